/* reducer_object.h - the Reducer object: what the files of a step share, and what may
 * be asked of it.
 *
 * A gradient is handled by one of three policies, chosen by size and by what is
 * declared, so equal on every rank:
 *
 *   copy  (small) the gradient stays the user's tensor; its values are copied to the
 *         slot as it comes and the reduced ones are copied back at the end.  Cheapest:
 *         no tensor is made, no attribute set.
 *   view  (large) the gradient is copied to the slot and dropped; `.grad` is None until
 *         the end of the step, then a view of the slot.  A gradient that is such a view
 *         already (accumulation) needs no copy.
 *   sparse (declared) the gradient stays where it is, and its rows are averaged at the
 *         end: sparse_grads.h.
 *
 * Who calls whom:
 *
 *     reducer_type -> reducer_build, uneven_inputs, hook_type
 *       -> backward_end_type -> dropped_backward
 *       -> step -> forwards, grad_results, module_buffers
 *       -> grads -> sparse_grads -> comm_hook -> gpu_step, grad_window -> here
 */
#ifndef PLI_REDUCER_OBJECT_H
#define PLI_REDUCER_OBJECT_H

#include "python/gpu.h"
#include "python/tensor.h"
#include "reducer/reducer.h"
#include "world.h"

/* How a slot is filled in this step.  A large gradient is copied back for one step
 * where a view would be seen: its own graph is recorded (create_graph), another hook
 * looks at it, or its strides are not the slot's. */
typedef enum grad_mode { GRAD_UNTOUCHED, GRAD_COPY, GRAD_VIEW } grad_mode;
typedef enum grad_policy { POLICY_COPY, POLICY_VIEW, POLICY_SPARSE } grad_policy;

/* What every gradient touches comes first, in one line of the cache. */
typedef struct grad_slot {
    PyObject *param;
    PyObject *hooks;    /* the parameter's dict of hooks like ours; NULL: not known */
    pli_layout *layout; /* of the slot */
    grad_policy policy;
    char is_unseen;         /* the gradient holds something that the peers lack */
    unsigned n_sparse_dims; /* of the gradient read last; 0: dense */
    uint64_t answered;      /* forwards.n when a step last took a gradient of it */
    char is_unused;         /* no output of the last forward shows it; for is_strict */
    /* of the step under way */
    grad_mode mode;
    char is_deferred; /* taken at the end: a hook of the user's ran after ours */
    char had_grad;    /* `.grad` was there before; noted for views, with keeps_grads */
    PyObject *target; /* copy: what is written to; view: what `.grad` stays */
    PyObject *late;   /* view: what came after the bucket was posted */
    PyObject *retained; /* view: what was copied, until the end of the step; on a GPU:
                           what is yet to be copied, one or a tuple of two */
    PyObject *saved;    /* the values of a view that perhaps no rank has used */
    /* of the whole life */
    PyObject *hook;   /* the hook object */
    PyObject *handle; /* torch's RemovableHandle of it */
} grad_slot;

/* A module's buffer: where to find the tensor that is it now. */
typedef struct grad_buffer {
    PyObject *owner; /* the module's `_buffers` */
    PyObject *name;
    size_t offset; /* in the reducer's extra memory */
    size_t n_bytes;
    PyObject *seen; /* the tensor, and its version, when taking over was deferred */
    long version;
} grad_buffer;

typedef enum grad_recording { RECORDING_OFF, RECORDING_ON } grad_recording;
typedef enum grad_engine { ENGINE_CALLS_BACK, ENGINE_COMPILED } grad_engine;
typedef enum buffers_state { BUFFERS_CURRENT, BUFFERS_RECEIVED } buffers_state;
/* Whether what was sent of the buffers last is the same on all ranks. */
typedef enum buffers_sent { BUFFERS_UNSENT, BUFFERS_SENT } buffers_sent;
/* Whether a step failed where no exception could reach this rank's program. */
typedef enum unseen_failure { NO_FAILURE_UNSEEN, FAILURE_UNSEEN } unseen_failure;
/* Whether the model was wrapped anew, so that another reducer has its parameters. */
typedef enum attachment { ATTACHED, DETACHED } attachment;
typedef enum sync_mode { SYNC_OFF, SYNC_ON } sync_mode;

