/* test_device_group_failure.c - a group of devices when the driver or a caller fails;
 * how it is made, and how it ends. */
#include "group_scene.h"

#include "core/alloc.h"

static scene_options options_of(scene_devices devices)
{
    return (scene_options){.seed = 3,
                           .schedule = FAKE_LATE,
                           .n = 3,
                           .devices = devices,
                           .own_streams = 6,
                           .peers = 1};
}

/* ---- calls, and their effect in the mirrors ------------------------------------- */

/* Packed segments, more than a ring has slots, and a large tensor. */
static pl_status broadcast(scene *it)
{
    enum { N = 5, BYTES = 128 };
    pl_move moves[N][2];
    void *targets[N][3];
    pli_segment segments[N];
    for (size_t i = 0; i < N; i++) {
        const size_t n_bytes = i == 2 ? 2 * (size_t)BYTES : BYTES;
        const size_t from = i * BYTES, to = i == 2 ? SCENE_HALF : i * BYTES;
        moves[i][0] = (pl_move){NULL, scene_at(it, 0, from), PL_U8, n_bytes};
        if (i != 2)
            moves[i][0].n_elems = 100;
        moves[i][1] =
            (pl_move){(char *)NULL + 100, scene_at(it, 0, from + 100), PL_U8, 28};
        for (int k = 0; k < it->n; k++)
            targets[i][k] = k > 0 ? scene_at(it, k, to) : NULL;
        segments[i] = (pli_segment){moves[i], i == 2 ? 1 : 2, n_bytes, targets[i]};
        for (int k = 1; k < it->n; k++)
            scene_mirror_copy(it, k, to, 0, from, n_bytes);
    }
    return pli_device_group_broadcast(it->group, it->streams, segments, N, it->ring,
                                      NULL);
}

/* Sums in several pieces. */
static pl_status sum_rows(scene *it, int n_rows)
{
    enum { N = 60, AT = 512 };
    const pl_move to = {scene_at(it, 0, SCENE_HALF), NULL, PL_F32, N};
    const unsigned char *in[2];
    scene_row rows[2];
    for (int r = 0; r < n_rows; r++) {
        in[r] = it->members[r + 1].bytes + AT;
        rows[r] = (scene_row){r + 1, scene_at(it, r + 1, AT)};
    }
    naive_reduce(in, n_rows, 4 * (size_t)N, PL_F32, PL_SUM,
                 it->members[0].bytes + SCENE_HALF);
    return scene_sum(it, rows, n_rows, &to);
}

static pl_status refresh(scene *it)
{
    void *targets[] = {NULL, scene_at(it, 1, 8), scene_at(it, 2, 16)};
    const pl_move moves[] = {{NULL, scene_at(it, 0, 4), PL_F32, 8},
                             {(char *)NULL + 64, scene_at(it, 0, 100), PL_F32, 8}};
    const pli_segment segment = {moves, 2, 96, targets};
    for (int k = 1; k < 3; k++)
        for (size_t i = 0; i < 2; i++)
            scene_mirror_copy(it, k, 8 * (size_t)k + 64 * i, 0, i == 0 ? 4 : 100, 32);
    return pli_device_group_broadcast(it->group, it->streams, &segment, 1, it->ring,
                                      it->sums);
}

static pl_status sum_two(scene *it)
{
    return sum_rows(it, 2);
}

static pl_status sum_one(scene *it)
{
    return sum_rows(it, 1);
}

static pl_status copy(scene *it, int source, int target)
{
    const pl_move moves[] = {
        {scene_at(it, target, SCENE_HALF), scene_at(it, source, 8), PL_F32, 50},
        {scene_at(it, target, 1500), scene_at(it, source, 300), PL_U8, 50}};
    scene_mirror_copy(it, target, SCENE_HALF, source, 8, 200);
    scene_mirror_copy(it, target, 1500, source, 300, 50);
    return pli_device_group_copy(it->group, it->streams, source, target, moves, 2);
}

static pl_status copy_down(scene *it)
{
    return copy(it, 1, 2);
}

static pl_status copy_up(scene *it)
{
    return copy(it, 2, 0);
}

/* Fills all with numbers, whatever they held. */
static void fill_all(scene *it)
{
    for (int k = 0; k < it->n; k++)
        scene_fill_floats(it, k, 0, PL_F32, SCENE_ARENA / 4);
}

