"""Packing of booleans into bytes, along the last axis.

By shift and sum, which XLA fuses with what makes the booleans (``jnp.packbits`` is left unfused and
takes four times the memory). The other axes stay as they are, so that a sharded or batched array is
packed where it lies.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ._xla import on_gpu

#: Unsigned integers by their bits, for the smallest that hold an index.
OFFSET = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def shards_per_axis(x: Array) -> tuple[int, ...]:
    """Into how many parts each axis is sharded, by axes of a mesh that are ``Explicit``."""
    sharding = jax.typeof(x).sharding
    sizes = dict(sharding.mesh.shape)

    def count(entry: Any) -> int:
        names = entry if isinstance(entry, tuple) else (entry,)
        return math.prod(sizes.get(name, 1) for name in names)

    return tuple(map(count, sharding.spec))


def is_packable(x: Array) -> bool:
    """Whether the parts of the last axis are whole bytes, as far as JAX asks. (Of a size that is
    not known, JAX cannot tell.)
    """
    if not jnp.ndim(x):
        return True
    count = shards_per_axis(x)[-1]
    return is_known(x.shape[-1:]) and (count == 1 or x.shape[-1] % (8 * count) == 0)


def is_known(shape: tuple[Any, ...]) -> bool:
    """Whether no size is a symbol, as those of ``jax.export`` may be."""
    return all(isinstance(size, int) for size in shape)


def pack(booleans: Array) -> Array:
    """Eight booleans per byte: ``(*n, size) -> (*n, ceil(size / 8))``, uint8. ``() -> (1,)``."""
    padded = _in_bytes(booleans)
    bits = padded.reshape(*padded.shape[:-1], padded.shape[-1] // 8, 8).astype(jnp.uint8)
    return jnp.sum(bits << _bit_positions(bits.ndim), axis=-1, dtype=jnp.uint8)


def by_bits(booleans: Array) -> tuple[Array, Array]:
    """The same, read from the bits, and these.

    For an output that is to be computed from them. Packing and the output are two loops, or
    kernels: XLA would compute (or draw) the booleans for each, or write them out; and it may put
    off the packing, and what they are computed from lives until then.
    """
    bits = pack(booleans)
    return unpack(bits, booleans.shape), bits


def with_bits(booleans: Array) -> tuple[Array, Array]:
    """The same, of booleans that take no more than a comparison.

    On a GPU, XLA makes one kernel of the output and of the sum in :func:`pack`.
    """
    return (booleans, pack(booleans)) if on_gpu() else by_bits(booleans)


def _in_bytes(booleans: Array) -> Array:
    """Padded to whole ones, along an axis at least."""
    if not booleans.ndim:
        booleans = booleans[None]
    rest = [(0, 0)] * (booleans.ndim - 1)
    return jnp.pad(booleans, [*rest, (0, -booleans.shape[-1] % 8)])


def unpack(packed: Array, shape: tuple[int, ...]) -> Array:
    """The booleans of this shape."""
    bits = (packed[..., None] >> _bit_positions(packed.ndim + 1)) & jnp.uint8(1)
    bits = bits.reshape(*packed.shape[:-1], packed.shape[-1] * 8).astype(bool)
    return bits[..., : shape[-1]] if shape else bits[0]


def _bit_positions(ndim: int) -> Array:
    """Along the last of so many axes. (Of one alone ``jax.numpy_rank_promotion`` may complain.)"""
    return jnp.arange(8, dtype=jnp.uint8).reshape(*[1] * (ndim - 1), 8)
