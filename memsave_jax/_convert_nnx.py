"""Convert a model of NNX to drop-ins, in place, and back; and say what was converted and why.

Knows no layer: the drop-ins of ``memsave_jax/nnx.py`` register themselves here. Converting swaps
``module.__class__``: variables, shared modules, paths, optimizers are untouched. NNX has functions
where PyTorch has modules (``relu``, ``max_pool``): those that a model holds are swapped as well,
those that its code names are listed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

from flax import nnx
from flax.nnx import reprlib
from flax.nnx.nn import activations

from memsave._text import Coverage, Entry, Status
from memsave.spec import Layer

from ._coverage import named, package, unwrapped

logger = logging.getLogger("memsave")

M = TypeVar("M", bound=nnx.Module)
C = TypeVar("C", bound=type[nnx.Module])
Path = tuple[str | int, ...]
Filter = Callable[[Any, str], bool]
Policy = Callable[[Any, str, tuple[Layer, ...]], Layer]

#: The drop-ins of each stock class and function; the first is the default.
DROP_INS: dict[Any, list[Any]] = {}
#: The rows that a drop-in may run (BatchNorm has one per mode), and what it stands for.
ROWS: dict[Any, tuple[Layer, ...]] = {}
STOCK: dict[Any, Any] = {}


def register(drop_in: Any, stock: Any, *rows: Layer) -> None:
    """The drop-in, a class or function, takes the place of stock."""
    DROP_INS.setdefault(stock, []).append(drop_in)
    ROWS[drop_in] = rows
    STOCK[drop_in] = stock


def drop_in(*rows: Layer) -> Callable[[C], C]:
    """Class decorator: the class replaces its base class wherever a model has exactly that.

    A drop-in adds no state to its base. Its ``repr`` shows the package.
    """

    def decorate(cls: C) -> C:
        (stock,) = cls.__bases__
        register(cls, stock, *rows)

        def __nnx_repr__(self: Any) -> Iterator[Any]:
            for part in stock.__nnx_repr__(self):
                is_name = isinstance(part, reprlib.Object)
                yield dataclasses.replace(part, type=f"memsave.{cls.__name__}") if is_name else part

        cls.__nnx_repr__ = __nnx_repr__  # type: ignore[method-assign]
        return cls

    return decorate


def convert(model: M, *, filter_fn: Filter | None = None, policy: Policy | None = None) -> M:
    """Replace stock layers and functions by their drop-ins, in place.

    Touched are modules whose class is exactly a stock class of the table, and functions of the
    table that the model holds: as attributes, in lists, tuples and dicts, also under
    ``functools.partial``. ``coverage(model)`` lists the others with the reason. Converting twice
    changes nothing; :func:`revert` undoes it. (What was compiled or split before keeps the stock
    classes.)

    Args:
        model: Any module; a stock layer itself is fine.
        filter_fn: ``filter_fn(module or function, name) -> bool``: what to convert. Default: all.
        policy: ``policy(module or function, name, rows) -> row``: which of the interchangeable rows
            of an op to use, e.g. ``memsave.spec.RELU_FROM_OUTPUT``. Default: the first.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``policy`` returned a row that it was not offered. Nothing is converted then.

    Warns:
        UserWarning: Nothing in the model could be converted.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"convert needs a flax.nnx.Module, got {type(model).__name__}")
    plan = {
        path: _choose(node, _name(path), policy)
        for path, node in _nodes(model)
        if _is_in(DROP_INS, _kind(node)) and (filter_fn is None or filter_fn(node, _name(path)))
    }
    _map(lambda path, node: _become(node, plan[path]) if path in plan else node, model)
    result = coverage(model)
    logger.info("%s", result)
    if not any(entry.status == "converted" for entry in result):
        warnings.warn(
            "memsave_jax.nnx.convert found nothing to convert; "
            "print(memsave_jax.nnx.coverage(model)) lists why",
            stacklevel=2,
        )
    return model


def revert(model: M) -> M:
    """Undo :func:`convert`, in place. Modules built as drop-ins become stock modules too.

    Returns:
        ``model`` itself.
    """

    def reverted(path: Path, node: Any) -> Any:
        kind = _kind(node)
        return _become(node, STOCK[kind]) if _is_in(STOCK, kind) else node

    _map(reverted, model)
    return model


def coverage(model: nnx.Module) -> Coverage:
    """Each layer and function of a model: converted, convertible, or skipped with the reason.

    A layer is a module without children, or one of a class that derives from a stock layer. Listed
    are also modules whose code names a stock function of the table, which only its author can
    replace. That is seen where the code names it as ``relu`` or ``nnx.relu``, be it in a function
    of the same package that it calls; not if it is found at run time.
    """
    return Coverage(
        Entry(_name(path), layer, status, reason)
        for path, node in _nodes(model)
        for layer, status, reason in (*_fate(node), *_out_of_reach(node))
    )