static pl_status (*const calls[])(scene *it) = {broadcast, sum_two, sum_one,
                                                copy_down, copy_up, refresh};
enum { N_CALLS = sizeof calls / sizeof calls[0] };

/* ---- the driver fails ----------------------------------------------------------- */

static const struct {
    const char *name, *words;
} functions[] = {
    {"cuEventRecord", "recording a CUDA event"},
    {"cuStreamWaitEvent", "having a stream wait"},
    {"cuMemcpyPeerAsync", "copying between two devices"},
    {"cuLaunchKernel", ""},
    {"cuCtxGetCurrent", "asking for the CUDA context"},
    {"cuCtxPushCurrent", "making the CUDA context current"},
    {"cuThreadExchangeStreamCaptureMode", ""},
};
enum { N_FUNCTIONS = sizeof functions / sizeof functions[0], COPIES = 2, LEAVES = 6 };

/* How often a call of the group calls a driver function. */
static int count_in(const scene_options *options, int call, int function)
{
    scene *it = scene_open(*options);
    fill_all(it);
    const int before = fake_count(functions[function].name);
    CHECK_OK(calls[call](it));
    const int n = fake_count(functions[function].name) - before;
    scene_close(it);
    return n;
}

/* A failed call leaves no work enqueued: later writes, in the order of streams, stay.
 * Then the group works. */
static void fail_at(const scene_options *options, int call, int function, int nth,
                    int also_sync)
{
    const char *const name = functions[function].name;
    scene_options of_this = *options;
    of_this.seed = (uint64_t)nth;
    scene *it = scene_open(of_this);
    fill_all(it);
    fake_fail(name, nth, CUDA_ERROR_UNKNOWN);
    if (also_sync)
        fake_fail("cuStreamSynchronize", 1, CUDA_ERROR_LAUNCH_FAILED);
    const pl_status st = calls[call](it);
    if (st != PL_OK) {
        CHECK_FAILS(st, PL_ESYS, "CUDA error 999", functions[function].words);
    }
    /* Leaving a scope cannot report a failure. */
    if (!CHECK(st != PL_OK || (function == LEAVES && nth % 2 == 0)))
        CHECK_MORE("call %d, %s, number %d", call, name, nth);
    if (also_sync) /* then some calls fail later */
        CHECK(fake_synchronize_all());
    fill_all(it);
    for (int k = 0; k < it->n; k++)
        scene_read(it, k, 0, SCENE_ARENA);
    if (nth % 2 == 0)
        scene_compare(it);
    for (int i = 0; i < N_CALLS; i++)
        CHECK_OK(calls[i](it));
    scene_close(it);
}

/* All data directly to and from member 0, or through other members. */
static void check_failures(scene_devices devices, int is_passed)
{
    scene_options options = options_of(devices);
    options.passed_bytes = options.shard_bytes = is_passed ? PL_CACHE_LINE : 0;
    for (int call = 0; call < N_CALLS; call++) {
        for (int f = 0; f < N_FUNCTIONS; f++) {
            const int n = count_in(&options, call, f);
            for (int nth = 1; nth <= n && atomic_load(&check_n_failures) == 0; nth++)
                fail_at(&options, call, f, nth, 0);
        }
    }
}

TEST(a_call_that_fails_anywhere_leaves_nothing_behind)
{
    check_failures(SCENE_APART, 0);
}

TEST(a_call_that_fails_among_members_leaves_nothing_behind)
{
    check_failures(SCENE_APART, 1);
}

TEST(a_call_that_fails_on_one_device_leaves_nothing_behind)
{
    check_failures(SCENE_ONE, 0);
    check_failures(SCENE_ONE, 1);
}

TEST(what_fails_first_is_what_is_said)
{
    const scene_options options = options_of(SCENE_APART);
    for (int call = 0; call < 3; call++)
        fail_at(&options, call, COPIES, 1, 1);
}

/* ---- a group cannot be made ----------------------------------------------------- */

/* Returns how often the function is called to make a group; the nth call fails, unless
 * nth is 0. */
