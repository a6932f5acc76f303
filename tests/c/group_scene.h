/* group_scene.h - a group of devices on the fake, beside a model of what it must do.
 *
 * Each member has an arena in device memory, and a mirror of it in host memory.  What a
 * test enqueues on the devices, it does at once in the mirrors.  At the end, when all
 * work is done, the two must be equal, except for undefined bytes (the gaps between
 * packed tensors).  A read copies a piece to the arena's tail, which nothing else
 * writes, so that the end also compares what each read saw.
 */
#ifndef PLT_GROUP_SCENE_H
#define PLT_GROUP_SCENE_H

#include <stdlib.h>
#include <string.h>

#include "backend/cuda.h"
#include "check.h"
#include "fake/fake.h"
#include "naive_sum.h"
#include "replicas/device_group.h"

#include "draw.h" /* last: a name there is a variable elsewhere */

enum {
    SCENE_MOST = 4,    /* members */
    SCENE_HALF = 2048, /* bytes; member 0 broadcasts its lower half */
    SCENE_ARENA = 2 * SCENE_HALF,
    SCENE_READS = 16 * SCENE_HALF,
    SCENE_RING = 4096,
    SCENE_ROOM = 512, /* per member */
    SCENE_SUMS = 256,
};

typedef struct scene_member {
    int device;
    pl_backend *backend;
    CUstream stream; /* NULL: the legacy default one */
    char *memory;
    void *room_memory;
    void *sums_memory;
    size_t n_read; /* bytes of the tail that are used */
    unsigned char bytes[SCENE_ARENA + SCENE_READS];
    unsigned char is_known[SCENE_ARENA + SCENE_READS];
} scene_member;

typedef struct scene {
    uint64_t seed;
    draw random;
    int n;
    pl_stream *streams[SCENE_MOST];
    void *ring_memory;
    pli_ring ring; /* in it */
    pli_room rooms[SCENE_MOST];
    pli_room sums[SCENE_MOST];
    pli_device_group *group;
    pli_gradient_sum *sum;
    scene_member members[SCENE_MOST];
} scene;

/* How members are distributed over devices. */
typedef enum scene_devices { SCENE_APART, SCENE_ONE, SCENE_PAIRS } scene_devices;

typedef struct scene_options {
    uint64_t seed;
    fake_schedule schedule;
    int n;
    scene_devices devices;
    unsigned own_streams;             /* bits: members with a stream of their own */
    int peers;                        /* 0: none, 1: all, 2: all but devices 0 and 1 */
    size_t passed_bytes, shard_bytes; /* 0: the group's own */
    int unshares;                     /* member 0's memory is not shared */
} scene_options;

static inline size_t scene_below(scene *it, size_t n)
{
    return draw_below(&it->random, n);
}

static inline void scene_enter(const scene_member *it, pli_cuda_scope *scope)
{
    if (!CHECK_OK(pli_cuda_enter(it->backend, scope)))
        exit(2);
}

/* ---- work on devices and mirrors ------------------------------------------------ */

static inline void scene_write(scene *it, int member, size_t at, const void *bytes,
                               size_t n_bytes)
{
    scene_member *const m = &it->members[member];
    pli_cuda_scope scope;
    scene_enter(m, &scope);
    CHECK(cuMemcpyHtoDAsync((CUdeviceptr)(uintptr_t)(m->memory + at), bytes, n_bytes,
                            m->stream) == 0);
    pli_cuda_leave(m->backend, &scope);
    memcpy(m->bytes + at, bytes, n_bytes);
    memset(m->is_known + at, 1, n_bytes);
}

/* Fills with random bytes. */
static inline void scene_fill(scene *it, int member, size_t at, size_t n_bytes)
{
    unsigned char bytes[SCENE_ARENA];
    for (size_t i = 0; i < n_bytes; i++)
        bytes[i] = (unsigned char)scene_below(it, 256);
    scene_write(it, member, at, bytes, n_bytes);
}

/* Fills with numbers whose sums round, and are finite. */
static inline void scene_fill_floats(scene *it, int member, size_t at, pl_dtype dtype,
                                     size_t n_elems)
{
    unsigned char bytes[SCENE_ARENA];
    const pl_dtype part = value_part(dtype);
    const size_t n_bytes = n_elems * pl_dtype_bytes(dtype);
    for (size_t i = 0; i < n_bytes; i += pl_dtype_bytes(part)) {
        const uint64_t bits = modest_bits(part);
        memcpy(bytes + i, &bits, pl_dtype_bytes(part)); /* little endian */
    }
    scene_write(it, member, at, bytes, n_bytes);
}

