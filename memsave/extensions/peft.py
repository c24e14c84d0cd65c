"""Drop-in for PEFT's LoRA of a linear layer.

Stock casts ``x`` to the dtype of the adapter in each adapted layer, and keeps the copy: the layers
for queries, keys and values keep three of them, in float32, of one ``x`` in bfloat16. With dropout
it keeps a mask and the product as well. Here all of them keep ``x`` itself, and bits.

Embeddings keep nothing of the kind. Convolutions are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import layer as lora
from torch import Tensor, nn

from .. import kernels
from .._context import amp_enabled
from ..function import Grads, Mask, Saved, Shapes, define
from ..kernels.reference import Like
from ..layers import dropout as dropouts, linear as linears
from ..layers.module import drop_in, is_hooked
from ..spec import Extra, Layer

# The first factor of an adapter: ``linear(dropout(x), weight)``, in the dtype of the weight, or in
# that of autocast. Both rows keep x in the dtype that it has.

CAST_LINEAR = Layer(
    "peft.cast_linear",
    args={"x": "*n i", "weight": "o i"},
    y="*n o",
    reads={"x": ("weight",), "weight": ("x",)},
)
DROPOUT_LINEAR = Layer(
    "peft.dropout_linear",
    args={"x": "*n i", "weight": "o i"},
    y="*n o",
    reads={"x": ("weight", "kept"), "weight": ("x", "kept")},
    extras={"kept": Extra("*n i", bits=1)},
    options={"p": (0.5, 0.1, 0.9)},
)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _linear(x: Tensor, weight: Tensor, *, flat: bool) -> Tensor:
    """``flat``: whether stock flattens x to a matrix, which may show in the last bit."""
    if flat and x.ndim > 2:
        return F.linear(_rows(x), weight).unflatten(0, x.shape[:-1])
    return F.linear(x, weight)


def _gradients(
    g: Tensor,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    drop: Callable[[Tensor], Tensor] = lambda x: x,
) -> Grads:
    """Those of ``linear(drop(x))``. Under autocast ``g`` has the dtype that it multiplied in."""
    x, weight = shapes["x"], shapes["weight"]
    if len(weight.shape) == 1:  # as stock takes that of one feature
        g = g.unsqueeze(-1)
    grads = {}
    if "x" in wrt:
        matrix = saved["weight"].to(g.dtype).reshape(g.shape[-1], x.shape[-1])
        dropped = (_rows(g) @ matrix).reshape(x.shape).to(weight.dtype)
        grads["x"] = drop(dropped).to(x.dtype)
    if "weight" in wrt:
        dropped = drop(saved["x"].to(weight.dtype)).to(g.dtype)
        grads["weight"] = (_rows(g).mT @ _rows(dropped)).reshape(weight.shape).to(weight.dtype)
    return grads


def _cast_primal(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight)


def _cast_fwd(wrt: Mask, x: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return _linear(x.to(weight.dtype), weight, flat="weight" in wrt), {}


def _cast_bwd(g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes) -> Grads:
    return _gradients(g, wrt, saved, shapes)


def _dropout_primal(x: Tensor, weight: Tensor, *, p: float) -> Tensor:
    return F.linear(F.dropout(x.to(weight.dtype), p), weight)


def _dropout_fwd(
    wrt: Mask, x: Tensor, weight: Tensor, *, p: float
) -> tuple[Tensor, dict[str, Tensor]]:
    dropped, extras = dropouts._fwd(wrt, x.to(weight.dtype), p=p)
    flat = "weight" in wrt or dropped.is_contiguous()
    return _linear(dropped, weight, flat=flat), extras


def _dropout_bwd(g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, p: float) -> Grads:
    x, weight = shapes["x"], shapes["weight"]
    # As it lies in memory, so do the bits of what forward has cast and dropped.
    like = Like.of(
        torch.empty_like(
            torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta"),
            dtype=weight.dtype,
        )
    )
    # Stock's fused kernel rounds no factor to a dtype of less than 32 bits, the other op does.
    fused = dropouts._fused(g, inplace=False)
    dtype = torch.promote_types(weight.dtype, torch.float32) if fused else weight.dtype
    factor = 1 / (1 - p) if fused else dropouts._factor(p, dtype)
    noise = kernels.unpack(saved["kept"], like, factor, dtype)
    return _gradients(g, wrt, saved, shapes, lambda x: (x * noise).to(weight.dtype))


_cast_linear = define(CAST_LINEAR, _cast_primal, _cast_bwd, _cast_fwd, compiled=False)
_dropout_linear = define(
    DROPOUT_LINEAR, _dropout_primal, _dropout_bwd, _dropout_fwd, compiled=False
)


@drop_in(CAST_LINEAR, DROPOUT_LINEAR)
class Linear(lora.Linear):
    """As PEFT's LoRA of a linear layer. Keeps its input, the product of that with ``lora_A``, and
    with dropout one bit per element.

    Outputs and random numbers are stock's. So are, on CPU to the bit, the gradients of ``lora_A``
    and ``lora_B``, and that of ``x`` with one active adapter. (With several, stock adds up what
    they give for ``x`` before it rounds the sum to the dtype of ``x``, and here each is rounded.)
    What is kept must not be overwritten: ``x`` is its input, and no copy.

    PEFT's own forward runs where there is nothing to save, and for whatever is not plain LoRA:
    variants (DoRA), merged and disabled adapters, adapters by name, modules with hooks inside.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapters = [name for name in self.active_adapters if name in self.lora_A]
        if args or kwargs or not _is_served(self, adapters, x):
            return lora.Linear.forward(self, x, *args, **kwargs)
        result = self.base_layer(x)
        dtype = result.dtype
        for name in adapters:
            low = _project(x, self.lora_dropout[name], self.lora_A[name])
            result = result + self.lora_B[name](low) * self.scaling[name]
        return result.to(dtype)


