/* step.c - one backward: from its first gradient to its reduced gradients; and the
 * shadow steps of a rank that ran out of batches. */
#include "step.h"

#include <unistd.h>

#include "backend/cuda.h"
#include "core/alloc.h"
#include "step_state.h"

/* ---- life ----------------------------------------------------------------------- */

/* Makes the spec of the buckets; out->params is for pli_free(). */
static pl_status make_spec(const pl_step_spec *spec, pl_reducer_spec *out)
{
    pl_status st = PL_OK;
    pl_param *params = NULL;
    *out = (pl_reducer_spec){
        .n_params = spec->n_params, .world_size = spec->world_size, .caps = spec->caps};
    PL_TRY(pli_calloc(spec->n_params, sizeof *params, "parameters", &params));
    out->params = params;
    for (size_t i = 0; i < spec->n_params; i++) {
        const pli_layout *layout = spec->layouts[i];
        const int is_sparse = spec->is_sparse != NULL && spec->is_sparse[i];
        params[i] = (pl_param){.n_elems = is_sparse ? 0 : layout->n_elems,
                               .dtype = layout->dtype};
        if (is_sparse)
            out->staging_bytes = PLI_EXCHANGE_BYTES;
    }
    for (size_t b = 0; b < spec->n_buffers; b++)
        out->extra_bytes += pli_line_up(spec->buffers[b].n_bytes);
done:
    return st;
}

pl_status pl_step_measure(const pl_step_spec *spec, pl_step_size *out)
{
    pl_status st = PL_OK;
    pl_reducer_spec buckets;
    PL_TRY(make_spec(spec, &buckets));
    *out = (pl_step_size){.arena_bytes = pl_reducer_arena_bytes(&buckets),
                          .n_ops = pl_reducer_max_ops(&buckets),
                          .header_bytes = pl_reducer_header_bytes(&buckets)};
    pli_free((void *)buckets.params);
done:
    return st;
}

static pl_status make_slots(pl_step *self, const pl_step_spec *spec)
{
    pl_status st = PL_OK;
    const size_t n = spec->n_params;
    const size_t n_most = n > spec->n_buffers ? n : spec->n_buffers;
    size_t offset = 0;
    PL_TRY(pli_calloc(n, sizeof *self->slots, "gradients", &self->slots));
    self->n_slots = n;
    for (size_t i = 0; i < n; i++)
        PL_TRY(pli_layout_copy(spec->layouts[i], &self->slots[i].layout));
    PL_TRY(pli_calloc(n, 1, "gradients' flags", &self->unseen));
    PL_TRY(pli_calloc(n, 1, "gradients' flags", &self->unused));
    PL_TRY(pli_calloc(n_most, sizeof *self->moves, "copies", &self->moves));
    PL_TRY(pli_calloc(spec->n_buffers, sizeof *self->buffers.all, "buffers",
                      &self->buffers.all));
    self->buffers.n = spec->n_buffers;
    for (size_t b = 0; b < spec->n_buffers; b++) {
        self->buffers.all[b] =
            (step_buffer){.spec = spec->buffers[b], .offset = offset};
        offset += pli_line_up(spec->buffers[b].n_bytes);
    }
    pli_grads_init(self, spec);
done:
    return st;
}

pl_status pl_step_create(const pl_step_spec *spec, pl_comm *comm, pl_backend *backend,
                         pl_step **out)
{
    pl_status st = PL_OK;
    pl_step *self = NULL;
    pl_reducer_spec buckets = {.params = NULL};
    PL_TRY(pli_calloc(1, sizeof *self, "step", &self));
    *self = (pl_step){.grads = spec->grads,
                      .host = spec->host,
                      .settings = spec->settings,
                      .context = spec->context,
                      .comm = comm,
                      .backend = backend,
                      .owner_pid = getpid(),
                      .backward = SYNC_ON,
                      .autograd_context = PL_NO_CONTEXT,
                      .role = PL_ACTIVE};
    PL_TRY(make_slots(self, spec));
    PL_TRY(make_spec(spec, &buckets));
    PL_TRY(pl_reducer_create(&buckets, comm, backend, &self->reducer));
    *out = self;
    self = NULL;
done:
    pli_free((void *)buckets.params);
    pl_step_destroy(self);
    return st;
}

