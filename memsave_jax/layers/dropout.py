"""Dropout, ``y = x * kept / (1 - p)``, drawing the same numbers as Flax from the same key.

Of single elements, of whole channels (feature dropout), or such that mean and variance stay as they
are (alpha dropout, for SELU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memsave import spec

from ..function import Grads, Mask, Saved, Shapes, define
from ..kernels import by_bits, pack, unpack


def _drawn(like: Array, key: Any, p: float, broadcast_dims: Sequence[int] = ()) -> Array:
    drawn = list(like.shape)
    for axis in broadcast_dims:
        drawn[axis] = 1
    sharding = jax.typeof(like).sharding
    return jax.random.bernoulli(key, 1.0 - p, drawn, out_sharding=sharding)


def _kept(like: Array, key: Any, p: float, broadcast_dims: Sequence[int] = ()) -> Array:
    return jnp.broadcast_to(_drawn(like, key, p, broadcast_dims), like.shape)


def _apply(x: Array, kept: Array, p: float) -> Array:
    return lax.select(kept, x / (1.0 - p), jnp.zeros_like(x))


def _transposed(g: Array, kept: Array, p: float) -> Array:
    """Of :func:`_apply`, in the order of stock's operations, for the last bit."""
    return lax.select(kept, g, jnp.zeros_like(g)) / (1.0 - p)


def _primal(x: Array, *, key: Any, p: float, broadcast_dims: Sequence[int] = ()) -> Array:
    return _apply(x, _kept(x, key, p, broadcast_dims), p)


def _fwd(wrt: Mask, x: Array, *, key: Any, p: float) -> tuple[Array, dict[str, Array]]:
    kept, bits = by_bits(_kept(x, key, p))
    return _apply(x, kept, p), {"kept": bits}


def _bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, *, p: float) -> Grads:
    return {"x": _transposed(g, unpack(saved["kept"], g.shape), p)}


def _fwd_rng(
    wrt: Mask, x: Array, *, key: Any, p: float, broadcast_dims: Sequence[int] = ()
) -> tuple[Array, dict[str, Array]]:
    again = jax.random.clone(key)  # which jax.debug_key_reuse asks for
    return _primal(x, key=key, p=p, broadcast_dims=broadcast_dims), {"rng_state": again}


def _bwd_rng(
    g: Array,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    p: float,
    broadcast_dims: Sequence[int] = (),
) -> Grads:
    return {"x": _transposed(g, _kept(g, saved["rng_state"], p, broadcast_dims), p)}


def _of_channels(like: Any) -> tuple[int, ...]:
    """The axes between the first and the last: their elements share their fate."""
    return tuple(range(1, like.ndim - 1))


def _primal_feature(x: Array, *, key: Any, p: float) -> Array:
    return _primal(x, key=key, p=p, broadcast_dims=_of_channels(x))


def _fwd_feature(wrt: Mask, x: Array, *, key: Any, p: float) -> tuple[Array, dict[str, Array]]:
    drawn = _drawn(x, key, p, _of_channels(x))
    bits = pack(drawn.reshape(_each_channel(x)))
    return _apply(x, _spread(bits, x), p), {"kept": bits}


def _bwd_feature(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, *, p: float) -> Grads:
    return {"x": _transposed(g, _spread(saved["kept"], g), p)}


def _each_channel(like: Array) -> tuple[int, ...]:
    """The shape of one for each channel."""
    return like.shape[:1] + like.shape[1:][-1:]


def _spread(bits: Array, like: Array) -> Array:
    kept = unpack(bits, _each_channel(like))
    return jnp.broadcast_to(jnp.expand_dims(kept, _of_channels(like)), like.shape)


#: What SELU tends to: what dropped elements become, before they are scaled.
ALPHA = -1.7580993408473766


def _scale(p: float) -> float:
    """The factor that restores the variance of 1."""
    return ((1 - p) * (1 + p * ALPHA**2)) ** -0.5


def _apply_alpha(x: Array, kept: Array, p: float) -> Array:
    scale = _scale(p)
    shift = -scale * ALPHA * p
    return jnp.where(kept, scale * x + shift, jnp.asarray(scale * ALPHA + shift, x.dtype))


