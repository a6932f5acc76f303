/* hello.c - Unix sockets, one descriptor, and an eye on the peers meanwhile. */
#include "hello.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "../core/alloc.h"
#include "../core/clock.h"

#define HELLO_MAGIC UINT64_C(0x6f6c6c65682d6c70) /* "pl-hello" */
enum { POLL_MS = 20, ASK_EVERY = 5, HELLO_PATIENCE_S = 5 };

static void fill_address(const char *address, struct sockaddr_un *out,
                         socklen_t *out_len)
{
    const size_t n = strnlen(address, PLI_ADDRESS_BYTES - 1);
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out->sun_path + 1, address,
           n); /* a leading zero: no file, nothing to unlink */
    *out_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

pl_status pli_listener_create(char address[PLI_ADDRESS_BYTES], pli_listener **out)
{
    pl_status st = PL_OK;
    pli_listener *listener = NULL;
    uint64_t noise[2];
    struct sockaddr_un name;
    socklen_t name_len;
    PL_TRY(pli_calloc(1, sizeof *listener, "listener", &listener));
    listener->fd = PL_SYS(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (listener->fd < 0)
        PL_FAIL_ERRNO("cannot make a Unix socket");
    if (PL_SYS(getrandom(noise, sizeof noise, 0)) != (ssize_t)sizeof noise)
        PL_FAIL_ERRNO("cannot draw a random name");
    (void)snprintf(address, PLI_ADDRESS_BYTES, "paceline-%016llx%016llx",
                   (unsigned long long)noise[0], (unsigned long long)noise[1]);
    fill_address(address, &name, &name_len);
    if (PL_SYS(bind(listener->fd, (struct sockaddr *)&name, name_len)) != 0)
        PL_FAIL_ERRNO("cannot name a Unix socket");
    if (PL_SYS(listen(listener->fd, 2 * PL_MAX_RANKS)) != 0)
        PL_FAIL_ERRNO("cannot listen on a Unix socket");
    *out = listener;
    listener = NULL;
done:
    pli_listener_destroy(listener);
    return st;
}

void pli_listener_destroy(pli_listener *listener)
{
    if (listener == NULL)
        return;
    if (listener->fd >= 0)
        (void)close(listener->fd);
    pli_free(listener);
}

/* Waits until `fd` is readable: PL_EPEER where a watched rank ends first. */
static pl_status wait_readable(const pli_shm_options *options, const pli_watch *watch,
                               int fd)
{
    pl_status st = PL_OK;
    const int64_t begin = pli_now_ns();
    for (int i = 0;; i++) {
        struct pollfd one = {.fd = fd, .events = POLLIN};
        const int n = PL_SYS(poll(&one, 1, POLL_MS));
        if (n > 0)
            break;
        if (n < 0 && errno != EINTR)
            PL_FAIL_ERRNO("cannot wait for the other ranks");
        int dead = pli_watch_ended(watch, PLI_PROCESS_ENDED, 0);
        if (dead < 0)
            dead = pli_watch_ended(watch, PLI_SOCKET_CLOSED, 0);
        if (dead >= 0 && poll(&one, 1, 0) <= 0)
            PL_FAIL(PL_EPEER,
                    "rank %d: rank %d (process %d) died or gave up during construction",
                    options->rank, dead, options->pids[dead]);
        if (i % ASK_EVERY == 0 && options->is_interrupted != NULL &&
            options->is_interrupted(options->context))
            PL_FAIL(PL_EAGAIN, "interrupted");
        if (pli_now_ns() - begin > options->deadline_ns)
            PL_FAIL(
                PL_ETIMEOUT,
                "rank %d: not every rank came to the construction before the deadline",
                options->rank);
    }
done:
    return st;
}

/* Only processes of the same user have a say. */
static int is_own_user(int fd)
{
    struct ucred peer;
    socklen_t n = sizeof peer;
    return PL_SYS(getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n)) == 0 &&
           peer.uid == geteuid();
}

static pl_status accept_one(const pli_listener *listener, int world_size,
                            pli_watch *watch)
{
    pl_status st = PL_OK;
    pli_hello hello;
    const struct timeval patience = {.tv_sec = HELLO_PATIENCE_S};
    const int fd = PL_SYS(accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC));
    if (fd < 0)
        PL_FAIL_ERRNO("cannot accept another rank's connection");
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (!is_own_user(fd) ||
        PL_SYS(recv(fd, &hello, sizeof hello, 0)) != (ssize_t)sizeof hello ||
        hello.magic != HELLO_MAGIC || hello.rank < 1 || hello.rank >= world_size ||
        watch->socket[hello.rank] >= 0) {
        (void)close(fd); /* a stranger, or a rank that has just died */
        goto done;
    }
    watch->socket[hello.rank] = fd;
