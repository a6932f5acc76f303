/* affinity.h - which cores a thread may run on, around a hand-over to a pinned worker.
 *
 * The kernel likes to stack a woken process on its waker's core, where the two then run
 * one after the other.  Workers are therefore pinned, and who hands work to one leaves
 * its cores: at once if it sits there, and for as long as it sleeps.  Otherwise its
 * mask stays as it was, so that threads and children that it makes inherit nothing
 * narrow.
 */
#ifndef PLI_AFFINITY_H
#define PLI_AFFINITY_H

#include <sched.h>

typedef struct pli_cores {
    int n;
    cpu_set_t set;
} pli_cores;

/* Takes `others` off the calling thread's mask: non-zero, with *before filled for
 * pli_cores_return(), where that changed it and left something. */
int pli_cores_leave(const pli_cores *others, cpu_set_t *before);
void pli_cores_return(const cpu_set_t *before);

/* Moves the calling thread off those cores if it sits on one; its mask stays. */
void pli_cores_step_off(const pli_cores *others);

#endif
