"""Packing is exact, in storage order, the inverse of unpacking, and the same when compiled; and
whatever implements a kernel computes what the reference does, bit for bit.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, settings, strategies as st
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._vmap_internals import _vmap
from torch.torch_version import TorchVersion

import memsave
from memsave import function, functional, kernels
from memsave.kernels import pack, reference, unpack
from memsave.kernels.reference import Like, Rows, Windows
from memsave.layers import norm_gradients

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
def test_unpack_puts_another_value_elsewhere(case: Bits, dtype: torch.dtype) -> None:
    packed = pack(case.mask.clone(), case.like)
    tensor = unpack(packed, case.like, 0.3, dtype, 0.7)
    assert tensor.equal(torch.where(case.mask, *(torch.tensor(v, dtype=dtype) for v in (0.3, 0.7))))


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


def test_gradients_that_are_lazily_negated() -> None:
    """As of ``imag`` of a conjugate: their memory may not be read as it is."""
    g = torch.arange(-4.0, 4)
    packed, like = pack(g > -2, Like.of(g)), Like.of(g)
    expected = torch.where(g > -2, g, 0.0)
    for kernel in (kernels.select, reference.select):
        assert kernel(torch._neg_view(-g), packed, like).equal(expected)


@given(bits(), st.sampled_from([*ONES]))
def test_traced_variants_agree(case: Bits, dtype: torch.dtype) -> None:
    """Their bytes hold the bits of other elements, and are as few."""
    mask, like, one = case.mask, case.like, ONES[dtype]
    packed = pack(mask.clone(), like)
    traced = reference._pack_traced(mask, like)
    assert (traced.dtype, traced.numel()) == (packed.dtype, packed.numel())
    for off in (0, 3):
        tensor = reference.unpack(traced, like, one, dtype, off)
        assert tensor.dtype == dtype
        assert tensor.equal(unpack(packed, like, one, dtype, off))


@pytest.mark.parametrize("shape", [(3, 16, 7), (3, 5, 7)])
def test_compiled_code_uses_the_traced_variants(shape: tuple[int, ...]) -> None:
    """In one graph, what it packed is unpacked rightly: an axis in eighths, or all in a row; and
    what was packed before, too.
    """

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
    def both(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        like = Like.of(x)
        packed = pack(x > 0, like)
        return packed, *(unpack(bits, like, 2.5, x.dtype) for bits in (packed, before))

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed, *tensors = both(x, pack(x > 0, Like.of(x)))
    assert packed.equal(reference._pack_traced(x > 0, Like.of(x)))
    for tensor in tensors:
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


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize])
def test_transforms_leave_the_table_plain(transform: Callable[..., Any]) -> None:
    """So does one made under a transform, of whose level it is."""
    packed, like = torch.tensor([5], dtype=torch.uint8), Like.of(torch.ones(3))
    reference._cached_table.cache_clear()
    transform(lambda x: (x * reference.unpack(packed, like, 3.0, x.dtype)).sum())(torch.ones(3))
    assert reference.unpack(packed, like, 3.0, torch.float32).tolist() == [3.0, 0.0, 3.0]
    table = reference._cached_table(3.0, 0, torch.float32, packed.device)
    assert not is_functorch_wrapped_tensor(table)
    assert not torch._is_functional_tensor(table)


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Of a call in one thread, with a part of a block and of a byte left; and of one in several.
SIZES = (0, 1, 7, 64, 65, 1000, 3 * 40961)


def values(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers, some of which are zeros, infinite, or nan."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1.0, -1.0])
    places = torch.randint(3 * len(special), (size,), generator=generator)
    return torch.where(places < len(special), special[places % len(special)], x).to(dtype)


def of_zeros(fast: Any, *tensors: Tensor) -> list[Tensor]:
    """Without the signs of zeros, if these are of CUDA, where torch clamps -0 to +0."""
    return [t + 0 if fast.__name__.endswith("cuda") else t for t in tensors]


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are the same to the bit, in the same layout; any nan is a nan."""
    nan = expected.isnan()
    integers = [
        t.masked_fill(nan, 0).view(reference.INTEGERS[t.itemsize]) for t in (actual, expected)
    ]
    layout = (actual.dtype, actual.shape, actual.stride())
    return (
        layout == (expected.dtype, expected.shape, expected.stride())
        and actual.isnan().equal(nan)
        and integers[0].equal(integers[1])
    )


@pytest.fixture
def native() -> Iterator[Any]:
    """The kernels of the CPU, with several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield importlib.import_module("memsave.kernels.native")
    torch.set_num_threads(before)


@pytest.fixture(params=["native", "cuda"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An implementation that is not the reference; Triton's by its interpreter, on the CPU."""
    if request.param == "native":
        yield request.getfixturevalue("native")
        return
    pytest.importorskip("triton")
    cuda = importlib.import_module("memsave.kernels.cuda")
    monkeypatch.setattr(cuda, "_is_here", lambda x: True)
    monkeypatch.setattr(cuda, "POOLED", 1 << 14)  # Programs run one after the other.
    monkeypatch.setattr(cuda, "PROGRAMS", 3)  # So that each has several tiles of rows.
    # It would compute all integers in 64 bits too, to see what overflows, and not tell.
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    with np.errstate(all="ignore"):  # of infinity and nan
        yield cuda


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest, fast: Any) -> int:
    """Of Triton's programs, which run here one after another, no more than five and a part."""
    if fast.__name__.endswith("cuda"):
        return min(request.param, 5 * 8 * fast.BYTES + 3)
    return request.param


@pytest.fixture
def pooling(fast: Any) -> Any:
    """The same, for kernels that run to a bound that they compute."""
    if fast.__name__.endswith("cuda") and TorchVersion(version("triton")) < "3.7":
        pytest.skip("this interpreter of Triton takes no array of NumPy's for a bound")
    return fast


def test_triton_that_cannot_compile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of a compiler for C, say: with one warning."""
    pytest.importorskip("triton")
    cuda = importlib.import_module("memsave.kernels.cuda")

    def fail() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(cuda, "_is_here", lambda x: True)
    monkeypatch.setattr(cuda, "_loops", fail)
    monkeypatch.setattr(cuda, "_works", {})
    x = torch.randn(9)
    with pytest.warns(
        UserWarning, match="without kernels on cpu: Failed to find C compiler"
    ) as seen:
        assert cuda.relu(x, False) is cuda.piecewise(x, False, "hardtanh", -1.0, 1.0) is None
    assert len(seen) == 1


def test_everything_works_without_them() -> None:
    """Where nothing is compiled, and there is no Triton."""
    code = """
import sys, torch
for name in ("native", "cuda", "nodes"):
    sys.modules["memsave.kernels." + name] = None
import memsave.nn
from memsave import kernels

