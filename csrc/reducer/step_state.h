/* step_state.h - the state of a step; for step*.c only. */
#ifndef PLI_STEP_STATE_H
#define PLI_STEP_STATE_H

#include <unistd.h>

#include "reducer_state.h"
#include "step.h"

/* How a slot is filled in this step.  A large gradient is copied back for one step if
 * its view would be visible: its graph is recorded (create_graph), another hook reads
 * it, or its strides differ from the slot's. */
typedef enum slot_mode { SLOT_UNTOUCHED, SLOT_COPY, SLOT_VIEW } slot_mode;

typedef enum grad_policy { POLICY_COPY, POLICY_VIEW, POLICY_SPARSE } grad_policy;

/* A parameter's place.  Fields that every gradient touches come first, in one cache
 * line. */
typedef struct step_slot {
    pli_layout *layout; /* of the slot */
    uint64_t answered;  /* forwards.n when a step last took its gradient */
    grad_policy policy;
    unsigned n_sparse_dims; /* of the last gradient read; 0: dense */
    /* of the step under way */
    slot_mode mode;
    char takes_at_end; /* a user's hook has yet to run, or it is in a context */
    char had_grad;     /* `.grad` existed before; set for views, with keeps_grads */
    char is_lazy;      /* copy: the target was, when it was read */
    pl_grad *target;   /* copy: tensor to write to; view: tensor that `.grad` stays;
                          sparse: the mean */
    pl_grad *late;     /* view: the gradient that came after the bucket was posted */
    pl_grad *retained; /* view: the copied gradient, until the end of the step; on a
                          GPU: the gradient that is yet to be copied */
    pl_grad *saved;    /* values of a view that perhaps no rank has used */
} step_slot;

/* A module's buffer. */
typedef struct step_buffer {
    pl_buffer_spec spec;
    size_t offset; /* in the reducer's extra memory */
    /* When its take-over was deferred: the tensor, its version, its memory, and on the
     * host a checksum of its values: a write through `.data` changes no version. */
    pl_grad *seen;
    long version;
    const void *data;
    uint32_t crc;
} step_buffer;

typedef enum buffers_state { BUFFERS_CURRENT, BUFFERS_RECEIVED } buffers_state;
/* Whether the buffers sent last are the same on all ranks; how they were sent. */
typedef enum buffers_sent {
    BUFFERS_UNSENT,
    BUFFERS_SENT, /* with the gradients of the last step */
    BUFFERS_SENT_IN_FORWARD
} buffers_sent;

typedef struct step_buffers {
    step_buffer *all;
    size_t n;
    buffers_state state;
    buffers_sent sent;
    unsigned n_notices; /* since the last step or the last sending */
} step_buffers;

/* Counts of synchronised forwards through the wrapper: step_forwards.c. */
typedef struct forward_counts {
    uint64_t n;                      /* ended, in total */
    uint64_t n_before;               /* ... when the last step ended */
    uint64_t n_over;                 /* no longer await a backward: the first n_over */
    unsigned n_training;             /* since the last step, in training mode */
    unsigned n_answered[PL_N_MODES]; /* their backward began since the last step */
    unsigned n_unanswered[PL_N_MODES]; /* watched since the last step, and no backward
                                          yet */
    unsigned n_raised[PL_N_MODES];     /* raised, since the last step */
    /* In training mode: of the last step whose results were taken, without those left
     * out; and, of steps that failed since then, all, and those left out. */
    unsigned n_in_step;
    unsigned n_failed, n_failed_unanswered;
} forward_counts;

typedef enum sync_mode { SYNC_OFF, SYNC_ON } sync_mode;
typedef enum recording { RECORDING_OFF, RECORDING_ON } recording;
typedef enum user_hooks { HOOKS_NONE, HOOKS_SEEN } user_hooks;

