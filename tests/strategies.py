"""Cases of a row, drawn from the row itself: nothing here names a layer, nor a framework.

Conventions of the table that it relies on: an axis ``kh`` is that of a kernel which slides along
``h``; an argument whose name ends in ``var`` is positive, and ``weight`` has no zero.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import assume, strategies as st

from memsave.spec import TABLE, Layer, Shape

DTYPES = ("float64", "float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32")
LAYOUTS = ("contiguous", "channels_last", "sliced", "transposed", "strided")
#: Where functions have kinks, and where they end. (The numbers among the options, too.)
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 40.0])
#: How many axes a starred axis is. (The first is what Hypothesis shrinks to.)
COUNTS = st.sampled_from((1, 2, 0, 3, 4))
#: The digits of a number, in bits.
DIGITS = {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}


@dataclass(frozen=True)
class Case:
    """One call of a layer, in terms of no framework.

    Args:
        shapes, dtypes: Of every argument; the shape is ``None`` where it is absent.
        options: The static options.
        indices: Of arguments that are integers, the size of the axis that they are indices into.
        wrt: The arguments whose gradient is wanted.
        layout, g_layout: How the arguments, and the incoming gradient, lie in memory.
        special: Whether values include signed zeros, infinities and nan.
        seed: Of the values and of what the layer itself draws.
    """

    shapes: Mapping[str, Shape | None]
    dtypes: Mapping[str, str]
    options: Mapping[str, Any]
    wrt: frozenset[str]
    indices: Mapping[str, int] = field(default_factory=dict)
    layout: str = "contiguous"
    g_layout: str = "contiguous"
    special: bool = False
    seed: int = 0

    def _bounds(self, dtype: str) -> np.ndarray:
        """The numbers among the options, which a layer may round to the dtype, and neighbours."""
        numbers = [value for value in self.options.values() if type(value) is float]
        step = 2.0 ** -DIGITS[dtype]
        return np.outer([-1, 1, 1 + step, 1 - step], numbers or [0.0]).ravel()

    def values(self, name: str, shape: Shape) -> np.ndarray:
        """The values of an argument: distinct and not zero (no kinks), special, or indices."""
        random = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        if name in self.indices:
            return random.integers(0, max(1, self.indices[name]), shape)
        if self.special:
            bounds = self._bounds(next(iter(self.dtypes.values())))
            near = random.random(shape) < 0.5
            return np.where(near, random.choice(bounds, shape), random.choice(SPECIAL, shape))
        size = max(1, math.prod(shape))
        values = random.permutation(size)[: math.prod(shape)].reshape(shape)
        values = (values + 0.2718) / size * 4 - 2
        if name.endswith("var"):
            return np.abs(values) + 0.5
        return values + np.copysign(0.5, values) if name == "weight" else values


def selects(row: Layer) -> bool:
    """Whether the gradient only selects and scales, so that infinities and nan have one answer.

    True where some row of the op keeps no floats: nothing but extras of so many bits.
    """
    return any(
        all(name in other.extras and other.extras[name].bits for name in other.saves(mask))
        for other in TABLE.values()
        if other.op == row.op
        for mask in [frozenset(other.reads)]
    )


def is_elementwise(row: Layer) -> bool:
    """Whether, moreover, each element is selected once, so that nothing is rounded."""
    return selects(row) and all(axes == row.y for axes in row.args.values())


def fits(row: Layer, dtype: str) -> bool:
    """Whether a row is for arguments of this dtype."""
    return not (row.wide and dtype in ("bfloat16", "float16"))


def wanted(row: Layer) -> list[frozenset[str]]:
    """The masks that want a gradient."""
    return [mask for mask in row.masks() if mask]


def label(value: Any) -> str:
    """What tests call a mask, a row, a backend, or a property."""
    if isinstance(value, frozenset):
        return "+".join(sorted(value))
    return getattr(value, "name", None) or value.__name__


def cases(
    row: Layer,
    *,
    wrt: frozenset[str] | None = None,
    dtypes: tuple[str, ...] = DTYPES,
    special: bool = False,
    empty: bool = True,
    largest: int = 6,
    layouts: tuple[str, ...] = LAYOUTS,
) -> st.SearchStrategy[Case]:
    """Calls of a row. Stock may refuse some: see :func:`accepted`.

    Args:
        wrt: The mask. Default: drawn.
        dtypes: To draw from.
        special: Whether to draw special values too, for rows that allow it.
        empty: Whether to draw an empty leading axis too.
        largest: Largest size of an axis.
        layouts: To draw from.
    """
    # (Made once: Hypothesis looks through each strategy that is new to it.)
    masks = st.sampled_from(wanted(row)) if wrt is None else st.just(wrt)
    values = {name: st.sampled_from(values) for name, values in row.options.items()}
    floating = st.sampled_from([dtype for dtype in dtypes if fits(row, dtype)])
    layouts_of_args = st.sampled_from(layouts)
    layouts_of_g = st.sampled_from((*layouts, "expanded"))
    may_be_special = special and selects(row)
    first = next(iter(row.args))

    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        wrt = draw(masks)
        options = {name: draw(strategy) for name, strategy in values.items()}
        absent = {name for name in row.optional if name not in wrt and draw(st.booleans())}
        sizes = _sizes(draw, row, options, largest)
        shapes = {
            name: None if name in absent else _shape(axes, sizes, options)
            for name, axes in row.args.items()
        }
        dtype = draw(floating)
        # As under mixed precision: parameters in float32.
        mixed = len(shapes) > 1 and dtype in ("bfloat16", "float16") and _seldom(draw)
        if empty and shapes[first] and _seldom(draw):
            axis = row.args[first].split()[0].lstrip("*")
            sizes[axis] = (0, *sizes[axis][1:])
            shapes[first] = _shape(row.args[first], sizes, options)
        floats = {name: "float32" if mixed and name != first else dtype for name in shapes}
        return Case(
            shapes=shapes,
            dtypes={**floats, **{name: INTEGERS[_seldom(draw)] for name in row.integers}},
            options=options,
            wrt=wrt,
            indices={name: sizes[axis][0] for name, axis in row.integers.items()},
            layout=draw(layouts_of_args),
            g_layout=draw(layouts_of_g),
            special=may_be_special and draw(st.booleans()),
            seed=draw(st.integers(0, 1000)),
        )

    return draw_case()


def at_bounds(row: Layer, dtype: str) -> Iterator[Case]:
    """Few elements, most of them where the layer has a bound: calls that are seldom drawn."""
    for values in product(*row.options.values()):
        options = dict(zip(row.options, values, strict=True))
        case = Case({"x": (7,)}, {"x": dtype}, options, frozenset({"x"}), special=True)
        yield from (replace(case, seed=seed) for seed in range(8))


def accepted(
    backend: Any, row: Layer, *, empty: bool = True, **domain: Any
) -> st.SearchStrategy[Case]:
    """The calls of a row that stock accepts, forward and backward."""
    return cases(row, empty=empty, **{"layouts": backend.layouts, **domain}).filter(
        lambda case: backend.accepts(row, case, empty=empty)
    )


def flawed(backend: Any, row: Layer) -> st.SearchStrategy[Case]:
    """Calls with one argument of a wrong shape or dtype (or right after all)."""
    right = cases(row, layouts=backend.layouts)

    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        case = draw(right)
        present = [name for name, shape in case.shapes.items() if shape is not None]
        name = draw(st.sampled_from(present))
        shape = case.shapes[name]
        assert shape is not None
        shape = draw(
            st.sampled_from(
                [
                    shape,
                    (1, *shape),
                    (2, *shape),
                    (*shape, 2),
                    shape[1:],
                    shape[:-1],
                    tuple(size + 1 for size in shape),
                ]
            )
        )
        dtype = draw(st.sampled_from([case.dtypes[name], *DTYPES]))
        case = replace(
            case, shapes={**case.shapes, name: shape}, dtypes={**case.dtypes, name: dtype}
        )
        assume(not backend.crashes(case))
        return case

    return draw_case()


def _seldom(draw: st.DrawFn) -> bool:
    return draw(st.integers(0, 7)) == 7


@cache
def _up_to(largest: int) -> st.SearchStrategy[int]:
    """The size of an axis: often the largest."""
    return st.integers(1, largest) | st.just(largest)


def _sizes(
    draw: st.DrawFn, row: Layer, options: Mapping[str, Any], largest: int
) -> dict[str, Shape]:
    """Sizes of the named axes; of a starred axis, any number of them."""
    tokens = [token for axes in row.args.values() for token in axes.split()]
    axes = {token.lstrip("*").partition("/")[0]: token[0] == "*" for token in tokens}
    unit = {token.split("/")[0]: options[token.split("/")[1]] for token in tokens if "/" in token}
    sizes: dict[str, Shape] = {}
    for axis, starred in axes.items():
        kernel = axis[0] == "k" and axis[1:] in axes
        if starred:
            sizes[axis] = tuple(draw(st.integers(1, 3)) for _ in range(draw(COUNTS)))
        elif kernel:
            sizes[axis] = (draw(st.integers(1, min(3, largest))),)
        else:
            sizes[axis] = (draw(_up_to(largest)) * unit.get(axis, 1),)
    return sizes


def _shape(axes: str, sizes: Mapping[str, Shape], options: Mapping[str, Any]) -> Shape:
    shape: Shape = ()
    for token in axes.split():
        axis, _, option = token.lstrip("*").partition("/")
        shape += tuple(size // options[option] for size in sizes[axis]) if option else sizes[axis]
    return shape


def functions_of_rows(layers: ModuleType) -> set[str]:
    """Those in a backend's package of layers that are named like a row, or what it computes."""
    modules = [
        importlib.import_module(f"{layers.__name__}.{module.name}")
        for module in pkgutil.iter_modules(layers.__path__)
    ]
    names = {*TABLE, *(row.op for row in TABLE.values())}
    return {n for module in modules for n, f in vars(module).items() if n in names and callable(f)}
