/* step_grads.c - one gradient on its way into its slot and, after the step, back to
 * `.grad`; and the window through which gradients see their slots.  Action by policy
 * (POLICIES, below):
 *
 *   event                  copy                view                     sparse
 *   ---------------------  ------------------  -----------------------  ---------
 *   gradient, bucket open  `.grad` -> slot     slot = or += `.grad`,    counted
 *                                              `.grad` = none
 *   ... on a GPU           with its bucket     with its bucket, is      (copy)
 *                                              retained until then
 *   ... bucket is posted   counted as late     slot->late += `.grad`    counted
 *   none in a backward     `.grad` -> slot     `.grad` -> slot, or      counted
 *                                              saved if it is in place
 *   second all-reduce      `.grad` -> slot     slot->late is added      none
 *   results                slot -> `.grad`     `.grad` = view of slot,  rows
 *                                              or the old tensor, filled
 *
 * choose_mode() decides when a step treats a view as a copy.
 *
 * On a GPU a gradient is retained until its bucket is posted, that is until its copy is
 * enqueued; from then on the order of the stream protects its memory.  A view that the
 * user keeps is overwritten by the next step, as with torch's class.  But if the
 * buckets are laid out anew, or a rank that joins early keeps its gradients, the world
 * moves to new memory and leaves the old to the views.
 */
#include "backend/cuda.h"
#include "step_state.h"

enum { RELEASE_BYTES = 65536 }; /* larger copies let other threads run */
enum { MOST_RETAINED_BYTES = 64 << 20 };

static const char GRADIENT[] = "a parameter's gradient";

/* ---- the window follows the plan ------------------------------------------------ */

/* If the window, on the CPU alone, has views, leaves it to them with their values. */
static pl_status retire_window(pl_step *self)
{
    pl_status st = PL_OK;
    if (self->window == NULL || pli_window_n_views(self->window) == 0)
        goto done;
    PL_TRY(pli_window_retire(self->window));
    pli_window_release(self->window);
    self->window = NULL;
done:
    return st;
}

pl_status pl_step_before_fork(pl_step *self)
{
    return retire_window(self);
}

pl_status pli_grads_refresh_window(pl_step *self)
{
    pl_status st = PL_OK;
    const pl_reducer *reducer = self->reducer;
    PL_TRY(retire_window(self));
    self->generation = reducer->generation;
    /* If all are sparse or empty, the window has no bytes. */
    if (self->window == NULL && reducer->plan->n_bytes > 0)
        PL_TRY(pli_window_create(self->comm, reducer->at.buckets,
                                 reducer->plan->n_bytes, self->n_slots, &self->window));
done:
    return st;
}

/* ---- reading -------------------------------------------------------------------- */

/* On a GPU other slots may be written before this gradient is copied. */
static pl_status check_place(const pl_step *self, size_t i, const pli_tensor *grad)
{
    pl_status st = PL_OK;
    const pl_comm *comm = self->comm;
    const char *data = grad->data;
    if (is_on_device(self) && data != slot_memory(self->reducer, i) &&
        data >= comm->device_memory &&
        data < comm->device_memory + (comm->arena_bytes - comm->host_bytes))
        PL_FAIL(PL_ESTATE,
                "the gradient of parameter %zu is a view of another bucket's memory: "
                "set a copy, as in p.grad = q.grad.clone()",
                i);
done:
    return st;
}

/* *out: the parameter's gradient, as a dense copy if it is sparse; NULL: none. */
static pl_status read_arrived(pl_step *self, size_t i, pl_grad **out,
                              pli_tensor *tensor)
{
    pl_status st = PL_OK;
    step_slot *slot = &self->slots[i];
    pl_grad *grad = NULL;
    PL_TRY(self->grads->find(self->context, i, &grad));
    if (grad != NULL) {
        PL_TRY(self->grads->read_arrived(self->context, &grad, &slot->n_sparse_dims,
                                         tensor));
        if (tensor->layout.dtype != slot->layout->dtype ||
            tensor->layout.n_elems != slot->layout->n_elems)
            PL_FAIL(PL_ESTATE,
                    "parameter %zu was %zu x %s when it was wrapped, and its gradient "
                    "is %zu x %s: wrap the model again after changing its parameters",
                    i, slot->layout->n_elems, pl_dtype_text(slot->layout->dtype),
                    tensor->layout.n_elems, pl_dtype_text(tensor->layout.dtype));
        PL_TRY(check_place(self, i, tensor));
        slot->is_lazy = (char)tensor->layout.is_lazy;
    }
    *out = grad;
    grad = NULL;
done:
    drop_grad(self, grad);
    return st;
}

