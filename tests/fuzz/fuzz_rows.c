/* fuzz_rows.c - the exchange of rows; the input gives the other rank's counts and row
 * numbers.
 */
#include "bytes.h"
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

static pl_status rows_wait(pl_comm *comm, pl_ticket ticket, int64_t slice_ns)
{
    (void)comm;
    (void)ticket;
    (void)slice_ns;
    return PL_OK;
}

static void rows_work(pl_comm *comm)
{
    (void)comm;
}

static const pl_comm_ops rows_ops = {
    .name = "rows", .issue = rows_issue, .work = rows_work, .wait = rows_wait};

/* Takes the union as its callers do: as rows of the table. */
static void take_union(pl_exchange *exchange, const pl_table *tables, void **rooms)
{
    for (size_t t = 0; t < ROWS_TABLES; t++) {
        const pl_sparse_rows all = pl_exchange_union(exchange, t);
        must(all.n_rows <= tables[t].n_rows);
        for (size_t k = 0; all.indices != NULL && k < all.n_rows; k++)
            must(all.indices[k] >= 0 &&
                 (uint64_t)all.indices[k] < (uint64_t)tables[t].n_rows);
        rooms[t] = calloc(all.n_rows + 1, tables[t].row_elems * sizeof(float));
        pl_exchange_set_room(exchange, t, rooms[t]);
    }
    must(pl_exchange_mean(exchange, 0) == PL_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const pl_table tables[ROWS_TABLES] = {
        {.n_rows = 5, .row_elems = 2, .dtype = PL_F32},
        {.n_rows = 700, .row_elems = 1, .dtype = PL_F32}};
    static int64_t indices[] = {1, 3};
    static float values[] = {1, 2, 3, 4};
    const pl_sparse_rows rows[ROWS_TABLES] = {{indices, values, 2},
                                              {indices, values, 2}};
    rows_world world = {.super = {.ops = &rows_ops,
                                  .rank = 1,
                                  .world_size = 2,
                                  .arena_bytes = ROWS_STAGING,
                                  .host_bytes = ROWS_STAGING},
                        .from = {data, n}};
    world.super.arena = world.arena;
    const pl_exchange_spec spec = {.comm = &world.super,
                                   .staging_bytes = ROWS_STAGING,
                                   .tables = tables,
                                   .rows = rows,
                                   .n_tables = ROWS_TABLES};
    void *rooms[ROWS_TABLES] = {NULL};
    pl_exchange *exchange = NULL;
    must(pl_exchange_create(&spec, &exchange) == PL_OK);
    if (pl_exchange_find(exchange, 0) == PL_OK)
        take_union(exchange, tables, rooms);
    for (size_t t = 0; t < ROWS_TABLES; t++)
        free(rooms[t]);
    pl_exchange_destroy(exchange);
    return 0;
}
