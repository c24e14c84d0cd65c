/* float16, many elements at a time. */

#pragma once

#include "elements.h"

/* Most processors convert eight at once (x86-64-v3); to the others, and of what is left, it is arithmetic. */
#ifdef V3
#include <immintrin.h>

V3 inline size eights_widened(const uint16_t *x, float *y, size count) {
    size k = 0;
    for (; k + 8 <= count; k += 8) _mm256_storeu_ps(y + k, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + k))));
    return k;
}

V3 inline size eights_narrowed(const float *x, uint16_t *y, size count, float factor) {
    size k = 0;
    for (; k + 8 <= count; k += 8) {
        const __m256 eight = _mm256_mul_ps(_mm256_loadu_ps(x + k), _mm256_set1_ps(factor));
        _mm_storeu_si128((__m128i *)(y + k), _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT));
    }
    return k;
}
#define BY_PROCESSOR(CONVERTED) (IS_V3 ? CONVERTED : 0)
#else
#define BY_PROCESSOR(CONVERTED) 0
#endif

static void widen(const uint16_t *x, float *y, size count) {
    for (size k = BY_PROCESSOR(eights_widened(x, y, count)); k < count; k++) y[k] = of_float16(x[k]);
}

static void narrow(const float *x, uint16_t *y, size count, float factor) {
    for (size k = BY_PROCESSOR(eights_narrowed(x, y, count, factor)); k < count; k++) y[k] = to_float16(x[k] * factor);
}
