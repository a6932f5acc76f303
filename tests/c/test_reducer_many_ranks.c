/* test_reducer_many_ranks.c - one rank of a world of thousands, whose peers are played
 * by a process group of the test: the flags have room for every rank.
 */
#include <string.h>

#include "check.h"
#include "comm/group_comm.h"
#include "core/alloc.h"
#include "kernel_driver.h"
#include "nccl/gpu_comm_state.h"
#include "ranks.h"
#include "reducer/sparse_exchange.h"
#include "reducer/step_state.h"

enum { N_RANKS = PLI_MAX_GROUP_RANKS, RANK = N_RANKS - 7, N_PARAMS = 5, N_ELEMS = 40 };

/* All peers do as this rank does, except for these. */
typedef struct peers {
    pl_comm *comm;
    pl_reducer *reducer;
    int odd_one; /* has run one more forward; -1: none */
    int joining; /* takes a shadow step; -1: none */
    int lame;    /* cannot make its part of a world; -1: none */
    int n_gathers;
} peers;

static char *memory_of(const peers *self, const pl_op *op)
{
    return self->comm->arena + op->offset_bytes;
}

static void reduce_flags(const peers *self)
{
    for (int r = 0; r < N_RANKS; r++) {
        if (r != RANK) {
            flags_of(self->reducer, r)->role =
                r == self->joining ? PL_JOINING : PL_ACTIVE;
            flags_of(self->reducer, r)->forwards =
                flags_of(self->reducer, RANK)->forwards;
        }
        if (r == self->odd_one)
            flags_of(self->reducer, r)->forwards = (forward_bytes){2, 1, 1};
    }
}

/* Each peer has one row, numbered by its rank; or a word of success. */
static void gather_of_all(peers *self, const pl_op *op)
{
    const size_t n = op->n_elems / N_RANKS;
    char *memory = memory_of(self, op);
    for (int r = 0; r < N_RANKS; r++) {
        const uint64_t row = (uint64_t)r;
        if (r != RANK)
            memcpy(memory + (size_t)r * n, memory + (size_t)RANK * n, n);
        if (n == sizeof row && self->n_gathers == 1)
            memcpy(memory + (size_t)r * n, &row, n);
        if (r == self->lame)
            memory[(size_t)r * n] = PL_ENOMEM;
    }
    self->n_gathers++;
}

static pl_status issue(void *context, const pl_op *op, pl_ticket ticket)
{
    peers *self = context;
    (void)ticket;
    if (op->kind == PL_ALL_REDUCE && op->reduction == PL_MAX)
        reduce_flags(self);
    if (op->kind == PL_ALL_GATHER)
        gather_of_all(self, op);
    if (op->kind == PL_BROADCAST && op->root == self->lame)
        strcpy(memory_of(self, op), "it is full");
    return PL_OK;
}

static pl_status wait_for_peers(void *context, pl_ticket ticket)
{
    (void)context;
    (void)ticket;
    return PL_OK;
}

static void drop(void *context)
{
    (void)context;
}

static int peers_create(size_t arena_bytes, peers *out)
{
    pl_comm *base = NULL;
    *out = (peers){.odd_one = -1, .joining = -1, .lame = -1};
    if (!CHECK_OK(local_create(1, arena_bytes, RANKS_DEADLINE_NS, &base)))
        return 0;
    const pli_group_comm_options options = {
        .rank = RANK,
        .world_size = N_RANKS,
        .base = base,
        .callbacks = {
            .context = out, .issue = issue, .wait = wait_for_peers, .drop = drop}};
    return CHECK_OK(pli_group_comm_create(&options, &out->comm));
}

/* ---- steps ---------------------------------------------------------------------- */

static const pl_param params[N_PARAMS] = {
    {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32}, {3, PL_F32}, {0, PL_F32}, {N_ELEMS, PL_F64}};
static const pl_reducer_spec spec = {.params = params,
                                     .n_params = N_PARAMS,
                                     .world_size = N_RANKS,
                                     .extra_bytes = 8,
                                     .caps = {.bucket_bytes = 256, .last_bytes = 64}};

/* A step of `value`s; returns pli_forwards_check(). */
static pl_status step(const peers *self, double value)
{
    pl_status st = PL_OK;
    float floats[N_ELEMS];
    double doubles[N_ELEMS];
    pl_ready_result result;
    for (size_t k = 0; k < N_ELEMS; k++)
        floats[k] = (float)(doubles[k] = value);
    CHECK_OK(pl_reducer_begin(self->reducer));
    for (size_t i = N_PARAMS; i-- > 0;)
        CHECK_OK(pl_reducer_mark_ready(self->reducer, i,
                                       params[i].dtype == PL_F64 ? (void *)doubles
                                                                 : (void *)floats,
                                       PL_REPLACE, NULL, &result));
    memset(pl_reducer_extra(self->reducer), (int)value, spec.extra_bytes);
    flags_of(self->reducer, pl_comm_rank(self->comm))->forwards =
        (forward_bytes){.n = 1, .n_answered = 1};
    CHECK_OK(pl_reducer_close(self->reducer));
    CHECK_OK(pl_reducer_wait(self->reducer, RANKS_SLICE_NS));
    for (size_t i = 0; i < N_PARAMS; i++) {
        const char *slot =
            pli_comm_memory(self->comm, pl_reducer_slot_offset(self->reducer, i));
        const size_t n_bytes = params[i].n_elems * pl_dtype_bytes(params[i].dtype);
        CHECK(memcmp(slot, params[i].dtype == PL_F64 ? (void *)doubles : (void *)floats,
                     n_bytes) == 0);
        CHECK(pl_reducer_is_used(self->reducer, i) &&
              !pl_reducer_is_late(self->reducer, i));
    }
    CHECK(*(const char *)pl_reducer_extra(self->reducer) == (char)value);
    st = pli_forwards_check(self->reducer);
    CHECK_OK(pl_reducer_end(self->reducer));
    return st;
}