static pl_status has_grad(pl_step *self, size_t i, int *out)
{
    pl_status st = PL_OK;
    pl_grad *grad = NULL;
    PL_TRY(self->grads->find(self->context, i, &grad));
    *out = grad != NULL;
    drop_grad(self, grad);
done:
    return st;
}

/* A tensor over slot i's memory, which must outlive it. */
static pl_status borrow_slot(pl_step *self, size_t i, pl_grad **out)
{
    const pl_place place = {.memory = slot_memory(self->reducer, i), .slot = i};
    return self->grads->over(self->context, &place, self->slots[i].layout, out);
}

/* Makes a tensor in slot i's layout: the parameter's may have changed. */
static pl_status make_empty(pl_step *self, size_t i, pl_grad **out)
{
    pl_status st = PL_OK;
    pl_grad *like = NULL;
    PL_TRY(borrow_slot(self, i, &like));
    PL_TRY(self->grads->empty_like(self->context, like, out));
done:
    drop_grad(self, like);
    return st;
}

/* The gradient in the slot's layout: *out is `grad` itself if it has that layout, else
 * a copy, which *tensor then describes. */
static pl_status in_slot_layout(pl_step *self, size_t i, pl_grad *grad,
                                pli_tensor *tensor, pl_grad **out)
{
    pl_status st = PL_OK;
    pl_grad *copy = NULL;
    if (pli_layout_equal(&tensor->layout, self->slots[i].layout)) {
        *out = hold_grad(self, grad);
        goto done;
    }
    PL_TRY(make_empty(self, i, &copy));
    PL_TRY(self->grads->copy(self->context, copy, grad));
    PL_TRY(self->grads->read(self->context, PL_READ_PLAIN, "a gradient's copy", copy,
                             tensor));
    *out = copy;
    copy = NULL;
done:
    drop_grad(self, copy);
    return st;
}

/* ---- a step begins -------------------------------------------------------------- */

/* A graph may have saved the views: they are the same tensors in each step. */
static pl_status note_views(pl_step *self)
{
    pl_status st = PL_OK;
    pl_grad *view = NULL;
    for (size_t i = 0; i < self->n_slots; i++) {
        if (self->slots[i].policy != POLICY_VIEW)
            continue;
        PL_TRY(borrow_slot(self, i, &view));
        PL_TRY(self->grads->note_write(self->context, view));
        replace_grad(self, &view, NULL);
    }
done:
    drop_grad(self, view);
    return st;
}

/* On a GPU: leaves the world's memory to its views, if this step must not write it. */
static pl_status leave_views(pl_step *self)
{
    pl_status st = PL_OK;
    const int is_laid_anew = self->generation != self->reducer->generation;
    int captures = 0;
    self->n_released = 0;
    if (self->has_views && (is_laid_anew || self->role != PL_ACTIVE)) {
        PL_TRY(pli_cuda_is_capturing(self->backend, self->stream, &captures));
        if (captures)
            PL_FAIL(PL_ESTATE, "a CUDA graph captures the first backward after a "
                               "change of its buckets: run a whole step first");
        PL_TRY(self->comm->device->renew(self->comm));
        PL_TRY(self->comm->device->outlive(self->comm, self->stream));
        self->has_views = 0;
    }
    if (self->has_views)
        PL_TRY(note_views(self));
    self->generation = self->reducer->generation;
done:
    return st;
}

pl_status pli_grads_begin(pl_step *self)
{
    if (is_on_device(self))
        return leave_views(self);
    return self->window == NULL || self->generation != self->reducer->generation
               ? pli_grads_refresh_window(self)
               : PL_OK;
}

