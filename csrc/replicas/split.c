/* split.c - whole rows, in order, as even as can be. */
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
