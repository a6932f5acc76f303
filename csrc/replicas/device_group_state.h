/* device_group_state.h - the state of a group of devices, and the steps of its calls.
 *
 * A wait refers to its event as last recorded when the wait is enqueued, so one event a
 * member (`mark`) serves all orders.  A wait enqueued later needs a separate event.
 */
#ifndef PLI_DEVICE_GROUP_STATE_H
#define PLI_DEVICE_GROUP_STATE_H

#include "device_group.h"

#include <pthread.h>

#include "backend/cuda.h"

typedef struct pli_group_member {
    pl_backend *backend;
    pl_stream *side;
    pl_event *mark;
    pl_event *has_read[PLI_RING_SLOTS]; /* in a broadcast, by slot */
    uint64_t readers; /* bits: members that read its blocks, in a broadcast */
    int reads_first;  /* its kernels can read member 0's memory */
} pli_group_member;

struct pli_device_group {
    pthread_mutex_t lock;
    int n_members;
    unsigned n_sent;                       /* slots of the ring written so far */
    uint64_t slot_readers[PLI_RING_SLOTS]; /* bits: members that have read it */
    size_t passed_bytes; /* segments of this size or more go from member to member */
    unsigned n_sums;     /* sums of gradients begun so far */
    size_t shard_bytes;  /* the least shard of a sum */
    pli_group_member members[];
};

static inline pl_status record(const pli_group_member *it, pl_event *event,
                               pl_stream *stream)
{
    return it->backend->ops->event_record(it->backend, event, stream);
}

static inline pl_status wait_for(const pli_group_member *it, pl_event *event,
                                 pl_stream *stream)
{
    return it->backend->ops->event_wait(it->backend, event, stream);
}

/* Makes `then` wait for all work that `first` holds. */
static inline pl_status order(const pli_group_member *of_first, pl_stream *first,
                              const pli_group_member *of_then, pl_stream *then)
{
    pl_status st = PL_OK;
    if (of_first->backend == of_then->backend && first == then)
        goto done;
    PL_TRY(record(of_first, of_first->mark, first));
    PL_TRY(wait_for(of_then, of_first->mark, then));
done:
    return st;
}

/* Memory of a member; a source of a copy is only read, so the cast is safe. */
static inline pli_cuda_place in(const pli_group_member *it, const void *memory)
{
    return (pli_cuda_place){it->backend, (void *)memory};
}

/* Copies on a stream of `by`. */
static inline pl_status copy_on(const pli_group_member *by, pl_stream *stream,
                                pli_cuda_place to, pli_cuda_place from, size_t n_bytes)
{
    return pli_cuda_copy_between(to, from, n_bytes, by->backend, stream);
}

/* Ends a call and returns its status.  A failed call leaves no work on the devices, so
 * that memory may be freed. */
pl_status pli_device_group_end_call(pli_device_group *self, pl_status st) PL_MUST_USE;

#endif