struct pl_step {
    const pl_grad_ops *grads;
    const pl_step_host *host;
    const pl_step_settings *settings;
    void *context;
    pl_comm *comm;
    pl_backend *backend;
    pl_reducer *reducer;
    int owner_pid; /* a forked child has no part in the world */
    step_slot *slots;
    size_t n_slots;
    unsigned char *unseen, *unused; /* by parameter: step.h */
    step_buffers buffers;
    forward_counts forwards;
    int retains_grads; /* frees copied gradients at the end of the step */
    /* Gradients that are views: on the CPU through a window (comm/window.h), on a GPU
     * of the world's memory itself. */
    pli_window *window;
    int has_views;       /* on a GPU: such gradients were made since it was new */
    unsigned generation; /* of the plan that they show */
    /* Copies for one launch: room for all. */
    pl_move *moves;
    size_t n_moves;
    pl_stream *stream; /* of the GPU, current in the hook that runs */
    size_t n_released; /* buckets, in order, whose gradients were dropped */
    int is_captured;   /* a graph may replay a step */
    /* The step under way. */
    sync_mode backward; /* as chosen at the forward whose backward runs */
    recording recording;
    user_hooks user_hooks; /* a parameter has hooks of the user */
    long autograd_context; /* the backward with gradients in a context */
    pl_role role;          /* of this rank */
    /* The join context. */
    pl_join_divisor divisor;
    pl_join_end join_end;
    pl_join_grads join_grads;
    const pl_step_hook *hook; /* NULL: none */
};

/* ---- state ---------------------------------------------------------------------- */

static inline int is_on_device(const pl_step *self)
{
    return self->comm->device != NULL;
}

static inline int is_forked(const pl_step *self)
{
    return getpid() != self->owner_pid;
}

/* The slot's offset in the window. */
static inline size_t slot_in_window(const pl_step *self, size_t i)
{
    return self->reducer->plan->slots[i].offset_bytes;
}

/* Number of live views of the slot, including the parameter's gradient; on a GPU not
 * known. */
static inline unsigned slot_n_views(const pl_step *self, size_t i)
{
    return self->window != NULL ? atomic_load(&self->window->n_views[i]) : 0;
}

/* Whether a gradient is a view of the slot. */
static inline int slot_is_seen_by(const pl_step *self, size_t i, const pli_tensor *grad)
{
    const void *seen = NULL;
    if (is_on_device(self))
        seen = slot_memory(self->reducer, i);
    else if (slot_n_views(self, i) > 0)
        seen = self->window->base + slot_in_window(self, i);
    return grad->data == seen && grad->layout.n_elems > 0 &&
           pli_layout_equal(&grad->layout, self->slots[i].layout);
}

static inline int is_anyone_missing(const pl_step *self)
{
    return self->reducer->participation.n_active < pl_comm_world_size(self->comm);
}

/* Whether means are over the active ranks only.  The result of a communication hook is
 * not scaled. */
static inline int is_to_rescale(const pl_step *self)
{
    return self->hook == NULL && self->divisor == PL_BY_N_ACTIVE &&
           is_anyone_missing(self);
}

/* Whether this rank takes the reduced gradients; in a shadow step it may not. */
static inline int binds_results(const pl_step *self)
{
    return self->role == PL_ACTIVE || (self->join_grads == PL_BINDS_RESULTS &&
                                       self->reducer->participation.n_active > 0);
}

/* ---- the caller's tensors ------------------------------------------------------- */

/* Drops a tensor that may be NULL. */
static inline void drop_grad(const pl_step *self, pl_grad *grad)
{
    if (grad != NULL)
        self->grads->drop(grad);
}

/* Makes *place hold `grad`, a new reference or NULL, in place of what it held. */
static inline void replace_grad(const pl_step *self, pl_grad **place, pl_grad *grad)
{
    pl_grad *before = *place;
    *place = grad; /* first: dropping may run the caller's code */
    drop_grad(self, before);
}

static inline pl_grad *hold_grad(const pl_step *self, pl_grad *grad)
{
    self->grads->hold(grad);
    return grad;
}

/* ---- the caller's threads (step_host.c) ----------------------------------------- */

enum { PLI_SLICE_NS = 50 * PLI_MS }; /* of a wait: signals are handled as often */

/* If `lets`, lets other threads use the caller until take_back(). */
static inline void *let_go_if(const pl_step *self, int lets)
{
    return lets ? self->host->let_go(self->context) : NULL;
}

static inline void take_back(const pl_step *self, void *lock)
{
    if (lock != NULL)
        self->host->take_back(lock);
}

/* Calls `slice` until it is done; other threads may use the caller meanwhile, and
 * signals are handled between two slices. */
typedef pl_status (*slice_fn)(void *argument, int64_t slice_ns);
pl_status pli_step_wait(pl_step *self, slice_fn slice, void *argument) PL_MUST_USE;

/* Waits for the operations up to the ticket. */
pl_status pli_step_wait_for(pl_step *self, pl_ticket ticket) PL_MUST_USE;

/* Calls it while other threads may use the caller. */
pl_status pli_step_let_go(pl_step *self, pl_status (*call)(pl_reducer *)) PL_MUST_USE;

