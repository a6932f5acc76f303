/* step.h - the steps of a rank: what a gradient does, and in which order a step ends.
 *
 *     forward_begins  forward_ends      a synchronised forward: its backward is a step
 *     take  take ...                    each gradient; the first begins the step
 *     finish                            at the backward's end: every `.grad` is a mean
 *
 * A step decides; it knows no tensors.  The caller's tensors stay behind pl_grad_ops,
 * and what else it needs of the caller behind pl_step_host: the binding implements both
 * for torch, tests/c for arrays.  A function of these that fails ends the step with its
 * status.  They may run the caller's code, so the state is consistent before each call.
 *
 * One of three policies handles a gradient.  Its size and declaration choose the
 * policy, so all ranks choose the same:
 *
 *   copy   (small) the gradient stays the user's tensor; its values are copied to the
 *          slot as it comes and the reduced ones are copied back at the end.  Cheapest:
 *          no tensor is made, no attribute set.
 *   view   (large) the gradient is copied to the slot and dropped; `.grad` is empty
 *          until the end of the step, then a view of the slot.  A gradient that is such
 *          a view already (accumulation) needs no copy.
 *   sparse (declared) the gradient stays where it is, and its rows are averaged at the
 *          end: sparse_exchange.h.
 *
 *     step (begin, end, failure)
 *       -> step_forwards -> step_buffers
 *       -> step_grads (policies), step_sparse
 *            all -> step_host (the caller's threads), reducer (buckets)
 */
#ifndef PLI_STEP_H
#define PLI_STEP_H

#include "comm/window.h"
#include "core/layout.h"
#include "reducer.h"
#include "sparse_exchange.h"

typedef struct pl_step pl_step;

/* ---- what the caller implements ------------------------------------------------- */

/* A tensor of the caller: a gradient, a buffer, a mean. */
typedef struct pl_grad pl_grad;

/* How to read a tensor. */
typedef enum pl_reading {
    PL_READ_GRAD,  /* a gradient: also asks whether its sign is lazy */
    PL_READ_ANY,   /* the layout may be lazy, but is not asked for its sign */
    PL_READ_PLAIN, /* it has memory */
} pl_reading;

/* The memory of a slot, for a new tensor: in a window, which counts the tensor; on a
 * GPU in the world's memory, whose owner must outlive the tensor; else it outlives the
 * tensor. */
typedef struct pl_place {
    void *memory;
    size_t slot;        /* SIZE_MAX: none, the memory is a buffer's */
    pli_window *window; /* or NULL */
    size_t offset;      /* of the memory, in the window */
} pl_place;

/* Operations on the caller's tensors.  A pl_grad in *out is a new reference, for
 * `drop`. `context` is that of pl_step_spec. */
typedef struct pl_grad_ops {
    /* Parameter i's `.grad`, as it is now; NULL: none. */
    pl_status (*find)(void *context, size_t i, pl_grad **out);
    /* Reads a gradient that backward has produced.  Replaces a sparse one by a dense
     * copy.  *n_sparse_dims: of the parameter's last gradient, 0 if dense; on return of
     * this one. */
    pl_status (*read_arrived)(void *context, pl_grad **grad, unsigned *n_sparse_dims,
                              pli_tensor *out);
    pl_status (*read)(void *context, pl_reading how, const char *what, pl_grad *grad,
                      pli_tensor *out);
    void (*hold)(pl_grad *grad);
    void (*drop)(pl_grad *grad);
    /* `.grad` of parameter i = grad; NULL: none. */
    pl_status (*put)(void *context, size_t i, pl_grad *grad);
    /* The same for a step that is given up: never fails. */
    void (*put_back)(void *context, size_t i, pl_grad *grad);
    /* A tensor over memory at `place`; and a new one in the same layout. */
    pl_status (*over)(void *context, const pl_place *place, const pli_layout *layout,
                      pl_grad **out);
    pl_status (*empty_like)(void *context, pl_grad *grad, pl_grad **out);
    pl_status (*clone)(void *context, pl_grad *grad, pl_grad **out);
    pl_status (*copy)(void *context, pl_grad *to, pl_grad *from);
    pl_status (*add)(void *context, pl_grad *to, pl_grad *from);
    /* Tells autograd that the tensor was overwritten; how often it was. */
    pl_status (*note_write)(void *context, pl_grad *grad);
    pl_status (*n_writes)(void *context, pl_grad *grad, long *out);
    /* Buffer b of the module, as it is now; NULL: it is gone. */
    pl_status (*find_buffer)(void *context, size_t b, pl_grad **out);
    /* This rank's rows of parameter i, which is declared sparse; *out owns them; NULL:
     * it has no gradient. */
    pl_status (*read_rows)(void *context, size_t i, const pl_table *table,
                           pl_sparse_rows *rows, pl_grad **out);
    /* A mean of parameter i, to be filled, of the rows `all`; `rows` is its memory. */
    pl_status (*make_rows)(void *context, size_t i, const pl_table *table,
                           const pl_sparse_rows *all, pl_sparse_rows *rows,
                           pl_grad **out);
    /* A sparse copy of a dense tensor. */
    pl_status (*to_sparse)(void *context, pl_grad *grad, unsigned n_dims,
                           pl_grad **out);
    /* Makes a mean the gradient of parameter i: the same tensor as before, if both are
     * sparse, or both dense. */
    pl_status (*put_mean)(void *context, size_t i, pl_grad *mean);
} pl_grad_ops;

