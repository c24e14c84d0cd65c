/* Kernels for the CPU: one pass over memory where torch's operations take several.

   A module of Python's stable ABI that knows nothing of torch but addresses. native.py calls it, and
   says what each loop computes. Arrays are dense and in storage order; eight elements share a byte of
   bits, the first in the lowest. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef Py_ssize_t size;

/* What some of the work is, from start to end, and by which thread. */
typedef void Loop(const void *work, size start, size end, size thread);

typedef struct {
    const void *x;
    void *y;
    uint8_t *bits;
    double a, b;
} Arrays;

/* The compiler makes each loop for several instruction sets; which one runs is found at load. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define LOOP static __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LOOP static
#endif

/* Elements do not depend on each other, also where y is x. */
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define EACH _Pragma("GCC ivdep")
#else
#define EACH
#endif

/* Eight bytes of 0 or 1 to the bits of a byte, and back to bytes that are 0 or not. */

static inline uint64_t little_endian(uint64_t eight) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_bswap64(eight);
#else
    return eight;
#endif
}

static inline void gather(const uint8_t *flags, uint8_t *byte) {
    uint64_t eight;
    memcpy(&eight, flags, 8);
    *byte = (uint8_t)(little_endian(eight) * 0x0102040810204080u >> 56);
}

static inline void spread(const uint8_t *byte, uint8_t *flags) {
    const uint64_t eight = little_endian(*byte * 0x0101010101010101u & 0x8040201008040201u);
    memcpy(flags, &eight, 8);
}

/* For 64 elements at a time, from j = i on: the compiler takes them together. */
#define IN_BLOCKS(ELEMENT, BEFORE, AFTER)                                                \
    for (size i = start; i < end; i += 64) {                                            \
        uint8_t flags[64] = {0}, *bytes = arrays->bits + i / 8;                         \
        const size rest = end - i;                                                      \
        if (rest >= 64) {                                                               \
            for (size k = 0; k < 8; k++) BEFORE;                                        \
            EACH for (size j = i; j < i + 64; j++) ELEMENT                              \
            for (size k = 0; k < 8; k++) AFTER;                                         \
        } else {                                                                        \
            for (size k = 0; 8 * k < rest; k++) BEFORE;                                 \
            for (size j = i; j < end; j++) ELEMENT                                      \
            for (size k = 0; 8 * k < rest; k++) AFTER;                                  \
        }                                                                               \
    }
#define NOTHING (void)0

#define ARRAYS(T)                                                                       \
    const Arrays *arrays = work;                                                        \
    (void)thread;                                                                       \
    const T *x = arrays->x, a = (T)arrays->a, b = (T)arrays->b;                         \
    T *y = arrays->y;                                                                   \
    (void)y, (void)a, (void)b

/* From x to bits: DO, of the element v = x[j], says `flag`, and may say y[j]. */
#define TO_BITS(NAME, T, DO)                                                            \
    LOOP void NAME(const void *work, size start, size end, size thread) {               \
        ARRAYS(T);                                                                      \
        IN_BLOCKS({ const T v = x[j]; uint8_t flag; DO; flags[j - i] = flag; },         \
                  NOTHING, gather(flags + 8 * k, bytes + k))                            \
    }

/* From x and bits to y: y[j] = VALUE, of the element v = x[j] and its flag. */
#define FROM_BITS(NAME, T, VALUE)                                                       \
    LOOP void NAME(const void *work, size start, size end, size thread) {               \
        ARRAYS(T);                                                                      \
        IN_BLOCKS({ const T v = x[j]; const uint8_t flag = flags[j - i]; y[j] = (T)(VALUE); }, \
                  spread(bytes + k, flags + 8 * k), NOTHING)                            \
    }

