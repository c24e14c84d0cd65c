/* Kernels for the CPU: one pass over memory where torch's operations take several.

   A module of Python's stable ABI that knows of torch what DLPack says of its tensors, and the
   functions that native.py hands over. native.py calls it, and says what each loop computes. Arrays
   are dense and in storage order; eight elements share a byte of bits, the first in the lowest. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "loops.h"
#include "vectors.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Bits are read and written as integers whose first byte is the lowest."
#endif

typedef Py_ssize_t size;

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

/* From x to bits: DO, of the element v = x[j], says `flag`, and may say y[j]. */
#define TO_BITS(NAME, T, STORED, LOAD, STORE, WORD, DO)                                 \
    WIDE_LOOP void NAME(const void *work, size start, size end, size thread) {          \
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
    }
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
    CLONES void NAME(const void *work, size start, size end, size thread) {             \
        ARRAYS(T, STORED, LOAD, STORE);                                                 \
        size i = start;                                                                 \
        WORD word = 0;                                                                  \
        for (; end - i >= BITS(WORD); i += BITS(WORD)) {                                \
            memcpy(&word, bits + i / 8, sizeof(WORD));                                  \
            EACH for (size k = 0; k < BITS(WORD); k++) OF_BIT(T, STORED, LOAD, WORD, VALUE) \
        }                                                                               \
        memcpy(&word, bits + i / 8, (size_t)(end - i + 7) / 8);                         \
        for (size k = 0; k < end - i; k++) OF_BIT(T, STORED, LOAD, WORD, VALUE)         \
    }
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
OF_FLOATS(float, float, float, , , , LOOP)
OF_FLOATS(double, double, double, , , , LOOP)
OF_FLOATS(bfloat16, float, uint16_t, of_bfloat16, back_to_bfloat16, as_bfloat16, WIDE_LOOP)

