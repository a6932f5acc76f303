/* reducer_build.c - a Reducer's slots, buffers, backend and hooks. */
#include "core/alloc.h"
#include "gpu_step.h"
#include "hook_type.h"
#include "reducer_args.h"

enum { MOST_RETAINED_BYTES = 64 << 20 };

static int register_hook(const module_state *state, reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    slot->hook = pli_hook_new(state, self, i);
    PyObject *function = slot->hook != NULL ? pli_hook_function(slot->hook) : NULL;
    if (function == NULL)
        return -1;
    slot->handle = PyObject_CallMethod(
        slot->param, "register_post_accumulate_grad_hook", "O", function);
    Py_DECREF(function);
    if (slot->handle == NULL)
        return -1;
    slot->hooks = PyObject_GetAttrString(slot->param, "_post_accumulate_grad_hooks");
    if (slot->hooks == NULL || !PyDict_Check(slot->hooks)) {
        Py_CLEAR(slot->hooks);
        PyErr_Clear();
        return 0;
    }
    /* torch.utils.swap_tensors keeps this dict, but moves away the C++ hook that calls
     * it: then added hooks run only after the dict is set again. */
    return PyObject_SetAttrString(slot->param, "_post_accumulate_grad_hooks",
                                  slot->hooks);
}

/* Makes the backend that moves the gradients; for pli_backend_destroy(). */
static int make_backend(const module_state *state, reducer_object *self)
{
    const size_t n_most =
        self->n_slots > self->buffers.n ? self->n_slots : self->buffers.n;
    if (pli_check(state, pli_calloc(n_most, sizeof *self->device.copies, "copies",
                                    &self->device.copies)) != 0)
        return -1;
    if (!pli_is_on_device(self))
        return pli_check(state, pli_cpu_backend_create(&self->backend));
    self->backend = self->device.gpu->backend;
    pli_cuda_backend_retain(self->backend);
    return 0;
}

/* Whether to free copied gradients at the end of the step only.  If a large gradient at
 * the top of the heap is freed at once, malloc returns its memory to the kernel.  The
 * next layer then takes a page fault per page: for a ResNet 14,000 a step, a tenth of
 * its time.  Waiting keeps the heap as large as it is without data parallelism; the
 * cost in memory is bounded. */
static int may_retain(const reducer_object *self)
{
    size_t n_bytes = 0;
    for (size_t i = 0; i < self->n_slots; i++)
        if (self->slots[i].policy == POLICY_VIEW)
            n_bytes += pli_layout_bytes(self->slots[i].layout);
    return n_bytes <= MOST_RETAINED_BYTES;
}

/* Every rank calls this at the same time. */
static int prepare(reducer_object *self)
{
    if (!pli_is_on_device(self))
        return 0;
    if (pli_gpu_step_read_stream(self) != 0)
        return -1;
    return pli_call_reducer(self, pl_reducer_prepare);
}

int pli_reducer_build(const module_state *state, reducer_object *self,
                      const pli_reducer_args *args)
{
    pli_reducer_parts parts;
    int status = -1;
    const int is_read = pli_reducer_read(state, self->device.place, args, &parts) == 0;
    self->slots = parts.slots;
    self->n_slots = parts.n_slots;
    self->buffers.all = parts.buffers;
    self->buffers.n = parts.n_buffers;
    if (!is_read || make_backend(state, self) != 0 ||
        pli_check(state, pl_reducer_create(&parts.spec, self->comm, self->backend,
                                           &self->reducer)) != 0 ||
        prepare(self) != 0)
        goto done;
    for (size_t i = 0; i < self->n_slots; i++) {
        grad_slot *slot = &self->slots[i];
        const size_t n_bytes = pli_layout_bytes(slot->layout);
        if (slot->policy != POLICY_SPARSE && n_bytes > 0 &&
            n_bytes >= (size_t)args->view_bytes)
            slot->policy = POLICY_VIEW;
        if (register_hook(state, self, i) != 0)
            goto done;
    }
    self->options.retains_grads = (char)(!pli_is_on_device(self) && may_retain(self));
    status = 0;
done:
    pli_reducer_free_spec(&parts.spec);
    return status;
}
