/* split.h - how the rows of a batch are divided over replicas, and which outputs can be
 * joined: pure arithmetic.
 *
 *     rows 0 .. 6 over 3 replicas:   0 1 2 | 3 4 | 5 6      the larger parts first
 */
#ifndef PLI_SPLIT_H
#define PLI_SPLIT_H

#include "core/layout.h"

typedef struct pli_rows {
    int64_t begin;
    int64_t n;
} pli_rows;

/* How many of n_replicas take part: as many as get a row each, but at least one. */
int64_t pli_split_parts(int64_t n_rows, int64_t n_replicas);

/* The rows of part k of n_parts. */
pli_rows pli_split_rows(int64_t n_rows, int64_t n_parts, int64_t k);

enum { PLI_SHAPE_UNKNOWN = -1 }; /* n_dims of a nested tensor */

typedef struct pli_shape {
    int n_dims;
    int is_strided; /* not sparse, not nested */
    int64_t sizes[PLI_MAX_DIMS];
} pli_shape;

/* `dim` counted from the front, or -1 if the shape has no such dimension. */
int pli_shape_dim(const pli_shape *shape, int64_t dim);

/* Non-zero if the two differ in no dimension but `dim`, counted from the front. */
int pli_shape_joins(const pli_shape *first, const pli_shape *other, int dim);

#endif
