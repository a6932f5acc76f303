/* test_hierarchy_rows.c - rows of sparse gradients between hosts: a rank is interrupted
 * somewhere in the exchange that ends a step. */
#include "core/alloc.h"
#include "hosts.h"
#include "reducer/sparse_exchange.h"

enum { N_ROWS = 40, ROW_ELEMS = 700, ARENA_BYTES = 1 << 17 };

static const hosts worlds[] = {
    {.n_hosts = 2, .n_ranks = {1, 1}},
    {.n_hosts = 2, .n_ranks = {2, 1}},
    {.n_hosts = 3, .n_ranks = {1, 2, 1}},
};
enum { N_WORLDS = sizeof worlds / sizeof worlds[0] };

typedef struct interruption {
    verdicts found;
    int n_rows; /* per rank; 0: only counts of rows are sent */
} interruption;

/* How a rank waits.  A culprit does as much as it can without waiting, a drawn number
 * of times. */
typedef struct patience {
    pl_comm *comm;
    int is_culprit;
    size_t n_calls;
} patience;

static pl_status wait_a_while(void *context, pl_ticket ticket)
{
    patience *self = context;
    pl_status st = PL_EAGAIN;
    if (!self->is_culprit)
        return wait_through(self->comm, ticket);
    while (st == PL_EAGAIN && self->n_calls > 0) {
        st = pl_comm_wait(self->comm, ticket, 0);
        self->n_calls -= st == PL_EAGAIN;
    }
    return st;
}

/* One step: an exchange of rows, the same on every rank. */
static pl_status exchange_rows(rank_job *job, int n_rows, int is_culprit)
{
    static float values[N_ROWS * ROW_ELEMS];
    pl_status st = PL_OK;
    int64_t *found = NULL;
    int64_t indices[N_ROWS];
    patience self = {job->comm, is_culprit, 1 + draw_below(&job->random, 40)};
    pl_exchange_part part = {
        .table = {.n_rows = N_ROWS, .row_elems = ROW_ELEMS, .dtype = PL_F32},
        .local = {.indices = indices, .values = values, .n_rows = (size_t)n_rows}};
    const pl_exchange exchange = {.comm = job->comm,
                                  .staging_bytes = ARENA_BYTES,
                                  .parts = &part,
                                  .n_parts = 1,
                                  .wait = wait_a_while,
                                  .context = &self};
    float *room = NULL;
    for (int k = 0; k < n_rows; k++)
        indices[k] = k;
    PL_TRY(pli_calloc(sizeof values, 1, "room", &room));
    PL_TRY(pl_exchange_find(&exchange, &found));
    part.all.values = room;
    PL_TRY(pl_exchange_mean(&exchange));
done:
    pli_free(found);
    pli_free(room);
    return st;
}

static void be_interrupted(rank_job *job)
{
    const int n_rows = ((const interruption *)job->context)->n_rows;
    verdicts *all = job->context; /* its first member */
    CHECK_OK(exchange_rows(job, n_rows, 0));
    if (job->rank == all->culprit) {
        const pl_status st = exchange_rows(job, n_rows, 1);
        CHECK(st == PL_OK || st == PL_EAGAIN);
        all->has_ended[job->rank] = st == PL_OK;
        pl_comm_abort(job->comm, "the dog ate it");
    } else {
        all->has_ended[job->rank] = exchange_rows(job, n_rows, 0) == PL_OK;
        if (all->has_ended[job->rank])
            CHECK(exchange_rows(job, n_rows, 0) != PL_OK);
    }
}

TEST(rows_that_one_rank_has_taken_are_taken_by_all)
{
    const uint64_t n_seeds = IS_SANITIZED ? 40 : 200;
    unsigned n_ended = 0;
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        hosts it = worlds[seed % N_WORLDS];
        it.deadline_ns = RANKS_DEADLINE_NS;
        const int n = hosts_world_size(&it);
        interruption what = {.found.culprit = seed % 2 == 0 ? 0 : n - 1,
                             .n_rows = seed % 5 == 0 ? 0 : N_ROWS};
        hosts_run(&it, ARENA_BYTES, be_interrupted, &what, seed);
        verdicts_check(&what.found, n);
        n_ended += (unsigned)what.found.has_ended[what.found.culprit];
    }
    printf("%u culprits had taken the rows\n", n_ended);
}
