/* comm_hook.c - buckets that Python averages, by a communication hook.
 *
 * The step calls the hook's `post` with each full bucket; `post` reads it and starts
 * communication.  Once every rank has closed the step, the step calls `finish`, which
 * writes the results to the buckets; gradients are taken from there.
 */
#include "comm_hook.h"

/* ---- buckets, copied to and from a flat tensor ----------------------------------- */

static int check_flat(const pl_bucket_plan *bucket, size_t n_elems,
                      const pli_tensor *tensor)
{
    if (tensor->layout.dtype == bucket->dtype && tensor->layout.n_elems == n_elems &&
        !tensor->layout.is_lazy && pli_layout_is_dense(&tensor->layout))
        return 0;
    return pli_error(PyExc_ValueError,
                     "a tensor of %zu x %s does not fit a bucket of %zu x %s: give a "
                     "contiguous tensor that does",
                     tensor->layout.n_elems, pl_dtype_text(tensor->layout.dtype),
                     n_elems, pl_dtype_text(bucket->dtype));
}

static PyObject *copy_bucket(PyObject *object, PyObject *args, pl_slot_direction way)
{
    const reducer_object *self = (reducer_object *)object;
    const module_state *state = state_of_reducer(self);
    const pl_plan *plan = pl_step_look(self->step).plan;
    Py_ssize_t index;
    PyObject *flat;
    pli_tensor tensor;
    if (!PyArg_ParseTuple(args, "nO", &index, &flat) ||
        pli_tensor_read_on(state, self->device.place, flat, "a bucket's tensor",
                           &tensor) != 0)
        return NULL;
    if (index < 0 || (size_t)index >= plan->n_buckets)
        return PyErr_Format(PyExc_IndexError, "bucket %zd of %zu", index,
                            plan->n_buckets);
    const size_t bucket = (size_t)index;
    if (check_flat(&plan->buckets[bucket], pl_step_bucket_elems(self->step, bucket),
                   &tensor) != 0)
        return NULL;
    return pli_none(
        pli_check(state, pl_step_copy_bucket(self->step, bucket, tensor.data, way)));
}

PyObject *pli_comm_hook_read_bucket(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    return copy_bucket(object, args, PL_FROM_SLOTS);
}

PyObject *pli_comm_hook_write_bucket(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    return copy_bucket(object, args, PL_TO_SLOTS);
}

/* ---- what the step calls -------------------------------------------------------- */

/* Turns the result of a call, which it drops, into a status. */
static pl_status status_of(PyObject *result)
{
    return pli_drop(result) == 0 ? PL_OK : pli_callback_failed();
}

static pl_status post(void *context, size_t bucket)
{
    const reducer_object *self = context;
    const PyGILState_STATE gil = PyGILState_Ensure(); /* the step may have let it go */
    const pl_status st = status_of(
        PyObject_CallMethod(self->comm_hook, "post", "n", (Py_ssize_t)bucket));
    PyGILState_Release(gil);
    return st;
}

static pl_status finish(void *context)
{
    const reducer_object *self = context;
    return status_of(PyObject_CallMethod(self->comm_hook, "finish", NULL));
}

/* A failure of the hook's own changes nothing; nor does an exception that is set. */
static void call_quietly(const reducer_object *self, const char *method)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (pli_drop(PyObject_CallMethod(self->comm_hook, method, NULL)) != 0)
        PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

static void settle(void *context)
{
    call_quietly(context, "finish");
}

static void abandon(void *context)
{
    call_quietly(context, "abandon");
}

static pl_status finish_sparse(void *context, const size_t *params, size_t n,
                               int is_active, int binds_results)
{
    const reducer_object *self = context;
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t k = 0; list != NULL && k < n; k++)
        pli_list_put(&list, (Py_ssize_t)k, PyLong_FromSize_t(params[k]));
    PyObject *result = NULL;
    if (list != NULL)
        result = PyObject_CallMethod(self->comm_hook, "finish_sparse", "OOO", list,
                                     is_active ? Py_True : Py_False,
                                     binds_results ? Py_True : Py_False);
    Py_XDECREF(list);
    return status_of(result);
}

const pl_step_hook pli_comm_hook = {.post = post,
                                    .finish = finish,
                                    .settle = settle,
                                    .finish_sparse = finish_sparse,
                                    .abandon = abandon};

/* ---- methods of the Reducer ----------------------------------------------------- */

PyObject *pli_comm_hook_poll(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = (reducer_object *)object;
    (void)ignored;
    PyThreadState *thread = PyEval_SaveThread();
    const pl_status st = pli_comm_check_peers(self->comm);
    PyEval_RestoreThread(thread);
    return pli_none(pli_check(state_of_reducer(self), st));
}

void pli_comm_hook_raise_refusal(reducer_object *self)
{
    PyObject *type, *value, *traceback;
    if (self->comm_hook == NULL || !PyErr_ExceptionMatches(PyExc_RuntimeError))
        return;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *result = PyObject_CallMethod(self->comm_hook, "refuse", NULL);
    if (result == NULL) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return;
    }
    Py_DECREF(result);
    PyErr_Restore(type, value, traceback);
}