enum { NO_CONTEXT = -1 }; /* gradients are the parameters' `.grad` */

/* By how many ranks the sums of a join context are divided, and what happens there when
 * the first rank has no batches left. */
typedef enum join_divisor { DIVIDE_BY_WORLD_SIZE, DIVIDE_BY_N_ACTIVE } join_divisor;
typedef enum join_end { JOIN_GOES_ON, JOIN_RAISES } join_end;
/* What becomes of `.grad` on a rank that takes a shadow step. */
typedef enum join_grads { JOIN_LEAVES_GRADS, JOIN_BINDS_RESULTS } join_grads;

/* Of a forward: whether the wrapper was in training mode. */
typedef enum forward_mode { MODE_EVALUATION, MODE_TRAINING, N_MODES } forward_mode;

/* Forwards through the wrapper whose backward is to be synchronised: forwards.c. */
typedef struct forward_counts {
    uint64_t n;          /* that have ended, in all */
    uint64_t n_before;   /* ... when the last step ended */
    uint64_t n_over;     /* the backward of the first n_over is awaited no longer */
    unsigned n_training; /* since the last step, in training mode */
    unsigned n_answered[N_MODES];   /* whose backward has begun since the last step */
    unsigned n_unanswered[N_MODES]; /* after the last step, watched, has not begun */
} forward_counts;

/* Where the gradients are, and what is on its way there. */
typedef struct reducer_device {
    dl_device place;   /* of the parameters */
    gpu_object *gpu;   /* the world's; NULL: the CPU */
    pl_stream *stream; /* of the GPU, current in the hook that runs */
    pl_move *copies;   /* to be made in one launch; room for all */
    size_t n_copies;
    size_t n_released;        /* buckets, in order, whose gradients were dropped */
    pli_memory_ref *captured; /* memory that a captured step uses; NULL: none was */
} reducer_device;

typedef struct reducer_buffers {
    grad_buffer *all;
    size_t n;
    buffers_state state;
    buffers_sent sent;
    unsigned n_notices; /* since the last step or sending */
} reducer_buffers;

/* What the wrapper chooses. */
typedef struct reducer_options {
    char retains_grads;    /* what was copied is freed at the end of the step */
    char keeps_grads;      /* a `.grad` that a step finds stays the same tensor */
    char binds_new;        /* `.grad` is made of what is read: results are set anew */
    char is_strict;        /* a second gradient in one backward is an error: torch's */
    char follows_forwards; /* a backward of no forward of the wrapper is local */
    char ends_with_step; /* what a step leaves without gradient is awaited no longer */
} reducer_options;

typedef struct reducer_sync {
    char is_on;         /* forwards are to be synchronised */
    char is_in_no_sync; /* ... and backwards are not, whatever their forward was */
    sync_mode backward; /* ... asked for at the forward whose backward runs */
} reducer_sync;

typedef struct reducer_join {
    join_divisor divisor;
    join_end end;
    join_grads grads;
} reducer_join;

/* Of distributed autograd. */
typedef struct reducer_context {
    PyObject *all;   /* autograd_contexts.Contexts, with RPC; or NULL */
    PyObject *homes; /* what has each `.grad` in the context; NULL: parameters */
    long task;       /* whose gradients are in a context; or NO_CONTEXT */
} reducer_context;

typedef struct reducer_object {
    PyObject_HEAD
    struct reducer_object *next; /* in the module's list */
    unsigned long thread;        /* in which the step under way began */
    long task;                   /* the backward whose end is waited for, or -1 */
    PyObject *weak_references;
    PyObject *weak_self; /* a weak reference to itself; NULL where there is a GIL */
    PyObject *world;
    pl_comm *comm; /* the world's */
    pl_backend *backend;
    reducer_device device;
    pl_reducer *reducer;
    pli_window *window;
    unsigned generation; /* of the plan that the window shows */
    grad_slot *slots;
    size_t n_slots;
    reducer_buffers buffers;
    reducer_options options;
    reducer_sync sync;
    forward_counts forwards;
    unseen_failure unseen;
    attachment attachment;
    grad_recording recording;
    grad_engine engine;
    pl_role role; /* of this rank in the step under way */
    reducer_join join;
    PyObject *on_finish; /* called after each step, in the backward; NULL: nothing */
    char has_user_hooks; /* in this step: a parameter has hooks of the user's */
    PyObject *comm_hook; /* a communication hook's: comm_hook.c; NULL: none */
    reducer_context context;
    int n_backward_ends; /* queued in the engine, not yet called */
    int owner_pid;       /* a forked child has no part in the world */
} reducer_object;

