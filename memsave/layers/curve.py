"""Activations that are curves: their gradients read the input or the output, once.

Where stock reads the same, it is left alone, but for the rows from the output: those are free where
the next layer keeps the output anyway, and the row from the input is where the last one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels, spec
from .._context import is_final, is_plain
from ..function import Grads, Mask, Saved, Shapes, define
from ..spec import Layer
from .module import as_stock, drop_in


def define_curve(
    row: Layer,
    primal: Callable[..., Tensor],
    gradient: Callable[..., Tensor],
    node: Callable[..., tuple[float, ...]] | None = None,
    *,
    compiled: bool = True,
) -> Callable[..., Tensor]:
    """The rule of a row that reads one array: ``gradient(g, array, **options)``.

    Args:
        node: ``node(**options)``: the numbers of :func:`memsave.kernels.nodes.curve`, if that has
            the row.
        compiled: As in :func:`memsave.function.define`.
    """
    residual, *others = row.reads["x"]
    if others:
        raise ValueError(f"row {row.name!r} reads {[residual, *others]}, of which a curve has one")

    def bwd(g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, **options: Any) -> Grads:
        return {"x": gradient(g, saved[residual], **options)}

    def by_node(
        name: str, wrt: Mask, x: Tensor, *, inplace: bool = False, **options: Any
    ) -> Tensor | None:
        assert node is not None
        return None if inplace else kernels.nodes.curve(name, x, *node(**options))

    own = None if node is None else by_node
    return define(row, primal, bwd, shapes=(), node=own, compiled=compiled)


def _elu(x: Tensor, *, alpha: float, inplace: bool = False) -> Tensor:
    return F.elu(x, alpha, inplace)


def _celu(x: Tensor, *, alpha: float, inplace: bool = False) -> Tensor:
    return F.celu(x, alpha, inplace)


def _selu_numbers() -> tuple[float, float, float]:
    """Alpha and scale, of https://arxiv.org/abs/1706.02515, and as third the scale of the input."""
    return 1.6732632423543772848170429916717, 1.0507009873554804934193349852946, 1


def _selu(x: Tensor, *, inplace: bool = False) -> Tensor:
    return F.selu(x, inplace)


def _softplus(x: Tensor, *, beta: float, threshold: float) -> Tensor:
    return F.softplus(x, beta, threshold)


def _times_rest(g: Tensor, exponent: Tensor) -> Tensor:
    """``g * (1 - exp(exponent))``, without the rounding of that difference."""
    rest = exponent.expm1()
    if not is_final(g) or g.stride() != rest.stride():
        return g * -rest
    return torch.addcmul(g.new_zeros(()), rest, g, value=-1, out=rest)


def _logsigmoid_gradient(g: Tensor, x: Tensor) -> Tensor:
    # logsigmoid(x) is -softplus(-x), in whose kernel this is the sign; from 40 on, the slope is 1.
    return torch.ops.aten.softplus_backward(g, x, -1, 40)


def _tanhshrink_gradient(g: Tensor, x: Tensor) -> Tensor:
    y = x.tanh()
    overwrite = is_final(g) and g.stride() == y.stride()
    return y.square_().mul_(g) if overwrite else g * y.square()


def _softsign_gradient(g: Tensor, x: Tensor) -> Tensor:
    size = x.abs() + 1  # of which the square may be too large for the dtype
    return g / size / size


# What stock keeps is what the row says.
define(spec.SIGMOID, torch.sigmoid)
define(spec.TANH, torch.tanh)
define(spec.SOFTMAX, lambda x, dim: F.softmax(x, dim))
define(spec.LOG_SOFTMAX, lambda x, dim: F.log_softmax(x, dim))
define(spec.ELU, F.elu)
define(spec.CELU, F.celu)
define(spec.SELU, F.selu)
define(spec.SOFTPLUS, _softplus)
define(spec.GELU, lambda x, approximate: F.gelu(x, approximate=approximate))
define(spec.SILU, F.silu)
define(spec.MISH, F.mish)
define(spec.HARDSWISH, F.hardswish)
define(spec.GLU, lambda x, dim: F.glu(x, dim))

_elu_from_output = define_curve(
    spec.ELU_FROM_OUTPUT,
    _elu,
    lambda g, y, alpha, **_: torch.ops.aten.elu_backward(g, alpha, 1, 1, True, y),
    lambda alpha: (alpha, 1, 1),
)
_celu_from_output = define_curve(
    spec.CELU_FROM_OUTPUT,
    _celu,
    lambda g, y, alpha, **_: torch.ops.aten.elu_backward(g, alpha, 1, 1 / alpha, True, y),
    lambda alpha: (alpha, 1, 1 / alpha),
)
_selu_from_output = define_curve(
    spec.SELU_FROM_OUTPUT,
    _selu,
    lambda g, y, **_: torch.ops.aten.elu_backward(g, *_selu_numbers(), True, y),
    _selu_numbers,
)
_softplus_from_output = define_curve(
    spec.SOFTPLUS_FROM_OUTPUT,
    _softplus,
    # (It is 1 where softplus is the identity, to rounding.)
    lambda g, y, beta, **_: _times_rest(g, y * -beta),
    lambda beta, threshold: (beta, threshold),
)
# Stock keeps a buffer as well, on CPU.
_logsigmoid = define_curve(
    spec.LOGSIGMOID,
    F.logsigmoid,
    _logsigmoid_gradient,
    lambda: (),
)
_logsigmoid_from_output = define_curve(
    spec.LOGSIGMOID_FROM_OUTPUT, F.logsigmoid, _times_rest, lambda: ()
)
# Stock keeps what it has computed in between.
_tanhshrink = define_curve(
    spec.TANHSHRINK,
    F.tanhshrink,
    _tanhshrink_gradient,
    lambda: (),
)
_softsign = define_curve(spec.SOFTSIGN, F.softsign, _softsign_gradient)


