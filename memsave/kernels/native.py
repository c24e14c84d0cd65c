"""Kernels of the CPU by the loops of csrc/native.c: one pass, where the reference takes several.

Each function is that of its name in :mod:`memsave.kernels.reference`, or returns ``None`` where it
does not apply: on another device, dtype or layout, on a tensor that has no memory of its own, or
where a mode has to see every operation.
"""

from __future__ import annotations

import math
import os
import warnings
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.nn import Parameter

from . import _native  # type: ignore[attr-defined]
from .memory import (
    FORMATS,
    empty_result,
    in_order,
    is_as_result,
    layout_of_pool,
    len_of_functions,
    planes,
)
from .reference import AS_X, PIECES, TESTS, Like, Rows, Windows

#: That of csrc/loops.h.
INTERFACE = 28


def check(module: ModuleType) -> None:
    """Raise if a compiled module is not of these sources (of which one was installed before)."""
    if getattr(module, "INTERFACE", None) != INTERFACE:
        problem = f"{module.__name__} was compiled from other sources: install memsave again"
        warnings.warn(f"{problem}. It works without, but slower.", stacklevel=2)
        raise ImportError(problem)


check(_native)
if not hasattr(Tensor, "__dlpack_c_exchange_api__"):
    raise ImportError("this version of torch shows its tensors in Python alone")
_native.connect(
    Tensor.__dlpack_c_exchange_api__,  # type: ignore[attr-defined]
    Tensor,
    Parameter,
    Tensor.is_neg,
    empty_result,
    torch.empty(0, dtype=torch.uint8, device="cpu").new_empty,
    torch.autograd.graph.increment_version,
    torch.get_num_threads,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    len_of_functions,
    in_order,
)

are_arrays = _native.are_arrays

DTYPES = {torch.float32: "float", torch.float64: "double"}
POOLED = (*DTYPES, torch.bfloat16, torch.float16)


def _loops(name: str) -> dict[torch.dtype, int]:
    """A loop by the dtype that it is for."""
    return {dtype: getattr(_native, f"{name}_{suffix}") for dtype, suffix in DTYPES.items()}


PIECEWISE = {name: getattr(_native, name) for name in PIECES if hasattr(_native, name)}
COMPARE = {test: getattr(_native, test) for test in TESTS}


#: ``relu(x, inplace)``: the output and the bits in one pass. (No function of Python, as others
#: below: its call takes as long as a small kernel.)
relu = partial(_native.to_bits, _native.relu)
#: ``select(g, bits, like, factor=None)``: in one pass (with a factor, of the dtypes that C has).
select = partial(_native.from_bits, _native.part)
#: ``scale(x, bits, like, on, off, inplace=False)``: in one pass.
scale = partial(_native.from_bits, _native.scale)


def piecewise(
    x: Tensor, inplace: bool, name: str, low: float, high: float
) -> tuple[Tensor, Tensor] | None:
    """The output and the bits in one pass (or the bits, where torch has to compute the output)."""
    if name not in PIECEWISE or (name in AS_X and not inplace and not is_as_result(x)):
        return None
    size = x.numel()  # (which may be a symbol)
    if name != "softshrink" or (type(size) is int and _native.fills_vectors(size)):
        return _native.to_bits(PIECEWISE[name], x, inplace, None, low, high)
    op, test = PIECES[name]
    within, *bounds = test(low, high)
    bits = _native.to_bits(COMPARE[within], x, None, None, *bounds)
    return None if bits is None else (op(x, low, high, inplace), bits)


def compare(x: Tensor, like: Like, test: str, low: float, high: float) -> Tensor | None:
    """The bits in one pass."""
    return _native.to_bits(COMPARE[test], x, None, like.stride, low, high)


def pack(mask: Tensor, like: Like) -> Tensor | None:
    """The bits in one pass."""
    return _native.to_bits(_native.nonzero, mask, None, like.stride)


#: Loops of norms by the dtype of rows; of groups, as stored in torch's default format.
NORM = _loops("norm") | {
    torch.bfloat16: _native.norm_bfloat16,
    torch.float16: _native.norm_float16,
}
GROUP_NORM = _loops("group_norm")


def norm(rows: Rows, wrt: frozenset[str]) -> dict[str, Tensor] | None:
    """In one pass over the rows; sums over them by thread."""
    g, kept, mean, rstd, weight, bias, shift, from_output, centered, per = rows
    loop = (NORM if per is None else GROUP_NORM).get(g.dtype)
    if loop is None or kept.dtype != g.dtype or not g.is_cpu:
        return None
    if per is not None and not (kept.is_contiguous() and g.numel()):
        return None
    g, kept = contiguous(g), contiguous(kept)
    if not _native.has_memory(g):
        return None
    dtype = g.dtype if g.dtype in DTYPES else torch.float32  # of vectors
    mean, rstd = _vector(mean, g, dtype), _vector(rstd, g, dtype)
    weight, bias = _vector(weight, g, dtype), _vector(bias, g, dtype)
    inverse = weight.reciprocal() if from_output and per is None and weight is not None else None
    if per is None:
        features, groups, places = g.shape[-1], 1, 1
    else:
        features, groups, places = g.shape[1] // per, per, math.prod(g.shape[2:])
    threads = _native.threads_for(g.numel())
    grads = {"x": torch.empty_like(g)} if "x" in wrt else {}
    for name in ("weight", "bias"):
        if name in wrt:  # a row for each thread
            rows_of = (threads,) if threads > 1 else ()
            grads[name] = torch.zeros(*rows_of, groups * features, dtype=dtype, device="cpu")
    done = _native.norm(
        loop,
        g.numel() // max(features * places, 1),
        (features, groups, places),
        threads,
        (g, kept),
        (mean, rstd, weight, bias, inverse),
        (grads.get("x"), grads.get("weight"), grads.get("bias")),
        shift,
        from_output,
        centered,
    )
    if not done:
        return None
    if threads > 1:
        grads.update((name, grads[name].sum(0)) for name in ("weight", "bias") if name in wrt)
    return grads


