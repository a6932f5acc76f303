/* device.c - operations on a device's memory, in program order on its side stream. */
#include "device.h"

#include <string.h>
#include <unistd.h>

#include "../backend/cuda.h"
#include "../core/alloc.h"
#include "../core/clock.h"
#include "device_state.h"

enum { FLUSH_MS = 500 }; /* that destroy waits for NCCL to hand over what is sent */

static pli_device *device_of(pl_comm *comm)
{
    return (pli_device *)(void *)comm;
}

/* ---- operations ------------------------------------------------------------------ */

static int is_of_host(const pli_device *self, const pl_op *op)
{
    return op->kind == PL_BARRIER || op->offset_bytes < self->super.host_bytes;
}

/* One word that tells every list of device operations from every other. */
static uint32_t hash_with(uint32_t hash, const pl_op *op)
{
    uint64_t mixed = (uint64_t)hash << 32 | (uint64_t)op->kind << 28 |
                     (uint64_t)op->reduction << 24 | (uint64_t)op->dtype << 16 |
                     (uint64_t)(uint16_t)op->root;
    mixed = (mixed ^ op->offset_bytes) * UINT64_C(0x9e3779b97f4a7c15);
    mixed = (mixed ^ mixed >> 29 ^ op->n_elems) * UINT64_C(0xbf58476d1ce4e5b9);
    return (uint32_t)(mixed >> 32);
}

static pl_status issue_on_host(pli_device *self, const pl_op *op, pl_ticket *out)
{
    pl_status st = PL_OK;
    pl_op marked = *op;
    pl_ticket ticket = 0;
    const size_t n_bytes = op->n_elems * pl_dtype_bytes(op->dtype);
    if (op->kind != PL_BARRIER && n_bytes > self->super.host_bytes - op->offset_bytes)
        PL_FAIL(PL_EINVAL,
                "%zu bytes at byte %zu are partly on the host, partly on the device",
                n_bytes, op->offset_bytes);
    /* The base compares what ranks issue; so it does this for NCCL, which cannot. */
    if (op->kind != PL_REDUCE && op->kind != PL_BROADCAST &&
        !pli_comm_is_relayed(self->base))
        marked.root = (int)(self->hash & INT32_MAX);
    PL_TRY(pli_device_after(self, pl_comm_issue(self->base, &marked, &ticket)));
    (void)pthread_mutex_lock(&self->lock);
    self->base_ticket = ticket;
    self->n_at_ticket = self->follow.n_noted;
    (void)pthread_mutex_unlock(&self->lock);
    *out = ticket;
done:
    return st;
}

static pl_status carry(pli_device *self, const pl_op *op)
{
    char *memory = pli_comm_memory(&self->super, op->offset_bytes);
    const int is_short = op->dtype == PL_F16 || op->dtype == PL_BF16;
    if (self->super.world_size == 1)
        return PL_OK; /* its own sum, its own mean */
    if (self->accumulation == PLI_ACCUMULATE_IN_F32 && is_short &&
        op->kind == PL_ALL_REDUCE)
        return pli_device_sum(self, op, memory);
    return pli_nccl_enqueue(self->nccl, op, memory, self->side);
}

/* Records what follows the operation by. */
static pl_status note_op(pli_device *self, const pl_op *op)
{
    pl_status st = PL_OK;
    int is_captured = 0;
    PL_TRY(pli_cuda_is_capturing(self->backend, self->side, &is_captured));
    if (is_captured) {
        pli_nccl_note_captured(self->nccl);
        atomic_store(&self->is_captured, 1);
        PL_TRY(self->backend->ops->event_record(self->backend, self->captured,
                                                self->side));
        self->last = self->captured;
    } else {
        PL_TRY(pli_follow_note(&self->follow, op, atomic_load(&self->step), self->side,
                               &self->last));
    }
done:
    return st;
}

