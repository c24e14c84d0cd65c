"""The rules, a file per family of layers: the mathematics, and the functions that call them."""

from .. import _require

_require("jax")  # before the first rule imports it, with an error that names the extra