#define OF_WIDE_FLOATS(T)                                                               \
    TO_BITS(relu_##T, T, T, , , uint32_t, flag = !(v <= 0); y[j] = v < 0 ? 0 : v)       \
    TO_BITS(softshrink_##T, T, T, , , uint32_t, const int within = (v >= a) & (v <= b); \
            const T w = v < a ? v - a : v - b; flag = !within; y[j] = within ? 0 : w)
OF_WIDE_FLOATS(float)
OF_WIDE_FLOATS(double)

/* bfloat16 and float16 as integers. */
#define RELU_OF_HALF(NAME, INFINITE)                                                    \
    TO_BITS(NAME, int16_t, int16_t, , , uint16_t, const int16_t magnitude = v & 0x7fff; \
            flag = (magnitude > INFINITE) | (v > 0);                                    \
            y[j] = (v < 0) & (magnitude <= INFINITE) & (magnitude != 0) ? 0 : v)
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

/* exp(u), and exp(u) - 1: with u = n log(2) + r they are 2^n (exp(r) - 1), and to that 2^n, or 2^n - 1. The
   series of exp(r) - 1 has as many terms as a float can tell, or fewer if that is to be a bfloat16 (is_short).
   Below the normal numbers 2^n is 0. */
typedef struct {
    float power, product;
} Exponential;

static inline Exponential exponential_of(float u, int is_short) {
    u = u < -127 * 0.69314718f ? -127 * 0.69314718f : u; /* (nan stays) */
    const float whole = 12582912, rounded = u * 1.44269504f + whole, n = rounded - whole; /* 1.5 * 2^23 */
    const float r = is_short ? u - n * 0.69314718f : u - n * 0.693359375f + n * 2.12194440e-4f;
    const float terms = is_short ? 0 : r * (1 / 120.f + r * (1 / 720.f + r * (1 / 5040.f)));
    const float exponential = r * (1 + r * (1 / 2.f + r * (1 / 6.f + r * (1 / 24.f + terms))));
    uint32_t bits;
    float power;
    memcpy(&bits, &rounded, 4); /* those of whole, and n */
    bits = (bits - 0x4B400000 + 127) << 23;
    memcpy(&power, &bits, 4);
    return (Exponential){power, power * exponential};
}

static inline float expm1_of(float u, int is_short) {
    const Exponential e = exponential_of(u > 88 ? 88 : u, is_short);
    return e.product + (e.power - 1);
}

/* Of no more than 0. */
static inline float exp_of(float u, int is_short) {
    const Exponential e = exponential_of(u, is_short);
    return e.product + e.power;
}

static inline float tanh_of(float u, int is_short) {
    const float e = expm1_of(2 * u, is_short);
    return e / (e + 2);
}

static inline float square(float u) { return u * u; }

/* g / (1 + exp(x)), in two steps where it may be below the normal numbers. */
static inline float over_exponential(float g, float x, int is_short) {
    const float half = exp_of(fabsf(x) / -2, is_short);
    return (x > 0 ? g * half * half : g) / (1 + square(half));
}

/* Gradients of curves, by what is kept: g * (1 - exp(a * y)); g * tanh(x)^2; g / (1 + exp(x)). */
#define FROM_CURVE(NAME, STORED, LOAD, STORE, SLOPE)                                    \
    WIDE_LOOP void NAME(const void *work, size start, size end, size thread) {          \
        ARRAYS(float, STORED, LOAD, STORE);                                             \
        const STORED *also = arrays->also;                                              \
        (void)bits, (void)b, (void)a;                                                   \
        EACH for (size i = start; i < end; i++) {                                       \
            const float g = LOAD(x[i]), kept = LOAD(also[i]);                           \
            y[i] = STORE(SLOPE);                                                        \
        }                                                                               \
    }
#define OF_CURVES(NAME, STORED, LOAD, STORE, IS_SHORT)                                  \
    FROM_CURVE(rest_##NAME, STORED, LOAD, STORE, g * -expm1_of(a * kept, IS_SHORT))     \
    FROM_CURVE(tanh2_##NAME, STORED, LOAD, STORE, g * square(tanh_of(kept, IS_SHORT)))  \
    FROM_CURVE(logistic_##NAME, STORED, LOAD, STORE, over_exponential(g, kept, IS_SHORT))
OF_CURVES(float, float, , , 0)
OF_CURVES(bfloat16, uint16_t, of_bfloat16, back_to_bfloat16, 1)

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

/* Normalization, backwards: gradients of x, weight and bias, from x or from y. Of rows, or of groups
   of channels that have several places each. */

#define NORM(NAME, T, STORED, LOAD, STORE)                                              \
    WIDE_LOOP void NAME(const void *work, size start, size end, size thread) {          \
        const Norm *norm = work;                                                        \
        const size n = norm->features;                                                  \
        const T *weight = norm->weight, *bias = norm->bias, *mean = norm->mean;         \
        const T *inverse = norm->inverse, *rstd = norm->rstd, shift = (T)norm->shift;   \
        T *dweight = norm->dweight, *dbias = norm->dbias;                               \
        if (dweight) dweight += thread * n;                                             \
        if (dbias) dbias += thread * n;                                                 \
        /* Of parameters alone, the inverse is a factor of the whole sum. */            \
        const int at_last = dweight && dbias && bias && inverse && !norm->dx;           \
        for (size row = start; row < end; row++) {                                      \
            const STORED *g = (const STORED *)norm->g + row * n;                        \
            const STORED *kept = (const STORED *)norm->kept + row * n;                  \
            const T center = mean ? mean[row] : 0, scale = rstd ? rstd[row] : 1;        \
            T normalized[BLOCK_OF_ROW], along = 0, total = 0;                           \
            if (at_last) EACH for (size k = 0; k < n; k++) {                            \
                const T in = LOAD(g[k]);                                                \
                dweight[k] += in * (LOAD(kept[k]) - bias[k]);                           \
                dbias[k] += in;                                                         \
            } else for (size first = 0; first < n; first += BLOCK_OF_ROW) {             \
                const size count = n - first < BLOCK_OF_ROW ? n - first : BLOCK_OF_ROW; \
                NORMALIZE(T, LOAD)                                                      \
                if (dweight && dbias && norm->dx) {                                     \
                    SUMMED(along, total) for (size k = 0; k < count; k++) {             \
                        const T in = LOAD(g[first + k]), both = in * normalized[k];     \
                        const T factor = weight ? weight[first + k] + shift : 1;        \
                        dweight[first + k] += both;                                     \
                        dbias[first + k] += in;                                         \
                        along += both * factor;                                         \
                        total += in * factor;                                           \
                    }                                                                   \
                    continue;                                                           \
                }                                                                       \
                if (dweight && dbias) EACH for (size k = 0; k < count; k++) {           \
                    const T in = LOAD(g[first + k]);                                    \
                    dweight[first + k] += in * normalized[k];                           \
                    dbias[first + k] += in;                                             \
                } else if (dweight) EACH for (size k = 0; k < count; k++)               \
                    dweight[first + k] += LOAD(g[first + k]) * normalized[k];           \
                else if (dbias) EACH for (size k = 0; k < count; k++)                   \
                    dbias[first + k] += LOAD(g[first + k]);                             \
                if (!norm->dx) continue;                                                \
                SUMMED(along, total) for (size k = 0; k < count; k++) {                 \
                    const T in = LOAD(g[first + k]);                                    \
                    const T gw = weight ? in * (weight[first + k] + shift) : in;        \
                    along += gw * normalized[k];                                        \
                    total += gw;                                                        \
                }                                                                       \
            }                                                                           \
            if (!norm->dx) continue;                                                    \
            STORED *dx = (STORED *)norm->dx + row * n;                                  \
            along /= n;                                                                 \
            total = norm->centered ? total / n : 0;                                     \
            for (size first = 0; first < n; first += BLOCK_OF_ROW) {                    \
                const size count = n - first < BLOCK_OF_ROW ? n - first : BLOCK_OF_ROW; \
                if (n > BLOCK_OF_ROW) NORMALIZE(T, LOAD)                                \
                EACH for (size k = 0; k < count; k++) {                                 \
                    const T in = LOAD(g[first + k]);                                    \
                    const T gw = weight ? in * (weight[first + k] + shift) : in;        \
                    dx[first + k] = STORE((gw - normalized[k] * along - total) * scale); \
                }                                                                       \
            }                                                                           \
        }                                                                               \
        if (at_last) EACH for (size k = 0; k < n; k++) dweight[k] *= inverse[k];        \
    }
#define NORMALIZE(T, LOAD)                                                              \
    {                                                                                   \
        if (!norm->from_y)                                                              \
            EACH for (size k = 0; k < count; k++)                                       \
                normalized[k] = (LOAD(kept[first + k]) - center) * scale;               \
        else if (bias && inverse)                                                       \
            EACH for (size k = 0; k < count; k++)                                       \
                normalized[k] = (LOAD(kept[first + k]) - bias[first + k]) * inverse[first + k]; \
        else                                                                            \
            EACH for (size k = 0; k < count; k++) {                                     \
                const T shifted = LOAD(kept[first + k]) - (bias ? bias[first + k] : 0); \
                normalized[k] = shifted * (inverse ? inverse[first + k] : 1);           \
            }                                                                           \
    }
enum { BLOCK_OF_ROW = 2048 };
NORM(norm_float, float, float, , )
NORM(norm_double, double, double, , )
NORM(norm_bfloat16, float, uint16_t, of_bfloat16, to_bfloat16) /* parameters and statistics: float */

#define GROUP_NORM(NAME, T)                                                             \
    WIDE_LOOP void NAME(const void *work, size start, size end, size thread) {          \
        const Norm *norm = work;                                                        \
        const size channels = norm->features, places = norm->places, n = channels * places; \
        const T *weight = norm->weight, *bias = norm->bias, *mean = norm->mean, *rstd = norm->rstd; \
        T *dweight = norm->dweight, *dbias = norm->dbias;                               \
        if (dweight) dweight += thread * norm->groups * channels;                       \
        if (dbias) dbias += thread * norm->groups * channels;                           \
        for (size row = start; row < end; row++) {                                      \
            const T *g = (const T *)norm->g + row * n, *kept = (const T *)norm->kept + row * n; \
            T *dx = norm->dx ? (T *)norm->dx + row * n : NULL, along = 0, total = 0;    \
            const size first = row % norm->groups * channels;                           \
            for (size c = 0; c < channels; c++, g += places, kept += places) {          \
                NORMALIZED(T)                                                           \
                T of_weight = 0, of_bias = 0;                                           \
                SUMMED(of_weight, of_bias) for (size k = 0; k < places; k++) {          \
                    of_weight += g[k] * ((kept[k] - center) * scale);                   \
                    of_bias += g[k];                                                    \
                }                                                                       \
                if (dweight) dweight[first + c] += of_weight;                           \
                if (dbias) dbias[first + c] += of_bias;                                 \
                along += of_weight * factor, total += of_bias * factor;                 \
            }                                                                           \
            if (!dx) continue;                                                          \
            g -= n, kept -= n, along /= n, total /= n;                                  \
            for (size c = 0; c < channels; c++, g += places, kept += places, dx += places) { \
                NORMALIZED(T)                                                           \
                EACH for (size k = 0; k < places; k++)                                  \
                    dx[k] = (g[k] * factor - (kept[k] - center) * scale * along - total) * rstd[row]; \
            }                                                                           \
        }                                                                               \
    }
#define NORMALIZED(T)                                                                   \
    const T factor = weight ? weight[first + c] : 1;                                    \
    const T center = !norm->from_y ? mean[row] : bias ? bias[first + c] : 0;            \
    const T scale = norm->from_y ? 1 / factor : rstd[row];
GROUP_NORM(group_norm_float, float)
GROUP_NORM(group_norm_double, double)

/* Batch normalization of several places per channel, forwards. Sums are those of torch, in its order,
   so that y is the same; but of some channels at once, as each addition waits for the one before. */

typedef struct {
    const void *x, *weight, *bias; /* or NULL, the last two */
    void *y, *mean, *squares, *running_mean, *running_var; /* or NULL, the last two */
    size batch, channels, places;
    double momentum, eps;
} BatchNorm;

/* Of TERM, an expression of `value`, that is VALUE, of the element v of lane l. */
#define SUM_OF_CHANNELS(T, VALUE, TERM)                                                 \
    for (size l = 0; l < LANES; l++) sum[l] = 0;                                        \
    for (size n = 0; n < norm->batch; n++)                                              \
        for (size i = 0; i < places; i += BLOCK_OF_PLACES) {                            \
            double block[LANES][BLOCK_OF_PLACES];                                       \
            const size count = at_most(places - i, BLOCK_OF_PLACES);                    \
            for (size l = 0; l < LANES; l++) {                                          \
                const T *x = (const T *)norm->x + (n * channels + channel[l]) * places + i; \
                EACH for (size k = 0; k < count; k++) {                                 \
                    const T v = x[k];                                                   \
                    block[l][k] = VALUE;                                                \
                }                                                                       \
            }                                                                           \
            for (size k = 0; k < count; k++)                                            \
                for (size l = 0; l < LANES; l++) {                                      \
                    const double value = block[l][k];                                   \
                    sum[l] += TERM;                                                     \
                }                                                                       \
        }

/* Of LANES channels at a time, of which the last ones may be the same. A SQUARE is that of the value,
   or taken where it is added: of as many bits as torch does. */
#define BATCH_NORM(T, SQUARE, ADDED)                                                    \
    LOOP void batch_norm_##T(const void *work, size start, size end, size thread) {     \
        const BatchNorm *norm = work;                                                   \
        const size channels = norm->channels, places = norm->places;                    \
        const T *weight = norm->weight, *bias = norm->bias, total = (T)(norm->batch * places); \
        (void)thread;                                                                   \
        for (size first = start * LANES; first < at_most(end * LANES, channels); first += LANES) { \
            const size lanes = at_most(channels - first, LANES);                        \
            size channel[LANES];                                                        \
            double sum[LANES];                                                          \
            T center[LANES];                                                            \
            for (size l = 0; l < LANES; l++) channel[l] = first + at_most(l, lanes - 1); \
            SUM_OF_CHANNELS(T, v, value)                                                \
            for (size l = 0; l < LANES; l++)                                            \
                center[l] = (T)(sum[l] / (double)(norm->batch * places));               \
            SUM_OF_CHANNELS(T, SQUARE(v - center[l]), ADDED(value))                     \
            for (size l = 0; l < lanes; l++) {                                          \
                const size c = channel[l];                                              \
                const T squares = (T)sum[l];                                            \
                ((T *)norm->mean)[c] = center[l], ((T *)norm->squares)[c] = squares;    \
                const T slope = RSTD(T, squares / total) * (weight ? weight[c] : 1);    \
                const T shift = (bias ? bias[c] : 0) - center[l] * slope;               \
                for (size n = 0; n < norm->batch; n++) {                                \
                    const T *x = (const T *)norm->x + (n * channels + c) * places;      \
                    T *y = (T *)norm->y + (n * channels + c) * places;                  \
                    EACH for (size k = 0; k < places; k++) y[k] = x[k] * slope + shift; \
                }                                                                       \
            }                                                                           \
        }                                                                               \
    }                                                                                   \
    /* Not for the instruction sets that round once what torch rounds twice here. */    \
    static void end_batch_norm_##T(const BatchNorm *norm) {                             \
        const size total = norm->batch * norm->places;                                  \
        const T new = (T)norm->momentum, old = 1 - new;                                 \
        T *mean = norm->running_mean, *var = norm->running_var, *squares = norm->squares; \
        for (size c = 0; c < norm->channels; c++) {                                     \
            const double unbiased = squares[c] / (T)(total - 1);                        \
            if (mean) mean[c] = new * ((T *)norm->mean)[c] + old * mean[c];             \
            if (var) var[c] = (T)(new * unbiased + old * var[c]);                       \
            squares[c] = RSTD(T, squares[c] / (T)total);                                \
        }                                                                               \
    }
#define RSTD(T, VAR) ((VAR) != 0 || norm->eps != 0 ? (T)(1 / sqrt((double)(VAR) + norm->eps)) : 0)
#define SQUARE_OF(VALUE) (VALUE) * (VALUE)
#define SAME(VALUE) (VALUE)
enum { LANES = 4, BLOCK_OF_PLACES = 128 };
BATCH_NORM(float, SQUARE_OF, SAME)
BATCH_NORM(double, SAME, SQUARE_OF)

typedef struct {
    const void *g, *x, *mean, *rstd, *weight; /* or NULL, the last */
    void *dx, *dweight, *dbias;               /* or NULL */
    size batch, channels, places;
} BatchNormBackward;

/* Backwards, of one channel after the other. */
#define BATCH_NORM_BACKWARD(T)                                                          \
    LOOP void batch_norm_backward_##T(const void *work, size start, size end, size thread) { \
        const BatchNormBackward *norm = work;                                           \
        const size places = norm->places, step = norm->channels * places;               \
        const T *weight = norm->weight, total = (T)(norm->batch * places);              \
        T *dweight = norm->dweight, *dbias = norm->dbias;                               \
        (void)thread;                                                                   \
        for (size c = start; c < end; c++) {                                            \
            const T *g = (const T *)norm->g + c * places, *x = (const T *)norm->x + c * places; \
            T *dx = norm->dx ? (T *)norm->dx + c * places : NULL;                       \
            const T mean = ((const T *)norm->mean)[c], rstd = ((const T *)norm->rstd)[c]; \
            double along = 0, sum = 0;                                                  \
            for (size n = 0; n < norm->batch; n++) {                                    \
                T with_x = 0, alone = 0;                                                \
                SUMMED(with_x, alone) for (size k = n * step; k < n * step + places; k++) { \
                    with_x += (x[k] - mean) * g[k];                                     \
                    alone += g[k];                                                      \
                }                                                                       \
                along += with_x, sum += alone;                                          \
            }                                                                           \
            if (dweight) dweight[c] = (T)(along * rstd);                                \
            if (dbias) dbias[c] = (T)sum;                                               \
            if (!dx) continue;                                                          \
            const T slope = (T)along * rstd * rstd / total, shift = (T)sum / total;     \
            const T scale = rstd * (weight ? weight[c] : 1);                            \
            for (size n = 0; n < norm->batch; n++)                                      \
                EACH for (size k = n * step; k < n * step + places; k++)                \
                    dx[k] = (g[k] - shift - (x[k] - mean) * slope) * scale;             \
        }                                                                               \
    }
BATCH_NORM_BACKWARD(float)
BATCH_NORM_BACKWARD(double)

/* Max pooling over three spatial axes, where those that are missing have size 1. Several `channels`
   lie beside each other where they are stored last. An offset is an index in the window. */

enum { BLOCK_OF_POOL = 256, FEW_OUTPUTS = 16, MANY_LINES = 32, LONG = 3 /* as simpler steps */ };

typedef struct {
    const void *x; /* or the gradient of y */
    void *y;       /* or the gradient of x */
    uint8_t *offsets;
    size channels;
    Window window;
    size moves[LARGEST_WINDOW]; /* backwards: from the start of a window to each of its places */
} Pool;

/* How many steps from `start` to the first place that is not before `place`. */
static inline size steps(size start, size place, size step) {
    if (start >= place) return 0;
    return step == 1 ? place - start : (place - start + step - 1) / step; /* (which takes long) */
}

/* Elements are taken together that lie beside each other: outputs of a row, or channels of one. */
#define BETTER(T, LOAD, STEP)                                                           \
    EACH for (size k = from; k < to; k++) {                                             \
        const T v = LOAD(x[k * (STEP)]);                                                \
        const int better = (v > best[k]) | (v != v);                                    \
        best[k] = better ? v : best[k];                                                 \
        which[k] = better ? offset : which[k];                                          \
    }

/* Of one window, from at0, at1 and at2 on. */
#define ONE_MAXIMUM(T, STORED, LOAD, STORE, AT1, AT2, OUTPUT)                           \
    {                                                                                   \
        const size from1 = AT1, from2 = AT2, skip1 = steps(from1, 0, dilation[1]);      \
        const size skip2 = steps(from2, 0, dilation[2]);                                \
        const size end0 = at_most(steps(at0, in[0], dilation[0]), kernel[0]);           \
        const size end1 = at_most(steps(from1, in[1], dilation[1]), kernel[1]);         \
        const size end2 = at_most(steps(from2, in[2], dilation[2]), kernel[2]);         \
        T best = (T)-INFINITY;                                                          \
        size which = (skip0 * kernel[1] + skip1) * kernel[2] + skip2;                   \
        if (!which && (end0 == kernel[0]) & (end1 == kernel[1]) & (end2 == kernel[2])) { \
            const STORED *x = plane + (at0 * in[1] + from1) * in[2] + from2;            \
            for (size k = 0; k < kernel[0] * kernel[1] * kernel[2]; k++) {              \
                const T v = LOAD(x[pool->moves[k]]);                                    \
                if (v > best || v != v) best = v, which = k;                            \
            }                                                                           \
        } else                                                                          \
        for (size k0 = skip0; k0 < end0; k0++)                                          \
            for (size k1 = skip1; k1 < end1; k1++) {                                    \
                const STORED *x = plane + ((at0 + k0 * dilation[0]) * in[1] + from1 + k1 * dilation[1]) * in[2]; \
                const size offset = (k0 * kernel[1] + k1) * kernel[2];                  \
                for (size k2 = skip2; k2 < end2; k2++) {                                \
                    const T v = LOAD(x[from2 + k2 * dilation[2]]);                      \
                    if (v > best || v != v) best = v, which = offset + k2;              \
                }                                                                       \
            }                                                                           \
        y[OUTPUT] = STORE(best);                                                        \
        offsets[OUTPUT] = (uint8_t)which;                                               \
    }

/* Forwards, for some rows of outputs: short ones several at a time, or, where there are few of them,
   one output after the other. Lines of large windows lie apart: those of the next rows are fetched
   ahead. */
#define MAX_POOL(NAME, T, STORED, LOAD, STORE)                                          \
    LOOP void NAME(const void *work, size start, size end, size thread) {               \
        const Pool *pool = work;                                                        \
        const Window *window = &pool->window;                                           \
        const size *in = window->in, *out = window->out, *kernel = window->kernel;      \
        const size *stride = window->stride, *dilation = window->dilation;              \
        const size channels = pool->channels;                                           \
        const int last = channels > 1, are_apart = kernel[0] * kernel[1] >= MANY_LINES; \
        const size step = last ? 1 : stride[2], lane = last ? channels : out[2];        \
        size first_output[LARGEST_WINDOW], end_of_outputs[LARGEST_WINDOW];              \
        for (size k = 0; k < kernel[2]; k++) {                                          \
            const size at = k * dilation[2] - window->padding[2];                       \
            first_output[k] = steps(at, 0, stride[2]);                                  \
            end_of_outputs[k] = steps(at, in[2], stride[2]);                            \
        }                                                                               \
        (void)thread;                                                                   \
        for (size row = start, rows; row < end; row += rows) {                          \
            const size at0 = row / out[1] % out[0] * stride[0] - window->padding[0];    \
            const size at1 = row % out[1] * stride[1] - window->padding[1];             \
            const size skip0 = steps(at0, 0, dilation[0]);                              \
            const STORED *plane = (const STORED *)pool->x +                             \
                             row / (out[0] * out[1]) * in[0] * in[1] * in[2] * channels; \
            STORED *y = (STORED *)pool->y + row * out[2] * channels;                    \
            uint8_t *offsets = pool->offsets + row * out[2] * channels;                 \
            rows = last || 2 * lane > BLOCK_OF_POOL ? 1 : BLOCK_OF_POOL / lane;         \
            rows = at_most(rows, at_most(out[1] - row % out[1], end - row));            \
            if (!last && rows * lane < FEW_OUTPUTS) {                                   \
                for (size r = 0; r < rows; r++)                                         \
                    for (size k = 0; k < lane; k++)                                     \
                        ONE_MAXIMUM(T, STORED, LOAD, STORE, at1 + r * stride[1], k * step - window->padding[2], r * lane + k) \
                continue;                                                               \
            }                                                                           \
            if (are_apart && rows > 1 && row + rows < end) {                            \
                const size from = row + rows, to0 = from / out[1] % out[0] * stride[0]; \
                const STORED *next = (const STORED *)pool->x + from / (out[0] * out[1]) * in[0] * in[1] * in[2]; \
                const size length = at_most(rows * stride[1], in[1]) * in[2];           \
                for (size k0 = 0; k0 < at_most(kernel[0], in[0] - to0); k0++)           \
                    for (size k = 0; k < length; k += 64 / (size)sizeof(STORED))        \
                        PREFETCH(next + (to0 + k0) * in[1] * in[2] + k);                \
            }                                                                           \
            for (size done = 0, count; done < out[2] * channels; done += count) {       \
                const size begin = done % lane, output = last ? done / lane : begin;    \
                const size at2 = output * stride[2] - window->padding[2];               \
                T best[BLOCK_OF_POOL];                                                  \
                int32_t which[BLOCK_OF_POOL];                                           \
                count = at_most(BLOCK_OF_POOL, lane - begin);                           \
                for (size r = 0; r < rows; r++) {                                       \
                    const size skip1 = steps(at1 + r * stride[1], 0, dilation[1]);      \
                    for (size k = 0; k < count; k++) {                                  \
                        const size skip2 = steps(last ? at2 : at2 + k * step, 0, dilation[2]); \
                        best[r * count + k] = (T)-INFINITY;                             \
                        which[r * count + k] =                                          \
                            (int32_t)((skip0 * kernel[1] + skip1) * kernel[2] + skip2); \
                    }                                                                   \
                }                                                                       \
                for (size k0 = skip0; k0 < kernel[0] && at0 + k0 * dilation[0] < in[0]; k0++) \
                    for (size k1 = 0; k1 < kernel[1]; k1++) {                           \
                        const size line1 = at1 + k1 * dilation[1];                      \
                        const size first_row = steps(line1, 0, stride[1]);              \
                        const size end_of_rows = at_most(steps(line1, in[1], stride[1]), rows); \
                        for (size k2 = 0; k2 < kernel[2]; k2++) {                       \
                            const int32_t offset = (int32_t)((k0 * kernel[1] + k1) * kernel[2] + k2); \
                            size from = first_output[k2] - output, to = end_of_outputs[k2] - output; \
                            if (last) {                                                 \
                                if (from > 0 || to <= 0) continue;                      \
                                from = 0, to = count;                                   \
                            }                                                           \
                            from = from < 0 ? 0 : from, to = at_most(to, count);        \
                            const size line0 = (at0 + k0 * dilation[0]) * in[1] + line1; \
                            const STORED *x = plane + (line0 * in[2] + at2 + k2 * dilation[2]) * channels + \
                                         (last ? begin : 0);                            \
                            if (rows == 1) {                                            \
                                if (first_row >= end_of_rows) continue;                 \
                                if (step == 1) BETTER(T, LOAD, 1)                       \
                                else if (step == 2) BETTER(T, LOAD, 2)                  \
                                else BETTER(T, LOAD, step)                              \
                                continue;                                               \
                            }                                                           \
                            STORED gathered[BLOCK_OF_POOL];                             \
                            for (size k = 0; k < rows * count; k++) gathered[k] = STORE((T)-INFINITY); \
                            for (size r = first_row; r < end_of_rows; r++)              \
                                for (size k = from; k < to; k++)                        \
                                    gathered[r * count + k] = x[r * stride[1] * in[2] + k * step]; \
                            x = gathered, from = 0, to = rows * count;                  \
                            BETTER(T, LOAD, 1)                                          \
                        }                                                               \
                    }                                                                   \
                for (size k = 0; k < rows * count; k++) y[done + k] = STORE(best[k]);   \
                for (size k = 0; k < rows * count; k++) offsets[done + k] = (uint8_t)which[k]; \
            }                                                                           \
        }                                                                               \
    }

/* Adaptive max pooling, for some rows of outputs. Windows of an axis begin where torch rounds k * in / out
   down, and end where it rounds (k + 1) * in / out up. As there, the last nan is the maximum, if any is. */
#define ADAPTIVE_MAX_POOL(NAME, T)                                                      \
    LOOP void NAME(const void *work, size start, size end, size thread) {               \
        const Adaptive *adaptive = work;                                                \
        const size *in = adaptive->in, *out = adaptive->out;                            \
        (void)thread;                                                                   \
        for (size row = start; row < end; row++) {                                      \
            const size o1 = row % out[1], o0 = row / out[1] % out[0], plane = row / (out[0] * out[1]); \
            const size from0 = o0 * in[0] / out[0], from1 = o1 * in[1] / out[1];        \
            const size to0 = ((o0 + 1) * in[0] + out[0] - 1) / out[0];                  \
            const size to1 = ((o1 + 1) * in[1] + out[1] - 1) / out[1];                  \
            const T *x = (const T *)adaptive->x + plane * in[0] * in[1] * in[2];        \
            for (size o2 = 0; o2 < out[2]; o2++) {                                      \
                const size from2 = o2 * in[2] / out[2];                                 \
                const size to2 = ((o2 + 1) * in[2] + out[2] - 1) / out[2];              \
                T best = (T)-INFINITY;                                                  \
                size which = (from0 * in[1] + from1) * in[2] + from2;                   \
                for (size at0 = from0; at0 < to0; at0++)                                \
                    for (size at1 = from1; at1 < to1; at1++) {                          \
                        const size line = (at0 * in[1] + at1) * in[2];                  \
                        T most = (T)-INFINITY;                                          \
                        int nans = 0;                                                   \
                        LARGEST(most, nans) for (size k = line + from2; k < line + to2; k++) { \
                            most = x[k] > most ? x[k] : most;                           \
                            nans |= x[k] != x[k];                                       \
                        }                                                               \
                        if (nans) {                                                     \
                            for (which = line + to2 - 1; x[which] == x[which];) which--; \
                            best = x[which];                                            \
                        } else if (most > best) {                                       \
                            for (which = line + from2; x[which] != most;) which++;      \
                            best = x[which]; /* of zeros, the first */                  \
                        }                                                               \
                    }                                                                   \
                ((T *)adaptive->y)[row * out[2] + o2] = best;                           \
                adaptive->places[row * out[2] + o2] = which;                            \
            }                                                                           \
        }                                                                               \
    }
ADAPTIVE_MAX_POOL(adaptive_max_pool_float, float)
ADAPTIVE_MAX_POOL(adaptive_max_pool_double, double)

/* Backwards, for some planes of x. Windows that overlap add up, in the order of the outputs. */
#define UNPOOL(NAME, STORED, LOAD, STORE)                                               \
    LOOP void NAME(const void *work, size start, size end, size thread) {               \
        const Pool *pool = work;                                                        \
        const Window *window = &pool->window;                                           \
        const size *in = window->in, *out = window->out, channels = pool->channels;     \
        const size places = in[0] * in[1] * in[2];                                      \
        size done = start * out[0] * out[1] * out[2] * channels;                        \
        const STORED *g = pool->x;                                                      \
        (void)thread;                                                                   \
        for (size plane = start; plane < end; plane++) {                                \
            STORED *dx = (STORED *)pool->y + plane * places * channels;                 \
            memset(dx, 0, places * channels * sizeof(STORED));                          \
            for (size o0 = 0; o0 < out[0]; o0++)                                        \
                for (size o1 = 0; o1 < out[1]; o1++) {                                  \
                    const size at0 = o0 * window->stride[0] - window->padding[0];       \
                    const size at1 = o1 * window->stride[1] - window->padding[1];       \
                    size at = (at0 * in[1] + at1) * in[2] - window->padding[2];         \
                    for (size o2 = 0; o2 < out[2]; o2++, at += window->stride[2])       \
                        for (size c = 0; c < channels; c++, done++) {                   \
                            const size place = at + pool->moves[pool->offsets[done]];   \
                            if ((size_t)place < (size_t)places) /* not so for another's offsets */ \
                                dx[place * channels + c] = STORE(LOAD(dx[place * channels + c]) + LOAD(g[done])); \
                        }                                                               \
                }                                                                       \
        }                                                                               \
    }

MAX_POOL(max_pool_float, float, float, , )
MAX_POOL(max_pool_double, double, double, , )
MAX_POOL(max_pool_bfloat16, float, uint16_t, of_bfloat16, to_bfloat16)
UNPOOL(unpool_float, float, , )
UNPOOL(unpool_double, double, , )
UNPOOL(unpool_bfloat16, uint16_t, of_bfloat16, to_bfloat16)

/* Threads are those of the OpenMP runtime that torch has loaded, if it has: others would compete
   with them, which wait for more work actively. A fork has none of its parent's. (Where these were
   started by torch alone, that does not show, and a fork waits for ever, as in torch's operations.) */

#if defined(__GNUC__) && !defined(_WIN32)
#include <pthread.h>
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));
#endif


