/* Gradients of cross-entropy. */

#pragma once

#include "exponential.h"

static inline float largest_float(const float *x, size count) {
    float largest = -INFINITY;
    LARGEST_OF(largest) for (size i = 0; i < count; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* As integers, once what is negative counts downwards. (nan may be the largest.) */
static inline int16_t rank_of(uint16_t half) { return (int16_t)half < 0 ? (int16_t)(half ^ 0x7fff) : (int16_t)half; }

static inline float largest_bfloat16(const uint16_t *x, size count) {
    int16_t largest = INT16_MIN;
    LARGEST_OF(largest) for (size i = 0; i < count; i++) largest = rank_of(x[i]) > largest ? rank_of(x[i]) : largest;
    return of_bfloat16((uint16_t)rank_of((uint16_t)largest));
}

/* Gradients of cross-entropy. Of 16 bits the exponentials are computed twice, as they cannot be put aside. */
#define SOFTMAX(NAME, STORED, LOAD, STORE, IS_SHORT)                                    \
    WIDE_LOOP void softmax_##NAME(const void *work, size start, size end, size thread) { \
        const Softmax *rows = work;                                                     \
        const size features = rows->features;                                           \
        const float smoothing = (float)rows->smoothing, rest = (float)(1 - rows->smoothing); \
        (void)thread;                                                                   \
        for (size row = start; row < end; row++) {                                      \
            const STORED *x = (const STORED *)rows->x + row * features;                 \
            STORED *y = (STORED *)rows->y + row * features;                             \
            const float largest = largest_##NAME(x, features);                          \
            float sum = 0;                                                              \
            SUMMED(sum) for (size i = 0; i < features; i++) {                           \
                const float e = exp_of(LOAD(x[i]) - largest, IS_SHORT);                 \
                if (!IS_SHORT) y[i] = STORE(e);                                         \
                sum += e;                                                               \
            }                                                                           \
            const float factor = rows->factors[row], scale = factor / sum, each = factor * smoothing / features; \
            const size class = (size)rows->classes[row];                                \
            EACH for (size i = 0; i < features; i++)                                    \
                y[i] = STORE((IS_SHORT ? exp_of(LOAD(x[i]) - largest, IS_SHORT) : LOAD(y[i])) * scale - each); \
            if (factor != 0 && class >= 0 && class < features)                          \
                y[class] = STORE(exp_of(LOAD(x[class]) - largest, IS_SHORT) * scale - each - factor * rest); \
        }                                                                               \
    }
SOFTMAX(float, float, , , 0)
SOFTMAX(bfloat16, uint16_t, of_bfloat16, back_to_bfloat16, 1)

/* The same of images, whose places lie beside each other: several at a time. */
enum { PLACES_AT_ONCE = 128 };
#define SOFTMAX_OF_IMAGES(NAME, STORED, LOAD, STORE, IS_SHORT)                          \
    WIDE_LOOP void image_softmax_##NAME(const void *work, size start, size end, size thread) { \
        const Softmax *rows = work;                                                     \
        const size features = rows->features, step = rows->places;                      \
        const float each = (float)rows->smoothing / features, rest = (float)(1 - rows->smoothing); \
        (void)thread;                                                                   \
        for (size count; start < end; start += count) {                                 \
            const size place = start % step, first = start / step * features * step + place; \
            count = at_most(at_most(PLACES_AT_ONCE, step - place), end - start);        \
            const STORED *x = (const STORED *)rows->x + first;                          \
            STORED *y = (STORED *)rows->y + first;                                      \
            const float *factors = rows->factors + start;                               \
            float largest[PLACES_AT_ONCE], sum[PLACES_AT_ONCE], scale[PLACES_AT_ONCE];  \
            for (size k = 0; k < count; k++) largest[k] = -INFINITY, sum[k] = 0;        \
            for (size i = 0; i < features * step; i += step)                            \
                EACH for (size k = 0; k < count; k++)                                   \
                    largest[k] = LOAD(x[i + k]) > largest[k] ? LOAD(x[i + k]) : largest[k]; \
            for (size i = 0; i < features * step; i += step)                            \
                EACH for (size k = 0; k < count; k++) {                                 \
                    const float e = exp_of(LOAD(x[i + k]) - largest[k], IS_SHORT);      \
                    if (!IS_SHORT) y[i + k] = STORE(e);                                 \
                    sum[k] += e;                                                        \
                }                                                                       \
            for (size k = 0; k < count; k++) scale[k] = factors[k] / sum[k];            \
            for (size i = 0; i < features * step; i += step)                            \
                EACH for (size k = 0; k < count; k++) {                                 \
                    const float e = IS_SHORT ? exp_of(LOAD(x[i + k]) - largest[k], IS_SHORT) : LOAD(y[i + k]); \
                    y[i + k] = STORE(e * scale[k] - factors[k] * each);                 \
                }                                                                       \
            for (size k = 0; k < count; k++) {                                          \
                const size class = (size)rows->classes[start + k], i = class * step + k; \
                if (factors[k] == 0 || class < 0 || class >= features) continue;        \
                const float p = exp_of(LOAD(x[i]) - largest[k], IS_SHORT) * scale[k];   \
                y[i] = STORE(p - factors[k] * each - factors[k] * rest);                \
            }                                                                           \
        }                                                                               \
    }
SOFTMAX_OF_IMAGES(float, float, , , 0)
SOFTMAX_OF_IMAGES(bfloat16, uint16_t, of_bfloat16, back_to_bfloat16, 1)
