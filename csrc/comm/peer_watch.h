/* peer_watch.h - detects that peers' processes have ended.
 *
 * Each peer's process is watched if this process can see it (process.h).  If the peer
 * lives in another PID namespace, or pidfds are unavailable, the socket over which the
 * world was made is watched too, for its end of file.
 */
#ifndef PLI_PEER_WATCH_H
#define PLI_PEER_WATCH_H

#include "core/process.h"

typedef struct pli_watched {
    pli_process *process; /* NULL if not visible */
    int socket;           /* -1 if none; owned */
    int is_sure; /* each process sees the other's end at once, without the socket */
} pli_watched;

typedef struct pli_watch {
    int n_ranks;
    pli_watched *ranks;
} pli_watch;

/* Watches no process and no socket yet.  Free with pli_watch_fini(). */
pl_status pli_watch_init(pli_watch *watch, int n_ranks) PL_MUST_USE;

/* Watches `pid` as rank `rank`; `processes` may be NULL.  PL_EPEER if that process is
 * already gone. */
pl_status pli_watch_add(pli_watch *watch, pli_processes *processes, int rank,
                        int pid) PL_MUST_USE;

/* When a process ends, other ranks may give up and close their sockets: so check all
 * ranks for PLI_PROCESS_ENDED first. */
typedef enum pli_end { PLI_PROCESS_ENDED, PLI_SOCKET_CLOSED, PLI_N_ENDS } pli_end;

/* The first rank from `from` on that shows `end`, or -1; one system call checks many
 * ranks. */
int pli_watch_ended(const pli_watch *watch, pli_end end, int from);

/* Whether this process sees the rank's end at once. */
int pli_watch_is_sure(const pli_watch *watch, int rank);

/* Closes the sockets that neither process needs, once all ranks have met. */
void pli_watch_drop_sockets(pli_watch *watch);

/* Leaves a watch without ranks. */
void pli_watch_fini(pli_watch *watch);

#endif
