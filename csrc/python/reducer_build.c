/* reducer_build.c - what a reducer is made of: its parameters, buffers and hooks. */
#include <string.h>

#include "../core/alloc.h"
#include "../core/reducer_exchange.h"
#include "reducer_build.h"

/* ---- what is reduced ---------------------------------------------------------------
 */

static int check_sizes(const pli_reducer_arguments *given)
{
    if (given->bucket_bytes > 0 && given->last_bytes > 0 && given->view_bytes >= 0)
        return 0;
    PyErr_Format(
        PyExc_ValueError,
        "bucket_bytes %zd and last_bytes %zd must be positive, view_bytes %zd not "
        "negative",
        given->bucket_bytes, given->last_bytes, given->view_bytes);
    return -1;
}

static int read_each_cap(PyObject *sequence, size_t n, size_t *each)
{
    for (size_t k = 0; k < n; k++) {
        const Py_ssize_t cap =
            PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(sequence, (Py_ssize_t)k));
        if (cap == -1 && PyErr_Occurred())
            return -1;
        if (cap <= 0) {
            PyErr_Format(PyExc_ValueError, "caps[%zu] is %zd: give bytes", k, cap);
            return -1;
        }
        each[k] = (size_t)cap;
    }
    return 0;
}

int pli_reducer_read_caps(const module_state *state, const pli_reducer_arguments *given,
                          pl_plan_caps *out)
{
    int status = -1;
    size_t *each = NULL;
    if (check_sizes(given) != 0)
        return -1;
    PyObject *fast = given->caps != NULL
                         ? PySequence_Fast(given->caps, "caps: give a "
                                                        "sequence of integers")
                         : PyTuple_New(0);
    if (fast == NULL)
        return -1;
    const size_t n = (size_t)PySequence_Fast_GET_SIZE(fast);
    if (pli_check(state, pli_calloc(n, sizeof *each, "caps of buckets", &each)) != 0 ||
        read_each_cap(fast, n, each) != 0)
        goto done;
    *out = (pl_plan_caps){.bucket_bytes = (size_t)given->bucket_bytes,
                          .last_bytes = (size_t)given->last_bytes,
                          .each = each,
                          .n_each = n};
    each = NULL;
    status = 0;
done:
    pli_free(each);
    Py_DECREF(fast);
    return status;
}

static int read_param(const module_state *state, dl_device place, size_t i,
                      PyObject *param, grad_slot *slot)
{
    pli_tensor tensor;
    char what[40];
    (void)PyOS_snprintf(what, sizeof what, "parameter %zu", i);
    if (pli_tensor_read_on(state, place, param, what, &tensor) != 0)
        return -1;
    if (!pli_layout_is_dense(&tensor.layout))
        pli_layout_make_row_major(&tensor.layout);
    slot->param = Py_NewRef(param);
    return pli_check(state, pli_layout_copy(&tensor.layout, &slot->layout));
}

static int read_params(const module_state *state, dl_device place, PyObject *params,
                       grad_slot **out, size_t *out_n)
{
    int status = -1;
    PyObject *fast = PySequence_Fast(params, "params: give a sequence of tensors");
    if (fast == NULL)
        return -1;
    const size_t n = (size_t)PySequence_Fast_GET_SIZE(fast);
    if (n == 0) {
        PyErr_SetString(PyExc_ValueError, "params is empty: give at least one tensor");
        goto done;
    }
    if (pli_check(state, pli_calloc(n, sizeof **out, "gradients", out)) != 0)
        goto done;
    *out_n = n;
    for (size_t i = 0; i < n; i++)
        if (read_param(state, place, i, PySequence_Fast_GET_ITEM(fast, (Py_ssize_t)i),
                       *out + i) != 0)
            goto done;
    status = 0;
done:
    Py_DECREF(fast);
    return status;
}

static int read_buffer(const module_state *state, dl_device place, PyObject *pair,
                       size_t offset, grad_buffer *out)
{
    PyObject *owner, *name;
    pli_tensor tensor;
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
        !PyDict_Check(PyTuple_GET_ITEM(pair, 0)) ||
        !PyUnicode_Check(PyTuple_GET_ITEM(pair, 1))) {
        PyErr_Format(PyExc_TypeError, "buffers has %R: give pairs of (dict, name)",
                     pair);
        return -1;
    }
    owner = PyTuple_GET_ITEM(pair, 0);
    name = PyTuple_GET_ITEM(pair, 1);
    PyObject *object = PyDict_GetItemWithError(owner, name);
    if (object == NULL) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_KeyError, "buffers names '%U', which its dict lacks",
                         name);
        return -1;
    }
    if (pli_tensor_read_on(state, place, object, "a buffer", &tensor) != 0)
        return -1;
    *out = (grad_buffer){.owner = Py_NewRef(owner),
                         .name = Py_NewRef(name),
                         .offset = offset,
                         .n_bytes = pli_layout_bytes(&tensor.layout)};
    return 0;
}

