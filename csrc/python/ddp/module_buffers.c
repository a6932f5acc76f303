/* module_buffers.c - in each training forward, the root's buffers reach the others.
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
 * While a forward awaits its backward, whose graph may have saved the buffers, they
 * stay unchanged.  On a GPU a comparison of values would wait for the GPU, so a forward
 * takes over the buffers of the last step.
 */
#include "module_buffers.h"

#include <string.h>

#include "core/alloc.h"
#include "gpu_step.h"

typedef enum dense_direction { TO_DENSE, FROM_DENSE } dense_direction;

/* Returns 1 with *out and *tensor filled, or -1.  Returns 0 if the buffer is gone or
 * has another size, such as one that grew in a forward: this rank then skips it in this
 * step, and its next forward wraps the model anew. */
static int read_buffer(reducer_object *self, const grad_buffer *buffer, PyObject **out,
                       pli_tensor *tensor)
{
    const module_state *state = state_of_reducer(self);
    PyObject *object = PyDict_GetItemWithError(buffer->owner, buffer->name);
    if (object == NULL && PyErr_Occurred())
        return -1;
    if (object == NULL || object == Py_None)
        return 0;
    if (pli_tensor_read_on(state, self->device.place, object, "a buffer", tensor) != 0)
        return -1;
    if (pli_layout_bytes(&tensor->layout) != buffer->n_bytes)
        return 0;
    *out = Py_NewRef(object);
    return 1;
}

typedef int (*read_fn)(reducer_object *self, const grad_buffer *buffer, PyObject **out,
                       pli_tensor *tensor);
typedef int (*visit_fn)(reducer_object *self, const grad_buffer *buffer,
                        PyObject *object, const pli_tensor *tensor);

/* Visits each buffer for which `read` returns 1, until a visit returns something other
 * than 0, and returns that; -1 if a buffer cannot be read. */
static int visit_buffers(reducer_object *self, read_fn read, visit_fn visit)
{
    int status = 0;
    for (size_t b = 0; status == 0 && b < self->buffers.n; b++) {
        PyObject *object = NULL;
        pli_tensor tensor;
        status = read(self, &self->buffers.all[b], &object, &tensor);
        if (status > 0)
            status = visit(self, &self->buffers.all[b], object, &tensor);
        Py_XDECREF(object);
    }
    return status;
}

PyObject *pli_buffers_get_are_others(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    reducer_object *self = (reducer_object *)object;
    int read = 1;
    (void)closure;
    for (size_t b = 0; read > 0 && b < self->buffers.n; b++) {
        PyObject *buffer = NULL;
        pli_tensor tensor;
        read = read_buffer(self, &self->buffers.all[b], &buffer, &tensor);
        Py_XDECREF(buffer);
    }
    return read < 0 ? NULL : PyBool_FromLong(!read);
}

/* Lets torch copy a lazy tensor, or one with gaps, whose elements the block then has in
 * row-major order. */
static int copy_by_torch(reducer_object *self, PyObject *object,
                         const pli_tensor *tensor, char *block, dense_direction way)
{
    pli_layout layout = tensor->layout;
    if (!pli_layout_is_dense(&layout))
        pli_layout_make_row_major(&layout);
    PyObject *dense =
        pli_tensor_borrow(state_of_reducer(self), self->device.place, block, &layout);
    int status = -1;
    if (dense != NULL)
        status = way == TO_DENSE ? pli_tensor_overwrite(dense, object)
                                 : pli_tensor_overwrite(object, dense);
    Py_XDECREF(dense);
    return status;
}

/* Copies a buffer to or from its block of the memory that is sent.  A dense buffer
 * keeps its order in memory, since all ranks have the same strides.  On a GPU the copy
 * is deferred for one launch: the module keeps the tensors alive until then. */
static int copy_one(reducer_object *self, PyObject *object, const pli_tensor *tensor,
                    const grad_buffer *buffer, dense_direction way)
{
    const pli_layout *layout = &tensor->layout;
    char *block = (char *)pl_reducer_extra(self->reducer) + buffer->offset;
    if (layout->is_lazy || (pli_is_on_device(self) && !pli_layout_is_dense(layout)))
        return copy_by_torch(self, object, tensor, block, way);
    if (pli_is_on_device(self) && way == TO_DENSE)
        pli_step_defer_copy(self, block, tensor->data, layout);
    else if (pli_is_on_device(self))
        pli_step_defer_copy(self, tensor->data, block, layout);
    else if (way == TO_DENSE)
        pli_layout_pack(layout, tensor->data, block);
    else
        pli_layout_unpack(layout, tensor->data, block);
    return 0;
}

