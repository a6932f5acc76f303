/* reducer_type.c - paceline._native.Reducer: its arguments, construction, methods and
 * attributes. */
#include <stddef.h>

#include "autograd_hooks.h"
#include "comm_hook.h"
#include "core/alloc.h"
#include <structmember.h>

/* A Reducer's arguments as Python passes them; all sizes are in bytes. */
typedef struct reducer_args {
    PyObject *world;   /* NULL in measure() */
    PyObject *params;  /* list of tensors */
    PyObject *buffers; /* list of (dict, name, is_uncounted) */
    Py_ssize_t bucket_bytes;
    Py_ssize_t last_bytes;
    Py_ssize_t view_bytes; /* the smallest gradient that becomes a view */
    PyObject *sparse;      /* list of indices into params, or NULL */
    PyObject *caps;        /* tuple with the size of each bucket, or NULL */
    int world_size;        /* 0: up to PL_MAX_RANKS */
    int is_on_device;
} reducer_args;

/* The parts made from the arguments. */
typedef struct reducer_parts {
    reducer_param *params; /* for free_params() */
    size_t n_params;
    reducer_buffer *buffers; /* for free_buffers() */
    size_t n_buffers;
    pli_layout **layouts;
    unsigned char *is_sparse;
    pl_buffer_spec *buffer_specs;
    pl_step_spec spec; /* reads all of these */
} reducer_parts;

static reducer_object *reducer_of(PyObject *object)
{
    return (reducer_object *)object;
}

/* ---- arguments ------------------------------------------------------------------ */

static int check_sizes(Py_ssize_t bucket_bytes, Py_ssize_t last_bytes,
                       Py_ssize_t view_bytes)
{
    if (bucket_bytes > 0 && last_bytes > 0 && view_bytes >= 0)
        return 0;
    return pli_error(
        PyExc_ValueError,
        "bucket_bytes %zd and last_bytes %zd must be positive, view_bytes %zd not "
        "negative",
        bucket_bytes, last_bytes, view_bytes);
}

/* Reads the caps of buckets, a tuple or NULL; out->each is for pli_free(). */
static int read_caps(const module_state *state, Py_ssize_t bucket_bytes,
                     Py_ssize_t last_bytes, PyObject *caps, pl_plan_caps *out)
{
    const size_t n = caps != NULL ? (size_t)PyTuple_GET_SIZE(caps) : 0;
    size_t *each = NULL;
    if (check_sizes(bucket_bytes, last_bytes, 0) != 0 ||
        pli_check(state, pli_calloc(n, sizeof *each, "caps of buckets", &each)) != 0)
        return -1;
    for (size_t k = 0; k < n; k++) {
        const Py_ssize_t cap = PyLong_AsSsize_t(PyTuple_GET_ITEM(caps, (Py_ssize_t)k));
        if (cap <= 0) {
            pli_free(each);
            return PyErr_Occurred() != NULL
                       ? -1
                       : pli_error(PyExc_ValueError, "caps[%zu] is %zd: give bytes", k,
                                   cap);
        }
        each[k] = (size_t)cap;
    }
    *out = (pl_plan_caps){.bucket_bytes = (size_t)bucket_bytes,
                          .last_bytes = (size_t)last_bytes,
                          .each = each,
                          .n_each = n};
    return 0;
}

static int read_param(const module_state *state, dl_device place, size_t i,
                      PyObject *param, pli_layout **out)
{
    pli_tensor tensor;
    char what[40];
    (void)PyOS_snprintf(what, sizeof what, "parameter %zu", i);
    if (pli_tensor_read_any(state, place, param, what, &tensor) != 0)
        return -1;
    if (tensor.layout.dtype < PL_F16)
        return pli_error(PyExc_NotImplementedError,
                         "%s has a type that paceline cannot reduce", what);
    if (!pli_layout_is_dense(&tensor.layout))
        pli_layout_make_row_major(&tensor.layout);
    tensor.layout.is_lazy = 0; /* the slot is not lazy */
    return pli_check(state, pli_layout_copy(&tensor.layout, out));
}

static int read_params(const module_state *state, dl_device place, PyObject *params,
                       reducer_parts *out)
{
    const size_t n = (size_t)PyList_GET_SIZE(params);
    if (n == 0)
        return pli_error(PyExc_ValueError, "params is empty: give at least one tensor");
    if (pli_check(state,
                  pli_calloc(n, sizeof *out->params, "parameters", &out->params)) != 0)
        return -1;
    out->n_params = n;
    if (pli_check(state,
                  pli_calloc(n, sizeof *out->layouts, "gradients", &out->layouts)) != 0)
        return -1;
    for (size_t i = 0; i < n; i++) {
        PyObject *param = PyList_GET_ITEM(params, (Py_ssize_t)i);
        if (read_param(state, place, i, param, &out->layouts[i]) != 0)
            return -1;
        out->params[i].param = Py_NewRef(param);
    }
    return 0;
}

