/* grads.c - one gradient on its way into its slot and, after the step, back to `.grad`;
 * and the window through which gradients see their slots.  Action by policy:
 *
 *   event                  copy                view                     sparse
 *   ---------------------  ------------------  -----------------------  ---------
 *   gradient, bucket open  `.grad` -> slot     `.grad` -> slot or       counted
 *                                              += slot, `.grad` = None
 *   ... on a GPU           with its bucket     with its bucket, is      (copy)
 *                                              retained until then
 *   ... bucket is posted   counted as late     += slot->late            counted
 *   none in a backward     `.grad` -> slot     `.grad` -> slot, or      counted
 *                                              saved if it is in place
 *   second all-reduce      `.grad` -> slot     slot->late is added      none
 *   results                slot -> `.grad`     `.grad` = view of slot,  rows
 *                                              or the old tensor, filled
 *
 * choose_mode() decides when a step treats a view as a copy.
 */
#include "grads.h"

#include "gpu_step.h"
#include "sparse_grads.h"

enum { RELEASE_GIL_BYTES = 65536 }; /* larger copies release the GIL */

/* ---- the window follows the plan ------------------------------------------------ */

int pli_grad_window_retire(reducer_object *self)
{
    if (self->window == NULL || pli_window_n_views(self->window) == 0)
        return 0;
    if (pli_check(state_of_reducer(self), pli_window_retire(self->window)) != 0)
        return -1;
    pli_window_release(self->window);
    self->window = NULL;
    return 0;
}

int pli_grad_window_refresh(reducer_object *self)
{
    const module_state *state = state_of_reducer(self);
    size_t offset, n_bytes;
    if (pli_grad_window_retire(self) != 0)
        return -1;
    self->generation = pl_reducer_generation(self->reducer);
    if (self->window != NULL)
        return 0;
    pl_reducer_buckets(self->reducer, &offset, &n_bytes);
    if (n_bytes == 0) /* all are sparse or empty: the window has no bytes */
        return 0;
    return pli_check(state, pli_window_create(self->comm, offset, n_bytes,
                                              self->n_slots, &self->window));
}

/* ---- reading -------------------------------------------------------------------- */

/* Reads *grad, or a dense copy that replaces it.  If reading fails, the gradient is
 * sparse; the next ones are then taken for sparse until a dense one comes. */
static int read_dense(reducer_object *self, size_t i, PyObject **grad, pli_tensor *out)
{
    static const char what[] = "a parameter's gradient";
    const module_state *state = state_of_reducer(self);
    if (self->slots[i].n_sparse_dims == 0) {
        if (pli_tensor_read_grad(state, self->device.place, *grad, what, out) == 0)
            return 0;
        if (!PyErr_ExceptionMatches(PyExc_TypeError))
            return -1;
        PyErr_Clear();
    }
    if (pli_sparse_densify(self, i, grad) != 0)
        return -1;
    return pli_tensor_read_any(state, self->device.place, *grad, what, out);
}

int pli_grads_read(reducer_object *self, size_t i, PyObject **out, pli_tensor *tensor)
{
    const module_state *state = state_of_reducer(self);
    grad_slot *slot = &self->slots[i];
    PyObject *grad = PyObject_GetAttr(pli_grad_home(self, i), state->name_grad);
    if (grad == NULL)
        return -1;
    if (grad == Py_None) {
        Py_DECREF(grad);
        return 0;
    }
    if (read_dense(self, i, &grad, tensor) != 0) {
        Py_DECREF(grad);
        return -1;
    }
    if (tensor->layout.dtype != slot->layout->dtype ||
        tensor->layout.n_elems != slot->layout->n_elems) {
        PyErr_Format(
            PyExc_RuntimeError,
            "parameter %zu was %zu x %s when it was wrapped, and its gradient is "
            "%zu x %s: wrap the model again after changing its parameters",
            i, slot->layout->n_elems, pl_dtype_text(slot->layout->dtype),
            tensor->layout.n_elems, pl_dtype_text(tensor->layout.dtype));
        Py_DECREF(grad);
        return -1;
    }
    slot->is_lazy = (char)tensor->layout.is_lazy;
    *out = grad;
    return 1;
}

