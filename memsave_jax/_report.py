"""What a function keeps for backward: stock and ours, who made it, eagerly and compiled.

Nothing is run and nothing is estimated: the function is traced, once as it is and once with the
stock op in place of every layer; what the closure of :func:`jax.vjp` then holds is what an eager
call keeps. The compiler keeps something else, so it is asked as well.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from memsave._text import columns, human

from .function import RULES, bytes_of, using

Wrt = int | tuple[int, ...] | Callable[[str, Any], bool]


# The function as one of its arrays.


class _Traceable(NamedTuple):
    """A function of arrays, by their places among the leaves of ``(fn, args)``."""

    tree: Any
    static: dict[int, Any]
    arrays: dict[int, Any]
    wanted: frozenset[int]
    #: How many leaves, the first ones, belong to ``fn`` (a module that is called).
    own: int

    def vjp(self, arrays: dict[int, Any]) -> tuple[list[Any], Callable[..., Any], list[Any]]:
        """The floating outputs, their pull-back to the wanted arrays, and the other outputs."""

        def call(wanted: dict[int, Any]) -> tuple[list[Any], list[Any]]:
            leaves = {**self.static, **arrays, **wanted}
            # Made here, a module may change: it is not the user's.
            fn, args = jax.tree.unflatten(self.tree, [leaves[k] for k in range(len(leaves))])
            outputs = [leaf for leaf in jax.tree.leaves(fn(*args)) if _is_array(leaf)]
            floating = [leaf for leaf in outputs if _is_floating(leaf)]
            if not floating:
                raise ValueError("fn has no floating output: there is nothing to differentiate")
            return floating, [leaf for leaf in outputs if not _is_floating(leaf)]

        return jax.vjp(call, {k: arrays[k] for k in self.wanted}, has_aux=True)


def _traceable(fn: Callable[..., Any], args: tuple[Any, ...], wrt: Wrt) -> _Traceable:
    own = len(jax.tree.leaves(fn))
    given = enumerate(jax.tree_util.tree_leaves_with_path(args), start=own)
    wanted = frozenset(
        k
        for k, (path, leaf) in given
        if _is_floating(leaf) and _selects(wrt, path, leaf, len(args))
    )
    if not wanted:
        raise ValueError(f"wrt={wrt!r} selects no floating array of the arguments")
    leaves, tree = jax.tree.flatten((fn, args))
    arrays = {k: leaf for k, leaf in enumerate(leaves) if _is_array(leaf)}
    static = {k: leaf for k, leaf in enumerate(leaves) if k not in arrays}
    return _Traceable(tree, static, arrays, wanted, own)


def _selects(wrt: Wrt, path: Any, leaf: Any, count: int) -> bool:
    if callable(wrt):
        return bool(wrt(jax.tree_util.keystr(path), leaf))
    argnums = wrt if isinstance(wrt, tuple) else (wrt,)
    for argnum in argnums:
        if not -count <= argnum < count:
            raise ValueError(f"wrt={wrt!r}, but fn is called with {count} arguments")
    return path[0].idx in {argnum % count for argnum in argnums}


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_floating(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


# What it keeps.


@dataclass(frozen=True)
class Residual:
    """An array that is kept for backward.

    Attributes:
        name: ``"relu.positive"`` for the extra of a layer, ``"sin output"`` for what a primitive
            made, ``"constant"``, or the name that :func:`jax.ad_checkpoint.checkpoint_name` gave.
        shape, dtype: Of the array.
        nbytes: Its size in bytes.
        scope: The :func:`jax.named_scope` (Linen: module) in which it was made, or ``""``.
        source: The line of the user that made it, ``"path:line (function)"``, or ``""``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    scope: str
    source: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{','.join(map(str, self.shape))}]"


class _Kept(NamedTuple):
    """What one trace found. ``inputs`` and ``parameters`` in bytes; they are alive anyway."""

    residuals: list[Residual]
    inputs: int
    parameters: int
    outputs: list[Any]

    @property
    def total(self) -> int:
        return sum(residual.nbytes for residual in self.residuals)


