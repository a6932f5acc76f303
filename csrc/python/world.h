/* world.h - a rank's end of a world, as Python holds it. */
#ifndef PLI_WORLD_H
#define PLI_WORLD_H

#include "../comm/relay.h"
#include "../comm/shm.h"
#include "gpu.h"

typedef struct listener_object {
    PyObject_HEAD
    pli_listener *listener;
    char address[PLI_ADDRESS_BYTES];
} listener_object;

typedef struct world_object {
    PyObject_HEAD
    pl_comm *comm;
    PyObject *relay; /* who carries a relay's operations; NULL: shared memory does */
    gpu_object *gpu; /* in whose memory the gradients are; NULL: the CPU's */
    int owner_pid;   /* a forked child leaves what is the GPU's alone */
    PyObject *weak_references;
} world_object;

/* What waits in slices, so that signals are seen: any pl_*_wait or _recover. */
typedef pl_status (*pli_slice_fn)(void *self, int64_t slice_ns);

/* Calls `slice` with the GIL released until it is done, looking at signals between;
 * -1 with an exception set. */
int pli_wait_in_slices(const module_state *state, pli_slice_fn slice, void *self);

/* For a call that has raised inside the core: a failure with the exception's words; the
 * exception stays set, and is what pli_check() leaves. */
pl_status pli_callback_failed(void);

/* What calls relay.issue() and relay.wait(), taking the GIL; borrowed. */
pli_relay_carrier pli_relay_carrier_of(PyObject *relay);

/* Has a device's world, with memory of `gpu`, take the place of *comm, its base. */
typedef struct pli_device_world {
    gpu_object *gpu;
    Py_ssize_t n_bytes;     /* of its memory */
    const char *nccl;       /* path of the library; NULL: none was found */
    const char *accumulate; /* how averages are added up */
    size_t host_bytes;
    size_t n_ops;
    int64_t deadline_ns;
} pli_device_world;
int pli_device_world_create(module_state *state, const pli_device_world *given,
                            pl_comm **comm);

/* ... whose calls may wait for the device: in the watchdog's name, and others'. */
static inline PyThreadState *pli_world_let_go(const world_object *self)
{
    return self->gpu != NULL ? PyEval_SaveThread() : NULL;
}

static inline void pli_world_take_back(PyThreadState *thread)
{
    if (thread != NULL)
        PyEval_RestoreThread(thread);
}

/* nccl_version(path) -> int, of the module */
PyObject *pli_nccl_version(PyObject *module, PyObject *path);

/* Whether a signal has come for this thread: for who cannot raise; takes the GIL. */
int pli_is_interrupted(void *ignored);

/* The text of an argument `words`, borrowed; NULL with TypeError. */
const char *pli_words(PyObject *words);

#endif