static pl_status enqueue(pli_device *self, const pl_op *op, const pli_order *order)
{
    pl_status st = PL_OK;
    const pl_backend_ops *backend = self->backend->ops;
    if (order->ready != NULL)
        PL_TRY(backend->event_wait(self->backend, order->ready, self->side));
    PL_TRY(carry(self, op));
    PL_TRY(note_op(self, op));
    if (order->done != NULL)
        PL_TRY(backend->event_record(self->backend, order->done, self->side));
done:
    return st;
}

static pl_status device_issue(pl_comm *comm, const pl_op *op, const pli_order *order,
                              pl_ticket *out)
{
    pl_status st = PL_OK;
    pli_device *self = device_of(comm);
    PL_TRY(pli_device_check(self));
    if (is_of_host(self, op)) {
        PL_TRY(issue_on_host(self, op, out));
        goto done;
    }
    PL_TRY(pli_nccl_can(op));
    st = enqueue(self, op, order);
    if (st != PL_OK) {
        pli_device_fail(self, self->generation, st);
        PL_TRY(pli_device_check(self));
    }
    self->hash = hash_with(self->hash, op);
    *out = self->base_ticket;
done:
    return st;
}

/* ---- waiting --------------------------------------------------------------------- */

static void device_work(pl_comm *comm)
{
    const pli_device *self = device_of(comm);
    self->base->ops->work(self->base);
}

static pl_status device_progress(pl_comm *comm)
{
    pl_status st = PL_OK;
    pli_device *self = device_of(comm);
    PL_TRY(pli_device_check(self));
    PL_TRY(pli_device_after(self, pl_comm_progress(self->base)));
done:
    return st;
}

static pl_status device_look(pl_comm *comm)
{
    pl_status st = PL_OK;
    pli_device *self = device_of(comm);
    PL_TRY(pli_device_check(self));
    PL_TRY(pli_device_after(self, pli_comm_look(self->base)));
done:
    return st;
}

static pl_status device_survey(pl_comm *comm, pli_survey what)
{
    return pli_comm_survey(device_of(comm)->base, what);
}

/* Where every rank has done its part of the step's words the step is over, on all
 * ranks, though one may have failed in the next by now. */
static pl_status device_wait(pl_comm *comm, pl_ticket ticket, int64_t slice_ns)
{
    pl_status st = PL_OK;
    pli_device *self = device_of(comm);
    PL_TRY(pli_device_after(self, pl_comm_wait(self->base, ticket, slice_ns)));
    (void)pthread_mutex_lock(&self->lock);
    if (ticket == self->base_ticket)
        pli_device_agreed_locked(self);
    (void)pthread_mutex_unlock(&self->lock);
done:
    return st;
}

static pl_status device_order(pl_comm *comm, pl_stream *stream)
{
    pl_status st = PL_OK;
    pli_device *self = device_of(comm);
    int is_captured = 0;
    PL_TRY(pli_device_check_means(self));
    if (self->last == NULL)
        goto done;
    /* What is captured waits for what is captured, and nothing else for that. */
    PL_TRY(pli_cuda_is_capturing(self->backend, stream, &is_captured));
    if ((is_captured != 0) == (self->last == self->captured))
        PL_TRY(self->backend->ops->event_wait(self->backend, self->last, stream));
done:
    return st;
}

/* ---- words and memory ------------------------------------------------------------ */

static void device_abort(pl_comm *comm, const char *words)
{
    pli_device *self = device_of(comm);
    if (self->owner_pid != getpid())
        return;
    pl_comm_abort(self->base, words);
    (void)pthread_mutex_lock(&self->lock);
    const uint64_t generation = self->generation;
    (void)pthread_mutex_unlock(&self->lock);
    pli_device_fail(self, generation, PL_OK);
}

static void device_note(pl_comm *comm, pl_activity activity, uint64_t step)
{
    pli_device *self = device_of(comm);
    atomic_store_explicit(&self->step, step, memory_order_relaxed);
    pli_comm_note(self->base, activity, step);
}

static void device_last_words(pl_comm *comm, const char *words)
{
    pli_comm_last_words(device_of(comm)->base, words);
}

