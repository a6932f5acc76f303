/* test_device_group.c - what a group of devices must do, in the order of streams.
 *
 *     test_device_group [seeds [first seed]]
 */
#include <pthread.h>
#include <unistd.h>

#include "fake/host_kernels.h"
#include "group_scene.h"
#include "seeds.h"

#include "core/alloc.h"

enum { N_SEEDS = 400, N_CALLS = 16, MOST_MOVES = 4, MOST_SEGMENTS = 8 };

/* ---- random calls --------------------------------------------------------------- */

/* A member reads, and overwrites, the data that a call reads or writes. */
static void use(scene *it, int member, size_t at, size_t n_bytes)
{
    if (scene_below(it, 2) == 0)
        scene_read(it, member, at, n_bytes);
    if (scene_below(it, 3) == 0)
        scene_fill(it, member, at, n_bytes);
}

typedef struct segments {
    pli_segment all[MOST_SEGMENTS];
    pl_move moves[MOST_SEGMENTS][MOST_MOVES];
    void *targets[MOST_SEGMENTS][SCENE_MOST];
    size_t at[MOST_SEGMENTS][SCENE_MOST]; /* of targets, in the arenas */
} segments;

static size_t offset_of(const scene *it, const void *memory)
{
    return (size_t)((const char *)memory - it->members[0].memory);
}

/* Some tensors with gaps between them, some empty, at multiples of `step`; or one
 * tensor of any size. */
static void draw_moves(scene *it, pli_segment *segment, pl_move *moves, size_t step)
{
    const int is_large = scene_below(it, 3) == 0;
    const size_t most = it->ring.slot_bytes;
    size_t at = 0;
    segment->moves = moves;
    segment->n_moves = is_large ? 1 : scene_below(it, MOST_MOVES + 1);
    for (size_t i = 0; i < segment->n_moves; i++) {
        const size_t gap = is_large ? 0 : scene_below(it, 3) * 8;
        const size_t room = is_large ? 800 : most / MOST_MOVES - 16;
        const size_t n = scene_below(it, 4) == 0 ? 0 : scene_below(it, room / 4);
        at += gap;
        moves[i] = (pl_move){.to = (char *)NULL + at,
                             .from = scene_at(it, 0, 4 * scene_below(it, 50)),
                             .dtype = PL_F32,
                             .n_elems = n};
        at += is_large ? 4 * n : (4 * n + step - 1) / step * step;
    }
    segment->n_bytes = at + (is_large ? 0 : scene_below(it, 2) * 8);
}

/* Separate targets, if there is room. */
static void draw_targets(scene *it, segments *s, size_t i)
{
    s->all[i].targets = s->targets[i];
    for (int k = 0; k < it->n; k++) {
        const size_t last = i > 0 ? s->at[i - 1][k] + s->all[i - 1].n_bytes : 0;
        s->at[i][k] = last + scene_below(it, 40);
        s->targets[i][k] = NULL;
        if (k > 0 && scene_below(it, 5) != 0 &&
            s->at[i][k] + s->all[i].n_bytes <= SCENE_ARENA)
            s->targets[i][k] = scene_at(it, k, s->at[i][k]);
    }
}

static void mirror_segment(scene *it, const segments *s, size_t i)
{
    const pli_segment *const segment = &s->all[i];
    for (int k = 1; k < it->n; k++) {
        if (segment->targets[k] == NULL)
            continue;
        memset(it->members[k].is_known + s->at[i][k], 0, segment->n_bytes);
        for (size_t j = 0; j < segment->n_moves; j++)
            scene_mirror_copy(it, k, s->at[i][k] + (uintptr_t)segment->moves[j].to, 0,
                              offset_of(it, segment->moves[j].from),
                              4 * segment->moves[j].n_elems);
    }
}