/* What queues a call at a backward's end.  The backward in which an output's hook runs
 * holds the whole graph of that forward; a parameter's hook may run in a backward
 * inside that one. */
typedef enum pl_end_origin {
    PL_END_OF_OUTPUT,
    PL_END_OF_PARAMETER,
    PL_END_OF_LOCAL_OUTPUT, /* of a backward that is not synchronised */
} pl_end_origin;

typedef struct pl_step_host {
    /* Has pl_step_finish(), or for a local output pl_step_end_local(), called when this
     * backward ends, unless that is arranged already. */
    pl_status (*await_end)(void *context, pl_end_origin origin);
    /* Whether the backward itself is recorded (create_graph). */
    pl_status (*is_recorded)(void *context, int *out);
    /* Whether other hooks than ours see parameter i's gradient before the step ends. */
    int (*has_hooks)(void *context, size_t i);
    /* Let other threads use the caller meanwhile; `take_back` gets the result of
     * let_go, which is not NULL. */
    void *(*let_go)(void *context);
    void (*take_back)(void *lock);
    /* Fails if a signal handler has raised. */
    pl_status (*check_signals)(void *context);
    /* The stream of this thread; NULL on the CPU. */
    pl_status (*current_stream)(void *context, pl_stream **out);
    /* Every `.grad` is set. */
    pl_status (*finished)(void *context);
} pl_step_host;

/* A communication hook of the user; `context` is that of pl_step_spec. */
typedef struct pl_step_hook {
    pl_status (*post)(void *context, size_t bucket);
    /* Waits for what it has started, and writes it to the slots. */
    pl_status (*finish)(void *context);
    /* The same where ranks find that they are in different steps: never fails. */
    void (*settle)(void *context);
    /* Averages the gradients declared sparse, of `n` parameters. */
    pl_status (*finish_sparse)(void *context, const size_t *params, size_t n,
                               int is_active, int binds_results);
    /* The step has failed: drops work in flight. */
    void (*abandon)(void *context);
} pl_step_hook;

/* Set by the caller at any time.  Chars, because Python sets them in place. */
typedef struct pl_step_settings {
    char is_on;            /* forwards are synchronised */
    char is_in_no_sync;    /* all backwards are local, whatever their forward was */
    char keeps_grads;      /* a `.grad` that a step finds stays the same tensor */
    char binds_new;        /* `.grad` is a derived tensor: results are set anew */
    char is_strict;        /* as torch, raises at a second gradient in one backward */
    char follows_forwards; /* a backward without a forward of the wrapper is local */
    char ends_with_step;   /* after a step no parameter awaits a gradient */
    char is_manual; /* a backward's end only closes its step: the user finishes it */
    /* Of the backward under way. */
    char is_compiled; /* no call comes at its end */
    int n_ends;       /* calls at its end that are queued */
} pl_step_settings;

/* ---- life ----------------------------------------------------------------------- */

typedef struct pl_buffer_spec {
    size_t n_bytes;
    /* Autograd does not count its forwards' writes, as a norm's of its statistics: then
     * neither are those of a take-over. */
    int is_uncounted;
} pl_buffer_spec;

