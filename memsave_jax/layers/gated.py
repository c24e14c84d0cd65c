"""Gated products ``y = f(gate) * up``. Stock keeps ``f(gate)`` besides ``gate`` and ``up``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax

from memsave import spec
from memsave.spec import Layer

from ..function import Grads, Mask, Saved, Shapes, define

Function = Callable[..., Any]


def _gated(row: Layer, activation: Function) -> Function:
    def primal(gate: Array, up: Array, **options: Any) -> Array:
        return activation(gate, **options) * up

    def bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, **options: Any) -> Grads:
        # Behind a barrier, XLA does not see what forward computed already, and so does not keep it.
        gate = lax.optimization_barrier(saved["gate"])
        grads = {}
        if "gate" in wrt:
            up = lax.optimization_barrier(saved["up"])
            (grads["gate"],) = jax.vjp(lambda gate: primal(gate, up, **options), gate)[1](g)
        if "up" in wrt:
            # Another barrier, or f(gate) would have two readers and be written out early.
            same = lax.optimization_barrier(gate)
            transpose = jax.linear_transpose(lambda up: primal(same, up, **options), shapes["up"])
            (grads["up"],) = transpose(g)
        return grads

    return define(row, primal, bwd)


def _gelu(x: Array, *, approximate: str = "tanh") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


_swiglu = _gated(spec.SWIGLU, jax.nn.silu)
_geglu = _gated(spec.GEGLU, _gelu)


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
