/* reduce_add.c - one sum of the backend. */
#include "reduce_add.h"

pl_status pli_reduce_add(pl_backend *backend, const void *const *rows, int n_rows,
                         void *to, pl_dtype dtype, size_t n_elems)
{
    pl_status st = PL_OK;
    const pl_move only = {to, n_rows == 1 ? rows[0] : NULL, dtype, n_elems};
    const pl_rank_ranges all = {.to = to,
                                .addresses = rows,
                                .n_ranks = n_rows,
                                .dtype = dtype,
                                .reduction = PL_SUM,
                                .n_elems = n_elems};
    if (n_rows == 1)
        PL_TRY(backend->ops->copy(backend, &only, 1, NULL));
    else
        PL_TRY(backend->ops->sum(backend, &all, NULL));
done:
    return st;
}