static int read_buffer(const module_state *state, dl_device place, PyObject *entry,
                       reducer_buffer *out, pl_buffer_spec *spec)
{
    PyObject *owner, *name;
    pli_tensor tensor;
    int is_uncounted;
    if (!PyTuple_Check(entry) ||
        !PyArg_ParseTuple(entry, "O!O!p", &PyDict_Type, &owner, &PyUnicode_Type, &name,
                          &is_uncounted))
        return pli_error(PyExc_TypeError,
                         "buffers has %R: give (dict, name, is_uncounted)", entry);
    PyObject *object = pli_dict_get(owner, name);
    if (object == NULL) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_KeyError, "buffers names '%U', which its dict lacks",
                         name);
        return -1;
    }
    const int status = pli_tensor_read_on(state, place, object, "a buffer", &tensor);
    Py_DECREF(object);
    if (status != 0)
        return -1;
    *out = (reducer_buffer){.owner = Py_NewRef(owner), .name = Py_NewRef(name)};
    *spec = (pl_buffer_spec){.n_bytes = pli_layout_bytes(&tensor.layout),
                             .is_uncounted = is_uncounted};
    return 0;
}

static int read_buffers(const module_state *state, dl_device place, PyObject *buffers,
                        reducer_parts *out)
{
    const size_t n = (size_t)PyList_GET_SIZE(buffers);
    if (pli_check(state,
                  pli_calloc(n, sizeof *out->buffers, "buffers", &out->buffers)) != 0 ||
        pli_check(state, pli_calloc(n, sizeof *out->buffer_specs, "buffers",
                                    &out->buffer_specs)) != 0)
        return -1;
    for (size_t b = 0; b < n; b++, out->n_buffers++)
        if (read_buffer(state, place, PyList_GET_ITEM(buffers, (Py_ssize_t)b),
                        &out->buffers[b], &out->buffer_specs[b]) != 0)
            return -1;
    return 0;
}

/* On a GPU, gradients declared sparse are reduced as dense ones. */
static int read_sparse(const module_state *state, const reducer_args *args,
                       reducer_parts *out)
{
    const Py_ssize_t n = args->sparse != NULL ? PyList_GET_SIZE(args->sparse) : 0;
    if (!args->is_on_device &&
        pli_check(state, pli_calloc(out->n_params, 1, "gradients", &out->is_sparse)) !=
            0)
        return -1;
    for (Py_ssize_t k = 0; k < n; k++) {
        const Py_ssize_t i = PyLong_AsSsize_t(PyList_GET_ITEM(args->sparse, k));
        if (i == -1 && PyErr_Occurred())
            return -1;
        if (i < 0 || (size_t)i >= out->n_params || out->layouts[i]->n_dims == 0)
            return pli_error(PyExc_ValueError,
                             "sparse has %zd: give indices of params that have rows",
                             i);
        if (out->is_sparse != NULL)
            out->is_sparse[i] = 1;
    }
    return 0;
}

static void free_params(reducer_param *params, size_t n_params)
{
    for (size_t i = 0; params != NULL && i < n_params; i++) {
        Py_XDECREF(params[i].param);
        Py_XDECREF(params[i].hook);
        Py_XDECREF(params[i].handle);
        Py_XDECREF(params[i].hooks);
        Py_XDECREF(params[i].view);
    }
    pli_free(params);
}

static void free_buffers(reducer_buffer *buffers, size_t n_buffers)
{
    for (size_t b = 0; buffers != NULL && b < n_buffers; b++) {
        Py_XDECREF(buffers[b].owner);
        Py_XDECREF(buffers[b].name);
    }
    pli_free(buffers);
}

/* Reads all but the world; free *out after a failure too. */
static int read_parts(const module_state *state, dl_device place,
                      const reducer_args *args, reducer_parts *out)
{
    *out = (reducer_parts){.n_params = 0};
    if (read_params(state, place, args->params, out) != 0 ||
        read_sparse(state, args, out) != 0 ||
        read_buffers(state, place, args->buffers, out) != 0 ||
        check_sizes(args->bucket_bytes, args->last_bytes, args->view_bytes) != 0)
        return -1;
    out->spec = (pl_step_spec){.layouts = out->layouts,
                               .is_sparse = out->is_sparse,
                               .n_params = out->n_params,
                               .buffers = out->buffer_specs,
                               .n_buffers = out->n_buffers,
                               .view_bytes = (size_t)args->view_bytes,
                               .world_size = args->world_size};
    return read_caps(state, args->bucket_bytes, args->last_bytes, args->caps,
                     &out->spec.caps);
}

