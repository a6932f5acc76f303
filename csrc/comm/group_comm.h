/* group_comm.h - a world over the collectives of a process group that we know nothing
 * of, or that joins hosts which share no memory.
 *
 * It has an arena like any other world: that of a world of one rank, its *base*.
 * Operations are numbered, and handed to the callbacks in the order in which they are
 * issued, which is every rank's; a group may do them one after another only.
 *
 * Ranks share no memory here: a rank that dies is noticed by the group,
 * if by anybody, and a step that failed on this rank cannot be left behind together
 * with the others, who do not know: they may have issued any number of operations of
 * it, each of which would meet one of the next step's.  So a group comm that has failed
 * stays so, and says why.  (A step that fails before its first operation does not fail
 * the group comm.)
 */
#ifndef PLI_GROUP_COMM_H
#define PLI_GROUP_COMM_H

#include "comm.h"

enum { PLI_MAX_GROUP_RANKS = 4096 };

typedef struct pli_group_callbacks {
    void *context;
    /* Begins an operation that was checked; may return before it is done. */
    pl_status (*issue)(void *context, const pl_op *op, pl_ticket ticket);
    /* Returns once all operations up to `ticket` are done; PL_EAGAIN is allowed. */
    pl_status (*wait)(void *context, pl_ticket ticket);
    /* The group comm has failed: nothing that was begun is waited for any more. */
    void (*drop)(void *context);
} pli_group_callbacks;

typedef struct pli_group_comm_options {
    int rank;
    int world_size; /* 1 to PLI_MAX_GROUP_RANKS */
    pl_comm *base;  /* the group comm's on success, and destroyed with it */
    pli_group_callbacks callbacks;
} pli_group_comm_options;

/* *out: for pl_comm_destroy(). */
pl_status pli_group_comm_create(const pli_group_comm_options *options,
                                pl_comm **out) PL_MUST_USE;

#endif
