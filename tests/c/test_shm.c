/* test_shm.c - worlds of processes that end well: made, used, and left, with nothing
 * leaked.
 *
 * Processes that die are in test_shm_failure.c.
 */
#include "processes.h"

/* A test that each rank runs in its own process, in worlds of some sizes. */
#define SHM_TEST(least, most, seed, name)                                              \
    TEST_BY(name, child *self, {                                                       \
        for (int world_size = least; world_size <= (most); world_size++)               \
            processes_run(board_create(world_size, seed), name##_by);                  \
    })

/* ---- operations ----------------------------------------------------------------- */

SHM_TEST(1, 4, (uint64_t)world_size, processes_reduce_exactly_in_worlds_of_1_to_4)
{
    draw_rest(&self->random, 3 * PLI_MS);
    if (!CHECK_OK(child_join(self)))
        return;
    CHECK(pl_comm_rank(self->comm) == self->rank);
    CHECK(pl_comm_world_size(self->comm) == self->board->world_size);
    CHECK(pl_comm_arena_bytes(self->comm) >= self->board->arena_bytes);
    for (unsigned n = 0; n < 100; n++) {
        draw_rest(&self->random, 50000);
        if (!CHECK_OK(child_reduce(self, n)))
            return;
    }
}

SHM_TEST(2, 4, 7, processes_do_every_kind_of_operation)
{
    const int world_size = self->board->world_size;
    if (!CHECK_OK(child_join(self)))
        return;
    for (unsigned seed = 0; seed < 120; seed++) {
        const pl_dtype dtype = (pl_dtype)(seed % PL_N_DTYPES);
        const pl_op op = {.kind = (pl_op_kind)(seed % PL_N_OP_KINDS),
                          .reduction = value_is_integer(dtype) ? PL_MAX : PL_MEAN,
                          .dtype = dtype,
                          .root = (int)seed % world_size,
                          .offset_bytes = OPS_GUARD_BYTES,
                          .n_elems = (size_t)world_size * (seed % 50)};
        if (!CHECK_OK(ops_run(self->comm, &op, seed)))
            return;
    }
}

/* Leaves, and waits until rank 0 listens again, for the world of the next round. */
static void leave_for_the_next(child *self, int round)
{
    child_leave(self);
    if (self->rank == 0) {
        CHECK_OK(pli_listener_create(self->board->address, &self->listener));
        atomic_store(&self->board->note, round + 1);
    }
    while (atomic_load(&self->board->note) <= round)
        pli_sleep_ns(100000);
}

SHM_TEST(3, 3, 1, worlds_made_one_after_another_leave_no_descriptor_and_no_mapping)
{
    for (int round = 0; round < 10; round++) {
        if (!CHECK_OK(child_join(self)))
            return;
        CHECK_OK(child_reduce(self, (unsigned)round));
        if (round < 9)
            leave_for_the_next(self, round);
    }
}

/* ---- steps that fail ------------------------------------------------------------ */

SHM_TEST(3, 3, 2, processes_go_on_in_a_new_world_after_an_aborted_step)
{
    for (int round = 0; round < 30; round++) {
        const int culprit = round % self->board->world_size;
        char words[32];
        (void)snprintf(words, sizeof words, "round %d;", round);
        if (!CHECK_OK(child_join(self)) ||
            !CHECK_OK(child_reduce(self, (unsigned)round)))
            return;
        draw_rest(&self->random, 200000);
        if (self->rank == culprit) {
            pl_comm_abort(self->comm, words);
        } else {
            CHECK(child_reduce(self, 0) == PL_EPEER);
            CHECK(blames(pl_error_message(), self->rank, culprit));
            CHECK_SAYS(words);
        }
        check_stays_failed(self->comm, PL_EPEER, words);
        if (round < 29)
            leave_for_the_next(self, round);
    }
}

/* ---- child processes of a rank -------------------------------------------------- */

/* As a worker of a data loader: a child of the rank ends while the ranks continue. */
SHM_TEST(2, 2, 3, children_of_a_rank_come_and_go_without_a_word_to_the_world)
{
    if (!CHECK_OK(child_join(self)))
        return;
    for (unsigned n = 0; n < 5; n++) {
        (void)fflush(NULL);
        const pid_t pid = fork();
        if (pid == 0) {
            const unsigned char *arena = (void *)self->comm->arena;
            const int holds_arena = arena[0] == (n == 0 ? 0 : OPS_GUARD);
            if (n % 2 == 0)
                pl_comm_destroy(self->comm); /* does not leave in its parent's name */
            _exit(holds_arena ? 0 : 1);
        }
        int how = 0;
        (void)waitpid(pid, &how, 0);
        CHECK(WIFEXITED(how) && WEXITSTATUS(how) == 0);
        if (!CHECK_OK(child_reduce(self, n)))
            return;
    }
}

/* ---- construction that fails ---------------------------------------------------- */

SHM_TEST(2, 4, 1, ranks_that_ask_for_different_arenas_make_no_world)
{
    if (self->rank == self->board->world_size - 1) {
        board mine = *self->board;
        child other = *self;
        mine.arena_bytes = 2 * self->board->arena_bytes;
        other.board = &mine;
        CHECK_FAILS(child_join(&other), PL_EMISMATCH,
                    "the ranks ask for different shared memory");
    } else {
        CHECK(child_join(self) == PL_EPEER);
        if (!CHECK(blames(pl_error_message(), self->rank, self->board->world_size - 1)))
            CHECK_MORE("%s", pl_error_message());
        CHECK_SAYS("during construction");
    }
    CHECK(n_open_descriptors() == self->n_descriptors);
    CHECK(n_shared_mappings() == 0);
}

static int yes(void *context)
{
    return ++*(int *)context > 3;
}

TEST(an_interrupt_ends_the_wait_for_the_others)
{
    static const int nobody[2] = {0, 0};
    char address[PLI_ADDRESS_BYTES];
    pli_listener *listener = NULL;
    pl_comm *comm = NULL;
    int n_asked = 0;
    const pli_shm_options options = {.world_size = 2,
                                     .arena_bytes = 1,
                                     .n_ops = 1,
                                     .deadline_ns = RANKS_DEADLINE_NS,
                                     .pids = nobody,
                                     .is_interrupted = yes,
                                     .prove = secret_prove,
                                     .context = &n_asked};
    const int n_descriptors = n_open_descriptors();
    const int64_t begin = pli_now_ns();
    if (!CHECK_OK(pli_listener_create(address, &listener)))
        return;
    CHECK(pli_shm_create(&options, listener, NULL, &comm) == PL_EAGAIN);
    CHECK(comm == NULL);
    CHECK(n_asked == 4);
    CHECK(pli_now_ns() - begin < 3000 * PLI_MS);
    pli_listener_destroy(listener);
    pli_listener_destroy(NULL);
    CHECK(n_open_descriptors() == n_descriptors);
}

TEST(ranks_that_never_come_end_the_wait_at_the_deadline)
{
    static const int nobody[2] = {0, 0};
    char address[PLI_ADDRESS_BYTES];
    pli_listener *listener = NULL;
    pl_comm *comm = NULL;
    const pli_shm_options options = {.world_size = 2,
                                     .arena_bytes = 1,
                                     .n_ops = 1,
                                     .deadline_ns = 100 * PLI_MS,
                                     .pids = nobody,
                                     .prove = secret_prove};
    const int64_t begin = pli_now_ns();
    if (!CHECK_OK(pli_listener_create(address, &listener)))
        return;
    CHECK_FAILS(pli_shm_create(&options, listener, NULL, &comm), PL_ETIMEOUT,
                "not every rank came");
    CHECK(pli_now_ns() - begin >= 100 * PLI_MS);
    pli_listener_destroy(listener);
}
