/* tracer.h - a backend and a world that do all at once and write down their calls.
 *
 *     c1:2     copies 2 tensors on stream 1        r1e3    records event 3 on stream 1
 *     a1:1     adds                                w2e3    stream 2 waits for event 3
 *     s1:4     scales                              i7      issues device operation,
 *     o1       orders stream 1 behind the world            ready with event 7
 *     f1       releases memory after stream 1
 *     h  b     issues in host memory; a barrier
 *
 * Memory is the host's; the world stands on a local one.  One thread drives both ranks
 * of a pair, and tests read rank 0's trace.
 */
#ifndef PLT_TRACER_H
#define PLT_TRACER_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "reducer_pair.h"

enum { TRACE_BYTES = 1024, N_RANKS = 2, N_PARAMS = 4, N_ELEMS = 16 };

typedef struct tracer {
    pl_backend backend;
    pl_comm comm;
    pl_backend *cpu;
    pl_comm *local;
    char text[TRACE_BYTES];
    size_t n_bytes;
    size_t n_events, n_live_events;
    size_t n_allocs, n_live_allocs;
    int fail_at; /* the backend's call that fails, counted from now; 0: none */
} tracer;

static inline pl_status fails(tracer *it)
{
    if (it->fail_at > 0 && --it->fail_at == 0)
        return pli_fail(PL_ESYS, "ordered by a test");
    return PL_OK;
}

static inline tracer *of_backend(pl_backend *backend)
{
    return (tracer *)(void *)backend;
}

static inline tracer *of_comm(pl_comm *comm)
{
    return (tracer *)(void *)((char *)comm - offsetof(tracer, comm));
}

__attribute__((format(printf, 2, 3))) static inline void note(tracer *it,
                                                              const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int n =
        vsnprintf(it->text + it->n_bytes, TRACE_BYTES - it->n_bytes, format, arguments);
    va_end(arguments);
    if (n > 0 && it->n_bytes + (size_t)n < TRACE_BYTES)
        it->n_bytes += (size_t)n;
}

static inline int number(const void *handle)
{
    return (int)(uintptr_t)handle;
}

static inline pl_stream *stream(int n)
{
    return (pl_stream *)(uintptr_t)n; /* NOLINT(performance-no-int-to-ptr) */
}

/* ---- the backend ---------------------------------------------------------------- */

static inline pl_status trace_alloc(pl_backend *backend, size_t n_bytes, void **out)
{
    tracer *it = of_backend(backend);
    if (fails(it) != PL_OK)
        return PL_ESYS;
    it->n_allocs++;
    it->n_live_allocs++;
    *out = malloc(n_bytes);
    return PL_OK;
}

static inline void trace_free(pl_backend *backend, void *memory)
{
    of_backend(backend)->n_live_allocs--;
    free(memory);
}

/* Moves tensors as the CPU does. */
#define TRACE_MOVES(kind, letter)                                                      \
    static inline pl_status trace_##kind(pl_backend *backend, const pl_move *moves,    \
                                         size_t n_moves, pl_stream *on)                \
    {                                                                                  \
        tracer *it = of_backend(backend);                                              \
        if (fails(it) != PL_OK)                                                        \
            return PL_ESYS;                                                            \
        note(it, letter "%d:%zu ", number(on), n_moves);                               \
        return it->cpu->ops->kind(it->cpu, moves, n_moves, NULL);                      \
    }
TRACE_MOVES(copy, "c")
TRACE_MOVES(add, "a")

static inline pl_status trace_scale(pl_backend *backend, const pl_move *moves,
                                    size_t n_moves, int numerator, int denominator,
                                    pl_stream *on)
{
    tracer *it = of_backend(backend);
    if (fails(it) != PL_OK)
        return PL_ESYS;
    note(it, "s%d:%zu ", number(on), n_moves);
    return it->cpu->ops->scale(it->cpu, moves, n_moves, numerator, denominator, NULL);
}