/* Frees what only the spec reads. */
static void free_spec(reducer_parts *parts)
{
    for (size_t i = 0; parts->layouts != NULL && i < parts->n_params; i++)
        pli_free(parts->layouts[i]);
    pli_free(parts->layouts);
    pli_free(parts->is_sparse);
    pli_free(parts->buffer_specs);
    pli_free((void *)parts->spec.caps.each);
}

PyObject *pli_measure(PyObject *module, PyObject *args)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    reducer_args read = {0};
    PyObject *device = Py_None;
    dl_device place = {.type = DL_CPU};
    reducer_parts parts;
    pl_step_size size;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "O!O!nn|O!Oi:measure", &PyList_Type, &read.params,
                          &PyList_Type, &read.buffers, &read.bucket_bytes,
                          &read.last_bytes, &PyList_Type, &read.sparse, &device,
                          &read.world_size) ||
        pli_check_device(state, device) != 0)
        return NULL;
    read.is_on_device = device != Py_None;
    if (read.is_on_device)
        place = ((gpu_object *)device)->place;
    if (read_parts(state, place, &read, &parts) == 0 &&
        pli_check(state, pl_step_measure(&parts.spec, &size)) == 0)
        result = Py_BuildValue("nnn", (Py_ssize_t)size.arena_bytes,
                               (Py_ssize_t)size.n_ops, (Py_ssize_t)size.header_bytes);
    free_spec(&parts);
    free_params(parts.params, parts.n_params);
    free_buffers(parts.buffers, parts.n_buffers);
    return result;
}

/* ---- backend, step and hooks ---------------------------------------------------- */

static int register_hook(const module_state *state, reducer_object *self, size_t i)
{
    reducer_param *param = &self->params[i];
    param->hook = pli_hook_new(state, self, i);
    PyObject *function = param->hook != NULL ? pli_hook_function(param->hook) : NULL;
    if (function == NULL)
        return -1;
    param->handle = PyObject_CallMethod(
        param->param, "register_post_accumulate_grad_hook", "O", function);
    Py_DECREF(function);
    if (param->handle == NULL)
        return -1;
    param->hooks = PyObject_GetAttrString(param->param, "_post_accumulate_grad_hooks");
    if (param->hooks == NULL || !PyDict_Check(param->hooks)) {
        Py_CLEAR(param->hooks);
        PyErr_Clear();
        return 0;
    }
    /* torch.utils.swap_tensors keeps this dict, but moves away the C++ hook that calls
     * it: then added hooks run only after the dict is set again. */
    return PyObject_SetAttrString(param->param, "_post_accumulate_grad_hooks",
                                  param->hooks);
}

/* Makes the backend that moves the gradients; for pli_backend_destroy(). */
static int make_backend(const module_state *state, reducer_object *self)
{
    if (!pli_is_on_device(self))
        return pli_check(state, pli_cpu_backend_create(&self->backend));
    self->backend = self->device.gpu->backend;
    pli_cuda_backend_retain(self->backend);
    return 0;
}

/* Fills a new reducer and registers its hooks; -1 leaves the rest to its dealloc. */
static int build(const module_state *state, reducer_object *self,
                 const reducer_args *args)
{
    reducer_parts parts;
    const int is_read = read_parts(state, self->device.place, args, &parts) == 0;
    self->params = parts.params;
    self->n_params = parts.n_params;
    self->buffers = parts.buffers;
    self->n_buffers = parts.n_buffers;
    parts.spec.grads = &pli_torch_grads;
    parts.spec.host = &pli_torch_host;
    parts.spec.settings = &self->settings;
    parts.spec.context = self;
    int status = -1;
    if (is_read && make_backend(state, self) == 0)
        status = pli_check(
            state, pl_step_create(&parts.spec, self->comm, self->backend, &self->step));
    free_spec(&parts);
    if (status == 0)
        status = pli_check(state, pl_step_prepare(self->step));
    for (size_t i = 0; status == 0 && i < self->n_params; i++)
        status = register_hook(state, self, i);
    return status;
}

/* ---- construction and end ------------------------------------------------------- */

