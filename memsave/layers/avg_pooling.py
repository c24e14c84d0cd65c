"""Average pooling, whose gradient depends on shapes alone; torch keeps the input to know its shape.

Torch's kernels for backward ask an input for nothing else, so they get one element, expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels, spec
from .._context import is_final
from ..function import Grads, Mask, Saved, Shapes, by_attributes, define
from ..kernels.reference import Like
from .module import drop_in
from .shape import (
    Ints,
    by_shape,
    channels_last,
    empty_in_format,
    in_format,
    per_axis,
    placeholder,
    remembered,
    stride_or,
)

AVG_POOL: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}


@remembered
def _windows(
    dims: int, kernel_size: Ints, stride: Ints | None, padding: Ints
) -> tuple[tuple[int, ...], ...]:
    """Sizes, steps and padding by axis; of one axis as of two, as torch does forward."""
    sizes = [
        per_axis(size, dims) for size in (kernel_size, stride_or(kernel_size, stride), padding)
    ]
    if dims == 1:
        sizes = [[fill, *size] for fill, size in zip((1, 1, 0), sizes, strict=True)]
    return tuple(map(tuple, sizes))


def _bwd(
    dims: int,
    g: Tensor,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Grads:
    like = shapes["x"]
    windows = _windows(dims, kernel_size, stride, padding)
    rest = (ceil_mode, count_include_pad, divisor_override)
    backward = (
        torch.ops.aten.avg_pool3d_backward if dims == 3 else torch.ops.aten.avg_pool2d_backward
    )
    if dims == 2:
        return {"x": by_shape(backward, g, like, *windows, *rest)}
    # (These are stored in torch's default format, as stock's.)
    shape = like.shape if dims == 3 else [*like.shape[:-1], 1, like.shape[-1]]
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, size * stride[0])
    like = Like(torch.Size(shape), tuple(stride), like.dtype)
    dx = by_shape(backward, g if dims == 3 else g.unsqueeze(-2), like, *windows, *rest)
    return {"x": dx if dims == 3 else dx.squeeze(-2)}


def _adaptive_bwd(
    dims: int, g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, output_size: Any
) -> Grads:
    like = shapes["x"]
    backward = (
        torch.ops.aten._adaptive_avg_pool3d_backward
        if dims == 3
        else torch.ops.aten._adaptive_avg_pool2d_backward
    )
    if dims == 1:
        return {
            "x": backward(g.unsqueeze(-2), placeholder(g, like.shape).unsqueeze(-2)).squeeze(-2)
        }
    if not is_final(g) or not channels_last(like, dims):
        return {"x": in_format(backward(g, placeholder(g, like.shape)), like)}
    # For the kernel of this format x has to be in it, too. (With one in another, the gradient would
    # be made in that first, and copied: as much memory.)
    g, sizes = in_format(g, like), tuple(zip(like.shape[-dims:], g.shape[-dims:], strict=True))
    if dims == 2 and all(out and size % out == 0 for size, out in sizes):
        kernel = [size // out for size, out in sizes]
        average = torch.ops.aten.avg_pool2d_backward
        return {"x": by_shape(average, g, like, kernel, kernel, [0, 0], False, True, None)}
    return {"x": backward(g, empty_in_format(g, like))}


def _node(
    dims: int,
    row: str,
    wrt: Mask,
    x: Tensor,
    *,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    return kernels.nodes.avg_pool(
        row,
        x,
        dims,
        kernel_size,
        stride_or(kernel_size, stride),
        padding,
        ceil_mode,
        count_include_pad,
        divisor_override,
    )


def _adaptive_node(dims: int, row: str, wrt: Mask, x: Tensor, *, output_size: Any) -> Tensor | None:
    # (Of fewer axes, the stock function has its own error.)
    return kernels.nodes.adaptive_avg_pool(row, x, dims, output_size) if x.ndim > dims else None


def _stock_keeps_x(*, output_size: Any) -> bool:
    """But to one element per channel, where torch takes the mean."""
    if isinstance(output_size, int):
        return output_size != 1
    # (Of what else there is, stock is to say whether it takes it.)
    return isinstance(output_size, list | tuple) and any(size != 1 for size in output_size)


_avg_pool1d, _avg_pool2d, _avg_pool3d = (
    define(
        row,
        AVG_POOL[dims],
        partial(_bwd, dims),
        node=partial(_node, dims),
    )
    for dims, row in ((1, spec.AVG_POOL1D), (2, spec.AVG_POOL2D), (3, spec.AVG_POOL3D))
)
_adaptive_avg_pool1d, _adaptive_avg_pool2d, _adaptive_avg_pool3d = (
    define(
        row,
        ADAPTIVE[dims],
        partial(_adaptive_bwd, dims),
        stock_keeps=lambda wrt: (),
        unless=_stock_keeps_x,
        node=partial(_adaptive_node, dims),
    )
    for dims, row in (
        (1, spec.ADAPTIVE_AVG_POOL1D),
        (2, spec.ADAPTIVE_AVG_POOL2D),
        (3, spec.ADAPTIVE_AVG_POOL3D),
    )
)


def avg_pool1d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """As :func:`torch.nn.functional.avg_pool1d`. Keeps nothing.

    Args:
        input: ``(n, c, l)``, or without ``n``.
    """
    return _avg_pool1d(
        input,
        kernel_size=kernel_size,
        stride=kernel_size if stride is None else stride,
        padding=padding,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
    )


def _functional(layer: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    def avg_pool(
        input: Tensor,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        return layer(
            input,
            kernel_size=kernel_size,
            stride=kernel_size if stride is None else stride,
            padding=padding,
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            divisor_override=divisor_override,
        )

    name = f"avg_pool{dims}d"
    avg_pool.__name__ = avg_pool.__qualname__ = name
    avg_pool.__doc__ = f"As :func:`torch.nn.functional.{name}`. Keeps nothing."
    return avg_pool


avg_pool2d, avg_pool3d = _functional(_avg_pool2d, 2), _functional(_avg_pool3d, 3)


def _adaptive(layer: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    def adaptive_avg_pool(input: Tensor, output_size: Any) -> Tensor:
        return layer(input, output_size=output_size)

    name = f"adaptive_avg_pool{dims}d"
    adaptive_avg_pool.__name__ = adaptive_avg_pool.__qualname__ = name
    adaptive_avg_pool.__doc__ = f"As :func:`torch.nn.functional.{name}`. Keeps nothing."
    return adaptive_avg_pool


adaptive_avg_pool1d = _adaptive(_adaptive_avg_pool1d, 1)
adaptive_avg_pool2d = _adaptive(_adaptive_avg_pool2d, 2)
adaptive_avg_pool3d = _adaptive(_adaptive_avg_pool3d, 3)


def _forward(
    row: spec.Layer, stock: type[nn.Module], layer: Callable[..., Tensor], dims: int, *last: str
) -> Callable[..., Tensor]:
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", *last)
    of_module = by_attributes(row, stock, "avg_pool", dims, *names, *[None][len(last) :])

    def forward(self: Any, input: Tensor) -> Tensor:
        if (y := of_module(self, input)) is not None:
            return y
        return layer(input, **{name: getattr(self, name) for name in names})

    return forward


@drop_in(spec.AVG_POOL1D)
class AvgPool1d(nn.AvgPool1d):
    """As :class:`torch.nn.AvgPool1d`. Keeps nothing."""

    forward = _forward(spec.AVG_POOL1D, nn.AvgPool1d, avg_pool1d, 1)


@drop_in(spec.AVG_POOL2D)
class AvgPool2d(nn.AvgPool2d):
    """As :class:`torch.nn.AvgPool2d`. Keeps nothing."""

    forward = _forward(spec.AVG_POOL2D, nn.AvgPool2d, avg_pool2d, 2, "divisor_override")


@drop_in(spec.AVG_POOL3D)
class AvgPool3d(nn.AvgPool3d):
    """As :class:`torch.nn.AvgPool3d`. Keeps nothing."""

    forward = _forward(spec.AVG_POOL3D, nn.AvgPool3d, avg_pool3d, 3, "divisor_override")


@drop_in(spec.ADAPTIVE_AVG_POOL1D)
class AdaptiveAvgPool1d(nn.AdaptiveAvgPool1d):
    """As :class:`torch.nn.AdaptiveAvgPool1d`. Keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        return adaptive_avg_pool1d(input, self.output_size)


@drop_in(spec.ADAPTIVE_AVG_POOL2D)
class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """As :class:`torch.nn.AdaptiveAvgPool2d`. Keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        return adaptive_avg_pool2d(input, self.output_size)


@drop_in(spec.ADAPTIVE_AVG_POOL3D)
class AdaptiveAvgPool3d(nn.AdaptiveAvgPool3d):
    """As :class:`torch.nn.AdaptiveAvgPool3d`. Keeps nothing."""

    def forward(self, input: Tensor) -> Tensor:
        return adaptive_avg_pool3d(input, self.output_size)
