/* test_nccl.c - the library, and one communicator: made, used, aborted, ended. */
#include "gpu_ranks.h"

/* ---- the library ---------------------------------------------------------------- */

TEST(a_library_is_found_by_its_path)
{
    pli_nccl_library *library = NULL;
    fake_reset(NULL);
    if (!CHECK_OK(pli_nccl_library_open(fake_path(), &library)))
        return;
    CHECK(library->version == fake_defaults().nccl);
    CHECK(library->GetLastError != NULL && library->CommFinalize != NULL);
    pli_nccl_library_retain(library);
    pli_nccl_library_release(library);
    CHECK(library->AllReduce != NULL); /* one user is left */
    pli_nccl_library_release(library);
    pli_nccl_library_release(NULL);
}

TEST(the_environment_comes_before_all_else)
{
    pli_nccl_library *library = NULL;
    fake_reset(NULL);
    (void)setenv("PACELINE_LIBNCCL", "/nowhere/libnccl.so.2", 1);
    CHECK_FAILS(pli_nccl_library_open(fake_path(), &library), PL_EUNSUPPORTED,
                "/nowhere/libnccl.so.2", "PACELINE_LIBNCCL", "nvidia-nccl");
    (void)setenv("PACELINE_LIBNCCL", fake_path(), 1);
    if (CHECK_OK(pli_nccl_library_open("/nowhere/else", &library)))
        pli_nccl_library_release(library);
    (void)setenv("PACELINE_LIBNCCL", "libm.so.6", 1); /* not an NCCL */
    CHECK_FAILS(pli_nccl_library_open(NULL, &library), PL_EUNSUPPORTED, "has no nccl");
    (void)unsetenv("PACELINE_LIBNCCL");
}

TEST(one_that_is_too_old_is_refused_by_its_version)
{
    static const struct {
        int version;
        const char *text; /* NULL: new enough */
    } all[] = {{2804, "2.8.4"}, {21805, "2.18.5"}, {21900, NULL}, {23203, NULL}};
    for (int k = 0; k < 4; k++) {
        pli_nccl_library *library = NULL;
        fake_options options = fake_defaults();
        options.nccl = all[k].version;
        fake_reset(&options);
        const pl_status st = pli_nccl_library_open(fake_path(), &library);
        CHECK(st == (all[k].text != NULL ? PL_EUNSUPPORTED : PL_OK));
        if (all[k].text != NULL)
            CHECK_SAYS(all[k].text);
        pli_nccl_library_release(library);
    }
    fake_reset(NULL);
    fake_fail("ncclGetVersion", 1, 3);
    pli_nccl_library *library = NULL;
    CHECK(pli_nccl_library_open(fake_path(), &library) == PL_EUNSUPPORTED);
    pli_fault_arm(PLI_FAULT_ALLOC, 1);
    CHECK(pli_nccl_library_open(fake_path(), &library) == PL_ENOMEM);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
}

/* ---- communicators of ranks that are threads ------------------------------------ */

typedef struct meeting {
    pthread_mutex_t lock;
    char id[PLI_NCCL_ID_BYTES];
    atomic_int has_id;
    atomic_int n_made;
    atomic_int n_over;
    atomic_int is_refused; /* `poll` fails from now on */
    atomic_int n_polls;
    atomic_int are_made;
    atomic_int n_awaited; /* communicators: `poll` returns once they are made */
} meeting;

static pl_status poll_meeting(void *context)
{
    meeting *it = context;
    atomic_fetch_add(&it->n_polls, 1);
    while (atomic_load(&it->n_awaited) > 0) {
        if (fake_live(FAKE_COMMS) == atomic_load(&it->n_awaited))
            atomic_store(&it->are_made, 1);
        if (atomic_load(&it->are_made))
            break;
        pli_sleep_ns(100000);
    }
    if (atomic_load(&it->n_awaited) > 0)
        pli_sleep_ns(100 * PLI_MS); /* for the threads that made them */
    if (atomic_load(&it->is_refused))
        return pli_fail(PL_EPEER, "somebody has gone");
    return PL_OK;
}