static PyObject *reducer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PLI_ENTER(type);
    static char *names[] = {"world",        "params",     "buffers",
                            "bucket_bytes", "last_bytes", "view_bytes",
                            "sparse",       "caps",       NULL};
    module_state *state = state_of_type(type);
    reducer_args read = {0};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O!O!nnn|O!O!:Reducer", names, state->world_type,
            &read.world, &PyList_Type, &read.params, &PyList_Type, &read.buffers,
            &read.bucket_bytes, &read.last_bytes, &read.view_bytes, &PyList_Type,
            &read.sparse, &PyTuple_Type, &read.caps) ||
        pli_needs_torch(state) != 0)
        return NULL;
    reducer_object *self = (reducer_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (pli_reducers_enter(state, self) != 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->world = Py_NewRef(read.world);
    self->comm = ((world_object *)read.world)->comm;
    read.world_size = pl_comm_world_size(self->comm);
    self->device.gpu = ((world_object *)read.world)->gpu;
    self->device.place =
        pli_is_on_device(self) ? self->device.gpu->place : (dl_device){.type = DL_CPU};
    self->task = -1;
    self->settings.is_on = 1;
    read.is_on_device = pli_is_on_device(self);
    if (build(state, self, &read) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void remove_hooks(reducer_object *self)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (size_t i = 0; i < self->n_params; i++) {
        if (self->params[i].hook != NULL)
            pli_hook_detach(self->params[i].hook);
        if (self->params[i].handle == NULL)
            continue;
        if (pli_drop(PyObject_CallMethod(self->params[i].handle, "remove", NULL)) != 0)
            PyErr_Clear(); /* at interpreter exit: the hook does nothing anyway */
        Py_CLEAR(self->params[i].handle);
    }
    PyErr_Restore(type, value, traceback);
}

typedef struct visitor {
    visitproc visit;
    void *arg;
} visitor;

static int visit_grad(pl_grad *grad, void *argument)
{
    const visitor *self = argument;
    return self->visit((PyObject *)grad, self->arg);
}

static int reducer_traverse(PyObject *object, visitproc visit, void *arg)
{
    const reducer_object *self = reducer_of(object);
    visitor each = {.visit = visit, .arg = arg};
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->world);
    Py_VISIT(self->on_finish);
    Py_VISIT(self->comm_hook);
    Py_VISIT(self->context.all);
    Py_VISIT(self->context.homes);
    for (size_t i = 0; i < self->n_params; i++) {
        Py_VISIT(self->params[i].param);
        Py_VISIT(self->params[i].hooks);
        Py_VISIT(self->params[i].handle);
        Py_VISIT(self->params[i].view);
    }
    for (size_t b = 0; b < self->n_buffers; b++)
        Py_VISIT(self->buffers[b].owner);
    return self->step != NULL ? pl_step_visit(self->step, visit_grad, &each) : 0;
}

static int reducer_clear(PyObject *object)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    remove_hooks(self);
    if (self->step != NULL)
        pl_step_drop(self->step);
    const size_t n_params = self->n_params, n_buffers = self->n_buffers;
    self->n_params = self->n_buffers = 0;
    free_params(self->params, n_params);
    self->params = NULL;
    free_buffers(self->buffers, n_buffers);
    self->buffers = NULL;
    Py_CLEAR(self->on_finish);
    Py_CLEAR(self->comm_hook);
    Py_CLEAR(self->context.all);
    Py_CLEAR(self->context.homes);
    return 0;
}

/* Before members are freed: stops hooks in other threads from leading here. */
static void detach_hooks(const reducer_object *self)
{
    PLI_ENTER(self);
    for (size_t i = 0; i < self->n_params; i++)
        if (self->params[i].hook != NULL)
            pli_hook_detach(self->params[i].hook);
}

static void reducer_dealloc(PyObject *object)
{
    reducer_object *self = reducer_of(object);
    detach_hooks(self);
    pli_reducers_leave(state_of(object), self);
    PyObject_GC_UnTrack(object);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs(object);
    Py_CLEAR(self->weak_self);
    (void)reducer_clear(object);
    pl_step_destroy(self->step);
    pli_backend_destroy(self->backend);
    Py_CLEAR(self->world); /* last: the rest lives in its memory */
    pli_object_free(object);
}

/* ---- forwards ------------------------------------------------------------------- */

static PyObject *none_of(PyObject *object, pl_status st)
{
    return pli_none(pli_check(state_of(object), st));
}

/* A forward inside a backward is a checkpoint's recomputation: ignore it. */
static int is_in_backward(const module_state *state)
{
    PyObject *node = PyObject_CallNoArgs(state->current_node);
    const int is_inside = node != NULL && node != Py_None;
    PyErr_Clear();
    Py_XDECREF(node);
    return is_inside;
}

static pl_forward_mode mode_of(int is_training)
{
    return is_training ? PL_TRAINS : PL_EVALUATES;
}

/* Raises if the user has yet to finish a step.  It stays as it is. */
static int check_finished(const reducer_object *self)
{
    const pl_step_state state = pl_step_look(self->step);
    if (!self->settings.is_manual || !state.is_active || state.is_open)
        return 0;
    return pli_error(PyExc_RuntimeError,
                     "Expected to have finalized the prior backward pass before "
                     "starting a new one. Call finalize_backward() after backward() "
                     "when require_manual_backward_finalization is true.");
}

