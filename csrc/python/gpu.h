/* gpu.h - the Python object of a GPU. */
#ifndef PLI_GPU_H
#define PLI_GPU_H

#include "backend/cuda.h"
#include "nccl/gpu_comm.h"
#include "state.h"

typedef struct gpu_object {
    PyObject_HEAD
    pl_backend *backend;
    dl_device place; /* as DLPack describes tensors on it */
} gpu_object;

/* The stream that is current in this thread; 0, or -1 with an exception. */
int pli_gpu_current_stream(const module_state *state, const gpu_object *device,
                           pl_stream **out);

/* Memory of torch's allocator on the device, which it borrows: the owner is a tensor.
 */
pli_device_allocator pli_gpu_allocator(gpu_object *device);

/* The module's function driver_version(path) -> int. */
PyObject *pli_driver_version(PyObject *module, PyObject *args);

#endif
