"""Bit packing in plain torch: the reference, on every device.

Eight booleans are eight bytes of 0 or 1, so one int64 multiplication gathers them in its top byte;
a table of 256 rows spreads them again. Bits lie in the storage order of ``like``, so that neither
direction copies a channels_last tensor into another layout.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

GATHER = 0x0102040810204080  # byte k of the factor moves boolean k to bit k of the top byte


class Like(NamedTuple):
    """What a rule may know of a tensor without keeping it alive."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)


def pack(mask: Tensor, like: Like) -> Tensor:
    """Pack booleans, shape ``like.shape``, to uint8, shape ``(ceil(numel / 8),)``.

    Overwrites ``mask``, which the caller has just made.
    """
    if torch.compiler.is_compiling():
        return _pack_traced(mask)
    flat = _in_storage_order(mask, like)
    if flat.numel() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    return flat.view(torch.int64).mul_(GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack(
    bits: Tensor, like: Like, one: bool | int | float, dtype: torch.dtype, over: float = 1
) -> Tensor:
    """A fresh tensor of ``like``'s shape and layout: where a bit is set ``one``, or ``one / over``
    as torch rounds it in ``dtype``; 0 elsewhere.
    """
    if torch.compiler.is_compiling():
        return _unpack_traced(bits, like.shape, one, dtype, over)
    # A table made of fake tensors or under functorch must not outlive its mode.
    table = _cached_table if type(bits) is Tensor else _table
    flat = table(one, dtype, over, bits.device).index_select(0, bits.int()).view(-1)
    if _dense(like):
        return flat.as_strided(like.shape, like.stride)
    return flat[: like.shape.numel()].view(like.shape)


def _table(
    one: bool | int | float, dtype: torch.dtype, over: float, device: torch.device
) -> Tensor:
    """Row ``b``: the eight values that byte ``b`` stands for; shape (256, 8)."""
    byte = torch.arange(256, device=device)[:, None]
    bit = torch.arange(8, device=device)
    values = ((byte >> bit) & 1).to(dtype).mul_(one)
    return values if over == 1 else values.div_(over)


_cached_table = lru_cache(maxsize=64)(_table)


def _in_storage_order(tensor: Tensor, like: Like) -> Tensor:
    """The elements as a flat tensor, in the order in which ``like`` stores them."""
    if not _dense(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride:
        tensor = tensor.new_empty_strided(like.shape, like.stride).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def _dense(like: Like) -> bool:
    """Whether the strides cover the storage exactly once (any permutation of contiguous)."""
    expected = 1
    for stride, size in sorted(zip(like.stride, like.shape, strict=True)):
        if size != 1 and stride != expected:
            return size == 0 or 0 in like.shape
        expected *= size
    return True


# For torch.compile: expressions that its code generator fuses with what surrounds them. Elements
# are taken in logical order, which a compiler may lay out as it likes.


def _pack_traced(mask: Tensor) -> Tensor:
    flat = mask.reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    bits = flat[:, 0].to(torch.uint8)
    for k in range(1, 8):
        bits = bits | (flat[:, k].to(torch.uint8) << k)
    return bits


def _unpack_traced(
    bits: Tensor, shape: torch.Size, one: bool | int | float, dtype: torch.dtype, over: float
) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    flat = ((bits[:, None] >> shifts) & 1).view(-1)[: shape.numel()]
    values = flat.view(shape).to(dtype) * one
    return values if over == 1 else values / over
