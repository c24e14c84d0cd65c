"""Bits in plain torch: the reference, on every device.

Eight booleans are eight bytes of 0 or 1, so one int64 multiplication gathers them in its top byte;
a table of 256 rows spreads them again. Bits lie in the storage order of ``like``, so that neither
direction copies a channels_last tensor into another layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

GATHER = 0x0102040810204080  # byte k of the factor moves boolean k to bit k of the top byte


class Like(NamedTuple):
    """What a rule may know of a tensor without keeping it alive."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)


#: A mask is applied to a float as to an integer of its size.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _wide(x: Tensor) -> Tensor:
    """As torch compares it with bounds that it does not round to 16 bits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


#: Of an element and two bounds. The negations say what nan is to them.
TESTS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "above": lambda x, low, high: x > low,
    "within": lambda x, low, high: (x > low) & (x < high),
    "not_outside": lambda x, low, high: ~((_wide(x) <= low) | (_wide(x) >= high)),
    "not_inside": lambda x, low, high: ~((x >= low) & (x <= high)),
}


class Piece(NamedTuple):
    """An activation that is linear in pieces, of two numbers ``low`` and ``high``.

    Attributes:
        op: ``op(x, low, high, inplace)``, by torch.
        test: Where a gradient passes (or passes whole), of :data:`TESTS`, with its bounds.
    """

    op: Callable[[Tensor, float, float, bool], Tensor]
    test: Callable[[float, float], tuple[str, float, float]]


#: By the name of the stock function. (The slope of a leaky ReLU is ``low``; the value of a
#: threshold, ``high``.)
PIECES = {
    "hardshrink": Piece(
        lambda x, low, high, inplace: F.hardshrink(x, high),
        lambda low, high: ("not_inside", low, high),
    ),
    "hardsigmoid": Piece(
        lambda x, low, high, inplace: F.hardsigmoid(x, inplace),
        lambda low, high: ("within", low, high),
    ),
    "hardtanh": Piece(F.hardtanh, lambda low, high: ("not_outside", low, high)),
    "leaky_relu": Piece(
        lambda x, low, high, inplace: F.leaky_relu(x, low, inplace),
        lambda low, high: ("above", 0.0, 0.0),
    ),
    "softshrink": Piece(
        lambda x, low, high, inplace: F.softshrink(x, high),
        lambda low, high: ("not_inside", low, high),
    ),
    "threshold": Piece(F.threshold, lambda low, high: ("not_outside", low, math.nan)),
}

#: Those whose output torch stores exactly as ``x`` (see ``empty_result`` in ``memory.py``).
AS_X = {"hardtanh"}

#: What nodes and their loops make of gradients by bits, in the order in which these are numbered.
SELECTIONS = ("select", "part", "scale")


def relu(x: Tensor, inplace: bool) -> tuple[Tensor, Tensor]:
    """``F.relu(x, inplace)``, and the bits of where it passes a gradient."""
    y = F.relu(x, inplace)
    # Stock passes a gradient unless y <= 0, hence also where y is nan. y is never negative, so that
    # is where it is not zero. torch converts to bool four times as fast as it compares; in what
    # torch.compile makes for CPU it is the other way round.
    passes = y != 0 if torch.compiler.is_compiling() else y.bool()
    return y, pack(passes, Like.of(y))


def piecewise(
    x: Tensor, inplace: bool, name: str, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """One of :data:`PIECES`, and the bits of where its test holds."""
    op, test = PIECES[name]
    if inplace:  # y overwrites x
        bits = compare(x, Like.of(x), *test(low, high))
        return op(x, low, high, True), bits
    y = op(x, low, high, False)
    return y, compare(x, Like.of(y), *test(low, high))


def compare(x: Tensor, like: Like, test: str, low: float, high: float) -> Tensor:
    """The bits of where one of :data:`TESTS` holds, in the order of ``like``."""
    return pack(TESTS[test](x, low, high), like)


def select(g: Tensor, bits: Tensor, like: Like, factor: float | None = None) -> Tensor:
    """``g``, or ``g * factor``, where a bit is set and +0 elsewhere, whatever stands there.

    torch's ``where`` on CPU costs four times as much as this bitwise "and", which has no
    derivative, however.
    """
    integer = INTEGERS[g.itemsize]
    ones = unpack(bits, like, -1, integer)
    selected = ones.bitwise_and_(g.resolve_neg().view(integer)).view(g.dtype)
    return selected if factor is None else selected.mul_(factor)


def scale(
    x: Tensor, bits: Tensor, like: Like, on: float, off: float, inplace: bool = False
) -> Tensor:
    """``x * on`` where a bit is set and ``x * off`` elsewhere. (Neither is rounded to 16 bits.)"""
    wide = torch.promote_types(x.dtype, torch.float32)
    factors = unpack(bits, like, on, wide, off)
    if inplace:
        return x.mul_(factors)
    # (What lies behind factors in the last byte must not stay alive; and x may be sparse.)
    is_whole = not like.shape.numel() % 8 and x.layout is torch.strided
    return (factors.mul_(x) if is_whole else factors * x).to(x.dtype)


class Rows(NamedTuple):
    """What was normalized, and what came in: the arguments of :func:`norm`.

    Attributes:
        g: The gradient of the output: rows ``(*n, i)``, or groups of channels ``(n, c, *s)``.
        kept: The input; or the output, without mean.
        mean, rstd: ``(*n,)`` or ``(n, groups)``; no mean if there is none, or of the output.
        weight, bias: ``(i,)`` or ``(c,)``, or ``None``.
        shift: What the layer adds to the weight.
        centered: Whether the layer subtracts a mean.
        groups: How many; ``None`` of rows.
    """

    g: Tensor
    kept: Tensor
    mean: Tensor | None
    rstd: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    shift: float
    from_output: bool
    centered: bool
    groups: int | None


def norm(rows: Rows, wrt: frozenset[str]) -> dict[str, Tensor] | None:
    """The gradients of ``x``, ``weight`` and ``bias``; here ``None``: the formula, of operations
    that can be differentiated, is in :mod:`memsave.layers.norm_gradients`.
    """
    return None


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The output of batch normalization in train mode, mean and reciprocal standard deviation of
    each channel; updates the running statistics. Here ``None``: stock's op is at hand.
    """
    return None