#define OF_FLOATS(T)                                                                \
    TO_BITS(relu_##T, T, flag = !(v <= 0); y[j] = v < 0 ? 0 : v)                    \
    TO_BITS(leaky_relu_##T, T, flag = v > 0; y[j] = v > 0 ? v : v * a)                  \
    TO_BITS(hardtanh_##T, T, flag = !(v <= a) & !(v >= b); const T w = v < a ? a : v;   \
            y[j] = w > b ? b : w)                                                       \
    TO_BITS(threshold_##T, T, flag = !(v <= a); y[j] = v <= a ? b : v)                  \
    TO_BITS(hardshrink_##T, T, flag = !((v >= a) & (v <= b)); y[j] = (v >= a) & (v <= b) ? 0 : v) \
    TO_BITS(hardsigmoid_##T, T, flag = (v > a) & (v < b); const T w = v - a;            \
            y[j] = (w < 0 ? 0 : w > b - a ? b - a : w) / (b - a))                       \
    TO_BITS(above_##T, T, flag = v > a)                                             \
    TO_BITS(within_##T, T, flag = (v > a) & (v < b))                                    \
    TO_BITS(not_outside_##T, T, flag = !((v <= a) | (v >= b)))                          \
    TO_BITS(not_inside_##T, T, flag = !((v >= a) & (v <= b)))                           \
    FROM_BITS(scale_##T, T, v * (flag ? a : b))                                         \
    FROM_BITS(part_##T, T, flag ? v * a : 0)
OF_FLOATS(float)
OF_FLOATS(double)

/* bfloat16 and float16 as integers; a is their infinity. */
TO_BITS(relu_half, int16_t, const int16_t magnitude = v & 0x7fff;
        flag = (magnitude > a) | (v > 0);
        y[j] = (v < 0) & (magnitude <= a) & (magnitude != 0) ? 0 : v)

TO_BITS(nonzero, uint8_t, flag = v != 0)

#define OF_INTEGERS(T) FROM_BITS(select_##T, T, flag ? v : 0)
OF_INTEGERS(int8_t)
OF_INTEGERS(int16_t)
OF_INTEGERS(int32_t)
OF_INTEGERS(int64_t)

/* Normalization, backwards: gradients of x, weight and bias, from x or from y. Of rows, or of groups
   of channels that have several places each. */

typedef struct {
    const void *g, *kept, *mean, *rstd, *weight, *bias, *inverse; /* or NULL, the last five */
    void *dx, *dweight, *dbias;                         /* or NULL; a row for each thread */
    size features;       /* or channels of a group */
    size groups, places; /* or 1 */
    double shift;        /* added to the weight */
    int from_y, centered;
} Norm;

static inline float of_bfloat16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define NORM(NAME, T, STORED, LOAD, STORE)                                              \
    LOOP void NAME(const void *work, size start, size end, size thread) {               \
        const Norm *norm = work;                                                        \
        const size n = norm->features;                                                  \
        const T *weight = norm->weight, *bias = norm->bias, *mean = norm->mean;         \
        const T *inverse = norm->inverse, *rstd = norm->rstd, shift = (T)norm->shift;   \
        T *dweight = norm->dweight, *dbias = norm->dbias;                               \
        if (dweight) dweight += thread * n;                                             \
        if (dbias) dbias += thread * n;                                                 \
        for (size row = start; row < end; row++) {                                      \
            const STORED *g = (const STORED *)norm->g + row * n;                        \
            const STORED *kept = (const STORED *)norm->kept + row * n;                  \
            const T center = mean ? mean[row] : 0, scale = rstd ? rstd[row] : 1;        \
            T normalized[BLOCK_OF_ROW], along = 0, total = 0;                           \
            for (size first = 0; first < n; first += BLOCK_OF_ROW) {                    \
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
                    dx[first + k] = STORE((gw - normalized[k] * along - total) * scale);\
                }                                                                       \
            }                                                                           \
        }                                                                               \
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
#if defined(__GNUC__) /* with -fopenmp-simd */
#define PRAGMA(TEXT) _Pragma(#TEXT)
#define SUMMED(A, B) PRAGMA(omp simd reduction(+ : A, B))
#else
#define SUMMED(A, B)
#endif
enum { BLOCK_OF_ROW = 2048 };
NORM(norm_float, float, float, , )
NORM(norm_double, double, double, , )
NORM(norm_bfloat16, float, uint16_t, of_bfloat16, to_bfloat16) /* parameters and statistics: float */

#define GROUP_NORM(NAME, T)                                                             \
    LOOP void NAME(const void *work, size start, size end, size thread) {               \
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

/* Max pooling over three spatial axes, where those that are missing have size 1. Several `channels`
   lie beside each other where they are stored last. An offset is an index in the window. */

enum { BLOCK_OF_POOL = 256, LARGEST_WINDOW = 256 };

typedef struct {
    const void *x; /* or the gradient of y */
    void *y;       /* or the gradient of x */
    uint8_t *offsets;
    size channels, in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
    size moves[LARGEST_WINDOW]; /* backwards: from the start of a window to each of its places */
} Pool;

static inline size at_most(size a, size b) { return a < b ? a : b; }

/* How many steps from `start` to the first place that is not before `place`. */
static inline size steps(size start, size place, size step) {
    return start < place ? (place - start + step - 1) / step : 0;
}

/* Elements are taken together that lie beside each other: outputs of a row, or channels of one. */
#define BETTER(STEP)                                                                    \
    EACH for (size k = from; k < to; k++) {                                             \
        const T v = x[k * (STEP)];                                                      \
        const int better = (v > best[k]) | (v != v);                                    \
        best[k] = better ? v : best[k];                                                 \
        which[k] = better ? offset : which[k];                                          \
    }

/* Forwards, for some rows of outputs: short ones several at a time. */
#define MAX_POOL(NAME)                                                                  \
    LOOP void NAME(const void *work, size start, size end, size thread) {               \
        const Pool *pool = work;                                                        \
        const size *in = pool->in, *out = pool->out, *kernel = pool->kernel;            \
        const size *stride = pool->stride, *dilation = pool->dilation;                  \
        const size channels = pool->channels;                                           \
        const int last = channels > 1;                                                  \
        const size step = last ? 1 : stride[2], lane = last ? channels : out[2];        \
        size first_output[LARGEST_WINDOW], end_of_outputs[LARGEST_WINDOW];              \
        for (size k = 0; k < kernel[2]; k++) {                                          \
            const size at = k * dilation[2] - pool->padding[2];                         \
            first_output[k] = steps(at, 0, stride[2]);                                  \
            end_of_outputs[k] = steps(at, in[2], stride[2]);                            \
        }                                                                               \
        (void)thread;                                                                   \
        for (size row = start, rows; row < end; row += rows) {                          \
            const size at0 = row / out[1] % out[0] * stride[0] - pool->padding[0];      \
            const size at1 = row % out[1] * stride[1] - pool->padding[1];               \
            const size skip0 = steps(at0, 0, dilation[0]);                              \
            const T *plane = (const T *)pool->x +                                       \
                             row / (out[0] * out[1]) * in[0] * in[1] * in[2] * channels; \
            T *y = (T *)pool->y + row * out[2] * channels;                              \
            uint8_t *offsets = pool->offsets + row * out[2] * channels;                 \
            rows = last || 2 * lane > BLOCK_OF_POOL ? 1 : BLOCK_OF_POOL / lane;         \
            rows = at_most(rows, at_most(out[1] - row % out[1], end - row));            \
            for (size done = 0, count; done < out[2] * channels; done += count) {       \
                const size begin = done % lane, output = last ? done / lane : begin;    \
                const size at2 = output * stride[2] - pool->padding[2];                 \
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
                            const T *x = plane + (line0 * in[2] + at2 + k2 * dilation[2]) * channels + \
                                         (last ? begin : 0);                            \
                            if (rows == 1) {                                            \
                                if (first_row >= end_of_rows) continue;                 \
                                if (step == 1) BETTER(1)                                \
                                else if (step == 2) BETTER(2)                           \
                                else BETTER(step)                                       \
                                continue;                                               \
                            }                                                           \
                            T gathered[BLOCK_OF_POOL];                                  \
                            for (size k = 0; k < rows * count; k++) gathered[k] = (T)-INFINITY; \
                            for (size r = first_row; r < end_of_rows; r++)              \
                                for (size k = from; k < to; k++)                        \
                                    gathered[r * count + k] = x[r * stride[1] * in[2] + k * step]; \
                            x = gathered, from = 0, to = rows * count;                  \
                            BETTER(1)                                                   \
                        }                                                               \
                    }                                                                   \
                for (size k = 0; k < rows * count; k++) y[done + k] = best[k];          \
                for (size k = 0; k < rows * count; k++) offsets[done + k] = (uint8_t)which[k]; \
            }                                                                           \
        }                                                                               \
    }

/* Backwards, for some planes of x. Windows that overlap add up, in the order of the outputs. */
#define UNPOOL(NAME)                                                                    \
    LOOP void NAME(const void *work, size start, size end, size thread) {               \
        const Pool *pool = work;                                                        \
        const size *in = pool->in, *out = pool->out, channels = pool->channels;         \
        const size places = in[0] * in[1] * in[2];                                      \
        size done = start * out[0] * out[1] * out[2] * channels;                        \
        const T *g = pool->x;                                                           \
        (void)thread;                                                                   \
        for (size plane = start; plane < end; plane++) {                                \
            T *dx = (T *)pool->y + plane * places * channels;                           \
            memset(dx, 0, places * channels * sizeof(T));                               \
            for (size o0 = 0; o0 < out[0]; o0++)                                        \
                for (size o1 = 0; o1 < out[1]; o1++) {                                  \
                    const size at0 = o0 * pool->stride[0] - pool->padding[0];           \
                    const size at1 = o1 * pool->stride[1] - pool->padding[1];           \
                    size at = (at0 * in[1] + at1) * in[2] - pool->padding[2];           \
                    for (size o2 = 0; o2 < out[2]; o2++, at += pool->stride[2])         \
                        for (size c = 0; c < channels; c++, done++) {                   \
                            const size place = at + pool->moves[pool->offsets[done]];   \
                            if ((size_t)place < (size_t)places) /* not so for another's offsets */ \
                                dx[place * channels + c] += g[done];                    \
                        }                                                               \
                }                                                                       \
        }                                                                               \
    }

#define T float
MAX_POOL(max_pool_float)
UNPOOL(unpool_float)
#undef T
#define T double
MAX_POOL(max_pool_double)
UNPOOL(unpool_double)
#undef T

/* Threads are those of the OpenMP runtime that torch has loaded, if it has: others would compete
   with them, which wait for more work actively. A fork has none of its parent's. */

#if defined(__GNUC__) && !defined(_WIN32)
#include <pthread.h>
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));
#endif

enum { GRAIN = 32768 }; /* of torch */

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

static void in_threads(Task task, size threads, size elements) {
    Py_BEGIN_ALLOW_THREADS;
#if defined(__GNUC__) && !defined(_WIN32)
    if (threads > 1 && elements > GRAIN && !is_fork && GOMP_parallel && omp_get_thread_num &&
        omp_get_num_threads) {
        has_team = 1;
        GOMP_parallel(part, &task, (unsigned)threads, 0);
    } else
#endif
        task.loop(task.work, 0, task.count, 0);
    Py_END_ALLOW_THREADS;
}

/* The module. */

#define NAMED(NAME) {#NAME, NAME}
typedef struct {
    const char *name;
    Loop *loop;
} Named;
static const Named LOOPS[] = {
    NAMED(relu_float),        NAMED(relu_double),        NAMED(relu_half),
    NAMED(leaky_relu_float),  NAMED(leaky_relu_double),  NAMED(hardtanh_float),
    NAMED(hardtanh_double),   NAMED(threshold_float),    NAMED(threshold_double),
    NAMED(hardshrink_float),  NAMED(hardshrink_double),
    NAMED(hardsigmoid_float), NAMED(hardsigmoid_double),
    NAMED(above_float),       NAMED(above_double),       NAMED(within_float),
    NAMED(within_double),     NAMED(not_outside_float),  NAMED(not_outside_double),
    NAMED(not_inside_float),  NAMED(not_inside_double),  NAMED(nonzero),
    NAMED(part_float),        NAMED(part_double),
    NAMED(scale_float),       NAMED(scale_double),       NAMED(select_int8_t),
    NAMED(select_int16_t),    NAMED(select_int32_t),     NAMED(select_int64_t),
};
static const Named NORMS[] = {
    NAMED(norm_float),       NAMED(norm_double), NAMED(norm_bfloat16),
    NAMED(group_norm_float), NAMED(group_norm_double),
};
#define COUNT(TABLE) (size)(sizeof TABLE / sizeof *TABLE)

static PyObject *run(PyObject *module, PyObject *args) {
    size loop, elements, threads, x, y, bits;
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "nnnnnndd:run", &loop, &elements, &threads, &x, &y, &bits,
                          &arrays.a, &arrays.b))
        return NULL;
    if (loop < 0 || loop >= COUNT(LOOPS)) {
        PyErr_SetString(PyExc_IndexError, "no such loop");
        return NULL;
    }
    arrays.x = (const void *)x;
    arrays.y = (void *)y;
    arrays.bits = (uint8_t *)bits;
    in_threads((Task){LOOPS[loop].loop, &arrays, elements, 4096}, threads, elements);
    Py_RETURN_NONE;
}

static PyObject *norm(PyObject *module, PyObject *args) {
    size loop, rows, threads, g, kept, mean, rstd, weight, bias, inverse, dx, dweight, dbias;
    Norm norm;
    if (!PyArg_ParseTuple(args, "nn(nnn)nnnnnnnnnnndpp:norm", &loop, &rows, &norm.features,
                          &norm.groups, &norm.places, &threads, &g, &kept, &mean, &rstd, &weight,
                          &bias, &inverse, &dx, &dweight, &dbias, &norm.shift, &norm.from_y,
                          &norm.centered))
        return NULL;
    if (loop < 0 || loop >= COUNT(NORMS)) {
        PyErr_SetString(PyExc_IndexError, "no such loop");
        return NULL;
    }
    norm.g = (const void *)g, norm.kept = (const void *)kept;
    norm.mean = (const void *)mean, norm.rstd = (const void *)rstd;
    norm.weight = (const void *)weight, norm.bias = (const void *)bias;
    norm.inverse = (const void *)inverse;
    norm.dx = (void *)dx, norm.dweight = (void *)dweight, norm.dbias = (void *)dbias;
    in_threads((Task){NORMS[loop].loop, &norm, rows, 1}, threads,
               rows * norm.features * norm.places);
    Py_RETURN_NONE;
}

static PyObject *pool(PyObject *module, PyObject *args) {
    int backwards, is_double;
    size planes, threads, x, y, offsets;
    Pool pool = {0};
#define THREE(FIELD) &pool.FIELD[0], &pool.FIELD[1], &pool.FIELD[2]
    if (!PyArg_ParseTuple(args, "ppnnnnnn(nnn)(nnn)(nnn)(nnn)(nnn)(nnn):pool", &backwards, &is_double,
                          &planes, &pool.channels, &threads, &x, &y, &offsets, THREE(in),
                          THREE(out), THREE(kernel), THREE(stride), THREE(padding), THREE(dilation)))
        return NULL;
    const size *in = pool.in, *out = pool.out, *kernel = pool.kernel, *dilation = pool.dilation;
    if (kernel[0] * kernel[1] * kernel[2] > LARGEST_WINDOW) {
        PyErr_SetString(PyExc_ValueError, "the window is too large");
        return NULL;
    }
    pool.x = (const void *)x, pool.y = (void *)y, pool.offsets = (uint8_t *)offsets;
    for (size k = 0; k < kernel[0] * kernel[1] * kernel[2]; k++) {
        const size k0 = k / kernel[2] / kernel[1], k1 = k / kernel[2] % kernel[1], k2 = k % kernel[2];
        pool.moves[k] = (k0 * dilation[0] * in[1] + k1 * dilation[1]) * in[2] + k2 * dilation[2];
    }
    Loop *loop = backwards ? is_double ? unpool_double : unpool_float
                           : is_double ? max_pool_double : max_pool_float;
    in_threads((Task){loop, &pool, backwards ? planes : planes * out[0] * out[1], 1}, threads,
               planes * in[0] * in[1] * in[2] * pool.channels);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS, "run(loop, elements, threads, x, y, bits, a, b), where x, y and bits are addresses"},
    {"norm", norm, METH_VARARGS,
     "norm(loop, rows, (features, groups, places), threads, g, kept, mean, rstd, weight, bias, "
     "inverse, dx, dweight, dbias, shift, from_y, centered), where arrays are addresses, or 0; "
     "inverse is that of the weight, for rows from y"},
    {"pool", pool, METH_VARARGS,
     "pool(backwards, is_double, planes, channels, threads, x, y, offsets, in, out, kernel, stride, "
     "padding, dilation), where arrays are addresses, and sizes have three values"},
    {NULL, NULL, 0, NULL},
};

static int add_names(PyObject *module, const Named *table, size count) {
    for (size k = 0; k < count; k++)
        if (PyModule_AddIntConstant(module, table[k].name, (long)k) < 0) return -1;
    return 0;
}

static int add_loops(PyObject *module) {
    if (add_names(module, LOOPS, COUNT(LOOPS)) || add_names(module, NORMS, COUNT(NORMS))) return -1;
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
