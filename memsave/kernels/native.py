"""Kernels of the CPU by the loops of native.c: one pass, where the reference takes several.

Each function is that of its name in :mod:`memsave.kernels.reference`, or returns ``None`` where it
does not apply: on another device, dtype or layout, on a tensor that has no memory of its own, or
where a mode has to see every operation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _native  # type: ignore[attr-defined]
from .memory import FORMATS, empty_bits, has_memory, in_order
from .reference import INTEGERS, PIECES, TESTS, Like, Rows, Windows

DTYPES = {torch.float32: "float", torch.float64: "double"}


def _loops(name: str) -> dict[torch.dtype, int]:
    """A loop by the dtype that it is for."""
    return {dtype: getattr(_native, f"{name}_{suffix}") for dtype, suffix in DTYPES.items()}


#: With the infinity of the dtypes of 16 bits, as an integer.
RELU = {
    **{dtype: (loop, 0) for dtype, loop in _loops("relu").items()},
    torch.bfloat16: (_native.relu_half, 0x7F80),
    torch.float16: (_native.relu_half, 0x7C00),
}
#: (Of softshrink, the sign of a zero depends on how torch comes by it.)
PIECEWISE = {name: _loops(name) for name in PIECES if name != "softshrink"}
COMPARE = {test: _loops(test) for test in TESTS}
SCALE = _loops("scale")
PART = _loops("part")
SELECT = {size: getattr(_native, f"select_int{8 * size}_t") for size in INTEGERS}


def _run(loop: int, x: Tensor, y: Tensor, bits: Tensor, a: float = 0, b: float = 0) -> None:
    size, threads = x.numel(), torch.get_num_threads()
    _native.run(loop, size, threads, x.data_ptr(), y.data_ptr(), bits.data_ptr(), a, b)


def relu(x: Tensor, inplace: bool) -> tuple[Tensor, Tensor] | None:
    """The output and the bits in one pass."""
    if x.dtype not in RELU:
        return None
    loop, infinity = RELU[x.dtype]
    return _with_bits(loop, x, inplace, infinity)


def piecewise(
    x: Tensor, inplace: bool, name: str, low: float, high: float
) -> tuple[Tensor, Tensor] | None:
    """The output and the bits in one pass (or the bits, where torch has to compute the output)."""
    if x.dtype not in DTYPES or {type(low), type(high)} - {float, int}:
        return None
    if name in PIECEWISE:
        return _with_bits(PIECEWISE[name][x.dtype], x, inplace, low, high)
    op, test = PIECES[name]
    bits = compare(x, Like.of(x), *test(low, high))
    return None if bits is None else (op(x, low, high, inplace), bits)


def _with_bits(
    loop: int, x: Tensor, inplace: bool, a: float, b: float = 0
) -> tuple[Tensor, Tensor] | None:
    if not x.is_cpu or not has_memory(x, x.stride()):
        return None
    y, bits = x if inplace else torch.empty_like(x), empty_bits(x)
    _run(loop, x, y, bits, a, b)
    if inplace:
        torch.autograd.graph.increment_version(x)
    return y, bits


def compare(x: Tensor, like: Like, test: str, low: float, high: float) -> Tensor | None:
    """The bits in one pass."""
    if not x.is_cpu or x.dtype not in COMPARE[test] or not has_memory(x, like.stride):
        return None
    bits = empty_bits(x)
    _run(COMPARE[test][x.dtype], x, x, bits, low, high)
    return bits


def pack(mask: Tensor, like: Like) -> Tensor | None:
    """The bits in one pass."""
    if not mask.is_cpu or not has_memory(mask, like.stride):
        return None
    bits = empty_bits(mask)
    _run(_native.nonzero, mask, mask, bits)
    return bits


def select(g: Tensor, bits: Tensor, like: Like, factor: float | None = None) -> Tensor | None:
    """In one pass."""
    if not g.is_cpu:
        return None
    if g.stride() != like.stride:
        g = in_order(g, like)
    if not has_memory(g, like.stride):
        return None
    y = torch.empty_like(g)
    if factor is not None and g.dtype in PART:
        _run(PART[g.dtype], g, y, bits, factor)
        return y
    _run(SELECT[g.itemsize], g, y, bits)
    return y if factor is None else y.mul_(factor)


def scale(
    x: Tensor, bits: Tensor, like: Like, on: float, off: float, inplace: bool = False
) -> Tensor | None:
    """In one pass."""
    if x.dtype not in SCALE or not x.is_cpu:
        return None
    if not inplace and x.stride() != like.stride:
        x = in_order(x, like)
    if not has_memory(x, like.stride):
        return None
    y = x if inplace else torch.empty_like(x)
    _run(SCALE[x.dtype], x, y, bits, on, off)
    if inplace:
        torch.autograd.graph.increment_version(x)
    return y


#: Loops of norms by the dtype of rows; of groups, as stored in torch's default format.
NORM = _loops("norm") | {torch.bfloat16: _native.norm_bfloat16}
GROUP_NORM = _loops("group_norm")


def norm(rows: Rows, wrt: frozenset[str]) -> dict[str, Tensor] | None:
    """In one pass over the rows; sums over them by thread."""
    loop = (NORM if rows.groups is None else GROUP_NORM).get(rows.g.dtype)
    if loop is None or rows.kept.dtype != rows.g.dtype or not rows.g.is_cpu:
        return None
    if rows.groups is not None and not (rows.kept.is_contiguous() and rows.g.numel()):
        return None
    dtype = torch.promote_types(rows.g.dtype, torch.float32)  # of vectors
    g, kept = rows.g.contiguous(), rows.kept.contiguous()
    vectors = [
        None if vector is None else vector.contiguous()
        for vector in (rows.mean, rows.rstd, rows.weight, rows.bias)
    ]
    # Parameters have the dtype of rows.
    vectors = [v.to(dtype) if v is not None and v.dtype == g.dtype else v for v in vectors]
    weight = vectors[2]
    divides = rows.from_output and rows.groups is None and weight is not None
    vectors.append(weight.reciprocal() if divides else None)  # type: ignore[union-attr]
    given = [vector for vector in vectors if vector is not None]
    if any(vector.dtype != dtype for vector in given):
        return None
    for array in (kept, g, *given):
        if not array.is_cpu or not has_memory(array, array.stride()):
            return None
    if rows.groups is None:
        features, groups, places = g.shape[-1], 1, 1
    else:
        features, groups = g.shape[1] // rows.groups, rows.groups
        places = math.prod(g.shape[2:])
    threads, grads = torch.get_num_threads(), {}
    if "x" in wrt:
        grads["x"] = torch.empty_like(g)
    for name in ("weight", "bias"):
        if name in wrt:  # a row for each thread
            grads[name] = torch.zeros(threads, groups * features, dtype=dtype)
    _native.norm(
        loop,
        g.numel() // max(features * places, 1),
        (features, groups, places),
        threads,
        g.data_ptr(),
        kept.data_ptr(),
        *(0 if vector is None else vector.data_ptr() for vector in vectors),
        *(grads[name].data_ptr() if name in grads else 0 for name in ("x", "weight", "bias")),
        rows.shift,
        rows.from_output,
        rows.centered,
    )
    return {name: grad if name == "x" else grad.sum(0) for name, grad in grads.items()}


#: Places in the largest window, of which a byte holds an offset.
LARGEST_WINDOW = 256


def max_pool(x: Tensor, windows: Windows) -> tuple[Tensor, Tensor] | None:
    """In one pass, without indices."""
    layout = _layout(x, windows)
    if layout is None or x.dtype not in DTYPES:
        return None
    shape = (*x.shape[: -len(windows.inputs)], *windows.outputs)
    y = torch.empty(shape, dtype=x.dtype, memory_format=layout)
    offsets = torch.empty(shape, dtype=torch.uint8, memory_format=layout)
    _pool(False, x, y, offsets, windows, layout)
    return y, offsets


def unpool(g: Tensor, offsets: Tensor, windows: Windows, like: Like) -> Tensor | None:
    """In one pass over the input and the output."""
    layout = _layout(offsets, windows)
    if layout is None or g.dtype not in DTYPES or offsets.dtype != torch.uint8:
        return None
    if not g.is_cpu or g.shape != offsets.shape:
        return None
    g = g.contiguous(memory_format=layout)
    if not has_memory(g, g.stride()):
        return None
    dx = torch.empty(like.shape, dtype=g.dtype, memory_format=layout)
    _pool(True, g, dx, offsets, windows, layout)
    return dx


def _layout(x: Tensor, windows: Windows) -> torch.memory_format | None:
    """How it is stored, where that is clear (to torch, too: one channel is first and last)."""
    if math.prod(windows.kernel) > LARGEST_WINDOW or not x.numel() or not 1 <= x.ndim <= 5:
        return None
    if not x.is_cpu or not has_memory(x, x.stride()):
        return None
    first, last = x.is_contiguous(), FORMATS.get(x.ndim)
    if len(windows.inputs) + 2 != x.ndim:
        return torch.contiguous_format if first else None
    if last is None:
        return torch.contiguous_format if first and x.shape[1] > 1 else None
    if first == x.is_contiguous(memory_format=last):
        return None
    return torch.contiguous_format if first else last


def _pool(
    backwards: bool,
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    windows: Windows,
    layout: torch.memory_format,
) -> None:
    dims = len(windows.inputs)
    first = layout is torch.contiguous_format
    absent = (1,) * (3 - dims)
    _native.pool(
        backwards,
        x.dtype == torch.float64,
        math.prod(x.shape[:-dims]) if first else x.shape[0],
        1 if first else x.shape[1],
        torch.get_num_threads(),
        x.data_ptr(),
        y.data_ptr(),
        offsets.data_ptr(),
        absent + windows.inputs,
        absent + windows.outputs,
        absent + windows.kernel,
        absent + windows.stride,
        (0,) * (3 - dims) + windows.padding,
        absent + windows.dilation,
    )