def batch_norm_backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, wrt: frozenset[str]
) -> dict[str, Tensor] | None:
    """Its gradients of ``x``, ``weight`` and ``bias``; here ``None``, too."""
    return None


def contiguous(x: Tensor) -> Tensor:
    """As :meth:`torch.Tensor.contiguous`, where no derivative is asked."""
    return x.contiguous()


class Windows(NamedTuple):
    """The windows of max pooling: one value per spatial axis throughout.

    Attributes:
        inputs, outputs: Sizes of the input and of the output.
        kernel, stride, padding, dilation: As in :func:`torch.nn.functional.max_pool2d`.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @lru_cache(maxsize=256)  # noqa: B019 (of tuples of numbers)
    def in_three_axes(self) -> Windows:
        """The same, with axes of one place in front."""
        axes = 3 - len(self.inputs)
        wide = {name: (1,) * axes + sizes for name, sizes in self._asdict().items()}
        return Windows(**{**wide, "padding": (0,) * axes + self.padding})


def max_pool(x: Tensor, windows: Windows) -> tuple[Tensor, Tensor] | None:
    """The output, and the offset of each maximum in its window (uint8, laid out as the output);
    here ``None``: :mod:`memsave.layers.pooling` finds them from stock's indices.
    """
    return None


def unpool(g: Tensor, offsets: Tensor, windows: Windows, like: Like) -> Tensor | None:
    """The gradient of the input, ``like``, from that of the output; here ``None``, too."""
    return None


def pack(mask: Tensor, like: Like) -> Tensor:
    """Pack booleans, shape ``like.shape``, to uint8, shape ``(ceil(numel / 8),)``. (Compiled, in
    another order, with two axes or more.)

    Overwrites ``mask``, which the caller has just made.
    """
    if torch.compiler.is_compiling():
        return _pack_traced(mask, like)
    flat = _in_storage_order(mask, like)
    if flat.numel() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    eights = flat.view(torch.int64)
    if are_results_cached():
        return ((eights * GATHER) >> 56).to(torch.uint8)
    return eights.mul_(GATHER).bitwise_right_shift_(56).to(torch.uint8)


def are_results_cached() -> bool:
    """Whether a mode keeps what ops return, so that it may not be overwritten: that of selective
    checkpointing.
    """
    if torch.compiler.is_compiling() or not _len_torch_dispatch_stack():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes)


def bernoulli(
    x: Tensor, like: Like, p: float, pack: Callable[[Tensor, Like], Tensor] = pack
) -> Tensor:
    """The bits of ``torch.empty_like(x).bernoulli_(p)``, in the order of ``like``: that of ``x``,
    if it is dense, or that of what this is.
    """
    # On CPU the numbers do not depend on the dtype that they are drawn in; elsewhere they may.
    kept = torch.empty_like(x, dtype=torch.bool if x.device.type == "cpu" else x.dtype)
    return pack(kept.bernoulli_(p).bool(), like)


def unpack(bits: Tensor, like: Like, on: float, dtype: torch.dtype, off: float = 0) -> Tensor:
    """A fresh tensor of ``like``'s shape and layout: ``on`` where a bit is set, else ``off``."""
    if bits.ndim > 1:
        return _unpack_traced(bits, like, on, dtype, off)
    # A table made of fake tensors, under functorch or for a CUDA graph must not outlive its mode.
    lasts = type(bits) is Tensor and not torch.compiler.is_compiling()
    lasts = lasts and not _are_functorch_transforms_active()
    if lasts and bits.is_cuda:
        lasts = not torch.cuda.is_current_stream_capturing()
    table = _cached_table if lasts else _table
    flat = table(on, off, dtype, bits.device).index_select(0, bits.int()).view(-1)
    if is_dense(like):
        return flat.as_strided(like.shape, like.stride)
    return flat[: like.shape.numel()].view(like.shape)


