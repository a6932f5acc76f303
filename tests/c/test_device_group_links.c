/* test_device_group_links.c - which device sends how much to which, and what waits. */
#include "group_scene.h"

enum { N = SCENE_MOST, BYTES = 1152 /* a multiple of cache lines for 2 and for 3 */ };

static scene_options options_of(size_t passed_bytes, size_t shard_bytes)
{
    return (scene_options){.seed = 5,
                           .schedule = FAKE_LATE,
                           .n = N,
                           .own_streams = 0xf,
                           .peers = 1,
                           .passed_bytes = passed_bytes,
                           .shard_bytes = shard_bytes};
}

static void check_sent(int64_t expected[N][N])
{
    for (int from = 0; from < N; from++)
        for (int to = 0; to < N; to++)
            if (!CHECK(fake_sent_bytes(from, to) == expected[from][to]))
                CHECK_MORE("%d to %d: %d bytes, not %d", from, to,
                           (int)fake_sent_bytes(from, to), (int)expected[from][to]);
}

/* ---- parameters ----------------------------------------------------------------- */

/* A large tensor and two packed ones, to the members of these bits. */
static void broadcast(scene *it, unsigned large_to, unsigned packed_to)
{
    void *targets[2][N] = {{NULL}};
    const pl_move large = {NULL, scene_at(it, 0, 0), PL_U8, BYTES};
    const pl_move packed[] = {{NULL, scene_at(it, 0, 0), PL_U8, 80},
                              {(char *)NULL + 80, scene_at(it, 0, 200), PL_U8, 80}};
    const pli_segment segments[] = {{&large, 1, BYTES, targets[0]},
                                    {packed, 2, 160, targets[1]}};
    for (int k = 1; k < N; k++) {
        if (large_to >> k & 1) {
            targets[0][k] = scene_at(it, k, 100);
            scene_mirror_copy(it, k, 100, 0, 0, BYTES);
        }
        if (packed_to >> k & 1) {
            targets[1][k] = scene_at(it, k, SCENE_HALF);
            scene_mirror_copy(it, k, SCENE_HALF, 0, 0, 80);
            scene_mirror_copy(it, k, SCENE_HALF + 80, 0, 200, 80);
        }
    }
    CHECK_OK(pli_device_group_broadcast(it->group, it->streams, segments, 2, it->ring,
                                        NULL));
}

static void check_broadcast(size_t passed_bytes, unsigned large_to, unsigned packed_to,
                            int64_t expected[N][N])
{
    scene *it = scene_open(options_of(passed_bytes, 0));
    broadcast(it, large_to, packed_to);
    check_sent(expected);
    scene_close(it);
}

TEST(large_segments_go_from_member_to_member)
{
    enum { BOTH = BYTES + 160 };
    check_broadcast(160, 0xe, 0xe,
                    (int64_t[N][N]){{0, BOTH}, {0, 0, BOTH}, {0, 0, 0, BOTH}});
    check_broadcast(
        161, 0xe, 0xe,
        (int64_t[N][N]){{0, BOTH, 160, 160}, {0, 0, BYTES}, {0, 0, 0, BYTES}});
    check_broadcast(BYTES + 1, 0xe, 0xe, (int64_t[N][N]){{0, BOTH, BOTH, BOTH}});
}

TEST(only_members_that_get_a_segment_pass_it_on)
{
    check_broadcast(1, 0xa, 0xc,
                    (int64_t[N][N]){{0, BYTES, 160}, {0, 0, 0, BYTES}, {0, 0, 0, 160}});
}

SCENE_TEST(options_of(0, 0), thresholds_are_what_a_link_takes_for_more_than_its_latency)
{
    CHECK(it->group->passed_bytes == 1 << 20);
    CHECK(it->group->shard_bytes == 8 << 20);
}

/* ---- gradients ------------------------------------------------------------------ */

static void sum(scene *it, int n_rows)
{
    const unsigned char *in[N];
    scene_row rows[N];
    const pl_move to = {scene_at(it, 0, SCENE_HALF), NULL, PL_F32, BYTES / 4};
    for (int r = 0; r < n_rows; r++) {
        scene_fill_floats(it, r + 1, 0, PL_F32, BYTES / 4);
        in[r] = it->members[r + 1].bytes;
        rows[r] = (scene_row){r + 1, scene_at(it, r + 1, 0)};
    }
    if (n_rows == 1)
        memcpy(it->members[0].bytes + SCENE_HALF, in[0], BYTES);
    else
        naive_reduce(in, n_rows, BYTES, PL_F32, PL_SUM,
                     it->members[0].bytes + SCENE_HALF);
    CHECK_OK(scene_sum(it, rows, n_rows, &to));
}

static void check_sum(size_t shard_bytes, int n_rows, int64_t expected[N][N])
{
    scene *it = scene_open(options_of(0, shard_bytes));
    sum(it, n_rows);
    check_sent(expected);
    scene_close(it);
}

TEST(members_share_what_is_added_up)
{
    enum { THIRD = BYTES / 3, HALF = BYTES / 2 };
    check_sum(1, 3,
              (int64_t[N][N]){{0},
                              {THIRD, 0, THIRD, THIRD},
                              {THIRD, THIRD, 0, THIRD},
                              {THIRD, THIRD, THIRD, 0}});
    check_sum(1, 2, (int64_t[N][N]){{0}, {HALF, 0, HALF}, {HALF, HALF}});
    check_sum(1, 1, (int64_t[N][N]){{0}, {BYTES}});
}

/* The first shards only, if there is too little for all.  Rooms are large enough for
 * one piece. */
