/* step_arrays.h - a rank whose gradients are arrays: all that a step asks of its
 * caller.
 *
 * An array counts its references, and its rank counts the arrays that are alive, so a
 * test sees each leak.  A view of a slot counts itself in its window.  Any callback can
 * be made to fail: see array_fault.  One thread uses a rank.
 */
#ifndef PLT_STEP_ARRAYS_H
#define PLT_STEP_ARRAYS_H

#include <stdlib.h>

#include "ranks.h"
#include "reducer/step.h"

enum { ARRAYS_MOST_PARAMS = 8, ARRAYS_MOST_BUFFERS = 3, ARRAYS_MOST_ELEMS = 64 };

/* ---- callbacks that fail -------------------------------------------------------- */

#define ARRAY_CALLS(X)                                                                 \
    X(CALL_FIND, "find")                                                               \
    X(CALL_READ_ARRIVED, "read_arrived")                                               \
    X(CALL_READ, "read")                                                               \
    X(CALL_PUT, "put")                                                                 \
    X(CALL_OVER, "over")                                                               \
    X(CALL_EMPTY_LIKE, "empty_like")                                                   \
    X(CALL_CLONE, "clone")                                                             \
    X(CALL_COPY, "copy")                                                               \
    X(CALL_ADD, "add")                                                                 \
    X(CALL_NOTE_WRITE, "note_write")                                                   \
    X(CALL_N_WRITES, "n_writes")                                                       \
    X(CALL_FIND_BUFFER, "find_buffer")                                                 \
    X(CALL_READ_ROWS, "read_rows")                                                     \
    X(CALL_MAKE_ROWS, "make_rows")                                                     \
    X(CALL_TO_SPARSE, "to_sparse")                                                     \
    X(CALL_PUT_MEAN, "put_mean")                                                       \
    X(CALL_AWAIT_END, "await_end")                                                     \
    X(CALL_IS_RECORDED, "is_recorded")                                                 \
    X(CALL_CHECK_SIGNALS, "check_signals")                                             \
    X(CALL_CURRENT_STREAM, "current_stream")                                           \
    X(CALL_FINISHED, "finished")

typedef enum array_call {
#define ARRAY_CALL_ENUM(name, text) name,
    ARRAY_CALLS(ARRAY_CALL_ENUM)
#undef ARRAY_CALL_ENUM
        N_ARRAY_CALLS
} array_call;

static inline const char *array_call_text(array_call which)
{
    static const char *const texts[] = {
#define ARRAY_CALL_TEXT(name, text) text,
        ARRAY_CALLS(ARRAY_CALL_TEXT)
#undef ARRAY_CALL_TEXT
    };
    return which < N_ARRAY_CALLS ? texts[which] : "any";
}

/* The n-th call from now on fails, of one callback or of any; or calls `instead`. */
typedef struct array_fault {
    array_call which; /* N_ARRAY_CALLS: any */
    long n_left;      /* 0: none fails */
    array_call hit;   /* the callback that failed; N_ARRAY_CALLS: none yet */
    void (*instead)(void *context); /* NULL: it fails */
} array_fault;

/* ---- a model and its ranks ------------------------------------------------------ */

typedef struct array_param {
    int n_rows, n_cols;
    unsigned char is_sparse; /* declared */
} array_param;

typedef struct array_model {
    const array_param *params;
    size_t n_params;
    const size_t *buffer_elems;
    size_t n_buffers;
    size_t view_bytes;
    pl_plan_caps caps;
} array_model;

typedef struct rank_arrays {
    const array_model *model;
    int rank, world_size;
    pl_comm *comm;
    pl_backend *backend;
    pl_step *step;
    pl_step_settings settings;
    pl_grad *grads[ARRAYS_MOST_PARAMS];      /* each parameter's `.grad` */
    pl_grad *in_context[ARRAYS_MOST_PARAMS]; /* gradients of a backward in a context */
    pl_grad *buffers[ARRAYS_MOST_BUFFERS];   /* NULL: gone */
    char has_hooks[ARRAYS_MOST_PARAMS];      /* hooks of the user */
    int is_recorded;                         /* backward makes a graph */
    int n_local_ends;                        /* local outputs whose end is awaited */
    int is_let_go;                           /* other threads may use the arrays */
    unsigned n_finished;
    long n_alive; /* arrays */
    long n_calls[N_ARRAY_CALLS];
    array_fault fault;
    void *context; /* the test's */
} rank_arrays;

