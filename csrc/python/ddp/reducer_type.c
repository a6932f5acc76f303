/* reducer_type.c - paceline._native.Reducer: its arguments, construction, methods and
 * attributes; and the module's list of live reducers. */
#include <stddef.h>
#include <unistd.h>

#include "backward_end_type.h"
#include "comm_hook.h"
#include "core/alloc.h"
#include "forwards.h"
#include "gpu_step.h"
#include "hook_type.h"
#include "module_buffers.h"
#include "reducer/sparse_exchange.h"
#include "step.h"
#include <structmember.h>

enum { MOST_RETAINED_BYTES = 64 << 20 };

/* A Reducer's arguments as Python passes them; all sizes are in bytes. */
typedef struct reducer_args {
    PyObject *world;   /* NULL in measure() */
    PyObject *params;  /* list of tensors */
    PyObject *buffers; /* list of (dict, name) */
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
    grad_slot *slots; /* for free_slots() */
    size_t n_slots;
    grad_buffer *buffers; /* for free_buffers() */
    size_t n_buffers;
    pl_reducer_spec spec; /* for free_spec() */
} reducer_parts;

static reducer_object *reducer_of(PyObject *object)
{
    return (reducer_object *)object;
}

/* ---- the list of live reducers -------------------------------------------------- */

/* Reducers enter the module's list when they are made, and leave it when they end; it
 * owns none.  The order of construction is that in which the steps of one backward
 * finish, and in which most ranks take the shadow steps of several wrappers.
 *
 * With a GIL no thread finds a reducer that has lost its last reference.  Without a GIL
 * a thread may; the weak reference that each reducer has to itself then shows the loss.
 */

/* Puts a new reducer at the end of the list; 0 or -1. */
static int enter_list(module_state *state, reducer_object *self)
{
    reducer_object **link = &state->reducers;
#ifdef Py_GIL_DISABLED
    self->weak_self = PyWeakref_NewRef((PyObject *)self, NULL);
    if (self->weak_self == NULL)
        return -1;
#endif
    while (*link != NULL)
        link = &(*link)->next;
    *link = self;
    return 0;
}

/* Takes a reducer out of the list, if it is in it. */
static void leave_list(module_state *state, reducer_object *self)
{
    PLI_ENTER(self);
    reducer_object **link = &state->reducers;
    while (*link != NULL && *link != self)
        link = &(*link)->next;
    if (*link != NULL)
        *link = self->next;
}

reducer_object *pli_reducer_ref(reducer_object *self)
{
#ifdef Py_GIL_DISABLED
    PyObject *object = NULL;
    if (PyWeakref_GetRef(self->weak_self, &object) < 0)
        PyErr_Clear(); /* set only if weak_self is no weak reference */
    return (reducer_object *)object;
#else
    return (reducer_object *)Py_NewRef((PyObject *)self);
#endif
}

reducer_object *pli_reducers_first(reducer_object *list)
{
    reducer_object *found = NULL;
    for (; list != NULL && found == NULL; list = list->next)
        found = pli_reducer_ref(list);
    return found;
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

int pli_read_caps(const module_state *state, Py_ssize_t bucket_bytes,
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
                       reducer_parts *out)
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
                        reducer_parts *out)
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

static int read_sparse(const reducer_args *args, reducer_parts *out)
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

static void free_slots(grad_slot *slots, size_t n_slots)
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

static void free_buffers(grad_buffer *buffers, size_t n_buffers)
{
    for (size_t b = 0; buffers != NULL && b < n_buffers; b++) {
        Py_XDECREF(buffers[b].seen);
        Py_XDECREF(buffers[b].owner);
        Py_XDECREF(buffers[b].name);
    }
    pli_free(buffers);
}

static int make_spec(const module_state *state, const reducer_args *args,
                     reducer_parts *out)
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
    if (check_sizes(args->bucket_bytes, args->last_bytes, args->view_bytes) != 0)
        return -1;
    return pli_read_caps(state, args->bucket_bytes, args->last_bytes, args->caps,
                         &spec->caps);
}

/* Reads all but the world; free *out after a failure too.  On a GPU, gradients declared
 * sparse are reduced as dense ones. */
