/* failure.h - one number that says who failed the world, when and why.
 *
 * The first to notice a failure writes it; later ones of the same epoch are its
 * consequences and change nothing.  A final failure (any but PLI_RAISED) stands for
 * good, in a later epoch than one that was raised.  The number packs
 *
 *     epoch : 40 | rank : 8 | reason : 8 | 1 : 8        0: nothing has failed
 *
 * so that one atomic load tells a rank on its fast path that all is well.
 */
#ifndef PLI_FAILURE_H
#define PLI_FAILURE_H

#include "segment.h"

typedef struct pli_failure {
    uint64_t epoch;
    int rank;
    pli_reason reason;
} pli_failure;

/* Non-zero, with *out filled, where the world has failed. */
int pli_failure_get(const pli_shm_segment *segment, pli_failure *out);

/* Non-zero, with *out filled, where a step of `epoch` failed before anything final:
 * what a rank of that epoch is to be told, though others have given up and left since.
 */
int pli_failure_raised_in(const pli_shm_segment *segment, uint64_t epoch,
                          pli_failure *out);

/* Non-zero where that failure ends what a rank does in `epoch`. */
int pli_failure_concerns(const pli_failure *failure, uint64_t epoch);

int pli_failure_is_final(const pli_failure *failure);

/* Records a failure, unless an earlier one of that epoch or a final one stands, and
 * wakes every waiting rank. */
void pli_failure_set(const pli_shm_segment *segment, const pli_failure *failure);

/* Reports the standing failure to rank `me`: the status that it carries,
 * with the culprit, what both ranks were doing, and the culprit's own message. */
pl_status pli_failure_report(const pli_shm_segment *segment, const pli_failure *failure,
                             int me, const char *waiting_for) PL_MUST_USE;

/* Wakes every rank that sleeps in a wait. */
void pli_wake_ranks(const pli_shm_segment *segment);

#endif
