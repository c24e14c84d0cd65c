"""The loops of cuda.py in Triton. Arrays are dense; those that bits describe in storage order:
eight elements share a byte, the first in the lowest.
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
        w = tl.where(wide <= 0, tl.zeros_like(v), v)  # +0 of -0, as torch's on CUDA
    elif KIND == "leaky_relu":
        flag = wide > 0
        w = tl.where(flag, v, (wide * low).to(v.dtype))
    elif KIND == "hardtanh":
        flag = ((wide > low) & (wide < high)) | (wide != wide)
        w = tl.where(wide <= low, low, tl.where(wide > high, high, wide)).to(v.dtype)
    elif KIND == "threshold":
        flag = (v > low) | (v != v)
        w = tl.where(flag, v, high)
    elif KIND == "hardshrink":
        flag = (v < low) | (v > high) | (v != v)
        w = tl.where(flag, v, tl.zeros_like(v))
    elif KIND == "softshrink":
        flag = (v < low) | (v > high) | (v != v)
        w = tl.where(v < low, v - low, tl.where(v > high, v - high, tl.where(flag, v, 0)))
    elif KIND == "hardsigmoid":
        flag = ((wide > low) & (wide < high)) | (wide != wide)
        w = wide - low
        w = tl.where(w < 0, 0, tl.where(w > 6, 6, w))
        w = (w * 0.16666667).to(v.dtype)  # which is rounded as torch's on CUDA, not as on CPU
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
    """``y`` from ``x`` and bits: ``x`` or 0; ``x * low`` or 0; ``x * low`` or ``x * high``."""
    # (For checkers of types, a call from Python, which never returns.)
    byte, element, is_byte, is_element = _places(size, BYTES)  # type: ignore[misc]
    v = tl.load(x + element, mask=is_element, other=0)
    eight = tl.load(bits + byte, mask=is_byte, other=0).to(tl.int32)
    flag = ((eight[:, None] >> tl.arange(0, 8)[None, :]) & 1) != 0
    if KIND == "select":
        w = tl.where(flag, v, tl.zeros_like(v))
    elif KIND == "part":
        w = tl.where(flag, (v.to(tl.float32) * low).to(v.dtype), tl.zeros_like(v))
    else:
        w = (v.to(tl.float32) * tl.where(flag, low, high)).to(v.dtype)
    tl.store(y + element, w, mask=is_element)


@triton.jit
def prelu(x, y, bits, weight, size, inner, count, FORWARD: tl.constexpr, BYTES: tl.constexpr):
    """``y`` from ``x`` and where it is positive, which forward writes as bits and backward reads. A
    weight is that of ``inner`` elements one after the other, and then the next of ``count``.
    """
    # (For checkers of types, a call from Python, which never returns.)
    byte, element, is_byte, is_element = _places(size, BYTES)  # type: ignore[misc]
    v = tl.load(x + element, mask=is_element, other=0)
    wide = v.to(tl.float32) if v.dtype.primitive_bitwidth == 16 else v
    slope = tl.load(weight + element.to(tl.int32) // inner % count, mask=is_element, other=0)
    digit = tl.arange(0, 8)[None, :]
    if FORWARD:
        flag = wide > 0
        eight = tl.sum(tl.where(flag & is_element, 1, 0) << digit, axis=1)
        tl.store(bits + byte, eight.to(tl.uint8), mask=is_byte)
    else:
        eight = tl.load(bits + byte, mask=is_byte, other=0).to(tl.int32)
        flag = ((eight[:, None] >> digit) & 1) != 0
    w = tl.where(flag, v, (wide * slope.to(wide.dtype)).to(v.dtype))
    tl.store(y + element, w, mask=is_element)


@triton.jit
def dropout(
    x, y, bits, size, keep, scale, seed, offset, threads, VECTOR: tl.constexpr, BYTES: tl.constexpr
):
    """``y`` from ``x`` and bits, by the random numbers that torch's kernel draws: of its
    ``threads``, each takes a vector at a time, by fours of its sequence from ``offset`` on.
    """
    # (For checkers of types, a call from Python, which never returns.)
    byte, element, is_byte, is_element = _places(size, BYTES)  # type: ignore[misc]
    v = tl.load(x + element, mask=is_element, other=0)
    two = tl.arange(0, 2)[None, :]  # halves of a byte
    four = byte.to(tl.int32)[:, None] * 2 + two
    vector = four // (VECTOR // 4)
    turn = offset + vector // threads * (VECTOR // 4) + four % (VECTOR // 4)
    low, high = turn.to(tl.uint32), (turn >> 32).to(tl.uint32)
    thread = (vector % threads).to(tl.uint32)
    draw_0, draw_1, draw_2, draw_3 = tl.philox(seed, low, high, thread, tl.zeros_like(thread))
    half = _is_below(draw_0, keep) | _is_below(draw_1, keep) << 1
    half |= _is_below(draw_2, keep) << 2 | _is_below(draw_3, keep) << 3
    half = tl.where(four * 4 < size, half, 0)
    eight = tl.sum(half << two * 4, axis=1)
    tl.store(bits + byte, eight.to(tl.uint8), mask=is_byte)
    # What is dropped is multiplied by 0, too: nan stays.
    kept = ((eight[:, None] >> tl.arange(0, 8)[None, :]) & 1).to(tl.float32)
    tl.store(y + element, (v.to(tl.float32) * kept * scale).to(v.dtype), mask=is_element)


@triton.jit
def scale_channels(
    x,
    y,
    bits,
    size,
    inner,
    channels,
    factor,
    LAST: tl.constexpr,
    EIGHTS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """``y``: what of ``x`` is of a channel with a bit, by ``factor``, the rest by 0. A channel has
    ``inner`` elements one after the other; or is ``LAST``, of images of ``inner`` elements.
    ``EIGHTS``: eight elements are of one channel, or of eight.
    """
    # (For checkers of types, a call from Python, which never returns.)
    byte, element, _, is_element = _places(size, BYTES)  # type: ignore[misc]
    place = byte.to(tl.int32)[:, None] * 8 if EIGHTS else element.to(tl.int32)
    channel = place // inner
    if LAST:
        channel = channel * channels + place % channels
        if EIGHTS:
            channel += tl.arange(0, 8)[None, :]
    eight = tl.load(bits + channel // 8, mask=place < size, other=0).to(tl.int32)
    kept = ((eight >> channel % 8) & 1).to(tl.float32)
    v = tl.load(x + element, mask=is_element, other=0).to(tl.float32)
    tl.store(y + element, (v * (kept * factor)).to(x.dtype.element_ty), mask=is_element)


@triton.jit
def _is_below(draw, number):
    """Whether a draw is, as a number of (0, 1], by its 32 bits: as those of CUDA have it."""
    return (draw.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10 < number).to(
        tl.int32
    )


# Max pooling: windows of three axes, on images of three (the first may have one place each), whose
# places have ``channels`` elements that lie side by side.


@triton.jit
def _at(program, size, channels, size_1, size_2, size_3, FAR: tl.constexpr, BLOCK: tl.constexpr):
    """The elements of a program, and which there are; of each its image, places by axis, channel.
    (``FAR``: indices have over 31 bits.)
    """
    start = program.to(tl.int64) if FAR else program
    index = start * BLOCK + tl.arange(0, BLOCK)
    rest = index // channels
    at_3 = rest % size_3
    rest = rest // size_3
    at_2 = rest % size_2
    rest = rest // size_2
    return index, index < size, rest // size_1, rest % size_1, at_2, at_3, index % channels


@triton.jit
def _flat(image, at_1, at_2, at_3, channel, channels, size_1, size_2, size_3):
    """The inverse."""
    return (((image * size_1 + at_1) * size_2 + at_2) * size_3 + at_3) * channels + channel


#: Times that what is within loops over windows is written out.
UNROLLED = tl.constexpr(4)
#: Of which Triton would compile a kernel where they are multiples of 16, and another where not.
SIZES = ["size", "in_1", "in_2", "in_3", "out_1", "out_2", "out_3"]


@triton.jit(do_not_specialize_on_alignment=SIZES)
def max_pool(
    x,
    y,
    offsets,
    size,
    channels,
    in_1,
    in_2,
    in_3,
    out_1,
    out_2,
    out_3,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest of each window, and its offset."""
    index, is_in, image, o_1, o_2, o_3, channel = _at(  # type: ignore[misc]
        tl.program_id(0), size, channels, out_1, out_2, out_3, FAR, BLOCK
    )
    wide = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    best = tl.full([BLOCK], float("-inf"), wide)
    offset = tl.full([BLOCK], -1, tl.int32)
    for k_1 in range(KERNEL[0]):
        i_1 = o_1 * STRIDE[0] - PADDING[0] + k_1 * DILATION[0]
        for k_2 in tl.range(KERNEL[1], loop_unroll_factor=UNROLLED):
            i_2 = o_2 * STRIDE[1] - PADDING[1] + k_2 * DILATION[1]
            for k_3 in tl.range(KERNEL[2], loop_unroll_factor=UNROLLED):
                i_3 = o_3 * STRIDE[2] - PADDING[2] + k_3 * DILATION[2]
                there = (i_1 >= 0) & (i_1 < in_1) & (i_2 >= 0) & (i_2 < in_2)
                there = there & (i_3 >= 0) & (i_3 < in_3) & is_in
                place = _flat(image, i_1, i_2, i_3, channel, channels, in_1, in_2, in_3)
                v = tl.load(x + place, mask=there, other=0).to(wide)
                # The first place, a larger one than before, or (as stock's) the last nan.
                taken = there & ((offset < 0) | (v > best) | (v != v))
                best = tl.where(taken, v, best)
                offset = tl.where(taken, (k_1 * KERNEL[1] + k_2) * KERNEL[2] + k_3, offset)
    tl.store(y + index, best.to(x.dtype.element_ty), mask=is_in)
    # (A window of nothing but padding has no place.)
    tl.store(offsets + index, tl.maximum(offset, 0).to(tl.uint8), mask=is_in)


