/* step_buffers.c - in each training forward, the root's buffers reach the others.
 *
 * The root is rank 0, unless it has joined (reducer.h).  It sends its buffers with
 * each step, beside the gradients, and the other ranks take them over later:
 *
 *  1. In a training forward the root compares its buffers with those it sent, and sends
 *     one bit: whether they differ.  If they do, it sends them again.  Then the other
 *     ranks take them over.
 *  2. In evaluation the first forward after a step takes over the buffers of that step,
 *     without waiting.  A buffer that was written or replaced since (a checkpoint was
 *     loaded) keeps its value.
 *  3. In a join context each forward does as in evaluation: no rank can tell which
 *     others run one.
 *
 * On a GPU a comparison of values would wait for the GPU, so a forward takes over the
 * buffers of the last step.  There, and across hosts, forwards after the first of a
 * step keep theirs.
 */
#include <string.h>

#include "core/alloc.h"
#include "core/crc32c.h"
#include "step_state.h"

typedef enum dense_direction { TO_DENSE, FROM_DENSE } dense_direction;

/* A buffer as it is now. */
typedef struct buffer_view {
    pl_grad *grad; /* NULL: it is gone, or has another size, such as one that grew in a
                      forward: this rank then skips it in this step, and its next
                      forward wraps the model anew */
    pli_tensor tensor;
    const step_buffer *buffer;
    char *sent; /* its block of the memory that is sent */
} buffer_view;

static void release(const pl_step *self, buffer_view *view)
{
    drop_grad(self, view->grad);
    view->grad = NULL;
}

static pl_status read_buffer(pl_step *self, size_t b, buffer_view *out)
{
    pl_status st = PL_OK;
    const step_buffer *buffer = &self->buffers.all[b];
    out->buffer = buffer;
    out->sent = (char *)pl_reducer_extra(self->reducer) + buffer->offset;
    out->grad = NULL;
    PL_TRY(self->grads->find_buffer(self->context, b, &out->grad));
    if (out->grad == NULL)
        goto done;
    PL_TRY(self->grads->read(self->context, PL_READ_PLAIN, "a buffer", out->grad,
                             &out->tensor));
    if (pli_layout_bytes(&out->tensor.layout) != buffer->spec.n_bytes)
        release(self, out);
done:
    if (st != PL_OK)
        release(self, out);
    return st;
}

/* Calls `visit` for each buffer that is there, until one fails or sets *is_done. */
typedef pl_status (*visit_fn)(pl_step *self, const buffer_view *view, int *is_done);

static pl_status visit_buffers(pl_step *self, visit_fn visit, int *is_done)
{
    pl_status st = PL_OK;
    for (size_t b = 0; st == PL_OK && !*is_done && b < self->buffers.n; b++) {
        buffer_view view;
        st = read_buffer(self, b, &view);
        if (st == PL_OK && view.grad != NULL)
            st = visit(self, &view, is_done);
        release(self, &view);
    }
    return st;
}

pl_status pl_step_has_other_buffers(pl_step *self, int *out)
{
    pl_status st = PL_OK;
    int has_other = 0;
    for (size_t b = 0; !has_other && b < self->buffers.n; b++) {
        buffer_view view;
        PL_TRY(read_buffer(self, b, &view));
        has_other = view.grad == NULL;
        release(self, &view);
    }
    *out = has_other;
done:
    return st;
}

/* Has the caller copy a lazy tensor, or one with gaps, whose elements the block then
 * has in row-major order. */
static pl_status copy_by_caller(pl_step *self, const buffer_view *view, char *block,
                                dense_direction way)
{
    pl_status st = PL_OK;
    const pl_place place = {.memory = block, .slot = SIZE_MAX};
    pli_layout layout = view->tensor.layout;
    pl_grad *dense = NULL;
    if (!pli_layout_is_dense(&layout))
        pli_layout_make_row_major(&layout);
    PL_TRY(self->grads->over(self->context, &place, &layout, &dense));
    PL_TRY(way == TO_DENSE ? self->grads->copy(self->context, dense, view->grad)
                           : self->grads->copy(self->context, view->grad, dense));
done:
    drop_grad(self, dense);
    return st;
}