assert not kernels.IMPLEMENTATIONS
x = torch.randn(2, 3, 8, 8, requires_grad=True)
stock = torch.nn.Sequential(torch.nn.LeakyReLU(), torch.nn.MaxPool2d(2), torch.nn.ReLU())
ours = torch.nn.Sequential(memsave.nn.LeakyReLU(), memsave.nn.MaxPool2d(2), memsave.nn.ReLU())
expected, actual = (torch.autograd.grad(layers(x).sum(), x)[0] for layers in (stock, ours))
assert actual.equal(expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_torch_that_shows_its_tensors_in_python_alone() -> None:
    """The kernels for the CPU, which go by DLPack, are then missing like those not compiled."""
    code = """
import torch
del torch.Tensor.__dlpack_c_exchange_api__
from memsave import kernels, nn

assert not [one for one in kernels.IMPLEMENTATIONS if one.__name__.endswith("native")]
assert not kernels.are_arrays(torch.randn(3))
x = torch.randn(3, requires_grad=True)
assert torch.autograd.grad(nn.ReLU()(x).sum(), x)[0].equal((x > 0).float())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_kernels_of_other_devices_leave_the_cpu_alone() -> None:
    """And Triton is not imported for it."""
    code = """
import sys, torch
from memsave import kernels
from memsave.kernels import cuda, reference

x = torch.randn(100)
like = reference.Like.of(x)
y, bits = kernels.relu(x, False)
calls = [("relu", x, False), ("piecewise", x, False, "hardtanh", -1.0, 1.0),
         ("compare", x, like, "above", 0.0, 0.0), ("pack", x > 0, like),
         ("select", x, bits, like), ("scale", x, bits, like, 1.0, 0.5)]
for name, *args in calls:
    assert getattr(cuda, name)(*args) is None, name
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


COMPILE = """
from itertools import product
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from memsave.kernels import cuda, reference, triton_loops

FLOATS = ["fp32", "fp64", "bf16", "fp16"]

def check(loop, types, warps=4, **constants):
    function = getattr(triton_loops, loop)
    names = function.arg_names
    types = {name: "i32" for name in names} | types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        function,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": warps}
    assert compile(source, target=target, options=options).asm["cubin"]

def check_bits(loop, dtypes, **constants):
    for dtype in dtypes:
        types = {"x": "*" + dtype, "y": "*" + dtype, "bits": "*u8", "low": "fp32", "high": "fp32"}
        check(loop, types, BYTES=cuda.BYTES, **constants)

check_bits("to_bits", FLOATS, KIND="relu", WRITES=True)
check_bits("to_bits", ["u8"], KIND="nonzero", WRITES=False)
for name in cuda.PIECEWISE:
    check_bits("to_bits", ["fp32"], KIND=name, WRITES=True)
for name in reference.TESTS:
    check_bits("to_bits", ["fp32", "bf16", "fp16"], KIND=name, WRITES=False)
check_bits("from_bits", ["i8", "i16", "i32", "i64"], KIND="select")
check_bits("from_bits", ["fp32", "bf16", "fp16"], KIND="scale")

windows = {"KERNEL": (1, 3, 3), "STRIDE": (1, 2, 2), "PADDING": (0, 1, 1), "DILATION": (1, 1, 2)}
for dtype, far in (*((dtype, False) for dtype in FLOATS), ("fp32", True)):
    for loop, names in (("max_pool", "xy"), ("unpool", ("g", "dx"))):
        types = {name: "*" + dtype for name in names} | {"offsets": "*u8"}
        # (Triton compiles numbers that are 1 as such.)
        ones = {} if far else {"channels": 1, "in_1": 1, "out_1": 1}
        check(loop, types, **windows, **ones, FAR=far, BLOCK=cuda.POOLED)

for dtype, from_output in product(FLOATS, [False, True]):
    wide = "*fp64" if dtype == "fp64" else "*fp32"
    types = {name: "*" + dtype for name in ("g", "kept", "weight", "bias", "dx")}
    types |= dict.fromkeys(("rstd", "dweight", "dbias"), wide) | {"shift": "fp32"}
    names = ("HAS_WEIGHT", "CENTERED", "WANTS_X", "WANTS_WEIGHT", "WANTS_BIAS")
    flags = dict.fromkeys(names, True) | {"FROM_OUTPUT": from_output, "HAS_BIAS": from_output}
    check("norm", types, **flags, ROWS=4, BLOCK=cuda.ELEMENTS // 4)
    if dtype == "fp32":
        check("norm", types, warps=16, **flags, ROWS=1, BLOCK=cuda.BYTES_OF_ROW // 4)
"""


def test_the_loops_of_triton_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For an H100, which needs none: the interpreter takes what the compiler does not. (Those that
    Python launches; for those of nodes see below.)
    """
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    subprocess.run([sys.executable, "-c", COMPILE], check=True, timeout=120)


LAUNCHED = r"""
import re
from itertools import product
from triton.backends.compiler import GPUTarget
from memsave.kernels import cuda, triton_loops
from memsave.kernels.nodes import _nodes as of

HALF, FLOAT, DOUBLE, BOOL, BFLOAT16 = 5, 6, 7, 11, 15
LOOPS = (of.TO_BITS, of.FROM_BITS, of.MAX_POOLING, of.UNPOOLING, of.NORM_OF_ROWS)
LOOPS += (of.WEIGHTS_OF_ROWS, of.LOSS_OF_ROWS, of.DROPPING, of.SLOPING, of.SCALING_CHANNELS)
assert len(LOOPS) == len(cuda.SOURCES)
sources = (cuda.SOURCES[loop] for loop in LOOPS)
to_bits, from_bits, max_pool, unpool, norm, weigh, loss, drop, slope, scale = sources
WINDOWS = (1, 3, 3, 1, 2, 2, 0, 1, 1, 1, 1, 2)
KINDS = {"i32": "u32", "i64": "u64", "fp32": "f32"}
# In the order of csrc/nodes.
BITS = ["x", "y", "bits", "size", "low", "high"]
SIZES = ["offsets", "size", "channels", "in_1", "in_2", "in_3", "out_1", "out_2", "out_3"]
PASSED = {
    "to_bits": BITS,
    "from_bits": BITS,
    "max_pool": ["x", "y", *SIZES],
    "unpool": ["g", "dx", *SIZES],
    "norm": ["g", "kept", "rstd", "weight", "bias", "dx", "dweight", "dbias"]
    + ["rows", "features", "shift"],
    "weigh": ["target", "weight", "sums", "rows", "ignored"],
    "cross_entropy": ["x", "target", "g", "weight", "sums", "dx", "rows", "classes", "places"]
    + ["ignored", "parts", "smoothing"],
    "prelu": ["x", "y", "bits", "weight", "size", "inner", "count"],
    "scale_channels": ["x", "y", "bits", "size", "inner", "channels", "factor"],
    "dropout": ["x", "y", "bits", "size", "keep", "scale", "seed", "offset", "threads"],
}

def check(name, types, constants, even, warps):
    made = cuda.compile_loop(
        name, types, constants, even, warps, target=GPUTarget("cuda", 90, 32)
    )
    entry = re.search(r"[.]entry.*?[)]", made.asm["ptx"], re.DOTALL)[0]
    found = re.findall(r"[.]param [.](\w+)", entry)
    names = [key for key in getattr(triton_loops, name).arg_names if key not in constants]
    assert names == [key for key in PASSED[name] if key not in constants]
    expected = ["u64" if types[key].startswith("*") else KINDS[types[key]] for key in names]
    assert found[: len(expected)] == expected, (name, found)
    # What comes after these are pointers to memory that none of these loops has any of.
    assert {*found[len(expected) :]} <= {"u64"} and len(found) < 32
    metadata = made.metadata
    sizes = [getattr(metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
    assert sizes == [0, 0] and metadata.num_ctas == 1

assert of.BITS_OF_PROGRAM == 8 * cuda.BYTES
assert (of.POOLED_BY_PROGRAM, of.ELEMENTS_OF_PROGRAM) == (cuda.POOLED, cuda.ELEMENTS)
assert (of.BYTES_OF_ROW, of.PROGRAMS_OF_NORM) == (cuda.BYTES_OF_ROW, cuda.PROGRAMS)
numbers = {"hardsigmoid": of.HARDSIGMOID, "hardtanh": of.HARDTANH, "nonzero": of.NONZERO_BITS}
assert {name: cuda.KINDS.index(name) for name in numbers} == numbers
assert cuda.KINDS[: of.HARDSIGMOID] == ("relu", "leaky_relu")  # which nodes take in any dtype
# Which it has write.
assert {*cuda.KINDS[: of.NONZERO_BITS]} == {"relu", "hardsigmoid", *cuda.PIECEWISE}

for even, kind in product((0, 1), range(len(cuda.KINDS))):
    check(*to_bits(FLOAT, kind, kind < of.NONZERO_BITS, even))
for dtype, kind in product((HALF, BFLOAT16), range(of.HARDTANH + 1)):
    check(*to_bits(dtype, kind, kind < of.NONZERO_BITS, 1))
check(*to_bits(BOOL, of.NONZERO_BITS, 0, 1))
for dtype, kind in product((HALF, FLOAT, BFLOAT16), range(3)):
    check(*from_bits(dtype, kind, 1))
check(*from_bits(DOUBLE, 0, 0))
for dtype, forward, is_one in product((DOUBLE, BFLOAT16), (0, 1), (0, 1)):
    check(*slope(dtype, forward, is_one, 1))
for dtype, vector in ((FLOAT, 4), (HALF, 8), (BFLOAT16, 8)):
    check(*drop(dtype, vector, int(dtype == FLOAT)))
    for is_last, eights in product((0, 1), (0, 1)):
        check(*scale(dtype, is_last, eights, int(dtype == FLOAT)))
for loop, channels, ones in product((max_pool, unpool), (0, 1, 2), ((0, 0), (1, 1), (3, 7))):
    check(*loop(FLOAT, channels, *ones, *WINDOWS))
for dtype, block in product((FLOAT, DOUBLE, BFLOAT16), (1, 256)):
    check(*norm(dtype, 1, 1, 1, 1, 1, 1, 1, 4, block, int(block > 1)))
assert of.MOST_PARTS == cuda.PARTS
for dtype, given in ((FLOAT, FLOAT), (DOUBLE, DOUBLE), (BFLOAT16, FLOAT), (HALF, HALF)):
    for has_weight in (0, 1):
        check(*weigh(dtype, has_weight))
    for is_flat, (at_once, block) in product((0, 1), ((1024, 1), (64, 16), (1, 4096))):
        check(*loss(dtype, given, 1, 1, 1, is_flat, at_once, block, int(block > 16)))
"""


def test_loops_take_what_nodes_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As csrc/nodes launch them by itself: by its numbers of loops and bits, with grids for as
    much as a program of theirs does, and arguments but for the constants, in order.
    """
    pytest.importorskip("triton")
    pytest.importorskip("memsave.kernels.nodes")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    subprocess.run([sys.executable, "-c", LAUNCHED], check=True, timeout=240)


def test_the_kernels_for_the_cpu_are_compiled() -> None:
    """Where the tests run, there is a compiler; otherwise the tests below would test nothing."""
    assert "memsave.kernels.native" in [module.__name__ for module in kernels.IMPLEMENTATIONS]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("inplace", [False, True])
def test_relu(fast: Any, size: int, dtype: torch.dtype, inplace: bool) -> None:
    x = values(size, dtype, seed=size)
    given = x.clone()
    version = given._version
    y, bits = fast.relu(given, inplace)
    expected = reference.relu(x.clone(), inplace)
    assert same(*of_zeros(fast, y, expected[0]))
    assert bits.equal(expected[1])
    assert (y is given, given._version > version) == (inplace, inplace)


def serves(fast: Any, dtype: torch.dtype) -> bool:
    """Whether it has loops over elements for numbers like these."""
    return not fast.__name__.endswith("cuda") or dtype in fast.NARROW


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", [*reference.PIECES])
def test_piecewise(fast: Any, size: int, dtype: torch.dtype, inplace: bool, name: str) -> None:
    x = values(size, dtype, seed=size)
    inplace = inplace and name not in ("hardshrink", "softshrink")  # which stock has not
    for low, high in ((-3.0, 3.0), (-1.0, 1.0), (0.0, 6.0), (0.01, 0.3)):
        if name in ("hardshrink", "softshrink"):
            low = -high
        elif name == "hardsigmoid":
            low, high = -3.0, 3.0
        elif name == "threshold" and fast.__name__.endswith("cuda"):
            low = round(4 * low) / 4  # (torch rounds it there, and not on CPU.)
        elif name == "hardtanh" and dtype is torch.bfloat16 and fast.__name__.endswith("cuda"):
            high = math.ceil(high)  # (Triton's interpreter cuts to bfloat16, where devices round.)
            low = math.floor(low)
        given = x.clone()
        version = given._version
        found = fast.piecewise(given, inplace, name, low, high)
        assert found or not serves(fast, dtype) or name not in fast.PIECEWISE
        if found is None:
            continue
        y, bits = found
        expected = reference.piecewise(x.clone(), inplace, name, low, high)
        assert same(*of_zeros(fast, y, expected[0]))
        assert bits.equal(expected[1])
        assert (y is given, given._version > version) == (inplace, inplace)


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d is not torch.float64])
@pytest.mark.parametrize("name", [*reference.PIECES])
def test_numbers_that_a_dtype_has_not_are_left_alone(
    fast: Any, dtype: torch.dtype, name: str
) -> None:
    """For torch to refuse."""
    beyond = 1.002 * torch.finfo(dtype).max
    x = values(8, dtype, seed=0)
    assert fast.piecewise(x, False, name, -3.0, beyond) is None
    assert fast.piecewise(x, False, name, -beyond, 3.0) is None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("test", [*reference.TESTS])
def test_compare(fast: Any, size: int, dtype: torch.dtype, test: str) -> None:
    x = values(size, dtype, seed=size)
    like = Like.of(x)
    for bounds in ((-1.0, 1.0), (0.0, 0.0), (0.1, math.nan)):
        bits = fast.compare(x, like, test, *bounds)
        if bits is None:
            assert not serves(fast, dtype)
        else:
            assert bits.equal(reference.compare(x, like, test, *bounds))


def philox(counter: tuple[Any, ...], key: tuple[int, int]) -> list[Any]:
    """Philox 4x32-10 of Salmon et al. (2011), of four words each in a wider integer."""
    words, low = [np.asarray(word, np.uint64) for word in counter], np.uint64(0xFFFFFFFF)
    for turn in range(10):
        of_0, of_2 = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        keys = (key[0] + turn * 0x9E3779B9, key[1] + turn * 0xBB67AE85)
        key_0, key_1 = (np.uint64(one % 2**32) for one in keys)
        mixed = of_2 >> 32 ^ words[1] ^ key_0, of_0 >> 32 ^ words[3] ^ key_1
        words = [mixed[0], of_2 & low, mixed[1], of_0 & low]
    return words


def test_philox_is_that_of_its_authors() -> None:
    """Their known answers: https://github.com/DEShawResearch/random123."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    answers = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (pi, (0xA4093822, 0x299F31D0)): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    for (counter, key), answer in answers.items():
        assert tuple(map(int, philox(counter, key))) == answer


@pytest.mark.parametrize("vector", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [8, 3000])
@pytest.mark.parametrize("offset", [3, 2**32 - 2])
def test_dropout_draws_as_a_kernel_of_torch(
    vector: int, dtype: torch.dtype, size: int, offset: int
) -> None:
    """Of 256 threads, each of which takes a vector, and then the next that no thread has taken."""
    pytest.importorskip("triton")
    loops = importlib.import_module("memsave.kernels.triton_loops")
    size, threads, p, seed = size + 4 * (vector == 4), 256, 0.3, 0x1234567890
    keep = np.float32(1 - p)
    scale = np.float32(1 / np.float64(keep))
    x = values(size, dtype, seed=0)
    y, bits = torch.empty_like(x), torch.empty(-(-size // 8), dtype=torch.uint8)
    programs = -(-size // 256)
    with np.errstate(all="ignore"):
        loops.dropout[(programs,)](
            x, y, bits, size, float(keep), float(scale), seed, offset, threads, vector, 32
        )
    # Each thread, one after the other.
    kept = np.zeros(size, bool)
    for thread in range(threads):
        count = offset
        for start in range(thread * vector, size, threads * vector):
            for four in range(start, start + vector, 4):
                words = philox((count % 2**32, count >> 32, thread, 0), (seed % 2**32, seed >> 32))
                draws = np.array(words).astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
                kept[four : four + 4] = draws < keep
                count += 1
    kept = torch.from_numpy(kept)
    assert bits.equal(pack(kept, Like.of(kept)))
    expected = (x.float() * kept * float(scale)).to(dtype)
    if dtype is torch.bfloat16:  # which Triton's interpreter cuts, where devices round
        assert ((y == expected) | (y.isnan() & expected.isnan()))[~kept].all()
        torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-2, atol=0)
    else:
        assert same(y, expected)
    assert 0.6 < kept.float().mean() < 0.8 or size < 100


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 5, 7)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("by", ["one", "channels", "channels last"])
def test_prelu_of_triton(shape: tuple[int, ...], dtype: torch.dtype, by: str) -> None:
    """Both ways, by one weight, by those of axis 1, and by those of the last axis in memory."""
    pytest.importorskip("triton")
    loops = importlib.import_module("memsave.kernels.triton_loops")
    if by != "one" and len(shape) == 1:
        return
    x, g = (values(math.prod(shape), dtype, seed).view(shape) for seed in (0, 1))
    x.requires_grad_()
    count = 1 if by == "one" else shape[1]
    inner = math.prod(shape[2:]) if by == "channels" else 1
    weight = torch.linspace(-0.5, 2, count).to(dtype)
    y = F.prelu(x, weight)
    (dx,) = torch.autograd.grad(y, x, g)
    if by == "channels last":
        x, y, g, dx = (array.detach().movedim(1, -1) for array in (x, y, g, dx))
    x, y, g, dx = (array.detach().contiguous() for array in (x, y, g, dx))
    ours, size = [torch.empty_like(y), torch.empty_like(dx)], y.numel()
    bits = torch.full((-(-size // 8),), 255, dtype=torch.uint8)
    with np.errstate(all="ignore"):
        for forward, given, out in ((True, x, ours[0]), (False, g, ours[1])):
            grid = (-(-size // 64),)
            loops.prelu[grid](given, out, bits, weight, size, inner, count, forward, 8)
    assert bits.equal(pack(x > 0, Like.of(x)))
    for actual, expected in zip(ours, (y, dx), strict=True):
        if dtype is torch.bfloat16:  # which Triton's interpreter cuts, where devices round
            torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-2, atol=1e-38)
        else:
            assert same(actual, expected)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5, 7), (3, 16, 2, 4, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_last", [False, True])
def test_channels_scaled_by_triton(
    shape: tuple[int, ...], dtype: torch.dtype, is_last: bool
) -> None:
    """Each by the bit of its image and channel; what is dropped by 0, which nan stays."""
    pytest.importorskip("triton")
    loops = importlib.import_module("memsave.kernels.triton_loops")
    x = values(math.prod(shape), dtype, seed=0).view(shape)
    images, channels, size = shape[0], shape[1], x.numel()
    kept = torch.arange(images * channels) % 3 > 0
    bits = pack(kept, Like.of(kept))
    expected = x * (kept.to(dtype) * 1.25).view(images, channels, *[1] * (len(shape) - 2))
    if is_last:
        x, expected = (array.movedim(1, -1).contiguous() for array in (x, expected))
    inner = size // images if is_last else size // (images * channels)
    y = torch.empty_like(x)
    with np.errstate(all="ignore"):
        grid = (-(-size // 64),)
        by_eights = (channels if is_last else inner) % 8 == 0
        loops.scale_channels[grid](x, y, bits, size, inner, channels, 1.25, is_last, by_eights, 8)
    if dtype is torch.bfloat16:  # which Triton's interpreter cuts, where devices round
        torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-2, atol=1e-38)
    else:
        assert same(y, expected)


@pytest.mark.parametrize(
    "shape",
    [(3, 5, 7, 11), (2, 3, 101, 113), (1, 3, 300, 301), (7, 6, 5, 3), (0, 3, 4, 5)],
    ids=str,
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.usefixtures("native")
def test_channels_scaled(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also where the parts of threads, or what is left to torch, begin within a channel."""
    x = values(math.prod(shape), dtype, seed=0).view(shape).requires_grad_()
    results = []
    for layer in (functional.dropout2d, F.dropout2d):
        torch.manual_seed(0)
        y = layer(x, 0.4)
        (owned,) = torch.autograd.grad(y * 1, x, x.detach(), retain_graph=True)
        (given,) = torch.autograd.grad(y, x, x.detach())
        results.append((y.detach(), owned, given))
    for actual, expected in zip(*results, strict=True):
        assert same(actual, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_applied(fast: Any, size: int, dtype: torch.dtype) -> None:
    g = values(size, dtype, seed=size)
    like = Like.of(g)
    mask = values(size, torch.float32, seed=size + 1) > 0
    bits = reference.pack(mask.clone(), like)
    assert fast.pack(mask, like).equal(bits)
    for factor in (None, 0.3):
        assert same(fast.select(g, bits, like, factor), reference.select(g, bits, like, factor))
    for inplace in (False, True):
        for factors in ((2.5, 0.0), (0.3, 1 / 3)):
            scaled = fast.scale(g.clone(), bits, like, *factors, inplace)
            if scaled is None:
                assert not serves(fast, dtype)
            else:
                expected = reference.scale(g.clone(), bits, like, *factors, inplace)
                if fast.__name__.endswith("cuda") and dtype is torch.bfloat16:
                    # Triton's interpreter cuts to bfloat16, where devices round.
                    torch.testing.assert_close(scaled, expected, rtol=2**-7, atol=0, equal_nan=True)
                else:
                    assert same(scaled, expected)


@pytest.mark.parametrize("factor", [1.0, 0.3, 2**-9, 2.0**9])
@pytest.mark.parametrize("size", [7, 1 << 16])
def test_every_number_of_float16(native: Any, size: int, factor: float) -> None:
    """Converted by arithmetic (fewer than eight) and by the processor, if it can."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for x in every.split(size):
        bits = torch.full(((len(x) + 7) // 8,), 255, dtype=torch.uint8)
        assert same(native.scale(x, bits, Like.of(x), factor, 0.0), x * factor)


@given(bits(), st.booleans())
def test_every_layout(case: Bits, contiguous: bool) -> None:
    """Of what the bits describe, and of a gradient that comes in another."""
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(case.mask.shape, generator=generator)
    if not contiguous:
        g = torch.stack([g, g], dim=-1)[..., 0]
    packed = pack(case.mask.clone(), case.like)
    assert kernels.select(g, packed, case.like).equal(torch.where(case.mask, g, 0.0))
    scaled = torch.where(case.mask, g * 2.0, g * 0.5)
    assert kernels.scale(g, packed, case.like, 2.0, 0.5).equal(scaled)
    like = torch.empty_strided(case.like.shape, case.like.stride).copy_(g)
    above = kernels.compare(like, Like.of(like), "above", 0.0, 0.0)
    assert unpack(above, Like.of(like), True, torch.bool).equal(like > 0)
    y, positive = kernels.relu(like.clone(), False)
    assert y.equal(like.relu())
    assert unpack(positive, Like.of(y), True, torch.bool).equal(like > 0)


ARRAYS = {
    "plain": lambda x: x,
    "absent": lambda x: None,
    "parameter": torch.nn.Parameter,
    "wanted": lambda x: x.requires_grad_(),
    "strided": lambda x: x[::2],
    "empty": lambda x: x[:0],
    "integer": lambda x: x.long(),
}
OTHERS = {
    "number": lambda x: 1.0,
    "complex": lambda x: x.to(torch.complex64),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "meta": lambda x: x.to("meta"),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "subclass": lambda x: x.as_subclass(type("Sub", (Tensor,), {})),
    "mkldnn": lambda x: x.to_mkldnn(),
}


@pytest.mark.parametrize("kind", [*ARRAYS, *OTHERS])
def test_what_is_an_array(native: Any, kind: str) -> None:
    array = (ARRAYS | OTHERS)[kind](torch.ones(8))
    assert native.are_arrays(array) is (kind in ARRAYS)
    assert native.are_arrays(torch.ones(3), array, None) is (kind in ARRAYS)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, _vmap])
def test_an_array_of_transforms_is_none(native: Any, transform: Any) -> None:
    seen = []
    transform(lambda x: (seen.append(native.are_arrays(x)), x.sum())[1])(torch.ones(8))
    assert seen == [False]


def test_what_native_kernels_leave_alone(native: Any) -> None:
    x = torch.randn(3, 8)
    like = Like.of(x)
    bits = native.pack(x > 0, like)
    with_gaps, sums = torch.randn(3, 16)[:, ::2], torch.randn(()).expand(3, 8)
    for other in (with_gaps, sums, x.to_sparse(), x.long(), x.to("meta")):
        assert native.relu(other, False) is None
    assert native.relu(x, True) is not None
    for number in (torch.tensor(0.5), True, None):
        assert native.piecewise(x, False, "leaky_relu", number, 0.0) is None
    of_another = [bits[:-1], bits.long(), bits.to("meta"), torch.zeros(6, dtype=torch.uint8)[::2]]
    for wrong in of_another:
        assert native.select(x, wrong, like) is None
        assert native.scale(x, wrong, like, 1.0, 0.0) is None
    assert native.scale(x.t(), bits, like, 1.0, 0.0, True) is None  # in another order
    assert native.select(x, bits, like) is not None


@pytest.mark.parametrize("inplace", [False, True])
def test_native_kernels_hold_nothing(native: Any, inplace: bool) -> None:
    x = torch.randn(100)
    before, version = sys.getrefcount(x), x._version
    y, bits = native.relu(x, inplace)
    assert (y is x, x._version) == (inplace, version + inplace)
    g = torch.randn(100)
    dx = native.scale(g, bits, Like.of(x), 1.0, 0.0, inplace)
    assert g._version == inplace
    results = [weakref.ref(one) for one in (bits, dx) if one is not g]
    held = native.compare(x, Like.of(x), "above", 0.0, 0.0)
    results.append(weakref.ref(held))
    del y, bits, dx, held
    assert sys.getrefcount(x) == before
    assert [ref() for ref in results] == [None] * len(results)


def test_modes_see_every_operation() -> None:
    """Such as those that count operations: what has no operation is left to the reference."""
    x = torch.randn(64)

    with helpers.Ops() as ops:
        kernels.relu(x, False)
    assert "aten.relu.default" in ops.names


def test_a_negated_view_has_other_values_than_its_memory() -> None:
    x = torch._neg_view(torch.randn(8))
    assert x.is_neg()
    y, _ = kernels.relu(x, False)
    assert y.equal(x.clone().relu())


def test_a_fork_has_no_threads_of_its_parent() -> None:
    """Which would let it wait for ever, as it does in torch's own operations."""
    code = """
import os, torch
from memsave.kernels import native

x = torch.randn(1 << 20)
native.relu(x, False)
child = os.fork()
if not child:
    y, _ = native.relu(x, False)
    os._exit(not (y.numpy() == x.numpy().clip(0)).all())
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_threads_at_once() -> None:
    xs = [torch.randn(1 << 18, generator=torch.Generator().manual_seed(k)) for k in range(8)]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda x: kernels.relu(x, False), xs * 4))
    for x, (y, bits) in zip(xs * 4, results, strict=True):
        assert y.equal(x.relu())
        assert bits.equal(reference.pack(x > 0, Like.of(x)))


LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


class Pooling(NamedTuple):
    """A call of max pooling, by axis; and how it is stored."""

    x: Tensor
    windows: Windows
    ceil_mode: bool


@st.composite
def poolings(draw: st.DrawFn) -> Pooling:
    """Every number of axes and layout, windows that overlap, and more elements than a block has."""
    dims = draw(st.integers(1, 3))
    axes = st.integers(1, 6 if dims == 3 else 11)
    inputs = draw(st.tuples(*[axes] * dims))
    if draw(st.booleans()):
        inputs = (*inputs[:-1], draw(st.integers(250, 600)))
    kernel, stride = (draw(st.tuples(*[st.integers(1, 3)] * dims)) for _ in range(2))
    padding = tuple(draw(st.integers(0, size // 2)) for size in kernel)
    dilation = draw(st.tuples(*[st.integers(1, 2)] * dims))
    channels = draw(st.sampled_from([2, 3, 300]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    shape = (draw(st.integers(1, 3)), channels, *inputs)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if draw(st.booleans()):
        x = x.round()  # so that a window has several maxima
    if dims > 1 and draw(st.booleans()):
        x = x.contiguous(memory_format=LAST[dims])
    return Pooling(x, Windows(inputs, (), kernel, stride, padding, dilation), draw(st.booleans()))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # once for all examples
@given(poolings())
@example(Pooling(torch.randn(2, 3, 9), Windows((9,), (), (3,), (2,), (1,), (1,)), True))
@example(
    Pooling(torch.zeros(2, 3, 9, 9), Windows((9, 9), (), (3, 2), (3, 3), (1, 0), (1, 2)), False)
)
@example(
    Pooling(torch.zeros(2, 3, 40, 40), Windows((40, 40), (), (3, 3), (2, 1), (1, 0), (1, 1)), True)
)
def test_max_pool(pooling: Any, case: Pooling) -> None:
    """As stock's, to the bit, and in its layout; and stock's indices are what the offsets say."""
    x, windows, ceil_mode = case
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    pool = MAX_POOL[len(windows.inputs)]
    try:
        expected = pool(x, *windows[2:], ceil_mode)
    except RuntimeError:
        return  # too small an input
    assume(expected.isfinite().all())  # no window outside of the input
    windows = windows._replace(outputs=tuple(expected.shape[2:]))
    found = pooling.max_pool(x.detach(), windows)
    if found is None:  # where it is not clear what stock's layout is
        assert x.is_contiguous()
        assert x.is_contiguous(memory_format=LAST[x.ndim - 2])
        return
    y, offsets = found
    assert same(y, expected.detach())
    assert (offsets.dtype, offsets.stride()) == (torch.uint8, y.stride())
    g = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    expected.backward(g)
    assert same(pooling.unpool(g, offsets, windows, Like.of(x)), x.grad)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_max_pool_of_nan_and_infinities(pooling: Any, dtype: torch.dtype, last: bool) -> None:
    """And, of CUDA, in 16 bits: as stock's of the same numbers."""
    x = values(2 * 3 * 12 * 9, dtype, seed=1).view(2, 3, 12, 9)
    x[0, 0, :6] = -torch.inf
    if last:
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    windows = Windows((12, 9), (7, 5), (3, 3), (2, 2), (1, 1), (1, 1))
    expected = F.max_pool2d(x.double(), *windows[2:], True)
    windows = windows._replace(outputs=tuple(expected.shape[2:]))
    found = pooling.max_pool(x.detach(), windows)
    if found is None:
        assert pooling.__name__.endswith("native")
        assert dtype.itemsize == 2
        return
    assert same(found[0], expected.detach().to(dtype))
    g = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).round()
    expected.backward(g.double())
    assert x.grad is not None
    assert same(pooling.unpool(g.to(dtype), found[1], windows, Like.of(x)), x.grad)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.parametrize("last", [False, True])
def test_adaptive_max_pooling_of_windows_that_are_alike(
    native: Any, monkeypatch: pytest.MonkeyPatch, dims: int, outputs: int, last: bool
) -> None:
    """It is max pooling then; stock's for three axes does not keep the channels last."""
    x = torch.randn(2, 3, *[4] * dims, generator=torch.Generator().manual_seed(0))
    if last and dims > 1:
        x = x.to(memory_format=LAST[dims])
    found = []

    def max_pool(stand_in: Callable[..., Any], *args: Any) -> Any:
        found.append(stand_in(*args))
        return found[-1]

    monkeypatch.setattr(kernels, "max_pool", partial(max_pool, native.max_pool))
    if kernels.nodes is not None:
        of_node = partial(max_pool, kernels.nodes.max_pool_by_windows)
        monkeypatch.setattr(kernels.nodes, "max_pool_by_windows", of_node)
    results = []
    for package in (F, functional):
        x = x.detach().requires_grad_()
        y = getattr(package, f"adaptive_max_pool{dims}d")(x, outputs)
        y.square().sum().backward()
        assert x.grad is not None
        results.append((y.detach(), x.grad))
    for stock, ours in zip(*results, strict=True):
        assert ours.equal(stock)
        assert ours.stride() == stock.stride()
    assert bool(found) == (outputs < 3 and not (last and dims == 3))
    assert None not in found


def test_a_window_of_padding_alone_has_an_offset(fast: Any) -> None:
    """The first, of places -1 and 4."""
    windows = Windows((3,), (2,), (2,), (3,), (1,), (5,))
    y, offsets = fast.max_pool(torch.randn(2, 3, 3), windows)
    assert y[..., 0].isinf().all()
    assert (offsets < 2).all()


def test_offsets_of_another_call_write_nowhere_else(native: Any) -> None:
    """Such as a hook of saved tensors may give back: here, of padding before the input."""
    windows = Windows((4, 4), (2, 2), (2, 2), (2, 2), (1, 1), (1, 1))
    g = torch.ones(2, 3, 2, 2)
    offsets = torch.zeros(g.shape, dtype=torch.uint8)
    dx = native.unpool(g, offsets, windows, Like.of(torch.empty(2, 3, 4, 4)))
    # Windows begin at -5, -3, 3 and 5, of 16 places.
    assert dx.flatten(2).nonzero()[:, 2].unique().tolist() == [3, 5]
    for of_g, of_offsets in ((2, 1), (1, 2)):
        g, offsets = torch.ones(of_g, 3, 2, 2), torch.zeros(of_offsets, 3, 2, 2, dtype=torch.uint8)
        assert native.unpool(g, offsets, windows, Like.of(torch.empty(of_g, 3, 4, 4))) is None


@pytest.mark.parametrize("kept", ["x", "y"])
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (5, 3, 5000), (140, 1100), (20000, 20)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norm(
    fast: Any,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    affine: bool,
    centered: bool,
    kept: str,
) -> None:
    """The reference is the formula by operations; sums are taken in another order."""
    generator, is_cuda = torch.Generator().manual_seed(0), fast.__name__.endswith("cuda")
    if is_cuda and math.prod(shape) > 100_000:  # for many threads; Triton's interpreter has one
        shape = (6000 // shape[-1], *shape[1:])

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)

    wide = torch.promote_types(dtype, torch.float32)
    x, g = draw(*shape) - 0.5, draw(*shape) - 0.5
    weight, bias = draw(shape[-1]) + 0.5, draw(shape[-1])
    mean = x.to(wide).mean(-1) if centered else torch.zeros(shape[:-1], dtype=wide)
    rstd = draw(*shape[:-1], dtype=wide)
    xhat = (x.to(wide) - mean[..., None]) * rstd[..., None]
    y = (xhat * weight + bias * centered if affine else xhat).to(dtype)
    saved = {"x": x, "y": y, "mean": mean, "rstd": rstd, "weight": None, "bias": None}
    shapes = {"x": Like.of(x), "weight": Like.of(weight), "bias": Like.of(bias)}
    wanted = {"x"}
    if affine:
        saved |= {"weight": weight, "bias": bias if centered else None}
        wanted |= {"weight", "bias"} if centered else {"weight"}
    wide_bounds = {torch.float64: 1e-10, torch.float32: 1e-3}
    tolerance = wide_bounds.get(dtype) or {torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]

    def gradients(wrt: frozenset[str]) -> Any:
        of = norm_gradients.from_input if kept == "x" else norm_gradients.from_output
        with torch.no_grad():
            return of({"y": g}, wrt, saved, shapes, None, centered=centered)

    found = []

    def kernel(*args: Any) -> Any:
        found.append(fast.norm(*args))
        return found[-1]

    for wrt in (frozenset(wanted), frozenset({"x"}), frozenset(wanted - {"x"})):
        if wrt:
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "norm", kernel)
                actual = gradients(wrt)
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "norm", reference.norm)
                expected = gradients(wrt)
            assert actual.keys() == expected.keys() == wrt
            for name, grad in actual.items():
                torch.testing.assert_close(grad, expected[name], rtol=tolerance, atol=tolerance)
                if dtype.itemsize == 2 and not is_cuda:
                    # Rounded the same way, where devices round and Triton's interpreter cuts.
                    assert (grad == expected[name]).double().mean() > 0.9
    # (On CUDA layer norm of its input is stock's; and a row is to fit in registers.)
    left = (centered and kept == "x") or (dtype == torch.float64 and shape[-1] == 5000)
    assert all((grads is None) == (is_cuda and left) for grads in found)


