"""Layer and RMS normalization, and the gradients of all norms of each example:
``y = xhat * weight + bias``, where ``xhat = (x - mean) * rstd`` over the elements of a group.

The gradients read ``xhat``, which comes from ``x`` and the statistics, or from ``y`` and the
parameters; that of the bias reads nothing.

Index legend: n batch, g groups, k features of a group, s places; statistics are (n, g, 1, 1) and
parameters (g, k, 1). Layer and RMS normalization have one group and one place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from .. import kernels, spec
from ..function import (
    INPUT,
    WEIGHT,
    Grads,
    Mask,
    Saved,
    Shapes,
    define,
    for_stock,
    is_final,
    is_traced,
    is_value_known,
    widened,
)
from ..kernels.reference import Like, Rows
from .batch_norm import weight_or_ones, wide_dtype
from .module import drop_in
from .shape import in_format

Gs = dict[str, Tensor]


def _wide(tensor: Tensor) -> Tensor:
    """In the dtype of statistics and sums."""
    return tensor.to(wide_dtype(tensor.dtype))


def _spread(vector: Tensor, groups: int | None) -> Tensor:
    """A parameter against the grouped ``x``."""
    return _wide(vector).reshape(groups or 1, -1, 1)


def _gradients(
    gs: Gs,
    groups: int | None,
    wrt: Mask,
    xhat: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    shapes: Shapes,
    *,
    centered: bool = True,
) -> Grads:
    """All gradients, from grouped arrays in a wide dtype.

    In double backward the statistics have gradients, as functions of ``x``: ``d mean = d x / N``
    and ``d rstd = - rstd^2 xhat d x / N``.
    """
    g, grads = grouped(gs["y"], groups), {}
    if "bias" in wrt:
        grads["bias"] = g.sum((0, 3))
    if "weight" in wrt:
        assert xhat is not None
        grads["weight"] = (g * xhat).sum((0, 3))
    if "x" in wrt:
        assert xhat is not None
        assert rstd is not None
        gw = g if weight is None else g * weight
        dx = gw - xhat * (gw * xhat).mean((2, 3), keepdim=True)
        if centered:
            dx = dx - gw.mean((2, 3), keepdim=True)
        dx = dx * rstd
        count = math.prod(g.shape[2:])
        if "rstd" in gs:
            dx = dx - (_statistic(gs["rstd"], groups) * rstd.square() / count) * xhat
        if "mean" in gs:
            dx = dx + _statistic(gs["mean"], groups) / count
        grads["x"] = dx
    return {name: like_argument(grad, shapes, name) for name, grad in grads.items()}


def at_once(
    gs: Gs,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    groups: int | None,
    kept: str,
    centered: bool,
    shift: float = 0.0,
) -> Grads | None:
    """By a kernel, if there is one, of which no derivative is asked."""
    if not in_one_pass(gs, wrt):
        return None
    of_output = kept == "y"
    rows = Rows(
        gs["y"],
        saved[kept],
        saved["mean"] if centered and not of_output else None,
        saved["rstd"] if "x" in wrt or not of_output else None,
        saved["weight"] if "x" in wrt or of_output else None,
        saved["bias"] if centered and of_output else None,
        shift,
        of_output,
        centered,
        groups,
    )
    grads = kernels.norm(rows, wrt)
    if grads is not None:
        for name in wrt:
            grads[name] = like_argument(grads[name], shapes, name)
    return grads


def in_one_pass(gs: Gs, wrt: Mask) -> bool:
    """Whether one kernel may make all gradients: no derivative of them is asked, and they are not
    a mere sum.
    """
    return gs.keys() == {"y"} and wrt != {"bias"} and is_final(gs["y"])


def formatted(grads: Grads, shapes: Shapes) -> Grads:
    """Where stock's gradient has the memory format of ``x``."""
    return {**grads, "x": in_format(grads["x"], shapes["x"])} if "x" in grads else grads


def like_argument(grad: Tensor, shapes: Shapes, name: str) -> Tensor:
    """The gradient in the shape and dtype of its argument."""
    like = shapes[name]
    assert like is not None
    if (grad.shape, grad.dtype) == (like.shape, like.dtype):
        return grad
    return grad.reshape(like.shape).to(like.dtype)


