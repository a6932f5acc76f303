/* layout.c - one walk over strided elements, both ways. */
#include "layout.h"

#include <string.h>

#include "alloc.h"

/* ---- density -------------------------------------------------------------------- */

size_t pli_strided_bytes(const pli_strided *strided)
{
    size_t n_bytes = strided->elem_bytes;
    for (int d = 0; d < strided->n_dims; d++)
        n_bytes *= (size_t)strided->dims[d].size;
    return n_bytes;
}

/* How many leading dimensions there are before the elements lie in one row-major piece;
 * *piece_bytes is its size. */
static int leading_dims(const pli_strided *strided, size_t *piece_bytes)
{
    int n = strided->n_dims;
    *piece_bytes = strided->elem_bytes;
    for (; n > 0; n--) {
        const pli_dim *dim = &strided->dims[n - 1];
        if (dim->size != 1 && dim->stride != (int64_t)*piece_bytes)
            break;
        *piece_bytes *= (size_t)dim->size;
    }
    return n;
}

/* Walks the dimensions from the smallest stride up: each must begin where the block of
 * the ones before ends. */
static int is_dense(const pli_strided *strided)
{
    const pli_dim *dims = strided->dims;
    unsigned char is_taken[PLI_MAX_DIMS] = {0};
    int64_t block = (int64_t)strided->elem_bytes;
    for (int n = 0; n < strided->n_dims; n++) {
        int next = -1;
        for (int d = 0; d < strided->n_dims; d++) {
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

pli_density pli_strided_density(const pli_strided *strided)
{
    size_t piece_bytes = 0;
    if (pli_strided_bytes(strided) == 0 || leading_dims(strided, &piece_bytes) == 0)
        return PLI_ROW_MAJOR;
    return is_dense(strided) ? PLI_DENSE : PLI_NOT_DENSE;
}

/* ---- copies --------------------------------------------------------------------- */

typedef enum direction { PACK, UNPACK } direction;

/* A walk over the leading dimensions. */
typedef struct walk {
    const pli_strided *strided;
    int n_leading;
    size_t piece_bytes;
    direction way;
} walk;

static void copy_piece(const walk *self, char *data, char *block, size_t n_bytes)
{
    if (self->way == PACK)
        memcpy(block, data, n_bytes);
    else
        memcpy(data, block, n_bytes);
}

/* The innermost dimension of a walk: a copy whose size the compiler knows is a move. */
static char *copy_column(const walk *self, const pli_dim *dim, char *data, char *block)
{
#define COPY_COLUMN(bytes)                                                             \
    case bytes:                                                                        \
        for (int64_t i = 0; i < dim->size; i++, data += dim->stride, block += (bytes)) \
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
        for (int64_t i = 0; i < dim->size; i++, data += dim->stride, block += n_bytes)
            copy_piece(self, data, block, n_bytes);
        return block;
    }
#undef COPY_COLUMN
}

/* Copies what lies behind the first `d` dimensions; returns where the block goes on. */
static char *copy_rows(const walk *self, int d, char *data, char *block)
{
    const pli_dim *dim = &self->strided->dims[d];
    if (d == self->n_leading - 1)
        return copy_column(self, dim, data, block);
    for (int64_t i = 0; i < dim->size; i++, data += dim->stride)
        block = copy_rows(self, d + 1, data, block);
    return block;
}

static void copy(const pli_strided *strided, void *data, void *block, direction way)
{
    walk self = {.strided = strided, .way = way};
    const size_t n_bytes = pli_strided_bytes(strided);
    if (n_bytes == 0)
        return;
    self.n_leading = leading_dims(strided, &self.piece_bytes);
    if (self.n_leading == 0 || is_dense(strided))
        copy_piece(&self, data, block, n_bytes);
    else
        (void)copy_rows(&self, 0, data, block);
}

void pli_strided_pack(const pli_strided *strided, const void *data, void *block)
{
    copy(strided, (void *)data, block, PACK);
}

/* ---- layouts of tensors --------------------------------------------------------- */

int pli_layout_is_dense(const pli_layout *layout)
{
    const pli_strided elements = {layout->dims, layout->n_dims, 1};
    return pli_strided_density(&elements) != PLI_NOT_DENSE;
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

static void copy_layout(const pli_layout *layout, void *data, void *block,
                        direction way)
{
    pli_dim dims[PLI_MAX_DIMS];
    const size_t elem_bytes = pl_dtype_bytes(layout->dtype);
    for (int d = 0; d < layout->n_dims; d++)
        dims[d] = (pli_dim){layout->dims[d].size,
                            layout->dims[d].stride * (int64_t)elem_bytes};
    const pli_strided strided = {dims, layout->n_dims, elem_bytes};
    copy(&strided, data, block, way);
}

void pli_layout_pack(const pli_layout *layout, const void *data, void *block)
{
    copy_layout(layout, (void *)data, block, PACK);
}

void pli_layout_unpack(const pli_layout *layout, void *data, const void *block)
{
    copy_layout(layout, data, (void *)block, UNPACK);
}