/* ---- a gradient arrives --------------------------------------------------------- */

int pli_grads_note(reducer_object *self, size_t first)
{
    for (size_t i = 0; self->options.keeps_grads && i < self->n_slots; i++) {
        grad_slot *slot = &self->slots[i];
        if (slot->policy != POLICY_VIEW)
            continue;
        PyObject *grad =
            PyObject_GetAttr(slot->param, state_of_reducer(self)->name_grad);
        int had_grad = grad == NULL ? -1 : grad != Py_None;
        if (had_grad == 1 && i == first) { /* did autograd add to it? */
            const long version = pli_tensor_version(grad);
            had_grad = version < 0 ? -1 : version > 0;
        }
        Py_XDECREF(grad);
        if (had_grad < 0)
            return -1;
        slot->had_grad = (char)had_grad;
    }
    return 0;
}

/* Before a slot is overwritten: views of its last gradient keep their values. */
static int protect_views(reducer_object *self, size_t i, pl_write_mode mode)
{
    if (mode == PL_IN_PLACE || self->slots[i].mode != GRAD_UNTOUCHED ||
        pli_slot_n_views(self, i) == 0)
        return 0;
    if (!pli_is_on_device(self))
        return pli_grad_window_refresh(self);
    return pli_error(
        PyExc_RuntimeError,
        "the gradient of parameter %zu was replaced during backward, and is "
        "still in use: on a GPU, replace a gradient only before backward",
        i);
}

/* Whether to release the GIL: for a large copy, or for calls of the device. */
static int takes_long(const reducer_object *self, size_t i, pl_write_mode mode)
{
    if (pli_is_on_device(self))
        return mode == PL_ADD || pl_reducer_may_post(self->reducer, i);
    return pli_layout_bytes(self->slots[i].layout) >= RELEASE_GIL_BYTES;
}

static int mark_ready(reducer_object *self, size_t i, const void *data,
                      pl_write_mode mode, pl_ready_result *out)
{
    if (protect_views(self, i, mode) != 0)
        return -1;
    PyThreadState *thread = takes_long(self, i, mode) ? PyEval_SaveThread() : NULL;
    const pl_status st =
        pl_reducer_mark_ready(self->reducer, i, data, mode, self->device.stream, out);
    pli_take_back(thread);
    return pli_check(state_of_reducer(self), st);
}

/* Makes a tensor in slot i's layout: the parameter's may have changed. */
static PyObject *make_empty(reducer_object *self, size_t i)
{
    const module_state *state = state_of_reducer(self);
    PyObject *like = pli_tensor_borrow(state, self->device.place,
                                       pli_slot_memory(self, i), self->slots[i].layout);
    PyObject *empty =
        like != NULL ? PyObject_CallOneArg(state->empty_like, like) : NULL;
    Py_XDECREF(like);
    return empty;
}

/* The gradient in the slot's layout: *out is `grad` itself if it has that layout, else
 * a copy made by torch. */
static int in_slot_layout(reducer_object *self, size_t i, PyObject *grad,
                          pli_tensor *tensor, PyObject **out)
{
    const module_state *state = state_of_reducer(self);
    const grad_slot *slot = &self->slots[i];
    if (pli_layout_equal(&tensor->layout, slot->layout)) {
        *out = Py_NewRef(grad);
        return 0;
    }
    PyObject *copy = make_empty(self, i);
    int status = copy != NULL ? pli_tensor_overwrite(copy, grad) : -1;
    if (status == 0)
        status = pli_tensor_read_on(state, self->device.place, copy,
                                    "a gradient's copy", tensor);
    if (status == 0 && !pli_layout_equal(&tensor->layout, slot->layout))
        status =
            pli_error(PyExc_RuntimeError,
                      "the shape of parameter %zu changed after wrapping: wrap the "
                      "model again",
                      i);
    if (status == 0)
        *out = Py_NewRef(copy);
    Py_XDECREF(copy);
    return status;
}

