"""memsave: PyTorch layers that keep for backward only what the wanted gradients read.

``memsave.spec`` needs the standard library only; everything else here needs torch and is imported
at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import functional, nn, spec
    from ._convert import convert, coverage, revert
    from ._functional_mode import functional_mode
    from ._report import Report, report
    from ._text import Coverage
    from .layers.module import register, unregister

__version__ = "0.1.0"
__all__ = [
    "Coverage",
    "Report",
    "convert",
    "coverage",
    "functional",
    "functional_mode",
    "nn",
    "register",
    "report",
    "revert",
    "spec",
    "unregister",
]

# Where each public name lives. (The files of functions are private: a submodule called "convert"
# would hide the function as soon as anything imports it.)
_HOMES = {
    "Coverage": "_text",
    "Report": "_report",
    "convert": "_convert",
    "coverage": "_convert",
    "functional_mode": "_functional_mode",
    "register": "layers.module",
    "report": "_report",
    "revert": "_convert",
    "unregister": "layers.module",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "spec":
        return importlib.import_module(".spec", __name__)
    _require_torch()
    if name not in _HOMES:
        return importlib.import_module(f".{name}", __name__)
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
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
