/* reducer.h - fills buckets as gradients arrive, issues them, and waits for the means.
 *
 * One step:
 *
 *     begin   mark_ready mark_ready ...   mark_unused ...   close   wait
 *     [write_late ...   close   wait]   end
 *
 * `mark_ready` takes each gradient as backward produces it.  A bucket expects as many
 * gradients of each parameter as came in the last step.  It is posted once it has them
 * and all buckets before it are posted, so that every rank posts in the same order.
 * `mark_unused` is for a parameter without a gradient.  `close` posts the remaining
 * buckets, and two bytes per parameter: whether any rank used it, and whether any was
 * late.  When `wait` succeeds, every mean is in place.
 *
 * A gradient that comes after its bucket was posted is *late*: mark_ready refuses it,
 * the caller keeps it, and after `wait` every rank takes part in a second all-reduce of
 * that parameter.  If every parameter gets its expected number, no gradient is late.
 *
 * A rank that has no more gradients may take *shadow steps*: it contributes zeros, so
 * that the others get their means.  The flags of a step carry each rank's role; all
 * roles together are the *participation*.
 *
 * The arena:
 *
 *     [ used: n bytes ][ late: n bytes ][ flags of ranks ][ order: n uint32 ]
 *     [ extra ][ staging ][ buckets ]
 *
 * Each step broadcasts `extra`, whose contents the caller chooses.  The root is rank 0
 * at first, and then the lowest rank that was active in the step before.  The caller
 * may use `staging` between `wait` and `end` (sparse_exchange.h).  Only one thread at a
 * time may call a reducer.
 */
#ifndef PLI_REDUCER_H
#define PLI_REDUCER_H

#include "backend/backend.h"
#include "comm/comm.h"
#include "core/plan.h"

typedef struct pl_reducer pl_reducer;

/* How a gradient changes its slot. */
typedef enum pl_write_mode {
    PL_REPLACE,  /* the data replaces the slot's; NULL writes zeros */
    PL_ADD,      /* the data is added to the slot */
    PL_IN_PLACE, /* the data is in the slot already */
} pl_write_mode;

typedef enum pl_ready_result {
    PL_COPIED,   /* the data was copied, or its copy enqueued: the caller may drop it */
    PL_LATE,     /* the bucket is posted: the caller keeps the data for write_late */
    PL_DEFERRED, /* the data is copied with its bucket: the caller keeps it unchanged
                    until the bucket is posted, or the step has failed */
} pl_ready_result;

/* What all ranks must agree on before a world is made. */
typedef struct pl_reducer_spec {
    const pl_param *params; /* borrowed during calls only */
    size_t n_params;
    int world_size; /* 0 is enough up to PL_MAX_RANKS: there is room for these */
    size_t extra_bytes;
    size_t staging_bytes; /* 0: none */
    pl_plan_caps caps;
} pl_reducer_spec;

/* The size of the reducer's arena, and the most operations in flight.  The header, at
 * the arena's start, is host memory; the rest is memory of the backend.  On a device,
 * comm->host_bytes must be pl_reducer_header_bytes(). */
size_t pl_reducer_header_bytes(const pl_reducer_spec *spec);
size_t pl_reducer_arena_bytes(const pl_reducer_spec *spec);
size_t pl_reducer_max_ops(const pl_reducer_spec *spec);

/* A communication hook of the user, which averages the buckets in place of the world.
 * The world still carries all else (flags, order, extra). */
typedef struct pl_comm_hook {
    void *context;
    /* Called in mark_ready or close with each bucket as it is posted, in order: the
     * hook owns its slots until `wait` has returned.  Must not wait. */
    pl_status (*post)(void *context, size_t bucket);
} pl_comm_hook;

/* comm and backend are borrowed until the reducer is destroyed. */
pl_status pl_reducer_create(const pl_reducer_spec *spec, pl_comm *comm,
                            pl_backend *backend, pl_reducer **out) PL_MUST_USE;
void pl_reducer_destroy(pl_reducer *reducer);

/* Between steps, on every rank: makes a plan under `caps`, and passes its buckets to
 * `hook` from now on.  After `wait` the caller writes the hook's means to the slots; it
 * must refuse late gradients.  PL_ESTATE if a step is under way or has failed. */
pl_status pl_reducer_set_comm_hook(pl_reducer *reducer, const pl_comm_hook *hook,
                                   const pl_plan_caps *caps) PL_MUST_USE;

/* Collective, before the first step: tries the operations that steps use, so that no
 * step has to allocate or to connect ranks.  They run on the device after the work on
 * the stream.  A no-op on the CPU. */
pl_status pl_reducer_prepare(pl_reducer *reducer) PL_MUST_USE;

/* Starts a step.  PL_ESTATE if one is under way; the failure of a world that has
 * failed: this rank gives up that step too, even if it gets there late. */
pl_status pl_reducer_begin(pl_reducer *reducer) PL_MUST_USE;

