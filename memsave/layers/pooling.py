"""Max pooling, which keeps the place of each maximum in its window.

Index legend: a place is an index in the input's spatial axes, flattened (what torch returns as
int64 ``indices``); an offset is an index in the window, flattened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import kernels, spec
from .._context import Autocast, is_plain_gradient
from ..function import Grads, Mask, Saved, Shapes, by_attributes, define
from ..kernels.reference import Windows, are_results_cached
from .module import drop_in
from .shape import Ints, channels_last, per_axis, remembered, stride_or

OFFSET = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class Window:
    """Where each output's window lies: one value per spatial axis throughout.

    Args:
        inputs: Spatial sizes of the input.
        starts: First place of each window, per axis.
        kernel: Sizes of a window, or of the largest one.
        dilation: As in :func:`torch.nn.functional.max_pool2d`.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        starts: Sequence[Tensor],
        kernel: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        self.inputs, self.kernel, self.dilation = inputs, kernel, dilation
        #: Shaped to broadcast over the outputs.
        self.starts = [
            first.view(-1, *[1] * (len(inputs) - 1 - axis)) for axis, first in enumerate(starts)
        ]

    def offsets(self, places: Tensor) -> Tensor:
        """Place of each maximum -> its offset."""
        if math.prod(self.inputs) < 2**31:
            places = places.to(torch.int32)  # which divides faster
        offsets = torch.zeros((), dtype=places.dtype, device=places.device)
        unit, cached = 1, are_results_cached()
        for axis in reversed(range(len(self.inputs))):
            size, step = self.inputs[axis], self.dilation[axis]
            rest = places.div(size, rounding_mode="floor") if axis else 0
            inside = places - rest * size - self.starts[axis].to(places)
            if step > 1:
                inside = (inside.div if cached else inside.div_)(step, rounding_mode="floor")
            offsets = offsets + inside * unit if cached else inside.mul_(unit).add_(offsets)
            unit *= self.kernel[axis]
            places = rest  # type: ignore[assignment]
        return offsets

    def places(self, offsets: Tensor) -> Tensor:
        """The inverse: a table over the window, plus the place where each window starts."""
        table = first = torch.zeros((), dtype=torch.int64, device=offsets.device)
        for axis, size in enumerate(self.inputs):
            step = torch.arange(self.kernel[axis], device=offsets.device) * self.dilation[axis]
            table = (table * size)[..., None] + step
            first = first * size + self.starts[axis]
        return table.reshape(-1).take(offsets.long()).add_(first)


def _may_stray(window: Window, x: Tensor) -> bool:
    """Whether stock's index may lie outside of its window: of one of nothing but -inf that stores
    the channels last, or of nothing but padding, as dilated ones may be.
    """
    return len(window.inputs) == 3 or x.is_cuda or max(window.dilation) > 1


