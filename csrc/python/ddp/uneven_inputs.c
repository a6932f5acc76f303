/* uneven_inputs.c - ranks that ran out of batches, and their effect on others.
 *
 * Such a rank takes shadow steps: whole steps with zeros and without a backward, until
 * a step's participation shows that no rank has gradients any more.  The others take
 * ordinary steps, and read from the participation which ranks were missing.
 */
#include "uneven_inputs.h"

#include "backward_end_type.h"
#include "grads.h"
#include "module_buffers.h"
#include "step.h"

static int begin(reducer_object *self, pl_role role)
{
    /* Move gradients that are views of their slots before all slots are written: they
     * keep their values.  On a device pli_step_begin() does that. */
    if (pli_step_check_process(self) != 0 || pli_backward_end_await(self) != 0 ||
        pli_buffers_apply(self) != 0 ||
        (!pli_is_on_device(self) && pli_grad_window_refresh(self) != 0))
        return -1;
    self->role = role;
    int status = pli_step_begin(self);
    if (status == 0) {
        PyThreadState *thread = PyEval_SaveThread();
        const pl_status st = pl_reducer_shadow_step(self->reducer, role);
        PyEval_RestoreThread(thread);
        status = pli_check(state_of_reducer(self), st);
    }
    if (status != 0 && pl_reducer_is_active(self->reducer))
        pli_step_fail(self, NULL);
    return status;
}

PyObject *pli_join_shadow_step(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    reducer_object *self = (reducer_object *)object;
    int is_first = 0, binds_results = 0;
    if (!PyArg_ParseTuple(args, "pp:shadow_step", &is_first, &binds_results))
        return NULL;
    const pl_role role = is_first ? PL_JOINING : PL_SHADOWING;
    int status = begin(self, role);
    self->join.grads = binds_results ? JOIN_BINDS_RESULTS : JOIN_LEAVES_GRADS;
    if (status == 0)
        status = pli_step_finish(self);
    self->role = PL_ACTIVE;
    if (status != 0)
        return NULL;
    const pl_participation last = pl_reducer_participation(self->reducer);
    return Py_BuildValue("ii", last.n_active, last.last_joining);
}

PyObject *pli_join_set(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    reducer_object *self = (reducer_object *)object;
    int divides_by_active = 0, raises = 0;
    if (!PyArg_ParseTuple(args, "pp:set_join", &divides_by_active, &raises))
        return NULL;
    self->join.divisor = divides_by_active ? DIVIDE_BY_N_ACTIVE : DIVIDE_BY_WORLD_SIZE;
    pl_reducer_reset_participation(self->reducer);
    self->join.end = raises ? JOIN_RAISES : JOIN_GOES_ON;
    Py_RETURN_NONE;
}

PyObject *pli_join_abandon(PyObject *object, PyObject *argument)
{
    PLI_ENTER(object);
    reducer_object *self = (reducer_object *)object;
    const char *text = pli_text_of(argument);
    if (text == NULL || pli_step_check_process(self) != 0)
        return NULL;
    if (!pl_reducer_has_failed(self->reducer))
        pli_step_fail(self, text);
    Py_RETURN_NONE;
}
