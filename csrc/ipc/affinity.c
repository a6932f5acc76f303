/* affinity.c - sched_setaffinity, for a moment. */
#include "affinity.h"

#include "core/alloc.h"

int pli_cores_leave(const pli_cores *others, cpu_set_t *before)
{
    cpu_set_t rest;
    if (others->n == 0 || PL_SYS(sched_getaffinity(0, sizeof *before, before)) != 0)
        return 0;
    CPU_AND(&rest, before, &others->set);
    if (CPU_COUNT(&rest) == 0)
        return 0;
    CPU_XOR(&rest, before, &rest);
    return CPU_COUNT(&rest) > 0 &&
           PL_SYS(sched_setaffinity(0, sizeof rest, &rest)) == 0;
}

void pli_cores_return(const cpu_set_t *before)
{
    (void)sched_setaffinity(0, sizeof *before, before);
}

void pli_cores_step_off(const pli_cores *others)
{
    cpu_set_t before;
    if (others->n == 0)
        return;
    const int core = sched_getcpu();
    if (core < 0 || core >= CPU_SETSIZE || !CPU_ISSET((size_t)core, &others->set))
        return;
    if (pli_cores_leave(others, &before))
        pli_cores_return(&before);
}
