"""Gated products ``y = f(gate) * up``. Stock keeps ``f(gate)`` besides ``gate`` and ``up``."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from memsave import spec
from memsave.spec import Layer

from .._xla import as_kept
from ..function import Function, Grads, Mask, Saved, Shapes, define
from .curve import gelu_again, gelu_primal


def _gated(row: Layer, activation: Function, again: Function) -> Function:
    """(The gradients are those of the same activation, written ``again``.)"""

    def primal(gate: Array, up: Array, **options: Any) -> Array:
        return activation(gate, **options) * up

    def bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, **options: Any) -> Grads:
        def curve(gate: Array, up: Array) -> Array:
            return again(gate, **options) * up

        gate = as_kept(saved["gate"], 1)
        grads = {}
        if "gate" in wrt:
            up = as_kept(saved["up"], 1)
            (grads["gate"],) = jax.vjp(lambda gate: curve(gate, up), gate)[1](g)
        if "up" in wrt:
            # Another barrier, or f(gate) would have two readers and be written out early.
            same = as_kept(gate, 1)
            transpose = jax.linear_transpose(lambda up: curve(same, up), shapes["up"])
            (grads["up"],) = transpose(g)
        return grads

    return define(row, primal, bwd)


_swiglu = _gated(spec.SWIGLU, jax.nn.silu, again=jax.nn.silu)
_geglu = _gated(spec.GEGLU, gelu_primal, again=gelu_again)


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