static size_t draw_segments(scene *it, segments *s, size_t step)
{
    const size_t n = scene_below(it, MOST_SEGMENTS + 1);
    for (size_t i = 0; i < n; i++) {
        draw_moves(it, &s->all[i], s->moves[i], step);
        draw_targets(it, s, i);
    }
    return n;
}

static void use_segments(scene *it, const segments *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (int k = 1; k < it->n; k++)
            if (s->targets[i][k] != NULL && s->all[i].n_bytes > 0)
                use(it, k, s->at[i][k], s->all[i].n_bytes);
    if (scene_below(it, 3) == 0)
        scene_fill(it, 0, scene_below(it, 256), 256);
}

static void draw_broadcast(scene *it)
{
    segments s = {0};
    const size_t n = draw_segments(it, &s, 4);
    CHECK_OK(
        pli_device_group_broadcast(it->group, it->streams, s.all, n, it->ring, NULL));
    for (size_t i = 0; i < n; i++)
        mirror_segment(it, &s, i);
    use_segments(it, &s, n);
}

/* Repeated refreshes, while single bytes change on either side. */
static void draw_refreshes(scene *it)
{
    segments s = {0};
    const size_t n = draw_segments(it, &s, 8);
    do {
        CHECK_OK(pli_device_group_broadcast(it->group, it->streams, s.all, n, it->ring,
                                            it->sums));
        for (size_t i = 0; i < n; i++)
            mirror_segment(it, &s, i);
        for (int k = 0; k < it->n; k++) {
            if (scene_below(it, 2) == 0)
                scene_fill(it, k, scene_below(it, 500), 1);
            if (scene_below(it, 4) == 0)
                scene_spoil_sums(it, k);
        }
    } while (scene_below(it, 3) != 0);
    use_segments(it, &s, n);
}

typedef struct rows {
    scene_row all[SCENE_MOST];
    size_t at[SCENE_MOST];
    int n;
    pl_move to;
    size_t to_at, n_bytes;
} rows;

static void draw_rows(scene *it, rows *r, pl_dtype dtype, size_t n_elems)
{
    const size_t given = 1 + scene_below(it, (1u << (it->n - 1)) - 1);
    r->n_bytes = n_elems * pl_dtype_bytes(dtype);
    for (int k = 1; k < it->n; k++) {
        if (!(given >> (k - 1) & 1))
            continue;
        r->at[r->n] = 16 * scene_below(it, 16);
        r->all[r->n] = (scene_row){k, scene_at(it, k, r->at[r->n])};
        scene_fill_floats(it, k, r->at[r->n++], dtype, n_elems);
    }
    r->to_at = SCENE_HALF + 16 * scene_below(it, 16);
    r->to = (pl_move){scene_at(it, 0, r->to_at), NULL, dtype, n_elems};
}

static void mirror_sum(scene *it, const rows *r)
{
    const unsigned char *in[SCENE_MOST];
    scene_member *const first = &it->members[0];
    for (int i = 0; i < r->n; i++)
        in[i] = it->members[r->all[i].member].bytes + r->at[i];
    if (r->n == 1)
        memcpy(first->bytes + r->to_at, in[0], r->n_bytes);
    else
        naive_reduce(in, r->n, r->n_bytes, r->to.dtype, PL_SUM,
                     first->bytes + r->to_at);
    memset(first->is_known + r->to_at, 1, r->n_bytes);
}

static void draw_sum(scene *it)
{
    static const size_t sizes[] = {0, 1, 3, 12, 17, 48, 100};
    const pl_dtype dtype = (pl_dtype)(PL_F16 + scene_below(it, PL_N_DTYPES - PL_F16));
    rows r = {.n = 0};
    draw_rows(it, &r, dtype, sizes[scene_below(it, sizeof sizes / sizeof sizes[0])]);
    CHECK_OK(scene_sum(it, r.all, r.n, &r.to));
    mirror_sum(it, &r);
    if (r.n_bytes == 0)
        return;
    for (int i = 0; i < r.n; i++)
        if (scene_below(it, 2) == 0)
            scene_fill(it, r.all[i].member, r.at[i], r.n_bytes);
    for (int k = 0; k < it->n; k++)
        if (scene_below(it, 4) == 0)
            scene_spoil_room(it, k);
    use(it, 0, r.to_at, r.n_bytes);
}