def logsigmoid(input: Tensor) -> Tensor:
    """As :func:`torch.nn.functional.logsigmoid`. Keeps its input, once."""
    return _logsigmoid(input)


def tanhshrink(input: Tensor) -> Tensor:
    """As :func:`torch.nn.functional.tanhshrink`. Keeps its input, once."""
    return _tanhshrink(input)


def softsign(input: Tensor) -> Tensor:
    """As :func:`torch.nn.functional.softsign`. Keeps its input, once."""
    return _softsign(input)


as_stock(nn.Sigmoid, spec.SIGMOID)
as_stock(nn.Tanh, spec.TANH)
as_stock(nn.Softmax, spec.SOFTMAX)
as_stock(nn.LogSoftmax, spec.LOG_SOFTMAX)
as_stock(nn.ELU, spec.ELU)
as_stock(nn.CELU, spec.CELU)
as_stock(nn.SELU, spec.SELU)
as_stock(nn.Softplus, spec.SOFTPLUS)
as_stock(nn.GELU, spec.GELU)
as_stock(nn.SiLU, spec.SILU)
as_stock(nn.Mish, spec.MISH)
as_stock(nn.Hardswish, spec.HARDSWISH)
as_stock(nn.GLU, spec.GLU)


def _has_digits(x: Any) -> bool:
    """Whether its dtype has digits enough for a slope that is the output and a constant, which
    cancel near zero. (Of what is no tensor it has not: a proxy of torch.fx, or an error.)
    """
    return is_plain(x) and x.itemsize >= 4


@drop_in(spec.ELU_FROM_OUTPUT)
class ELUFromOutput(nn.ELU):
    """As :class:`torch.nn.ELU`. Keeps its output; its input where ``alpha`` is negative, or the
    dtype is of less than 32 bits.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.alpha < 0 or not _has_digits(input):  # not one to one
            return nn.ELU.forward(self, input)
        return _elu_from_output(input, alpha=self.alpha, inplace=self.inplace)


@drop_in(spec.CELU_FROM_OUTPUT)
class CELUFromOutput(nn.CELU):
    """As :class:`torch.nn.CELU`. Keeps its output; its input where ``alpha`` is negative, or the
    dtype is of less than 32 bits.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.alpha <= 0 or not _has_digits(input):
            return nn.CELU.forward(self, input)
        return _celu_from_output(input, alpha=self.alpha, inplace=self.inplace)


@drop_in(spec.SELU_FROM_OUTPUT)
class SELUFromOutput(nn.SELU):
    """As :class:`torch.nn.SELU`. Keeps its output; its input where the dtype is of less than 32
    bits.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not _has_digits(input):
            return nn.SELU.forward(self, input)
        return _selu_from_output(input, inplace=self.inplace)


def _tells_branch(x: Any, threshold: float) -> bool:
    """Whether the output of softplus does: exp(-threshold) is below eps. (Of float16, what is small
    has too few digits.)
    """
    if not is_plain(x) or x.dtype is torch.float16 or not x.is_floating_point():
        return False
    return threshold >= -math.log(torch.finfo(x.dtype).eps)


@drop_in(spec.SOFTPLUS_FROM_OUTPUT)
class SoftplusFromOutput(nn.Softplus):
    """As :class:`torch.nn.Softplus`. Keeps its output; its input where the output does not tell
    which of the two branches it is from, to rounding: ``exp(-threshold) > eps``; or the dtype is
    float16.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.beta <= 0 or not _tells_branch(input, self.threshold):
            return nn.Softplus.forward(self, input)
        return _softplus_from_output(input, beta=self.beta, threshold=self.threshold)


@drop_in(spec.LOGSIGMOID)
class LogSigmoid(nn.LogSigmoid):
    """As :class:`torch.nn.LogSigmoid`. Keeps its input, once."""

    def forward(self, input: Tensor) -> Tensor:
        return logsigmoid(input)


@drop_in(spec.LOGSIGMOID_FROM_OUTPUT)
class LogSigmoidFromOutput(nn.LogSigmoid):
    """As :class:`torch.nn.LogSigmoid`. Keeps its output."""

    def forward(self, input: Tensor) -> Tensor:
        return _logsigmoid_from_output(input)


@drop_in(spec.TANHSHRINK)
class Tanhshrink(nn.Tanhshrink):
    """As :class:`torch.nn.Tanhshrink`. Keeps its input, once."""

    def forward(self, input: Tensor) -> Tensor:
        return tanhshrink(input)


@drop_in(spec.SOFTSIGN)
class Softsign(nn.Softsign):
    """As :class:`torch.nn.Softsign`. Keeps its input, once."""

    def forward(self, input: Tensor) -> Tensor:
        return softsign(input)
