/* module.c - paceline._native: multi-phase initialisation, state, functions. */
#include "../backend/cpu_sum.h"
#include "grads.h"

static module_state *state_of_module(PyObject *module)
{
    return PyModule_GetState(module);
}

/* ---- functions ----------------------------------------------------------------------
 */

static int take_callable(PyObject *kwargs, const char *name, PyObject **field)
{
    PyObject *callable = PyDict_GetItemString(kwargs, name); /* borrowed */
    if (callable == NULL || !PyCallable_Check(callable)) {
        PyErr_Format(PyExc_TypeError, "attach_torch: %s must be a callable", name);
        return -1;
    }
    Py_XSETREF(*field, Py_NewRef(callable));
    return 0;
}

static int take_exchange(module_state *state, PyObject *capsule)
{
    if (capsule == NULL || capsule == Py_None) {
        state->exchange = NULL;
        Py_CLEAR(state->exchange_capsule);
        return 0;
    }
    if (!PyCapsule_IsValid(capsule, DL_EXCHANGE_CAPSULE)) {
        PyErr_Format(PyExc_TypeError,
                     "attach_torch: exchange is %R: give the capsule of "
                     "torch.Tensor.__dlpack_c_exchange_api__, or None",
                     capsule);
        return -1;
    }
    const dl_exchange *exchange = PyCapsule_GetPointer(capsule, DL_EXCHANGE_CAPSULE);
    while (exchange != NULL && exchange->version.major != DL_MAJOR)
        exchange = exchange->previous;
    if (exchange == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "attach_torch: exchange is of a DLPack "
                                                "that this version does not know");
        return -1;
    }
    /* Without a non-owning read there is nothing to gain over capsules. */
    state->exchange = exchange->tensor_from_object != NULL ? exchange : NULL;
    Py_XSETREF(state->exchange_capsule, Py_NewRef(capsule));
    return 0;
}

