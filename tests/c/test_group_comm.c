/* test_group_comm.c - worlds over a user's process group.
 *
 * The group of these tests is a ferry: it copies each range to a world of threads,
 * which does the operation, and copies the result back.
 */
#include "comm/group_comm.h"
#include "comm/shm_init.h"
#include "comm/window.h"
#include "core/alloc.h"
#include "reducer/reducer_state.h"
#include "small_steps.h"

enum { MAX_OPS = 4096, ARENA_BYTES = 1 << 16, N_ELEMS = 1000 };

typedef struct ferry {
    pl_comm *world;      /* does the work */
    pl_comm *group_comm; /* holds the ranges */
    pl_op *ops;          /* MAX_OPS of them */
    pl_ticket n_issued;
    pl_ticket n_done;
    pl_ticket fail_issue; /* the ticket whose issue fails; 0: none */
    pl_ticket fail_wait;
    int n_delays; /* waits that return PL_EAGAIN first */
    int n_drops;
} ferry;

static size_t op_bytes(const pl_op *op)
{
    return op->n_elems * pl_dtype_bytes(op->dtype);
}

static pl_status ferry_issue(void *context, const pl_op *op, pl_ticket ticket)
{
    pl_status st = PL_OK;
    ferry *self = context;
    pl_ticket inner = 0;
    CHECK(ticket == self->n_issued + 1);
    if (ticket == self->fail_issue)
        PL_FAIL(PL_ESYS, "the bridge is up");
    self->ops[self->n_issued % MAX_OPS] = *op;
    if (op_bytes(op) > 0)
        memcpy(self->world->arena + op->offset_bytes,
               self->group_comm->arena + op->offset_bytes, op_bytes(op));
    PL_TRY(pl_comm_issue(self->world, op, &inner));
    CHECK(inner == ticket);
    self->n_issued = ticket;
done:
    return st;
}

static pl_status ferry_wait(void *context, pl_ticket ticket)
{
    pl_status st = PL_OK;
    ferry *self = context;
    CHECK(ticket > self->n_done && ticket <= self->n_issued);
    if (self->n_delays > 0) {
        self->n_delays--;
        PL_FAIL(PL_EAGAIN, "the tide is out");
    }
    if (self->fail_wait > 0 && ticket >= self->fail_wait)
        PL_FAIL(PL_ESYS, "the ferry has sunk");
    PL_TRY(pl_comm_wait(self->world, ticket, RANKS_SLICE_NS));
    for (; self->n_done < ticket; self->n_done++) {
        const pl_op *op = &self->ops[self->n_done % MAX_OPS];
        if (op_bytes(op) > 0)
            memcpy(self->group_comm->arena + op->offset_bytes,
                   self->world->arena + op->offset_bytes, op_bytes(op));
    }
done:
    return st;
}

static void ferry_drop(void *context)
{
    ((ferry *)context)->n_drops++;
}

/* ---- group_comms between ranks that are threads --------------------------------- */

static ferry *ferries[PL_MAX_RANKS]; /* of group_comms_run() */

static int group_comm_over(pl_comm *world, size_t arena_bytes, ferry *it)
{
    pl_comm *base = NULL;
    *it = (ferry){.world = world};
    if (!CHECK_OK(pli_calloc(MAX_OPS, sizeof *it->ops, "operations", &it->ops)) ||
        !CHECK_OK(local_create(1, arena_bytes, RANKS_DEADLINE_NS, &base)))
        return 0;
    const pli_group_comm_options options = {.rank = pl_comm_rank(world),
                                            .world_size = pl_comm_world_size(world),
                                            .base = base,
                                            .callbacks = {.context = it,
                                                          .issue = ferry_issue,
                                                          .wait = ferry_wait,
                                                          .drop = ferry_drop}};
    return CHECK_OK(pli_group_comm_create(&options, &it->group_comm));
}

static void ferry_fini(ferry *it)
{
    pl_comm_destroy(it->group_comm);
    pl_comm_destroy(it->world);
    pli_free(it->ops);
}

/* Makes a world of group_comms, runs it, and destroys it. */
static void group_comms_run(int world_size, size_t arena_bytes,
                            void (*run)(rank_job *job), void *context, uint64_t seed)
{
    pl_comm *worlds[PL_MAX_RANKS] = {NULL};
    pl_comm *group_comms[PL_MAX_RANKS] = {NULL};
    static ferry all[PL_MAX_RANKS];
    if (!CHECK_OK(local_create(world_size, arena_bytes, RANKS_DEADLINE_NS, worlds)))
        return;
    for (int r = 0; r < world_size; r++) {
        if (!group_comm_over(worlds[r], arena_bytes, &all[r]))
            return;
        group_comms[r] = all[r].group_comm;
        ferries[r] = &all[r];
    }
    ranks_run(world_size, group_comms, run, context, seed);
    for (int r = 0; r < world_size; r++)
        ferry_fini(&all[r]);
}

