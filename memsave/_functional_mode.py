"""Have a model's calls of torch's functions run those of :mod:`memsave.functional`.

Which of torch's functions have one is found by their names: there is no second list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from . import functional
from ._context import checkpoint_hook
from .layers.modes import beneath, others, stack

Function = Callable[..., Any]


def _stand_ins() -> Iterator[tuple[Function, Function]]:
    """Each of torch's functions, and the one that runs in its place."""
    for name in functional.__all__:
        ours = getattr(functional, name)
        homes = (F, torch, Tensor) if _takes_arguments_of(ours, name) else (F,)
        yield from ((stock, ours) for stock in _named(name, homes))
        if _takes_arguments_of(ours, f"{name}_"):
            inplace = _always(ours, inplace=True)
            yield from ((stock, inplace) for stock in _named(f"{name}_", (F, torch, Tensor)))
        # What F.max_pool2d calls where return_indices is true.
        both = _always(ours, return_indices=True)
        yield from ((stock, both) for stock in _named(f"{name}_with_indices", (F,)))


def _named(name: str, homes: tuple[Any, ...]) -> list[Function]:
    return [getattr(home, name) for home in homes if hasattr(home, name)]


def _takes_arguments_of(ours: Function, name: str) -> bool:
    """Whether a function of ours takes the arguments of torch's op of this name.

    It does those of ``torch.nn.functional``; but ``torch.batch_norm`` has another order.
    """
    op = getattr(torch.ops.aten, name, None)
    if op is None:
        return False
    schema = getattr(op, op.overloads()[0])._schema
    if len(schema.returns) != 1:  # as torch.adaptive_max_pool1d, whose indices ours leaves out
        return False
    theirs = [argument.name.replace("self", "input") for argument in schema.arguments]
    return theirs == [*signature(ours).parameters][: len(theirs)]


def _always(function: Function, **options: Any) -> Function:
    return lambda *args, **kwargs: function(*args, **{**kwargs, **options})


#: Of torch's functions, those of :mod:`memsave.functional`.
STAND_INS: dict[Function, Function] = dict(_stand_ins())
#: The types of arguments none of which has a meaning of its own for torch's functions (as those of
#: torch.fx have).
PLAIN = ((), (Tensor,))


class functional_mode(TorchFunctionMode, ContextDecorator):
    """Context manager and decorator: run :mod:`memsave.functional` for torch's own functions.

    ::

        with memsave.functional_mode():
            y = model(x)
        y.sum().backward()

    For models that call functions where :func:`memsave.convert` looks for modules. Inside,
    ``torch.nn.functional.relu``, ``torch.relu``, ``x.relu()``, ``x.relu_()`` and so on for each
    name in :mod:`memsave.functional` run the function of that name: outputs and gradients are the
    same, and less is kept for backward. Modules that call those are served, too.

    It holds in the thread that enters it. Backward may run outside. What torch computes by a
    function of its own that it lets nobody look into (``F.multi_head_attention_forward``), and
    what runs in ``torch.utils.checkpoint``, which keeps nothing, stays as it is.
    """

    asks_for_layers = True  # which the layers themselves are not to be asked for

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # (In here torch has taken the mode away, so that memsave can call torch's functions.)
        kwargs = kwargs or {}
        is_given = "out" in kwargs  # where to write, of which no gradient can be
        if func in STAND_INS and types in PLAIN and not is_given and not checkpoint_hook():
            if others():  # which have been on before, and see torch's functions
                with beneath(self):
                    return func(*args, **kwargs)
            func = STAND_INS[func]
        return func(*args, **kwargs)


@contextmanager
def outside() -> Iterator[bool]:
    """Step out of all modes of this kind. (Whether there is one.)"""
    modes = _get_current_function_mode_stack()
    left = [mode for mode in modes if not isinstance(mode, functional_mode)]
    with stack(left):
        yield len(left) < len(modes)
