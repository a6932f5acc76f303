/* hook_type.c - the callable behind each parameter's post-accumulate-grad hook.
 *
 * It knows its reducer without owning it: the parameter owns the hook, the reducer owns
 * the parameter, and a cycle through torch's C++ could not be collected.  The reducer
 * clears the link when it goes.
 */
#include "grads.h"

#include <unistd.h>

typedef struct hook_object {
    PyObject_HEAD
    reducer_object *reducer; /* borrowed; NULL once that is gone */
    size_t index;
} hook_object;

static int begin(reducer_object *self)
{
    /* The guard comes first: it tells the peers should this backward fail. */
    if (pli_step_queue_guard(self, GUARD_OF_PARAMETER) != 0)
        return -1;
    return pli_step_begin(self);
}

/* What torch refuses, for those who ask to be refused it too. */
static int check_is_first(const reducer_object *self, size_t i)
{
    if (!self->is_strict || pl_reducer_fires(self->reducer, i) == 0)
        return 0;
    PyErr_Format(
        PyExc_RuntimeError,
        "Expected to mark a variable ready only once. Parameter at index %zu (of those "
        "that require gradients) got a second gradient in one backward: it is used in "
        "several reentrant checkpoints, or outside of forward. Checkpoint with "
        "use_reentrant=False, or leave out strict: paceline averages such gradients "
        "too.",
        i);
    return -1;
}

static int on_gradient(reducer_object *self, size_t i)
{
    if (!pl_reducer_is_active(self->reducer)) {
        if (getpid() != self->owner_pid)
            return 0; /* a forked child trains the bare model for itself */
        if (self->sync_now == SYNC_OFF || self->sync_forward == SYNC_OFF) {
            self->slots[i].sync = GRAD_UNSYNCED;
            return 0;
        }
        if (begin(self) != 0)
            return -1;
    }
    /* An inner backward's guard may have been called: the outer one needs its own. */
    if (self->n_guards == 0 && self->engine == ENGINE_CALLS_BACK &&
        pli_step_queue_guard(self, GUARD_OF_PARAMETER) != 0)
        return -1;
    if (check_is_first(self, i) != 0 ||
        (pli_is_on_device(self) && pli_launch_look(self) != 0))
        return -1;
    return pli_grads_arrive(self, i) != 0 ? -1 : pli_step_finish_inline(self);
}

static PyObject *hook_call(PyObject *object, PyObject *param)
{
    const hook_object *self = (hook_object *)object;
    (void)param;
    if (self->reducer != NULL && on_gradient(self->reducer, self->index) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef hook_call_def = {"paceline_hook", hook_call, METH_O,
                                    "paceline_hook($self, param, /)\n--\n\nTake the "
                                    "gradient that backward has produced."};

PyObject *pli_hook_new(const module_state *state, reducer_object *reducer, size_t index)
{
    hook_object *self = PyObject_New(hook_object, state->hook_type);
    if (self == NULL)
        return NULL;
    self->reducer = reducer;
    self->index = index;
    return (PyObject *)self;
}

void pli_hook_forget(PyObject *hook)
{
    ((hook_object *)hook)->reducer = NULL;
}

/* The function that torch calls: as cheap as a callable gets. */
static PyObject *hook_function(PyObject *object, void *closure)
{
    (void)closure;
    return PyCFunction_New(&hook_call_def, object);
}

static void hook_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyGetSetDef hook_getset[] = {
    {"function", hook_function, NULL, "The callable to register.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot hook_slots[] = {
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_getset, hook_getset},
    {Py_tp_doc, "A parameter's hook; made by Reducer alone."},
    {0, NULL},
};

PyType_Spec pli_hook_spec = {
    .name = "paceline._native.Hook",
    .basicsize = sizeof(hook_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = hook_slots,
};
