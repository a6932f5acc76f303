/* nccl.h - one NCCL communicator.
 *
 * Calls may block, for as long as a peer makes NCCL wait: the watchdog sees it, and
 * aborts.  Where the communicator does not block (PACELINE_NCCL_BLOCKING=0), what NCCL
 * has not ended is waited for here, with a deadline, and with a check of the peers,
 * whom NCCL does not watch.
 *
 * One thread at a time enqueues; check and abort are for any thread, also while another
 * is inside of NCCL.
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
    /* Called now and then by whoever waits for NCCL: non-PL_OK gives up with that. */
    pl_status (*poll)(void *context);
    void *context;
} pli_nccl_options;

/* What one rank makes and gives to all. */
pl_status pli_nccl_new_id(const pli_nccl_library *library, pl_backend *backend,
                          char id[PLI_NCCL_ID_BYTES]) PL_MUST_USE;

/* Meets the other ranks; returns once all have.  PL_ETIMEOUT after the deadline. */
pl_status pli_nccl_create(const pli_nccl_options *options, pli_nccl **out) PL_MUST_USE;

/* PL_EINVAL for what NCCL has no operation for. */
pl_status pli_nccl_can(const pl_op *op) PL_MUST_USE;

/* Enqueues op on `memory`, this rank's range, behind what `stream` holds. */
pl_status pli_nccl_enqueue(pli_nccl *nccl, const pl_op *op, void *memory,
                           pl_stream *stream) PL_MUST_USE;

/* Every rank's block r to rank r, and into each rank's blocks one of every other rank:
 * its own is left alone. */
typedef struct pli_nccl_swap {
    const char *from;
    char *to;
    size_t from_stride_bytes; /* from a rank's block to the next rank's */
    size_t to_stride_bytes;
    size_t n_bytes; /* of a block */
} pli_nccl_swap;
pl_status pli_nccl_swap_blocks(pli_nccl *nccl, const pli_nccl_swap *swap,
                               pl_stream *stream) PL_MUST_USE;

/* What was enqueued last was captured into a graph.  NULL is allowed. */
void pli_nccl_record_captured(pli_nccl *nccl);

/* An error that came up later, in NCCL's own terms; PL_OK: none.  PL_ETIMEOUT where a
 * call has kept its thread inside of NCCL for longer than the deadline.  Never waits.
 */
pl_status pli_nccl_check(pli_nccl *nccl) PL_MUST_USE;

/* Device memory that NCCL prefers, where it has such; else the backend's.  Zeros. */
typedef struct pli_nccl_memory {
    void *address;
    size_t n_bytes;
    int is_of_nccl;
} pli_nccl_memory;
pl_status pli_nccl_alloc(const pli_nccl_library *library, pl_backend *backend,
                         size_t n_bytes, pli_nccl_memory *out) PL_MUST_USE;

/* The device is through with the memory: nothing here waits for that. */
void pli_nccl_free(const pli_nccl_library *library, pl_backend *backend,
                   pli_nccl_memory *memory);

/* Tells NCCL of memory of its own; NULL where it does not care.  The handle is for
 * pli_nccl_deregister(), or ends with the communicator. */
void *pli_nccl_register(pli_nccl *nccl, const pli_nccl_memory *memory);
void pli_nccl_deregister(pli_nccl *nccl, void *handle);

/* Ends what runs on the device at once, in any thread; nothing can be enqueued any
 * more.  May be called twice.  What NCCL frees behind that is waited for only so long:
 * it may have to wait for graphs of the user's, or for other work on the device. */
void pli_nccl_abort(pli_nccl *nccl);

/* Waits for up to most_ns for NCCL to hand over what the device has done already,
 * and so does no harm to peers that are still at it; then as abort.  Where graphs may
 * hold operations, or NCCL is older than 2.14, it is left to itself then. */
void pli_nccl_finish(pli_nccl *nccl, int64_t most_ns);

/* Aborts, and frees; never waits for other ranks.  No thread may be inside.  NULL is
 * allowed. */
void pli_nccl_destroy(pli_nccl *nccl);

#endif
