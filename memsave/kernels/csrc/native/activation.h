/* Activations that are linear in pieces, and bits: one pass from x to bits, one from bits to a gradient. */

#pragma once

#include "elements.h"

/* From x to bits: DO, of the element v = x[j], says `flag`, and may say y[j]. */
#define TO_BITS(NAME, T, STORED, LOAD, STORE, WORD, DO)                                 \
    INLINE void NAME##_inline(const void *work, size start, size end, size thread) {    \
        ARRAYS(T, STORED, LOAD, STORE);                                                 \
        size i = start;                                                                 \
        for (; end - i >= BITS(WORD); i += BITS(WORD)) {                                \
            WORD word = 0;                                                              \
            UNITED(word) for (size k = 0; k < BITS(WORD); k++) TO_BIT(T, LOAD, WORD, DO) \
            memcpy(bits + i / 8, &word, sizeof(WORD));                                  \
        }                                                                               \
        WORD word = 0;                                                                  \
        for (size k = 0; k < end - i; k++) TO_BIT(T, LOAD, WORD, DO)                    \
        memcpy(bits + i / 8, &word, (size_t)(end - i + 7) / 8);                         \
    }                                                                                   \
    CLONED(WIDE_LOOP, NAME)
#define TO_BIT(T, LOAD, WORD, DO)                                                       \
    {                                                                                   \
        const size j = i + k;                                                           \
        const T v = LOAD(x[j]);                                                         \
        int flag;                                                                       \
        DO;                                                                             \
        word |= flag ? BIT_OF_##WORD[k] : 0;                                            \
    }

/* From x and bits to y: y[j] = VALUE, of the element v = x[j] and its flag. */
#define FROM_BITS(CLONES, NAME, T, STORED, LOAD, STORE, WORD, VALUE)                    \
    INLINE void NAME##_inline(const void *work, size start, size end, size thread) {    \
        ARRAYS(T, STORED, LOAD, STORE);                                                 \
        size i = start;                                                                 \
        WORD word = 0;                                                                  \
        for (; end - i >= BITS(WORD); i += BITS(WORD)) {                                \
            memcpy(&word, bits + i / 8, sizeof(WORD));                                  \
            EACH for (size k = 0; k < BITS(WORD); k++) OF_BIT(T, STORED, LOAD, WORD, VALUE) \
        }                                                                               \
        memcpy(&word, bits + i / 8, (size_t)(end - i + 7) / 8);                         \
        for (size k = 0; k < end - i; k++) OF_BIT(T, STORED, LOAD, WORD, VALUE)         \
    }                                                                                   \
    CLONED(CLONES, NAME)
#define OF_BIT(T, STORED, LOAD, WORD, VALUE)                                            \
    {                                                                                   \
        const T v = LOAD(x[i + k]);                                                     \
        const WORD flag = word & BIT_OF_##WORD[k];                                      \
        y[i + k] = (STORED)(VALUE);                                                     \
    }

/* (In 16 bits torch rounds the numbers that elements are compared with, but not the bounds of hardtanh
   and threshold; nor those by which elements are multiplied.) */
