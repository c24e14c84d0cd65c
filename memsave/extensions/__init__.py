"""Drop-ins for the classes of other libraries: a file per library, imported when that has been."""

from __future__ import annotations

import importlib
import sys

LIBRARIES = ("transformers", "peft", "timm")


def load() -> None:
    """Import the extension of every library that has been imported (a model of its cannot be there
    otherwise)."""
    for name in LIBRARIES:
        if name in sys.modules:
            importlib.import_module(f".{name}", __name__)
