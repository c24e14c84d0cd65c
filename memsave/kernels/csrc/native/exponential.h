/* Exponentials of floats, in vectors. */

#pragma once

#include <math.h>

#include "elements.h"

/* exp(u), and exp(u) - 1: with u = n log(2) + r they are 2^n (exp(r) - 1), and to that 2^n, or 2^n - 1. The
   series of exp(r) - 1 has as many terms as a float can tell, or fewer if that is to have 16 bits (is_short): off
   by less than 2^-15 of itself.
   Below the normal numbers 2^n is 0. */
typedef struct {
    float power, product;
} Exponential;

static inline Exponential exponential_of(float u, int is_short) {
    u = u < -127 * 0.69314718f ? -127 * 0.69314718f : u; /* (nan stays) */
    const float whole = 12582912, rounded = u * 1.44269504f + whole, n = rounded - whole; /* 1.5 * 2^23 */
    const float r = is_short ? u - n * 0.69314718f : u - n * 0.693359375f + n * 2.12194440e-4f;
    const float terms = is_short ? 0.041741f : 1 / 24.f + r * (1 / 120.f + r * (1 / 720.f + r * (1 / 5040.f)));
    const float exponential = r * (1 + r * (1 / 2.f + r * ((is_short ? 0.167483f : 1 / 6.f) + r * terms)));
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
