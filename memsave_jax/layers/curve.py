"""Activations that are curves: their gradients read the input or the output, once.

From the input, backward computes again what else it needs, element by element.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memsave import spec
from memsave.spec import Layer

from .._xla import as_kept, on_gpu
from ..function import Function, Grads, Mask, Saved, Shapes, cast, define, is_number

SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


def _from_input(
    row: Layer,
    primal: Function,
    effort: int = 1,
    gradient: Function | None = None,
    again: Function | None = None,
) -> Function:
    """The gradient is stock's, of the input; or that of the same function, written ``again``; or
    ``gradient(g, x)``, where that takes less than to compute the output again. (Of ``effort``, see
    :func:`as_kept`.)
    """
    curve = again or primal

    def bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, **options: Any) -> Grads:
        x = as_kept(saved["x"], effort)
        if gradient is not None:
            return {"x": gradient(g, x, **options)}
        return {"x": jax.vjp(partial(curve, **options), x)[1](g)[0]}

    return define(row, primal, bwd)


def _from_output(row: Layer, primal: Function, gradient: Function) -> Function:
    """The gradient is ``gradient(g, y)``."""

    def bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, **options: Any) -> Grads:
        return {"x": gradient(g, saved["y"], **options)}

    return define(row, primal, bwd)


def _softmax_primal(x: Array, *, dim: Any = -1) -> Array:
    return jax.nn.softmax(x, axis=dim)


def _softmax_bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, *, dim: Any = -1) -> Grads:
    weighted = g * saved["y"]
    return {"x": weighted - saved["y"] * weighted.sum(dim, keepdims=True)}


def _log_softmax_primal(x: Array, *, dim: Any = -1) -> Array:
    return jax.nn.log_softmax(x, axis=dim)


def _log_softmax_bwd(g: Array, wrt: Mask, saved: Saved, shapes: Shapes, *, dim: Any = -1) -> Grads:
    return {"x": g - jnp.exp(saved["y"]) * g.sum(dim, keepdims=True)}


def _softplus_primal(x: Array, *, beta: float = 1.0, threshold: float = math.inf) -> Array:
    """JAX's, and PyTorch's, which is ``x`` above the threshold."""
    y = jax.nn.softplus(x) if beta == 1 else jax.nn.softplus(beta * x) / beta
    return y if threshold == math.inf else jnp.where(beta * x > threshold, x, y)


def _wide(x: Array) -> Array:
    """For exponentials: those of a narrow range are soon infinite, or nan. (What XLA casts, it may
    keep: bfloat16 has the range of float32.)
    """
    return x if jnp.finfo(x.dtype).maxexp >= 128 else x.astype(jnp.float32)


def _times_sigmoid(g: Array, x: Array) -> Array:
    s = jax.nn.sigmoid(_wide(x))
    # (Of 8 bits, JAX widens nothing by itself.)
    return cast(cast(g, s.dtype) * s, g.dtype)


def _softplus_gradient(
    g: Array, x: Array, *, beta: float = 1.0, threshold: float = math.inf
) -> Array:
    dx = _times_sigmoid(g, beta * x)
    return dx if threshold == math.inf else jnp.where(beta * x > threshold, g, dx)


def _mish_gradient(g: Array, x: Array) -> Array:
    """By ``tanh(softplus(x)) = s (2 - s) / (1 + (1 - s)^2)``, where ``s = sigmoid(x)``."""
    s = jax.nn.sigmoid(_wide(x))
    rest = lax.square(1 - s)
    part = 1 / (1 + rest)
    slope = part * (s * (2 - s) + cast(x, s.dtype) * (4 * s * rest * part))
    return cast(cast(g, s.dtype) * slope, g.dtype)


def gelu_primal(x: Array, *, approximate: str = "tanh") -> Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def gelu_again(x: Array, *, approximate: str = "tanh") -> Array:
    """The same, for gradients. On a GPU in other terms: what XLA does not know to be the same, it
    does not keep. (By the smaller tail, of which floats of 16 bits have all digits.) On a CPU, that
    would be slower, and there is a barrier: see :func:`as_kept`.
    """
    if not on_gpu():
        return gelu_primal(x, approximate=approximate)
    positive = x > 0
    size = jnp.where(positive, x, -x)
    if approximate == "tanh":
        rate = 2 * math.sqrt(2 / math.pi)
        tail = jax.nn.sigmoid(-size * (rate + 0.044715 * rate * (size * size)))
    else:
        tail = lax.erfc(size * math.sqrt(0.5)) / 2
    return x * jnp.where(positive, 1 - tail, tail)


def _tanhshrink_primal(x: Array) -> Array:
    return x - jnp.tanh(x)


def _glu_primal(x: Array, *, dim: int = -1) -> Array:
    return jax.nn.glu(x, axis=dim)


def _tanh_gradient(g: Array, y: Array) -> Array:
    half = g * (1 - y)  # as stock, also where g is infinite
    return half + half * y


def _elu_slope(g: Array, x: Array, *, alpha: float = 1.0) -> Array:
    return jnp.where(x > 0, g, g * (alpha * jnp.exp(_negative(x))))


def _celu_slope(g: Array, x: Array, *, alpha: float = 1.0) -> Array:
    return jnp.where(x > 0, g, g * jnp.exp(_negative(x) / alpha))


def _selu_slope(g: Array, x: Array) -> Array:
    return jnp.where(x > 0, g * SELU_SCALE, g * (SELU_SCALE * SELU_ALPHA * jnp.exp(_negative(x))))


def _elu_gradient(g: Array, y: Array, *, alpha: float = 1.0) -> Array:
    return jnp.where(y > 0, g, g * (_negative(y) + alpha))


def _celu_gradient(g: Array, y: Array, *, alpha: float = 1.0) -> Array:
    return jnp.where(y > 0, g, g * (_negative(y) / alpha + 1))


def _selu_gradient(g: Array, y: Array) -> Array:
    return jnp.where(y > 0, g * SELU_SCALE, g * (_negative(y) + SELU_SCALE * SELU_ALPHA))


def _negative(y: Array) -> Array:
    """(Of what is not selected, too, infinity would give nan to second derivatives.)"""
    return jnp.where(y > 0, 0, y)


def _softplus_gradient_from_output(
    g: Array, y: Array, *, beta: float = 1.0, threshold: float = math.inf
) -> Array:
    return g * -jnp.expm1(-beta * y)  # which above the threshold is g, to rounding


_sigmoid = _from_output(spec.SIGMOID, jax.nn.sigmoid, lambda g, y: g * (y * (1 - y)))
_tanh = _from_output(spec.TANH, jnp.tanh, _tanh_gradient)
_softmax = define(spec.SOFTMAX, _softmax_primal, _softmax_bwd)
_log_softmax = define(spec.LOG_SOFTMAX, _log_softmax_primal, _log_softmax_bwd)
_elu = _from_input(spec.ELU, jax.nn.elu, gradient=_elu_slope)
_elu_from_output = _from_output(spec.ELU_FROM_OUTPUT, jax.nn.elu, _elu_gradient)
_celu = _from_input(spec.CELU, jax.nn.celu, gradient=_celu_slope)
_celu_from_output = _from_output(spec.CELU_FROM_OUTPUT, jax.nn.celu, _celu_gradient)
_selu = _from_input(spec.SELU, jax.nn.selu, gradient=_selu_slope)
_selu_from_output = _from_output(spec.SELU_FROM_OUTPUT, jax.nn.selu, _selu_gradient)
_softplus = _from_input(spec.SOFTPLUS, _softplus_primal, gradient=_softplus_gradient)
_softplus_from_output = _from_output(
    spec.SOFTPLUS_FROM_OUTPUT, _softplus_primal, _softplus_gradient_from_output
)
_logsigmoid = _from_input(
    spec.LOGSIGMOID, jax.nn.log_sigmoid, gradient=lambda g, x: _times_sigmoid(g, -x)
)
_logsigmoid_from_output = _from_output(
    spec.LOGSIGMOID_FROM_OUTPUT, jax.nn.log_sigmoid, lambda g, y: g * -jnp.expm1(y)
)
_gelu = _from_input(spec.GELU, gelu_primal, again=gelu_again)
_silu = _from_input(spec.SILU, jax.nn.silu)
_mish = _from_input(spec.MISH, jax.nn.mish, gradient=_mish_gradient)
_hardswish = _from_input(spec.HARDSWISH, jax.nn.hard_swish, 0)
_tanhshrink = _from_input(spec.TANHSHRINK, _tanhshrink_primal)
_softsign = _from_input(spec.SOFTSIGN, jax.nn.soft_sign, 0)
_glu = _from_input(spec.GLU, _glu_primal)


def sigmoid(x: Array) -> Array:
    """As :func:`jax.nn.sigmoid`. Keeps its output.

    Args:
        x: Any shape and real dtype.
    """
    return _sigmoid(x)


def tanh(x: Array) -> Array:
    """As :func:`jax.numpy.tanh`. Keeps its output."""
    return _tanh(x)


def softmax(x: Array, axis: Any = -1, where: Array | None = None) -> Array:
    """As :func:`jax.nn.softmax`. Keeps its output. With ``where`` it is stock.

    Args:
        x: Any shape and real dtype.
        axis: An axis, several, or ``None`` for all.
    """
    return _softmax(x, dim=axis) if where is None else jax.nn.softmax(x, axis, where)


def log_softmax(x: Array, axis: Any = -1, where: Array | None = None) -> Array:
    """As :func:`jax.nn.log_softmax`. Keeps its output. With ``where`` it is stock.

    Args:
        x: Any shape and real dtype.
        axis: An axis, several, or ``None`` for all.
    """
    return _log_softmax(x, dim=axis) if where is None else jax.nn.log_softmax(x, axis, where)


def _is_positive(alpha: Any) -> bool:
    """A number (not an array), with which ``y`` has the sign of ``x``."""
    return is_number(alpha) and alpha > 0


def elu(x: Array, alpha: Any = 1.0) -> Array:
    """As :func:`jax.nn.elu`. Keeps ``x``. With an array for ``alpha`` it is stock."""
    if not is_number(alpha):
        return jax.nn.elu(x, alpha)
    return _elu(x, alpha=alpha)


def elu_from_output(x: Array, alpha: Any = 1.0) -> Array:
    """As :func:`jax.nn.elu`. Keeps its output. It is stock unless ``alpha > 0``."""
    return _elu_from_output(x, alpha=alpha) if _is_positive(alpha) else jax.nn.elu(x, alpha)


def celu(x: Array, alpha: Any = 1.0) -> Array:
    """As :func:`jax.nn.celu`. Keeps ``x``. With an array for ``alpha`` it is stock."""
    if not is_number(alpha):
        return jax.nn.celu(x, alpha)
    return _celu(x, alpha=alpha)


def celu_from_output(x: Array, alpha: Any = 1.0) -> Array:
    """As :func:`jax.nn.celu`. Keeps its output. It is stock unless ``alpha > 0``."""
    return _celu_from_output(x, alpha=alpha) if _is_positive(alpha) else jax.nn.celu(x, alpha)


def selu(x: Array) -> Array:
    """As :func:`jax.nn.selu`. Keeps ``x``, of any shape and real dtype."""
    return _selu(x)


def selu_from_output(x: Array) -> Array:
    """As :func:`jax.nn.selu`. Keeps its output; its input where the dtype is of less than 32 bits,
    as near its limit the output has too few digits.
    """
    dtype = getattr(x, "dtype", jnp.float32)  # (stock says of what is no array what it is not)
    return _selu(x) if jnp.dtype(dtype).itemsize < 4 else _selu_from_output(x)


def softplus(x: Array) -> Array:
    """As :func:`jax.nn.softplus`. Keeps ``x``, of any shape and real dtype."""
    return _softplus(x)


def softplus_from_output(x: Array) -> Array:
    """As :func:`jax.nn.softplus`. Keeps its output."""
    return _softplus_from_output(x)


def log_sigmoid(x: Array) -> Array:
    """As :func:`jax.nn.log_sigmoid`. Keeps ``x``, of any shape and real dtype."""
    return _logsigmoid(x)


def log_sigmoid_from_output(x: Array) -> Array:
    """As :func:`jax.nn.log_sigmoid`. Keeps its output."""
    return _logsigmoid_from_output(x)


def gelu(x: Array, approximate: bool = True) -> Array:
    """As :func:`jax.nn.gelu`. Keeps ``x``, of any shape and real dtype."""
    return _gelu(x, approximate="tanh" if approximate else "none")


def silu(x: Array) -> Array:
    """As :func:`jax.nn.silu`. Keeps ``x``, of any shape and real dtype."""
    return _silu(x)


def mish(x: Array) -> Array:
    """As :func:`jax.nn.mish`. Keeps ``x``, of any shape and real dtype."""
    return _mish(x)


def hard_silu(x: Array) -> Array:
    """As :func:`jax.nn.hard_silu`. Keeps ``x``, of any shape and real dtype."""
    return _hardswish(x)


swish, hard_swish = silu, hard_silu


def tanh_shrink(x: Array) -> Array:
    """As :func:`torch.nn.functional.tanhshrink`. Keeps ``x``, of any shape and real dtype."""
    return _tanhshrink(x)


def soft_sign(x: Array) -> Array:
    """As :func:`jax.nn.soft_sign`. Keeps ``x``, of any shape and real dtype."""
    return _softsign(x)


def glu(x: Array, axis: int = -1) -> Array:
    """As :func:`jax.nn.glu`. Keeps ``x``, of any shape that is even along the axis."""
    return _glu(x, dim=axis)
