/* grads.h - the Reducer object: what becomes of each parameter's `.grad`.
 *
 * Three policies, chosen by size and by what is declared, so equal on every rank:
 *
 *   copy  (small) the gradient stays the user's tensor; its values are copied to the
 *         slot as it comes and the mean is copied back at the end.  Cheapest: no tensor
 *         is made, no attribute set.
 *   view  (large) the gradient is copied to the slot and dropped, at once or at the end
 *         of the step (retain.c); `.grad` is None until that end, then a view of the
 *         slot.  A gradient that is such a view already (accumulation) needs no copy.
 *   sparse (declared) the gradient stays where it is, and its rows are averaged at the
 *         end: sparse.h.
 *
 * A large gradient is treated as `copy` for one step where a view would be seen: its
 * own graph is recorded (create_graph), somebody else's hook looks at it, or its
 * strides are not the slot's.
 */
#ifndef PLI_GRADS_H
#define PLI_GRADS_H

#include "../core/reducer.h"
#include "gpu.h"
#include "tensor.h"
#include "world.h"

typedef enum grad_mode { GRAD_UNTOUCHED, GRAD_COPY, GRAD_VIEW } grad_mode;
typedef enum grad_policy { POLICY_COPY, POLICY_VIEW, POLICY_SPARSE } grad_policy;

/* Whether this rank's gradient holds something that the peers have not seen. */
typedef enum grad_sync { GRAD_SYNCED, GRAD_UNSYNCED } grad_sync;

/* What every gradient touches comes first, in one line of the cache. */
typedef struct grad_slot {
    PyObject *param;
    PyObject *hooks;    /* the parameter's dict of hooks like ours; NULL: not known */
    pli_layout *layout; /* of the slot */
    grad_policy policy;
    grad_sync sync;
    unsigned n_sparse_dims; /* of the gradient read last; 0: dense; see sparse.h */
    /* of the step under way */
    grad_mode mode;
    PyObject *held;  /* copy: where the mean goes; view: the view found in place */
    PyObject *late;  /* view: what came after the bucket was posted */
    PyObject *kept;  /* view: what was copied, until the end of the step; on a device:
                        what is yet to be copied, one or a tuple of two */
    void *backup;    /* of a view nobody may have used */
    PyObject *saved; /* the same on a device, as a tensor */
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
    PyObject *seen; /* the tensor, and its version, when taking over was put off */
    long version;
} grad_buffer;

/* When a gradient that was copied to its slot is freed: see retain.c. */
typedef enum grad_release {
    RELEASE_AT_ONCE,
    RELEASE_AT_END, /* of the step */
    N_RELEASES
} grad_release;

typedef struct grad_retention {
    grad_release release; /* in the step under way */
    int can_keep;         /* all of it is little enough */
    unsigned n_steps;
    int64_t faults_before; /* page faults of this thread when the last step began */
    int64_t fewest_faults[N_RELEASES]; /* of a step, in the last trial */
} grad_retention;

typedef enum grad_recording { RECORDING_OFF, RECORDING_ON } grad_recording;
typedef enum grad_engine { ENGINE_CALLS_BACK, ENGINE_COMPILED } grad_engine;
typedef enum buffers_state { BUFFERS_CURRENT, BUFFERS_RECEIVED } buffers_state;
/* Whether a step failed where no exception could tell this rank's program. */
typedef enum unseen_failure { NO_FAILURE_UNSEEN, FAILURE_UNSEEN } unseen_failure;
/* Whether the model was wrapped anew, so that another reducer has its parameters. */
typedef enum attachment { ATTACHED, DETACHED } attachment;
/* Who queued a guard.  The backward in which an output's hook runs holds all of that
 * forward's graph; one in which a parameter's hook runs may be inside that. */
typedef enum guard_origin {
    GUARD_OF_OUTPUT,
    GUARD_OF_PARAMETER,
    GUARD_OF_LOCAL, /* of an output whose backward is not synchronised: ends that */
} guard_origin;
typedef enum sync_mode { SYNC_OFF, SYNC_ON } sync_mode;

/* By how many ranks the means of a join context are divided, and what happens there
 * when the first rank has no batches left. */
typedef enum join_divisor { DIVIDE_BY_WORLD_SIZE, DIVIDE_BY_N_ACTIVE } join_divisor;
typedef enum join_end { JOIN_GOES_ON, JOIN_RAISES } join_end;
/* What becomes of `.grad` on a rank that stands in. */
typedef enum join_grads { JOIN_LEAVES_GRADS, JOIN_BINDS_MEANS } join_grads;

