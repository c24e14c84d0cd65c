"""The loops of cuda.py in Triton. Arrays are dense and in storage order; eight elements share a
byte of bits, the first in the lowest.
"""

# (No `from __future__ import annotations`: Triton reads the annotations.)

import triton
import triton.language as tl


@triton.jit
def _places(size, BYTES: tl.constexpr):
    """Of the bytes of a program, and of their elements by eight; and which there are."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    element = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    return byte, element, byte * 8 < size, element < size


@triton.jit
def to_bits(
    x, y, bits, size, low, high, KIND: tl.constexpr, WRITES: tl.constexpr, BYTES: tl.constexpr
):
    """Bits from ``x``, and of activations ``y``. (``KIND``: a test or a piece of reference.py.)"""
    # (For checkers of types, a call from Python, which never returns.)
    byte, element, is_byte, is_element = _places(size, BYTES)  # type: ignore[misc]
    v = tl.load(x + element, mask=is_element, other=0)
    w = v
    wide = v.to(tl.float32) if v.dtype.primitive_bitwidth == 16 else v
    if KIND == "relu":
        flag = (wide > 0) | (wide != wide)
        w = tl.where(wide < 0, tl.zeros_like(v), v)
    elif KIND == "leaky_relu":
        flag = v > 0
        w = tl.where(flag, v, v * low)
    elif KIND == "hardtanh":
        flag = ((v > low) & (v < high)) | (v != v)
        w = tl.where(v < low, low, tl.where(v > high, high, v))
    elif KIND == "threshold":
        flag = (v > low) | (v != v)
        w = tl.where(flag, v, high)
    elif KIND == "hardshrink":
        flag = (v < low) | (v > high) | (v != v)
        w = tl.where(flag, v, tl.zeros_like(v))
    elif KIND == "above":
        flag = wide > low
    elif KIND == "within":
        flag = (wide > low) & (wide < high)
    elif KIND == "not_outside":
        flag = ((wide <= low) | (wide >= high)) == 0
    elif KIND == "not_inside":
        flag = ((wide >= low) & (wide <= high)) == 0
    else:
        flag = v != 0
    if WRITES:
        tl.store(y + element, w, mask=is_element)
    ones = tl.where(flag & is_element, 1, 0) << tl.arange(0, 8)[None, :]
    tl.store(bits + byte, tl.sum(ones, axis=1).to(tl.uint8), mask=is_byte)


@triton.jit
def from_bits(x, y, bits, size, low, high, KIND: tl.constexpr, BYTES: tl.constexpr):
    """``y`` from ``x`` and bits: ``x`` or zero; or multiplied by ``low`` if set, else ``high``."""
    # (For checkers of types, a call from Python, which never returns.)
    byte, element, is_byte, is_element = _places(size, BYTES)  # type: ignore[misc]
    v = tl.load(x + element, mask=is_element, other=0)
    eight = tl.load(bits + byte, mask=is_byte, other=0).to(tl.int32)
    flag = ((eight[:, None] >> tl.arange(0, 8)[None, :]) & 1) != 0
    if KIND == "select":
        w = tl.where(flag, v, tl.zeros_like(v))
    else:
        w = (v.to(tl.float32) * tl.where(flag, low, high)).to(v.dtype)
    tl.store(y + element, w, mask=is_element)
