"""Normalization by statistics of each example, ``y = (x - mean) * rstd * weight + bias``.

Over the features (layer norm), over groups of channels (group norm), over one channel (instance
norm), or by the root mean square alone, without mean and bias. As in ``batch_norm.py`` the gradient
is affine in the incoming one, and no array of the size of ``x`` is made from ``x`` alone, which XLA
could keep. Rows "from output" know that ``(y - bias) / weight`` is what ``x`` became.

Index legend: n batch, i features, c channels, s spatial axes, g groups of channels; features and
channels come last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from memsave import spec
from memsave.spec import Layer

from .._xla import as_kept
from ..function import Function, Grads, Mask, Saved, Shapes, define
from ..kernels import shards_per_axis
from .batch_norm import is_clipped, squared, wide
from .shape import as_tuple


class View(NamedTuple):
    """How the statistics lie in ``x``: its shape, maybe with the channels as (groups, group)."""

    shape: tuple[int, ...]
    reduced: tuple[int, ...]
    features: int = 1

    @property
    def size(self) -> int:
        """Elements per statistic."""
        return math.prod(self.shape[a] for a in self.reduced)

    def spread(self, statistic: Array) -> Array:
        """To the shape that broadcasts."""
        return jnp.expand_dims(statistic, self.reduced)

    def parameter(self, vector: Array) -> Array:
        """To the shape that broadcasts."""
        first = len(self.shape) - self.features
        return jnp.asarray(vector).reshape(*[1] * first, *self.shape[first:])

    @property
    def spatial(self) -> list[int]:
        """The reduced axes that are not of features."""
        return [axis for axis in self.reduced if axis < len(self.shape) - self.features]

    def along_space(self, array: Array) -> Array:
        """The sum along the spatial axes, in the shape that broadcasts.

        With all channels beside each other: XLA:CPU takes more time, and an array more, for those
        of groups. (The spatial axes stay as they are, as a mesh may split any of them.)
        """
        first = len(self.shape) - self.features
        rest, features = self.shape[:first], self.shape[first:]
        array = array.reshape(*rest, math.prod(features)).sum(range(1, first))
        return jnp.expand_dims(array.reshape(rest[0], *features), self.spatial)

    def along_features(self, array: Array) -> Array:
        """The sum over the features of each group, in the shape that broadcasts."""
        features = [axis for axis in self.reduced if axis not in self.spatial]
        return array.sum(features, keepdims=True)

    def total(self, array: Array) -> Array:
        """Over each group, in the shape that broadcasts."""
        return self.along_features(self.along_space(array) if self.spatial else array)

    def correlation(self, array: Array, vector: Array | None) -> Array:
        """``total(array * vector)`` over features, as a matrix-vector product.

        Of a sum in a backward pass XLA:CPU writes the factors out beforehand, all of full size.
        """
        vector = jnp.ones(self.shape[-1:], array.dtype) if vector is None else vector
        if shards_per_axis(array)[-1] > 1:  # JAX cannot tell whether a product is to stay in parts.
            return self.total(array * vector.astype(array.dtype))
        total = jnp.matmul(array, vector.astype(array.dtype), precision=lax.Precision.HIGHEST)
        return total[..., None]

    def per_feature(self, array: Array) -> Array:
        """The sum over all but the features."""
        return array.sum(range(len(self.shape) - self.features))


def is_last(x: Array, axes: int | Sequence[int]) -> bool:
    """Whether these axes, as Flax takes them, are the last one alone."""
    given = {*as_tuple(axes)}
    return bool(given) and given <= {-1, x.ndim - 1}


def _of_features(shape: tuple[int, ...], **_: Any) -> View:
    return View(shape, (len(shape) - 1,))


def _of_channels(shape: tuple[int, ...], **_: Any) -> View:
    if len(shape) < 2:
        raise ValueError(f"instances and channels are two axes, x is {shape}")
    return View(shape, tuple(range(1, len(shape) - 1)))


def _of_groups(shape: tuple[int, ...], *, num_groups: int, **_: Any) -> View:
    *rest, channels = shape
    if channels % num_groups:
        raise ValueError(f"{channels} channels do not make {num_groups} groups")
    split = (*rest, num_groups, channels // num_groups)
    return View(split, (*range(1, len(rest)), len(rest) + 1), features=2)


def _statistics(x: Array, view: View, row: Layer, dtype: Any, fast: bool) -> tuple[Any, Array]:
    """Mean (``None`` of what is not centered) and variance, as Flax computes them."""
    x = x.astype(jnp.promote_types(dtype or x.dtype, jnp.float32))
    if row.op == "rms_norm":
        return None, squared(x).mean(view.reduced)
    mean = x.mean(view.reduced)
    if fast:
        return mean, jnp.maximum(0.0, squared(x).mean(view.reduced) - squared(mean))
    return mean, squared(x - view.spread(mean)).mean(view.reduced)


def _forward(
    row: Layer,
    view_of: Callable[..., View],
    x: Array,
    *others: Array | None,
    eps: float,
    dtype: Any = None,
    use_fast_variance: bool = True,
    **options: Any,
) -> tuple[Array, dict[str, Array]]:
    x = jnp.asarray(x)  # (In what NumPy computes the last bits are others.)
    named = dict(zip(row.args, (x, *others), strict=True))
    weight, bias = named["weight"], named.get("bias")
    view = view_of(x.shape, **options)
    of_groups = x.reshape(view.shape)
    mean, var = _statistics(of_groups, view, row, dtype, use_fast_variance)
    rstd = lax.rsqrt(var + eps)
    # The order of the operations is Flax's, for the last bit.
    scale = view.spread(rstd)
    if weight is not None:
        scale = scale * view.parameter(weight)
    y = (of_groups if mean is None else of_groups - view.spread(mean)) * scale
    if bias is not None:
        y = y + view.parameter(bias)
    present = [array for array in (x, weight, bias) if array is not None]
    y = jnp.asarray(y.reshape(x.shape), dtype or jnp.result_type(*present))
    extras = {"mean": mean, "rstd": rstd}
    return y, {name: extras[name] for name in row.extras}


def _gradients(
    view: View,
    centers: bool,
    fast: bool,
    g: Array,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    eps: float,
) -> Grads:
    """Of ``x`` and the weight, by ``x``."""
    grads = {}
    x, rstd = saved["x"].astype(g.dtype).reshape(view.shape), view.spread(saved["rstd"])
    mean = view.spread(saved["mean"]) if centers else None
    # As stable as forward: with the fast variance, mean and spread of x are told apart at the end.
    if mean is not None and not fast:
        x, mean = x - mean, jnp.zeros_like(mean)
    incoming, g = g, g * rstd
    sums = None
    if mean is not None and view.spatial:
        # Of each example and channel, from which all else follows. (Were x - mean in a sum, XLA
        # would keep it, beside x.)
        sums = view.along_space(incoming), view.along_space(incoming * x)
    if "weight" in wrt:
        if mean is None:
            grad = view.per_feature(g * x)
        elif sums is None:
            # (In one sum: two of many rows, subtracted in the end, would have fewer digits.)
            grad = view.per_feature(g * x - g * mean)
        else:
            grad = view.per_feature(rstd * (sums[1] - mean * sums[0]))
        grads["weight"] = grad.reshape(shapes["weight"].shape)
    if "x" in wrt:
        weight = None if saved["weight"] is None else view.parameter(saved["weight"])
        g = g if weight is None else g * weight
        if mean is None:
            correlation = rstd * view.correlation(incoming * x, saved["weight"])
            dx = g - lax.square(rstd) * correlation / view.size * x
        else:
            if sums is None:
                total, correlation = view.total(g), view.total(g * x)
            else:
                scale = rstd if weight is None else rstd * weight
                total, correlation = (view.along_features(array * scale) for array in sums)
            slope = -lax.square(rstd) * (correlation - mean * total) / view.size
            if fast:
                slope = jnp.where(is_clipped(rstd, eps), 0, slope)
            # (As sums of fewer kinds XLA:GPU makes fewer kernels of it.)
            dx = g + slope * (x - mean) - total / view.size
        grads["x"] = dx.reshape(shapes["x"].shape)
    return grads


def _gradients_from_output(
    view: View,
    centers: bool,
    fast: bool,
    g: Array,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    eps: float,
) -> Grads:
    """Of ``x`` and the weight, by ``y``."""
    grads = {}
    y = as_kept(saved["y"], effort=2).astype(g.dtype).reshape(view.shape)
    if centers and saved["bias"] is not None:
        y = y - view.parameter(saved["bias"])
    weight = 1.0 if saved["weight"] is None else view.parameter(saved["weight"])
    if "weight" in wrt:
        grad = view.per_feature(g * y)
        grad = grad / jnp.reshape(weight, grad.shape)
        grads["weight"] = grad.reshape(shapes["weight"].shape)
    if "x" in wrt:
        sum_of = view.total if centers else partial(view.correlation, vector=None)
        correlation, g = sum_of(g * y), g * weight
        # If the passes are one program, XLA:CPU would write rstd out at full size for both.
        rstd = view.spread(as_kept(saved["rstd"], effort=1))
        if centers and fast:
            correlation = jnp.where(is_clipped(rstd, eps), 0, correlation)
        dx = g - correlation / view.size * y / weight
        dx = dx - view.total(g) / view.size if centers else dx
        grads["x"] = (dx * rstd).reshape(shapes["x"].shape)
    return grads


CHANNELS_LAST = {"x": "n *s c", "y": "n *s c"}


def _define(row: Layer, view_of: Callable[..., View]) -> Function:
    centers = row.op != "rms_norm"
    gradients = _gradients if row.name == row.op else _gradients_from_output

    def primal(*args: Array | None, **options: Any) -> Array:
        return _forward(row, view_of, *args, **options)[0]  # type: ignore[arg-type]

    def fwd(wrt: Mask, *args: Array | None, **options: Any) -> tuple[Array, dict[str, Array]]:
        return _forward(row, view_of, *args, **options)  # type: ignore[arg-type]

    def bwd(
        g: Array,
        wrt: Mask,
        saved: Saved,
        shapes: Shapes,
        *,
        eps: float,
        use_fast_variance: bool = True,
        **options: Any,
    ) -> Grads:
        view = view_of(g.shape, **options)
        g = wide(g).reshape(view.shape)
        grads = {}
        if "bias" in wrt:
            grads["bias"] = view.per_feature(g).reshape(shapes["bias"].shape)
        if wrt <= {"bias"}:
            return grads
        return grads | gradients(view, centers, use_fast_variance, g, wrt, saved, shapes, eps)

    layout = CHANNELS_LAST if "c" in row.args["x"].split() else None
    return define(row, primal, bwd, fwd, layout=layout)


_layer_norm = _define(spec.LAYER_NORM, _of_features)
_layer_norm_from_output = _define(spec.LAYER_NORM_FROM_OUTPUT, _of_features)
_group_norm = _define(spec.GROUP_NORM, _of_groups)
_group_norm_from_output = _define(spec.GROUP_NORM_FROM_OUTPUT, _of_groups)
_instance_norm = _define(spec.INSTANCE_NORM, _of_channels)
_instance_norm_from_output = _define(spec.INSTANCE_NORM_FROM_OUTPUT, _of_channels)
_rms_norm = _define(spec.RMS_NORM, _of_features)
_rms_norm_from_output = _define(spec.RMS_NORM_FROM_OUTPUT, _of_features)


def layer_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-6,
    dtype: Any = None,
    use_fast_variance: bool = True,
) -> Array:
    """The layer of :class:`flax.nnx.LayerNorm`, as a function.

    Keeps ``x`` and two numbers per example for the gradients of ``x`` and ``scale``, nothing for
    that of ``bias``.

    Args:
        x: ``(*, i)`` of any real dtype.
        scale, bias: ``(i,)`` or ``None``.
        epsilon, dtype, use_fast_variance: As in :class:`flax.nnx.LayerNorm`.
    """
    options = {"eps": epsilon, "dtype": dtype, "use_fast_variance": use_fast_variance}
    return _layer_norm(x, scale, bias, **options)


def layer_norm_from_output(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-6,
    dtype: Any = None,
    use_fast_variance: bool = True,
) -> Array:
    """As :func:`layer_norm`. Keeps its output in place of ``x``; ``scale`` may have no zero."""
    options = {"eps": epsilon, "dtype": dtype, "use_fast_variance": use_fast_variance}
    return _layer_norm_from_output(x, scale, bias, **options)


def group_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    num_groups: int = 32,
    epsilon: float = 1e-6,
    dtype: Any = None,
    use_fast_variance: bool = True,
) -> Array:
    """The layer of :class:`flax.nnx.GroupNorm`, as a function.

    Keeps ``x`` and two numbers per example and group for the gradients of ``x`` and ``scale``,
    nothing for that of ``bias``.

    Args:
        x: ``(n, *, c)`` of any real dtype.
        scale, bias: ``(c,)`` or ``None``.
        num_groups, epsilon, dtype, use_fast_variance: As in :class:`flax.nnx.GroupNorm`.
    """
    options = {"num_groups": num_groups, "eps": epsilon, "dtype": dtype}
    return _group_norm(x, scale, bias, use_fast_variance=use_fast_variance, **options)


def group_norm_from_output(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    num_groups: int = 32,
    epsilon: float = 1e-6,
    dtype: Any = None,
    use_fast_variance: bool = True,
) -> Array:
    """As :func:`group_norm`. Keeps its output in place of ``x``; ``scale`` may have no zero."""
    options = {"num_groups": num_groups, "eps": epsilon, "dtype": dtype}
    return _group_norm_from_output(x, scale, bias, use_fast_variance=use_fast_variance, **options)


def instance_norm(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-6,
    dtype: Any = None,
    use_fast_variance: bool = True,
) -> Array:
    """The layer of :class:`flax.nnx.InstanceNorm`, as a function.

    Keeps ``x`` and two numbers per example and channel for the gradients of ``x`` and ``scale``,
    nothing for that of ``bias``.

    Args:
        x: ``(n, *, c)`` of any real dtype.
        scale, bias: ``(c,)`` or ``None``.
        epsilon, dtype, use_fast_variance: As in :class:`flax.nnx.InstanceNorm`.
    """
    options = {"eps": epsilon, "dtype": dtype, "use_fast_variance": use_fast_variance}
    return _instance_norm(x, None, None, scale, bias, **options)


def instance_norm_from_output(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-6,
    dtype: Any = None,
    use_fast_variance: bool = True,
) -> Array:
    """As :func:`instance_norm`. Keeps its output in place of ``x``; ``scale`` may have no zero."""
    options = {"eps": epsilon, "dtype": dtype, "use_fast_variance": use_fast_variance}
    return _instance_norm_from_output(x, None, None, scale, bias, **options)


def rms_norm(
    x: Array, scale: Array | None = None, *, epsilon: float = 1e-6, dtype: Any = None
) -> Array:
    """The layer of :class:`flax.nnx.RMSNorm`, as a function.

    Keeps ``x`` and a number per example.

    Args:
        x: ``(*, i)`` of any real dtype.
        scale: ``(i,)`` or ``None``.
        epsilon, dtype: As in :class:`flax.nnx.RMSNorm`.
    """
    return _rms_norm(x, scale, eps=epsilon, dtype=dtype)


def rms_norm_from_output(
    x: Array, scale: Array | None = None, *, epsilon: float = 1e-6, dtype: Any = None
) -> Array:
    """As :func:`rms_norm`. Keeps its output in place of ``x``; ``scale`` may have no zero."""
    return _rms_norm_from_output(x, scale, eps=epsilon, dtype=dtype)
