/* test_hierarchy_failure.c - what other hosts learn of a failure, and when: the rank
 * that fails continues only when they have. */
#include <stdatomic.h>

#include "hosts.h"
#include "ops.h"

enum { N_ELEMS = 50, MOST_MS = 20000 };

/* How a rank fails. */
typedef enum failing {
    WITH_WORDS,    /* sends its message at once */
    WORDS_FOLLOW,  /* ... or a moment later */
    WITHOUT_WORDS, /* ... or reports that none follows */
    GOES_ON,       /* ... or only calls again */
    N_FAILINGS
} failing;

typedef struct scene {
    failing how;
    int culprit; /* the last host's first rank */
    int ends_step;
    int has_more;      /* others have issued an operation that the culprit never does */
    atomic_int n_know; /* ranks of other hosts */
    atomic_int has_begun;
    atomic_int has_failed;
} scene;

static int comes_to(atomic_int *value, int least)
{
    for (int ms = 0; atomic_load(value) < least && ms < MOST_MS; ms++)
        pli_sleep_ns(PLI_MS);
    return atomic_load(value) >= least;
}

/* An operation, which may be the only one of its step. */
static pl_status issue(rank_job *job, int ends_step, pl_ticket *out)
{
    const pl_op op = {.kind = PL_ALL_REDUCE,
                      .dtype = PL_F32,
                      .reduction = PL_SUM,
                      .offset_bytes = OPS_GUARD_BYTES,
                      .n_elems = N_ELEMS,
                      .ends_step = ends_step};
    return pl_comm_issue(job->comm, &op, out);
}

static pl_status do_step(rank_job *job)
{
    pl_ticket ticket = 0;
    const pl_status st = issue(job, 1, &ticket);
    return st == PL_OK ? wait_through(job->comm, ticket) : st;
}

/* ---- messages ------------------------------------------------------------------- */

static void fail_as(rank_job *job, failing how)
{
    pl_comm_abort(job->comm, how == WITH_WORDS ? "the dog ate it" : NULL);
    if (how == GOES_ON) {
        CHECK(pl_comm_progress(job->comm) == PL_EPEER);
    } else if (how != WITH_WORDS) {
        pli_sleep_ns(5 * PLI_MS);
        pli_comm_set_failure_message(job->comm,
                                     how == WORDS_FOLLOW ? "the dog ate it" : NULL);
    }
}

static void tell_others(rank_job *job)
{
    scene *it = job->context;
    CHECK_OK(do_step(job));
    if (job->rank == it->culprit) {
        fail_as(job, it->how);
        CHECK(comes_to(&it->n_know, it->culprit));
    } else {
        CHECK(do_step(job) == PL_EPEER);
        if (job->rank < it->culprit) {
            const int has_words = it->how >= WITHOUT_WORDS
                                      ? error_has("an exception in its backward")
                                      : error_has("the dog ate it");
            if (!CHECK(has_words && error_has("host")))
                CHECK_MORE("rank %d: %s", job->rank, pl_error_message());
            atomic_fetch_add(&it->n_know, 1);
        }
    }
}

TEST(other_hosts_know_why_before_the_rank_goes_on)
{
    static const hosts worlds[] = {{.n_hosts = 2, .n_ranks = {1, 1}},
                                   {.n_hosts = 2, .n_ranks = {2, 2}},
                                   {.n_hosts = 3, .n_ranks = {2, 1, 1}}};
    for (size_t k = 0; k < sizeof worlds / sizeof worlds[0]; k++) {
        for (int how = 0; how < N_FAILINGS; how++) {
            hosts world = worlds[k];
            scene it = {.how = (failing)how,
                        .culprit = hosts_world_size(&world) -
                                   world.n_ranks[world.n_hosts - 1]};
            world.deadline_ns = RANKS_DEADLINE_NS;
            hosts_run(&world, 1 << 16, tell_others, &it, 1);
        }
    }
}

/* A rank leaves early: ranks of other hosts, and of hosts that know, know it is gone.
 */
