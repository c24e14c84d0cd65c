"""Gated products ``y = f(gate) * up``. Stock keeps ``f(gate)`` besides ``gate`` and ``up``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import spec
from ..function import Grads, Mask, Saved, Shapes, define


def _swiglu_primal(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _silu_gradient(g: Tensor, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(g, x)  # which has no derivative
    rising = torch.sigmoid(x)
    return g * rising * (1 + x * (1 - rising))


def _swiglu_bwd(g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes) -> Grads:
    gate, grads = saved["gate"], {}
    if "gate" in wrt:
        grads["gate"] = _silu_gradient(g * saved["up"], gate)
    if "up" in wrt:
        grads["up"] = g * F.silu(gate)
    return grads


def _geglu_primal(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def _geglu_bwd(g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, approximate: str) -> Grads:
    gate, grads = saved["gate"], {}
    if "gate" in wrt:
        grads["gate"] = torch.ops.aten.gelu_backward(g * saved["up"], gate, approximate=approximate)
    if "up" in wrt:
        grads["up"] = g * F.gelu(gate, approximate=approximate)
    return grads


_swiglu = define(spec.SWIGLU, _swiglu_primal, _swiglu_bwd)
_geglu = define(spec.GEGLU, _geglu_primal, _geglu_bwd)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``. Keeps ``gate`` and ``up``; for the gradient of ``up`` only ``gate``.

    Args:
        gate, up: Of one shape and dtype. (Others are multiplied as torch does, by the stock ops.)

    Source: https://arxiv.org/abs/2002.05202.
    """
    return _swiglu(gate, up) if _alike(gate, up) else _swiglu_primal(gate, up)


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up``, otherwise as :func:`swiglu`.

    Args:
        approximate: As in :func:`torch.nn.functional.gelu`.
    """
    if not _alike(gate, up):
        return _geglu_primal(gate, up, approximate=approximate)
    return _geglu(gate, up, approximate=approximate)


def _alike(gate: Tensor, up: Tensor) -> bool:
    return gate.shape == up.shape and gate.dtype == up.dtype