static PyObject *reducer_forward_begins(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    (void)ignored;
    if (is_in_backward(state_of(object)))
        Py_RETURN_NONE;
    if (pli_backward_end_await(self) != 0 || check_finished(self) != 0)
        return NULL;
    return pli_none(pli_step_check(self, pl_step_forward_begins(self->step)));
}

static PyObject *reducer_forward_ends(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    uint64_t token = 0;
    int is_watched, is_training;
    if (!PyArg_ParseTuple(args, "pp:forward_ends", &is_watched, &is_training))
        return NULL;
    if (!is_in_backward(state_of(object)))
        token =
            pl_step_forward_ends(reducer_of(object)->step,
                                 is_watched ? PL_OUTPUTS_WATCHED : PL_OUTPUTS_UNWATCHED,
                                 mode_of(is_training));
    return PyLong_FromUnsignedLongLong(token);
}

static PyObject *reducer_await_backward(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    pl_step_await_backward(reducer_of(object)->step);
    Py_RETURN_NONE;
}

static PyObject *reducer_forward_fails(PyObject *object, PyObject *argument)
{
    PLI_ENTER(object);
    const int is_training = PyObject_IsTrue(argument);
    if (is_training < 0)
        return NULL;
    if (!is_in_backward(state_of(object)))
        pl_step_forward_fails(reducer_of(object)->step, mode_of(is_training));
    Py_RETURN_NONE;
}

static PyObject *reducer_on_output(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    const reducer_object *self = reducer_of(object);
    int is_synchronised;
    unsigned long long token;
    if (!PyArg_ParseTuple(args, "pK:on_output", &is_synchronised, &token))
        return NULL;
    if (self->attachment == DETACHED)
        Py_RETURN_FALSE;
    if (check_finished(self) != 0)
        return NULL;
    const pl_status st = pl_step_output(self->step, token, is_synchronised);
    return st == PL_OK ? Py_NewRef(Py_True) : pli_raise(state_of(object), st);
}

static PyObject *reducer_apply_buffers(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    return none_of(object, pl_step_apply_buffers(reducer_of(object)->step));
}

static PyObject *reducer_sync_buffers(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    (void)ignored;
    if (self->n_buffers == 0 || is_in_backward(state_of(object)))
        Py_RETURN_NONE;
    if (pli_check(state_of(object), pl_step_sync_buffers(self->step)) == 0)
        Py_RETURN_NONE;
    if (!pl_step_look(self->step).has_failed)
        pli_step_fail_with_exception(self);
    pl_step_forward_raises(self->step, PL_TRAINS);
    return NULL;
}

/* ---- gradients ------------------------------------------------------------------ */

static PyObject *reducer_arrive_in_context(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    const reducer_object *self = reducer_of(object);
    Py_ssize_t i;
    long task;
    if (!PyArg_ParseTuple(args, "nl:arrive_in_context", &i, &task))
        return NULL;
    if (i < 0 || (size_t)i >= self->n_params || task < 0 || self->context.all == NULL)
        return PyErr_Format(PyExc_ValueError, "no parameter %zd, or no backward %ld", i,
                            task);
    if (self->attachment == DETACHED)
        Py_RETURN_NONE;
    return none_of(object, pl_step_take_in_context(self->step, (size_t)i, task));
}

static PyObject *reducer_finish(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    (void)ignored;
    if (!is_in_backward(state_of(object)) && pli_backward_end_await(self) != 0)
        return NULL;
    return pli_none(pli_step_finish(self));
}

static PyObject *reducer_get_unseen(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    const reducer_object *self = reducer_of(object);
    (void)closure;
    return PyBytes_FromStringAndSize((const char *)pl_step_look(self->step).unseen,
                                     (Py_ssize_t)self->n_params);
}

static int write_flags(const reducer_object *self, PyObject *flags, unsigned char *out)
{
    if (flags == NULL || !PyBytes_Check(flags) ||
        PyBytes_GET_SIZE(flags) != (Py_ssize_t)self->n_params)
        return pli_error(PyExc_ValueError, "give %zu bytes, one a parameter",
                         self->n_params);
    memcpy(out, PyBytes_AS_STRING(flags), self->n_params);
    return 0;
}

static int reducer_set_unseen(PyObject *object, PyObject *flags, void *closure)
{
    PLI_ENTER(object);
    const reducer_object *self = reducer_of(object);
    (void)closure;
    return write_flags(self, flags, pl_step_look(self->step).unseen);
}

static int reducer_set_unused(PyObject *object, PyObject *flags, void *closure)
{
    PLI_ENTER(object);
    const reducer_object *self = reducer_of(object);
    (void)closure;
    return write_flags(self, flags, pl_step_look(self->step).unused);
}

static PyObject *reducer_detach(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    (void)ignored;
    self->attachment = DETACHED;
    remove_hooks(self);
    Py_CLEAR(self->on_finish);
    Py_RETURN_NONE;
}

