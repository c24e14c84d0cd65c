/* Gradients of curves, by what is kept: g * (1 - exp(a * y)); g * tanh(x)^2; g / (1 + exp(x)). */

#pragma once

#include "exponential.h"

#define FROM_CURVE(NAME, STORED, LOAD, STORE, SLOPE)                                    \
    INLINE void NAME##_inline(const void *work, size start, size end, size thread) {    \
        ARRAYS(float, STORED, LOAD, STORE);                                             \
        const STORED *also = arrays->also;                                              \
        (void)bits, (void)b, (void)a;                                                   \
        EACH for (size i = start; i < end; i++) {                                       \
            const float g = LOAD(x[i]), kept = LOAD(also[i]);                           \
            y[i] = STORE(SLOPE);                                                        \
        }                                                                               \
    }                                                                                   \
    CLONED(WIDE_LOOP, NAME)
#define OF_CURVES(NAME, STORED, LOAD, STORE, IS_SHORT)                                  \
    FROM_CURVE(rest_##NAME, STORED, LOAD, STORE, g * -expm1_of(a * kept, IS_SHORT))     \
    FROM_CURVE(tanh2_##NAME, STORED, LOAD, STORE, g * square(tanh_of(kept, IS_SHORT)))  \
    FROM_CURVE(logistic_##NAME, STORED, LOAD, STORE, over_exponential(g, kept, IS_SHORT))
OF_CURVES(float, float, , , 0)
OF_CURVES(bfloat16, uint16_t, of_bfloat16, back_to_bfloat16, 1)
