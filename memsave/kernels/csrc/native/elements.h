/* Elements of loops: numbers, as they are stored and as they are computed with. */

#pragma once

#include <stdint.h>
#include <string.h>

#include "../loops.h"
#include "../vectors.h"

typedef ptrdiff_t size;

static inline size at_most(size a, size b) { return a < b ? a : b; }

/* bfloat16, as integers of its bits: the upper half of a float. */
static inline float of_bfloat16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Of a float that is one; of any but nan, or of nan that comes of one (whose lower half is 0); of any. */
static inline uint16_t as_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)(bits >> 16);
}

static inline uint16_t back_to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint16_t to_bfloat16(float value) { return value != value ? 0x7fc0 : back_to_bfloat16(value); }

/* float16, by its bits: five of the exponent, which is less by 112, and the upper ten of the others. The smallest
   numbers, of exponent 0, have no leading 1: it comes with a number that has it, which is added or taken away. */
static inline float of_float16(uint16_t half) {
    const uint32_t size = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t bits = size + ((size < 0x7c00u << 13 ? 112u : 224u) << 23), least = size + (113u << 23);
    float value, small;
    memcpy(&value, &bits, 4);
    memcpy(&small, &least, 4);
    value = size < 0x400u << 13 ? small - 0x1p-14f : value;
    uint32_t signed_bits;
    memcpy(&signed_bits, &value, 4);
    signed_bits |= sign;
    memcpy(&value, &signed_bits, 4);
    return value;
}

static inline uint16_t to_float16(float value) {
    uint32_t bits, least;
    memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    float small;
    memcpy(&small, &size, 4);
    small += 0.5f; /* whose last bit is that of the smallest number */
    memcpy(&least, &small, 4);
    const uint32_t usual = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    const uint32_t half = size < 113u << 23 ? least - (126u << 23) : usual > 0x7c00 ? 0x7c00 : usual;
    return (uint16_t)(sign | (size > 0x7f800000 ? 0x7e00 : half));
}

static inline float near_float16(float value) { return of_float16(to_float16(value)); }

/* Elements are STORED, and LOADed to be computed as T; near the two numbers are those that can be stored. */
#define ARRAYS(T, STORED, LOAD, STORE)                                                  \
    const Arrays *arrays = work;                                                        \
    (void)thread;                                                                       \
    const T a = (T)arrays->a, b = (T)arrays->b;                                         \
    const T near_a = LOAD(STORE(a)), near_b = LOAD(STORE(b));                           \
    const STORED *x = arrays->x;                                                        \
    STORED *y = arrays->y;                                                              \
    uint8_t *bits = arrays->bits;                                                       \
    (void)y, (void)near_a, (void)near_b

/* A loop that is also inlined into others, by itself. */
#define CLONED(CLONES, NAME)                                                            \
    CLONES void NAME(const void *work, size start, size end, size thread) { NAME##_inline(work, start, end, thread); }

/* So many elements of a row are near at hand, in the first cache, while they are put aside. */
enum { BLOCK_OF_ROW = 2048 };
