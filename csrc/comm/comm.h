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

typedef struct pl_comm_ops {
    const char *name;
    pl_status (*issue)(pl_comm *comm, const pl_op *op, const pli_order *order,
                       pl_ticket *out);
    void (*work)(pl_comm *comm); /* progress, but failures are left to be met later */
    pl_status (*progress)(pl_comm *comm);
    pl_status (*check_peers)(
        pl_comm *comm); /* progress; a rank that is gone is a failure */
    pl_status (*query)(pl_comm *comm, pli_query what); /* any thread; NULL: unknown */
    int (*is_done)(pl_comm *comm, pl_ticket ticket);   /* everywhere; as `query` */
    pl_status (*wait)(pl_comm *comm, pl_ticket ticket, int64_t slice_ns);
    pl_status (*recover)(pl_comm *comm, int64_t slice_ns, pl_recovery *out);
    void (*abort)(pl_comm *comm, const char *message);
    /* As abort, for good: nothing recovers from it.  NULL: this kind is no host's. */
    void (*end)(pl_comm *comm, const char *message);
    void (*record_activity)(pl_comm *comm, pl_activity activity, uint64_t step);
    void (*set_failure_message)(pl_comm *comm,
                                const char *message); /* NULL: nobody is told */
    /* Hands the recorder on to worlds that do this one's operations; NULL: none do. */
    void (*set_recorder)(pl_comm *comm, pli_recorder *recorder);
    /* A bit for the peers, at a point that all ranks pass: behind the operations issued
     * so far, the n-th notice there, of 1 to PLI_MOST_NOTICES.  One store. */
    void (*notify)(pl_comm *comm, unsigned n, unsigned bit); /* NULL: cannot */
    /* Waits until `rank` has been at this point, and no longer; 0 where it has passed
     * it.  PL_EMISMATCH where it waits for this rank to go on; 1 where it is at a
     * barrier, so that both find out. */
    pl_status (*await_notice)(pl_comm *comm, int rank, unsigned n, int64_t slice_ns,
                              unsigned *bit);
    void *(*arena)(pl_comm *comm); /* of host memory */
    /* Where byte `offset_bytes` of the arena lies, be it a device's memory; NULL: in
     * arena(). */
    void *(*memory)(pl_comm *comm, size_t offset_bytes);
    /* All device operations issued so far come before what `stream` does from now on.
     * They have been enqueued by the time it returns.  NULL: there are none. */
    pl_status (*order)(pl_comm *comm, pl_stream *stream);
    /* A step has failed: what `stream` holds may still touch the device's memory, and
     * no operation is behind it.  What the world does from now on is, and the end of
     * that memory.  NULL: there is none. */
    void (*follow)(pl_comm *comm, pl_stream *stream);
    /* Maps a range of this rank's own arena once more, and makes such a mapping private
     * with its contents; NULL: this kind cannot. */
    pl_status (*map_own)(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                         void **out);
    pl_status (*unshare_own)(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                             void *memory);
    /* In a forked child: lets go of connections, whose end the peers could not see
     * while the child has them; NULL: there are none. */
    void (*forget)(pl_comm *comm);
    /* On a device, NULL elsewhere: a further share of its memory as it is now; and
     * other memory in its place, contents undefined, where no operation is under way.
     * What memory() answers changes; what is retained stays.  Each rank for itself. */
    pli_memory_ref *(*retain_memory)(pl_comm *comm);
    pl_status (*renew)(pl_comm *comm);
    /* On a device, NULL elsewhere.  Collective, before the first step: tries operations
     * as steps will issue them, behind `order->ready`, so that none of these has to
     * allocate, or to wait on the host, and checks what came.  What the device's memory
     * had in it is lost, but for what is retained. */
    pl_status (*prepare)(pl_comm *comm, const pli_op_range *ranges, size_t n_ranges,
                         const pli_order *order);
    void (*leave)(pl_comm *comm);
    void (*destroy)(pl_comm *comm);
} pl_comm_ops;

enum { PLI_MOST_NOTICES = 127 };

/* A chunk that stays in cache between two ranks; pl_reducer_max_ops() counts by it. */
enum { PLI_SHM_CHUNK_BYTES = 1 << 20 };

/* Every kind's struct begins with this. */
struct pl_comm {
    const pl_comm_ops *ops;
    int rank;
    int world_size;
    size_t arena_bytes;
    size_t host_bytes;   /* offsets below are host memory; equal to arena_bytes where
                            there is no device */
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
    comm->recorder = recorder;
    if (comm->ops->set_recorder != NULL)
        comm->ops->set_recorder(comm, recorder);
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
    if (comm->ops->set_failure_message != NULL)
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
    return comm->ops->query != NULL ? comm->ops->query(comm, what) : PL_OK;
}

/* The start of this rank's own arena. */
static inline void *pli_comm_arena(pl_comm *comm)
{
    return comm->ops->arena(comm);
}

/* Where byte `offset_bytes` of this rank's own arena lies: host or device memory. */
static inline void *pli_comm_memory(pl_comm *comm, size_t offset_bytes)
{
    if (comm->ops->memory != NULL)
        return comm->ops->memory(comm, offset_bytes);
    return (char *)comm->ops->arena(comm) + offset_bytes;
}

/* As pl_comm_issue(), with the device-side order of the operation. */
pl_status pli_comm_issue_ordered(pl_comm *comm, const pl_op *op, const pli_order *order,
                                 pl_ticket *out) PL_MUST_USE;

/* Orders `stream` behind all device operations issued so far; no-op without a device.
 */
static inline pl_status pli_comm_order(pl_comm *comm, pl_stream *stream)
{
    return comm->ops->order != NULL ? comm->ops->order(comm, stream) : PL_OK;
}

/* A no-op without a device. */
static inline void pli_comm_follow(pl_comm *comm, pl_stream *stream)
{
    if (comm->ops->follow != NULL)
        comm->ops->follow(comm, stream);
}

/* A no-op without a device. */
static inline pl_status pli_comm_prepare(pl_comm *comm, const pli_op_range *ranges,
                                         size_t n_ranges, const pli_order *order)
{
    if (comm->ops->prepare == NULL)
        return PL_OK;
    return comm->ops->prepare(comm, ranges, n_ranges, order);
}

/* PL_EUNSUPPORTED where this kind of world has no such memory. */
pl_status pli_comm_map_own(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                           void **out) PL_MUST_USE;

/* In a forked child; the world is its parent's. */
static inline void pli_comm_forget(pl_comm *comm)
{
    if (comm->ops->forget != NULL)
        comm->ops->forget(comm);
}

/* Differs where two operations differ. */
uint64_t pli_op_hash(const pl_op *op);

const char *pli_op_kind_text(pl_op_kind kind);

#endif
