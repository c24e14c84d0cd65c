"""Convolutions and transposed convolutions, 1 to 3 dimensional.

``y = conv(x, w) + b`` is linear in each of them: the gradient of ``x`` is the adjoint convolution
of ``g`` with ``w``, that of ``w`` a correlation of ``x`` with ``g``, that of ``b`` a sum of ``g``.

Padding that the convolution itself cannot do (``padding_mode``, "same" with an even kernel) is
part of the layer, so that ``x`` is kept and not a padded copy.

Index legend: n batch, i input channels, o output channels; spatial axes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import kernels, spec
from .._context import OF_TORCH, amp_enabled, is_exported, is_plain, lowered
from ..function import WEIGHT, Grads, Mask, Saved, Shapes, by_node, define, for_stock
from ..kernels.reference import Like
from .modes import is_replaced, others
from .module import drop_in, parameters_of
from .padding import pad, unpad
from .shape import Ints, in_format, is_size, per_axis, placeholder, remembered

#: Of images of so few elements, a padded copy may live beside that of their gradient.
FEW_ELEMENTS = 1 << 15
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


# Padding: explicit (an op of its own, one (left, right) per axis) or implicit in the convolution.


def _padding(
    padding: Ints | str, mode: str, kernel: Sequence[int], dilation: Ints
) -> tuple[list[tuple[int, int]], list[int]]:
    """Split into explicit padding per axis (if any) and the padding left to the convolution."""
    dims = len(kernel)
    if padding == "same":
        apart = per_axis(dilation, dims)
        if len(apart) != dims:
            return [], [0] * dims  # (The convolution refuses it.)
        totals = [d * (k - 1) for d, k in zip(apart, kernel, strict=True)]
        both = [(total // 2, total - total // 2) for total in totals]
    else:
        both = [(p, p) for p in per_axis(0 if isinstance(padding, str) else padding, dims)]
    if mode == "zeros" and all(left == right for left, right in both):
        return [], [left for left, _ in both]
    return both, [0] * dims


class Geometry(NamedTuple):
    """What a convolution's sizes and options come to, per axis.

    Attributes:
        pads: Explicit padding, or nothing.
        padding: That of the convolution itself.
        padded: The input's sizes with explicit padding.
        left_over: What the stride leaves of them on the right: the adjoint's ``output_padding``.
    """

    stride: list[int]
    dilation: list[int]
    pads: list[tuple[int, int]]
    padding: list[int]
    padded: list[int]
    left_over: list[int]


@remembered
def _geometry(
    inputs: Sequence[int],
    kernel: Sequence[int],
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    mode: str,
) -> Geometry:
    dims = len(kernel)
    stride, dilation = per_axis(stride, dims), per_axis(dilation, dims)
    pads, padding = _padding(padding, mode, kernel, dilation)
    padded = list(inputs)
    for axis, (left, right) in enumerate(pads):
        padded[axis] += left + right
    left_over = [
        (s + 2 * p - d * (k - 1) - 1) % step
        for s, p, d, k, step in zip(padded, padding, dilation, kernel, stride, strict=True)
    ]
    return Geometry(stride, dilation, pads, padding, padded, left_over)


def _pad(x: Tensor, pads: Sequence[tuple[int, int]], mode: str) -> Tensor:
    if not pads:
        return x
    return F.pad(x, _flat(pads), mode="constant" if mode == "zeros" else mode)


def _flat(pads: Sequence[tuple[int, int]]) -> list[int]:
    """As ``F.pad`` takes it."""
    return [p for pair in reversed(pads) for p in pair]


def _unpad(g: Tensor, like: Like, pads: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """The adjoint of :func:`_pad`, of a ``g`` that nobody else has: add what was copied to where it
    came from, and crop.
    """
    if mode in ("reflect", "replicate"):
        return unpad(g, like, _flat(pads), mode)
    for axis, (left, right) in enumerate(pads if mode == "circular" else (), start=-len(pads)):
        size = like.shape[axis]
        g.narrow(axis, size, left).add_(g.narrow(axis, 0, left))
        g.narrow(axis, left, right).add_(g.narrow(axis, left + size, right))
    return in_format(F.pad(g, [-p for p in _flat(pads)]), like)


def _bias_gradient(g: Tensor, dims: int, channels: int) -> Tensor:
    if is_size(g.numel(), 0):  # Of no input channels, the output of torch has none either.
        return g.new_zeros(channels)
    return g.sum([axis for axis in range(g.ndim) if axis != g.ndim - dims - 1])


def _weight_gradient(
    g: Tensor, x: Tensor, weight_shape: torch.Size, *options: Any, groups: int
) -> Tensor:
    """By the kernel that stock uses, which asks the weight for its shape only."""
    dims = len(weight_shape) - 2
    if g.ndim == dims + 1:
        g, x = g[None], x[None]
    weight = placeholder(g, weight_shape)
    mask = [False, True, False]
    backward = torch.ops.aten.convolution_backward
    return backward(g, x, weight, None, *options, groups, mask)[1]


def _is_few(count: Any) -> bool:
    """Whether it is a number of elements (and no symbol of a compiler's) so small."""
    return not is_dynamo_compiling() and type(count) is int and 0 < count < FEW_ELEMENTS


def _conv_bwd(
    g: Tensor,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Grads:
    x_shape, weight_shape = shapes["x"].shape, shapes["weight"].shape
    dims = len(weight_shape) - 2
    sizes = (x_shape[-dims:], weight_shape[2:])
    steps, apart, pads, edges, padded, left_over = _geometry(
        *sizes, stride, padding, dilation, padding_mode
    )
    grads = {}
    g = in_format(g, shapes["x"]) if "x" in wrt else g
    wants_both = {"x", "weight"} <= wrt and g.ndim == dims + 2
    if wants_both and _is_few(x_shape.numel()) and not is_size(g.numel(), 0):
        x = _pad(saved["x"], pads, padding_mode)
        options = (steps, edges, apart, False, [0] * dims, groups, [True, True, "bias" in wrt])
        backward = torch.ops.aten.convolution_backward
        dx, dw, db = backward(g, x, saved["weight"], weight_shape[:1], *options)
        dx = _unpad(dx, shapes["x"], pads, padding_mode) if pads else dx
        return {"x": dx, "weight": dw} | ({"bias": db} if "bias" in wrt else {})
    if "weight" in wrt:
        # First: its padded copy is gone before there is one of the gradient of x.
        x = _pad(saved["x"], pads, padding_mode)
        options = (steps, edges, apart, False, [0] * dims)
        grads["weight"] = _weight_gradient(g, x, weight_shape, *options, groups=groups)
        del x
    if "x" in wrt:
        padded_shape = [*x_shape[:-dims], *padded]
        if is_size(g.numel(), 0):
            dx = g.new_zeros(padded_shape)
        elif g.is_cuda and groups > 1 and g.ndim == dims + 2 > 3 and g.is_contiguous():
            # (Where each channel is a group, stock has its own kernel; that of one axis copies x.)
            options = (steps, edges, apart, False, [0] * dims, groups, [True, False, False])
            x = placeholder(g, padded_shape)
            backward = torch.ops.aten.convolution_backward
            dx = backward(g, x, saved["weight"], None, *options)[0]
        else:
            # A transposed convolution: unlike convolution_backward it needs no stand-in for x.
            adjoint = CONV_TRANSPOSE[dims]
            dx = adjoint(g, saved["weight"], None, steps, edges, left_over, groups, apart)
        grads["x"] = _unpad(dx, shapes["x"], pads, padding_mode) if pads else dx
        del dx
    if "bias" in wrt:
        grads["bias"] = _bias_gradient(g, dims, weight_shape[0])
    return grads


def _conv_transpose_bwd(
    g: Tensor,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Grads:
    x_shape, weight_shape = shapes["x"].shape, shapes["weight"].shape
    dims = len(weight_shape) - 2
    stride, padding = per_axis(stride, dims), per_axis(padding, dims)
    dilation, output_padding = per_axis(dilation, dims), per_axis(output_padding, dims)
    grads = {}
    if "x" in wrt:
        if not is_size(g.numel(), 0):
            dx = CONV[dims](g, saved["weight"], None, stride, padding, dilation, groups)
            # An output_padding of a stride or more (allowed under a larger dilation) adds places.
            for axis in range(-dims, 0):
                dx = dx.narrow(axis, 0, x_shape[axis])
        else:
            dx = g.new_zeros(x_shape)
        grads["x"] = dx
    if "weight" in wrt:
        options = (stride, padding, dilation, True, output_padding)
        grads["weight"] = _weight_gradient(g, saved["x"], weight_shape, *options, groups=groups)
    if "bias" in wrt:
        grads["bias"] = _bias_gradient(g, dims, weight_shape[1] * groups)
    return grads


def _conv_node(
    dims: int,
    row: str,
    wrt: Mask,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor | None:
    if x.ndim != dims + 2:
        return None
    if padding_mode != "zeros" or padding == "same":
        pads, _ = _padding(padding, padding_mode, weight.shape[2:], dilation)
        how = (stride, dilation, groups, padding_mode, _flat(pads))
        return kernels.nodes.padded_convolution(row, x, weight, bias, *how) if pads else None
    if wrt != {"x"}:
        return None
    options = (stride, 0 if padding == "valid" else padding, dilation, False, 0, groups)
    return kernels.nodes.convolution(row, x, weight, bias, *options)


@remembered
def _adds_places(dims: int, stride: Ints, output_padding: Ints) -> bool:
    """Whether the convolution of the gradient has more places than ``x``."""
    sizes = zip(per_axis(output_padding, dims), per_axis(stride, dims), strict=False)
    return any(added >= step for added, step in sizes)


def _conv_transpose_node(
    dims: int,
    row: str,
    wrt: Mask,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor | None:
    if wrt != {"x"} or x.ndim != dims + 2 or _adds_places(dims, stride, output_padding):
        return None
    options = (stride, padding, dilation, True, output_padding, groups)
    return kernels.nodes.convolution(row, x, weight, bias, *options)


def _stock_keeps(wrt: Mask) -> tuple[str, ...]:
    return ("x", "weight")


def _stock_pads(*, padding: Ints | str = 0, padding_mode: str = "zeros", **_: Any) -> bool:
    """Whether the stock layer keeps a padded copy of ``x`` (or may)."""
    return padding_mode != "zeros" or padding == "same"


def _conv_primal(dims: int) -> Callable[..., Tensor]:
    stock = CONV[dims]

    def primal(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
    ) -> Tensor:
        if padding_mode != "zeros":
            pads, padding = _padding(padding, padding_mode, weight.shape[2:], dilation)
            x = _pad(x, pads, padding_mode)
        return stock(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[arg-type]

    return primal


_conv1d, _conv2d, _conv3d = (
    define(
        row,
        _conv_primal(dims),
        _conv_bwd,
        stock_keeps=_stock_keeps,
        unless=_stock_pads,
        autocast=lowered,
        shapes=("x", "weight"),
        node=partial(_conv_node, dims),
        node_casts=True,
    )
    for dims, row in ((1, spec.CONV1D), (2, spec.CONV2D), (3, spec.CONV3D))
)
_conv_transpose1d, _conv_transpose2d, _conv_transpose3d = (
    define(
        row,
        CONV_TRANSPOSE[dims],
        _conv_transpose_bwd,
        stock_keeps=_stock_keeps,
        autocast=lowered,
        shapes=("x", "weight"),
        node=partial(_conv_transpose_node, dims),
        node_casts=True,
    )
    for dims, row in (
        (1, spec.CONV_TRANSPOSE1D),
        (2, spec.CONV_TRANSPOSE2D),
        (3, spec.CONV_TRANSPOSE3D),
    )
)


def _functional(layer: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    def conv(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> Tensor:
        return layer(
            input,
            weight,
            bias,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )

    return _named(conv, f"conv{dims}d")


def _functional_transpose(layer: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    def conv_transpose(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
    ) -> Tensor:
        return layer(
            input,
            weight,
            bias,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            dilation=dilation,
        )

    return _named(conv_transpose, f"conv_transpose{dims}d")


def _named(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"""As :func:`torch.nn.functional.{name}`.

    Keeps the weight for the gradient of the input, the input for the gradient of the weight,
    nothing for that of the bias. Shapes, dtypes and errors are those of the stock function.
    """
    return function


conv1d = _functional(_conv1d, 1)
conv2d = _functional(_conv2d, 2)
conv3d = _functional(_conv3d, 3)
conv_transpose1d = _functional_transpose(_conv_transpose1d, 1)
conv_transpose2d = _functional_transpose(_conv_transpose2d, 2)
conv_transpose3d = _functional_transpose(_conv_transpose3d, 3)


#: By the number of spatial axes.
_STOCK: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_STOCK_TRANSPOSE: dict[int, Any] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}
_CONV = {1: _conv1d, 2: _conv2d, 3: _conv3d}
_FUNCTIONAL = {1: conv1d, 2: conv2d, 3: conv3d}
_TRANSPOSE = {1: conv_transpose1d, 2: conv_transpose2d, 3: conv_transpose3d}


def _has_axes(module: Any, dims: int) -> bool:
    """Whether its kernel has so many, as a tuple tells. (Otherwise it is stock that says it has
    not, or works: it does not look.)
    """
    size = module.kernel_size
    return isinstance(size, tuple) and len(size) == dims


def _padding_left(self: Any) -> Any:
    """The option, in numbers where "same" is as much on both sides: which the convolution does."""
    padding = self.padding
    if padding == "same" and self.padding_mode == "zeros" and not is_exported():
        return _same(self.kernel_size, self.dilation) or padding
    return padding


@remembered
def _same(kernel: Sequence[int], dilation: Ints) -> tuple[int, ...]:
    """The padding to the same size, if it is as much on both sides."""
    pads, padding = _padding("same", "zeros", kernel, dilation)
    return () if pads else tuple(padding)


def _methods(dims: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``forward`` and ``_conv_forward`` along so many axes. (No attribute says how many: who holds
    a forward may call it when the module has its stock class back.)
    """
    stock = _STOCK[dims]

    def forward(self: Any, input: Tensor) -> Tensor:
        if not _has_axes(self, dims):
            return stock.forward(self, input)  # type: ignore[no-any-return]  # whose error it is
        row = _ROWS.get(type(self))
        if row is not None and (y := by_node("convolution_of", row, self, input)) is not None:
            return y
        # (As torch.nn's would, by _conv_forward, unless that is ours and would do nothing more.)
        padding, own = _padding_left(self), self._conv_forward
        pads = padding == "same" or self.padding_mode != "zeros"
        if pads or getattr(own, "__func__", own) is not _conv_forward:
            return own(input, self.weight, self.bias)  # type: ignore[no-any-return]
        options = (self.stride, padding, self.dilation, self.groups)
        if (parameters := for_stock(self, WEIGHT, input, casts=True)) is not None:
            return CONV[dims](input, *parameters, *options)
        return _FUNCTIONAL[dims](input, *parameters_of(self), *options)

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if (
            weight is None
            or not is_plain(input)
            or not _has_axes(self, dims)
            or others()
            or is_replaced(stock)
        ):
            return stock._conv_forward(self, input, weight, bias)
        padding, mode = _padding_left(self), self.padding_mode
        if mode != "zeros":
            pads = self._reversed_padding_repeated_twice
            own = _flat(_padding(padding, mode, self.kernel_size, self.dilation)[0])
            # Only a gradient of the weight reads the input. (Autocast pads, and adds up the
            # gradients of what was copied, before it rounds. And of no axes padding is an error.)
            is_frozen = type(weight) in OF_TORCH and not weight.requires_grad
            is_read = mode == "circular" or not is_frozen
            if not pads or [*pads] != own or amp_enabled(input.device.type) or not is_read:
                input, padding, mode = pad(input, pads, mode), 0, "zeros"
        elif padding == "same" and weight.requires_grad and amp_enabled(input.device.type):
            # Autocast has one narrow copy of the weight for all calls: the rule cannot ask for it.
            return CONV[dims](input, weight, bias, self.stride, padding, self.dilation, self.groups)
        return _CONV[dims](
            input,
            weight,
            bias,
            stride=self.stride,
            padding=padding,
            dilation=self.dilation,
            groups=self.groups,
            padding_mode=mode,
        )

    return forward, _conv_forward


@drop_in(spec.CONV1D)
class Conv1d(nn.Conv1d):
    """As :class:`torch.nn.Conv1d`."""

    forward, _conv_forward = _methods(1)  # type: ignore[assignment]


@drop_in(spec.CONV2D)
class Conv2d(nn.Conv2d):
    """As :class:`torch.nn.Conv2d`."""

    forward, _conv_forward = _methods(2)  # type: ignore[assignment]


@drop_in(spec.CONV3D)
class Conv3d(nn.Conv3d):
    """As :class:`torch.nn.Conv3d`."""

    forward, _conv_forward = _methods(3)  # type: ignore[assignment]


#: Of these classes themselves: those that derive from them may compute something else.
_ROWS = {Conv1d: spec.CONV1D, Conv2d: spec.CONV2D, Conv3d: spec.CONV3D}


def _forward_transpose(dims: int) -> Callable[..., Any]:
    stock = _STOCK_TRANSPOSE[dims]

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not _has_axes(self, dims) or not isinstance(self.padding, tuple):
            return stock.forward(self, input, output_size)  # type: ignore[no-any-return]
        geometry = (self.stride, self.padding, self.kernel_size, dims, self.dilation)
        output_padding = self._output_padding(input, output_size, *geometry)
        options = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        if (own := for_stock(self, WEIGHT, input, casts=True)) is not None:
            return CONV_TRANSPOSE[dims](input, *own, *options)
        return _TRANSPOSE[dims](input, *parameters_of(self), *options)

    return forward


@drop_in(spec.CONV_TRANSPOSE1D)
class ConvTranspose1d(nn.ConvTranspose1d):
    """As :class:`torch.nn.ConvTranspose1d`."""

    forward = _forward_transpose(1)


@drop_in(spec.CONV_TRANSPOSE2D)
class ConvTranspose2d(nn.ConvTranspose2d):
    """As :class:`torch.nn.ConvTranspose2d`."""

    forward = _forward_transpose(2)


@drop_in(spec.CONV_TRANSPOSE3D)
class ConvTranspose3d(nn.ConvTranspose3d):
    """As :class:`torch.nn.ConvTranspose3d`."""

    forward = _forward_transpose(3)