static pl_status note(pl_step *self, size_t i, size_t first)
{
    pl_status st = PL_OK;
    pl_grad *grad = NULL;
    long n_writes = 1;
    PL_TRY(self->grads->find(self->context, i, &grad));
    if (grad != NULL && i == first) /* did autograd add to it? */
        PL_TRY(self->grads->n_writes(self->context, grad, &n_writes));
    self->slots[i].had_grad = (char)(grad != NULL && n_writes > 0);
done:
    drop_grad(self, grad);
    return st;
}

pl_status pli_grads_note(pl_step *self, size_t first)
{
    pl_status st = PL_OK;
    for (size_t i = 0; self->settings->keeps_grads && i < self->n_slots; i++)
        if (self->slots[i].policy == POLICY_VIEW)
            PL_TRY(note(self, i, first));
done:
    return st;
}

/* ---- a gradient arrives --------------------------------------------------------- */

/* Before a slot is overwritten: views of its last gradient keep their values. */
static pl_status protect(pl_step *self, size_t i, pl_write_mode mode)
{
    if (mode == PL_IN_PLACE || self->slots[i].mode != SLOT_UNTOUCHED ||
        slot_n_views(self, i) == 0)
        return PL_OK;
    return pli_grads_refresh_window(self);
}

/* On a GPU: a gradient that is a view of its slot, but is to stay as it is until the
 * step's end, leaves the slot. */
static pl_status move_out(pl_step *self, size_t i, pl_grad **grad, pli_tensor *tensor)
{
    pl_status st = PL_OK;
    pl_grad *copy = NULL;
    if (!is_on_device(self) || !slot_is_seen_by(self, i, tensor))
        goto done;
    PL_TRY(self->grads->clone(self->context, *grad, &copy));
    PL_TRY(self->grads->read(self->context, PL_READ_PLAIN, GRADIENT, copy, tensor));
    PL_TRY(self->grads->put(self->context, i, copy));
    drop_grad(self, *grad);
    *grad = copy;
    copy = NULL;
done:
    drop_grad(self, copy);
    return st;
}

/* Whether other threads may run meanwhile: a large copy, or calls of the device. */
static int takes_long(const pl_step *self, size_t i, pl_write_mode mode)
{
    if (is_on_device(self))
        return mode == PL_ADD || pl_reducer_may_post(self->reducer, i);
    return pli_layout_bytes(self->slots[i].layout) >= RELEASE_BYTES;
}

static pl_status mark_ready(pl_step *self, size_t i, const void *data,
                            pl_write_mode mode, pl_ready_result *out)
{
    pl_status st = PL_OK;
    PL_TRY(protect(self, i, mode));
    void *lock = let_go_if(self, takes_long(self, i, mode));
    st = pl_reducer_mark_ready(self->reducer, i, data, mode, self->stream, out);
    take_back(self, lock);
done:
    return st;
}

/* The slot was filled with a dense copy of a sparse gradient. */
static void set_sparse(pl_step *self, size_t i)
{
    if (self->slots[i].n_sparse_dims > 0)
        pl_reducer_set_sparse(self->reducer, i, self->slots[i].n_sparse_dims);
}

/* `data` is copied later: it is the user's gradient, or a copy of it. */
static pl_status retain_until_copied(pl_step *self, size_t i, pl_grad *grad,
                                     pl_grad *data)
{
    pl_status st = PL_OK;
    if (self->host->has_hooks(self->context, i)) { /* they may change it before */
        void *lock = self->host->let_go(self->context);
        st = pl_reducer_flush(self->reducer, i);
        self->host->take_back(lock);
    } else if (data != grad) {
        replace_grad(self, &self->slots[i].retained, hold_grad(self, data));
    }
    return st;
}

