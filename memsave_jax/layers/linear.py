"""Linear layers. JAX's own already keep just what the row says, for every mask.

Index legend: i input features, o output features.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from memsave import spec

from ..function import define


def _primal(x: Array, weight: Array, bias: Array | None, **options: Any) -> Array:
    contracted = (((x.ndim - 1,), (0,)), ((), ()))
    y = lax.dot_general(x, weight, contracted, **options)
    return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))


_linear = define(spec.LINEAR, _primal, layout={"weight": "i o"})


def linear(
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    """The layer of :class:`flax.nnx.Linear`, ``inputs @ kernel + bias``, in their promoted dtype.

    Keeps the kernel for the gradient of the inputs, the inputs for the gradient of the kernel,
    nothing for that of the bias.

    Args:
        inputs: ``(*, in_features)``.
        kernel: ``(in_features, out_features)``.
        bias: ``(out_features,)``.
        precision, preferred_element_type: As in :func:`jax.lax.dot_general`.
    """
    return _linear(
        inputs, kernel, bias, precision=precision, preferred_element_type=preferred_element_type
    )