/* The slot was filled with a dense copy of a sparse gradient. */
static void set_sparse(reducer_object *self, size_t i)
{
    if (self->slots[i].n_sparse_dims > 0)
        pl_reducer_set_sparse(self->reducer, i, self->slots[i].n_sparse_dims);
}

/* Keeps one more object until its bucket is posted. */
static int retain(grad_slot *slot, PyObject *object)
{
    PyObject *both = slot->retained == NULL ? Py_NewRef(object)
                                            : PyTuple_Pack(2, slot->retained, object);
    if (both == NULL)
        return -1;
    Py_XSETREF(slot->retained, both);
    return 0;
}

/* `data` is copied later: it is the user's gradient, or a copy of it. */
static int retain_until_copied(reducer_object *self, size_t i, PyObject *grad,
                               PyObject *data)
{
    grad_slot *slot = &self->slots[i];
    if (pli_has_user_hooks(slot)) { /* they may change it before */
        PyThreadState *thread = PyEval_SaveThread();
        const pl_status st = pl_reducer_flush(self->reducer, i);
        PyEval_RestoreThread(thread);
        return pli_check(state_of_reducer(self), st);
    }
    return data != grad ? retain(slot, data) : 0;
}

static int mark_ready_by_copy(reducer_object *self, size_t i, PyObject *grad,
                              pli_tensor *tensor)
{
    grad_slot *slot = &self->slots[i];
    PyObject *dense = NULL;
    pl_ready_result result;
    if (in_slot_layout(self, i, grad, tensor, &dense) != 0)
        return -1;
    /* The second all-reduce of a large gradient adds its late part only, but this one
     * is kept whole: keep its bucket back, so that no part is late. */
    if (slot->policy == POLICY_VIEW && slot->mode == GRAD_UNTOUCHED)
        pl_reducer_defer_bucket(self->reducer, i);
    int status = mark_ready(self, i, tensor->data, PL_REPLACE, &result);
    if (status == 0 && result == PL_DEFERRED)
        status = retain_until_copied(self, i, grad, dense);
    Py_DECREF(dense);
    if (status == 0) {
        Py_XSETREF(slot->target, Py_NewRef(grad));
        slot->mode = GRAD_COPY;
        set_sparse(self, i);
    }
    return status;
}

static int add_late(grad_slot *slot, PyObject *grad)
{
    if (slot->late == NULL) {
        slot->late = Py_NewRef(grad);
        return 0;
    }
    return pli_drop(PyObject_CallMethod(slot->late, "add_", "O", grad));
}

static int mark_ready_by_view(reducer_object *self, size_t i, PyObject *grad,
                              pli_tensor *tensor)
{
    grad_slot *slot = &self->slots[i];
    const int is_in_place = pli_slot_is_seen_by(self, i, tensor);
    const int is_first = slot->mode == GRAD_UNTOUCHED;
    const int stays = is_first && slot->had_grad;
    PyObject *dense = NULL;
    pl_ready_result result;
    if (in_slot_layout(self, i, grad, tensor, &dense) != 0)
        return -1;
    const pl_write_mode mode =
        is_in_place ? PL_IN_PLACE : (is_first ? PL_REPLACE : PL_ADD);
    int status = mark_ready(self, i, tensor->data, mode, &result);
    if (status == 0 && result == PL_DEFERRED && !is_in_place)
        status = retain(slot, dense);
    Py_DECREF(dense);
    if (status != 0)
        return -1;
    slot->mode = GRAD_VIEW;
    if (result == PL_LATE) {
        if (add_late(slot, grad) != 0)
            return -1;
    } else if (!is_in_place && self->options.retains_grads) {
        Py_XSETREF(slot->retained, Py_NewRef(grad));
    }
    if (stays || (is_in_place && result != PL_LATE))
        Py_XSETREF(slot->target, Py_NewRef(grad));
    return pli_set_grad(self, i, Py_None);
}

