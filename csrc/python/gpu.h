/* gpu.h - a GPU, as Python holds it. */
#ifndef PLI_GPU_H
#define PLI_GPU_H

#include "backend/cuda.h"
#include "state.h"

typedef struct gpu_object {
    PyObject_HEAD
    pl_backend *backend;
    dl_device place; /* as tensors on it say */
} gpu_object;

/* The stream that is current in this thread; -1 with an exception. */
int pli_gpu_current_stream(const module_state *state, const gpu_object *device,
                           pl_stream **out);

/* Has torch give back device memory that it only keeps; takes the GIL. */
void pli_gpu_empty_cache(void *state);

/* driver_version(path) -> int, of the module */
PyObject *pli_driver_version(PyObject *module, PyObject *args);

#endif