static void *device_arena(pl_comm *comm)
{
    return pli_comm_arena(device_of(comm)->base);
}

static void *device_memory(pl_comm *comm, size_t offset_bytes)
{
    pli_device *self = device_of(comm);
    if (offset_bytes < comm->host_bytes)
        return pli_comm_memory(self->base, offset_bytes);
    return (char *)self->block->memory.address + (offset_bytes - comm->host_bytes);
}

static pli_hold *device_hold_memory(pl_comm *comm)
{
    return pli_block_hold(device_of(comm)->block);
}

static pl_status device_renew(pl_comm *comm)
{
    pl_status st = PL_OK;
    pli_device *self = device_of(comm);
    pli_block *fresh = NULL;
    PL_TRY(pli_device_check(self));
    PL_TRY(pli_pool_take(self->pool, &fresh));
    if (self->is_registered && fresh->handle == NULL) {
        fresh->handle = pli_nccl_register(self->nccl, &fresh->memory);
        if (fresh->handle == NULL) { /* all ranks' memory is, or none's */
            pli_pool_discard(self->pool, fresh);
            PL_FAIL(PL_ENOMEM,
                    "rank %d: NCCL cannot register %zu bytes more for gradients",
                    comm->rank, comm->arena_bytes - comm->host_bytes);
        }
    }
    pli_block *old = self->block;
    self->block = fresh;
    old->hold.release(&old->hold);
    pli_pool_trim(self->pool, self->nccl);
done:
    return st;
}

/* ---- life ------------------------------------------------------------------------ */

static void device_leave(pl_comm *comm)
{
    pl_comm_leave(device_of(comm)->base);
}

/* Where all is well: what the device was given, and the peers need, is done first. */
static void end_well(pli_device *self)
{
    pli_followed oldest = {.n = 0};
    if (atomic_load(&self->phase) == PLI_DEVICE_RUNNING && pli_device_drain(self) &&
        pli_follow_oldest(&self->follow, &oldest) == PL_OK && oldest.n == 0) {
        pli_nccl_deregister(self->nccl, self->staging_handle);
        pli_pool_deregister(self->pool, self->nccl);
        pli_nccl_finish(self->nccl, FLUSH_MS * PLI_MS);
    }
}

/* All but the base. */
static void tear_down(pli_device *self)
{
    if (self->watchdog != NULL)
        pli_watchdog_leave(self->watchdog, self);
    pli_nccl_destroy(self->nccl);
    if (self->staging.address != NULL)
        pli_nccl_free(self->library, self->backend, &self->staging);
    if (self->pool != NULL)
        pli_pool_deregister(self->pool, NULL);
    pli_follow_fini(&self->follow);
    self->backend->ops->event_destroy(self->backend, self->captured);
    self->backend->ops->event_destroy(self->backend, self->drained);
    if (self->block != NULL)
        self->block->hold.release(&self->block->hold);
    pli_pool_close(self->pool);
    pli_nccl_library_release(self->library);
    pli_backend_destroy(self->backend);
    (void)pthread_mutex_destroy(&self->lock);
    pli_free(self);
}

static void device_destroy(pl_comm *comm)
{
    pli_device *self = device_of(comm);
    pl_comm *base = self->base;
    /* In a forked child the device and all threads are the parent's. */
    if (self->owner_pid == getpid()) {
        end_well(self);
        tear_down(self);
    }
    pl_comm_destroy(base);
}

static const pl_comm_ops device_ops = {
    .name = "device",
    .issue = device_issue,
    .work = device_work,
    .progress = device_progress,
    .look = device_look,
    .survey = device_survey,
    .wait = device_wait,
    .recover = pli_device_recover,
    .abort = device_abort,
    .note = device_note,
    .last_words = device_last_words,
    .arena = device_arena,
    .memory = device_memory,
    .order = device_order,
    .hold_memory = device_hold_memory,
    .renew = device_renew,
    .leave = device_leave,
    .destroy = device_destroy,
};

