/* Batch normalization of several places per channel, forwards. Sums are those of torch, in its order,
   so that y is the same; but of some channels at once, as each addition waits for the one before. */

#pragma once

#include <math.h>

#include "elements.h"

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