static int make_group(const char *name, int nth)
{
    scene *it = scene_open_without_group(options_of(SCENE_APART));
    const int before = fake_count(name);
    if (nth > 0) {
        fake_fail(name, nth, CUDA_ERROR_UNKNOWN);
        CHECK_FAILS(scene_make_group(it), PL_ESYS, "CUDA error 999");
        CHECK(it->group == NULL);
        CHECK(fake_live(FAKE_EVENTS) == 0);
    }
    CHECK_OK(scene_make_group(it));
    const int n = fake_count(name) - before;
    CHECK_OK(broadcast(it));
    scene_close(it);
    return n;
}

TEST(a_group_that_cannot_be_made_leaves_nothing_behind)
{
    static const char *const names[] = {"cuEventCreate", "cuDeviceGet",
                                        "cuDeviceCanAccessPeer", "cuCtxGetCurrent",
                                        "cuCtxPushCurrent"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const int n = make_group(names[i], 0);
        CHECK(n >= 4);
        for (int nth = 1; nth <= n; nth++)
            (void)make_group(names[i], nth);
    }
}

TEST(a_group_without_memory_is_not_made)
{
    scene *it = scene_open_without_group(options_of(SCENE_APART));
    pli_fault_arm(PLI_FAULT_ALLOC, 1);
    CHECK(scene_make_group(it) == PL_ENOMEM);
    CHECK(pli_fault_count(PLI_FAULT_ALLOC) == 1);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
    CHECK(it->group == NULL);
    CHECK_SAYS("a group of devices");
    scene_close(it);
}

/* Torch may have enabled access already, a device has access to a limited number of
 * others, and some devices refuse it.  Member 0 itself needs none. */
TEST(access_that_is_there_or_cannot_be_is_no_failure)
{
    static const int codes[] = {205, 217, 304, 704, 711, 801, 999};
    for (size_t i = 0; i < 2 * sizeof codes / sizeof codes[0]; i++) {
        const int nth = 1 + (int)i % 2, code = codes[i / 2];
        scene *it = scene_open_without_group(options_of(SCENE_APART));
        fake_fail("cuCtxEnablePeerAccess", nth, code);
        CHECK_OK(scene_make_group(it));
        CHECK(it->group->members[1].reads_first == (code == 704 || nth == 1));
        CHECK_OK(copy_up(it));
        scene_compare(it);
        pli_device_group_destroy(it->group);
        CHECK_OK(scene_make_group(it)); /* again */
        scene_close(it);
    }
}

/* ---- a caller fails ------------------------------------------------------------- */

TEST(groups_of_no_device_or_of_too_many_are_refused)
{
    pl_backend *backends[PLI_MOST_MEMBERS + 1];
    scene *it = scene_open_without_group(options_of(SCENE_ONE));
    for (int k = 0; k <= PLI_MOST_MEMBERS; k++)
        backends[k] = it->members[0].backend;
    CHECK_FAILS(pli_device_group_create(backends, 0, &it->group), PL_EINVAL,
                "a group of 0 devices: give 1 to 64");
    CHECK_FAILS(pli_device_group_create(backends, PLI_MOST_MEMBERS + 1, &it->group),
                PL_EINVAL, "a group of 65 devices");
    CHECK(it->group == NULL);
    CHECK_OK(pli_device_group_create(backends, PLI_MOST_MEMBERS, &it->group));
    CHECK(it->group->n_members == PLI_MOST_MEMBERS);
    scene_close(it);
}

SCENE_TEST(options_of(SCENE_APART), sums_of_no_row_or_without_room_are_refused)
{
    const scene_row rows[2] = {{1, scene_at(it, 1, 0)}, {2, scene_at(it, 2, 0)}};
    const pl_move to = {scene_at(it, 0, 0), NULL, PL_F32, 4};
    const pl_move whole = {scene_at(it, 0, 0), NULL, PL_I32, 4};
    CHECK_FAILS(scene_sum(it, rows, 0, &to), PL_EINVAL,
                "a sum of gradients that no member has packed");
    CHECK(scene_sum(it, rows, 2, &whole) == PL_EINVAL);
    it->rooms[2].memory = NULL; /* not used yet */
    it->rooms[1].n_bytes = 2 * PL_CACHE_LINE - 1;
    it->group->n_sums = 0;
    CHECK_FAILS(scene_sum(it, rows, 2, &to), PL_EINVAL,
                "127 bytes of member 1 have no room for 2 rows");
    it->rooms[1].n_bytes++;
    it->group->n_sums = 0;
    CHECK_OK(scene_sum(it, rows, 2, &to));
    memset(it->members[0].is_known, 0, 16);
    CHECK_FAILS(scene_sum(it, rows, 2, &to), PL_EINVAL,
                "0 bytes of member 2 have no room for 2 rows");
    it->group->n_sums = 0;
    it->group->shard_bytes = 8; /* now both sum */
    CHECK_FAILS(scene_sum(it, rows, 2, &to), PL_EINVAL,
                "0 bytes of member 2 have no room for 2 rows");
}

