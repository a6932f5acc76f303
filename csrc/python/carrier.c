/* carrier.c - buckets that Python averages: a communication hook's.
 *
 * The carrier is told of each full bucket, reads it, and begins what it likes.  Once
 * every rank has closed the step it is told to finish: it writes what came of the
 * buckets back, and the gradients are taken from there as if they were means.
 */
#include <string.h>

#include "../core/alloc.h"
#include "reducer_build.h"

static const module_state *state_of_reducer(const reducer_object *self)
{
    return state_of((PyObject *)self);
}

/* ---- buckets, one after another in a tensor ---------------------------------------
 */

typedef enum direction { FROM_SLOTS, TO_SLOTS } direction;

static int check_flat(const pl_bucket_plan *bucket, size_t n_elems,
                      const pli_tensor *tensor)
{
    if (tensor->layout.dtype == bucket->dtype && tensor->layout.n_elems == n_elems &&
        pli_layout_is_dense(&tensor->layout))
        return 0;
    PyErr_Format(PyExc_ValueError,
                 "a tensor of %zu x %s does not fit a bucket of %zu x %s: give a "
                 "contiguous one that does",
                 tensor->layout.n_elems, pl_dtype_text(tensor->layout.dtype), n_elems,
                 pl_dtype_text(bucket->dtype));
    return -1;
}

static void move_bucket(const reducer_object *self, const pl_bucket_plan *bucket,
                        char *at, direction way)
{
    for (size_t m = 0; m < bucket->n_params; m++) {
        const uint32_t i = bucket->params[m];
        const size_t n_bytes =
            pl_reducer_elems(self->reducer, i) * pl_dtype_bytes(bucket->dtype);
        char *slot = pli_slot_memory(self, i);
        if (n_bytes > 0)
            memcpy(way == FROM_SLOTS ? at : slot, way == FROM_SLOTS ? slot : at,
                   n_bytes);
        at += n_bytes;
    }
}

/* On the stream that is current now, which may be one of the hook's own. */
static int launch_bucket(reducer_object *self, const pl_bucket_plan *bucket, char *at,
                         direction way)
{
    pl_stream *stream = NULL;
    if (pli_gpu_current_stream(state_of_reducer(self), self->gpu, &stream) != 0)
        return -1;
    for (size_t m = 0; m < bucket->n_params; m++) {
        const uint32_t i = bucket->params[m];
        void *slot = pli_slot_memory(self, i);
        pli_launch_note(self, way == FROM_SLOTS ? at : slot,
                        way == FROM_SLOTS ? slot : at, self->slots[i].layout);
        at += pli_layout_bytes(self->slots[i].layout);
    }
    return pli_launch_copies(self, stream);
}

static PyObject *copy_bucket(PyObject *object, PyObject *args, direction way)
{
    reducer_object *self = (reducer_object *)object;
    const pl_plan *plan = pl_reducer_plan(self->reducer);
    Py_ssize_t index;
    PyObject *flat;
    pli_tensor tensor;
    size_t n_elems = 0;
    if (!PyArg_ParseTuple(args, "nO", &index, &flat) ||
        pli_tensor_read_on(state_of_reducer(self), self->place, flat,
                           "a bucket's tensor", &tensor) != 0)
        return NULL;
    if (index < 0 || (size_t)index >= plan->n_buckets) {
        PyErr_Format(PyExc_IndexError, "bucket %zd of %zu", index, plan->n_buckets);
        return NULL;
    }
    const pl_bucket_plan *bucket = &plan->buckets[index];
    for (size_t m = 0; m < bucket->n_params; m++)
        n_elems += pl_reducer_elems(self->reducer, bucket->params[m]);
    if (check_flat(bucket, n_elems, &tensor) != 0)
        return NULL;
    if (pli_is_on_device(self)) {
        if (launch_bucket(self, bucket, tensor.data, way) != 0)
            return NULL;
    } else {
        Py_BEGIN_ALLOW_THREADS move_bucket(self, bucket, tensor.data, way);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

PyObject *pli_carrier_read(PyObject *object, PyObject *args)
{
    return copy_bucket(object, args, FROM_SLOTS);
}

PyObject *pli_carrier_write(PyObject *object, PyObject *args)
{
    return copy_bucket(object, args, TO_SLOTS);
}

/* ---- the carrier is set ------------------------------------------------------------
 */

static pl_status post(void *context, size_t bucket)
{
    const reducer_object *self = context;
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result =
        PyObject_CallMethod(self->carrier, "post", "n", (Py_ssize_t)bucket);
    const pl_status st = result != NULL ? PL_OK : pli_callback_failed();
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return st;
}

PyObject *pli_carrier_set(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"carrier", "bucket_bytes", "last_bytes", "caps", NULL};
    reducer_object *self = (reducer_object *)object;
    const module_state *state = state_of_reducer(self);
    const pl_carrier carrier = {.context = self, .post = post};
    pli_reducer_arguments given = {0};
    PyObject *call = NULL;
    pl_plan_caps caps = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onn|O:carry", names, &call,
                                     &given.bucket_bytes, &given.last_bytes,
                                     &given.caps) ||
        pli_reducer_read_caps(state, &given, &caps) != 0)
        return NULL;
    const pl_status st = pl_reducer_set_carrier(self->reducer, &carrier, &caps);
    pli_free((void *)caps.each);
    if (pli_check(state, st) != 0)
        return NULL;
    Py_XSETREF(self->carrier, Py_NewRef(call));
    Py_RETURN_NONE;
}

