/* peer_watch.h - tells which peers' processes have ended.
 *
 * Each peer's process is watched where this process can see it (process.h).  Where the
 * peer lives in another PID namespace, or pidfds are not to be had, there is also the
 * socket that the world was made over, and its end of file.
 */
#ifndef PLI_PEER_WATCH_H
#define PLI_PEER_WATCH_H

#include "core/process.h"

typedef struct pli_watched {
    pli_process *process; /* NULL: not visible */
    int socket;           /* -1: none; owned */
    int is_sure; /* each of the two sees the other's end at once, without the socket */
} pli_watched;

typedef struct pli_watch {
    int n_ranks;
    pli_watched *ranks;
} pli_watch;

/* Of no rank's process or socket yet; for pli_watch_fini(). */
pl_status pli_watch_init(pli_watch *watch, int n_ranks) PL_MUST_USE;

/* Watches `pid` as rank `rank`; `processes` may be NULL.  PL_EPEER where that process
 * is gone already. */
pl_status pli_watch_add(pli_watch *watch, pli_processes *processes, int rank,
                        int pid) PL_MUST_USE;

/* A rank whose process has ended may have made others give up, which then close their
 * sockets: look for the first sign first. */
typedef enum pli_end { PLI_PROCESS_ENDED, PLI_SOCKET_CLOSED, PLI_N_ENDS } pli_end;

/* The first rank from `from` on of which `end` is seen, or -1; a system call for many
 * of them. */
int pli_watch_ended(const pli_watch *watch, pli_end end, int from);

/* Whether this process sees that rank's end at once. */
int pli_watch_is_sure(const pli_watch *watch, int rank);

/* Closes the sockets that neither end needs, once all ranks have met. */
void pli_watch_drop_sockets(pli_watch *watch);

/* Leaves one of no ranks. */
void pli_watch_fini(pli_watch *watch);

#endif
