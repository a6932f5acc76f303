/* progress.h - the worlds of a process: a thread that waits in one works for all.
 *
 * Two wrappers may run backward in opposite order on two ranks: each rank waits in the
 * wrapper that the other has not reached.  To prevent a deadlock, a waiting thread also
 * does its rank's part in every other world of the process.
 */
#ifndef PLI_PROGRESS_H
#define PLI_PROGRESS_H

#include "comm.h"

typedef struct pli_progress pli_progress;

/* *out: the caller destroys it after the last world that joined it. */
pl_status pli_progress_create(pli_progress **out) PL_MUST_USE;
void pli_progress_destroy(pli_progress *progress);

/* In a forked child: drops the worlds and the lock, which belong to the parent. */
void pli_progress_forget(pli_progress *progress);

/* A random number of this process: its pid may be another's in another PID namespace.
 * 0 if `progress` is NULL. */
uint64_t pli_progress_process(pli_progress *progress);

/* A world joins at its creation and leaves before it is freed.  NULL is allowed. */
pl_status pli_progress_join(pli_progress *progress, pl_comm *comm) PL_MUST_USE;
void pli_progress_leave(pli_progress *progress, const pl_comm *comm);

/* Does what every world other than `but` can do without waiting.  A failure of such a
 * world is returned by the next wait in it. */
void pli_progress_others(pli_progress *progress, const pl_comm *but);

/* Whether the predicate holds for any world but `but`; 0 if the list is locked. */
typedef int (*pli_comm_predicate)(const pl_comm *comm, const void *context);
int pli_progress_any_other(pli_progress *progress, const pl_comm *but,
                           pli_comm_predicate predicate, const void *context);

#endif