static pl_status check_options(const pli_device_options *options)
{
    pl_status st = PL_OK;
    const size_t room = pl_comm_arena_bytes(options->base);
    if (options->host_bytes % PL_CACHE_LINE != 0 || room < PLI_DEVICE_WORDS_BYTES ||
        options->host_bytes > room - PLI_DEVICE_WORDS_BYTES)
        PL_FAIL(PL_EINVAL,
                "a device world's words are %zu bytes, and its base has room for %zu: "
                "give whole cache lines, and %d bytes more to the base",
                options->host_bytes, room, PLI_DEVICE_WORDS_BYTES);
done:
    return st;
}

/* Makes what a rank has for itself. */
static pl_status furnish(pli_device *self, const pli_device_options *options)
{
    pl_status st = PL_OK;
    const int is_alone = self->super.world_size == 1;
    if (self->library == NULL && !is_alone)
        PL_FAIL(PL_EUNSUPPORTED, "a world of several GPUs needs NCCL");
    PL_TRY(pli_follow_init(&self->follow, self->backend, options->n_ops));
    PL_TRY(self->backend->ops->event_create(self->backend, &self->captured));
    PL_TRY(self->backend->ops->event_create(self->backend, &self->drained));
    PL_TRY(pli_pool_create(self->library, self->backend, options->device_bytes,
                           &self->pool));
    PL_TRY(pli_pool_take(self->pool, &self->block));
    if (self->accumulation == PLI_ACCUMULATE_IN_F32 && !is_alone)
        PL_TRY(pli_nccl_alloc(
            self->library, self->backend,
            pli_device_staging_bytes(self->super.world_size, options->device_bytes),
            &self->staging));
    if (options->watchdog != NULL)
        PL_TRY(pli_watchdog_join(options->watchdog, pli_device_watch, self));
    self->watchdog = options->watchdog;
done:
    return st;
}

static pl_comm super_of(const pli_device_options *options)
{
    return (pl_comm){.ops = &device_ops,
                     .rank = pl_comm_rank(options->base),
                     .world_size = pl_comm_world_size(options->base),
                     .arena_bytes = options->host_bytes + options->device_bytes,
                     .host_bytes = options->host_bytes,
                     .backend = options->backend,
                     .chunk_bytes = SIZE_MAX,
                     .is_relayed = pli_comm_is_relayed(options->base)};
}

static pl_status make(const pli_device_options *options, pli_device **out)
{
    pl_status st = PL_OK;
    pli_device *self = NULL;
    PL_TRY(pli_calloc(1, sizeof *self, "a world on a device", &self));
    self->super = super_of(options);
    self->base = options->base;
    self->backend = options->backend;
    pli_cuda_backend_hold(self->backend);
    self->side = pli_cuda_side_stream(self->backend);
    self->library = self->super.world_size > 1 ? options->nccl : NULL;
    if (self->library != NULL)
        pli_nccl_library_hold(self->library);
    self->deadline_ns = options->deadline_ns;
    self->accumulation = options->accumulation;
    self->is_interrupted = options->is_interrupted;
    self->context = options->context;
    self->owner_pid = getpid();
    (void)pthread_mutex_init(&self->lock, NULL); /* cannot fail on Linux */
    *out = self;
done:
    return st;
}

/* The others are told even by a rank that has come to nothing. */
static pl_status give_up(const pli_device_options *options, pl_status st)
{
    pli_device nothing = {.super = super_of(options),
                          .base = options->base,
                          .accumulation = options->accumulation};
    return pli_device_agree(&nothing, st);
}

pl_status pli_device_create(const pli_device_options *options, pl_comm **out)
{
    pl_status st = PL_OK;
    pli_device *self = NULL;
    PL_TRY(check_options(options)); /* the same on every rank */
    st = make(options, &self);
    if (self == NULL)
        return give_up(options, st);
    PL_TRY(pli_device_agree(self, furnish(self, options)));
    PL_TRY(pli_device_meet(self));
    *out = &self->super;
    self = NULL;
done:
    if (self != NULL)
        tear_down(self);
    return st;
}
