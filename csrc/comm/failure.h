/* failure.h - one number that records which rank failed the world, when and why.
 *
 * The first rank to notice a failure writes it; later failures of the same epoch are
 * its consequences and change nothing.  A final failure (any but PLI_RAISED) is
 * permanent; it replaces only a raised failure of an earlier epoch.  The number packs
 *
 *     epoch : 32 | rank : 16 | reason : 8 | 1 : 8       0: nothing has failed
 *
 * so a rank's fast path needs one atomic load to see that nothing has failed.
 */
#ifndef PLI_FAILURE_H
#define PLI_FAILURE_H

#include "segment.h"

typedef struct pli_failure {
    uint64_t epoch;
    int rank;
    pli_reason reason;
} pli_failure;

/* Returns non-zero and fills *out if the world has failed. */
int pli_failure_get(const pli_shm_segment *segment, pli_failure *out);

/* Returns non-zero and fills *out if a step of `epoch` failed before any final failure.
 * A rank of that epoch must report this one, even if others have since left. */
int pli_failure_raised_in(const pli_shm_segment *segment, uint64_t epoch,
                          pli_failure *out);

/* Whether the failure ends what a rank does in `epoch`. */
int pli_failure_concerns(const pli_failure *failure, uint64_t epoch);

int pli_failure_is_final(const pli_failure *failure);

/* Records a failure, unless a final one or one of that epoch or a later one stands, and
 * wakes every waiting rank. */
void pli_failure_set(const pli_shm_segment *segment, const pli_failure *failure);

/* Returns the status of the standing failure for rank `me`.  The message has the
 * culprit, what both ranks were doing, and the culprit's own message. */
pl_status pli_failure_report(const pli_shm_segment *segment, const pli_failure *failure,
                             int me, const char *waiting_for) PL_MUST_USE;

/* Wakes every rank that sleeps in a wait. */
void pli_wake_ranks(const pli_shm_segment *segment);

#endif
