/* How the compiler comes to vectors of the elements of a loop. */

#ifndef MEMSAVE_VECTORS_H
#define MEMSAVE_VECTORS_H

#include <stdint.h>

/* The compiler makes each loop for some instruction sets; which one runs is found at load. (With those
   of x86-64-v4 it would load under masks what it selects, which costs more than they give: so they are for
   loops that compute, and those that load all they compare. Vectors have 256 bits there, too: see setup.py.) */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define V3 static __attribute__((target("arch=x86-64-v3")))
#define IS_V3 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
#define LOOP static __attribute__((target_clones("arch=x86-64-v3", "default")))
#define WIDE_LOOP static __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LOOP static
#define WIDE_LOOP static
#endif

/* Elements do not depend on each other, also where y is x; on none of the few before; or only in their
   sums, or their largest. */
#if defined(__GNUC__) /* with -fopenmp-simd */
#define PRAGMA(TEXT) _Pragma(#TEXT)
#define EACH PRAGMA(omp simd)
#define EACH_OF_FEW PRAGMA(omp simd safelen(64))
#define SUMMED(...) PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#define UNITED(WORD) PRAGMA(omp simd reduction(| : WORD))
#define LARGEST_OF(MOST) PRAGMA(omp simd reduction(max : MOST))
#define LARGEST(MOST, WORD) PRAGMA(omp simd reduction(max : MOST) reduction(| : WORD))
#define PREFETCH(ADDRESS) __builtin_prefetch(ADDRESS)
#define INLINE static inline __attribute__((always_inline))
#else
#define EACH
#define EACH_OF_FEW
#define SUMMED(...)
#define UNITED(WORD)
#define LARGEST_OF(MOST)
#define LARGEST(MOST, WORD)
#define PREFETCH(ADDRESS) (void)(ADDRESS)
#define INLINE static inline
#endif

/* The bits of some elements at a time are a WORD: 1 << k of each (which not all vectors can shift). */
#define EIGHT(K) 1u << K, 2u << K, 4u << K, 8u << K, 16u << K, 32u << K, 64u << K, 128u << K
static const uint8_t BIT_OF_uint8_t[] = {EIGHT(0)};
static const uint16_t BIT_OF_uint16_t[] = {EIGHT(0), EIGHT(8)};
static const uint32_t BIT_OF_uint32_t[] = {EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)};
#define BITS(WORD) (size)(8 * sizeof(WORD))

#endif