SCENE_TEST(options_of(SCENE_APART), a_packed_segment_that_no_slot_holds_is_refused)
{
    void *const targets[] = {NULL, scene_at(it, 1, 0), scene_at(it, 2, 0)};
    const pl_move moves[] = {{NULL, scene_at(it, 0, 0), PL_F32, 24},
                             {(char *)NULL + 96, scene_at(it, 0, 200), PL_F32, 25}};
    const pli_segment segments[] = {{moves, 1, 96, targets}, {moves, 2, 196, targets}};
    CHECK_FAILS(
        pli_device_group_broadcast(it->group, it->streams, segments, 2, it->ring, NULL),
        PL_EINVAL, "a segment of 196 bytes does not fit into a slot of 192");
    scene_mirror_copy(it, 1, 0, 0, 0, 96);
    scene_mirror_copy(it, 2, 0, 0, 0, 96);
}

/* ---- life ----------------------------------------------------------------------- */

/* Peer access is requested both ways between any two members. */
TEST(devices_are_given_access_where_they_can)
{
    static const struct {
        scene_devices devices;
        int peers, n_asked, n_given;
    } table[] = {{SCENE_APART, 1, 12, 12},
                 {SCENE_APART, 0, 12, 0},
                 {SCENE_APART, 2, 12, 10},
                 {SCENE_ONE, 1, 0, 0},
                 {SCENE_PAIRS, 1, 8, 8}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        scene_options options = options_of(table[i].devices);
        options.n = 4;
        options.peers = table[i].peers;
        scene *it = scene_open(options);
        CHECK(fake_count("cuDeviceCanAccessPeer") == table[i].n_asked);
        CHECK(fake_count("cuCtxEnablePeerAccess") == table[i].n_given);
        scene_close(it);
    }
}

TEST(a_group_keeps_its_devices)
{
    pl_backend *members[2] = {NULL, NULL};
    pli_device_group *group = NULL;
    pl_stream *const streams[2] = {NULL, NULL};
    scene_reset(&(scene_options){.seed = 1, .schedule = FAKE_LATE});
    for (int k = 0; k < 2; k++) {
        const pli_cuda_options options = {.device = k, .driver = fake_path()};
        if (!CHECK_OK(pli_cuda_backend_create(&options, &members[k])))
            return;
    }
    CHECK_OK(pli_device_group_create(members, 2, &group));
    pli_backend_destroy(members[0]);
    pli_backend_destroy(members[1]);
    CHECK(fake_live(FAKE_CONTEXTS) == 2);
    CHECK_OK(pli_device_group_copy(group, streams, 0, 1, NULL, 0));
    pli_device_group_destroy(group);
    pli_device_group_destroy(NULL);
    CHECK(fake_live_objects() == 0 && fake_errors() == 0);
}

/* ---- one member ----------------------------------------------------------------- */

TEST(a_group_of_one_moves_nothing)
{
    scene_options options = options_of(SCENE_APART);
    options.n = 1;
    scene *it = scene_open(options);
    void *const targets[] = {NULL};
    const pl_move move = {NULL, scene_at(it, 0, 0), PL_F32, 24};
    const pli_segment segment = {&move, 1, 100, targets};
    const scene_row row = {0, scene_at(it, 0, 0)};
    const pl_move to = {scene_at(it, 0, 512), NULL, PL_F32, 4};
    CHECK_OK(pli_device_group_broadcast(it->group, it->streams, &segment, 1, it->ring,
                                        NULL));
    CHECK_OK(copy(it, 0, 0));
    CHECK(scene_sum(it, &row, 0, &to) == PL_EINVAL);
    scene_close(it);
}
