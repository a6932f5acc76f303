/* fuzz_rows.c - the exchange of rows; the input gives the other rank's counts and row
 * numbers.
 */
#include "bytes.h"
#include "core/alloc.h"
#include "reducer/sparse_exchange.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { ROWS_TABLES = 2, ROWS_STAGING = 4096 };

/* A world of two in which the input is rank 0. */
typedef struct rows_world {
    pl_comm super;
    bytes from;
    pl_ticket n_issued;
    _Alignas(PL_CACHE_LINE) char arena[ROWS_STAGING];
} rows_world;

static pl_status rows_issue(pl_comm *comm, const pl_op *op, const pli_order *order,
                            pl_ticket *out)
{
    rows_world *self = (rows_world *)(void *)comm;
    (void)order;
    if (op->kind == PL_ALL_GATHER)
        bytes_copy(&self->from, self->arena + op->offset_bytes, op->n_elems / 2);
    *out = ++self->n_issued;
    return PL_OK;
}

static pl_status rows_wait(void *context, pl_ticket ticket)
{
    (void)context;
    (void)ticket;
    return PL_OK;
}

static void rows_work(pl_comm *comm)
{
    (void)comm;
}

static const pl_comm_ops rows_ops = {
    .name = "rows", .issue = rows_issue, .work = rows_work};

/* Takes the union as its callers do: as rows of the table. */
static void take_union(const pl_exchange *exchange)
{
    for (size_t t = 0; t < ROWS_TABLES; t++) {
        const pl_table *table = &exchange->parts[t].table;
        pl_sparse_rows *all = &exchange->parts[t].all;
        must(all->n_rows <= table->n_rows);
        for (size_t k = 0; all->indices != NULL && k < all->n_rows; k++)
            must(all->indices[k] >= 0 &&
                 (uint64_t)all->indices[k] < (uint64_t)table->n_rows);
        all->values = calloc(all->n_rows + 1, table->row_elems * sizeof(float));
    }
    must(pl_exchange_mean(exchange) == PL_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static int64_t indices[] = {1, 3};
    static float values[] = {1, 2, 3, 4};
    const pl_sparse_rows rows = {indices, values, 2};
    pl_exchange_part parts[ROWS_TABLES] = {
        {.table = {.n_rows = 5, .row_elems = 2, .dtype = PL_F32}, .local = rows},
        {.table = {.n_rows = 700, .row_elems = 1, .dtype = PL_F32}, .local = rows}};
    int64_t *found = NULL;
    rows_world world = {.super = {.ops = &rows_ops,
                                  .rank = 1,
                                  .world_size = 2,
                                  .arena_bytes = ROWS_STAGING,
                                  .host_bytes = ROWS_STAGING},
                        .from = {data, n}};
    world.super.arena = world.arena;
    const pl_exchange exchange = {.comm = &world.super,
                                  .staging_bytes = ROWS_STAGING,
                                  .parts = parts,
                                  .n_parts = ROWS_TABLES,
                                  .wait = rows_wait};
    if (pl_exchange_find(&exchange, &found) == PL_OK)
        take_union(&exchange);
    for (size_t t = 0; t < ROWS_TABLES; t++)
        free(parts[t].all.values);
    pli_free(found);
    return 0;
}
