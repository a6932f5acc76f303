/* gpu_step.c - a step on a device: streams, copies in one launch, lifetimes.
 *
 * A gradient is retained until its bucket is posted, that is until its copy is
 * enqueued; from then on the order of the stream protects its memory.  Results that go
 * back to the user's gradients are copied in one launch at the end of the step.
 *
 * A gradient that the user sees may be a view of its slot.  If such a view still lives
 * when the slot will be overwritten, the world moves to new memory (window.h).  That is
 * possible only when a step begins: step.c checks all parameters then.
 */
#include "gpu_step.h"

/* ---- streams -------------------------------------------------------------------- */

int pli_gpu_step_read_stream(reducer_object *self)
{
    if (!pli_is_on_device(self))
        return 0;
    if (pli_gpu_current_stream(state_of_reducer(self), self->device.gpu,
                               &self->device.stream) != 0)
        return -1;
    pl_reducer_set_stream(self->reducer, self->device.stream);
    return 0;
}

int pli_gpu_step_is_capturing(const reducer_object *self, int *out)
{
    return pli_check(state_of_reducer(self),
                     pli_cuda_is_capturing(self->backend, self->device.stream, out));
}

int pli_gpu_step_check_capture(reducer_object *self)
{
    int captures = 0;
    if (!pli_is_on_device(self))
        return 0;
    if (pli_gpu_step_read_stream(self) != 0 ||
        pli_gpu_step_is_capturing(self, &captures) != 0)
        return -1;
    if (!captures)
        return 0;
    if (!pl_reducer_is_learned(self->reducer))
        return pli_error(PyExc_RuntimeError,
                         "a CUDA graph captures a backward before its buckets are in "
                         "their final order: run 3 whole steps (forward, backward, "
                         "optimizer) on the capture's stream first");
    /* A replay writes to the current memory, even after the reducer has left it. */
    if (self->device.captured == NULL)
        self->device.captured = self->comm->device->retain_memory(self->comm);
    return 0;
}

/* ---- copies --------------------------------------------------------------------- */

void pli_step_defer_copy(reducer_object *self, void *to, const void *from,
                         const pli_layout *layout)
{
    if (layout->n_elems > 0)
        self->device.copies[self->device.n_copies++] = (pl_move){
            .to = to, .from = from, .dtype = layout->dtype, .n_elems = layout->n_elems};
}

int pli_step_copy(reducer_object *self, pl_stream *stream)
{
    pl_backend *backend = self->backend;
    const size_t n_copies = self->device.n_copies;
    self->device.n_copies = 0;
    if (n_copies == 0)
        return 0;
    PyThreadState *thread = pli_let_go(self->device.gpu);
    const pl_status st =
        backend->ops->copy(backend, self->device.copies, n_copies, stream);
    pli_take_back(thread);
    return pli_check(state_of_reducer(self), st);
}

/* ---- what the step refers to ---------------------------------------------------- */

void pli_gpu_step_release_posted(reducer_object *self)
{
    const size_t n_posted = pl_reducer_n_posted(self->reducer);
    while (self->device.n_released < n_posted) {
        const pl_bucket_plan *bucket =
            &pl_reducer_plan(self->reducer)->buckets[self->device.n_released++];
        for (size_t m = 0; m < bucket->n_params; m++)
            Py_CLEAR(self->slots[bucket->params[m]].retained);
    }
}
