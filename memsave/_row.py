"""What a row of the table is: :class:`Layer`. The rows themselves are in :mod:`memsave.spec`.

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType
from typing import Any, Literal

Shape = tuple[int, ...]
Packing = Literal["storage", "last"]


@dataclass(frozen=True)
class Extra:
    """A tensor that forward makes for backward.

    Args:
        axes: Its named axes; an axis that no argument has is free (its size is the backend's).
        bits: Bits per element; a function of the options and the sizes of the named axes; or
            ``None`` for an extra whose dtype follows the computation (statistics), to be passed to
            :meth:`Layer.saved_bits`.
    """

    axes: str
    bits: int | Callable[[Mapping[str, Any], Mapping[str, Shape]], int] | None = None


@dataclass(frozen=True)
class Layer:
    """One row of the table.

    Args:
        name: Unique name of the row.
        args: Tensor arguments, in call order, with their named axes.
        y: Named axes of the output.
        reads: For each differentiable argument, the residuals that its gradient reads.
        extras: The residuals that are neither arguments nor ``y``.
        op: What the row computes; rows with one ``op`` are interchangeable. Default: ``name``.
        optional: Arguments that may be absent.
        integers: The arguments that are integers, each with the axis that it holds indices into.
        options: Static options with the values that the tests draw; the first is the default.
        inplace: Whether the option ``inplace`` makes ``y`` overwrite the first argument.
        wide: Whether it is only for arguments of at least 32 bits: what the gradients read is
            rounded to the dtype of ``y``, and they may lose what is left of it in fewer.

    Raises:
        ValueError: The row contradicts itself; the message names the row and the culprit.
    """

    name: str
    args: Mapping[str, str]
    y: str
    reads: Mapping[str, tuple[str, ...]]
    extras: Mapping[str, Extra] = field(default_factory=dict)
    op: str = ""
    optional: tuple[str, ...] = ()
    integers: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inplace: bool = False
    wide: bool = False
    _saves: Mapping[frozenset[str], tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("args", "reads", "extras", "integers", "options"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        object.__setattr__(self, "op", self.op or self.name)
        self._validate()
        # Every mask once, so that asking is a look-up (and nothing for torch.compile to trace).
        object.__setattr__(self, "_saves", {wrt: self._union(wrt) for wrt in self.masks()})

    def _validate(self) -> None:
        def fail(problem: str) -> None:
            raise ValueError(f"row {self.name!r}: {problem}")

        residuals = {*self.args, "y", *self.extras}
        if len(residuals) != len(self.args) + 1 + len(self.extras):
            fail("an extra has the name of an argument or of the output")
        for arg, names in self.reads.items():
            if arg not in self.args:
                fail(f"reads for {arg!r}, which is no argument")
            for name in names:
                if name not in residuals:
                    fail(f"the gradient of {arg!r} reads {name!r}, which the row does not declare")
        read = {name for names in self.reads.values() for name in names}
        for name in self.extras:
            if name not in read:
                fail(f"the extra {name!r} is read by no gradient")
        for name in self.optional:
            if name not in self.args:
                fail(f"the optional {name!r} is no argument")
        for name, axis in self.integers.items():
            if name not in self.args or name in self.reads:
                fail(f"the integers {name!r} are no argument without a gradient")
            if not any(axis in axes.split() for axes in self.args.values()):
                fail(f"the integers {name!r} are indices into {axis!r}, which is no axis")
        for name, values in self.options.items():
            if not values:
                fail(f"the option {name!r} has no value")
        if self.inplace and True not in self.options.get("inplace", ()):
            fail("it is inplace, which is no option")
        for axes in (*self.args.values(), self.y, *(e.axes for e in self.extras.values())):
            if sum(token.startswith("*") for token in axes.split()) > 1:
                fail(f"{axes!r} has more than one starred axis")

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<row {self.name}>"

    def masks(self) -> list[frozenset[str]]:
        """All masks, the empty one included."""
        names = list(self.reads)
        return [
            frozenset(subset)
            for size in range(len(names) + 1)
            for subset in combinations(names, size)
        ]

    def _union(self, wrt: frozenset[str]) -> tuple[str, ...]:
        read = {name for arg in wrt for name in self.reads[arg]}
        return tuple(name for name in (*self.args, "y", *self.extras) if name in read)

    def saves(self, wrt: frozenset[str]) -> tuple[str, ...]:
        """Names of what is kept for the gradients ``wrt``: arguments, then ``y``, then extras.

        Raises:
            ValueError: ``wrt`` names something that has no gradient here.
        """
        if wrt not in self._saves:
            raise ValueError(f"row {self.name!r} has gradients for {[*self.reads]}, not {[*wrt]}")
        return self._saves[wrt]

    def reason(self, wrt: Iterable[str]) -> str:
        """Why it keeps what it keeps, e.g. ``"x reads weight; weight reads x"``."""
        wanted = frozenset(wrt)
        parts = (
            f"{arg} reads {', '.join(names) or 'nothing'}"
            for arg, names in self.reads.items()
            if arg in wanted
        )
        return "; ".join(parts)

    def saved_bits(
        self,
        wrt: Iterable[str],
        shapes: Mapping[str, Shape | None],
        bits: Mapping[str, int],
        options: Mapping[str, Any] | None = None,
        packing: Packing = "storage",
    ) -> dict[str, int]:
        """Size in bits of each kept residual.

        Args:
            wrt: The arguments whose gradient is wanted.
            shapes: Shape of every argument that is not absent and of ``y``; of an extra only
                if one of its axes is free.
            bits: Bits per element of arguments and ``y``, and of extras whose dtype is free.
            options: The static options of the call.
            packing: Extras of less than a byte per element fill whole bytes either over the whole
                array ("storage") or along the last axis ("last").

        Raises:
            ValueError: The shapes do not fit the row's axes.
        """
        options = options or {}
        sizes = self._bind(shapes, options)
        saved = {}
        for name in self.saves(frozenset(wrt)):
            if name in self.extras:
                extra = self.extras[name]
                each = extra.bits(options, sizes) if callable(extra.bits) else extra.bits
                each = bits[name] if each is None else each
                saved[name] = _packed(_shape(extra.axes, sizes, options), each, packing)
            elif (shape := shapes.get(name)) is not None:
                saved[name] = math.prod(shape) * bits[name]
        return saved

    def _bind(
        self, shapes: Mapping[str, Shape | None], options: Mapping[str, Any]
    ) -> dict[str, Shape]:
        """Sizes of the named axes (a starred axis has any number of them)."""
        sizes: dict[str, Shape] = {}
        declared = {**self.args, "y": self.y, **{n: e.axes for n, e in self.extras.items()}}
        for name, axes in declared.items():
            shape = shapes.get(name)
            bound = all(_axis(token) in sizes for token in axes.split())
            if shape is None or (name in self.extras and bound):
                continue
            for axis, size in _assign(axes, tuple(shape), options, f"{self.name}: {name}").items():
                if sizes.setdefault(axis, size) != size:
                    raise ValueError(
                        f"{self.name}: axis {axis!r} is {sizes[axis]} and, in {name!r}, {size}"
                    )
        return sizes


class MissingResidual(KeyError):
    """A rule reads a residual that its row does not keep for this mask."""


class Residuals(dict[str, Any]):
    """What was saved, by name; reading anything else fails with the name. See :meth:`of`."""

    row: Layer
    wrt: frozenset[str]

    @classmethod
    def of(cls, row: Layer, wrt: frozenset[str]) -> type[Residuals]:
        """The class of those of a mask. (Made once, it takes what was saved without a call of
        Python.)
        """
        return type(cls.__name__, (cls,), {"row": row, "wrt": wrt})

    def __missing__(self, name: str) -> Any:
        raise MissingResidual(
            f"the rule of row {self.row.name!r} reads {name!r}, which the row does not keep for "
            f"the gradients of {sorted(self.wrt)} (it keeps {self.row.saves(self.wrt)})"
        )


def permutation(axes: str, to: str, ndim: int) -> tuple[int, ...]:
    """The order in which to take the axes of an array to go from one layout to another.

    >>> permutation("*n c h w", "*n h w c", 4)
    (0, 2, 3, 1)

    Args:
        axes: The named axes of the array, which has ``ndim``.
        to: The same axes in another order.

    Raises:
        ValueError: The two do not name the same axes.
    """
    places = [name for token in axes.split() for name in _repeated(token, ndim - len(axes.split()))]
    wanted = [name for token in to.split() for name in _repeated(token, ndim - len(axes.split()))]
    if sorted(places) != sorted(wanted) or len(places) != ndim:
        raise ValueError(f"{to!r} is no order of the axes {axes!r} of {ndim} dimensions")
    return tuple(places.index(name) for name in wanted)


def _repeated(token: str, spare: int) -> list[str]:
    """A starred axis is one per spare dimension, any other is one."""
    axis = _axis(token)
    return [f"{axis}[{k}]" for k in range(spare + 1)] if token.startswith("*") else [axis]


def _axis(token: str) -> str:
    """The axis that ``*n`` or ``i/groups`` is about."""
    return token.lstrip("*").partition("/")[0]


def _assign(axes: str, shape: Shape, options: Mapping[str, Any], what: str) -> dict[str, Shape]:
    tokens = axes.split()
    starred = next((k for k, token in enumerate(tokens) if token.startswith("*")), None)
    spare = len(shape) - len(tokens) + (starred is not None)
    if spare < 0 or (spare and starred is None):
        raise ValueError(f"{what} has shape {shape}, its axes are {axes!r}")
    if starred is not None:
        tokens[starred : starred + 1] = [tokens[starred]] * spare
    sizes: dict[str, Shape] = {axis[1:]: () for axis in axes.split() if axis.startswith("*")}
    for token, size in zip(tokens, shape, strict=True):
        if token.startswith("*"):
            sizes[token[1:]] += (size,)
        elif "/" in token:
            axis, option = token.split("/")
            sizes[axis] = (size * options.get(option, 1),)
        else:
            sizes[token] = (size,)
    return sizes


def _shape(axes: str, sizes: Mapping[str, Shape], options: Mapping[str, Any]) -> Shape:
    shape: Shape = ()
    for token in axes.split():
        option = token.partition("/")[2]
        size = sizes[_axis(token)]
        shape += tuple(s // options.get(option, 1) for s in size) if option else size
    return shape


def _packed(shape: Shape, bits: int, packing: Packing) -> int:
    if bits >= 8:
        return math.prod(shape) * bits
    if packing == "storage" or not shape:
        return math.ceil(math.prod(shape) * bits / 8) * 8
    return math.prod(shape[:-1]) * math.ceil(shape[-1] * bits / 8) * 8