/* Takes a gradient that backward has just produced.  `data` is dense, in the slot's
 * layout.  NULL counts as zeros, and as not used. */
pl_status pl_reducer_mark_ready(pl_reducer *reducer, size_t param, const void *data,
                                pl_write_mode mode, pl_stream *stream,
                                pl_ready_result *out) PL_MUST_USE;

/* Makes the deferred copy of the parameter's gradient now, so that the caller may drop
 * or change the gradient.  A no-op if none is deferred. */
pl_status pl_reducer_flush(pl_reducer *reducer, size_t param) PL_MUST_USE;

/* Before `close`, for a parameter that was not marked ready: this rank contributes
 * `data` (NULL: zeros) to its mean.  The caller keeps the data unchanged until the
 * bucket is posted, as for PL_DEFERRED. */
typedef enum pl_use { PL_UNUSED, PL_USED } pl_use;
pl_status pl_reducer_mark_unused(pl_reducer *reducer, size_t param, const void *data,
                                 pl_write_mode mode, pl_use use) PL_MUST_USE;

pl_status pl_reducer_close(pl_reducer *reducer) PL_MUST_USE;

/* Waits for the means.  PL_EAGAIN after about slice_ns; PL_EMISMATCH, on every rank, if
 * ranks got different means in the step before (reducer_finish.c). */
pl_status pl_reducer_wait(pl_reducer *reducer, int64_t slice_ns) PL_MUST_USE;

/* After `wait`: makes later work on the stream wait for the means.  The call itself
 * never waits; a no-op on the CPU. */
pl_status pl_reducer_order(pl_reducer *reducer) PL_MUST_USE;

pl_status pl_reducer_write_late(pl_reducer *reducer, size_t param, const void *data,
                                pl_write_mode mode) PL_MUST_USE;

/* In place of `end`, on every rank: drops the means. */
void pl_reducer_discard(pl_reducer *reducer);

/* Between steps: returns the failure of the world, if a peer has failed it; this rank
 * then gives up the next step, too. */
pl_status pl_reducer_notice_failure(pl_reducer *reducer) PL_MUST_USE;

/* ---- ranks without gradients ---------------------------------------------------- */

/* A rank's role in a step; a rank is active by default. */
typedef enum pl_role {
    PL_SHADOWING, /* it has taken shadow steps before */
    PL_JOINING,   /* it takes its first shadow step */
    PL_ACTIVE,
    PL_GIVES_UP, /* over a group comm: the step has failed on it, so on all ranks */
} pl_role;

/* The roles in a step; the same on every rank. */
typedef struct pl_participation {
    int n_active;
    int first_active; /* -1: none */
    int last_joining; /* -1: none */
    int gives_up;     /* the lowest rank that does; -1: none */
} pl_participation;

/* After `begin`: this rank has no gradients for the step.  Marks all parameters unused,
 * with zeros; the caller goes on with `close`. */
pl_status pl_reducer_shadow_step(pl_reducer *reducer, pl_role role) PL_MUST_USE;

/* Between steps, on every rank: broadcasts the next root's `extra`.  Wait for *out with
 * pl_comm_wait(). */
pl_status pl_reducer_send_extra(pl_reducer *reducer, pl_ticket *out) PL_MUST_USE;

/* Between steps, on every rank, when a join begins or ends: marks all ranks active. */
void pl_reducer_reset_participation(pl_reducer *reducer);

/* After `wait`, before `end`: turns the means over all ranks into means over the active
 * ranks, by one more multiplication and rounding.  Exact if the ratio of the two
 * numbers of ranks is a power of two; a no-op if all ranks are active. */
pl_status pl_reducer_rescale(pl_reducer *reducer) PL_MUST_USE;

/* Rescales likewise one mean, at `mean->to`, that is not in a slot. */
pl_status pl_reducer_rescale_mean(pl_reducer *reducer, const pl_move *mean) PL_MUST_USE;

/* Ends the step, and learns from it for the next one.  Peers take the step when its
 * last operation is done: if this rank then fails before `end`, the numbers of taken
 * steps differ. */
pl_status pl_reducer_end(pl_reducer *reducer) PL_MUST_USE;

/* Fails the world with the step, on every rank; `text` may be NULL.  No step follows:
 * make a new world, and a reducer that follows this one.  Over a group comm the world
 * lasts until peers see in the step's flags that this rank gives it up. */
void pl_reducer_fail(pl_reducer *reducer, const char *text);

/* Continues the numbers of steps of a reducer whose world has failed. */
void pl_reducer_follow(pl_reducer *reducer, const pl_reducer *failed);

/* After a failure: PL_EMISMATCH if ranks have got different means, PL_EPEER if this
 * rank's device has lost means of a finished step.  Then only a checkpoint helps. */
pl_status pl_reducer_check_weights(const pl_reducer *reducer) PL_MUST_USE;

#endif