/* Whether the elements are the negated ones of the memory. */
typedef enum array_lazy {
    NOT_LAZY,
    LAZY_HIDDEN, /* as a sign of torch: only a gradient is asked for it */
    LAZY_SHOWN,  /* as a conjugation: every reading shows it */
} array_lazy;

/* An array: dense, or with n_sparse_dims rows of a table. */
struct pl_grad {
    rank_arrays *owner;
    int n_refs;
    long n_writes;
    array_lazy lazy;
    pli_layout layout;
    float *data; /* sparse: n_rows times row_elems */
    int owns_data;
    pli_window *window; /* of a view of a slot */
    size_t slot;
    unsigned n_sparse_dims;
    int64_t *rows;
    size_t n_rows;
};

/* ---- arrays --------------------------------------------------------------------- */

static inline pli_layout layout_of(int n_rows, int n_cols)
{
    pli_layout layout = {
        .dtype = PL_F32,
        .n_dims = 2,
        .n_elems = (size_t)n_rows * (size_t)n_cols,
        .dims = {{.size = n_rows, .stride = n_cols}, {.size = n_cols, .stride = 1}}};
    return layout;
}

static inline size_t array_cols(const pl_grad *grad)
{
    return (size_t)grad->layout.dims[1].size;
}

/* An array of a rank, without memory yet.  `layout` may be cut after its dimensions. */
static inline pl_grad *array_bare(rank_arrays *self, const pli_layout *layout)
{
    pl_grad *grad = calloc(1, sizeof *grad);
    if (grad == NULL)
        exit(2);
    grad->owner = self;
    grad->n_refs = 1;
    grad->layout = (pli_layout){
        .dtype = layout->dtype, .n_dims = layout->n_dims, .n_elems = layout->n_elems};
    memcpy(grad->layout.dims, layout->dims, 2 * sizeof *layout->dims);
    self->n_alive++;
    return grad;
}

static inline void array_give_memory(pl_grad *grad, size_t n_elems)
{
    grad->owns_data = 1;
    grad->data = malloc(n_elems * sizeof *grad->data + 1);
    if (grad->data == NULL)
        exit(2);
    for (size_t k = 0; k < n_elems; k++)
        grad->data[k] = -7777; /* nobody has written it */
}

/* A new dense array, with any values. */
static inline pl_grad *array_new(rank_arrays *self, const pli_layout *layout)
{
    pl_grad *grad = array_bare(self, layout);
    array_give_memory(grad, layout->n_elems);
    return grad;
}

static inline pl_grad *array_new_sparse(rank_arrays *self, const pli_layout *layout,
                                        size_t n_rows)
{
    pl_grad *grad = array_bare(self, layout);
    array_give_memory(grad, n_rows * array_cols(grad));
    grad->n_sparse_dims = 1;
    grad->n_rows = n_rows;
    grad->rows = calloc(n_rows + 1, sizeof *grad->rows);
    if (grad->rows == NULL)
        exit(2);
    return grad;
}

static inline void array_hold(pl_grad *grad)
{
    CHECK(grad->n_refs > 0);
    grad->n_refs++;
}

static inline void array_drop(pl_grad *grad)
{
    if (grad == NULL)
        return;
    CHECK(grad->n_refs > 0);
    if (--grad->n_refs > 0)
        return;
    grad->owner->n_alive--;
    if (grad->window != NULL)
        pli_window_unsee(grad->window, grad->slot);
    if (grad->owns_data)
        free(grad->data);
    free(grad->rows);
    free(grad);
}

/* Where element k, in row-major order, is in memory; NULL: a row that is not there. */
static inline float *array_at(const pl_grad *grad, size_t k)
{
    const size_t row = k / array_cols(grad);
    const size_t col = k % array_cols(grad);
    if (grad->n_sparse_dims == 0)
        return grad->data + (int64_t)row * grad->layout.dims[0].stride +
               (int64_t)col * grad->layout.dims[1].stride;
    for (size_t r = 0; r < grad->n_rows; r++)
        if (grad->rows[r] == (int64_t)row)
            return grad->data + r * array_cols(grad) + col;
    return NULL;
}

static inline float array_get(const pl_grad *grad, size_t k)
{
    const float *at = array_at(grad, k);
    if (at == NULL)
        return 0;
    return grad->lazy ? -*at : *at;
}

static inline void array_set(pl_grad *grad, size_t k, float value)
{
    *array_at(grad, k) = grad->lazy ? -value : value;
}