static pl_status take_by_copy(pl_step *self, size_t i, pl_grad *grad,
                              pli_tensor *tensor)
{
    pl_status st = PL_OK;
    step_slot *slot = &self->slots[i];
    pl_grad *dense = NULL;
    pl_ready_result result;
    PL_TRY(in_slot_layout(self, i, grad, tensor, &dense));
    /* The second all-reduce of a large gradient adds its late part only, but this one
     * is kept whole: keep its bucket back, so that no part is late. */
    if (slot->policy == POLICY_VIEW && slot->mode == SLOT_UNTOUCHED)
        pl_reducer_defer_bucket(self->reducer, i);
    PL_TRY(mark_ready(self, i, tensor->data, PL_REPLACE, &result));
    if (result == PL_DEFERRED)
        PL_TRY(retain_until_copied(self, i, grad, dense));
    slot->mode = SLOT_COPY;
    set_sparse(self, i);
    replace_grad(self, &slot->target, hold_grad(self, grad));
done:
    drop_grad(self, dense);
    return st;
}

static pl_status add_late(pl_step *self, step_slot *slot, pl_grad *grad)
{
    if (slot->late != NULL)
        return self->grads->add(self->context, slot->late, grad);
    slot->late = hold_grad(self, grad);
    return PL_OK;
}

static pl_status take_by_view(pl_step *self, size_t i, pl_grad *grad,
                              pli_tensor *tensor)
{
    pl_status st = PL_OK;
    step_slot *slot = &self->slots[i];
    const int is_in_place = slot_is_seen_by(self, i, tensor);
    const int is_first = slot->mode == SLOT_UNTOUCHED;
    const int stays = is_first && slot->had_grad;
    const pl_write_mode mode =
        is_in_place ? PL_IN_PLACE : (is_first ? PL_REPLACE : PL_ADD);
    pl_grad *dense = NULL;
    pl_ready_result result;
    PL_TRY(in_slot_layout(self, i, grad, tensor, &dense));
    PL_TRY(mark_ready(self, i, tensor->data, mode, &result));
    if (result == PL_DEFERRED && !is_in_place)
        replace_grad(self, &slot->retained, hold_grad(self, dense));
    slot->mode = SLOT_VIEW;
    if (result == PL_LATE)
        PL_TRY(add_late(self, slot, grad));
    else if (!is_in_place && self->retains_grads)
        replace_grad(self, &slot->retained, hold_grad(self, grad));
    if (stays || (is_in_place && result != PL_LATE))
        replace_grad(self, &slot->target, hold_grad(self, grad));
    PL_TRY(self->grads->put(self->context, i, NULL));
done:
    drop_grad(self, dense);
    return st;
}

/* The user must not see the view in place of the gradient before the step ends. */
static slot_mode choose_mode(const pl_step *self, size_t i, const pli_tensor *grad)
{
    const step_slot *slot = &self->slots[i];
    if (slot->mode != SLOT_UNTOUCHED)
        return slot->mode;
    return slot->policy == POLICY_VIEW && self->recording == RECORDING_OFF &&
                   self->autograd_context == PL_NO_CONTEXT &&
                   slot->n_sparse_dims == 0 &&
                   !self->host->has_hooks(self->context, i) &&
                   pli_layout_equal(&grad->layout, slot->layout)
               ? SLOT_VIEW
               : SLOT_COPY;
}

static pl_status take_dense(pl_step *self, size_t i)
{
    pl_status st = PL_OK;
    pl_grad *grad = NULL;
    pli_tensor tensor;
    pl_ready_result result;
    PL_TRY(read_arrived(self, i, &grad, &tensor));
    if (grad == NULL) { /* an undefined gradient: nothing to add or wait for */
        PL_TRY(mark_ready(self, i, NULL,
                          self->slots[i].mode == SLOT_UNTOUCHED ? PL_REPLACE : PL_ADD,
                          &result));
    } else if (choose_mode(self, i, &tensor) == SLOT_VIEW) {
        PL_TRY(take_by_view(self, i, grad, &tensor));
    } else {
        PL_TRY(move_out(self, i, &grad, &tensor));
        PL_TRY(take_by_copy(self, i, grad, &tensor));
    }
    pli_grads_release_posted(self);
done:
    drop_grad(self, grad);
    return st;
}

