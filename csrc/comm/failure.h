/* failure.h - one number that records which rank failed the world, when and why.
 *
 * The first rank to notice a failure writes it.  It stands as long as the world; later
 * failures are its consequences and change nothing.  The number packs
 *
 *     rank : 16 | reason : 8 | 1 : 8       0: nothing has failed
 *
 * so a rank's fast path needs one atomic load to see that nothing has failed.
 */
#ifndef PLI_FAILURE_H
#define PLI_FAILURE_H

#include <limits.h>

#include "core/backoff.h"
#include "segment.h"

typedef struct pli_failure {
    int rank;
    pli_reason reason;
} pli_failure;

/* Returns non-zero and fills *out if the world has failed. */
static inline int pli_failure_get(const pli_shm_segment *segment, pli_failure *out)
{
    const uint64_t word = atomic_load(&pli_header_of(segment)->failure);
    if (word != 0)
        *out = (pli_failure){.rank = (int)(word >> 16 & 0xffff),
                             .reason = (pli_reason)(word >> 8 & 0xff)};
    return word != 0;
}

/* Records a failure, unless one stands, and wakes every waiting rank. */
void pli_failure_set(const pli_shm_segment *segment, const pli_failure *failure);

/* Returns the status of a failure for rank `me`.  The message has the
 * culprit, what both ranks were doing, and the culprit's own message. */
pl_status pli_failure_report(const pli_shm_segment *segment, const pli_failure *failure,
                             int me, const char *waiting_for) PL_MUST_USE;

/* Wakes every rank that sleeps in a wait. */
static inline void pli_wake_ranks(const pli_shm_segment *segment)
{
    pli_header *header = pli_header_of(segment);
    /* Sequentially consistent, like the caller's store and the waiter's count and
     * loads: either this sees the waiter, or the waiter sees what was stored. */
    if (atomic_load(&header->n_waiters) == 0)
        return;
    atomic_fetch_add(&header->wakeup, 1);
    pli_futex_wake(&header->wakeup, INT_MAX);
}

#endif
