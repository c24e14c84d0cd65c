"""Kernels of CUDA devices by the loops of triton_loops.py: one pass, where the reference has
several.

Each function is that of its name in :mod:`memsave.kernels.reference`, or returns ``None`` where it
does not apply. Triton, which PyTorch brings along for CUDA, is imported with the first call that
needs it.
"""

from __future__ import annotations

import importlib
import math
import warnings
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .memory import (
    empty_bits,
    empty_result,
    has_memory,
    in_order,
    is_as_result,
    layout_of_pool,
    planes,
)
from .reference import AS_X, INTEGERS, PIECES, SELECTIONS, TESTS, Like, Rows, Windows

if find_spec("triton") is None:
    raise ImportError("no triton")

#: Those of :data:`memsave.kernels.reference.PIECES` in which nothing is rounded twice.
PIECEWISE = ("hardshrink", "hardtanh", "leaky_relu", "softshrink", "threshold")
#: Dtypes whose numbers a loop of float32 has; float64 has too many for the scalars of Triton.
NARROW = (torch.float32, torch.bfloat16, torch.float16)
#: Of bits, by one program.
BYTES = 256
#: Elements of a program: of a pooling all; of rows those that it has at a time.
POOLED = 256
ELEMENTS = 1024
#: Dtypes of norms and poolings.
FLOATS = (*NARROW, torch.float64)
#: Of the longest row of a norm, in the dtype of sums: what the registers of a program hold.
BYTES_OF_ROW = 1 << 15
#: Programs that share the rows of a norm, where each sums over its own.
PROGRAMS = 512
#: Programs that sum the weights of a loss.
PARTS = 64


@cache
def _loops() -> Any:
    return importlib.import_module(".triton_loops", __package__)


def _is_here(x: Tensor) -> bool:
    """(Apart, so that tests can have Triton's interpreter on the CPU.)"""
    return x.is_cuda


#: What :func:`_compiles` has said of a device.
_works: dict[torch.device, bool] = {}


def _compiles(device: torch.device) -> bool:
    """Whether Triton compiles for this device. (It needs a compiler for C, too.)"""
    try:
        x = torch.ones(8, device=device)
        bits = empty_bits(x)
        _run("to_bits", x, x, bits, 0.0, 0.0, "above", False)
        return bits.item() == 255
    except Exception as error:  # of whatever kind: its compiler runs several
        warnings.warn(f"memsave runs without kernels on {device}: {error}", stacklevel=2)
        return False


def _has_memory(x: Tensor, stride: tuple[int, ...]) -> bool:
    if not _is_here(x) or not has_memory(x, stride):
        return False
    if x.device not in _works:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # The first look waits for the device, which a CUDA graph cannot.
        _works[x.device] = _compiles(x.device)
    return _works[x.device]


