"""Linear layers. PyTorch's own already keeps just what the row says, for every mask."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .. import spec
from ..function import BIAS, INPUT, WEIGHT, define, for_stock
from .module import drop_in

_linear = define(spec.LINEAR, primal=F.linear)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As :func:`torch.nn.functional.linear`. Keeps the weight for the gradient of the input, the
    input for the gradient of the weight, nothing for that of the bias.

    Args:
        input: ``(*, in_features)``.
        weight: ``(out_features, in_features)`` or ``(in_features,)``.
        bias: ``(out_features,)`` or ``()``.
    """
    return _linear(input, weight, bias)


@drop_in(spec.LINEAR)
class Linear(nn.Linear):
    """As :class:`torch.nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        if (own := for_stock(self, INPUT | WEIGHT | BIAS, input)) is not None:
            return F.linear(input, *own)
        return linear(input, self.weight, self.bias)
