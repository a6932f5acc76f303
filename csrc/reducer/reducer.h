/* reducer.h - fills buckets as gradients arrive, issues them, says when means are in.
 *
 * One step:
 *
 *     begin   mark_ready mark_ready ...   mark_unused ...   close   wait
 *     [write_late ...   close   wait]   end
 *
 * `mark_ready` is called as each gradient comes out of backward, and posts a bucket as
 * soon as all that came last time are in (never before the buckets ahead of it: the
 * order is every rank's).  `mark_unused` is for a parameter that no gradient came for.
 * `close` posts what is left, with two bytes a parameter: who used it, who was late.
 * `wait` ends with every mean in place.
 *
 * A gradient that comes after its bucket was posted is *late*: mark_ready refuses it,
 * the caller keeps it, and after `wait` every rank takes part in a second all-reduce of
 * that parameter.  Buckets are posted early only on the strength of the last step, so a
 * model whose parameters get ready as often as last time is never late.
 *
 * A rank that has no gradients any more may take *shadow steps*: it takes part with
 * zeros, so that the others get their means.  Each step's bytes show every rank who
 * took part how: the *participation*.
 *
 * The arena:
 *
 *     [ used: n bytes ][ late: n bytes ][ roles ][ forwards ][ order: n uint32 ]
 *     [ extra ][ staging ][ buckets ]
 *
 * `extra` is broadcast with each step, from rank 0, or from the lowest rank that was
 * active in the step before; the caller decides what is in it.
 * `staging` is the caller's, between `wait` and `end`: sparse_exchange.h.
 * One thread at a time calls a reducer.
 */
#ifndef PLI_REDUCER_H
#define PLI_REDUCER_H

#include "backend/backend.h"
#include "comm/comm.h"
#include "core/plan.h"

typedef struct pl_reducer pl_reducer;

/* What a gradient does to what is in its slot. */
typedef enum pl_write_mode {
    PL_REPLACE,  /* the slot becomes the data; zeros where there is none */
    PL_ADD,      /* the data is added to the slot */
    PL_IN_PLACE, /* the data is in the slot already */
} pl_write_mode;

typedef enum pl_ready_result {
    PL_COPIED,   /* the data was copied, or its copy enqueued: the caller may drop it */
    PL_LATE,     /* the bucket is posted: the caller keeps it for write_late */
    PL_DEFERRED, /* it is copied with its bucket: the caller keeps it, and its values,
                until that is posted (pl_reducer_n_posted), or the step has failed */
} pl_ready_result;

/* What every rank must agree on before a world is made. */
typedef struct pl_reducer_spec {
    const pl_param *params; /* borrowed during calls only */
    size_t n_params;
    int world_size; /* 0: up to PL_MAX_RANKS, for which there is always room */
    size_t extra_bytes;
    size_t staging_bytes; /* 0: none */
    pl_plan_caps caps;
} pl_reducer_spec;

/* The arena that such a reducer needs, and its most operations in flight.  The header,
 * at the arena's start, is host memory; all behind it is the backend's:
 * comm->host_bytes is pl_reducer_header_bytes() where there is a device. */
size_t pl_reducer_header_bytes(const pl_reducer_spec *spec);
size_t pl_reducer_arena_bytes(const pl_reducer_spec *spec);
size_t pl_reducer_max_ops(const pl_reducer_spec *spec);

/* Who averages the buckets in place of the world: a communication hook of the user's.
 * All else (flags, order, extra) is the world's all the same. */
typedef struct pl_comm_hook {
    void *context;
    /* Called with each bucket as it is posted, in order, in mark_ready or close: its
     * slots are the hook's until `wait` has returned.  Never waits. */
    pl_status (*post)(void *context, size_t bucket);
} pl_comm_hook;

/* comm and backend are borrowed until the reducer is destroyed. */
pl_status pl_reducer_create(const pl_reducer_spec *spec, pl_comm *comm,
                            pl_backend *backend, pl_reducer **out) PL_MUST_USE;
void pl_reducer_destroy(pl_reducer *reducer);

/* Between steps, on every rank: hands the buckets, cut anew under `caps`, to a hook.
 * After `wait` its owner writes the means to the slots; late gradients cannot be
 * taken.  PL_ESTATE where a step is under way or has failed. */
pl_status pl_reducer_set_comm_hook(pl_reducer *reducer, const pl_comm_hook *hook,
                                   const pl_plan_caps *caps) PL_MUST_USE;

/* The stream of all that follows but `mark_ready`, which has its own.  NULL at first.
 */
void pl_reducer_set_stream(pl_reducer *reducer, pl_stream *stream);

/* Collective, before the first step: has the world try what steps will ask of it,
 * behind what the stream holds, so that no step has to allocate or to connect ranks.
 * A no-op on the CPU. */
