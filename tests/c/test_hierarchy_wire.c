/* test_hierarchy_wire.c - what a leader sends to another host, and receives: the test
 * is that host. */
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>

#include "core/crc32c.h"
#include "hosts.h"
#include "ops.h"

enum {
    N_BUCKETS = 3,
    BUCKET_ELEMS = 1 << 16,
    FLAG_BYTES = 100,
    HEAD_BYTES = 32,
    CRC_BYTES = 4
};

/* Host 0 of two, with one rank; peer[]: host 1's sockets. */
typedef struct scene {
    pl_comm *world;
    int peer[PLI_N_LINK_STREAMS];
    size_t n_bytes; /* received */
} scene;

static int scene_init(scene *it)
{
    const hosts two = {
        .n_hosts = 2, .n_ranks = {1, 1}, .deadline_ns = RANKS_DEADLINE_NS};
    pli_hierarchy_options options = {.world_size = 2,
                                     .n_hosts = 2,
                                     .n_ranks = two.n_ranks,
                                     .n_ops = 2 * N_BUCKETS,
                                     .deadline_ns = two.deadline_ns};
    hosts_sockets fds;
    *it = (scene){.world = NULL};
    if (!hosts_connect(&two, fds) || !hosts_link(&two, 0, fds[0], &options.links) ||
        !CHECK_OK(local_create(1, (N_BUCKETS + 1) * BUCKET_ELEMS * sizeof(float),
                               two.deadline_ns, &options.inner)) ||
        !CHECK_OK(pli_hierarchy_create(&options, &it->world)))
        return 0;
    memcpy(it->peer, fds[1], sizeof it->peer); /* those to host 0 come first */
    return 1;
}

static void scene_fini(scene *it)
{
    pl_comm_destroy(it->world);
    for (int s = 0; s < PLI_N_LINK_STREAMS; s++)
        (void)close(it->peer[s]);
}

/* Host 1 has the same gradients, so it sends back what it receives. */
static void echo(scene *it)
{
    static char bytes[1 << 14];
    for (int s = PLI_LINK_NOTICE; s < PLI_N_LINK_STREAMS; s++) {
        ssize_t n = 0;
        while ((n = recv(it->peer[s], bytes, sizeof bytes, MSG_DONTWAIT)) > 0) {
            it->n_bytes += (size_t)n;
            CHECK(send(it->peer[s], bytes, (size_t)n, MSG_NOSIGNAL) == n);
            (void)!pl_comm_progress(it->world); /* makes room in the sockets */
        }
    }
}

static pl_op op_at(size_t k)
{
    const pl_op bucket = {.kind = PL_ALL_REDUCE,
                          .reduction = PL_MEAN,
                          .dtype = PL_F32,
                          .offset_bytes = k * BUCKET_ELEMS * sizeof(float),
                          .n_elems = BUCKET_ELEMS,
                          .is_followed = 1};
    pl_op flags = bucket;
    flags.reduction = PL_MAX;
    flags.dtype = PL_U8;
    flags.n_elems = FLAG_BYTES;
    flags.is_followed = 0;
    flags.ends_step = 1;
    return k < N_BUCKETS ? bucket : flags;
}

TEST(a_step_sends_each_bucket_once_with_a_head_and_a_checksum)
{
    scene it;
    if (!scene_init(&it))
        return;
    for (int step = 0; step < 3; step++) {
        pl_ticket ticket = 0;
        pl_status st = PL_EAGAIN;
        it.n_bytes = 0;
        for (size_t k = 0; k <= N_BUCKETS; k++) {
            const pl_op op = op_at(k);
            CHECK_OK(pl_comm_issue(it.world, &op, &ticket));
        }
        while (st == PL_EAGAIN) {
            echo(&it);
            st = pl_comm_wait(it.world, ticket, 0);
        }
        CHECK_OK(st);
        const size_t n_data = N_BUCKETS * BUCKET_ELEMS * sizeof(float);
        CHECK(it.n_bytes ==
              n_data + FLAG_BYTES + (N_BUCKETS + 1) * (HEAD_BYTES + CRC_BYTES));
        CHECK(it.n_bytes - n_data < n_data / 100);
    }
    scene_fini(&it);
}

/* ---- bytes sent ----------------------------------------------------------------- */

static atomic_size_t n_bytes_sent; /* by all hosts, with heads and checksums */

/* The C library's function, counted. */
ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    const ssize_t n = syscall(SYS_sendmsg, fd, message, flags);
    if (n > 0)
        atomic_fetch_add(&n_bytes_sent, (size_t)n);
    return n;
}