def _kept(function: _Traceable) -> _Kept:
    def trace(arrays: dict[int, Any]) -> tuple[list[Any], list[Any]]:
        outputs, pull, _ = function.vjp(arrays)
        return outputs, list({id(leaf): leaf for leaf in jax.tree.leaves(pull)}.values())

    closed, (outputs, _) = jax.make_jaxpr(trace, return_shape=True)(function.arrays)
    jaxpr, origins = closed.jaxpr, _Origins()
    free = {id(var): "parameters" for var in jaxpr.constvars}
    for k, var in zip(sorted(function.arrays), jaxpr.invars, strict=True):
        free[id(var)] = "parameters" if k < function.own else "inputs"
    held: dict[int, tuple[Any, Any]] = {}
    for var in jaxpr.outvars[len(outputs) :]:
        array = origins.unwrapped(jaxpr, var, _SAME_ARRAY)
        if id(array) not in held or array is not var:  # an alias may have a name
            held[id(array)] = array, var
    residuals, sizes = [], {"inputs": 0, "parameters": 0}
    for array, var in held.values():
        size = bytes_of(array.aval)
        if id(array) in free:
            sizes[free[id(array)]] += size
        elif size:
            made, aval = origins.find(jaxpr, var), array.aval
            residuals.append(Residual(made.name, aval.shape, str(aval.dtype), size, *made[1:]))
    return _Kept(residuals, outputs=outputs, **sizes)


# Who made it.

#: Primitives that call a jaxpr, whose outputs are those of the equation in order, by the parameter.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "shard_map": "jaxpr",
    "scan": "jaxpr",
    "while": "body_jaxpr",
    "cond": "branches",
}
#: What a branch of ``cond`` puts in the place of what only another one keeps.
_FILLERS = ("constant", "broadcast_in_dim output")
#: What returns its operands themselves when it is called eagerly. (So does a barrier of the engine,
#: which is in traces only.)
_SAME_ARRAY = ("name", "optimization_barrier", "stop_gradient")
#: What makes nothing of its own. (The last one marks what ``checkpoint`` keeps.)
_SAME_VALUES = ("optimization_barrier", "stop_gradient", "reduce_precision")


class _Made(NamedTuple):
    name: str
    scope: str = ""
    source: str = ""


class _Origins:
    """Finds the equation that made a variable, through the calls of jaxprs in jaxprs."""

    def __init__(self) -> None:
        self._makers: dict[int, dict[Any, tuple[JaxprEqn, int]]] = {}

    def _maker(self, jaxpr: Jaxpr, var: Any) -> tuple[JaxprEqn, int] | None:
        if id(jaxpr) not in self._makers:
            outs = ((out, eqn, k) for eqn in jaxpr.eqns for k, out in enumerate(eqn.outvars))
            self._makers[id(jaxpr)] = {out: (eqn, k) for out, eqn, k in outs}
        return None if isinstance(var, Literal) else self._makers[id(jaxpr)].get(var)

    def unwrapped(self, jaxpr: Jaxpr, var: Any, through: tuple[str, ...]) -> Any:
        """The variable that this one is, behind some primitives."""
        while (maker := self._maker(jaxpr, var)) and maker[0].primitive.name in through:
            var = maker[0].invars[maker[1]]
        return var

    def find(self, jaxpr: Jaxpr, var: Any, seen: frozenset[Any] = frozenset()) -> _Made:
        """Who made a variable. ``seen``: the loop variables that were followed to get here."""
        var = self.unwrapped(jaxpr, var, _SAME_VALUES)
        maker = self._maker(jaxpr, var)
        if maker is None:
            is_input = not isinstance(var, Literal) and var in jaxpr.invars
            return _Made("copy of an input" if is_input else "constant")
        eqn, index = maker
        name = eqn.primitive.name
        scope, source = _scope(eqn), _source(eqn)
        if name == "name":
            return _Made(eqn.params["name"], scope, source)
        if name not in _CALLS:
            return _Made(f"{name} output", scope, source)
        bodies = _bodies(eqn)
        if "name" in eqn.params and _is_of_jax(bodies[0]):
            # Traced once and for all callers: the lines inside are those of the first.
            return _Made(f"{eqn.params['name']} output", scope, source)
        found = [self._inside(jaxpr, eqn, body, index, seen | {var}) for body in bodies]
        made = next((made for made in found if made.name not in _FILLERS), found[0])
        scope = "/".join(filter(None, (scope, made.scope)))
        return _Made(made.name, scope, made.source or source)

    def _inside(
        self, jaxpr: Jaxpr, eqn: JaxprEqn, body: Jaxpr, index: int, seen: frozenset[Any]
    ) -> _Made:
        """Who made an output of a body: one of its equations, or what is handed through it."""
        var = self.unwrapped(body, body.outvars[index], _SAME_VALUES)
        if isinstance(var, Literal) or var not in body.invars:
            return self.find(body, var, seen)
        place = body.invars.index(var)
        carries = _carries(eqn, body)
        if place in carries and (carry := carries.index(place)) != index and var not in seen:
            # The carry as an iteration finds it: made by the iteration before.
            return self._inside(jaxpr, eqn, body, carry, seen | {var})
        # (The operands of the body are the last ones of the call.)
        outer = eqn.invars[len(eqn.invars) - len(body.invars) + place]
        return self.find(jaxpr, outer, seen)