static void leave_host(rank_job *job)
{
    scene *it = job->context;
    CHECK_OK(do_step(job));
    if (job->rank == it->culprit) {
        pl_comm_leave(job->comm);
        return;
    }
    const char *name = it->culprit == 2 ? "rank 2 (process" : "rank 0 (host 0)";
    const char *what = it->culprit == 2 ? "has left" : "died or left";
    CHECK(do_step(job) == PL_EPEER && error_has(name));
    CHECK(it->culprit == 2 || job->rank == 1 || comes_to(&it->n_know, 1));
    CHECK(pli_comm_query(job->comm, PLI_QUERY_GONE) == PL_EPEER);
    CHECK_SAYS(name, what);
    atomic_fetch_add(&it->n_know, 1);
    CHECK(comes_to(&it->n_know, 2)); /* the host is still there */
}

TEST(a_rank_that_is_gone_is_known_to_be_on_other_hosts)
{
    const hosts world = {
        .n_hosts = 2, .n_ranks = {1, 2}, .deadline_ns = RANKS_DEADLINE_NS};
    for (int culprit = 0; culprit <= 2; culprit += 2) {
        scene it = {.culprit = culprit};
        hosts_run(&world, 1 << 16, leave_host, &it, 1);
    }
}

/* ---- a thread that only queries ------------------------------------------------- */

/* Host 0 fails after its part, host 1 only queries, and host 2 lacks host 1's part: it
 * must not wait until host 1 does more than query. */
static void only_ask(rank_job *job)
{
    scene *it = job->context;
    CHECK_OK(do_step(job));
    if (job->rank == 0) {
        pl_ticket ticket = 0;
        CHECK_OK(issue(job, 0, &ticket));
        CHECK(pl_comm_wait(job->comm, ticket, PLI_MS) == PL_EAGAIN);
        pl_comm_abort(job->comm, "the dog ate it");
    } else if (job->rank == 1) {
        while (pli_comm_query(job->comm, PLI_QUERY_STEP) == PL_OK)
            pli_sleep_ns(PLI_MS);
        CHECK_SAYS("the dog ate it");
    } else {
        CHECK(do_step(job) == PL_EPEER);
        atomic_fetch_add(&it->n_know, 1);
    }
    CHECK(comes_to(&it->n_know, 1));
    check_stays_failed(job->comm, PL_EPEER, "the dog ate it");
}

TEST(who_only_asks_has_others_know)
{
    const hosts world = {
        .n_hosts = 3, .n_ranks = {1, 1, 1}, .deadline_ns = RANKS_DEADLINE_NS};
    scene it = {.culprit = 0};
    hosts_run(&world, 1 << 16, only_ask, &it, 1);
}

/* Rank 0 has seen the end of an operation and fails in the next.  Rank 1 learns of that
 * before it has read that the operation ended. */
static void ask_before_the_end_is_seen(rank_job *job)
{
    scene *it = job->context;
    pl_ticket ticket = 0;
    if (job->rank == 0) {
        CHECK(comes_to(&it->has_begun, 1));
        CHECK_OK(issue(job, it->ends_step, &ticket));
        CHECK_OK(wait_through(job->comm, ticket));
        pl_comm_abort(job->comm, "the dog ate it");
        atomic_store(&it->has_failed, 1);
    } else {
        pl_ticket more = 0;
        CHECK_OK(issue(job, it->ends_step, &ticket));
        if (it->has_more) /* that will not come: the query shows it */
            CHECK_OK(issue(job, 1, &more));
        atomic_store(&it->has_begun, 1);
        CHECK(comes_to(&it->has_failed, 1));
        CHECK(pli_comm_query(job->comm, PLI_QUERY_STEP) == PL_EPEER);
        CHECK_OK(wait_through(job->comm, ticket));
        CHECK(more == 0 || wait_through(job->comm, more) == PL_EPEER);
        CHECK(do_step(job) == PL_EPEER && error_has("the dog ate it"));
    }
    check_stays_failed(job->comm, PL_EPEER, "the dog ate it");
}

TEST(what_others_have_seen_the_end_of_is_not_given_up)
{
    const hosts world = {
        .n_hosts = 2, .n_ranks = {1, 1}, .deadline_ns = RANKS_DEADLINE_NS};
    scene scenes[] = {{.ends_step = 1}, {.ends_step = 0}, {.has_more = 1}};
    for (size_t k = 0; k < sizeof scenes / sizeof scenes[0]; k++)
        hosts_run(&world, 1 << 16, ask_before_the_end_is_seen, &scenes[k], 1);
}
