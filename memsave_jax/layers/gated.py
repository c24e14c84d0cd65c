"""Gated products ``y = f(gate) * up``. Stock keeps ``f(gate)`` besides ``gate`` and ``up``."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from memsave import spec
from memsave.spec import Layer

from .._xla import as_kept, on_gpu
from ..function import Function, Grads, Mask, Saved, Shapes, define
from .curve import gelu_primal


def _gated(row: Layer, activation: Function, effort: int) -> Function:
    def primal(gate: Array, up: Array, **options: Any) -> Array:
        return activation(gate, **options) * up

    def bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, **options: Any) -> Grads:
        gate = as_kept(saved["gate"], effort)
        grads = {}
        if "gate" in wrt:
            up = as_kept(saved["up"], effort)
            (grads["gate"],) = jax.vjp(lambda gate: primal(gate, up, **options), gate)[1](g)
        if "up" in wrt:
            # On a CPU, another barrier, or f(gate) would have two readers and be written out early.
            # (On a GPU both gradients are one kernel, which a barrier would part.)
            same = gate if on_gpu() else as_kept(gate, effort)
            transpose = jax.linear_transpose(lambda up: primal(same, up, **options), shapes["up"])
            (grads["up"],) = transpose(g)
        return grads

    return define(row, primal, bwd)


_swiglu = _gated(spec.SWIGLU, jax.nn.silu, effort=1)
_geglu = _gated(spec.GEGLU, gelu_primal, effort=3)


def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) * up``. Keeps ``gate`` and ``up``, or ``gate`` alone for the gradient of ``up``.

    Args:
        gate, up: Of one shape and any floating dtype.
    """
    return _swiglu(gate, up)


def geglu(gate: Array, up: Array, approximate: bool = True) -> Array:
    """``gelu(gate) * up``. Keeps ``gate`` and ``up``, or ``gate`` alone for the gradient of ``up``.

    Args:
        gate, up: Of one shape and any floating dtype.
        approximate: As in :func:`jax.nn.gelu`.
    """
    return _geglu(gate, up, approximate="tanh" if approximate else "none")
