/* Normalization, backwards: gradients of x, weight and bias, from x or from y. Of rows, or of groups
   of channels that have several places each. */

#pragma once

#include "elements.h"

/* Sums over many rows lose digits: from time to time they are put aside, and in the end they are the totals. */
enum { ROWS_OF_SUM = 64 };
/* Of several rows at once, the sums are read and written once. Shorter rows, in bytes, are read in order (they arrive
   sooner): with the gradient of x, or of parameters alone. */
enum { ROWS_AT_ONCE = 4, LONG_ROW = 4096, LONG_ROW_OF_SUMS = 6144 };
#define PUT_ASIDE(T)                                                                    \
    static inline void put_aside_##T(T *dweight, T *dbias, double *totals, size n, int is_end) { \
        T *const both[] = {dweight, dbias};                                             \
        for (int which = 0; totals && which < 2; which++, totals += n)                  \
            for (size k = 0; both[which] && k < n; k++) {                               \
                totals[k] += both[which][k];                                            \
                both[which][k] = is_end ? (T)totals[k] : 0;                             \
            }                                                                           \
    }
PUT_ASIDE(float)
PUT_ASIDE(double)

#define NORM(NAME, T, STORED, LOAD, STORE)                                              \
    WIDE_LOOP void NAME(const void *work, size start, size end, size thread) {          \
        const Norm *norm = work;                                                        \
        const size n = norm->features;                                                  \
        const T *mean = norm->mean, *rstd = norm->rstd, shift = norm->weight ? (T)norm->shift : 0; \
        T *dweight = norm->dweight, *dbias = norm->dbias;                               \
        if (dweight) dweight += thread * n;                                             \
        if (dbias) dbias += thread * n;                                                 \
        double *totals = norm->totals ? norm->totals + 2 * thread * n : NULL;           \
        T aside[BLOCK_OF_ROW], ones[BLOCK_OF_ROW], zeros[BLOCK_OF_ROW];                 \
        /* (Of parameters that are missing. A loop that asks whether they are is not one of vectors.) */ \
        EACH for (size k = 0; k < at_most(n, BLOCK_OF_ROW); k++) ones[k] = 1, aside[k] = zeros[k] = 0; \
        const int is_long = n * (size)sizeof(STORED) >= (norm->dx ? LONG_ROW : LONG_ROW_OF_SUMS); \
        size row = start;                                                               \
        for (; dweight && is_long && row + ROWS_AT_ONCE <= end; row += ROWS_AT_ONCE) {  \
            if ((row - start) % ROWS_OF_SUM == 0) put_aside_##T(dweight, dbias, totals, n, 0); \
            T center[ROWS_AT_ONCE], scale[ROWS_AT_ONCE], slope[ROWS_AT_ONCE], shared[ROWS_AT_ONCE]; \
            double along[ROWS_AT_ONCE] = {0}, total[ROWS_AT_ONCE] = {0};                \
            for (size r = 0; r < ROWS_AT_ONCE; r++)                                     \
                center[r] = mean ? mean[row + r] : 0, scale[r] = rstd ? rstd[row + r] : 1; \
            for (size first = 0; first < n; first += BLOCK_OF_ROW) {                    \
                BLOCK(T, STORED)                                                        \
                if (norm->dx && norm->from_y) SUMS_ALONG_ROWS(FROM_Y, ALONG_Y, T, LOAD) \
                else if (norm->dx) SUMS_ALONG_ROWS(FROM_X, ALONG_X, T, LOAD)            \
                else if (norm->from_y) SUMS_OF_ROWS(FROM_Y, T, LOAD)                    \
                else SUMS_OF_ROWS(FROM_X, T, LOAD)                                      \
            }                                                                           \
            if (!norm->dx) continue;                                                    \
            for (size r = 0; r < ROWS_AT_ONCE; r++)                                     \
                slope[r] = (T)(along[r] / n), shared[r] = norm->centered ? (T)(total[r] / n) : 0; \
            for (size first = 0; first < n; first += BLOCK_OF_ROW) {                    \
                BLOCK(T, STORED)                                                        \
                if (norm->from_y) GRADIENTS(ROWS_AT_ONCE, FROM_Y, T, STORED, LOAD, STORE) \
                else GRADIENTS(ROWS_AT_ONCE, FROM_X, T, STORED, LOAD, STORE)            \
            }                                                                           \
        }                                                                               \
        for (; row < end; row++) {                                                      \
            if ((row - start) % ROWS_OF_SUM == 0) put_aside_##T(dweight, dbias, totals, n, 0); \
            const T center[] = {mean ? mean[row] : 0}, scale[] = {rstd ? rstd[row] : 1}; \
            double along = 0, total = 0;                                                \
            for (size first = 0; first < n; first += BLOCK_OF_ROW) {                    \
                BLOCK(T, STORED)                                                        \
                T with_x = 0, alone = 0;                                                \
                if (norm->from_y) SUMS(FROM_Y(LOAD, 0), ALONG_Y(LOAD, 0), T, LOAD)      \
                else SUMS(FROM_X(LOAD, 0), ALONG_X(LOAD, 0), T, LOAD)                   \
                along += with_x, total += alone;                                        \
            }                                                                           \
            if (!norm->dx) continue;                                                    \
            const T slope[] = {(T)(along / n)}, shared[] = {norm->centered ? (T)(total / n) : 0}; \
            for (size first = 0; first < n; first += BLOCK_OF_ROW) {                    \
                BLOCK(T, STORED)                                                        \
                if (norm->from_y) GRADIENTS(1, FROM_Y, T, STORED, LOAD, STORE)          \
                else GRADIENTS(1, FROM_X, T, STORED, LOAD, STORE)                       \
            }                                                                           \
        }                                                                               \
        put_aside_##T(dweight, dbias, totals, n, 1);                                    \
    }
