/* wait.c - waits in slices of 50 ms. */
#include "wait.h"

enum { SLICE_MS = 50 };

int pli_wait_for_ticket(const module_state *state, pl_comm *comm, pl_ticket ticket)
{
    for (;;) {
        pl_status st;
        Py_BEGIN_ALLOW_THREADS
        st = pl_comm_wait(comm, ticket, SLICE_MS * INT64_C(1000000));
        Py_END_ALLOW_THREADS
        if (st != PL_EAGAIN)
            return pli_check(state, st);
        if (PyErr_CheckSignals() != 0)
            return -1;
    }
}

int pli_is_interrupted(void *ignored)
{
    (void)ignored;
    const PyGILState_STATE gil = PyGILState_Ensure();
    const int is_set = PyErr_CheckSignals() != 0;
    PyGILState_Release(gil);
    return is_set;
}