def _run(loop: str, x: Tensor, y: Tensor, bits: Tensor, *rest: Any) -> None:
    if size := x.numel():
        with torch.cuda.device_of(x):
            grid = (-(-size // (8 * BYTES)),)
            getattr(_loops(), loop)[grid](x, y, bits, size, *rest, BYTES)


def _bits(x: Tensor, kind: str, low: float = 0.0, high: float = 0.0) -> Tensor:
    bits = empty_bits(x)
    _run("to_bits", x, x, bits, float(low), float(high), kind, False)
    return bits


def _bits_of_test(x: Tensor, test: str, low: float, high: float) -> Tensor:
    """Of one of :data:`memsave.kernels.reference.TESTS`, of which all but this round bounds."""
    if test != "not_outside":
        low, high = _rounded(low, x.dtype), _rounded(high, x.dtype)
    return _bits(x, test, low, high)


def _with_bits(
    x: Tensor, inplace: bool, kind: str, low: float = 0, high: float = 0
) -> tuple[Tensor, Tensor] | None:
    if not _has_memory(x, x.stride()):
        return None
    y, bits = x if inplace else empty_result(x), empty_bits(x)
    _run("to_bits", x, y, bits, float(low), float(high), kind, True)
    if inplace:
        torch.autograd.graph.increment_version(x)
    return y, bits


def relu(x: Tensor, inplace: bool) -> tuple[Tensor, Tensor] | None:
    """The output and the bits in one pass."""
    return _with_bits(x, inplace, "relu") if x.is_floating_point() else None


def piecewise(
    x: Tensor, inplace: bool, name: str, low: float, high: float
) -> tuple[Tensor, Tensor] | None:
    """The output and the bits in one pass, or in one each; or the bits of a test by torch."""
    if name in AS_X and not inplace and not is_as_result(x):
        return None
    are_numbers = {type(low), type(high)} <= {float, int}
    if x.dtype in FLOATS and are_numbers:
        largest = torch.finfo(x.dtype).max
        if any(largest < abs(number) < math.inf for number in (low, high)):
            return None  # For torch to refuse.
    dtypes = NARROW if name == "hardtanh" else (torch.float32,)
    if x.dtype in dtypes and name in PIECEWISE and are_numbers:
        return _with_bits(x, inplace, name, low, high)
    if not _has_memory(x, x.stride()):
        return None
    op, test = PIECES[name]
    which, *bounds = test(low, high)
    if x.dtype in NARROW and are_numbers:
        if name == "threshold":  # On CPU torch does not round it.
            bounds = [_rounded(bound, x.dtype) for bound in bounds]
        bits = _bits_of_test(x, which, *bounds)
    else:
        bits = pack(TESTS[which](x, *bounds), Like.of(x))
    return None if bits is None else (op(x, low, high, inplace), bits)


def compare(x: Tensor, like: Like, test: str, low: float, high: float) -> Tensor | None:
    """The bits in one pass."""
    if x.dtype not in NARROW or not _has_memory(x, like.stride):
        return None
    return _bits_of_test(x, test, low, high)


def pack(mask: Tensor, like: Like) -> Tensor | None:
    """The bits in one pass."""
    if not _has_memory(mask, like.stride):
        return None
    return _bits(mask.view(torch.uint8), "nonzero")


def select(g: Tensor, bits: Tensor, like: Like, factor: float | None = None) -> Tensor | None:
    """In one pass, or with a factor in two."""
    if not _is_here(g):
        return None
    g = in_order(g, like)
    if not _has_memory(g, like.stride):
        return None
    y, integer = empty_result(g), INTEGERS[g.itemsize]
    _run("from_bits", g.view(integer), y.view(integer), bits, 0.0, 0.0, "select")
    return y if factor is None else y.mul_(factor)


def scale(
    x: Tensor, bits: Tensor, like: Like, on: float, off: float, inplace: bool = False
) -> Tensor | None:
    """In one pass."""
    if x.dtype not in NARROW or not _is_here(x):
        return None
    if not inplace:
        x = in_order(x, like)
    if not _has_memory(x, like.stride):
        return None
    y = x if inplace else empty_result(x)
    _run("from_bits", x, y, bits, float(on), float(off), "scale")
    if inplace:
        torch.autograd.graph.increment_version(x)
    return y


def max_pool(x: Tensor, windows: Windows) -> tuple[Tensor, Tensor] | None:
    """In one pass, without indices."""
    layout = _layout(x, windows)
    if layout is None or x.dtype not in FLOATS:
        return None
    shape = (*x.shape[: -len(windows.inputs)], *windows.outputs)
    y = torch.empty(shape, dtype=x.dtype, memory_format=layout, device=x.device)
    offsets = torch.empty_like(y, dtype=torch.uint8)
    _pool("max_pool", x, y, offsets, windows, layout)
    return y, offsets


def unpool(g: Tensor, offsets: Tensor, windows: Windows, like: Like) -> Tensor | None:
    """In one pass; windows that overlap are added in the order of stock's."""
    layout = _layout(offsets, windows, like)
    if layout is None or offsets.dtype is not torch.uint8 or g.dtype not in FLOATS:
        return None
    if (g.device, g.shape) != (offsets.device, offsets.shape):
        return None
    g = g.contiguous(memory_format=layout)
    if not _has_memory(g, g.stride()):
        return None
    dx = torch.empty(like.shape, dtype=g.dtype, memory_format=layout, device=g.device)
    _pool("unpool", g, dx, offsets, windows, layout)
    return dx


def _layout(x: Tensor, windows: Windows, like: Like | None = None) -> torch.memory_format | None:
    return layout_of_pool(x, windows, like) if _has_memory(x, x.stride()) else None


def _pool(
    loop: str,
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    windows: Windows,
    layout: torch.memory_format,
) -> None:
    size, times, (_, channels) = y.numel(), 1, planes(x, windows, layout)
    inputs, outputs, _, stride, padding, _ = three = windows.in_three_axes()
    if loop == "unpool":  # by stretches of a stride along two axes
        times = stride[0] * stride[1]
        for length, step, pad in [*zip(inputs, stride, padding, strict=True)][:2]:
            size = size // length * ((length - 1 + pad) // step - pad // step + 1)
    far = max(size * times, x.numel()) + POOLED >= 1 << 31
    with torch.cuda.device_of(x):
        getattr(_loops(), loop)[(-(-size // POOLED) * times,)](
            x, y, offsets, size, channels, *inputs, *outputs, *three[2:], far, POOLED
        )


def norm(rows: Rows, wrt: frozenset[str]) -> dict[str, Tensor] | None:
    """Of rows, in one pass; sums over them by program."""
    g, kept, mean, rstd, weight, bias, shift, from_output, centered, groups = rows
    if groups is not None or mean is not None or g.dtype not in FLOATS or not _is_here(g):
        return None
    wide = torch.promote_types(g.dtype, torch.float32)
    features = g.shape[-1] if g.numel() else 0
    block = 1 << max(features - 1, 0).bit_length()
    if not features or block * wide.itemsize > BYTES_OF_ROW:
        return None
    count = g.numel() // features
    g, kept = g.contiguous(), kept.contiguous()
    if kept.shape != g.shape or not _are_vectors((g, kept), g.numel(), g, g.dtype):
        return None
    # (Hooks of saved tensors may give back anything.)
    if not _are_vectors((rstd,), count, g, wide) or not _are_vectors((weight, bias), features, g):
        return None
    at_once = max(1, ELEMENTS // block)
    programs = -(-count // at_once)
    if wrt != {"x"}:
        programs = min(programs, PROGRAMS)
    grads = {"x": torch.empty_like(g)} if "x" in wrt else {}
    for name in ("weight", "bias"):
        if name in wrt:
            grads[name] = g.new_empty(programs, features, dtype=wide)
    names = ("x", "weight", "bias")
    with torch.cuda.device_of(g):
        _loops().norm[(programs,)](
            g,
            kept,
            *(g if v is None else v for v in (rstd, weight, bias)),
            *(grads.get(name, g) for name in names),
            count,
            features,
            shift,
            from_output,
            weight is not None,
            bias is not None,
            centered,
            *(name in wrt for name in names),
            at_once,
            block,
            num_warps=_warps(block),
        )
    return {name: grad if name == "x" else grad.sum(0) for name, grad in grads.items()}


def _warps(block: int) -> int:
    """Of a norm."""
    return 4 if block <= 1024 else 8 if block <= 4096 else 16


def _are_vectors(
    tensors: tuple[Tensor | None, ...], size: int, g: Tensor, dtype: torch.dtype | None = None
) -> bool:
    """Whether those that are there have so many numbers, which lie side by side, beside ``g``."""
    return all(
        v is None
        or (
            (v.device, v.numel()) == (g.device, size)
            and (v.dtype is dtype if dtype else v.dtype in FLOATS)
            and v.is_contiguous()
            and _has_memory(v, v.stride())
        )
        for v in tensors
    )


# For csrc/nodes, which launches loops by itself.

#: Of bits, by number: pieces, those in any dtype first; that of booleans.
KINDS = (
    *("relu", "leaky_relu", "hardsigmoid", "hardtanh"),
    *("threshold", "hardshrink", "softshrink"),
    "nonzero",
)
#: What Triton calls an element, by the number that torch has for its dtype.
ELEMENT = {0: "u8", 5: "fp16", 6: "fp32", 7: "fp64", 11: "u8", 15: "bf16"}
INTEGER = {5: "i16", 6: "i32", 7: "i64", 15: "i16"}


def compiled(device: int, loop: int, *constants: int) -> tuple[int, int, int] | None:
    """The function (of CUDA's driver) of a loop on a device, its threads and its bytes of shared
    memory; zeros where it is not compiled; ``None`` if that cannot be said now.

    Pointers are to addresses that 16 divides.
    """
    place = torch.device("cuda", device)
    with torch.cuda.device(place):
        if torch.cuda.is_current_stream_capturing():
            return None  # Loading a function is nothing that a CUDA graph can contain.
        if place not in _works:
            _works[place] = _compiles(place)
        if not _works[place]:
            return 0, 0, 0
        try:
            kernel = compile_loop(*SOURCES[loop](*constants))
            kernel[1, 1, 1]  # which loads it
        except Exception as error:
            warnings.warn(f"memsave runs without a kernel on {place}: {error}", stacklevel=2)
            return 0, 0, 0
    return kernel.function, 32 * kernel.metadata.num_warps, kernel.metadata.shared


def compile_loop(
    name: str,
    types: dict[str, str],
    constants: dict[str, Any],
    even: tuple[str, ...],
    warps: int,
    target: Any = None,
) -> Any:
    """A loop for a target of Triton's (by default, the current device), with the ``types`` of all
    arguments that are no ``constants``; those that 16 divides are ``even``, as pointers are.
    """
    from triton import compile
    from triton.compiler import ASTSource

    function = getattr(_loops(), name)
    names = function.arg_names
    signature = {key: "constexpr" if key in constants else types[key] for key in names}
    even = tuple(key for key, kind in signature.items() if kind.startswith("*") or key in even)
    source = ASTSource(
        function,
        signature,
        {(names.index(key),): value for key, value in constants.items()},
        {(names.index(key),): [["tt.divisibility", 16]] for key in even},
    )
    return compile(source, target=target, options={"num_warps": warps})


def _sums(element: str) -> str:
    """Of elements like these."""
    return "*fp64" if element == "fp64" else "*fp32"


Source = tuple[str, dict[str, str], dict[str, Any], tuple[str, ...], int]


def _source_of_bits(loop: str, element: str, even: int, **constants: Any) -> Source:
    types = dict.fromkeys(("x", "y"), "*" + element) | {"bits": "*u8", "size": "i32"}
    types |= {"low": "fp32", "high": "fp32"}
    return loop, types, constants | {"BYTES": BYTES}, ("size",) * even, 4


def _to_bits(dtype: int, kind: int, writes: int, even: int) -> Source:
    return _source_of_bits("to_bits", ELEMENT[dtype], even, KIND=KINDS[kind], WRITES=bool(writes))


def _from_bits(dtype: int, kind: int, even: int) -> Source:
    selection = SELECTIONS[kind]
    elements = INTEGER if selection == "select" else ELEMENT
    return _source_of_bits("from_bits", elements[dtype], even, KIND=selection)


def _source_of_pool(
    loop: str, dtype: int, channels: int, in_ones: int, out_ones: int, *windows: int
) -> Source:
    """``channels``: one (2), or a multiple of 16 (1); ``ones``: bits of axes of one place."""
    x = "*" + ELEMENT[dtype]
    constants: dict[str, Any] = {"FAR": False, "BLOCK": POOLED}
    for place, name in enumerate(("KERNEL", "STRIDE", "PADDING", "DILATION")):
        constants[name] = windows[3 * place : 3 * place + 3]
    for which, ones in (("in", in_ones), ("out", out_ones)):
        constants |= {f"{which}_{axis + 1}": 1 for axis in range(3) if ones >> axis & 1}
    if channels == 2:
        constants["channels"] = 1
    names = ("x", "y") if loop == "max_pool" else ("g", "dx")
    types = {**dict.fromkeys(names, x), "offsets": "*u8", "size": "i32", "channels": "i32"}
    types |= {f"{which}_{axis}": "i32" for which in ("in", "out") for axis in (1, 2, 3)}
    return loop, types, constants, ("channels",) * (channels == 1), 4


def _norm(
    dtype: int,
    from_output: int,
    has_weight: int,
    has_bias: int,
    centered: int,
    wants_x: int,
    wants_weight: int,
    wants_bias: int,
    at_once: int,
    block: int,
    even: int,
) -> Source:
    x, wide = "*" + ELEMENT[dtype], _sums(ELEMENT[dtype])
    types = dict.fromkeys(("g", "kept", "weight", "bias", "dx"), x)
    types |= {"rstd": wide, "dweight": wide, "dbias": wide}
    types |= {"rows": "i32", "features": "i32", "shift": "fp32"}
    flags = {"FROM_OUTPUT": from_output, "HAS_WEIGHT": has_weight, "HAS_BIAS": has_bias}
    flags |= {"CENTERED": centered, "WANTS_X": wants_x}
    flags |= {"WANTS_WEIGHT": wants_weight, "WANTS_BIAS": wants_bias}
    constants: dict[str, Any] = {name: bool(flag) for name, flag in flags.items()}
    constants |= {"ROWS": at_once, "BLOCK": block}
    constants |= {"features": 1} if block == 1 else {}
    return "norm", types, constants, ("features",) * even, _warps(block)


def _weigh(dtype: int, has_weight: int) -> Source:
    element = ELEMENT[dtype]
    types = {"target": "*i64", "weight": "*" + element, "sums": _sums(element)}
    types |= {"rows": "i32", "ignored": "i64"}
    return "weigh", types, {"HAS_WEIGHT": bool(has_weight), "BLOCK": ELEMENTS}, (), 4


def _cross_entropy(
    dtype: int,
    of_gradient: int,
    of_rows: int,
    has_weight: int,
    is_mean: int,
    is_flat: int,
    at_once: int,
    block: int,
    even: int,
) -> Source:
    """``is_flat``: there is one place."""
    x = "*" + ELEMENT[dtype]
    types = dict.fromkeys(("x", "weight", "dx"), x)
    types |= {"g": "*" + ELEMENT[of_gradient], "target": "*i64", "sums": _sums(ELEMENT[dtype])}
    types |= dict.fromkeys(("rows", "classes", "places", "parts"), "i32")
    types |= {"ignored": "i64", "smoothing": "fp32"}
    flags = {"OF_ROWS": of_rows, "HAS_WEIGHT": has_weight, "IS_MEAN": is_mean}
    constants: dict[str, Any] = {name: bool(flag) for name, flag in flags.items()}
    constants |= {"PARTS": PARTS, "ROWS": at_once, "BLOCK": block}
    constants |= {"places": 1} if is_flat else {}
    constants |= {"classes": 1} if block == 1 else {}
    return "cross_entropy", types, constants, ("classes",) * even, _warps(at_once * block)


def _dropping(dtype: int, vector: int, even: int) -> Source:
    loop, types, constants, even_ones, warps = _source_of_bits("dropout", ELEMENT[dtype], even)
    types |= {"keep": "fp32", "scale": "fp32", "seed": "i64", "offset": "i64", "threads": "i32"}
    return loop, types, constants | {"VECTOR": vector}, even_ones, warps


def _prelu(dtype: int, forward: int, is_one: int, even: int) -> Source:
    """``is_one``: there is one weight."""
    loop, types, constants, even_ones, warps = _source_of_bits("prelu", ELEMENT[dtype], even)
    types |= {"weight": types["x"], "inner": "i32", "count": "i32"}
    constants |= {"FORWARD": bool(forward)} | ({"inner": 1, "count": 1} if is_one else {})
    return loop, types, constants, even_ones, warps


def _scale_channels(dtype: int, is_last: int, eights: int, even: int) -> Source:
    flags = {"LAST": bool(is_last), "EIGHTS": bool(eights)}
    source = _source_of_bits("scale_channels", ELEMENT[dtype], even, **flags)
    source[1].update({"inner": "i32", "channels": "i32", "factor": "fp32"})
    return source


#: By number.
SOURCES = (
    _to_bits,
    _from_bits,
    partial(_source_of_pool, "max_pool"),
    partial(_source_of_pool, "unpool"),
    _norm,
    _weigh,
    _cross_entropy,
    _dropping,
    _prelu,
    _scale_channels,
)


@lru_cache(maxsize=64)
def _rounded(number: float, dtype: torch.dtype) -> float:
    """As an element of a tensor."""
    return torch.tensor(number, dtype=dtype, device="cpu").item()
