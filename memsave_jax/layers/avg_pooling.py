"""Average pooling, whose gradient is the transpose of the same op and needs shapes alone.

Spatial axes come before the channels. Padding, and what counts, are PyTorch's, of which Flax's are
special cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memsave import spec

from ..function import Grads, Mask, Saved, Shapes, define
from ..kernels import is_known
from .pooling import Window, checked, is_untellable, window_of


def _primal(
    dims: int,
    x: Array,
    *,
    count_include_pad: bool = True,
    padding: Any = 0,
    count_dtype: Any = None,
    **options: Any,
) -> Array:
    window = window_of(dims, x.shape, padding=padding, **options)
    total = lax.reduce_window(x, 0.0, lax.add, window.kernel, window.stride, window.padding)
    floor = window_of(dims, x.shape, padding=padding, **{**options, "ceil_mode": False})
    count = _count(x.shape, total.shape, window, floor, count_include_pad)
    dtype = count_dtype or total.dtype
    if isinstance(count, int):  # a scalar that promotes, which a number of Python's does not
        return total / np.asarray(count, dtype)[()]
    return total / count.astype(dtype)


def _count(
    inputs: Sequence[int],
    outputs: Sequence[int],
    window: Window,
    floor: Window,
    count_include_pad: bool,
) -> int | Array:
    """Of each window, the elements that count: not those that ``ceil_mode`` adds at the end.

    (Counted in the program: a constant of the outputs' size would be kept for backward.)
    """
    count: Any = 1
    for axis, (size, out) in enumerate(zip(inputs, outputs, strict=True)):
        low, high = floor.padding[axis]
        start, end = (-low, size + high) if count_include_pad else (0, size)
        kernel, last = window.kernel[axis], (out - 1) * window.stride[axis] - low
        if is_known((size, out)) and start <= -low and last + kernel <= end:
            count = count * kernel
            continue
        shape = [out if a == axis else 1 for a in range(len(inputs))]
        first = lax.broadcasted_iota(jnp.int32, shape, axis) * window.stride[axis] - low
        inside = jnp.minimum(first + kernel, end) - jnp.maximum(first, start)
        count = count * jnp.maximum(inside, 0)
    return count


def _primal_adaptive(dims: int, x: Array, *, output_size: Any) -> Array:
    """Per axis, the means of as many equal parts, which overlap where the size does not divide."""
    parts = (output_size,) * dims if isinstance(output_size, int) else output_size
    for axis, count in enumerate(parts, start=x.ndim - dims - 1):
        size = x.shape[axis]
        count = size if count is None else count
        ends = [(k * size // count, -(-(k + 1) * size // count)) for k in range(count)]
        means = [
            lax.slice_in_dim(x, start, end, axis=axis).mean(axis, keepdims=True)
            for start, end in ends
        ]
        x = jnp.concatenate(means, axis) if means else lax.slice_in_dim(x, 0, 0, axis=axis)
    return x


def _bwd(
    primal: Callable[..., Array], g: Array, wrt: Mask, saved: Saved, shapes: Shapes, **options: Any
) -> Grads:
    return {"x": jax.linear_transpose(partial(primal, **options), shapes["x"])(g)[0]}


def _define(row: spec.Layer, dims: int, primal: Callable[..., Array]) -> Callable[..., Array]:
    x, y = row.args["x"].split()[2:], row.y.split()[2:]
    layout = {"x": f"*n {' '.join(x)} c", "y": f"*n {' '.join(y)} c"}
    primal = partial(primal, dims)
    return define(
        row,
        primal,
        partial(_bwd, primal),
        stock_op=partial(is_untellable, dims),
        layout=layout,
        linear=True,
    )


_avg_pool = {
    dims: _define(row, dims, _primal)
    for dims, row in ((1, spec.AVG_POOL1D), (2, spec.AVG_POOL2D), (3, spec.AVG_POOL3D))
}
_adaptive_avg_pool = {
    dims: _define(row, dims, _primal_adaptive)
    for dims, row in (
        (1, spec.ADAPTIVE_AVG_POOL1D),
        (2, spec.ADAPTIVE_AVG_POOL2D),
        (3, spec.ADAPTIVE_AVG_POOL3D),
    )
}


def adaptive_avg_pool(inputs: Array, output_size: Sequence[int | None]) -> Array:
    """As :class:`torch.nn.AdaptiveAvgPool2d`, over one to three axes before the channels. Keeps
    nothing.

    Args:
        inputs: ``(*n, spatial axes, channels)``.
        output_size: Size of the output along each spatial axis; ``None``: that of the input.
    """
    if len(output_size) not in _adaptive_avg_pool:
        raise ValueError(f"output_size is of one to three axes, not {output_size}")
    pool = _adaptive_avg_pool[len(output_size)]
    return pool(jnp.asarray(inputs), output_size=tuple(output_size))


def avg_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[Sequence[int]] = "VALID",
    count_include_pad: bool = True,
) -> Array:
    """As :func:`flax.linen.avg_pool` (and ``nnx.avg_pool``). Keeps nothing.

    Args:
        inputs: ``(*n, spatial axes, channels)``.
        window_shape: Size of the window along the spatial axes.
        strides: Default: 1 along every axis.
        padding: ``"SAME"``, ``"VALID"``, or a pair per spatial axis.
        count_include_pad: Whether padding is part of the average.
    """
    inputs = jnp.asarray(inputs)
    pool = _avg_pool.get(len(window_shape), partial(_primal, len(window_shape)))
    options = checked(inputs, window_shape, strides, padding)
    # Flax counts what is no padding in the widest float, whatever it averages.
    options["count_dtype"] = None if count_include_pad else jnp.result_type(float)
    return pool(inputs, count_include_pad=count_include_pad, **options)