/* On a GPU: *out is this thread's stream, whose work the world's memory outlives. */
pl_status pli_step_current_stream(pl_step *self, pl_stream **out) PL_MUST_USE;

/* The reducer enqueues on `stream` from now on; NULL on the CPU. */
static inline void set_stream(pl_step *self, pl_stream *stream)
{
    self->stream = stream;
    pl_reducer_set_stream(self->reducer, stream);
}

/* On a GPU: reads this thread's stream, and sets it. */
pl_status pli_step_read_stream(pl_step *self) PL_MUST_USE;

PL_MUST_USE static inline pl_status read_stream(pl_step *self)
{
    return is_on_device(self) ? pli_step_read_stream(self) : PL_OK;
}

/* Adds a copy to the next pli_step_copy(), which makes them all: on a GPU in one
 * launch. */
void pli_step_defer_copy(pl_step *self, void *to, const void *from,
                         const pli_layout *layout);
pl_status pli_step_copy(pl_step *self, pl_stream *stream) PL_MUST_USE;

/* ---- gradients (step_grads.c) --------------------------------------------------- */

/* Chooses the slots' policies. */
void pli_grads_init(pl_step *self, const pl_step_spec *spec);

/* A step begins: makes the window show the plan, and leaves it to views that are still
 * in use. */
pl_status pli_grads_begin(pl_step *self) PL_MUST_USE;

/* ... with the gradient of slot `first`: notes which gradients existed before, since
 * the user may keep them. */
pl_status pli_grads_note(pl_step *self, size_t first) PL_MUST_USE;

/* Backward has produced a gradient for slot i. */
pl_status pli_grads_take(pl_step *self, size_t i) PL_MUST_USE;

/* Before the end of the step: takes deferred gradients, and marks slots without one. */
pl_status pli_grads_complete(pl_step *self) PL_MUST_USE;

/* On a GPU: drops gradients that were retained for buckets posted in the meantime. */
void pli_grads_release_posted(pl_step *self);

/* Writes what each late slot adds in the second all-reduce. */
pl_status pli_grads_write_late(pl_step *self) PL_MUST_USE;

/* Makes the reduced gradients `.grad`, and drops what the step refers to. */
pl_status pli_grads_bind(pl_step *self) PL_MUST_USE;

/* Gives up the step's gradients: `.grad` gets back a view that was taken from it. */
void pli_grads_abandon(pl_step *self);

/* Drops what the step refers to. */
void pli_grads_drop(pl_step *self);

/* Makes the window show the current plan; holders of old views keep their values. */
pl_status pli_grads_refresh_window(pl_step *self) PL_MUST_USE;

/* ---- sparse gradients (step_sparse.c) ------------------------------------------- */

/* After the means of the buckets: averages the gradients declared sparse, of all slots.
 * Each slot's target is its mean, unless a communication hook stored that. */
pl_status pli_sparse_finish(pl_step *self) PL_MUST_USE;

/* ---- forwards (step_forwards.c) ------------------------------------------------- */

/* If no step is under way: whether a gradient for slot i begins one. */
int pli_forwards_begin_step(const pl_step *self, size_t i);

/* Before `close`: sends this rank's counts with the step's flags. */
void pli_forwards_send(pl_step *self);

/* After the wait: PL_EMISMATCH, on every rank, if active ranks are not in the same step
 * because a rank has skipped a backward, or run an additional one. */
pl_status pli_forwards_check(const pl_reducer *reducer) PL_MUST_USE;

/* A step is over; its results were taken, or dropped. */
void pli_forwards_end_step(pl_step *self, int is_taken);

/* A step has failed. */
void pli_forwards_fail_step(pl_step *self);

/* Continues the counts of a step that has failed. */
void pli_forwards_follow(pl_step *self, const pl_step *failed);

/* Forgets what steps that failed have counted.  For a join context that begins or ends:
 * ranks that left it by an exception are together. */
void pli_forwards_forget_failed(pl_step *self);

/* ---- buffers (step_buffers.c) --------------------------------------------------- */

/* Writes the root's buffers to the memory that it sends with each step. */
pl_status pli_buffers_pack(pl_step *self) PL_MUST_USE;

/* After the step: notes the root's buffers, to take them over later. */
pl_status pli_buffers_receive(pl_step *self) PL_MUST_USE;

/* A step failed or was dropped: the values sent last may differ between ranks. */
void pli_buffers_forget(pl_step *self);

#endif