static inline pl_status trace_event_create(pl_backend *backend, pl_event **out)
{
    tracer *it = of_backend(backend);
    if (fails(it) != PL_OK)
        return PL_ESYS;
    it->n_events++;
    it->n_live_events++;
    *out = (pl_event *)(uintptr_t)it->n_events; /* NOLINT(performance-no-int-to-ptr) */
    return PL_OK;
}

#define TRACE_EVENT(kind, letter)                                                      \
    static inline pl_status trace_event_##kind(pl_backend *backend, pl_event *event,   \
                                               pl_stream *on)                          \
    {                                                                                  \
        if (fails(of_backend(backend)) != PL_OK)                                       \
            return PL_ESYS;                                                            \
        note(of_backend(backend), letter "%de%d ", number(on), number(event));         \
        return PL_OK;                                                                  \
    }
TRACE_EVENT(record, "r")
TRACE_EVENT(wait, "w")

static inline void trace_event_destroy(pl_backend *backend, pl_event *event)
{
    CHECK(event != NULL);
    of_backend(backend)->n_live_events--;
}

static const pl_backend_ops trace_backend_ops = {
    .name = "trace",
    .batching = PL_MOVE_BY_BUCKET,
    .alloc = trace_alloc,
    .free = trace_free,
    .copy = trace_copy,
    .add = trace_add,
    .scale = trace_scale,
    .event_create = trace_event_create,
    .event_record = trace_event_record,
    .event_wait = trace_event_wait,
    .event_destroy = trace_event_destroy,
};

/* ---- the world ------------------------------------------------------------------ */

static inline pl_status trace_issue(pl_comm *comm, const pl_op *op,
                                    const pli_order *order, pl_ticket *out)
{
    tracer *it = of_comm(comm);
    if (op->kind == PL_BARRIER)
        note(it, "b ");
    else if (op->offset_bytes < comm->host_bytes)
        note(it, "h ");
    else
        note(it, "i%d ", number(order->ready));
    return pli_comm_issue_ordered(it->local, op, order, out);
}

static inline pl_status trace_progress(pl_comm *comm)
{
    return pl_comm_progress(of_comm(comm)->local);
}

static inline pl_status trace_wait(pl_comm *comm, pl_ticket ticket, int64_t slice_ns)
{
    return pl_comm_wait(of_comm(comm)->local, ticket, slice_ns);
}

static inline void trace_abort(pl_comm *comm, const char *words)
{
    pl_comm_abort(of_comm(comm)->local, words);
}

static inline void trace_record_activity(pl_comm *comm, pl_activity activity,
                                         uint64_t step)
{
    pli_comm_record_activity(of_comm(comm)->local, activity, step);
}

static inline pl_status trace_order(pl_comm *comm, pl_stream *on)
{
    note(of_comm(comm), "o%d ", number(on));
    return PL_OK;
}

static const pl_comm_ops trace_comm_ops = {
    .name = "trace",
    .issue = trace_issue,
    .progress = trace_progress,
    .wait = trace_wait,
    .abort = trace_abort,
    .record_activity = trace_record_activity,
};

static const pli_device_ops trace_device_ops = {
    .order = trace_order,
};

/* ---- two ranks ------------------------------------------------------------------ */

static tracer tracers[N_RANKS]; /* of the one pair */

/* Buckets of two parameters each: 3 2 | 1 0. */
static const pl_param params[N_PARAMS] = {
    {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32}, {N_ELEMS, PL_F32}};
static const pl_reducer_spec spec = {.params = params,
                                     .n_params = N_PARAMS,
                                     .extra_bytes = 8,
                                     .caps = {.bucket_bytes = 128, .last_bytes = 128}};

