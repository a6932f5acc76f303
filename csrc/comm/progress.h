/* progress.h - the worlds of a process, so that who waits in one works for all.
 *
 * Two wrappers may run backward in opposite order on two ranks: each rank waits in
 * the wrapper that the other has not reached.  Nothing stands still as long as a
 * waiting thread also does its rank's part in every other world of the process.
 */
#ifndef PLI_PROGRESS_H
#define PLI_PROGRESS_H

#include "comm.h"

typedef struct pli_progress pli_progress;

/* *out: the caller destroys it after the last world that joined it. */
pl_status pli_progress_create(pli_progress **out) PL_MUST_USE;
void pli_progress_destroy(pli_progress *progress);

/* In a forked child: the worlds are its parent's, and so is who holds the lock. */
void pli_progress_forget(pli_progress *progress);

/* A number drawn for this process: its pid can be another's in another PID namespace.
 * 0 without a progress. */
uint64_t pli_progress_process(pli_progress *progress);

/* A world joins at its creation and leaves before it is freed.  NULL is allowed. */
pl_status pli_progress_join(pli_progress *progress, pl_comm *comm) PL_MUST_USE;
void pli_progress_leave(pli_progress *progress, const pl_comm *comm);

/* Does what every other world than `but` can do without waiting.  Their failures
 * are theirs: they are met when someone waits there. */
void pli_progress_others(pli_progress *progress, const pl_comm *but);

/* Whether the predicate holds for any other world than `but`; no, if the list is busy.
 */
typedef int (*pli_comm_predicate)(const pl_comm *comm, const void *context);
int pli_progress_any_other(pli_progress *progress, const pl_comm *but,
                           pli_comm_predicate predicate, const void *context);

#endif