def test_a_norm_of_other_residuals(fast: Any) -> None:
    """Which hooks of saved tensors may give back: nothing is read that is not there."""
    g, vector = torch.ones(4, 8), torch.ones(8)
    rows = Rows(g, g, None, torch.ones(4), vector, vector, 0.0, True, True, None)
    wrt = frozenset({"x"})
    assert fast.norm(rows, wrt) is not None
    for other in (
        {"kept": g[:3]},
        {"kept": g.double()},
        {"rstd": torch.ones(3)},
        {"rstd": torch.ones(4).double()},
        {"weight": vector[:7]},
        {"bias": vector[:1]},
    ):
        assert fast.norm(rows._replace(**other), wrt) is None


class BatchNormed(NamedTuple):
    """What batch norm of train mode is given: arguments of the kernel, and a gradient of ``y``."""

    x: Tensor
    vectors: list[Tensor | None]
    g: Tensor


@pytest.fixture
def batch_normed(
    native: Any,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    absent: set[int],
) -> BatchNormed:
    """The loop takes any size here. One channel has no variance (nor a mean, to cancel)."""
    monkeypatch.setattr(native, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(native, "LEAST_PLACES", 1)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=dtype) + 0.5

    x, g = draw(*shape), draw(*shape) - 1
    x[:, 0] = 0
    return BatchNormed(x, [None if k in absent else draw(shape[1]) for k in range(4)], g)


