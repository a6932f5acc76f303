/* seeds.h - which seeds a test of random programs draws from:
 *
 *     test_x [seeds [first seed]]
 *
 * runs more of them than the usual few, or others.
 */
#ifndef TEST_SEEDS_H
#define TEST_SEEDS_H

#include <stdint.h>
#include <stdlib.h>

typedef struct seeds {
    uint64_t n, first, last; /* `last` is among them */
    int is_usual;            /* nothing was asked for */
} seeds;

static inline seeds seeds_of(int n_words, char **words, uint64_t usual)
{
    seeds it = {.n = usual, .first = 1, .is_usual = n_words < 2};
    if (n_words > 1)
        it.n = strtoull(words[1], NULL, 10);
    if (n_words > 2)
        it.first = strtoull(words[2], NULL, 10);
    it.last = it.first + it.n - 1;
    return it;
}

#endif
