"""Activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from memsave import spec

from ..function import Grads, Mask, Saved, Shapes, define
from ..kernels import pack, unpack


def _relu_fwd(wrt: Mask, x: Array) -> tuple[Array, dict[str, Array]]:
    x = jnp.asarray(x)
    positive = pack(x > 0)
    # y is computed from the bits. Otherwise XLA may put off the packing, and x lives until then.
    # (Elsewhere y is 0 or nan, and, as in stock, constant.)
    constant = lax.stop_gradient(jax.nn.relu(x))
    return jnp.where(unpack(positive, x.shape), x, constant), {"positive": positive}


def _relu_bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes) -> Grads:
    return {"x": jnp.where(unpack(saved["positive"], g.shape), g, jnp.zeros_like(g))}


def _relu_from_output_bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes) -> Grads:
    return {"x": jnp.where(saved["y"] > 0, g, jnp.zeros_like(g))}


_relu = define(spec.RELU, jax.nn.relu, _relu_bwd, _relu_fwd)
_relu_from_output = define(spec.RELU_FROM_OUTPUT, jax.nn.relu, _relu_from_output_bwd)


def relu(x: Array) -> Array:
    """As :func:`jax.nn.relu`. Keeps one bit per element.

    Args:
        x: Any shape and real dtype.
    """
    return _relu(x)


def relu_from_output(x: Array) -> Array:
    """As :func:`jax.nn.relu`. Keeps its output: free where the next layer keeps it anyway."""
    return _relu_from_output(x)