pl_status pl_step_prepare(pl_step *self)
{
    pl_status st = PL_OK;
    if (is_on_device(self)) {
        PL_TRY(pli_step_read_stream(self));
        PL_TRY(pli_step_let_go(self, pl_reducer_prepare));
    }
    pli_comm_record_activity(self->comm, PL_IDLE, 0);
done:
    return st;
}

int pl_step_visit(const pl_step *self, int (*visit)(pl_grad *grad, void *argument),
                  void *argument)
{
    int status = 0;
    for (size_t i = 0; status == 0 && i < self->n_slots; i++) {
        const step_slot *slot = &self->slots[i];
        pl_grad *const held[] = {slot->target, slot->late, slot->retained, slot->saved};
        for (size_t k = 0; status == 0 && k < sizeof held / sizeof *held; k++)
            status = held[k] != NULL ? visit(held[k], argument) : 0;
    }
    for (size_t b = 0; status == 0 && b < self->buffers.n; b++)
        if (self->buffers.all[b].seen != NULL)
            status = visit(self->buffers.all[b].seen, argument);
    return status;
}

void pl_step_drop(pl_step *self)
{
    pli_grads_drop(self);
    for (size_t b = 0; b < self->buffers.n; b++)
        replace_grad(self, &self->buffers.all[b].seen, NULL);
}

void pl_step_destroy(pl_step *self)
{
    if (self == NULL)
        return;
    pl_step_drop(self);
    pl_reducer_destroy(self->reducer);
    pli_window_release(self->window);
    for (size_t i = 0; i < self->n_slots; i++)
        pli_free(self->slots[i].layout);
    pli_free(self->slots);
    pli_free(self->unseen);
    pli_free(self->unused);
    pli_free(self->moves);
    pli_free(self->buffers.all);
    pli_free(self);
}

/* ---- what a caller may show ----------------------------------------------------- */

pl_step_state pl_step_look(const pl_step *self)
{
    return (pl_step_state){
        .is_active = pl_reducer_is_active(self->reducer),
        .is_open = self->reducer->phase == REDUCER_FILLING,
        .has_failed = pl_reducer_has_failed(self->reducer),
        .number = self->reducer->step,
        .n_taken = self->reducer->n_taken,
        .participation = self->reducer->participation,
        .plan = self->reducer->plan,
        .context = self->autograd_context,
        .unseen = self->unseen,
        .unused = self->unused,
    };
}

void pl_step_count_grads(const pl_step *self, unsigned char *out)
{
    for (size_t i = 0; i < self->n_slots; i++) {
        const unsigned n = self->reducer->slots[i].n_ready;
        out[i] = (unsigned char)(n < UINT8_MAX ? n : UINT8_MAX);
    }
}

/* ---- a step begins -------------------------------------------------------------- */

/* On a GPU: fails if a graph is captured before the reducer's plan is final. */
static pl_status check_capture(pl_step *self)
{
    pl_status st = PL_OK;
    int captures = 0;
    if (!is_on_device(self))
        goto done;
    PL_TRY(pli_step_read_stream(self));
    PL_TRY(pli_cuda_is_capturing(self->backend, self->stream, &captures));
    if (!captures)
        goto done;
    if (self->reducer->learning != LEARNING_DONE)
        PL_FAIL(PL_ESTATE,
                "a CUDA graph captures a backward before its buckets are in their "
                "final order: run 3 whole steps (forward, backward, optimizer) on the "
                "capture's stream first");
    self->is_captured = 1;
done:
    return st;
}

