/* watch.h - tells whether a peer's process still runs.
 *
 * A pidfd tells it for sure, whoever else holds the peer's descriptors (forked
 * DataLoader workers do).  Where the peer lives in another PID namespace there is
 * only the socket that the world was made over, and its end of file.
 */
#ifndef PLI_WATCH_H
#define PLI_WATCH_H

#include "../core/status.h"

typedef struct pli_watch {
    int n_ranks;
    int pidfd[PL_MAX_RANKS];  /* -1: none */
    int socket[PL_MAX_RANKS]; /* -1: none; owned */
} pli_watch;

void pli_watch_init(pli_watch *watch, int n_ranks);

/* Watches `pid` as rank `rank`.  PL_EPEER where that process is gone already;
 * PL_OK, watching nothing, where the kernel has no pidfds. */
pl_status pli_watch_add(pli_watch *watch, int rank, int pid) PL_MUST_USE;

/* A rank whose process has ended may have made others give up, which then close their
 * sockets: look for the first sign first. */
typedef enum pli_end { PLI_PROCESS_ENDED, PLI_SOCKET_CLOSED, PLI_N_ENDS } pli_end;

/* The first rank from `from` on of which `end` is seen, or -1. */
int pli_watch_ended(const pli_watch *watch, pli_end end, int from);

void pli_watch_fini(pli_watch *watch);

#endif