static int read_parts(const module_state *state, dl_device place,
                      const reducer_args *args, reducer_parts *out)
{
    *out = (reducer_parts){.n_slots = 0};
    return read_params(state, place, args->params, out) != 0 ||
                   read_sparse(args, out) != 0 ||
                   read_buffers(state, place, args->buffers, out) != 0 ||
                   make_spec(state, args, out) != 0
               ? -1
               : 0;
}

static void free_spec(pl_reducer_spec *spec)
{
    pli_free((void *)spec->params);
    pli_free((void *)spec->caps.each);
}

PyObject *pli_measure(PyObject *module, PyObject *args)
{
    PLI_ENTER(module);
    const module_state *state = PyModule_GetState(module);
    reducer_args read = {0};
    PyObject *device = Py_None;
    dl_device place = {.type = DL_CPU};
    reducer_parts parts;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "O!O!nn|O!Oi:measure", &PyList_Type, &read.params,
                          &PyList_Type, &read.buffers, &read.bucket_bytes,
                          &read.last_bytes, &PyList_Type, &read.sparse, &device,
                          &read.world_size) ||
        pli_check_device(state, device) != 0 ||
        check_sizes(read.bucket_bytes, read.last_bytes, 0) != 0)
        return NULL;
    read.is_on_device = device != Py_None;
    if (read.is_on_device)
        place = ((gpu_object *)device)->place;
    if (read_parts(state, place, &read, &parts) == 0)
        result = Py_BuildValue("nnn", (Py_ssize_t)pl_reducer_arena_bytes(&parts.spec),
                               (Py_ssize_t)pl_reducer_max_ops(&parts.spec),
                               (Py_ssize_t)pl_reducer_header_bytes(&parts.spec));
    free_slots(parts.slots, parts.n_slots);
    free_buffers(parts.buffers, parts.n_buffers);
    free_spec(&parts.spec);
    return result;
}

/* ---- slots, buffers, backend and hooks ------------------------------------------ */

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