#: Channels that are no multiple of those that the loop takes together, more places than a block
#: has, single ones, and work for several threads.
PLANES = [(4, 1, 1), (2, 3, 5, 7), (3, 10, 300), (2, 7, 3, 5, 2), (8, 66, 20, 20)]


@pytest.mark.parametrize("absent", [set(), {0, 1}, {2, 3}, {3}, {0, 1, 2, 3}], ids=str)
@pytest.mark.parametrize("shape", PLANES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("momentum", "eps"), [(0.1, 1e-5), (1.0, 0.0)])
def test_batch_norm(native: Any, batch_normed: BatchNormed, momentum: float, eps: float) -> None:
    """As torch's: outputs, statistics and running ones to an ulp, gradients to rounding."""
    x, vectors, g = batch_normed
    running, (weight, bias) = vectors[:2], vectors[2:]
    expected_running = [None if t is None else t.clone() for t in running]
    y, mean, rstd = native.batch_norm(x, *vectors, momentum, eps)
    expected = torch.native_batch_norm(x, weight, bias, *expected_running, True, momentum, eps)
    ulp = 2 * torch.finfo(x.dtype).eps
    for actual, like in zip((y, mean, rstd, *running), (*expected, *expected_running), strict=True):
        if actual is not None and like is not None:
            torch.testing.assert_close(actual, like, rtol=ulp, atol=4 * ulp, check_stride=True)
    assert all(t is None or t._version == 0 for t in running)  # as torch's
    if eps:
        wrt = frozenset({"x", "weight", "bias"})
        ones = torch.ones_like(mean) if weight is None else weight
        like = torch.ops.aten.native_batch_norm_backward(
            g, x, ones, None, None, mean, rstd, True, eps, [True] * 3
        )
        all_grads = dict(zip(("x", "weight", "bias"), like, strict=True))
        for wanted in (wrt, {"x"}, {"weight"}, {"weight", "bias"}):
            grads = native.batch_norm_backward(g, x, mean, rstd, weight, wanted)
            assert grads.keys() == wanted
            for name in wanted:
                scale = all_grads[name].abs().max().item()
                torch.testing.assert_close(
                    grads[name], all_grads[name], rtol=0, atol=64 * ulp * max(scale, 1)
                )


