/* The loops of native.c over bits, as nodes.cpp finds them: in a capsule of that module. */

#ifndef MEMSAVE_LOOPS_H
#define MEMSAVE_LOOPS_H

#include <stddef.h>
#include <stdint.h>

/* What some of the work is, from start to end, and by which thread. */
typedef void Loop(const void *work, ptrdiff_t start, ptrdiff_t end, ptrdiff_t thread);

/* Dense, and in storage order; eight elements share a byte of bits, the first in the lowest. */
typedef struct {
    const void *x;
    void *y;
    uint8_t *bits;
    double a, b;
} Arrays;

#define LOOPS "memsave.kernels._native.loops"

typedef struct {
    /* Of a family, for a dtype as DLPack names it; or NULL. */
    Loop *(*of)(ptrdiff_t family, int code, int bits);
    /* Over all elements, by at most so many threads. It does not need Python's lock. */
    void (*run)(Loop *loop, const Arrays *arrays, ptrdiff_t elements, ptrdiff_t threads);
} Loops;

#endif
