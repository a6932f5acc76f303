/* world.h - a rank's end of a world, as Python holds it. */
#ifndef PLI_WORLD_H
#define PLI_WORLD_H

#include "comm/group_comm.h"
#include "comm/shm_init.h"
#include "nccl/gpu_comm.h"
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

/* Has a device's world take the place of *comm, its base.  Of `options` all is given
 * but what follows from the rest: `accumulate` is how averages are added up, `nccl` the
 * library's path, or NULL where none was found. */
int pli_gpu_world_create(module_state *state, pli_gpu_comm_options *options,
                         const char *accumulate, const char *nccl, pl_comm **comm);

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

/* The reductions by name. */
extern const char *const pli_reduction_texts[PL_N_REDUCTIONS];

/* World.broadcast(tensors, root=0): every rank gives dense tensors of the same sizes;
 * the root's values end up in all.  It goes through the whole arena: no gradient may be
 * in it. */
PyObject *pli_world_broadcast(PyObject *object, PyObject *args);

/* nccl_version(path) -> int, of the module */
PyObject *pli_nccl_version(PyObject *module, PyObject *args);

/* -1 with TypeError unless `device` is a Device, or None. */
int pli_check_device(const module_state *state, PyObject *device);

/* The text of an argument, borrowed; NULL with TypeError. */
const char *pli_text_of(PyObject *argument);

#endif
