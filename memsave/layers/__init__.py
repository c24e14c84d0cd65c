"""The rules, a file per family of layers: mathematics, and the drop-in modules that call it."""

from .. import _require_torch

_require_torch()  # before the first rule imports it, with an error that names the extra