TEST(steps_of_thousands_of_ranks_are_steps)
{
    pl_backend *backend = NULL;
    peers all;
    if (!peers_create(pl_reducer_arena_bytes(&spec), &all) ||
        !CHECK_OK(pli_cpu_backend_create(&backend)) ||
        !CHECK_OK(pl_reducer_create(&spec, all.comm, backend, &all.reducer)))
        return;
    for (int k = 1; k < 5; k++)
        CHECK_OK(step(&all, k));
    CHECK(all.reducer->learning == LEARNING_DONE);
    all.joining = N_RANKS - 1;
    CHECK_OK(step(&all, 5));
    CHECK(all.reducer->participation.n_active == N_RANKS - 1);
    CHECK(all.reducer->participation.last_joining == N_RANKS - 1);
    all.odd_one = N_RANKS - 2;
    CHECK(step(&all, 6) == PL_EMISMATCH);
    pl_reducer_destroy(all.reducer);
    pli_backend_destroy(backend);
    pl_comm_destroy(all.comm);
}

TEST(a_reducer_without_room_for_all_ranks_is_refused)
{
    pl_backend *backend = NULL;
    pl_reducer_spec few = spec;
    peers all;
    few.world_size = 0;
    if (!peers_create(pl_reducer_arena_bytes(&spec), &all) ||
        !CHECK_OK(pli_cpu_backend_create(&backend)))
        return;
    CHECK(pl_reducer_create(&few, all.comm, backend, &all.reducer) == PL_EINVAL);
    CHECK(pl_reducer_header_bytes(&few) < pl_reducer_header_bytes(&spec));
    pli_backend_destroy(backend);
    pl_comm_destroy(all.comm);
}

/* ---- rows ----------------------------------------------------------------------- */

TEST(rows_of_thousands_of_ranks_are_found)
{
    int64_t row = RANK;
    float value = 1;
    int64_t *found = NULL;
    peers all;
    pl_exchange_part part = {
        .table = {.n_rows = N_RANKS, .row_elems = 1, .dtype = PL_F32},
        .local = {.indices = &row, .values = &value, .n_rows = 1}};
    if (!peers_create(PLI_EXCHANGE_BYTES, &all))
        return;
    pl_exchange exchange = {.comm = all.comm,
                            .staging_bytes = (N_RANKS - 1) * PL_CACHE_LINE,
                            .parts = &part,
                            .n_parts = 1,
                            .wait = wait_through,
                            .context = all.comm};
    CHECK_FAILS(pl_exchange_find(&exchange, &found), PL_EINVAL, "too small");
    exchange.staging_bytes = PLI_EXCHANGE_BYTES;
    if (CHECK_OK(pl_exchange_find(&exchange, &found))) {
        CHECK(part.all.n_rows == N_RANKS);
        for (size_t k = 0; k < part.all.n_rows; k++)
            CHECK(part.all.indices[k] == (int64_t)k);
    }
    pli_free(found);
    pl_comm_destroy(all.comm);
}

/* ---- agreement of GPU worlds ---------------------------------------------------- */

TEST(thousands_of_ranks_agree_to_make_a_world)
{
    peers all;
    if (!peers_create(pli_gpu_board_bytes(N_RANKS), &all))
        return;
    pli_gpu_comm self = {.super = {.base = all.comm,
                                   .rank = RANK,
                                   .world_size = N_RANKS,
                                   .arena = all.comm->arena}};
    CHECK_OK(pli_gpu_comm_agree(&self, PL_OK));
    all.lame = N_RANKS - 1;
    CHECK_FAILS(pli_gpu_comm_agree(&self, PL_OK), PL_EPEER,
                "rank 4095 could not go on: it is full");
    pl_comm_destroy(all.comm);
}

/* ---- sums ----------------------------------------------------------------------- */

TEST(ranges_of_thousands_of_ranks_are_summed_on_a_device)
{
    static float rows[N_RANKS][N_ELEMS];
    float means[N_ELEMS] = {0};
    pli_kernels *kernels = NULL;
    pl_rank_ranges ranges = {.to = means,
                             .from = rows,
                             .stride_bytes = sizeof rows[0],
                             .n_elems = N_ELEMS,
                             .n_ranks = N_RANKS,
                             .dtype = PL_F32,
                             .reduction = PL_MEAN};
    for (int r = 0; r < N_RANKS; r++)
        for (size_t k = 0; k < N_ELEMS; k++)
            rows[r][k] = (float)(r % 2) + (float)k;
    if (!CHECK_OK(pli_kernels_load(&kernel_driver, 80, NULL, &kernels)))
        return;
    CHECK_OK(pli_kernels_sum(kernels, &ranges, NULL));
    for (size_t k = 0; k < N_ELEMS; k++)
        CHECK(means[k] == 0.5F + (float)k);
    ranges.n_ranks = 0;
    CHECK(pli_kernels_sum(kernels, &ranges, NULL) == PL_EINVAL);
    pli_kernels_unload(kernels);
}
