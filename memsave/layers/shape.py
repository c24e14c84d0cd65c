"""Spatial options and layouts, as several families of layers need them."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.reference import Like

Ints = int | Sequence[int]


def per_axis(value: Ints, dims: int) -> list[int]:
    """One value per spatial axis; torch accepts an int or a sequence of one for all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def channels_last(like: Like, dims: int) -> bool:
    """Whether a batched tensor stores its channels as the last axis (and they are several)."""
    return len(like.shape) == dims + 2 and like.shape[1] > 1 and like.stride[1] == 1
