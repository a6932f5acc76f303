/* group_comm.h - a world over the collectives of a process group: one of an unknown
 * kind, or one across hosts that share no memory.
 *
 * Its arena is that of a world of one rank, its *base*.  Operations are numbered, and
 * passed to the callbacks in the order of issue, which is the same on every rank; the
 * group may run them one at a time.
 *
 * Ranks share no memory here, so only the group can notice that a rank died, and the
 * others do not learn of a failure of this world.  They may have issued any number of
 * the step's operations, and each would match one of the next step's.  So a reducer
 * ends a step that has failed with zeros, and leaves the world as it is.
 */
#ifndef PLI_GROUP_COMM_H
#define PLI_GROUP_COMM_H

#include "comm.h"

enum { PLI_MAX_GROUP_RANKS = 4096 };

typedef struct pli_group_callbacks {
    void *context;
    /* Begins an operation that has been checked; may return before it is done. */
    pl_status (*issue)(void *context, const pl_op *op, pl_ticket ticket);
    /* Returns once all operations up to `ticket` are done; PL_EAGAIN is allowed. */
    pl_status (*wait)(void *context, pl_ticket ticket);
    /* The group comm has failed: no begun operation is waited for any more. */
    void (*drop)(void *context);
} pli_group_callbacks;

typedef struct pli_group_comm_options {
    int rank;
    int world_size; /* 1 to PLI_MAX_GROUP_RANKS */
    pl_comm *base;  /* owned by the group comm on success */
    pli_group_callbacks callbacks;
} pli_group_comm_options;

/* *out: free it with pl_comm_destroy(). */
pl_status pli_group_comm_create(const pli_group_comm_options *options,
                                pl_comm **out) PL_MUST_USE;

#endif
