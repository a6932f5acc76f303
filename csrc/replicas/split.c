/* split.c - splits whole rows, in order and as evenly as possible; parts can be joined
 * if they differ in no other dimension. */
#include "split.h"

int64_t pli_split_parts(int64_t n_rows, int64_t n_replicas)
{
    const int64_t n_parts = n_replicas < n_rows ? n_replicas : n_rows;
    return n_parts < 1 ? 1 : n_parts;
}

pli_rows pli_split_rows(int64_t n_rows, int64_t n_parts, int64_t k)
{
    const int64_t n_each = n_rows / n_parts;
    const int64_t n_larger = n_rows % n_parts;
    return (pli_rows){.begin = k * n_each + (k < n_larger ? k : n_larger),
                      .n = n_each + (k < n_larger)};
}

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
