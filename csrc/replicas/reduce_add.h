/* reduce_add.h - the sum of what replicas have, in their order. */
#ifndef PLI_REDUCE_ADD_H
#define PLI_REDUCE_ADD_H

#include "backend/backend.h"

/* to = rows[0] + rows[1] + ...: dense elements of one layout, floating point or
 * complex; 16-bit floats in float32, rounded once.  `to` is one of the rows or overlaps
 * none.  PL_EINVAL for another number of rows than 1 to PL_MAX_RANKS. */
pl_status pli_reduce_add(pl_backend *backend, const void *const *rows, int n_rows,
                         void *to, pl_dtype dtype, size_t n_elems) PL_MUST_USE;

#endif