@triton.jit(do_not_specialize_on_alignment=SIZES)
def unpool(
    g,
    dx,
    offsets,
    size,
    channels,
    in_1,
    in_2,
    in_3,
    out_1,
    out_2,
    out_3,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    DILATION: tl.constexpr,
    FAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each place the gradients of the windows whose offsets lead to it, in their order.

    A program has places that lie alike to the windows along the first two axes, so that all have
    as many: of every stretch of a stride, the one at ``s_1``, ``s_2``.
    """
    s_1 = tl.program_id(0) % STRIDE[0]
    s_2 = tl.program_id(0) // STRIDE[0] % STRIDE[1]
    # Where the first stretch begins, in windows, and how many there are.
    first_1: tl.constexpr = PADDING[0] // STRIDE[0]
    first_2: tl.constexpr = PADDING[1] // STRIDE[1]
    along_1 = (in_1 - 1 + PADDING[0]) // STRIDE[0] - first_1 + 1
    along_2 = (in_2 - 1 + PADDING[1]) // STRIDE[1] - first_2 + 1
    program = tl.program_id(0) // (STRIDE[0] * STRIDE[1])
    _, is_in, image, c_1, c_2, i_3, channel = _at(  # type: ignore[misc]
        program, size, channels, along_1, along_2, in_3, FAR, BLOCK
    )
    i_1 = (first_1 + c_1) * STRIDE[0] + s_1 - PADDING[0]
    i_2 = (first_2 + c_2) * STRIDE[1] + s_2 - PADDING[1]
    is_in = is_in & (i_1 >= 0) & (i_1 < in_1) & (i_2 >= 0) & (i_2 < in_2)
    wide = tl.float64 if g.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros([BLOCK], wide)
    # As many windows as cover a place, the last of which begins at it or before.
    count_1 = ((KERNEL[0] - 1) * DILATION[0] - s_1 + STRIDE[0]) // STRIDE[0]
    count_2 = ((KERNEL[1] - 1) * DILATION[1] - s_2 + STRIDE[1]) // STRIDE[1]
    count_3 = (KERNEL[2] - 1) * DILATION[2] // STRIDE[2] + 1
    for w_1 in range(count_1 - 1, -1, -1):
        o_1, t_1 = first_1 + c_1 - w_1, s_1 + w_1 * STRIDE[0]
        for w_2 in range(count_2 - 1, -1, -1):
            o_2, t_2 = first_2 + c_2 - w_2, s_2 + w_2 * STRIDE[1]
            there_2 = (o_1 >= 0) & (o_1 < out_1) & (o_2 >= 0) & (o_2 < out_2) & is_in
            there_2 = there_2 & (t_1 % DILATION[0] == 0) & (t_2 % DILATION[1] == 0)
            for w_3 in tl.range(count_3 - 1, -1, -1, loop_unroll_factor=UNROLLED):
                o_3 = (i_3 + PADDING[2]) // STRIDE[2] - w_3
                t_3 = i_3 + PADDING[2] - o_3 * STRIDE[2]
                there = there_2 & (o_3 >= 0) & (o_3 < out_3)
                there = there & (t_3 % DILATION[2] == 0) & (t_3 < KERNEL[2] * DILATION[2])
                here = t_1 // DILATION[0] * KERNEL[1] + t_2 // DILATION[1]
                here = here * KERNEL[2] + t_3 // DILATION[2]
                place = _flat(image, o_1, o_2, o_3, channel, channels, out_1, out_2, out_3)
                offset = tl.load(offsets + place, mask=there, other=0).to(tl.int32)
                chosen = there & (offset == here)
                total += tl.load(g + place, mask=chosen, other=0).to(wide)
    place = _flat(image, i_1, i_2, i_3, channel, channels, in_1, in_2, in_3)
    tl.store(dx + place, total.to(g.dtype.element_ty), mask=is_in)


# Norms.


@triton.jit(do_not_specialize_on_alignment=["rows"])
def norm(
    g,
    kept,
    rstd,
    weight,
    bias,
    dx,
    dweight,
    dbias,
    rows,
    features,
    shift,
    FROM_OUTPUT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    WANTS_X: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr,
    WANTS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of a norm of rows (see reference.py), of which a program has ``ROWS`` at once;
    those of weight and bias of all that it has.
    """
    feature = tl.arange(0, BLOCK)[None, :]
    is_feature = feature < features
    wide = tl.float64 if g.dtype.element_ty == tl.float64 else tl.float32
    scale = tl.full([1, BLOCK], 1, wide)
    center = tl.zeros([1, BLOCK], wide)
    if HAS_WEIGHT:
        scale = tl.load(weight + feature, mask=is_feature, other=1).to(wide) + shift
    if HAS_BIAS:
        center = tl.load(bias + feature, mask=is_feature, other=0).to(wide)
    inverse = 1 / scale
    of_weight = tl.zeros([ROWS, BLOCK], wide)
    of_bias = tl.zeros([ROWS, BLOCK], wide)
    start = tl.program_id(0).to(tl.int64) * ROWS
    while start < rows:
        row = start + tl.arange(0, ROWS)[:, None]
        is_in = (row < rows) & is_feature
        place = row * features + feature
        dy = tl.load(g + place, mask=is_in, other=0).to(wide)
        xhat = tl.load(kept + place, mask=is_in, other=0).to(wide)
        if FROM_OUTPUT:
            xhat = (xhat - center) * inverse
        else:
            xhat = xhat * tl.load(rstd + row, mask=row < rows, other=0)
        xhat = tl.where(is_in, xhat, 0)
        if WANTS_WEIGHT:
            of_weight += dy * xhat
        if WANTS_BIAS:
            of_bias += dy
        if WANTS_X:
            dxhat = dy * scale
            away = xhat * (tl.sum(dxhat * xhat, axis=1) / features)[:, None]
            if CENTERED:
                away += (tl.sum(dxhat, axis=1) / features)[:, None]
            new = (dxhat - away) * tl.load(rstd + row, mask=row < rows, other=0)
            tl.store(dx + place, new.to(g.dtype.element_ty), mask=is_in)
        start += tl.num_programs(0) * ROWS
    place = tl.program_id(0) * features + feature
    if WANTS_WEIGHT:
        tl.store(dweight + place, tl.sum(of_weight, axis=0)[None, :], mask=is_feature)
    if WANTS_BIAS:
        tl.store(dbias + place, tl.sum(of_bias, axis=0)[None, :], mask=is_feature)


# Losses.


@triton.jit
def weigh(target, weight, sums, rows, ignored, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The weights of the rows that are not ignored: a sum of each program."""
    total = tl.zeros([BLOCK], sums.dtype.element_ty)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < rows:
        row = start + tl.arange(0, BLOCK)
        index = tl.load(target + row, mask=row < rows, other=0)
        counts = (row < rows) & (index != ignored)
        if HAS_WEIGHT:
            total += tl.load(weight + index, mask=counts, other=0).to(total.dtype)
        else:
            total += tl.where(counts, 1, 0).to(total.dtype)
        start += tl.num_programs(0) * BLOCK
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _logits(x, first, is_row, start, classes, places, BLOCK: tl.constexpr):
    """Some classes of rows that begin at ``first``; where they are, and which there are; and what
    they have there.
    """
    one = start + tl.arange(0, BLOCK)[None, :]
    is_in = is_row[:, None] & (one < classes)
    at = first[:, None] + one.to(tl.int64) * places
    return one, at, is_in, tl.load(x + at, mask=is_in, other=float("-inf"))


@triton.jit
def cross_entropy(
    x,
    target,
    g,
    weight,
    sums,
    dx,
    rows,
    classes,
    places,
    ignored,
    parts,
    smoothing,
    OF_ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    IS_MEAN: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of logits, of which a program has ``ROWS``: of as many places of an image, which
    lie side by side, or of one place each. (``OF_ROWS``: there are as many gradients; otherwise
    one. The mean divides it by the sum of ``sums``.)
    """
    wide = sums.dtype.element_ty
    if places == 1:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        is_row = row < rows
        first = row * classes
    else:
        blocks = (places + ROWS - 1) // ROWS
        place = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
        image = (tl.program_id(0) // blocks).to(tl.int64)
        is_row = place < places
        row = image * places + place
        first = image * classes * places + place
    index = tl.load(target + row, mask=is_row, other=ignored)
    counts = is_row & (index != ignored)
    if OF_ROWS:
        h = tl.load(g + row, mask=is_row, other=0).to(wide)
    else:
        h = tl.zeros([ROWS], wide) + tl.load(g).to(wide)
    if HAS_WEIGHT:
        h *= tl.load(weight + index, mask=counts, other=0).to(wide)
    if IS_MEAN:
        part = tl.arange(0, PARTS)
        h /= tl.sum(tl.load(sums + part, mask=part < parts, other=0), axis=0)
    h = tl.where(counts, h, 0)
    most = tl.full([ROWS], float("-inf"), wide)
    total = tl.zeros([ROWS], wide)
    start = 0
    while start < classes:
        _, _, _, v = _logits(x, first, is_row, start, classes, places, BLOCK)  # type: ignore[misc]
        v = v.to(wide)
        larger = tl.maximum(most, tl.max(v, axis=1))
        from_here = tl.where(larger == float("-inf"), 0, larger)
        total = total * tl.exp(most - from_here) + tl.sum(tl.exp(v - from_here[:, None]), axis=1)
        most = larger
        start += BLOCK
    most = tl.where(most == float("-inf"), 0, most)
    start = 0
    while start < classes:
        one, at, is_in, v = _logits(  # type: ignore[misc]
            x, first, is_row, start, classes, places, BLOCK
        )
        p = tl.exp(v.to(wide) - most[:, None]) / total[:, None]
        q = tl.where(one == index[:, None], 1 - smoothing, 0) + smoothing / classes
        tl.store(dx + at, (h[:, None] * (p - q)).to(x.dtype.element_ty), mask=is_in)
        start += BLOCK
