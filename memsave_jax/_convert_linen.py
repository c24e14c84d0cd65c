"""Convert whole models of :mod:`flax.linen`, and back; and say what was converted and why.

A converted model is the same model with another class: one that derives from the model's own, has
its name, and lets an interceptor replace the calls of stock layers while a method of the model
runs. So parameters, names and lifted transforms stay as they are. That the layers differ is told to
JAX (by ``_active``), which hence does not reuse what it traced with the stock model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import jax
from flax import linen as nn, serialization

from memsave._text import Coverage, Entry
from memsave.spec import Layer

from . import functional
from ._coverage import named

M = TypeVar("M", bound=nn.Module)
C = TypeVar("C", bound=type[nn.Module])

#: The drop-in of each stock class, and the rows that it may run.
DROP_INS: dict[type[nn.Module], type[nn.Module]] = {}
ROWS: dict[type[nn.Module], tuple[Layer, ...]] = {}


def drop_in(*rows: Layer) -> Callable[[C], C]:
    """Class decorator: the class replaces its base class wherever a model has exactly that.

    It adds no fields, and its ``__call__`` must run on an instance of the base class too.
    """

    def register(cls: C) -> C:
        DROP_INS[cls.__bases__[0]] = cls
        ROWS[cls] = rows
        return cls

    return register


#: Whether stock layers are replaced: a context of JAX, and so part of the keys of its caches.
_active = jax.make_user_context(False)
#: Which call of :func:`coverage` is running: a function that was jitted earlier is traced again.
_listing = jax.make_user_context(None)
#: The functions that stand for layers, which a model calls without a module.
FUNCTIONS = {
    name: getattr(nn, name)
    for name in functional.__all__
    if callable(getattr(nn, name, None)) and name not in ("hard_swish", "swish")  # (second names)
}


def _replace(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """The interceptor: stock layers run the ``__call__`` of their drop-ins."""
    drop_in = DROP_INS.get(type(context.module))
    # Other interceptors between this one and the layer see stock, as there is no way to call them.
    if drop_in is None or context.method_name != "__call__" or call is not context.orig_method:
        return call(*args, **kwargs)
    return inspect.unwrap(drop_in.__call__)(context.module, *args, **kwargs)


class _Converted:
    """What the class of a converted model has before the model's own.

    It overrides two methods of :class:`flax.linen.Module` that are not public, as through them goes
    every call of a method, and every submodule that becomes an attribute.
    """

    def __init_subclass__(cls) -> None:
        """Without what the model's own classes do for each of theirs, which they have done."""
        nn.Module.__init_subclass__.__func__(cls)  # type: ignore[attr-defined]

    def _call_wrapped_method(self, *args: Any, **kwargs: Any) -> Any:
        with _active(True), nn.intercept_methods(_replace):
            return super()._call_wrapped_method(*args, **kwargs)  # type: ignore[misc]

    def _register_submodules(self, name: str, val: Any) -> None:
        """Also convert it: ``model.bind(variables).encoder(x)`` is no call of the model."""
        super()._register_submodules(name, val)  # type: ignore[misc]
        for module in _modules_in(getattr(self, name)):
            if module.parent is self:
                _set_class(module, _converted_class(type(module)))

    def __reduce__(self) -> Any:
        # (With its state, as of any object: ``copy`` asks for it, too, and it may be bound.)
        return _bare, (_stock_class(type(self)),), dict(vars(self))  # type: ignore[arg-type]


for _name in ("_call_wrapped_method", "_register_submodules"):
    if not hasattr(nn.Module, _name):
        raise ImportError(f"memsave_jax.linen needs Module.{_name}, which this Flax does not have")


def _leaves(tree: Any) -> list[Any]:
    """What the value of an attribute consists of, as Flax looks for modules in it."""
    return jax.tree.leaves(serialization.to_state_dict(tree))


def _modules_in(tree: Any) -> list[nn.Module]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, nn.Module)]


def _attributes(module: nn.Module) -> list[Any]:
    return [v for k, v in vars(module).items() if not k.startswith("_") and k != "scope"]


def _set_class(module: M, cls: type[nn.Module]) -> M:
    object.__setattr__(module, "__class__", cls)
    return module


def _bare(stock: type[nn.Module]) -> nn.Module:
    """A converted module to which its state is yet to be given."""
    return object.__new__(_converted_class(stock))


def _converted_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls in ROWS or issubclass(cls, _Converted):
        return cls
    if cls in DROP_INS:
        return DROP_INS[cls]
    for known in cls.__subclasses__():
        if known.__bases__ == (_Converted, cls):
            return known

    def equal(self: Any, other: Any) -> Any:
        return type(self) is type(other) and cls.__eq__(self, other)

    # Flax makes a dataclass of it; what the model's class defines itself must survive that.
    body = {"__eq__": equal, "__hash__": cls.__hash__, "__init__": cls.__init__}
    same = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (_Converted, cls), {**same, **body})


def _stock_class(cls: type[nn.Module]) -> type[nn.Module]:
    return cls.__bases__[-1] if cls in ROWS or issubclass(cls, _Converted) else cls