/* Copies from one half of an arena to the other half of any. */
static void draw_copy(scene *it)
{
    const int source = (int)scene_below(it, (size_t)it->n);
    const int target = (int)scene_below(it, (size_t)it->n);
    const size_t half = scene_below(it, 2) * SCENE_HALF;
    const size_t n = scene_below(it, MOST_MOVES + 1);
    size_t from[MOST_MOVES], to[MOST_MOVES];
    pl_move moves[MOST_MOVES] = {{NULL}};
    for (size_t i = 0; i < n; i++) {
        from[i] = SCENE_HALF - half + scene_below(it, SCENE_HALF / 2);
        to[i] = half + i * SCENE_HALF / MOST_MOVES;
        moves[i] = (pl_move){scene_at(it, target, to[i]), scene_at(it, source, from[i]),
                             PL_F32, scene_below(it, SCENE_HALF / MOST_MOVES / 4)};
    }
    CHECK_OK(pli_device_group_copy(it->group, it->streams, source, target, moves, n));
    for (size_t i = 0; i < n; i++)
        scene_mirror_copy(it, target, to[i], source, from[i], 4 * moves[i].n_elems);
    for (size_t i = 0; i < n; i++) {
        if (moves[i].n_elems > 0 && scene_below(it, 2) == 0)
            scene_fill(it, source, from[i], 4 * moves[i].n_elems);
        if (moves[i].n_elems > 0)
            use(it, target, to[i], 4 * moves[i].n_elems);
    }
}

/* A ring that overlaps the last one.  Its data may be read, or member 0's stream may
 * use its memory.  Rooms may have any size. */
static void draw_ring(scene *it)
{
    pli_ring *const ring = &it->ring;
    ring->memory = (char *)ring->memory + PL_CACHE_LINE;
    ring->slot_bytes = PL_CACHE_LINE * (3 + scene_below(it, 4));
    if (scene_below(it, 2) == 0)
        scene_spoil_ring(it);
    for (int k = 0; k < it->n; k++)
        it->rooms[k].n_bytes = PL_CACHE_LINE * (3 + scene_below(it, 6));
}

static void draw_call(scene *it)
{
    switch (scene_below(it, 9)) {
    case 0:
    case 1:
        draw_broadcast(it);
        break;
    case 2:
    case 3:
        draw_sum(it);
        break;
    case 4:
    case 5:
        draw_copy(it);
        break;
    case 6:
    case 7:
        draw_refreshes(it);
        break;
    default:
        draw_ring(it);
        break;
    }
}

static void run_drawn(uint64_t seed, fake_schedule schedule)
{
    draw random = draw_of(seed);
    scene_options options = {.seed = seed, .schedule = schedule};
    options.n = 2 + (int)draw_below(&random, 3);
    options.devices = (scene_devices)draw_below(&random, 3);
    options.own_streams = (unsigned)draw_below(&random, 16);
    options.peers = (int)draw_below(&random, 3);
    options.passed_bytes = (size_t[]){1, 150, 300, 0}[draw_below(&random, 4)];
    options.shard_bytes = (size_t[]){1, 100, 300, 0}[draw_below(&random, 4)];
    options.unshares = draw_below(&random, 4) == 0;
    scene *it = scene_open(options);
    for (int i = 0; i < N_CALLS; i++)
        draw_call(it);
    scene_close(it);
}

/* Stops at the first seed that fails. */
static void run_drawn_programs(fake_schedule schedule)
{
    EACH_SEED (seed, N_SEEDS) {
        run_drawn(seed, schedule);
        if (atomic_load(&check_n_failures) > 0)
            break;
    }
}