static pl_status take_sparse(pl_step *self, size_t i)
{
    pl_status st = PL_OK;
    pl_ready_result result;
    int has = 0;
    PL_TRY(has_grad(self, i, &has));
    /* The slot has no memory: not NULL means that there is a gradient. */
    PL_TRY(pl_reducer_mark_ready(self->reducer, i, has ? self : NULL, PL_IN_PLACE, NULL,
                                 &result));
done:
    return st;
}

/* ---- no gradient arrived -------------------------------------------------------- */

/* Whether the peers have yet to receive this gradient.  A context holds only what its
 * own backwards made: all of it counts. */
static pl_use read_use(pl_step *self, size_t i, int has)
{
    if (self->autograd_context != PL_NO_CONTEXT)
        return has ? PL_USED : PL_UNUSED;
    if (!has)
        self->unseen[i] = 0; /* the accumulated gradient was reset */
    return self->unseen[i] ? PL_USED : PL_UNUSED;
}

static pl_status mark_unused(pl_step *self, size_t i, const void *data,
                             pl_write_mode mode, int has)
{
    pl_status st = PL_OK;
    const pl_use use = read_use(self, i, has);
    PL_TRY(protect(self, i, mode));
    PL_TRY(pl_reducer_mark_unused(self->reducer, i, data, mode, use));
done:
    return st;
}

static pl_status leave_dense(pl_step *self, size_t i)
{
    pl_status st = PL_OK;
    step_slot *slot = &self->slots[i];
    pl_grad *grad = NULL;
    pl_grad *dense = NULL;
    pli_tensor tensor;
    PL_TRY(read_arrived(self, i, &grad, &tensor));
    if (grad == NULL) {
        PL_TRY(mark_unused(self, i, NULL, PL_REPLACE, 0));
        goto done;
    }
    if (slot_is_seen_by(self, i, &tensor)) {
        /* If no rank used it, the reduction must leave it unchanged. */
        PL_TRY(self->grads->clone(self->context, grad, &slot->saved));
        PL_TRY(mark_unused(self, i, NULL, PL_IN_PLACE, 1));
        slot->mode = SLOT_VIEW;
    } else {
        PL_TRY(in_slot_layout(self, i, grad, &tensor, &dense));
        PL_TRY(mark_unused(self, i, tensor.data, PL_REPLACE, 1));
        if (dense != grad && is_on_device(self))
            replace_grad(self, &slot->retained, hold_grad(self, dense));
        slot->mode = SLOT_COPY;
        set_sparse(self, i);
    }
    replace_grad(self, &slot->target, hold_grad(self, grad));
done:
    drop_grad(self, dense);
    drop_grad(self, grad);
    return st;
}

static pl_status leave_sparse(pl_step *self, size_t i)
{
    pl_status st = PL_OK;
    int has = 0;
    PL_TRY(has_grad(self, i, &has));
    PL_TRY(mark_unused(self, i, NULL, PL_IN_PLACE, has));
done:
    return st;
}

void pli_grads_release_posted(pl_step *self)
{
    const size_t n_posted = is_on_device(self) ? self->reducer->n_posted : 0;
    while (self->n_released < n_posted) {
        const pl_bucket_plan *bucket =
            &self->reducer->plan->buckets[self->n_released++];
        for (size_t m = 0; m < bucket->n_params; m++)
            replace_grad(self, &self->slots[bucket->params[m]].retained, NULL);
    }
}

/* ---- the second all-reduce ------------------------------------------------------ */

static pl_status write_late(pl_step *self, size_t i, pl_grad *grad, pl_write_mode mode)
{
    pl_status st = PL_OK;
    pl_grad *dense = NULL;
    pli_tensor tensor = {.data = NULL};
    if (grad != NULL) {
        PL_TRY(self->grads->read(self->context, PL_READ_GRAD, GRADIENT, grad, &tensor));
        PL_TRY(in_slot_layout(self, i, grad, &tensor, &dense));
    }
    void *lock = self->host->let_go(self->context);
    st = pl_reducer_write_late(self->reducer, i, tensor.data, mode);
    self->host->take_back(lock);
done:
    drop_grad(self, dense);
    return st;
}

static pl_status write_late_copy(pl_step *self, size_t i)
{
    return write_late(self, i, self->slots[i].target, PL_REPLACE);
}