/* Fills a new reducer and registers its hooks; -1 leaves the rest to its dealloc. */
static int build(const module_state *state, reducer_object *self,
                 const reducer_args *args)
{
    reducer_parts parts;
    int status = -1;
    const int is_read = read_parts(state, self->device.place, args, &parts) == 0;
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
    free_spec(&parts.spec);
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
    if (enter_list(state, self) != 0) {
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
    self->context.task = NO_CONTEXT;
    self->sync.is_on = 1;
    self->sync.backward = SYNC_ON;
    self->role = PL_ACTIVE;
    self->owner_pid = getpid();
    read.is_on_device = pli_is_on_device(self);
    if (build(state, self, &read) != 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void remove_hooks(reducer_object *self)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (size_t i = 0; self->slots != NULL && i < self->n_slots; i++) {
        if (self->slots[i].hook != NULL)
            pli_hook_detach(self->slots[i].hook);
        if (self->slots[i].handle == NULL)
            continue;
        if (pli_drop(PyObject_CallMethod(self->slots[i].handle, "remove", NULL)) != 0)
            PyErr_Clear(); /* at interpreter exit: the hook does nothing anyway */
        Py_CLEAR(self->slots[i].handle);
    }
    PyErr_Restore(type, value, traceback);
}

static int reducer_traverse(PyObject *object, visitproc visit, void *arg)
{
    const reducer_object *self = reducer_of(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->world);
    Py_VISIT(self->on_finish);
    Py_VISIT(self->comm_hook);
    Py_VISIT(self->context.all);
    Py_VISIT(self->context.homes);
    for (size_t i = 0; self->slots != NULL && i < self->n_slots; i++) {
        Py_VISIT(self->slots[i].param);
        Py_VISIT(self->slots[i].hooks);
        Py_VISIT(self->slots[i].handle);
        Py_VISIT(self->slots[i].target);
        Py_VISIT(self->slots[i].late);
        Py_VISIT(self->slots[i].retained);
        Py_VISIT(self->slots[i].saved);
    }
    for (size_t b = 0; self->buffers.all != NULL && b < self->buffers.n; b++) {
        Py_VISIT(self->buffers.all[b].owner);
        Py_VISIT(self->buffers.all[b].seen);
    }
    return 0;
}

static int reducer_clear(PyObject *object)
{
    reducer_object *self = reducer_of(object);
    remove_hooks(self);
    free_slots(self->slots, self->n_slots);
    self->slots = NULL;
    self->n_slots = 0;
    free_buffers(self->buffers.all, self->buffers.n);
    self->buffers.all = NULL;
    self->buffers.n = 0;
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
    for (size_t i = 0; self->slots != NULL && i < self->n_slots; i++)
        if (self->slots[i].hook != NULL)
            pli_hook_detach(self->slots[i].hook);
}

static void reducer_dealloc(PyObject *object)
{
    reducer_object *self = reducer_of(object);
    detach_hooks(self);
    leave_list(state_of(object), self);
    PyObject_GC_UnTrack(object);
    if (self->weak_references != NULL)
        PyObject_ClearWeakRefs(object);
    Py_CLEAR(self->weak_self);
    (void)reducer_clear(object);
    pl_reducer_destroy(self->reducer);
    pli_window_release(self->window);
    if (self->device.captured != NULL)
        self->device.captured->release(self->device.captured);
    pli_backend_destroy(self->backend);
    pli_free(self->device.copies);
    Py_CLEAR(self->world); /* last: the rest lives in its memory */
    pli_object_free(object);
}

/* ---- methods -------------------------------------------------------------------- */

static int is_in_backward(const module_state *state)
{
    PyObject *node = PyObject_CallNoArgs(state->current_node);
    const int is_inside = node != NULL && node != Py_None;
    PyErr_Clear();
    Py_XDECREF(node);
    return is_inside;
}

static PyObject *reducer_forward_begins(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    const module_state *state = state_of(object);
    (void)ignored;
    /* A forward inside a backward is a checkpoint's recomputation: ignore it. */
    if (is_in_backward(state))
        Py_RETURN_NONE;
    if (pli_step_check_process(self) != 0 || pli_backward_end_await(self) != 0)
        return NULL;
    if (pl_reducer_is_active(self->reducer)) {
        /* The optimizer has run since, on gradients that were not averaged. */
        pli_step_fail(self, "the end of the last backward was never seen");
        return PyErr_Format(
            PyExc_RuntimeError,
            "the last backward's gradients were not averaged, since its end "
            "was never seen: run the model's forward through the wrapper");
    }
    self->sync.backward = SYNC_ON;
    if (pli_is_on_device(self) && pli_buffers_apply(self) != 0)
        return NULL;
    /* Drop an old exception, unless it failed a step: peers must still read it. */
    if (!pl_reducer_has_failed(self->reducer))
        pli_comm_set_failure_message(self->comm, NULL);
    pli_comm_record_activity(self->comm, PL_FORWARD,
                             pl_reducer_step(self->reducer) + 1);
    Py_RETURN_NONE;
}

static PyObject *reducer_forward_ends(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    uint64_t token = 0;
    int is_watched, is_training;
    if (!PyArg_ParseTuple(args, "pp:forward_ends", &is_watched, &is_training))
        return NULL;
    if (!is_in_backward(state_of(object))) {
        if (self->sync.is_on)
            token =
                pli_forwards_end(self, is_watched ? OUTPUTS_WATCHED : OUTPUTS_UNWATCHED,
                                 is_training ? MODE_TRAINING : MODE_EVALUATION);
        else if (!is_watched) /* no backward of it can be seen: await none */
            self->forwards.n_over = self->forwards.n;
    }
    if (!pl_reducer_is_active(self->reducer))
        pli_comm_record_activity(self->comm, PL_IDLE,
                                 pl_reducer_step(self->reducer) + 1);
    return PyLong_FromUnsignedLongLong(token);
}

static PyObject *reducer_await_backward(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    (void)pli_forwards_end(reducer_of(object), OUTPUTS_UNWATCHED, MODE_TRAINING);
    Py_RETURN_NONE;
}

static PyObject *reducer_forward_fails(PyObject *object, PyObject *argument)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    const int is_training = PyObject_IsTrue(argument);
    if (is_training < 0)
        return NULL;
    if (!self->sync.is_on || is_in_backward(state_of(object)) ||
        getpid() != self->owner_pid)
        Py_RETURN_NONE;
    if (pl_reducer_has_failed(self->reducer)) {
        pli_forwards_lose(self);
        Py_RETURN_NONE;
    }
    if (pl_reducer_notice_failure(self->reducer) != PL_OK)
        pli_forwards_fail_step(self);
    pli_forwards_raise(self, is_training ? MODE_TRAINING : MODE_EVALUATION);
    Py_RETURN_NONE;
}

/* Raises why no reducer may follow this one, whose step has failed. */
static PyObject *reducer_check_failure(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    (void)ignored;
    if (self->unseen == FAILURE_UNSEEN) {
        self->unseen = NO_FAILURE_UNSEEN;
        return PyErr_Format(PyExc_RuntimeError,
                            "the last backward's gradients were not averaged: compiled "
                            "autograd ran it outside of the main thread and left "
                            "parameters unused; run it in the main thread");
    }
    pl_status st = pl_reducer_check_weights(self->reducer);
    for (pl_comm *comm = self->comm; st == PL_OK && comm != NULL; comm = comm->base)
        if (pli_comm_is_group_comm(comm)) /* peers may wait in it for this rank */
            st = pl_comm_progress(comm);
    return pli_none(pli_check(state_of(object), st));
}

static PyObject *reducer_follow(PyObject *object, PyObject *argument)
{
    PLI_ENTER(object);
    if (!Py_IS_TYPE(argument, Py_TYPE(object)))
        return PyErr_Format(PyExc_TypeError, "failed is %R: give a Reducer", argument);
    pl_reducer_follow(reducer_of(object)->reducer, reducer_of(argument)->reducer);
    pli_forwards_follow(reducer_of(object), reducer_of(argument));
    Py_RETURN_NONE;
}

static PyObject *reducer_apply_buffers(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    (void)ignored;
    return pli_none(pli_buffers_apply(reducer_of(object)));
}

static PyObject *reducer_sync_buffers(PyObject *object, PyObject *ignored)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    (void)ignored;
    if (pli_is_on_device(self) || is_in_backward(state_of(object)))
        Py_RETURN_NONE;
    if (pli_buffers_sync(self) == 0)
        Py_RETURN_NONE;
    if (!pl_reducer_has_failed(self->reducer))
        pli_step_fail_with_exception(self);
    pli_forwards_raise(self, MODE_TRAINING);
    return NULL;
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

static PyObject *reducer_on_output(PyObject *object, PyObject *args)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    int is_synchronised;
    unsigned long long token;
    if (!PyArg_ParseTuple(args, "pK:on_output", &is_synchronised, &token))
        return NULL;
    if (self->attachment == DETACHED)
        Py_RETURN_FALSE;
    if (token > 0)
        pli_forwards_answer(self, token);
    if (!is_synchronised) {
        if (pli_backward_end_queue_local(self) != 0)
            return NULL;
        Py_RETURN_TRUE;
    }
    self->sync.backward = SYNC_ON;
    if (!self->sync.is_in_no_sync &&
        pli_backward_end_queue(self, QUEUED_BY_OUTPUT) != 0)
        return NULL;
    Py_RETURN_TRUE;
}

