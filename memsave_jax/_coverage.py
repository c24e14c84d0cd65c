"""What a converter cannot reach: the functions that a model's code names. Knows no framework."""

from __future__ import annotations

import dis
import functools
from collections.abc import Collection, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any


def named(code: FunctionType, wanted: Collection[Any]) -> list[Any]:
    """Those of ``wanted`` that a function's code names, as ``relu`` or as ``nnx.relu``.

    Looks into the functions defined in it, and into those that it names of the same package. Does
    not see what is found at run time only, e.g. ``getattr(nnx, name)``.
    """
    found: list[Any] = []
    todo, seen = [code], {code}
    while todo:
        function = todo.pop()
        for value in _named(function):
            value = unwrapped(value, wanted)
            if any(value is each for each in wanted):
                found += [] if any(value is each for each in found) else [value]
            elif isinstance(value, FunctionType) and package(value) == package(code):
                todo += [] if value in seen else [value]
                seen.add(value)
    return found


def unwrapped(value: Any, wanted: Collection[Any] = ()) -> Any:
    """The function under decorators and partial application, or one of ``wanted`` on the way."""
    while not any(value is each for each in wanted):
        if isinstance(value, functools.partial):
            value = value.func
        else:
            try:
                value = value.__wrapped__
            except Exception:  # of whatever kind: it is no function, perhaps, but the user's own
                break
    return value


def package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _named(function: FunctionType) -> Iterator[Any]:
    """The values of the global and enclosing names in the code, and of names within modules."""
    enclosing = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    todo = [function.__code__]
    while todo:
        code = todo.pop()
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        value: Any = None
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname == "LOAD_GLOBAL":
                value = function.__globals__.get(name)
            elif instruction.opname == "LOAD_DEREF":
                cell = enclosing.get(name)
                value = _contents(cell) if cell is not None else None
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                value = vars(value).get(name) if isinstance(value, ModuleType) else None
            else:
                value = None
            if value is not None:
                yield value


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