static inline const module_state *state_of_reducer(const reducer_object *self)
{
    return state_of((PyObject *)self);
}

/* Tells autograd that a tensor was overwritten. */
static inline int pli_increment_version(const module_state *state, PyObject *tensor)
{
    PyObject *alone = PyTuple_Pack(1, tensor);
    const int status = alone != NULL ? pli_increment_versions(state, alone) : -1;
    Py_XDECREF(alone);
    return status;
}

static inline int pli_is_on_device(const reducer_object *self)
{
    return self->device.gpu != NULL;
}

/* Calls without the GIL: the call may take long, or wait for the device. */
static inline int pli_call_reducer(const reducer_object *self,
                                   pl_status (*call)(pl_reducer *))
{
    PyThreadState *thread = PyEval_SaveThread();
    const pl_status st = call(self->reducer);
    PyEval_RestoreThread(thread);
    return pli_check(state_of_reducer(self), st);
}

/* What has the gradient of parameter i as its `.grad`; borrowed. */
static inline PyObject *pli_grad_home(const reducer_object *self, size_t i)
{
    return self->context.homes != NULL
               ? PyTuple_GET_ITEM(self->context.homes, (Py_ssize_t)i)
               : self->slots[i].param;
}

static inline int pli_set_grad(reducer_object *self, size_t i, PyObject *grad)
{
    return PyObject_SetAttr(pli_grad_home(self, i), state_of_reducer(self)->str_grad,
                            grad);
}

/* The parameter has other hooks than ours, which see `.grad` before the step ends. */
static inline int pli_has_user_hooks(const grad_slot *slot)
{
    return slot->hooks != NULL && PyDict_Size(slot->hooks) > 1;
}

/* Where the slot of parameter i begins: host or device memory. */
static inline void *pli_slot_memory(const reducer_object *self, size_t i)
{
    return pli_comm_memory(self->comm, pl_reducer_slot_offset(self->reducer, i));
}

/* Where it begins in the window. */
static inline size_t pli_slot_in_window(const reducer_object *self, size_t i)
{
    size_t buckets_at, n_bytes;
    pl_reducer_buckets(self->reducer, &buckets_at, &n_bytes);
    return pl_reducer_slot_offset(self->reducer, i) - buckets_at;
}

/* Views of it that live, be one the parameter's gradient or not. */
static inline unsigned pli_slot_n_views(const reducer_object *self, size_t i)
{
    return self->window != NULL ? atomic_load(&self->window->n_views[i]) : 0;
}

/* Whether a gradient is such a view. */
static inline int pli_slot_is_seen_by(const reducer_object *self, size_t i,
                                      const pli_tensor *grad)
{
    return pli_slot_n_views(self, i) > 0 &&
           grad->data == self->window->base + pli_slot_in_window(self, i) &&
           pli_layout_equal(&grad->layout, self->slots[i].layout);
}

/* Whether slot i is declared sparse, and some rank used it in this step. */
static inline int pli_sparse_is_used(const reducer_object *self, size_t i)
{
    return self->slots[i].policy == POLICY_SPARSE &&
           pl_reducer_is_used(self->reducer, i);
}

static inline int pli_is_anyone_missing(const reducer_object *self)
{
    return pl_reducer_participation(self->reducer).n_active <
           pl_comm_world_size(self->comm);
}

/* Whether means are to be over the active ranks alone.  What a communication hook makes
 * of the gradients is nobody else's to scale. */
static inline int pli_is_to_rescale(const reducer_object *self)
{
    return self->comm_hook == NULL && self->join.divisor == DIVIDE_BY_N_ACTIVE &&
           pli_is_anyone_missing(self);
}

/* Whether this rank takes the reduced gradients: in a shadow step it may not. */
static inline int pli_binds_results(const reducer_object *self)
{
    return self->role == PL_ACTIVE ||
           (self->join.grads == JOIN_BINDS_RESULTS &&
            pl_reducer_participation(self->reducer).n_active > 0);
}

#endif
