/* world.h - a rank's end of a world, as Python holds it. */
#ifndef PLI_WORLD_H
#define PLI_WORLD_H

#include "comm/group_comm.h"
#include "comm/shm_init.h"
#include "python/gpu.h"
#include "python/wait.h"

typedef struct listener_object {
    PyObject_HEAD
    pli_listener *listener;
    char address[PLI_ADDRESS_BYTES];
} listener_object;

typedef struct world_object {
    PyObject_HEAD
    pl_comm *comm;
    PyObject *recorder;   /* of this rank's steps; NULL: none */
    PyObject *group_comm; /* who carries a group_comm's operations; NULL: shared memory
                             does */
    gpu_object *gpu;      /* in whose memory the gradients are; NULL: the CPU's */
    int owner_pid;        /* a forked child leaves what is the GPU's alone */
    PyObject *weak_references;
} world_object;

/* What calls group_comm.issue() and group_comm.wait(), taking the GIL; borrowed. */
pli_group_callbacks pli_group_callbacks_of(PyObject *group_comm);

/* Has a device's world, with memory of `gpu`, take the place of *comm, its base. */
typedef struct pli_gpu_world {
    gpu_object *gpu;
    Py_ssize_t n_bytes;     /* of its memory */
    const char *nccl;       /* path of the library; NULL: none was found */
    const char *accumulate; /* how averages are added up */
    size_t host_bytes;
    size_t n_ops;
    int64_t deadline_ns;
} pli_gpu_world;
int pli_gpu_world_create(module_state *state, const pli_gpu_world *world,
                         pl_comm **comm);

/* Releases the GIL if there is a device: a call may wait for the device, or for the
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

/* World.issue(kind, dtype, reduction, offset_bytes, n_elems, root) -> ticket */
PyObject *pli_world_issue(PyObject *object, PyObject *args);

/* nccl_version(path) -> int, of the module */
PyObject *pli_nccl_version(PyObject *module, PyObject *path);

/* The text of an argument, borrowed; NULL with TypeError. */
const char *pli_text_of(PyObject *argument);

#endif
