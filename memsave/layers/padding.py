"""Padding by reflection and replication, whose gradient depends on shapes alone; torch keeps the
input to know its shape. (Of constant and circular padding it keeps nothing.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels, spec
from ..function import Grads, Mask, Saved, Shapes, define
from ..kernels.reference import Like
from .module import drop_in
from .shape import by_shape, in_format, placeholder


def _primal(x: Tensor, *, pad: Sequence[int], mode: str) -> Tensor:
    return F.pad(x, pad, mode)  # type: ignore[arg-type]


def unpad(g: Tensor, like: Like, pad: Sequence[int], mode: str) -> Tensor:
    """The gradient of what was padded: what was copied is added to where it came from."""
    kind = {"reflect": "reflection", "replicate": "replication"}[mode]
    backward = getattr(torch.ops.aten, f"{kind}_pad{len(pad) // 2}d_backward")
    if not g.is_cpu:
        return in_format(backward(g, placeholder(g, like.shape), pad), like)
    return by_shape(backward, g, like, pad)


def _bwd(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, pad: Sequence[int], mode: str
) -> Grads:
    return {"x": unpad(g, shapes["x"], pad, mode)}


def _node(row: str, wrt: Mask, x: Tensor, *, pad: Sequence[int], mode: str) -> Tensor | None:
    return kernels.nodes.pad(row, x, mode == "replicate", pad)


def _stock_keeps_x(*, pad: Sequence[int], mode: str) -> bool:
    return mode != "circular"


_pad = define(
    spec.PAD, _primal, _bwd, stock_keeps=lambda wrt: (), unless=_stock_keeps_x, node=_node
)


def pad(
    input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    """As :func:`torch.nn.functional.pad`. Keeps nothing.

    Args:
        input: ``(n, c, *s)``, or without ``n``, for the modes that are not ``"constant"``.
        pad: Of each axis of ``s``, the last one first, how many places before and after.
    """
    is_none = value is None or (isinstance(value, float | int) and value == 0)
    if mode not in ("reflect", "replicate") or not is_none:  # (stock says that these take none)
        return F.pad(input, pad, mode, value)  # type: ignore[arg-type]
    return _pad(input, pad=pad, mode=mode)


def _reflect(self: Any, input: Tensor) -> Tensor:
    return _pad(input, pad=self.padding, mode="reflect")


def _replicate(self: Any, input: Tensor) -> Tensor:
    return _pad(input, pad=self.padding, mode="replicate")


@drop_in(spec.PAD)
class ReflectionPad1d(nn.ReflectionPad1d):
    """As :class:`torch.nn.ReflectionPad1d`. Keeps nothing."""

    forward = _reflect


@drop_in(spec.PAD)
class ReflectionPad2d(nn.ReflectionPad2d):
    """As :class:`torch.nn.ReflectionPad2d`. Keeps nothing."""

    forward = _reflect


@drop_in(spec.PAD)
class ReflectionPad3d(nn.ReflectionPad3d):
    """As :class:`torch.nn.ReflectionPad3d`. Keeps nothing."""

    forward = _reflect


@drop_in(spec.PAD)
class ReplicationPad1d(nn.ReplicationPad1d):
    """As :class:`torch.nn.ReplicationPad1d`. Keeps nothing."""

    forward = _replicate


@drop_in(spec.PAD)
class ReplicationPad2d(nn.ReplicationPad2d):
    """As :class:`torch.nn.ReplicationPad2d`. Keeps nothing."""

    forward = _replicate


@drop_in(spec.PAD)
class ReplicationPad3d(nn.ReplicationPad3d):
    """As :class:`torch.nn.ReplicationPad3d`. Keeps nothing."""

    forward = _replicate
