/* gpu_world.c - the part of World for gradients in a GPU's memory. */
#include <string.h>

#include "world.h"

static int read_accumulation(const char *word, pli_accumulation *out)
{
    *out = strcmp(word, "nccl") == 0 ? PLI_ACCUMULATE_BY_NCCL : PLI_ACCUMULATE_IN_F32;
    if (*out == PLI_ACCUMULATE_BY_NCCL || strcmp(word, "float32") == 0)
        return 0;
    return pli_error(PyExc_ValueError, "accumulate is '%s': give 'nccl' or 'float32'",
                     word);
}

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
                         const char *accumulate, const char *nccl, pl_comm **comm)
{
    pl_status st = PL_OK;
    pli_nccl_library *library = NULL;
    options->is_interrupted = pli_is_interrupted;
    options->empty_caches = pli_gpu_empty_cache;
    options->report_loss = report_loss;
    options->context = state;
    if (read_accumulation(accumulate, &options->accumulation) != 0)
        return -1;
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
