/* Copies of strided elements, against a walk index by index. */
#include <string.h>

#include "check.h"
#include "core/alloc.h"
#include "core/layout.h"
#include "draw.h"

enum { MOST_BYTES = 1 << 16 };

static unsigned char memory[MOST_BYTES];
static unsigned char block[MOST_BYTES];

static pli_layout layout_over(pl_dtype dtype, const pli_dim *dims, int n_dims)
{
    pli_layout layout = {.dtype = dtype, .n_dims = n_dims, .n_elems = 1};
    for (int d = 0; d < n_dims; d++) {
        layout.dims[d] = dims[d];
        layout.n_elems *= (size_t)dims[d].size;
    }
    return layout;
}

/* The offset in bytes of the `at`-th element in row-major order of indices. */
static int64_t offset_of(const pli_layout *layout, size_t at)
{
    int64_t offset = 0;
    for (int d = layout->n_dims - 1; d >= 0; d--) {
        offset += (int64_t)(at % (size_t)layout->dims[d].size) * layout->dims[d].stride;
        at /= (size_t)layout->dims[d].size;
    }
    return offset * (int64_t)pl_dtype_bytes(layout->dtype);
}

static void fill(unsigned char *bytes)
{
    for (size_t i = 0; i < MOST_BYTES; i++)
        bytes[i] = (unsigned char)(i * 7 + i / 251);
}

/* Packs from the memory's middle, and compares with a copy element by element. */
static void check_pack(const pli_layout *layout)
{
    const unsigned char *data = memory + MOST_BYTES / 2;
    const size_t n = pl_dtype_bytes(layout->dtype);
    fill(memory);
    memset(block, 0xEE, sizeof block);
    pli_layout_pack(layout, data, block);
    if (pli_layout_is_dense(layout))
        CHECK(memcmp(block, data, layout->n_elems * n) == 0);
    else
        for (size_t e = 0; e < layout->n_elems; e++)
            if (!CHECK(memcmp(block + e * n, data + offset_of(layout, e), n) == 0))
                return;
    for (size_t i = layout->n_elems * n; i < layout->n_elems * n + 64; i++)
        CHECK(block[i] == 0xEE);
}

/* ---- density -------------------------------------------------------------------- */

TEST(density_is_told_of_any_order_of_dimensions)
{
    static const struct {
        pli_dim dims[3];
        int n_dims;
        int is_dense;
    } table[] = {
        {{{0, 0}}, 0, 1},
        {{{5, 1}}, 1, 1},
        {{{2, 3}, {3, 1}}, 2, 1},
        {{{2, 1}, {3, 2}}, 2, 1},
        {{{2, 1}, {3, 4}, {2, 2}}, 3, 1},
        {{{1, 999}, {3, 1}}, 2, 1}, /* no stride reaches a second one */
        {{{3, 1}, {1, -7}}, 2, 1},
        {{{0, 5}, {3, 77}}, 2, 1}, /* no elements */
        {{{2, 4}, {3, 1}}, 2, 0},  /* a gap */
        {{{3, 2}}, 1, 0},
        {{{2, 0}, {3, 1}}, 2, 0}, /* repeats */
        {{{2, 1}, {3, 1}}, 2, 0},
        {{{3, -1}}, 1, 0},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const pli_layout layout = layout_over(PL_F32, table[i].dims, table[i].n_dims);
        if (!CHECK(pli_layout_is_dense(&layout) == table[i].is_dense))
            CHECK_MORE("row %zu", i);
        check_pack(&layout);
    }
}

/* ---- copies --------------------------------------------------------------------- */

/* Strides of a dense layout in a random order of dimensions; some cases are then
 * changed: gaps, repeats, backwards. */
static void draw_dims(draw *random, pli_dim *dims, int n_dims)
{
    int64_t stride = 1;
    int order[8];
    for (int d = 0; d < n_dims; d++) {
        const int other = (int)draw_below(random, (size_t)d + 1);
        order[d] = order[other];
        order[other] = d;
        dims[d].size = 1 + (int64_t)draw_below(random, n_dims > 4 ? 2 : 4);
    }
    for (int d = 0; d < n_dims; d++) {
        dims[order[d]].stride = stride;
        stride *= dims[order[d]].size;
        if (draw_below(random, 6) == 0)
            stride++;
    }
    for (int d = 0; d < n_dims; d++) {
        const size_t how = draw_below(random, 12);
        if (how == 0)
            dims[d].stride = 0;
        else if (how == 1)
            dims[d].stride = -dims[d].stride;
        else if (how == 2)
            dims[d].size = 0;
    }
}

