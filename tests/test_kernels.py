"""Packing is exact, in storage order, the inverse of unpacking, and the same when compiled."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memsave.kernels import pack, reference, unpack
from memsave.kernels.reference import Like

ONES = {
    torch.bool: True,
    torch.int8: -1,
    torch.int16: -1,
    torch.int32: -1,
    torch.int64: -1,
    torch.bfloat16: 2.5,
    torch.float16: 2.5,
    torch.float32: 2.5,
    torch.float64: 1 / 3,
}


class Bits(NamedTuple):
    """A boolean tensor, what it looks like, and its elements in the order of packing."""

    mask: Tensor
    like: Like
    flat: np.ndarray


@st.composite
def bits(draw: st.DrawFn, *, dense: bool | None = None) -> Bits:
    """Any permutation of contiguous axes; or, not dense, with gaps (packed in logical order)."""
    stored = draw(st.lists(st.integers(0, 5), max_size=5))
    axes = draw(st.permutations(range(len(stored))))
    values = np.asarray(np.random.default_rng(draw(st.integers(0, 1000))).random(stored) < 0.5)
    tensor = torch.tensor(values.tolist(), dtype=torch.bool).view(stored).permute(axes)
    if draw(st.booleans()) if dense is None else dense:
        like, flat = Like.of(tensor), values.reshape(-1)
    else:
        like = Like.of(torch.stack([tensor, tensor], dim=-1)[..., 0])
        flat = tensor.numpy().reshape(-1)
    mask = tensor.clone(memory_format=draw(st.sampled_from(FORMATS)))
    return Bits(mask, like, flat)


FORMATS = (torch.preserve_format, torch.contiguous_format)


@given(bits())
def test_pack_is_packbits_in_storage_order(case: Bits) -> None:
    packed = pack(case.mask.clone(), case.like)
    assert packed.dtype == torch.uint8
    assert packed.untyped_storage().nbytes() == math.ceil(case.flat.size / 8)
    assert np.array_equal(packed.numpy(), np.packbits(case.flat, bitorder="little"))


@given(bits(), st.sampled_from([*ONES]))
def test_unpack_is_the_inverse(case: Bits, dtype: torch.dtype) -> None:
    one = ONES[dtype]
    tensor = unpack(pack(case.mask.clone(), case.like), case.like, one, dtype)
    zero = torch.zeros((), dtype=dtype)
    assert tensor.dtype == dtype
    assert tensor.equal(torch.where(case.mask, torch.tensor(one, dtype=dtype), zero))


@given(bits(), st.sampled_from([dtype for dtype in ONES if dtype.is_floating_point]))
def test_unpack_divides_as_torch_does(case: Bits, dtype: torch.dtype) -> None:
    packed = pack(case.mask.clone(), case.like)
    tensor = unpack(packed, case.like, 1, dtype, over=0.3)
    assert tensor.equal(case.mask.to(dtype).div(0.3))


@given(bits(dense=True))
def test_unpack_has_the_layout_of_what_the_bits_describe(case: Bits) -> None:
    tensor = unpack(pack(case.mask.clone(), case.like), case.like, 1.0, torch.float32)
    assert tensor.stride() == case.like.stride


@given(bits())
def test_unpacked_tensors_share_no_memory(case: Bits) -> None:
    """Callers overwrite them: neither the table nor another result may change."""
    packed = pack(case.mask.clone(), case.like)
    first = unpack(packed, case.like, 1.0, torch.float32)
    expected = first.clone()
    first.fill_(7)
    assert unpack(packed, case.like, 1.0, torch.float32).equal(expected)


@given(bits(dense=True), st.sampled_from([*ONES]))
def test_traced_variants_agree(case: Bits, dtype: torch.dtype) -> None:
    """On contiguous tensors: the order of the others is the compiler's."""
    mask = case.mask.contiguous()
    packed = pack(mask.clone(), Like.of(mask))
    assert reference._pack_traced(mask).equal(packed)
    one = ONES[dtype]
    over = 3 if dtype.is_floating_point else 1
    tensor = reference._unpack_traced(packed, mask.shape, one, dtype, over)
    assert tensor.dtype == dtype
    assert tensor.equal(unpack(packed, Like.of(mask), one, dtype, over))


def test_compiled_code_uses_the_traced_variants() -> None:
    """In one graph, and with what it packed unpacked rightly."""
    shape = (3, 5, 7)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        like = Like.of(x)
        packed = pack(x > 0, like)
        return packed, unpack(packed, like, 2.5, x.dtype)

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed, tensor = both(x)
    assert packed.equal(pack(x > 0, Like.of(x)))
    assert tensor.equal((x > 0) * 2.5)


@pytest.mark.parametrize("cached", [False, True])
def test_fake_tensors_leave_the_table_real(cached: bool) -> None:
    """A table made under ``FakeTensorMode`` has no values; the next real call must not meet it."""
    mask = torch.tensor([True, False, True])
    like = Like.of(mask)
    packed = pack(mask.clone(), like)
    reference._cached_table.cache_clear()
    if cached:
        unpack(packed, like, 3.0, torch.float32)
    with FakeTensorMode() as mode:
        fake = unpack(mode.from_tensor(packed), like, 3.0, torch.float32)
    assert (fake.shape, fake.dtype) == (mask.shape, torch.float32)
    assert unpack(packed, like, 3.0, torch.float32).tolist() == [3.0, 0.0, 3.0]