static void average_one_range(rank_job *job)
{
    const pl_op op = {.kind = PL_ALL_REDUCE,
                      .reduction = PL_MEAN,
                      .dtype = PL_F32,
                      .n_elems = *(const size_t *)job->context / sizeof(float)};
    CHECK_OK(do_op(job->comm, &op));
}

/* Bytes that all hosts send for one range, without heads and checksums. */
static size_t bytes_sent_for(int n_hosts, size_t n_bytes, size_t n_messages)
{
    hosts it = {.n_hosts = n_hosts, .deadline_ns = RANKS_DEADLINE_NS};
    for (int h = 0; h < n_hosts; h++)
        it.n_ranks[h] = 1;
    atomic_store(&n_bytes_sent, 0);
    hosts_run(&it, 1 << 17, average_one_range, &n_bytes, 1);
    return atomic_load(&n_bytes_sent) - n_messages * (HEAD_BYTES + CRC_BYTES);
}

/* The least that n hosts can send is 2 S (n - 1) / n of S bytes per host.  They send
 * more if a second round would cost more than the bytes that it saves. */
TEST(hosts_send_no_more_than_they_must)
{
    const size_t least_saved = 1 << 16;
    for (size_t n = 2; n <= 10; n++) {
        const size_t n_pairs = n * (n - 1);
        const size_t small =
            n == 2 ? least_saved : least_saved / (n - 2) / 64 * 64 - 64;
        CHECK(bytes_sent_for((int)n, small, n_pairs) == n_pairs * small);
        for (size_t bytes = small + 128; n > 2 && bytes <= 1 << 17; bytes *= 3)
            CHECK(bytes_sent_for((int)n, bytes, 2 * n_pairs) == 2 * (n - 1) * bytes);
    }
}

/* ---- damage --------------------------------------------------------------------- */

/* Sends back what comes for an operation of N bytes, with one bit flipped. */
static pl_status average_with_flipped(size_t n_bytes, size_t bit)
{
    static char message[N_BUCKETS * BUCKET_ELEMS * sizeof(float)];
    const size_t n_whole = HEAD_BYTES + n_bytes + CRC_BYTES;
    const pl_op op = {.kind = PL_ALL_REDUCE,
                      .reduction = PL_MEAN,
                      .dtype = PL_F32,
                      .n_elems = n_bytes / sizeof(float)};
    scene it;
    pl_ticket ticket = 0;
    pl_status st = PL_EAGAIN;
    if (!scene_init(&it))
        return PL_OK;
    CHECK_OK(pl_comm_issue(it.world, &op, &ticket));
    for (size_t n = 0; n < n_whole;) {
        const ssize_t more = recv(it.peer[PLI_LINK_DATA], message + n, n_whole - n, 0);
        n += (size_t)(more > 0 ? more : 0);
        (void)!pl_comm_progress(it.world);
    }
    if (bit < 8 * n_whole)
        message[bit / 8] ^= (char)(1 << bit % 8);
    for (size_t n = 0; n < n_whole && st == PL_EAGAIN;) {
        const ssize_t more =
            send(it.peer[PLI_LINK_DATA], message + n, n_whole - n, MSG_DONTWAIT);
        n += (size_t)(more > 0 ? more : 0);
        st = pl_comm_wait(it.world, ticket, 0);
    }
    for (int i = 0; i < 100 && st == PL_EAGAIN; i++)
        st = pl_comm_wait(it.world, ticket, PLI_MS);
    scene_fini(&it);
    return st;
}

TEST(a_flipped_bit_anywhere_in_a_message_is_an_error)
{
    const size_t small = 64, large = 2 * BUCKET_ELEMS * sizeof(float);
    CHECK_OK(average_with_flipped(small, SIZE_MAX));
    CHECK_OK(average_with_flipped(large, SIZE_MAX));
    for (size_t bit = 0; bit < 8 * (HEAD_BYTES + small + CRC_BYTES); bit += 3) {
        if (!CHECK(average_with_flipped(small, bit) == PL_EPEER))
            CHECK_MORE("bit %zu", bit);
        CHECK_SAYS("arrived damaged");
    }
    for (size_t k = 0; k <= 10; k++) {
        const size_t n_bits = 8 * (HEAD_BYTES + large + CRC_BYTES);
        const size_t bit = k < 10 ? k * 1111111 % n_bits : n_bits - 1;
        CHECK(average_with_flipped(large, bit) == PL_EPEER);
        CHECK_SAYS("arrived damaged");
    }
}

