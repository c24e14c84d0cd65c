"""Losses. Cross-entropy keeps the logits, in their own dtype: backward normalizes them again.

Index legend: c classes, which are the last axis.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memsave import spec

from .._xla import as_kept, on_gpu
from ..function import Grads, Mask, Saved, Shapes, define, placed


def _as(dtype: Any, x: Array) -> Array:
    return x if dtype is None else x.astype(dtype)


def _largest(x: Array) -> Array:
    """Logit. (An infinite one counts as none: the loss of that class alone is not finite then.)"""
    largest = lax.stop_gradient(x.max(-1, keepdims=True))
    return jnp.where(jnp.isfinite(largest), largest, 0)


def _normalized(x: Array) -> tuple[Array, Array]:
    """Logits that are at most zero, and the logarithm of the sum of their exponentials."""
    x = x - lax.stop_gradient(x.max(-1, keepdims=True))
    return x, jnp.log(jnp.exp(x).sum(-1, keepdims=True))


def _of_targets(
    x: Array, target: Array, weight: Array | None, ignore_index: int
) -> tuple[Array, Array, Array]:
    """Which positions count, the class of each (any, if it does not), and that class's weight."""
    target = jnp.broadcast_to(target, jnp.broadcast_shapes(target.shape, x.shape[:-1]))
    if target.dtype.itemsize < 4:  # and may hold neither all classes nor ignore_index
        target = target.astype(jnp.int32)
    counts = target != ignore_index
    index = jnp.where(target < 0, target + x.shape[-1], target)  # as indices of arrays are
    # (Of those that are none, some would count from the end once more.)
    index = jnp.where(counts, jnp.where(index < 0, x.shape[-1], index), 0)
    of_target = jnp.ones((), x.dtype) if weight is None else weight[index]
    return counts, index, jnp.where(counts, of_target, jnp.zeros((), of_target.dtype))


def _primal(
    x: Array,
    target: Array,
    weight: Array | None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    dtype: Any = None,
) -> Array:
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight is {weight.shape}, not one of each of {x.shape[-1]} classes")
    x = _as(dtype, x)
    counts, index, of_target = _of_targets(x, target, weight, ignore_index)
    largest = _largest(x)
    log_sum = jnp.log(jnp.exp(x - largest).sum(-1, keepdims=True))
    # (Of x itself: XLA writes out what it is to look up elements of.)
    logp = jnp.take_along_axis(x, index[..., None], -1) - largest - log_sum
    loss = of_target * -logp[..., 0]
    if label_smoothing:
        smooth = _of_classes(log_sum - (x - largest), weight).sum(-1)
        loss = loss * (1 - label_smoothing) + smooth * (label_smoothing / x.shape[-1])
    loss = jnp.where(counts, loss, jnp.zeros((), loss.dtype))
    return _reduced(loss, of_target.sum(), reduction)


def _primal_of_probabilities(
    x: Array,
    target: Array,
    weight: Array | None,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    dtype: Any = None,
) -> Array:
    x, log_sum = _normalized(_as(dtype, x))
    loss = (_smoothed(target, weight, label_smoothing) * (log_sum - x)).sum(-1)
    return _reduced(loss, loss.size, reduction)


def _of_classes(array: Array, weight: Array | None) -> Array:
    return array if weight is None else array * weight


def _smoothed(q: Array, weight: Array | None, label_smoothing: float) -> Array:
    if label_smoothing:
        q = q * (1 - label_smoothing) + label_smoothing / q.shape[-1]
    return _of_classes(q, weight)


def _reduced(loss: Array, count: Any, reduction: str) -> Array:
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is none, mean or sum, not {reduction!r}")
    return loss.sum() / count if reduction == "mean" else loss.sum()


# The gradient of a loss -sum_c(q_c log p_c), of p = softmax(x), is p * sum_c(q_c) - q. Times the
# weights of the classes, q is 1 - label_smoothing for the target, and label_smoothing / c more for
# every class.


