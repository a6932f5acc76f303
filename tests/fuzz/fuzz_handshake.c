/* fuzz_handshake.c - the construction of a world of processes: strangers connect to
 * rank 0 before rank 1 does, or one that claims to be rank 0 answers rank 1.
 */
#include <pthread.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "bytes.h"
#include "comm/handshake.h"
#include "core/clock.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { HANDSHAKE_ANSWERS = 1 }; /* flag: the input claims to be rank 0 */

static const int handshake_pids[2] = {0, 0};

static pli_shm_options handshake_options(int rank)
{
    return (pli_shm_options){.rank = rank,
                             .world_size = 2,
                             .arena_bytes = 1,
                             .n_ops = 1,
                             .deadline_ns = 5000 * PLI_MS,
                             .pids = handshake_pids};
}

static int handshake_connect(const char *address)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    const size_t n = strlen(address);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    memcpy(name.sun_path + 1, address, n);
    must(connect(fd, (struct sockaddr *)&name,
                 (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n)) == 0);
    return fd;
}

/* Sends a packet with copies of the listener's descriptor, not of shared memory. */
static void send_packet(int to, bytes packet, size_t n_fds, int listener)
{
    const int fds[3] = {listener, listener, listener};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof fds)] = {0};
    struct iovec part = {.iov_base = (void *)packet.at, .iov_len = packet.n};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (n_fds > 0) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(head), fds, n_fds * sizeof(int));
    }
    (void)sendmsg(to, &message, MSG_NOSIGNAL);
}

/* ---- rank 0 --------------------------------------------------------------------- */

static void hear_stranger(const pli_listener *listener, const char *address,
                          bytes *from)
{
    const pli_shm_options options = handshake_options(0);
    /* "pl-hello": the correct request of rank 1 */
    const pli_handshake_join request = {.magic = UINT64_C(0x6f6c6c65682d6c70),
                                        .rank = 1};
    const bytes word = {(const uint8_t *)&request, sizeof request};
    const size_t n_fds = bytes_number(from) % 4;
    pli_watch watch;
    must(pli_watch_init(&watch, 2) == PL_OK);
    const int stranger = handshake_connect(address);
    send_packet(stranger, *from, n_fds, listener->fd);
    const int rank = handshake_connect(address);
    send_packet(rank, word, 0, -1);
    must(pli_handshake_accept(&options, listener, &watch) == PL_OK);
    pli_watch_fini(&watch);
    (void)close(stranger);
    (void)close(rank);
}

/* ---- rank 1 --------------------------------------------------------------------- */

typedef struct answering {
    int listener;
    bytes from;
} answering;

static void *answer_rank(void *argument)
{
    answering *self = argument;
    char request[64];
    const size_t n_fds = bytes_number(&self->from) % 4;
    const int fd = accept4(self->listener, NULL, NULL, SOCK_CLOEXEC);
    (void)recv(fd, request, sizeof request, 0);
    send_packet(fd, self->from, n_fds, self->listener);
    (void)close(fd);
    return NULL;
}

static void be_answered(const pli_listener *listener, const char *address, bytes *from)
{
    const pli_shm_options options = handshake_options(1);
    answering answer = {listener->fd, *from};
    pthread_t thread;
    pl_comm *comm = NULL;
    must(pthread_create(&thread, NULL, answer_rank, &answer) == 0);
    must(pli_shm_create(&options, NULL, address, &comm) != PL_OK);
    (void)pthread_join(thread, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    bytes from = {data, n};
    char address[PLI_ADDRESS_BYTES];
    pli_listener *listener = NULL;
    const int n_before = n_descriptors();
    must(pli_listener_create(address, &listener) == PL_OK);
    if (bytes_number(&from) & HANDSHAKE_ANSWERS)
        be_answered(listener, address, &from);
    else
        hear_stranger(listener, address, &from);
    pli_listener_destroy(listener);
    must(n_descriptors() == n_before);
    return 0;
}
