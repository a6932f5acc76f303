/* comm.h - comm/: ranks communicate over host memory or the user's process group.
 *
 *     nccl (gpu_comm is a pl_comm over another), reducer, python
 *       \--> pl_comm: local and shm_init (shm_comm over a segment), hierarchy (one
 *            shm_comm per host, and links), group_comm
 *              \--> backend, ipc, core
 *
 * All kinds of communication implement one table of functions.  An operation is data
 * (pl_op); pl_comm_issue() checks it and passes it to the kind's `issue`.  Issuing
 * never waits: on shared memory it stores a counter; on a device it enqueues on the
 * side stream after the event `order->ready`.  Callers ask for completion by ticket
 * alone, so the reducer works with every kind.
 */
#ifndef PLI_COMM_H
#define PLI_COMM_H

#include "backend/backend.h"
#include "core/activity.h"
#include "core/status.h"
#include "ipc/recorder.h"

typedef struct pl_comm pl_comm;

/* Device-side order of one operation. */
typedef struct pli_order {
    pl_event *ready; /* the range is valid after this event; NULL on the CPU */
} pli_order;

/* Queries for threads other than the rank's own. */
typedef enum pli_query {
    PLI_QUERY_GONE,  /* fails if a rank is gone; does not fail the world */
    PLI_QUERY_STEP,  /* fails if the step has failed, on any rank */
    PLI_QUERY_WORLD, /* fails if a rank is gone or timed out; not if one has raised */
} pli_query;

/* The memory that steps reduce, from least_bytes to most_bytes at a time. */
typedef struct pli_reduced_range {
    size_t offset_bytes, least_bytes, most_bytes;
} pli_reduced_range;

/* Functions of every kind; none is NULL.  A kind built on another may use its base's
 * functions (pli_base_...). */
typedef struct pl_comm_ops {
    const char *name;
    pl_status (*issue)(pl_comm *comm, const pl_op *op, const pli_order *order,
                       pl_ticket *out);
    void (*work)(pl_comm *comm); /* progress; a later call returns its failure */
    pl_status (*progress)(pl_comm *comm);
    pl_status (*check_peers)(pl_comm *comm); /* progress; fails if a rank is gone */
    pl_status (*query)(pl_comm *comm, pli_query what); /* any thread */
    /* Whether the operation is known to be done on every rank; any thread. */
    int (*is_done)(pl_comm *comm, pl_ticket ticket);
    pl_status (*wait)(pl_comm *comm, pl_ticket ticket, int64_t slice_ns);
    void (*abort)(pl_comm *comm, const char *message);
    void (*record_activity)(pl_comm *comm, pl_activity activity, uint64_t step);
    void (*set_failure_message)(pl_comm *comm, const char *message);
    /* In a forked child: closes the connections.  While the child holds them, peers
     * cannot see that the parent has ended. */
    void (*forget)(pl_comm *comm);
    void (*leave)(pl_comm *comm);
    void (*destroy)(pl_comm *comm);
} pl_comm_ops;

/* Further functions of a world whose ranks share memory. */
typedef struct pli_host_ops {
    /* Leaves a bit for the peers as the n-th notice since the last issued operation,
     * with n from 1 to PLI_MOST_NOTICES.  Every rank passes this point.  One store. */
    void (*notify)(pl_comm *comm, unsigned n, unsigned bit);
    /* Waits until `rank` has left its n-th notice, and returns its bit.  If a later one
     * has replaced it, *bit is 0; if `rank` is at a barrier, 1: both ranks then find
     * the mismatch.  PL_EMISMATCH if `rank` waits for this rank. */
    pl_status (*await_notice)(pl_comm *comm, int rank, unsigned n, int64_t slice_ns,
                              unsigned *bit);
    /* Maps a range of this rank's own arena a second time; unshare_own() makes such a
     * mapping private and keeps its contents. */
    pl_status (*map_own)(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                         void **out);
    pl_status (*unshare_own)(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                             void *memory);
} pli_host_ops;

