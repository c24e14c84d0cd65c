"""Group and instance normalization: norms of each example, over groups of channels. (Their
gradients are those of all of them: ``norm_gradients.py``.)

Index legend: n batch, c channels, s spatial axes; statistics are (n, groups).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch._prims_common import suggest_memory_format
from torch.compiler import is_dynamo_compiling

from .. import kernels, spec
from .._context import is_final, is_traced, widened
from ..function import INPUT, WEIGHT, Grads, Mask, Saved, Shapes, by_node, define, for_stock
from ..kernels.memory import FORMATS
from .batch_norm import are_numbers, batch_norm, by_batch, weight_or_ones, zeros
from .invertible import is_invertible, tells_its_input
from .modes import is_replaced, others
from .module import drop_in
from .norm import norm_node, rstd_only
from .norm_gradients import (
    Gs,
    by_kernel,
    formatted,
    from_input,
    from_output,
    grouped,
    in_one_pass,
    like_argument,
)
from .shape import is_size, last_format

# Group normalization.


def _group_primal(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, num_groups: int, eps: float
) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, eps)


def _group_fwd(
    wrt: Mask,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    num_groups: int,
    eps: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    if (
        x.ndim < 2
        # (First, as torch.compile of 2.11 cannot learn a size later in here.)
        or any(v is not None and v.shape != x.shape[1:2] for v in (weight, bias))
        or x.shape[1] % num_groups
        or is_size(x.numel(), 0, num_groups)
    ):
        y = _group_primal(x, weight, bias, num_groups=num_groups, eps=eps)  # or stock's error
        empty = y.new_zeros(x.shape[0], num_groups)
        return y, {"mean": empty, "rstd": empty.clone()}
    n, c, places = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    # The kernel takes these for granted.
    x = x.contiguous(memory_format=_memory_format(x))
    weight, bias = (None if v is None else v.contiguous() for v in (weight, bias))
    y, mean, rstd = torch.native_group_norm(x, weight, bias, n, c, places, num_groups, eps)
    return y, {"mean": mean, "rstd": rstd}


#: Devices whose kernel takes channels that are stored first, alone.
CHANNELS_FIRST = {"cuda", "xpu", "mps"}


def _memory_format(x: Tensor) -> torch.memory_format:
    """The format in which the kernel takes a tensor (and stock makes a copy, if it is in none)."""
    if x.ndim not in FORMATS or x.device.type in CHANNELS_FIRST:
        return torch.contiguous_format
    if not is_dynamo_compiling():
        return suggest_memory_format(x)
    # (torch.compile has no such kernel, nor knows that function.)
    last = FORMATS[x.ndim]
    return last if x.is_contiguous(memory_format=last) else torch.contiguous_format


#: Places of an image.
MANY_PLACES = 2048


def _crashes_without_x(x: Tensor, memory_format: torch.memory_format) -> bool:
    """Whether stock's kernel does so, in torch 2.13, if it is asked for gradients of parameters
    alone: with channels that are last and few places.
    """
    is_last = memory_format is not torch.contiguous_format and x.is_cpu
    return is_last and x.shape[2:].numel() < MANY_PLACES


def _group_bwd(
    gs: Gs, wrt: Mask, saved: Saved, shapes: Shapes, *, num_groups: int, eps: float
) -> Grads:
    like = shapes["x"]
    # (What is compiled has no second derivative.)
    by_stock = wrt != {"bias"} if is_dynamo_compiling() else in_one_pass(gs, wrt)
    if by_stock and not is_size(like.shape.numel(), 0):
        return _group_bwd_at_once(gs["y"], wrt, saved, shapes, num_groups)
    return formatted(from_input(gs, wrt, saved, shapes, num_groups), shapes)


def _group_bwd_at_once(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, num_groups: int
) -> Grads:
    """By stock's kernel, whose own derivative does not know that the statistics depend on x."""
    x, memory_format = saved["x"], torch.contiguous_format
    if not is_dynamo_compiling():
        memory_format = _memory_format(x)
    # (The compiler cannot ask what is saved for its layout.)
    elif g.device.type not in CHANNELS_FIRST:
        memory_format = last_format(shapes["x"]) or memory_format  # type: ignore[arg-type]
    weight = weight_or_ones(saved["weight"] if "x" in wrt else None, g, shapes)
    n, c, *s = x.shape
    names = ("x", "weight", "bias")
    grads = torch.ops.aten.native_group_norm_backward(
        g.contiguous(memory_format=memory_format),
        x.contiguous(memory_format=memory_format),
        saved["mean"],
        saved["rstd"],
        None if weight is None else weight.contiguous(),
        n,
        c,
        math.prod(s),
        num_groups,
        ["x" in wrt or _crashes_without_x(x, memory_format), "weight" in wrt, "bias" in wrt],
    )
    return {name: grad for name, grad in zip(names, grads, strict=True) if name in wrt}