/* What there is of a row from an element on. */
#define BLOCK(T, STORED)                                                                \
    const size count = at_most(n - first, BLOCK_OF_ROW);                                \
    const STORED *g = (const STORED *)norm->g + row * n + first;                        \
    const STORED *kept = (const STORED *)norm->kept + row * n + first;                  \
    const T *weight = norm->weight ? (const T *)norm->weight + first : ones;            \
    const T *bias = norm->bias ? (const T *)norm->bias + first : zeros;                 \
    const T *inverse = norm->inverse ? (const T *)norm->inverse + first : ones;         \
    (void)weight, (void)bias, (void)inverse;
/* What is normalized, and that times the weight, which from y is no factor. */
#define FROM_X(LOAD, r) (LOAD(kept[(r) * n + k]) - center[r]) * scale[r]
#define FROM_Y(LOAD, r) (LOAD(kept[(r) * n + k]) - bias[k]) * inverse[k]
#define ALONG_X(LOAD, r) (FROM_X(LOAD, r)) * factor
#define ALONG_Y(LOAD, r) (LOAD(kept[(r) * n + k]) - bias[k])
/* Of several rows. (Without a bias, what would be its gradient is written aside.) */
#define SUMS_OF_ROWS(FROM, T, LOAD)                                                     \
    {                                                                                   \
        T *of_weight = dweight + first, *of_bias = dbias ? dbias + first : aside;       \
        EACH for (size k = 0; k < count; k++) {                                         \
            T with_x = 0, alone = 0;                                                    \
            for (size r = 0; r < ROWS_AT_ONCE; r++) {                                   \
                const T in = LOAD(g[r * n + k]);                                        \
                with_x += in * (FROM(LOAD, r));                                         \
                alone += in;                                                            \
            }                                                                           \
            of_weight[k] += with_x;                                                     \
            of_bias[k] += alone;                                                        \
        }                                                                               \
    }
/* Likewise, and sums along the rows. (They have names, as sums of vectors must.) */
#define SUMS_ALONG_ROWS(FROM, ALONG, T, LOAD)                                           \
    {                                                                                   \
        T *of_weight = dweight + first, *of_bias = dbias ? dbias + first : aside;       \
        T x0 = 0, x1 = 0, x2 = 0, x3 = 0, g0 = 0, g1 = 0, g2 = 0, g3 = 0;               \
        SUMMED(x0, x1, x2, x3, g0, g1, g2, g3) for (size k = 0; k < count; k++) {       \
            const T factor = weight[k] + shift;                                         \
            T with_x = 0, alone = 0;                                                    \
            OF_ROW(FROM, ALONG, T, LOAD, 0) OF_ROW(FROM, ALONG, T, LOAD, 1)             \
            OF_ROW(FROM, ALONG, T, LOAD, 2) OF_ROW(FROM, ALONG, T, LOAD, 3)             \
            of_weight[k] += with_x;                                                     \
            of_bias[k] += alone;                                                        \
        }                                                                               \
        along[0] += x0, along[1] += x1, along[2] += x2, along[3] += x3;                 \
        total[0] += g0, total[1] += g1, total[2] += g2, total[3] += g3;                 \
    }