/* Copies a buffer to or from its block of the memory that is sent.  A dense buffer
 * keeps its order in memory, since all ranks have the same strides.  On a GPU the copy
 * is deferred for one launch: the module keeps the tensors alive until then. */
static pl_status copy_one(pl_step *self, const buffer_view *view, dense_direction way)
{
    const pli_layout *layout = &view->tensor.layout;
    void *data = view->tensor.data;
    if (layout->is_lazy || (is_on_device(self) && !pli_layout_is_dense(layout)))
        return copy_by_caller(self, view, view->sent, way);
    if (is_on_device(self) && way == TO_DENSE)
        pli_step_defer_copy(self, view->sent, data, layout);
    else if (is_on_device(self))
        pli_step_defer_copy(self, data, view->sent, layout);
    else if (way == TO_DENSE)
        pli_layout_pack(layout, data, view->sent);
    else
        pli_layout_unpack(layout, data, view->sent);
    return PL_OK;
}

/* ---- packing -------------------------------------------------------------------- */

static pl_status pack_one(pl_step *self, const buffer_view *view, int *is_done)
{
    (void)is_done;
    return copy_one(self, view, TO_DENSE);
}

static pl_status pack(pl_step *self)
{
    pl_status st = PL_OK;
    int is_done = 0;
    PL_TRY(visit_buffers(self, pack_one, &is_done));
    PL_TRY(pli_step_copy(self, self->stream));
done:
    return st;
}

pl_status pli_buffers_pack(pl_step *self)
{
    /* If a group's collectives do nothing, each rank keeps its own values. */
    if (pl_comm_rank(self->comm) != self->reducer->root &&
        !pli_comm_is_group_comm(self->comm))
        return PL_OK;
    return pack(self);
}

/* *out: whether a buffer has the values in its block. */
static pl_status has_values(pl_step *self, const buffer_view *view, int *out)
{
    pl_status st = PL_OK;
    const pli_layout *layout = &view->tensor.layout;
    const size_t n_bytes = pli_layout_bytes(layout);
    const char *mine = view->tensor.data;
    char *copy = NULL;
    if (n_bytes > 0 && (layout->is_lazy || !pli_layout_is_dense(layout))) {
        PL_TRY(pli_calloc(n_bytes, 1, "a buffer's copy", &copy));
        if (layout->is_lazy)
            PL_TRY(copy_by_caller(self, view, copy, TO_DENSE));
        else
            pli_layout_pack(layout, view->tensor.data, copy);
        mine = copy;
    }
    *out = n_bytes == 0 || memcmp(mine, view->sent, n_bytes) == 0;
done:
    pli_free(copy);
    return st;
}

static pl_status note_write(pl_step *self, const step_buffer *buffer, pl_grad *grad)
{
    return buffer->spec.is_uncounted ? PL_OK
                                     : self->grads->note_write(self->context, grad);
}

/* Overwrites one buffer, unless it has these values already: then a graph that saved it
 * sees no change. */
static pl_status overwrite(pl_step *self, const buffer_view *view, int *is_done)
{
    pl_status st = PL_OK;
    int is_same = 0;
    (void)is_done;
    PL_TRY(has_values(self, view, &is_same));
    if (is_same)
        goto done;
    PL_TRY(copy_one(self, view, FROM_DENSE));
    PL_TRY(note_write(self, view->buffer, view->grad));
done:
    return st;
}

/* 0 for a buffer whose values are not at hand. */
static uint32_t crc_of(const pl_step *self, const buffer_view *view)
{
    const pli_layout *layout = &view->tensor.layout;
    if (view->grad == NULL || is_on_device(self) || layout->is_lazy ||
        !pli_layout_is_dense(layout))
        return 0;
    return pli_crc32c(0, view->tensor.data, pli_layout_bytes(layout));
}

