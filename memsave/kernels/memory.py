"""Tensors as memory: what kernels that go by addresses have to know of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _get_function_stack_at,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._prims_common import suggest_memory_format
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from .reference import Like, Windows, is_dense

#: Formats of tensors of so many axes that store the channels last.
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
#: Places in the largest window, of which a byte holds an offset.
LARGEST_WINDOW = 256


def len_of_functions() -> int:
    """How many modes there are that see functions, but for those of ``torch.set_default_device``
    and ``with torch.device(...)``, which say where tensors are made.
    """
    modes = map(_get_function_stack_at, range(_len_torch_function_stack()))
    return sum(type(mode) is not DeviceContext for mode in modes)


def has_memory(x: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether it is real, stored without gaps in this order, and no mode has to see operations."""
    return (
        type(x) in (Tensor, Parameter)
        and x.layout is torch.strided
        and not x.is_neg()
        and not _len_torch_dispatch_stack()
        and not len_of_functions()
        and x.stride() == stride
        and (x.is_contiguous() or is_dense(Like.of(x)))
    )


def layout_of_pool(
    x: Tensor, windows: Windows, like: Like | None = None
) -> torch.memory_format | None:
    """How the input of a pooling is stored (or an output, of an input ``like`` this), where that is
    clear (to torch, too: one channel is first and last) and a byte holds its offsets.
    """
    if math.prod(windows.kernel) > LARGEST_WINDOW or not x.numel() or not 1 <= x.ndim <= 5:
        return None
    first, last = x.is_contiguous(), FORMATS.get(x.ndim)
    if len(windows.inputs) + 2 != x.ndim:
        return torch.contiguous_format if first else None
    if last is None:
        return torch.contiguous_format if first and x.shape[1] > 1 else None
    is_last = x.is_contiguous(memory_format=last) and (first or suggest_memory_format(x) is last)
    if first == is_last:
        if not first or like is None or like.shape[1] == 1:
            return None
        first = like.stride[1] != 1  # As the input, of whose channels there are several.
    return torch.contiguous_format if first else last


def planes(x: Tensor, windows: Windows, layout: torch.memory_format) -> tuple[int, int]:
    """How many images are stored, and how many channels each of their places has."""
    if layout is torch.contiguous_format:
        return math.prod(x.shape[: -len(windows.inputs)]), 1
    return x.shape[0], x.shape[1]


def empty_result(x: Tensor, **options: Any) -> Tensor:
    """Room for what torch computes of each element: stored as ``x`` (or its own dense order), but
    for strides of axes of one place, which are those of a format, if ``x`` is in one.
    """
    if x.is_contiguous():
        own = torch.contiguous_format
    elif x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        own = torch.channels_last
    else:
        own = torch.preserve_format
    return torch.empty_like(x, memory_format=own, **options)


def is_as_result(x: Tensor) -> bool:
    """Whether it is stored exactly as :func:`empty_result` of it."""
    return 1 not in x.shape or x.stride() == empty_result(x, device="meta").stride()


def empty_bits(x: Tensor) -> Tensor:
    """Room for the bits of a tensor."""
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


def in_order(x: Tensor, like: Like) -> Tensor:
    """The tensor in the memory format that the bits are in."""
    if x.stride() == like.stride or type(x) is not Tensor or not is_dense(like):
        return x
    return torch.empty_strided(like.shape, like.stride, dtype=x.dtype, device=x.device).copy_(x)
