/* hook_type.c - the callable behind each parameter's post-accumulate-grad hook.
 *
 * It runs after all hooks of the user, whenever they were registered, and takes the
 * gradient as they left it.  torch's wrapper does so too: its hook is on the node,
 * whose hooks run after the parameter's.
 *
 * It does not own its reducer: the parameter owns the hook, the reducer owns the
 * parameter, and Python could not collect a cycle through torch's C++.  The reducer
 * clears the link when it goes.
 */
#include "hook_type.h"

#include "backward_end_type.h"
#include "comm_hook.h"

typedef struct hook_object {
    PyObject_HEAD
    reducer_object *reducer; /* borrowed; NULL after the reducer is gone */
    size_t index;
} hook_object;

static PyObject *hook_call(PyObject *object, PyObject *param);

/* The hook object behind a function, or NULL for a function of the user; borrowed. */
static PyObject *hook_behind(PyObject *function)
{
    return PyCFunction_Check(function) &&
                   PyCFunction_GET_FUNCTION(function) == hook_call
               ? PyCFunction_GET_SELF(function)
               : NULL;
}

/* Returns 1 if no other hook of the parameter runs after ours.  Else returns 0, and
 * makes ours the last from the next gradient on; or -1.  Hooks registered after ours
 * have yet to run for this gradient. */
static int become_last(const reducer_param *param)
{
    PyObject *key, *value;
    PyObject *our_key = NULL;
    int is_last = 1; /* ignoring hooks of other wrappers, which change nothing */
    Py_ssize_t at = 0;
    while (PyDict_Next(param->hooks, &at, &key, &value)) {
        const PyObject *hook = hook_behind(value);
        if (hook == param->hook)
            our_key = key;
        else if (our_key != NULL && hook == NULL)
            is_last = 0;
    }
    if (our_key == NULL || is_last)
        return 1;
    /* torch calls them in the order of the dict. */
    Py_INCREF(our_key);
    PyObject *function = PyObject_GetItem(param->hooks, our_key);
    const int status = function != NULL &&
                               PyObject_DelItem(param->hooks, our_key) == 0 &&
                               PyObject_SetItem(param->hooks, our_key, function) == 0
                           ? 0
                           : -1;
    Py_XDECREF(function);
    Py_DECREF(our_key);
    return status;
}

static int on_gradient(reducer_object *self, size_t i)
{
    pl_arrival arrival = PL_ARRIVES_ALONE;
    int is_due = 0;
    if (pli_has_user_hooks(&self->params[i])) {
        const int is_last = become_last(&self->params[i]);
        if (is_last < 0)
            return -1;
        arrival = is_last ? PL_ARRIVES_AFTER_HOOKS : PL_ARRIVES_BEFORE_HOOKS;
    }
    /* If it fails, so does the backward, and its end reports that. */
    if (pli_check(state_of_reducer(self),
                  pl_step_take(self->step, i, arrival, &is_due)) != 0)
        return -1;
    return is_due ? pli_step_finish(self) : 0;
}

static PyObject *hook_call(PyObject *object, PyObject *param)
{
    PLI_ENTER(object);
    const hook_object *self = (hook_object *)object;
    (void)param;
    reducer_object *reducer =
        self->reducer != NULL ? pli_reducer_ref(self->reducer) : NULL;
    const int status = reducer != NULL ? on_gradient(reducer, self->index) : 0;
    if (status != 0)
        pli_comm_hook_raise_refusal(reducer);
    Py_XDECREF(reducer);
    return pli_none(status);
}

static PyMethodDef hook_call_def = {"paceline_hook", hook_call, METH_O,
                                    "paceline_hook($self, param, /)\n--\n\nTake the "
                                    "gradient that backward produced."};

PyObject *pli_hook_new(const module_state *state, reducer_object *reducer, size_t index)
{
    hook_object *self = PyObject_New(hook_object, state->hook_type);
    if (self == NULL)
        return NULL;
    self->reducer = reducer;
    self->index = index;
    return (PyObject *)self;
}

void pli_hook_detach(PyObject *hook)
{
    ((hook_object *)hook)->reducer = NULL;
}

PyObject *pli_hook_function(PyObject *hook)
{
    return PyCFunction_New(&hook_call_def, hook);
}

static void hook_dealloc(PyObject *object)
{
    pli_object_free(object);
}

static PyType_Slot hook_slots[] = {
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_doc, "A parameter's hook; made by Reducer alone."},
    {0, NULL},
};

PLI_TYPE(hook, Hook, Py_TPFLAGS_DISALLOW_INSTANTIATION);