typedef struct pl_step_spec {
    pli_layout *const *layouts;     /* of the parameters' slots: dense */
    const unsigned char *is_sparse; /* by parameter: declared sparse; NULL: none */
    size_t n_params;
    const pl_buffer_spec *buffers; /* of the module */
    size_t n_buffers;
    size_t view_bytes; /* the smallest gradient that becomes a view */
    int world_size;
    pl_plan_caps caps;
    /* Not read by pl_step_measure(). */
    const pl_grad_ops *grads;
    const pl_step_host *host;
    const pl_step_settings *settings;
    void *context;
} pl_step_spec;

/* What all ranks must agree on before a world is made: reducer.h. */
typedef struct pl_step_size {
    size_t arena_bytes, n_ops, header_bytes;
} pl_step_size;

pl_status pl_step_measure(const pl_step_spec *spec, pl_step_size *out) PL_MUST_USE;

/* comm and backend are borrowed until the end; the rest of the spec only by the call,
 * but grads, host, settings. */
pl_status pl_step_create(const pl_step_spec *spec, pl_comm *comm, pl_backend *backend,
                         pl_step **out) PL_MUST_USE;
void pl_step_destroy(pl_step *step);

/* Collective, before the first step: pl_reducer_prepare().  Construction is over. */
pl_status pl_step_prepare(pl_step *step) PL_MUST_USE;

/* Calls `visit` for each tensor that the step holds, until it returns non-zero; and
 * drops them all. */
int pl_step_visit(const pl_step *step, int (*visit)(pl_grad *grad, void *argument),
                  void *argument);
void pl_step_drop(pl_step *step);

/* Before a fork, and in the child: makes gradients that other processes could see
 * private.  A no-op on a GPU. */
pl_status pl_step_before_fork(pl_step *step) PL_MUST_USE;

/* Fails in a process forked from the rank. */
pl_status pl_step_check_process(const pl_step *step) PL_MUST_USE;

/* What a caller may show. */
typedef struct pl_step_state {
    int is_active;   /* a step is under way */
    int is_open;     /* ... and takes gradients */
    int has_failed;  /* the world has: no step follows */
    uint64_t number; /* steps begun, also those of steps that this one follows */
    uint64_t n_taken;
    pl_participation participation;
    const pl_plan *plan;
    long context; /* of the step's gradients, or PL_NO_CONTEXT */
    /* By parameter, for the caller to read and write: whether its gradient holds values
     * that no step has averaged; whether the last outputs do not depend on it (for
     * is_strict). */
    unsigned char *unseen, *unused;
} pl_step_state;

pl_step_state pl_step_look(const pl_step *step);

/* How often each parameter got a gradient in the last step begun; 255: or more. */
void pl_step_count_grads(const pl_step *step, unsigned char *out);

/* ---- forwards ------------------------------------------------------------------- */

/* Whether a forward ran with the wrapper in training mode. */
typedef enum pl_forward_mode { PL_EVALUATES, PL_TRAINS, PL_N_MODES } pl_forward_mode;

/* Whether pl_step_output() is called when the forward's backward begins. */
typedef enum pl_outputs { PL_OUTPUTS_UNWATCHED, PL_OUTPUTS_WATCHED } pl_outputs;

/* A forward begins.  Fails if the end of the last backward was never seen.  Takes over
 * the root's buffers where no comparison of values is possible (step_buffers.c). */
pl_status pl_step_forward_begins(pl_step *step) PL_MUST_USE;

/* It ends.  Returns a token for pl_step_output(); 0 if none will come. */
uint64_t pl_step_forward_ends(pl_step *step, pl_outputs outputs, pl_forward_mode mode);

/* Treats the next backward as that of a synchronised forward. */
void pl_step_await_backward(pl_step *step);

/* The forward begun last has raised; the same where its buffers could not be synced. */
void pl_step_forward_fails(pl_step *step, pl_forward_mode mode);
void pl_step_forward_raises(pl_step *step, pl_forward_mode mode);

/* The backward of a forward begins at an output.  `is_synchronised` is that of the
 * forward; `token` is its token the first time, 0 later. */
pl_status pl_step_output(pl_step *step, uint64_t token,
                         int is_synchronised) PL_MUST_USE;