typedef struct {
    Loop *loop;
    const void *work;
    size count, block; /* A part has whole blocks. */
} Task;

static int has_team, is_fork;

static void in_fork(void) { is_fork = has_team; }

#if defined(__GNUC__) && !defined(_WIN32)
static void part(void *data) {
    const Task *task = data;
    const size threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const size blocks = (task->count + task->block - 1) / task->block;
    const size each = (blocks + threads - 1) / threads * task->block;
    const size start = thread * each, end = start + each;
    if (start < task->count)
        task->loop(task->work, start, end < task->count ? end : task->count, thread);
}
#endif

static void run(Task task, size threads, size elements) {
    if (!task.count) return;
#if defined(__GNUC__) && !defined(_WIN32)
    if (threads > 1 && elements > GRAIN && !is_fork && GOMP_parallel && omp_get_thread_num &&
        omp_get_num_threads) {
        has_team = 1;
        GOMP_parallel(part, &task, (unsigned)threads, 0);
        return;
    }
#endif
    task.loop(task.work, 0, task.count, 0);
}

static void in_threads(Task task, size threads, size elements) {
    Py_BEGIN_ALLOW_THREADS;
    run(task, threads, elements);
    Py_END_ALLOW_THREADS;
}

/* Over bits: whole bytes of them, and vectors. */
static void run_over_bits(Loop *loop, const Arrays *arrays, size elements, size threads) {
    run((Task){loop, arrays, elements, 4096}, threads, elements);
}

