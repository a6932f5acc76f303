/* sparse_grads.c - sparse gradients: rows from torch's tensors and back. */
#include "sparse_grads.h"

#include <string.h>

#include "comm_hook.h"
#include "core/alloc.h"
#include "reducer/sparse_exchange.h"

/* ---- declared: a gradient arrives ----------------------------------------------- */

int pli_sparse_has_grad(const reducer_object *self, size_t i)
{
    const module_state *state = state_of_reducer(self);
    PyObject *grad = PyObject_GetAttr(pli_grad_home(self, i), state->name_grad);
    const int has_grad = grad == NULL ? -1 : grad != Py_None;
    Py_XDECREF(grad);
    return has_grad;
}

int pli_sparse_mark_ready(reducer_object *self, size_t i)
{
    pl_ready_result result;
    const int has_grad = pli_sparse_has_grad(self, i);
    const void *data = has_grad > 0 ? self : NULL; /* not NULL: there is one */
    if (has_grad < 0)
        return -1;
    return pli_check(
        state_of_reducer(self),
        pl_reducer_mark_ready(self->reducer, i, data, PL_IN_PLACE, NULL, &result));
}

/* ---- declared: the exchange at the end of the step ------------------------------ */

/* One parameter's part: this rank's rows, and the memory for the mean. */
typedef struct sparse_part {
    size_t slot;
    PyObject *local; /* (numbers or None, values), or None without a gradient */
    PyObject *room;  /* (numbers or None, values, the tensor made of them) */
    pl_move mean;    /* the mean's values */
} sparse_part;

typedef struct sparse_step {
    reducer_object *reducer;
    size_t n_parts;
    sparse_part *parts;
    pl_table *tables;
    pl_sparse_rows *rows;
    pl_exchange *exchange;
} sparse_step;

static size_t count_parts(const reducer_object *reducer)
{
    size_t n_parts = 0;
    for (size_t i = 0; i < reducer->n_slots; i++)
        n_parts += pli_sparse_is_used(reducer, i) != 0;
    return n_parts;
}

/* Stands for an empty list of rows, which has no memory: NULL would mean all rows. */
static int64_t *no_indices(void)
{
    static int64_t none;
    return &none;
}

/* Reads a tuple of numbers and values, which owns the memory; -1 if they do not fit the
 * table. */
static int read_rows(const module_state *state, PyObject *tuple, const pl_table *table,
                     pl_sparse_rows *out)
{
    PyObject *numbers, *values, *mean;
    pli_tensor tensor;
    if (!PyArg_ParseTuple(tuple, "OO|O", &numbers, &values, &mean))
        return -1;
    *out = (pl_sparse_rows){.n_rows = table->n_rows};
    if (numbers != Py_None) {
        if (pli_tensor_read(state, numbers, "row numbers", &tensor) != 0)
            return -1;
        out->n_rows = tensor.layout.n_elems;
        out->indices = out->n_rows > 0 ? tensor.data : no_indices();
        if (tensor.layout.dtype != PL_I64)
            goto misfit;
    }
    if (pli_tensor_read(state, values, "a gradient's rows", &tensor) != 0)
        return -1;
    out->values = tensor.data;
    if (tensor.layout.dtype == table->dtype &&
        tensor.layout.n_elems == out->n_rows * table->row_elems)
        return 0;
misfit:
    return pli_error(PyExc_RuntimeError,
                     "a sparse gradient does not fit its parameter: wrap the model "
                     "again after changing its parameters");
}

static pl_table table_of(const pli_layout *layout)
{
    pl_table table = {
        .n_rows = (size_t)layout->dims[0].size, .row_elems = 1, .dtype = layout->dtype};
    for (int d = 1; d < layout->n_dims; d++)
        table.row_elems *= (size_t)layout->dims[d].size;
    return table;
}

