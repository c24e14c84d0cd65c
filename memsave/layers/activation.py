"""Activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels, spec
from ..function import Grads, Mask, Saved, Shapes, define, is_plain_gradient
from ..kernels.reference import Like
from .module import drop_in

#: Masks are applied to the bits of a float as an integer of its size.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _select(g: Tensor, bits: Tensor, like: Like) -> Tensor:
    """``g`` where a bit is set and +0 elsewhere, whatever stands there (inf, nan).

    torch's ``where`` on CPU costs four times as much as this bitwise "and", which has no
    derivative, however.
    """
    if torch.compiler.is_compiling() or not is_plain_gradient(g):
        return torch.where(kernels.unpack(bits, like, True, torch.bool), g, 0.0)
    integer = BITS[g.itemsize]
    ones = kernels.unpack(bits, like, -1, integer)
    return ones.bitwise_and_(g.view(integer)).view(g.dtype)


def _relu_primal(x: Tensor, *, inplace: bool = False) -> Tensor:
    return F.relu(x, inplace)


def _relu_fwd(wrt: Mask, x: Tensor, *, inplace: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    y = F.relu(x, inplace)
    # Stock passes a gradient unless y <= 0, hence also where y is nan. y is never negative, so that
    # is where it is not zero, and torch converts to bool four times as fast as it compares.
    return y, {"positive": kernels.pack(y.bool(), Like.of(y))}


def _relu_bwd(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, inplace: bool = False
) -> Grads:
    like = shapes["y"]
    assert like is not None
    return {"x": _select(g, saved["positive"], like)}


_relu = define(spec.RELU, _relu_primal, _relu_bwd, _relu_fwd)
_relu_from_output = define(spec.RELU_FROM_OUTPUT, _relu_primal)


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.relu`. Keeps one bit per element.

    Args:
        input: Any shape and real floating dtype; overwritten if ``inplace``.
    """
    return _relu(input, inplace=inplace)


@drop_in(spec.RELU)
class ReLU(nn.ReLU):
    """As :class:`torch.nn.ReLU`. Keeps one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return relu(input, self.inplace)


@drop_in(spec.RELU_FROM_OUTPUT)
class ReLUFromOutput(nn.ReLU):
    """As :class:`torch.nn.ReLU`. Keeps its output: free where the next layer keeps it anyway."""

    def forward(self, input: Tensor) -> Tensor:
        return _relu_from_output(input, inplace=self.inplace)
