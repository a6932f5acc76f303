/* gpu_comm.h - nccl/: worlds whose gradients are in GPU memory.
 *
 *     python
 *       \--> gpu_comm (gpu_*: failures, order)  \--> nccl, watchdog
 *              \--> comm (the base world), backend, core
 *
 * A GPU world stands on another world of the same ranks, its *base* (shm, hierarchy,
 * group, or a world of one rank).  Through the base, the ranks reach agreements and
 * learn which rank failed and which rank waits for which.  The arena's first host_bytes
 * belong to the base; the rest is memory of this rank's GPU, on which NCCL operates:
 *
 *     offset < host_bytes     the base runs the operation, in host memory
 *     offset >= host_bytes    NCCL runs it: issue() enqueues it on the side stream
 *                             after order->ready
 *
 * Every rank must enqueue device operations and the user's collectives in the same
 * order.  The ticket of a device operation is that of the base's latest operation, so
 * several operations may have one ticket.  A ticket is done when the base's operations
 * up to it are done, and the device operations are *enqueued*; pli_comm_order() makes a
 * stream wait for these.  So the host never waits for a device in a step.
 *
 * A wait for a host operation returns once every rank has enqueued the device
 * operations before it, so a step must end with a host operation, at least a
 * PL_BARRIER.  Its mark shows whether all ranks issued the same device operations,
 * which NCCL cannot see.
 *
 * If a step fails, so does the world: every rank aborts the communicator, so that no
 * kernel spins on the device.  The device may still run operations of finished steps,
 * so the abort waits for these first.  The watchdog (watchdog.h) does this too, so that
 * the rank's thread may be blocked elsewhere.
 *
 * A call into NCCL may block for as long as a peer keeps it waiting.  During
 * construction a helper thread (helper_thread.h) makes these calls, and tries the
 * operations of steps; in a step the watchdog aborts a call that does not return.
 *
 * The device's memory comes from the caller's allocator, torch's, which learns of each
 * stream whose work may touch it.  So it may be released at any time: the allocator
 * reuses it only after that work.
 *
 * Destroying a world waits up to the deadline for each device operation of finished
 * steps, and half a second for NCCL to flush.  It does not wait for other ranks' hosts.
 */
#ifndef PLI_GPU_COMM_H
#define PLI_GPU_COMM_H

#include "comm/comm.h"
#include "nccl.h"
#include "watchdog.h"

/* The board holds one word per rank while ranks agree.  It lies in the base's arena,
 * after host_bytes. */
enum { PLI_GPU_BOARD_BYTES = 256 }; /* its least size */
size_t pli_gpu_board_bytes(int world_size);

typedef struct pli_device_memory {
    void *address; /* aligned to a cache line */
    void *owner;   /* what the allocator knows it by */
} pli_device_memory;

/* The thread that makes, uses or destroys the world calls these, with no lock held. */
typedef struct pli_device_allocator {
    /* Memory that work on any stream may use at once. */
    pl_status (*alloc)(void *context, size_t n_bytes, pli_device_memory *out);
    /* The memory must not be reused before the present and later work on `stream` up to
     * its release is done. */
    pl_status (*record_stream)(void *context, void *owner, pl_stream *stream);
    void (*release)(void *context, void *owner);
    void *context; /* borrowed until the world is destroyed */
} pli_device_allocator;

typedef struct pli_gpu_comm_options {
    pl_comm *base;          /* owned by the world on success; has room for the board */
    pl_backend *backend;    /* cuda; retained */
    pli_nccl_library *nccl; /* retained; NULL: only for a world of one rank */
    pli_watchdog *watchdog; /* borrowed until destroyed; NULL: none */
    size_t host_bytes;      /* a multiple of a cache line */
    size_t device_bytes;
    pli_device_allocator allocator;
    size_t n_ops; /* most device operations in one step */
    int64_t deadline_ns;
    /* Called at least ten times a second while the ranks make a communicator.  If it
     * returns non-zero, the rank gives up.  May be NULL. */
    int (*is_interrupted)(void *context);
    /* Called in the thread that destroys the world, with the reason, if the device has
     * not finished a finished step: its means are lost.  May be NULL. */
    void (*report_loss)(void *context, const char *message);
    void *context;
} pli_gpu_comm_options;

/* Collective: makes the communicator.  Destroy *out with pl_comm_destroy(). */
pl_status pli_gpu_comm_create(const pli_gpu_comm_options *options,
                              pl_comm **out) PL_MUST_USE;

#endif
