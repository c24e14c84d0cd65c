"""Dropout, ``y = x * kept / (1 - p)``, drawing the same numbers as Flax from the same key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memsave import spec

from ..function import Grads, Mask, Saved, Shapes, define
from ..kernels import pack, unpack


def _kept(like: Array, key: Any, p: float, broadcast_dims: Sequence[int] = ()) -> Array:
    drawn = list(like.shape)
    for axis in broadcast_dims:
        drawn[axis] = 1
    sharding = jax.typeof(like).sharding
    kept = jax.random.bernoulli(key, 1.0 - p, drawn, out_sharding=sharding)
    return jnp.broadcast_to(kept, like.shape)


def _apply(x: Array, kept: Array, p: float) -> Array:
    return lax.select(kept, x / (1.0 - p), jnp.zeros_like(x))


def _primal(x: Array, *, key: Any, p: float, broadcast_dims: Sequence[int] = ()) -> Array:
    return _apply(x, _kept(x, key, p, broadcast_dims), p)


def _fwd(wrt: Mask, x: Array, *, key: Any, p: float) -> tuple[Array, dict[str, Array]]:
    bits = pack(_kept(x, key, p))
    return _apply(x, unpack(bits, x.shape), p), {"kept": bits}


def _bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, *, p: float) -> Grads:
    return {"x": _apply(g, unpack(saved["kept"], g.shape), p)}


def _fwd_rng(
    wrt: Mask, x: Array, *, key: Any, p: float, broadcast_dims: Sequence[int] = ()
) -> tuple[Array, dict[str, Array]]:
    return _primal(x, key=key, p=p, broadcast_dims=broadcast_dims), {"rng_state": key}


def _bwd_rng(
    g: Array,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    p: float,
    broadcast_dims: Sequence[int] = (),
) -> Grads:
    return {"x": _apply(g, _kept(g, saved["rng_state"], p, broadcast_dims), p)}


_dropout = define(spec.DROPOUT, _primal, _bwd, _fwd)
_dropout_from_rng = define(spec.DROPOUT_FROM_RNG, _primal, _bwd_rng, _fwd_rng)


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
        return _dropout_from_rng(inputs, key=key, p=rate, broadcast_dims=tuple(broadcast_dims))
    return _dropout(inputs, key=key, p=rate)


def dropout_from_rng(inputs: Array, rate: float, key: Any, **options: Any) -> Array:
    """As :func:`dropout`. Keeps the key alone, and draws all numbers twice."""
    options.setdefault("broadcast_dims", ())
    if options.pop("deterministic", False) or rate in (0.0, 1.0):
        return dropout(inputs, rate, key, deterministic=rate != 1.0)
    return _dropout_from_rng(jnp.asarray(inputs), key=key, p=rate, **options)
