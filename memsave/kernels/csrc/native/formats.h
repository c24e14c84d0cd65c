/* From channels that are stored last to channels first: of each image a matrix is transposed. */

#pragma once

#include "elements.h"

typedef struct {
    const void *x;
    void *y;
    size channels, places;
} Images;

enum { STRIP = 16 }; /* of places, which fill a line of the cache */

#define CHANNELS_FIRST(T)                                                               \
    LOOP void channels_first_##T(const void *work, size start, size end, size thread) { \
        const Images *images = work;                                                    \
        const size channels = images->channels, places = images->places;                \
        const size strips = (places + STRIP - 1) / STRIP;                               \
        (void)thread;                                                                   \
        for (size strip = start; strip < end; strip++) {                                \
            const size image = strip / strips * channels * places, first = strip % strips * STRIP; \
            const size count = at_most(places - first, STRIP);                          \
            const T *x = (const T *)images->x + image + first * channels;               \
            T *y = (T *)images->y + image + first;                                      \
            for (size c = 0; c < channels; c++, x++, y += places) {                     \
                if (count == STRIP) /* which the compiler unrolls */                    \
                    for (size p = 0; p < STRIP; p++) y[p] = x[p * channels];            \
                else                                                                    \
                    for (size p = 0; p < count; p++) y[p] = x[p * channels];            \
            }                                                                           \
        }                                                                               \
    }
CHANNELS_FIRST(uint16_t)
CHANNELS_FIRST(uint32_t)
CHANNELS_FIRST(uint64_t)