/* Further functions of a kind with a device. */
typedef struct pli_device_ops {
    /* Orders later work on `stream` after all device operations issued so far, which
     * are enqueued by then. */
    pl_status (*order)(pl_comm *comm, pl_stream *stream);
    /* Has the world's memory outlive the work on `stream`: call for each stream on
     * which a step touches it. */
    pl_status (*outlive)(pl_comm *comm, pl_stream *stream);
    /* After a failure: PL_EPEER if this device has lost means of a finished step, so
     * that the ranks' weights may differ.  Then leaves the world, with that message. */
    pl_status (*check_means)(pl_comm *comm);
    /* Gives the world other memory, and leaves the old to the caller's views of it and
     * to graphs that replay operations.  No operation may be in flight.  Not
     * collective. */
    pl_status (*renew)(pl_comm *comm);
    /* Collective, before the first step: runs operations as large as those of steps,
     * after `order->ready`, and checks the results.  Steps then neither allocate nor
     * wait on the host.  Overwrites the device's memory. */
    pl_status (*prepare)(pl_comm *comm, const pli_reduced_range *range,
                         const pli_order *order);
} pli_device_ops;

enum { PLI_MOST_NOTICES = 127 };

/* chunk_bytes over shared memory: a chunk stays in cache between two ranks. */
enum { PLI_SHM_CHUNK_BYTES = 1 << 20 };

/* A rank's handle to a world; every kind's struct begins with this one. */
struct pl_comm {
    const pl_comm_ops *ops;
    const pli_host_ops *host;     /* NULL unless the kind is shared memory itself */
    const pli_device_ops *device; /* NULL without a device */
    pl_comm *base; /* the world below: this host's ranks, or all; NULL if none */
    int rank;
    int world_size;
    char *arena; /* this rank's host memory, owned by the lowest world */
    size_t arena_bytes;
    size_t host_bytes;   /* of the arena in host memory; all of it without a device */
    char *device_memory; /* the rest of the arena; renew() changes it */
    void *device_owner; /* what the caller's allocator has returned with it; borrowed */
    pl_backend *backend; /* of device_memory; NULL if none; borrowed */
    size_t chunk_bytes;  /* best size of operations for a long range */
    int is_group_comm;
    pli_recorder *recorder; /* of this rank's steps; NULL if none; borrowed */
};

/* ---- for callers ---------------------------------------------------------------- */

static inline int pl_comm_rank(const pl_comm *comm)
{
    return comm->rank;
}

static inline int pl_comm_world_size(const pl_comm *comm)
{
    return comm->world_size;
}

static inline size_t pl_comm_arena_bytes(const pl_comm *comm)
{
    return comm->arena_bytes;
}

/* Issues op, which declares this rank's range ready, and returns at once.  Until the
 * caller has waited for op, it must not touch the range, and no other operation may
 * overlap it.  PL_EINVAL for a bad range; PL_EPEER, PL_EMISMATCH for a failed world. */
pl_status pl_comm_issue(pl_comm *comm, const pl_op *op, pl_ticket *out) PL_MUST_USE;

/* Like pl_comm_issue(), with the device-side order of the operation. */
pl_status pli_comm_issue_ordered(pl_comm *comm, const pl_op *op, const pli_order *order,
                                 pl_ticket *out) PL_MUST_USE;

/* Does the part of this rank's work that needs no waiting. */
PL_MUST_USE static inline pl_status pl_comm_progress(pl_comm *comm)
{
    return comm->ops->progress(comm);
}

/* Waits until every rank has done its part of all operations up to `ticket`, and
 * meanwhile works for every world with the same pl_progress.  PL_EAGAIN after
 * about slice_ns, so that the caller can check for signals and call again; PL_EPEER,
 * PL_ETIMEOUT and PL_EMISMATCH name the rank at fault.  On one host, once this rank has
 * done its part of an operation that ends a step, peers may see the step end at any
 * moment: the call then waits without slices, unless slice_ns is 0. */
PL_MUST_USE static inline pl_status pl_comm_wait(pl_comm *comm, pl_ticket ticket,
                                                 int64_t slice_ns)
{
    return comm->ops->wait(comm, ticket, slice_ns);
}

