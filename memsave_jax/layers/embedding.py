"""Embeddings, which keep the indices: as they are, or in the smallest integers that hold them.

(Outside of jit, JAX keeps a copy of the indices, of 32 bits each.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from memsave import spec

from ..function import Grads, Mask, Saved, Shapes, define
from ..kernels import OFFSET, is_known


def _primal(weight: Array, indices: Array) -> Array:
    return jnp.take(weight, indices, axis=0)


def _fwd_compact(wrt: Mask, weight: Array, indices: Array) -> tuple[Array, dict[str, Array]]:
    # Negative indices count from the end.
    ids = indices.astype(jnp.int32) % weight.shape[0]
    dtype = OFFSET[spec.offset_bits(weight.shape[:1])]
    return _primal(weight, indices), {"ids": ids.astype(dtype)}


def _gradient(g: Array, indices: Array, shapes: Shapes) -> Grads:
    return {"weight": jax.linear_transpose(lambda w: _primal(w, indices), shapes["weight"])(g)[0]}


def _bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes) -> Grads:
    return _gradient(g, saved["indices"], shapes)


def _bwd_compact(g: Array, wrt: Mask, saved: Saved, shapes: Shapes) -> Grads:
    return _gradient(g, saved["ids"], shapes)


_embedding = define(spec.EMBEDDING, _primal, _bwd)
_embedding_compact = define(
    spec.EMBEDDING_COMPACT,
    _primal,
    _bwd_compact,
    _fwd_compact,
    stock_op=lambda weight, indices: (
        not is_known(weight.shape[:1]) or spec.offset_bits(weight.shape[:1]) not in OFFSET
    ),
)


def embedding(weight: Array, indices: Array) -> Array:
    """The layer of :class:`flax.nnx.Embed`, ``jnp.take(weight, indices, axis=0)``.

    Keeps the indices alone.

    Args:
        weight: ``(num_embeddings, features)``.
        indices: Integers, ``(*)``; negative ones count from the end.
    """
    return _embedding(weight, jnp.asarray(indices))


def embedding_compact(weight: Array, indices: Array) -> Array:
    """As :func:`embedding`, keeping a copy of the indices in the smallest integers that hold them:
    for where they are computed, and nobody else keeps them. They must not be too large.
    """
    return _embedding_compact(weight, jnp.asarray(indices))
