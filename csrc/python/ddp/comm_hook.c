/* comm_hook.c - buckets that Python averages, by a communication hook.
 *
 * The reducer calls the hook's `post` with each full bucket; `post` reads it and starts
 * communication.  Once every rank has closed the step, the reducer calls `finish`,
 * which writes the results to the buckets; gradients are taken from there.
 */
#include "comm_hook.h"

#include "core/alloc.h"
#include "gpu_step.h"

/* ---- buckets, copied to and from a flat tensor ----------------------------------- */

typedef enum slot_direction { FROM_SLOTS, TO_SLOTS } slot_direction;

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

/* Copies a bucket.  On a GPU it uses the current stream, perhaps one of the hook. */
static int move_bucket(reducer_object *self, const pl_bucket_plan *bucket, char *flat,
                       slot_direction way)
{
    pl_stream *stream = NULL;
    if (pli_is_on_device(self) &&
        pli_gpu_current_stream(state_of_reducer(self), self->device.gpu, &stream) != 0)
        return -1;
    for (size_t m = 0; m < bucket->n_params; m++) {
        const uint32_t i = bucket->params[m];
        void *slot = pli_slot_memory(self, i);
        if (self->slots[i].policy == POLICY_SPARSE)
            continue;
        pli_step_defer_copy(self, way == FROM_SLOTS ? flat : slot,
                            way == FROM_SLOTS ? slot : flat, self->slots[i].layout);
        flat += pli_layout_bytes(self->slots[i].layout);
    }
    return pli_step_copy(self, stream);
}

static PyObject *copy_bucket(PyObject *object, PyObject *args, slot_direction way)
{
    reducer_object *self = (reducer_object *)object;
    const pl_plan *plan = pl_reducer_plan(self->reducer);
    Py_ssize_t index;
    PyObject *flat;
    pli_tensor tensor;
    size_t n_elems = 0;
    if (!PyArg_ParseTuple(args, "nO", &index, &flat) ||
        pli_tensor_read_on(state_of_reducer(self), self->device.place, flat,
                           "a bucket's tensor", &tensor) != 0)
        return NULL;
    if (index < 0 || (size_t)index >= plan->n_buckets)
        return PyErr_Format(PyExc_IndexError, "bucket %zd of %zu", index,
                            plan->n_buckets);
    const pl_bucket_plan *bucket = &plan->buckets[index];
    for (size_t m = 0; m < bucket->n_params; m++) {
        const grad_slot *slot = &self->slots[bucket->params[m]];
        n_elems += slot->policy == POLICY_SPARSE ? 0 : slot->layout->n_elems;
    }
    if (check_flat(bucket, n_elems, &tensor) != 0)
        return NULL;
    return pli_none(move_bucket(self, bucket, tensor.data, way));
}

PyObject *pli_comm_hook_read_bucket(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    return copy_bucket(object, args, FROM_SLOTS);
}

PyObject *pli_comm_hook_write_bucket(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    return copy_bucket(object, args, TO_SLOTS);
}

/* ---- the hook is set ------------------------------------------------------------ */

static pl_status post(void *context, size_t bucket)
{
    const reducer_object *self = context;
    const PyGILState_STATE gil = PyGILState_Ensure();
    const int status =
        pli_drop(PyObject_CallMethod(self->comm_hook, "post", "n", (Py_ssize_t)bucket));
    const pl_status st = status == 0 ? PL_OK : pli_callback_failed();
    PyGILState_Release(gil);
    return st;
}

PyObject *pli_comm_hook_set(PyObject *object, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(object);
    static char *names[] = {"hook", "bucket_bytes", "last_bytes", "caps", NULL};
    reducer_object *self = (reducer_object *)object;
    const module_state *state = state_of_reducer(self);
    const pl_comm_hook hook = {.context = self, .post = post};
    Py_ssize_t bucket_bytes, last_bytes;
    PyObject *each = NULL;
    PyObject *call = NULL;
    pl_plan_caps caps = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onn|O!:set_comm_hook", names, &call,
                                     &bucket_bytes, &last_bytes, &PyTuple_Type,
                                     &each) ||
        pli_read_caps(state, bucket_bytes, last_bytes, each, &caps) != 0)
        return NULL;
    const pl_status st = pl_reducer_set_comm_hook(self->reducer, &hook, &caps);
    pli_free((void *)caps.each);
    if (pli_check(state, st) != 0)
        return NULL;
    Py_XSETREF(self->comm_hook, Py_NewRef(call));
    Py_RETURN_NONE;
}

/* ---- the end of a step ---------------------------------------------------------- */

int pli_comm_hook_finish(reducer_object *self)
{
    if (self->comm_hook == NULL)
        return 0;
    return pli_drop(PyObject_CallMethod(self->comm_hook, "finish", NULL));
}

/* The used parameters that are declared sparse; the same list on every rank. */
static PyObject *list_sparse(const reducer_object *self)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < self->n_slots; i++) {
        if (!pli_sparse_is_used(self, i))
            continue;
        PyObject *index = PyLong_FromSize_t(i);
        if (index == NULL || PyList_Append(list, index) != 0)
            Py_CLEAR(list);
        Py_XDECREF(index);
    }
    return list;
}

int pli_comm_hook_finish_sparse(reducer_object *self)
{
    PyObject *list = list_sparse(self);
    PyObject *result = NULL;
    if (list != NULL)
        result = PyObject_CallMethod(self->comm_hook, "finish_sparse", "OOO", list,
                                     self->role == PL_ACTIVE ? Py_True : Py_False,
                                     pli_binds_results(self) ? Py_True : Py_False);
    for (size_t i = 0; result != NULL && i < self->n_slots; i++)
        if (pli_sparse_is_used(self, i))
            self->slots[i].is_unseen = 0;
    Py_XDECREF(list);
    return pli_drop(result);
}

/* Ensures that all ranks have their hooks' results, or that all give the step up. */
int pli_comm_hook_confirm(reducer_object *self)
{
    const module_state *state = state_of_reducer(self);
    const pl_op op = {.kind = PL_BARRIER, .ends_step = 1};
    pl_ticket ticket;
    if (self->comm_hook == NULL || pli_comm_is_group_comm(self->comm))
        return 0;
    if (pli_check(state, pl_comm_issue(self->comm, &op, &ticket)) != 0)
        return -1;
    return pli_wait_for_ticket(state, self->comm, ticket);
}

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

/* Called with no exception set, and leaves none. */
void pli_comm_hook_abandon(reducer_object *self)
{
    if (self->comm_hook == NULL)
        return;
    if (pli_drop(PyObject_CallMethod(self->comm_hook, "abandon", NULL)) != 0)
        PyErr_Clear();
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

int pli_comm_hook_check_late(reducer_object *self)
{
    if (self->comm_hook == NULL)
        return 0;
    size_t i = 0;
    while (i < self->n_slots && !pl_reducer_is_late(self->reducer, i))
        i++;
    return pli_error(
        PyExc_RuntimeError,
        "Expected to mark a variable ready only once. Parameter at index %zu "
        "(of those that require gradients) got a second gradient on some rank "
        "after its bucket had gone to the communication hook: keep the graph "
        "the same in each step, or train without the hook.",
        i);
}
