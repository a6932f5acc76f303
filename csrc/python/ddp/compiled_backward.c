/* compiled_backward.c - a backward that compiled autograd runs.
 *
 * Compiled autograd calls nobody back, but drops its callbacks at its end.  A pending
 * call follows at once, before Python goes on behind `backward()`: where no new
 * exception is in sight, it finishes the step.
 */
#include "compiled_backward.h"

#include "failed_backward.h"
#include "step.h"

static int finish_compiled(void *context)
{
    pending_call *self = context;
    reducer_object *reducer = self->reducer;
    PLI_ENTER(reducer);
    PyObject *exception = pli_find_exception();
    const int has_failed = exception != NULL && exception != self->handled;
    int status = 0;
    Py_XDECREF(exception);
    if (has_failed)
        pli_failed_backward_report(reducer);
    else if (pl_reducer_is_active(reducer->reducer))
        status = pli_step_finish_all(reducer);
    pli_pending_call_free(self);
    return status;
}

void pli_compiled_backward_ends(reducer_object *reducer, uint64_t step,
                                const void *handled)
{
    if (!pl_reducer_is_active(reducer->reducer) &&
        pl_reducer_step(reducer->reducer) != step)
        return; /* the last hook has finished the step that it was made for */
    if (pli_is_main_thread() && pli_call_soon(finish_compiled, reducer, handled) == 0)
        return;
    /* Nothing can be raised from here: the next forward does it. */
    reducer->unseen = FAILURE_UNSEEN;
    pli_failed_backward_report(reducer);
}
