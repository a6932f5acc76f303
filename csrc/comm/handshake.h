/* handshake.h - the two messages by which a world of processes is made (see
 * shm_init.h). */
#ifndef PLI_HANDSHAKE_H
#define PLI_HANDSHAKE_H

#include "peer_watch.h"
#include "shm_init.h"

struct pli_listener {
    int fd;
};

/* What a rank sends to rank 0, and what rank 0 answers with the descriptor. */
typedef struct pli_handshake_join {
    uint64_t magic;
    int32_t rank;
    int32_t is_sure; /* the rank sees the end of rank 0's process at once */
} pli_handshake_join;

typedef struct pli_handshake_reply {
    uint64_t magic;
    int32_t status;  /* pl_status: what became of rank 0's part */
    int32_t is_sure; /* rank 0 sees the end of this rank's process at once */
    char message[496];
} pli_handshake_reply;

/* Rank 0: waits for a request of every other rank; their sockets go to `watch`. Whoever
 * connects is read from beside the others, and is told why where it is no rank. */
pl_status pli_handshake_accept(const pli_shm_options *options,
                               const pli_listener *listener,
                               pli_watch *watch) PL_MUST_USE;

/* Rank 0: answers one rank; `fd` < 0 where `reply` carries a failure.  PL_EPEER where
 * that rank is gone.  The magic is filled in. */
pl_status pli_handshake_answer(int socket, const pli_handshake_reply *reply,
                               int fd) PL_MUST_USE;

/* Another rank: connects, sends its request, and waits for the descriptor. */
pl_status pli_handshake_request(const pli_shm_options *options, const char *address,
                                pli_watch *watch, int *out_fd) PL_MUST_USE;

#endif
