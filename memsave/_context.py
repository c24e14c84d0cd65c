"""What torch is doing where a layer is called: compiling, tracing, transforming, casting; and what
tensors are in there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, compiler, strided
from torch._C import (
    _are_functorch_transforms_active,
    _get_dispatch_mode,
    _is_tracing,
    _TorchDispatchModeKey,
)
from torch._C._autograd import CreationMeta, _get_creation_meta, _top_saved_tensors_default_hooks
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .kernels import are_arrays

Autocast = Callable[[str], torch.dtype | None]


# What a tensor is.


def is_writable(x: Tensor) -> bool:
    """Whether ``x``, which wants a gradient, may be overwritten. (Where it may not, the stock op
    says why, before it does.)
    """
    if not x._is_view():
        return not x.is_leaf
    base = x._base
    assert base is not None
    return not base.is_leaf and _get_creation_meta(x) == CreationMeta.DEFAULT


def is_special(arg: Tensor) -> bool:
    """Whether it is sparse, complex or nested."""
    return arg.layout is not strided or arg.is_complex() or arg.is_nested


OF_TORCH = (Tensor, torch.nn.Parameter)


def has_other_meaning(*args: Any) -> bool:
    """Whether one is no tensor, or of a class that gives torch ops another meaning."""
    return any(arg is not None and type(arg) not in OF_TORCH and _is_foreign(arg) for arg in args)


def _is_foreign(arg: Any) -> bool:
    return (
        not isinstance(arg, Tensor)
        or type(arg) is FunctionalTensor
        or type(arg).__torch_function__ is not torch._C._disabled_torch_function_impl
        or is_traceable_wrapper_subclass(arg)
    )


def is_plain(arg: Any) -> bool:
    """Whether it is a tensor that may be asked for what it is: of a class that gives that no other
    meaning. (Of all, ``torch.compile`` knows.)
    """
    if type(arg) in OF_TORCH:
        return True
    return isinstance(arg, Tensor) and (is_dynamo_compiling() or not _is_foreign(arg))


def has_tangent(arg: Any) -> bool:
    """Whether forward-mode AD, which is on, differentiates by it."""
    return isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None


# What torch is doing.


def is_unmapped(*args: Any) -> bool:
    """Whether the transforms of ``torch.func`` that are on leave these alone: all are vmap, and map
    none of them. (A checkpoint may run a layer once within vmap and once outside.)
    """
    levels = get_interpreter_stack() or ()
    return all(level.key() == TransformType.Vmap for level in levels) and not any(
        isinstance(arg, Tensor) and is_functorch_wrapped_tensor(arg) for arg in args
    )


def is_traced(x: Any) -> bool:
    """Whether ``torch.fx`` or ``torch.jit`` is tracing, so that nothing may depend on shapes."""
    if is_dynamo_compiling() or compiler._is_compiling_flag:
        return False
    return not isinstance(x, Tensor) or _is_tracing()


def is_exported() -> bool:
    """Whether ``torch.export`` is tracing, which is to find the calls of stock."""
    # (is_exporting() is always true to the compiler of torch 2.11.)
    return torch.compiler._is_exporting_flag


def is_recorded() -> bool:
    """Whether ``make_fx`` records what runs: for a program that is run on other values, and may be
    differentiated.
    """
    if is_dynamo_compiling():
        return False
    return _get_dispatch_mode(_TorchDispatchModeKey.PROXY) is not None


def checkpoint_hook() -> str:
    """What takes the tensors that are kept, if that is ``torch.utils.checkpoint``:
    ``_checkpoint_hook...``, and ``_recomputation_hook...`` when it runs again.
    """
    if is_compiling():
        return ""  # runs again in the same graph
    hooks = _top_saved_tensors_default_hooks(False)
    if hooks is None or getattr(hooks[0], "__module__", None) != "torch.utils.checkpoint":
        return ""
    return hooks[0].__qualname__


def is_value_known(*args: Any) -> bool:
    """Whether a layer may look at the values of tensors: nothing traces or transforms it."""
    return not (
        is_compiling()
        or _is_tracing()
        or (_are_functorch_transforms_active() and not is_unmapped(*args))
        or FunctionalTensor in map(type, args)
        or is_recorded()
    )


def is_plain_gradient(g: Tensor) -> bool:
    """Whether ``bwd`` may do to ``g`` what has no derivative and no rule for vmap."""
    if g.requires_grad or forward_ad._current_level >= 0:
        return False
    return are_arrays(g) or (
        type(g) in (Tensor, FakeTensor)
        and not is_legacy_batchedtensor(g)  # is_grads_batched
        and not is_functorch_wrapped_tensor(g)
    )


def is_final(g: Tensor) -> bool:
    """Whether the gradients that ``bwd`` makes are not to be differentiated, so that it may
    overwrite what it has made.
    """
    if is_compiling() or torch.is_grad_enabled() or is_recorded():
        return False
    return is_plain_gradient(g)


@contextmanager
def outside_of_vmap() -> Iterator[None]:
    """Where ``bwd`` may draw random numbers: the same for every incoming gradient of a batch."""
    if is_dynamo_compiling():  # (compiled autograd has no batches, and no way to leave them)
        yield
        return
    levels = torch._C._vmapmode_increment_nesting()  # of ``is_grads_batched``, and one
    for _ in range(levels):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(levels - 1):
            torch._C._vmapmode_increment_nesting()


# Autocast.

#: Devices that have autocast. (Asked here, as torch.compile cannot trace it in every version.)
AUTOCAST = frozenset(
    device
    for device in ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")
    if torch.amp.is_autocast_available(device)
)


def amp_enabled(device: str) -> bool:
    """Whether autocast is on, on this type of device."""
    return device in AUTOCAST and torch.is_autocast_enabled(device)


def lowered(device: str) -> torch.dtype:
    """The dtype of autocast on this type of device."""
    return torch.get_autocast_dtype(device)


#: Devices whose autocast does not widen norms.
_NARROW = {"cpu"}


def widened(device: str) -> torch.dtype | None:
    """The dtype in which autocast computes norms."""
    return None if device in _NARROW else torch.float32


def autocast_dtype(autocast: Autocast, args: tuple[Any, ...]) -> torch.dtype | None:
    """What autocast casts these arguments to, if it is on."""
    device = args[0].device.type
    return autocast(device) if amp_enabled(device) else None


def autocast_args(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Cast as autocast does: all floats but float64."""
    return tuple(
        arg.to(dtype)
        if isinstance(arg, Tensor) and arg.is_floating_point() and arg.dtype != torch.float64
        else arg
        for arg in args
    )
