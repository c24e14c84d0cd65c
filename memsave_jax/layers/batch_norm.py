"""Batch normalization, ``y = (x - mean) * rstd * weight + bias`` per feature.

With the running statistics ``y`` is affine in ``x``: its gradient needs no activation. With those
of the batch, the gradient is affine in the incoming one, ``A * g + B * x + C`` with one value of
each per feature; no array of the size of ``x`` is made from ``x`` alone, which XLA could keep.

Index legend: n batch, c features, of which the statistics and parameters have one value each.
Features are the last axis, or those that the option ``axis`` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from memsave import spec

from ..function import Grads, Mask, Saved, Shapes, define
from .shape import as_tuple

Axes = int | Sequence[int]


class _Axes:
    """Which axes are features, and how a value per feature broadcasts against ``x``."""

    def __init__(self, shape: tuple[int, ...], axis: Axes) -> None:
        features = sorted(
            {range(len(shape))[a] for a in as_tuple(axis)}
        )  # or an IndexError, as stock
        self.reduced = tuple(a for a in range(len(shape)) if a not in features)
        self.shape = tuple(s if a in features else 1 for a, s in enumerate(shape))
        self.count = math.prod(shape[a] for a in self.reduced)

    def spread(self, vector: Array) -> Array:
        """To the shape that broadcasts."""
        return vector.reshape(self.shape)


def _statistics(
    x: Array,
    axes: _Axes,
    dtype: Any,
    use_fast_variance: bool,
    mask: Array | None = None,
    axis_name: Any = None,
    axis_index_groups: Any = None,
) -> tuple[Array, Array]:
    """Mean and variance per feature, in at least float32, as Flax computes them."""
    x = jnp.asarray(x, jnp.promote_types(dtype or x.dtype, jnp.float32))

    def means(*arrays: Array) -> Sequence[Array]:
        here = [array.mean(axes.reduced, where=mask) for array in arrays]
        if axis_name is None:
            return here
        return list(lax.pmean(jnp.stack(here), axis_name, axis_index_groups=axis_index_groups))

    if use_fast_variance:
        mean, mean_square = means(x, squared(x))
        return mean, jnp.maximum(0.0, mean_square - squared(mean))
    (mean,) = means(x)
    (var,) = means(squared(x - jnp.expand_dims(mean, axes.reduced)))
    return mean, var


def squared(x: Array) -> Array:
    """Of the absolute value."""
    if jnp.iscomplexobj(x):
        return lax.square(lax.real(x)) + lax.square(lax.imag(x))
    return lax.square(x)


def _normalize(
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    bias: Array | None,
    axes: _Axes,
    dtype: Any,
) -> Array:
    # The order of the operations is Flax's, for the last bit.
    scale = rstd if weight is None else rstd * axes.spread(weight)
    y = (x - axes.spread(mean)) * scale
    if bias is not None:
        y = y + axes.spread(bias)
    present = [array for array in (x, weight, bias) if array is not None]
    return jnp.asarray(y, dtype or jnp.result_type(*present))


def _primal_eval(
    x: Array,
    mean: Array,
    var: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    axis: Axes = -1,
    dtype: Any = None,
) -> Array:
    axes = _Axes(x.shape, axis)
    rstd = lax.rsqrt(axes.spread(var) + eps)
    return _normalize(x, mean, rstd, weight, bias, axes, dtype)


def _fwd_train(
    wrt: Mask,
    x: Array,
    running_mean: Array | None,
    running_var: Array | None,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    axis: Axes = -1,
    dtype: Any = None,
    use_fast_variance: bool = True,
    **others: Any,
) -> tuple[tuple[Array, Array, Array], dict[str, Array]]:
    axes = _Axes(x.shape, axis)
    mean, var = _statistics(x, axes, dtype, use_fast_variance, **others)
    rstd = lax.rsqrt(axes.spread(var) + eps)
    y = _normalize(x, mean, rstd, weight, bias, axes, dtype)
    return (y, mean, var), {"mean": mean, "rstd": rstd.reshape(mean.shape)}


def _primal_train(*args: Array | None, **options: Any) -> tuple[Array, Array, Array]:
    return _fwd_train(frozenset(), *args, **options)[0]  # type: ignore[arg-type]


def wide(array: Array) -> Array:
    """In the dtype of statistics and sums: at least float32."""
    return array.astype(jnp.float32) if array.dtype.itemsize < 4 else array


def is_clipped(rstd: Array, eps: float) -> Array:
    """Where the fast variance, a difference, came out negative: it is 0 then, and so is what passes
    through it. ``rstd`` tells, with no bit more kept. (So do variances that it cannot tell from 0.
    There third derivatives are not stock's, which are not those of the function either.)
    """
    return rstd * math.sqrt(max(eps, 0)) >= 1 - 4 * jnp.finfo(rstd.dtype).eps


def _bwd_eval(
    g: Array,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    eps: float,
    axis: Axes = -1,
    **_: Any,
) -> Grads:
    axes = _Axes(g.shape, axis)
    g = wide(g)
    grads = {}
    if "x" in wrt:
        scale = lax.rsqrt(wide(saved["running_var"]) + eps)
        scale = scale if saved["weight"] is None else scale * wide(saved["weight"])
        grads["x"] = g * axes.spread(scale)
    if "weight" in wrt:
        rstd = lax.rsqrt(wide(saved["running_var"]) + eps)
        centered = wide(saved["x"]) - axes.spread(wide(saved["running_mean"]))
        grads["weight"] = ((g * centered).sum(axes.reduced) * rstd).reshape(shapes["weight"].shape)
    if "bias" in wrt:
        grads["bias"] = g.sum(axes.reduced).reshape(shapes["bias"].shape)
    return grads


def _bwd_train(
    g: tuple[Array, Array, Array],
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    eps: float,
    axis: Axes = -1,
    use_fast_variance: bool = True,
    **_: Any,
) -> Grads:
    gy, g_mean, g_var = g
    axes = _Axes(gy.shape, axis)
    gy = wide(gy)
    total = gy.sum(axes.reduced)  # the gradient of bias
    grads = {}
    if "bias" in wrt:
        grads["bias"] = total.reshape(shapes["bias"].shape)
    if wrt == {"bias"}:
        return grads
    rstd = saved["rstd"]
    # As stable as forward: with the fast variance, mean and spread of x are told apart at the end.
    x, mean = saved["x"].astype(gy.dtype), saved["mean"]
    if not use_fast_variance:
        x, mean = x - axes.spread(mean), jnp.zeros_like(mean)
    correlation = ((gy * x).sum(axes.reduced) - mean * total) * rstd  # the gradient of weight
    if "weight" in wrt:
        grads["weight"] = correlation.reshape(shapes["weight"].shape)
    if "x" in wrt:
        scale = rstd if saved["weight"] is None else rstd * saved["weight"].reshape(rstd.shape)
        slope = (2 * g_var - scale * rstd * correlation) / axes.count
        if use_fast_variance:
            slope = jnp.where(is_clipped(rstd, eps), 0, slope)
        constant = (g_mean - scale * total) / axes.count - slope * mean
        grads["x"] = axes.spread(scale) * gy + axes.spread(slope) * x + axes.spread(constant)
    return grads


def _of_other_elements(*args: Any, axis_name: Any = None, mask: Any = None, **_: Any) -> bool:
    """Whether the statistics are those of more, or of fewer, elements than ``x`` has."""
    return axis_name is not None or mask is not None


LAYOUT = {"x": "n *s c", "y": "n *s c"}
_batch_norm_eval = define(spec.BATCH_NORM_EVAL, _primal_eval, _bwd_eval, layout=LAYOUT)
_batch_norm_train = define(
    spec.BATCH_NORM_TRAIN,
    _primal_train,
    _bwd_train,
    _fwd_train,
    layout=LAYOUT,
    stock_op=_of_other_elements,
)


def batch_norm(
    x: Array,
    mean: Array | None,
    var: Array | None,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    use_running_average: bool,
    axis: Axes = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-5,
    dtype: Any = None,
    use_fast_variance: bool = True,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    mask: Array | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """The layer of :class:`flax.linen.BatchNorm`, as a function. (In :mod:`flax.nnx`, ``y`` has the
    dtype of the running statistics if that is wider.)

    With the running average it keeps ``x`` only for the gradient of ``scale``; with the statistics
    of the batch it keeps ``x`` and two vectors for the gradients of ``x`` and ``scale``; nothing
    for that of ``bias``. With ``axis_name`` or ``mask`` it is stock.

    Args:
        x: ``(n, *, c)``, or with ``c`` where ``axis`` says; of several axes, ``c`` is their sizes.
        mean, var: The running statistics, ``(c,)``; may be ``None`` where those of the batch are
            used.
        scale, bias: ``(c,)`` or ``None``.
        use_running_average, axis, momentum, epsilon, dtype, use_fast_variance, axis_name,
            axis_index_groups, mask: As in :class:`flax.linen.BatchNorm`.

    Returns:
        ``y`` and the running statistics, updated where those of the batch are used.
    """
    options = {"eps": epsilon, "axis": axis, "dtype": dtype}
    if use_running_average:
        return _batch_norm_eval(x, mean, var, scale, bias, **options), mean, var
    y, batch_mean, batch_var = _batch_norm_train(
        x,
        None,
        None,
        scale,
        bias,
        **options,
        use_fast_variance=use_fast_variance,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        mask=mask,
    )

    def update(running: Array | None, batch: Array) -> Array | None:
        return None if running is None else momentum * running + (1 - momentum) * batch

    return y, update(mean, batch_mean), update(var, batch_var)
