/* reducer_finish.c - ends a step: posts the remaining buckets, reduces late gradients,
 * checks that all ranks got the same means, and learns the next plan; or fails the
 * step. */
#include <stdio.h>
#include <string.h>

#include "comm/hierarchy.h"
#include "core/alloc.h"
#include "core/crc32c.h"
#include "reducer_state.h"

enum {
    N_SAMPLES = 16, /* of the means: each step checks one */
    SAMPLE_LEAST_BYTES = 1 << 16
};

pl_status pl_reducer_mark_unused(pl_reducer *self, size_t param, const void *data,
                                 pl_write_mode mode, pl_use use)
{
    pl_status st = PL_OK;
    const size_t b = self->plan->slots[param].bucket;
    pl_ready_result result;
    if (self->phase != REDUCER_FILLING || self->buckets[b].phase == BUCKET_POSTED)
        PL_FAIL(PL_ESTATE,
                "cannot mark parameter %zu unused after its bucket was posted", param);
    if (pli_reducer_defers(self)) {
        PL_TRY(pli_reducer_defer(self, param, data, mode, self->stream, &result));
    } else if (mode != PL_IN_PLACE) {
        const pl_move move = slot_move(self, param, data);
        PL_TRY(self->backend->ops->copy(self->backend, &move, 1, self->stream));
    }
    if (use == PL_USED)
        used_of(self)[param] = USED_DENSE;
done:
    return st;
}

typedef enum issue_place { ISSUE_LAST, ISSUE_FOLLOWED } issue_place;

static pl_status broadcast_bytes(pl_reducer *self, size_t offset_bytes, size_t n_bytes,
                                 pl_event *ready, issue_place place)
{
    const pli_order order = {.ready = ready};
    const pl_op op = {.kind = PL_BROADCAST,
                      .dtype = PL_U8,
                      .root = self->root,
                      .offset_bytes = offset_bytes,
                      .n_elems = n_bytes,
                      .is_followed = place == ISSUE_FOLLOWED,
                      .ends_step =
                          place == ISSUE_LAST && self->phase == REDUCER_FILLING};
    return pli_comm_issue_ordered(self->comm, &op, &order, &self->last_ticket);
}

static pl_status issue_flags(pl_reducer *self, issue_place place)
{
    const pl_op op = {.kind = PL_ALL_REDUCE,
                      .reduction = PL_MAX,
                      .dtype = PL_U8,
                      .n_elems = n_flag_bytes(self),
                      .is_followed = place == ISSUE_FOLLOWED,
                      .ends_step = 1};
    return pl_comm_issue(self->comm, &op, &self->last_ticket);
}

/* Issues `extra`, before the header's operations: when those are all done, every rank
 * has also enqueued its part of the step on its device. */
static pl_status issue_extra(pl_reducer *self, issue_place place)
{
    pl_status st = PL_OK;
    pl_event *ready = NULL;
    if (self->spec.extra_bytes == 0)
        goto done;
    PL_TRY(pli_reducer_record_side(self, self->stream, &ready));
    PL_TRY(broadcast_bytes(self, self->at.extra, self->spec.extra_bytes, ready, place));
done:
    return st;
}

pl_status pl_reducer_send_extra(pl_reducer *self, pl_ticket *out)
{
    pl_status st = PL_OK;
    if (self->phase != REDUCER_IDLE)
        PL_FAIL(PL_ESTATE, "cannot send extra in a step, or after one that failed");
    self->root = pl_reducer_next_root(self);
    PL_TRY(issue_extra(self, ISSUE_LAST));
    *out = self->last_ticket;
done:
    return st;
}

/* Writes the parameters in the order in which they last got ready, then those that did
 * not.  The root's order becomes every rank's plan. */
static pl_status write_order(pl_reducer *self)
{
    pl_status st = PL_OK;
    const size_t n = self->spec.n_params;
    uint32_t *order = (uint32_t *)(void *)(self->arena + self->at.order);
    uint32_t *param_at = NULL;
    size_t n_written = 0;
    PL_TRY(pli_calloc(self->n_ready, sizeof *param_at, "order", &param_at));
    for (size_t i = 0; i < n; i++)
        if (self->slots[i].n_ready > 0)
            param_at[self->slots[i].ready_at] = (uint32_t)i + 1;
    for (size_t f = 0; f < self->n_ready; f++)
        if (param_at[f] != 0)
            order[n_written++] = param_at[f] - 1;
    for (size_t i = n; i-- > 0;)
        if (self->slots[i].n_ready == 0)
            order[n_written++] = (uint32_t)i;
done:
    pli_free(param_at);
    return st;
}

