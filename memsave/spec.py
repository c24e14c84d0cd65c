"""The table: what each layer must keep for backward, given which gradients are wanted.

This module alone decides it. Both backends read it to know what to save, the report reads it to
explain and predict, and the tests draw their cases from it. It needs the standard library only.

Vocabulary
----------
argument   a tensor input of the layer, declared with named axes. The keys of ``reads`` are those
           that can want a gradient; the others (running statistics) are only read.
``y``      the (first) output.
extra      a tensor that forward makes on purpose for backward.
residual   what backward may read: an argument, ``y``, or an extra.
``wrt``    the mask: the names of the arguments whose gradient is wanted.

Axes
----
``"*n c h w"`` names the axes of an array; ``*n`` stands for any number of them. ``i/groups`` is an
axis whose size is that of ``i`` divided by the option ``groups``.

Adding a layer is one row here, one rule in each backend (see CONTRIBUTING.md), and no test code.
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
        bits: Bits per element; a function of the options; or ``None`` for an extra whose dtype
            follows the computation (statistics), to be passed to :meth:`Layer.saved_bits`.
    """

    axes: str
    bits: int | Callable[[Mapping[str, Any]], int] | None = None


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
        options: Static options with the values that the tests draw; the first is the default.
        inplace: Whether the option ``inplace`` makes ``y`` overwrite the first argument.

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
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inplace: bool = False
    _saves: Mapping[frozenset[str], tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("args", "reads", "extras", "options"):
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

    def kind(self, residual: str) -> Literal["parameters", "shared", "owned"]:
        """Who pays for a residual: nobody, maybe a neighbour too, or this layer alone."""
        if residual in self.extras:
            return "owned"
        if residual == "y" or residual == next(iter(self.args)):
            return "shared"
        return "parameters"

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
            shapes: Shape of every argument (``None`` where absent) and of ``y``; of an extra only
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
                each = extra.bits(options) if callable(extra.bits) else extra.bits
                each = bits[name] if each is None else each
                saved[name] = _packed(_shape(extra.axes, sizes, options), each, packing)
            elif shapes[name] is not None:
                saved[name] = math.prod(shapes[name] or ()) * bits[name]
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
    """What was saved, by name; reading anything else fails with the name."""

    def __init__(self, row: Layer, wrt: frozenset[str], saved: Mapping[str, Any]) -> None:
        super().__init__(saved)
        self.row, self.wrt = row, wrt

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


def offset_bits(kernel: Iterable[int]) -> int:
    """Bits of the integer that holds an offset in a window of these sizes."""
    places = math.prod(kernel)
    return 8 if places <= 1 << 8 else 16 if places <= 1 << 15 else 32


def _spatial(dims: int) -> tuple[str, str, str]:
    """Names of the spatial axes of x, of a kernel and of y."""
    names = {1: "l", 2: "h w", 3: "d h w"}[dims].split()
    return " ".join(names), " ".join("k" + n for n in names), " ".join("o" + n for n in names)


def _conv(dims: int) -> Layer:
    x, kernel, y = _spatial(dims)
    return Layer(
        f"conv{dims}d",
        args={"x": f"*n i {x}", "weight": f"o i/groups {kernel}", "bias": "o"},
        y=f"*n o {y}",
        reads={"x": ("weight",), "weight": ("x",), "bias": ()},
        optional=("bias",),
        options={
            "stride": (1, 2),
            "padding": (0, 1, "same", "valid"),
            "dilation": (1, 2),
            "groups": (1, 2),
            "padding_mode": ("zeros", "reflect", "replicate", "circular"),
        },
    )


def _conv_transpose(dims: int) -> Layer:
    x, kernel, y = _spatial(dims)
    return Layer(
        f"conv_transpose{dims}d",
        args={"x": f"*n i {x}", "weight": f"i o/groups {kernel}", "bias": "o"},
        y=f"*n o {y}",
        reads={"x": ("weight",), "weight": ("x",), "bias": ()},
        optional=("bias",),
        options={
            "stride": (1, 2),
            "padding": (0, 1),
            "output_padding": (0, 1),
            "groups": (1, 2),
            "dilation": (1, 2),
        },
    )


def _max_pool(dims: int) -> Layer:
    x, _, y = _spatial(dims)

    def bits(options: Mapping[str, Any]) -> int:
        size = options["kernel_size"]
        return offset_bits([size] * dims if isinstance(size, int) else size)

    return Layer(
        f"max_pool{dims}d",
        args={"x": f"*n c {x}"},
        y=f"*n c {y}",
        reads={"x": ("offsets",)},
        extras={"offsets": Extra(f"*n c {y}", bits=bits)},
        options={
            "kernel_size": (2, 3),
            "stride": (None, 1, 2),
            "padding": (0, 1),
            "dilation": (1, 2),
            "ceil_mode": (False, True),
            "return_indices": (False, True),
        },
    )


LINEAR = Layer(
    "linear",
    args={"x": "*n i", "weight": "o i", "bias": "o"},
    y="*n o",
    reads={"x": ("weight",), "weight": ("x",), "bias": ()},
    optional=("bias",),
)
CONV1D, CONV2D, CONV3D = _conv(1), _conv(2), _conv(3)
CONV_TRANSPOSE1D, CONV_TRANSPOSE2D, CONV_TRANSPOSE3D = (_conv_transpose(d) for d in (1, 2, 3))

BATCH_NORM_EVAL = Layer(
    "batch_norm_eval",
    args={"x": "n c *s", "running_mean": "c", "running_var": "c", "weight": "c", "bias": "c"},
    y="n c *s",
    reads={
        "x": ("weight", "running_var"),
        "weight": ("x", "running_mean", "running_var"),
        "bias": (),
    },
    optional=("weight", "bias"),
    options={"eps": (1e-5, 1e-2)},
)
BATCH_NORM_TRAIN = Layer(
    "batch_norm_train",
    args={"x": "n c *s", "running_mean": "c", "running_var": "c", "weight": "c", "bias": "c"},
    y="n c *s",
    reads={"x": ("x", "mean", "rstd", "weight"), "weight": ("x", "mean", "rstd"), "bias": ()},
    extras={"mean": Extra("c"), "rstd": Extra("c")},
    optional=("running_mean", "running_var", "weight", "bias"),
    options={"momentum": (0.1, 0.0, 1.0), "eps": (1e-5, 1e-2)},
)

RELU = Layer(
    "relu",
    args={"x": "*n"},
    y="*n",
    reads={"x": ("positive",)},
    extras={"positive": Extra("*n", bits=1)},
    options={"inplace": (False, True)},
    inplace=True,
)
RELU_FROM_OUTPUT = Layer(
    "relu_from_output",
    op="relu",
    args={"x": "*n"},
    y="*n",
    reads={"x": ("y",)},
    options={"inplace": (False, True)},
    inplace=True,
)

DROPOUT = Layer(
    "dropout",
    args={"x": "*n"},
    y="*n",
    reads={"x": ("kept",)},
    extras={"kept": Extra("*n", bits=1)},
    options={"p": (0.5, 0.1, 0.9), "inplace": (False, True)},
    inplace=True,
)
DROPOUT_FROM_RNG = Layer(
    "dropout_from_rng",
    op="dropout",
    args={"x": "*n"},
    y="*n",
    reads={"x": ("rng_state",)},
    extras={"rng_state": Extra("*s")},
    options={"p": (0.5, 0.1, 0.9), "inplace": (False, True)},
    inplace=True,
)

MAX_POOL1D, MAX_POOL2D, MAX_POOL3D = _max_pool(1), _max_pool(2), _max_pool(3)

TABLE: Mapping[str, Layer] = MappingProxyType(
    {row.name: row for row in list(globals().values()) if isinstance(row, Layer)}
)
