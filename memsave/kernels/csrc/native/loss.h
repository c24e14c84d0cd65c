/* Gradients of cross-entropy. */

#pragma once

#include "exponential.h"
#include "float16.h"

static inline float largest_float(const float *x, size count) {
    float largest = -INFINITY;
    LARGEST_OF(largest) for (size i = 0; i < count; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* As integers, once what is negative counts downwards. (nan may be the largest.) */
static inline int16_t rank_of(uint16_t half) { return (int16_t)half < 0 ? (int16_t)(half ^ 0x7fff) : (int16_t)half; }

static inline uint16_t largest_half(const uint16_t *x, size count) {
    int16_t largest = INT16_MIN;
    LARGEST_OF(largest) for (size i = 0; i < count; i++) largest = rank_of(x[i]) > largest ? rank_of(x[i]) : largest;
    return (uint16_t)rank_of((uint16_t)largest);
}

static inline float largest_bfloat16(const uint16_t *x, size count) { return of_bfloat16(largest_half(x, count)); }

static inline float largest_float16(const uint16_t *x, size count) { return of_float16(largest_half(x, count)); }

/* What each of some classes is wanted to be, times its weight: its probability (but for a row's class, which
   comes on top), and as much of what is smoothed as any other. (A loop that asks for what may be missing is not
   one of vectors.) */
#define WISHED(LOAD, q, w, COUNT)                                                       \
    if ((q) && (w)) EACH for (size k = 0; k < COUNT; k++) wished[k] = (rest * LOAD((q)[k]) + each) * LOAD((w)[k]); \
    else if (q) EACH for (size k = 0; k < COUNT; k++) wished[k] = rest * LOAD((q)[k]) + each; \
    else if (w) EACH for (size k = 0; k < COUNT; k++) wished[k] = each * LOAD((w)[k]);

/* Of the classes, as options of a loss say. */
#define WISHES(STORED, LOAD)                                                            \
    const size features = rows->features;                                               \
    const STORED *weights = rows->weights, *wishes = rows->probabilities;               \
    const float rest = (float)(1 - rows->smoothing), each = (float)rows->smoothing / features; \
    double of_all = weights ? 0 : features;                                             \
    for (size i = 0; weights && i < features; i++) of_all += LOAD(weights[i]);          \
    of_all *= rows->smoothing / features; /* what is smoothed, in sum */

/* Of a part of a row: its elements as floats; where to put floats aside, and y made of these. (Of 16 bits in a block
   of floats, those of 32 in y itself.) */
INLINE const float *widened_float(const float *x, float *block, size count) { return (void)block, (void)count, x; }

INLINE const float *widened_bfloat16(const uint16_t *x, float *block, size count) {
    EACH for (size k = 0; k < count; k++) block[k] = of_bfloat16(x[k]);
    return block;
}

INLINE const float *widened_float16(const uint16_t *x, float *block, size count) {
    widen(x, block, count);
    return block;
}

INLINE float *aside_float(float *y, float *block) { return (void)block, y; }
INLINE float *aside_bfloat16(uint16_t *y, float *block) { return (void)y, block; }
INLINE float *aside_float16(uint16_t *y, float *block) { return (void)y, block; }

INLINE void narrowed_float(const float *block, float *y, size count) { (void)block, (void)y, (void)count; }

INLINE void narrowed_bfloat16(const float *block, uint16_t *y, size count) {
    EACH for (size k = 0; k < count; k++) y[k] = back_to_bfloat16(block[k]);
}

INLINE void narrowed_float16(const float *block, uint16_t *y, size count) { narrow(block, y, count, 1); }

/* Gradients of cross-entropy. Of 16 bits the exponentials are computed twice where there is no memory to put them
   aside. */
#define SOFTMAX(NAME, STORED, LOAD, STORE, IS_SHORT)                                    \
    WIDE_LOOP void softmax_##NAME(const void *work, size start, size end, size thread) { \
        const Softmax *rows = work;                                                     \
        WISHES(STORED, LOAD)                                                            \
        const STORED *of_each = wishes || each ? weights : NULL; /* else only the row's class has one to count */ \
        float *const aside = rows->aside ? rows->aside + thread * features : NULL;      \
        float wished[BLOCK_OF_ROW], block[BLOCK_OF_ROW];                                \
        for (size k = 0; k < BLOCK_OF_ROW; k++) wished[k] = each;                       \
        for (size row = start; row < end; row++) {                                      \
            const STORED *x = (const STORED *)rows->x + row * features;                 \
            const STORED *q = wishes ? wishes + row * features : NULL;                  \
            STORED *y = (STORED *)rows->y + row * features;                             \
            const float largest = largest_##NAME(x, features), factor = rows->factors[row]; \
            float sum = 0, total = 0, own = 0;                                          \
            for (size first = 0; first < features; first += BLOCK_OF_ROW) {             \
                const size count = at_most(features - first, BLOCK_OF_ROW);             \
                float *here = aside ? aside + first : block, *to = aside_##NAME(y + first, here); \
                const float *from = widened_##NAME(x + first, here, count);             \
                SUMMED(sum) for (size k = 0; k < count; k++) {                          \
                    const float e = exp_of(from[k] - largest, IS_SHORT);                \
                    to[k] = e;                                                          \
                    sum += e;                                                           \
                }                                                                       \
            }                                                                           \
            const size class = q ? -1 : (size)rows->classes[row];                       \
            if (q) {                                                                    \
                if (weights) SUMMED(total) for (size i = 0; i < features; i++) total += LOAD(q[i]) * LOAD(weights[i]); \
                else SUMMED(total) for (size i = 0; i < features; i++) total += LOAD(q[i]); \
                total = rest * total + (float)of_all;                                   \
            } else if (factor != 0 && class >= 0 && class < features) {                 \
                own = rest * (weights ? LOAD(weights[class]) : 1);                      \
                total = weights ? own + (float)of_all : 1;                              \
            }                                                                           \
            const float scale = factor * total / sum;                                   \
            for (size first = 0; first < features; first += BLOCK_OF_ROW) {             \
                const size count = at_most(features - first, BLOCK_OF_ROW);             \
                float *here = aside ? aside + first : block, *to = aside_##NAME(y + first, here); \
                WISHED(LOAD, q ? q + first : NULL, of_each ? of_each + first : NULL, count) \
                if (IS_SHORT && !aside) {                                               \
                    const float *from = widened_##NAME(x + first, here, count);         \
                    EACH for (size k = 0; k < count; k++) to[k] = exp_of(from[k] - largest, IS_SHORT); \
                }                                                                       \
                EACH for (size k = 0; k < count; k++) to[k] = to[k] * scale - factor * wished[k]; \
                narrowed_##NAME(here, y + first, count);                                \
            }                                                                           \
            if (own != 0) {                                                             \
                const float p = exp_of(LOAD(x[class]) - largest, IS_SHORT) * scale;     \
                y[class] = STORE(p - factor * (each * (weights ? LOAD(weights[class]) : 1) + own)); \
            }                                                                           \
        }                                                                               \
    }
SOFTMAX(float, float, , , 0)
SOFTMAX(bfloat16, uint16_t, of_bfloat16, back_to_bfloat16, 1)
SOFTMAX(float16, uint16_t, of_float16, to_float16, 1)

/* The same of images, whose places lie beside each other: several at a time. */
enum { PLACES_AT_ONCE = 128 };
#define SOFTMAX_OF_IMAGES(NAME, STORED, LOAD, STORE, IS_SHORT)                          \
    WIDE_LOOP void image_softmax_##NAME(const void *work, size start, size end, size thread) { \
        const Softmax *rows = work;                                                     \
        WISHES(STORED, LOAD)                                                            \
        const size step = rows->places;                                                 \
        float *const aside = rows->aside ? rows->aside + thread * features * PLACES_AT_ONCE : NULL; \
        float block[PLACES_AT_ONCE];                                                    \
        for (size count; start < end; start += count) {                                 \
            const size place = start % step, first = start / step * features * step + place; \
            count = at_most(at_most(PLACES_AT_ONCE, step - place), end - start);        \
            const STORED *x = (const STORED *)rows->x + first, *q = wishes ? wishes + first : NULL; \
            STORED *y = (STORED *)rows->y + first;                                      \
            const float *factors = rows->factors + start;                               \
            float largest[PLACES_AT_ONCE], sum[PLACES_AT_ONCE], total[PLACES_AT_ONCE], own[PLACES_AT_ONCE]; \
            float scale[PLACES_AT_ONCE], wished[PLACES_AT_ONCE];                        \
            for (size k = 0; k < count; k++) {                                          \
                largest[k] = -INFINITY, sum[k] = total[k] = own[k] = 0, wished[k] = each; \
            }                                                                           \
            for (size i = 0; i < features; i++) {                                       \
                float *here = aside ? aside + i * PLACES_AT_ONCE : block;               \
                const float *from = widened_##NAME(x + i * step, here, count);          \
                EACH for (size k = 0; k < count; k++) largest[k] = from[k] > largest[k] ? from[k] : largest[k]; \
            }                                                                           \
            for (size i = 0; i < features; i++) {                                       \
                float *here = aside ? aside + i * PLACES_AT_ONCE : block, *to = aside_##NAME(y + i * step, here); \
                const float *from = aside ? here : widened_##NAME(x + i * step, here, count); \
                EACH for (size k = 0; k < count; k++) {                                 \
                    const float e = exp_of(from[k] - largest[k], IS_SHORT);             \
                    to[k] = e;                                                          \
                    sum[k] += e;                                                        \
                }                                                                       \
            }                                                                           \
            for (size i = 0; q && i < features; i++) {                                  \
                const float weight = weights ? LOAD(weights[i]) : 1;                    \
                EACH for (size k = 0; k < count; k++) total[k] += LOAD(q[i * step + k]) * weight; \
            }                                                                           \
            for (size k = 0; k < count && q; k++) total[k] = rest * total[k] + (float)of_all; \
            for (size k = 0; k < count && !q; k++) {                                    \
                const size class = (size)rows->classes[start + k];                      \
                if (factors[k] == 0 || class < 0 || class >= features) continue;        \
                own[k] = rest * (weights ? LOAD(weights[class]) : 1);                   \
                total[k] = weights ? own[k] + (float)of_all : 1;                        \
            }                                                                           \
            for (size k = 0; k < count; k++) scale[k] = factors[k] * total[k] / sum[k]; \
            for (size i = 0; i < features; i++) {                                       \
                const float weight = weights ? LOAD(weights[i]) : 1;                    \
                const STORED *of_each = NULL;                                           \
                float *here = aside ? aside + i * PLACES_AT_ONCE : block, *to = aside_##NAME(y + i * step, here); \
                WISHED(LOAD, q ? q + i * step : NULL, of_each, count)                   \
                if (IS_SHORT && !aside) {                                               \
                    const float *from = widened_##NAME(x + i * step, here, count);      \
                    EACH for (size k = 0; k < count; k++) to[k] = exp_of(from[k] - largest[k], IS_SHORT); \
                }                                                                       \
                EACH for (size k = 0; k < count; k++)                                   \
                    to[k] = to[k] * scale[k] - factors[k] * wished[k] * weight;         \
                narrowed_##NAME(here, y + i * step, count);                             \
            }                                                                           \
            for (size k = 0; k < count; k++) {                                          \
                if (own[k] == 0) continue;                                              \
                const size class = (size)rows->classes[start + k], at = class * step + k; \
                const float p = exp_of(LOAD(x[at]) - largest[k], IS_SHORT) * scale[k];  \
                y[at] = STORE(p - factors[k] * (each * (weights ? LOAD(weights[class]) : 1) + own[k])); \
            }                                                                           \
        }                                                                               \
    }
SOFTMAX_OF_IMAGES(float, float, , , 0)
SOFTMAX_OF_IMAGES(bfloat16, uint16_t, of_bfloat16, back_to_bfloat16, 1)
SOFTMAX_OF_IMAGES(float16, uint16_t, of_float16, to_float16, 1)
