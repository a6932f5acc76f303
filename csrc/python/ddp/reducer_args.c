/* reducer_args.c - reads a reducer's arguments: its parameters and buffers. */
#include "reducer_args.h"

#include "core/alloc.h"
#include "reducer/sparse_exchange.h"

static int check_sizes(const pli_reducer_args *args)
{
    if (args->bucket_bytes > 0 && args->last_bytes > 0 && args->view_bytes >= 0)
        return 0;
    return pli_error(
        PyExc_ValueError,
        "bucket_bytes %zd and last_bytes %zd must be positive, view_bytes %zd not "
        "negative",
        args->bucket_bytes, args->last_bytes, args->view_bytes);
}

int pli_reducer_read_caps(const module_state *state, const pli_reducer_args *args,
                          pl_plan_caps *out)
{
    const size_t n = args->caps != NULL ? (size_t)PyTuple_GET_SIZE(args->caps) : 0;
    size_t *each = NULL;
    if (check_sizes(args) != 0 ||
        pli_check(state, pli_calloc(n, sizeof *each, "caps of buckets", &each)) != 0)
        return -1;
    for (size_t k = 0; k < n; k++) {
        const Py_ssize_t cap =
            PyLong_AsSsize_t(PyTuple_GET_ITEM(args->caps, (Py_ssize_t)k));
        if (cap <= 0) {
            pli_free(each);
            return PyErr_Occurred() != NULL
                       ? -1
                       : pli_error(PyExc_ValueError, "caps[%zu] is %zd: give bytes", k,
                                   cap);
        }
        each[k] = (size_t)cap;
    }
    *out = (pl_plan_caps){.bucket_bytes = (size_t)args->bucket_bytes,
                          .last_bytes = (size_t)args->last_bytes,
                          .each = each,
                          .n_each = n};
    return 0;
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
    tensor.layout.is_lazy = 0; /* the slot is not lazy */
    slot->param = Py_NewRef(param);
    return pli_check(state, pli_layout_copy(&tensor.layout, &slot->layout));
}

static int read_params(const module_state *state, dl_device place, PyObject *params,
                       pli_reducer_parts *out)
{
    const size_t n = (size_t)PyList_GET_SIZE(params);
    if (n == 0)
        return pli_error(PyExc_ValueError, "params is empty: give at least one tensor");
    if (pli_check(state, pli_calloc(n, sizeof *out->slots, "gradients", &out->slots)) !=
        0)
        return -1;
    out->n_slots = n;
    for (size_t i = 0; i < n; i++)
        if (read_param(state, place, i, PyList_GET_ITEM(params, (Py_ssize_t)i),
                       &out->slots[i]) != 0)
            return -1;
    return 0;
}

static int read_buffer(const module_state *state, dl_device place, PyObject *pair,
                       size_t offset, grad_buffer *out)
{
    PyObject *owner, *name;
    pli_tensor tensor;
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 ||
        !PyDict_Check(PyTuple_GET_ITEM(pair, 0)) ||
        !PyUnicode_Check(PyTuple_GET_ITEM(pair, 1)))
        return pli_error(PyExc_TypeError, "buffers has %R: give pairs of (dict, name)",
                         pair);
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
                        pli_reducer_parts *out)
{
    const Py_ssize_t n = PyList_GET_SIZE(buffers);
    if (pli_check(state, pli_calloc((size_t)n, sizeof *out->buffers, "buffers",
                                    &out->buffers)) != 0)
        return -1;
    for (Py_ssize_t b = 0; b < n; b++) {
        grad_buffer *buffer = &out->buffers[b];
        if (read_buffer(state, place, PyList_GET_ITEM(buffers, b),
                        out->spec.extra_bytes, buffer) != 0)
            return -1;
        out->spec.extra_bytes +=
            (buffer->n_bytes + PL_CACHE_LINE - 1) / PL_CACHE_LINE * PL_CACHE_LINE;
        out->n_buffers++;
    }
    return 0;
}

static int read_sparse(const pli_reducer_args *args, pli_reducer_parts *out)
{
    const Py_ssize_t n = args->sparse != NULL ? PyList_GET_SIZE(args->sparse) : 0;
    for (Py_ssize_t k = 0; k < n; k++) {
        const Py_ssize_t i = PyLong_AsSsize_t(PyList_GET_ITEM(args->sparse, k));
        if (i == -1 && PyErr_Occurred())
            return -1;
        if (i < 0 || (size_t)i >= out->n_slots || out->slots[i].layout->n_dims == 0)
            return pli_error(PyExc_ValueError,
                             "sparse has %zd: give indices of params that have rows",
                             i);
        if (!args->is_on_device)
            out->slots[i].policy = POLICY_SPARSE;
    }
    return 0;
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

static int make_spec(const module_state *state, const pli_reducer_args *args,
                     pli_reducer_parts *out)
{
    pl_param *params = NULL;
    pl_reducer_spec *spec = &out->spec;
    if (pli_check(state,
                  pli_calloc(out->n_slots, sizeof *params, "parameters", &params)) != 0)
        return -1;
    spec->params = params;
    spec->n_params = out->n_slots;
    spec->world_size = args->world_size;
    for (size_t i = 0; i < out->n_slots; i++) {
        const grad_slot *slot = &out->slots[i];
        const int is_sparse = slot->policy == POLICY_SPARSE;
        params[i] = (pl_param){.n_elems = is_sparse ? 0 : slot->layout->n_elems,
                               .dtype = slot->layout->dtype};
        if (is_sparse)
            spec->staging_bytes = PLI_EXCHANGE_BYTES;
    }
    return pli_reducer_read_caps(state, args, &spec->caps);
}

int pli_reducer_read(const module_state *state, dl_device place,
                     const pli_reducer_args *args, pli_reducer_parts *out)
{
    *out = (pli_reducer_parts){.n_slots = 0};
    return read_params(state, place, args->params, out) != 0 ||
                   read_sparse(args, out) != 0 ||
                   read_buffers(state, place, args->buffers, out) != 0 ||
                   make_spec(state, args, out) != 0
               ? -1
               : 0;
}

void pli_reducer_free_spec(pl_reducer_spec *spec)
{
    pli_free((void *)spec->params);
    pli_free((void *)spec->caps.each);
}

PyObject *pli_measure(PyObject *module, PyObject *args)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    pli_reducer_args read = {0};
    PyObject *device = Py_None;
    dl_device place = {.type = DL_CPU};
    pli_reducer_parts parts;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "O!O!nn|O!Oi:measure", &PyList_Type, &read.params,
                          &PyList_Type, &read.buffers, &read.bucket_bytes,
                          &read.last_bytes, &PyList_Type, &read.sparse, &device,
                          &read.world_size) ||
        pli_check_device(state, device) != 0 || check_sizes(&read) != 0)
        return NULL;
    read.is_on_device = device != Py_None;
    if (read.is_on_device)
        place = ((gpu_object *)device)->place;
    if (pli_reducer_read(state, place, &read, &parts) == 0)
        result = Py_BuildValue("nnn", (Py_ssize_t)pl_reducer_arena_bytes(&parts.spec),
                               (Py_ssize_t)pl_reducer_max_ops(&parts.spec),
                               (Py_ssize_t)pl_reducer_header_bytes(&parts.spec));
    pli_free_slots(parts.slots, parts.n_slots);
    pli_free_buffers(parts.buffers, parts.n_buffers);
    pli_reducer_free_spec(&parts.spec);
    return result;
}