def _project(x: Tensor, dropout: nn.Module, lora_A: nn.Module) -> Tensor:
    p, weight = _probability(dropout), lora_A.weight
    if p:
        return _dropout_linear(x, weight, p=p)
    return lora_A(x) if x.dtype == weight.dtype else _cast_linear(x, weight)


def _probability(dropout: nn.Module) -> float:
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


#: Classes of modules that are one op.
LINEARS = (nn.Linear, linears.Linear)
DROPOUTS = (nn.Identity, nn.Dropout, dropouts.Dropout)


def _is_served(layer: lora.Linear, adapters: list[str], x: Any) -> bool:
    """Whether a call is of plain LoRA, and ``x`` is no larger than what stock would keep."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not isinstance(x, Tensor):
        return False
    if layer.disable_adapters or layer.merged or not layer.cast_input_dtype_enabled:
        return False
    if not all(_is_plain(layer, name) for name in adapters):
        return False
    weights: list[Any] = [layer.lora_A[name].weight for name in adapters]
    # (Of several dtypes, stock casts from one to the next.)
    if len({weight.dtype for weight in weights}) != 1:
        return False
    return x.itemsize <= _multiplied_in(weights[0]).itemsize


def _multiplied_in(weight: Tensor) -> torch.dtype:
    """The dtype in which a linear layer of this weight multiplies."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if amp_enabled(device) else weight.dtype


def _is_plain(layer: lora.Linear, adapter: str) -> bool:
    lora_A, dropout = layer.lora_A[adapter], layer.lora_dropout[adapter]
    return (
        adapter not in layer.lora_variant
        and _is_op(lora_A, LINEARS)
        and lora_A.bias is None
        and _is_op(dropout, DROPOUTS)
        and _probability(dropout) < 1
        and not getattr(dropout, "inplace", False)
    )


def _is_op(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Whether a call of a module is the op of its class, and nobody looks on."""
    return type(module) in classes and not is_hooked(module)