static pl_status begin(pl_step *self)
{
    pl_status st = PL_OK;
    int is_recorded = 0;
    PL_TRY(self->host->is_recorded(self->context, &is_recorded));
    self->recording = is_recorded ? RECORDING_ON : RECORDING_OFF;
    PL_TRY(check_capture(self));
    PL_TRY(pl_reducer_begin(self->reducer));
    self->user_hooks = HOOKS_NONE;
    PL_TRY(pli_grads_begin(self));
done:
    return st;
}

/* A gradient came for slot i, in an autograd context or, with PL_NO_CONTEXT, as
 * `.grad`.  *is_in_step: it belongs to a step, which may begin with it. */
static pl_status enter(pl_step *self, size_t i, long context, int *is_in_step)
{
    pl_status st = PL_OK;
    *is_in_step = 0;
    if (!pl_reducer_is_active(self->reducer)) {
        if (is_forked(self))
            goto done; /* a forked child trains the bare model on its own */
        if (!pli_forwards_begin_step(self, i)) {
            if (context == PL_NO_CONTEXT)
                self->unseen[i] = 1;
            goto done;
        }
        /* First: if this backward fails, its end reports that. */
        PL_TRY(self->host->await_end(self->context, PL_END_OF_PARAMETER));
        PL_TRY(begin(self));
        if (context == PL_NO_CONTEXT)
            PL_TRY(pli_grads_note(self, i));
        self->autograd_context = context;
    } else if (self->autograd_context != context ||
               self->reducer->phase != REDUCER_FILLING) {
        PL_FAIL(PL_ESTATE,
                "a model got gradients from two backwards at once, one of them through "
                "torch.distributed.autograd or before finalize_backward(): run one "
                "after the other");
    }
    /* The end of an inner backward may be over: the outer backward needs its own. */
    if (self->settings->n_ends == 0 && !self->settings->is_compiled)
        PL_TRY(self->host->await_end(self->context, PL_END_OF_PARAMETER));
    *is_in_step = 1;
done:
    return st;
}

/* Under `is_strict`, fails as torch does at a second gradient in one backward. */
static pl_status check_is_first(const pl_step *self, size_t i)
{
    if (!self->settings->is_strict)
        return PL_OK;
    if (self->unused[i])
        return pli_fail(
            PL_ESTATE,
            "Expected to mark a variable ready only once. Parameter at index %zu (of "
            "those that require gradients) got a gradient, and no output of the last "
            "forward shows that it is used: it is used in a reentrant checkpoint, for "
            "an output that hides its tensors, or outside of forward. Leave out "
            "find_unused_parameters, or strict: paceline averages such gradients too.",
            i);
    if (self->reducer->slots[i].n_ready == 0)
        return PL_OK;
    return pli_fail(
        PL_ESTATE,
        "Expected to mark a variable ready only once. Parameter at index %zu (of those "
        "that require gradients) got a second gradient in one backward: it is used in "
        "several reentrant checkpoints, or outside of forward. Checkpoint with "
        "use_reentrant=False, or leave out strict: paceline averages such gradients "
        "too.",
        i);
}

pl_status pl_step_take(pl_step *self, size_t i, pl_arrival arrival, int *is_due)
{
    pl_status st = PL_OK;
    int is_in_step = 0;
    pl_stream *stream = NULL;
    *is_due = 0;
    if (is_on_device(self)) /* autograd may have written to a view, whatever fails */
        PL_TRY(pli_step_current_stream(self, &stream));
    PL_TRY(enter(self, i, PL_NO_CONTEXT, &is_in_step));
    if (!is_in_step)
        goto done;
    if (arrival != PL_ARRIVES_ALONE)
        self->user_hooks = HOOKS_SEEN;
    self->slots[i].takes_at_end = (char)(arrival == PL_ARRIVES_BEFORE_HOOKS);
    if (arrival == PL_ARRIVES_BEFORE_HOOKS)
        goto done;
    PL_TRY(check_is_first(self, i));
    set_stream(self, stream);
    PL_TRY(pli_grads_take(self, i));
    *is_due = self->settings->is_compiled &&
              self->reducer->spec.n_params - self->reducer->n_ready_params == 0;
done:
    return st;
}