static pl_status close_step(pl_reducer *self)
{
    pl_status st = PL_OK;
    for (size_t b = self->n_posted; b < self->plan->n_buckets; b++)
        if (self->buckets[b].phase == BUCKET_FILLING)
            pli_reducer_bucket_is_ready(self, b);
    PL_TRY(pli_reducer_post_ready(self, self->stream));
    PL_TRY(issue_extra(self, ISSUE_FOLLOWED));
    const int sends_order = self->learning == LEARNING_NOTHING;
    PL_TRY(issue_flags(self, sends_order ? ISSUE_FOLLOWED : ISSUE_LAST));
    if (sends_order) {
        PL_TRY(write_order(self));
        PL_TRY(broadcast_bytes(self, self->at.order,
                               self->spec.n_params * sizeof(uint32_t), NULL,
                               ISSUE_LAST));
    }
done:
    return st;
}

static pl_status close_second(pl_reducer *self)
{
    pl_status st = PL_OK;
    pli_order order = {.ready = NULL};
    PL_TRY(pli_reducer_record_side(self, self->stream, &order.ready));
    for (size_t i = 0; i < self->spec.n_params; i++) {
        if (!pl_reducer_is_late(self, i))
            continue;
        const pl_op op = {.kind = PL_ALL_REDUCE,
                          .reduction = PL_MEAN,
                          .dtype = self->params[i].dtype,
                          .offset_bytes = pl_reducer_slot_offset(self, i),
                          .n_elems = self->params[i].n_elems,
                          .ends_step = 1};
        PL_TRY(pli_comm_issue_ordered(self->comm, &op, &order, &self->last_ticket));
    }
    if (self->comm->backend != NULL) { /* see issue_extra() */
        const pl_op barrier = {.kind = PL_BARRIER};
        PL_TRY(pl_comm_issue(self->comm, &barrier, &self->last_ticket));
    }
done:
    return st;
}

static int is_active_rank(const pl_reducer *self)
{
    return flags_of(self, pl_comm_rank(self->comm))->role == PL_ACTIVE;
}

pl_status pl_reducer_close(pl_reducer *self)
{
    pl_status st = PL_OK;
    /* Read first: once the flags are issued, another rank may write them. */
    const int is_active = is_active_rank(self);
    if (self->phase == REDUCER_FILLING) {
        PL_TRY(close_step(self));
        self->phase = REDUCER_WAITING;
    } else if (self->phase == REDUCER_FILLING_AGAIN) {
        PL_TRY(close_second(self));
        self->phase = REDUCER_WAITING_AGAIN;
    } else {
        PL_FAIL(PL_ESTATE, "cannot close a step that is not open");
    }
    self->is_ordered = 0;
    pli_comm_record_activity(self->comm, is_active ? PL_FINISHING : PL_JOINED,
                             self->step);
done:
    return st;
}

/* Makes the stream wait for all that was issued. */
static pl_status order(pl_reducer *self)
{
    pl_status st = PL_OK;
    if (!self->is_ordered)
        PL_TRY(pli_comm_order(self->comm, self->stream));
    self->is_ordered = 1;
done:
    return st;
}

pl_status pl_reducer_order(pl_reducer *self)
{
    if (self->phase != REDUCER_REDUCED)
        return pli_fail(PL_ESTATE,
                        "cannot order a stream after means that are not in place");
    return order(self);
}

/* ---- the same means ------------------------------------------------------------- */

/* After each step a rank computes a checksum of means that it got, and sends it with
 * the flags of the next step.  The ranks count the steps that they took together, and
 * each step checks a sample of the means: 1/16 of them and at least 64 KiB, so that
 * this costs less than 1 % of an exchange; or all of them.  Ranks with other bits have
 * other weights from then on, so no further step can be taken.
 *
 * A world of one host has no network.  Over a process group, sums are the group's. */
static int is_checked(const pl_reducer *self)
{
    const pl_comm *comm = self->comm;
    const int is_between_hosts = comm->host == NULL && !comm->is_group_comm;
    return comm->world_size > 1 && comm->backend == NULL &&
           self->comm_hook.post == NULL &&
           (self->check.kind == PLI_CHECK_ALL ||
            (self->check.kind == PLI_CHECK_ROTATE && is_between_hosts));
}