TEST(elements_of_any_dtype_and_rank_are_packed_in_order)
{
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        draw random = draw_of(seed);
        pli_dim dims[8];
        const int n_dims = (int)draw_below(&random, 9);
        const pl_dtype dtype = (pl_dtype)draw_below(&random, PL_N_DTYPES);
        draw_dims(&random, dims, n_dims);
        const pli_layout layout = layout_over(dtype, dims, n_dims);
        const int n_failures = atomic_load(&check_n_failures);
        check_pack(&layout);
        if (atomic_load(&check_n_failures) > n_failures)
            CHECK_MORE("seed %d, %d dims of dtype %d", (int)seed, n_dims, (int)dtype);
    }
}

TEST(the_most_dimensions_are_walked)
{
    pli_dim dims[PLI_MAX_DIMS];
    for (int d = 0; d < PLI_MAX_DIMS; d++)
        dims[d] = (pli_dim){1, 1000};
    dims[0] = (pli_dim){3, 10};
    dims[31] = (pli_dim){2, 4};
    dims[63] = (pli_dim){2, 1};
    const pli_layout layout = layout_over(PL_F32, dims, PLI_MAX_DIMS);
    CHECK(!pli_layout_is_dense(&layout));
    CHECK(layout.n_elems == 12);
    check_pack(&layout);
}

/* ---- layouts of tensors --------------------------------------------------------- */

static pli_layout layout_of(pl_dtype dtype, int64_t rows, int64_t columns)
{
    pli_layout layout = {
        .dtype = dtype, .n_dims = 2, .n_elems = (size_t)(rows * columns)};
    layout.dims[0].size = rows;
    layout.dims[1].size = columns;
    pli_layout_make_row_major(&layout);
    return layout;
}

TEST(unpacking_puts_each_element_back_and_nothing_else)
{
    for (int dtype = 0; dtype < PL_N_DTYPES; dtype++) {
        const size_t n = pl_dtype_bytes((pl_dtype)dtype);
        pli_layout layout = layout_of((pl_dtype)dtype, 3, 4);
        layout.dims[0].stride = 10; /* 0 2 4 6 . . . . . . 10 12 14 16 . . */
        layout.dims[1].stride = 2;
        fill(memory);
        pli_layout_pack(&layout, memory, block);
        for (size_t e = 0; e < 12; e++)
            CHECK(memcmp(block + e * n, memory + (e / 4 * 10 + e % 4 * 2) * n, n) == 0);
        memset(memory, 0xEE, sizeof memory);
        pli_layout_unpack(&layout, memory, block);
        for (size_t at = 0; at < 40 * n; at++) {
            const size_t e = at / n;
            const int is_one = e / 10 < 3 && e % 2 == 0 && e % 10 < 8;
            const size_t from = (e / 10 * 4 + e % 10 / 2) * n + at % n;
            CHECK(memory[at] == (is_one ? block[from] : 0xEE));
        }
    }
}

TEST(dense_tensors_are_packed_as_they_lie)
{
    pli_layout layout = layout_of(PL_F32, 3, 4);
    layout.dims[0].stride = 1;
    layout.dims[1].stride = 3;
    fill(memory);
    CHECK(pli_layout_is_dense(&layout));
    pli_layout_pack(&layout, memory, block);
    CHECK(memcmp(block, memory, pli_layout_bytes(&layout)) == 0);
    memset(memory, 0, sizeof memory);
    pli_layout_unpack(&layout, memory, block);
    CHECK(memcmp(block, memory, pli_layout_bytes(&layout)) == 0);
    CHECK(memory[48] == 0);
}

TEST(layouts_are_equal_where_they_put_the_same_at_the_same_places)
{
    const pli_layout first = layout_of(PL_F32, 3, 1);
    pli_layout other = first;
    other.dims[1].stride = 77; /* a dimension of one element */
    CHECK(pli_layout_equal(&first, &other));
    other.dims[0].stride = 2;
    CHECK(!pli_layout_equal(&first, &other));
    other = first;
    other.is_lazy = 1;
    CHECK(!pli_layout_equal(&first, &other));
    other = first;
    other.dtype = PL_I32;
    CHECK(!pli_layout_equal(&first, &other));
    other = first;
    other.n_dims = 1;
    CHECK(!pli_layout_equal(&first, &other));
    other = layout_of(PL_F32, 4, 1);
    CHECK(!pli_layout_equal(&first, &other));
}

TEST(a_copy_of_a_layout_is_its_own_or_fails)
{
    const pli_layout layout = layout_of(PL_BF16, 3, 4);
    pli_layout *copy = NULL;
    if (!CHECK_OK(pli_layout_copy(&layout, &copy)))
        return;
    CHECK(pli_layout_equal(&layout, copy));
    pli_free(copy);
    copy = NULL;
    pli_fault_arm(PLI_FAULT_ALLOC, 1);
    CHECK(pli_layout_copy(&layout, &copy) == PL_ENOMEM);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
    CHECK(copy == NULL);
}
