"""Layer and RMS normalization. (Their gradients are those of all norms of each example:
``norm_gradients.py``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.compiler import is_dynamo_compiling

from .. import kernels, spec
from .._context import is_exported, is_plain, is_traced, widened
from ..function import INPUT, WEIGHT, Grads, Mask, Saved, Shapes, by_node, define, for_stock
from ..kernels.reference import Like
from .batch_norm import weight_or_ones
from .invertible import LARGEST_RATIO, is_invertible, tells_its_input
from .module import drop_in
from .norm_gradients import (
    Gs,
    formatted,
    from_input,
    from_output,
    grouped,
    in_one_pass,
    like_argument,
    wide,
)
from .shape import placeholder

# Layer normalization, over the last axis.


def _layer_primal(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _layer_fwd(
    wrt: Mask, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, dict[str, Tensor]]:
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y, {"mean": mean, "rstd": rstd}


def _layer_bwd(g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, eps: float) -> Grads:
    if wrt == {"bias"}:
        return {"bias": like_argument(grouped(g, None).sum((0, 3)), shapes, "bias")}
    mask = ["x" in wrt, "weight" in wrt, "bias" in wrt]
    # Of the bias, the kernel asks whether there is one. Without a weight, its own derivative leaves
    # the bias out.
    bias, weight = shapes["bias"], saved["weight"] if "x" in wrt else None
    if bias is not None:
        bias = placeholder(g, bias.shape, bias.dtype)
    weight = weight_or_ones(weight, g, shapes)
    # Stock's op: its own derivative accounts for mean and rstd being functions of x.
    grads = torch.ops.aten.native_layer_norm_backward(
        g, saved["x"], g.shape[-1:], saved["mean"], saved["rstd"], weight, bias, mask
    )
    return {n: grad for n, grad in zip(("x", "weight", "bias"), grads, strict=True) if n in wrt}


def _layer_bwd_from_output(gs: Gs, wrt: Mask, saved: Saved, shapes: Shapes, *, eps: float) -> Grads:
    return from_output(gs, wrt, saved, shapes, None)


def rstd_only(fwd: Any) -> Any:
    """The forward of a row from ``y``, which reads no mean."""

    def fwd_of_output(*args: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        y, extras = fwd(*args, **options)
        return y, {"rstd": extras["rstd"]}

    return fwd_of_output


def norm_node(
    row: str,
    wrt: Mask,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    from_y: bool,
    centered: bool,
    eps: float | None,
    num_groups: int | None = None,
) -> Tensor | None:
    """Of all norms here, but for gradients of the bias alone."""
    if wrt == {"bias"}:
        return None
    if num_groups is not None and (type(num_groups) is not int or num_groups < 1):
        return None
    groups, wants_x = num_groups or 0, "x" in wrt
    return kernels.nodes.norm(row, x, weight, bias, groups, from_y, centered, wants_x, eps)


_layer_norm = define(spec.LAYER_NORM, _layer_primal, _layer_bwd, _layer_fwd, autocast=widened)
_layer_norm_from_output = define(
    spec.LAYER_NORM_FROM_OUTPUT,
    _layer_primal,
    _layer_bwd_from_output,
    rstd_only(_layer_fwd),
    autocast=widened,
    smooth=True,
    node=partial(norm_node, from_y=True, centered=True),
)


# RMS normalization, over the last axis, by the square root of the mean square.


def _rms_primal(x: Tensor, weight: Tensor | None, *, eps: float | None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _is_fused(x: Tensor, weight: Tensor | Like | None) -> bool:
    """Whether torch has a kernel for it."""
    if not x.ndim or weight is None:
        return x.ndim > 0
    return (weight.dtype, weight.shape) == (x.dtype, x.shape[-1:])


def _rms_fwd(
    wrt: Mask, x: Tensor, weight: Tensor | None, *, eps: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    if _is_fused(x, weight):
        # (The shorter way, which torch.compile does not know.)
        at_once = torch.ops.aten if is_dynamo_compiling() else torch
        y, rstd = at_once._fused_rms_norm(x, x.shape[-1:], weight, eps)  # type: ignore[attr-defined]
        return y, {"rstd": rstd.squeeze(-1)}
    x_wide = wide(x)
    eps = torch.finfo(x_wide.dtype).eps if eps is None else eps
    rstd = x_wide.square().mean(-1).add_(eps).rsqrt_()
    return _rms_primal(x, weight, eps=eps), {"rstd": rstd}


def _rms_bwd(gs: Gs, wrt: Mask, saved: Saved, shapes: Shapes, *, eps: float | None) -> Grads:
    g, x, rstd = gs.get("y"), saved["x"], saved["rstd"]
    if g is not None and g.is_cuda and in_one_pass(gs, wrt) and _is_fused(x, shapes["weight"]):
        weight = weight_or_ones(saved["weight"] if "x" in wrt else None, g, shapes)
        mask = [name in wrt for name in ("x", "weight")]
        backward = torch.ops.aten._fused_rms_norm_backward
        grads = backward(g, x, x.shape[-1:], rstd.unsqueeze(-1), weight, mask)
        named = zip(("x", "weight"), grads, strict=True)
        return formatted({name: grad for name, grad in named if name in wrt}, shapes)
    return formatted(from_input(gs, wrt, saved, shapes, None, centered=False), shapes)


def _rms_bwd_from_output(
    gs: Gs, wrt: Mask, saved: Saved, shapes: Shapes, *, eps: float | None
) -> Grads:
    return formatted(from_output(gs, wrt, saved, shapes, None, centered=False), shapes)


#: Autocast of accelerators leaves it alone in torch 2.11.
_casts = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")
RMS_AUTOCAST = widened if _casts else None

_rms_norm = define(
    spec.RMS_NORM,
    _rms_primal,
    _rms_bwd,
    _rms_fwd,
    autocast=RMS_AUTOCAST,
    smooth=True,
    node=partial(norm_node, from_y=False, centered=False),
)
_rms_norm_from_output = define(
    spec.RMS_NORM_FROM_OUTPUT,
    _rms_primal,
    _rms_bwd_from_output,
    _rms_fwd,
    autocast=RMS_AUTOCAST,
    smooth=True,
    node=partial(norm_node, from_y=True, centered=False),
)


# The functions.


def _over_last(
    input: Tensor, normalized_shape: Sequence[int], *params: Tensor | None
) -> tuple[Any, ...] | None:
    """The input and parameters with the normalized axes as one; None where stock is to run."""
    at_a_look = None if is_dynamo_compiling() else kernels.nodes
    if at_a_look is not None and at_a_look.is_over_last(input, normalized_shape, *params):
        return input, *params
    if not is_plain(input):
        return None
    shape = tuple(normalized_shape)
    dims = len(shape)
    if is_traced(input) or is_exported() or input.is_nested:
        return None
    if not dims or input.shape[-dims:] != shape:
        return None
    if float in map(type, shape):
        return None
    for param in params:
        if param is not None and not (isinstance(param, Tensor) and param.shape == shape):
            return None
    if dims == 1:
        return input, *params
    if not input.is_contiguous() and not _wants_bias_alone(input, *params):
        return None  # Stock keeps no copy.
    return input.flatten(-dims), *[None if param is None else param.flatten() for param in params]


def _wants_bias_alone(input: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> bool:
    """Where nothing is kept, and stock keeps what it reads for other gradients."""
    if bias is None or not bias.requires_grad or input.requires_grad:
        return False
    return weight is None or not weight.requires_grad


def _shaped(y: Tensor, input: Tensor, is_kept: bool = False) -> Tensor:
    """Of the input's shape, and no view, as stock's (but that what is kept must not change)."""
    if y.ndim == input.ndim:
        return y
    return y.view(input.shape) if is_kept else torch.ops.aten._unsafe_view(y, input.shape)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As :func:`torch.nn.functional.layer_norm`. Keeps the input and two numbers per group for the
    gradients of input and weight, nothing for that of the bias.

    Args:
        input: ``(*, *normalized_shape)``.
        weight, bias: ``normalized_shape`` or ``None``.
    """
    flat = _over_last(input, normalized_shape, weight, bias)
    if flat is None:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)  # type: ignore[arg-type]
    return _shaped(_layer_norm(*flat, eps=eps), input)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """As :func:`torch.nn.functional.rms_norm`. Keeps the input and one number per group.

    Args:
        input: ``(*, *normalized_shape)``.
        weight: ``normalized_shape`` or ``None``.
    """
    flat = _over_last(input, normalized_shape, weight)
    if flat is None:
        return F.rms_norm(input, normalized_shape, weight, eps)  # type: ignore[arg-type]
    return _shaped(_rms_norm(*flat, eps=eps), input)