def _group_bwd_from_output(
    gs: Gs, wrt: Mask, saved: Saved, shapes: Shapes, *, num_groups: int, eps: float
) -> Grads:
    return formatted(_from_output_of_groups(gs, wrt, saved, shapes, num_groups), shapes)


def _from_output_of_groups(
    gs: Gs, wrt: Mask, saved: Saved, shapes: Shapes, num_groups: int
) -> Grads:
    if not in_one_pass(gs, wrt) or is_size(shapes["x"].shape.numel(), 0):
        return from_output(gs, wrt, saved, shapes, num_groups)
    fast = by_kernel(gs, wrt, saved, shapes, num_groups, "y", True)
    return fast or _from_output_at_once(gs["y"], wrt, saved, shapes, num_groups)


def _from_output_at_once(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, num_groups: int
) -> Grads:
    """As of an input that is normalized already, whose own statistics are 0 and 1."""
    xhat, weight, bias = saved["y"], saved["weight"], saved["bias"]
    n, c = xhat.shape[:2]

    def over_places(vector: Tensor) -> Tensor:
        return vector.view(-1, c, *[1] * (xhat.ndim - 2))

    if bias is not None:
        xhat = xhat - over_places(bias)
    if weight is not None:
        divide = xhat.div if bias is None else xhat.div_
        xhat = divide(over_places(weight))
    mean = xhat.new_zeros(n, num_groups)
    known = {"x": xhat, "mean": mean, "rstd": torch.ones_like(mean), "weight": weight}
    grads = _group_bwd_at_once(g, wrt, known, shapes, num_groups)
    if "x" in wrt:
        grads["x"].mul_(over_places(saved["rstd"].repeat_interleave(c // num_groups, 1)))
    return grads


_group_norm = define(
    spec.GROUP_NORM, _group_primal, _group_bwd, _group_fwd, autocast=widened, smooth=True
)
_group_norm_from_output = define(
    spec.GROUP_NORM_FROM_OUTPUT,
    _group_primal,
    _group_bwd_from_output,
    rstd_only(_group_fwd),
    autocast=widened,
    smooth=True,
    node=partial(norm_node, from_y=True, centered=True),
)


# Instance normalization: each channel of each example is a group.


def _instance_primal(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    momentum: float,
    eps: float,
) -> Tensor:
    return F.instance_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)


def _instance_fwd(
    wrt: Mask,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    momentum: float,
    eps: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    args = (running_mean, running_var, weight, bias)
    one_alone = (running_mean is None) != (running_var is None)
    is_refused = one_alone or x.ndim < 2 or not are_numbers(momentum, eps)
    if is_refused or x.shape[2:].numel() < 2 or not x.numel():
        y = _instance_primal(x, *args, momentum=momentum, eps=eps)  # or stock's error
        empty = y.new_zeros(x.shape[:2])
        return y, {"mean": empty, "rstd": empty.clone()}
    # As torch does it: batch normalization of one example that has all channels.
    n, cast = x.shape[0], _as_weight(running_mean, running_var, x, weight)
    each = [None if v is None else v.repeat(n) for v in (*cast, weight, bias)]
    y, *statistics = by_batch(_as_one(kernels.contiguous(x)), *each, momentum=momentum, eps=eps)
    for running, updated in zip(args[:2], each[:2], strict=True):
        if running is not None and updated is not None:
            running.copy_(updated.view(n, -1).mean(0))
    extras = {"mean": statistics[0].view(n, -1), "rstd": statistics[1].view(n, -1)}
    return y.view(x.shape), extras


def _as_weight(
    running_mean: Tensor | None, running_var: Tensor | None, x: Tensor, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Running statistics as torch takes them: in the dtype of the weight, if the mean is not."""
    dtype = (x if weight is None else weight).dtype
    if running_mean is None or running_mean.dtype == dtype:
        return running_mean, running_var
    return running_mean.to(dtype), None if running_var is None else running_var.to(dtype)


def _as_one(x: Tensor) -> Tensor:
    """All channels of all examples as those of one."""
    return x.view(1, -1, *x.shape[2:])


def _instance_bwd(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, momentum: float, eps: float
) -> Grads:
    n = g.shape[0]
    if is_size(g.numel(), 0):
        return zeros(g, wrt, shapes)
    if wrt == {"bias"}:
        return {"bias": like_argument(grouped(g, g.shape[1]).sum((0, 3)), shapes, "bias")}
    # (As torch has them, which keeps such a copy of x.)
    contiguous = kernels.contiguous if is_final(g) else Tensor.contiguous
    g, saved = contiguous(g), type(saved)(saved, x=contiguous(saved["x"]))  # type: ignore[call-arg]
    if (fast := by_kernel({"y": g}, wrt, saved, shapes, g.shape[1], "x", True)) is not None:
        return fast
    weight = weight_or_ones(saved["weight"] if "x" in wrt else None, g, shapes)
    mean, rstd = saved["mean"].flatten(), saved["rstd"].flatten()
    mask = ["x" in wrt, "weight" in wrt, "bias" in wrt]
    dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        _as_one(g),
        _as_one(saved["x"]),
        None if weight is None else weight.repeat(n),
        None,
        None,
        mean,
        rstd,
        True,
        eps,
        mask,
    )
    grads = {"x": dx.view(g.shape)} if "x" in wrt else {}
    for name, by_example in (("weight", dweight), ("bias", dbias)):
        if name in wrt:
            grads[name] = like_argument(by_example.view(n, -1).sum(0), shapes, name)
    return grads


def _instance_bwd_from_output(
    gs: Gs, wrt: Mask, saved: Saved, shapes: Shapes, *, momentum: float, eps: float
) -> Grads:
    like = shapes["x"]
    return _from_output_of_groups(gs, wrt, saved, shapes, like.shape[1])


def _instance_node(
    row: str,
    wrt: Mask,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    momentum: float,
    eps: float,
) -> Tensor | None:
    if wrt != {"x"} or running_mean is not None or running_var is not None:
        return None
    if type(momentum) is not float:  # which it does not read, but stock may refuse
        return None
    by_loop = kernels.beats_batch_norm(x, True)
    return kernels.nodes.instance_norm(row, x, weight, bias, eps, by_loop)


_instance_norm = define(
    spec.INSTANCE_NORM, _instance_primal, _instance_bwd, _instance_fwd, node=_instance_node
)
_instance_norm_from_output = define(
    spec.INSTANCE_NORM_FROM_OUTPUT,
    _instance_primal,
    _instance_bwd_from_output,
    rstd_only(_instance_fwd),
    smooth=True,
)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As :func:`torch.nn.functional.group_norm`. Keeps the input and two numbers per group for the
    gradients of input and weight, nothing for that of the bias.

    Args:
        input: ``(n, c, *)``.
        weight, bias: ``(c,)`` or ``None``.
    """
    return _group_norm(input, weight, bias, num_groups=num_groups, eps=eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As :func:`torch.nn.functional.instance_norm`. Keeps the input and two numbers per channel of
    each example for the gradients of input and weight, nothing for that of the bias. With the
    running statistics, as :func:`batch_norm`.

    Args:
        input: ``(n, c, *)``.
        running_mean, running_var, weight, bias: ``(c,)`` or ``None``.
    """
    params = (running_mean, running_var, weight, bias)
    if use_input_stats is not True:
        if (
            use_input_stats is not False
            or is_traced(input)
            or not torch.is_grad_enabled()
            or not input.numel()
        ):  # (Or stock's error.)
            return F.instance_norm(input, *params, use_input_stats, momentum, eps)
        running = _as_weight(running_mean, running_var, input, weight)
        # (Of another layout stock makes a copy, too.)
        return batch_norm(input.contiguous(), *running, weight, bias, False, momentum, eps)
    return _instance_norm(input, *params, momentum=momentum, eps=eps)


@drop_in(spec.GROUP_NORM)
class GroupNorm(nn.GroupNorm):
    """As :class:`torch.nn.GroupNorm`. Keeps its input, or nothing for the bias alone."""

    def forward(self, input: Tensor) -> Tensor:
        if (y := by_node("group_norm_of", spec.GROUP_NORM, self, input)) is not None:
            return y
        own = for_stock(self, INPUT | WEIGHT, input)
        # Of another layout the stock op keeps a copy. (Under vmap none but the first is known.)
        if own is not None and (
            input.is_contiguous()
            or (
                not is_dynamo_compiling()
                and not _are_functorch_transforms_active()
                and input.is_contiguous(memory_format=(taken := _memory_format(input)))
                and (input.requires_grad or not _crashes_without_x(input, taken))
            )
        ):
            return F.group_norm(input, self.num_groups, *own, self.eps)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


@drop_in(spec.GROUP_NORM_FROM_OUTPUT)
class GroupNormFromOutput(nn.GroupNorm):
    """As :class:`torch.nn.GroupNorm`. Keeps its output, free where the next layer does; its input
    where a weight is zero or small beside its bias, or the dtype is of less than 32 bits.
    """

    fits = staticmethod(tells_its_input)

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if not is_invertible(input, weight, bias):
            return group_norm(input, self.num_groups, weight, bias, self.eps)
        options = {"num_groups": self.num_groups, "eps": self.eps}
        return _group_norm_from_output(input, weight, bias, **options)


def _apply_instance_norm(self: Any, input: Tensor) -> Tensor:
    """What the stock module does once it has checked its input."""
    if others() or is_replaced(nn.InstanceNorm2d):
        return nn.InstanceNorm2d._apply_instance_norm(self, input)
    weight, running_mean = self.weight, self.running_mean
    # Of another layout the stock op keeps a copy, and of vectors one for each example. (And of one
    # example its gradients are wrong where the incoming one is channels_last, in torch 2.13.)
    suffices = (
        weight is None
        and running_mean is None
        and not is_dynamo_compiling()
        and for_stock(self, INPUT, input) is not None
        and input.is_contiguous()
        and input.shape[0] > 1
        and not kernels.beats_batch_norm(input)
    )
    function = F.instance_norm if suffices else instance_norm
    return function(
        input,
        running_mean,
        self.running_var,
        weight,
        self.bias,
        self.training or not self.track_running_stats,
        0.0 if self.momentum is None else self.momentum,
        self.eps,
    )


@drop_in(spec.INSTANCE_NORM, spec.BATCH_NORM_EVAL)
class InstanceNorm1d(nn.InstanceNorm1d):
    """As :class:`torch.nn.InstanceNorm1d`. Keeps its input, or nothing for the bias alone."""

    _apply_instance_norm = _apply_instance_norm  # type: ignore[assignment]


@drop_in(spec.INSTANCE_NORM, spec.BATCH_NORM_EVAL)
class InstanceNorm2d(nn.InstanceNorm2d):
    """As :class:`torch.nn.InstanceNorm2d`. Keeps its input, or nothing for the bias alone."""

    _apply_instance_norm = _apply_instance_norm  # type: ignore[assignment]


@drop_in(spec.INSTANCE_NORM, spec.BATCH_NORM_EVAL)
class InstanceNorm3d(nn.InstanceNorm3d):
    """As :class:`torch.nn.InstanceNorm3d`. Keeps its input, or nothing for the bias alone."""

    _apply_instance_norm = _apply_instance_norm  # type: ignore[assignment]