/* Computes the checksum of means that are in place, for the next flags. */
static void sum_means(pl_reducer *self)
{
    means_check *check = &self->check;
    const size_t n_all = self->plan->n_bytes;
    size_t n_sample = n_all / N_SAMPLES + PL_CACHE_LINE;
    if (n_sample < SAMPLE_LEAST_BYTES)
        n_sample = SAMPLE_LEAST_BYTES;
    if (check->kind == PLI_CHECK_ALL)
        n_sample = n_all;
    check->crc = 0;
    check->step = self->step;
    if (!is_checked(self) || n_all == 0)
        return;
    const size_t n_samples = (n_all + n_sample - 1) / n_sample;
    const size_t begin = check->n_steps++ % n_samples * n_sample;
    for (size_t b = 0; b < self->plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &self->plan->buckets[b];
        size_t from = bucket->offset_bytes;
        size_t end = from + bucket->n_elems * pl_dtype_bytes(bucket->dtype);
        from = from > begin ? from : begin;
        end = end < begin + n_sample ? end : begin + n_sample;
        if (end <= from)
            continue;
        check->first_bucket = check->crc == 0 ? b : check->first_bucket;
        check->last_bucket = b;
        check->crc =
            pli_crc32c(check->crc, self->arena + self->at.buckets + from, end - from);
        check->crc += check->crc == 0; /* 0: a rank has none */
    }
}

/* PL_EMISMATCH, on every rank, if the ranks have sent different checksums. */
static pl_status compare_means(pl_reducer *self)
{
    pl_status st = PL_OK;
    int first = 0;
    uint32_t first_crc = 0;
    for (int r = 0; r < pl_comm_world_size(self->comm); r++) {
        uint32_t crc;
        memcpy(&crc, flags_of(self, r)->check, sizeof crc);
        if (first_crc == 0) {
            first = r;
            first_crc = crc;
        }
        if (crc == 0 || crc == first_crc)
            continue;
        self->check.has_failed = 1;
        PL_FAIL(PL_EMISMATCH,
                "rank %d: rank %d (host %d) and rank %d (host %d) got different means "
                "at the end of step %llu, in buckets %zu to %zu of %zu, so their "
                "weights differ: look for errors of memory and network on these "
                "hosts, load a checkpoint, and wrap the model anew on every rank",
                pl_comm_rank(self->comm), r, pli_hierarchy_host_of(self->comm, r),
                first, pli_hierarchy_host_of(self->comm, first),
                (unsigned long long)self->check.step, self->check.first_bucket + 1,
                self->check.last_bucket + 1, self->plan->n_buckets);
    }
done:
    return st;
}

/* ---- the second all-reduce ------------------------------------------------------ */

/* Saves the first mean from the second all-reduce. */
static pl_status back_up(pl_reducer *self, size_t param)
{
    pl_status st = PL_OK;
    backup *saved = &self->backups[param];
    const size_t n_bytes =
        self->params[param].n_elems * pl_dtype_bytes(self->params[param].dtype);
    if (saved->memory == NULL && pli_reducer_defers(self))
        PL_TRY(self->backend->ops->alloc(self->backend, n_bytes, &saved->memory));
    else if (saved->memory == NULL)
        PL_TRY(pli_calloc(n_bytes, 1, "a first mean", &saved->memory));
    pl_move move = slot_move(self, param, NULL);
    move.from = move.to;
    move.to = saved->memory;
    PL_TRY(self->backend->ops->copy(self->backend, &move, 1, self->stream));
    saved->is_taken = 1;
done:
    return st;
}

/* Adds each second mean to the first. */
static pl_status merge_backups(pl_reducer *self)
{
    pl_status st = PL_OK;
    PL_TRY(order(self));
    for (size_t i = 0; i < self->spec.n_params; i++) {
        backup *saved = &self->backups[i];
        if (!saved->is_taken)
            continue;
        const pl_move move = slot_move(self, i, saved->memory);
        PL_TRY(self->backend->ops->add(self->backend, &move, 1, self->stream));
        saved->is_taken = 0;
        if (!pli_reducer_defers(self))
            pli_reducer_free_backup(self, saved);
    }
done:
    return st;
}

/* ---- the end -------------------------------------------------------------------- */