static inline int traced_create(pair *out)
{
    memset(tracers, 0, sizeof tracers);
    *out = (pair){.backend = NULL};
    if (!CHECK_OK(pli_cpu_backend_create(&out->backend)) ||
        !CHECK_OK(local_create(N_RANKS, pl_reducer_arena_bytes(&spec),
                               RANKS_DEADLINE_NS, out->comms)))
        return 0;
    for (int r = 0; r < N_RANKS; r++) {
        tracer *it = &tracers[r];
        it->cpu = out->backend;
        it->local = out->comms[r];
        it->backend.ops = &trace_backend_ops;
        it->comm = (pl_comm){.ops = &trace_comm_ops,
                             .device = &trace_device_ops,
                             .rank = r,
                             .world_size = N_RANKS,
                             .arena = it->local->arena,
                             .device_memory =
                                 it->local->arena + pl_reducer_header_bytes(&spec),
                             .arena_bytes = pl_comm_arena_bytes(it->local),
                             .host_bytes = pl_reducer_header_bytes(&spec),
                             .backend = &it->backend,
                             .chunk_bytes = SIZE_MAX};
        if (!CHECK_OK(
                pl_reducer_create(&spec, &it->comm, &it->backend, &out->reducers[r])))
            return 0;
        pl_reducer_set_stream(out->reducers[r], stream(9));
    }
    return 1;
}

static inline void traced_run(void (*run)(pair *it))
{
    pair it;
    if (!traced_create(&it))
        return;
    run(&it);
    pair_destroy(&it);
    for (int r = 0; r < N_RANKS; r++)
        CHECK(tracers[r].n_live_events == 0 && tracers[r].n_live_allocs == 0);
}

/* A test with such a pair. */
#define TRACED_TEST(name) TEST_BY(name, pair *it, traced_run(name##_by))

static inline void forget_trace(void)
{
    tracers[0].n_bytes = 0;
    tracers[0].text[0] = 0;
}

/* Whether `text` is what rank 0 has called since the last asked(). */
static inline int asked(const char *text)
{
    const int is_so = strcmp(tracers[0].text, text) == 0;
    if (!is_so)
        CHECK_MORE("asked for \"%s\", not for \"%s\"", tracers[0].text, text);
    forget_trace();
    return is_so;
}

typedef float gradient[N_ELEMS];

static inline void fill(gradient data, float value)
{
    for (size_t i = 0; i < N_ELEMS; i++)
        data[i] = value;
}

static inline pl_ready_result mark_ready(const pair *it, int rank, size_t param,
                                         const float *data, pl_write_mode mode, int on)
{
    pl_ready_result result = PL_LATE;
    CHECK_OK(pl_reducer_mark_ready(it->reducers[rank], param, data, mode, stream(on),
                                   &result));
    return result;
}

/* Rank 1's gradient for every parameter. */
static const gradient threes = {3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3};

static inline int holds(const pair *it, size_t param, float value)
{
    int is_held = 1;
    for (int r = 0; r < N_RANKS; r++)
        for (size_t i = 0; i < N_ELEMS; i++)
            is_held &= pair_slot(it, r, param)[i] == value;
    return is_held;
}

static inline void all_ready_of_rank_1(const pair *it)
{
    for (size_t i = N_PARAMS; i-- > 0;)
        (void)mark_ready(it, 1, i, threes, PL_REPLACE, 1);
}

static inline void close_wait_and_order(const pair *it)
{
    close_and_wait(it);
    for (int r = 0; r < N_RANKS; r++)
        CHECK_OK(pl_reducer_order(it->reducers[r]));
}

/* Whether all parameters hold a value. */
static inline int all_hold(const pair *it, float value)
{
    int are_held = 1;
    for (size_t i = 0; i < N_PARAMS; i++)
        are_held &= holds(it, i, value);
    return are_held;
}

/* Rank 0's gradients of ones, ready on one stream, in the order of buckets. */
static inline void all_ready_of_rank_0(const pair *it, gradient *data, int on)
{
    for (size_t i = N_PARAMS; i-- > 0;) {
        fill(data[i], 1);
        (void)mark_ready(it, 0, i, data[i], PL_REPLACE, on);
    }
}

/* A step on stream 1, which shows the order 3 2 | 1 0; then the next step begins. */
static inline void learn(const pair *it)
{
    gradient data[N_PARAMS];
    begin_both(it);
    all_ready_of_rank_0(it, data, 1);
    all_ready_of_rank_1(it);
    close_wait_and_order(it);
    CHECK(all_hold(it, 2));
    end_both(it);
    begin_both(it);
    forget_trace();
}

#endif
