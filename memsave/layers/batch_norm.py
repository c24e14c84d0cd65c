"""Batch normalization, ``y = (x - mean) * rstd * weight + bias`` per channel.

In eval mode the statistics are constants and ``y`` is affine in ``x``: its gradient needs no
activation. In train mode they depend on ``x``; forward keeps the two vectors.

Index legend: n batch, c channels; the statistics and parameters have one value per channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import kernels, spec
from .._context import is_final
from ..function import INPUT, WEIGHT, Grads, Mask, Saved, Shapes, by_node, define, for_stock
from ..kernels.memory import FORMATS
from .module import drop_in, parameters_of


def _primal_eval(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)


def _primal_train(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    momentum: float,
    eps: float,
) -> Tensor:
    return F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)


def _fwd_train(
    wrt: Mask, x: Tensor, *args: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, dict[str, Tensor]]:
    is_refused = x.ndim < 2 or x.shape[0] * x.shape[2:].numel() == 1
    if is_refused or not are_numbers(momentum, eps):
        return _primal_train(x, *args, momentum=momentum, eps=eps), {}  # raises stock's error
    y, mean, rstd = by_batch(x, *args, momentum=momentum, eps=eps)
    return y, {"mean": mean, "rstd": rstd}


def are_numbers(*options: Any) -> bool:
    """Whether stock takes these options for numbers."""
    return all(isinstance(option, float | int) for option in options)


def by_batch(
    x: Tensor, *vectors: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the statistics that it is normalized by; updates the running ones.

    ``vectors`` are these, weight and bias.
    """
    if (made := kernels.batch_norm(x, *vectors, momentum, eps)) is not None:
        return made
    running_mean, running_var, weight, bias = vectors
    # The op inside torch.batch_norm, which also returns the statistics.
    return torch.ops.aten._batch_norm_impl_index(
        x,
        weight,
        bias,
        running_mean,
        running_var,
        True,
        momentum,
        eps,
        torch.backends.cudnn.enabled,
    )[:3]


