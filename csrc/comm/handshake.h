/* handshake.h - the two messages that create a world of processes (see shm_init.h). */
#ifndef PLI_HANDSHAKE_H
#define PLI_HANDSHAKE_H

#include "peer_watch.h"
#include "shm_init.h"

struct pli_listener {
    int fd;
};

/* What a rank sends to rank 0, and rank 0's reply, which carries the descriptor. */
typedef struct pli_handshake_join {
    uint64_t magic;
    int32_t rank;
    int32_t is_sure; /* this rank sees the end of rank 0's process at once */
} pli_handshake_join;

typedef struct pli_handshake_reply {
    uint64_t magic;
    int32_t status;  /* pl_status of rank 0's part */
    int32_t is_sure; /* rank 0 sees the end of this rank's process at once */
    char message[496];
} pli_handshake_reply;

/* Rank 0: waits for a request of every other rank, and gives their sockets to `watch`.
 * Reads from all connections side by side; tells a process that is no rank why not. */
pl_status pli_handshake_accept(const pli_shm_options *options,
                               const pli_listener *listener,
                               pli_watch *watch) PL_MUST_USE;

/* Rank 0: answers one rank; `fd` < 0 if `reply` carries a failure.  PL_EPEER if that
 * rank is gone.  Fills in the magic. */
pl_status pli_handshake_answer(int socket, const pli_handshake_reply *reply,
                               int fd) PL_MUST_USE;

/* Other ranks: connects, sends the request, and waits for the descriptor. */
pl_status pli_handshake_request(const pli_shm_options *options, const char *address,
                                pli_watch *watch, int *out_fd) PL_MUST_USE;

#endif