def _fate(node: Any) -> Iterator[tuple[str, Status, str]]:
    """What becomes of a module or function, if it is one of the table or could have been."""
    kind = _kind(node)
    is_module = isinstance(node, nnx.Module)
    bases = type(node).__mro__ if is_module else ()
    stock = next((base for base in bases if base in DROP_INS), None)
    if _is_in(ROWS, kind):
        yield kind.__name__, "converted", f"rows: {', '.join(row.name for row in ROWS[kind])}"
    elif _is_in(DROP_INS, kind):
        yield kind.__name__, "convertible", ""
    elif stock is not None:
        between = bases[: bases.index(stock)]
        own = any("__call__" in vars(cls) for cls in between)
        why = "with a __call__ of its own" if own else "which may mean more than its base"
        yield kind.__name__, "skipped", f"subclass of {stock.__name__} {why}"
    elif _is_leaf(node) or any(kind is function for function in _OTHER_FUNCTIONS):
        yield kind.__name__, "skipped", "not in the table"


#: Whose code is not the user's to change.
_LIBRARIES = {"flax", "jax", "memsave_jax", "optax"}
_OTHER_FUNCTIONS = [
    nnx.min_pool,
    *(f for name in activations.__all__ if not isinstance(f := getattr(activations, name), type)),
]


def _out_of_reach(node: Any) -> Iterator[tuple[str, Status, str]]:
    """The stock functions of the table that code of the user's names."""
    functions = [stock for stock in DROP_INS if not isinstance(stock, type)]
    if isinstance(node, nnx.Module):
        # (What the constructor names is held by the model, hence converted there.)
        members = [
            member
            for cls in type(node).__mro__
            for name, member in vars(cls).items()
            if name not in ("__init__", "__post_init__")
        ]
    else:
        members = [node]
    users = {}
    for member in members:
        code = unwrapped(member, functions)
        if isinstance(code, FunctionType) and package(code) not in _LIBRARIES:
            users |= {id(function): function for function in named(code, functions)}
    if users:
        names = [function.__name__ for function in users.values()]
        ours = ", ".join(f"memsave_jax.nnx.{name}" for name in names)
        layer = type(node) if isinstance(node, nnx.Module) else unwrapped(node)
        yield layer.__name__, "skipped", f"its code names {', '.join(names)}: use {ours} there"


def _choose(node: Any, name: str, policy: Policy | None) -> Any:
    candidates = DROP_INS[_kind(node)]
    if policy is None or len(candidates) == 1:
        return candidates[0]
    rows = tuple(ROWS[candidate][0] for candidate in candidates)
    row = policy(node, name, rows)
    if row not in rows:
        raise ValueError(f"the policy chose {row!r} for {name!r}, which offers {rows}")
    return candidates[rows.index(row)]


# A model is a tree of modules and plain containers; its leaves are variables and, what matters
# here, functions. (The walks of NNX leave out what is static, such as a tuple of functions.)


def _map(change: Callable[[Path, Any], Any], node: Any, path: Path = (), seen: Any = None) -> Any:
    """Put ``change(path, node)`` in place of each module and leaf. Tuples, lists and dictionaries,
    which others may hold, are made anew for it (but classes of the user's own stay as they are).
    """
    seen = {} if seen is None else seen  # by id, what has become of it (and itself, to stay alive)
    if isinstance(node, tuple):
        parts = [_map(change, part, (*path, k), seen) for k, part in enumerate(node)]
        if all(new is old for new, old in zip(parts, node, strict=True)):
            return node
        if hasattr(node, "_fields"):
            return type(node)(*parts)
        return tuple(parts) if type(node) is tuple else node
    if not isinstance(node, nnx.Pytree | list | dict):
        return change(path, node)
    if id(node) in seen:
        return seen[id(node)][0]
    seen[id(node)] = node, node
    if isinstance(node, nnx.Pytree):
        node = change(path, node)
    old = node
    for key, part in _parts(node):
        new = _map(change, part, (*path, key), seen)
        if new is part:
            continue
        if isinstance(node, nnx.Pytree):
            object.__setattr__(node, str(key), new)  # of the same kind: static stays static
            continue
        if type(old) not in _CONTAINERS:
            continue
        if node is old:
            node = copy.copy(old)
            seen[id(old)] = node, old
        node[key] = new
    return node


_CONTAINERS = {list, dict, OrderedDict, defaultdict}


def _parts(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, list):
        return list(enumerate(node))
    if isinstance(node, dict):
        return list(node.items())
    return [(key, part) for key, part in vars(node).items() if not key.startswith("_pytree__")]


def _nodes(model: nnx.Module) -> list[tuple[Path, Any]]:
    """All modules and leaves with their paths. What is shared comes once."""
    found = []

    def note(path: Path, node: Any) -> Any:
        found.append((path, node))
        return node

    _map(note, model)
    return found


def _is_leaf(node: Any) -> bool:
    """Whether it is a module without children, other than an empty container."""
    if not isinstance(node, nnx.Module) or isinstance(node, nnx.List | nnx.Dict | nnx.Sequential):
        return False
    return sum(isinstance(part, nnx.Module) for _, part in _nodes(node)) == 1


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _kind(node: Any) -> Any:
    """What is swapped: the class of a module; a function, also one with arguments bound."""
    if isinstance(node, nnx.Module):
        return type(node)
    return node.func if isinstance(node, functools.partial) else node


def _is_in(table: dict[Any, Any], kind: Any) -> bool:
    return any(kind is each for each in table)  # (a leaf need not be hashable)


def _become(node: Any, kind: Any) -> Any:
    if isinstance(node, nnx.Module):
        object.__setattr__(node, "__class__", kind)  # (NNX's own would register an attribute)
        return node
    if isinstance(node, functools.partial):
        return type(node)(kind, *node.args, **node.keywords)
    return kind
