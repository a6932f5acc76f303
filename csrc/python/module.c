/* module.c - paceline._native: multi-phase initialisation, state, functions. */
#include "backend/cpu_sum.h"
#include "comm/links.h"
#include "ipc/parent_watch.h"
#include "python/ddp/autograd_hooks.h"
#include "python/dp/tree.h"

static module_state *state_of_module(PyObject *module)
{
    return PyModule_GetState(module);
}

/* ---- functions ------------------------------------------------------------------ */

/* Takes an argument of this type; if `type` is NULL, a callable. */
static int take(PyObject *kwargs, const char *name, PyTypeObject *type,
                PyObject **field)
{
    PyObject *given = PyDict_GetItemString(kwargs, name); /* borrowed */
    if (given == NULL ||
        !(type != NULL ? PyObject_TypeCheck(given, type) : PyCallable_Check(given)))
        return pli_error(PyExc_TypeError, "attach_torch: %s must be a %s", name,
                         type != NULL ? type->tp_name : "callable");
    Py_XSETREF(*field, Py_NewRef(given));
    return 0;
}

static int take_exchange(module_state *state, PyObject *capsule)
{
    if (capsule == NULL || capsule == Py_None) {
        state->exchange = NULL;
        Py_CLEAR(state->exchange_capsule);
        return 0;
    }
    if (!PyCapsule_IsValid(capsule, DL_EXCHANGE_CAPSULE))
        return pli_error(PyExc_TypeError,
                         "attach_torch: exchange is %R: give the capsule of "
                         "torch.Tensor.__dlpack_c_exchange_api__, or None",
                         capsule);
    const dl_exchange *exchange = PyCapsule_GetPointer(capsule, DL_EXCHANGE_CAPSULE);
    while (exchange != NULL && exchange->version.major != DL_MAJOR)
        exchange = exchange->previous;
    if (exchange == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "attach_torch: exchange has a DLPack "
                                                "version that is not supported");
        return -1;
    }
    /* A table without non-owning reads is no faster than capsules. */
    state->exchange = exchange->tensor_from_object != NULL ? exchange : NULL;
    Py_XSETREF(state->exchange_capsule, Py_NewRef(capsule));
    return 0;
}

