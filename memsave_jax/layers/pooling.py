"""Max pooling, which keeps the place of each maximum in its window.

A window's places are few: forward goes through them one by one over all windows at once, and so
does backward, as slices and paddings that XLA fuses into one loop. (Stock compares again in
backward, for which it keeps the whole input.)

Index legend: an offset is an index in the window, flattened. Spatial axes come before the channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memsave import spec
from memsave.spec import Layer

from ..function import Function, Grads, Mask, Saved, Shapes, define
from ..kernels import OFFSET, is_known, shards_per_axis
from .shape import Ints, Padding, per_axis

#: Windows of more places are not gone through one by one: the program would be too long.
FEW = 64


class Window(NamedTuple):
    """Where the windows lie: one value per axis of the array."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    def places(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Each offset, and how far its place is from the window's first, per axis."""
        inside = itertools.product(*map(range, self.kernel))
        for offset, index in enumerate(inside):
            yield offset, tuple(i * d for i, d in zip(index, self.dilation, strict=True))

    def ends(self, outputs: Sequence[int]) -> tuple[int, ...]:
        """How far the windows reach, per axis, from where the first begins."""
        sizes = zip(outputs, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((out - 1) * step + (k - 1) * d + 1 for out, k, step, d in sizes)

    def padded(self, x: Array, outputs: Sequence[int], value: Any) -> Array:
        """All that the windows see."""
        ends = zip(self.ends(outputs), x.shape, self.padding, strict=True)
        pads = [(low, end - size - low, 0) for end, size, (low, _) in ends]
        return lax.pad(x, jnp.asarray(value, x.dtype), pads)


def window_of(
    dims: int,
    shape: Sequence[int],
    *,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Padding = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> Window:
    """The windows of these options over an array whose last axis is the channels."""
    kernel = per_axis(kernel_size, dims)
    stride = kernel if stride is None else per_axis(stride, dims)
    dilation = per_axis(dilation, dims)
    inputs = shape[-dims - 1 : -1]
    extent = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    if isinstance(padding, str):
        pads = lax.padtype_to_pads(inputs, extent, stride, padding)
    else:
        padding = (padding,) * dims if isinstance(padding, int) else padding
        pads = [(p, p) if isinstance(p, int) else (p[0], p[1]) for p in padding]
    if ceil_mode:
        sizes = zip(inputs, extent, stride, pads, strict=True)
        pads = [(low, _ceil(size, e, s, low, high)) for size, e, s, (low, high) in sizes]
    ones = (1,) * (len(shape) - dims - 1)
    return Window(
        (*ones, *kernel, 1),
        (*ones, *stride, 1),
        (*[(0, 0)] * len(ones), *pads, (0, 0)),
        (*ones, *dilation, 1),
    )


def _ceil(size: int, extent: int, step: int, low: int, high: int) -> int:
    """The padding at the end for one more window, if that begins in the input."""
    last = math.ceil((size + low + high - extent) / step) * step
    return max(high, last + extent - size - low) if last < size + low else high


def _primal(dims: int, x: Array, **options: Any) -> Array:
    window = window_of(dims, x.shape, **options)
    return lax.reduce_window(
        x, -jnp.inf, lax.max, window.kernel, window.stride, window.padding,
        window_dilation=window.dilation,
    )  # fmt: skip


def _fwd(dims: int, wrt: Mask, x: Array, **options: Any) -> tuple[Array, dict[str, Array]]:
    y = _primal(dims, x, **options)
    window = window_of(dims, x.shape, **options)
    dtype = OFFSET[spec.offset_bits(window.kernel)]
    if not y.size:
        return y, {"offsets": jnp.zeros(y.shape, dtype)}
    find = _offsets if math.prod(window.kernel) <= FEW else _offsets_of_many
    offsets = find(lax.stop_gradient(x), y.shape, window).astype(dtype)
    # Together: otherwise XLA may put off the offsets, and x lives until then.
    y, offsets = lax.optimization_barrier((y, offsets))
    return y, {"offsets": offsets}


def _lowest(dtype: Any) -> Any:
    """What stock pads with: an infinity, or where a dtype has none, its lowest number."""
    has_infinity = not np.isnan(np.asarray(-np.inf).astype(dtype))
    return -jnp.inf if has_infinity else jnp.finfo(dtype).min


#: Of what finds places: eagerly, too, ``jax.debug_infs`` is to see no infinite start or padding.
_compiled = partial(jax.jit, static_argnums=(1, 2), inline=True)


@_compiled
def _offsets(x: Array, outputs: tuple[int, ...], window: Window) -> Array:
    """The offset of each maximum: of equal ones the first, instead of nan what follows it.

    That, and that padding is a place like others, is what stock does.
    """
    x = window.padded(x, outputs, _lowest(x.dtype))

    def place(shift: tuple[int, ...]) -> Array:
        sizes = zip(shift, outputs, window.stride, strict=True)
        ends = [d + (out - 1) * step + 1 for d, out, step in sizes]
        return lax.slice(x, shift, ends, window.stride)

    (_, first), *others = window.places()
    best, offsets = place(first), jnp.zeros(outputs, jnp.int32)
    for offset, shift in others:
        other = place(shift)
        keep = best >= other
        best, offsets = jnp.where(keep, best, other), jnp.where(keep, offsets, offset)
    return offsets


@_compiled
def _offsets_of_many(x: Array, outputs: tuple[int, ...], window: Window) -> Array:
    """The same by JAX's own loop over a window, which also carries where a place is."""
    x = window.padded(x, outputs, _lowest(x.dtype))
    # Within an image, as 32 bits may not count a batch.
    axes = [axis for axis in reversed(range(x.ndim)) if window.kernel[axis] > 1]
    index, unit = jnp.zeros(x.shape, jnp.int32), 1
    for axis in axes:
        index = index + _iota(x, axis) * unit
        unit *= x.shape[axis]

    def later(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
        keep = (two[1] < 0) | ((one[1] >= 0) & (one[0] >= two[0]))  # the start is no place
        return jnp.where(keep, one[0], two[0]), jnp.where(keep, one[1], two[1])

    start = jnp.asarray(_lowest(x.dtype), x.dtype), jnp.int32(-1)
    _, places = lax.reduce_window(
        (x, index), start, later, window.kernel, window.stride, "VALID",
        window_dilation=window.dilation,
    )  # fmt: skip
    offsets, unit = jnp.zeros(outputs, jnp.int32), 1
    for axis in axes:
        first = lax.broadcasted_iota(jnp.int32, outputs, axis) * window.stride[axis]
        offsets = offsets + (places % x.shape[axis] - first) // window.dilation[axis] * unit
        unit *= window.kernel[axis]
        places = places // x.shape[axis]
    return offsets


def _bwd(dims: int, g: Array, wrt: Mask, saved: Saved, shapes: Shapes, **options: Any) -> Grads:
    inputs = shapes["x"].shape
    if not g.size:
        return {"x": jnp.zeros(inputs, g.dtype) + g.sum()}  # which is zero, and linear in g
    window = window_of(dims, inputs, **options)
    scatter = _scatter if math.prod(window.kernel) <= FEW else _scatter_many
    if g.dtype.itemsize == 1:  # in which a sum would have no digits left
        g = g.astype(jnp.float32)
    return {"x": scatter(g, saved["offsets"], inputs, window)}


def _scatter(g: Array, offsets: Array, inputs: tuple[int, ...], window: Window) -> Array:
    """The gradient of each window to the place of its maximum.

    Places whose indices have one remainder modulo the stride make up an array of their own, into
    which a window's places go by mere shifts; in the end these arrays are interleaved. (Padding
    between elements does the same, but is slow after JAX has transposed it twice.)
    """
    zero = jnp.zeros((), g.dtype)
    seen = window.ends(g.shape)
    sizes = tuple(-(-end // step) for end, step in zip(seen, window.stride, strict=True))
    residues = dict.fromkeys(
        itertools.product(*map(range, window.stride)), jnp.zeros(sizes, g.dtype)
    )
    for offset, shift in window.places():
        chosen = jnp.where(offsets == offset, g, zero)
        steps = [divmod(d, step) for d, step in zip(shift, window.stride, strict=True)]
        ends = zip(steps, sizes, g.shape, strict=True)
        pads = [(start, size - start - out, 0) for (start, _), size, out in ends]
        remainder = tuple(rest for _, rest in steps)
        residues[remainder] = residues[remainder] + lax.pad(chosen, zero, pads)
    total = jnp.stack([*residues.values()]).reshape(*window.stride, *sizes)
    total = total.transpose([axis + k for axis in range(g.ndim) for k in (g.ndim, 0)])
    total = total.reshape([s * step for s, step in zip(sizes, window.stride, strict=True)])
    return _unpadded(total[tuple(map(slice, seen))], inputs, window)


def _scatter_many(g: Array, offsets: Array, inputs: tuple[int, ...], window: Window) -> Array:
    """The same as one scatter."""
    starts = [_iota(g, axis) * step for axis, step in enumerate(window.stride)]
    index = _indices_of(starts, offsets, window.kernel, window.dilation)
    return _unpadded(jnp.zeros(window.ends(g.shape), g.dtype).at[index].add(g), inputs, window)


def _iota(g: Array, axis: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, g.shape, axis)


def _indices_of(
    starts: Sequence[Array], offsets: Array, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[Array, ...]:
    """Per axis, the place of each offset in a window that begins at ``starts``."""
    index = []
    rest = offsets.astype(jnp.int32)
    for first, size, step in zip(*map(reversed, (starts, kernel, dilation)), strict=True):
        index.append(first + rest % size * step)
        rest = rest // size
    return tuple(reversed(index))


def _unpadded(total: Array, inputs: tuple[int, ...], window: Window) -> Array:
    """Of all that the windows see, the input."""
    ends = zip(inputs, total.shape, window.padding, strict=True)
    pads = [(-low, size - end + low, 0) for size, end, (low, _) in ends]
    return lax.pad(total, jnp.zeros((), total.dtype), pads)


def _adaptive(dims: int, x: Array, output_size: Any) -> tuple[Array, Array]:
    """The maxima, of parts that overlap where the size does not divide, and their offsets.

    Axis by axis from the last, so of equal ones the first; of nan the first, too.
    """
    sizes = x.shape[-dims - 1 : -1]
    parts = per_axis(output_size, dims)
    parts = [size if count is None else count for size, count in zip(sizes, parts, strict=True)]
    offsets, unit = jnp.zeros(x.shape, jnp.int32), 1
    for axis in reversed(range(dims)):
        size, count, at = sizes[axis], parts[axis], x.ndim - dims - 1 + axis
        best = [(lax.slice_in_dim(x, 0, 0, axis=at), lax.slice_in_dim(offsets, 0, 0, axis=at))]
        for k in range(count):
            start, end = k * size // count, -(-(k + 1) * size // count)
            part = lax.slice_in_dim(x, start, end, axis=at)
            place = jnp.argmax(part, at, keepdims=True)
            inside = lax.slice_in_dim(offsets, start, end, axis=at)
            inside = jnp.take_along_axis(inside, place, at) + place.astype(jnp.int32) * unit
            best.append((jnp.take_along_axis(part, place, at), inside))
        x, offsets = (jnp.concatenate(arrays, at) for arrays in zip(*best, strict=True))
        if is_known((size,)):  # (Otherwise nobody asks for the offsets.)
            unit *= spec.adaptive_kernel([size], [count])[0]
    return x, offsets


def _adaptive_primal(dims: int, x: Array, *, output_size: Any) -> Array:
    return _adaptive(dims, x, output_size)[0]


def _adaptive_fwd(
    dims: int, wrt: Mask, x: Array, *, output_size: Any
) -> tuple[Array, dict[str, Array]]:
    y, offsets = _adaptive(dims, x, output_size)
    kernel = spec.adaptive_kernel(x.shape[-dims - 1 : -1], y.shape[-dims - 1 : -1])
    y, offsets = lax.optimization_barrier((y, offsets.astype(OFFSET[spec.offset_bits(kernel)])))
    return y, {"offsets": offsets}


def _adaptive_bwd(
    dims: int, g: Array, wrt: Mask, saved: Saved, shapes: Shapes, *, output_size: Any
) -> Grads:
    inputs = shapes["x"].shape
    if not g.size:
        return {"x": jnp.zeros(inputs, g.dtype) + g.sum()}  # which is zero, and linear in g
    first = g.ndim - dims - 1
    sizes, counts = inputs[first:-1], g.shape[first:-1]
    starts = []
    for axis, (size, count) in enumerate(zip(sizes, counts, strict=True), first):
        k = _iota(g, axis)  # and k * size // count, but that could have over 32 bits
        starts.append(k * (size // count) + k * (size % count) // count)
    kernel = spec.adaptive_kernel(sizes, counts)
    places = jnp.zeros(g.shape, jnp.int32)
    for size, index in zip(
        sizes, _indices_of(starts, saved["offsets"], kernel, [1] * dims), strict=True
    ):
        places = places * size + index

    def scatter(g: Array, places: Array) -> Array:
        return jnp.zeros(math.prod(sizes), g.dtype).at[places.ravel()].add(g.ravel())

    # Mapped, so that XLA sees that examples and channels are apart, and may be on other devices.
    scatter = jax.vmap(scatter, -1, -1)
    for _ in range(first):
        scatter = jax.vmap(scatter)
    return {"x": scatter(g, places).reshape(inputs)}


def _layout(dims: int) -> dict[str, str]:
    row = (spec.MAX_POOL1D, spec.MAX_POOL2D, spec.MAX_POOL3D)[dims - 1]
    x, y = row.args["x"].split()[2:], row.y.split()[2:]
    y = f"*n {' '.join(y)} c"
    return {"x": f"*n {' '.join(x)} c", "y": y, "offsets": y}


def is_untellable(dims: int, x: Array, **_: Any) -> bool:
    """Whether JAX cannot tell how the windows' places lie: in what is sharded by an ``Explicit``
    mesh, or between places whose number is a symbol.
    """
    return any(count > 1 for count in shards_per_axis(x)) or not is_known(x.shape[-dims - 1 : -1])


def _by_axes(
    rows: Sequence[Layer], primal: Function, bwd: Function, fwd: Function
) -> dict[int, Function]:
    """The functions of rows of 1, 2, and 3 spatial axes."""
    return {
        dims: define(
            row,
            partial(primal, dims),
            partial(bwd, dims),
            partial(fwd, dims),
            stock_op=partial(is_untellable, dims),
            layout=_layout(dims),
        )
        for dims, row in enumerate(rows, start=1)
    }


_max_pool = _by_axes((spec.MAX_POOL1D, spec.MAX_POOL2D, spec.MAX_POOL3D), _primal, _bwd, _fwd)
_adaptive_max_pool = _by_axes(
    (spec.ADAPTIVE_MAX_POOL1D, spec.ADAPTIVE_MAX_POOL2D, spec.ADAPTIVE_MAX_POOL3D),
    _adaptive_primal,
    _adaptive_bwd,
    _adaptive_fwd,
)


def max_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[Sequence[int]] = "VALID",
) -> Array:
    """As :func:`flax.linen.max_pool` (and ``nnx.max_pool``).

    Keeps one byte per output element (two where a window has over 256 places, four where over
    32768), not the input. Over other than one to three axes it is stock.

    Args:
        inputs: ``(*n, spatial axes, channels)``.
        window_shape: Size of the window along the spatial axes.
        strides: Default: 1 along every axis.
        padding: ``"SAME"``, ``"VALID"``, or a pair per spatial axis.
    """
    inputs = jnp.asarray(inputs)
    pool = _max_pool.get(len(window_shape), partial(_primal, len(window_shape)))
    return pool(inputs, **checked(inputs, window_shape, strides, padding))


def adaptive_max_pool(inputs: Array, output_size: Sequence[int | None]) -> Array:
    """As :class:`torch.nn.AdaptiveMaxPool2d`, over one to three axes before the channels.

    Keeps one byte per output element (two where a window has over 256 places, four where over
    32768), not the input.

    Args:
        inputs: ``(*n, spatial axes, channels)``.
        output_size: Size of the output along each spatial axis; ``None``: that of the input.
    """
    if len(output_size) not in _adaptive_max_pool:
        raise ValueError(f"output_size is of one to three axes, not {output_size}")
    pool = _adaptive_max_pool[len(output_size)]
    return pool(jnp.asarray(inputs), output_size=tuple(output_size))


def checked(
    inputs: Array, window_shape: Sequence[int], strides: Sequence[int] | None, padding: Any
) -> dict[str, Any]:
    """Flax's options as those of the table; raises what Flax does."""
    dims = len(window_shape)
    assert inputs.ndim > dims, f"inputs of {inputs.shape} have no {dims} axes and channels"
    strides = strides or (1,) * dims
    if not isinstance(padding, str):
        padding = tuple(map(tuple, padding))
        assert len(padding) == dims, (
            f"padding {padding} must specify pads for same number of dims as "
            f"window_shape {window_shape}"
        )
        assert all(len(pair) == 2 for pair in padding), (
            f"each entry in padding {padding} must be length 2"
        )
    assert dims == len(strides), f"len({window_shape}) must equal len({strides})"
    return {"kernel_size": tuple(window_shape), "stride": tuple(strides), "padding": padding}