/* Writes the elements; a dense array's memory stays. */
static inline void array_fill(pl_grad *grad, const float *values)
{
    for (size_t k = 0; k < grad->layout.n_elems; k++)
        if (array_at(grad, k) != NULL)
            array_set(grad, k, values[k]);
    grad->n_writes++;
}

static inline void array_values(const pl_grad *grad, float *out)
{
    for (size_t k = 0; k < grad->layout.n_elems; k++)
        out[k] = array_get(grad, k);
}

static inline int array_holds(const pl_grad *grad, const float *values)
{
    for (size_t k = 0; k < grad->layout.n_elems; k++)
        if (array_get(grad, k) != values[k])
            return 0;
    return 1;
}

/* A sparse array with the rows that are not zero. */
static inline pl_grad *array_sparse_of(rank_arrays *self, const pli_layout *layout,
                                       const float *values)
{
    const size_t n_cols = (size_t)layout->dims[1].size;
    size_t rows[ARRAYS_MOST_ELEMS];
    size_t n_rows = 0;
    for (size_t row = 0; row < (size_t)layout->dims[0].size; row++) {
        int is_any = 0;
        for (size_t col = 0; col < n_cols; col++)
            is_any |= values[row * n_cols + col] != 0;
        if (is_any)
            rows[n_rows++] = row;
    }
    pl_grad *grad = array_new_sparse(self, layout, n_rows);
    for (size_t r = 0; r < n_rows; r++)
        grad->rows[r] = (int64_t)rows[r];
    array_fill(grad, values);
    grad->n_writes = 0;
    return grad;
}

static inline pl_grad *array_dense_of(rank_arrays *self, const pli_layout *layout,
                                      const float *values)
{
    pl_grad *grad = array_new(self, layout);
    array_fill(grad, values);
    grad->n_writes = 0;
    return grad;
}

/* Gives `to` the rows and memory of another sparse array. */
static inline void array_become(pl_grad *to, const pl_grad *from)
{
    pl_grad *same = array_new_sparse(to->owner, &from->layout, from->n_rows);
    memcpy(same->rows, from->rows, from->n_rows * sizeof *from->rows);
    memcpy(same->data, from->data,
           from->n_rows * array_cols(from) * sizeof *from->data);
    float *data = to->data;
    int64_t *rows = to->rows;
    to->data = same->data;
    to->rows = same->rows;
    to->n_rows = same->n_rows;
    same->data = data;
    same->rows = rows;
    array_drop(same);
    to->n_writes++;
}

/* ---- the operations of a step --------------------------------------------------- */

static inline rank_arrays *arrays_of(void *context)
{
    return context;
}

/* Enters a callback: fails where the test wants it. */
static inline pl_status arrays_call(void *context, array_call which)
{
    rank_arrays *self = context;
    array_fault *fault = &self->fault;
    CHECK(!self->is_let_go);
    self->n_calls[which]++;
    if (fault->n_left == 0 || (fault->which != N_ARRAY_CALLS && fault->which != which))
        return PL_OK;
    if (--fault->n_left > 0)
        return PL_OK;
    fault->hit = which;
    if (fault->instead != NULL) {
        fault->instead(self->context);
        return PL_OK;
    }
    return pli_fail(PL_ESTATE, "the callback %s was refused", array_call_text(which));
}

static inline void arrays_expect_fault(rank_arrays *self, array_call which, long n)
{
    self->fault = (array_fault){.which = which, .n_left = n, .hit = N_ARRAY_CALLS};
}

/* Where the step's gradient of parameter i is. */
static inline pl_grad **arrays_home(void *context, size_t i)
{
    rank_arrays *self = context;
    return pl_step_look(self->step).context == PL_NO_CONTEXT ? &self->grads[i]
                                                             : &self->in_context[i];
}

/* Takes over the reference. */
static inline void array_replace(pl_grad **home, pl_grad *grad)
{
    pl_grad *before = *home;
    *home = grad;
    array_drop(before);
}

static inline void arrays_set_grad(rank_arrays *self, size_t i, pl_grad *grad)
{
    array_replace(&self->grads[i], grad);
}

static inline pl_grad *array_hold_maybe(pl_grad *grad)
{
    if (grad != NULL)
        array_hold(grad);
    return grad;
}

static inline pl_status arrays_find(void *context, size_t i, pl_grad **out)
{
    pl_status st = PL_OK;
    PL_TRY(arrays_call(context, CALL_FIND));
    *out = array_hold_maybe(*arrays_home(context, i));
done:
    return st;
}

