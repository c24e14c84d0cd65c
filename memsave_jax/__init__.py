"""memsave_jax: layers for JAX and Flax that keep for backward only what the wanted gradients read.

JAX is imported at the first use of a name here, Flax only for ``nnx``, ``linen`` and ``interop``,
PyTorch never.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import functional, interop, linen, nnx
    from ._report import Report, report

__all__ = ["Report", "functional", "interop", "linen", "nnx", "report"]

# Where each public name lives, if it is no module. (A submodule called "report" would hide the
# function as soon as anything imports it.)
_HOMES = {"Report": "_report", "report": "_report"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _require("jax")
    if name not in _HOMES:
        return importlib.import_module(f".{name}", __name__)
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_NAMES = {"jax": "JAX", "flax": "Flax"}


def _require(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"memsave_jax needs {_NAMES[package]}, which is not installed: "
            "pip install 'memsave[jax]'"
        ) from error