def _bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    bodies = eqn.params[_CALLS[eqn.primitive.name]]
    bodies = bodies if isinstance(bodies, tuple) else (bodies,)
    return [body.jaxpr if isinstance(body, ClosedJaxpr) else body for body in bodies]


def _carries(eqn: JaxprEqn, body: Jaxpr) -> range:
    """Where the carry of a scan is among the operands of its body, which are constants, carry, xs.

    By the shapes, as the parameters that say so differ between versions of JAX: outside, what the
    scan runs over has one axis more.
    """

    def whole(inside: list[Any], outside: list[Any]) -> int:
        pairs = zip(inside, outside, strict=True)
        return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)

    if eqn.primitive.name != "scan":
        return range(0)
    stop = whole(body.invars, eqn.invars)
    return range(stop - whole(body.outvars, eqn.outvars), stop)


def _is_of_jax(jaxpr: Jaxpr) -> bool:
    where = getattr(jaxpr.debug_info, "func_src_info", None) or ""
    return f" at {_folder(jax)}" in where


def _scope(eqn: JaxprEqn) -> str:
    """The user's scopes: the name stack without "jvp(...)" and the like."""
    stack = str(eqn.source_info.name_stack)
    while (plain := re.sub(r"\b\w+\(([^()]*)\)", r"\1", stack)) != stack:
        stack = plain
    return "/".join(filter(None, stack.split("/")))


def _source(eqn: JaxprEqn) -> str:
    """The innermost line outside JAX, this package and Flax."""
    frames = source_info_util.summarize(eqn.source_info, num_frames=sys.maxsize).splitlines()
    ours = tuple(
        _folder(sys.modules[name]) for name in (__package__, "flax") if name in sys.modules
    )
    for frame in reversed(frames):
        if not frame.startswith(ours):
            return re.sub(r":(\d+):\d+ \(", r":\1 (", frame)
    return ""


def _folder(package: Any) -> str:
    return os.path.dirname(package.__file__) + os.sep


# The report.


@dataclass(frozen=True)
class Row:
    """What was made in one place and is kept. All sizes in bytes.

    Stock and ours keep different arrays of different ops, so what they have in common is the
    place: the scope and the user's line.
    """

    scope: str
    source: str
    stock: int
    now: int
    stock_residuals: tuple[Residual, ...]
    now_residuals: tuple[Residual, ...]

    @property
    def where(self) -> str:
        """The scope, or else the function, and the line."""
        line, _, function = self.source.partition(" (")
        place = self.scope or function.removesuffix(")").rpartition("<locals>.")[2]
        return f"{place} ({os.path.basename(line)})" if line else place or "(unknown)"

    @property
    def saves(self) -> int:
        """How much less than stock is kept."""
        return self.stock - self.now

    @property
    def reason(self) -> str:
        """Which gradients read the extras of our layers, as the table says."""
        names = dict.fromkeys(residual.name.partition(".")[::2] for residual in self.now_residuals)
        return "; ".join(
            f"{layer}: {', '.join(arg for arg, reads in row.reads.items() if extra in reads)} "
            f"reads {extra}"
            for layer, extra in names
            if layer in RULES and extra in (row := RULES[layer].row).extras
        )


@dataclass(frozen=True)
class Report:
    """What a function keeps for backward. ``print`` it, or read ``rows``. All sizes in bytes.

    Attributes:
        rows: The places where anything that is kept was made, the largest first.
        stock, now: Totals of an eager call: with stock ops, and as the function is.
        inputs, parameters: What is held as well but is alive anyway, and not counted: arguments;
            arrays that the function closes over, or those of the module that it is.
        stock_temp, now_temp: Temporary memory of the compiled step (see :func:`report`), or
            ``None`` if it was not compiled.
    """

    rows: list[Row]
    stock: int
    now: int
    inputs: int
    parameters: int
    stock_temp: int | None
    now_temp: int | None

    def __str__(self) -> str:
        return self.format()

    def format(self, limit: int | None = 30) -> str:
        """The report as text, with the ``limit`` rows that keep most (``None``: all)."""
        shown = self.rows[:limit]
        hidden = self.rows[len(shown) :]
        lines: list[tuple[str, ...]] = [("where", *_SIZES, "stock keeps", "now keeps", "why")]
        for row in shown:
            sizes = (human(getattr(row, size)) for size in _SIZES)
            keeps = _names(row.stock_residuals), _names(row.now_residuals)
            lines.append((row.where, *sizes, *keeps, row.reason))
        if hidden:
            sums = [human(sum(getattr(row, size) for row in hidden)) for size in _SIZES]
            lines.append((f"({len(hidden)} smaller rows)", *sums, "", "", ""))
        totals = map(human, (self.stock, self.now, self.stock - self.now))
        lines.append(("total", *totals, "", "", ""))
        return "\n".join([*columns(lines, range(1, 1 + len(_SIZES))), "", *self._summary()])

    def _summary(self) -> Iterator[str]:
        yield f"eagerly stock keeps {human(self.stock)}, now {human(self.now)}" + _ratio(
            self.now, self.stock
        )
        if self.stock_temp is not None and self.now_temp is not None:
            stock, now = human(self.stock_temp), human(self.now_temp)
            ratio = _ratio(self.now_temp, self.stock_temp)
            yield f"compiled stock takes {stock} of temporaries, now {now}{ratio}"
        yield (
            f"held as well, but alive anyway: inputs {human(self.inputs)}, "
            f"parameters {human(self.parameters)}"
        )