static inline void array_read_to(const pl_grad *grad, pli_tensor *out)
{
    out->data = grad->data;
    out->layout = grad->layout;
}

static inline pl_status arrays_read_arrived(void *context, pl_grad **grad,
                                            unsigned *n_sparse_dims, pli_tensor *out)
{
    pl_status st = PL_OK;
    float values[ARRAYS_MOST_ELEMS];
    PL_TRY(arrays_call(context, CALL_READ_ARRIVED));
    *n_sparse_dims = (*grad)->n_sparse_dims;
    if (*n_sparse_dims > 0) {
        pl_grad *sparse = *grad;
        const pli_layout layout =
            layout_of((int)sparse->layout.dims[0].size, (int)array_cols(sparse));
        array_values(sparse, values);
        *grad = array_dense_of(context, &layout, values);
        array_drop(sparse);
    }
    array_read_to(*grad, out);
    out->layout.is_lazy = (*grad)->lazy != NOT_LAZY;
done:
    return st;
}

static inline pl_status arrays_read(void *context, pl_reading how, const char *what,
                                    pl_grad *grad, pli_tensor *out)
{
    pl_status st = PL_OK;
    PL_TRY(arrays_call(context, CALL_READ));
    CHECK(what != NULL && grad->n_refs > 0);
    if (grad->n_sparse_dims > 0)
        PL_FAIL(PL_EINVAL, "%s is sparse", what);
    array_read_to(grad, out);
    out->layout.is_lazy =
        grad->lazy == LAZY_SHOWN || (grad->lazy == LAZY_HIDDEN && how == PL_READ_GRAD);
done:
    return st;
}

static inline pl_status arrays_put(void *context, size_t i, pl_grad *grad)
{
    pl_status st = PL_OK;
    PL_TRY(arrays_call(context, CALL_PUT));
    array_replace(arrays_home(context, i), array_hold_maybe(grad));
done:
    return st;
}

static inline void arrays_put_back(void *context, size_t i, pl_grad *grad)
{
    array_replace(arrays_home(context, i), array_hold_maybe(grad));
}

static inline pl_status arrays_over(void *context, const pl_place *place,
                                    const pli_layout *layout, pl_grad **out)
{
    pl_status st = PL_OK;
    PL_TRY(arrays_call(context, CALL_OVER));
    pl_grad *grad = array_bare(context, layout);
    grad->data = place->memory;
    if (place->window != NULL) {
        grad->data = (float *)(void *)(place->window->base + place->offset);
        CHECK(place->window->comm != NULL); /* not retired */
        grad->window = place->window;
        grad->slot = place->slot;
        pli_window_see(place->window, place->slot);
    }
    *out = grad;
done:
    return st;
}

static inline pl_status arrays_empty_like(void *context, pl_grad *grad, pl_grad **out)
{
    pl_status st = PL_OK;
    PL_TRY(arrays_call(context, CALL_EMPTY_LIKE));
    *out = array_new(context, &grad->layout);
done:
    return st;
}

static inline pl_status arrays_clone(void *context, pl_grad *grad, pl_grad **out)
{
    pl_status st = PL_OK;
    float values[ARRAYS_MOST_ELEMS];
    PL_TRY(arrays_call(context, CALL_CLONE));
    array_values(grad, values);
    *out = array_dense_of(context, &grad->layout, values);
done:
    return st;
}

static inline pl_status arrays_copy(void *context, pl_grad *to, pl_grad *from)
{
    pl_status st = PL_OK;
    float values[ARRAYS_MOST_ELEMS];
    PL_TRY(arrays_call(context, CALL_COPY));
    if (to->layout.n_elems != from->layout.n_elems)
        PL_FAIL(PL_EINVAL, "%zu elements do not fit %zu", from->layout.n_elems,
                to->layout.n_elems);
    array_values(from, values);
    array_fill(to, values);
done:
    return st;
}

static inline void array_add(pl_grad *to, const pl_grad *from)
{
    float sums[ARRAYS_MOST_ELEMS];
    for (size_t k = 0; k < to->layout.n_elems; k++)
        sums[k] = array_get(to, k) + array_get(from, k);
    if (to->n_sparse_dims == 0) {
        array_fill(to, sums);
        return;
    }
    CHECK(from->n_sparse_dims > 0);
    pl_grad *both = array_sparse_of(to->owner, &to->layout, sums);
    array_become(to, both);
    array_drop(both);
}

