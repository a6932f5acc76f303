/* test_faults.c - every allocation and every guarded system call fails once.
 *
 * A scenario runs with its first such call failing, then with its second, until it ends
 * without reaching the failing call.  Each failure returns an error with a message,
 * leaks nothing, and makes no peer hang.
 */
#include "comm/window.h"
#include "core/alloc.h"
#include "core/plan.h"
#include "processes.h"
#include "reducer_pair.h"

enum { MAX_CALLS = 500 };

static const char *const kind_texts[PLI_N_FAULTS] = {"allocation", "system call"};

typedef pl_status (*scenario)(void);

/* Returns how many calls could fail. */
static long fail_each(enum pli_fault_kind kind, scenario run)
{
    long n_failed = 0;
    for (long n = 1; CHECK(n < MAX_CALLS); n++) {
        const int n_descriptors = n_open_descriptors();
        (void)pli_fail(PL_OK, "%s", "");
        pli_fault_arm(kind, n);
        const pl_status st = run();
        const int is_hit = pli_fault_count(kind) >= n;
        pli_fault_arm(kind, 0);
        CHECK(n_open_descriptors() == n_descriptors);
        CHECK(n_shared_mappings() == 0);
        if (!is_hit) {
            CHECK_OK(st);
            break;
        }
        n_failed += st != PL_OK;
        if (!CHECK(st == PL_OK || pl_error_message()[0] != '\0'))
            CHECK_MORE("%s %d left no words", kind_texts[kind], (int)n);
    }
    return n_failed;
}

/* ---- objects of one thread ------------------------------------------------------ */

static const pl_param params[] = {
    {100, PL_F32}, {50, PL_F32}, {30, PL_F64}, {100, PL_F32}};
enum { N_PARAMS = sizeof params / sizeof params[0] };
static const pl_reducer_spec spec = {
    .params = params, .n_params = N_PARAMS, .extra_bytes = 8};

static pl_status make_plans(void)
{
    static const uint32_t order[N_PARAMS] = {2, 0, 3, 1};
    pl_plan *plan = NULL;
    pl_status st = pl_plan_create(params, N_PARAMS, NULL, &spec.caps, &plan);
    pl_plan_destroy(plan);
    if (st != PL_OK)
        return st;
    plan = NULL;
    st = pl_plan_create(params, N_PARAMS, order, &spec.caps, &plan);
    pl_plan_destroy(plan);
    return st;
}

static pl_status make_local_world(void)
{
    pl_comm *comms[4] = {NULL};
    const pl_status st = local_create(4, 5000, RANKS_DEADLINE_NS, comms);
    for (int r = 0; r < 4; r++)
        pl_comm_destroy(comms[r]); /* NULL if it failed */
    return st;
}

static pl_status make_lone_world(pl_comm **out)
{
    static const int nobody[1] = {0};
    char address[PLI_ADDRESS_BYTES];
    pli_listener *listener = NULL;
    pli_progress *progress = NULL;
    pl_status st = pli_progress_create(&progress);
    const pli_shm_options options = {.world_size = 1,
                                     .arena_bytes = 70000,
                                     .n_ops = 1,
                                     .deadline_ns = RANKS_DEADLINE_NS,
                                     .pids = nobody,
                                     .progress = out == NULL ? progress : NULL};
    pl_comm *comm = NULL;
    if (st == PL_OK)
        st = pli_listener_create(address, &listener);
    if (st == PL_OK)
        st = pli_shm_create(&options, listener, NULL, &comm);
    if (out != NULL)
        *out = comm;
    else
        pl_comm_destroy(comm);
    pli_listener_destroy(listener);
    pli_progress_destroy(progress);
    return st;
}

static pl_status make_shm_world(void)
{
    return make_lone_world(NULL);
}

static pl_status make_and_retire_window(void)
{
    pl_comm *comm = NULL;
    pli_window *window = NULL;
    pl_status st = make_lone_world(&comm);
    if (st == PL_OK)
        st = pli_window_create(comm, 0, 70000, 3, &window);
    if (st == PL_OK) {
        memset(comm->arena, 1, 70000);
        pli_window_see(window, 2);
        st = pli_window_retire(window);
        /* Kept or not, the view can be read. */
        CHECK(window->base[0] == 1 && window->base[69999] == 1);
        pli_window_unsee(window, 2);
    }
    pli_window_release(window);
    pl_comm_destroy(comm);
    return st;
}

TEST(plans_survive_the_failure_of_any_allocation)
{
    CHECK(fail_each(PLI_FAULT_ALLOC, make_plans) == 16);
}

TEST(worlds_survive_the_failure_of_any_allocation)
{
    CHECK(fail_each(PLI_FAULT_ALLOC, make_local_world) == 9);
    CHECK(fail_each(PLI_FAULT_ALLOC, make_shm_world) >= 5);
    CHECK(fail_each(PLI_FAULT_ALLOC, make_and_retire_window) >= 7);
}

TEST(worlds_survive_the_failure_of_any_system_call)
{
    CHECK(fail_each(PLI_FAULT_SYSCALL, make_local_world) == 4);
    CHECK(fail_each(PLI_FAULT_SYSCALL, make_shm_world) >= 5);
    CHECK(fail_each(PLI_FAULT_SYSCALL, make_and_retire_window) >= 8);
}

/* ---- steps of a reducer --------------------------------------------------------- */

static pl_status make_reducers(void)
{
    pair it;
    const pl_status st = pair_create(&spec, &it);
    if (st == PL_OK)
        pair_destroy(&it);
    return st;
}

