/* fuzz_hosts.c - the leader of host 1 of three, and the data that the two others send:
 * notices, and heads followed by their bytes.
 */
#include <sys/socket.h>

#include "../c/local.h"
#include "bytes.h"
#include "comm/hierarchy.h"
#include "core/clock.h"
#include "core/crc32c.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum {
    HOSTS_N = 3,
    HOSTS_ME = 1,
    HOSTS_BIG = 1 << 14, /* elements of a range that ranks divide */
    HOSTS_WAITS = 20,
    HOSTS_HEAD_BYTES = 32
};

/* The input writes to ends[s]; the leader has fds[s]. */
static void connect_hosts(int *fds, int *ends)
{
    for (int s = 0; s < HOSTS_N * PLI_N_LINK_STREAMS; s++) {
        int pair[2] = {-1, -1};
        if (s / PLI_N_LINK_STREAMS != HOSTS_ME)
            must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
        fds[s] = pair[0];
        ends[s] = pair[1];
    }
}

static void close_sockets(const int *fds)
{
    for (int s = 0; s < HOSTS_N * PLI_N_LINK_STREAMS; s++)
        if (fds[s] >= 0)
            (void)close(fds[s]);
}

/* Puts the right checksum into a head. */
static void seal(uint8_t *head)
{
    const uint64_t crc = pli_crc32c(0, head, HOSTS_HEAD_BYTES - sizeof crc);
    memcpy(head + HOSTS_HEAD_BYTES - sizeof crc, &crc, sizeof crc);
}

/* ... and into a notice of n bytes. */
static void seal_notice(uint8_t *notice, size_t n)
{
    uint32_t crc = 0;
    if (n < sizeof crc)
        return;
    crc = pli_crc32c(0, notice + sizeof crc, n - sizeof crc);
    memcpy(notice, &crc, sizeof crc);
}

/* Sends runs of bytes; the input gives the socket, the repeats, the size, the bytes.  A
 * run for this leader itself asks for a right checksum in the next. */
static void send_runs(const int *ends, bytes *from)
{
    int is_sealed = 0;
    while (from->n > 0) {
        const unsigned s = bytes_number(from) % (HOSTS_N * PLI_N_LINK_STREAMS);
        const unsigned n_times = 1 + bytes_number(from) % 128;
        const size_t n = bytes_number(from);
        const bytes run = bytes_take(from, n);
        uint8_t sent[UINT8_MAX];
        memcpy(sent, run.at, run.n);
        if (is_sealed && s % PLI_N_LINK_STREAMS == PLI_LINK_NOTICE)
            seal_notice(sent, run.n);
        else if (is_sealed && run.n >= HOSTS_HEAD_BYTES)
            seal(sent);
        is_sealed = ends[s] < 0;
        for (unsigned i = 0; ends[s] >= 0 && i < n_times; i++)
            (void)send(ends[s], sent, run.n, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

static pl_op drawn_op(unsigned number)
{
    static const pl_op_kind kinds[] = {PL_ALL_REDUCE, PL_ALL_REDUCE, PL_BROADCAST,
                                       PL_ALL_GATHER, PL_BARRIER};
    return (pl_op){.kind = kinds[number % 5],
                   .dtype = PL_F32,
                   .n_elems = number % 5 == 1 ? HOSTS_BIG : 6,
                   .ends_step = number & 0x80 ? 1 : 0};
}

static void use_hosts(pl_comm *world, bytes *from, const int *ends)
{
    const pl_op op = drawn_op(bytes_number(from));
    pl_ticket ticket = 0;
    pl_status st = PL_EAGAIN;
    send_runs(ends, from);
    for (int s = 0; s < HOSTS_N * PLI_N_LINK_STREAMS; s++)
        if (ends[s] >= 0)
            (void)shutdown(ends[s], SHUT_WR);
    if (pl_comm_issue(world, &op, &ticket) == PL_OK)
        for (int i = 0; i < HOSTS_WAITS && st == PL_EAGAIN; i++)
            st = pl_comm_wait(world, ticket, 0);
    (void)!pli_comm_check_peers(world);
    for (int what = PLI_QUERY_GONE; what <= PLI_QUERY_WORLD; what++)
        (void)!pli_comm_query(world, (pli_query)what);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char *const names[] = {"host 0", "host 1", "host 2"};
    static const int n_ranks[] = {1, 1, 1};
    bytes from = {data, n};
    int fds[HOSTS_N * PLI_N_LINK_STREAMS], ends[HOSTS_N * PLI_N_LINK_STREAMS];
    pl_comm *world = NULL;
    pli_hierarchy_options options = {.rank = 1,
                                     .world_size = HOSTS_N,
                                     .n_hosts = HOSTS_N,
                                     .n_ranks = n_ranks,
                                     .n_ops = 4,
                                     .deadline_ns = 60000 * PLI_MS};
    const pli_links_options links = {
        .n_hosts = HOSTS_N, .host = HOSTS_ME, .rank = 1, .fds = fds, .names = names};
    const int n_before = n_descriptors();
    connect_hosts(fds, ends);
    must(local_create(1, HOSTS_BIG * sizeof(float), 60000 * PLI_MS, &options.inner) ==
         PL_OK);
    must(pli_links_create(&links, &options.links) == PL_OK);
    close_sockets(fds);
    must(pli_hierarchy_create(&options, &world) == PL_OK);
    use_hosts(world, &from, ends);
    pl_comm_destroy(world);
    close_sockets(ends);
    must(n_descriptors() == n_before);
    return 0;
}
