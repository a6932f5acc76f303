/* process.h - threads of this process, and whether another process still runs.
 *
 * A pidfd tells it for sure, whoever else holds the process's descriptors (forked
 * DataLoader workers do).  Where the kernel has no pidfds, a filter forbids them or no
 * descriptor is to be had, kill(pid, 0) is asked: it takes a process that ended for
 * alive until its parent has collected it.
 *
 * A process that is a peer in several worlds is opened once: descriptors grow with the
 * number of peers, not with that of worlds.
 */
#ifndef PLI_PROCESS_H
#define PLI_PROCESS_H

#include <pthread.h>

#include "status.h"

typedef struct pli_process pli_process;

/* Starts a thread that takes no signals: they are for the threads that know of them.
 * `what` it is for goes into the error. */
pl_status pli_thread_start(void *(*run)(void *argument), void *argument,
                           const char *what, pthread_t *out) PL_MUST_USE;

/* The processes that are open, for all worlds of this process. */
typedef struct pli_processes pli_processes;

/* *out: the caller destroys it after the last process was closed. */
pl_status pli_processes_create(pli_processes **out) PL_MUST_USE;
void pli_processes_destroy(pli_processes *processes);

/* In a forked child: another thread of the parent may have held the lock. */
void pli_processes_forget(pli_processes *processes);

/* Opens a process, or shares one that is open.  `processes` is borrowed until it is
 * closed; NULL: it is shared with nobody.  PL_EPEER where it is gone already. */
pl_status pli_process_open(pli_processes *processes, int pid,
                           pli_process **out) PL_MUST_USE;
int pli_process_has_ended(const pli_process *process);

/* Whether its end is seen at once: by a pidfd. */
int pli_process_is_sure(const pli_process *process);

/* To poll with others: readable once the process has ended.  -1: there is none. */
int pli_process_descriptor(const pli_process *process);

void pli_process_close(pli_process *process);

#endif