/* Reads the roles that the ranks have sent. */
static void read_participation(pl_reducer *self)
{
    pl_participation found = {.first_active = -1, .last_joining = -1, .gives_up = -1};
    for (int r = pl_comm_world_size(self->comm); r-- > 0;) {
        const unsigned char role = flags_of(self, r)->role;
        if (role == PL_ACTIVE) {
            found.n_active++;
            found.first_active = r;
        } else if (role == PL_JOINING && found.last_joining < 0) {
            found.last_joining = r;
        } else if (role == PL_GIVES_UP) {
            found.gives_up = r;
        }
    }
    self->participation = found;
}

pl_status pl_reducer_wait(pl_reducer *self, int64_t slice_ns)
{
    pl_status st = PL_OK;
    if (self->phase != REDUCER_WAITING && self->phase != REDUCER_WAITING_AGAIN)
        PL_FAIL(PL_ESTATE, "cannot wait for a step that is not closed");
    PL_TRY(pl_comm_wait(self->comm, self->last_ticket, slice_ns));
    pli_recorder_reduced(self->comm->recorder);
    if (self->phase == REDUCER_WAITING_AGAIN) {
        PL_TRY(merge_backups(self));
        memset(late_of(self), 0, self->spec.n_params);
    } else {
        read_participation(self);
        if (self->participation.gives_up >= 0)
            PL_FAIL(
                PL_EPEER,
                "rank %d: the step of rank %d failed (step %llu), so this one cannot "
                "be finished: rank %d has the cause",
                pl_comm_rank(self->comm), self->participation.gives_up,
                (unsigned long long)self->step, self->participation.gives_up);
        PL_TRY(compare_means(self));
        sum_means(self);
    }
    self->phase = REDUCER_REDUCED;
done:
    return st;
}

pl_status pl_reducer_write_late(pl_reducer *self, size_t param, const void *data,
                                pl_write_mode mode)
{
    pl_status st = PL_OK;
    if ((self->phase != REDUCER_REDUCED && self->phase != REDUCER_FILLING_AGAIN) ||
        !pl_reducer_is_late(self, param))
        PL_FAIL(PL_ESTATE, "parameter %zu is written again but is not late", param);
    PL_TRY(order(self));
    if (mode == PL_ADD && !self->backups[param].is_taken)
        PL_TRY(back_up(self, param));
    PL_TRY(pli_reducer_copy_late(self, param, data));
    self->phase = REDUCER_FILLING_AGAIN;
done:
    return st;
}

static pl_status end_step(pl_reducer *self)
{
    pl_status st = PL_OK;
    if (self->phase != REDUCER_REDUCED)
        PL_FAIL(PL_ESTATE, "cannot end a step whose means are not in place");
    if (pl_reducer_n_late(self) > 0)
        PL_FAIL(PL_ESTATE,
                "cannot end a step whose late gradients got no second all-reduce");
    /* Learn nothing from a step without gradients. */
    for (size_t i = 0; is_active_rank(self) && i < self->spec.n_params; i++)
        self->slots[i].n_expected = self->slots[i].n_ready;
    if (self->learning == LEARNING_NOTHING && pl_reducer_root_is_active(self))
        self->learning = LEARNING_ORDER_KNOWN;
    self->phase = REDUCER_IDLE;
    pli_comm_record_activity(self->comm, PL_IDLE, self->step);
done:
    return st;
}

pl_status pl_reducer_end(pl_reducer *self)
{
    const pl_status st = end_step(self);
    self->n_taken += st == PL_OK;
    return st;
}

void pl_reducer_discard(pl_reducer *self)
{
    memset(late_of(self), 0, self->spec.n_params);
    if (end_step(self) != PL_OK)
        pl_reducer_fail(self, NULL);
}

pl_status pl_reducer_notice_failure(pl_reducer *self)
{
    const pl_status st = pl_comm_progress(self->comm);
    if (st != PL_OK && self->phase == REDUCER_IDLE)
        self->phase = REDUCER_FAILED;
    return st;
}

/* ---- ranks without gradients ---------------------------------------------------- */

/* Each rank has a byte of the flags for its role in the step, and the all-reduce of
 * the flags shows all roles to all ranks.  They are known only at the step's end, but
 * the broadcasts of the step need their root before: so the root is the lowest rank
 * that was active in the step before.  If the root takes its first shadow step itself,
 * its values are out of date, and every rank ignores them; the next step has a
 * different root. */