static inline pl_status arrays_add(void *context, pl_grad *to, pl_grad *from)
{
    pl_status st = PL_OK;
    PL_TRY(arrays_call(context, CALL_ADD));
    array_add(to, from);
done:
    return st;
}

static inline pl_status arrays_note_write(void *context, pl_grad *grad)
{
    pl_status st = PL_OK;
    PL_TRY(arrays_call(context, CALL_NOTE_WRITE));
    grad->n_writes++;
done:
    return st;
}

static inline pl_status arrays_n_writes(void *context, pl_grad *grad, long *out)
{
    pl_status st = PL_OK;
    PL_TRY(arrays_call(context, CALL_N_WRITES));
    *out = grad->n_writes;
done:
    return st;
}

static inline pl_status arrays_find_buffer(void *context, size_t b, pl_grad **out)
{
    pl_status st = PL_OK;
    PL_TRY(arrays_call(context, CALL_FIND_BUFFER));
    *out = array_hold_maybe(arrays_of(context)->buffers[b]);
done:
    return st;
}

/* `indices` of an array without rows must not be NULL, which means all rows. */
static inline void array_rows_to(const pl_grad *grad, pl_sparse_rows *rows)
{
    *rows = (pl_sparse_rows){.values = grad->data, .n_rows = grad->n_rows};
    if (grad->n_sparse_dims > 0)
        rows->indices = grad->rows;
    else
        rows->n_rows = (size_t)grad->layout.dims[0].size;
}

static inline pl_status arrays_read_rows(void *context, size_t i, const pl_table *table,
                                         pl_sparse_rows *rows, pl_grad **out)
{
    pl_status st = PL_OK;
    pl_grad *grad = *arrays_home(context, i);
    PL_TRY(arrays_call(context, CALL_READ_ROWS));
    *out = NULL;
    if (grad == NULL)
        return PL_OK;
    CHECK(table->n_rows == (size_t)grad->layout.dims[0].size);
    CHECK(table->row_elems == array_cols(grad) && table->dtype == PL_F32);
    array_hold(grad);
    *out = grad;
    if (grad->n_sparse_dims == 0) { /* its rows follow each other */
        float values[ARRAYS_MOST_ELEMS];
        const pli_layout layout = layout_of((int)table->n_rows, (int)table->row_elems);
        array_values(grad, values);
        *out = array_dense_of(context, &layout, values);
        array_drop(grad);
    }
    array_rows_to(*out, rows);
done:
    return st;
}

static inline pl_status arrays_make_rows(void *context, size_t i, const pl_table *table,
                                         const pl_sparse_rows *all,
                                         pl_sparse_rows *rows, pl_grad **out)
{
    pl_status st = PL_OK;
    const pli_layout layout = layout_of((int)table->n_rows, (int)table->row_elems);
    PL_TRY(arrays_call(context, CALL_MAKE_ROWS));
    CHECK(arrays_of(context)->model->params[i].is_sparse);
    pl_grad *mean = all->indices != NULL
                        ? array_new_sparse(context, &layout, all->n_rows)
                        : array_new(context, &layout);
    if (all->indices != NULL)
        memcpy(mean->rows, all->indices, all->n_rows * sizeof *mean->rows);
    array_rows_to(mean, rows);
    *out = mean;
done:
    return st;
}

static inline pl_status arrays_to_sparse(void *context, pl_grad *grad, unsigned n_dims,
                                         pl_grad **out)
{
    pl_status st = PL_OK;
    float values[ARRAYS_MOST_ELEMS];
    PL_TRY(arrays_call(context, CALL_TO_SPARSE));
    CHECK(n_dims == 1);
    array_values(grad, values);
    *out = array_sparse_of(context, &grad->layout, values);
done:
    return st;
}

static inline pl_status arrays_put_mean(void *context, size_t i, pl_grad *mean)
{
    pl_status st = PL_OK;
    float values[ARRAYS_MOST_ELEMS];
    pl_grad *grad = *arrays_home(context, i);
    PL_TRY(arrays_call(context, CALL_PUT_MEAN));
    if (grad == NULL || (grad->n_sparse_dims > 0) != (mean->n_sparse_dims > 0)) {
        array_replace(arrays_home(context, i), array_hold_maybe(mean));
    } else if (grad->n_sparse_dims > 0) {
        array_become(grad, mean);
    } else {
        array_values(mean, values);
        array_fill(grad, values);
    }
done:
    return st;
}

#endif
