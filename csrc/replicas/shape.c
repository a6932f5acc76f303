/* shape.c - parts join where no other dimension differs. */
#include "shape.h"

int pli_shape_dim(const pli_shape *shape, int64_t dim)
{
    const int64_t counted = dim < 0 ? dim + shape->n_dims : dim;
    return counted >= 0 && counted < shape->n_dims ? (int)counted : -1;
}

int pli_shape_joins(const pli_shape *first, const pli_shape *other, int dim)
{
    if (first->n_dims != other->n_dims)
        return 0;
    for (int d = 0; d < first->n_dims; d++)
        if (d != dim && first->sizes[d] != other->sizes[d])
            return 0;
    return 1;
}