static pl_status write_late_view(pl_step *self, size_t i)
{
    return write_late(self, i, self->slots[i].late, PL_ADD);
}

/* ---- results -------------------------------------------------------------------- */

/* Writes the reduced gradient to a tensor of another layout. */
static pl_status overwrite(pl_step *self, size_t i, pl_grad *grad)
{
    pl_status st = PL_OK;
    pl_grad *reduced = NULL;
    PL_TRY(borrow_slot(self, i, &reduced));
    PL_TRY(self->grads->copy(self->context, grad, reduced));
done:
    drop_grad(self, reduced);
    return st;
}

static pl_status make_view(pl_step *self, size_t i, pl_grad **out)
{
    pl_status st = PL_OK;
    if (is_on_device(self)) {
        self->has_views = 1;
        return borrow_slot(self, i, out);
    }
    if (self->window == NULL) /* the process forked in this backward */
        PL_TRY(pli_grads_refresh_window(self));
    const pl_place place = {.memory = slot_memory(self->reducer, i),
                            .slot = i,
                            .window = self->window,
                            .offset = slot_in_window(self, i)};
    PL_TRY(self->grads->over(self->context, &place, self->slots[i].layout, out));
done:
    return st;
}

static pl_status write_back(pl_step *self, size_t i, pl_grad *grad,
                            const pli_layout *layout, void *data)
{
    pl_status st = PL_OK;
    if (pli_layout_equal(layout, self->slots[i].layout))
        pli_step_defer_copy(self, data, slot_memory(self->reducer, i), layout);
    else
        PL_TRY(overwrite(self, i, grad));
    /* The graph of the second backward may hold it: let autograd notice the change. */
    if (self->recording == RECORDING_ON)
        PL_TRY(self->grads->note_write(self->context, grad));
done:
    return st;
}

/* Fills slot->target, a new tensor. */
static pl_status fill_copy(pl_step *self, size_t i)
{
    pl_status st = PL_OK;
    pl_grad *grad = self->slots[i].target;
    pli_tensor tensor;
    PL_TRY(self->grads->read(self->context, PL_READ_ANY, GRADIENT, grad, &tensor));
    PL_TRY(write_back(self, i, grad, &tensor.layout, tensor.data));
done:
    return st;
}

/* Sets a new gradient: only other ranks used the parameter, or its gradient is lazy. */
static pl_status bind_new(pl_step *self, size_t i)
{
    pl_status st = PL_OK;
    step_slot *slot = &self->slots[i];
    const int is_view = slot->policy == POLICY_VIEW;
    pl_grad *grad = NULL;
    PL_TRY(is_view ? make_view(self, i, &grad) : make_empty(self, i, &grad));
    replace_grad(self, &slot->target, grad); /* it outlives copies that are deferred */
    if (!is_view)
        PL_TRY(fill_copy(self, i));
    PL_TRY(self->grads->put(self->context, i, slot->target));
done:
    return st;
}

/* Writes the reduced gradient to the user's gradient.  A lazy one is replaced instead,
 * as torch does with gradient_as_bucket_view; `is_lazy` adds to what `how` shows. */
static pl_status copy_back(pl_step *self, size_t i, pl_grad *grad, pl_reading how,
                           int is_lazy)
{
    pl_status st = PL_OK;
    pli_tensor tensor;
    PL_TRY(self->grads->read(self->context, how, GRADIENT, grad, &tensor));
    tensor.layout.is_lazy |= is_lazy;
    if (tensor.layout.is_lazy && !self->settings->keeps_grads)
        PL_TRY(bind_new(self, i));
    else
        PL_TRY(write_back(self, i, grad, &tensor.layout, tensor.data));
done:
    return st;
}

/* The user may have replaced a gradient since it was read.  As in torch, the result
 * goes to the parameter's current gradient. */
static pl_status copy_to_current(pl_step *self, size_t i)
{
    pl_status st = PL_OK;
    step_slot *slot = &self->slots[i];
    pl_grad *grad = NULL;
    PL_TRY(self->grads->find(self->context, i, &grad));
    if (grad == NULL)
        return bind_new(self, i);
    replace_grad(self, &slot->target, grad);
    PL_TRY(copy_back(self, i, slot->target, PL_READ_GRAD, 0));
done:
    return st;
}