static inline void scene_read(scene *it, int member, size_t at, size_t n_bytes)
{
    scene_member *const m = &it->members[member];
    const size_t to = SCENE_ARENA + m->n_read;
    pli_cuda_scope scope;
    if (m->n_read + n_bytes > SCENE_READS)
        return;
    scene_enter(m, &scope);
    CHECK(cuMemcpyDtoDAsync((CUdeviceptr)(uintptr_t)(m->memory + to),
                            (CUdeviceptr)(uintptr_t)(m->memory + at), n_bytes,
                            m->stream) == 0);
    pli_cuda_leave(m->backend, &scope);
    memcpy(m->bytes + to, m->bytes + at, n_bytes);
    memcpy(m->is_known + to, m->is_known + at, n_bytes);
    m->n_read += n_bytes;
}

/* Copies in the mirrors only. */
static inline void scene_mirror_copy(scene *it, int target, size_t to, int source,
                                     size_t from, size_t n_bytes)
{
    const scene_member *const s = &it->members[source];
    scene_member *const t = &it->members[target];
    memmove(t->bytes + to, s->bytes + from, n_bytes);
    memmove(t->is_known + to, s->is_known + from, n_bytes);
}

static inline void *scene_at(const scene *it, int member, size_t at)
{
    return it->members[member].memory + at;
}

/* A member's stream writes over memory for a long time: an allocation from the cache
 * then gets memory whose last use is still in flight. */
static inline void scene_spoil(scene *it, int member, const void *memory,
                               size_t n_bytes)
{
    enum { N_STEPS = 16 };
    const scene_member *const m = &it->members[member];
    const size_t step = n_bytes / N_STEPS;
    pli_cuda_scope scope;
    scene_enter(m, &scope);
    for (size_t i = 0; i < N_STEPS; i++)
        CHECK(cuMemsetD8Async((CUdeviceptr)(uintptr_t)memory + i * step, 0x5a, step,
                              m->stream) == 0);
    pli_cuda_leave(m->backend, &scope);
}

static inline void scene_spoil_ring(scene *it)
{
    scene_spoil(it, 0, it->ring_memory, SCENE_RING);
}

static inline void scene_spoil_room(scene *it, int member)
{
    scene_spoil(it, member, it->members[member].room_memory, SCENE_ROOM);
}

static inline void scene_spoil_sums(scene *it, int member)
{
    scene_spoil(it, member, it->members[member].sums_memory, SCENE_SUMS);
}

/* ---- sums ----------------------------------------------------------------------- */

/* A block of gradients of one member. */
typedef struct scene_row {
    int member;
    const void *memory;
} scene_row;

/* Adds up rows, which streams have written; all streams wait for the sum.  The group's
 * rooms may have been used before. */
static inline pl_status scene_sum(scene *it, const scene_row *rows, int n_rows,
                                  const pl_move *to)
{
    pl_status st = PL_OK;
    PL_TRY(pli_device_group_broadcast(it->group, it->streams, NULL, 0, it->ring, NULL));
    PL_TRY(pli_device_group_fence(it->group, it->streams));
    for (int r = 0; r < n_rows; r++)
        PL_TRY(pli_gradient_sum_pack(it->sum, rows[r].member,
                                     it->streams[rows[r].member], NULL, 0,
                                     rows[r].memory));
    PL_TRY(pli_gradient_sum_begin(it->sum, to, it->rooms));
    PL_TRY(pli_gradient_sum_end(it->sum, it->streams[0]));
    PL_TRY(pli_device_group_settle(it->group, it->streams));
done:
    return st;
}

/* ---- life ----------------------------------------------------------------------- */

static inline int scene_device_of(const scene_options *options, int member)
{
    if (options->devices == SCENE_ONE)
        return 0;
    return options->devices == SCENE_PAIRS ? member % 2 : member;
}

static inline void scene_reset(const scene_options *options)
{
    fake_options fake = fake_defaults();
    fake.seed = options->seed;
    fake.schedule = options->schedule;
    fake.devices = SCENE_MOST;
    fake.protect = options->seed % 4 == 3; /* it takes longer */
    fake.alloc_waits = 0;
    fake.quiet = 1;
    fake.peers = options->peers != 0;
    fake_reset(&fake);
    if (options->peers == 2)
        fake_part(0, 1);
}

static inline int scene_open_member(scene_member *it, int device, int has_stream)
{
    const pli_cuda_options options = {.device = device, .driver = fake_path()};
    pli_cuda_scope scope;
    it->device = device;
    if (!CHECK_OK(pli_cuda_backend_create(&options, &it->backend)) ||
        !CHECK_OK(it->backend->ops->alloc(it->backend, SCENE_ARENA + SCENE_READS,
                                          (void **)&it->memory)) ||
        !CHECK_OK(it->backend->ops->alloc(it->backend, SCENE_ROOM, &it->room_memory)) ||
        !CHECK_OK(it->backend->ops->alloc(it->backend, SCENE_SUMS, &it->sums_memory)))
        return 0;
    scene_enter(it, &scope);
    if (has_stream)
        CHECK(cuStreamCreate(&it->stream, CU_STREAM_NON_BLOCKING) == 0);
    pli_cuda_leave(it->backend, &scope);
    return 1;
}

