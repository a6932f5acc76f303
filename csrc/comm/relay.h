/* relay.h - a world whose operations somebody else carries: the collectives of a
 * process group that we know nothing of, or that joins hosts which share no memory.
 *
 * A relay has an arena like any other world: that of a world of one rank, its *base*.
 * Operations are numbered, and handed to the carrier in the order in which they are
 * issued, which is every rank's; a carrier may do them one after another only.
 *
 * There are no words in shared memory here: a rank that dies is noticed by the carrier,
 * if by anybody, and a step that failed on this rank cannot be left behind together
 * with the others, who do not know.  So a relay that has failed stays so, and says why.
 */
#ifndef PLI_RELAY_H
#define PLI_RELAY_H

#include "comm.h"

typedef struct pli_relay_carrier {
    void *context;
    /* Begins an operation that was checked; may return before it is done. */
    pl_status (*issue)(void *context, const pl_op *op, pl_ticket ticket);
    /* Returns once all operations up to `ticket` are done; PL_EAGAIN is allowed. */
    pl_status (*wait)(void *context, pl_ticket ticket);
    /* The relay has failed: nothing that was begun is waited for any more. */
    void (*drop)(void *context);
} pli_relay_carrier;

typedef struct pli_relay_options {
    int rank;
    int world_size; /* 1 to PL_MAX_RANKS */
    pl_comm *base;  /* the relay's on success, and destroyed with it */
    pli_relay_carrier carrier;
} pli_relay_options;

/* *out: for pl_comm_destroy(). */
pl_status pli_relay_create(const pli_relay_options *options, pl_comm **out) PL_MUST_USE;

#endif
