/* How rows are divided over replicas, and which outputs can be joined. */
#include "check.h"
#include "replicas/split.h"

/* ---- split ---------------------------------------------------------------------- */

TEST(the_larger_parts_come_first)
{
    static const struct {
        int64_t n_rows, n_replicas;
        int64_t parts[8]; /* 0: no more */
    } table[] = {
        {7, 3, {3, 2, 2}}, {8, 4, {2, 2, 2, 2}}, {10, 4, {3, 3, 2, 2}},
        {5, 1, {5}},       {3, 8, {1, 1, 1}},    {9, 8, {2, 1, 1, 1, 1, 1, 1, 1}},
        {1, 2, {1}},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const int64_t n = pli_split_parts(table[i].n_rows, table[i].n_replicas);
        int64_t begin = 0;
        CHECK(n == 8 || table[i].parts[n] == 0);
        for (int64_t k = 0; k < n; k++) {
            const pli_rows rows = pli_split_rows(table[i].n_rows, n, k);
            CHECK(rows.n == table[i].parts[k] && rows.begin == begin);
            begin += rows.n;
        }
    }
}

TEST(every_row_is_in_one_part_and_no_part_is_empty)
{
    for (int64_t n_rows = 1; n_rows <= 70; n_rows++)
        for (int64_t n_replicas = 1; n_replicas <= 8; n_replicas++) {
            const int64_t n = pli_split_parts(n_rows, n_replicas);
            int64_t end = 0;
            CHECK(n >= 1 && n <= n_replicas && n <= n_rows);
            for (int64_t k = 0; k < n; k++) {
                const pli_rows rows = pli_split_rows(n_rows, n, k);
                CHECK(rows.begin == end && rows.n >= 1);
                CHECK(rows.n - pli_split_rows(n_rows, n, n - 1).n <= 1);
                end += rows.n;
            }
            CHECK(end == n_rows);
        }
}

TEST(a_batch_without_rows_is_one_part)
{
    const pli_rows rows = pli_split_rows(0, pli_split_parts(0, 4), 0);
    CHECK(pli_split_parts(0, 4) == 1);
    CHECK(rows.begin == 0 && rows.n == 0);
}

/* ---- shapes --------------------------------------------------------------------- */

TEST(dimensions_are_counted_from_either_end)
{
    const pli_shape shape = {.n_dims = 3, .sizes = {2, 3, 4}};
    const pli_shape scalar = {.n_dims = 0};
    const pli_shape nested = {.n_dims = PLI_SHAPE_UNKNOWN};
    CHECK(pli_shape_dim(&shape, 0) == 0 && pli_shape_dim(&shape, 2) == 2);
    CHECK(pli_shape_dim(&shape, -1) == 2 && pli_shape_dim(&shape, -3) == 0);
    CHECK(pli_shape_dim(&shape, 3) == -1 && pli_shape_dim(&shape, -4) == -1);
    CHECK(pli_shape_dim(&scalar, 0) == -1 && pli_shape_dim(&scalar, -1) == -1);
    CHECK(pli_shape_dim(&nested, 0) == -1);
}

TEST(shapes_join_where_one_dimension_differs)
{
    const pli_shape first = {.n_dims = 2, .sizes = {2, 3}};
    const pli_shape fewer = {.n_dims = 2, .sizes = {1, 3}};
    const pli_shape longer = {.n_dims = 3, .sizes = {2, 3, 1}};
    const pli_shape scalar = {.n_dims = 0};
    CHECK(pli_shape_joins(&first, &first, 0) && pli_shape_joins(&first, &first, 1));
    CHECK(pli_shape_joins(&first, &fewer, 0));
    CHECK(!pli_shape_joins(&first, &fewer, 1));
    CHECK(!pli_shape_joins(&first, &longer, 0));
    CHECK(!pli_shape_joins(&first, &scalar, -1));
    CHECK(pli_shape_joins(&scalar, &scalar, -1));
}