static pl_status make(gpu_rank *self, int64_t deadline_ns, pli_nccl **out)
{
    pl_status st = PL_OK;
    meeting *it = self->all->context;
    if (self->rank == 0 && atomic_load(&it->has_id) == 0) {
        PL_TRY(pli_nccl_new_id(self->all->library, self->backend, it->id));
        atomic_store(&it->has_id, 1);
    }
    while (atomic_load(&it->has_id) == 0)
        pli_sleep_ns(100000);
    const pli_nccl_options options = {.library = self->all->library,
                                      .backend = self->backend,
                                      .rank = self->rank,
                                      .world_size = self->all->world_size,
                                      .id = it->id,
                                      .deadline_ns = deadline_ns,
                                      .poll = poll_meeting,
                                      .context = it};
    PL_TRY(pli_nccl_create(&options, out));
    atomic_fetch_add(&it->n_made, 1);
done:
    return st;
}

/* Runs `run` on threads that each have a device, but no world. */
static void *run_alone(void *memory)
{
    gpu_rank *self = memory;
    if (CHECK_OK(gpu_open(self)))
        self->run(self);
    gpu_close(self);
    return NULL;
}

static void run_ranks(gpu_ranks *all, meeting *it, void (*run)(gpu_rank *self))
{
    gpu_rank ranks[GPUS_MOST];
    pthread_t threads[GPUS_MOST];
    *it = (meeting){.has_id = 0};
    all->context = it;
    fake_reset(&all->fake);
    if (!CHECK_OK(pli_nccl_library_open(fake_path(), &all->library)))
        return;
    for (int r = 0; r < all->world_size; r++) {
        ranks[r] = (gpu_rank){.all = all, .rank = r, .run = run};
        if (pthread_create(&threads[r], NULL, run_alone, &ranks[r]) != 0)
            exit(2);
    }
    for (int r = 0; r < all->world_size; r++)
        (void)pthread_join(threads[r], NULL);
    gpu_ranks_end(all);
}

/* Sums a float per rank; returns the first failure. */
static pl_status sum_once(gpu_rank *self, pli_nccl *nccl)
{
    pl_status st = PL_OK;
    void *memory = NULL;
    float value = (float)(self->rank + 1);
    const float expected =
        (float)(self->all->world_size * (self->all->world_size + 1) / 2);
    const pl_op op = {.kind = PL_ALL_REDUCE, .dtype = PL_F32, .n_elems = 1};
    PL_TRY(self->backend->ops->alloc(self->backend, 4, &memory));
    PL_TRY(pli_cuda_write(self->backend, memory, &value, 4, self->stream));
    PL_TRY(pli_nccl_enqueue(nccl, &op, memory, self->stream));
    PL_TRY(pli_cuda_read(self->backend, &value, memory, 4, self->stream));
    CHECK(value == expected);
done:
    self->backend->ops->free(self->backend, memory);
    return st;
}

static void meet_and_sum(gpu_rank *self)
{
    pli_nccl *nccl = NULL;
    if (!CHECK_OK(make(self, RANKS_DEADLINE_NS, &nccl)))
        return;
    CHECK_OK(sum_once(self, nccl));
    CHECK_OK(pli_nccl_check(nccl));
    pli_nccl_finish(nccl, RANKS_DEADLINE_NS);
    pli_nccl_finish(nccl, RANKS_DEADLINE_NS);
    CHECK(pli_nccl_check(nccl) == PL_EPEER);
    pli_nccl_destroy(nccl);
}

TEST(ranks_meet_and_add)
{
    for (uint64_t seed = 1; seed <= 12; seed++) {
        meeting it;
        gpu_ranks all =
            gpu_ranks_of(2 + (int)(seed % 3), seed, (fake_schedule)(seed % 3));
        all.fake.lazy_connect = seed % 2 == 0;
        run_ranks(&all, &it, meet_and_sum);
    }
}