/* Remembers each buffer as it is now, to take it over later. */
static pl_status put_off(pl_step *self)
{
    pl_status st = PL_OK;
    for (size_t b = 0; b < self->buffers.n; b++) {
        step_buffer *buffer = &self->buffers.all[b];
        buffer_view view = {.tensor = {.data = NULL}};
        PL_TRY(read_buffer(self, b, &view));
        buffer->data = view.tensor.data;
        buffer->crc = crc_of(self, &view);
        replace_grad(self, &buffer->seen, view.grad);
        if (buffer->seen != NULL)
            PL_TRY(
                self->grads->n_writes(self->context, buffer->seen, &buffer->version));
    }
    self->buffers.state = BUFFERS_RECEIVED;
done:
    return st;
}

pl_status pli_buffers_receive(pl_step *self)
{
    if (self->buffers.n == 0)
        return PL_OK;
    self->buffers.sent = BUFFERS_SENT;
    self->buffers.n_notices = 0;
    if (pl_comm_rank(self->comm) == self->reducer->root)
        return PL_OK;
    if (pl_reducer_root_is_active(self->reducer))
        return put_off(self);
    self->buffers.state = BUFFERS_CURRENT; /* the deferred values are overwritten */
    return PL_OK;
}

void pli_buffers_forget(pl_step *self)
{
    self->buffers.state = BUFFERS_CURRENT;
    self->buffers.sent = BUFFERS_UNSENT;
    self->buffers.n_notices = 0;
}

/* ---- in a forward --------------------------------------------------------------- */

static pl_status differs(pl_step *self, const buffer_view *view, int *out)
{
    pl_status st = PL_OK;
    int is_same = 1;
    PL_TRY(has_values(self, view, &is_same));
    *out = !is_same;
done:
    return st;
}

/* A non-root rank's wait for the root's n-th notice, and the bit in that. */
typedef struct notice_wait {
    pl_comm *comm;
    int root;
    unsigned n;
    unsigned bit;
} notice_wait;

static pl_status notice_slice(void *context, int64_t slice_ns)
{
    notice_wait *wait = context;
    return wait->comm->host->await_notice(wait->comm, wait->root, wait->n, slice_ns,
                                          &wait->bit);
}

/* *sends: whether the root sends its buffers in this forward. */
static pl_status ask_root(pl_step *self, int root, int *sends)
{
    pl_status st = PL_OK;
    notice_wait wait = {.comm = self->comm, .root = root};
    const pli_host_ops *host = self->comm->host;
    *sends = 1;
    if (host == NULL || self->buffers.n_notices == PLI_MOST_NOTICES)
        goto done;
    wait.n = ++self->buffers.n_notices;
    if (pl_comm_rank(self->comm) != root) {
        PL_TRY(pli_step_wait(self, notice_slice, &wait));
        *sends = (int)wait.bit;
        goto done;
    }
    *sends = self->buffers.sent == BUFFERS_UNSENT;
    PL_TRY(visit_buffers(self, differs, sends));
    host->notify(self->comm, wait.n, (unsigned)*sends);
done:
    return st;
}

static pl_status send(pl_step *self, int root)
{
    pl_status st = PL_OK;
    pl_ticket ticket;
    if (pl_comm_rank(self->comm) == root || pli_comm_is_group_comm(self->comm))
        PL_TRY(pack(self));
    PL_TRY(pl_reducer_send_extra(self->reducer, &ticket));
    PL_TRY(pli_step_wait_for(self, ticket));
    self->buffers.sent = BUFFERS_SENT_IN_FORWARD;
    self->buffers.n_notices = 0;
done:
    return st;
}

/* Whether the other ranks may be in their backward, because this rank has caught an
 * exception there or before it.  Only notices tell: without them a second round could
 * be mistaken for a part of that backward. */
static int may_be_alone(const pl_step *self)
{
    const forward_counts *forwards = &self->forwards;
    return self->comm->host == NULL &&
           (forwards->n_unanswered[PL_TRAINS] > 0 ||
            (forwards->n_raised[PL_TRAINS] > 0 &&
             self->buffers.sent == BUFFERS_SENT_IN_FORWARD));
}

