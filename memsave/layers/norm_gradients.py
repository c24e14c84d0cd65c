"""The gradients of all norms of each example, for
``y = xhat * weight + bias``, where ``xhat = (x - mean) * rstd`` over the elements of a group.

They read ``xhat``, which comes from ``x`` and the statistics, or from ``y`` and the parameters;
that of the bias reads nothing.

Index legend: n batch, g groups, k features of a group, s places; statistics are (n, g, 1, 1) and
parameters (g, k, 1). Layer and RMS normalization have one group and one place.
"""

from __future__ import annotations

import math

from torch import Tensor

from .. import kernels
from .._context import is_final
from ..function import Grads, Mask, Saved, Shapes
from ..kernels.reference import Rows
from .batch_norm import wide_dtype
from .shape import in_format

Gs = dict[str, Tensor]


def wide(tensor: Tensor) -> Tensor:
    """In the dtype of statistics and sums."""
    return tensor.to(wide_dtype(tensor.dtype))


def _spread(vector: Tensor, groups: int | None) -> Tensor:
    """A parameter against the grouped ``x``."""
    return wide(vector).reshape(groups or 1, -1, 1)


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


def by_kernel(
    gs: Gs,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    groups: int | None,
    kept: str,
    centered: bool,
    shift: int = 0,
) -> Grads | None:
    """By a kernel, if there is one, of which no derivative is asked."""
    if not in_one_pass(gs, wrt):
        return None
    of_output = kept == "y"
    rows = Rows(
        g=gs["y"],
        kept=saved[kept],
        mean=saved["mean"] if centered and not of_output else None,
        rstd=saved["rstd"] if "x" in wrt or not of_output else None,
        weight=saved["weight"] if "x" in wrt or of_output else None,
        bias=saved["bias"] if centered and of_output else None,
        shift=float(shift),
        from_output=of_output,
        centered=centered,
        groups=groups,
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
    if (grad.shape, grad.dtype) == (like.shape, like.dtype):
        return grad
    return grad.reshape(like.shape).to(like.dtype)


def grouped(tensor: Tensor, groups: int | None) -> Tensor:
    """``(n, c, *s)`` to ``(n, g, k, s)``; without groups ``(*n, i)`` to ``(n, 1, i, 1)``."""
    if groups is None:
        return wide(tensor).reshape(math.prod(tensor.shape[:-1]), 1, tensor.shape[-1], 1)
    n, c, *s = tensor.shape
    return wide(tensor).reshape(n, groups, c // groups, math.prod(s))


def _statistic(tensor: Tensor, groups: int | None) -> Tensor:
    """A statistic against the grouped ``x``."""
    return wide(tensor).reshape(-1, groups or 1, 1, 1)


def from_input(
    gs: Gs,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    groups: int | None,
    *,
    centered: bool = True,
    shift: int = 0,
) -> Grads:
    """All gradients by ``xhat = (x - mean) * rstd``.

    Args:
        gs: The gradient of ``y`` and, in double backward, of the statistics.
        groups: How many; ``None`` for one over the last axis.
        centered: Whether there is a mean.
        shift: What the layer adds to its weight.
    """
    if (fast := by_kernel(gs, wrt, saved, shapes, groups, "x", centered, shift)) is not None:
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
    if (fast := by_kernel(gs, wrt, saved, shapes, groups, "y", centered)) is not None:
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