@pytest.mark.parametrize("absent", [set()])
@pytest.mark.parametrize("shape", [(2, 4, 6, 8)])
@pytest.mark.parametrize("dtype", [torch.float64])
def test_batch_norm_modules_with_the_kernel(
    native: Any, batch_normed: BatchNormed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wanted, and twice: outputs, gradients and their gradients are stock's."""
    monkeypatch.setattr(function, "nodes", None)  # which leave inputs of this size to torch
    found = []

    def run(module: torch.nn.Module, wanted: tuple[str, ...]) -> list[Tensor]:
        module = module.double()
        tensors = {"x": batch_normed.x.clone(), **dict(module.named_parameters())}
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in wanted)
        y = module(tensors["x"])
        found.append(type(y.grad_fn).__name__)
        leaves = [tensors[name] for name in wanted]
        once = torch.autograd.grad(y, leaves, batch_normed.g, retain_graph=True)
        g = batch_normed.g.clone().requires_grad_()
        grads = torch.autograd.grad(y, leaves, g, create_graph=True)
        total = sum(grad.square().sum() for grad in grads)
        twice = torch.autograd.grad(total, [*leaves, g], materialize_grads=True)
        return [y, *once, *grads, *twice, *module.buffers()]

    for wanted in (("x",), ("weight",), ("x", "weight"), ("x", "weight", "bias")):
        expected = run(torch.nn.BatchNorm2d(4), wanted)
        torch.testing.assert_close(run(memsave.nn.BatchNorm2d(4), wanted), expected)
    assert set(found) == {"NativeBatchNormBackward0", "MemsaveBatchNormTrainBackward"}