pl_status pl_reducer_shadow_step(pl_reducer *self, pl_role role)
{
    pl_status st = PL_OK;
    if (self->n_ready > 0)
        PL_FAIL(PL_ESTATE, "a shadow step cannot have gradients");
    for (size_t i = 0; i < self->spec.n_params; i++)
        PL_TRY(pl_reducer_mark_unused(self, i, NULL, PL_REPLACE, PL_UNUSED));
    flags_of(self, pl_comm_rank(self->comm))->role = (unsigned char)role;
done:
    return st;
}

static int is_rescaled(const pl_reducer *self)
{
    const int n_active = self->participation.n_active;
    return n_active != pl_comm_world_size(self->comm) && n_active != 0;
}

pl_status pl_reducer_rescale_mean(pl_reducer *self, const pl_move *mean)
{
    if (!is_rescaled(self))
        return PL_OK;
    return self->backend->ops->scale(self->backend, mean, 1, self->comm->world_size,
                                     self->participation.n_active, self->stream);
}

/* Rescales all means by one launch. */
static pl_status rescale_together(pl_reducer *self)
{
    pl_move *means = self->deferred.batch;
    size_t n = 0;
    for (size_t i = 0; i < self->spec.n_params; i++)
        if (pl_reducer_is_used(self, i) && self->params[i].n_elems > 0)
            means[n++] = slot_move(self, i, NULL);
    return n > 0 ? self->backend->ops->scale(self->backend, means, n,
                                             self->comm->world_size,
                                             self->participation.n_active, self->stream)
                 : PL_OK;
}

pl_status pl_reducer_rescale(pl_reducer *self)
{
    pl_status st = PL_OK;
    if (self->phase != REDUCER_REDUCED)
        PL_FAIL(PL_ESTATE, "cannot rescale means that are not in place");
    if (!is_rescaled(self))
        goto done;
    if (pli_reducer_defers(self)) {
        PL_TRY(pl_reducer_order(self));
        PL_TRY(rescale_together(self));
        goto done;
    }
    for (size_t i = 0; i < self->spec.n_params; i++) {
        const pl_move mean = slot_move(self, i, NULL);
        if (pl_reducer_is_used(self, i))
            PL_TRY(pl_reducer_rescale_mean(self, &mean));
    }
done:
    return st;
}

/* ---- failure -------------------------------------------------------------------- */

/* Over a process group, peers wait for every operation of the step, and cannot be told
 * that it has failed.  So this rank issues the operations that are left, with zeros,
 * and its role tells that no rank takes the step.  The group is then in step. */
static pl_status give_up(pl_reducer *self)
{
    pl_status st = PL_OK;
    if (self->phase == REDUCER_IDLE)
        PL_TRY(pl_reducer_begin(self));
    for (size_t i = 0; i < self->spec.n_params; i++)
        if (self->slots[i].n_ready == 0)
            PL_TRY(pl_reducer_mark_unused(self, i, NULL, PL_REPLACE, PL_UNUSED));
    flags_of(self, pl_comm_rank(self->comm))->role = PL_GIVES_UP;
    PL_TRY(close_step(self));
done:
    return st;
}

/* Whether all ranks fail the step by its end. */
static int fails_by_group(pl_reducer *self)
{
    if (!pli_comm_is_group_comm(self->comm) || self->comm->backend != NULL)
        return 0;
    if (self->participation.gives_up >= 0)
        return 1;
    return (self->phase == REDUCER_IDLE || self->phase == REDUCER_FILLING) &&
           pl_comm_progress(self->comm) == PL_OK && give_up(self) == PL_OK;
}

void pl_reducer_fail(pl_reducer *self, const char *text)
{
    if (!fails_by_group(self))
        pl_comm_abort(self->comm, text);
    self->phase = REDUCER_FAILED;
}

pl_status pl_reducer_check_weights(const pl_reducer *self)
{
    pl_status st = PL_OK;
    if (self->check.has_failed)
        PL_FAIL(
            PL_EMISMATCH,
            "rank %d: the ranks' weights differ since step %llu: load a checkpoint, "
            "and wrap the model anew on every rank",
            pl_comm_rank(self->comm), (unsigned long long)self->check.step);
    if (self->comm->device != NULL)
        PL_TRY(self->comm->device->check_means(self->comm));
done:
    return st;
}

void pl_reducer_follow(pl_reducer *self, const pl_reducer *failed)
{
    self->step = failed->step;
    self->n_taken = failed->n_taken;
}
