"""Losses. Cross-entropy keeps the logits as they are; torch keeps their log-probabilities, which
under autocast are of twice the size.

The softmax that the gradient reads is computed again, by one kernel: from the log-probabilities it
is no cheaper, and their normalization alone would cost a pass over the logits to keep.

Index legend: c classes, which are the second axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import _reduction

from .. import kernels, spec
from .._context import is_plain, is_plain_gradient
from ..function import Grads, Mask, Saved, Shapes, define
from .module import drop_in


def _primal(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    return F.cross_entropy(
        x,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _softmax(x: Tensor, g: Tensor) -> Tensor:
    """In the dtype of ``g``, which under autocast is wider than that of the logits; and in their
    layout: torch's kernel would copy those of sequences, whose classes are stored last.
    """
    if x.ndim == 3 and x.stride(1) == 1:
        return torch.softmax(x.movedim(1, -1), -1, dtype=g.dtype).movedim(-1, 1)
    return torch.softmax(x, 1, dtype=g.dtype)


def _times(p: Tensor, total: Tensor) -> Tensor:
    """``p * total``, in the place of ``p`` unless it is to be differentiated."""
    return p.mul_(total) if is_plain_gradient(total) and not p.requires_grad else p * total


def _is_mean(reduction: str) -> bool:
    """Also by its old name, ``elementwise_mean``; forward refuses what is none."""
    return reduction not in ("none", "sum")


def _per_class(weight: Tensor | None, p: Tensor) -> Tensor:
    """The weight of each class, to be multiplied with what has the axes of ``p``."""
    if weight is None:
        return p.new_ones(1)
    return weight.to(p.dtype).view(-1, *[1] * (p.ndim - 2))


# The gradient of a loss -sum_c(q_c log p_c), of p = softmax(x), is p * sum_c(q_c) - q. Times the
# weights of the classes, q is 1 - label_smoothing for the target, and label_smoothing / c more for
# every class.


def _bwd(
    g: Tensor,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Grads:
    x, target, weight = saved["x"], saved["target"], saved["weight"]
    if not x.shape[1]:
        return {"x": torch.zeros_like(x)}  # (where every target is to be ignored)
    p = _softmax(x, g)
    counts = target != ignore_index
    index = (target * counts).long()
    # (Of one class, stock takes a weight of any axes.)
    of_target = counts if weight is None else weight.to(p.dtype).flatten()[index] * counts
    if _is_mean(reduction):
        g = g / of_target.sum(dtype=p.dtype)
    g = torch.where(counts, g, 0.0)
    hard = (g if weight is None else g * of_target).unsqueeze(1)
    if label_smoothing:
        hard = hard * (1 - label_smoothing)
        soft = (g * (label_smoothing / p.shape[1])).unsqueeze(1)
        total = hard + soft * (p.shape[1] if weight is None else weight.to(p.dtype).sum())
        dx = _times(p, total).addcmul_(soft, _per_class(weight, p), value=-1)
    else:
        dx = _times(p, hard)
    # (scatter_add_ takes a copy of all in 32 bits where they are of 16.)
    index = index.unsqueeze(1)
    put = dx.scatter if dx.requires_grad else dx.scatter_
    return {"x": put(1, index, dx.gather(1, index) - hard).to(x.dtype)}


def _bwd_of_probabilities(
    g: Tensor,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Grads:
    x, q, weight = saved["x"], saved["target"], saved["weight"]
    if not x.shape[1]:
        return {"x": torch.zeros_like(x)}
    p = _softmax(x, g)
    q = q.to(p.dtype)
    if label_smoothing:
        q = q * (1 - label_smoothing) + label_smoothing / p.shape[1]
    if weight is not None:
        q = q * _per_class(weight, p)
    if _is_mean(reduction):
        g = g * p.shape[1] / p.numel()
    g = g.unsqueeze(1) if g.ndim else g
    dx = _times(p, g * q.sum(1, keepdim=True)).addcmul_(q, g, value=-1)
    return {"x": dx.to(x.dtype)}


def _node(
    row: str,
    wrt: Mask,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    mode = _reduction.get_enum(reduction)
    return kernels.nodes.cross_entropy(row, x, target, weight, ignore_index, mode, label_smoothing)


# torch.compile keeps the logits and what normalizes them, by itself.
_cross_entropy = define(spec.CROSS_ENTROPY, _primal, _bwd, compiled=False, node=_node)
_cross_entropy_of_probabilities = define(
    spec.CROSS_ENTROPY_OF_PROBABILITIES, _primal, _bwd_of_probabilities, compiled=False, node=_node
)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As :func:`torch.nn.functional.cross_entropy`. Keeps the logits, in their own dtype, and the
    target.

    (Where a gradient of the target or of the weight is wanted, it is stock.)

    Args:
        input: Logits, ``(c,)`` or ``(n, c, *)``.
        target: Indices of classes, ``()`` or ``(n, *)``; or probabilities, shaped like ``input``.
        weight: ``(c,)``.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if not _is_constant(target) or not (weight is None or _is_constant(weight)):
        layer = _primal
    else:
        layer = _cross_entropy_of_probabilities if target.is_floating_point() else _cross_entropy
    if not label_smoothing > 0:
        label_smoothing = 0.0  # as stock takes what is negative
    one = layer is not _primal and is_plain(input) and input.ndim == 1
    one = one and (target.ndim == 0 or target.is_floating_point())
    loss = layer(
        input[None] if one else input,
        target[None] if one else target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss[0] if one and reduction == "none" else loss


def _is_constant(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and not tensor.requires_grad


@drop_in(spec.CROSS_ENTROPY, spec.CROSS_ENTROPY_OF_PROBABILITIES)
class CrossEntropyLoss(nn.CrossEntropyLoss):
    """As :class:`torch.nn.CrossEntropyLoss`. Keeps the logits, in their own dtype."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
