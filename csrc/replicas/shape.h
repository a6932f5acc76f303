/* shape.h - which outputs of replicas can be joined along a dimension: pure arithmetic.
 */
#ifndef PLI_SHAPE_H
#define PLI_SHAPE_H

#include "core/layout.h"

enum { PLI_SHAPE_UNKNOWN = -1 }; /* n_dims of a nested tensor */

typedef struct pli_shape {
    int n_dims;
    int is_strided; /* not sparse, not nested */
    int64_t sizes[PLI_MAX_DIMS];
} pli_shape;

/* `dim` counted from the front, or -1 where the shape has no such dimension. */
int pli_shape_dim(const pli_shape *shape, int64_t dim);

/* Non-zero where the two differ in dimension `dim`, counted from the front, alone. */
int pli_shape_joins(const pli_shape *first, const pli_shape *other, int dim);

#endif