/* ---- failures ------------------------------------------------------------------- */

/* Raises why no reducer may follow this one, whose step has failed. */
static PyObject *reducer_check_failure(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    (void)ignored;
    if (self->report == FAILURE_UNREPORTED) {
        self->report = FAILURE_REPORTED;
        return PyErr_Format(PyExc_RuntimeError,
                            "the last backward's gradients were not averaged: compiled "
                            "autograd ran it outside of the main thread and left "
                            "parameters unused; run it in the main thread");
    }
    return none_of(object, pl_step_check_failure(self->step));
}

static PyObject *reducer_follow(PyObject *object, PyObject *argument)
{
    PLI_ENTER(object);
    if (!Py_IS_TYPE(argument, Py_TYPE(object)))
        return PyErr_Format(PyExc_TypeError, "failed is %R: give a Reducer", argument);
    pl_step_follow(reducer_of(object)->step, reducer_of(argument)->step);
    Py_RETURN_NONE;
}

static PyObject *reducer_abandon(PyObject *object, PyObject *argument)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    const char *text = pli_text_of(argument);
    if (text == NULL ||
        pli_check(state_of(object), pl_step_check_process(self->step)) != 0)
        return NULL;
    if (!pl_step_look(self->step).has_failed)
        pli_step_fail(self, text);
    Py_RETURN_NONE;
}

/* ---- ranks that ran out of batches ---------------------------------------------- */

static PyObject *reducer_set_join(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    int divides_by_active = 0, raises = 0;
    if (!PyArg_ParseTuple(args, "pp:set_join", &divides_by_active, &raises))
        return NULL;
    pl_step_set_join(reducer_of(object)->step,
                     divides_by_active ? PL_BY_N_ACTIVE : PL_BY_WORLD_SIZE,
                     raises ? PL_JOIN_RAISES : PL_JOIN_GOES_ON);
    Py_RETURN_NONE;
}

static PyObject *reducer_shadow_step(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    int is_first = 0, binds_results = 0;
    if (!PyArg_ParseTuple(args, "pp:shadow_step", &is_first, &binds_results))
        return NULL;
    if (pli_backward_end_await(self) != 0)
        return NULL;
    self->thread = PyThread_get_thread_ident();
    if (pli_step_check(
            self, pl_step_shadow(self->step, is_first ? PL_JOINING : PL_SHADOWING,
                                 binds_results ? PL_BINDS_RESULTS : PL_LEAVES_GRADS)) !=
        0)
        return NULL;
    const pl_participation last = pl_step_look(self->step).participation;
    return Py_BuildValue("ii", last.n_active, last.last_joining);
}

/* ---- a communication hook ------------------------------------------------------- */

static PyObject *reducer_set_comm_hook(PyObject *object, PyObject *args,
                                       PyObject *kwargs)
{
    PLI_ENTER(object);
    static char *names[] = {"hook", "bucket_bytes", "last_bytes", "caps", NULL};
    reducer_object *self = reducer_of(object);
    const module_state *state = state_of_reducer(self);
    Py_ssize_t bucket_bytes, last_bytes;
    PyObject *each = NULL;
    PyObject *call = NULL;
    pl_plan_caps caps = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onn|O!:set_comm_hook", names, &call,
                                     &bucket_bytes, &last_bytes, &PyTuple_Type,
                                     &each) ||
        read_caps(state, bucket_bytes, last_bytes, each, &caps) != 0)
        return NULL;
    const pl_status st = pl_step_set_hook(self->step, &pli_comm_hook, &caps);
    pli_free((void *)caps.each);
    if (pli_check(state, st) != 0)
        return NULL;
    Py_XSETREF(self->comm_hook, Py_NewRef(call));
    Py_RETURN_NONE;
}

/* ---- attributes ----------------------------------------------------------------- */

static PyObject *reducer_get_step(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyLong_FromUnsignedLongLong(pl_step_look(reducer_of(object)->step).number);
}

static PyObject *reducer_get_n_taken(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyLong_FromUnsignedLongLong(pl_step_look(reducer_of(object)->step).n_taken);
}

/* A backward of another thread may be about to fail. */
static PyObject *reducer_get_has_failed(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    const reducer_object *self = reducer_of(object);
    (void)closure;
    if (self->settings.n_ends > 0 && !is_in_backward(state_of(object)) &&
        pli_backward_end_await(self) != 0)
        return NULL;
    return PyBool_FromLong(pl_step_look(self->step).has_failed);
}

static PyObject *reducer_get_n_active(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyLong_FromLong(
        pl_step_look(reducer_of(object)->step).participation.n_active);
}

static PyObject *reducer_get_is_active(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyBool_FromLong(pl_step_look(reducer_of(object)->step).is_active);
}

