"""Spatial options, as several families of layers need them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Ints = int | Sequence[int]
Padding = int | str | Sequence[int | tuple[int, int]]


def per_axis(value: Ints, dims: int) -> tuple[int, ...]:
    """One value per spatial axis; an int is for all."""
    return (value,) * dims if isinstance(value, int) else tuple(value)


def as_tuple(value: Any) -> tuple[int, ...]:
    """One or several, as Flax takes axes and sizes."""
    return tuple(value) if isinstance(value, Iterable) else (value,)
