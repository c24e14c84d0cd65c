"""What the properties compare, in terms of no framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Array(NamedTuple):
    """An array of any backend. ``layout`` is what the backend says of its place in memory."""

    dtype: str
    shape: tuple[int, ...]
    layout: tuple[int, ...]
    values: np.ndarray

    def __repr__(self) -> str:
        return f"Array({self.dtype}, {self.layout}, {self.values.tolist()})"


class Result(NamedTuple):
    """What a call did.

    Args:
        outputs: What it returned.
        args: Its arguments afterwards (running statistics, ``inplace``).
        grads: The gradients that were wanted.
        drawn: The next random number after backward: says how many were drawn.
    """

    outputs: list[Array]
    args: dict[str, Array]
    grads: dict[str, Array]
    drawn: float

    def results(self) -> list[Array]:
        return [*self.outputs, *self.grads.values()]


class Kept(NamedTuple):
    """What is kept for backward: bits of each argument or ``y`` by name, and of the extras.

    What has no elements is left out: it costs nothing.
    """

    named: dict[str, int]
    extras: list[int]

    @classmethod
    def of(cls, named: Mapping[str, int], extras: Iterable[int]) -> Kept:
        return cls({k: v for k, v in named.items() if v}, sorted(v for v in extras if v))

    def total(self) -> int:
        return sum(self.named.values()) + sum(self.extras)


def remembered(run: Callable[..., Result]) -> Callable[..., Result]:
    """The same method of a backend, which asks stock but once for what it does in a case: whether
    it accepts it, and what ours is compared with, by one property after another.
    """
    results: dict[Any, Result] = {}

    @functools.wraps(run)
    def wrapped(self: Any, row: Any, case: Any, *, stock: bool = False) -> Result:
        if not stock:
            return run(self, row, case)
        asked = (self.stock(row), row.name, repr(case))
        if asked not in results:
            results[asked] = run(self, row, case, stock=True)
        return results[asked]

    return wrapped