/* The module. */

#define NAMED(NAME) {#NAME, NAME}
typedef struct {
    const char *name;
    Loop *loop;
} Named;
static const Named NORMS[] = {
    NAMED(norm_float),       NAMED(norm_double), NAMED(norm_bfloat16),
    NAMED(group_norm_float), NAMED(group_norm_double),
};

/* Loops over elements: for float, double, bfloat16 and float16; or for elements of 1, 2, 4 and 8 bytes. */
#define FLOATS(NAME) {#NAME, 0, {NAME##_float, NAME##_double, NAME##_bfloat16}}
#define CURVES(NAME) {#NAME, 0, {NAME##_float, NULL, NAME##_bfloat16}}
static const struct {
    const char *name;
    int by_size;
    Loop *loops[4];
} OVER_BITS[] = {
    {"select", 1, {select_int8_t, select_int16_t, select_int32_t, select_int64_t}},
    FLOATS(part),
    {"relu", 0, {relu_float, relu_double, relu_bfloat16, relu_float16}},
    FLOATS(leaky_relu), FLOATS(hardtanh), FLOATS(threshold), FLOATS(hardshrink),
    {"softshrink", 0, {softshrink_float, softshrink_double}}, FLOATS(hardsigmoid), FLOATS(above), FLOATS(within), FLOATS(not_outside),
    FLOATS(not_inside), FLOATS(scale),
    {"nonzero", 1, {nonzero}},
    CURVES(rest), CURVES(tanh2), CURVES(logistic),
};
enum { SELECT, PART }; /* of these */
#define COUNT(TABLE) (size)(sizeof TABLE / sizeof *TABLE)