static void leave_in_no_time(gpu_rank *self)
{
    pli_nccl *nccl = NULL;
    if (!CHECK_OK(make(self, RANKS_DEADLINE_NS, &nccl)))
        return;
    pli_nccl_finish(nccl, 0);
    pli_nccl_destroy(nccl);
}

/* The thread that flushes may run when the communicator no longer exists. */
TEST(a_flush_that_is_given_up_before_it_began_is_not_made)
{
    const uint64_t n_seeds = IS_SANITIZED ? 10 : 40;
    for (uint64_t seed = 1; seed <= n_seeds; seed++) {
        meeting it;
        gpu_ranks all = gpu_ranks_of(2, seed, FAKE_RANDOM);
        run_ranks(&all, &it, leave_in_no_time);
    }
}

/* One rank never comes. */
static void wait_for_nobody(gpu_rank *self)
{
    pli_nccl *nccl = NULL;
    meeting *it = self->all->context;
    if (self->rank == 1)
        return;
    if (self->all->deadline_ns < RANKS_DEADLINE_NS) {
        CHECK_FAILS(make(self, self->all->deadline_ns, &nccl), PL_ETIMEOUT,
                    "meeting the other ranks");
    } else {
        atomic_store(&it->is_refused, 1);
        CHECK(make(self, RANKS_DEADLINE_NS, &nccl) != PL_OK);
        if (error_has("somebody has gone")) /* or that the other has given up */
            atomic_fetch_add(&it->n_over, 1);
    }
    CHECK(nccl == NULL);
}

TEST(who_waits_for_a_rank_that_does_not_come_gives_up)
{
    meeting it;
    gpu_ranks all = gpu_ranks_of(3, 1, FAKE_RANDOM);
    all.deadline_ns = 60 * PLI_MS;
    run_ranks(&all, &it, wait_for_nobody);
    all = gpu_ranks_of(3, 1, FAKE_RANDOM);
    run_ranks(&all, &it, wait_for_nobody);
    CHECK(atomic_load(&it.n_over) >= 1);
}

/* The waiting rank gives up just when NCCL has met the last rank. */
static void give_up_too_late(gpu_rank *self)
{
    pli_nccl *nccl = NULL;
    meeting *it = self->all->context;
    const int is_last = self->rank == self->all->world_size - 1;
    atomic_store(&it->n_awaited, self->all->world_size);
    atomic_store(&it->is_refused, 1);
    while (is_last && atomic_load(&it->n_polls) < self->all->world_size - 1)
        pli_sleep_ns(100000);
    const pl_status st = make(self, RANKS_DEADLINE_NS, &nccl);
    while (!atomic_load(&it->are_made)) /* includes the one made here */
        pli_sleep_ns(100000);
    CHECK(is_last || (st == PL_EPEER && nccl == NULL));
    pli_nccl_destroy(nccl);
}

TEST(what_has_been_made_for_one_that_gives_up_is_aborted)
{
    meeting it;
    gpu_ranks all = gpu_ranks_of(3, 1, FAKE_RANDOM);
    run_ranks(&all, &it, give_up_too_late);
}

/* ---- aborting ------------------------------------------------------------------- */

typedef struct aborter {
    pli_nccl *nccl;
    int64_t rest_ns;
} aborter;

static void *abort_soon(void *memory)
{
    const aborter *it = memory;
    pli_sleep_ns(it->rest_ns);
    pli_nccl_abort(it->nccl);
    pli_nccl_abort(it->nccl);
    return NULL;
}