def _primal_alpha(x: Array, *, key: Any, p: float) -> Array:
    return _apply_alpha(x, _kept(x, key, p), p)


def _fwd_alpha(wrt: Mask, x: Array, *, key: Any, p: float) -> tuple[Array, dict[str, Array]]:
    kept, bits = by_bits(_kept(x, key, p))
    return _apply_alpha(x, kept, p), {"kept": bits}


def _bwd_alpha(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, *, p: float) -> Grads:
    kept = unpack(saved["kept"], g.shape)
    return {"x": _scale(p) * lax.select(kept, g, jnp.zeros_like(g))}


_dropout = define(spec.DROPOUT, _primal, _bwd, _fwd)
_dropout_from_rng = define(spec.DROPOUT_FROM_RNG, _primal, _bwd_rng, _fwd_rng)
_feature_dropout = define(
    spec.FEATURE_DROPOUT,
    _primal_feature,
    _bwd_feature,
    _fwd_feature,
    layout={"x": "n *s c", "y": "n *s c"},
)
_alpha_dropout = define(spec.ALPHA_DROPOUT, _primal_alpha, _bwd_alpha, _fwd_alpha)


def dropout(
    inputs: Array,
    rate: float,
    key: Any,
    *,
    broadcast_dims: Sequence[int] = (),
    deterministic: bool = False,
) -> Array:
    """The layer of :class:`flax.nnx.Dropout`, with the same random numbers.

    Keeps one bit per element; with ``broadcast_dims`` the key alone, as the few numbers that are
    shared are drawn again at little cost.

    Args:
        inputs: Any shape and floating dtype.
        rate: Probability of an element to be zeroed.
        key: A PRNG key, typed or raw.
        broadcast_dims: Axes along which all elements share their fate.
        deterministic: Return the inputs as they are.
    """
    inputs = jnp.asarray(inputs)
    if deterministic or rate == 0.0:
        return inputs
    if rate == 1.0:
        return jnp.zeros_like(inputs)
    if broadcast_dims:
        return dropout_from_rng(inputs, rate, key, broadcast_dims=broadcast_dims)
    return _dropout(inputs, key=key, p=rate)


def dropout_from_rng(
    inputs: Array,
    rate: float,
    key: Any,
    *,
    broadcast_dims: Sequence[int] = (),
    deterministic: bool = False,
) -> Array:
    """As :func:`dropout`. Keeps the key alone, and draws all numbers twice."""
    if deterministic or rate in (0.0, 1.0):
        return dropout(inputs, rate, key, deterministic=deterministic)
    inputs, dims = jnp.asarray(inputs), tuple(broadcast_dims)
    return _dropout_from_rng(inputs, key=key, p=rate, broadcast_dims=dims)


def feature_dropout(inputs: Array, rate: float, key: Any, *, deterministic: bool = False) -> Array:
    """Dropout of whole channels. Keeps one bit per example and channel.

    Args:
        inputs: ``(n, *, c)`` of any floating dtype.
        rate: Probability of a channel to be zeroed.
        key: A PRNG key, typed or raw.
        deterministic: Return the inputs as they are.
    """
    if deterministic or rate in (0.0, 1.0):
        return dropout(inputs, rate, key, deterministic=deterministic)
    return _feature_dropout(jnp.asarray(inputs), key=key, p=rate)


def alpha_dropout(inputs: Array, rate: float, key: Any, *, deterministic: bool = False) -> Array:
    """As :func:`torch.nn.functional.alpha_dropout`. Keeps one bit per element.

    Args:
        inputs: Any shape and floating dtype; of mean 0 and variance 1, and so is the result.
        rate: Probability of an element to be dropped.
        key: A PRNG key, typed or raw.
        deterministic: Return the inputs as they are.
    """
    if deterministic or rate in (0.0, 1.0):
        return dropout(inputs, rate, key, deterministic=deterministic)
    return _alpha_dropout(jnp.asarray(inputs), key=key, p=rate)