static pl_status bind_in_copy_mode(pl_step *self, size_t i)
{
    const step_slot *slot = &self->slots[i];
    if (self->settings->binds_new)
        return bind_new(self, i);
    return self->user_hooks == HOOKS_SEEN || self->settings->is_manual
               ? copy_to_current(self, i)
               : copy_back(self, i, slot->target, PL_READ_ANY, slot->is_lazy);
}

static pl_status bind_in_view_mode(pl_step *self, size_t i)
{
    pl_status st = PL_OK;
    const step_slot *slot = &self->slots[i];
    pli_tensor tensor;
    if (slot->target == NULL)
        return bind_new(self, i);
    PL_TRY(self->grads->read(self->context, PL_READ_PLAIN, "a gradient's view",
                             slot->target, &tensor));
    if (!slot_is_seen_by(self, i, &tensor)) {
        if (!slot->had_grad) /* a view; its window was retired meanwhile */
            return bind_new(self, i);
        PL_TRY(copy_back(self, i, slot->target, PL_READ_GRAD, 0));
    }
    PL_TRY(self->grads->put(self->context, i, slot->target));
done:
    return st;
}

/* The slot holds the mean of sparse gradients: makes it `.grad`, sparse again, or dense
 * if any rank's gradient was dense. */
static pl_status put_sparse_mean(pl_step *self, size_t i)
{
    pl_status st = PL_OK;
    const unsigned n_dims = pl_reducer_sparse_dims(self->reducer, i);
    pl_grad *slot = NULL;
    pl_grad *mean = NULL;
    PL_TRY(borrow_slot(self, i, &slot));
    PL_TRY(n_dims > 0 ? self->grads->to_sparse(self->context, slot, n_dims, &mean)
                      : self->grads->clone(self->context, slot, &mean));
    PL_TRY(self->grads->put_mean(self->context, i, mean));
done:
    drop_grad(self, mean);
    drop_grad(self, slot);
    return st;
}

static pl_status bind_dense(pl_step *self, size_t i)
{
    static pl_status (*const bind_by_mode[])(pl_step *, size_t) = {
        [SLOT_UNTOUCHED] = bind_new,
        [SLOT_COPY] = bind_in_copy_mode,
        [SLOT_VIEW] = bind_in_view_mode,
    };
    const step_slot *slot = &self->slots[i];
    if (pl_reducer_sparse_dims(self->reducer, i) > 0 ||
        (slot->n_sparse_dims > 0 && slot->mode == SLOT_COPY))
        return put_sparse_mean(self, i);
    return bind_by_mode[slot->mode](self, i);
}

static pl_status bind_sparse(pl_step *self, size_t i)
{
    pl_grad *mean = self->slots[i].target;
    return mean != NULL ? self->grads->put_mean(self->context, i, mean) : PL_OK;
}

/* No rank had a gradient: it gets back its value from before the reduction. */
static pl_status restore(pl_step *self, size_t i)
{
    pl_status st = PL_OK;
    const step_slot *slot = &self->slots[i];
    pli_tensor saved;
    if (slot->saved == NULL)
        goto done;
    PL_TRY(self->grads->read(self->context, PL_READ_PLAIN, "an unused gradient",
                             slot->saved, &saved));
    pli_step_defer_copy(self, slot_memory(self->reducer, i), saved.data, slot->layout);
done:
    return st;
}

/* ---- by policy ------------------------------------------------------------------ */

typedef struct policy_actions {
    pl_status (*take)(pl_step *self, size_t i);       /* a gradient arrives */
    pl_status (*leave)(pl_step *self, size_t i);      /* none has, in a backward */
    pl_status (*write_late)(pl_step *self, size_t i); /* NULL: it never is late */
    pl_status (*bind)(pl_step *self, size_t i);       /* the mean becomes `.grad` */
} policy_actions;