/* The user must not see the view in place of the gradient before the step ends. */
static grad_mode choose_mode(const reducer_object *self, const grad_slot *slot,
                             const pli_tensor *grad)
{
    if (slot->mode != GRAD_UNTOUCHED)
        return slot->mode;
    return slot->policy == POLICY_VIEW && self->recording == RECORDING_OFF &&
                   self->context.homes == NULL && !pli_has_user_hooks(slot) &&
                   slot->n_sparse_dims == 0 &&
                   pli_layout_equal(&grad->layout, slot->layout)
               ? GRAD_VIEW
               : GRAD_COPY;
}

int pli_grads_mark_ready(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    PyObject *grad = NULL;
    pli_tensor tensor;
    pl_ready_result result;
    if (slot->policy == POLICY_SPARSE)
        return pli_sparse_mark_ready(self, i);
    const int has_grad = pli_grads_read(self, i, &grad, &tensor);
    if (has_grad < 0)
        return -1;
    if (has_grad == 0) /* an undefined gradient: nothing to add or wait for */
        return mark_ready(self, i, NULL,
                          slot->mode == GRAD_UNTOUCHED ? PL_REPLACE : PL_ADD, &result);
    const int status = choose_mode(self, slot, &tensor) == GRAD_VIEW
                           ? mark_ready_by_view(self, i, grad, &tensor)
                           : mark_ready_by_copy(self, i, grad, &tensor);
    Py_DECREF(grad);
    if (pli_is_on_device(self))
        pli_gpu_step_release_posted(self);
    return status;
}

/* ---- no gradient arrived -------------------------------------------------------- */

/* Whether the peers have yet to receive this gradient.  A context holds only what its
 * own backwards made: all of it counts. */
static pl_use read_use(reducer_object *self, size_t i, int has_grad)
{
    grad_slot *slot = &self->slots[i];
    if (self->context.homes != NULL)
        return has_grad ? PL_USED : PL_UNUSED;
    if (!has_grad)
        slot->is_unseen = 0; /* the accumulated gradient was reset */
    return slot->is_unseen ? PL_USED : PL_UNUSED;
}

static int mark_unused(reducer_object *self, size_t i, const void *data,
                       pl_write_mode mode, int has_grad)
{
    const pl_use use = read_use(self, i, has_grad);
    if (protect_views(self, i, mode) != 0)
        return -1;
    return pli_check(state_of_reducer(self),
                     pl_reducer_mark_unused(self->reducer, i, data, mode, use));
}

/* If no rank used it, the reduction must leave it unchanged. */
static int save(grad_slot *slot, PyObject *grad)
{
    PyObject *detached = PyObject_CallMethod(grad, "detach", NULL);
    slot->saved =
        detached != NULL ? PyObject_CallMethod(detached, "clone", NULL) : NULL;
    Py_XDECREF(detached);
    return slot->saved != NULL ? 0 : -1;
}

int pli_grads_mark_unused(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    PyObject *grad = NULL;
    PyObject *dense = NULL;
    pli_tensor tensor;
    const int is_sparse = slot->policy == POLICY_SPARSE; /* nothing is in its slot */
    const int has_grad = is_sparse ? pli_sparse_has_grad(self, i)
                                   : pli_grads_read(self, i, &grad, &tensor);
    int status = -1;
    if (has_grad < 0)
        return -1;
    if (is_sparse || has_grad == 0)
        return mark_unused(self, i, NULL, is_sparse ? PL_IN_PLACE : PL_REPLACE,
                           has_grad);
    if (pli_slot_is_seen_by(self, i, &tensor)) {
        if (save(slot, grad) != 0)
            goto done;
        status = mark_unused(self, i, NULL, PL_IN_PLACE, has_grad);
        slot->mode = GRAD_VIEW;
    } else if (in_slot_layout(self, i, grad, &tensor, &dense) == 0) {
        status = mark_unused(self, i, tensor.data, PL_REPLACE, has_grad);
        if (status == 0 && dense != grad && pli_is_on_device(self))
            status = retain(slot, dense);
        slot->mode = GRAD_COPY;
        set_sparse(self, i);
    }
    if (status == 0)
        slot->target = Py_NewRef(grad);
done:
    Py_XDECREF(dense);
    Py_DECREF(grad);
    return status;
}

