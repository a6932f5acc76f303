/* test_reducer_exchange.c - rows of tables, averaged over ranks that are threads.
 *
 * The rows of each rank, and their values, are drawn from (seed, rank, table, row), so
 * each rank can compute every union and every mean.  Values are multiples of the world
 * size.
 */
#include <stdlib.h>

#include "core/alloc.h"
#include "ranks.h"
#include "reducer/sparse_exchange.h"
#include "values.h"

enum { MAX_TABLES = 6, MAX_ROWS = 300, MAX_ROW_ELEMS = 90, STAGING_AT = 256 };
enum { LEAST_STAGING = 4 * PLI_EXCHANGE_SEGMENTS * PL_CACHE_LINE };

typedef struct problem {
    uint64_t seed;
    int world_size;
    size_t n_tables;
    size_t staging_bytes;
    pl_table tables[MAX_TABLES];
    unsigned percent_whole; /* of a rank's tables: it has every row */
    int64_t rest_ns;        /* the longest pause between two calls; 0: none */
    int culprit;            /* fails between find and mean; -1: none */
} problem;

static problem problem_of(uint64_t seed, int world_size)
{
    static const pl_dtype dtypes[] = {PL_F32, PL_BF16, PL_F64, PL_F16, PL_C64};
    draw random = draw_of(seed);
    problem it = {.seed = seed,
                  .world_size = world_size,
                  .n_tables = 1 + draw_below(&random, MAX_TABLES),
                  .staging_bytes = LEAST_STAGING + draw_below(&random, 4096),
                  .culprit = -1};
    for (size_t t = 0; t < it.n_tables; t++)
        it.tables[t] = (pl_table){.n_rows = 1 + draw_below(&random, MAX_ROWS),
                                  .row_elems = 1 + draw_below(&random, MAX_ROW_ELEMS),
                                  .dtype = dtypes[draw_below(&random, 5)]};
    return it;
}

/* ---- random choices ------------------------------------------------------------- */

static unsigned percent(const problem *it, int rank, size_t t, size_t row)
{
    draw random = draw_of(it->seed * 1000003 + (uint64_t)rank * 10007 + t * 101 + row);
    return (unsigned)draw_below(&random, 100);
}

static int is_whole(const problem *it, int rank, size_t t)
{
    return percent(it, rank, t, MAX_ROWS + 1) < it->percent_whole;
}

/* Each rank's part of a table is dense, thin or empty. */
static int has_row(const problem *it, int rank, size_t t, size_t row)
{
    static const unsigned percents[] = {0, 3, 30, 100};
    const unsigned kind = percent(it, rank, t, MAX_ROWS + 2) % 4;
    return is_whole(it, rank, t) || percent(it, rank, t, row) < percents[kind];
}

static int value_of(const problem *it, int rank, size_t t, size_t row, size_t part)
{
    const unsigned mixed =
        ((unsigned)part * 2654435761u + (unsigned)row * 40503u + (unsigned)t * 7919u +
         (unsigned)rank * 3266489917u + (unsigned)it->seed * 668265263u) >>
        16;
    return it->world_size * ((int)(mixed % 5) - 2);
}

static size_t row_parts(const pl_table *table)
{
    return value_n_parts(table->dtype, table->row_elems);
}

static int mean_of(const problem *it, size_t t, size_t row, size_t part)
{
    int sum = 0;
    for (int r = 0; r < it->world_size; r++)
        if (has_row(it, r, t, row))
            sum += value_of(it, r, t, row, part);
    return sum / it->world_size;
}

/* ---- an exchange ---------------------------------------------------------------- */

typedef struct side {
    const problem *problem;
    int rank;
    pl_exchange_part parts[MAX_TABLES];
    pl_exchange exchange;
    int64_t *found;
} side;

static void *memory(size_t n_bytes)
{
    void *out = malloc(n_bytes + 1);
    if (out == NULL)
        exit(2);
    return out;
}

static void side_fill(const problem *it, int rank, pl_comm *comm, side *out)
{
    *out = (side){.problem = it,
                  .rank = rank,
                  .exchange = {.comm = comm,
                               .offset_bytes = STAGING_AT,
                               .staging_bytes = it->staging_bytes,
                               .parts = out->parts,
                               .n_parts = it->n_tables,
                               .wait = wait_through,
                               .context = comm}};
    for (size_t t = 0; t < it->n_tables; t++) {
        const pl_table *table = &it->tables[t];
        pl_sparse_rows *rows = &out->parts[t].local;
        out->parts[t].table = *table;
        rows->indices = memory(table->n_rows * sizeof(int64_t));
        rows->values = memory(table->n_rows * row_parts(table) * sizeof(double));
        for (size_t row = 0; row < table->n_rows; row++) {
            if (!has_row(it, rank, t, row))
                continue;
            for (size_t p = 0; p < row_parts(table); p++)
                value_put(rows->values, value_part(table->dtype),
                          rows->n_rows * row_parts(table) + p,
                          value_of(it, rank, t, row, p));
            rows->indices[rows->n_rows++] = (int64_t)row;
        }
        if (is_whole(it, rank, t)) {
            free(rows->indices);
            rows->indices = NULL;
        }
    }
}