def _fwd(
    dims: int,
    primal: Callable[..., Any],
    window_of: Callable[..., Window],
    formats: bool,
    wrt: Mask,
    x: Tensor,
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    windows = _windows(x.shape[-dims:], **options) if dims < x.ndim < dims + 3 else None
    if windows and not options["return_indices"] and (formats or x.is_contiguous()):
        fast = kernels.max_pool(x, windows)
        if fast is not None:
            return fast[0], {"offsets": fast[1]}
    y, places = primal(x, **{**options, "return_indices": True})
    window = window_of(x.shape[-dims:], y.shape[-dims:], x.device, **options)
    dtype = OFFSET[spec.offset_bits(window.kernel)]
    offsets = window.offsets(places)
    if _may_stray(window, x):
        last = math.prod(window.kernel) - 1
        offsets = (offsets.clamp if are_results_cached() else offsets.clamp_)(0, last)
    extras = {"offsets": offsets.to(dtype)}
    return ((y, places) if options["return_indices"] else y), extras


def _bwd(
    dims: int,
    window_of: Callable[..., Window],
    formats: bool,
    g: Tensor,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    **options: Any,
) -> Grads:
    like = shapes["x"]
    inputs, outputs = like.shape[-dims:], g.shape[-dims:]
    # (Of a window that strayed the place, below, is in the input, but the offset need not be.)
    strayed = dims == 3 and options["return_indices"]
    windows = None if strayed else _windows(inputs, **options)
    if windows and is_plain_gradient(g):
        dx = kernels.unpool(g, saved["offsets"], windows, like)
        if dx is not None:
            return {"x": dx}
    offsets = saved["offsets"]
    window = window_of(inputs, outputs, offsets.device, **options)
    places = window.places(offsets)
    if _may_stray(window, offsets):  # and that window may begin in the padding
        places.clamp_(0, math.prod(inputs) - 1)
    # Scatter along one flat axis of places; windows that overlap add up. The channels stay the
    # last axis where they are stored so (and in stock's gradient, too).
    if formats and channels_last(like, dims):
        flat = g.movedim(1, -1).reshape(g.shape[0], math.prod(outputs), g.shape[1])
        dx = flat.new_zeros(like.shape[0], math.prod(inputs), like.shape[1])
        dx.scatter_add_(1, places.movedim(1, -1).flatten(1, -2), flat)
        return {"x": dx.view(dx.shape[0], *inputs, dx.shape[-1]).movedim(-1, 1)}
    flat = g.reshape(*g.shape[:-dims], math.prod(outputs))
    dx = flat.new_zeros(*like.shape[:-dims], math.prod(inputs))
    dx.scatter_add_(-1, places.flatten(-dims), flat)
    return {"x": dx.view(like.shape)}


def _windows(
    inputs: torch.Size,
    *,
    kernel_size: Ints | None = None,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    output_size: Any = None,
    **_: Any,
) -> Windows | None:
    """The windows as kernels know them: of adaptive pooling if all are alike, and of nothing that
    stock may refuse.
    """
    if is_dynamo_compiling():  # which traces the reference
        return None
    options = (kernel_size, stride, padding, dilation, ceil_mode, output_size)
    # Stock refuses a float that is equal to an integer.
    types: tuple[Any, ...] = tuple(map(type, options))
    if tuple in types:
        types = tuple(map(_types, options))
    return _windows_of(inputs, *options, types)


def _per_output(output_size: Any, dims: int) -> list[Any]:
    """A size for each axis, of adaptive pooling: stock refuses a sequence of one for all."""
    return list(output_size) if isinstance(output_size, list | tuple) else [output_size] * dims


def _types(option: Any) -> Any:
    """Of an option, or of those for each axis: what a look-up does not tell apart."""
    return tuple(map(type, option)) if type(option) is tuple else type(option)


@remembered
def _windows_of(
    inputs: torch.Size,
    kernel_size: Ints | None,
    stride: Ints | None,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    output_size: Any,
    types: tuple[Any, ...],
) -> Windows | None:
    dims = len(inputs)
    if output_size is not None:
        outputs = _per_output(output_size, dims)
        if len(outputs) != dims or not all(type(count) is int and count > 0 for count in outputs):
            return None
        if any(size % count for size, count in zip(inputs, outputs, strict=True)):
            return None
        kernel_size = [size // count for size, count in zip(inputs, outputs, strict=True)]
    options = (kernel_size, stride_or(kernel_size, stride), padding, dilation)
    if not all(isinstance(option, int | tuple | list) for option in options):
        return None
    if type(ceil_mode) is not bool:
        return None
    kernel, step, pad, apart = (tuple(per_axis(option, dims)) for option in options)  # type: ignore[arg-type]
    numbers = (*kernel, *step, *pad, *apart)
    if {*map(type, numbers)} != {int} or max(numbers) >= 1 << 31:
        return None
    if not len(kernel) == len(step) == len(pad) == len(apart) == dims:
        return None
    if min(*kernel, *step, *apart) < 1 or any(
        not 0 <= 2 * before <= size for before, size in zip(pad, kernel, strict=True)
    ):
        return None
    outputs = []
    for size, width, along, before, wide in zip(inputs, kernel, step, pad, apart, strict=True):
        room = size + 2 * before - wide * (width - 1) - 1
        count = (room + (along - 1 if ceil_mode else 0)) // along + 1
        # The last window begins in the input or in the padding before it.
        is_outside = ceil_mode and (count - 1) * along >= size + before
        outputs.append(count - 1 if is_outside else count)
    if min(outputs) < 1:
        return None
    return Windows(tuple(inputs), tuple(outputs), kernel, step, pad, apart)


def _window(
    inputs: torch.Size,
    outputs: torch.Size,
    device: torch.device,
    *,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Window:
    dims = len(inputs)
    steps, pads = per_axis(stride_or(kernel_size, stride), dims), per_axis(padding, dims)
    starts = [
        torch.arange(count, device=device) * step - pad
        for count, step, pad in zip(outputs, steps, pads, strict=True)
    ]
    return Window(inputs, starts, per_axis(kernel_size, dims), per_axis(dilation, dims))


def _adaptive_window(
    inputs: torch.Size, outputs: torch.Size, device: torch.device, **_: Any
) -> Window:
    starts = [
        torch.arange(count, device=device) * size // max(count, 1)
        for size, count in zip(inputs, outputs, strict=True)
    ]
    return Window(inputs, starts, spec.adaptive_kernel(inputs, outputs), [1] * len(inputs))


@remembered
def _adaptive_sizes(
    inputs: torch.Size, output_size: Any, types: Any
) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Sizes of the outputs and of the largest window, and the bits of an offset; ``None`` of what
    stock may refuse. (Two that are equal are of the same types.)
    """
    given = _per_output(output_size, len(inputs))
    if output_size is None or len(given) != len(inputs):
        return None
    outputs = [size if out is None else out for size, out in zip(inputs, given, strict=True)]
    if {*map(type, outputs)} != {int} or min(outputs) < 1:
        return None
    kernel = spec.adaptive_kernel(inputs, outputs)
    return tuple(outputs), tuple(kernel), spec.offset_bits(kernel)


#: Of pooling by windows, in the order of stock; and what they are where they are not given.
_OPTIONS = {
    "kernel_size": None,
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
}


def _node(dims: int, row: str, wrt: Mask, x: Tensor, **options: Any) -> Tensor | None:
    return kernels.nodes.max_pool(row, x, dims, *(_OPTIONS | options).values())


def _adaptive_node(
    dims: int,
    formats: bool,
    row: str,
    wrt: Mask,
    x: Tensor,
    *,
    output_size: Any,
    return_indices: bool = False,
) -> Tensor | None:
    if return_indices or not dims < x.ndim < dims + 3:
        return None
    windows = _windows(x.shape[-dims:], output_size=output_size)
    if windows and (formats or x.is_contiguous()):
        y = kernels.nodes.max_pool_by_windows(row, x, windows)
        if y is not None:
            return y
    sizes = _adaptive_sizes(x.shape[-dims:], output_size, _types(output_size))
    return sizes and kernels.nodes.adaptive_max_pool(row, x, *sizes)


def _define(
    row: spec.Layer,
    dims: int,
    primal: Callable[..., Any],
    window_of: Callable[..., Window],
    *,
    formats: bool = True,
    compiled: bool = True,
    autocast: Autocast | None = None,
) -> Callable[..., Any]:
    """``formats``: whether gradients of what is ``channels_last`` are so, too."""
    fwd = partial(_fwd, dims, primal, window_of, formats)
    bwd = partial(_bwd, dims, window_of, formats)
    adaptive = window_of is _adaptive_window
    node = partial(_adaptive_node, dims, formats) if adaptive else partial(_node, dims)
    return define(
        row, primal, bwd, fwd, autocast=autocast, compiled=compiled, shapes=("x",), node=node
    )


def _wide_on_cpu(device: str) -> torch.dtype | None:
    """What autocast casts the input of max pooling to, along three axes."""
    return torch.float32 if device == "cpu" else None


# torch.compile keeps int8 offsets by itself.
_max_pool1d = _define(spec.MAX_POOL1D, 1, F.max_pool1d, _window, compiled=False)
_max_pool2d = _define(spec.MAX_POOL2D, 2, F.max_pool2d, _window, compiled=False)
_max_pool3d = _define(
    spec.MAX_POOL3D, 3, F.max_pool3d, _window, compiled=False, autocast=_wide_on_cpu
)
_adaptive_max_pool1d = _define(spec.ADAPTIVE_MAX_POOL1D, 1, F.adaptive_max_pool1d, _adaptive_window)
_adaptive_max_pool2d = _define(spec.ADAPTIVE_MAX_POOL2D, 2, F.adaptive_max_pool2d, _adaptive_window)
_adaptive_max_pool3d = _define(
    spec.ADAPTIVE_MAX_POOL3D,
    3,
    F.adaptive_max_pool3d,
    _adaptive_window,
    formats=False,
    autocast=_wide_on_cpu,
)


def _functional(layer: Callable[..., Any], dims: int) -> Callable[..., Any]:
    def max_pool(
        input: Tensor,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return layer(
            input,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            ceil_mode=ceil_mode,
            return_indices=return_indices,
        )

    name = f"max_pool{dims}d"
    max_pool.__name__ = max_pool.__qualname__ = name
    max_pool.__doc__ = f"""As :func:`torch.nn.functional.{name}`.

    Keeps one byte per output element (two where a window has over 256 places, four where over
    32768), not the input. Shapes, dtypes and errors are those of the stock function.
    """
    return max_pool


max_pool1d = _functional(_max_pool1d, 1)
max_pool2d = _functional(_max_pool2d, 2)
max_pool3d = _functional(_max_pool3d, 3)


def _adaptive(layer: Callable[..., Any], dims: int) -> Callable[..., Any]:
    def adaptive_max_pool(
        input: Tensor, output_size: Any, return_indices: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        return layer(input, output_size=output_size, return_indices=return_indices)

    name = f"adaptive_max_pool{dims}d"
    adaptive_max_pool.__name__ = adaptive_max_pool.__qualname__ = name
    adaptive_max_pool.__doc__ = f"""As :func:`torch.nn.functional.{name}`.

    Keeps one byte per output element (two where a window has over 256 places, four where over
    32768), not the input.
    """
    return adaptive_max_pool


adaptive_max_pool1d = _adaptive(_adaptive_max_pool1d, 1)
adaptive_max_pool2d = _adaptive(_adaptive_max_pool2d, 2)
adaptive_max_pool3d = _adaptive(_adaptive_max_pool3d, 3)


def _forward(
    row: spec.Layer, stock: type[nn.Module], layer: Callable[..., Any], dims: int
) -> Callable[..., Any]:
    casts = dims == 3  # _wide_on_cpu
    of_module = by_attributes(row, stock, "max_pool", dims, *_OPTIONS, casts=casts)

    def forward(self: Any, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if (y := of_module(self, input)) is not None:
            return y
        return layer(input, **{name: getattr(self, name) for name in _OPTIONS})  # type: ignore[no-any-return]

    return forward


@drop_in(spec.MAX_POOL1D)
class MaxPool1d(nn.MaxPool1d):
    """As :class:`torch.nn.MaxPool1d`. Keeps one byte per output element."""

    forward = _forward(spec.MAX_POOL1D, nn.MaxPool1d, max_pool1d, 1)


@drop_in(spec.MAX_POOL2D)
class MaxPool2d(nn.MaxPool2d):
    """As :class:`torch.nn.MaxPool2d`. Keeps one byte per output element."""

    forward = _forward(spec.MAX_POOL2D, nn.MaxPool2d, max_pool2d, 2)


@drop_in(spec.MAX_POOL3D)
class MaxPool3d(nn.MaxPool3d):
    """As :class:`torch.nn.MaxPool3d`. Keeps one byte per output element."""

    forward = _forward(spec.MAX_POOL3D, nn.MaxPool3d, max_pool3d, 3)


@drop_in(spec.ADAPTIVE_MAX_POOL1D)
class AdaptiveMaxPool1d(nn.AdaptiveMaxPool1d):
    """As :class:`torch.nn.AdaptiveMaxPool1d`. Keeps one byte per output element."""

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return adaptive_max_pool1d(input, self.output_size, self.return_indices)


@drop_in(spec.ADAPTIVE_MAX_POOL2D)
class AdaptiveMaxPool2d(nn.AdaptiveMaxPool2d):
    """As :class:`torch.nn.AdaptiveMaxPool2d`. Keeps one byte per output element."""

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return adaptive_max_pool2d(input, self.output_size, self.return_indices)


@drop_in(spec.ADAPTIVE_MAX_POOL3D)
class AdaptiveMaxPool3d(nn.AdaptiveMaxPool3d):
    """As :class:`torch.nn.AdaptiveMaxPool3d`. Keeps one byte per output element."""

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return adaptive_max_pool3d(input, self.output_size, self.return_indices)