/* The backward of a local output is over. */
void pl_step_end_local(pl_step *step);

/* In a training forward on the CPU: takes over the root's current buffers. */
pl_status pl_step_sync_buffers(pl_step *step) PL_MUST_USE;

/* Takes over the root's buffers of the last step. */
pl_status pl_step_apply_buffers(pl_step *step) PL_MUST_USE;

/* Whether a buffer is gone, or has changed its size. */
pl_status pl_step_has_other_buffers(pl_step *step, int *out) PL_MUST_USE;

/* ---- gradients ------------------------------------------------------------------ */

enum { PL_NO_CONTEXT = -1 }; /* gradients are the parameters' `.grad` */

/* Which hooks of the user see a gradient that arrives. */
typedef enum pl_arrival {
    PL_ARRIVES_ALONE,
    PL_ARRIVES_AFTER_HOOKS,
    PL_ARRIVES_BEFORE_HOOKS, /* taken at the end of the step */
} pl_arrival;

/* Backward has produced a gradient for parameter i.  *is_due: every parameter has one,
 * and no call comes at the backward's end, so the caller calls pl_step_finish(). */
pl_status pl_step_take(pl_step *step, size_t i, pl_arrival arrival,
                       int *is_due) PL_MUST_USE;

/* The same in backward number `context`, whose gradients are elsewhere than in `.grad`
 * (torch.distributed.autograd); `grads` finds them there from pl_step_close() on. */
pl_status pl_step_take_in_context(pl_step *step, size_t i, long context) PL_MUST_USE;

/* Posts the rest of the step, if it is open.  Several steps that end with one backward
 * are all closed first, because another rank may wait for them in another order. */
pl_status pl_step_close(pl_step *step) PL_MUST_USE;

/* Ends the step, if there is one, in the order of pl_step_phase().  If it fails, and
 * the step is still active, the caller reports that by pl_step_fail(). */
pl_status pl_step_finish(pl_step *step) PL_MUST_USE;

/* Returns the name of phase k of a step's end, or NULL behind the last. */
const char *pl_step_phase(size_t k);

/* The step failed here: sends the text to the peers; NULL: a traceback follows. */
void pl_step_fail(pl_step *step, const char *text);

/* If a peer has failed the world while no step is under way: notes that. */
pl_status pl_step_notice_failure(pl_step *step) PL_MUST_USE;

/* Why no step may follow this one, which has failed. */
pl_status pl_step_check_failure(const pl_step *step) PL_MUST_USE;

/* Continues the numbers and counts of one whose world has failed. */
void pl_step_follow(pl_step *step, const pl_step *failed);

/* ---- ranks that ran out of batches ---------------------------------------------- */

/* The divisor of a join context's sums, and its action when the first rank runs out. */
typedef enum pl_join_divisor { PL_BY_WORLD_SIZE, PL_BY_N_ACTIVE } pl_join_divisor;
typedef enum pl_join_end { PL_JOIN_GOES_ON, PL_JOIN_RAISES } pl_join_end;

/* A join context begins or ends. */
void pl_step_set_join(pl_step *step, pl_join_divisor divisor, pl_join_end end);

/* What a shadow step does to `.grad`. */
typedef enum pl_join_grads { PL_LEAVES_GRADS, PL_BINDS_RESULTS } pl_join_grads;

/* Takes a whole step with zeros, without a backward. */
pl_status pl_step_shadow(pl_step *step, pl_role role, pl_join_grads grads) PL_MUST_USE;

/* ---- communication hooks -------------------------------------------------------- */

/* Passes the buckets to `hook` from now on: pl_reducer_set_comm_hook(). */
pl_status pl_step_set_hook(pl_step *step, const pl_step_hook *hook,
                           const pl_plan_caps *caps) PL_MUST_USE;

typedef enum pl_slot_direction { PL_FROM_SLOTS, PL_TO_SLOTS } pl_slot_direction;

/* Elements of a bucket, without padding; and a copy of it from or to a flat range, on
 * this thread's stream. */
size_t pl_step_bucket_elems(const pl_step *step, size_t bucket);
pl_status pl_step_copy_bucket(pl_step *step, size_t bucket, void *flat,
                              pl_slot_direction way) PL_MUST_USE;

#endif