def test_batch_norm_of_a_torch_that_does_without_instructions() -> None:
    code = """if True:
        import torch, memsave.nn
        torch.manual_seed(0)
        x = torch.randn(8, 16, 32, 32)
        for module in (ours := memsave.nn.BatchNorm2d(16), stock := torch.nn.BatchNorm2d(16)):
            torch.nn.init.constant_(module.weight, 1.1), torch.nn.init.constant_(module.bias, 0.3)
        assert ours(x.requires_grad_()).equal(stock(x))
    """
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("inplace", [True, False])
def test_subnormals_that_are_to_be_zero(native: Any, dtype: torch.dtype, inplace: bool) -> None:
    tiny = torch.finfo(dtype).tiny / 4
    x = torch.tensor([tiny, -tiny, 0.0, -0.0, 1.0, -1.0, torch.nan] * 20, dtype=dtype)
    if not torch.set_flush_denormal(True):
        pytest.skip("not by this processor")
    try:
        y, bits = native.relu(x.clone(), inplace)
        expected = torch.relu(x)
        expected_bits = reference.relu(x, False)[1]
    finally:
        torch.set_flush_denormal(False)
    assert y.count_nonzero() == expected.count_nonzero()
    assert y.signbit().equal(expected.signbit())
    assert bits.equal(expected_bits)