static PyObject *reducer_get_step(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyLong_FromUnsignedLongLong(pl_reducer_step(reducer_of(object)->reducer));
}

static PyObject *reducer_get_n_taken(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyLong_FromUnsignedLongLong(pl_reducer_n_taken(reducer_of(object)->reducer));
}

/* A backward of another thread may be about to fail. */
static PyObject *reducer_get_has_failed(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    const reducer_object *self = reducer_of(object);
    (void)closure;
    if (self->n_backward_ends > 0 && !is_in_backward(state_of(object)) &&
        pli_backward_end_await(self) != 0)
        return NULL;
    return PyBool_FromLong(pl_reducer_has_failed(self->reducer));
}

static PyObject *reducer_get_n_active(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyLong_FromLong(
        pl_reducer_participation(reducer_of(object)->reducer).n_active);
}

static PyObject *reducer_get_is_active(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    (void)closure;
    return PyBool_FromLong(pl_reducer_is_active(reducer_of(object)->reducer));
}

/* [[parameter, ...], ...]: the current plan's buckets, in order. */
static PyObject *reducer_get_buckets(PyObject *object, void *closure)
{
    PLI_ENTER(object);
    const pl_plan *plan = pl_reducer_plan(reducer_of(object)->reducer);
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
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->n_slots);
    (void)closure;
    for (size_t i = 0; bytes != NULL && i < self->n_slots; i++) {
        const unsigned n = pl_reducer_ready_count(self->reducer, i);
        PyBytes_AS_STRING(bytes)[i] = (char)(n < UINT8_MAX ? n : UINT8_MAX);
    }
    return bytes;
}

