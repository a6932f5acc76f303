/* shm_init.h - creates a world of processes on one host.
 *
 * Rank 0 listens on a Unix socket of the abstract namespace; the ranks have agreed on
 * its name and on a secret by other means (the user's process group).  Each other rank
 * connects; both sides prove that they have the secret, and where a process can be
 * seen it must be the rank's.  When all ranks have, rank 0 sends each the segment's
 * descriptor.  If a rank fails meanwhile, its peers see its socket close or, by a
 * pidfd, its process end: no rank waits for one that is gone.
 *
 * A world of one rank needs neither socket nor descriptor.
 */
#ifndef PLI_SHM_INIT_H
#define PLI_SHM_INIT_H

#include "peer_watch.h"
#include "progress.h"

enum { PLI_ADDRESS_BYTES = 48, PLI_PROOF_BYTES = 32 };

typedef struct pli_listener {
    int fd;
} pli_listener;

typedef struct pli_shm_options {
    int rank;
    int world_size;
    int first_rank;           /* number of rank 0 in messages */
    size_t arena_bytes;       /* equal on all ranks */
    size_t n_ops;             /* the most operations in flight; equal on all ranks */
    int64_t deadline_ns;      /* of each wait, from the peer's last sign of life */
    const int *pids;          /* per rank, as this process sees them; 0: not visible */
    pli_progress *progress;   /* borrowed until the world is destroyed; NULL: none */
    pli_processes *processes; /* likewise */
    /* Called every 100 ms: non-zero gives up with PL_EAGAIN.  NULL: never called. */
    int (*is_interrupted)(void *context);
    /* Writes a message's HMAC-SHA256 under the job's secret.  NULL if alone. */
    pl_status (*prove)(void *context, const void *message, size_t n_bytes,
                       unsigned char out[PLI_PROOF_BYTES]);
    void *context; /* of both calls */
} pli_shm_options;

/* Rank 0: opens a socket with a random name, written to `address`. */
pl_status pli_listener_create(char address[PLI_ADDRESS_BYTES],
                              pli_listener **out) PL_MUST_USE;
void pli_listener_close(pli_listener *listener);
void pli_listener_destroy(pli_listener *listener);

/* Joins the world; returns once every rank has.  Rank 0 of several passes its listener,
 * which is closed in any case, so that late connections do not wait.  The others pass
 * its address.  *out: free it with pl_comm_destroy(). */
pl_status pli_shm_create(const pli_shm_options *options, pli_listener *listener,
                         const char *address, pl_comm **out) PL_MUST_USE;

/* ---- messages; for shm_init.c and its tests ------------------------------------- */

#define PLI_HANDSHAKE_MAGIC UINT64_C(0x326f6c6c65682d70) /* "p-hello2" */
enum { PLI_NONCE_BYTES = 32 };

typedef struct pli_handshake_greeting {
    uint64_t magic;
    unsigned char nonce[PLI_NONCE_BYTES]; /* random, for this connection */
} pli_handshake_greeting;

typedef struct pli_handshake_join {
    uint64_t magic;
    int32_t rank;
    int32_t is_sure; /* this rank sees the end of rank 0's process at once */
    unsigned char nonce[PLI_NONCE_BYTES];
    unsigned char proof[PLI_PROOF_BYTES];
} pli_handshake_join;

typedef struct pli_handshake_reply {
    uint64_t magic;
    unsigned char proof[PLI_PROOF_BYTES]; /* in the first reply to a rank */
    int32_t status;                       /* pl_status of rank 0's part */
    int32_t is_sure; /* rank 0 sees the end of this rank's process at once */
    char message[464];
} pli_handshake_reply;

/* Rank 0: waits for a request of every other rank, and gives their sockets to `watch`.
 * Reads from all connections side by side; tells a process that is no rank why not.
 * A caller has two seconds for its proof. */
pl_status pli_handshake_accept(const pli_shm_options *options,
                               const pli_listener *listener,
                               pli_watch *watch) PL_MUST_USE;

/* Rank 0: answers one rank; `fd` < 0 if `reply` carries a failure.  PL_EPEER if that
 * rank is gone.  Fills in the magic. */
pl_status pli_handshake_answer(int socket, const pli_handshake_reply *reply,
                               int fd) PL_MUST_USE;

/* Other ranks: connects, joins, and waits for the descriptor.  Connects again if rank 0
 * closes the connection before its welcome. */
pl_status pli_handshake_request(const pli_shm_options *options, const char *address,
                                pli_watch *watch, int *out_fd) PL_MUST_USE;

#endif