TEST(drawn_calls_happen_in_the_order_of_their_streams_however_late)
{
    run_drawn_programs(FAKE_LATE);
}

TEST(drawn_calls_happen_in_the_order_of_their_streams_at_any_time)
{
    run_drawn_programs(FAKE_RANDOM);
}

/* ---- single calls --------------------------------------------------------------- */

static scene_options options_of(int n, fake_schedule schedule)
{
    return (scene_options){
        .seed = 7, .schedule = schedule, .n = n, .own_streams = 0xa, .peers = 1};
}

/* More tensors than one launch takes. */
SCENE_TEST(options_of(3, FAKE_LATE), a_segment_may_be_of_hundreds_of_tensors)
{
    enum { N = 150 };
    pl_move moves[N];
    void *const targets[] = {NULL, scene_at(it, 1, 8), scene_at(it, 2, 100)};
    const pli_segment segment = {moves, N, N, targets};
    for (size_t i = 0; i < N; i++) {
        moves[i] = (pl_move){(char *)NULL + i, scene_at(it, 0, 3 * i), PL_U8, 1};
        scene_mirror_copy(it, 1, 8 + i, 0, 3 * i, 1);
        scene_mirror_copy(it, 2, 100 + i, 0, 3 * i, 1);
    }
    CHECK_OK(pli_device_group_broadcast(it->group, it->streams, &segment, 1, it->ring,
                                        NULL));
}

/* Two members read three slots; then one slot of a different size lies where all these
 * did, and the first member needs it at once. */
static void move_the_ring(uint64_t seed)
{
    scene_options options = options_of(3, FAKE_LATE);
    options.seed = seed;
    scene *it = scene_open(options);
    void *targets[4][3] = {{NULL}};
    pl_move moves[4][2];
    pli_segment each[4];
    for (size_t i = 0; i < 4; i++) {
        const size_t half = i < 3 ? 96 : 240;
        moves[i][0] = (pl_move){NULL, scene_at(it, 0, 100 * i), PL_U8, half};
        moves[i][1] = (pl_move){(char *)NULL + half, scene_at(it, 0, 0), PL_U8, half};
        each[i] = (pli_segment){moves[i], 2, 2 * half, targets[i]};
        for (int k = 1; k < (i < 3 ? 3 : 2); k++) {
            targets[i][k] = scene_at(it, k, 200 * i);
            scene_mirror_copy(it, k, 200 * i, 0, 100 * i, half);
            scene_mirror_copy(it, k, 200 * i + half, 0, 0, half);
        }
    }
    const pli_ring next = {it->ring.memory, 3 * it->ring.slot_bytes};
    CHECK_OK(
        pli_device_group_broadcast(it->group, it->streams, each, 3, it->ring, NULL));
    CHECK_OK(
        pli_device_group_broadcast(it->group, it->streams, &each[3], 1, next, NULL));
    scene_close(it);
}

TEST(a_ring_that_moves_waits_for_who_reads_the_last_one)
{
    for (uint64_t seed = 1; seed <= 20; seed++)
        move_the_ring(seed);
}