pl_status pl_reducer_prepare(pl_reducer *reducer) PL_MUST_USE;

/* Starts a step.  PL_ESTATE where one is under way. */
pl_status pl_reducer_begin(pl_reducer *reducer) PL_MUST_USE;

/* Hands over a gradient that backward has just produced; `data` is dense, in the
 * slot's layout; NULL: none came, which counts as zeros and as not used. */
pl_status pl_reducer_mark_ready(pl_reducer *reducer, size_t param, const void *data,
                                pl_write_mode mode, pl_stream *stream,
                                pl_ready_result *out) PL_MUST_USE;

/* Makes a deferred copy of the parameter's gradient now: the caller may drop it, or
 * change it.  A no-op where none is deferred. */
pl_status pl_reducer_flush(pl_reducer *reducer, size_t param) PL_MUST_USE;

/* Buckets posted in this step: 0 .. n - 1 of the plan.  What was kept for a member of
 * these may be dropped. */
size_t pl_reducer_n_posted(const pl_reducer *reducer);

/* Whether a gradient that came for the parameter now would let buckets be posted. */
int pl_reducer_may_post(const pl_reducer *reducer, size_t param);

/* Keeps the parameter's bucket back until `close`, whatever else comes: nothing that
 * arrives for it can then be late.  Called before the slot
 * is first written in a step. */
void pl_reducer_defer_bucket(pl_reducer *reducer, size_t param);

/* Before `close`, for a parameter that was not marked ready: `data` (NULL: zeros) is
 * what this rank contributes should any rank have used it.  The caller keeps it as what
 * is PL_DEFERRED. */
typedef enum pl_use { PL_UNUSED, PL_USED } pl_use;
pl_status pl_reducer_mark_unused(pl_reducer *reducer, size_t param, const void *data,
                                 pl_write_mode mode, pl_use use) PL_MUST_USE;

/* Before `close`: what was just marked ready, or unused with PL_USED, is sparse, in its
 * first n_dims dimensions (1 to 254), and its slot holds it densely. */
void pl_reducer_set_sparse(pl_reducer *reducer, size_t param, unsigned n_dims);

pl_status pl_reducer_close(pl_reducer *reducer) PL_MUST_USE;

/* PL_EAGAIN after about slice_ns. */
pl_status pl_reducer_wait(pl_reducer *reducer, int64_t slice_ns) PL_MUST_USE;

/* After `wait`: what the stream does from now on comes behind the means.  Never waits
 * itself; a no-op on the CPU. */
pl_status pl_reducer_order(pl_reducer *reducer) PL_MUST_USE;

/* After `wait`: the parameters that were late on some rank.  Each rank writes what it
 * has for each: PL_ADD adds to the mean, PL_REPLACE puts a new total in its place. */
size_t pl_reducer_n_late(const pl_reducer *reducer);
int pl_reducer_is_late(const pl_reducer *reducer, size_t param);
pl_status pl_reducer_write_late(pl_reducer *reducer, size_t param, const void *data,
                                pl_write_mode mode) PL_MUST_USE;

/* ---- which step a rank is in (reducer_forwards.c) ------------------------------- */

/* A rank's synchronised forwards. */
typedef struct pl_forwards {
    unsigned n;            /* since the last step */
    unsigned n_answered;   /* of all, whose backward has begun since the last step */
    unsigned n_unanswered; /* since the last step, whose backward has not begun */
} pl_forwards;

/* Between begin and close: has the flags carry this rank's. */
void pl_reducer_set_forwards(pl_reducer *reducer, const pl_forwards *forwards);

/* After `wait`: PL_EMISMATCH, on every rank, where active ranks are not in the same
 * step: one has skipped a backward, or takes one more. */
pl_status pl_reducer_check_forwards(const pl_reducer *reducer) PL_MUST_USE;

/* In place of `end`, on every rank: nobody takes the means. */
void pl_reducer_discard(pl_reducer *reducer);

/* Between steps: this rank has given the step to come up by itself.  Where peers have
 * failed it, it is the same step, and this rank does not fail of that. */
void pl_reducer_skip(pl_reducer *reducer);

/* ---- ranks without gradients (reducer_join.c) ----------------------------------- */

/* What a rank is to a step; a rank is active unless it says otherwise. */
typedef enum pl_role {
    PL_SHADOWING, /* it has taken shadow steps before */
    PL_JOINING,   /* it takes its first shadow step */
    PL_ACTIVE,
} pl_role;

/* Who was what in a step; every rank has the same. */
typedef struct pl_participation {
    int n_active;
    int first_active; /* -1: none */
    int last_joining; /* -1: none */
} pl_participation;

