"""Spatial options and layouts, as several families of layers need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling

from .._context import is_final, is_plain_gradient
from ..kernels.memory import FORMATS
from ..kernels.reference import Like

Ints = int | Sequence[int]
_SEQUENCES = (tuple, list)


def per_axis(value: Ints, dims: int) -> list[int]:
    """One value per spatial axis; torch accepts an int or a sequence of one for all."""
    values: list[Any] = list(value) if isinstance(value, _SEQUENCES) else [value]
    return values * dims if len(values) == 1 else values


def stride_or(kernel_size: Any, stride: Any) -> Any:
    """The stride of a pooling layer; where it is absent, the kernel's size. (0 is an error.)"""
    is_absent = stride is None or (isinstance(stride, _SEQUENCES) and not stride)
    return kernel_size if is_absent else stride


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for what depends on sizes and options alone: compute it once for each of them.

    (But not in compiled code, nor of what cannot be looked up: lists, symbolic sizes.)
    """
    look_up = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def remember(*args: Any) -> Any:
        if is_dynamo_compiling():
            return function(*args)
        try:
            return look_up(*args)
        except TypeError:
            return function(*args)

    return remember


def is_size(size: Any, *sizes: int) -> bool:
    """Whether a size is one of these. A size that depends on data, of which a compiler knows
    nothing, is none of them.
    """
    if not is_dynamo_compiling():
        return size in sizes
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # (slow, and there already)

    return any(guard_or_false(size == one) for one in sizes)


def placeholder(g: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of this shape for a kernel that asks for nothing else: one element, expanded.

    (Its dtype is that of the gradient, unless given.)
    """
    return g.new_empty(1, dtype=dtype).expand(shape)


def by_shape(backward: Callable[..., Tensor], g: Tensor, like: Like, *args: Any) -> Tensor:
    """The gradient of ``x`` by a kernel that asks ``x`` for its shape and memory format alone. If
    nobody looks on, the gradient itself, yet to be written, stands in for it. (There are modes that
    know what a kernel writes to by the name ``out`` alone.)
    """
    if not is_final(g) or _len_torch_dispatch_stack():
        return in_format(backward(g, placeholder(g, like.shape), *args), like)
    dx = empty_in_format(g, like)
    return backward(in_format(g, like), dx, *args, grad_input=dx)


def empty_in_format(g: Tensor, like: Like) -> Tensor:
    """Memory for the gradient of a tensor."""
    own = last_format(like) or torch.contiguous_format
    return torch.empty(like.shape, dtype=g.dtype, device=g.device, memory_format=own)


def in_format(gradient: Tensor, like: Like) -> Tensor:
    """The gradient with the channels last, if the tensor that it is of stores them so."""
    if torch.compiler.is_compiling() or not is_plain_gradient(gradient):
        return gradient
    last = last_format(like)
    return gradient if last is None else gradient.contiguous(memory_format=last)


def last_format(like: Like) -> torch.memory_format | None:
    """The format that stores the channels last, if the tensor is in it (and they are several)."""
    last = FORMATS.get(len(like.shape))
    return last if last and channels_last(like, len(like.shape) - 2) else None


def channels_last(like: Like, dims: int) -> bool:
    """Whether a batched tensor stores its channels as the last axis (and they are several)."""
    return len(like.shape) == dims + 2 and like.shape[1] > 1 and like.stride[1] == 1
