"""What makes a class a drop-in: which stock module it stands for, with which rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from torch import fx, nn

from ..spec import Layer

M = TypeVar("M", bound=type[nn.Module])

#: The drop-ins of each stock class; the first is the default.
DROP_INS: dict[type[nn.Module], list[type[nn.Module]]] = {}
#: The rows that a drop-in may run (BatchNorm has one per mode), and its stock class.
ROWS: dict[type[nn.Module], tuple[Layer, ...]] = {}
STOCK: dict[type[nn.Module], type[nn.Module]] = {}


def as_stock(stock: type[nn.Module], *rows: Layer) -> None:
    """The stock class keeps what the rows say, so it is its own first drop-in."""
    DROP_INS.setdefault(stock, []).insert(0, stock)
    ROWS[stock] = rows


def drop_in(*rows: Layer) -> Callable[[M], M]:
    """Class decorator: the class replaces its base class wherever a model has exactly that.

    A drop-in adds no state to its base, so that swapping ``__class__`` converts an instance. Its
    ``repr`` shows the package. ``torch.jit.script`` compiles the stock module in its place, and
    ``torch.fx`` traces a call of it as it does one of the stock module: as one node.
    """

    def register(cls: M) -> M:
        (stock,) = cls.__bases__
        DROP_INS.setdefault(stock, []).append(cls)
        ROWS[cls] = rows
        STOCK[cls] = stock

        def __prepare_scriptable__(self: nn.Module) -> nn.Module:
            plain = copy.copy(self)
            plain.__class__ = stock
            return plain

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A tracer of torch.fx takes modules of torch.nn for leaves, and looks into others.
            input = args[0] if args else kwargs.get("input")
            if isinstance(input, fx.Proxy):
                tracer: Any = input.tracer
                return tracer.call_module(self, _node(self, tracer), args, kwargs)
            return stock.__call__(self, *args, **kwargs)

        cls.__call__ = __call__  # type: ignore[method-assign]
        cls._get_name = lambda self: f"memsave.{cls.__name__}"  # type: ignore[method-assign]
        cls.__prepare_scriptable__ = __prepare_scriptable__  # type: ignore[attr-defined]
        return cls

    return register


def _node(module: nn.Module, tracer: Any) -> Callable[..., fx.Proxy]:
    """What a tracer does for a leaf."""

    def node(*args: Any, **kwargs: Any) -> fx.Proxy:
        return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)

    return node