/* ---- the second all-reduce ------------------------------------------------------ */

static int write_late(reducer_object *self, size_t i, const void *data,
                      pl_write_mode mode)
{
    PyThreadState *thread = PyEval_SaveThread();
    const pl_status st = pl_reducer_write_late(self->reducer, i, data, mode);
    PyEval_RestoreThread(thread);
    return pli_check(state_of_reducer(self), st);
}

int pli_grads_write_late(reducer_object *self, size_t i)
{
    const module_state *state = state_of_reducer(self);
    const grad_slot *slot = &self->slots[i];
    PyObject *dense = NULL;
    pli_tensor tensor;
    PyObject *grad = slot->policy == POLICY_VIEW ? slot->late : slot->target;
    const pl_write_mode mode = slot->policy == POLICY_VIEW ? PL_ADD : PL_REPLACE;
    if (grad == NULL)
        return write_late(self, i, NULL, mode);
    if (pli_tensor_read_grad(state, self->device.place, grad, "a parameter's gradient",
                             &tensor) != 0 ||
        in_slot_layout(self, i, grad, &tensor, &dense) != 0)
        return -1;
    const int status = write_late(self, i, tensor.data, mode);
    Py_DECREF(dense);
    return status;
}

/* ---- results -------------------------------------------------------------------- */

static int bind_new(reducer_object *self, size_t i);

/* Writes the reduced gradient to the user's gradient.  A lazy one is replaced instead,
 * as torch does with gradient_as_bucket_view.  is_lazy: -1 if not known. */
static int copy_back(reducer_object *self, size_t i, PyObject *grad, int is_lazy)
{
    const module_state *state = state_of_reducer(self);
    const grad_slot *slot = &self->slots[i];
    void *memory = pli_slot_memory(self, i);
    const dl_device place = self->device.place;
    static const char what[] = "a parameter's gradient";
    pli_tensor tensor;
    if ((is_lazy < 0 ? pli_tensor_read_grad(state, place, grad, what, &tensor)
                     : pli_tensor_read_any(state, place, grad, what, &tensor)) != 0)
        return -1;
    tensor.layout.is_lazy |= is_lazy == 1;
    if (tensor.layout.is_lazy && !self->options.keeps_grads)
        return bind_new(self, i);
    if (pli_layout_equal(&tensor.layout, slot->layout)) {
        pli_step_defer_copy(self, tensor.data, memory, slot->layout);
    } else {
        PyObject *reduced =
            pli_tensor_borrow(state, self->device.place, memory, slot->layout);
        const int status = reduced != NULL ? pli_tensor_overwrite(grad, reduced) : -1;
        Py_XDECREF(reduced);
        if (status != 0)
            return -1;
    }
    if (self->recording == RECORDING_OFF)
        return 0;
    /* The graph of the second backward may hold it: let autograd notice the change. */
    return pli_increment_version(state, grad);
}