static int read_buffers(const module_state *state, dl_device place, PyObject *buffers,
                        grad_buffer **out, size_t *out_n, size_t *out_bytes)
{
    int status = -1;
    PyObject *fast =
        PySequence_Fast(buffers, "buffers: give a sequence of (dict, name)");
    if (fast == NULL)
        return -1;
    const size_t n = (size_t)PySequence_Fast_GET_SIZE(fast);
    if (pli_check(state, pli_calloc(n, sizeof **out, "buffers", out)) != 0)
        goto done;
    for (size_t b = 0; b < n; b++) {
        grad_buffer *buffer = *out + b;
        if (read_buffer(state, place, PySequence_Fast_GET_ITEM(fast, (Py_ssize_t)b),
                        *out_bytes, buffer) != 0)
            goto done;
        *out_bytes +=
            (buffer->n_bytes + PL_CACHE_LINE - 1) / PL_CACHE_LINE * PL_CACHE_LINE;
        *out_n = b + 1;
    }
    status = 0;
done:
    Py_DECREF(fast);
    return status;
}

/* Gives those parameters the sparse policy that are declared so; on a device they are
 * reduced densely, as any. */
static int read_sparse(PyObject *sparse, int is_on_device, grad_slot *slots,
                       size_t n_slots)
{
    int status = -1;
    PyObject *fast = sparse != NULL
                         ? PySequence_Fast(sparse, "sparse: give a sequence of indices")
                         : PyTuple_New(0);
    if (fast == NULL)
        return -1;
    for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(fast); k++) {
        const Py_ssize_t i = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(fast, k));
        if (i == -1 && PyErr_Occurred())
            goto done;
        if (i < 0 || (size_t)i >= n_slots || slots[i].layout->n_dims == 0) {
            PyErr_Format(PyExc_ValueError,
                         "sparse has %zd: give indices of params that have rows", i);
            goto done;
        }
        if (!is_on_device)
            slots[i].policy = POLICY_SPARSE;
    }
    status = 0;
done:
    Py_DECREF(fast);
    return status;
}

void pli_free_slots(grad_slot *slots, size_t n_slots)
{
    for (size_t i = 0; slots != NULL && i < n_slots; i++) {
        Py_XDECREF(slots[i].param);
        Py_XDECREF(slots[i].hook);
        Py_XDECREF(slots[i].handle);
        Py_XDECREF(slots[i].hooks);
        Py_XDECREF(slots[i].held);
        Py_XDECREF(slots[i].late);
        Py_XDECREF(slots[i].kept);
        Py_XDECREF(slots[i].saved);
        pli_free(slots[i].backup);
        pli_free(slots[i].layout);
    }
    pli_free(slots);
}

void pli_free_buffers(grad_buffer *buffers, size_t n_buffers)
{
    for (size_t b = 0; buffers != NULL && b < n_buffers; b++) {
        Py_XDECREF(buffers[b].seen);
        Py_XDECREF(buffers[b].owner);
        Py_XDECREF(buffers[b].name);
    }
    pli_free(buffers);
}

/* The core's view of the same; for free_spec(). */
static int make_spec(const module_state *state, const pli_reducer_arguments *given,
                     const grad_slot *slots, size_t n_slots, size_t extra_bytes,
                     pl_reducer_spec *out)
{
    pl_param *params = NULL;
    pl_plan_caps caps;
    if (pli_reducer_read_caps(state, given, &caps) != 0)
        return -1;
    if (pli_check(state, pli_calloc(n_slots, sizeof *params, "parameters", &params)) !=
        0) {
        pli_free((void *)caps.each);
        return -1;
    }
    size_t n_sparse = 0;
    for (size_t i = 0; i < n_slots; i++) {
        const size_t is_sparse = slots[i].policy == POLICY_SPARSE;
        params[i] = (pl_param){.n_elems = is_sparse ? 0 : slots[i].layout->n_elems,
                               .dtype = slots[i].layout->dtype};
        n_sparse += is_sparse;
    }
    *out = (pl_reducer_spec){
        .params = params,
        .n_params = n_slots,
        .extra_bytes = extra_bytes,
        .staging_bytes = n_sparse > 0 ? PLI_EXCHANGE_BYTES : 0,
        .caps = caps,
    };
    return 0;
}

static void free_spec(pl_reducer_spec *spec)
{
    pli_free((void *)spec->params);
    pli_free((void *)spec->caps.each);
}

/* Where the model is: on `device`, or else where its first parameter is. */
static int read_place(const module_state *state, PyObject *params, PyObject *device,
                      dl_device *out)
{
    *out = (dl_device){.type = DL_CPU};
    if (device != Py_None) {
        *out = ((gpu_object *)device)->place;
        return 0;
    }
    if (!PySequence_Check(params) || PySequence_Size(params) == 0)
        return 0; /* read_params() says so */
    PyObject *first = PySequence_GetItem(params, 0);
    const int status =
        first != NULL ? pli_tensor_place(state, first, "parameter 0", out) : -1;
    Py_XDECREF(first);
    if (out->type != DL_CUDA)
        out->type = DL_CPU;
    return status;
}

