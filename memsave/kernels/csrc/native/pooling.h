/* Max pooling over three spatial axes, where those that are missing have size 1. Several `channels`
   lie beside each other where they are stored last. An offset is an index in the window. */

#pragma once

#include <math.h>

#include "elements.h"

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
MAX_POOL(max_pool_float16, float, uint16_t, of_float16, to_float16)
UNPOOL(unpool_float, float, , )
UNPOOL(unpool_double, double, , )
UNPOOL(unpool_bfloat16, uint16_t, of_bfloat16, to_bfloat16)
UNPOOL(unpool_float16, uint16_t, of_float16, to_float16)
