/* world.h - a rank's end of a world, as a Python object. */
#ifndef PLI_WORLD_H
#define PLI_WORLD_H

#include "comm/group_comm.h"
#include "comm/shm_init.h"
#include "nccl/gpu_comm.h"
#include "python/gpu.h"
#include "python/wait.h"

typedef struct world_object {
    PyObject_HEAD
    pl_comm *comm;
    PyObject *recorder; /* of this rank's steps, or NULL */
    PyObject
        *group_comm; /* carries a group_comm's operations; NULL: shared memory does */
    gpu_object *gpu; /* the device with the gradients; NULL: the CPU */
    int owner_pid;   /* a forked child leaves the GPU's resources alone */
    PyObject *weak_references;
} world_object;

/* Releases the GIL if the world has a device: a call may wait for the device or the
 * watchdog. */
static inline PyThreadState *pli_let_go(const gpu_object *gpu)
{
    return gpu != NULL ? PyEval_SaveThread() : NULL;
}

static inline void pli_take_back(PyThreadState *thread)
{
    if (thread != NULL)
        PyEval_RestoreThread(thread);
}

/* World.broadcast(tensors, root=0): every rank passes dense tensors of the same sizes;
 * all get the root's values.  It uses the whole arena, which must hold no
 * gradient. */
PyObject *pli_world_broadcast(PyObject *object, PyObject *args);

/* nccl_version(path) -> int, of the module */
PyObject *pli_nccl_version(PyObject *module, PyObject *args);

/* Returns -1 with TypeError unless `device` is a Device or None. */
int pli_check_device(const module_state *state, PyObject *device);

/* The text of an argument, borrowed; or NULL with TypeError. */
const char *pli_text_of(PyObject *argument);

#endif
