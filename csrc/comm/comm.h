/* comm.h - comm/: ranks that talk through host memory, or through the user's group.
 *
 *     nccl (gpu_comm is a pl_comm over another), reducer, python
 *       \--> pl_comm: local and shm_init (shm_comm over a segment), hierarchy (a
 *            shm_comm a host, and links), group_comm
 *              \--> backend, ipc, core
 *
 * Every kind of communication stands behind one table.
 * An operation is data (pl_op) and passes one door, pl_comm_issue(), which checks
 * it and hands it to the kind's `issue`.  Issuing never waits: on shared memory it
 * stores a counter, on a device it enqueues on the communication stream behind the
 * event that `order->ready` names, and records `order->done` after it.
 * Completion is asked for by ticket alone, so the reducer does not know which kind
 * it drives.
 */
#ifndef PLI_COMM_H
#define PLI_COMM_H

#include "backend/backend.h"
#include "core/activity.h"
#include "core/status.h"
#include "ipc/recorder.h"

/* The device-side order of one operation; NULL members on the CPU. */
typedef struct pli_order {
    pl_event *ready; /* the range is valid once this has happened */
    pl_event *done;  /* to be recorded after the operation */
} pli_order;

/* One user's reference to a device's memory: it stays what it is, where it is, until
 * the last one is dropped by `release`, by any thread, be the world gone or a capture
 * under way.  The user's streams may then still read it: whoever uses the memory next
 * does so behind them, as where a tensor is freed.  A kind's own struct begins with
 * this. */
typedef struct pli_memory_ref pli_memory_ref;
struct pli_memory_ref {
    void (*release)(pli_memory_ref *ref);
};

/* What another thread than the rank's may query. */
typedef enum pli_query {
    PLI_QUERY_GONE,  /* fails where a rank is gone, and fails nothing for that */
    PLI_QUERY_STEP,  /* fails where the step has failed, on whatever rank */
    PLI_QUERY_WORLD, /* fails where no step can follow: a rank is gone, or was late */
} pli_query;

/* Operations that differ in their size: from n_least elements to the op's. */
typedef struct pli_op_range {
    pl_op op;
    size_t n_least;
} pli_op_range;

/* What every kind has; none is NULL.  A kind that stands on another may leave a
 * function to its base (pli_base_...). */
typedef struct pl_comm_ops {
    const char *name;
    pl_status (*issue)(pl_comm *comm, const pl_op *op, const pli_order *order,
                       pl_ticket *out);
    void (*work)(pl_comm *comm); /* progress, but failures are left to be met later */
    pl_status (*progress)(pl_comm *comm);
    pl_status (*check_peers)(
        pl_comm *comm); /* progress; a rank that is gone fails it */
    pl_status (*query)(pl_comm *comm, pli_query what); /* any thread */
    /* Whether an operation is known to be done on every rank; any thread. */
    int (*is_done)(pl_comm *comm, pl_ticket ticket);
    pl_status (*wait)(pl_comm *comm, pl_ticket ticket, int64_t slice_ns);
    pl_status (*recover)(pl_comm *comm, int64_t slice_ns, pl_recovery *out);
    void (*abort)(pl_comm *comm, const char *message);
    void (*record_activity)(pl_comm *comm, pl_activity activity, uint64_t step);
    void (*set_failure_message)(pl_comm *comm, const char *message);
    /* In a forked child: closes connections, whose end the peers could not see while
     * the child has them. */
    void (*forget)(pl_comm *comm);
    void (*leave)(pl_comm *comm);
    void (*destroy)(pl_comm *comm);
} pl_comm_ops;

/* What ranks that share memory have beside. */
typedef struct pli_host_ops {
    /* Like abort, but permanent: nothing recovers from it. */
    void (*end)(pl_comm *comm, const char *message);
    /* A bit for the peers, at a point that all ranks pass: behind the operations issued
     * so far, the n-th notice there, of 1 to PLI_MOST_NOTICES.  One store. */
    void (*notify)(pl_comm *comm, unsigned n, unsigned bit);
    /* Waits until `rank` has been at this point, and no longer; 0 where it has passed
     * it.  PL_EMISMATCH where it waits for this rank to go on; 1 where it is at a
     * barrier, so that both find out. */
    pl_status (*await_notice)(pl_comm *comm, int rank, unsigned n, int64_t slice_ns,
                              unsigned *bit);
    /* Maps a range of this rank's own arena once more, and makes such a mapping private
     * with its contents. */
    pl_status (*map_own)(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                         void **out);
    pl_status (*unshare_own)(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                             void *memory);
} pli_host_ops;

/* What a kind with a device has beside. */
typedef struct pli_device_ops {
    /* All device operations issued so far come before what `stream` does from now on.
     * They have been enqueued by the time it returns. */
    pl_status (*order)(pl_comm *comm, pl_stream *stream);
    /* A step has failed: what `stream` holds may still touch the device's memory, and
     * no operation is behind it.  What the world does from now on is, and the end of
     * that memory. */
    void (*follow)(pl_comm *comm, pl_stream *stream);
    /* A further share of the device's memory as it is now; and other memory in its
     * place, contents undefined, where no operation is under way.  What is retained
     * stays.  Each rank for itself. */
    pli_memory_ref *(*retain_memory)(pl_comm *comm);
    pl_status (*renew)(pl_comm *comm);
    /* Collective, before the first step: tries operations as steps will issue them,
     * behind `order->ready`, so that none of these has to allocate, or to wait on the
     * host, and checks what came.  What the device's memory had in it is lost, but for
     * what is retained. */
    pl_status (*prepare)(pl_comm *comm, const pli_op_range *ranges, size_t n_ranges,
                         const pli_order *order);
} pli_device_ops;