pl_status pl_step_take_in_context(pl_step *self, size_t i, long context)
{
    pl_status st = PL_OK;
    int is_in_step = 0;
    if (is_on_device(self))
        PL_FAIL(PL_EUNSUPPORTED,
                "this version of paceline averages gradients in contexts of "
                "torch.distributed.autograd for models on the CPU only: wrap a model "
                "on GPUs with torch's own DistributedDataParallel");
    PL_TRY(enter(self, i, context, &is_in_step));
    if (is_in_step)
        self->slots[i].takes_at_end = 1;
done:
    return st;
}

/* ---- a step ends ---------------------------------------------------------------- */

static pl_status close_reducer(pl_step *self)
{
    return is_on_device(self) ? pli_step_let_go(self, pl_reducer_close)
                              : pl_reducer_close(self->reducer);
}

pl_status pl_step_close(pl_step *self)
{
    pl_status st = PL_OK;
    if (self->reducer->phase != REDUCER_FILLING)
        goto done;
    PL_TRY(read_stream(self));
    if (self->role == PL_ACTIVE)
        PL_TRY(pli_grads_complete(self));
    pli_forwards_send(self);
    PL_TRY(pli_buffers_pack(self));
    PL_TRY(close_reducer(self));
    pli_grads_release_posted(self);
done:
    return st;
}

static pl_status wait_slice(void *reducer, int64_t slice_ns)
{
    return pl_reducer_wait(reducer, slice_ns);
}

/* Waits for the peers' part; makes a GPU's stream wait for the results. */
static pl_status wait_step(pl_step *self)
{
    pl_status st = PL_OK;
    PL_TRY(read_stream(self));
    PL_TRY(pli_step_wait(self, wait_slice, self->reducer));
    if (is_on_device(self))
        PL_TRY(pli_step_let_go(self, pl_reducer_order));
done:
    return st;
}

static void forget_step(pl_step *self)
{
    pli_grads_abandon(self);
    pli_buffers_forget(self);
    self->autograd_context = PL_NO_CONTEXT;
}

/* Every rank detects itself that the ranks are not in the same step, so none sends a
 * failure: the step ends without results. */
static pl_status check_is_same_step(pl_step *self)
{
    char words[1024];
    if (pli_forwards_check(self->reducer) == PL_OK)
        return PL_OK;
    pli_text_print(words, sizeof words, "%s", pl_error_message());
    if (self->hook != NULL)
        self->hook->settle(self->context);
    forget_step(self);
    pl_reducer_discard(self->reducer);
    pli_forwards_end_step(self, 0);
    return pli_fail(PL_EMISMATCH, "%s", words);
}

/* A hook cannot take late gradients. */
static pl_status check_late(const pl_step *self)
{
    size_t i = 0;
    if (self->hook == NULL)
        return PL_OK;
    while (!pl_reducer_is_late(self->reducer, i))
        i++;
    return pli_fail(
        PL_ESTATE,
        "Expected to mark a variable ready only once. Parameter at index %zu (of those "
        "that require gradients) got a second gradient on some rank after its bucket "
        "had gone to the communication hook: keep the graph the same in each step, or "
        "train without the hook.",
        i);
}

/* The second all-reduce: for parameters that, on any rank, got a gradient after their
 * bucket was posted. */
static pl_status reduce_late(pl_step *self)
{
    pl_status st = PL_OK;
    if (pl_reducer_n_late(self->reducer) == 0)
        goto done;
    PL_TRY(check_late(self));
    PL_TRY(pli_grads_write_late(self));
    PL_TRY(close_reducer(self));
    PL_TRY(wait_step(self));
done:
    return st;
}