@pytest.mark.parametrize("elements", [64, 61])
def test_memory_of_what_is_scaled(elements: int) -> None:
    """No more than its elements take, whatever the bits are of."""
    x = torch.randn(elements)
    y = reference.scale(x, reference.pack(x > 0, Like.of(x)), Like.of(x), 2.0, 0.5)
    assert y.untyped_storage().nbytes() == x.nbytes
    assert y.equal(torch.where(x > 0, 2 * x, x / 2))


@pytest.mark.parametrize("shape", [(3, 17, 10, 7), (2, 3, 2, 5, 4), (1, 40, 1, 15), (4, 1, 8, 8)])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.complex64, torch.complex128], ids=str)
def test_contiguous(native: Any, monkeypatch, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """As torch's, of every format."""
    monkeypatch.setattr(native, "LEAST_ELEMENTS", 1)
    by_loop, done = native._native.channels_first, []

    def channels_first(*args: Any) -> bool:
        done.append(by_loop(*args))
        return done[-1]

    monkeypatch.setattr(native._native, "channels_first", channels_first)
    x = torch.randn(shape).mul(9).to(dtype)
    for stored in (x, x.to(memory_format=LAST[x.ndim - 2]), x.transpose(1, 2).clone()):
        y = native.contiguous(stored)
        assert y.equal(stored)
        assert y.is_contiguous()
    assert any(done) == (dtype.is_floating_point and shape[1] > 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.bfloat16(),
        lambda x: x.transpose(2, 3),
        lambda x: x[:, :, 0, 0],
        lambda x: x.to("meta"),
    ],
)
def test_batch_norm_that_the_loop_is_not_for(native: Any, change: Any) -> None:
    x = torch.randn(8, 16, 32, 32)  # 131072 elements
    assert native.beats_batch_norm(x)
    assert not native.beats_batch_norm(x[:, :, :1, :1].contiguous())  # few elements
    assert not native.beats_batch_norm(change(x))
    assert native.batch_norm(change(x), None, None, None, None, 0.1, 1e-5) is None
    assert native.batch_norm(x, torch.ones(16), None, None, None, 0.1, 1e-5) is None
    for g in (x[:4], x.double()):  # not of this x: a hook may have given back another
        assert native.batch_norm_backward(g, x, *torch.ones(3, 16), {"x"}) is None
    for vector in (torch.ones(15), torch.ones(16, 1), torch.ones(16).double(), torch.ones(32)[::2]):
        assert native.batch_norm(x, None, None, vector, None, 0.1, 1e-5) is None