/* The values include specials, so they are compared here, element by element. */
static void check_sum(scene *it, pl_dtype dtype, int n_rows, size_t n_elems)
{
    const size_t n_bytes = n_elems * pl_dtype_bytes(dtype);
    unsigned char found[SCENE_ARENA], expected[SCENE_ARENA],
        row[SCENE_MOST][SCENE_ARENA];
    const unsigned char *in[SCENE_MOST];
    scene_row all[SCENE_MOST];
    const pl_move to = {scene_at(it, 0, SCENE_HALF), NULL, dtype, n_elems};
    for (int r = 0; r < n_rows; r++) {
        naive_fill(row[r], n_bytes, dtype);
        in[r] = row[r];
        all[r] = (scene_row){r + 1, scene_at(it, r + 1, 0)};
        scene_write(it, r + 1, 0, row[r], n_bytes);
    }
    if (n_rows == 1)
        memcpy(expected, row[0], n_bytes);
    else
        naive_reduce(in, n_rows, n_bytes, dtype, PL_SUM, expected);
    CHECK_OK(scene_sum(it, all, n_rows, &to));
    for (int r = 0; r < n_rows; r++)
        scene_fill(it, r + 1, 0, n_bytes);
    CHECK_OK(
        pli_cuda_read(it->members[0].backend, found, to.to, n_bytes, it->streams[0]));
    memset(it->members[0].is_known + SCENE_HALF, 0, n_bytes);
    const long at = first_difference(found, expected, n_bytes, dtype);
    if (!CHECK(at < 0))
        CHECK_MORE("%s, %d rows of %zu: element %ld", pl_dtype_text(dtype), n_rows,
                   n_elems, at);
}

TEST(rows_of_any_float_are_summed_in_their_order_and_rounded_once)
{
    static const size_t n_bytes[] = {0, 16, 48, 64, 192, 208, 1008};
    for (int n_rows = 1; n_rows < SCENE_MOST; n_rows++) {
        scene *it = scene_open(options_of(SCENE_MOST, FAKE_LATE));
        for (int dtype = PL_F16; dtype < PL_N_DTYPES; dtype++)
            for (size_t s = 0; s < sizeof n_bytes / sizeof n_bytes[0]; s++)
                check_sum(it, (pl_dtype)dtype, n_rows,
                          n_bytes[s] / pl_dtype_bytes((pl_dtype)dtype));
        scene_close(it);
    }
}

/* A member continues while another one's stream is far behind. */
SCENE_TEST(options_of(3, FAKE_LATE), members_do_not_wait_for_one_another)
{
    void *const targets[] = {NULL, scene_at(it, 1, 0), scene_at(it, 2, 0)};
    const pl_move move = {NULL, scene_at(it, 0, 0), PL_F32, 20};
    const pli_segment segment = {&move, 1, 96, targets};
    unsigned char word = 0;
    for (int k = 1; k < 3; k++) {
        scene_mirror_copy(it, k, 0, 0, 0, 80);
        memset(it->members[k].is_known + 80, 0, 16);
    }
    CHECK(fake_synchronize_all());
    scene_fill(it, 1, 500, 1);
    CHECK_OK(pli_device_group_broadcast(it->group, it->streams, &segment, 1, it->ring,
                                        NULL));
    CHECK_OK(
        pli_cuda_read(it->members[2].backend, &word, targets[2], 1, it->streams[2]));
    CHECK(word == it->members[0].bytes[0]);
    CHECK(cuStreamQuery(it->members[1].stream) == CUDA_ERROR_NOT_READY);
}

/* ---- data that members have already --------------------------------------------- */

/* A segment of two tensors, and one of a single tensor, of 96 and 100 bytes. */
typedef struct pair {
    pl_move moves[3];
    void *targets[2][SCENE_MOST];
    pli_segment all[2];
} pair;

static void make_pair(scene *it, pair *out)
{
    out->moves[0] = (pl_move){NULL, scene_at(it, 0, 4), PL_F32, 8};
    out->moves[1] = (pl_move){(char *)NULL + 64, scene_at(it, 0, 100), PL_F32, 8};
    out->moves[2] = (pl_move){NULL, scene_at(it, 0, 200), PL_U8, 100};
    out->targets[0][0] = out->targets[1][0] = NULL;
    for (int k = 1; k < it->n; k++) {
        out->targets[0][k] = scene_at(it, k, 8);
        out->targets[1][k] = scene_at(it, k, 200);
    }
    out->all[0] = (pli_segment){out->moves, 2, 96, out->targets[0]};
    out->all[1] = (pli_segment){out->moves + 2, 1, 100, out->targets[1]};
}