/* The first failure among a call for each rank. */
#define BOTH(call)                                                                     \
    do {                                                                               \
        for (int r = 0; r < 2; r++) {                                                  \
            pl_reducer *self = it->reducers[r];                                        \
            const pl_status st_ = (call);                                              \
            if (st_ != PL_OK)                                                          \
                return st_;                                                            \
        }                                                                              \
    } while (0)

static pl_status finish(const pair *it)
{
    BOTH(pl_reducer_close(self));
    const pl_status st = pl_comm_progress(it->comms[1]);
    if (st != PL_OK)
        return st;
    BOTH(pl_reducer_wait(self, RANKS_SLICE_NS));
    return PL_OK;
}

/* Marks every parameter once; from the second step on, the first one is also late. */
static pl_status one_step(const pair *it, int is_late)
{
    static const double zeros[100] = {0};
    pl_ready_result result = PL_COPIED;
    BOTH(pl_reducer_begin(self));
    for (size_t i = 0; i < N_PARAMS; i++)
        BOTH(pl_reducer_mark_ready(self, i, zeros, PL_REPLACE, NULL, &result));
    if (is_late)
        BOTH(pl_reducer_mark_ready(self, 0, zeros, PL_ADD, NULL, &result));
    CHECK((result == PL_LATE) == (is_late != 0));
    const pl_status st = finish(it);
    if (st != PL_OK)
        return st;
    if (is_late) {
        BOTH(pl_reducer_write_late(self, 0, zeros, PL_ADD));
        const pl_status again = finish(it);
        if (again != PL_OK)
            return again;
    }
    BOTH(pl_reducer_end(self));
    return PL_OK;
}

/* After a step that failed, both ranks go on in a new world. */
static pl_status run_steps(void)
{
    pair it;
    pl_status st = pair_create(&spec, &it);
    if (st != PL_OK)
        return st;
    st = one_step(&it, 0);
    if (st == PL_OK)
        st = one_step(&it, 1);
    if (st != PL_OK) {
        char words[256];
        (void)snprintf(words, sizeof words, "%s", pl_error_message());
        for (int r = 0; r < 2; r++)
            pl_reducer_fail(it.reducers[r], NULL);
        pair_destroy(&it);
        if (!CHECK_OK(pair_create(&spec, &it)))
            return st;
        CHECK_OK(one_step(&it, 0));
        CHECK_OK(one_step(&it, 1));
        (void)pli_fail(st, "%s", words);
    }
    pair_destroy(&it);
    return st;
}

TEST(reducers_survive_the_failure_of_any_allocation)
{
    CHECK(fail_each(PLI_FAULT_ALLOC, make_reducers) > 20);
}

TEST(after_a_step_in_which_an_allocation_failed_the_next_goes_well)
{
    CHECK(fail_each(PLI_FAULT_ALLOC, run_steps) > 40);
}

/* ---- processes ------------------------------------------------------------------ */

enum { FAULT_DEADLINE_MS = 20000, N_PROCESSES = 3 };

typedef struct order {
    enum pli_fault_kind kind;
    int rank; /* the rank whose call fails */
    int n;
} order;

static order order_in_force; /* for the children forked next */

/* The rank whose call fails exits, as a process does; the others detect it. */
static void join_and_reduce(child *self)
{
    const int is_ordered = self->rank == order_in_force.rank;
    if (is_ordered)
        pli_fault_arm(order_in_force.kind, order_in_force.n);
    pl_status st = child_join(self);
    if (is_ordered) {
        const int is_hit = pli_fault_count(order_in_force.kind) >= order_in_force.n;
        atomic_store(&self->board->note, is_hit);
        pli_fault_arm(order_in_force.kind, 0);
    }
    if (st == PL_OK)
        st = child_reduce(self, 1);
    child_report(self, st);
    if (self->comm == NULL) {
        CHECK(n_open_descriptors() == self->n_descriptors);
        CHECK(n_shared_mappings() == 0);
    }
}

/* Returns whether a call failed. */
static int fail_one(const order *what)
{
    board *all = board_create(N_PROCESSES, (uint64_t)what->n);
    all->deadline_ns = FAULT_DEADLINE_MS * PLI_MS;
    order_in_force = *what;
    const int64_t begin = pli_now_ns();
    processes_start(all, join_and_reduce);
    processes_end(all, -1);
    const int is_hit = atomic_load(&all->note);
    for (int r = 0; r < N_PROCESSES; r++) {
        const report *it = &all->reports[r];
        const int is_well =
            it->status == all->reports[what->rank].status || it->status == PL_EPEER;
        if (!CHECK(is_hit ? is_well : it->status == PL_OK) ||
            !CHECK(it->status == PL_OK || it->words[0] != '\0'))
            CHECK_MORE("%s %d of rank %d; rank %d: %s: %s", kind_texts[what->kind],
                       what->n, what->rank, r, pl_status_text(it->status), it->words);
    }
    CHECK(pli_now_ns() - begin < FAULT_DEADLINE_MS * PLI_MS / 2); /* no rank hung */
    board_destroy(all);
    return is_hit;
}

TEST(no_rank_hangs_when_a_call_of_another_fails_in_construction)
{
    for (int kind = 0; kind < PLI_N_FAULTS; kind++) {
        for (int rank = 0; rank < N_PROCESSES; rank += 2) {
            order what = {.kind = (enum pli_fault_kind)kind, .rank = rank, .n = 1};
            while (fail_one(&what) && CHECK(what.n < MAX_CALLS))
                what.n++;
            CHECK(what.n > 3);
        }
    }
}
