/* split.h - how the rows of a batch are divided over replicas: pure arithmetic.
 *
 *     rows 0 .. 6 over 3 replicas:   0 1 2 | 3 4 | 5 6      the larger parts first
 */
#ifndef PLI_SPLIT_H
#define PLI_SPLIT_H

#include <stdint.h>

typedef struct pli_rows {
    int64_t begin;
    int64_t n;
} pli_rows;

/* How many of n_replicas take part: as many as have a row each, and one at the least.
 */
int64_t pli_split_parts(int64_t n_rows, int64_t n_replicas);

/* The rows of part k of n_parts. */
pli_rows pli_split_rows(int64_t n_rows, int64_t n_parts, int64_t k);

#endif