/* Bytes moved between devices by copies, or by kernels. */
static size_t n_sent(const scene *it, int of_kernels)
{
    int64_t n = 0;
    if (of_kernels)
        return host_kernel_fetched();
    for (int from = 0; from < it->n; from++)
        for (int to = 0; to < it->n; to++)
            n += from != to ? fake_sent_bytes(from, to) : 0;
    return (size_t)n;
}

static void refresh_pair(scene *it, const pair *p, size_t n_copied, size_t n_fetched)
{
    const size_t before[] = {n_sent(it, 0), n_sent(it, 1)};
    CHECK_OK(pli_device_group_broadcast(it->group, it->streams, p->all, 2, it->ring,
                                        it->sums));
    for (int k = 1; k < it->n; k++) {
        scene_mirror_copy(it, k, 8, 0, 4, 32);
        memset(it->members[k].is_known + 40, 0, 32);
        scene_mirror_copy(it, k, 72, 0, 100, 32);
        scene_mirror_copy(it, k, 200, 0, 200, 100);
    }
    scene_compare(it);
    if (!CHECK(n_sent(it, 0) - before[0] == n_copied) ||
        !CHECK(n_sent(it, 1) - before[1] == n_fetched))
        CHECK_MORE("%zu and %zu bytes", n_sent(it, 0) - before[0],
                   n_sent(it, 1) - before[1]);
}

enum { SUMS = 2 * 8, PAIR = 64 + 100, BLOCKS = 96 + 100 };

SCENE_TEST(options_of(3, FAKE_LATE), only_what_has_changed_travels)
{
    pair p;
    make_pair(it, &p);
    refresh_pair(it, &p, 2 * SUMS, 2 * PAIR);
    refresh_pair(it, &p, 2 * SUMS, 0);
    scene_fill(it, 0, 120, 1); /* in the first segment's second tensor */
    refresh_pair(it, &p, 2 * SUMS, 2 * 64);
    scene_fill(it, 2, 210, 1); /* in a member's second segment */
    refresh_pair(it, &p, 2 * SUMS, 100);
    scene_fill(it, 1, 50, 1); /* between tensors */
    refresh_pair(it, &p, 2 * SUMS, 0);
}

TEST(all_travels_where_kernels_cannot_read_the_model)
{
    static const struct {
        int peers, unshares, n_far; /* members on another device */
        scene_devices devices;
        int sends;
    } table[] = {{0, 0, 2, SCENE_APART, 1}, {1, 1, 2, SCENE_APART, 1},
                 {2, 0, 2, SCENE_APART, 1}, /* member 1 has no access */
                 {0, 1, 0, SCENE_ONE, 0},   {1, 0, 1, SCENE_PAIRS, 0},
                 {1, 1, 1, SCENE_PAIRS, 1}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        scene_options options = options_of(3, FAKE_LATE);
        options.peers = table[i].peers;
        options.unshares = table[i].unshares;
        options.devices = table[i].devices;
        pair p;
        scene *it = scene_open(options);
        make_pair(it, &p);
        const size_t n_far = (size_t)table[i].n_far;
        for (int again = 0; again < 2; again++)
            refresh_pair(it, &p, n_far * (table[i].sends ? BLOCKS : SUMS),
                         again || table[i].sends ? 0 : 2 * PAIR);
        scene_close(it);
    }
}

/* Member 0's access to the other's memory does not matter. */
TEST(all_travels_where_a_device_has_too_many_peers)
{
    for (int nth = 1; nth <= 2; nth++) {
        pair p;
        scene *it = scene_open_without_group(options_of(2, FAKE_LATE));
        fake_fail("cuCtxEnablePeerAccess", nth, 711);
        CHECK_OK(scene_make_group(it));
        make_pair(it, &p);
        refresh_pair(it, &p, nth == 1 ? SUMS : BLOCKS, nth == 1 ? PAIR : 0);
        scene_close(it);
    }
}

