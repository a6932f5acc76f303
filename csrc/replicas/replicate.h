/* replicate.h - keeps copies of a model's tensors up to date.
 *
 * Modules write buffers behind autograd's version counters (batch norm does), so what
 * differs is found by comparing bytes: for host memory.
 */
#ifndef PLI_REPLICATE_H
#define PLI_REPLICATE_H

#include "backend/backend.h"

/* Non-zero where the move would change its target. */
int pli_replicate_is_due(const pl_move *move);

/* Makes the moves that are due, in one call of the backend; those that follow each
 * other in both memories go as one.  Overwrites `moves`, which is the caller's scratch.
 */
pl_status pli_replicate(pl_backend *backend, pl_move *moves,
                        size_t n_moves) PL_MUST_USE;

#endif