/* ---- the end of a step ------------------------------------------------------------
 */

int pli_carrier_finish(reducer_object *self)
{
    if (self->carrier == NULL)
        return 0;
    PyObject *result = PyObject_CallMethod(self->carrier, "finish", NULL);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

typedef struct confirmation {
    pl_comm *comm;
    pl_ticket ticket;
} confirmation;

static pl_status confirm_slice(void *context, int64_t slice_ns)
{
    const confirmation *call = context;
    return pl_comm_wait(call->comm, call->ticket, slice_ns);
}

/* The used parameters that are declared sparse; the same on every rank. */
static PyObject *list_sparse(const reducer_object *self)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < self->n_slots; i++) {
        if (self->slots[i].policy != POLICY_SPARSE ||
            !pl_reducer_is_used(self->reducer, i))
            continue;
        PyObject *index = PyLong_FromSize_t(i);
        if (index == NULL || PyList_Append(list, index) != 0)
            Py_CLEAR(list);
        Py_XDECREF(index);
    }
    return list;
}

int pli_carrier_finish_sparse(reducer_object *self)
{
    PyObject *list = list_sparse(self);
    PyObject *result = NULL;
    if (list != NULL)
        result = PyObject_CallMethod(self->carrier, "finish_sparse", "OOO", list,
                                     self->part == PL_ACTIVE ? Py_True : Py_False,
                                     pli_join_binds(self) ? Py_True : Py_False);
    for (size_t i = 0; result != NULL && i < self->n_slots; i++)
        if (self->slots[i].policy == POLICY_SPARSE &&
            pl_reducer_is_used(self->reducer, i))
            self->slots[i].sync = GRAD_SYNCED;
    Py_XDECREF(list);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

/* All ranks have what came of their hooks, or all give the step up. */
int pli_carrier_confirm(reducer_object *self)
{
    const module_state *state = state_of_reducer(self);
    const pl_op op = {.kind = PL_BARRIER};
    confirmation call = {.comm = self->comm};
    if (self->carrier == NULL || pli_comm_is_relayed(self->comm))
        return 0;
    if (pli_check(state, pl_comm_issue(self->comm, &op, &call.ticket)) != 0)
        return -1;
    return pli_wait_in_slices(state, confirm_slice, &call);
}

PyObject *pli_carrier_look(PyObject *object, PyObject *ignored)
{
    reducer_object *self = (reducer_object *)object;
    (void)ignored;
    PyThreadState *thread = PyEval_SaveThread();
    const pl_status st = pli_comm_look(self->comm);
    PyEval_RestoreThread(thread);
    if (pli_check(state_of_reducer(self), st) != 0)
        return NULL;
    Py_RETURN_NONE;
}

/* No exception is set, and none is left. */
void pli_carrier_abandon(reducer_object *self)
{
    if (self->carrier == NULL)
        return;
    PyObject *result = PyObject_CallMethod(self->carrier, "abandon", NULL);
    if (result == NULL)
        PyErr_Clear();
    Py_XDECREF(result);
}

int pli_carrier_check_late(reducer_object *self)
{
    if (self->carrier == NULL)
        return 0;
    size_t i = 0;
    while (i < self->n_slots && !pl_reducer_is_late(self->reducer, i))
        i++;
    PyErr_Format(PyExc_RuntimeError,
                 "Expected to mark a variable ready only once. Parameter at index %zu "
                 "(of those that require gradients) got a second gradient on some rank "
                 "after its bucket had gone to the communication hook: keep the graph "
                 "the same in each step, or train without the hook.",
                 i);
    return -1;
}