#define OF_ROW(FROM, ALONG, T, LOAD, r)                                                 \
    {                                                                                   \
        const T in = LOAD(g[r * n + k]);                                                \
        with_x += in * (FROM(LOAD, r));                                                 \
        alone += in;                                                                    \
        x##r += in * ALONG(LOAD, r);                                                    \
        g##r += in * factor;                                                            \
    }
#define SUMS(XHAT, ALONG, T, LOAD)                                                      \
    {                                                                                   \
        T *of_weight = dweight ? dweight + first : NULL, *of_bias = dbias ? dbias + first : NULL; \
        if (dweight && dbias && norm->dx) SUMMED(with_x, alone) for (size k = 0; k < count; k++) { \
            const T in = LOAD(g[k]), factor = weight[k] + shift;                        \
            of_weight[k] += in * (XHAT);                                                \
            of_bias[k] += in;                                                           \
            with_x += in * ALONG;                                                       \
            alone += in * factor;                                                       \
        } else {                                                                        \
            if (dweight && dbias) EACH for (size k = 0; k < count; k++) {               \
                const T in = LOAD(g[k]);                                                \
                of_weight[k] += in * (XHAT);                                            \
                of_bias[k] += in;                                                       \
            } else if (dweight) EACH for (size k = 0; k < count; k++)                   \
                of_weight[k] += LOAD(g[k]) * (XHAT);                                    \
            else if (dbias) EACH for (size k = 0; k < count; k++)                       \
                of_bias[k] += LOAD(g[k]);                                               \
            if (norm->dx) SUMMED(with_x, alone) for (size k = 0; k < count; k++) {      \
                const T in = LOAD(g[k]), factor = weight[k] + shift;                    \
                with_x += in * ALONG;                                                   \
                alone += in * factor;                                                   \
            }                                                                           \
        }                                                                               \
    }
#define GRADIENTS(ROWS, FROM, T, STORED, LOAD, STORE)                                   \
    {                                                                                   \
        STORED *dx = (STORED *)norm->dx + row * n + first;                              \
        EACH for (size k = 0; k < count; k++) {                                         \
            const T factor = weight[k] + shift;                                         \
            for (size r = 0; r < ROWS; r++) {                                           \
                const T gw = LOAD(g[r * n + k]) * factor, xhat = FROM(LOAD, r);         \
                dx[r * n + k] = STORE((gw - xhat * slope[r] - shared[r]) * scale[r]);   \
            }                                                                           \
        }                                                                               \
    }
NORM(norm_float, float, float, , )
NORM(norm_double, double, double, , )
NORM(norm_bfloat16, float, uint16_t, of_bfloat16, to_bfloat16) /* parameters and statistics: float */
NORM(norm_float16, float, uint16_t, of_float16, to_float16)    /* (as well) */

#define GROUP_NORM(NAME, T)                                                             \
    WIDE_LOOP void NAME(const void *work, size start, size end, size thread) {          \
        const Norm *norm = work;                                                        \
        const size channels = norm->features, places = norm->places, n = channels * places; \
        const size all = norm->groups * channels, period = norm->groups * ROWS_OF_SUM;  \
        const T *weight = norm->weight, *bias = norm->bias, *mean = norm->mean, *rstd = norm->rstd; \
        T *dweight = norm->dweight, *dbias = norm->dbias;                               \
        if (dweight) dweight += thread * all;                                           \
        if (dbias) dbias += thread * all;                                               \
        double *totals = norm->totals ? norm->totals + 2 * thread * all : NULL;         \
        for (size row = start; row < end; row++) {                                      \
            if ((row - start) % period == 0) put_aside_##T(dweight, dbias, totals, all, 0); \
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
        put_aside_##T(dweight, dbias, totals, all, 1);                                  \
    }
#define NORMALIZED(T)                                                                   \
    const T factor = weight ? weight[first + c] : 1;                                    \
    const T center = !norm->from_y ? mean[row] : bias ? bias[first + c] : 0;            \
    const T scale = norm->from_y ? 1 / factor : rstd[row];
GROUP_NORM(group_norm_float, float)
GROUP_NORM(group_norm_double, double)
