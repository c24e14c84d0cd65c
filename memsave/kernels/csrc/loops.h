/* Loops of native.c, as nodes.cpp finds them: in a capsule of that module. */

#ifndef MEMSAVE_LOOPS_H
#define MEMSAVE_LOOPS_H

#include <float.h>
#include <stddef.h>
#include <stdint.h>

/* To be counted up, in native.py too, with each change of what is below or of what Python calls: so that
   nothing runs that was compiled from another state of the sources. */
enum { INTERFACE = 28 };

/* Kinds of numbers. */
enum { OF_FLOAT, OF_DOUBLE, OF_BFLOAT16, OF_FLOAT16 };

/* What some of the work is, from start to end, and by which thread. */
typedef void Loop(const void *work, ptrdiff_t start, ptrdiff_t end, ptrdiff_t thread);

/* Dense, and in storage order; eight elements share a byte of bits, the first in the lowest. */
typedef struct {
    const void *x;
    void *y;
    uint8_t *bits;
    double a, b;
    const void *also; /* of loops that read two */
} Arrays;

/* Of which torch says that it cannot be converted without overflow, to a dtype as DLPack names it. */
static inline int is_beyond(double number, int code, int bits) {
    const double size = number < 0 ? -number : number;
    const double largest = bits == 64 ? DBL_MAX : bits == 32 ? FLT_MAX : code == 4 ? 0x1.fep127 : 65504;
    return size > largest && size <= DBL_MAX;
}

/* Sizes of max pooling, by axis: 1 (or no padding) for those that are missing. */
typedef struct {
    ptrdiff_t in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
} Window;
enum { LARGEST_WINDOW = 256 }; /* in places */

/* Adaptive max pooling of whole planes: sizes by axis (1 for those that are missing), and of each output
   where in its plane the maximum is. */
typedef struct {
    const void *x;
    void *y;
    int64_t *places;
    ptrdiff_t in[3], out[3];
} Adaptive;

/* Batch normalization forwards, in train mode. Of fewer elements, what its loop saves is less than a Python function
   takes (on two cores, as measured); and of fewer places, it has nothing to take together. */
enum { LEAST_ELEMENTS = 75000, LEAST_PLACES = 8 };
typedef struct {
    const void *x, *weight, *bias; /* or NULL, the last two */
    void *y, *mean, *squares, *running_mean, *running_var; /* or NULL, the last two */
    ptrdiff_t batch, channels, places;
    double momentum, eps;
} BatchNorm;

/* Normalization, backwards: gradients of x, weight and bias, from x or from y, of rows. */
typedef struct {
    const void *g, *kept, *mean, *rstd, *weight, *bias, *inverse; /* or NULL, the last five */
    void *dx, *dweight, *dbias;                                   /* or NULL; a row for each thread */
    double *totals;           /* of native.c, for two rows of sums for each thread; or NULL */
    ptrdiff_t features;       /* or channels of a group */
    ptrdiff_t groups, places; /* or 1 */
    double shift;             /* added to the weight */
    int from_y, centered;
} Norm;

/* Softmax of rows, times what is wanted of all classes together, less that of each: 1 of the row's class, or
   their probabilities; smoothed over all, and times their weights. Each row times its factor; where that is 0,
   its class may be none. Those of an image are its places. */
typedef struct {
    const void *x;
    const float *factors;
    const int64_t *classes;
    const void *probabilities, *weights; /* or NULL, as are classes beside probabilities */
    void *y;
    ptrdiff_t features, places;
    double smoothing;
    float *aside; /* of native.c, for exponentials of each thread; or NULL */
} Softmax;

/* A Mersenne twister, as torch has it: the next word to take, and how many there are until all are made
   anew (at 1). */
enum { TWISTER_WORDS = 624 };
typedef struct {
    uint32_t *words;
    ptrdiff_t next, left;
} Twister;

/* Of torch: of no more elements, a loop is left to one thread. */
enum { GRAIN = 32768 };

/* Whether torch leaves no elements of a thread over, as too few for a vector of any dtype and instruction set.
   (In softshrink they give zeros that have the sign of x; and in 16 bits others than those of vectors.) */
static inline int fills_vectors(ptrdiff_t elements, ptrdiff_t threads) {
    const ptrdiff_t most = (elements + GRAIN - 1) / GRAIN, parts = threads < most ? threads : most;
    return elements % ((parts > 1 ? parts : 1) * 64) == 0;
}

#define LOOPS "memsave.kernels._native.loops"

typedef struct {
    /* Of a family, for a dtype as DLPack names it; or NULL. */
    Loop *(*of)(ptrdiff_t family, int code, int bits);
    /* Over all elements, by at most so many threads. It does not need Python's lock. */
    void (*run)(Loop *loop, const Arrays *arrays, ptrdiff_t elements, ptrdiff_t threads);
    /* Max pooling of a kind of number; whose channels are stored last, or count as planes; the same. */
    void (*pool)(int backwards, int kind, const void *x, void *y, uint8_t *offsets, ptrdiff_t planes,
                 ptrdiff_t channels, const Window *window, ptrdiff_t threads);
    void (*adaptive_pool)(const Adaptive *adaptive, int is_double, ptrdiff_t planes, ptrdiff_t threads);
    /* Rows of floats or doubles, or groups of several places; the same, with these threads. */
    void (*norm)(const Norm *norm, int is_double, int of_groups, ptrdiff_t rows, ptrdiff_t threads);
    /* Of floats or doubles, in torch's default format. */
    void (*batch_norm)(const BatchNorm *norm, int is_double, ptrdiff_t threads);
    /* Bits of whether each of some numbers in [0, 1) is below p. */
    void (*bernoulli)(Twister *twister, uint8_t *bits, ptrdiff_t elements, double p);
    /* Of floats, bfloat16 or float16. */
    void (*softmax)(const Softmax *softmax, int kind, ptrdiff_t rows, ptrdiff_t threads);
    /* Of images that store their channels last, to y, of elements of so many bytes: 2, 4 or 8. */
    void (*channels_first)(const void *x, void *y, ptrdiff_t bytes, ptrdiff_t images, ptrdiff_t channels,
                           ptrdiff_t places, ptrdiff_t threads);
} Loops;

#endif
