"""Padding by reflection, by replication, or around. JAX's own keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from memsave import spec

from ..function import define
from .conv import PAD_MODES


def _primal(x: Array, *, pad: Sequence[int], mode: str) -> Array:
    """``pad`` is ``(low, high)`` of the last axis, then of the one before it, and so on."""
    pairs = [*zip(pad[::2], pad[1::2], strict=True)]
    rest = [(0, 0)] * (x.ndim - len(pairs))
    return jnp.pad(x, [*rest, *reversed(pairs)], PAD_MODES[mode])


_pad = define(spec.PAD, _primal)


def pad(x: Array, pad: Sequence[int], mode: str = "reflect") -> Array:
    """As :func:`torch.nn.functional.pad` by ``"reflect"``, ``"replicate"``, ``"circular"``.

    Keeps nothing.

    Args:
        x: Any shape and dtype.
        pad: ``(low, high)`` of the last axis, then of the one before it, and so on.
    """
    if mode not in PAD_MODES:
        raise ValueError(f"mode is one of {[*PAD_MODES]}, not {mode!r}")
    return _pad(x, pad=pad, mode=mode)