/* Tensors, as DLPack lays them out: https://dmlc.github.io/dlpack/latest/c_api.html. (With cold caches
   each question to torch in Python takes about as long as a small kernel.) */

typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *previous, *others[3];
    int (*look_at)(PyObject *tensor, DLTensor *out);
} DLPackExchangeAPI;

enum { ON_CPU = 1, PINNED = 3, UNSIGNED = 1, FLOAT = 2, BFLOAT = 4, COMPLEX = 5 };

/* What Python hands over, in this order. */
static struct {
    PyObject *tensor, *parameter; /* classes */
    PyObject *is_neg, *empty_result, *empty_bytes, *overwritten, *threads, *modes[2], *functions, *in_order;
} torch;
static DLPackExchangeAPI *dlpack;

static PyObject *connect(PyObject *module, PyObject *args) {
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOOO:connect", &capsule, &torch.tensor, &torch.parameter,
                          &torch.is_neg, &torch.empty_result, &torch.empty_bytes, &torch.overwritten,
                          &torch.threads, &torch.modes[0], &torch.modes[1], &torch.functions,
                          &torch.in_order))
        return NULL;
    Py_INCREF(args); /* for good */
    dlpack = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (dlpack && (dlpack->major != 1 || !dlpack->look_at)) {
        PyErr_SetString(PyExc_ImportError, "another version of DLPack");
        dlpack = NULL;
    }
    if (!dlpack) return NULL;
    Py_RETURN_NONE;
}

/* A number that Python makes; -1 with its error. */
static size number_of(PyObject *function) {
    PyObject *result = PyObject_CallObject(function, NULL);
    if (!result) return -1;
    const size number = PyLong_AsSsize_t(result);
    Py_DECREF(result);
    return number;
}

/* Of torch's, as many as in_threads can use; -1 with an error. */
static size threads_for(size elements) { return elements > GRAIN ? number_of(torch.threads) : 1; }

static int is_dense(const DLTensor *x) {
    size expected = 1, place = x->ndim;
    while (place-- && (x->shape[place] == 1 || x->strides[place] == expected))
        expected *= x->shape[place];
    if (place < 0) return 1;
    /* From the smallest stride on. */
    uint64_t seen = 0;
    expected = 1;
    for (int k = 0; k < x->ndim; k++) {
        int least = -1;
        for (int j = 0; j < x->ndim; j++) {
            if (seen >> j & 1) continue;
            if (x->shape[j] == 0) return 1;
            if (least < 0 || x->strides[j] < x->strides[least] ||
                (x->strides[j] == x->strides[least] && x->shape[j] < x->shape[least]))
                least = j;
        }
        if (x->shape[least] != 1 && x->strides[least] != expected) return 0;
        expected *= x->shape[least];
        seen |= (uint64_t)1 << least;
    }
    return 1;
}