def _table(on: float, off: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Row ``b``: the eight values that byte ``b`` stands for; shape (256, 8)."""
    byte = torch.arange(256, device=device)[:, None]
    bit = torch.arange(8, device=device)
    return _choose(((byte >> bit) & 1).bool(), on, off, dtype)


def _choose(mask: Tensor, on: float, off: float, dtype: torch.dtype) -> Tensor:
    values = (torch.full((), value, dtype=dtype, device=mask.device) for value in (on, off))
    return torch.where(mask, *values)


_cached_table = lru_cache(maxsize=64)(_table)


def _in_storage_order(tensor: Tensor, like: Like) -> Tensor:
    """The elements as a flat tensor, in the order in which ``like`` stores them."""
    if not is_dense(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride:
        tensor = tensor.new_empty_strided(like.shape, like.stride).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(like: Like) -> bool:
    """Whether the strides cover the storage exactly once (any permutation of contiguous)."""
    expected = 1
    for stride, size in sorted(zip(like.stride, like.shape, strict=True)):
        if size != 1 and stride != expected:
            return size == 0 or 0 in like.shape
        expected *= size
    return True


# For torch.compile: expressions that its code generator fuses with what surrounds them, and
# vectorizes (on CPU, in 32 bits). A byte holds the bits of elements an eighth of an axis apart, so
# that bytes which lie side by side hold those of elements that do. An axis in front tells them from
# the other bits: compiled autograd traces the backward of a forward that nobody has.


def _pack_traced(mask: Tensor, like: Like) -> Tensor:
    mask, axis = _to_cut(mask, like)
    bits = mask.int().unflatten(axis, (2, 2, 2, mask.shape[axis] // 8))
    for places in (4, 2, 1):
        low, high = bits.unbind(axis)
        bits = low | (high << places)
    bits = bits.to(torch.uint8)
    # (Which tells it from what is not traced. Of a view inductor would make a copy, and could not
    # tell the order of its strides where sizes are dynamic.)
    return bits if bits.ndim > 1 else bits[None]


def _unpack_traced(bits: Tensor, like: Like, on: float, dtype: torch.dtype, off: float) -> Tensor:
    axis = _outermost(like)
    if axis is None or len(like.shape) == 1:
        bits = bits[0]
    places = 1 << torch.arange(8, dtype=torch.int32, device=bits.device)
    at = 0 if axis is None else axis
    places = places.view(8, *[1 for _ in range(bits.ndim - at)])
    mask = (bits.int().unsqueeze(at) & places) != 0
    mask = mask.flatten(at, at + 1)
    if axis is None:
        mask = mask[: like.shape.numel()].view(like.shape)
    return _choose(mask, on, off, dtype)


def _to_cut(mask: Tensor, like: Like) -> tuple[Tensor, int]:
    """What can be cut in eight, along which axis: the tensor, or all elements in a row."""
    axis = _outermost(like)
    if axis is not None:
        return mask, axis
    flat = mask.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % 8)), 0


def _outermost(like: Like) -> int | None:
    """The axis to cut in eight: the outermost in memory that can be, whatever sizes are dynamic."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    found = None
    for axis, size in enumerate(like.shape):
        fits = statically_known_true(size % 8 == 0)
        if fits and (found is None or like.stride[axis] > like.stride[found]):
            found = axis
    return found