TEST(sums_without_room_are_refused)
{
    for (int k = 0; k < 3; k++) {
        pair p;
        scene *it = scene_open(options_of(3, FAKE_LATE));
        make_pair(it, &p);
        it->sums[k].n_bytes = k == 0 ? 15 : 31;
        CHECK_FAILS(pli_device_group_broadcast(it->group, it->streams, p.all, 2,
                                               it->ring, it->sums),
                    PL_EINVAL, "have no room for 2 checksums");
        it->sums[k].n_bytes++;
        refresh_pair(it, &p, 2 * SUMS, 2 * PAIR);
        scene_close(it);
    }
}

/* More tensors than one launch takes; every fifth has a changed byte. */
SCENE_TEST(options_of(2, FAKE_LATE), a_refresh_may_be_of_thousands_of_tensors)
{
    enum { N = 2100, EACH = 5 };
    pl_move moves[N];
    void *const targets[] = {NULL, scene_at(it, 1, 0)};
    const pli_segment segment = {moves, N, 8 * (N / EACH), targets};
    for (size_t i = 0; i < N; i++) {
        const size_t offset = 8 * (i / EACH), n = i % EACH == 0;
        moves[i] = (pl_move){(char *)NULL + offset, scene_at(it, 0, i), PL_U8, n};
        scene_mirror_copy(it, 1, offset, 0, i, n);
    }
    CHECK_OK(pli_device_group_broadcast(it->group, it->streams, &segment, 1, it->ring,
                                        it->sums));
}

/* Memory may be freed once member 0's stream has reached it. */
TEST(a_broadcast_is_over_with_member_0s_stream)
{
    scene_options options = options_of(3, FAKE_LATE);
    options.own_streams = 7;
    scene *it = scene_open(options);
    void *const nobody[] = {NULL, NULL, NULL};
    const pl_move moves[] = {{NULL, scene_at(it, 0, 0), PL_U8, 20},
                             {(char *)NULL + 20, scene_at(it, 0, 100), PL_U8, 20}};
    const pli_segment segment = {moves, 2, 40, nobody};
    pl_backend *const first = it->members[0].backend;
    CHECK_OK(pli_device_group_broadcast(it->group, it->streams, &segment, 1, it->ring,
                                        NULL));
    CHECK_OK(first->ops->synchronize(first, it->streams[0]));
    CHECK(cuStreamQuery((CUstream)(void *)it->group->members[0].side) == 0);
    scene_close(it);
}

/* The host must not wait, and nothing is allocated. */
TEST(a_step_neither_waits_nor_allocates)
{
    static const char *const never[] = {"cuStreamSynchronize",
                                        "cuEventSynchronize",
                                        "cuEventQuery",
                                        "cuMemAlloc",
                                        "cuMemFree",
                                        "cuEventCreate",
                                        "cuStreamCreateWithPriority"};
    enum { N_NEVER = sizeof never / sizeof never[0] };
    int before[N_NEVER];
    for (uint64_t seed = 1; seed <= 20; seed++) {
        scene_options options = options_of(4, FAKE_LATE);
        options.seed = seed;
        scene *it = scene_open(options);
        for (size_t i = 0; i < N_NEVER; i++)
            before[i] = fake_count(never[i]);
        pli_fault_arm(PLI_FAULT_ALLOC, 1);
        for (int i = 0; i < N_CALLS; i++)
            draw_call(it);
        CHECK(pli_fault_count(PLI_FAULT_ALLOC) == 0);
        pli_fault_arm(PLI_FAULT_ALLOC, 0);
        for (size_t i = 0; i < N_NEVER; i++)
            if (!CHECK(fake_count(never[i]) == before[i]))
                CHECK_MORE("%s was called", never[i]);
        scene_close(it);
    }
}

/* ---- threads -------------------------------------------------------------------- */

typedef struct caller {
    scene *it;
    int member;
} caller;