/* Makes all that a group needs; the caller makes the group itself. */
static inline scene *scene_open_without_group(scene_options options)
{
    scene *it = calloc(1, sizeof *it);
    if (it == NULL)
        exit(2);
    scene_reset(&options);
    it->seed = options.seed;
    it->random = draw_of(options.seed);
    random_state = options.seed * 2 + 88172645463325252u;
    it->n = options.n;
    for (int k = 0; k < it->n; k++) {
        scene_member *const m = &it->members[k];
        if (!scene_open_member(m, scene_device_of(&options, k),
                               options.own_streams >> k & 1))
            exit(2);
        it->streams[k] = (pl_stream *)(void *)m->stream;
        it->rooms[k] = (pli_room){m->room_memory, 192};
        it->sums[k] = (pli_room){m->sums_memory, SCENE_SUMS};
        scene_fill(it, k, 0, SCENE_ARENA);
        scene_spoil_room(it, k);
    }
    pl_backend *const first = it->members[0].backend;
    if (!CHECK_OK(first->ops->alloc(first, SCENE_RING, &it->ring_memory)))
        exit(2);
    it->ring = (pli_ring){it->ring_memory, 192};
    scene_spoil_ring(it);
    return it;
}

static inline pl_status scene_make_group(scene *it)
{
    pl_backend *backends[SCENE_MOST] = {NULL};
    for (int k = 0; k < it->n; k++)
        backends[k] = it->members[k].backend;
    return pli_device_group_create(backends, it->n, &it->group);
}

static inline scene *scene_open(scene_options options)
{
    scene *it = scene_open_without_group(options);
    if (!CHECK_OK(scene_make_group(it)) ||
        !CHECK_OK(pli_gradient_sum_create(it->group, &it->sum)))
        exit(2);
    if (options.passed_bytes > 0)
        it->group->passed_bytes = options.passed_bytes;
    if (options.shard_bytes > 0)
        it->group->shard_bytes = options.shard_bytes;
    if (options.unshares)
        fake_unshare(it->members[0].memory);
    return it;
}

/* Executes all work: in any valid order, or member by member. */
static inline void scene_execute(scene *it)
{
    uint32_t order[SCENE_MOST];
    draw_order(&it->random, order, (size_t)it->n);
    if (scene_below(it, 2) == 0)
        (void)fake_step(INT32_MAX);
    for (int i = 0; i < it->n; i++) {
        pl_backend *const backend = it->members[order[i]].backend;
        CHECK_OK(backend->ops->synchronize(backend, it->streams[order[i]]));
    }
    CHECK(fake_synchronize_all());
}

/* Compares the devices' memory, when all is done, with the mirrors. */
static inline void scene_compare(scene *it)
{
    scene_execute(it);
    fake_show_memory();
    for (int k = 0; k < it->n; k++) {
        const scene_member *const m = &it->members[k];
        for (size_t i = 0; i < SCENE_ARENA + m->n_read; i++) {
            if (!m->is_known[i] || (unsigned char)m->memory[i] == m->bytes[i])
                continue;
            CHECK(0);
            CHECK_MORE("seed %d: member %d, byte %zu of %s", (int)it->seed, k,
                       i < SCENE_ARENA ? i : i - SCENE_ARENA,
                       i < SCENE_ARENA ? "its arena" : "what it has read");
            break;
        }
    }
    fake_hide_memory();
}

/* Checks that all is done, and equals the mirrors; then frees all. */
static inline void scene_close(scene *it)
{
    pl_backend *const first = it->members[0].backend;
    scene_compare(it);
    pli_gradient_sum_destroy(it->sum);
    pli_device_group_destroy(it->group);
    first->ops->free(first, it->ring_memory);
    for (int k = 0; k < it->n; k++) {
        scene_member *const m = &it->members[k];
        pli_cuda_scope scope;
        scene_enter(m, &scope);
        if (m->stream != NULL)
            CHECK(cuStreamDestroy(m->stream) == 0);
        pli_cuda_leave(m->backend, &scope);
        m->backend->ops->free(m->backend, m->memory);
        m->backend->ops->free(m->backend, m->room_memory);
        m->backend->ops->free(m->backend, m->sums_memory);
    }
    for (int k = 0; k < it->n; k++)
        pli_backend_destroy(it->members[k].backend);
    if (!CHECK(fake_errors() == 0))
        CHECK_MORE("seed %d: %s", (int)it->seed, fake_error(0));
    CHECK(fake_live_objects() == 0);
    CHECK(fake_context_depth() == 0);
    free(it);
}

#define SCENE_TEST(options, name)                                                      \
    TEST_BY(name, scene *it, {                                                         \
        scene *its = scene_open(options);                                              \
        name##_by(its);                                                                \
        scene_close(its);                                                              \
    })

#endif