def grouped(tensor: Tensor, groups: int | None) -> Tensor:
    """``(n, c, *s)`` to ``(n, g, k, s)``; without groups ``(*n, i)`` to ``(n, 1, i, 1)``."""
    if groups is None:
        return _wide(tensor).reshape(tensor.shape[:-1].numel(), 1, tensor.shape[-1], 1)
    n, c, *s = tensor.shape
    return _wide(tensor).reshape(n, groups, c // groups, math.prod(s))


def _statistic(tensor: Tensor, groups: int | None) -> Tensor:
    """A statistic against the grouped ``x``."""
    return _wide(tensor).reshape(-1, groups or 1, 1, 1)


def from_input(
    gs: Gs,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    groups: int | None,
    *,
    centered: bool = True,
    shift: float = 0.0,
) -> Grads:
    """All gradients by ``xhat = (x - mean) * rstd``.

    Args:
        gs: The gradient of ``y`` and, in double backward, of the statistics.
        groups: How many; ``None`` for one over the last axis.
        centered: Whether there is a mean.
        shift: What the layer adds to its weight.
    """
    if (fast := at_once(gs, wrt, saved, shapes, groups, "x", centered, shift)) is not None:
        return fast
    xhat = rstd = weight = None
    if wrt != {"bias"}:
        rstd, xhat = _statistic(saved["rstd"], groups), grouped(saved["x"], groups)
        xhat = (xhat - _statistic(saved["mean"], groups) if centered else xhat) * rstd
    if "x" in wrt and saved["weight"] is not None:
        weight = _spread(saved["weight"], groups) + shift
    return _gradients(gs, groups, wrt, xhat, rstd, weight, shapes, centered=centered)


def from_output(
    gs: Gs, wrt: Mask, saved: Saved, shapes: Shapes, groups: int | None, *, centered: bool = True
) -> Grads:
    """By ``xhat = (y - bias) / weight``."""
    if (fast := at_once(gs, wrt, saved, shapes, groups, "y", centered)) is not None:
        return fast
    xhat = rstd = weight = None
    if wrt != {"bias"}:
        xhat = grouped(saved["y"], groups)
        if centered and saved["bias"] is not None:
            xhat = xhat - _spread(saved["bias"], groups)
        if saved["weight"] is not None:
            weight = _spread(saved["weight"], groups)
            xhat = xhat / weight
    if "x" in wrt:
        rstd = _statistic(saved["rstd"], groups)
    return _gradients(gs, groups, wrt, xhat, rstd, weight, shapes, centered=centered)


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
        bias = g.new_empty(1, dtype=bias.dtype).expand(bias.shape)
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
    from_y: bool,
    centered: bool,
    row: str,
    wrt: Mask,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float | None,
    num_groups: int = 0,
) -> Tensor | None:
    """Of all norms here, but for gradients of the bias alone."""
    if wrt == {"bias"}:
        return None
    wants_x = "x" in wrt
    return kernels.nodes.norm(row, x, weight, bias, num_groups, from_y, centered, wants_x, eps)


_layer_norm = define(spec.LAYER_NORM, _layer_primal, _layer_bwd, _layer_fwd, autocast=widened)
_layer_norm_from_output = define(
    spec.LAYER_NORM_FROM_OUTPUT,
    _layer_primal,
    _layer_bwd_from_output,
    rstd_only(_layer_fwd),
    autocast=widened,
    smooth=True,
    node=partial(norm_node, True, True),
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
    wide = _wide(x)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = wide.square().mean(-1).add_(eps).rsqrt_()
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
    node=partial(norm_node, False, False),
)
_rms_norm_from_output = define(
    spec.RMS_NORM_FROM_OUTPUT,
    _rms_primal,
    _rms_bwd_from_output,
    _rms_fwd,
    autocast=RMS_AUTOCAST,
    smooth=True,
    node=partial(norm_node, True, False),
)


# The functions.


def _over_last(
    input: Tensor, normalized_shape: Sequence[int], *params: Tensor | None
) -> tuple[Any, ...] | None:
    """The input and parameters with the normalized axes as one; None where stock is to run."""
    at_a_look = None if is_dynamo_compiling() else kernels.nodes
    if at_a_look is not None and at_a_look.is_over_last(input, normalized_shape, *params):
        return input, *params
    dims = len(normalized_shape)
    shape = tuple(normalized_shape)
    if is_traced(input) or input.is_nested or not dims or input.shape[-dims:] != shape:
        return None
    for param in params:
        if param is not None and param.shape != shape:
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


#: How many times larger than the weight the bias may be: xhat loses as many bits as this has.
LARGEST_RATIO = 16
#: By dtype, the least weight: of smaller ones ``xhat * weight`` has fewer digits. (Its inverse is
#: the largest.)
LEAST_WEIGHT = {
    dtype: torch.finfo(dtype).tiny / torch.finfo(dtype).eps
    for dtype in (torch.float32, torch.float64)
}


