"""Bits on CUDA devices by the loops of triton_loops.py: one pass, where the reference has several.

Each function is that of its name in :mod:`memsave.kernels.reference`, or returns ``None`` where it
does not apply. Triton, which PyTorch brings along for CUDA, is imported with the first call that
needs it.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .memory import empty_bits, has_memory, in_order
from .reference import INTEGERS, PIECES, TESTS, Like

if find_spec("triton") is None:
    raise ImportError("no triton")

#: Those of :data:`memsave.kernels.reference.PIECES` in which nothing is rounded but a product.
PIECEWISE = ("hardshrink", "hardtanh", "leaky_relu", "threshold")
#: Dtypes whose numbers a loop of float32 has; float64 has too many for the scalars of Triton.
NARROW = (torch.float32, torch.bfloat16, torch.float16)
#: Of bits, by one program.
BYTES = 256


@cache
def _loops() -> Any:
    return importlib.import_module(".triton_loops", __package__)


def _is_here(x: Tensor) -> bool:
    return x.is_cuda


#: What :func:`_compiles` has said of a device.
_works: dict[torch.device, bool] = {}


def _compiles(device: torch.device) -> bool:
    """Whether Triton compiles for this device. (It needs a compiler for C, too.)"""
    try:
        x = torch.ones(8, device=device)
        bits = empty_bits(x)
        _run("to_bits", x, x, bits, 0.0, 0.0, "above", False)
        return bits.item() == 255
    except Exception as error:  # of whatever kind: its compiler runs several
        warnings.warn(f"memsave runs without kernels on {device}: {error}", stacklevel=2)
        return False


def _has_memory(x: Tensor, stride: tuple[int, ...]) -> bool:
    if not _is_here(x) or not has_memory(x, stride):
        return False
    if x.device not in _works:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # The first look waits for the device, which a CUDA graph cannot.
        _works[x.device] = _compiles(x.device)
    return _works[x.device]


def _run(loop: str, x: Tensor, y: Tensor, bits: Tensor, *rest: Any) -> None:
    if size := x.numel():
        with torch.cuda.device_of(x):
            grid = (-(-size // (8 * BYTES)),)
            getattr(_loops(), loop)[grid](x, y, bits, size, *rest, BYTES)


def _bits(x: Tensor, kind: str, low: float = 0.0, high: float = 0.0) -> Tensor:
    bits = empty_bits(x)
    _run("to_bits", x, x, bits, float(low), float(high), kind, False)
    return bits


def _bits_of_test(x: Tensor, test: str, low: float, high: float) -> Tensor:
    """Of one of :data:`memsave.kernels.reference.TESTS`, of which all but this round bounds."""
    if test != "not_outside":
        low, high = _rounded(low, x.dtype), _rounded(high, x.dtype)
    return _bits(x, test, low, high)


def _with_bits(
    x: Tensor, inplace: bool, kind: str, low: float = 0, high: float = 0
) -> tuple[Tensor, Tensor] | None:
    if not _has_memory(x, x.stride()):
        return None
    y, bits = x if inplace else torch.empty_like(x), empty_bits(x)
    _run("to_bits", x, y, bits, float(low), float(high), kind, True)
    if inplace:
        torch.autograd.graph.increment_version(x)
    return y, bits


def relu(x: Tensor, inplace: bool) -> tuple[Tensor, Tensor] | None:
    """The output and the bits in one pass."""
    return _with_bits(x, inplace, "relu") if x.is_floating_point() else None


def piecewise(
    x: Tensor, inplace: bool, name: str, low: float, high: float
) -> tuple[Tensor, Tensor] | None:
    """The output and the bits in one pass, or in one each; or the bits of a test by torch."""
    are_numbers = {type(low), type(high)} <= {float, int}
    if x.dtype is torch.float32 and name in PIECEWISE and are_numbers:
        return _with_bits(x, inplace, name, low, high)
    if not _has_memory(x, x.stride()):
        return None
    op, test = PIECES[name]
    which, *bounds = test(low, high)
    if x.dtype in NARROW and are_numbers:
        if name == "threshold":  # On CPU torch does not round it.
            bounds = [_rounded(bound, x.dtype) for bound in bounds]
        bits = _bits_of_test(x, which, *bounds)
    else:
        bits = pack(TESTS[which](x, *bounds), Like.of(x))
    return None if bits is None else (op(x, low, high, inplace), bits)


def compare(x: Tensor, like: Like, test: str, low: float, high: float) -> Tensor | None:
    """The bits in one pass."""
    if x.dtype not in NARROW or not _has_memory(x, like.stride):
        return None
    return _bits_of_test(x, test, low, high)


def pack(mask: Tensor, like: Like) -> Tensor | None:
    """The bits in one pass."""
    if not _has_memory(mask, like.stride):
        return None
    return _bits(mask.view(torch.uint8), "nonzero")


def select(g: Tensor, bits: Tensor, like: Like, factor: float | None = None) -> Tensor | None:
    """In one pass, or with a factor in two."""
    if not _is_here(g):
        return None
    g = in_order(g, like)
    if not _has_memory(g, like.stride):
        return None
    y, integer = torch.empty_like(g), INTEGERS[g.itemsize]
    _run("from_bits", g.view(integer), y.view(integer), bits, 0.0, 0.0, "select")
    return y if factor is None else y.mul_(factor)


def scale(
    x: Tensor, bits: Tensor, like: Like, on: float, off: float, inplace: bool = False
) -> Tensor | None:
    """In one pass."""
    if x.dtype not in NARROW or not _is_here(x):
        return None
    if not inplace:
        x = in_order(x, like)
    if not _has_memory(x, like.stride):
        return None
    y = x if inplace else torch.empty_like(x)
    _run("from_bits", x, y, bits, _rounded(on, x.dtype), _rounded(off, x.dtype), "scale")
    if inplace:
        torch.autograd.graph.increment_version(x)
    return y


@lru_cache(maxsize=64)
def _rounded(number: float, dtype: torch.dtype) -> float:
    """As an element of a tensor."""
    return torch.tensor(number, dtype=dtype, device="cpu").item()
