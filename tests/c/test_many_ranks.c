/* test_many_ranks.c - hundreds of ranks on a host, as threads and as processes, and
 * thousands on several hosts: sums, equal bits on all ranks, and the name of the rank
 * that failed.
 */
#include <sched.h>

#include "comm/hierarchy_state.h"
#include "hosts.h"
#include "processes.h"

enum {
    N_THREADS = IS_SANITIZED ? 40 : 300, /* more than fit in a byte */
    N_PROCESSES = IS_SANITIZED ? 12 : 256,
    N_ELEMS = 2 * N_THREADS,
    N_BIT_ELEMS = 4099
};

/* A test that each of many ranks runs. */
#define MANY_TEST(arena_bytes, name)                                                   \
    TEST_BY(name, rank_job *job,                                                       \
            ranks_run_world(N_THREADS, arena_bytes, name##_by, NULL, 1))

/* ---- one host, threads ---------------------------------------------------------- */

MANY_TEST(ops_arena_bytes(N_ELEMS), operations_of_hundreds_of_ranks_are_exact)
{
    static const pl_dtype dtypes[] = {PL_F64, PL_I32};
    for (unsigned seed = 0; seed < 2 * PL_N_OP_KINDS; seed++) {
        const pl_op op = {.kind = (pl_op_kind)(seed / 2),
                          .dtype = dtypes[seed % 2],
                          .root = job->world_size - 1,
                          .offset_bytes = 2 * OPS_GUARD_BYTES,
                          .n_elems = N_ELEMS};
        if (!CHECK_OK(ops_run(job->comm, &op, seed)))
            return;
    }
}

/* Values whose sum depends on the order; the context receives the results. */
static void average(rank_job *job)
{
    char *results = job->context;
    float *range = (void *)job->comm->arena;
    const pl_op op = {.dtype = PL_F32, .reduction = PL_MEAN, .n_elems = N_BIT_ELEMS};
    for (size_t i = 0; i < N_BIT_ELEMS; i++)
        range[i] = 1.0F / (float)(1 + (size_t)job->rank * 7919 % (i + 13));
    if (CHECK_OK(do_op(job->comm, &op)))
        memcpy(results + (size_t)job->rank * sizeof(float[N_BIT_ELEMS]), range,
               sizeof(float[N_BIT_ELEMS]));
}

static void check_bits(const char *results, int n_ranks)
{
    const size_t n_bytes = sizeof(float[N_BIT_ELEMS]);
    for (int r = 1; r < n_ranks; r++)
        if (!CHECK(memcmp(results, results + (size_t)r * n_bytes, n_bytes) == 0))
            CHECK_MORE("ranks 0 and %d of %d have other means", r, n_ranks);
}

TEST(means_have_the_same_bits_on_hundreds_of_ranks)
{
    char *results = calloc(N_THREADS, sizeof(float[N_BIT_ELEMS]));
    ranks_run_world(N_THREADS, sizeof(float[N_BIT_ELEMS]), average, results, 1);
    check_bits(results, N_THREADS);
    free(results);
}

static int reduce_well(rank_job *job, unsigned seed)
{
    const pl_op op = {
        .dtype = PL_F32, .offset_bytes = 2 * OPS_GUARD_BYTES, .n_elems = N_ELEMS};
    return ops_run(job->comm, &op, seed) == PL_OK;
}

/* The last rank fails.  The context: the number of ranks of each host; NULL: one
 * host. */
static void let_the_last_fail(rank_job *job)
{
    const int culprit = job->world_size - 1;
    const int n_here = job->context != NULL ? *(const int *)job->context : 0;
    const int is_near = n_here == 0 || job->rank / n_here == culprit / n_here;
    char name[64];
    (void)snprintf(name, sizeof name,
                   is_near ? "the step of rank %d failed" : "rank %d", culprit);
    CHECK(reduce_well(job, 1));
    if (job->rank == culprit) {
        pl_comm_abort(job->comm, "the dog ate it");
    } else if (CHECK(!reduce_well(job, 2))) {
        CHECK_SAYS(name, "the dog ate it");
        CHECK(is_near || error_has(" (host "));
    }
    check_stays_failed(job->comm, PL_EPEER, "the dog ate it");
}

TEST(the_last_of_hundreds_of_ranks_is_named_when_it_fails)
{
    ranks_run_world(N_THREADS, ops_arena_bytes(N_ELEMS), let_the_last_fail, NULL, 1);
}

/* The last rank issues a different operation. */
MANY_TEST(4096, one_of_hundreds_that_runs_another_operation_is_named)
{
    const int culprit = job->world_size - 1;
    const pl_op op = {.dtype = PL_F32, .n_elems = job->rank == culprit ? 3 : 4};
    pl_status st = do_op(job->comm, &op);
    CHECK(st == PL_EMISMATCH &&
          (job->rank == culprit || blames(pl_error_message(), job->rank, culprit)));
}

/* ---- one host, processes -------------------------------------------------------- */

static void reduce_until_it_fails(child *self)
{
    pl_status st = child_join(self);
    for (unsigned n = 0; st == PL_OK; n++)
        st = child_reduce(self, n);
    child_report(self, st);
    await_flag(&self->board->is_stopped);
}

TEST(a_killed_process_of_hundreds_is_named_by_all)
{
    const int culprit = N_PROCESSES - 1;
    board *all = board_create(N_PROCESSES, 1);
    processes_start(all, reduce_until_it_fails);
    processes_await_world(all);
    processes_blame(all, culprit, PL_EPEER, processes_lose(all, culprit, SIGKILL),
                    RANKS_DEADLINE_NS);
    board_destroy(all);
}

/* ---- several hosts -------------------------------------------------------------- */

static hosts even_hosts(int n_hosts, int n_ranks)
{
    hosts it = {.n_hosts = n_hosts, .deadline_ns = RANKS_DEADLINE_NS};
    for (int h = 0; h < n_hosts; h++)
        it.n_ranks[h] = n_ranks;
    return it;
}

TEST(hundreds_of_ranks_on_several_hosts_agree_to_the_bit)
{
    const hosts it = IS_SANITIZED ? even_hosts(3, 8) : even_hosts(4, 70);
    const int n_ranks = hosts_world_size(&it);
    char *results = calloc((size_t)n_ranks, sizeof(float[N_BIT_ELEMS]));
    hosts_run(&it, sizeof(float[N_BIT_ELEMS]), average, results, 1);
    check_bits(results, n_ranks);
    free(results);
}

TEST(the_last_rank_of_the_last_host_is_named_when_it_fails)
{
    const hosts it = IS_SANITIZED ? even_hosts(3, 8) : even_hosts(4, 70);
    int n_here = it.n_ranks[0];
    hosts_run(&it, ops_arena_bytes(N_ELEMS), let_the_last_fail, &n_here, 1);
}

/* A thread that drives all ranks of a host: none of their calls waits. */
typedef struct crowd {
    pl_comm **comms; /* of the host's ranks */
    int n_ranks;
    int first_rank;
    pthread_t thread;
} crowd;

static int has_ended(pl_comm *comm, pl_ticket ticket)
{
    hierarchy *self = hierarchy_of(comm);
    return self->n_down >= ticket &&
           pli_base_is_done(comm, operation_at(self, ticket)->whole);
}

/* Whether all of a host's ranks have seen the end of an operation that all issue. */
static int reduce_in_turns(const crowd *self, const pl_op *op)
{
    pl_ticket ticket = 0;
    int n_ended = 0;
    for (int r = 0; r < self->n_ranks; r++)
        if (!CHECK_OK(pl_comm_issue(self->comms[r], op, &ticket)))
            return 0;
    while (n_ended < self->n_ranks) {
        n_ended = 0;
        for (int r = 0; r < self->n_ranks; r++) {
            if (!CHECK_OK(pl_comm_progress(self->comms[r])))
                return 0;
            n_ended += has_ended(self->comms[r], ticket);
        }
        (void)sched_yield();
    }
    for (int r = 0; r < self->n_ranks; r++)
        if (!CHECK_OK(pl_comm_wait(self->comms[r], ticket, RANKS_SLICE_NS)))
            return 0;
    return 1;
}

static void *run_crowd(void *memory)
{
    const crowd *self = memory;
    const pl_op op = {.dtype = PL_I64, .n_elems = 8};
    const int64_t n = pl_comm_world_size(self->comms[0]);
    for (int64_t step = 1; step <= 2; step++) {
        for (int r = 0; r < self->n_ranks; r++)
            for (int64_t i = 0; i < 8; i++)
                ((int64_t *)self->comms[r]->arena)[i] =
                    step * (self->first_rank + r) + i;
        if (!reduce_in_turns(self, &op))
            break;
        for (int r = 0; r < self->n_ranks; r++)
            for (int64_t i = 0; i < 8; i++)
                CHECK(((const int64_t *)self->comms[r]->arena)[i] ==
                      step * (n * (n - 1) / 2) + n * i);
    }
    return NULL;
}

static void sum_over(int n_hosts, int n_ranks)
{
    const hosts it = even_hosts(n_hosts, n_ranks);
    const size_t n = (size_t)hosts_world_size(&it);
    pl_comm **comms = calloc(n, sizeof *comms);
    crowd *crowds = calloc((size_t)n_hosts, sizeof *crowds);
    if (CHECK(hosts_create(&it, 4096, comms)))
        for (int h = 0; h < n_hosts; h++) {
            crowds[h] = (crowd){.comms = comms + (ptrdiff_t)h * n_ranks,
                                .n_ranks = n_ranks,
                                .first_rank = h * n_ranks};
            if (pthread_create(&crowds[h].thread, NULL, run_crowd, &crowds[h]) != 0)
                exit(2);
        }
    for (int h = 0; h < n_hosts; h++)
        (void)pthread_join(crowds[h].thread, NULL);
    for (size_t r = 0; r < n; r++)
        pl_comm_destroy(comms[r]);
    free(crowds);
    free(comms);
}

TEST(worlds_of_4096_ranks_sum_up_all_of_them)
{
    if (IS_SANITIZED) {
        sum_over(4, 16);
        return;
    }
    sum_over(16, 256);
    sum_over(HOSTS_MOST, 4096 / HOSTS_MOST); /* more than 64 hosts */
}
