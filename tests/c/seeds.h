/* seeds.h - the seeds from which a test of random programs draws:
 *
 *     test_x [seeds [first seed]]
 *
 * runs more seeds than the usual few, or different ones.
 */
#ifndef TEST_SEEDS_H
#define TEST_SEEDS_H

#include <stdint.h>
#include <stdlib.h>

#include "check.h"

typedef struct seeds {
    uint64_t n, first, last; /* `last` is included */
} seeds;

static inline seeds seeds_of(uint64_t usual)
{
    seeds it = {.n = usual, .first = 1};
    if (check_words != NULL)
        it.n = strtoull(check_words[0], NULL, 10);
    if (check_words != NULL && check_words[1] != NULL)
        it.first = strtoull(check_words[1], NULL, 10);
    it.last = it.first + it.n - 1;
    return it;
}

#define EACH_SEED(seed, usual)                                                         \
    for (uint64_t seed = seeds_of(usual).first; seed <= seeds_of(usual).last; seed++)

#endif
