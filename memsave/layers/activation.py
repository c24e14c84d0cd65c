"""Activations that are linear in pieces: their gradients read one bit per element.

Each says where the gradient passes as stock's does, nan and the kinks included. (Of hardtanh, relu6
and the shrinking ones, stock itself passes it or not where x is nan: its vectors and its remainder
differ. Here it passes.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import kernels, spec
from .._context import is_final, is_plain, is_plain_gradient, lowered
from ..function import WEIGHT, Grads, Mask, Saved, Shapes, by_attributes, define, for_stock
from ..kernels.memory import has_memory
from ..kernels.reference import Like
from ..spec import Layer
from .module import drop_in


def _one_sixth() -> float:
    """As torch has it, of float32, for float64 too."""
    return 0.1666666716337204


def _mask(bits: Tensor, like: Like) -> Tensor:
    return kernels.unpack(bits, like, True, torch.bool)


def _select(g: Tensor, bits: Tensor, like: Like, factor: float | None = None) -> Tensor:
    """``g``, or ``g * factor``, where a bit is set and +0 elsewhere, whatever stands there."""
    if is_dynamo_compiling() or not is_plain_gradient(g):
        selected = torch.where(_mask(bits, like), g, 0.0)
        return selected if factor is None else selected.mul_(factor)
    return kernels.select(g, bits, like, factor)


def _scale(g: Tensor, bits: Tensor, like: Like, slope: float) -> Tensor:
    """``g`` where a bit is set and ``g * slope`` elsewhere."""
    if is_dynamo_compiling() or not is_plain_gradient(g):
        return torch.where(_mask(bits, like), g, g * slope)
    return kernels.scale(g, bits, like, 1.0, slope)


def _relu_primal(x: Tensor, *, inplace: bool = False) -> Tensor:
    return F.relu(x, inplace)


def _relu_fwd(wrt: Mask, x: Tensor, *, inplace: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    y, positive = kernels.relu(x, inplace)
    return y, {"positive": positive}


def _relu_bwd(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, inplace: bool = False
) -> Grads:
    return {"x": _select(g, saved["positive"], shapes["y"])}


def _relu_node(row: str, wrt: Mask, x: Tensor, *, inplace: bool = False) -> Tensor | None:
    return kernels.nodes.bits(row, x, inplace, "relu", 0.0, 0.0)


_relu = define(spec.RELU, _relu_primal, _relu_bwd, _relu_fwd, shapes=("y",), node=_relu_node)
_relu_from_output = define(spec.RELU_FROM_OUTPUT, _relu_primal)


def _define(
    row: Layer,
    primal: Callable[..., Tensor],
    piece: Callable[..., tuple[str, float, float]],
    gradient: Callable[..., Tensor],
    backward: Callable[..., tuple[Any, ...]] = lambda **_: ("select",),
) -> Callable[..., Tensor]:
    """The rule of a row whose one extra says where a gradient passes.

    Args:
        piece: ``piece(**options)``: one of :data:`memsave.kernels.reference.PIECES`, and its
            numbers.
        gradient: ``gradient(g, bits, like, **options)``.
        backward: ``backward(**options)``: the same, as :func:`memsave.kernels.nodes.bits` has it.
    """
    (extra,) = row.extras

    def fwd(
        wrt: Mask, x: Tensor, *, inplace: bool = False, **options: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        y, bits = kernels.piecewise(x, inplace, *piece(**options))
        return y, {extra: bits}

    def bwd(g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, **options: Any) -> Grads:
        return {"x": gradient(g, saved[extra], shapes["y"], **options)}

    def node(
        row: str, wrt: Mask, x: Tensor, *, inplace: bool = False, **options: Any
    ) -> Tensor | None:
        return kernels.nodes.bits(row, x, inplace, *piece(**options), *backward(**options))

    return define(row, primal, bwd, fwd, shapes=("y",), node=node)


def _where_it_passes(g: Tensor, bits: Tensor, like: Like, **_: Any) -> Tensor:
    return _select(g, bits, like)


_leaky_relu = _define(
    spec.LEAKY_RELU,
    lambda x, negative_slope, inplace=False: F.leaky_relu(x, negative_slope, inplace),
    lambda negative_slope: ("leaky_relu", negative_slope, 0.0),
    lambda g, bits, like, negative_slope, **_: _scale(g, bits, like, negative_slope),
    lambda negative_slope: ("scale", 1.0, negative_slope),
)
_relu6 = _define(
    spec.RELU6,
    lambda x, inplace=False: F.relu6(x, inplace),
    lambda: ("hardtanh", 0.0, 6.0),
    _where_it_passes,
)
_hardtanh = _define(
    spec.HARDTANH,
    lambda x, min_val, max_val, inplace=False: F.hardtanh(x, min_val, max_val, inplace),
    lambda min_val, max_val: ("hardtanh", min_val, max_val),
    _where_it_passes,
)
_threshold = _define(
    spec.THRESHOLD,
    lambda x, threshold, value, inplace=False: F.threshold(x, threshold, value, inplace),
    lambda threshold, value: ("threshold", threshold, value),
    _where_it_passes,
)
_hardsigmoid = _define(
    spec.HARDSIGMOID,
    lambda x, inplace=False: F.hardsigmoid(x, inplace),
    lambda: ("hardsigmoid", -3.0, 3.0),
    lambda g, bits, like, **_: _select(g, bits, like, _one_sixth()),
    lambda: ("part", _one_sixth()),
)
_hardshrink = _define(
    spec.HARDSHRINK,
    lambda x, lambd: F.hardshrink(x, lambd),
    lambda lambd: ("hardshrink", -lambd, lambd),
    _where_it_passes,
)
_softshrink = _define(
    spec.SOFTSHRINK,
    lambda x, lambd: F.softshrink(x, lambd),
    lambda lambd: ("softshrink", -lambd, lambd),
    _where_it_passes,
)


def _prelu_fwd(wrt: Mask, x: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    if _is_number(weight) and x.dtype == weight.dtype:
        y, positive = kernels.piecewise(x, False, "leaky_relu", weight.item(), 0.0)
        return y, {"positive": positive}
    y = F.prelu(x, weight)
    return y, {"positive": kernels.compare(x, Like.of(y), "above", 0.0, 0.0)}


def _is_number(weight: Tensor | None) -> bool:
    """Whether it is a single one that can be read at once, and torch does not round its products
    otherwise than those of a Python number.
    """
    if is_dynamo_compiling() or weight is None or weight.numel() != 1 or weight.ndim > 1:
        return False
    return weight.is_cpu and weight.itemsize >= 4 and has_memory(weight, weight.stride())


def _prelu_slope(g: Tensor, positive: Tensor, weight: Tensor) -> Tensor:
    """The gradient of ``x``."""
    weight = weight.view(-1, *[1] * (g.ndim - 2)) if weight.numel() > 1 else weight
    return torch.where(positive, g, g * weight)


def _prelu_weight(g: Tensor, x: Tensor, like: Like) -> Tensor:
    """The gradient of the weight."""
    shared = like.shape.numel() == 1
    axes = [axis for axis in range(g.ndim) if shared or axis != 1]
    return torch.where(x > 0, 0.0, x * g).sum(axes).view(like.shape)


def _prelu_bwd(g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes) -> Grads:
    grads = {}
    if "x" in wrt:
        weight, bits, like = saved["weight"], saved["positive"], shapes["y"]
        if is_final(g) and _is_number(weight):
            grads["x"] = _scale(g, bits, like, weight.item())
        else:
            grads["x"] = _prelu_slope(g, _mask(bits, like), weight)
    if "weight" in wrt:
        grads["weight"] = _prelu_weight(g, saved["x"], shapes["weight"])
    return grads


def _prelu_bwd_from_input(g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes) -> Grads:
    x, grads = saved["x"], {}
    if "x" in wrt:
        grads["x"] = _prelu_slope(g, x > 0, saved["weight"])
    if "weight" in wrt:
        grads["weight"] = _prelu_weight(g, x, shapes["weight"])
    return grads


def _prelu_node(row: str, wrt: Mask, x: Tensor, weight: Tensor) -> Tensor | None:
    if wrt == {"x"} and x.is_cuda:
        return kernels.nodes.prelu(row, x, weight)
    if wrt != {"x"} or not _is_number(weight) or x.dtype != weight.dtype:
        return None
    slope = weight.item()
    piece = ("leaky_relu", slope, 0.0, "scale", 1.0, slope)
    return kernels.nodes.bits(row, x, False, *piece, also=weight)


_prelu = define(spec.PRELU, F.prelu, _prelu_bwd, _prelu_fwd, autocast=lowered, node=_prelu_node)
_prelu_from_input = define(
    spec.PRELU_FROM_INPUT,
    F.prelu,
    _prelu_bwd_from_input,
    stock_keeps=lambda wrt: ("x", "weight"),
    autocast=lowered,
)


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.relu`. Keeps one bit per element.

    Args:
        input: Any shape and real floating dtype; overwritten if ``inplace``.
    """
    return _relu(input, inplace=inplace)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.leaky_relu`. Keeps one bit per element."""
    return _leaky_relu(input, negative_slope=negative_slope, inplace=inplace)


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.relu6`. Keeps one bit per element."""
    return _relu6(input, inplace=inplace)


def hardtanh(
    input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Tensor:
    """As :func:`torch.nn.functional.hardtanh`. Keeps one bit per element."""
    if not min_val <= max_val:
        return F.hardtanh(input, min_val, max_val, inplace)  # which says why not
    return _hardtanh(input, min_val=min_val, max_val=max_val, inplace=inplace)


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.threshold`. Keeps one bit per element."""
    return _threshold(input, threshold=threshold, value=value, inplace=inplace)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.hardsigmoid`. Keeps one bit per element."""
    return _hardsigmoid(input, inplace=inplace)


def hardshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """As :func:`torch.nn.functional.hardshrink`. Keeps one bit per element."""
    return _hardshrink(input, lambd=lambd)


def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """As :func:`torch.nn.functional.softshrink`. Keeps one bit per element."""
    if not 0 <= lambd < math.inf:
        return F.softshrink(input, lambd)  # which says why not
    return _softshrink(input, lambd=lambd)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """As :func:`torch.nn.functional.prelu`. Keeps one bit per element where the weight is frozen,
    and otherwise the input, which the gradient of the weight reads.

    Args:
        input: ``(n, c, *)``. With fewer axes, for a single weight, it is stock.
        weight: ``(1,)`` or ``(c,)``.
    """
    if not is_plain(input) or input.ndim < 2:
        return F.prelu(input, weight)
    wants_weight = getattr(weight, "requires_grad", False)  # (what is no tensor is stock's error)
    return (_prelu_from_input if wants_weight else _prelu)(input, weight)


def _of_module(row: Layer, stock: type[nn.Module], *piece: Any) -> Callable[[nn.Module, Any], Any]:
    """The node of a module, by names of attributes in the place of options."""
    inplace = "inplace" if row.inplace else False
    call = kernels.nodes and kernels.nodes.of_piece(inplace, *piece)
    return by_attributes(row, stock, "of_bits" if call else None, *(call or ()))


_relu_of = _of_module(spec.RELU, nn.ReLU, "relu", 0.0, 0.0)
_leaky_relu_of = _of_module(
    *(spec.LEAKY_RELU, nn.LeakyReLU, "leaky_relu"),
    *("negative_slope", 0.0, "scale", 1.0, "negative_slope"),
)
_hardtanh_of = _of_module(spec.HARDTANH, nn.Hardtanh, "hardtanh", "min_val", "max_val")
_threshold_of = _of_module(spec.THRESHOLD, nn.Threshold, "threshold", "threshold", "value")
_hardsigmoid_of = _of_module(
    spec.HARDSIGMOID, nn.Hardsigmoid, "hardsigmoid", -3.0, 3.0, "part", _one_sixth()
)
_hardshrink_of = _of_module(spec.HARDSHRINK, nn.Hardshrink, "hardshrink", ("lambd",), "lambd")
_softshrink_of = _of_module(spec.SOFTSHRINK, nn.Softshrink, "softshrink", ("lambd",), "lambd")


@drop_in(spec.RELU)
class ReLU(nn.ReLU):
    """As :class:`torch.nn.ReLU`. Keeps one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        if (y := _relu_of(self, input)) is not None:
            return y
        return _relu(input, inplace=self.inplace)


@drop_in(spec.RELU_FROM_OUTPUT)
class ReLUFromOutput(nn.ReLU):
    """As :class:`torch.nn.ReLU`. Keeps its output: free where the next layer keeps it anyway."""

    def forward(self, input: Tensor) -> Tensor:
        return _relu_from_output(input, inplace=self.inplace)


@drop_in(spec.LEAKY_RELU)
class LeakyReLU(nn.LeakyReLU):
    """As :class:`torch.nn.LeakyReLU`. Keeps one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        if (y := _leaky_relu_of(self, input)) is not None:
            return y
        return _leaky_relu(input, negative_slope=self.negative_slope, inplace=self.inplace)


def _forward_hardtanh(self: nn.Hardtanh, input: Tensor) -> Tensor:
    if self.min_val <= self.max_val and (y := _hardtanh_of(self, input)) is not None:
        return y
    return hardtanh(input, self.min_val, self.max_val, self.inplace)


@drop_in(spec.HARDTANH)
class ReLU6(nn.ReLU6):
    """As :class:`torch.nn.ReLU6`, which is a Hardtanh. Keeps one bit per element."""

    forward = _forward_hardtanh


@drop_in(spec.HARDTANH)
class Hardtanh(nn.Hardtanh):
    """As :class:`torch.nn.Hardtanh`. Keeps one bit per element."""

    forward = _forward_hardtanh


@drop_in(spec.THRESHOLD)
class Threshold(nn.Threshold):
    """As :class:`torch.nn.Threshold`. Keeps one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        if (y := _threshold_of(self, input)) is not None:
            return y
        options = {"threshold": self.threshold, "value": self.value}
        return _threshold(input, **options, inplace=self.inplace)


@drop_in(spec.HARDSIGMOID)
class Hardsigmoid(nn.Hardsigmoid):
    """As :class:`torch.nn.Hardsigmoid`. Keeps one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        if (y := _hardsigmoid_of(self, input)) is not None:
            return y
        return _hardsigmoid(input, inplace=self.inplace)


@drop_in(spec.HARDSHRINK)
class Hardshrink(nn.Hardshrink):
    """As :class:`torch.nn.Hardshrink`. Keeps one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        if (y := _hardshrink_of(self, input)) is not None:
            return y
        return _hardshrink(input, lambd=self.lambd)


@drop_in(spec.SOFTSHRINK)
class Softshrink(nn.Softshrink):
    """As :class:`torch.nn.Softshrink`. Keeps one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        if 0 <= self.lambd < math.inf and (y := _softshrink_of(self, input)) is not None:
            return y
        return softshrink(input, self.lambd)


@drop_in(spec.PRELU, spec.PRELU_FROM_INPUT)
class PReLU(nn.PReLU):
    """As :class:`torch.nn.PReLU`. Keeps one bit per element while its weight is frozen."""

    def forward(self, input: Tensor) -> Tensor:
        if (own := for_stock(self, WEIGHT, input, casts=True, has_bias=False)) is not None:
            return F.prelu(input, own[0])
        return prelu(input, self.weight)