static pl_status finish_hook(pl_step *self)
{
    return self->hook != NULL ? self->hook->finish(self->context) : PL_OK;
}

static pl_status rescale(pl_step *self)
{
    return is_to_rescale(self) ? pli_step_let_go(self, pl_reducer_rescale) : PL_OK;
}

static pl_status confirm_hook(pl_step *self)
{
    pl_status st = PL_OK;
    const pl_op op = {.kind = PL_BARRIER, .ends_step = 1};
    pl_ticket ticket;
    if (self->hook == NULL || pli_comm_is_group_comm(self->comm))
        goto done;
    PL_TRY(pl_comm_issue(self->comm, &op, &ticket));
    PL_TRY(pli_step_wait_for(self, ticket));
done:
    return st;
}

static pl_status end(pl_step *self)
{
    self->autograd_context = PL_NO_CONTEXT;
    pli_forwards_end_step(self, 1);
    return pl_reducer_end(self->reducer);
}

static pl_status tell_caller(pl_step *self)
{
    return self->host->finished(self->context);
}

/* Fails, with torch's words, if a rank has run out of batches and the join context must
 * end then. */
static pl_status check_join(pl_step *self)
{
    if (self->join_end == PL_JOIN_GOES_ON || self->role != PL_ACTIVE ||
        !is_anyone_missing(self))
        return PL_OK;
    return pli_fail(PL_ESTATE, "Detected at least one rank that exhausted inputs. "
                               "Throwing across all ranks.");
}

typedef struct step_phase {
    const char *name;
    pl_status (*run)(pl_step *self);
} step_phase;

/* The end of a step.  From `bind` on peers keep the step, so this rank must keep it
 * too: no phase from there to `end` handles signals, so Ctrl-C cannot raise. */
static const step_phase PHASES[] = {
    {"close: mark parameters without a gradient, post the rest", pl_step_close},
    {"wait: for every rank's part, and so for means and flags", wait_step},
    {"compare: whether all ranks are in the same step", check_is_same_step},
    {"reduce late gradients, in a second all-reduce", reduce_late},
    {"finish the communication hook: its results go to the slots", finish_hook},
    {"rescale: means over the active ranks only", rescale},
    {"average rows of sparse gradients into new tensors", pli_sparse_finish},
    {"confirm that all ranks have the hook's results", confirm_hook},
    {"bind: the means become `.grad`", pli_grads_bind},
    {"receive the root's buffers, to take them over later", pli_buffers_receive},
    {"end: learn for the next step", end},
    {"tell the caller", tell_caller},
    {"check the join: whether it must end", check_join},
};

enum { N_PHASES = sizeof PHASES / sizeof *PHASES };

const char *pl_step_phase(size_t k)
{
    return k < N_PHASES ? PHASES[k].name : NULL;
}

pl_status pl_step_finish(pl_step *self)
{
    pl_status st = PL_OK;
    const size_t n_phases = pl_reducer_is_active(self->reducer) ? N_PHASES : 0;
    for (size_t k = 0; st == PL_OK && k < n_phases; k++)
        st = PHASES[k].run(self);
    return st;
}

/* ---- a step fails --------------------------------------------------------------- */

void pl_step_fail(pl_step *self, const char *text)
{
    if (is_forked(self))
        return; /* a forked child has no part in the world */
    /* On a device this aborts the communicator, which may take a while. */
    void *lock = let_go_if(self, is_on_device(self));
    pl_reducer_fail(self->reducer, text);
    take_back(self, lock);
    pli_forwards_fail_step(self);
    if (self->hook != NULL)
        self->hook->abandon(self->context);
    forget_step(self);
}

pl_status pl_step_notice_failure(pl_step *self)
{
    if (is_forked(self) || pl_reducer_is_active(self->reducer) ||
        pl_reducer_has_failed(self->reducer))
        return PL_OK;
    return pl_reducer_notice_failure(self->reducer);
}

