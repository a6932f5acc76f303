/* reducer.c - creates a reducer, begins its steps, and answers queries. */
#include <string.h>

#include "core/alloc.h"
#include "reducer_state.h"
#include "sparse_exchange.h"

enum {
    OPS_BESIDE_BUCKETS = 8 /* flags, order, extra, and some to spare */
};

/* ---- the arena ------------------------------------------------------------------ */

static arena_layout lay_out_arena(const pl_reducer_spec *spec)
{
    /* Buckets begin on a page, so that they can be mapped separately: a multiple of
     * every page size in use. */
    const size_t page = 65536;
    const int n_ranks =
        spec->world_size > PL_MAX_RANKS ? spec->world_size : PL_MAX_RANKS;
    arena_layout at = {.late = spec->n_params, .ranks = 2 * spec->n_params};
    at.order = pli_line_up(at.ranks + sizeof(rank_flags) * (size_t)n_ranks);
    at.extra = at.order + pli_line_up(spec->n_params * sizeof(uint32_t));
    at.staging = at.extra + pli_line_up(spec->extra_bytes);
    const size_t end = at.staging + pli_line_up(spec->staging_bytes);
    at.buckets = (end + page - 1) / page * page;
    return at;
}

size_t pl_reducer_header_bytes(const pl_reducer_spec *spec)
{
    return lay_out_arena(spec).extra;
}

size_t pl_reducer_arena_bytes(const pl_reducer_spec *spec)
{
    return lay_out_arena(spec).buckets + pl_plan_bytes(spec->params, spec->n_params);
}

size_t pl_reducer_max_ops(const pl_reducer_spec *spec)
{
    size_t n_ops = OPS_BESIDE_BUCKETS + spec->n_params; /* buckets, at most */
    if (spec->staging_bytes > 0)
        n_ops += PLI_EXCHANGE_SEGMENTS;
    return n_ops + pl_plan_bytes(spec->params, spec->n_params) / PLI_SHM_CHUNK_BYTES;
}

/* ---- life ----------------------------------------------------------------------- */

/* *out: free it with pli_free(). */
static pl_status copy_each_cap(const pl_plan_caps *caps, size_t **out)
{
    pl_status st = PL_OK;
    size_t *each = NULL;
    if (caps->n_each > 0) {
        PL_TRY(pli_calloc(caps->n_each, sizeof *each, "caps of buckets", &each));
        memcpy(each, caps->each, caps->n_each * sizeof *each);
    }
    *out = each;
done:
    return st;
}

static pl_status allocate(const pl_reducer_spec *spec, pl_reducer *self)
{
    pl_status st = PL_OK;
    const size_t n = spec->n_params;
    PL_TRY(pli_calloc(n, sizeof *self->params, "reducer's parameters", &self->params));
    memcpy(self->params, spec->params, n * sizeof *self->params);
    PL_TRY(pli_calloc(n, sizeof *self->slots, "reducer's slots", &self->slots));
    PL_TRY(pli_calloc(n, sizeof *self->buckets, "reducer's buckets", &self->buckets));
    PL_TRY(pli_calloc(n, sizeof *self->backups, "reducer's backups", &self->backups));
    PL_TRY(pl_plan_create(self->params, n, NULL, &spec->caps, &self->plan));
    PL_TRY(pli_deferred_copies_init(self));
    PL_TRY(pli_deferred_copies_make_room(self, self->plan->n_buckets));
done:
    return st;
}