/* Another thread aborts while this one enqueues operations that the peers never do. */
static void enqueue_until_aborted(gpu_rank *self)
{
    pli_nccl *nccl = NULL;
    pthread_t thread;
    void *memory = NULL;
    pl_status st = PL_OK;
    const pl_op op = {.kind = PL_ALL_REDUCE, .dtype = PL_F32, .n_elems = 1};
    if (!CHECK_OK(make(self, RANKS_DEADLINE_NS, &nccl)))
        return;
    aborter it = {.nccl = nccl, .rest_ns = (int64_t)(self->all->seed * 7919 % 3000000)};
    CHECK_OK(self->backend->ops->alloc(self->backend, 4, &memory));
    if (self->rank == 0 && pthread_create(&thread, NULL, abort_soon, &it) == 0) {
        while (st == PL_OK) {
            st = pli_nccl_enqueue(nccl, &op, memory, self->stream);
            pli_sleep_ns(100000);
        }
        CHECK_FAILS(st, PL_EPEER, "aborted");
        (void)pthread_join(thread, NULL);
        CHECK(pli_nccl_check(nccl) == PL_EPEER);
    }
    pli_nccl_abort(nccl);
    CHECK_OK(self->backend->ops->synchronize(self->backend, self->stream));
    self->backend->ops->free(self->backend, memory);
    pli_nccl_destroy(nccl);
}

TEST(an_abort_from_another_thread_ends_all_that_runs)
{
    for (uint64_t seed = 1; seed <= 15; seed++) {
        meeting it;
        gpu_ranks all = gpu_ranks_of(2, seed, (fake_schedule)(seed % 3));
        all.fake.lazy_connect = seed % 5 == 0; /* enqueuing may block */
        run_ranks(&all, &it, enqueue_until_aborted);
    }
}

/* ---- errors --------------------------------------------------------- */

static void meet_errors(gpu_rank *self)
{
    pli_nccl *nccl = NULL;
    static const struct {
        int code;
        pl_status status;
    } errors[] = {{ncclUnhandledCudaError, PL_ESYS}, {ncclSystemError, PL_ESYS},
                  {ncclInternalError, PL_ESYS},      {ncclInvalidArgument, PL_EINVAL},
                  {ncclInvalidUsage, PL_EINVAL},     {ncclRemoteError, PL_EPEER},
                  {ncclTimeout, PL_ETIMEOUT}};
    meeting *it = self->all->context;
    if (!CHECK_OK(make(self, RANKS_DEADLINE_NS, &nccl)))
        return;
    while (atomic_load(&it->n_made) < 2) /* a poll would take the error */
        pli_sleep_ns(100000);
    for (size_t k = 0; self->rank == 0 && k < sizeof errors / sizeof errors[0]; k++) {
        fake_fail("ncclCommGetAsyncError", 1, errors[k].code);
        CHECK(pli_nccl_check(nccl) == errors[k].status);
        CHECK_SAYS(ncclGetErrorString((ncclResult_t)errors[k].code));
        CHECK_OK(pli_nccl_check(nccl));
    }
    pli_nccl_destroy(nccl);
}

TEST(errors_are_told_in_nccls_own_words)
{
    meeting it;
    gpu_ranks all = gpu_ranks_of(2, 1, FAKE_RANDOM);
    run_ranks(&all, &it, meet_errors);
}

/* As with NCCL_COMM_BLOCKING=0: the device would not wait for such a call. */
static void meet_early_returns(gpu_rank *self)
{
    static const char *const functions[] = {"ncclAllReduce", "ncclCommGetAsyncError"};
    pli_nccl *nccl = NULL;
    fake_fail("ncclCommInitRank", 1, ncclInProgress);
    CHECK_FAILS(make(self, RANKS_DEADLINE_NS, &nccl), PL_EUNSUPPORTED,
                "NCCL_COMM_BLOCKING=0");
    if (!CHECK_OK(make(self, RANKS_DEADLINE_NS, &nccl)))
        return;
    for (int k = 0; k < 2; k++) {
        fake_fail(functions[k], 1, ncclInProgress);
        CHECK_FAILS(sum_once(self, nccl), PL_EUNSUPPORTED, "NCCL_COMM_BLOCKING=0");
    }
    CHECK_OK(sum_once(self, nccl));
    pli_nccl_destroy(nccl);
}

TEST(calls_that_return_before_their_end_are_refused)
{
    meeting it;
    gpu_ranks all = gpu_ranks_of(1, 1, FAKE_RANDOM);
    run_ranks(&all, &it, meet_early_returns);
}