static PyObject *attach_torch(PyObject *module, PyObject *args, PyObject *kwargs)
{
    module_state *state = state_of_module(module);
    if (PyTuple_GET_SIZE(args) != 0 || kwargs == NULL) {
        PyErr_SetString(PyExc_TypeError, "attach_torch takes keywords only");
        return NULL;
    }
#define TAKE_CALLABLE(name)                                                            \
    if (take_callable(kwargs, #name, &state->name) != 0)                               \
        return NULL;
    PLI_TORCH_MAP(TAKE_CALLABLE)
#undef TAKE_CALLABLE
    if (take_exchange(state, PyDict_GetItemString(kwargs, "exchange")) != 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *isa(PyObject *module, PyObject *ignored)
{
    const pli_sum_table *sums = NULL;
    (void)ignored;
    const pl_status st = pli_cpu_sums(&sums);
    if (st != PL_OK)
        return pli_raise(state_of_module(module), st);
    return PyUnicode_FromString(pli_isa_text(sums->isa));
}

static PyObject *after_fork_in_child(PyObject *module, PyObject *ignored)
{
    (void)ignored;
    reducer_object *reducer = state_of_module(module)->reducers;
    for (; reducer != NULL; reducer = reducer->next) {
        size_t offset, n_bytes;
        if (reducer->window == NULL)
            continue;
        pl_reducer_buckets(reducer->reducer, &offset, &n_bytes);
        pli_shm_unshare_own(reducer->comm, offset, n_bytes, reducer->window->base);
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"attach_torch", (PyCFunction)(void (*)(void))attach_torch,
     METH_VARARGS | METH_KEYWORDS,
     "attach_torch(**callables)\n--\n\nHand over what the extension needs of torch."},
    {"measure", pli_measure, METH_VARARGS,
     "measure(params, buffers, bucket_bytes, last_bytes, sparse=(), /)\n--\n\n"
     "Return (arena_bytes, n_ops) that a Reducer of these needs of its World."},
    {"after_fork_in_child", after_fork_in_child, METH_NOARGS,
     "after_fork_in_child()\n--\n\nMake the gradients that a child sees its own."},
    {"isa", isa, METH_NOARGS, "isa()\n--\n\nName of the instruction set of the sums."},
    {NULL, NULL, 0, NULL},
};

/* ---- module -------------------------------------------------------------------------
 */

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **field)
{
    *field = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *field != NULL ? PyModule_AddType(module, *field) : -1;
}

static int add_exception(PyObject *module, const char *name, const char *doc,
                         PyObject *bases, PyObject **field)
{
    char path[64];
    (void)PyOS_snprintf(path, sizeof path, "paceline.%s", name);
    *field = PyErr_NewExceptionWithDoc(path, doc, bases, NULL);
    return *field != NULL ? PyModule_AddObjectRef(module, name, *field) : -1;
}

static int add_exceptions(PyObject *module, module_state *state)
{
    if (add_exception(
            module, "PeerError",
            "Another rank died, left, or failed in this step; the message names "
            "it.",
            PyExc_RuntimeError, &state->peer_error) != 0)
        return -1;
    PyObject *bases = PyTuple_Pack(2, state->peer_error, PyExc_TimeoutError);
    if (bases == NULL)
        return -1;
    const int status = add_exception(
        module, "PeerTimeoutError",
        "Another rank lives but kept this one waiting beyond the deadline.", bases,
        &state->peer_timeout_error);
    Py_DECREF(bases);
    if (status != 0)
        return -1;
    return add_exception(module, "MismatchError",
                         "The ranks' models, or the steps they run, differ.",
                         PyExc_RuntimeError, &state->mismatch_error);
}

static int module_exec(PyObject *module)
{
    module_state *state = state_of_module(module);
    if (add_exceptions(module, state) != 0 ||
        add_type(module, &pli_listener_spec, &state->listener_type) != 0 ||
        add_type(module, &pli_world_spec, &state->world_type) != 0 ||
        add_type(module, &pli_reducer_spec, &state->reducer_type) != 0 ||
        add_type(module, &pli_hook_spec, &state->hook_type) != 0 ||
        add_type(module, &pli_guard_spec, &state->guard_type) != 0 ||
        add_type(module, &pli_watch_spec, &state->watch_type) != 0)
        return -1;
    state->str_grad = PyUnicode_InternFromString("grad");
    if (state->str_grad == NULL)
        return -1;
    return pli_check(state, pli_progress_create(&state->progress));
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    const module_state *state = state_of_module(module);
    Py_VISIT(state->listener_type);
    Py_VISIT(state->world_type);
    Py_VISIT(state->reducer_type);
    Py_VISIT(state->hook_type);
    Py_VISIT(state->guard_type);
    Py_VISIT(state->watch_type);
    Py_VISIT(state->peer_error);
    Py_VISIT(state->peer_timeout_error);
    Py_VISIT(state->mismatch_error);
    Py_VISIT(state->exchange_capsule);
#define VISIT_CALLABLE(name) Py_VISIT(state->name);
    PLI_TORCH_MAP(VISIT_CALLABLE)
#undef VISIT_CALLABLE
    return 0;
}

static int module_clear(PyObject *module)
{
    module_state *state = state_of_module(module);
    Py_CLEAR(state->listener_type);
    Py_CLEAR(state->world_type);
    Py_CLEAR(state->reducer_type);
    Py_CLEAR(state->hook_type);
    Py_CLEAR(state->guard_type);
    Py_CLEAR(state->watch_type);
    Py_CLEAR(state->peer_error);
    Py_CLEAR(state->peer_timeout_error);
    Py_CLEAR(state->mismatch_error);
    Py_CLEAR(state->str_grad);
    state->exchange = NULL;
    Py_CLEAR(state->exchange_capsule);
#define CLEAR_CALLABLE(name) Py_CLEAR(state->name);
    PLI_TORCH_MAP(CLEAR_CALLABLE)
#undef CLEAR_CALLABLE
    return 0;
}

static void module_free(void *module)
{
    module_state *state = state_of_module(module);
    (void)module_clear(module);
    pli_progress_destroy(state->progress);
    state->progress = NULL;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef native_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "paceline._native",
    .m_doc = "Paceline's core: worlds of ranks and reducers of gradients.",
    .m_size = sizeof(module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__native(void);
PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&native_module);
}
