/* gpu_world.c - the part of World for gradients in a GPU's memory. */
#include "world.h"

static pl_status open_library(const char *path, pli_nccl_library **out)
{
    pl_status st;
    Py_BEGIN_ALLOW_THREADS
    st = pli_nccl_library_open(path, out);
    Py_END_ALLOW_THREADS
    return st;
}

/* A world may be destroyed while an exception is on its way. */
static void report_loss(void *state, const char *message)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *traceback;
    (void)state;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyErr_WarnFormat(PyExc_RuntimeWarning, 1,
                         "averages of the last steps were lost on the GPU: %s",
                         message) != 0)
        PyErr_WriteUnraisable(NULL);
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(gil);
}

int pli_gpu_world_create(module_state *state, pli_gpu_comm_options *options,
                         const char *nccl, pl_comm **comm)
{
    pl_status st = PL_OK;
    pli_nccl_library *library = NULL;
    options->is_interrupted = pli_is_interrupted;
    options->empty_caches = pli_gpu_empty_cache;
    options->report_loss = report_loss;
    options->context = state;
    if (state->watchdog == NULL)
        PL_TRY(pli_watchdog_create(&state->watchdog));
    options->watchdog = state->watchdog;
    if (pl_comm_world_size(*comm) > 1)
        PL_TRY(open_library(nccl, &library));
    options->nccl = library;
    Py_BEGIN_ALLOW_THREADS
    st = pli_gpu_comm_create(options, comm);
    Py_END_ALLOW_THREADS
done:
    pli_nccl_library_release(library);
    return pli_check(state, st);
}

PyObject *pli_nccl_version(PyObject *module, PyObject *args)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    pli_nccl_library *library = NULL;
    const char *path = NULL;
    if (!PyArg_ParseTuple(args, "z:nccl_version", &path))
        return NULL;
    const pl_status st = open_library(path, &library);
    if (st != PL_OK)
        return pli_raise(state, st);
    const int version = library->version;
    pli_nccl_library_release(library);
    return PyLong_FromLong(version);
}