static PyObject *reducer_get_has_other_buffers(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    const reducer_object *self = reducer_of(object);
    int has_others = 0;
    (void)closure;
    const pl_status st = self->n_buffers > 0
                             ? pl_step_has_other_buffers(self->step, &has_others)
                             : PL_OK;
    return st == PL_OK ? PyBool_FromLong(has_others) : pli_raise(state_of(object), st);
}

/* [[parameter, ...], ...]: the current plan's buckets, in order. */
static PyObject *reducer_get_buckets(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    const pl_plan *plan = pl_step_look(reducer_of(object)->step).plan;
    PyObject *buckets = PyList_New((Py_ssize_t)plan->n_buckets);
    (void)closure;
    for (size_t b = 0; buckets != NULL && b < plan->n_buckets; b++) {
        const pl_bucket_plan *bucket = &plan->buckets[b];
        PyObject *members = PyList_New((Py_ssize_t)bucket->n_params);
        for (size_t m = 0; members != NULL && m < bucket->n_params; m++)
            pli_list_put(&members, (Py_ssize_t)m,
                         PyLong_FromUnsignedLong(bucket->params[m]));
        pli_list_put(&buckets, (Py_ssize_t)b, members);
    }
    return buckets;
}

/* How often each parameter got a gradient in the last step begun. */
static PyObject *reducer_get_ready_counts(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    const reducer_object *self = reducer_of(object);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->n_params);
    (void)closure;
    if (bytes != NULL && self->n_params > 0) /* 0: cleared */
        pl_step_count_grads(self->step, (unsigned char *)PyBytes_AS_STRING(bytes));
    return bytes;
}