static void side_drop(side *self)
{
    for (size_t t = 0; t < self->problem->n_tables; t++) {
        const pl_exchange_part *part = &self->parts[t];
        if (part->all.values != part->local.values)
            free(part->all.values);
        free(part->local.indices);
        free(part->local.values);
    }
    pli_free(self->found);
}

static int any_is_whole(const problem *it, size_t t)
{
    for (int r = 0; r < it->world_size; r++)
        if (is_whole(it, r, t))
            return 1;
    return 0;
}

static void check_union(const problem *it, size_t t, pl_sparse_rows found)
{
    size_t n = 0;
    CHECK((found.indices == NULL) == any_is_whole(it, t));
    for (size_t row = 0; row < it->tables[t].n_rows; row++) {
        int is_there = any_is_whole(it, t);
        for (int r = 0; r < it->world_size; r++)
            is_there = is_there || has_row(it, r, t, row);
        if (!is_there)
            continue;
        CHECK(n < found.n_rows);
        CHECK(found.indices == NULL || found.indices[n] == (int64_t)row);
        n++;
    }
    CHECK(n == found.n_rows);
}

static void check_means(const side *self, size_t t)
{
    const pl_sparse_rows found = self->parts[t].all;
    const problem *it = self->problem;
    const pl_table *table = &it->tables[t];
    size_t n_wrong = 0;
    for (size_t k = 0; k < found.n_rows; k++) {
        const size_t row = found.indices != NULL ? (size_t)found.indices[k] : k;
        for (size_t p = 0; p < row_parts(table); p++)
            n_wrong += !value_is(found.values, value_part(table->dtype),
                                 k * row_parts(table) + p, mean_of(it, t, row, p));
    }
    if (!CHECK(n_wrong == 0))
        CHECK_MORE("seed %d, rank %d of %d, table %zu: %zu parts wrong", (int)it->seed,
                   self->rank, it->world_size, t, n_wrong);
}

/* A rank that has every row may take the means in place. */
static void give_room(side *self)
{
    for (size_t t = 0; t < self->problem->n_tables; t++) {
        pl_exchange_part *part = &self->parts[t];
        const size_t n_bytes =
            part->all.n_rows * row_parts(&part->table) * sizeof(double);
        check_union(self->problem, t, part->all);
        part->all.values =
            part->local.indices == NULL ? part->local.values : memory(n_bytes);
    }
}

static void average(rank_job *job)
{
    const problem *it = job->context;
    side self;
    side_fill(it, job->rank, job->comm, &self);
    if (it->rest_ns > 0)
        draw_rest(&job->random, it->rest_ns);
    if (CHECK_OK(pl_exchange_find(&self.exchange, &self.found))) {
        give_room(&self);
        if (it->rest_ns > 0)
            draw_rest(&job->random, it->rest_ns);
        if (CHECK_OK(pl_exchange_mean(&self.exchange)))
            for (size_t t = 0; t < it->n_tables; t++)
                check_means(&self, t);
    }
    side_drop(&self);
}

static void run_problem(problem *it, void (*run)(rank_job *job))
{
    ranks_run_world(it->world_size, STAGING_AT + it->staging_bytes + 64, run, it,
                    it->seed);
}

/* ---- tests ---------------------------------------------------------------------- */

TEST(means_of_rows_are_exact_in_worlds_of_1_to_5)
{
    for (uint64_t seed = 1; seed <= 40; seed++) {
        problem it = problem_of(seed, 1 + (int)(seed % 5));
        it.rest_ns = seed % 3 == 0 ? 100000 : 0;
        run_problem(&it, average);
    }
}

TEST(a_table_that_one_rank_has_whole_is_whole_on_all)
{
    for (uint64_t seed = 50; seed < 80; seed++) {
        problem it = problem_of(seed, 1 + (int)(seed % 4));
        it.percent_whole = seed % 2 == 0 ? 20 : 100;
        run_problem(&it, average);
    }
}

TEST(a_row_may_be_longer_than_a_segment_and_a_table_than_the_staging)
{
    problem it = problem_of(3, 3);
    it.n_tables = 2;
    it.staging_bytes = LEAST_STAGING; /* segments of 256 bytes */
    it.tables[0] = (pl_table){.n_rows = 300, .row_elems = 85, .dtype = PL_F64};
    it.tables[1] = (pl_table){.n_rows = 300, .row_elems = 1, .dtype = PL_BF16};
    for (it.seed = 90; it.seed < 100; it.seed++)
        run_problem(&it, average);
}

