/* layout.c - one walk over strided elements, both ways. */
#include "layout.h"

#include <string.h>

#include "alloc.h"

/* ---- layouts of tensors --------------------------------------------------------- */

/* Walks the dimensions from the smallest stride up: each stride must equal the size of
 * the block that the dimensions before it fill. */
int pli_layout_is_dense(const pli_layout *layout)
{
    const pli_dim *dims = layout->dims;
    unsigned char is_taken[PLI_MAX_DIMS] = {0};
    int64_t block = 1;
    for (int n = 0; n < layout->n_dims && layout->n_elems > 0; n++) {
        int next = -1;
        for (int d = 0; d < layout->n_dims; d++) {
            if (is_taken[d] || dims[d].size == 1)
                continue;
            if (next < 0 || dims[d].stride < dims[next].stride)
                next = d;
        }
        if (next < 0)
            break;
        if (dims[next].stride != block)
            return 0;
        block *= dims[next].size;
        is_taken[next] = 1;
    }
    return 1;
}

void pli_layout_make_row_major(pli_layout *layout)
{
    int64_t stride = 1;
    for (int d = layout->n_dims - 1; d >= 0; d--) {
        layout->dims[d].stride = stride;
        stride *= layout->dims[d].size;
    }
}

pl_status pli_layout_copy(const pli_layout *layout, pli_layout **out)
{
    pl_status st = PL_OK;
    const size_t n_bytes =
        offsetof(pli_layout, dims) + (size_t)layout->n_dims * sizeof(pli_dim);
    PL_TRY(pli_calloc(1, n_bytes, "a tensor's layout", out));
    memcpy(*out, layout, n_bytes);
done:
    return st;
}

int pli_layout_equal(const pli_layout *left, const pli_layout *right)
{
    if (left->dtype != right->dtype || left->n_dims != right->n_dims ||
        left->is_lazy != right->is_lazy)
        return 0;
    for (int d = 0; d < left->n_dims; d++)
        if (left->dims[d].size != right->dims[d].size ||
            (left->dims[d].stride != right->dims[d].stride && left->dims[d].size != 1))
            return 0;
    return 1;
}

/* ---- copies --------------------------------------------------------------------- */

typedef enum pack_direction { PACK, UNPACK } pack_direction;

/* A walk over the leading dimensions.  The elements behind them lie in row-major
 * pieces. */
typedef struct walk {
    const pli_layout *layout;
    int n_leading;
    size_t elem_bytes;
    size_t piece_bytes;
    pack_direction way;
} walk;

static walk begin_walk(const pli_layout *layout, pack_direction way)
{
    const size_t elem_bytes = pl_dtype_bytes(layout->dtype);
    int64_t piece = 1;
    int n = layout->n_dims;
    for (; n > 0; n--) {
        const pli_dim *dim = &layout->dims[n - 1];
        if (dim->size != 1 && dim->stride != piece)
            break;
        piece *= dim->size;
    }
    return (walk){layout, n, elem_bytes, (size_t)piece * elem_bytes, way};
}

static void copy_piece(const walk *self, char *data, char *block, size_t n_bytes)
{
    if (self->way == PACK)
        memcpy(block, data, n_bytes);
    else
        memcpy(data, block, n_bytes);
}

/* The innermost dimension of a walk: a copy of constant size compiles to a move. */
static char *copy_column(const walk *self, int64_t size, int64_t step_bytes, char *data,
                         char *block)
{
#define COPY_COLUMN(bytes)                                                             \
    case bytes:                                                                        \
        for (int64_t i = 0; i < size; i++, data += step_bytes, block += (bytes))       \
            copy_piece(self, data, block, (bytes));                                    \
        return block;
    const size_t n_bytes = self->piece_bytes;
    switch (n_bytes) {
        COPY_COLUMN(1)
        COPY_COLUMN(2)
        COPY_COLUMN(4)
        COPY_COLUMN(8)
        COPY_COLUMN(16)
    default:
        for (int64_t i = 0; i < size; i++, data += step_bytes, block += n_bytes)
            copy_piece(self, data, block, n_bytes);
        return block;
    }
#undef COPY_COLUMN
}

/* Copies from dimension `d` on inward; returns the end of what it used of the block. */
static char *copy_rows(const walk *self, int d, char *data, char *block)
{
    const pli_dim *dim = &self->layout->dims[d];
    const int64_t step_bytes = dim->stride * (int64_t)self->elem_bytes;
    if (d == self->n_leading - 1)
        return copy_column(self, dim->size, step_bytes, data, block);
    for (int64_t i = 0; i < dim->size; i++, data += step_bytes)
        block = copy_rows(self, d + 1, data, block);
    return block;
}

static void copy(const pli_layout *layout, void *data, void *block, pack_direction way)
{
    const walk self = begin_walk(layout, way);
    if (layout->n_elems == 0)
        return;
    if (self.n_leading == 0 || pli_layout_is_dense(layout))
        copy_piece(&self, data, block, pli_layout_bytes(layout));
    else
        (void)copy_rows(&self, 0, data, block);
}

void pli_layout_pack(const pli_layout *layout, const void *data, void *block)
{
    copy(layout, (void *)data, block, PACK);
}

void pli_layout_unpack(const pli_layout *layout, void *data, const void *block)
{
    copy(layout, data, (void *)block, UNPACK);
}
