"""Gated products ``y = f(gate) * up``. Stock keeps ``f(gate)`` besides ``gate`` and ``up``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import spec
from ..function import Grads, Mask, Saved, Shapes, define
from ..spec import Layer
from .module import STOCK, Class, is_hooked

Product = Callable[[Tensor, Tensor], Tensor]


def define_gated(
    row: Layer,
    activation: Callable[..., Tensor],
    gradient: Callable[..., Tensor],
    *,
    compiled: bool = True,
) -> Callable[..., Tensor]:
    """The differentiable function of a gated product.

    Args:
        row: Its row.
        activation: ``activation(gate, **options)``: the stock op.
        gradient: ``gradient(g, gate, **options)``: the gradient of the gate through it.
        compiled: As in :func:`memsave.function.define`.

    Returns:
        A function of ``gate``, ``up`` and the options. Where the two are not of one shape, they
        are multiplied as torch does, by the stock ops.
    """

    def are_alike(gate: Tensor, up: Tensor) -> bool:
        return gate.shape == up.shape

    def primal(gate: Tensor, up: Tensor, **options: Any) -> Tensor:
        return activation(gate, **options) * up

    def bwd(g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, **options: Any) -> Grads:
        gate, grads = saved["gate"], {}
        if "gate" in wrt:
            through = (g * saved["up"]).to(gate.dtype)  # not every processor takes another
            grads["gate"] = gradient(through, gate, **options)
        if "up" in wrt:
            grads["up"] = g * activation(gate, **options)
        return grads

    return define(row, primal, bwd, covers=are_alike, compiled=compiled)


def _swish_gradient(g: Tensor, x: Tensor, rate: float) -> Tensor:
    """The gradient of ``x`` through ``x * sigmoid(rate * x)``."""
    rising = torch.sigmoid(rate * x)
    return g * rising * (1 + rate * x * (1 - rising))


def silu_gradient(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``x`` through SiLU."""
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(g, x)  # which has no derivative
    return _swish_gradient(g, x, 1.0)


def quick_gelu_gradient(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``x`` through ``x * sigmoid(1.702 * x)``."""
    return _swish_gradient(g, x, 1.702)


def gelu_gradient(g: Tensor, x: Tensor, *, approximate: str) -> Tensor:
    """The gradient of ``x`` through GELU."""
    return torch.ops.aten.gelu_backward(g, x, approximate=approximate)


_swiglu = define_gated(spec.SWIGLU, F.silu, silu_gradient)
_geglu = define_gated(spec.GEGLU, F.gelu, gelu_gradient)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``. Keeps ``gate`` and ``up``; for the gradient of ``up`` only ``gate``.

    Args:
        gate, up: Of one shape. (Others are multiplied as torch does, by the stock ops.)

    Source: https://arxiv.org/abs/2002.05202.
    """
    return _swiglu(gate, up)


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up``, otherwise as :func:`swiglu`.

    Args:
        approximate: As in :func:`torch.nn.functional.gelu`.
    """
    return _geglu(gate, up, approximate=approximate)


#: Of classes of activations: the gated product of an instance, if it has one.
PRODUCTS: dict[Class, Callable[[Any], Product | None]] = {
    nn.SiLU: lambda act: None if act.inplace else swiglu,
    nn.GELU: lambda act: partial(geglu, approximate=act.approximate),
}


def gated(act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """``act(gate) * up``; as a gated product where the activation has one and no hooks."""
    product_of = PRODUCTS.get(STOCK.get(type(act), type(act)))
    product = None if product_of is None or is_hooked(act) else product_of(act)
    return act(gate) * up if product is None else product(gate, up)