static PyMethodDef reducer_methods[] = {
    {"forward_begins", reducer_forward_begins, METH_NOARGS,
     "forward_begins($self, /)\n--\n\nTake over buffers, and leave a failed step "
     "behind."},
    {"forward_ends", reducer_forward_ends, METH_VARARGS,
     "forward_ends($self, is_watched, is_training, /)\n--\n\nIf is_watched, return "
     "a token for the on_output() call when its backward begins; else return 0."},
    {"await_backward", reducer_await_backward, METH_NOARGS,
     "await_backward($self, /)\n--\n\nTreat the next backward as that of a "
     "synchronised forward."},
    {"forward_fails", reducer_forward_fails, METH_O,
     "forward_fails($self, is_training, /)\n--\n\nThe forward begun last has raised, "
     "so no backward of it follows."},
    {"sync_buffers", reducer_sync_buffers, METH_NOARGS,
     "sync_buffers($self, /)\n--\n\nIn a training forward on the CPU: take over rank "
     "0's current buffers."},
    {"apply_buffers", reducer_apply_buffers, METH_NOARGS,
     "apply_buffers($self, /)\n--\n\nTake over rank 0's buffers of the last step."},
    {"on_output", reducer_on_output, METH_VARARGS,
     "on_output($self, is_synchronised, token, /)\n--\n\nThe backward of a forward "
     "begins. is_synchronised is that of the forward; token is its token the first "
     "time, 0 later. Return False if another reducer has the parameters."},
    {"arrive_in_context", reducer_arrive_in_context, METH_VARARGS,
     "arrive_in_context($self, index, task, /)\n--\n\nIn backward number "
     "task, a parameter got a gradient in a context of torch.distributed.autograd, "
     "not as its `grad`."},
    {"finish", reducer_finish, METH_NOARGS,
     "finish($self, /)\n--\n\nWith is_manual: end the step of the last backward."},
    {"check_failure", reducer_check_failure, METH_NOARGS,
     "check_failure($self, /)\n--\n\nRaise if no reducer may follow this one, whose "
     "step has failed."},
    {"follow", reducer_follow, METH_O,
     "follow($self, failed, /)\n--\n\nContinue the numbers of a reducer whose step has "
     "failed."},
    {"detach", reducer_detach, METH_NOARGS,
     "detach($self, /)\n--\n\nRemove the hooks from the parameters, and on_finish: "
     "another reducer has them from now on, also for outputs of earlier forwards."},
    {"shadow_step", reducer_shadow_step, METH_VARARGS,
     "shadow_step($self, is_first, binds_results, /)\n--\n\nTake part in one step "
     "without gradients; return the number of ranks that had gradients, and the "
     "highest rank that took its first shadow step, or -1."},
    {"set_join", reducer_set_join, METH_VARARGS,
     "set_join($self, divides_by_active, raises, /)\n--\n\nForget which ranks were "
     "missing; set whether means are over the active ranks, and whether backward "
     "raises if a rank is missing."},
    {"abandon", reducer_abandon, METH_O,
     "abandon($self, text, /)\n--\n\nTell the peers, unless they were told, that this "
     "rank will not take the next step, and why."},
    {"set_comm_hook", (PyCFunction)(void (*)(void))reducer_set_comm_hook,
     METH_VARARGS | METH_KEYWORDS,
     "set_comm_hook($self, hook, bucket_bytes, last_bytes, caps=())\n--\n\nLet a hook "
     "average the buckets from now on, laid out anew with these caps. The reducer "
     "calls its post(bucket) for each full bucket, finish() when all are full, "
     "abandon() when a step fails, and finish_sparse(params, is_active, binds) for "
     "parameters declared sparse."},
    {"poll", pli_comm_hook_poll, METH_NOARGS,
     "poll($self, /)\n--\n\nRaise if a rank has failed or left."},
    {"read_bucket", pli_comm_hook_read_bucket, METH_VARARGS,
     "read_bucket($self, bucket, tensor, /)\n--\n\nCopy a bucket's gradients, one "
     "after another, to a tensor."},
    {"write_bucket", pli_comm_hook_write_bucket, METH_VARARGS,
     "write_bucket($self, bucket, tensor, /)\n--\n\nThe reverse of read_bucket()."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reducer_getset[] = {
    {"step", reducer_get_step, NULL, "Number of synchronised backwards begun.", NULL},
    {"is_active", reducer_get_is_active, NULL, "Whether a step is in progress.", NULL},
    {"n_taken", reducer_get_n_taken, NULL,
     "Steps that this rank has taken, also those of reducers that this one follows.",
     NULL},
    {"has_failed", reducer_get_has_failed, NULL, "Whether a step has failed.", NULL},
    {"n_active", reducer_get_n_active, NULL, "Ranks with gradients, last step.", NULL},
    {"buckets", reducer_get_buckets, NULL, "Parameters' indices, by bucket.", NULL},
    {"ready_counts", reducer_get_ready_counts, NULL,
     "How often each parameter got a gradient in the last step; 255: or more.", NULL},
    {"has_other_buffers", reducer_get_has_other_buffers, NULL,
     "Whether a buffer is gone, or has changed its size.", NULL},
    {"unused", NULL, reducer_set_unused,
     "A byte a parameter: whether a gradient for it raises, as in torch, under strict.",
     NULL},
    {"unseen", reducer_get_unseen, reducer_set_unseen,
     "A byte a parameter: whether its gradient holds values that no step averaged.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef reducer_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(reducer_object, weak_references),
     READONLY, NULL},
    {"on_finish", T_OBJECT, offsetof(reducer_object, on_finish), 0,
     "Called without arguments after each step, inside the backward; or None."},
    {"contexts", T_OBJECT, offsetof(reducer_object, context.all), 0,
     "Called with a backward's number at its end, if arrive_in_context() was called in "
     "it; returns the objects that have the gradients as their `grad`."},
    {"sync", T_BOOL, offsetof(reducer_object, settings.is_on), 0,
     "Whether the backwards of later forwards are synchronised."},
    {"in_no_sync", T_BOOL, offsetof(reducer_object, settings.is_in_no_sync), 0,
     "Whether all backwards are local now, whatever their forward was."},
    {"keeps_grads", T_BOOL, offsetof(reducer_object, settings.keeps_grads), 0,
     "Whether a .grad that a step finds stays the same tensor."},
    {"binds_new", T_BOOL, offsetof(reducer_object, settings.binds_new), 0,
     "Whether a reduced gradient is set as a new .grad, not written to the old one."},
    {"strict", T_BOOL, offsetof(reducer_object, settings.is_strict), 0,
     "Whether a second gradient of a parameter in one backward raises, as in torch."},
    {"follows_forwards", T_BOOL, offsetof(reducer_object, settings.follows_forwards), 0,
     "Whether a backward without a forward of the wrapper is local; else all are "
     "steps."},
    {"ends_with_step", T_BOOL, offsetof(reducer_object, settings.ends_with_step), 0,
     "Whether parameters without a gradient in a step stop awaiting one after it."},
    {"is_manual", T_BOOL, offsetof(reducer_object, settings.is_manual), 0,
     "Whether a step ends by finish() instead of with its backward."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot reducer_slots[] = {
    {Py_tp_new, reducer_new},
    {Py_tp_dealloc, reducer_dealloc},
    {Py_tp_traverse, reducer_traverse},
    {Py_tp_clear, reducer_clear},
    {Py_tp_methods, reducer_methods},
    {Py_tp_getset, reducer_getset},
    {Py_tp_members, reducer_members},
    {Py_tp_doc, "Reducer(world, params, buffers, bucket_bytes, last_bytes, view_bytes, "
                "sparse=[], caps=())\n--\n\n"
                "Means of gradients over the ranks of a world, taken during backward."},
    {0, NULL},
};

PLI_TYPE(reducer, Reducer, Py_TPFLAGS_HAVE_GC);
