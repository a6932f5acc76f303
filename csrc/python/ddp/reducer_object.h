/* reducer_object.h - the Reducer object: state and helpers that the files of a step
 * share.
 *
 * One of three policies handles a gradient.  Its size and declaration choose the
 * policy, so all ranks choose the same:
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
 * Calls go in this direction:
 *
 *     reducer_type -> hook_type -> backward_end_type -> step
 *       -> forwards, module_buffers
 *       -> grads -> sparse_grads -> comm_hook -> gpu_step -> here
 */
#ifndef PLI_REDUCER_OBJECT_H
#define PLI_REDUCER_OBJECT_H

#include "python/gpu.h"
#include "python/tensor.h"
#include "reducer/reducer.h"
#include "world.h"

/* How a slot is filled in this step.  A large gradient is copied back for one step if
 * its view would be visible: its graph is recorded (create_graph), another hook reads
 * it, or its strides differ from the slot's. */
typedef enum grad_mode { GRAD_UNTOUCHED, GRAD_COPY, GRAD_VIEW } grad_mode;
typedef enum grad_policy { POLICY_COPY, POLICY_VIEW, POLICY_SPARSE } grad_policy;

/* Fields that every gradient touches come first, in one cache line. */
typedef struct grad_slot {
    PyObject *param;
    PyObject *hooks;    /* dict of post-accumulate hooks; NULL: unknown */
    pli_layout *layout; /* of the slot */
    grad_policy policy;
    char is_unseen;         /* the gradient holds values that the peers lack */
    unsigned n_sparse_dims; /* of the last gradient read; 0: dense */
    uint64_t answered;      /* forwards.n when a step last took its gradient */
    char is_unused;         /* the last outputs do not depend on it; for is_strict */
    int64_t arrived_ns;     /* its last gradient in a step; with notes_arrivals */
    /* of the step under way */
    grad_mode mode;
    char is_deferred;   /* taken at the end: a user's hook ran after ours */
    char had_grad;      /* `.grad` existed before; set for views, with keeps_grads */
    PyObject *target;   /* copy: tensor to write to; view: tensor that `.grad` stays */
    char is_lazy;       /* copy: the target was, when it was read */
    PyObject *late;     /* view: the gradient that came after the bucket was posted */
    PyObject *retained; /* view: the copied gradient, until the end of the step; on a
                           GPU: gradients yet to be copied, one or a tuple of two */
    PyObject *saved;    /* values of a view that perhaps no rank has used */
    /* of the whole life */
    PyObject *hook;   /* the hook object */
    PyObject *handle; /* torch's RemovableHandle of the hook */
} grad_slot;

/* A module's buffer: how to find its current tensor. */
typedef struct grad_buffer {
    PyObject *owner; /* the module's `_buffers` */
    PyObject *name;
    size_t offset; /* in the reducer's extra memory */
    size_t n_bytes;
    PyObject *seen; /* the tensor, and its version, when its take-over was deferred */
    long version;
} grad_buffer;

typedef enum grad_recording { RECORDING_OFF, RECORDING_ON } grad_recording;
typedef enum grad_engine { ENGINE_CALLS_BACK, ENGINE_COMPILED } grad_engine;
typedef enum buffers_state { BUFFERS_CURRENT, BUFFERS_RECEIVED } buffers_state;
/* Whether the buffers sent last are the same on all ranks; how they were sent. */
typedef enum buffers_sent {
    BUFFERS_UNSENT,
    BUFFERS_SENT, /* with the gradients of the last step */
    BUFFERS_SENT_IN_FORWARD
} buffers_sent;
/* Whether a step failed without an exception that could reach this rank's program. */
typedef enum unseen_failure { NO_FAILURE_UNSEEN, FAILURE_UNSEEN } unseen_failure;
/* Whether the model was wrapped again: then another reducer has its parameters. */
typedef enum attachment { ATTACHED, DETACHED } attachment;
typedef enum sync_mode { SYNC_OFF, SYNC_ON } sync_mode;

enum { NO_CONTEXT = -1 }; /* gradients are the parameters' `.grad` */

/* The divisor of a join context's sums, and its action when the first rank runs out of
 * batches. */
typedef enum join_divisor { DIVIDE_BY_WORLD_SIZE, DIVIDE_BY_N_ACTIVE } join_divisor;
typedef enum join_end { JOIN_GOES_ON, JOIN_RAISES } join_end;
/* What a shadow step does to `.grad`. */
typedef enum join_grads { JOIN_LEAVES_GRADS, JOIN_BINDS_RESULTS } join_grads;

/* Whether a forward ran with the wrapper in training mode. */
typedef enum forward_mode { MODE_EVALUATION, MODE_TRAINING, N_MODES } forward_mode;

/* Counts of synchronised forwards through the wrapper: forwards.c. */
typedef struct forward_counts {
    uint64_t n;                   /* ended, in total */
    uint64_t n_before;            /* ... when the last step ended */
    uint64_t n_over;              /* no longer await a backward: the first n_over */
    unsigned n_training;          /* since the last step, in training mode */
    unsigned n_answered[N_MODES]; /* their backward began since the last step */
    unsigned
        n_unanswered[N_MODES];  /* watched since the last step, and no backward yet */
    unsigned n_raised[N_MODES]; /* raised, since the last step */
    /* In training mode: of the last step whose results were taken, without those left
     * out; and, of steps that failed since then, all, and those left out. */
    unsigned n_in_step;
    unsigned n_failed, n_failed_unanswered;
} forward_counts;