typedef struct reducer_object {
    PyObject_HEAD
    struct reducer_object *next; /* in the module's list */
    unsigned long thread;        /* in which the step under way began */
    long task;                   /* the backward whose end is waited for, or -1 */
    PyObject *weak_references;
    PyObject *world;
    pl_comm *comm; /* the world's */
    pl_backend *backend;
    dl_device place;   /* of the parameters */
    gpu_object *gpu;   /* the world's; NULL: the CPU */
    pl_stream *stream; /* of the device, current in the hook that runs */
    pl_move *moves;    /* those to be made in one launch; room for all */
    size_t n_moves;
    size_t n_let_go;    /* buckets, in order, whose gradients are kept no longer */
    pli_hold *captured; /* memory that a captured step uses; NULL: none was */
    pl_reducer *reducer;
    pli_window *window;
    unsigned generation; /* of the plan that the window shows */
    grad_slot *slots;
    size_t n_slots;
    grad_buffer *buffers;
    size_t n_buffers;
    buffers_state buffers_state;
    grad_retention retention;
    sync_mode sync_now;     /* what the user asks for at this moment */
    sync_mode sync_forward; /* ... asked for at the forward whose backward runs, or at
                               the last one, if its outputs cannot tell */
    unseen_failure unseen;
    attachment attachment;
    grad_recording recording;
    grad_engine engine;
    pl_part part; /* of this rank in the step under way */
    join_divisor join_divisor;
    join_end join_end;
    join_grads join_grads;
    PyObject *on_finish;    /* called after each step, in the backward; NULL: nothing */
    char is_strict;         /* a second gradient in one backward is an error: torch's */
    PyObject *carrier;      /* a communication hook's: carrier.c; NULL: none */
    int n_pending_forwards; /* whose backward has not begun, as far as is known */
    int n_guards;           /* queued in the engine, not yet called */
    int owner_pid;          /* a forked child has no part in the world */
} reducer_object;