/* Copies two pieces from member 0 to its own member, repeatedly. */
static void *call_often(void *context)
{
    const caller *const self = context;
    const scene *const it = self->it;
    const size_t from = 100 * (size_t)self->member;
    const pl_move moves[] = {{NULL, scene_at(it, 0, from), PL_U8, 100},
                             {(char *)NULL + 100, scene_at(it, 0, 0), PL_U8, 50}};
    void *targets[SCENE_MOST] = {NULL};
    const pli_segment segment = {moves, 2, 150, targets};
    for (size_t i = 0; i < 6; i++) {
        targets[self->member] = scene_at(it, self->member, 150 * i);
        CHECK_OK(pli_device_group_broadcast(it->group, it->streams, &segment, 1,
                                            it->ring, NULL));
    }
    return NULL;
}

TEST(threads_may_call_at_the_same_time)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        scene_options options = options_of(SCENE_MOST, FAKE_LATE);
        pthread_t threads[SCENE_MOST];
        caller callers[SCENE_MOST];
        options.seed = seed;
        scene *it = scene_open(options);
        for (int k = 1; k < it->n; k++) {
            callers[k] = (caller){it, k};
            CHECK(pthread_create(&threads[k], NULL, call_often, &callers[k]) == 0);
        }
        for (int k = 1; k < it->n; k++) {
            (void)pthread_join(threads[k], NULL);
            for (size_t i = 0; i < 6; i++) {
                scene_mirror_copy(it, k, 150 * i, 0, 100 * (size_t)k, 100);
                scene_mirror_copy(it, k, 150 * i + 100, 0, 0, 50);
            }
        }
        scene_close(it);
    }
}

static pl_status broadcast_nothing(scene *it)
{
    return pli_device_group_broadcast(it->group, it->streams, NULL, 0, it->ring, NULL);
}

static pl_status copy_nothing(scene *it)
{
    return pli_device_group_copy(it->group, it->streams, 0, 1, NULL, 0);
}

static pl_status fence(scene *it)
{
    return pli_device_group_fence(it->group, it->streams);
}

static pl_status settle(scene *it)
{
    return pli_device_group_settle(it->group, it->streams);
}

static pl_status begin_sum(scene *it)
{
    pl_status st = PL_OK;
    const pl_move to = {scene_at(it, 0, SCENE_HALF), NULL, PL_F32, 4};
    memset(it->members[0].is_known + SCENE_HALF, 0, 16);
    PL_TRY(
        pli_gradient_sum_pack(it->sum, 1, it->streams[1], NULL, 0, scene_at(it, 1, 0)));
    PL_TRY(pli_gradient_sum_begin(it->sum, &to, it->rooms));
done:
    return st;
}

static pl_status end_sum(scene *it)
{
    return pli_gradient_sum_end(it->sum, it->streams[0]);
}

typedef struct single_call {
    scene *it;
    pl_status (*make)(scene *it);
    atomic_int is_done;
} single_call;

static void *call_once(void *context)
{
    single_call *const self = context;
    CHECK_OK(self->make(self->it));
    atomic_store(&self->is_done, 1);
    return NULL;
}

TEST(each_call_waits_for_that_of_another_thread)
{
    static pl_status (*const calls[])(scene *) = {
        broadcast_nothing, copy_nothing, fence, settle, begin_sum, end_sum};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        scene *it = scene_open(options_of(2, FAKE_LATE));
        single_call call = {.it = it, .make = calls[i]};
        pthread_t thread;
        (void)pthread_mutex_lock(&it->group->lock);
        CHECK(pthread_create(&thread, NULL, call_once, &call) == 0);
        (void)usleep(20000);
        if (!CHECK(!atomic_load(&call.is_done)))
            CHECK_MORE("call %zu", i);
        (void)pthread_mutex_unlock(&it->group->lock);
        (void)pthread_join(thread, NULL);
        scene_close(it);
    }
}