def convert(module: M) -> M:
    """A model whose stock layers keep only what the wanted gradients read.

    It has the same parameters, names and results, and takes part in ``init``, ``apply``, ``bind``,
    other modules and lifted transforms like the original; as a static argument of ``jax.jit`` it
    differs from it. Layers of exactly a stock class are replaced, wherever the model makes them.
    Functions that the model calls (``nn.relu``) are not: :func:`coverage` lists them. Converting
    twice changes nothing; :func:`revert` undoes it.

    Args:
        module: Any linen module; a stock layer itself is fine.

    Returns:
        A copy, which shares the submodules among the fields. A module that is bound already (in a
        compact method, or by ``bind``) is converted in place and returned.

    Raises:
        TypeError: ``module`` is no instance of :class:`flax.linen.Module`.
    """
    cls = _converted_class(type(_checked(module, "convert")))
    if type(module) is cls:
        return module
    return _set_class(module if module.scope is not None else module.clone(), cls)


def revert(module: M) -> M:
    """Undo :func:`convert`, attributes included. Drop-ins become stock modules too.

    Returns:
        A copy, unless there is nothing to undo. A bound module is reverted in place.

    Raises:
        TypeError: ``module`` is no instance of :class:`flax.linen.Module`.
    """
    every = _with_submodules(_checked(module, "revert"))
    if all(_stock_class(type(each)) is type(each) for each in every):
        return module
    if module.scope is None:
        module = module.copy(parent=None, name=module.name)
    for each in _with_submodules(module):
        _set_class(each, _stock_class(type(each)))
    return module


def _with_submodules(module: nn.Module) -> list[nn.Module]:
    """The module, and those that are attributes: fields, and what setup made."""
    found = {id(module): module}
    for each in (queue := [module]):
        for attribute in _attributes(each):
            new = {id(m): m for m in _modules_in(attribute) if id(m) not in found}
            found.update(new)
            queue += new.values()
    return queue


def _checked(module: Any, verb: str) -> nn.Module:
    if not isinstance(module, nn.Module):
        what = module.__name__ if isinstance(module, type) else f"a {type(module).__name__}"
        raise TypeError(f"{verb} needs an instance of flax.linen.Module, got {what}")
    return module


# What a model calls.


def coverage(module: nn.Module, *args: Any, rngs: Any = None, **kwargs: Any) -> Coverage:
    """Each layer that a model calls: converted, convertible, or skipped with the reason.

    The model's ``init`` is traced for that, anew by every call; nothing is computed. (JAX remembers
    what it has traced until :func:`jax.clear_caches`.) A layer is a module without
    submodules, or one of a class that derives from a stock layer. The functions that stand for
    layers (``nn.relu``, ``nn.max_pool``) are looked for in the attributes of the modules and in the
    code of their methods, not in other functions that these call.

    Args:
        module: Any linen module, converted or not.
        *args, **kwargs: As for ``module.init``; arrays may be :class:`jax.ShapeDtypeStruct`.
        rngs: As for ``module.init``. Default: a fixed key.

    Raises:
        TypeError: ``module`` is no instance of :class:`flax.linen.Module`.
    """
    _checked(module, "coverage")
    calls: dict[tuple[str, ...], tuple[nn.Module, bool]] = {}

    def record(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        # Of several at one path (a lifted class around a layer) the innermost, which comes last.
        # (Flax checks setup by a call of its own, of a lambda, on a module bound elsewhere.)
        if context.method_name != "setup" and hasattr(type(context.module), context.method_name):
            calls[context.module.path] = context.module, _active.value
        return call(*args, **kwargs)

    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {n: leaf for n, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def init(arrays: dict[int, Any]) -> Any:
        args, kwargs = tree.unflatten(arrays.get(n, leaf) for n, leaf in enumerate(leaves))
        return module.init(jax.random.key(0) if rngs is None else rngs, *args, **kwargs)

    with _listing(object()), nn.intercept_methods(record):
        jax.eval_shape(init, arrays)
    return Coverage(_entries(calls))


def _entries(calls: dict[tuple[str, ...], tuple[nn.Module, bool]]) -> Iterator[Entry]:
    for path, (module, active) in calls.items():
        name, cls = "/".join(path), type(module)
        own = _stock_class(cls) if issubclass(cls, _Converted) else cls
        stock = next((base for base in own.__mro__ if base in DROP_INS), None)
        if own in ROWS or (active and own in DROP_INS):
            rows = ", ".join(row.name for row in ROWS[DROP_INS.get(own, own)])
            yield Entry(name, cls.__name__, "converted", f"rows: {rows}")
        elif own in DROP_INS:
            yield Entry(name, cls.__name__, "convertible", "")
        elif stock is not None:
            between = own.__mro__[: own.__mro__.index(stock)]
            calls_own = any("__call__" in vars(base) for base in between)
            why = "with a __call__ of its own" if calls_own else "which may mean more than its base"
            yield Entry(name, cls.__name__, "skipped", f"subclass of {stock.__name__} {why}")
        elif not any(other[: len(path)] == path != other for other in calls):
            yield Entry(name, cls.__name__, "skipped", "not in the table")
        for function in _functions_of(module):
            yield Entry(name, function, "skipped", f"a function: use memsave_jax.linen.{function}")


def _functions_of(module: nn.Module) -> list[str]:
    """Which functions that stand for layers are attributes of a module, or named by its methods."""
    used = [leaf for value in _attributes(module) for leaf in _leaves(value)]
    for base in type(module).__mro__:
        if not base.__module__.startswith(("flax.", "memsave_jax.")):
            methods = (inspect.unwrap(m) for m in vars(base).values() if callable(m))
            functions = [method for method in methods if isinstance(method, FunctionType)]
            used += [v for function in functions for v in named(function, FUNCTIONS.values())]
    used = [getattr(value, "func", value) for value in used]  # of a functools.partial
    return [name for name, stock in FUNCTIONS.items() if any(value is stock for value in used)]