/* A test that each of n ranks runs. */
#define GROUP_TEST(n_ranks, name)                                                      \
    TEST_BY(name, rank_job *job,                                                       \
            group_comms_run(n_ranks, ARENA_BYTES, name##_by, NULL, 1))

static pl_op mean_of(size_t n_elems)
{
    return (pl_op){.kind = PL_ALL_REDUCE,
                   .reduction = PL_MEAN,
                   .dtype = PL_F32,
                   .n_elems = n_elems};
}

static float *floats_of(pl_comm *comm)
{
    return (float *)comm->arena;
}

/* ---- operations ----------------------------------------------------------------- */

static void reduce_and_send(rank_job *job)
{
    float *mine = floats_of(job->comm);
    const pl_op ops[] = {
        mean_of(N_ELEMS),
        {.kind = PL_BROADCAST,
         .dtype = PL_F32,
         .root = job->world_size - 1,
         .offset_bytes = N_ELEMS * sizeof(float),
         .n_elems = N_ELEMS},
        mean_of(0), /* no elements */
        {.kind = PL_BARRIER},
    };
    pl_ticket ticket = 0;
    for (size_t i = 0; i < N_ELEMS; i++) {
        mine[i] = (float)(job->rank * 2);
        mine[N_ELEMS + i] = (float)job->rank;
    }
    for (size_t k = 0; k < sizeof ops / sizeof ops[0]; k++) {
        CHECK_OK(pl_comm_issue(job->comm, &ops[k], &ticket));
        CHECK(ticket == k + 1);
        CHECK_OK(pl_comm_progress(job->comm));
    }
    CHECK_OK(wait_through(job->comm, 1));
    CHECK(mine[0] == (float)(job->world_size - 1));
    CHECK(mine[N_ELEMS - 1] == (float)(job->world_size - 1));
    CHECK_OK(wait_through(job->comm, ticket));
    CHECK(mine[2 * N_ELEMS - 1] == (float)(job->world_size - 1));
    CHECK_OK(wait_through(job->comm, 2)); /* done long ago */
    CHECK(ferries[job->rank]->n_done == ticket);
    for (size_t k = 0; k < sizeof ops / sizeof ops[0]; k++) {
        const pl_op *seen = &ferries[job->rank]->ops[k];
        CHECK(seen->kind == ops[k].kind && seen->n_elems == ops[k].n_elems);
    }
}

TEST(operations_are_carried_in_their_order_to_every_rank)
{
    for (int world_size = 1; world_size <= 4; world_size++)
        group_comms_run(world_size, ARENA_BYTES, reduce_and_send, NULL, 1);
}

GROUP_TEST(3, a_group_comm_has_its_own_rank_and_the_arena_of_its_base)
{
    const pl_comm *group_comm = job->comm;
    CHECK(pl_comm_rank(group_comm) == job->rank);
    CHECK(pl_comm_world_size(group_comm) == job->world_size);
    CHECK(pl_comm_arena_bytes(group_comm) == ARENA_BYTES);
    CHECK(pli_comm_is_group_comm(group_comm));
    CHECK_OK(pli_comm_check_peers(job->comm));
    pli_comm_record_activity(job->comm, PL_BACKWARD, 1);
    pli_comm_set_failure_message(job->comm, "nobody is told");
    pl_comm_leave(job->comm);
    pl_comm_leave(job->comm);
}

TEST(steps_over_groups_have_exact_means)
{
    pl_step_size size;
    for (int world_size = 1; world_size <= 3; world_size++)
        if (CHECK_OK(arrays_measure(&model, world_size, &size)))
            group_comms_run(world_size, size.arena_bytes, take_three_steps, NULL, 1);
}

GROUP_TEST(2, group_callbacks_may_ask_for_more_time)
{
    const pl_op op = mean_of(N_ELEMS);
    pl_ticket ticket = 0;
    ferries[job->rank]->n_delays = 3;
    CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
    CHECK(pl_comm_wait(job->comm, ticket, 0) == PL_EAGAIN);
    CHECK(ferries[job->rank]->n_drops == 0);
    CHECK_OK(wait_through(job->comm, ticket));
}

/* ---- failures ------------------------------------------------------------------- */

/* Every call fails, with the reason. */
static void check_failed(rank_job *job, const char *words)
{
    const pl_op op = mean_of(1);
    pl_ticket ticket = 77;
    CHECK(pl_comm_issue(job->comm, &op, &ticket) == PL_EPEER);
    CHECK(ticket == 77); /* written on success only */
    CHECK_SAYS(words, "wrap the model anew on every rank");
    CHECK(blames(pl_error_message(), job->world_size, job->rank));
    CHECK_FAILS(pl_comm_wait(job->comm, 0, 0), PL_EPEER, words);
    CHECK_FAILS(pl_comm_progress(job->comm), PL_EPEER, words);
    CHECK_FAILS(pli_comm_check_peers(job->comm), PL_EPEER, words);
    CHECK_FAILS(pli_comm_query(job->comm, PLI_QUERY_STEP), PL_EPEER, words);
    CHECK(ferries[job->rank]->n_drops == 1);
}

GROUP_TEST(2, an_operation_that_cannot_begin_is_the_end_of_the_group_comm)
{
    const pl_op op = mean_of(N_ELEMS);
    pl_ticket ticket = 0;
    ferries[job->rank]->fail_issue = 2;
    CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
    CHECK_OK(wait_through(job->comm, ticket));
    CHECK_FAILS(pl_comm_issue(job->comm, &op, &ticket), PL_ESYS, "the bridge is up");
    CHECK(ticket == 1);
    check_failed(job, "the bridge is up");
    pl_comm_abort(job->comm, "something that came of it"); /* the first message stays */
    check_failed(job, "the bridge is up");
}

GROUP_TEST(2, an_operation_that_cannot_be_waited_for_is_the_end_of_the_group_comm)
{
    const pl_op op = mean_of(10);
    pl_ticket ticket = 0;
    ferries[job->rank]->fail_wait = 2;
    for (int k = 0; k < 3; k++)
        CHECK_OK(pl_comm_issue(job->comm, &op, &ticket));
    CHECK_OK(wait_through(job->comm, 1));
    CHECK_FAILS(wait_through(job->comm, ticket), PL_ESYS, "the ferry has sunk");
    check_failed(job, "the ferry has sunk");
}

GROUP_TEST(2, what_is_aborted_stays_so_in_its_own_words)
{
    if (job->rank == 1) {
        pl_comm_abort(job->comm, NULL);
        check_failed(job, "an exception in its backward");
    } else {
        pl_comm_abort(job->comm, "the dog ate it");
        check_failed(job, "the dog ate it");
    }
    CHECK(ferries[job->rank]->n_issued == 0);
}

/* A rank fails before the step's first operation, after some, or after the last. */
typedef enum failing_place { BEFORE_ALL, AFTER_A_BUCKET, AFTER_ALL } failing_place;

static void fail_a_step(rank_job *job)
{
    const failing_place place = *(const failing_place *)job->context;
    const pl_param two[] = {{.n_elems = N_ELEMS, .dtype = PL_F32},
                            {.n_elems = N_ELEMS, .dtype = PL_F32}};
    const pl_reducer_spec spec = {.params = two,
                                  .n_params = 2,
                                  .extra_bytes = 8,
                                  .caps = {.bucket_bytes = N_ELEMS * sizeof(float),
                                           .last_bytes = N_ELEMS * sizeof(float)}};
    static const float ones[N_ELEMS] = {1};
    pl_backend *backend = NULL;
    pl_reducer *reducer = NULL;
    pl_ready_result result;
    const pl_op barrier = {.kind = PL_BARRIER};
    pl_ticket ticket = 0;
    if (!CHECK_OK(pli_cpu_backend_create(&backend)) ||
        !CHECK_OK(pl_reducer_create(&spec, job->comm, backend, &reducer)))
        return;
    for (int step = 0; step < 3; step++) {
        const int fails = step == 2 && job->rank == 1;
        CHECK_OK(pl_reducer_begin(reducer));
        for (size_t i = 2; i-- > 0 && !(fails && place == BEFORE_ALL);)
            if (!fails || place == AFTER_ALL || i == 1)
                CHECK_OK(
                    pl_reducer_mark_ready(reducer, i, ones, PL_REPLACE, NULL, &result));
        if (!fails || place == AFTER_ALL)
            CHECK_OK(pl_reducer_close(reducer));
        if (fails)
            pl_reducer_fail(reducer, "a moth");
        else if (step < 2)
            CHECK(pl_reducer_wait(reducer, RANKS_DEADLINE_NS) == PL_OK &&
                  pl_reducer_end(reducer) == PL_OK);
    }
    if (job->rank == 1) {
        CHECK((pl_comm_progress(job->comm) == PL_OK) == (place != AFTER_ALL));
    } else if (place != AFTER_ALL) {
        CHECK_FAILS(pl_reducer_wait(reducer, RANKS_DEADLINE_NS), PL_EPEER,
                    "the step of rank 1 failed");
        pl_reducer_fail(reducer, NULL);
    }
    if (place != AFTER_ALL) { /* the group is in step, and another reducer can follow */
        CHECK(ferries[job->rank]->n_drops == 0);
        CHECK(pl_reducer_has_failed(reducer) && reducer->n_taken == 2);
        CHECK(pl_reducer_begin(reducer) == PL_EPEER);
        CHECK_OK(pl_comm_issue(job->comm, &barrier, &ticket));
        CHECK_OK(wait_through(job->comm, ticket));
    }
    pl_reducer_destroy(reducer);
    pli_backend_destroy(backend);
}

TEST(a_rank_that_fails_ends_the_step_for_all)
{
    for (failing_place place = BEFORE_ALL; place <= AFTER_ALL; place++)
        group_comms_run(2, ARENA_BYTES * 2, fail_a_step, &place, 1);
}

GROUP_TEST(2, a_bad_call_is_refused_and_the_group_comm_stays_usable)
{
    const pl_op too_long = mean_of(ARENA_BYTES);
    pl_ticket ticket = 0;
    CHECK(pl_comm_issue(job->comm, &too_long, &ticket) == PL_EINVAL);
    CHECK_FAILS(pl_comm_wait(job->comm, 1, 0), PL_EINVAL,
                "ticket 1, but only 0 operations");
    CHECK(ferries[job->rank]->n_drops == 0);
    reduce_and_send(job); /* nothing has failed */
}

/* ---- life ----------------------------------------------------------------------- */

TEST(what_makes_no_group_comm_leaves_the_base_to_its_owner)
{
    static const int bad[][2] = {{0, 0}, {1, 1}, {-1, 2}, {0, PLI_MAX_GROUP_RANKS + 1}};
    pl_comm *pair[2] = {NULL};
    pl_comm *base = NULL;
    pl_comm *group_comm = NULL;
    ferry it = {.world = NULL};
    if (!CHECK_OK(local_create(1, 64, RANKS_DEADLINE_NS, &base)) ||
        !CHECK_OK(local_create(2, 64, RANKS_DEADLINE_NS, pair)))
        return;
    pli_group_comm_options options = {.world_size = 2,
                                      .base = pair[0],
                                      .callbacks = {.context = &it,
                                                    .issue = ferry_issue,
                                                    .wait = ferry_wait,
                                                    .drop = ferry_drop}};
    CHECK_FAILS(pli_group_comm_create(&options, &group_comm), PL_EINVAL,
                "base has 2 ranks");
    options.base = base;
    for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++) {
        options.rank = bad[k][0];
        options.world_size = bad[k][1];
        CHECK_FAILS(pli_group_comm_create(&options, &group_comm), PL_EINVAL,
                    "a world has 1 to 4096 ranks");
    }
    options.rank = 0;
    options.world_size = 2;
    pli_fault_arm(PLI_FAULT_ALLOC, 1);
    CHECK(pli_group_comm_create(&options, &group_comm) == PL_ENOMEM);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
    CHECK(group_comm == NULL);
    CHECK_OK(pli_group_comm_create(&options, &group_comm));
    pl_comm_destroy(group_comm); /* and the base with it */
    pl_comm_destroy(pair[0]);
    pl_comm_destroy(pair[1]);
}

TEST(a_window_shows_the_arena_of_the_base)
{
    static const int nobody[1] = {0};
    char address[PLI_ADDRESS_BYTES];
    pli_listener *listener = NULL;
    const pli_shm_options of_base = {.world_size = 1,
                                     .arena_bytes = 1 << 17,
                                     .n_ops = 1,
                                     .deadline_ns = RANKS_DEADLINE_NS,
                                     .pids = nobody};
    ferry it = {.world = NULL};
    pli_group_comm_options options = {.rank = 1,
                                      .world_size = 2,
                                      .callbacks = {.context = &it,
                                                    .issue = ferry_issue,
                                                    .wait = ferry_wait,
                                                    .drop = ferry_drop}};
    pl_comm *group_comm = NULL;
    pli_window *window = NULL;
    if (!CHECK_OK(pli_listener_create(address, &listener)) ||
        !CHECK_OK(pli_shm_create(&of_base, listener, NULL, &options.base)) ||
        !CHECK_OK(pli_group_comm_create(&options, &group_comm)) ||
        !CHECK_OK(pli_window_create(group_comm, 1 << 16, 4096, 1, &window)))
        return;
    floats_of(group_comm)[(1 << 16) / sizeof(float)] = 5;
    CHECK(*(float *)(void *)window->base == 5);
    pli_window_see(window, 0);
    CHECK_OK(pli_window_retire(window));
    floats_of(group_comm)[(1 << 16) / sizeof(float)] = 6;
    CHECK(*(float *)(void *)window->base == 5); /* the view keeps its value */
    pli_window_unsee(window, 0);
    pli_window_release(window);
    pli_listener_destroy(listener);
    pl_comm_destroy(group_comm);
}