static int read_part(sparse_step *self, size_t t, size_t slot)
{
    const module_state *state = state_of_reducer(self->reducer);
    const pli_layout *layout = self->reducer->slots[slot].layout;
    sparse_part *part = &self->parts[t];
    part->slot = slot;
    self->tables[t] = table_of(layout);
    self->rows[t] = (pl_sparse_rows){.indices = no_indices()};
    /* In a shadow step the gradient is that of an earlier step: ignore it. */
    part->local = self->reducer->role == PL_ACTIVE
                      ? PyObject_CallOneArg(state->sparse_read,
                                            pli_grad_home(self->reducer, slot))
                      : Py_NewRef(Py_None);
    if (part->local == NULL)
        return -1;
    if (part->local == Py_None)
        return 0;
    return read_rows(state, part->local, &self->tables[t], &self->rows[t]);
}

static int begin(sparse_step *self)
{
    reducer_object *reducer = self->reducer;
    const module_state *state = state_of_reducer(reducer);
    const size_t n = self->n_parts;
    size_t t = 0;
    if (pli_check(state, pli_calloc(n, sizeof *self->parts, "rows", &self->parts)) !=
            0 ||
        pli_check(state, pli_calloc(n, sizeof *self->tables, "rows", &self->tables)) !=
            0 ||
        pli_check(state, pli_calloc(n, sizeof *self->rows, "rows", &self->rows)) != 0)
        return -1;
    for (size_t i = 0; i < reducer->n_slots; i++)
        if (pli_sparse_is_used(reducer, i) && read_part(self, t++, i) != 0)
            return -1;
    const pl_exchange_spec spec = {
        .comm = reducer->comm,
        .offset_bytes = pl_reducer_staging_offset(reducer->reducer),
        .staging_bytes = PLI_EXCHANGE_BYTES,
        .tables = self->tables,
        .rows = self->rows,
        .n_tables = n,
    };
    return pli_check(state, pl_exchange_create(&spec, &self->exchange));
}

/* Makes the tensors that receive the means. */
static int make_room(sparse_step *self, size_t t)
{
    const module_state *state = state_of_reducer(self->reducer);
    const pl_sparse_rows all = pl_exchange_union(self->exchange, t);
    sparse_part *part = &self->parts[t];
    PyObject *param = self->reducer->slots[part->slot].param;
    pl_sparse_rows room;
    part->room = all.indices != NULL
                     ? PyObject_CallFunction(state->sparse_room, "On", param,
                                             (Py_ssize_t)all.n_rows)
                     : PyObject_CallFunction(state->sparse_room, "OO", param, Py_None);
    if (part->room == NULL ||
        read_rows(state, part->room, &self->tables[t], &room) != 0)
        return -1;
    if (all.n_rows > 0 && all.indices != NULL && room.indices != NULL)
        memcpy(room.indices, all.indices, all.n_rows * sizeof *all.indices);
    part->mean = (pl_move){.to = room.values,
                           .dtype = self->tables[t].dtype,
                           .n_elems = room.n_rows * self->tables[t].row_elems};
    pl_exchange_set_room(self->exchange, t, room.values);
    return 0;
}

static pl_status find_slice(void *exchange, int64_t slice_ns)
{
    return pl_exchange_find(exchange, slice_ns);
}

static pl_status mean_slice(void *exchange, int64_t slice_ns)
{
    return pl_exchange_mean(exchange, slice_ns);
}

static int run(sparse_step *self)
{
    const module_state *state = state_of_reducer(self->reducer);
    if (begin(self) != 0 || pli_wait_in_slices(state, find_slice, self->exchange) != 0)
        return -1;
    for (size_t t = 0; t < self->n_parts; t++)
        if (make_room(self, t) != 0)
            return -1;
    if (pli_wait_in_slices(state, mean_slice, self->exchange) != 0)
        return -1;
    for (size_t t = 0; t < self->n_parts && pli_is_to_rescale(self->reducer); t++)
        if (pli_check(state, pl_reducer_rescale_mean(self->reducer->reducer,
                                                     &self->parts[t].mean)) != 0)
            return -1;
    for (size_t t = 0; t < self->n_parts && pli_binds_results(self->reducer); t++)
        Py_XSETREF(self->reducer->slots[self->parts[t].slot].target,
                   Py_NewRef(PyTuple_GET_ITEM(self->parts[t].room, 2)));
    return 0;
}