/* After `begin`: this rank has no gradients for the step.  All parameters are marked
 * unused, with zeros; what remains is `close` and all that follows. */
pl_status pl_reducer_shadow_step(pl_reducer *reducer, pl_role role) PL_MUST_USE;

/* That of the last step that was waited for; of all ranks before the first. */
pl_participation pl_reducer_participation(const pl_reducer *reducer);

/* The rank whose `extra` travels with the next step. */
int pl_reducer_next_root(const pl_reducer *reducer);

/* Between steps, on every rank: sends the next root's `extra` to all; to be waited for
 * by pl_comm_wait(). */
pl_status pl_reducer_send_extra(pl_reducer *reducer, pl_ticket *out) PL_MUST_USE;

/* Between steps, on every rank: takes all for active again.  A join is over, or begins.
 */
void pl_reducer_reset_participation(pl_reducer *reducer);

/* The rank whose `extra` travels with this step, and whether it was active in it,
 * which is known after `wait`: if it was not, its values are out of date. */
int pl_reducer_root(const pl_reducer *reducer);
int pl_reducer_root_is_active(const pl_reducer *reducer);

/* After `wait`, before `end`: turns the means over all ranks into means over the active
 * ones, by one multiplication and one rounding more; exact where the two numbers differ
 * by a power of two, and nothing where they are equal. */
pl_status pl_reducer_rescale(pl_reducer *reducer) PL_MUST_USE;

/* ... one that is in no slot: what `mean->to` has. */
pl_status pl_reducer_rescale_mean(pl_reducer *reducer, const pl_move *mean) PL_MUST_USE;

/* The last operation of the step is done: peers take it.  From here to `end` a failure
 * is not left behind: it ends the world, where the kind of world can be ended. */
pl_status pl_reducer_complete(pl_reducer *reducer) PL_MUST_USE;

/* Ends the step: what was learned of it shapes the next. */
pl_status pl_reducer_end(pl_reducer *reducer) PL_MUST_USE;

/* Declares the step failed, on this rank and so on all; `text` may be NULL.  Over a
 * group comm, before anything of the step is issued, it is as if it had not begun. */
void pl_reducer_fail(pl_reducer *reducer, const char *text);

/* To be called before a step begins.  Where a step has failed on another rank, and this
 * one does not know yet, it learns of it now: PL_EPEER, so that every rank gives the
 * same step up, however late it comes to it.  Where it knows, it leaves the failure
 * behind, together with every rank (PL_EAGAIN after slice_ns).  PL_OK at once where all
 * is well. */
pl_status pl_reducer_recover(pl_reducer *reducer, int64_t slice_ns) PL_MUST_USE;

/* ---- what may be asked ---------------------------------------------------------- */

/* Non-zero once the plan follows the order that a step has shown: nothing changes from
 * step to step any more. */
int pl_reducer_is_learned(const pl_reducer *reducer);

/* Non-zero between begin and end. */
int pl_reducer_is_active(const pl_reducer *reducer);

/* Non-zero after a step has failed, until that is left behind. */
int pl_reducer_has_failed(const pl_reducer *reducer);

/* Non-zero between begin and the first close: gradients are still taken. */
int pl_reducer_is_open(const pl_reducer *reducer);

/* Parameters for which no gradient has come in this step. */
size_t pl_reducer_n_not_ready(const pl_reducer *reducer);

/* Times that a gradient came for this parameter in this step. */
unsigned pl_reducer_ready_count(const pl_reducer *reducer, size_t param);

/* After `wait`: non-zero where some rank had a gradient for it. */
int pl_reducer_is_used(const pl_reducer *reducer, size_t param);

/* After `wait`: 0 where some rank's gradient was dense or none was used; else in how
 * many dimensions they were sparse, the same on every rank. */
unsigned pl_reducer_sparse_dims(const pl_reducer *reducer, size_t param);

/* Elements of the parameter. */
size_t pl_reducer_elems(const pl_reducer *reducer, size_t param);

/* Byte of the arena at which the parameter's slot begins; a new plan moves it. */
size_t pl_reducer_slot_offset(const pl_reducer *reducer, size_t param);

/* The arena's range of buckets, and the memory of `extra`. */
void pl_reducer_buckets(const pl_reducer *reducer, size_t *offset_bytes,
                        size_t *n_bytes);
void *pl_reducer_extra(const pl_reducer *reducer);

/* Byte of the arena at which the staging begins. */
size_t pl_reducer_staging_offset(const pl_reducer *reducer);

/* Grows with each new plan; slots have moved since where it differs. */
unsigned pl_reducer_generation(const pl_reducer *reducer);

uint64_t pl_reducer_step(const pl_reducer *reducer);
const pl_plan *pl_reducer_plan(const pl_reducer *reducer);

#endif
