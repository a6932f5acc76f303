/* join.c - ranks that have run out of batches, and what they change for the others.
 *
 * Such a rank stands in: it takes whole steps with zeros and no backward, until the
 * roll of a step shows that no rank has gradients any more.  The others take their
 * ordinary steps, and read in the roll who stood in.
 */
#include "grads.h"

static const module_state *state_of_reducer(const reducer_object *self)
{
    return state_of((PyObject *)self);
}

static int is_anyone_missing(const reducer_object *self)
{
    return pl_reducer_roll(self->reducer).n_active < pl_comm_world_size(self->comm);
}

/* ---- parts of a step that step.c takes ------------------------------------------ */

/* What a communication hook makes of the gradients is nobody else's to scale. */
static int is_to_rescale(const reducer_object *self)
{
    return self->carrier == NULL && self->join_divisor == DIVIDE_BY_N_ACTIVE &&
           is_anyone_missing(self);
}

int pli_join_rescale(reducer_object *self)
{
    if (!is_to_rescale(self))
        return 0;
    PyThreadState *thread = PyEval_SaveThread();
    const pl_status st = pl_reducer_rescale(self->reducer);
    PyEval_RestoreThread(thread);
    return pli_check(state_of_reducer(self), st);
}

int pli_join_rescale_mean(reducer_object *self, const pl_move *mean)
{
    return is_to_rescale(self) ? pli_check(state_of_reducer(self),
                                           pl_reducer_rescale_mean(self->reducer, mean))
                               : 0;
}

int pli_join_binds(const reducer_object *self)
{
    return self->part == PL_ACTIVE || (self->join_grads == JOIN_BINDS_MEANS &&
                                       pl_reducer_roll(self->reducer).n_active > 0);
}

int pli_join_bind(reducer_object *self, size_t i)
{
    if (!pli_join_binds(self))
        return 0;
    if (pl_reducer_is_used(self->reducer, i))
        return pli_means_bind(self, i);
    /* What is there is the gradient of a step before: no optimizer may take it again.
     */
    return PyObject_SetAttr(self->slots[i].param, state_of_reducer(self)->str_grad,
                            Py_None);
}

int pli_join_check_end(const reducer_object *self)
{
    if (self->join_end == JOIN_GOES_ON || self->part != PL_ACTIVE ||
        !is_anyone_missing(self))
        return 0;
    PyErr_SetString(PyExc_RuntimeError,
                    "Detected at least one rank that exhausted inputs. Throwing across "
                    "all ranks.");
    return -1;
}

/* ---- methods -------------------------------------------------------------------- */

static int begin(reducer_object *self, pl_part part)
{
    /* Gradients that the user sees in their slots keep their values: they are moved
     * before all slots are written; on a device pli_step_begin() does. */
    if (pli_step_check_process(self) != 0 || pli_step_await_guards(self) != 0 ||
        pli_buffers_apply(self) != 0 ||
        (!pli_is_on_device(self) && pli_means_refresh_window(self) != 0))
        return -1;
    self->part = part;
    if (pli_step_begin(self) != 0) {
        if (pl_reducer_is_active(self->reducer))
            pli_step_fail(self, NULL);
        return -1;
    }
    PyThreadState *thread = PyEval_SaveThread();
    const pl_status st = pl_reducer_stand_in(self->reducer, part);
    PyEval_RestoreThread(thread);
    if (pli_check(state_of_reducer(self), st) == 0)
        return 0;
    pli_step_fail(self, NULL);
    return -1;
}

PyObject *pli_join_stand_in(PyObject *object, PyObject *args)
{
    reducer_object *self = (reducer_object *)object;
    int is_first = 0, binds_means = 0;
    if (!PyArg_ParseTuple(args, "pp:stand_in", &is_first, &binds_means))
        return NULL;
    const pl_part part = is_first ? PL_JOINING : PL_STANDING_IN;
    int status = begin(self, part);
    self->join_grads = binds_means ? JOIN_BINDS_MEANS : JOIN_LEAVES_GRADS;
    if (status == 0)
        status = pli_step_finish(self);
    self->part = PL_ACTIVE;
    if (status != 0)
        return NULL;
    const pl_roll roll = pl_reducer_roll(self->reducer);
    return Py_BuildValue("ii", roll.n_active, roll.last_joining);
}

PyObject *pli_join_set(PyObject *object, PyObject *args)
{
    reducer_object *self = (reducer_object *)object;
    int divides_by_active = 0, raises = 0;
    if (!PyArg_ParseTuple(args, "pp:set_join", &divides_by_active, &raises))
        return NULL;
    self->join_divisor = divides_by_active ? DIVIDE_BY_N_ACTIVE : DIVIDE_BY_WORLD_SIZE;
    pl_reducer_forget_roll(self->reducer);
    self->join_end = raises ? JOIN_RAISES : JOIN_GOES_ON;
    Py_RETURN_NONE;
}

PyObject *pli_join_abandon(PyObject *object, PyObject *words)
{
    reducer_object *self = (reducer_object *)object;
    const char *text = pli_words(words);
    if (text == NULL || pli_step_check_process(self) != 0)
        return NULL;
    if (!pl_reducer_has_failed(self->reducer))
        pli_step_fail(self, text);
    Py_RETURN_NONE;
}