/* Whether it is of a class of torch's own, and an array of real numbers: not of another layout, nor
   of torch.func, for instance. */
static int is_array(PyObject *tensor, DLTensor *x) {
    const PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != torch.tensor && type != torch.parameter) return 0;
    if (dlpack->look_at(tensor, x)) return PyErr_Clear(), 0;
    return x->code != COMPLEX && x->lanes == 1;
}

static int is_here(const DLTensor *x) {
    return x->device_type == ON_CPU || x->device_type == PINNED;
}

/* Whether it lies in memory without gaps; -1 with an error. */
static int look_at(PyObject *tensor, DLTensor *x, size *elements) {
    if (!is_array(tensor, x) || !is_here(x)) return 0;
    *elements = 1;
    for (int k = 0; k < x->ndim; k++) *elements *= x->shape[k];
    if (x->ndim > 64 || !is_dense(x) || (*elements && !x->data)) return 0;
    x->data = (char *)x->data + x->byte_offset;
    PyObject *is_neg = PyObject_CallFunctionObjArgs(torch.is_neg, tensor, NULL);
    if (!is_neg) return -1;
    Py_DECREF(is_neg);
    return is_neg == Py_False;
}

/* Of these, in which loops come; -1 for others. */
static int kind_of(int code, int bits) {
    static const uint8_t KINDS[4][2] = {{FLOAT, 32}, {FLOAT, 64}, {BFLOAT, 16}, {FLOAT, 16}};
    for (int k = 0; k < 4; k++)
        if (code == KINDS[k][0] && bits == KINDS[k][1]) return k;
    return -1;
}

/* Whether no mode has to see operations; -1 with an error. */
static int is_unobserved(void) {
    for (int k = 0; k < 2; k++) {
        size depth = number_of(torch.modes[k]);
        if (k && depth > 0) depth = number_of(torch.functions); /* of which some do not count */
        if (depth) return depth < 0 ? -1 : 0;
    }
    return 1;
}

static void run_norm(const Norm *norm, int is_double, int of_groups, size rows, size threads) {
    Loop *const loops[2][2] = {{norm_float, norm_double}, {group_norm_float, group_norm_double}};
    run((Task){loops[of_groups][is_double], norm, rows, 1}, threads,
        rows * norm->features * norm->places);
}

static void run_softmax(const Softmax *rows, int kind, size count, size threads) {
    Loop *const loops[2][2] = {{softmax_float, softmax_bfloat16}, {image_softmax_float, image_softmax_bfloat16}};
    const int of_images = rows->places > 1;
    run((Task){loops[of_images][kind != OF_FLOAT], rows, count, of_images ? PLACES_AT_ONCE : 1}, threads,
        count * rows->features);
}

static Loop *loop_for(size family, int code, int bits) {
    if (family < 0 || family >= COUNT(OVER_BITS)) return NULL;
    int kind = kind_of(code, bits);
    if (OVER_BITS[family].by_size)
        for (kind = 3; kind >= 0 && bits != 8 << kind;) kind--;
    return kind < 0 ? NULL : OVER_BITS[family].loops[kind];
}

static Loop *loop_of(size family, const DLTensor *x) { return loop_for(family, x->code, x->bits); }

static int is_stored_as(const DLTensor *x, PyObject *stride) {
    if (PyTuple_Size(stride) != x->ndim) return PyErr_Clear(), 0;
    for (int k = 0; k < x->ndim; k++)
        if (PyLong_AsSsize_t(PyTuple_GetItem(stride, k)) != x->strides[k]) return PyErr_Clear(), 0;
    return 1;
}

/* Not what only behaves like one: a symbol, say. (0 where it was left out.) */
static int is_number(PyObject *object, double *number) {
    if (!object) return *number = 0, 1;
    if (!PyFloat_CheckExact(object) && !PyLong_CheckExact(object)) return 0;
    *number = PyFloat_AsDouble(object);
    return *number != -1 || !PyErr_Occurred() || (PyErr_Clear(), 0);
}

/* What there is to do with a tensor: 1 if it can be done here, else 0, or -1 with an error. */
typedef struct {
    Loop *loop;
    Arrays arrays;
    size elements;
} Pass;

static int begin(Pass *pass, size family, PyObject *x, PyObject *stride, PyObject *a, PyObject *b) {
    DLTensor array;
    const int is_plain = look_at(x, &array, &pass->elements);
    if (is_plain <= 0) return is_plain;
    if (!is_number(a, &pass->arrays.a) || !is_number(b, &pass->arrays.b)) return 0;
    pass->loop = loop_of(family, &array);
    const int any_order = !stride || stride == Py_None;
    if (!pass->loop || (!any_order && !is_stored_as(&array, stride))) return 0;
    pass->arrays.x = pass->arrays.y = array.data;
    return is_unobserved();
}

/* A new tensor; its memory is dense. */
static PyObject *tensor_of(PyObject *function, PyObject *of, void **data) {
    DLTensor array;
    PyObject *tensor = PyObject_CallFunctionObjArgs(function, of, NULL);
    if (!tensor || dlpack->look_at(tensor, &array)) return Py_XDECREF(tensor), NULL;
    *data = array.data;
    return tensor;
}

enum { NEW = 0, INPLACE = 1, NONE = -1 };

/* The output: a new tensor, or x, overwritten or not; NULL with an error. */
static PyObject *end(Pass *pass, PyObject *x, int output) {
    const size threads = threads_for(pass->elements);
    if (threads < 0) return NULL;
    PyObject *y = output == NEW ? tensor_of(torch.empty_result, x, &pass->arrays.y) : Py_NewRef(x);
    if (!y) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    run_over_bits(pass->loop, &pass->arrays, pass->elements, threads);
    Py_END_ALLOW_THREADS;
    if (output == INPLACE) {
        PyObject *nothing = PyObject_CallFunctionObjArgs(torch.overwritten, x, NULL);
        if (!nothing) Py_CLEAR(y);
        Py_XDECREF(nothing);
    }
    return y;
}

/* An argument, or NULL where it was left out. */
static PyObject *argument(PyObject *const *args, Py_ssize_t count, Py_ssize_t place) {
    return place < count ? args[place] : NULL;
}

static PyObject *to_bits(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Pass pass;
    if (count < 3 || count > 6)
        return PyErr_SetString(PyExc_TypeError, "to_bits takes 3 to 6 arguments"), NULL;
    PyObject *x = args[1], *inplace = args[2], *y, *bits = NULL, *result;
    const size family = PyLong_AsSsize_t(args[0]);
    const int overwrites = inplace == Py_None ? 0 : PyObject_IsTrue(inplace);
    if ((family == -1 && PyErr_Occurred()) || overwrites < 0) return NULL;
    const int can = begin(&pass, family, x, argument(args, count, 3), argument(args, count, 4),
                          argument(args, count, 5));
    if (can < 0) return NULL;
    if (!can) Py_RETURN_NONE;
    PyObject *size_of_bits = PyLong_FromSsize_t((pass.elements + 7) / 8);
    if (size_of_bits) bits = tensor_of(torch.empty_bytes, size_of_bits, (void **)&pass.arrays.bits);
    Py_XDECREF(size_of_bits);
    if (!bits) return NULL;
    const int output = inplace == Py_None ? NONE : overwrites ? INPLACE : NEW;
    y = end(&pass, x, output);
    result = !y ? NULL : output == NONE ? Py_NewRef(bits) : PyTuple_Pack(2, y, bits);
    Py_XDECREF(y);
    Py_DECREF(bits);
    return result;
}

/* Whether the bits are those of the array, too. */
static int begin_with(PyObject *bits, Pass *pass, size family, PyObject *x, PyObject *stride,
                      PyObject *a, PyObject *b) {
    DLTensor array;
    size bytes;
    int can = begin(pass, family, x, stride, a, b);
    if (can > 0) can = look_at(bits, &array, &bytes);
    if (can <= 0) return can;
    pass->arrays.bits = array.data;
    return array.code == UNSIGNED && array.bits == 8 && bytes == (pass->elements + 7) / 8;
}