TEST(a_damaged_notice_is_an_error)
{
    const uint32_t notice[6] = {1, 2, 3}; /* its checksum is wrong */
    scene it;
    if (!scene_init(&it))
        return;
    CHECK(send(it.peer[PLI_LINK_NOTICE], notice, sizeof notice, MSG_NOSIGNAL) ==
          (ssize_t)sizeof notice);
    CHECK(pli_comm_check_peers(it.world) == PL_EPEER);
    CHECK_SAYS("rank 1 (host 1) sent a notice that arrived damaged");
    scene_fini(&it);
}

/* ---- invalid heads -------------------------------------------------------------- */

/* In place of its part, host 1 sends an invalid head: this host fails without waiting
 * for the bytes that the head announces. */
static void receive_head(uint64_t number, uint64_t n_bytes)
{
    const pl_op op = op_at(N_BUCKETS);
    uint64_t head[] = {number, pli_op_hash(&op), n_bytes, 0};
    pl_ticket ticket = 0;
    scene it;
    if (!scene_init(&it))
        return;
    head[3] = pli_crc32c(0, head, 3 * sizeof *head);
    CHECK_OK(pl_comm_issue(it.world, &op, &ticket));
    CHECK(send(it.peer[PLI_LINK_DATA], head, sizeof head, MSG_NOSIGNAL) ==
          (ssize_t)sizeof head);
    CHECK_FAILS(pl_comm_wait(it.world, ticket, 0), PL_EMISMATCH,
                "rank 1 (host 1) issued another operation than this rank");
    scene_fini(&it);
}

TEST(a_head_that_no_host_sends_is_an_error_at_once)
{
    receive_head(0, FLAG_BYTES);
    receive_head(2, FLAG_BYTES);
    receive_head(UINT64_MAX, FLAG_BYTES);
    receive_head(1, FLAG_BYTES - 1);
    receive_head(1, UINT64_C(1) << 40);
    receive_head(1, UINT64_MAX - HEAD_BYTES + 1); /* complete if it overflows */
}

/* ---- notices that overtake data ------------------------------------------------- */

/* Host 1 has failed, after it had finished so many operations. */
static void send_failure(const scene *it, uint64_t n_finished)
{
    static const char text[] = "the dog ate it";
    enum { TEXT_AT = 24, N_TEXT = sizeof text - 1 };
    struct {
        uint32_t crc, host;
        uint64_t number;
        uint32_t kind, n_bytes;
        char text[N_TEXT];
    } sent = {.number = n_finished, .n_bytes = N_TEXT};
    memcpy(sent.text, text, N_TEXT);
    sent.crc = pli_crc32c(0, &sent.host, TEXT_AT + N_TEXT - sizeof sent.crc);
    CHECK(send(it->peer[PLI_LINK_NOTICE], &sent, TEXT_AT + N_TEXT, MSG_NOSIGNAL) ==
          TEXT_AT + N_TEXT);
}

/* This host has not failed, nor finished the operation. */
static void check_waits(const scene *it, pl_ticket ticket)
{
    CHECK(pl_comm_wait(it->world, ticket, PLI_MS) == PL_EAGAIN);
    CHECK_OK(pli_comm_query(it->world, PLI_QUERY_STEP));
}

TEST(what_a_host_had_finished_before_it_failed_is_finished_though_its_notice_is_first)
{
    enum { N_BYTES = HEAD_BYTES + FLAG_BYTES + CRC_BYTES, N_CUT = HEAD_BYTES + 7 };
    for (uint64_t n_finished = 0; n_finished <= 1; n_finished++) {
        char message[N_BYTES];
        scene it;
        pl_op op = op_at(N_BUCKETS);
        pl_ticket ticket = 0;
        if (!scene_init(&it))
            return;
        CHECK_OK(pl_comm_issue(it.world, &op, &ticket));
        CHECK(recv(it.peer[PLI_LINK_DATA], message, N_BYTES, MSG_WAITALL) == N_BYTES);
        send_failure(&it, n_finished);
        if (n_finished == 1) {
            check_waits(&it, ticket);
            CHECK(send(it.peer[PLI_LINK_DATA], message, N_CUT, 0) == N_CUT);
            check_waits(&it, ticket);
            CHECK(send(it.peer[PLI_LINK_DATA], message + N_CUT, N_BYTES - N_CUT, 0) ==
                  N_BYTES - N_CUT);
            CHECK_OK(wait_through(it.world, ticket));
        }
        CHECK(n_finished == 1 || wait_through(it.world, ticket) == PL_EPEER);
        CHECK(do_op(it.world, &op) == PL_EPEER);
        CHECK_SAYS("the step of rank 1 (host 1) failed", "the dog ate it");
        scene_fini(&it);
    }
}
