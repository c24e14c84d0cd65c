"""What makes a class a drop-in: which stock class it stands for, with which rows."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import fx, nn
from torch._C import _len_torch_function_stack
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from .. import extensions
from .._context import checkpoint_hook
from ..spec import Layer
from .modes import FUNCTIONS, is_replaced, others, shown

Class = type[nn.Module]
M = TypeVar("M", bound=Class)

#: The drop-ins of each stock class; the first is the default.
DROP_INS: dict[Class, list[Class]] = {}
#: The rows that a drop-in may run (BatchNorm has one per mode), and its stock class.
ROWS: dict[Class, tuple[Layer, ...]] = {}
STOCK: dict[Class, Class] = {}
#: The forward that each stock class came with, if it is known.
_FORWARDS: dict[Class, Callable[..., Any]] = {}
#: Drop-ins that keep least at a price in time, and are taken only if a policy says so.
BY_POLICY: set[Class] = set()
#: Make drop-ins for classes that nobody has listed, if they can: ``recogniser(cls)`` registers
#: one, or does nothing.
RECOGNISERS: list[Callable[[Class], None]] = []
_asked: weakref.WeakSet[Class] = weakref.WeakSet()
#: How torch calls a module.
_CALL = nn.Module.__dict__.get("_wrapped_call_impl")


def offered(cls: Class) -> list[Class]:
    """The drop-ins of a class, or nothing."""
    if cls not in DROP_INS and cls not in _asked:
        _asked.add(cls)
        for recogniser in RECOGNISERS:
            recogniser(cls)
    return DROP_INS.get(cls, [])


def recogniser(function: Callable[[Class], None]) -> Callable[[Class], None]:
    """Decorator: have a function asked about every class that is not registered."""
    RECOGNISERS.append(function)
    _asked.clear()
    return function


def as_stock(stock: Class, *rows: Layer) -> None:
    """The stock class keeps what the rows say, so it is its own first drop-in."""
    DROP_INS.setdefault(stock, []).insert(0, stock)
    ROWS[stock] = rows


def register(*rows: Layer) -> Callable[[M], M]:
    """Class decorator: :func:`memsave.convert` puts the class wherever a model has its base.

    ::

        @memsave.register(memsave.spec.SWIGLU)
        class MLP(my_package.MLP):
            def forward(self, x):
                return self.down(memsave.functional.swiglu(self.gate(x), self.up(x)))

    The class replaces exactly the class that it derives from, by a change of ``__class__``: it has
    the same state, and another ``forward`` of the same signature, whose outputs and gradients are
    the same. The last one registered for a class is the default, and takes the place of one of the
    same name (that of a notebook's cell that ran before); :func:`unregister` undoes it.
    Its ``repr`` shows the package. ``torch.jit.script`` compiles the stock module in its place, and
    ``torch.fx`` traces that.

    Args:
        *rows: The rows of the table that the drop-in runs. Reports and ``coverage`` show them.

    Raises:
        TypeError: No row, or a class that does not derive from one class of modules alone, or
            from a drop-in.
    """
    return _register(rows, default=True)


def drop_in(*rows: Layer, by_policy: bool = False) -> Callable[[M], M]:
    """As :func:`register`, in the order of preference, or only if a policy says so."""
    taken = _register(rows, default=False)

    def decorate(cls: M) -> M:
        if by_policy:
            BY_POLICY.add(cls)
        return taken(cls)

    return decorate


def _register(rows: tuple[Layer, ...], *, default: bool) -> Callable[[M], M]:
    if not rows or not all(isinstance(row, Layer) for row in rows):
        raise TypeError(f"a drop-in is registered with rows of the table, not {rows}")

    def decorate(cls: M) -> M:
        bases = cls.__bases__ if isinstance(cls, type) else ()
        if len(bases) != 1 or not issubclass(bases[0], nn.Module) or bases[0] is nn.Module:
            raise TypeError(f"a drop-in derives from the class that it replaces alone, not {bases}")
        (stock,) = bases
        if stock in STOCK:
            raise TypeError(f"{stock.__name__} is a drop-in itself: derive from {STOCK[stock]}")
        candidates = DROP_INS.setdefault(stock, [])
        if default:
            candidates[:] = [other for other in candidates if _name(other) != _name(cls)]
        candidates.insert(0 if default else len(candidates), cls)
        ROWS[cls], STOCK[cls] = rows, stock
        _dress(cls, stock)
        return cls

    return decorate


def _name(cls: Class) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def derive(stock: Class, forward: Callable[..., Any], *rows: Layer) -> Class:
    """Make and register a drop-in with this ``forward``, for a class that is one of many.

    No module has it by name, so its instances pickle as the one of these rows that is made for the
    stock class (or, where none is, as that).
    """

    names = tuple(row.name for row in rows)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        return _rebuild, (stock, names), self.__getstate__()  # type: ignore[operator]

    body = {"forward": forward, "__reduce_ex__": __reduce_ex__, "__doc__": stock.__doc__}
    cls: Class = type(stock.__name__, (stock,), {**body, "__module__": __name__})
    return drop_in(*rows)(cls)


def _rebuild(stock: Class, names: tuple[str, ...]) -> nn.Module:
    extensions.load()
    made = [cls for cls in offered(stock) if cls.__module__ == __name__]
    of_rows = (cls for cls in made if tuple(row.name for row in ROWS[cls]) == names)
    cls = next(of_rows, stock)
    return cls.__new__(cls)


def unregister(cls: Class) -> None:
    """Undo :func:`register`: ``convert`` leaves the class's base as it was before.

    Modules that are converted already stay so until :func:`memsave.revert`.

    Raises:
        ValueError: The class is not registered.
    """
    candidates = DROP_INS.get(STOCK.get(cls, cls), [])
    if cls not in candidates or cls not in STOCK:
        raise ValueError(f"{cls.__name__} is not registered")
    candidates.remove(cls)
    if not candidates:
        del DROP_INS[STOCK[cls]]


def has_own_forward(stock: Class) -> bool:
    """Whether nobody has put another forward in the place of that of a stock class, for all modules
    that have it, or another function in the place of the one that it calls.
    """
    if stock not in _FORWARDS:
        owner = next(cls for cls in stock.__mro__ if "forward" in vars(cls))
        is_of_torch = owner.__module__.startswith("torch.")
        if is_of_torch and getattr(owner.forward, "__module__", None) != owner.__module__:
            return False
        _FORWARDS[stock] = stock.forward
    return stock.forward is _FORWARDS[stock] and not is_replaced(stock)


#: Hooks of all modules, by their number, that may miss calls within a layer.
OF_RECORDERS: set[int] = set()


#: What was found of modules in checkpoints.
_hooked: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody sees a call of it: by hooks, its own or those of all modules, or by what is
    put in the place of its forward, that of its class, or the call of modules. What a checkpoint
    runs again, whether somebody saw it the first time.
    """
    checkpoint = checkpoint_hook()
    if checkpoint.startswith("_recomputation_hook") and module in _hooked:
        return _hooked[module]
    found = _is_hooked(module)
    if checkpoint:
        _hooked[module] = found
    return found


def _is_hooked(module: nn.Module) -> bool:
    stock = STOCK.get(type(module), type(module))
    if stock.__call__ is not _CALL or not has_own_forward(stock):
        return True
    forward = module._forward_hooks or module._forward_pre_hooks
    if forward or module._backward_hooks or module._backward_pre_hooks:
        return True
    if "forward" in vars(module):
        return True
    every = (
        *(_global_forward_hooks, _global_forward_pre_hooks),
        *(_global_backward_hooks, _global_backward_pre_hooks),
    )
    return any(hooks and hooks.keys() - OF_RECORDERS for hooks in every)


def parameters_of(module: nn.Module) -> tuple[Any, Any]:
    """Its weight and its bias, as its attributes are, without the search of ``torch.nn.Module`` for
    each, which takes longer than all else that calls a small layer.
    """
    own, parameters = module.__dict__, module._parameters
    if "weight" in own or "bias" in own or "weight" not in parameters or "bias" not in parameters:
        return module.weight, module.bias
    return parameters["weight"], parameters["bias"]


def _dress(cls: Class, stock: Class) -> None:
    """Give a drop-in what is said of it in :func:`register`."""
    own, seen = cls.forward, stock.forward if has_own_forward(stock) else None
    called, to_modes, was_replaced = (*FUNCTIONS.get(stock, {}).items(),), shown(stock, own), False

    def __prepare_scriptable__(self: nn.Module) -> nn.Module:
        plain = copy.copy(self)
        plain.__class__ = stock
        return plain

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen, was_replaced
        replaced = False
        for name, function in called:
            replaced = replaced or getattr(F, name) is not function
        # Somebody has replaced it, for all modules of the class.
        if stock.forward is not seen or replaced is not was_replaced:
            seen, was_replaced = stock.forward, replaced
            cls.forward = own if has_own_forward(stock) else seen  # type: ignore[method-assign]
        # For good, as other threads may be in a mode when this one leaves its own: without a mode
        # it does what `own` does.
        if _len_torch_function_stack() and called and cls.forward is own and others():
            cls.forward = to_modes  # type: ignore[method-assign]
        # Nobody has put a function of their own in its place, as torch.fx does: what that does.
        if stock.__call__ is _CALL and self._compiled_call_impl is None:
            return self._call_impl(*args, **kwargs)
        input = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(input, fx.Proxy) or type(self) is not cls:
            return stock.__call__(self, *args, **kwargs)
        self.__class__ = stock  # which tracers of torch.fx know
        try:
            return self(*args, **kwargs)
        finally:
            self.__class__ = cls

    # A code of its own: torch.compile counts how often it has compiled one, for all classes.
    name = f"{cls.__qualname__}.__call__"
    __call__.__code__ = __call__.__code__.replace(co_qualname=name)
    cls.__call__ = __call__  # type: ignore[method-assign]
    cls._get_name = lambda self: f"memsave.{type(self).__name__}"  # type: ignore[method-assign]
    cls.__prepare_scriptable__ = __prepare_scriptable__  # type: ignore[attr-defined]
