/* nccl.h - one NCCL communicator.
 *
 * A call may block for as long as a peer keeps NCCL waiting; the watchdog notices, and
 * aborts the communicator.
 *
 * One thread at a time enqueues.  Any thread may check or abort, also while another is
 * inside NCCL.
 */
#ifndef PLI_NCCL_H
#define PLI_NCCL_H

#include "backend/backend.h"
#include "comm/comm.h"
#include "nccl_library.h"

typedef struct pli_nccl pli_nccl;

typedef struct pli_nccl_options {
    pli_nccl_library *library; /* borrowed until destroyed, as is all below */
    pl_backend *backend;       /* cuda */
    int rank;
    int world_size;
    const char *id; /* PLI_NCCL_ID_BYTES, the same on every rank; not kept */
    int64_t deadline_ns;
    /* Called now and then while the ranks meet: a failure ends the wait. */
    pl_status (*poll)(void *context);
    void *context;
} pli_nccl_options;

/* Makes the id on one rank, which sends it to all others. */
pl_status pli_nccl_new_id(const pli_nccl_library *library, pl_backend *backend,
                          char id[PLI_NCCL_ID_BYTES]) PL_MUST_USE;

/* Collective: returns once all ranks have joined.  PL_ETIMEOUT after the deadline. */
pl_status pli_nccl_create(const pli_nccl_options *options, pli_nccl **out) PL_MUST_USE;

/* PL_EINVAL if NCCL has no operation for `op`. */
pl_status pli_nccl_can(const pl_op *op) PL_MUST_USE;

/* Enqueues op on `memory`, this rank's range, after the work on `stream`. */
pl_status pli_nccl_enqueue(pli_nccl *nccl, const pl_op *op, void *memory,
                           pl_stream *stream) PL_MUST_USE;

/* Records that the latest operation was captured into a graph.  NULL is allowed. */
void pli_nccl_record_captured(pli_nccl *nccl);

/* Returns NCCL's asynchronous error, or PL_OK; PL_ETIMEOUT if a call has been inside
 * NCCL for longer than the deadline.  Never waits. */
pl_status pli_nccl_check(pli_nccl *nccl) PL_MUST_USE;

/* Ends the communicator's work on the device at once; nothing can be enqueued
 * afterwards.  Any thread may call, also twice.  NCCL then frees its resources, which
 * may depend on graphs of the user or on other work on the device: the wait for that is
 * limited. */
void pli_nccl_abort(pli_nccl *nccl);

/* Waits up to most_ns until NCCL has flushed finished work, so that peers that still
 * receive it come to no harm; then aborts.  If graphs may hold operations, destroys the
 * communicator instead, in a thread left behind if that takes too long. */
void pli_nccl_finish(pli_nccl *nccl, int64_t most_ns);

/* Aborts and frees; never waits for other ranks.  No thread may be inside.  NULL is
 * allowed. */
void pli_nccl_destroy(pli_nccl *nccl);

#endif
