/* shm_init.h - makes a world of processes of one host.
 *
 * Rank 0 listens on a Unix socket of the abstract namespace, whose name the ranks
 * have agreed on by other means (the user's process group).  Each other rank
 * connects and sends a request; when all have, rank 0 sends each the segment's
 * descriptor.  A rank that fails meanwhile closes its socket, or dies and is seen by
 * its pidfd: no rank waits for one that is gone.
 *
 * A world of one rank needs nothing of this, and no descriptor.
 */
#ifndef PLI_SHM_INIT_H
#define PLI_SHM_INIT_H

#include "core/process.h"
#include "progress.h"

enum { PLI_ADDRESS_BYTES = 48 };

typedef struct pli_listener pli_listener;

typedef struct pli_shm_options {
    int rank;
    int world_size;
    int first_rank;      /* what rank 0 is called in messages */
    size_t arena_bytes;  /* equal on all ranks */
    size_t n_ops;        /* the most operations ever in flight; equal on all ranks */
    int64_t deadline_ns; /* of each wait, counted from the peer's last sign of life */
    const int *pids;     /* per rank, as this process sees them; 0: not visible */
    pli_progress *progress;   /* borrowed until the world is destroyed; NULL: none */
    pli_processes *processes; /* likewise */
    /* Asked every 100 ms: non-zero gives up with PL_EAGAIN.  NULL: never. */
    int (*is_interrupted)(void *context);
    void *context;
} pli_shm_options;

/* Rank 0: opens a socket with a random name, written to `address`. */
pl_status pli_listener_create(char address[PLI_ADDRESS_BYTES],
                              pli_listener **out) PL_MUST_USE;
void pli_listener_close(pli_listener *listener);
void pli_listener_destroy(pli_listener *listener);

/* Joins the world; returns once every rank has.  Rank 0 of several gives its listener,
 * which is closed then, whatever came of it: who still connects is not left waiting.
 * The others give its address.  *out: for pl_comm_destroy(). */
pl_status pli_shm_create(const pli_shm_options *options, pli_listener *listener,
                         const char *address, pl_comm **out) PL_MUST_USE;

#endif