/* ---- packing -------------------------------------------------------------------- */

static int pack_one(reducer_object *self, const grad_buffer *buffer, PyObject *object,
                    const pli_tensor *tensor)
{
    return copy_one(self, object, tensor, buffer, TO_DENSE);
}

static int pack(reducer_object *self)
{
    if (visit_buffers(self, read_buffer, pack_one) != 0)
        return -1;
    return pli_step_copy(self, self->device.stream);
}

int pli_buffers_pack(reducer_object *self)
{
    /* If a group's collectives do nothing, each rank keeps its own values. */
    if (pl_comm_rank(self->comm) != pl_reducer_root(self->reducer) &&
        !pli_comm_is_group_comm(self->comm))
        return 0;
    return pack(self);
}

/* Returns 1, 0 or -1. */
static int has_values(reducer_object *self, PyObject *object, const pli_tensor *tensor,
                      const char *values)
{
    const size_t n_bytes = pli_layout_bytes(&tensor->layout);
    char *mine = NULL;
    if (n_bytes == 0)
        return 1;
    if (!tensor->layout.is_lazy && pli_layout_is_dense(&tensor->layout))
        return memcmp(tensor->data, values, n_bytes) == 0;
    if (pli_check(state_of_reducer(self),
                  pli_calloc(n_bytes, 1, "a buffer's copy", &mine)) != 0)
        return -1;
    int status = 0;
    if (tensor->layout.is_lazy)
        status = copy_by_torch(self, object, tensor, mine, TO_DENSE);
    else
        pli_layout_pack(&tensor->layout, tensor->data, mine);
    const int is_same = status == 0 ? memcmp(mine, values, n_bytes) == 0 : -1;
    pli_free(mine);
    return is_same;
}

/* Overwrites one buffer, unless it has these values already: then a graph that saved it
 * sees no change. */
static int overwrite(reducer_object *self, const grad_buffer *buffer, PyObject *object,
                     const pli_tensor *tensor)
{
    char *values = (char *)pl_reducer_extra(self->reducer) + buffer->offset;
    const int is_same = has_values(self, object, tensor, values);
    if (is_same != 0)
        return is_same < 0 ? -1 : 0;
    if (copy_one(self, object, tensor, buffer, FROM_DENSE) != 0)
        return -1;
    return pli_increment_version(state_of_reducer(self), object);
}

/* Remembers each buffer as it is now, to take it over later. */
static int put_off(reducer_object *self)
{
    for (size_t b = 0; b < self->buffers.n; b++) {
        grad_buffer *buffer = &self->buffers.all[b];
        PyObject *object = NULL;
        pli_tensor tensor;
        if (read_buffer(self, buffer, &object, &tensor) < 0)
            return -1;
        Py_XSETREF(buffer->seen, object);
        buffer->version = object != NULL ? pli_tensor_version(object) : 0;
        if (buffer->version < 0)
            return -1;
    }
    self->buffers.state = BUFFERS_RECEIVED;
    return 0;
}

int pli_buffers_receive(reducer_object *self)
{
    if (self->buffers.n == 0)
        return 0;
    self->buffers.sent = BUFFERS_SENT;
    self->buffers.n_notices = 0;
    if (pl_comm_rank(self->comm) == pl_reducer_root(self->reducer))
        return 0;
    if (!pl_reducer_root_is_active(self->reducer)) {
        self->buffers.state = BUFFERS_CURRENT; /* the deferred values are overwritten */
        return 0;
    }
    return put_off(self);
}

void pli_buffers_forget(reducer_object *self)
{
    self->buffers.state = BUFFERS_CURRENT;
    self->buffers.sent = BUFFERS_UNSENT;
    self->buffers.n_notices = 0;
}

/* ---- in a forward --------------------------------------------------------------- */

/* Returns 1 if a buffer differs from the values sent last, 0, or -1. */
static int differs(reducer_object *self, const grad_buffer *buffer, PyObject *object,
                   const pli_tensor *tensor)
{
    const char *sent = (const char *)pl_reducer_extra(self->reducer) + buffer->offset;
    const int is_same = has_values(self, object, tensor, sent);
    return is_same < 0 ? -1 : !is_same;
}

