"""Spatial options, as several families of layers need them."""

from __future__ import annotations

from collections.abc import Sequence

Ints = int | Sequence[int]
Padding = int | str | Sequence[int | tuple[int, int]]


def per_axis(value: Ints, dims: int) -> tuple[int, ...]:
    """One value per spatial axis; an int is for all."""
    return (value,) * dims if isinstance(value, int) else tuple(value)
