/* process.h - threads of this process, and whether another process still runs.
 *
 * A pidfd shows at once that a process has ended, even if others (forked DataLoader
 * workers) hold its descriptors.  If the kernel has no pidfds, a seccomp filter forbids
 * them, or no descriptor is free, kill(pid, 0) is used instead: it reports an ended
 * process as alive until its parent has reaped it.
 *
 * A process that is a peer in several worlds is opened once: the number of descriptors
 * grows with the peers, not with the worlds.
 */
#ifndef PLI_PROCESS_H
#define PLI_PROCESS_H

#include <pthread.h>

#include "status.h"

typedef struct pli_process pli_process;

/* Starts a thread with all signals blocked, so that the program's own threads receive
 * them.  `what` says what the thread does; the error message quotes it. */
pl_status pli_thread_start(void *(*run)(void *argument), void *argument,
                           const char *what, pthread_t *out) PL_MUST_USE;

/* The open processes, shared by all worlds of this process. */
typedef struct pli_processes pli_processes;

/* *out: the caller destroys it after the last process was closed. */
pl_status pli_processes_create(pli_processes **out) PL_MUST_USE;
void pli_processes_destroy(pli_processes *processes);

/* For a forked child: resets the lock, which the parent may have held. */
void pli_processes_forget(pli_processes *processes);

/* Opens a process, or shares the open one.  `processes` is borrowed until the process
 * is closed; NULL: it is not shared.  PL_EPEER if the process is already gone. */
pl_status pli_process_open(pli_processes *processes, int pid,
                           pli_process **out) PL_MUST_USE;
int pli_process_has_ended(const pli_process *process);

/* Whether its end is seen at once, by a pidfd. */
int pli_process_is_sure(const pli_process *process);

/* The pidfd, for poll(): readable once the process has ended.  -1 if there is none. */
int pli_process_descriptor(const pli_process *process);

void pli_process_close(pli_process *process);

#endif