@drop_in(spec.LAYER_NORM)
class LayerNorm(nn.LayerNorm):
    """As :class:`torch.nn.LayerNorm`. Keeps its input, or nothing for the bias alone."""

    def forward(self, input: Tensor) -> Tensor:
        if (y := by_node("layer_norm_of", spec.LAYER_NORM, self, input)) is not None:
            return y
        if (own := for_stock(self, INPUT | WEIGHT, input)) is not None:
            # (Without what F.layer_norm does for those who look at functions, as compilers do.)
            is_seen = _len_torch_function_stack() or is_dynamo_compiling()
            stock = F.layer_norm if is_seen else torch.layer_norm
            return stock(input, self.normalized_shape, *own, self.eps)
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


@drop_in(spec.LAYER_NORM_FROM_OUTPUT)
class LayerNormFromOutput(nn.LayerNorm):
    """As :class:`torch.nn.LayerNorm`. Keeps its output, free where the next layer does; its input
    where a weight is zero or small beside its bias, or the dtype is of less than 32 bits.
    """

    fits = staticmethod(tells_its_input)

    def forward(self, input: Tensor) -> Tensor:
        node, row = "layer_norm_from_output_of", spec.LAYER_NORM_FROM_OUTPUT
        if (y := by_node(node, row, self, input, LARGEST_RATIO)) is not None:
            return y
        weight, bias = self.weight, self.bias
        flat = _over_last(input, self.normalized_shape, weight, bias)
        if flat is None or not is_invertible(input, weight, bias):
            return layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return _shaped(_layer_norm_from_output(*flat, eps=self.eps), input, True)