def _bias_gradient(g: Tensor, shapes: Shapes) -> Tensor:
    total = g.sum([axis for axis in range(g.ndim) if axis != 1], dtype=wide_dtype(g.dtype))
    return total.to(shapes["bias"].dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which stock computes statistics and sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def zeros(g: Tensor, wrt: Mask, shapes: Shapes) -> Grads:
    """The gradients of an empty batch, on which ``native_batch_norm_backward`` divides by zero."""
    likes = {name: shapes[name] for name in wrt}
    return {name: g.new_zeros(like.shape, dtype=like.dtype) for name, like in likes.items() if like}


def weight_or_ones(weight: Tensor | None, g: Tensor, shapes: Shapes) -> Tensor | None:
    """The weight for a kernel that does not read it: without one, the kernel's own derivative
    leaves out the gradients of weight and bias.
    """
    like = shapes["weight"] or shapes["bias"]
    if weight is not None or like is None:
        return weight
    return torch.ones(like.shape, dtype=like.dtype, device=g.device)


#: Of fewer elements, or in 16 bits, one operation that passes over them twice is faster than
#: several of which one passes over them (on two cores, as measured).
FEW_AT_ONCE = 2**17


def _scaled(g: Tensor, var: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The gradient of ``x`` in eval mode."""
    at_once = (g.numel() < FEW_AT_ONCE or g.itemsize < 4) and g.is_cpu and is_final(g)
    # (Of rows, that operation reads vectors as if they were contiguous.)
    vectors = [v for v in (var, weight) if v is not None]
    if at_once and all(v.is_contiguous() for v in vectors):
        # It reads x and the mean, for which g and the variance stand in, for the other two alone.
        args = (g, g, weight, var, var, None, None, False, eps, [True, False, False])
        return torch.ops.aten.native_batch_norm_backward(*args)[0]
    wide = wide_dtype(g.dtype)
    scale = var.to(wide).add(eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(wide)
    return (g * scale.view(-1, *[1] * (g.ndim - 2))).to(g.dtype)


def _bwd_eval(g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, eps: float) -> Grads:
    if not g.numel():
        return zeros(g, wrt, shapes)
    grads: Grads = {}
    if "x" in wrt:
        grads["x"] = _scaled(g, saved["running_var"], saved["weight"], eps)
    if "weight" in wrt:
        mean, var = saved["running_mean"], saved["running_var"]
        mask = [False, True, "bias" in wrt]
        ones, none = weight_or_ones(None, g, shapes), mean.new_empty(0)  # (which CUDA asks for)
        _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            g, saved["x"], ones, mean, var, none, none, False, eps, mask
        )
        grads |= _cast({"weight": dweight, "bias": dbias}, wrt - {"x"}, shapes)
    elif "bias" in wrt:
        grads["bias"] = _bias_gradient(g, shapes)
    return grads


def _bwd_train(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, momentum: float, eps: float
) -> Grads:
    if not g.numel():
        return zeros(g, wrt, shapes)
    if wrt == {"bias"}:
        return {"bias": _bias_gradient(g, shapes)}
    weight = saved["weight"] if "x" in wrt else None
    if is_final(g):
        residuals = (saved["x"], saved["mean"], saved["rstd"], weight)
        if (made := kernels.batch_norm_backward(g, *residuals, wrt)) is not None:
            return made
    weight = weight_or_ones(weight, g, shapes)
    mask = [name in wrt for name in ("x", "weight", "bias")]
    # Stock's op: its own derivative accounts for mean and rstd being functions of x.
    dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        g, saved["x"], weight, None, None, saved["mean"], saved["rstd"], True, eps, mask
    )
    return _cast({"x": dx, "weight": dweight, "bias": dbias}, wrt, shapes)


def _cast(grads: dict[str, Tensor | None], wrt: Mask, shapes: Shapes) -> Grads:
    """The wanted gradients in the dtypes of their arguments."""
    return {name: grads[name].to(shapes[name].dtype) for name in wrt}  # type: ignore[union-attr]


def _node_eval(
    row: str,
    wrt: Mask,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
) -> Tensor | None:
    if wrt != {"x"} or eps <= 0:  # (which torch 2.11 refuses)
        return None
    return kernels.nodes.batch_norm_eval(row, x, mean, var, weight, bias, eps)


# torch.compile decomposes stock batch_norm, and then keeps no more than these rows.
_batch_norm_eval = define(
    spec.BATCH_NORM_EVAL,
    _primal_eval,
    _bwd_eval,
    stock_keeps=lambda wrt: ("x", "running_mean", "running_var", "weight"),
    compiled=False,
    shapes=("x", "weight", "bias"),
    node=_node_eval,
)
_batch_norm_train = define(
    spec.BATCH_NORM_TRAIN, _primal_train, _bwd_train, _fwd_train, compiled=False
)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As :func:`torch.nn.functional.batch_norm`.

    Not training, it keeps the input only for the gradient of the weight. Training, it keeps the
    input and two vectors for the gradients of input and weight, and nothing for that of the bias.

    Args:
        input: ``(n, c, *)``.
        running_mean, running_var, weight, bias: ``(c,)`` or ``None``. The running statistics are
            updated in place when training, and may be ``None`` then.
    """
    if training is True and eps > 0:
        options = {"momentum": momentum, "eps": eps}
        return _batch_norm_train(input, running_mean, running_var, weight, bias, **options)
    is_refused = training is not False or eps < 0 or momentum is None
    if is_refused or running_mean is None or running_var is None:  # stock's error
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return _batch_norm_eval(input, running_mean, running_var, weight, bias, eps=eps)


def _forward(module: Any, input: Tensor) -> Tensor:
    """Which statistics to use and to update: https://docs.pytorch.org/docs/stable/nn.html."""
    axes = _AXES.get(type(module))
    if axes is not None:
        row = spec.BATCH_NORM_EVAL
        if (y := by_node("batch_norm_of", row, module, input, *axes)) is not None:
            return y
    module._check_input_dim(input)
    training, momentum, tracks = module.training, module.momentum, module.track_running_stats
    # (In stock's order, which torch.export shows.)
    if training and tracks and (count := module.num_batches_tracked) is not None:
        count.add_(1)
        if momentum is None:  # cumulative average
            momentum = 1.0 / float(count)
    mean, var = module.running_mean, module.running_var
    if (own := _for_stock(module, training, input)) is None:
        function, own = batch_norm, parameters_of(module)
    else:
        function = F.batch_norm
    by_batch = bool(training or (mean is None and var is None))
    if training and not tracks:
        mean = var = None
    momentum = 0.0 if momentum is None else momentum
    return function(input, mean, var, *own, by_batch, momentum, module.eps)


def _for_stock(module: Any, training: bool, input: Tensor) -> tuple[Any, Any] | None:
    """(Without a weight, its second derivative leaves out terms. On CUDA it keeps a copy of ``x``
    where that is stored in neither of torch's formats; on other devices it may.)
    """
    if is_dynamo_compiling():
        return None  # as it traces the stock op of every call
    # Not training, the gradient of the input reads none of it.
    own = for_stock(module, INPUT | WEIGHT if training else WEIGHT, input)
    if own is None or own[0] is None:
        return None
    if input.is_cuda:
        last = FORMATS.get(input.ndim)
        is_as_read = input.is_contiguous() or (last and input.is_contiguous(memory_format=last))
        return own if is_as_read else None
    return None if not input.is_cpu or (training and kernels.beats_batch_norm(input)) else own


@drop_in(spec.BATCH_NORM_EVAL, spec.BATCH_NORM_TRAIN)
class BatchNorm1d(nn.BatchNorm1d):
    """As :class:`torch.nn.BatchNorm1d`."""

    def forward(self, input: Tensor) -> Tensor:
        return _forward(self, input)


@drop_in(spec.BATCH_NORM_EVAL, spec.BATCH_NORM_TRAIN)
class BatchNorm2d(nn.BatchNorm2d):
    """As :class:`torch.nn.BatchNorm2d`."""

    def forward(self, input: Tensor) -> Tensor:
        return _forward(self, input)


@drop_in(spec.BATCH_NORM_EVAL, spec.BATCH_NORM_TRAIN)
class BatchNorm3d(nn.BatchNorm3d):
    """As :class:`torch.nn.BatchNorm3d`."""

    def forward(self, input: Tensor) -> Tensor:
        return _forward(self, input)


#: How many axes an input has, from to, of these classes themselves.
_AXES = {BatchNorm1d: (2, 3), BatchNorm2d: (4, 4), BatchNorm3d: (5, 5)}