static PyObject *from_bits(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Pass pass;
    DLTensor array;
    if (count < 4 || count > 7)
        return PyErr_SetString(PyExc_TypeError, "from_bits takes 4 to 7 arguments"), NULL;
    PyObject *bits = args[2], *like = args[3], *stride = PyTuple_GetItem(like, 1), *y = NULL;
    PyObject *a = argument(args, count, 4), *b = argument(args, count, 5);
    const int inplace = count > 6 ? PyObject_IsTrue(args[6]) : 0;
    size family = PyLong_AsSsize_t(args[0]);
    if (!stride || inplace < 0 || (family == -1 && PyErr_Occurred())) return NULL;
    if (!is_array(args[1], &array)) Py_RETURN_NONE;
    if (family == PART && a == Py_None) a = NULL;
    const int multiplies = family == PART && a && !loop_of(PART, &array);
    if (family == PART && (multiplies || !a)) family = SELECT;

    PyObject *x = Py_NewRef(args[1]);
    int can = begin_with(bits, &pass, family, x, stride, a, b);
    if (!can && !inplace && is_here(&array) && !is_stored_as(&array, stride)) {
        Py_DECREF(x);
        x = PyObject_CallFunctionObjArgs(torch.in_order, args[1], like, NULL);
        can = x ? begin_with(bits, &pass, family, x, stride, a, b) : -1;
    }
    if (can >= 0) y = can ? end(&pass, x, inplace ? INPLACE : NEW) : Py_NewRef(Py_None);
    if (y && can && multiplies) {
        PyObject *product = PyObject_CallMethod(y, "mul_", "O", a);
        Py_DECREF(y);
        y = product;
    }
    Py_XDECREF(x);
    return y;
}

/* Whether all are plain tensors, or None; -1 with an error. */
static int look_at_all(PyObject *const *tensors, DLTensor *arrays, const void **data, size count) {
    size elements;
    for (size k = 0; k < count; k++) {
        arrays[k].data = NULL;
        const int can = tensors[k] == Py_None ? 1 : look_at(tensors[k], &arrays[k], &elements);
        if (can <= 0) return can;
        data[k] = arrays[k].data;
    }
    return is_unobserved();
}

