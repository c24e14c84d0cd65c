/* Random numbers as torch's generator of the CPU draws them, several at a time: a Mersenne twister
   (M. Matsumoto, T. Nishimura, https://doi.org/10.1145/272991.272995), which torch asks for one number
   after the other. nodes/dropout.h has the generator, and compares with torch before it believes this. */

#pragma once

#include <math.h>

#include "elements.h"

enum { MIDDLE = 397, BLOCK = 1024 };

static inline uint32_t twist(uint32_t word, uint32_t next) {
    return ((word & 0x80000000u) | (next & 0x7fffffffu)) >> 1 ^ (next & 1 ? 0x9908b0dfu : 0);
}

/* A word may be made of those before it, if they are further away than a vector is long. */
LOOP void make_words(uint32_t *word) {
    EACH for (size k = 0; k < TWISTER_WORDS - MIDDLE; k++)
        word[k] = word[k + MIDDLE] ^ twist(word[k], word[k + 1]);
    EACH_OF_FEW for (size k = TWISTER_WORDS - MIDDLE; k < TWISTER_WORDS - 1; k++)
        word[k] = word[k + MIDDLE - TWISTER_WORDS] ^ twist(word[k], word[k + 1]);
    word[TWISTER_WORDS - 1] = word[MIDDLE - 1] ^ twist(word[TWISTER_WORDS - 1], word[0]);
}

LOOP void temper(const uint32_t *word, uint32_t *out, size count) {
    EACH for (size k = 0; k < count; k++) {
        uint32_t y = word[k];
        y ^= y >> 11;
        y ^= y << 7 & 0x9d2c5680u;
        y ^= y << 15 & 0xefc60000u;
        out[k] = y ^ y >> 18;
    }
}

/* A number has 53 bits: the last ones of a word, then the next word. */
LOOP void are_below(const uint32_t *words, uint64_t limit, uint8_t *bits, size elements) {
    for (size i = 0; i < elements; i += BITS(uint32_t)) {
        uint32_t word = 0;
        UNITED(word) for (size k = 0; k < BITS(uint32_t); k++) {
            const uint64_t high = words[2 * (i + k)] & 0x1fffff, low = words[2 * (i + k) + 1];
            word |= (int64_t)(high << 32 | low) < (int64_t)limit ? BIT_OF_uint32_t[k] : 0;
        }
        const size left = (elements - i + 7) / 8;
        memcpy(bits + i / 8, &word, left < 4 ? (size_t)left : 4);
    }
}

static void bernoulli(Twister *twister, uint8_t *bits, ptrdiff_t elements, double p) {
    const uint64_t limit = (uint64_t)ceil(p * 9007199254740992.0); /* 2^53: exact, as is p's product */
    uint32_t words[2 * BLOCK] = {0};
    for (size done = 0, count; done < elements; done += count) {
        count = at_most(elements - done, BLOCK);
        for (size made = 0, some; made < 2 * count; made += some) {
            if (twister->left == 1) {
                make_words(twister->words);
                twister->next = 0, twister->left = TWISTER_WORDS + 1;
            }
            some = at_most(twister->left - 1, 2 * count - made);
            temper(twister->words + twister->next, words + made, some);
            twister->next += some, twister->left -= some;
        }
        are_below(words, limit, bits + done / 8, count);
    }
    if (elements % 8) bits[elements / 8] &= (1 << elements % 8) - 1;
}