enum { PLI_MOST_NOTICES = 127 };

/* A chunk that stays in cache between two ranks; pl_reducer_max_ops() counts by it. */
enum { PLI_SHM_CHUNK_BYTES = 1 << 20 };

/* Every kind's struct begins with this. */
struct pl_comm {
    const pl_comm_ops *ops;
    const pli_host_ops *host;     /* NULL unless this is shared memory itself */
    const pli_device_ops *device; /* NULL: no device */
    pl_comm *base; /* the world below, of this host's ranks or all; NULL: none */
    int rank;
    int world_size;
    char *arena; /* its host memory, which is that of the lowest world */
    size_t arena_bytes;
    size_t host_bytes;   /* offsets below are host memory; equal to arena_bytes where
                            there is no device */
    char *device_memory; /* the rest; changed by renew() */
    pl_backend *backend; /* of the memory above; NULL: none.  Borrowed */
    size_t chunk_bytes;  /* a long range is best issued in operations of this size */
    int is_group_comm;
    int is_failure_final;   /* no failed step can be left behind: recover() fails */
    pli_recorder *recorder; /* of this rank's steps; NULL: none.  Borrowed */
};

/* Before the first step: has the world record its parts and waits, and what the rank
 * does.  Until it is destroyed, or given NULL. */
static inline void pli_comm_set_recorder(pl_comm *comm, pli_recorder *recorder)
{
    /* A base does the operations of whoever has no device. */
    for (; comm != NULL; comm = comm->device == NULL ? comm->base : NULL)
        comm->recorder = recorder;
}

/* Says what this rank is doing, in which step: to its peers, by two plain stores, and
 * to the recorder. */
static inline void pli_comm_record_activity(pl_comm *comm, pl_activity activity,
                                            uint64_t step)
{
    comm->ops->record_activity(comm, activity, step);
    pli_recorder_activity(comm->recorder, activity, step);
}

/* Keeps `message` (a traceback, say) for peers that will have to name this rank;
 * NULL forgets it, or says, where this rank has failed, that none follows. */
static inline void pli_comm_set_failure_message(pl_comm *comm, const char *message)
{
    comm->ops->set_failure_message(comm, message);
}

/* Whether somebody else carries the operations (group_comm.h): then no rank is told of
 * another that fails or is gone. */
static inline int pli_comm_is_group_comm(const pl_comm *comm)
{
    return comm->is_group_comm;
}

/* For whoever waits for the peers by other means than pl_comm_wait(): does this rank's
 * work, and fails where a rank has failed or is gone, for whatever reason. */
static inline pl_status pli_comm_check_peers(pl_comm *comm)
{
    return comm->ops->check_peers(comm);
}

/* Beside the rank's own thread: fails where the peers have; else does nothing. */
static inline pl_status pli_comm_query(pl_comm *comm, pli_query what)
{
    return comm->ops->query(comm, what);
}

/* Where byte `offset_bytes` of this rank's own arena lies: host or device memory. */
static inline void *pli_comm_memory(pl_comm *comm, size_t offset_bytes)
{
    return comm->device == NULL || offset_bytes < comm->host_bytes
               ? comm->arena + offset_bytes
               : comm->device_memory + (offset_bytes - comm->host_bytes);
}

/* The world that the arena belongs to, which has host ops. */
static inline pl_comm *pli_comm_lowest(pl_comm *comm)
{
    while (comm->base != NULL)
        comm = comm->base;
    return comm;
}

/* As pl_comm_issue(), with the device-side order of the operation. */
pl_status pli_comm_issue_ordered(pl_comm *comm, const pl_op *op, const pli_order *order,
                                 pl_ticket *out) PL_MUST_USE;

/* Orders `stream` behind all device operations issued so far; no-op without a device.
 */
static inline pl_status pli_comm_order(pl_comm *comm, pl_stream *stream)
{
    return comm->device != NULL ? comm->device->order(comm, stream) : PL_OK;
}

/* Functions of pl_comm_ops for a kind that leaves them to its base. */
void pli_base_work(pl_comm *comm);
pl_status pli_base_query(pl_comm *comm, pli_query what) PL_MUST_USE;
int pli_base_is_done(pl_comm *comm, pl_ticket ticket);
void pli_base_record_activity(pl_comm *comm, pl_activity activity, uint64_t step);
void pli_base_set_failure_message(pl_comm *comm, const char *message);
void pli_base_forget(pl_comm *comm);
void pli_base_leave(pl_comm *comm);

/* Differs where two operations differ. */
uint64_t pli_op_hash(const pl_op *op);

const char *pli_op_kind_text(pl_op_kind kind);

#endif
