/* gpu_comm.h - nccl/: worlds whose gradients are in GPUs' memory.
 *
 *     python
 *       \--> gpu_comm (gpu_*: failures, memory, order)  \--> nccl, watchdog
 *              \--> comm (the base world), backend, core
 *
 * It stands on another world of the same ranks, its *base* (shm, hierarchy, group, or
 * of one rank), for what the hosts say: what ranks must agree on, who failed, who waits
 * for whom. The arena's first host_bytes are the base's; above them lies memory of this
 * rank's GPU, whose operations NCCL carries:
 *
 *     offset < host_bytes     the base does it: host memory
 *     offset >= host_bytes    enqueued at once on the side stream, behind order->ready;
 *                             order->done is recorded behind it
 *
 * Device operations are enqueued in the order in which they are issued, which is the
 * program's: the same on every rank, also beside the user's own collectives.  Their
 * ticket is that of the base's last operation: tickets never shrink, but need not grow.
 * One is done when the base's operations up to it are, and those of the device have
 * been *enqueued*; pli_comm_order() makes a stream wait for them.  So no host ever
 * waits for a device in a step.
 *
 * Once an operation of the host was waited for, every rank is known to have enqueued
 * what it issued before: a step is to end with one, be it a PL_BARRIER.  It also tells
 * whether all ranks have issued the same on their devices, which NCCL cannot see.
 *
 * Where a step fails the communicator is aborted at once, on every rank, so that
 * nothing keeps spinning on the device, and made anew by pl_comm_recover(); what steps
 * that are over have enqueued is done before, for the host is ahead of the device.  A
 * watchdog (watchdog.h) does the same where the host sleeps in a call of the user's.
 *
 * A call into NCCL may keep its thread for as long as a peer wants.  In construction it
 * is made by a helper thread (helper_thread.h), and all that steps will do is tried
 * there; in a step the watchdog aborts what does not come back.
 *
 * Destroying a world waits for its own device's part of steps that are over, for half a
 * second at the most for NCCL to hand over what that has sent, and for ten for what
 * else touches its memory (gpu_memory.h); never for a host.
 */
#ifndef PLI_GPU_COMM_H
#define PLI_GPU_COMM_H

#include "comm/comm.h"
#include "nccl.h"
#include "watchdog.h"

/* The board: what ranks say while they make a world, a word each, is in the base's
 * arena, behind host_bytes. */
enum { PLI_GPU_BOARD_BYTES = 256 }; /* at the least */
size_t pli_gpu_board_bytes(int world_size);

/* How averages of 16-bit floats are added up. */
typedef enum pli_accumulation {
    PLI_ACCUMULATE_BY_NCCL, /* as NCCL does */
    PLI_ACCUMULATE_IN_F32,  /* in rank order in float32, rounded once: every run has the
                               same bits */
} pli_accumulation;

typedef struct pli_gpu_comm_options {
    pl_comm *base;          /* the world's on success; arena: host_bytes + the board */
    pl_backend *backend;    /* cuda; retained */
    pli_nccl_library *nccl; /* retained; NULL: only for a world of one rank */
    pli_watchdog *watchdog; /* borrowed until destroyed; NULL: none */
    size_t host_bytes;      /* a multiple of a cache line */
    size_t device_bytes;
    size_t n_ops; /* device operations in one step, at the most */
    int64_t deadline_ns;
    pli_accumulation accumulation;
    /* Asked every 50 ms while the ranks meet, also after a failure: non-zero gives up.
     * NULL: never. */
    int (*is_interrupted)(void *context);
    /* As in pli_pool_options; called in the rank's own thread.  NULL: none are. */
    void (*empty_caches)(void *context);
    void *context;
} pli_gpu_comm_options;

/* *out: for pl_comm_destroy().  Collective: makes the communicator. */
pl_status pli_gpu_comm_create(const pli_gpu_comm_options *options,
                              pl_comm **out) PL_MUST_USE;

#endif