_SIZES = ("stock", "now", "saves")


def _ratio(now: int, stock: int) -> str:
    return f" ({now / stock:.4f} of stock)" if stock else ""


def _names(residuals: tuple[Residual, ...], most: int = 3) -> str:
    """The largest residuals by name, each name once."""
    largest = sorted(residuals, key=lambda residual: -residual.nbytes)
    names = list(dict.fromkeys(residual.name for residual in largest))
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join(names[:most] + more) or "-"


def report(fn: Callable[..., Any], *args: Any, wrt: Wrt = 0, compiled: bool = True) -> Report:
    """Report what ``fn(*args)`` keeps for backward: with stock ops, and as it is.

    Nothing is run. ``fn`` is traced twice, and twice more to compile it; a module among ``args`` is
    not changed by that.

    *Eagerly*, what is kept is what the pull-back of :func:`jax.vjp` holds, each array once, without
    the arguments and the arrays that ``fn`` closes over, which are alive anyway. ``rows`` say who
    made it and where. (Not counted are copies that a cast to the same dtype makes of concrete
    arrays: outside of ``jit``, stock layers of Flax keep such copies of inputs and kernels, so that
    they hold more than is said of them.)

    *Compiled*, XLA keeps what it likes. ``stock_temp`` and ``now_temp`` are the
    ``temp_size_in_bytes`` of :meth:`jax.stages.Compiled.memory_analysis` for one step that takes
    ``args`` and cotangents and returns the outputs and the gradients: all that the step allocates
    beside its arguments and results, on the default backend, at its highest point. (The
    ``peak_memory_in_bytes`` of the same analysis leaves temporaries out on CPU.)

    Args:
        fn: Any function, or a module that is called, which counts as parameters and is not
            differentiated. Its floating outputs, in any pytree, are what is differentiated.
        *args: Pytrees of arrays or :class:`jax.ShapeDtypeStruct`; also PRNG keys and Flax NNX
            modules. Only shapes and dtypes matter. Leaves without a dtype are passed as they are.
        wrt: The arguments to differentiate with respect to: an argnum, several, or
            ``wrt(path, leaf) -> bool``, called for every floating leaf of ``args`` with its path in
            the tuple as by :func:`jax.tree_util.keystr`, like ``"[0]['kernel']"``. Arrays that are
            not floating are never differentiated.
        compiled: Also compile, twice. ``False`` for a function that takes long to.

    Raises:
        ValueError: ``wrt`` selects no floating array or no argument, or no output is floating.
    """
    function = _traceable(fn, args, wrt)
    now, now_temp = _kept(function), None
    with using("stock"):
        stock, stock_temp = _kept(function), None
        if compiled:
            stock_temp = _temp_bytes(function, stock.outputs)
    if compiled:
        now_temp = _temp_bytes(function, now.outputs)
    rows = sorted(_rows(stock, now), key=lambda row: -max(row.stock, row.now))
    return Report(rows, stock.total, now.total, now.inputs, now.parameters, stock_temp, now_temp)


def _rows(stock: _Kept, now: _Kept) -> Iterator[Row]:
    places = dict.fromkeys((r.scope, r.source) for r in (*stock.residuals, *now.residuals))
    for place in places:
        theirs = tuple(r for r in stock.residuals if (r.scope, r.source) == place)
        ours = tuple(r for r in now.residuals if (r.scope, r.source) == place)
        sizes = sum(r.nbytes for r in theirs), sum(r.nbytes for r in ours)
        yield Row(*place, *sizes, theirs, ours)


def _temp_bytes(function: _Traceable, cotangents: list[Any]) -> int | None:
    def step(arrays: dict[int, Any], cotangents: list[Any]) -> Any:
        outputs, pull, others = function.vjp(arrays)
        return outputs, others, pull(cotangents)

    analysis = jax.jit(step).lower(function.arrays, cotangents).compile().memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes
