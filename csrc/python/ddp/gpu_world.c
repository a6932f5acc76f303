/* gpu_world.c - what World does for gradients that are in a GPU's memory. */
#include <string.h>

#include "nccl/gpu_comm.h"
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

int pli_gpu_world_create(module_state *state, const pli_gpu_world *world,
                         pl_comm **comm)
{
    pl_status st = PL_OK;
    pli_nccl_library *library = NULL;
    pli_gpu_comm_options options = {
        .base = *comm,
        .backend = world->gpu->backend,
        .host_bytes = world->host_bytes,
        .device_bytes = (size_t)world->n_bytes,
        .n_ops = world->n_ops,
        .deadline_ns = world->deadline_ns,
        .is_interrupted = pli_is_interrupted,
        .empty_caches = pli_gpu_empty_cache,
        .context = state,
    };
    if (read_accumulation(world->accumulate, &options.accumulation) != 0)
        return -1;
    if (state->watchdog == NULL)
        PL_TRY(pli_watchdog_create(&state->watchdog));
    options.watchdog = state->watchdog;
    if (pl_comm_world_size(*comm) > 1)
        PL_TRY(open_library(world->nccl, &library));
    options.nccl = library;
    Py_BEGIN_ALLOW_THREADS
    st = pli_gpu_comm_create(&options, comm);
    Py_END_ALLOW_THREADS
done:
    pli_nccl_library_release(library);
    return pli_check(state, st);
}

PyObject *pli_nccl_version(PyObject *module, PyObject *path)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    pli_nccl_library *library = NULL;
    const char *text = NULL;
    if (path != Py_None && !PyUnicode_Check(path))
        return PyErr_Format(PyExc_TypeError, "path is %R: give a string, or None",
                            path);
    if (path != Py_None && (text = PyUnicode_AsUTF8(path)) == NULL)
        return NULL;
    const pl_status st = open_library(text, &library);
    if (st != PL_OK)
        return pli_raise(state, st);
    const int version = library->version;
    pli_nccl_library_release(library);
    return PyLong_FromLong(version);
}
