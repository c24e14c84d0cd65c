"""Who puts something in the place of a function of torch, and what they see of a layer.

It is what they see of stock's module, whose forward calls one function: a
``torch.overrides.TorchFunctionMode`` sees that call, and what it has the function mean holds; where
it has nothing to say, the layer's own forward runs. Where the function itself is another than
torch's (``torch.nn.functional.relu = ...``), stock's forward runs.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

Function = Callable[..., Any]
Class = type[nn.Module]


def _functions_of(stock: Class) -> dict[str, Function | None]:
    found: dict[str, Function | None] = {}
    methods, seen = ["forward"], set()
    while methods:
        method = getattr(stock, methods.pop(0), None)
        if not isinstance(method, FunctionType) or method in seen:
            continue
        seen.add(method)
        methods += method.__code__.co_names
        for name in method.__code__.co_names if method.__globals__.get("F") is F else ():
            if not name.startswith("_") and callable(function := getattr(F, name, None)):
                home = getattr(function, "__module__", None) or "torch"
                found[name] = function if home.startswith("torch") else None
    return found


#: The functions of ``torch.nn.functional`` that each class of ``torch.nn`` calls, by name, as they
#: were at first (``None`` where one was not torch's).
FUNCTIONS = {
    cls: _functions_of(cls)
    for cls in vars(nn).values()
    if isinstance(cls, type) and issubclass(cls, nn.Module)
}


def is_replaced(stock: Class) -> bool:
    """Whether somebody has put another function in the place of one that a stock class calls."""
    for name, function in FUNCTIONS.get(stock, {}).items():
        if getattr(F, name) is not function:
            return True
    return False


def others() -> list[TorchFunctionMode]:
    """The modes that may have a layer's function mean something else: all but ours and torch's own
    (such as that of ``torch.set_default_device``).
    """
    if not _len_torch_function_stack():
        return []
    modes = [m for m in _get_current_function_mode_stack() if not _asks_for_layers(m)]
    return [m for m in modes if not type(m).__module__.startswith(("torch.", "memsave."))]


def _asks_for_layers(mode: TorchFunctionMode) -> bool:
    return getattr(mode, "asks_for_layers", False)


@contextmanager
def stack(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Have these modes on, from the outermost, and no others."""
    before = [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()
        for mode in before:
            _push_mode(mode)


def beneath(mode: TorchFunctionMode) -> Any:
    """Have this one be the outermost, which is asked last."""
    return stack([mode, *_get_current_function_mode_stack()])


class _Asking(TorchFunctionMode):
    """The innermost: notes how stock's forward calls its functions."""

    asks_for_layers = True

    def __init__(self) -> None:
        super().__init__()
        self.call: tuple[Any, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.call = (func, *args, *kwargs, *kwargs.values())
        return func(*args, **kwargs)


class _Answering(TorchFunctionMode):
    """The outermost: where the call of a function comes through as it was, of the layer's input (or
    what was made of it by others), runs the layer in its place.
    """

    asks_for_layers = True

    def __init__(
        self, asking: _Asking, input: Any, functions: dict[Function, bool], run: Callable[[], Any]
    ) -> None:
        super().__init__()
        self.asking, self.input, self.functions, self.run = asking, input, functions, run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, asked = kwargs or {}, self.asking.call
        given = (func, *args, *kwargs, *kwargs.values())
        is_asked = len(given) == len(asked) and all(map(operator.is_, given, asked))
        if not is_asked or func not in self.functions or not args or args[0] is not self.input:
            return func(*args, **kwargs)
        if self.functions[func]:
            return self.run()
        # A checkpoint that runs again outside of the mode must not miss what this would keep.
        is_hooked = _top_saved_tensors_default_hooks(False) is not None
        with saved_tensors_hooks(_same, _same) if is_hooked else nullcontext():
            self.input = func(*args, **kwargs)
        return self.input


def _same(tensor: Tensor) -> Tensor:
    return tensor


def shown(stock: Class, own: Function) -> Function:
    """The forward of a drop-in, as that of its stock class to the modes of others."""
    functions: dict[Function, bool] = {}  # whether it is the layer itself: the first that it names
    for place, name in enumerate(FUNCTIONS.get(stock, {})):
        # (Torch's modes may see the one of this name in torch.)
        for home, end in itertools.product((F, torch), ("", "_with_indices")):
            if hasattr(home, name + end):
                functions.setdefault(getattr(home, name + end), place == 0)

    @wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not others():
            return own(self, *args, **kwargs)
        if is_parametrized(self):  # whose weight may be another each time that it is asked for
            return stock.forward(self, *args, **kwargs)

        is_counted = isinstance(self, _BatchNorm) and self.training
        with stack([]):
            count: Any = self.num_batches_tracked if is_counted else None
            before = None if count is None else count.clone()

        def run() -> Any:
            if count is not None:  # What stock's forward has added, ours adds again.
                count.copy_(before)
            return own(self, *args, **kwargs)

        input = args[0] if args else next(iter(kwargs.values()), None)
        asking = _Asking()
        answering = _Answering(asking, input, functions, run)
        modes = [m for m in _get_current_function_mode_stack() if not _asks_for_layers(m)]
        with stack([answering, *modes, asking]):
            return stock.forward(self, *args, **kwargs)

    forward.own = own  # type: ignore[attr-defined]
    return forward