static pl_status check(const pl_reducer_spec *spec, const pl_comm *comm)
{
    if (pl_comm_world_size(comm) > PL_MAX_RANKS &&
        pl_comm_world_size(comm) != spec->world_size)
        return pli_fail(PL_EINVAL,
                        "cannot make a reducer for %d ranks in a world of %d",
                        spec->world_size, pl_comm_world_size(comm));
    if (pl_comm_arena_bytes(comm) < pl_reducer_arena_bytes(spec))
        return pli_fail(
            PL_EINVAL,
            "an arena of %zu bytes is too small for %zu parameters: give %zu",
            pl_comm_arena_bytes(comm), spec->n_params, pl_reducer_arena_bytes(spec));
    if (comm->backend != NULL && comm->host_bytes != pl_reducer_header_bytes(spec))
        return pli_fail(
            PL_EINVAL,
            "the world has %zu bytes of host memory, not the %zu of a reducer's header",
            comm->host_bytes, pl_reducer_header_bytes(spec));
    for (size_t i = 0; i < spec->n_params; i++)
        if (spec->params[i].dtype < PL_F16)
            return pli_fail(PL_EINVAL,
                            "parameter %zu is %s: only floating point has a mean", i,
                            pl_dtype_text(spec->params[i].dtype));
    return PL_OK;
}

pl_status pl_reducer_create(const pl_reducer_spec *spec, pl_comm *comm,
                            pl_backend *backend, pl_reducer **out)
{
    pl_status st = PL_OK;
    pl_reducer *self = NULL;
    size_t *each = NULL;
    PL_TRY(check(spec, comm));
    PL_TRY(pli_calloc(1, sizeof *self, "reducer", &self));
    self->comm = comm;
    self->backend = backend;
    self->spec.n_params = spec->n_params;
    PL_TRY(allocate(spec, self));
    PL_TRY(pli_config_check(&self->check.kind));
    PL_TRY(copy_each_cap(&spec->caps, &each));
    self->spec = *spec;
    self->spec.params = self->params;
    self->spec.caps.each = each;
    self->arena = comm->arena;
    self->at = lay_out_arena(spec);
    pl_reducer_reset_participation(self);
    *out = self;
    self = NULL;
done:
    pl_reducer_destroy(self);
    return st;
}

void pli_reducer_free_backup(pl_reducer *self, backup *saved)
{
    if (saved->memory != NULL && pli_reducer_defers(self))
        self->backend->ops->free(self->backend, saved->memory);
    else
        pli_free(saved->memory);
    *saved = (backup){.memory = NULL};
}

void pl_reducer_destroy(pl_reducer *self)
{
    if (self == NULL)
        return;
    for (size_t i = 0; self->backups != NULL && i < self->spec.n_params; i++)
        pli_reducer_free_backup(self, &self->backups[i]);
    pli_deferred_copies_fini(self);
    pl_plan_destroy(self->plan);
    pli_free(self->params);
    pli_free((void *)self->spec.caps.each);
    pli_free(self->slots);
    pli_free(self->buckets);
    pli_free(self->backups);
    pli_free(self);
}

/* ---- before the first step ------------------------------------------------------ */

/* Steps reduce sizes from the largest bucket down to the smallest parameter, because a
 * late parameter is reduced alone. */
static pli_reduced_range range_of(const pl_reducer *self)
{
    pli_reduced_range range = {.offset_bytes = self->at.buckets};
    for (size_t b = 0; b < self->plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &self->plan->buckets[b];
        const size_t n_bytes = bucket->n_elems * pl_dtype_bytes(bucket->dtype);
        if (n_bytes > range.most_bytes)
            range.most_bytes = n_bytes;
    }
    range.least_bytes = range.most_bytes;
    for (size_t i = 0; i < self->spec.n_params; i++) {
        const pl_param *param = &self->params[i];
        const size_t n_bytes = param->n_elems * pl_dtype_bytes(param->dtype);
        if (n_bytes > 0 && n_bytes < range.least_bytes)
            range.least_bytes = n_bytes;
    }
    return range;
}

pl_status pl_reducer_prepare(pl_reducer *self)
{
    pl_status st = PL_OK;
    pli_order order = {.ready = NULL};
    if (self->comm->device == NULL)
        goto done;
    const pli_reduced_range range = range_of(self);
    PL_TRY(pli_reducer_record_side(self, self->stream, &order.ready));
    PL_TRY(self->comm->device->prepare(self->comm, &range, &order));
done:
    return st;
}

/* ---- a step begins -------------------------------------------------------------- */

