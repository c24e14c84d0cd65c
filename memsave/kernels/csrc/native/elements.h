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

/* So many elements of a row are near at hand, in the first cache, while they are put aside. */
enum { BLOCK_OF_ROW = 2048 };