pl_status pl_step_check_failure(const pl_step *self)
{
    pl_status st = pl_reducer_check_weights(self->reducer);
    for (pl_comm *comm = self->comm; st == PL_OK && comm != NULL; comm = comm->base)
        if (pli_comm_is_group_comm(comm)) /* peers may wait in it for this rank */
            st = pl_comm_progress(comm);
    return st;
}

void pl_step_follow(pl_step *self, const pl_step *failed)
{
    pl_reducer_follow(self->reducer, failed->reducer);
    pli_forwards_follow(self, failed);
}

/* ---- ranks that ran out of batches ---------------------------------------------- */

void pl_step_set_join(pl_step *self, pl_join_divisor divisor, pl_join_end end)
{
    self->divisor = divisor;
    self->join_end = end;
    pl_reducer_reset_participation(self->reducer);
    pli_forwards_forget_failed(self);
}

static pl_status begin_shadow(pl_step *self)
{
    pl_status st = PL_OK;
    PL_TRY(pl_step_check_process(self));
    PL_TRY(pl_step_apply_buffers(self));
    /* Move gradients that are views of their slots before all slots are written: they
     * keep their values.  On a device begin() does that. */
    if (!is_on_device(self))
        PL_TRY(pli_grads_refresh_window(self));
    PL_TRY(begin(self));
    void *lock = self->host->let_go(self->context);
    st = pl_reducer_shadow_step(self->reducer, self->role);
    self->host->take_back(lock);
done:
    return st;
}

/* Such a rank takes shadow steps: whole steps with zeros and without a backward, until
 * a step's participation shows that no rank has gradients any more.  The others take
 * ordinary steps, and read from the participation which ranks were missing. */
pl_status pl_step_shadow(pl_step *self, pl_role role, pl_join_grads grads)
{
    pl_status st = PL_OK;
    self->role = role;
    self->join_grads = grads;
    PL_TRY(begin_shadow(self));
    PL_TRY(pl_step_finish(self));
done:
    self->role = PL_ACTIVE;
    return st;
}

/* ---- communication hooks -------------------------------------------------------- */

pl_status pl_step_set_hook(pl_step *self, const pl_step_hook *hook,
                           const pl_plan_caps *caps)
{
    pl_status st = PL_OK;
    const pl_comm_hook posts = {.context = self->context, .post = hook->post};
    PL_TRY(pl_reducer_set_comm_hook(self->reducer, &posts, caps));
    self->hook = hook;
done:
    return st;
}

size_t pl_step_bucket_elems(const pl_step *self, size_t bucket)
{
    const pl_bucket_plan *plan = &self->reducer->plan->buckets[bucket];
    size_t n_elems = 0;
    for (size_t m = 0; m < plan->n_params; m++) {
        const step_slot *slot = &self->slots[plan->params[m]];
        n_elems += slot->policy == POLICY_SPARSE ? 0 : slot->layout->n_elems;
    }
    return n_elems;
}

pl_status pl_step_copy_bucket(pl_step *self, size_t bucket, void *flat,
                              pl_slot_direction way)
{
    pl_status st = PL_OK;
    const pl_bucket_plan *plan = &self->reducer->plan->buckets[bucket];
    pl_stream *stream = NULL; /* perhaps one of the hook */
    char *at = flat;
    if (is_on_device(self))
        PL_TRY(pli_step_current_stream(self, &stream));
    for (size_t m = 0; m < plan->n_params; m++) {
        const uint32_t i = plan->params[m];
        void *slot = slot_memory(self->reducer, i);
        if (self->slots[i].policy == POLICY_SPARSE)
            continue;
        pli_step_defer_copy(self, way == PL_FROM_SLOTS ? at : slot,
                            way == PL_FROM_SLOTS ? slot : at, self->slots[i].layout);
        at += pli_layout_bytes(self->slots[i].layout);
    }
    PL_TRY(pli_step_copy(self, stream));
done:
    return st;
}