def is_invertible(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether ``xhat`` can be read off ``y``: its dtype is wide, and no weight is (nearly) zero or
    infinite, or small beside its bias.

    On an accelerator it waits for the device, once per version of the parameters; of what is
    written to their ``.data`` there are no versions.
    """
    least = LEAST_WEIGHT.get(input.dtype)
    if least is None or not torch.is_grad_enabled():
        return False
    if kernels.nodes is not None and not is_dynamo_compiling():
        is_known = kernels.nodes.is_invertible(input, weight, bias, least, LARGEST_RATIO)
        if is_known is not None:
            return is_known
    if not is_value_known(input):
        return False
    if isinstance(input, FakeTensor) or input.is_meta:
        return True  # as if they were like those of a trained model
    if weight is None:
        return bias is None
    return (_tells if input.is_cpu else tells_once)(weight, bias, least)


def _tells(weight: Tensor, bias: Tensor | None, least: float) -> bool:
    with torch.no_grad():
        size = weight.abs()
        fits = (size >= least) & (size <= 1 / least)
        if bias is not None:
            fits = fits & (bias.abs() <= LARGEST_RATIO * size)
        return bool(fits.all())


def tells_its_input(module: Any) -> bool:
    """Whether ``xhat`` can be read off the output of a norm with the parameters that it has now."""
    weight, bias = module.weight, getattr(module, "bias", None)
    if weight is None:
        return bias is None
    least = LEAST_WEIGHT.get(weight.dtype)
    if least is None or type(weight) not in (Tensor, nn.Parameter) or weight.is_meta:
        return True
    return _tells(weight, bias, least)


#: What was found, by the ``id`` of the weight. (Weak references are to storages: tensors that have
#: some cannot be swapped, ``torch.utils.swap_tensors``.)
_found: dict[int, tuple[Any, bool]] = {}


def tells_once(weight: Tensor, bias: Tensor | None, least: float) -> bool:
    """As ``_tells``, looked up once per version of the parameters."""
    state = [
        (id(tensor), tensor._version, StorageWeakRef(tensor.untyped_storage()))
        for tensor in (weight, bias)
        if tensor is not None
    ]
    found = _found.get(id(weight))
    if found is None:
        for key, ((first, *_), _) in [*_found.items()]:
            if first[-1].expired():
                _found.pop(key, None)
    if found is None or found[0] != state:
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # A CUDA graph cannot wait for a look.
        found = _found[id(weight)] = (state, _tells(weight, bias, least))
    return found[1]


@drop_in(spec.LAYER_NORM)
class LayerNorm(nn.LayerNorm):
    """As :class:`torch.nn.LayerNorm`. Keeps its input, or nothing for the bias alone."""

    def forward(self, input: Tensor) -> Tensor:
        if (own := for_stock(self, INPUT | WEIGHT, input)) is not None:
            # (Without what F.layer_norm does for those who look at functions.)
            stock = F.layer_norm if _len_torch_function_stack() else torch.layer_norm
            return stock(input, self.normalized_shape, *own, self.eps)
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


@drop_in(spec.LAYER_NORM_FROM_OUTPUT)
class LayerNormFromOutput(nn.LayerNorm):
    """As :class:`torch.nn.LayerNorm`. Keeps its output, free where the next layer does; its input
    where a weight is zero or small beside its bias, or the dtype is of less than 32 bits.
    """

    fits = staticmethod(tells_its_input)

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        flat = _over_last(input, self.normalized_shape, weight, bias)
        if flat is None or not is_invertible(input, weight, bias):
            return layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return _shaped(_layer_norm_from_output(*flat, eps=self.eps), input, True)


@drop_in(spec.RMS_NORM)
class RMSNorm(nn.RMSNorm):
    """As :class:`torch.nn.RMSNorm`. Keeps its input, once."""

    def forward(self, x: Tensor) -> Tensor:
        # On CUDA, stock's kernel keeps the same.
        if getattr(x, "is_cuda", False) and x.is_contiguous() and _is_fused(x, self.weight):
            own = for_stock(self, INPUT | WEIGHT, x, casts=True, has_bias=False)
            if own is not None:
                return F.rms_norm(x, self.normalized_shape, own[0], self.eps)
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


@drop_in(spec.RMS_NORM_FROM_OUTPUT)
class RMSNormFromOutput(nn.RMSNorm):
    """As :class:`torch.nn.RMSNorm`. Keeps its output; its input where a weight is zero, or the
    dtype is of less than 32 bits.
    """

    fits = staticmethod(tells_its_input)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        flat = _over_last(x, self.normalized_shape, weight)
        if flat is None or not is_invertible(x, weight, None):
            return rms_norm(x, self.normalized_shape, weight, self.eps)
        return _shaped(_rms_norm_from_output(*flat, eps=self.eps), x, True)
