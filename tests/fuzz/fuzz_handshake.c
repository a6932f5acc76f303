/* fuzz_handshake.c - the construction of a world of processes: a stranger connects to
 * rank 0 before rank 1 does, or one that claims to be rank 0 answers rank 1.  Either
 * may have the secret, so that inputs reach what follows the proofs.
 */
#include <pthread.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "bytes.h"
#include "comm/shm_init.h"
#include "core/clock.h"
#include "tests/c/secret.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Flags: the input claims to be rank 0; it has the secret. */
enum { HANDSHAKE_ANSWERS = 1, HANDSHAKE_PROVES = 2 };

static const int handshake_pids[2] = {0, 0};

static pli_shm_options handshake_options(int rank)
{
    return (pli_shm_options){.rank = rank,
                             .world_size = 2,
                             .arena_bytes = 1,
                             .n_ops = 1,
                             .deadline_ns = 5000 * PLI_MS,
                             .pids = handshake_pids,
                             .prove = secret_prove};
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

static void make_proof(const char *side, const pli_handshake_greeting *greeting,
                       const pli_handshake_join *join, unsigned char *out)
{
    struct {
        char side[8];
        unsigned char nonces[2][PLI_NONCE_BYTES];
        int32_t rank, is_sure;
    } message = {.rank = join->rank, .is_sure = join->is_sure};
    memcpy(message.side, side, strlen(side));
    memcpy(message.nonces[0], greeting->nonce, PLI_NONCE_BYTES);
    memcpy(message.nonces[1], join->nonce, PLI_NONCE_BYTES);
    must(secret_prove(NULL, &message, sizeof message, out) == PL_OK);
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

/* The input in one thread, the product in the other. */
typedef struct scene {
    pli_listener *listener;
    const char *address;
    bytes from;
    int has_secret;
} scene;

/* ---- rank 0 --------------------------------------------------------------------- */

static void *come_as_stranger_and_as_rank_1(void *argument)
{
    scene *self = argument;
    const pli_shm_options options = handshake_options(1);
    const size_t n_fds = bytes_number(&self->from) % 4;
    pli_handshake_greeting greeting = {0};
    pli_watch watch;
    int fd = -1;
    const int stranger = handshake_connect(self->address);
    (void)!recv(stranger, &greeting, sizeof greeting, 0);
    if (self->has_secret) {
        pli_handshake_join join = {0};
        bytes_copy(&self->from, &join, sizeof join);
        make_proof("join", &greeting, &join, join.proof);
        send_packet(stranger, (bytes){(const uint8_t *)&join, sizeof join}, n_fds,
                    self->listener->fd);
    } else {
        send_packet(stranger, self->from, n_fds, self->listener->fd);
    }
    must(pli_watch_init(&watch, 2) == PL_OK);
    must(pli_handshake_request(&options, self->address, &watch, &fd) == PL_EPEER);
    pli_watch_fini(&watch);
    (void)close(stranger);
    return NULL;
}

static void hear_stranger(scene *self)
{
    const pli_shm_options options = handshake_options(0);
    pthread_t thread;
    pli_watch watch;
    must(pli_watch_init(&watch, 2) == PL_OK);
    must(pthread_create(&thread, NULL, come_as_stranger_and_as_rank_1, self) == 0);
    must(pli_handshake_accept(&options, self->listener, &watch) == PL_OK);
    pli_listener_close(self->listener);
    pli_watch_fini(&watch);
    (void)pthread_join(thread, NULL);
}

/* ---- rank 1 --------------------------------------------------------------------- */

static void *answer_rank(void *argument)
{
    scene *self = argument;
    const pli_handshake_greeting greeting = {.magic = PLI_HANDSHAKE_MAGIC};
    const size_t n_fds = bytes_number(&self->from) % 4;
    pli_handshake_join join = {0};
    const int fd = accept4(self->listener->fd, NULL, NULL, SOCK_CLOEXEC);
    if (self->has_secret) {
        pli_handshake_reply reply = {.magic = PLI_HANDSHAKE_MAGIC};
        (void)!send(fd, &greeting, sizeof greeting, MSG_NOSIGNAL);
        (void)!recv(fd, &join, sizeof join, 0);
        make_proof("reply", &greeting, &join, reply.proof);
        (void)!send(fd, &reply, sizeof reply, MSG_NOSIGNAL);
    }
    send_packet(fd, self->from, n_fds, self->listener->fd);
    pli_listener_close(self->listener); /* it is not tried again */
    (void)close(fd);
    return NULL;
}

static void be_answered(scene *self)
{
    const pli_shm_options options = handshake_options(1);
    pthread_t thread;
    pl_comm *comm = NULL;
    must(pthread_create(&thread, NULL, answer_rank, self) == 0);
    must(pli_shm_create(&options, NULL, self->address, &comm) != PL_OK);
    (void)pthread_join(thread, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    bytes from = {data, n};
    char address[PLI_ADDRESS_BYTES];
    pli_listener *listener = NULL;
    const int n_before = n_descriptors();
    const unsigned flags = bytes_number(&from);
    must(pli_listener_create(address, &listener) == PL_OK);
    scene self = {listener, address, from, (flags & HANDSHAKE_PROVES) != 0};
    if (flags & HANDSHAKE_ANSWERS)
        be_answered(&self);
    else
        hear_stranger(&self);
    pli_listener_destroy(listener);
    must(n_descriptors() == n_before);
    return 0;
}
