/* shm_comm.h - communication over memory that every rank maps (shm_init.c).
 *
 * Each operation is cut into one part per rank.  Once every rank has posted the
 * operation, the owner of a part computes it in place in all arenas:
 *
 *     rank 0 posts ------\                 /-- rank 0 does part 0 --\
 *     rank 1 posts ------->  all posted  --+                         +-> all done
 *     rank 2 posts ------/                 \-- rank 1 does part 1 --/
 *
 * Posting is one store and never waits.  A rank does its parts in its other calls, such
 * as pl_comm_progress() and any wait.  Between "all posted" and "all done" an arena
 * belongs to the owners of the parts; before and after, to its rank.
 */
#ifndef PLI_SHM_COMM_H
#define PLI_SHM_COMM_H

#include "backend/cpu_sum.h"
#include "comm.h"
#include "peer_watch.h"
#include "progress.h"
#include "segment.h"

typedef struct pli_shm_comm {
    pl_comm super;
    pli_shm_segment *segment;
    const pli_sum_table *sums;
    pli_progress *progress; /* borrowed until destroyed; NULL: none */
    pli_watch watch;
    int64_t deadline_ns;
    int owner_pid; /* a forked child must not leave for its parent */
    int n_spins;
    _Atomic uint64_t n_posted; /* by this rank */
    uint64_t n_done;           /* guarded by busy */
    atomic_flag busy;          /* held while a thread does this rank's parts */
    pl_op *ring;               /* the last ring_ops operations */
    atomic_flag is_writing;    /* held while a thread writes the failure message */
    pli_stopwatch silence;     /* since the awaited rank last showed life */
    uint64_t last_sign;        /* ... and a hash of its counters then */
    unsigned n_checks;         /* of the peers, so far */
    int notice_from;           /* the rank whose notice this one waits for */
} pli_shm_comm;

typedef struct pli_shm_comm_options {
    pli_shm_segment *segment; /* one share of it passes to the comm on success */
    pli_progress *progress;
    int rank;
    int64_t deadline_ns;
    int pid; /* 0: a thread, which is not watched */
} pli_shm_comm_options;

/* Joins rank `options->rank` to a mapped segment. */
pl_status pli_shm_comm_create(const pli_shm_comm_options *options,
                              pli_shm_comm **out) PL_MUST_USE;

#endif
