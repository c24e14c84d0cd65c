"""Activations that are linear in pieces: their gradients read one bit per element.

Each says where the gradient passes as stock's does, nan and the kinks included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memsave import spec
from memsave.spec import Layer

from .._xla import on_gpu
from ..function import Function, Grads, Mask, Saved, Shapes, define, is_number
from ..kernels import unpack, with_bits


def _same(x: Array, **options: Any) -> Array:
    return x


def _selecting(
    row: Layer,
    primal: Function,
    passes: Function,
    through: Function = _same,
    scaled: Function = _same,
) -> Function:
    """``y = through(x)`` where ``passes(x)``, with the gradient ``scaled(g)``; else constant."""
    (extra,) = row.extras

    def fwd(wrt: Mask, x: Array, **options: Any) -> tuple[Array, dict[str, Array]]:
        x = jnp.asarray(x)
        y = primal(x, **options)
        chosen, bits = with_bits(passes(x, **options))
        if not on_gpu():  # (where a product may compute y as it reads it, if it is as simple)
            # What is not chosen is a bound or nan, and, as in stock, constant.
            y = jnp.where(chosen, through(x, **options), lax.stop_gradient(y))
        return y, {extra: bits}

    def bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, **options: Any) -> Grads:
        return {"x": jnp.where(unpack(saved[extra], g.shape), scaled(g), jnp.zeros_like(g))}

    return define(row, primal, bwd, fwd)


def _relu_from_output_bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes) -> Grads:
    return {"x": jnp.where(saved["y"] > 0, g, jnp.zeros_like(g))}


def _hardtanh_primal(x: Array, *, min_val: float = -1.0, max_val: float = 1.0) -> Array:
    if (min_val, max_val) == (-1, 1):
        return jax.nn.hard_tanh(x)
    return jnp.where(x > max_val, max_val, jnp.where(x < min_val, min_val, x))


def _inside(x: Array, *, min_val: float = -1.0, max_val: float = 1.0) -> Array:
    return ~((x > max_val) | (x < min_val))  # nan passes


def _exceeds(x: Array, *, threshold: float, value: float) -> Array:
    return ~(x <= threshold)  # nan passes


def _threshold_primal(x: Array, *, threshold: float, value: float) -> Array:
    return jnp.where(x <= threshold, value, x)


def _outside(x: Array, *, lambd: float = 0.5) -> Array:
    return ~((x >= -lambd) & (x <= lambd))  # nan passes


def _hardshrink_primal(x: Array, *, lambd: float = 0.5) -> Array:
    return jnp.where(_outside(x, lambd=lambd), x, 0)


def _shrunk(x: Array, *, lambd: float = 0.5) -> Array:
    return x - jnp.where(x > 0, lambd, -lambd)


def _softshrink_primal(x: Array, *, lambd: float = 0.5) -> Array:
    return jnp.where(_outside(x, lambd=lambd), _shrunk(x, lambd=lambd), 0)


_relu = _selecting(spec.RELU, jax.nn.relu, lambda x: x > 0)
_relu_from_output = define(spec.RELU_FROM_OUTPUT, jax.nn.relu, _relu_from_output_bwd)
_relu6 = _selecting(spec.RELU6, jax.nn.relu6, lambda x: (x > 0) & (x < 6))
_hardtanh = _selecting(spec.HARDTANH, _hardtanh_primal, _inside)
_threshold = _selecting(spec.THRESHOLD, _threshold_primal, _exceeds)
_hardsigmoid = _selecting(
    spec.HARDSIGMOID,
    jax.nn.hard_sigmoid,
    lambda x: (x + 3.0 > 0) & (x + 3.0 < 6),
    lambda x: (x + 3.0) / 6.0,
    lambda g: g / 6.0,
)
_hardshrink = _selecting(spec.HARDSHRINK, _hardshrink_primal, _outside)
_softshrink = _selecting(spec.SOFTSHRINK, _softshrink_primal, _outside, _shrunk)


def _sloped(g: Array, positive: Array, slope: Any) -> Array:
    """A sum of two, as stock's: it is its own transpose, down to the sign of zero."""
    zero = jnp.zeros_like(g)
    return jnp.where(positive, g, zero) + slope * jnp.where(positive, zero, g)


def _leaky_relu_fwd(
    wrt: Mask, x: Array, *, negative_slope: float = 0.01
) -> tuple[Array, dict[str, Array]]:
    x = jnp.asarray(x)
    positive, bits = with_bits(x >= 0)
    return jnp.where(positive, x, negative_slope * x), {"positive": bits}


def _leaky_relu_bwd(
    g: Array, wrt: Mask, saved: Saved, shapes: Shapes, *, negative_slope: float = 0.01
) -> Grads:
    return {"x": _sloped(g, unpack(saved["positive"], g.shape), negative_slope)}


_leaky_relu = define(spec.LEAKY_RELU, jax.nn.leaky_relu, _leaky_relu_bwd, _leaky_relu_fwd)


