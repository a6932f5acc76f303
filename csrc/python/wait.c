/* wait.c - waits in slices of 50 ms. */
#include "wait.h"

enum { SLICE_MS = 50 };

int pli_wait_in_slices(const module_state *state, pli_slice_fn slice, void *context)
{
    for (;;) {
        pl_status st;
        Py_BEGIN_ALLOW_THREADS
        st = slice(context, SLICE_MS * INT64_C(1000000));
        Py_END_ALLOW_THREADS
        if (st != PL_EAGAIN)
            return pli_check(state, st);
        if (PyErr_CheckSignals() != 0)
            return -1;
    }
}

typedef struct ticket_wait {
    pl_comm *comm;
    pl_ticket ticket;
} ticket_wait;

static pl_status wait_slice(void *context, int64_t slice_ns)
{
    const ticket_wait *wait = context;
    return pl_comm_wait(wait->comm, wait->ticket, slice_ns);
}

int pli_wait_for_ticket(const module_state *state, pl_comm *comm, pl_ticket ticket)
{
    ticket_wait wait = {.comm = comm, .ticket = ticket};
    return pli_wait_in_slices(state, wait_slice, &wait);
}

int pli_is_interrupted(void *ignored)
{
    (void)ignored;
    const PyGILState_STATE gil = PyGILState_Ensure();
    const int is_set = PyErr_CheckSignals() != 0;
    PyGILState_Release(gil);
    return is_set;
}