/* Where the gradients are, and copies to them in flight. */
typedef struct reducer_device {
    dl_device place;   /* of the parameters */
    gpu_object *gpu;   /* the world's; NULL: the CPU */
    pl_stream *stream; /* of the GPU, current in the hook that runs */
    pl_move *copies;   /* for one launch; room for all */
    size_t n_copies;
    size_t n_released;        /* buckets, in order, whose gradients were dropped */
    pli_memory_ref *captured; /* memory that a captured step uses, or NULL */
} reducer_device;

typedef struct reducer_buffers {
    grad_buffer *all;
    size_t n;
    buffers_state state;
    buffers_sent sent;
    unsigned n_notices; /* since the last step or the last sending */
} reducer_buffers;

/* Options that the wrapper sets. */
typedef struct reducer_options {
    char retains_grads;    /* frees copied gradients at the end of the step */
    char keeps_grads;      /* a `.grad` that a step finds stays the same tensor */
    char binds_new;        /* `.grad` is a derived tensor: results are set anew */
    char is_strict;        /* as torch, raises at a second gradient in one backward */
    char follows_forwards; /* a backward without a forward of the wrapper is local */
    char ends_with_step;   /* after a step no parameter awaits a gradient */
    char notes_arrivals;   /* for the log of steps */
} reducer_options;

typedef struct reducer_sync {
    char is_on;         /* forwards are synchronised */
    char is_in_no_sync; /* all backwards are local, whatever their forward was */
    sync_mode backward; /* as chosen at the forward whose backward runs */
} reducer_sync;

typedef struct reducer_join {
    join_divisor divisor;
    join_end end;
    join_grads grads;
} reducer_join;

/* State of distributed autograd. */
typedef struct reducer_context {
    PyObject *all;   /* autograd_contexts.Contexts, with RPC; or NULL */
    PyObject *homes; /* objects with each `.grad` in the context; NULL: parameters */
    long task;       /* the backward with gradients in a context, or NO_CONTEXT */
} reducer_context;

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
    pl_role role; /* of this rank in the current step */
    reducer_join join;
    PyObject *on_finish; /* called after each step, in the backward; or NULL */
    char has_user_hooks; /* in this step a parameter has hooks of the user */
    PyObject *comm_hook; /* serves a communication hook: comm_hook.c; or NULL */
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

/* Calls without the GIL, since the call may take long or wait for the device. */
static inline int pli_call_reducer(const reducer_object *self,
                                   pl_status (*call)(pl_reducer *))
{
    PyThreadState *thread = PyEval_SaveThread();
    const pl_status st = call(self->reducer);
    PyEval_RestoreThread(thread);
    return pli_check(state_of_reducer(self), st);
}

/* The object whose `.grad` is the gradient of parameter i; borrowed. */
static inline PyObject *pli_grad_home(const reducer_object *self, size_t i)
{
    return self->context.homes != NULL
               ? PyTuple_GET_ITEM(self->context.homes, (Py_ssize_t)i)
               : self->slots[i].param;
}

static inline int pli_set_grad(reducer_object *self, size_t i, PyObject *grad)
{
    return PyObject_SetAttr(pli_grad_home(self, i), state_of_reducer(self)->name_grad,
                            grad);
}

/* Whether other hooks than ours see the parameter's `.grad` before the step ends. */
static inline int pli_has_user_hooks(const grad_slot *slot)
{
    return slot->hooks != NULL && PyDict_Size(slot->hooks) > 1;
}

/* The beginning of parameter i's slot, in host or device memory. */
static inline void *pli_slot_memory(const reducer_object *self, size_t i)
{
    return pli_comm_memory(self->comm, pl_reducer_slot_offset(self->reducer, i));
}

/* The slot's offset in the window. */
static inline size_t pli_slot_in_window(const reducer_object *self, size_t i)
{
    size_t buckets_at, n_bytes;
    pl_reducer_buckets(self->reducer, &buckets_at, &n_bytes);
    return pl_reducer_slot_offset(self->reducer, i) - buckets_at;
}

/* Number of live views of the slot, including the parameter's gradient. */
static inline unsigned pli_slot_n_views(const reducer_object *self, size_t i)
{
    return self->window != NULL ? atomic_load(&self->window->n_views[i]) : 0;
}

/* Whether a gradient is a view of the slot. */
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

/* Whether means are over the active ranks only.  The result of a communication hook is
 * not scaled. */
static inline int pli_is_to_rescale(const reducer_object *self)
{
    return self->comm_hook == NULL && self->join.divisor == DIVIDE_BY_N_ACTIVE &&
           pli_is_anyone_missing(self);
}

/* Whether this rank takes the reduced gradients; in a shadow step it may not. */
static inline int pli_binds_results(const reducer_object *self)
{
    return self->role == PL_ACTIVE ||
           (self->join.grads == JOIN_BINDS_RESULTS &&
            pl_reducer_participation(self->reducer).n_active > 0);
}

/* A new reference to a reducer found by a borrowed pointer; NULL if another thread
 * dropped its last reference and now waits for the lock to leave. */
reducer_object *pli_reducer_ref(reducer_object *self);

/* A new reference to the first reducer of a list that still lives, or NULL. */
reducer_object *pli_reducers_first(reducer_object *list);

/* Reads and checks the caps of buckets, a tuple or NULL; out->each is for pli_free().
 * Returns -1 with ValueError if a size is out of range. */
int pli_read_caps(const module_state *state, Py_ssize_t bucket_bytes,
                  Py_ssize_t last_bytes, PyObject *caps, pl_plan_caps *out);

/* measure(params, buffers, bucket_bytes, last_bytes, sparse, device, world_size)
 * -> (arena_bytes, n_ops, header_bytes), of the module */
PyObject *pli_measure(PyObject *module, PyObject *args);

#endif