static PyObject *are_arrays(PyObject *module, PyObject *const *tensors, Py_ssize_t count) {
    DLTensor array;
    for (Py_ssize_t k = 0; k < count; k++)
        if (tensors[k] != Py_None && !is_array(tensors[k], &array)) Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

static PyObject *threads(PyObject *module, PyObject *elements) {
    const size count = PyLong_AsSsize_t(elements);
    if (count == -1 && PyErr_Occurred()) return NULL;
    const size number = threads_for(count);
    return number < 0 ? NULL : PyLong_FromSsize_t(number);
}

static PyObject *has_memory(PyObject *module, PyObject *tensor) {
    DLTensor array;
    const void *data;
    const int has = look_at_all(&tensor, &array, &data, 1);
    return has < 0 ? NULL : PyBool_FromLong(has);
}

static size elements_of(const DLTensor *x) {
    size elements = 1;
    for (int k = 0; k < x->ndim; k++) elements *= x->shape[k];
    return elements;
}

static PyObject *norm(PyObject *module, PyObject *args) {
    enum { G, KEPT, VECTORS, DX = VECTORS + 5, DWEIGHT, DBIAS, ALL };
    size loop, rows, threads;
    Norm norm;
    PyObject *tensors[ALL];
    DLTensor arrays[ALL];
    const void *data[ALL];
    if (!PyArg_ParseTuple(args, "nn(nnn)n(OO)(OOOOO)(OOO)dpp:norm", &loop, &rows, &norm.features,
                          &norm.groups, &norm.places, &threads, &tensors[0], &tensors[1],
                          &tensors[2], &tensors[3], &tensors[4], &tensors[5], &tensors[6],
                          &tensors[7], &tensors[8], &tensors[9], &norm.shift, &norm.from_y,
                          &norm.centered))
        return NULL;
    if (loop < 0 || loop >= COUNT(NORMS)) {
        PyErr_SetString(PyExc_IndexError, "no such loop");
        return NULL;
    }
    const int can = look_at_all(tensors, arrays, data, ALL);
    if (can < 0) return NULL;
    if (!can) Py_RETURN_FALSE;
    for (size k = VECTORS; k < DX; k++)
        if (data[k] && (arrays[k].code != FLOAT || arrays[k].bits != (arrays[G].bits == 64 ? 64 : 32)))
            Py_RETURN_FALSE;
    /* (Hooks of saved tensors may give back anything.) */
    const size all = rows * norm.features * norm.places, channels = norm.groups * norm.features;
    if (elements_of(&arrays[G]) != all || elements_of(&arrays[KEPT]) != all ||
        arrays[KEPT].bits != arrays[G].bits)
        Py_RETURN_FALSE;
    for (size k = VECTORS; k < DX; k++)
        if (data[k] && elements_of(&arrays[k]) != (k < VECTORS + 2 ? rows : channels)) Py_RETURN_FALSE;
    norm.g = data[G], norm.kept = data[KEPT];
    norm.mean = data[VECTORS], norm.rstd = data[VECTORS + 1], norm.weight = data[VECTORS + 2];
    norm.bias = data[VECTORS + 3], norm.inverse = data[VECTORS + 4];
    norm.dx = (void *)data[DX], norm.dweight = (void *)data[DWEIGHT], norm.dbias = (void *)data[DBIAS];
    in_threads((Task){NORMS[loop].loop, &norm, rows, 1}, threads,
               rows * norm.features * norm.places);
    Py_RETURN_TRUE;
}

/* Whether all that are there are of one dtype, float or double, and those from `first` on vectors. */
static int are_alike(const DLTensor *arrays, const void **data, size count, size first, size length) {
    for (size k = 0; k < count; k++)
        if (data[k] && (arrays[k].code != FLOAT || arrays[k].bits != arrays[0].bits ||
                        (k >= first && (arrays[k].ndim != 1 || arrays[k].shape[0] != length))))
            return 0;
    return arrays[0].bits == 32 || arrays[0].bits == 64;
}

static PyObject *batch_norm(PyObject *module, PyObject *args) {
    enum { X, Y, MEAN, RSTD, RUNNING_MEAN, RUNNING_VAR, WEIGHT, BIAS, ALL };
    BatchNorm norm;
    PyObject *tensors[ALL];
    DLTensor arrays[ALL];
    const void *data[ALL];
    if (!PyArg_ParseTuple(args, "(nnn)OOOOOOOOdd:batch_norm", &norm.batch, &norm.channels,
                          &norm.places, &tensors[X], &tensors[Y], &tensors[MEAN], &tensors[RSTD],
                          &tensors[RUNNING_MEAN], &tensors[RUNNING_VAR], &tensors[WEIGHT],
                          &tensors[BIAS], &norm.momentum, &norm.eps))
        return NULL;
    const int can = look_at_all(tensors, arrays, data, ALL);
    const size elements = norm.batch * norm.channels * norm.places, threads = threads_for(elements);
    if (can < 0 || threads < 0) return NULL;
    if (!can || !are_alike(arrays, data, ALL, MEAN, norm.channels)) Py_RETURN_FALSE;
    norm.x = data[X], norm.y = (void *)data[Y];
    norm.mean = (void *)data[MEAN], norm.squares = (void *)data[RSTD];
    norm.running_mean = (void *)data[RUNNING_MEAN], norm.running_var = (void *)data[RUNNING_VAR];
    norm.weight = data[WEIGHT], norm.bias = data[BIAS];
    const int is_double = arrays[X].bits == 64;
    in_threads((Task){is_double ? batch_norm_double : batch_norm_float, &norm,
                      (norm.channels + LANES - 1) / LANES, 1}, threads, elements);
    (is_double ? end_batch_norm_double : end_batch_norm_float)(&norm);
    Py_RETURN_TRUE; /* (torch does not count it either as a version of the running statistics) */
}

static PyObject *batch_norm_backward(PyObject *module, PyObject *args) {
    enum { G, X, DX, MEAN, RSTD, WEIGHT, DWEIGHT, DBIAS, ALL };
    BatchNormBackward norm;
    PyObject *tensors[ALL];
    DLTensor arrays[ALL];
    const void *data[ALL];
    if (!PyArg_ParseTuple(args, "(nnn)OOOOOOOO:batch_norm_backward", &norm.batch, &norm.channels,
                          &norm.places, &tensors[G], &tensors[X], &tensors[DX], &tensors[MEAN],
                          &tensors[RSTD], &tensors[WEIGHT], &tensors[DWEIGHT], &tensors[DBIAS]))
        return NULL;
    const int can = look_at_all(tensors, arrays, data, ALL);
    const size elements = norm.batch * norm.channels * norm.places, threads = threads_for(elements);
    if (can < 0 || threads < 0) return NULL;
    if (!can || !are_alike(arrays, data, ALL, MEAN, norm.channels)) Py_RETURN_FALSE;
    norm.g = data[G], norm.x = data[X], norm.dx = (void *)data[DX];
    norm.mean = data[MEAN], norm.rstd = data[RSTD], norm.weight = data[WEIGHT];
    norm.dweight = (void *)data[DWEIGHT], norm.dbias = (void *)data[DBIAS];
    in_threads((Task){arrays[G].bits == 64 ? batch_norm_backward_double : batch_norm_backward_float,
                      &norm, norm.channels, 1}, threads, elements);
    Py_RETURN_TRUE;
}

/* Over planes, or rows of outputs. (Without Python's lock, or with it.) */
static void run_pool(int backwards, int kind, const void *x, void *y, uint8_t *offsets,
                     size planes, size channels, const Window *window, size threads) {
    Pool pool = {x, y, offsets, channels, *window, {0}};
    const size *in = window->in, *out = window->out, *kernel = window->kernel;
    const size *dilation = window->dilation;
    for (size k = 0; k < kernel[0] * kernel[1] * kernel[2]; k++) {
        const size k0 = k / kernel[2] / kernel[1], k1 = k / kernel[2] % kernel[1], k2 = k % kernel[2];
        pool.moves[k] = (k0 * dilation[0] * in[1] + k1 * dilation[1]) * in[2] + k2 * dilation[2];
    }
    Loop *const loops[][2] = {{max_pool_float, unpool_float}, {max_pool_double, unpool_double},
                              {max_pool_bfloat16, unpool_bfloat16}};
    Loop *loop = loops[kind][backwards];
    const size rows = planes * out[0] * out[1], volume = kernel[0] * kernel[1] * kernel[2];
    if (backwards) run((Task){loop, &pool, planes, 1}, threads, planes * in[0] * in[1] * in[2] * channels);
    else run((Task){loop, &pool, rows, 1}, threads, rows * out[2] * channels * volume * LONG);
}

static void run_adaptive_pool(const Adaptive *adaptive, int is_double, size planes, size threads) {
    const size *in = adaptive->in, *out = adaptive->out;
    run((Task){is_double ? adaptive_max_pool_double : adaptive_max_pool_float, adaptive,
               planes * out[0] * out[1], 1}, threads, planes * in[0] * in[1] * in[2]);
}

static PyObject *pool(PyObject *module, PyObject *args) {
    enum { X, Y, OFFSETS, ALL };
    int backwards;
    size planes, channels;
    Window window;
    PyObject *tensors[ALL];
    DLTensor arrays[ALL];
    const void *data[ALL];
#define THREE(FIELD) &window.FIELD[0], &window.FIELD[1], &window.FIELD[2]
    if (!PyArg_ParseTuple(args, "pnnOOO(nnn)(nnn)(nnn)(nnn)(nnn)(nnn):pool", &backwards, &planes,
                          &channels, &tensors[X], &tensors[Y], &tensors[OFFSETS], THREE(in),
                          THREE(out), THREE(kernel), THREE(stride), THREE(padding), THREE(dilation)))
        return NULL;
    const size *in = window.in, *kernel = window.kernel;
    if (kernel[0] * kernel[1] * kernel[2] > LARGEST_WINDOW) {
        PyErr_SetString(PyExc_ValueError, "the window is too large");
        return NULL;
    }
    const int can = look_at_all(tensors, arrays, data, ALL);
    if (can < 0) return NULL;
    const int kind = kind_of(arrays[X].code, arrays[X].bits);
    if (!can || kind < 0 || kind > OF_BFLOAT16 || arrays[OFFSETS].code != UNSIGNED || arrays[OFFSETS].bits != 8)
        Py_RETURN_FALSE;
    const size threads = threads_for(planes * in[0] * in[1] * in[2] * channels);
    if (threads < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    run_pool(backwards, kind, data[X], (void *)data[Y], (uint8_t *)data[OFFSETS], planes, channels,
             &window, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS,
     "connect(capsule, Tensor, Parameter, is_neg, empty_result, empty_bytes, overwritten, threads, mode, "
     "mode, functions, in_order): to torch, by DLPack and its own functions"},
    {"to_bits", (PyCFunction)(void (*)(void))to_bits, METH_FASTCALL,
     "to_bits(loop, x, inplace | None, stride=None, a=None, b=None): the output and the bits, or the "
     "bits alone where inplace is None; None where the loop is not for such a tensor"},
    {"from_bits", (PyCFunction)(void (*)(void))from_bits, METH_FASTCALL,
     "from_bits(loop, x, bits, like, a=None, b=None, inplace=False): the output, or None as to_bits; "
     "without a, part is select"},
    {"are_arrays", (PyCFunction)(void (*)(void))are_arrays, METH_FASTCALL,
     "are_arrays(*tensors): whether each is None, or of torch's own classes, strided, and real; and "
     "none of torch.func"},
    {"threads_for", threads, METH_O, "threads_for(elements): how many a loop over so many uses at most"},
    {"has_memory", has_memory, METH_O,
     "has_memory(x): whether it is a plain tensor, stored without gaps, and no mode has to see "
     "operations"},
    {"norm", norm, METH_VARARGS,
     "norm(loop, rows, (features, groups, places), threads, (g, kept), (mean, rstd, weight, bias, "
     "inverse), (dx, dweight, dbias), shift, from_y, centered), where inverse is that of the weight, "
     "for rows from y: whether the loop is for such tensors, which are contiguous, or None"},
    {"batch_norm", batch_norm, METH_VARARGS,
     "batch_norm((batch, channels, places), x, y, mean, rstd, running_mean, running_var, weight, bias, "
     "momentum, eps): whether the loop is for such tensors, which are contiguous, or None"},
    {"batch_norm_backward", batch_norm_backward, METH_VARARGS,
     "batch_norm_backward((batch, channels, places), g, x, dx, mean, rstd, weight, dweight, dbias): "
     "as batch_norm"},
    {"pool", pool, METH_VARARGS,
     "pool(backwards, planes, channels, x, y, offsets, in, out, kernel, stride, padding, dilation), "
     "where sizes have three values: whether the loop is for such tensors"},
    {NULL, NULL, 0, NULL},
};

static int add_names(PyObject *module, const Named *table, size count) {
    for (size k = 0; k < count; k++)
        if (PyModule_AddIntConstant(module, table[k].name, (long)k) < 0) return -1;
    return 0;
}

static int add_loops(PyObject *module) {
    static const Loops loops = {loop_for, run_over_bits,     run_pool,   run_adaptive_pool,
                                run_norm, memsave_bernoulli, run_softmax};
    PyObject *capsule = PyCapsule_New((void *)&loops, LOOPS, NULL);
    const int failed = !capsule || PyModule_AddObjectRef(module, "loops", capsule) < 0;
    Py_XDECREF(capsule);
    if (failed || PyModule_AddIntConstant(module, "INTERFACE", INTERFACE)) return -1;
    if (PyModule_AddIntConstant(module, "GRAIN", GRAIN)) return -1;
    if (add_names(module, NORMS, COUNT(NORMS))) return -1;
    for (size k = 0; k < COUNT(OVER_BITS); k++)
        if (PyModule_AddIntConstant(module, OVER_BITS[k].name, (long)k) < 0) return -1;
#if defined(__GNUC__) && !defined(_WIN32)
    if (pthread_atfork(NULL, NULL, in_fork)) return -1;
#endif
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)add_loops}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Loops over arrays.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
