/* handshake.h - the messages that create a world of processes (see shm_init.h).
 *
 *     rank 0                            another rank
 *       greeting: nonce             -->
 *                                   <-- join: rank, nonce, proof
 *       reply: proof, or a refusal  -->
 *       reply: the segment          --> once all ranks have joined
 *
 * Each proof covers both nonces, and needs the secret that the ranks share.
 */
#ifndef PLI_HANDSHAKE_H
#define PLI_HANDSHAKE_H

#include <sys/socket.h>
#include <sys/un.h>

#include "peer_watch.h"
#include "shm_init.h"

/* Repeats a system call that a signal has interrupted. */
#define PLI_UNTIL_DONE(n, call)                                                        \
    do                                                                                 \
        (n) = PL_SYS(call);                                                            \
    while ((n) < 0 && errno == EINTR)

struct pli_listener {
    int fd;
};

/* Writes a listener's name; returns its length. */
socklen_t pli_listener_name(const char *address, struct sockaddr_un *out);

/* The process at the other end of a connection; PL_ESYS if the kernel does not say. */
pl_status pli_read_peer(int fd, struct ucred *out) PL_MUST_USE;

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
