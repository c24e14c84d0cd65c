"""memsave: PyTorch layers that keep for backward only what the wanted gradients read.

``memsave.spec`` needs the standard library only; everything else here needs torch and is imported
at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import functional, nn, spec
    from .convert import Coverage, convert, coverage, revert
    from .report import Report, report

__version__ = "0.1.0"
__all__ = [
    "Coverage",
    "Report",
    "convert",
    "coverage",
    "functional",
    "nn",
    "report",
    "revert",
    "spec",
]

_HOMES = {
    "Coverage": "convert",
    "Report": "report",
    "convert": "convert",
    "coverage": "convert",
    "functional": "",
    "nn": "",
    "report": "report",
    "revert": "convert",
    "spec": "",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "spec":
        _require_torch()
    home = _HOMES[name]
    module = importlib.import_module(f".{home or name}", __name__)
    # A submodule of the same name (convert, report) is set on the package by its import: the
    # public function takes its place.
    value = getattr(module, name) if home else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "memsave needs PyTorch, which is not installed: pip install 'memsave[torch]'"
        ) from error