def _vector(vector: Tensor | None, g: Tensor, dtype: torch.dtype) -> Tensor | None:
    """As the loop reads it: contiguous; and a parameter, which has the dtype of rows, widened."""
    if vector is None:
        return None
    vector = vector.contiguous()
    return vector.to(dtype) if vector.dtype == g.dtype != dtype else vector


#: Of the inputs of :func:`batch_norm`.
LEAST_ELEMENTS, LEAST_PLACES = _native.LEAST_ELEMENTS, _native.LEAST_PLACES
#: Whether torch has been told to do without what this processor has: then it rounds otherwise.
_IS_PLAIN = os.environ.get("ATEN_CPU_CAPABILITY") == "default"


def beats_batch_norm(x: Tensor, copied: bool = False) -> bool:
    """Whether :func:`batch_norm` applies to such an input (or, ``copied``, to what is contiguous of
    it), and is faster than torch's.
    """
    if x.dtype not in DTYPES or x.numel() < LEAST_ELEMENTS or _IS_PLAIN:
        return False
    if not (copied or x.is_contiguous()):
        return False
    return x.is_cpu and x.ndim > 2 and x.shape[2:].numel() >= LEAST_PLACES


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """To the bits of torch's, whose sums wait for each element of a channel in turn."""
    if not beats_batch_norm(x) or not _native.has_memory(x):
        return None
    if (running_mean is None) != (running_var is None):
        return None
    y, mean, rstd = torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])
    done = _native.batch_norm(
        _channels(x), x, y, mean, rstd, running_mean, running_var, weight, bias, momentum, eps
    )
    return (y, mean, rstd) if done else None


def batch_norm_backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, wrt: frozenset[str]
) -> dict[str, Tensor] | None:
    """In one pass over each channel."""
    if not beats_batch_norm(x) or not _native.has_memory(x) or g.shape != x.shape:
        return None  # (a hook of saved tensors may give back another x)
    grads = {"x": torch.empty_like(x)} if "x" in wrt else {}
    for name in ("weight", "bias"):
        if name in wrt:
            grads[name] = torch.empty_like(mean)
    new = (grads.get("x"), mean, rstd, weight, grads.get("weight"), grads.get("bias"))
    return grads if _native.batch_norm_backward(_channels(x), contiguous(g), x, *new) else None


def contiguous(x: Tensor) -> Tensor:
    """By whole lines of the cache, as torch's copy does not, where channels are stored last."""
    last = FORMATS.get(x.ndim)
    is_last = last and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    if is_last and x.is_cpu and x.numel() >= LEAST_ELEMENTS and _native.has_memory(x):
        y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        if _native.channels_first(_channels(x), x, y):
            return y
    return x.contiguous()


def _channels(x: Tensor) -> tuple[int, int, int]:
    """The batch, its channels, and the places of each."""
    return x.shape[0], x.shape[1], x.shape[2:].numel()


def max_pool(x: Tensor, windows: Windows) -> tuple[Tensor, Tensor] | None:
    """In one pass, without indices."""
    layout = _layout(x, windows)
    if layout is None or x.dtype not in POOLED:
        return None
    shape = (*x.shape[: -len(windows.inputs)], *windows.outputs)
    y = torch.empty(shape, dtype=x.dtype, memory_format=layout, device="cpu")
    offsets = torch.empty(shape, dtype=torch.uint8, memory_format=layout, device="cpu")
    return (y, offsets) if _pool(False, x, y, offsets, windows, layout) else None


def unpool(g: Tensor, offsets: Tensor, windows: Windows, like: Like) -> Tensor | None:
    """In one pass over the input and the output."""
    layout = _layout(offsets, windows, like)
    if layout is None or g.dtype not in POOLED or not g.is_cpu or g.shape != offsets.shape:
        return None
    g = g.contiguous(memory_format=layout)
    dx = torch.empty(like.shape, dtype=g.dtype, memory_format=layout, device="cpu")
    return dx if _pool(True, g, dx, offsets, windows, layout) else None


def _layout(x: Tensor, windows: Windows, like: Like | None = None) -> torch.memory_format | None:
    return layout_of_pool(x, windows, like) if _native.has_memory(x) else None


def _pool(
    backwards: bool,
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    windows: Windows,
    layout: torch.memory_format,
) -> bool:
    images = planes(x, windows, layout)
    return _native.pool(backwards, *images, x, y, offsets, *windows.in_three_axes())