/* Counts what each bucket waits for, and puts all in BUCKET_FILLING. */
static void arm_buckets(pl_reducer *self)
{
    self->n_posted = 0;
    for (size_t b = 0; b < self->plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &self->plan->buckets[b];
        uint32_t n_pending = 0;
        uint32_t n_unexpected = 0;
        for (size_t m = 0; m < bucket->n_params; m++) {
            n_pending += self->slots[bucket->params[m]].n_expected > 0;
            n_unexpected += self->slots[bucket->params[m]].n_expected == 0;
        }
        self->buckets[b] = (bucket_state){.phase = BUCKET_FILLING,
                                          .n_pending = n_pending + (n_unexpected > 0)};
    }
}

/* The order that the root saw; it is in the arena since the first step. */
static const uint32_t *learned_order(const pl_reducer *self)
{
    return (const uint32_t *)(const void *)(self->arena + self->at.order);
}

/* Adopts a new plan with this order and these caps. */
static pl_status lay_out(pl_reducer *self, const uint32_t *order,
                         const pl_plan_caps *caps)
{
    pl_status st = PL_OK;
    pl_plan *plan = NULL;
    PL_TRY(pl_plan_create(self->params, self->spec.n_params, order, caps, &plan));
    PL_TRY(pli_deferred_copies_make_room(self, plan->n_buckets));
    pl_plan_destroy(self->plan);
    self->plan = plan;
    plan = NULL;
    self->generation++;
done:
    pl_plan_destroy(plan);
    return st;
}

pl_status pl_reducer_set_comm_hook(pl_reducer *self, const pl_comm_hook *hook,
                                   const pl_plan_caps *caps)
{
    pl_status st = PL_OK;
    size_t *each = NULL;
    const uint32_t *order =
        self->learning == LEARNING_DONE ? learned_order(self) : NULL;
    if (self->phase != REDUCER_IDLE)
        PL_FAIL(PL_ESTATE, "cannot set a communication hook during a step, or after a "
                           "failed one: set it after the next step");
    PL_TRY(copy_each_cap(caps, &each));
    PL_TRY(lay_out(self, order, caps));
    pli_free((void *)self->spec.caps.each);
    self->spec.caps = *caps;
    self->spec.caps.each = each;
    each = NULL;
    self->comm_hook = *hook;
done:
    pli_free(each);
    return st;
}

pl_status pl_reducer_begin(pl_reducer *self)
{
    pl_status st = PL_OK;
    rank_flags *mine = flags_of(self, pl_comm_rank(self->comm));
    if (self->phase == REDUCER_FAILED)
        PL_FAIL(PL_EPEER,
                "rank %d: a step has failed, and no forward has met the other ranks "
                "since: run one through the wrapper before this backward",
                pl_comm_rank(self->comm));
    if (self->phase != REDUCER_IDLE)
        PL_FAIL(PL_ESTATE, "cannot begin a step while another is under way");
    PL_TRY(pl_reducer_notice_failure(self));
    if (self->learning == LEARNING_ORDER_KNOWN) { /* the second step, on every rank */
        PL_TRY(lay_out(self, learned_order(self), &self->spec.caps));
        self->learning = LEARNING_DONE;
    }
    for (size_t i = 0; i < self->spec.n_params; i++)
        self->slots[i].n_ready = 0;
    pli_deferred_copies_begin(self);
    self->n_ready = 0;
    self->n_ready_params = 0;
    self->is_ordered = 0;
    memset(used_of(self), 0, n_flag_bytes(self));
    mine->role = PL_ACTIVE;
    memcpy(mine->check, &self->check.crc, sizeof mine->check);
    self->root = pl_reducer_next_root(self);
    arm_buckets(self);
    self->step++;
    self->phase = REDUCER_FILLING;
    pli_comm_record_activity(self->comm, PL_BACKWARD, self->step);
    pli_recorder_plan(self->comm->recorder, self->plan->n_buckets, self->plan->n_bytes);
done:
    return st;
}

/* ---- queries -------------------------------------------------------------------- */

void pl_reducer_reset_participation(pl_reducer *self)
{
    self->participation = (pl_participation){
        .n_active = pl_comm_world_size(self->comm), .last_joining = -1, .gives_up = -1};
}