int pli_sparse_finish(reducer_object *self)
{
    sparse_step step = {.reducer = self, .n_parts = count_parts(self)};
    if (step.n_parts == 0)
        return 0;
    if (self->comm_hook != NULL)
        return pli_comm_hook_finish_sparse(self);
    const int status = run(&step);
    for (size_t t = 0; step.parts != NULL && t < step.n_parts; t++) {
        Py_XDECREF(step.parts[t].local);
        Py_XDECREF(step.parts[t].room);
    }
    pl_exchange_destroy(step.exchange);
    pli_free(step.parts);
    pli_free(step.tables);
    pli_free(step.rows);
    return status;
}

/* ---- not declared: reduced densely ---------------------------------------------- */

int pli_sparse_densify(reducer_object *self, size_t i, PyObject **grad)
{
    PyObject *pair = PyObject_CallOneArg(state_of_reducer(self)->sparse_densify, *grad);
    PyObject *dense;
    int n_dims = 0;
    if (pair == NULL)
        return -1;
    if (pair != Py_None) {
        if (!PyArg_ParseTuple(pair, "Oi", &dense, &n_dims)) {
            Py_DECREF(pair);
            return -1;
        }
        Py_SETREF(*grad, Py_NewRef(dense));
    }
    Py_DECREF(pair);
    self->slots[i].n_sparse_dims = (unsigned)n_dims;
    return 0;
}

/* ---- the end of the step: a mean becomes the gradient ---------------------------- */

/* Returns 1 if both have the same layout, 0, or -1. */
static int has_layout_of(PyObject *tensor, PyObject *other)
{
    PyObject *layout = PyObject_GetAttrString(tensor, "layout");
    PyObject *others = layout != NULL ? PyObject_GetAttrString(other, "layout") : NULL;
    const int is_same =
        others != NULL ? PyObject_RichCompareBool(layout, others, Py_EQ) : -1;
    Py_XDECREF(layout);
    Py_XDECREF(others);
    return is_same;
}

/* The gradient stays the same object, as in torch; a dense one keeps its memory. */
static int overwrite(const module_state *state, PyObject *grad, PyObject *mean)
{
    PyObject *is_sparse = PyObject_GetAttrString(mean, "is_sparse");
    int status = -1;
    if (is_sparse == Py_True)
        status = PyObject_SetAttr(grad, state->name_data, mean);
    else if (is_sparse != NULL)
        status = pli_tensor_overwrite(grad, mean);
    Py_XDECREF(is_sparse);
    return status == 0 ? pli_increment_version(state, grad) : -1;
}

int pli_sparse_put(reducer_object *self, size_t i, PyObject *mean)
{
    const module_state *state = state_of_reducer(self);
    PyObject *grad = PyObject_GetAttr(pli_grad_home(self, i), state->name_grad);
    if (grad == NULL)
        return -1;
    const int is_same = grad != Py_None ? has_layout_of(grad, mean) : 0;
    int status = is_same;
    if (is_same == 0)
        status = pli_set_grad(self, i, mean);
    else if (is_same > 0)
        status = overwrite(state, grad, mean);
    Py_DECREF(grad);
    return status;
}

int pli_sparse_put_mean(reducer_object *self, size_t i)
{
    const module_state *state = state_of_reducer(self);
    const unsigned n_dims = pl_reducer_sparse_dims(self->reducer, i);
    PyObject *slot = pli_tensor_borrow(state, self->device.place,
                                       pli_slot_memory(self, i), self->slots[i].layout);
    PyObject *mean = NULL;
    if (slot != NULL)
        mean = n_dims > 0 ? PyObject_CallMethod(slot, "to_sparse", "I", n_dims)
                          : PyObject_CallMethod(slot, "clone", NULL);
    Py_XDECREF(slot);
    const int status = mean != NULL ? pli_sparse_put(self, i, mean) : -1;
    Py_XDECREF(mean);
    return status;
}