static const policy_actions POLICIES[] = {
    [POLICY_COPY] = {take_dense, leave_dense, write_late_copy, bind_dense},
    [POLICY_VIEW] = {take_dense, leave_dense, write_late_view, bind_dense},
    [POLICY_SPARSE] = {take_sparse, leave_sparse, NULL, bind_sparse},
};

/* If a large gradient at the top of the heap is freed at once, malloc returns its
 * memory to the kernel.  The next layer then takes a page fault per page: for a ResNet
 * 14,000 a step, a tenth of its time.  Freeing it at the end of the step keeps the heap
 * as large as it is without data parallelism; the cost in memory is bounded. */
void pli_grads_init(pl_step *self, const pl_step_spec *spec)
{
    size_t n_view_bytes = 0;
    for (size_t i = 0; i < self->n_slots; i++) {
        const size_t n_bytes = pli_layout_bytes(self->slots[i].layout);
        if (spec->is_sparse != NULL && spec->is_sparse[i]) {
            self->slots[i].policy = POLICY_SPARSE;
        } else if (n_bytes > 0 && n_bytes >= spec->view_bytes) {
            self->slots[i].policy = POLICY_VIEW;
            n_view_bytes += n_bytes;
        }
    }
    self->retains_grads = !is_on_device(self) && n_view_bytes <= MOST_RETAINED_BYTES;
}

pl_status pli_grads_take(pl_step *self, size_t i)
{
    return POLICIES[self->slots[i].policy].take(self, i);
}

pl_status pli_grads_complete(pl_step *self)
{
    pl_status st = PL_OK;
    for (size_t i = 0; i < self->n_slots; i++) {
        step_slot *slot = &self->slots[i];
        if (slot->takes_at_end) {
            slot->takes_at_end = 0;
            PL_TRY(POLICIES[slot->policy].take(self, i));
        } else if (self->reducer->slots[i].n_ready == 0) {
            PL_TRY(POLICIES[slot->policy].leave(self, i));
        }
    }
done:
    return st;
}

pl_status pli_grads_write_late(pl_step *self)
{
    pl_status st = PL_OK;
    for (size_t i = 0; i < self->n_slots; i++)
        if (pl_reducer_is_late(self->reducer, i))
            PL_TRY(POLICIES[self->slots[i].policy].write_late(self, i));
done:
    return st;
}

static pl_status bind_one(pl_step *self, size_t i)
{
    pl_status st = PL_OK;
    if (pl_reducer_is_used(self->reducer, i)) {
        PL_TRY(POLICIES[self->slots[i].policy].bind(self, i));
        if (self->autograd_context == PL_NO_CONTEXT)
            self->unseen[i] = 0;
    } else if (self->role == PL_ACTIVE) {
        PL_TRY(restore(self, i));
    } else {
        /* In a shadow step `.grad` holds the gradient of an earlier step: the optimizer
         * must not apply it again. */
        PL_TRY(self->grads->put(self->context, i, NULL));
    }
done:
    return st;
}

void pli_grads_drop(pl_step *self)
{
    for (size_t i = 0; i < self->n_slots; i++) {
        step_slot *slot = &self->slots[i];
        slot->mode = SLOT_UNTOUCHED;
        slot->takes_at_end = 0;
        replace_grad(self, &slot->target, NULL);
        replace_grad(self, &slot->late, NULL);
        replace_grad(self, &slot->retained, NULL);
        replace_grad(self, &slot->saved, NULL);
    }
}

pl_status pli_grads_bind(pl_step *self)
{
    pl_status st = PL_OK;
    for (size_t i = 0; st == PL_OK && binds_results(self) && i < self->n_slots; i++)
        st = bind_one(self, i);
    /* After a failure too: those that are bound get their values. */
    const pl_status copied = pli_step_copy(self, self->stream);
    PL_TRY(st);
    PL_TRY(copied);
    pli_grads_drop(self);
done:
    return st;
}

void pli_grads_abandon(pl_step *self)
{
    for (size_t i = 0; i < self->n_slots; i++) {
        const step_slot *slot = &self->slots[i];
        if (slot->mode == SLOT_VIEW && slot->target != NULL)
            self->grads->put_back(self->context, i, slot->target);
    }
    pli_grads_drop(self);
    self->n_moves = 0;
}