/* Sets a new gradient: only other ranks used the parameter, or its gradient is lazy. */
static int bind_new(reducer_object *self, size_t i)
{
    const module_state *state = state_of_reducer(self);
    const grad_slot *slot = &self->slots[i];
    PyObject *grad = NULL;
    if (slot->policy == POLICY_VIEW) {
        if (self->window == NULL && pli_grad_window_refresh(self) != 0)
            return -1; /* no window: the process forked in this backward */
        const pli_view view = {.window = self->window,
                               .place = self->device.place,
                               .slot = i,
                               .offset = pli_slot_in_window(self, i)};
        grad = pli_tensor_view(state, &view, slot->layout);
    } else {
        grad = make_empty(self, i);
        if (grad != NULL && copy_back(self, i, grad, 0) != 0)
            Py_CLEAR(grad);
    }
    const int status = grad != NULL ? pli_set_grad(self, i, grad) : -1;
    Py_XDECREF(grad);
    return status;
}

/* The user's hooks may have replaced a gradient since it was read.  As in torch, the
 * result goes to the parameter's current gradient. */
static int copy_to_current(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    PyObject *grad = PyObject_GetAttr(slot->param, state_of_reducer(self)->name_grad);
    if (grad == NULL)
        return -1;
    if (grad == Py_None) {
        Py_DECREF(grad);
        return bind_new(self, i);
    }
    Py_XSETREF(slot->target, grad);
    return copy_back(self, i, grad, -1);
}

static int bind_used(reducer_object *self, size_t i)
{
    const grad_slot *slot = &self->slots[i];
    pli_tensor tensor;
    if (slot->policy == POLICY_SPARSE)
        return slot->target != NULL ? pli_sparse_put(self, i, slot->target) : 0;
    if (pl_reducer_sparse_dims(self->reducer, i) > 0 ||
        (slot->n_sparse_dims > 0 && slot->mode == GRAD_COPY))
        return pli_sparse_put_mean(self, i);
    switch (slot->mode) {
    case GRAD_COPY:
        if (self->options.binds_new)
            break;
        return self->has_user_hooks ? copy_to_current(self, i)
                                    : copy_back(self, i, slot->target, slot->is_lazy);
    case GRAD_VIEW:
        if (slot->target == NULL)
            break;
        if (pli_tensor_read_on(state_of_reducer(self), self->device.place, slot->target,
                               "a gradient's view", &tensor) != 0)
            return -1;
        if (!pli_slot_is_seen_by(self, i, &tensor)) {
            if (!slot->had_grad) /* a view; its window was retired meanwhile */
                break;
            if (copy_back(self, i, slot->target, -1) != 0)
                return -1;
        }
        return pli_set_grad(self, i, slot->target);
    case GRAD_UNTOUCHED:
        break;
    }
    return bind_new(self, i);
}

/* No rank had a gradient: it gets back its value from before the reduction. */
static int restore(reducer_object *self, size_t i)
{
    const grad_slot *slot = &self->slots[i];
    pli_tensor saved;
    if (slot->saved == NULL)
        return 0;
    if (pli_tensor_read_on(state_of_reducer(self), self->device.place, slot->saved,
                           "an unused gradient", &saved) != 0)
        return -1;
    pli_step_defer_copy(self, pli_slot_memory(self, i), saved.data, slot->layout);
    return 0;
}

int pli_results_bind(reducer_object *self, size_t i)
{
    if (!pli_binds_results(self))
        return 0;
    if (!pl_reducer_is_used(self->reducer, i))
        /* In a shadow step `.grad` holds the gradient of an earlier step: the optimizer
         * must not apply it again. */
        return self->role == PL_ACTIVE ? restore(self, i)
                                       : pli_set_grad(self, i, Py_None);
    const int status = bind_used(self, i);
    if (self->context.homes == NULL)
        self->slots[i].is_unseen = 0;
    return status;
}

void pli_results_drop(reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    slot->mode = GRAD_UNTOUCHED;
    slot->is_deferred = 0;
    Py_CLEAR(slot->target);
    Py_CLEAR(slot->late);
    Py_CLEAR(slot->retained);
    Py_CLEAR(slot->saved);
}

int pli_results_finish(reducer_object *self)
{
    const int status = pli_step_copy(self, self->device.stream);
    for (size_t i = 0; i < self->n_slots; i++)
        pli_results_drop(self, i);
    return status;
}
