/* float16: some elements at a time are widened for a loop of floats, and what it makes of them is narrowed. */

#pragma once

#include "activation.h"
#include "curve.h"
#include "float16.h"

enum { WIDENED = 1024, AT_ONCE = 32 };

/* For a loop of floats that compares with rounded numbers, or does not. */
INLINE Arrays widened(const Arrays *half, float *x, float *also, float *y, int rounds) {
    Arrays arrays = *half;
    arrays.x = x, arrays.also = also, arrays.y = y;
    if (rounds) arrays.a = near_float16((float)half->a), arrays.b = near_float16((float)half->b);
    return arrays;
}

static void in_floats(Loop *loop, const Arrays *half, size start, size end, size thread, int rounds, int writes) {
    float values[WIDENED], others[WIDENED];
    Arrays arrays = widened(half, values, others, values, rounds);
    for (size i = start, count; i < end; i += count) {
        count = at_most(WIDENED, end - i);
        widen((const uint16_t *)half->x + i, values, count);
        if (half->also) widen((const uint16_t *)half->also + i, others, count);
        if (half->bits) arrays.bits = half->bits + i / 8;
        loop(&arrays, 0, count, thread);
        if (writes) narrow(values, (uint16_t *)half->y + i, count, 1);
    }
}

/* Few at once, the processor converts some while it computes others. (Were y in the place of x, it would be written
   only where it differs, one by one.) */
#ifdef V3
#define BY_EIGHTS(FAMILY, LOOP_OF_FLOATS, ROUNDS, WRITES)                               \
    V3 size FAMILY##_by_eights(const Arrays *half, size start, size end) {              \
        _Alignas(64) float values[AT_ONCE], others[AT_ONCE], made[AT_ONCE];             \
        Arrays arrays = widened(half, values, others, made, ROUNDS);                    \
        const size first = start;                                                       \
        for (; end - start >= AT_ONCE; start += AT_ONCE) {                              \
            eights_widened((const uint16_t *)half->x + start, values, AT_ONCE);         \
            if (half->also) eights_widened((const uint16_t *)half->also + start, others, AT_ONCE); \
            if (half->bits) arrays.bits = half->bits + start / 8;                       \
            LOOP_OF_FLOATS##_inline(&arrays, 0, AT_ONCE, 0);                            \
            if (WRITES) eights_narrowed(made, (uint16_t *)half->y + start, AT_ONCE, 1); \
        }                                                                               \
        return start - first;                                                           \
    }
#else
#define BY_EIGHTS(FAMILY, LOOP_OF_FLOATS, ROUNDS, WRITES)
#endif

/* Those that compare with rounded numbers, and those that make more than bits. */
#define OF_FLOAT16(FAMILY, ROUNDS, WRITES) BY_FLOATS(FAMILY, FAMILY##_float, ROUNDS, WRITES)
#define BY_FLOATS(FAMILY, LOOP_OF_FLOATS, ROUNDS, WRITES)                               \
    BY_EIGHTS(FAMILY, LOOP_OF_FLOATS, ROUNDS, WRITES)                                   \
    static void FAMILY##_float16(const void *work, size start, size end, size thread) { \
        start += BY_PROCESSOR(FAMILY##_by_eights(work, start, end));                    \
        in_floats(LOOP_OF_FLOATS, work, start, end, thread, ROUNDS, WRITES);            \
    }
OF_FLOAT16(leaky_relu, 0, 1)
OF_FLOAT16(hardtanh, 0, 1)
OF_FLOAT16(threshold, 0, 1)
OF_FLOAT16(hardshrink, 1, 1)
OF_FLOAT16(hardsigmoid, 0, 1)
OF_FLOAT16(above, 1, 0)
OF_FLOAT16(within, 1, 0)
OF_FLOAT16(not_outside, 0, 0)
OF_FLOAT16(not_inside, 1, 0)
OF_FLOAT16(scale, 0, 1)
OF_FLOAT16(part, 0, 1)
BY_FLOATS(softshrink, softshrink_short_float, 0, 1)
OF_CURVES(short_float, float, , , 1)
BY_FLOATS(rest, rest_short_float, 0, 1)
BY_FLOATS(tanh2, tanh2_short_float, 0, 1)
BY_FLOATS(logistic, logistic_short_float, 0, 1)

/* (As those of other dtypes.) */
static void scale_channels_float16(const void *work, size start, size end, size thread) {
    const Arrays *arrays = work;
    const size places = (size)arrays->b;
    _Alignas(64) float values[WIDENED];
    (void)thread;
    for (size i = start, count; i < end; i += count) {
        const size channel = i / places;
        const float factor = arrays->bits[channel / 8] >> channel % 8 & 1 ? (float)arrays->a : 0;
        count = at_most(WIDENED, at_most((channel + 1) * places, end) - i);
        widen((const uint16_t *)arrays->x + i, values, count);
        narrow(values, (uint16_t *)arrays->y + i, count, factor);
    }
}