pl_status pl_step_sync_buffers(pl_step *self)
{
    pl_status st = PL_OK;
    const int root = pl_reducer_next_root(self->reducer);
    int sends = 0;
    int is_done = 0;
    /* The next synchronised forward leaves a failed step behind, but one of no_sync()
     * does not. */
    if (is_on_device(self) || self->buffers.n == 0 ||
        pl_reducer_has_failed(self->reducer) || may_be_alone(self))
        goto done;
    PL_TRY(ask_root(self, root, &sends));
    if (sends)
        PL_TRY(send(self, root));
    self->buffers.state = BUFFERS_CURRENT;
    if (pl_comm_rank(self->comm) != root)
        PL_TRY(visit_buffers(self, overwrite, &is_done));
done:
    return st;
}

/* Whether the buffer is still the tensor that was there when its take-over was
 * deferred: then it can be read. */
static pl_status is_as_seen(pl_step *self, size_t b, int *out)
{
    pl_status st = PL_OK;
    const step_buffer *buffer = &self->buffers.all[b];
    pl_grad *now = NULL;
    *out = 0;
    if (buffer->seen == NULL)
        goto done;
    PL_TRY(self->grads->find_buffer(self->context, b, &now));
    *out = now == buffer->seen;
done:
    drop_grad(self, now);
    return st;
}

/* Lets go of a buffer that was written or replaced since its take-over was deferred, or
 * that has the new values. */
static pl_status compare_with_seen(pl_step *self, size_t b)
{
    pl_status st = PL_OK;
    step_buffer *buffer = &self->buffers.all[b];
    buffer_view view = {.grad = NULL};
    int is_as_it_was = 0;
    int has_them = 1;
    long version = 0;
    PL_TRY(is_as_seen(self, b, &is_as_it_was));
    if (is_as_it_was)
        PL_TRY(read_buffer(self, b, &view));
    if (view.grad != NULL) {
        PL_TRY(self->grads->n_writes(self->context, view.grad, &version));
        has_them = version != buffer->version || view.tensor.data != buffer->data ||
                   crc_of(self, &view) != buffer->crc;
        if (!has_them && !is_on_device(self))
            PL_TRY(has_values(self, &view, &has_them));
    }
    if (has_them)
        replace_grad(self, &buffer->seen, NULL);
done:
    release(self, &view);
    return st;
}

static pl_status take_over(pl_step *self, size_t b)
{
    pl_status st = PL_OK;
    buffer_view view;
    PL_TRY(read_buffer(self, b, &view));
    st = copy_one(self, &view, FROM_DENSE);
    release(self, &view);
done:
    return st;
}

/* Compares all buffers before it writes one: some share memory, or a version, as views
 * of one tensor. */
static pl_status apply(pl_step *self)
{
    pl_status st = PL_OK;
    PL_TRY(read_stream(self));
    for (size_t b = 0; b < self->buffers.n; b++)
        PL_TRY(compare_with_seen(self, b));
    for (size_t b = 0; b < self->buffers.n; b++)
        if (self->buffers.all[b].seen != NULL)
            PL_TRY(take_over(self, b));
    PL_TRY(pli_step_copy(self, self->stream));
    for (size_t b = 0; b < self->buffers.n; b++) {
        const step_buffer *buffer = &self->buffers.all[b];
        if (buffer->seen != NULL)
            PL_TRY(note_write(self, buffer, buffer->seen));
    }
done:
    self->n_moves = 0;
    return st;
}

pl_status pl_step_apply_buffers(pl_step *self)
{
    pl_status st = PL_OK;
    if (self->buffers.state == BUFFERS_CURRENT)
        goto done;
    self->buffers.state = BUFFERS_CURRENT;
    st = apply(self);
    for (size_t b = 0; b < self->buffers.n; b++)
        replace_grad(self, &self->buffers.all[b].seen, NULL);
    /* Replays of a captured step bring new values without a call. */
    if (st == PL_OK && self->is_captured)
        PL_TRY(put_off(self));
done:
    return st;
}