def _bwd(
    g: Array,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    dtype: Any = None,
) -> Grads:
    x, weight = _as(dtype, saved["x"]), saved["weight"]
    p = jnp.exp(x - _largest(x))  # but for a factor: an array that forward has, too
    total = p.sum(-1, keepdims=True)
    counts, index, of_target = _of_targets(p, saved["target"], weight, ignore_index)
    if reduction == "mean":
        g = g / of_target.sum()
    g = jnp.where(counts, g, jnp.zeros((), g.dtype))
    hard = (g * of_target * (1 - label_smoothing))[..., None]
    if not label_smoothing:
        return {"x": _summed(_plus(p * (hard / total), index, -hard), p.shape)}
    soft = (g * (label_smoothing / p.shape[-1]))[..., None]
    all_soft = soft * (p.shape[-1] if weight is None else weight.sum())
    dx = p * ((hard + all_soft) / total) - _of_classes(soft, weight)
    return {"x": _summed(_plus(dx, index, -hard), p.shape)}


def _plus(x: Array, index: Array, values: Array) -> Array:
    """``x`` and, at the indices, these values: on a GPU in the kernel that makes ``x``. XLA:CPU
    adds a few in place, but writes out anew what it compares the indices for.
    """
    if on_gpu():
        classes = lax.broadcasted_iota(index.dtype, x.shape, x.ndim - 1)
        return x + jnp.where(classes == index[..., None], values, jnp.zeros((), values.dtype))
    picked, pull = jax.vjp(lambda x: jnp.take_along_axis(x, index[..., None], -1), x)
    return x + pull(placed(values.astype(x.dtype), jax.typeof(picked)))[0]


def _bwd_of_probabilities(
    g: Array,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    dtype: Any = None,
) -> Grads:
    # (Otherwise XLA may keep what forward has computed of the logits.)
    x, log_sum = _normalized(_as(dtype, as_kept(saved["x"], effort=3)))
    p = jnp.exp(x - log_sum)
    q = _smoothed(saved["target"], saved["weight"], label_smoothing)
    q = jnp.broadcast_to(q, jnp.broadcast_shapes(p.shape, q.shape))
    if reduction == "mean":
        g = g / math.prod(q.shape[:-1])
    g = g[..., None] if g.ndim else g
    total = q.sum(-1, keepdims=True)
    q = q if p.shape[-1:] == q.shape[-1:] else total  # logits of one class broadcast, too
    return {"x": _summed(g * (p * total - q), p.shape)}


def _summed(array: Array, shape: tuple[int, ...]) -> Array:
    """Over the axes along which what has this shape was broadcast."""
    if array.shape == shape:
        return array
    like = jax.ShapeDtypeStruct(shape, array.dtype)
    return jax.linear_transpose(lambda x: jnp.broadcast_to(x, array.shape), like)(array)[0]


_cross_entropy = define(spec.CROSS_ENTROPY, _primal, _bwd, layout={"x": "n *s c", "target": "n *s"})
_cross_entropy_of_probabilities = define(
    spec.CROSS_ENTROPY_OF_PROBABILITIES,
    _primal_of_probabilities,
    _bwd_of_probabilities,
    layout={"x": "n *s c", "target": "n *s c"},
)


def cross_entropy(
    logits: Array,
    labels: Array,
    weight: Array | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "none",
    label_smoothing: float = 0.0,
    dtype: Any = None,
) -> Array:
    """As ``optax.softmax_cross_entropy_with_integer_labels``, or for labels that are floats
    ``optax.softmax_cross_entropy``, with the options of PyTorch.

    Keeps the logits, in their own dtype, and the labels.

    Args:
        logits: ``(*, c)``.
        labels: Indices of classes, ``(*)``, of which negative ones count from the end; or
            probabilities, ``(*, c)``. Either broadcast.
        weight: Of the classes, ``(c,)``.
        ignore_index: The label of positions that do not count. (Of indices only.)
        reduction: ``"none"``, ``"sum"``, or ``"mean"``: by the weights of what counts.
        label_smoothing: The part of a label that is spread over all classes.
        dtype: To compute in, and of the loss. Default: that of the logits.

    Returns:
        The losses, ``(*)``, or their sum or mean.

    Raises:
        ValueError: The axes of the arguments do not fit, or there is no such reduction.
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    options = {"reduction": reduction, "label_smoothing": label_smoothing, "dtype": dtype}
    if jnp.issubdtype(labels.dtype, jnp.floating):
        return _cross_entropy_of_probabilities(logits, labels, weight, **options)
    if labels.ndim != logits.ndim - 1:
        raise ValueError(f"labels {labels.shape} have not one axis less than logits {logits.shape}")
    return _cross_entropy(logits, labels, weight, ignore_index=ignore_index, **options)