/* Fails the world: on every rank, all calls return PL_EPEER with `message` from now on,
 * except waits for what every rank has done.  `comm` may be NULL. */
static inline void pl_comm_abort(pl_comm *comm, const char *message)
{
    if (comm != NULL)
        comm->ops->abort(comm, message);
}

/* Tells the peers that this rank leaves: if one waits for it from now on, that wait
 * fails with this reason.  Never waits; may be called twice. */
static inline void pl_comm_leave(pl_comm *comm)
{
    comm->ops->leave(comm);
}

/* Leaves, then frees everything.  Never waits. */
static inline void pl_comm_destroy(pl_comm *comm)
{
    if (comm != NULL)
        comm->ops->destroy(comm);
}

/* Call before the first step.  The world then records its operations, its waits and the
 * rank's activity, until it is destroyed or the recorder is set to NULL. */
static inline void pli_comm_set_recorder(pl_comm *comm, pli_recorder *recorder)
{
    /* The base runs the operations of a kind without a device. */
    for (; comm != NULL; comm = comm->device == NULL ? comm->base : NULL)
        comm->recorder = recorder;
}

/* Publishes what this rank is doing, and in which step: to its peers, by plain stores,
 * and to the recorder. */
static inline void pli_comm_record_activity(pl_comm *comm, pl_activity activity,
                                            uint64_t step)
{
    comm->ops->record_activity(comm, activity, step);
    pli_recorder_activity(comm->recorder, activity, step);
}

/* Keeps `message` (a traceback, say) for peers that report a failure of this rank.
 * NULL removes it; after such a failure NULL only announces that no message follows. */
static inline void pli_comm_set_failure_message(pl_comm *comm, const char *message)
{
    comm->ops->set_failure_message(comm, message);
}

/* Whether a process group carries the operations (group_comm.h): ranks then do not
 * learn that another rank has failed or is gone. */
static inline int pli_comm_is_group_comm(const pl_comm *comm)
{
    return comm->is_group_comm;
}

/* For a caller that waits for the peers by other means than pl_comm_wait(): does this
 * rank's work, and fails if any rank has failed or is gone. */
static inline pl_status pli_comm_check_peers(pl_comm *comm)
{
    return comm->ops->check_peers(comm);
}

/* For any thread: returns PL_OK, or the failure that `what` asks about. */
static inline pl_status pli_comm_query(pl_comm *comm, pli_query what)
{
    return comm->ops->query(comm, what);
}

/* Address of byte `offset_bytes` of this rank's own arena, in host or device memory. */
static inline void *pli_comm_memory(pl_comm *comm, size_t offset_bytes)
{
    return comm->device == NULL || offset_bytes < comm->host_bytes
               ? comm->arena + offset_bytes
               : comm->device_memory + (offset_bytes - comm->host_bytes);
}

/* The world that owns the arena; it has host ops. */
static inline pl_comm *pli_comm_lowest(pl_comm *comm)
{
    while (comm->base != NULL)
        comm = comm->base;
    return comm;
}

/* Orders `stream` after all device operations issued so far; no-op without a device. */
static inline pl_status pli_comm_order(pl_comm *comm, pl_stream *stream)
{
    return comm->device != NULL ? comm->device->order(comm, stream) : PL_OK;
}

/* Functions of pl_comm_ops that forward to the base. */
void pli_base_work(pl_comm *comm);
pl_status pli_base_query(pl_comm *comm, pli_query what) PL_MUST_USE;
int pli_base_is_done(pl_comm *comm, pl_ticket ticket);
void pli_base_record_activity(pl_comm *comm, pl_activity activity, uint64_t step);
void pli_base_set_failure_message(pl_comm *comm, const char *message);
void pli_base_forget(pl_comm *comm);
void pli_base_leave(pl_comm *comm);

/* Hash of an operation; differs for different operations. */
uint64_t pli_op_hash(const pl_op *op);

const char *pli_op_kind_text(pl_op_kind kind);

/* The part of a range that `rank` owns: whole cache lines, except the last. */
void pli_part_of(size_t n_elems, size_t elem_bytes, int world_size, int rank,
                 size_t *first, size_t *n);

#endif