/* Returns 1 if any buffer differs from the values sent last, 0, or -1. */
static int is_to_send(reducer_object *self)
{
    if (self->buffers.sent == BUFFERS_UNSENT)
        return 1;
    return visit_buffers(self, read_buffer, differs);
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

/* Whether the root sends its buffers in this forward: the root's answer, or -1. */
static int ask_root(reducer_object *self, int root)
{
    notice_wait wait = {.comm = self->comm, .root = root};
    const pli_host_ops *host = self->comm->host;
    if (host == NULL || self->buffers.n_notices == PLI_MOST_NOTICES)
        return 1;
    wait.n = ++self->buffers.n_notices;
    if (pl_comm_rank(self->comm) != root)
        return pli_wait_in_slices(state_of_reducer(self), notice_slice, &wait) != 0
                   ? -1
                   : (int)wait.bit;
    const int sends = is_to_send(self);
    if (sends >= 0)
        host->notify(self->comm, wait.n, (unsigned)sends);
    return sends;
}

static int send(reducer_object *self, int root)
{
    pl_ticket ticket;
    const module_state *state = state_of_reducer(self);
    if ((pl_comm_rank(self->comm) == root || pli_comm_is_group_comm(self->comm)) &&
        pack(self) != 0)
        return -1;
    if (pli_check(state, pl_reducer_send_extra(self->reducer, &ticket)) != 0 ||
        pli_wait_for_ticket(state, self->comm, ticket) != 0)
        return -1;
    self->buffers.sent = BUFFERS_SENT_IN_FORWARD;
    self->buffers.n_notices = 0;
    return 0;
}

int pli_buffers_sync(reducer_object *self)
{
    const int root = pl_reducer_next_root(self->reducer);
    /* The next synchronised forward leaves a failed step behind, but one of no_sync()
     * does not. */
    if (self->buffers.n == 0 || self->forwards.n_unanswered[MODE_TRAINING] > 0 ||
        pl_reducer_has_failed(self->reducer))
        return 0;
    /* If only this rank has raised, the others are in their backward.  Without notices,
     * a second round would be mistaken for a part of that. */
    if (self->comm->host == NULL && self->forwards.n_raised[MODE_TRAINING] > 0 &&
        self->buffers.sent == BUFFERS_SENT_IN_FORWARD)
        return 0;
    const int sends = ask_root(self, root);
    if (sends < 0 || (sends > 0 && send(self, root) != 0))
        return -1;
    self->buffers.state = BUFFERS_CURRENT;
    if (pl_comm_rank(self->comm) == root)
        return 0;
    return visit_buffers(self, read_buffer, overwrite);
}

/* Reads a buffer and returns 1 if it is as it was when its take-over was deferred; 0 if
 * it was written or replaced since; -1. */
static int is_as_seen(reducer_object *self, const grad_buffer *buffer, PyObject **out,
                      pli_tensor *tensor)
{
    if (buffer->seen == NULL ||
        PyDict_GetItem(buffer->owner, buffer->name) != buffer->seen)
        return 0;
    const int is_read = read_buffer(self, buffer, out, tensor);
    if (is_read <= 0)
        return is_read;
    const long version = pli_tensor_version(*out);
    return version < 0 ? -1 : version == buffer->version;
}

static int launch_in(reducer_object *self)
{
    const module_state *state = state_of_reducer(self);
    PyObject *written = PyList_New(0);
    int status = written != NULL ? pli_gpu_step_read_stream(self) : -1;
    for (size_t b = 0; b < self->buffers.n; b++) {
        grad_buffer *buffer = &self->buffers.all[b];
        PyObject *object = NULL;
        pli_tensor tensor;
        const int is_to = status == 0 ? is_as_seen(self, buffer, &object, &tensor) : 0;
        if (is_to < 0)
            status = -1;
        else if (is_to && (copy_one(self, object, &tensor, buffer, FROM_DENSE) != 0 ||
                           PyList_Append(written, object) != 0))
            status = -1;
        Py_XDECREF(object);
    }
    if (status == 0)
        status = pli_step_copy(self, self->device.stream);
    if (status == 0 && PyList_GET_SIZE(written) > 0)
        status = pli_increment_versions(state, written);
    self->device.n_copies = 0;
    Py_XDECREF(written);
    return status;
}

int pli_buffers_apply(reducer_object *self)
{
    if (self->buffers.state == BUFFERS_CURRENT)
        return 0;
    self->buffers.state = BUFFERS_CURRENT;
    const int status = pli_is_on_device(self)
                           ? launch_in(self)
                           : visit_buffers(self, is_as_seen, overwrite);
    for (size_t b = 0; b < self->buffers.n; b++)
        Py_CLEAR(self->buffers.all[b].seen);
    /* Replays of a captured step bring new values without a call. */
    return status == 0 && self->device.captured != NULL ? put_off(self) : status;
}