def _slopes(x: Array, weight: Array) -> Array:
    """One for all elements of ``x``, or one per channel."""
    if weight.size != 1 and weight.shape != x.shape[-1:]:
        raise ValueError(f"{weight.shape} slopes for an input of shape {x.shape}")
    shape = () if weight.size == 1 else (*[1] * (x.ndim - 1), weight.size)
    return jnp.asarray(weight.reshape(shape), x.dtype)


def _prelu_primal(x: Array, weight: Array) -> Array:
    return jnp.where(x >= 0, x, _slopes(x, weight) * x)


def _prelu_fwd(wrt: Mask, x: Array, weight: Array) -> tuple[Array, dict[str, Array]]:
    positive, bits = with_bits(x >= 0)
    return jnp.where(positive, x, _slopes(x, weight) * x), {"positive": bits}


def _prelu_bwd(
    positive: Callable[[Saved, tuple[int, ...]], Array],
    g: Array,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
) -> Grads:
    grads = {}
    if "x" in wrt:
        grads["x"] = _sloped(g, positive(saved, g.shape), _slopes(g, saved["weight"]))
    if "weight" in wrt and 0 in g.shape:
        # (A zero that in a shard_map may differ between devices, as g may.)
        grads["weight"] = jnp.broadcast_to(
            g.sum().astype(shapes["weight"].dtype), shapes["weight"].shape
        )
    elif "weight" in wrt:
        x = saved["x"]
        transpose = jax.linear_transpose(lambda w: _slopes(g, w) * x, shapes["weight"])
        (grads["weight"],) = transpose(jnp.where(x >= 0, jnp.zeros((), g.dtype), g))
    return grads


def _define_prelu(row: Layer, positive: Function, fwd: Function | None) -> Function:
    def bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes) -> Grads:
        return _prelu_bwd(positive, g, wrt, saved, shapes)

    layout = {"x": "n *s c", "y": "n *s c", **dict.fromkeys(row.extras, "n *s c")}
    return define(row, _prelu_primal, bwd, fwd, layout=layout, stock_op=_of_integers)


def _of_integers(x: Array, weight: Array) -> bool:
    """Which have no gradient to take that of the slope from."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


_prelu = _define_prelu(
    spec.PRELU, lambda saved, shape: unpack(saved["positive"], shape), _prelu_fwd
)
_prelu_from_input = _define_prelu(spec.PRELU_FROM_INPUT, lambda saved, shape: saved["x"] >= 0, None)


def relu(x: Array) -> Array:
    """As :func:`jax.nn.relu`. Keeps one bit per element.

    Args:
        x: Any shape and real dtype.
    """
    return _relu(x)


def relu_from_output(x: Array) -> Array:
    """As :func:`jax.nn.relu`. Keeps its output: free where the next layer keeps it anyway."""
    return _relu_from_output(x)


def leaky_relu(x: Array, negative_slope: Any = 1e-2) -> Array:
    """As :func:`jax.nn.leaky_relu`. Keeps one bit per element.

    Args:
        x: Any shape and real dtype.
        negative_slope: The slope for negative elements. With an array it is stock.
    """
    if not is_number(negative_slope):
        return jax.nn.leaky_relu(x, negative_slope)
    return _leaky_relu(x, negative_slope=negative_slope)


def relu6(x: Array) -> Array:
    """As :func:`jax.nn.relu6`. Keeps one bit per element."""
    return _relu6(x)


def hard_tanh(x: Array) -> Array:
    """As :func:`jax.nn.hard_tanh`. Keeps one bit per element."""
    return _hardtanh(x)


def hard_sigmoid(x: Array) -> Array:
    """As :func:`jax.nn.hard_sigmoid`. Keeps one bit per element."""
    return _hardsigmoid(x)


def threshold(x: Array, threshold: float, value: float) -> Array:
    """As :func:`torch.nn.functional.threshold`: ``x``, or ``value``.

    Keeps one bit per element.
    """
    return _threshold(x, threshold=threshold, value=value)


def hard_shrink(x: Array, lambd: float = 0.5) -> Array:
    """As :func:`torch.nn.functional.hardshrink`. Keeps one bit per element."""
    return _hardshrink(x, lambd=lambd)


def soft_shrink(x: Array, lambd: float = 0.5) -> Array:
    """As :func:`torch.nn.functional.softshrink`. Keeps one bit per element."""
    return _softshrink(x, lambd=lambd)


def prelu(x: Array, negative_slope: Array) -> Array:
    """The layer of :class:`flax.nnx.PReLU`, as a function.

    Keeps one bit per element for the gradient of ``x``, ``x`` for that of the slope.

    Args:
        x: ``(*, c)`` of any real dtype.
        negative_slope: One slope for all elements, or ``(c,)``. Cast to the dtype of ``x``.
    """
    return _prelu(x, negative_slope)


def prelu_from_input(x: Array, negative_slope: Array) -> Array:
    """As :func:`prelu`. Keeps ``x``: all there is to keep where the slope is trained."""
    return _prelu_from_input(x, negative_slope)