static PyObject *reducer_note_arrivals(PyObject *object, PyObject *is_on)
{
    PLI_ENTER(object);
    reducer_object *self = reducer_of(object);
    PyObject *times = PyList_New((Py_ssize_t)self->n_slots);
    for (size_t i = 0; times != NULL && i < self->n_slots; i++) {
        pli_list_put(&times, (Py_ssize_t)i,
                     PyLong_FromLongLong(self->slots[i].arrived_ns));
        self->slots[i].arrived_ns = 0;
    }
    self->options.notes_arrivals = (char)(is_on == Py_True);
    return times;
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
    {"arrive_in_context", pli_hook_arrive_in_context, METH_VARARGS,
     "arrive_in_context($self, index, task, /)\n--\n\nIn backward number "
     "task, a parameter got a gradient in a context of torch.distributed.autograd, "
     "not as its `grad`."},
    {"note_arrivals", reducer_note_arrivals, METH_O,
     "note_arrivals($self, is_on, /)\n--\n\nReturn when a step last took each "
     "parameter's gradient since the call before, in nanoseconds of the monotonic "
     "clock, or 0; note the times from now on, or stop."},
    {"check_failure", reducer_check_failure, METH_NOARGS,
     "check_failure($self, /)\n--\n\nRaise if no reducer may follow this one, whose "
     "step has failed."},
    {"follow", reducer_follow, METH_O,
     "follow($self, failed, /)\n--\n\nContinue the numbers of a reducer whose step has "
     "failed."},
    {"detach", reducer_detach, METH_NOARGS,
     "detach($self, /)\n--\n\nRemove the hooks from the parameters, and on_finish: "
     "another reducer has them from now on, also for outputs of earlier forwards."},
    {"shadow_step", pli_join_shadow_step, METH_VARARGS,
     "shadow_step($self, is_first, binds_results, /)\n--\n\nTake part in one step "
     "without gradients; return the number of ranks that had gradients, and the "
     "highest rank that took its first shadow step, or -1."},
    {"set_join", pli_join_set, METH_VARARGS,
     "set_join($self, divides_by_active, raises, /)\n--\n\nForget which ranks were "
     "missing; set whether means are over the active ranks, and whether backward "
     "raises if a rank is missing."},
    {"abandon", pli_join_abandon, METH_O,
     "abandon($self, text, /)\n--\n\nTell the peers, unless they were told, that this "
     "rank will not take the next step, and why."},
    {"set_comm_hook", (PyCFunction)(void (*)(void))pli_comm_hook_set,
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
    {"has_other_buffers", pli_buffers_get_are_others, NULL,
     "Whether a buffer is gone, or has changed its size.", NULL},
    {"unused", NULL, pli_hook_set_flags,
     "A byte a parameter: whether a gradient for it raises, as in torch, under strict.",
     (void *)offsetof(grad_slot, is_unused)}, /* NOLINT: an offset */
    {"unseen", pli_hook_get_flags, pli_hook_set_flags,
     "A byte a parameter: whether its gradient holds values that no step averaged.",
     (void *)offsetof(grad_slot, is_unseen)}, /* NOLINT: an offset */
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
    {"sync", T_BOOL, offsetof(reducer_object, sync.is_on), 0,
     "Whether the backwards of later forwards are synchronised."},
    {"in_no_sync", T_BOOL, offsetof(reducer_object, sync.is_in_no_sync), 0,
     "Whether all backwards are local now, whatever their forward was."},
    {"keeps_grads", T_BOOL, offsetof(reducer_object, options.keeps_grads), 0,
     "Whether a .grad that a step finds stays the same tensor."},
    {"binds_new", T_BOOL, offsetof(reducer_object, options.binds_new), 0,
     "Whether a reduced gradient is set as a new .grad, not written to the old one."},
    {"strict", T_BOOL, offsetof(reducer_object, options.is_strict), 0,
     "Whether a second gradient of a parameter in one backward raises, as in torch."},
    {"follows_forwards", T_BOOL, offsetof(reducer_object, options.follows_forwards), 0,
     "Whether a backward without a forward of the wrapper is local; else all are "
     "steps."},
    {"ends_with_step", T_BOOL, offsetof(reducer_object, options.ends_with_step), 0,
     "Whether parameters without a gradient in a step stop awaiting one after it."},
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