#define OF_FLOATS(NAME, T, STORED, LOAD, STORE, AS, CLONES)                             \
    TO_BITS(leaky_relu_##NAME, T, STORED, LOAD, STORE, uint32_t, flag = v > 0; y[j] = v > 0 ? AS(v) : STORE(v * a)) \
    TO_BITS(hardtanh_##NAME, T, STORED, LOAD, STORE, uint32_t, flag = !(v <= a) & !(v >= b); \
            const T w = v < a ? near_a : v; y[j] = AS(w > b ? near_b : w))              \
    TO_BITS(threshold_##NAME, T, STORED, LOAD, STORE, uint32_t, flag = !(v <= a); y[j] = AS(v <= a ? near_b : v)) \
    TO_BITS(hardshrink_##NAME, T, STORED, LOAD, STORE, uint32_t,                        \
            const int within = (v >= near_a) & (v <= near_b);                           \
            flag = !within; y[j] = AS(within ? 0 : v))                                  \
    TO_BITS(hardsigmoid_##NAME, T, STORED, LOAD, STORE, uint32_t, flag = (v > a) & (v < b); const T w = v - a; \
            y[j] = STORE((w < 0 ? 0 : w > b - a ? b - a : w) / (b - a)))                \
    TO_BITS(above_##NAME, T, STORED, LOAD, STORE, uint32_t, flag = v > near_a)          \
    TO_BITS(within_##NAME, T, STORED, LOAD, STORE, uint32_t, flag = (v > near_a) & (v < near_b)) \
    TO_BITS(not_outside_##NAME, T, STORED, LOAD, STORE, uint32_t, flag = !((v <= a) | (v >= b))) \
    TO_BITS(not_inside_##NAME, T, STORED, LOAD, STORE, uint32_t,                        \
            flag = !((v >= near_a) & (v <= near_b)))                                    \
    FROM_BITS(CLONES, scale_##NAME, T, STORED, LOAD, STORE, uint32_t, STORE(v * (flag ? a : b))) \
    FROM_BITS(CLONES, part_##NAME, T, STORED, LOAD, STORE, uint32_t, STORE(flag ? v * a : 0))
/* Of the channel of an element, which has b places in a row, there is one bit. */
#define SCALE_CHANNELS(NAME, T, STORED, LOAD, STORE, CLONES)                            \
    CLONES void scale_channels_##NAME(const void *work, size start, size end, size thread) { \
        ARRAYS(T, STORED, LOAD, STORE);                                                 \
        const size places = (size)arrays->b;                                            \
        for (size i = start; i < end;) {                                                \
            const size channel = i / places, stop = at_most((channel + 1) * places, end); \
            const T factor = bits[channel / 8] >> channel % 8 & 1 ? a : 0;              \
            EACH for (size k = i; k < stop; k++) y[k] = STORE(LOAD(x[k]) * factor);     \
            i = stop;                                                                   \
        }                                                                               \
    }
SCALE_CHANNELS(float, float, float, , , LOOP)
SCALE_CHANNELS(double, double, double, , , LOOP)
SCALE_CHANNELS(bfloat16, float, uint16_t, of_bfloat16, back_to_bfloat16, WIDE_LOOP)

OF_FLOATS(float, float, float, , , , LOOP)
OF_FLOATS(double, double, double, , , , LOOP)
OF_FLOATS(bfloat16, float, uint16_t, of_bfloat16, back_to_bfloat16, as_bfloat16, WIDE_LOOP)

/* (relu has 0 for a. Where subnormals are to be 0, it is subtraction that makes them so, as torch's maximum does.) */
#define RELU(T) TO_BITS(relu_##T, T, T, , , uint32_t, flag = !(v <= 0); y[j] = (v < 0 ? 0 : v) - a)
RELU(float)
RELU(double)

/* (Of 16 bits, torch's output does not round the numbers, but its gradient does.) */
#define SOFTSHRINK(NAME, T, STORED, LOAD, STORE, LOW, HIGH)                             \
    TO_BITS(softshrink_##NAME, T, STORED, LOAD, STORE, uint32_t, const T w = v < a ? v - a : v - b; \
            flag = !((v >= LOW) & (v <= HIGH)); y[j] = (v >= a) & (v <= b) ? 0 : STORE(w))
SOFTSHRINK(float, float, float, , , a, b)
SOFTSHRINK(double, double, double, , , a, b)
SOFTSHRINK(bfloat16, float, uint16_t, of_bfloat16, back_to_bfloat16, near_a, near_b)
SOFTSHRINK(short_float, float, float, , , near_float16(a), near_float16(b))

/* bfloat16 and float16 as integers. */
#define RELU_OF_HALF(NAME, INFINITE)                                                    \
    TO_BITS(NAME, int16_t, int16_t, , , uint16_t, const int16_t magnitude = v & 0x7fff; \
            flag = (magnitude > INFINITE) | (v > 0);                                    \
            y[j] = ((v < 0) & (magnitude <= INFINITE) & (magnitude != 0)) ? 0 : v)
RELU_OF_HALF(relu_bfloat16, 0x7f80)
RELU_OF_HALF(relu_float16, 0x7c00)

/* Up to eight booleans, bytes of 0 or 1, come together in the highest byte. */
static inline uint8_t byte_of(const uint8_t *booleans, size count) {
    uint64_t eight = 0;
    memcpy(&eight, booleans, (size_t)count);
    return (uint8_t)(eight * 0x0102040810204080 >> 56);
}

/* (Not a LOOP, as vectors multiply such integers slowly.) */
static void nonzero(const void *work, size start, size end, size thread) {
    ARRAYS(uint8_t, uint8_t, , );
    size i = start;
    for (; end - i >= 8; i += 8) bits[i / 8] = byte_of(x + i, 8);
    if (i < end) bits[i / 8] = byte_of(x + i, end - i);
}

FROM_BITS(LOOP, select_int8_t, int8_t, int8_t, , , uint8_t, flag ? v : 0)
FROM_BITS(LOOP, select_int16_t, int16_t, int16_t, , , uint16_t, flag ? v : 0)
FROM_BITS(LOOP, select_int32_t, int32_t, int32_t, , , uint32_t, flag ? v : 0)
FROM_BITS(LOOP, select_int64_t, int64_t, int64_t, , , uint32_t, flag ? v : 0)