@drop_in(spec.RMS_NORM)
class RMSNorm(nn.RMSNorm):
    """As :class:`torch.nn.RMSNorm`. Keeps its input, once."""

    def forward(self, x: Tensor) -> Tensor:
        if (y := by_node("rms_norm_of", spec.RMS_NORM, self, x)) is not None:
            return y
        own = for_stock(self, INPUT | WEIGHT, x, casts=True, has_bias=False)
        weight = self.weight if own is None else own[0]
        is_cuda = own is not None and x is not None and x.is_cuda  # (None is stock's error)
        # On CUDA, stock's kernel keeps the same.
        if is_cuda and x.is_contiguous() and _is_fused(x, weight):
            stock = F.rms_norm if _len_torch_function_stack() else torch.rms_norm
            return stock(x, self.normalized_shape, weight, self.eps)
        return rms_norm(x, self.normalized_shape, weight, self.eps)


@drop_in(spec.RMS_NORM_FROM_OUTPUT)
class RMSNormFromOutput(nn.RMSNorm):
    """As :class:`torch.nn.RMSNorm`. Keeps its output; its input where a weight is zero, or the
    dtype is of less than 32 bits.
    """

    fits = staticmethod(tells_its_input)

    def forward(self, x: Tensor) -> Tensor:
        node, row = "rms_norm_from_output_of", spec.RMS_NORM_FROM_OUTPUT
        if (y := by_node(node, row, self, x, LARGEST_RATIO)) is not None:
            return y
        weight = self.weight
        flat = _over_last(x, self.normalized_shape, weight)
        if flat is None or not is_invertible(x, weight, None):
            return rms_norm(x, self.normalized_shape, weight, self.eps)
        return _shaped(_rms_norm_from_output(*flat, eps=self.eps), x, True)