@pytest.mark.parametrize("kept", ["x", "y"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "groups"), [((1, 1, 2), 1), ((2, 6, 5, 7), 3), ((3, 4), 2), ((8, 64, 20, 20), 64)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_group_norm(
    native: Any,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    groups: int,
    affine: bool,
    kept: str,
) -> None:
    """As of rows; what stores the channels last is left to the reference."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=dtype)

    x, g = draw(*shape) - 0.5, draw(*shape) - 0.5
    weight, bias = (draw(shape[1]) + 0.5, draw(shape[1])) if affine else (None, None)
    rows = x.view(shape[0], groups, -1)
    mean, rstd = rows.mean(-1), draw(shape[0], groups)
    y = ((rows - mean[..., None]) * rstd[..., None]).view(shape)
    if affine:
        along = (-1, *[1] * (len(shape) - 2))
        y = y * weight.view(along) + bias.view(along)
    saved = {"x": x, "y": y, "mean": mean, "rstd": rstd, "weight": weight, "bias": bias}
    parameters = {"weight", "bias"} if affine else set()
    shapes = {name: Like.of(saved[name]) for name in ("x", *parameters)}
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    of = norm_gradients.from_input if kept == "x" else norm_gradients.from_output
    for wrt in map(frozenset, ({"x", *parameters}, {"x"}, parameters)):
        results = []
        for kernel in (native.norm, reference.norm):
            with monkeypatch.context() as patch, torch.no_grad():
                patch.setattr(kernels, "norm", kernel)
                results.append(of({"y": g}, wrt, saved, shapes, groups) if wrt else {})
        assert results[0].keys() == results[1].keys() == wrt
        for name, grad in results[0].items():
            torch.testing.assert_close(grad, results[1][name], rtol=tolerance, atol=tolerance)
    of_rows = Rows(g, x, mean, rstd, weight, None, 0.0, False, True, groups)
    assert native.norm(of_rows, frozenset({"x"})) is not None
    if len(shape) == 4:
        last = x.to(memory_format=torch.channels_last)
        assert native.norm(of_rows._replace(kept=last), frozenset({"x"})) is None


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"weight": True}, {"label_smoothing": 0.2}], ids=str)
@pytest.mark.parametrize("shape", [(70, 5), (3, 21), (4, 1), (3, 5, 11), (2, 5, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_loops_of_cross_entropy(
    shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any], reduction: str
) -> None:
    """By programs of 16 rows or places, which have 8 classes at a time."""
    pytest.importorskip("triton")
    loops = importlib.import_module("memsave.kernels.triton_loops")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=dtype).mul_(5)
    x.view(-1)[0] = -torch.inf
    classes = shape[1]
    target = torch.randint(classes, (shape[0], *shape[2:]), generator=generator)
    target.view(-1)[::3] = -100
    rows, places = target.numel(), target[0].numel()
    weight = torch.rand(classes, generator=generator, dtype=dtype) + 0.5
    smoothing = options.get("label_smoothing", 0.0)
    has_weight = "weight" in options
    passed = {**options, "weight": weight} if has_weight else options
    x.requires_grad_()
    loss = F.cross_entropy(x, target, **passed, reduction=reduction)
    g = torch.randn(loss.shape, generator=generator, dtype=dtype)
    (expected,) = torch.autograd.grad(loss, x, g)
    sums, dx = torch.full((3,), torch.nan, dtype=dtype), torch.full_like(x, torch.nan)
    x = x.detach()
    images, each = (1, rows) if places == 1 else (shape[0], places)
    with np.errstate(all="ignore"):
        loops.weigh[(3,)](target, weight, sums, rows, -100, has_weight, 16)
        loops.cross_entropy[(-(-each // 16) * images,)](
            *(x, target, g, weight, sums, dx, rows, classes, places, -100, 3, smoothing),
            *(g.ndim > 0, has_weight, reduction == "mean", 4, 16, 8),
        )
    bound = 1e-5 if dtype is torch.float32 or smoothing else 1e-12  # (smoothing is in float32)
    torch.testing.assert_close(dx, expected, rtol=bound, atol=bound / 10, equal_nan=True)