static int read_device(const module_state *state, PyObject *device)
{
    if (device == Py_None || Py_IS_TYPE(device, state->gpu_type))
        return 0;
    PyErr_Format(PyExc_TypeError, "device is %R: give a Device, or None", device);
    return -1;
}

PyObject *pli_measure(PyObject *module, PyObject *args)
{
    const module_state *state = PyModule_GetState(module);
    pli_reducer_arguments given = {0};
    PyObject *device = Py_None;
    dl_device place;
    grad_slot *slots = NULL;
    grad_buffer *buffers = NULL;
    size_t n_slots = 0, n_buffers = 0, extra_bytes = 0;
    pl_reducer_spec spec = {0};
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "OOnn|OO:measure", &given.params, &given.buffers,
                          &given.bucket_bytes, &given.last_bytes, &given.sparse,
                          &device) ||
        read_device(state, device) != 0 || check_sizes(&given) != 0 ||
        read_place(state, given.params, device, &place) != 0)
        return NULL;
    if (read_params(state, place, given.params, &slots, &n_slots) == 0 &&
        read_sparse(given.sparse, device != Py_None || place.type != DL_CPU, slots,
                    n_slots) == 0 &&
        read_buffers(state, place, given.buffers, &buffers, &n_buffers, &extra_bytes) ==
            0 &&
        make_spec(state, &given, slots, n_slots, extra_bytes, &spec) == 0)
        result = Py_BuildValue("nnn", (Py_ssize_t)pl_reducer_arena_bytes(&spec),
                               (Py_ssize_t)pl_reducer_max_ops(&spec),
                               (Py_ssize_t)pl_reducer_words_bytes(&spec));
    pli_free_slots(slots, n_slots);
    pli_free_buffers(buffers, n_buffers);
    free_spec(&spec);
    return result;
}

/* ---- construction
 * -------------------------------------------------------------------- */

static int register_hook(const module_state *state, reducer_object *self, size_t i)
{
    grad_slot *slot = &self->slots[i];
    slot->hook = pli_hook_new(state, self, i);
    PyObject *function =
        slot->hook != NULL ? PyObject_GetAttrString(slot->hook, "function") : NULL;
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
    /* torch.utils.swap_tensors leaves the dict here and takes what calls it away: then
     * a hook that is added is not called before the dict is set anew. */
    return PyObject_SetAttrString(slot->param, "_post_accumulate_grad_hooks",
                                  slot->hooks);
}

static grad_policy policy_by_size(const grad_slot *slot, size_t view_bytes)
{
    const size_t n_bytes = pli_layout_bytes(slot->layout);
    return n_bytes > 0 && n_bytes >= view_bytes ? POLICY_VIEW : POLICY_COPY;
}

/* What moves the gradients; for pli_backend_destroy(). */
static int make_backend(const module_state *state, reducer_object *self)
{
    const size_t n_most =
        self->n_slots > self->n_buffers ? self->n_slots : self->n_buffers;
    if (!pli_is_on_device(self))
        return pli_check(state, pli_cpu_backend_create(&self->backend));
    self->backend = self->gpu->backend;
    pli_cuda_backend_hold(self->backend);
    return pli_check(state,
                     pli_calloc(n_most, sizeof *self->moves, "copies", &self->moves));
}

int pli_reducer_build(const module_state *state, reducer_object *self,
                      const pli_reducer_arguments *given)
{
    size_t extra_bytes = 0;
    pl_reducer_spec spec = {0};
    int status = -1;
    if (read_params(state, self->place, given->params, &self->slots, &self->n_slots) !=
            0 ||
        read_sparse(given->sparse, pli_is_on_device(self), self->slots,
                    self->n_slots) != 0 ||
        read_buffers(state, self->place, given->buffers, &self->buffers,
                     &self->n_buffers, &extra_bytes) != 0 ||
        make_spec(state, given, self->slots, self->n_slots, extra_bytes, &spec) != 0 ||
        make_backend(state, self) != 0 ||
        pli_check(state, pl_reducer_create(&spec, self->comm, self->backend,
                                           &self->reducer)) != 0)
        goto done;
    for (size_t i = 0; i < self->n_slots; i++) {
        grad_slot *slot = &self->slots[i];
        if (slot->policy != POLICY_SPARSE)
            slot->policy = policy_by_size(slot, (size_t)given->view_bytes);
        if (register_hook(state, self, i) != 0)
            goto done;
    }
    if (!pli_is_on_device(self))
        pli_retention_init(&self->retention, self->slots, self->n_slots);
    status = 0;
done:
    free_spec(&spec);
    return status;
}
