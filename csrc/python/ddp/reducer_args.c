/* reducer_args.c - what a reducer is made of: its parameters and buffers. */
#include "reducer_args.h"

#include "core/alloc.h"
#include "reducer/sparse_exchange.h"

static int check_sizes(const pli_reducer_args *args)
{
    if (args->bucket_bytes > 0 && args->last_bytes > 0 && args->view_bytes >= 0)
        return 0;
    PyErr_Format(
        PyExc_ValueError,
        "bucket_bytes %zd and last_bytes %zd must be positive, view_bytes %zd not "
        "negative",
        args->bucket_bytes, args->last_bytes, args->view_bytes);
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

int pli_reducer_read_caps(const module_state *state, const pli_reducer_args *args,
                          pl_plan_caps *out)
{
    int status = -1;
    size_t *each = NULL;
    if (check_sizes(args) != 0)
        return -1;
    PyObject *fast = args->caps != NULL
                         ? PySequence_Fast(args->caps, "caps: give a "
                                                       "sequence of integers")
                         : PyTuple_New(0);
    if (fast == NULL)
        return -1;
    const size_t n = (size_t)PySequence_Fast_GET_SIZE(fast);
    if (pli_check(state, pli_calloc(n, sizeof *each, "caps of buckets", &each)) != 0 ||
        read_each_cap(fast, n, each) != 0)
        goto done;
    *out = (pl_plan_caps){.bucket_bytes = (size_t)args->bucket_bytes,
                          .last_bytes = (size_t)args->last_bytes,
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
    if (pli_tensor_read_any(state, place, param, what, &tensor) != 0)
        return -1;
    if (!pli_layout_is_dense(&tensor.layout))
        pli_layout_make_row_major(&tensor.layout);
    tensor.layout.is_lazy = 0; /* its slot is not */
    slot->param = Py_NewRef(param);
    return pli_check(state, pli_layout_copy(&tensor.layout, &slot->layout));
}

int pli_reducer_read_params(const module_state *state, dl_device place,
                            PyObject *params, grad_slot **out, size_t *out_n)
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

int pli_reducer_read_buffers(const module_state *state, dl_device place,
                             PyObject *buffers, grad_buffer **out, size_t *out_n,
                             size_t *out_bytes)
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

int pli_reducer_read_sparse(PyObject *sparse, int is_on_device, grad_slot *slots,
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
        Py_XDECREF(slots[i].target);
        Py_XDECREF(slots[i].late);
        Py_XDECREF(slots[i].retained);
        Py_XDECREF(slots[i].saved);
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

int pli_reducer_make_spec(const module_state *state, const pli_reducer_args *args,
                          const grad_slot *slots, size_t n_slots, size_t extra_bytes,
                          pl_reducer_spec *out)
{
    pl_param *params = NULL;
    pl_plan_caps caps;
    if (pli_reducer_read_caps(state, args, &caps) != 0)
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
        .world_size = args->world_size,
        .extra_bytes = extra_bytes,
        .staging_bytes = n_sparse > 0 ? PLI_EXCHANGE_BYTES : 0,
        .caps = caps,
    };
    return 0;
}

void pli_reducer_free_spec(pl_reducer_spec *spec)
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
        return 0; /* pli_reducer_read_params() says so */
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
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    pli_reducer_args read = {0};
    PyObject *device = Py_None;
    dl_device place;
    grad_slot *slots = NULL;
    grad_buffer *buffers = NULL;
    size_t n_slots = 0, n_buffers = 0, extra_bytes = 0;
    pl_reducer_spec spec = {0};
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "OOnn|OOi:measure", &read.params, &read.buffers,
                          &read.bucket_bytes, &read.last_bytes, &read.sparse, &device,
                          &read.world_size) ||
        read_device(state, device) != 0 || check_sizes(&read) != 0 ||
        read_place(state, read.params, device, &place) != 0)
        return NULL;
    if (pli_reducer_read_params(state, place, read.params, &slots, &n_slots) == 0 &&
        pli_reducer_read_sparse(read.sparse, device != Py_None || place.type != DL_CPU,
                                slots, n_slots) == 0 &&
        pli_reducer_read_buffers(state, place, read.buffers, &buffers, &n_buffers,
                                 &extra_bytes) == 0 &&
        pli_reducer_make_spec(state, &read, slots, n_slots, extra_bytes, &spec) == 0)
        result = Py_BuildValue("nnn", (Py_ssize_t)pl_reducer_arena_bytes(&spec),
                               (Py_ssize_t)pl_reducer_max_ops(&spec),
                               (Py_ssize_t)pl_reducer_header_bytes(&spec));
    pli_free_slots(slots, n_slots);
    pli_free_buffers(buffers, n_buffers);
    pli_reducer_free_spec(&spec);
    return result;
}
