/* hello.h - the two messages by which a world of processes is made (see shm.h). */
#ifndef PLI_HELLO_H
#define PLI_HELLO_H

#include "shm.h"
#include "watch.h"

struct pli_listener {
    int fd;
};

/* What a rank says to rank 0, and what rank 0 answers with the descriptor. */
typedef struct pli_hello {
    uint64_t magic;
    int32_t rank;
    int32_t pid;
} pli_hello;

typedef struct pli_welcome {
    uint64_t magic;
    int32_t status; /* pl_status: what became of rank 0's part */
    char words[500];
} pli_welcome;

/* Rank 0: waits for a hello of every other rank; their sockets go to `watch`. */
pl_status pli_hello_accept(const pli_shm_options *options, const pli_listener *listener,
                           pli_watch *watch) PL_MUST_USE;

/* Rank 0: answers one rank; `fd` < 0 where `welcome` carries a failure.  PL_EPEER where
 * that rank is gone. */
pl_status pli_hello_answer(int socket, const pli_welcome *welcome, int fd) PL_MUST_USE;

/* Another rank: connects, says hello, and waits for the descriptor. */
pl_status pli_hello_say(const pli_shm_options *options, const char *address,
                        pli_watch *watch, int *out_fd) PL_MUST_USE;

#endif