TEST(short_rows_are_cut_into_fewer_shards)
{
    enum { ROOM = 3 * BYTES, HALF = BYTES / 2, THIRD = BYTES / 3 };
    static const struct {
        size_t shard_bytes;
        int64_t sent[N][N];
    } table[] = {
        {BYTES + 1, {{0}, {BYTES}, {0, BYTES}, {0, BYTES}}},
        {HALF + 1, {{0}, {BYTES}, {0, BYTES}, {0, BYTES}}},
        {HALF, {{0}, {HALF, 0, HALF}, {HALF, HALF}, {0, HALF, HALF}}},
        {THIRD + 1, {{0}, {HALF, 0, HALF}, {HALF, HALF}, {0, HALF, HALF}}},
        {THIRD,
         {{0},
          {THIRD, 0, THIRD, THIRD},
          {THIRD, THIRD, 0, THIRD},
          {THIRD, THIRD, THIRD, 0}}},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        scene *it = scene_open(options_of(0, table[i].shard_bytes));
        void *memory[N];
        int64_t sent[N][N];
        memcpy(sent, table[i].sent, sizeof sent);
        for (int k = 1; k < N; k++) {
            pl_backend *const backend = it->members[k].backend;
            CHECK_OK(backend->ops->alloc(backend, ROOM, &memory[k]));
            it->rooms[k] = (pli_room){memory[k], ROOM};
        }
        sum(it, 3);
        check_sent(sent);
        scene_compare(it);
        for (int k = 1; k < N; k++)
            it->members[k].backend->ops->free(it->members[k].backend, memory[k]);
        scene_close(it);
    }
}

SCENE_TEST(options_of(0, BYTES + 1), members_take_turns_with_what_is_not_cut)
{
    enum { TWICE = 2 * BYTES };
    for (int i = 0; i < 4; i++)
        sum(it, 2);
    check_sent((int64_t[N][N]){{0}, {TWICE, 0, TWICE}, {TWICE, TWICE}});
}

/* ---- waits ---------------------------------------------------------------------- */

static void read_one(const scene *it, int member, size_t at)
{
    unsigned char byte = 0;
    CHECK_OK(pli_cuda_read(it->members[member].backend, &byte, scene_at(it, member, at),
                           1, it->streams[member]));
    CHECK(byte == it->members[member].bytes[at]);
}

static int is_behind(const scene *it, int member)
{
    return cuStreamQuery(it->members[member].stream) == CUDA_ERROR_NOT_READY;
}

SCENE_TEST(options_of(1, 1), members_wait_for_those_alone_that_have_a_part)
{
    CHECK(fake_synchronize_all());
    scene_fill(it, 3, 0, 1);
    broadcast(it, 6, 6);
    read_one(it, 1, 100);
    read_one(it, 2, 100);
    sum(it, 2);
    read_one(it, 0, SCENE_HALF);
    CHECK(is_behind(it, 3));
}

/* Begins a sum of rows of members 1 and 2, which both continue. */
static void begin_sum(scene *it, pl_move *to)
{
    *to = (pl_move){scene_at(it, 0, SCENE_HALF), NULL, PL_F32, BYTES / 4};
    CHECK_OK(
        pli_device_group_broadcast(it->group, it->streams, NULL, 0, it->ring, NULL));
    CHECK_OK(pli_device_group_fence(it->group, it->streams));
    for (int k = 1; k <= 2; k++) {
        scene_fill_floats(it, k, 0, PL_F32, BYTES / 4);
        CHECK_OK(pli_gradient_sum_pack(it->sum, k, it->streams[k], NULL, 0,
                                       scene_at(it, k, 0)));
        scene_fill(it, k, BYTES, 1);
    }
    CHECK_OK(pli_gradient_sum_begin(it->sum, to, it->rooms));
}

SCENE_TEST(options_of(0, 0), nobody_waits_for_a_sum_before_its_end)
{
    const unsigned char *const in[] = {it->members[1].bytes, it->members[2].bytes};
    pl_move to;
    begin_sum(it, &to);
    for (int k = 0; k <= 2; k++)
        read_one(it, k, k == 0 ? SCENE_HALF : BYTES); /* member 0 keeps its data */
    CHECK_OK(pli_gradient_sum_end(it->sum, it->streams[0]));
    naive_reduce(in, 2, BYTES, PL_F32, PL_SUM, it->members[0].bytes + SCENE_HALF);
    read_one(it, 0, SCENE_HALF);
}

SCENE_TEST(options_of(0, 0), a_sum_waits_for_its_rows_alone)
{
    const unsigned char *const in[] = {it->members[1].bytes, it->members[2].bytes};
    pl_move to;
    begin_sum(it, &to);
    CHECK_OK(pli_gradient_sum_end(it->sum, it->streams[0]));
    naive_reduce(in, 2, BYTES, PL_F32, PL_SUM, it->members[0].bytes + SCENE_HALF);
    read_one(it, 0, SCENE_HALF);
    CHECK(is_behind(it, 1) && is_behind(it, 2));
    CHECK_OK(pli_device_group_settle(it->group, it->streams));
}

/* The last member of a chain waits for an earlier one only for data that it takes from
 * it. */
SCENE_TEST(options_of(1, 1), whom_nobody_takes_from_waits_for_nobody_behind)
{
    CHECK(fake_synchronize_all());
    broadcast(it, 0xa, 0x8);
    scene_fill(it, 1, 0, 1);
    read_one(it, 3, 100);
    CHECK(is_behind(it, 1));
}