done:
    return st;
}

pl_status pli_hello_accept(const pli_shm_options *options, const pli_listener *listener,
                           pli_watch *watch)
{
    pl_status st = PL_OK;
    int n_missing = options->world_size - 1;
    while (n_missing > 0) {
        PL_TRY(wait_readable(options, watch, listener->fd));
        PL_TRY(accept_one(listener, options->world_size, watch));
        n_missing = 0;
        for (int r = 1; r < options->world_size; r++)
            n_missing += watch->socket[r] < 0;
    }
done:
    return st;
}

pl_status pli_hello_answer(int socket, const pli_welcome *welcome, int fd)
{
    pl_status st = PL_OK;
    pli_welcome message = *welcome;
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {.iov_base = &message, .iov_len = sizeof message};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    message.magic = HELLO_MAGIC;
    if (fd >= 0) {
        packet.msg_control = control;
        packet.msg_controllen = sizeof control;
        struct cmsghdr *head = CMSG_FIRSTHDR(&packet);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(head), &fd, sizeof fd);
    }
    const ssize_t n = PL_SYS(sendmsg(socket, &packet, MSG_NOSIGNAL));
    if (n < 0 && (errno == EPIPE || errno == ECONNRESET))
        PL_FAIL(PL_EPEER, "another rank died or gave up during construction");
    if (n != (ssize_t)sizeof message)
        PL_FAIL_ERRNO("cannot send shared memory to another rank");
done:
    return st;
}

/* Rank 0 is gone, or gave up over a rank that is. */
static pl_status fail_without_rank_0(const pli_shm_options *options,
                                     const pli_watch *watch)
{
    const int dead = pli_watch_ended(watch, PLI_PROCESS_ENDED, 0);
    return pli_fail(PL_EPEER, "rank %d: rank %d died or gave up during construction",
                    options->rank, dead > 0 ? dead : 0);
}

static pl_status receive_welcome(const pli_shm_options *options, const pli_watch *watch,
                                 int *out_fd)
{
    pl_status st = PL_OK;
    const int rank = options->rank;
    pli_welcome welcome = {0};
    int fd = -1;
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {.iov_base = &welcome, .iov_len = sizeof welcome};
    struct msghdr packet = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = control,
                            .msg_controllen = sizeof control};
    const ssize_t n = PL_SYS(recvmsg(watch->socket[0], &packet, MSG_CMSG_CLOEXEC));
    const struct cmsghdr *head = n > 0 ? CMSG_FIRSTHDR(&packet) : NULL;
    if (head != NULL && head->cmsg_type == SCM_RIGHTS)
        memcpy(&fd, CMSG_DATA(head), sizeof fd);
    if (n != (ssize_t)sizeof welcome || welcome.magic != HELLO_MAGIC)
        PL_TRY(fail_without_rank_0(options, watch));
    if (welcome.status != PL_OK)
        PL_FAIL(PL_EPEER, "rank %d: rank 0 could not make the world: %.*s", rank,
                (int)sizeof welcome.words - 1, welcome.words);
    if (fd < 0)
        PL_FAIL(
            PL_ESYS,
            "rank %d: no descriptor came with rank 0's answer: is the limit of open "
            "files (ulimit -n) reached?",
            rank);
    *out_fd = fd;
    fd = -1;
done:
    if (fd >= 0)
        (void)close(fd);
    return st;
}

pl_status pli_hello_say(const pli_shm_options *options, const char *address,
                        pli_watch *watch, int *out_fd)
{
    pl_status st = PL_OK;
    struct sockaddr_un name;
    socklen_t name_len;
    const pli_hello hello = {
        .magic = HELLO_MAGIC, .rank = options->rank, .pid = getpid()};
    const int fd = PL_SYS(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd < 0)
        PL_FAIL_ERRNO("cannot make a Unix socket");
    watch->socket[0] = fd;
    fill_address(address, &name, &name_len);
    if (PL_SYS(connect(fd, (struct sockaddr *)&name, name_len)) != 0) {
        if (errno == ECONNREFUSED)
            PL_TRY(fail_without_rank_0(options, watch));
        PL_FAIL_ERRNO("rank %d: cannot connect to rank 0", options->rank);
    }
    const ssize_t n = PL_SYS(send(fd, &hello, sizeof hello, MSG_NOSIGNAL));
    if (n < 0 && (errno == EPIPE || errno == ECONNRESET))
        PL_TRY(fail_without_rank_0(options, watch));
    if (n != (ssize_t)sizeof hello)
        PL_FAIL_ERRNO("rank %d: cannot speak to rank 0", options->rank);
    PL_TRY(wait_readable(options, watch, fd));
    PL_TRY(receive_welcome(options, watch, out_fd));
done:
    return st;
}