static inline int pli_is_on_device(const reducer_object *self)
{
    return self->gpu != NULL;
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

/* measure(params, buffers, bucket_bytes, last_bytes, sparse, device)
 * -> (arena_bytes, n_ops, words_bytes) */
PyObject *pli_measure(PyObject *module, PyObject *args);

/* ---- grads.c: one gradient ------------------------------------------------------ */

/* Backward has produced a gradient for slot i. */
int pli_grads_arrive(reducer_object *self, size_t i);

/* Before the end of the step: slot i got none. */
int pli_grads_settle(reducer_object *self, size_t i);

/* What slot i has to add in the round of the late. */
int pli_grads_amend(reducer_object *self, size_t i);

/* Reads the parameter's gradient, a dense copy where it is sparse: 1 and *out (new
 * reference), 0 where it has none, -1. */
int pli_grads_read(reducer_object *self, size_t i, PyObject **out, pli_tensor *tensor);

/* Another hook of the user's would see `.grad` before the step ends. */
int pli_grads_is_watched(const grad_slot *slot);

/* ---- means.c: what becomes of it --------------------------------------------------
 */

/* After the step: the mean is in the slot, or every rank left the parameter unused.  On
 * a device, what is to be copied is noted, and what was held is kept until
 * pli_launch_finish(). */
int pli_means_bind(reducer_object *self, size_t i);

/* Drops what the step held; the gradients are not means. */
void pli_means_drop(reducer_object *self, size_t i);

/* Makes the window show the current plan; whoever sees an old view keeps its values. */
int pli_means_refresh_window(reducer_object *self);

/* ---- launch.c: a step on a device ---------------------------------------------------
 *
 * All of it is without effect on the CPU but what says otherwise.
 */

/* Asks for this thread's current stream: what the reducer enqueues from now on goes
 * there. */
int pli_launch_look(reducer_object *self);

/* Before a step: -1 where a graph is captured, and the reducer has yet to learn. */
int pli_launch_check(reducer_object *self);

/* A step has begun: makes sure that no slot is written anew of which somebody keeps a
 * view. */
int pli_launch_begin(reducer_object *self);

/* On a device: notes a copy. */
void pli_launch_note(reducer_object *self, void *to, const void *from,
                     const pli_layout *layout);

/* On a device: makes all copies that were noted, in one launch, on `stream`. */
int pli_launch_copies(reducer_object *self, pl_stream *stream);

/* Drops the gradients that were kept for buckets that have been posted since. */
void pli_launch_let_go(reducer_object *self);

/* All means are bound: makes the copies, and drops what the step held. */
int pli_launch_finish(reducer_object *self);

/* ---- retain.c: the memory of what was copied --------------------------------------
 */

void pli_retention_init(grad_retention *self, const grad_slot *slots, size_t n_slots);

/* Chooses when this step's gradients are freed. */
void pli_retention_begin_step(grad_retention *self);

/* ---- step.c: one backward ---------------------------------------------------------
 */

/* -1, with an exception, in a process forked from the rank. */
int pli_step_check_process(const reducer_object *self);

/* Leaves a failed step behind, together with every rank; at once where none failed. */
int pli_step_recover(reducer_object *self);

int pli_step_begin(reducer_object *self);

/* Also raises, after a step without fault, where a join context is to end with it. */
int pli_step_finish(reducer_object *self);

/* The outermost backward of this thread is over: posts what is left of every step in
 * it.  Another rank may wait for them in another order than this one will. */
int pli_step_close_all(reducer_object *self);

/* ... and finishes them, in the order in which they were made: the rounds that follow
 * those of the buckets (of the late, of sparse rows) are then in one order on all
 * ranks. */
int pli_step_finish_all(reducer_object *self);

/* The step failed here: tells the peers; an exception that is set stays set. */
void pli_step_fail(reducer_object *self, const char *words);

/* A backward begins whose forward was not to be synchronised: none of it is. */
int pli_step_begin_local(reducer_object *self);

/* On a device: waits, for a while, until no guard is queued.  A backward that failed in
 * the engine's thread raises in the caller's, which may be here before that thread has
 * dropped what it held.  Not for use in a backward. */
int pli_step_await_guards(const reducer_object *self);

/* Asks the engine to call us when this backward ends, unless it will already. */
int pli_step_queue_guard(reducer_object *self, guard_origin origin);

/* After each gradient: ends the step here where the engine will not call back. */
int pli_step_finish_inline(reducer_object *self);

/* ---- buffers.c: what a module keeps beside its parameters ---------------------------
 */

/* Writes the root's buffers to the memory that it sends with each step. */
int pli_buffers_pack(reducer_object *self);

/* After the step: takes over what came from the root, or puts that off. */
int pli_buffers_receive(reducer_object *self);

/* Takes over what was put off. */
int pli_buffers_apply(reducer_object *self);

/* ---- carrier.c: buckets that a communication hook averages --------------------------
 */

/* After `wait`: waits for what the carrier was given, and puts it into the slots.  A
 * no-op where there is no carrier. */
int pli_carrier_finish(reducer_object *self);

/* In place of the exchange of rows: the carrier averages declared sparse gradients. */
int pli_carrier_finish_sparse(reducer_object *self);

/* Once a carrier's results are there: waits until every rank has its own. */
int pli_carrier_confirm(reducer_object *self);

/* The step failed: tells the carrier, which may have work on its way. */
void pli_carrier_abandon(reducer_object *self);

/* -1 where a late gradient would have to be amended, which no carrier can do. */
int pli_carrier_check_late(reducer_object *self);

/* Methods of the Reducer. */
PyObject *pli_carrier_set(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *pli_carrier_look(PyObject *object, PyObject *ignored);
PyObject *pli_carrier_read(PyObject *object, PyObject *args);
PyObject *pli_carrier_write(PyObject *object, PyObject *args);

/* ---- join.c: ranks that have run out of batches -----------------------------------
 */

/* After `wait`, before the means are bound: divides them by the number of active ranks
 * where that is asked for. */
int pli_join_rescale(reducer_object *self);

/* ... of a mean that is in no slot: `mean->to`. */
int pli_join_rescale_mean(reducer_object *self, const pl_move *mean);

/* Whether this rank takes the means as its gradients: one that stands in may not. */
int pli_join_binds(const reducer_object *self);

/* In place of pli_grads_bind() on a rank that stands in. */
int pli_join_bind(reducer_object *self, size_t i);

/* After the step's end: -1, with torch's exception, where a rank stood in for it and
 * the join context is to end then. */
int pli_join_check_end(const reducer_object *self);

/* Methods and attributes of the Reducer. */
PyObject *pli_join_stand_in(PyObject *object, PyObject *args);
PyObject *pli_join_abandon(PyObject *object, PyObject *words);
PyObject *pli_join_set(PyObject *object, PyObject *args);

/* ---- hook_type.c, guard_type.c ------------------------------------------------------
 */

PyObject *pli_hook_new(const module_state *state, reducer_object *reducer,
                       size_t index);

/* The reducer is gone: the hook does nothing from now on. */
void pli_hook_forget(PyObject *hook);

PyObject *pli_guard_new(const module_state *state, reducer_object *reducer,
                        guard_origin origin);

#endif
