/* reducer_object.h - the Reducer object: a step (reducer/step.h) whose tensors are
 * torch's.
 *
 *     reducer_type -> autograd_hooks -> comm_hook
 *           \----------> torch_step, which the step calls
 */
#ifndef PLI_REDUCER_OBJECT_H
#define PLI_REDUCER_OBJECT_H

#include "python/gpu.h"
#include "python/tensor.h"
#include "reducer/step.h"
#include "world.h"

typedef struct reducer_param {
    PyObject *param;
    PyObject *hooks;  /* dict of post-accumulate hooks; NULL: unknown */
    PyObject *hook;   /* the hook object */
    PyObject *handle; /* torch's RemovableHandle of the hook */
    PyObject *view;   /* of its slot, on a GPU; NULL: not made yet */
} reducer_param;

/* A module's buffer: how to find its current tensor. */
typedef struct reducer_buffer {
    PyObject *owner; /* the module's `_buffers` */
    PyObject *name;
} reducer_buffer;

/* Where the gradients are. */
typedef struct reducer_device {
    dl_device place; /* of the parameters */
    gpu_object *gpu; /* the world's; NULL: the CPU */
    void *viewed;    /* its memory that the parameters' views show */
} reducer_device;

/* State of distributed autograd. */
typedef struct reducer_context {
    PyObject *all;   /* autograd_contexts.Contexts, with RPC; or NULL */
    PyObject *homes; /* objects with each `.grad` in the context; NULL: parameters */
} reducer_context;

/* Whether a step failed without an exception that could reach this rank's program. */
typedef enum failure_report { FAILURE_REPORTED, FAILURE_UNREPORTED } failure_report;
/* Whether the model was wrapped again: then another reducer has its parameters. */
typedef enum attachment { ATTACHED, DETACHED } attachment;

typedef struct reducer_object {
    PyObject_HEAD
    struct reducer_object *next; /* in the module's list */
    unsigned long thread;        /* in which the current step began */
    long task;                   /* the backward whose end is awaited, or -1 */
    PyObject *weak_references;
    PyObject *weak_self; /* a weak reference to itself; NULL with a GIL */
    PyObject *world;
    pl_comm *comm; /* the world's */
    pl_backend *backend;
    reducer_device device;
    pl_step *step; /* NULL while the object is made */
    pl_step_settings settings;
    reducer_param *params;
    size_t n_params;
    reducer_buffer *buffers;
    size_t n_buffers;
    failure_report report;
    attachment attachment;
    PyObject *on_finish; /* called after each step, in the backward; or NULL */
    PyObject *comm_hook; /* serves a communication hook: comm_hook.c; or NULL */
    reducer_context context;
} reducer_object;

static inline const module_state *state_of_reducer(const reducer_object *self)
{
    return state_of((PyObject *)self);
}

static inline int pli_is_on_device(const reducer_object *self)
{
    return self->device.gpu != NULL;
}

/* Whether the user has hooks on parameter i, beside ours. */
static inline int pli_has_user_hooks(const reducer_param *param)
{
    return param->hooks != NULL && PyDict_Size(param->hooks) > 1;
}

/* What a step calls (torch_step.c): its context is the reducer_object, and a pl_grad is
 * a PyObject. */
extern const pl_grad_ops pli_torch_grads;
extern const pl_step_host pli_torch_host;

/* measure(params, buffers, bucket_bytes, last_bytes, sparse, device, world_size)
 * -> (arena_bytes, n_ops, header_bytes), of the module */
PyObject *pli_measure(PyObject *module, PyObject *args);

#endif