TEST(tables_without_rows_or_columns_have_no_means)
{
    problem it = problem_of(4, 2);
    it.n_tables = 3;
    it.tables[0] = (pl_table){.n_rows = 0, .row_elems = 5, .dtype = PL_F32};
    it.tables[1] = (pl_table){.n_rows = 40, .row_elems = 0, .dtype = PL_F32};
    it.tables[2] = (pl_table){.n_rows = 40, .row_elems = 5, .dtype = PL_F32};
    for (it.seed = 110; it.seed < 120; it.seed++)
        run_problem(&it, average);
}

static void fail_between(rank_job *job)
{
    const problem *it = job->context;
    side self;
    side_fill(it, job->rank, job->comm, &self);
    pl_status st = pl_exchange_find(&self.exchange, &self.found);
    if (job->rank == it->culprit) {
        CHECK_OK(st);
        pl_comm_abort(job->comm, "no memory for the means;");
    } else {
        if (st == PL_OK) {
            give_room(&self);
            st = pl_exchange_mean(&self.exchange);
        }
        CHECK_FAILS(st, PL_EPEER, "no memory for the means;");
        CHECK(blames(pl_error_message(), job->rank, it->culprit));
        pl_comm_abort(job->comm, NULL);
    }
    side_drop(&self);
}

TEST(who_fails_between_two_rounds_fails_the_exchange_on_every_rank)
{
    for (uint64_t seed = 130; seed < 150; seed++) {
        problem it = problem_of(seed, 2 + (int)(seed % 3));
        it.tables[0] = (pl_table){.n_rows = 100, .row_elems = 40, .dtype = PL_F32};
        it.percent_whole = 60;
        it.culprit = (int)(seed % (uint64_t)it.world_size);
        run_problem(&it, fail_between);
    }
}

/* Row numbers of one rank, which a table of five rows lacks, or out of order. */
typedef struct wrong_rows {
    size_t n;
    int64_t indices[6];
    const char *words;
} wrong_rows;

static void refuse_rows(rank_job *job)
{
    const wrong_rows *wrong = job->context;
    int64_t right[] = {0, 4};
    int64_t indices[6];
    float values[12] = {0};
    int64_t *found = NULL;
    pl_exchange_part part = {
        .table = {.n_rows = 5, .row_elems = 2, .dtype = PL_F32},
        .local = {.indices = right, .values = values, .n_rows = 2}};
    const pl_exchange exchange = {.comm = job->comm,
                                  .staging_bytes = LEAST_STAGING,
                                  .parts = &part,
                                  .n_parts = 1,
                                  .wait = wait_through,
                                  .context = job->comm};
    if (job->rank == 1) {
        memcpy(indices, wrong->indices, sizeof indices);
        part.local.indices = indices;
        part.local.n_rows = wrong->n;
    }
    CHECK_FAILS(pl_exchange_find(&exchange, &found), PL_EMISMATCH, wrong->words);
    CHECK(found == NULL);
}

TEST(rows_that_no_table_has_are_refused_on_every_rank)
{
    wrong_rows cases[] = {
        {2, {2, 2}, "rank 1 has row 2 of table 0 after row 2"},
        {3, {0, 3, 1}, "rank 1 has row 1 of table 0 after row 3"},
        {2, {2, 5}, "rank 1 has row 5 of table 0, which has 5 rows"},
        {1, {-1}, "rank 1 has row -1 of table 0,"},
        {6, {0, 1, 2, 3, 4, 4}, "rank 1 has more rows than table 0"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
        ranks_run_world(3, LEAST_STAGING, refuse_rows, &cases[k], k);
}

TEST(exchanges_survive_the_failure_of_any_allocation)
{
    const problem it = problem_of(170, 1);
    pl_comm *comm = NULL;
    int n_failed = 0;
    side self;
    if (!CHECK_OK(local_create(1, 65536, RANKS_DEADLINE_NS, &comm)))
        return;
    side_fill(&it, 0, comm, &self);
    for (long n = 1; n < 100; n++) {
        pli_fault_arm(PLI_FAULT_ALLOC, n);
        const pl_status st = pl_exchange_find(&self.exchange, &self.found);
        const int is_hit = pli_fault_count(PLI_FAULT_ALLOC) >= n;
        pli_fault_arm(PLI_FAULT_ALLOC, 0);
        CHECK(st == (is_hit ? PL_ENOMEM : PL_OK));
        n_failed += is_hit;
        if (!is_hit)
            break;
    }
    CHECK(n_failed == 6);
    pl_comm_destroy(comm);
    side_drop(&self);
}