static PyObject *attach_torch(PyObject *module, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(module);
    module_state *state = state_of_module(module);
    if (PyTuple_GET_SIZE(args) != 0 || kwargs == NULL)
        return PyErr_Format(PyExc_TypeError, "attach_torch takes keywords only");
#define TAKE_CALLABLE(name)                                                            \
    if (take(kwargs, #name, NULL, &state->name) != 0)                                  \
        return NULL;
    PLI_TORCH_MAP(TAKE_CALLABLE)
#undef TAKE_CALLABLE
#define TAKE_CLASS(name)                                                               \
    if (take(kwargs, #name, &PyType_Type, &state->name) != 0)                          \
        return NULL;
    PLI_CLASS_MAP(TAKE_CLASS)
#undef TAKE_CLASS
    if (take(kwargs, "registry", &PyDict_Type, &state->registry) != 0)
        return NULL;
    return pli_none(take_exchange(state, PyDict_GetItemString(kwargs, "exchange")));
}

static PyObject *isa(PyObject *module, PyObject *ignored)
{
    PLI_ENTER(module);
    const pli_sum_table *sums = NULL;
    (void)ignored;
    const pl_status st = pli_cpu_sums(&sums);
    if (st != PL_OK)
        return pli_raise(state_of_module(module), st);
    return PyUnicode_FromString(pli_isa_text(sums->isa));
}

/* Moves the views of gradients to private memory, which a fork copies on write. */
static PyObject *before_fork(PyObject *module, PyObject *ignored)
{
    PLI_ENTER(module);
    (void)ignored;
    reducer_object *reducer = state_of_module(module)->reducers;
    for (; reducer != NULL; reducer = reducer->next)
        if (reducer->step != NULL &&
            pli_check(state_of_module(module), pl_step_before_fork(reducer->step)) != 0)
            return NULL;
    Py_RETURN_NONE;
}

static PyObject *after_fork_in_child(PyObject *module, PyObject *kept)
{
    PLI_ENTER(module);
    Py_INCREF(kept); /* never dropped, so that no one destroys what it holds */
    reducer_object *reducer = state_of_module(module)->reducers;
    pli_watchdog_forget(state_of_module(module)->watchdog);
    pli_progress_forget(state_of_module(module)->progress);
    pli_processes_forget(state_of_module(module)->processes);
    for (; reducer != NULL; reducer = reducer->next) {
        reducer->comm->ops->forget(reducer->comm);
        pli_recorder_hide(reducer->comm->recorder);
    }
    return before_fork(module, NULL); /* views that another thread has made since */
}

static PyObject *has_ended(PyObject *module, PyObject *args)
{
    PLI_ENTER(module);
    pli_process *process = NULL;
    int pid;
    if (!PyArg_ParseTuple(args, "i:has_ended", &pid))
        return NULL;
    const pl_status st = pli_process_open(NULL, pid, &process);
    const int is_over =
        st == PL_EPEER || (st == PL_OK && pli_process_has_ended(process));
    pli_process_close(process);
    if (st != PL_OK && st != PL_EPEER)
        return pli_raise(state_of_module(module), st);
    return PyBool_FromLong(is_over);
}

static PyObject *die_with(PyObject *module, PyObject *args)
{
    PLI_ENTER(module);
    int pidfd, pipe_fd;
    return pli_none(
        !PyArg_ParseTuple(args, "ii", &pidfd, &pipe_fd) ||
        pli_check(state_of_module(module), pli_parent_watch_start(pidfd, pipe_fd)));
}

/* ---- whether modules are as they were ------------------------------------------- */

static int is_same_name(PyObject *name, PyObject *expected)
{
    return name == expected || (PyUnicode_Check(name) && PyUnicode_Check(expected) &&
                                PyUnicode_Compare(name, expected) == 0);
}

/* Runs no user code: names are compared as strings, values by identity.  A value may be
 * anything if the expected one is `any`; if `any` is NULL, only names are compared. */
static int is_as(PyObject *dict, PyObject *expected, PyObject *any)
{
    Py_ssize_t at = 0, at_expected = 0;
    PyObject *name, *value, *expected_name, *held;
    PLI_HOLD(dict);
    if (PyDict_GET_SIZE(dict) != PyDict_GET_SIZE(expected))
        return 0;
    while (PyDict_Next(dict, &at, &name, &value) &&
           PyDict_Next(expected, &at_expected, &expected_name, &held))
        if (!is_same_name(name, expected_name) ||
            (any != NULL && held != any && value != held))
            return 0;
    return 1;
}

static int check_dicts(PyObject *dicts, PyObject *expected)
{
    int is_right = PyList_Check(dicts) && PyList_Check(expected) &&
                   PyList_GET_SIZE(dicts) == PyList_GET_SIZE(expected);
    for (Py_ssize_t i = 0; is_right && i < PyList_GET_SIZE(dicts); i++)
        is_right = PyDict_Check(PyList_GET_ITEM(dicts, i)) &&
                   PyDict_Check(PyList_GET_ITEM(expected, i));
    if (!is_right)
        PyErr_SetString(PyExc_TypeError, "give two lists of dicts, equally long");
    return is_right ? 0 : -1;
}

static PyObject *restore(PyObject *module, PyObject *args)
{
    PLI_ENTER(module);
    PyObject *dicts, *expected;
    if (!PyArg_ParseTuple(args, "OO:restore", &dicts, &expected) ||
        check_dicts(dicts, expected) != 0)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dicts); i++) {
        PyObject *const dict = PyList_GET_ITEM(dicts, i);
        PyObject *const held = PyList_GET_ITEM(expected, i);
        if (is_as(dict, held, held)) /* no value is `held` */
            continue;
        if (!is_as(dict, held, NULL))
            PyDict_Clear(dict);
        if (PyDict_Update(dict, held) != 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *differing(PyObject *module, PyObject *args)
{
    PLI_ENTER(module);
    PyObject *dicts, *expected, *any;
    if (!PyArg_ParseTuple(args, "OOO:differing", &dicts, &expected, &any) ||
        check_dicts(dicts, expected) != 0)
        return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(dicts); i++) {
        if (is_as(PyList_GET_ITEM(dicts, i), PyList_GET_ITEM(expected, i), any))
            continue;
        PyObject *number = PyLong_FromSsize_t(i);
        if (number == NULL || PyList_Append(found, number) != 0)
            Py_CLEAR(found);
        Py_XDECREF(number);
    }
    return found;
}

static int append_dict(PyObject *dict, PyObject *sizes, PyObject *names,
                       PyObject *values)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;
    PLI_HOLD(dict);
    PyObject *size = PyLong_FromSsize_t(PyDict_GET_SIZE(dict));
    int failed = size == NULL || PyList_Append(sizes, size) != 0;
    Py_XDECREF(size);
    while (!failed && PyDict_Next(dict, &at, &name, &value))
        failed = PyList_Append(names, name) != 0 || PyList_Append(values, value) != 0;
    return failed ? -1 : 0;
}

/* Appends a dictionary's size, names and values, in the order that Python sees: an
 * OrderedDict has its own, and a script's only looks like a dictionary. */
static int append_items(PyObject *held, PyObject *sizes, PyObject *names,
                        PyObject *values)
{
    if (PyDict_CheckExact(held))
        return append_dict(held, sizes, names, values);
    PyObject *dict = PyDict_New();
    const int status = dict != NULL && PyDict_Update(dict, held) == 0
                           ? append_dict(dict, sizes, names, values)
                           : -1;
    Py_XDECREF(dict);
    return status;
}

static PyObject *items(PyObject *module, PyObject *args)
{
    PLI_ENTER(module);
    PyObject *objects, *attributes;
    if (!PyArg_ParseTuple(args, "O!O!:items", &PyList_Type, &objects, &PyTuple_Type,
                          &attributes))
        return NULL;
    PyObject *of[3] = {PyList_New(0), PyList_New(0), PyList_New(0)};
    int status = of[0] == NULL || of[1] == NULL || of[2] == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyList_GET_SIZE(objects); i++) {
        for (Py_ssize_t k = 0; status == 0 && k < PyTuple_GET_SIZE(attributes); k++) {
            PyObject *held = PyObject_GetAttr(PyList_GET_ITEM(objects, i),
                                              PyTuple_GET_ITEM(attributes, k));
            status = held != NULL ? append_items(held, of[0], of[1], of[2]) : -1;
            Py_XDECREF(held);
        }
    }
    PyObject *found = status == 0 ? PyTuple_Pack(3, of[0], of[1], of[2]) : NULL;
    for (int k = 0; k < 3; k++)
        Py_XDECREF(of[k]);
    return found;
}

static PyObject *reference_counts(PyObject *module, PyObject *objects)
{
    PLI_ENTER(module);
    if (!PyList_Check(objects))
        return PyErr_Format(PyExc_TypeError, "objects is not a list");
    PyObject *counts = PyTuple_New(PyList_GET_SIZE(objects));
    for (Py_ssize_t i = 0; counts != NULL && i < PyList_GET_SIZE(objects); i++)
        pli_tuple_put(&counts, i,
                      PyLong_FromSsize_t(Py_REFCNT(PyList_GET_ITEM(objects, i))));
    return counts;
}

/* Returns 1 if object.name is no longer `was`, 0, or -1. */
static int has_changed(PyObject *object, PyObject *name, PyObject *was)
{
    PyObject *now = PyObject_GetAttr(object, name);
    Py_XDECREF(now); /* dtypes and booleans stay alive */
    return now == NULL ? -1 : now != was;
}

/* Has a parameter another dtype or __dict__ than noted, or does a frozen one require a
 * gradient?  torch moves a __dict__ and hooks when it swaps two tensors' contents. */
static int is_converted(const module_state *state, PyObject *noted)
{
    if (!PyTuple_Check(noted) || PyTuple_GET_SIZE(noted) != 4)
        return pli_error(PyExc_TypeError,
                         "%R: give (parameter, dtype, __dict__, trains)", noted);
    PyObject *const parameter = PyTuple_GET_ITEM(noted, 0);
    PyObject *const trains = PyTuple_GET_ITEM(noted, 3);
    PyObject *attributes = PyObject_GenericGetDict(parameter, NULL);
    Py_XDECREF(attributes); /* compared, never read */
    if (attributes != PyTuple_GET_ITEM(noted, 2))
        return attributes == NULL ? -1 : 1;
    const int dtype =
        has_changed(parameter, state->name_dtype, PyTuple_GET_ITEM(noted, 1));
    /* A trained parameter that was frozen gets no gradients: it needs no new wrapping,
     * and is often unfrozen soon (adversarial training). */
    if (dtype != 0 || trains == Py_True)
        return dtype;
    return has_changed(parameter, state->name_requires_grad, trains);
}

static PyObject *converted(PyObject *module, PyObject *noted)
{
    PLI_ENTER(module);
    const module_state *state = state_of_module(module);
    int found = 0;
    if (!PyList_Check(noted))
        return PyErr_Format(PyExc_TypeError, "noted is %R: give a list", noted);
    for (Py_ssize_t i = 0; found == 0 && i < PyList_GET_SIZE(noted); i++)
        found = is_converted(state, PyList_GET_ITEM(noted, i));
    return found >= 0 ? PyBool_FromLong(found) : NULL;
}

/* ---- the table ------------------------------------------------------------------ */

static PyMethodDef module_methods[] = {
    {"attach_torch", (PyCFunction)(void (*)(void))attach_torch,
     METH_VARARGS | METH_KEYWORDS,
     "attach_torch(**callables)\n--\n\nPass what the extension needs of torch."},
    {"measure", pli_measure, METH_VARARGS,
     "measure(params, buffers, bucket_bytes, last_bytes, sparse=[], device=None, "
     "world_size=0, /)\n"
     "--\n\nReturn (arena_bytes, n_ops, words_bytes) that a Reducer of these needs of "
     "its World; words_bytes of the arena are host memory."},
    {"nccl_version", pli_nccl_version, METH_VARARGS,
     "nccl_version(path, /)\n--\n\nReturn the version of the NCCL that a World would "
     "use, as 22907; path is where one was found, or None."},
    {"unwound_keeper", pli_unwound_keeper, METH_O,
     "unwound_keeper(kept, /)\n--\n\nReturn a callback for sys.monitoring's PY_UNWIND: "
     "if the frame's code is kept[0], it\nstores the exception in kept[1]."},
    {"driver_version", pli_driver_version, METH_VARARGS,
     "driver_version(path, /)\n--\n\nStart CUDA's driver, and return the CUDA version "
     "that it supports, as 13000; path is its library, or None."},
    {"before_fork", before_fork, METH_NOARGS,
     "before_fork()\n--\n\nMove gradients from shared memory into private memory, "
     "which a child gets a copy of."},
    {"after_fork_in_child", after_fork_in_child, METH_O,
     "after_fork_in_child(kept, /)\n--\n\nNever destroy `kept`, close inherited "
     "connections, and make gradients that are\nstill shared with the parent private."},
    {"has_ended", has_ended, METH_VARARGS,
     "has_ended(pid, /)\n--\n\nTell whether a process has ended: at once if the kernel "
     "has pidfds, else once its parent has reaped it."},
    {"die_with", die_with, METH_VARARGS,
     "die_with(pidfd, pipe_fd, /)\n--\n\n"
     "End this process at once when the process of a pidfd or the pipe ends."},
    {"flatten", pli_flatten, METH_O,
     "flatten(value, /)\n--\n\nReturn (tree, leaves): the nesting, and the tensors and "
     "arrays in order."},
    {"leaves", pli_leaves, METH_O,
     "leaves(value, /)\n--\n\nReturn (leaves, has_mark): the tensors and arrays at "
     "any depth, and whether a value is marked."},
    {"scatter", (PyCFunction)(void (*)(void))pli_scatter, METH_FASTCALL,
     "scatter(inputs, kwargs, n, dim, /)\n--\n\nSplit a call's arguments over at most "
     "n replicas. Return (tree, sizes, leaves), both by replica."},
    {"gather", (PyCFunction)(void (*)(void))pli_gather, METH_FASTCALL,
     "gather(outputs, sizes, dim, join=None, /)\n--\n\nJoin the replicas' outputs; "
     "join(tensors, dim) joins tensors, and join.of_replica(value, k) brings a value."},
    {"differing", differing, METH_VARARGS,
     "differing(dicts, expected, any, /)\n--\n\nReturn the indices of dicts that lack "
     "the expected names and values in the expected order; the value `any` matches "
     "every object."},
    {"items", items, METH_VARARGS,
     "items(objects, attributes, /)\n--\n\nReturn (sizes, names, values) of the dicts "
     "that objects have as these attributes, object by object."},
    {"restore", restore, METH_VARARGS,
     "restore(dicts, expected, /)\n--\n\nGive dicts exactly the expected items."},
    {"converted", converted, METH_O,
     "converted(noted, /)\n--\n\nTell whether any (parameter, dtype, __dict__, "
     "requires_grad) has changed; freezing does not count."},
    {"reference_counts", reference_counts, METH_O,
     "reference_counts(objects, /)\n--\n\nReturn the reference count of each object of "
     "a list."},
    {"isa", isa, METH_NOARGS, "isa()\n--\n\nReturn the instruction set of the sums."},
    {NULL, NULL, 0, NULL},
};

/* ---- module --------------------------------------------------------------------- */

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **field)
{
    *field = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *field != NULL ? PyModule_AddType(module, *field) : -1;
}

/* The exception classes are defined in Python. */
static int add_exceptions(PyObject *module, module_state *state)
{
    static const char *const names[] = {"PeerError", "PeerTimeoutError",
                                        "MismatchError"};
    state->errors = PyImport_ImportModule("paceline._errors");
    int status = state->errors != NULL ? 0 : -1;
    for (size_t i = 0; i < sizeof names / sizeof names[0] && status == 0; i++) {
        PyObject *type = PyObject_GetAttrString(state->errors, names[i]);
        status = type != NULL ? PyModule_AddObjectRef(module, names[i], type) : -1;
        Py_XDECREF(type);
    }
    return status;
}

static int module_exec(PyObject *module)
{
    module_state *state = state_of_module(module);
    if (add_exceptions(module, state) != 0 ||
        PyModule_AddIntConstant(module, "MAX_SHARED_MEMORY_RANKS", PL_MAX_RANKS) != 0 ||
        PyModule_AddIntConstant(module, "MAX_HOSTS", PLI_MAX_HOSTS) != 0 ||
        PyModule_AddIntConstant(module, "N_LINK_STREAMS", PLI_N_LINK_STREAMS) != 0)
        return -1;
#define ADD_TYPE(name)                                                                 \
    if (add_type(module, &pli_##name##_spec, &state->name##_type) != 0)                \
        return -1;
    PLI_TYPE_MAP(ADD_TYPE)
#undef ADD_TYPE
#define MAKE_NAME(name)                                                                \
    if ((state->name_##name = PyUnicode_InternFromString(#name)) == NULL)              \
        return -1;
    PLI_NAME_MAP(MAKE_NAME)
#undef MAKE_NAME
    if (pli_check(state, pli_processes_create(&state->processes)) != 0)
        return -1;
    return pli_check(state, pli_progress_create(&state->progress));
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    const module_state *state = state_of_module(module);
#define VISIT_TYPE(name) Py_VISIT(state->name##_type);
    PLI_TYPE_MAP(VISIT_TYPE)
#undef VISIT_TYPE
#define VISIT_OBJECT(name) Py_VISIT(state->name);
    PLI_OBJECT_MAP(VISIT_OBJECT)
#undef VISIT_OBJECT
    return 0;
}

static int module_clear(PyObject *module)
{
    module_state *state = state_of_module(module);
#define CLEAR_TYPE(name) Py_CLEAR(state->name##_type);
    PLI_TYPE_MAP(CLEAR_TYPE)
#undef CLEAR_TYPE
    state->exchange = NULL;
#define CLEAR_OBJECT(name) Py_CLEAR(state->name);
    PLI_OBJECT_MAP(CLEAR_OBJECT)
#undef CLEAR_OBJECT
#define CLEAR_NAME(name) Py_CLEAR(state->name_##name);
    PLI_NAME_MAP(CLEAR_NAME)
#undef CLEAR_NAME
    return 0;
}

static void module_free(void *module)
{
    module_state *state = state_of_module(module);
    (void)module_clear(module);
    if (state->watchdog != NULL) { /* its thread may wait for the GIL */
        PyThreadState *thread = PyEval_SaveThread();
        pli_watchdog_destroy(state->watchdog);
        PyEval_RestoreThread(thread);
        state->watchdog = NULL;
    }
    pli_progress_destroy(state->progress);
    state->progress = NULL;
    pli_processes_destroy(state->processes);
    state->processes = NULL;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030e0000 /* not 3.13: docs/versions.md */
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
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
