/* gpu_comm.h - nccl/: worlds whose gradients are in GPU memory.
 *
 *     python
 *       \--> gpu_comm (gpu_*: failures, memory, order)  \--> nccl, watchdog
 *              \--> comm (the base world), backend, core
 *
 * A GPU world stands on another world of the same ranks, its *base* (shm, hierarchy,
 * group, or of one rank).  The hosts exchange through it what the ranks must agree on,
 * which rank failed, and which rank waits for which.  The arena's first host_bytes are
 * the base's; above them lies memory of this rank's GPU, on which NCCL operates:
 *
 *     offset < host_bytes     the base does it: host memory
 *     offset >= host_bytes    enqueued at once on the side stream, behind order->ready;
 *                             order->done is recorded behind it
 *
 * Device operations are enqueued in program order, which is the same on every rank,
 * also relative to the user's own collectives.  Their ticket is that of the base's
 * latest operation: tickets never shrink, but need not grow.  A ticket is done when the
 * base's operations up to it are done and the device's are *enqueued*; pli_comm_order()
 * makes a stream wait for the latter.  So the host never waits for a device in a step.
 *
 * A wait for a host operation returns once every rank has enqueued all that it issued
 * before, so a step must end with a host operation, at least a PL_BARRIER.  The
 * operation also shows whether all ranks issued the same device operations, which NCCL
 * cannot see.
 *
 * If a step fails, every rank aborts the communicator at once, so that no kernel spins
 * on the device, and pl_comm_recover() makes a new one.  The host is ahead of the
 * device, so the abort first waits for the operations of finished steps.  The watchdog
 * (watchdog.h) does the same while the host sleeps in a call of the user.
 *
 * A call into NCCL may block for as long as a peer keeps it waiting.  During
 * construction a helper thread (helper_thread.h) makes these calls, and tries all that
 * steps will do; in a step the watchdog aborts a call that does not return.
 *
 * Destroying a world waits for this device's part of finished steps: for up to ten
 * seconds per operation, for up to half a second while NCCL flushes, and for up to ten
 * seconds for other work that touches the memory (gpu_memory.h); never for a host.
 */
#ifndef PLI_GPU_COMM_H
#define PLI_GPU_COMM_H

#include "comm/comm.h"
#include "nccl.h"
#include "watchdog.h"

/* The board: one word per rank while a world is made.  It lies in the base's arena,
 * behind host_bytes. */
enum { PLI_GPU_BOARD_BYTES = 256 }; /* at the least */
size_t pli_gpu_board_bytes(int world_size);

/* How 16-bit floats are summed for an average. */
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
    /* Called every 50 ms while the ranks meet, also after a failure: non-zero gives up.
     * NULL: never. */
    int (*is_interrupted)(void *context);
    /* As in pli_pool_options; called in the rank's thread.  May be NULL. */
    void (*empty_caches)(void *context);
    void *context;
} pli_gpu_comm_options;

/* Collective: makes the communicator.  Destroy *out with pl_comm_destroy(). */
pl_status pli_gpu_comm_create(const pli_gpu_comm_options *options,
                              pl_comm **out) PL_MUST_USE;

#endif
