/* handshake.c - sends a descriptor over Unix sockets, and watches the peers. */
#include "handshake.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/clock.h"

#define HANDSHAKE_MAGIC UINT64_C(0x6f6c6c65682d6c70) /* "pl-hello" */
enum {
    POLL_MS = 20,
    ASK_EVERY = 5, /* polls */
    REQUEST_TIMEOUT_S = 5,
    MOST_PEERS = 2 * PL_MAX_RANKS
};

/* Repeats a system call that a signal has interrupted. */
#define UNTIL_DONE(n, call)                                                            \
    do                                                                                 \
        (n) = PL_SYS(call);                                                            \
    while ((n) < 0 && errno == EINTR)

static void fill_address(const char *address, struct sockaddr_un *out,
                         socklen_t *out_len)
{
    const size_t n = strnlen(address, PLI_ADDRESS_BYTES - 1);
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out->sun_path + 1, address,
           n); /* leading zero: abstract name, no file to unlink */
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

void pli_listener_close(pli_listener *listener)
{
    if (listener == NULL || listener->fd < 0)
        return;
    (void)close(listener->fd);
    listener->fd = -1;
}

void pli_listener_destroy(pli_listener *listener)
{
    pli_listener_close(listener);
    pli_free(listener);
}

/* State of one wait during construction, across its wake-ups. */
typedef struct waiting {
    const pli_shm_options *options;
    const pli_watch *watch;
    pli_stopwatch silence; /* since a peer last showed life */
    int n_polls;
} waiting;

/* Waits briefly for any of `fds`.  PL_EPEER if a watched rank has ended and none is
 * readable; *n_ready may be 0. */
static pl_status poll_peers(waiting *self, struct pollfd *fds, nfds_t n_fds,
                            int *n_ready)
{
    pl_status st = PL_OK;
    const pli_shm_options *options = self->options;
    *n_ready = PL_SYS(poll(fds, n_fds, POLL_MS));
    if (*n_ready < 0 && errno != EINTR)
        PL_FAIL_ERRNO("cannot wait for the other ranks");
    if (*n_ready > 0)
        goto done;
    int dead = pli_watch_ended(self->watch, PLI_PROCESS_ENDED, 0);
    if (dead < 0)
        dead = pli_watch_ended(self->watch, PLI_SOCKET_CLOSED, 0);
    if (dead >= 0 && (*n_ready = poll(fds, n_fds, 0)) <= 0)
        PL_FAIL(PL_EPEER,
                "rank %d: rank %d (process %d) died or gave up during construction",
                options->first_rank + options->rank, options->first_rank + dead,
                options->pids[dead]);
    if (self->n_polls++ % ASK_EVERY == 0 && options->is_interrupted != NULL &&
        options->is_interrupted(options->context))
        PL_FAIL(PL_EAGAIN, "interrupted");
    if (pli_elapsed_ns(&self->silence) > options->deadline_ns)
        PL_FAIL(PL_ETIMEOUT,
                "rank %d: not every rank came to the construction before the deadline",
                options->first_rank + options->rank);
done:
    return st;
}

static pl_status wait_readable(const pli_shm_options *options, const pli_watch *watch,
                               int fd)
{
    pl_status st = PL_OK;
    waiting wait = {.options = options, .watch = watch};
    for (int n_ready = 0; n_ready <= 0;) {
        struct pollfd one = {.fd = fd, .events = POLLIN};
        PL_TRY(poll_peers(&wait, &one, 1, &n_ready));
    }
done:
    return st;
}

/* ---- connections to rank 0 ----------------------------------------------------- */

/* Peers that have connected and sent nothing yet, oldest first. */
typedef struct pending_peers {
    int n;
    struct {
        int fd;
        int64_t since_ns;
    } all[MOST_PEERS];
} pending_peers;

static void drop_peer(pending_peers *self, int i)
{
    self->n--;
    for (; i < self->n; i++)
        self->all[i] = self->all[i + 1];
}

static void refuse(int fd, const char *message)
{
    pli_handshake_reply reply = {.magic = HANDSHAKE_MAGIC, .status = PL_EPEER};
    pli_text_print(reply.message, sizeof reply.message, "%s", message);
    (void)send(fd, &reply, sizeof reply, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)close(fd);
}

static pl_status accept_peer(const pli_listener *listener, pending_peers *self)
{
    pl_status st = PL_OK;
    const int fd = PL_SYS(accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC));
    if (fd < 0 && (errno == EINTR || errno == ECONNABORTED || errno == EAGAIN))
        goto done;
    if (fd < 0)
        PL_FAIL_ERRNO("cannot accept another rank's connection");
    if (self->n == MOST_PEERS) { /* the oldest has had its time */
        refuse(self->all[0].fd, "too many processes connect to rank 0");
        drop_peer(self, 0);
    }
    self->all[self->n].fd = fd;
    self->all[self->n++].since_ns = pli_now_ns();
done:
    return st;
}

/* The process at the other end, if the kernel reports it; pid 0 if it is not visible
 * from here. */
static int read_peer(int fd, struct ucred *out)
{
    socklen_t n = sizeof *out;
    int status = 0;
    UNTIL_DONE(status, getsockopt(fd, SOL_SOCKET, SO_PEERCRED, out, &n));
    return status == 0;
}

/* Whether the peer is the rank it claims to be; PL_EINVAL if not, with a message for
 * the peer. */
static pl_status check_request(const pli_shm_options *options, const pli_watch *watch,
                               const pli_handshake_join *request,
                               const struct ucred *peer)
{
    pl_status st = PL_OK;
    const int r = request->rank;
    if (r < 1 || r >= options->world_size || watch->ranks[r].socket >= 0)
        PL_FAIL(PL_EINVAL, "rank 0 does not wait for a rank %d", r);
    if (options->pids[r] > 0 && peer->pid > 0 && peer->pid != options->pids[r])
        PL_FAIL(PL_EINVAL, "process %d is not rank %d, which is process %d",
                (int)peer->pid, r, options->pids[r]);
    if (peer->uid == geteuid())
        goto done;
    /* Ignore a process of another user.  But if it is known to be this rank, the rank
     * can never join: do not wait for it. */
    st = options->pids[r] > 0 && peer->pid == options->pids[r] ? PL_ESYS : PL_EINVAL;
    st = pli_fail(st,
                  "rank 0 runs as user %u and rank %d as user %u: they cannot share "
                  "memory",
                  (unsigned)geteuid(), r, (unsigned)peer->uid);
done:
    return st;
}

/* Reads a peer's request; the socket is then a rank's, or closed. */
static pl_status read_request(const pli_shm_options *options, int fd, pli_watch *watch)
{
    pl_status st = PL_OK;
    pli_handshake_join request = {0};
    struct ucred peer = {0};
    const int is_known = read_peer(fd, &peer);
    ssize_t n = 0;
    UNTIL_DONE(n, recv(fd, &request, sizeof request, MSG_DONTWAIT));
    if (!is_known || n != (ssize_t)sizeof request || request.magic != HANDSHAKE_MAGIC) {
        refuse(fd, "rank 0 received no request from a rank of the same version of "
                   "paceline");
        goto done;
    }
    st = check_request(options, watch, &request, &peer);
    if (st != PL_OK) {
        refuse(fd, pl_error_message());
        st = st == PL_EINVAL ? PL_OK : st;
        goto done;
    }
    watch->ranks[request.rank].socket = fd;
    if (watch->ranks[request.rank].process == NULL && peer.pid > 0)
        PL_TRY(pli_watch_add(watch, options->processes, request.rank, peer.pid));
    watch->ranks[request.rank].is_sure =
        request.is_sure && pli_watch_is_sure(watch, request.rank);
done:
    return st;
}

/* Reads from all connected peers, side by side. */
static pl_status read_requests(const pli_shm_options *options,
                               const struct pollfd *polled, pending_peers *self,
                               pli_watch *watch)
{
    pl_status st = PL_OK;
    for (int i = self->n - 1; i >= 0; i--) {
        const int fd = self->all[i].fd;
        const int is_late = pli_now_ns() - self->all[i].since_ns >
                            (int64_t)REQUEST_TIMEOUT_S * 1000 * PLI_MS;
        if (polled[i].revents == 0 && !is_late)
            continue;
        drop_peer(self, i);
        if (polled[i].revents == 0)
            refuse(fd, "rank 0 received no request in time");
        else
            PL_TRY(read_request(options, fd, watch));
    }
done:
    return st;
}

static int n_missing(const pli_shm_options *options, const pli_watch *watch)
{
    int n = 0;
    for (int r = 1; r < options->world_size; r++)
        n += watch->ranks[r].socket < 0;
    return n;
}

pl_status pli_handshake_accept(const pli_shm_options *options,
                               const pli_listener *listener, pli_watch *watch)
{
    pl_status st = PL_OK;
    pending_peers all = {0};
    waiting wait = {.options = options, .watch = watch};
    int n_left = n_missing(options, watch);
    if (listener->fd < 0)
        PL_FAIL(PL_EINVAL, "this listener has already made a world: make another");
    while (n_left > 0) {
        struct pollfd polled[MOST_PEERS + 1];
        const int n = all.n;
        int n_ready = 0;
        for (int i = 0; i < n; i++)
            polled[i] = (struct pollfd){.fd = all.all[i].fd, .events = POLLIN};
        polled[n] = (struct pollfd){.fd = listener->fd, .events = POLLIN};
        PL_TRY(poll_peers(&wait, polled, (nfds_t)n + 1, &n_ready));
        PL_TRY(read_requests(options, polled, &all, watch));
        if (n_ready > 0 && polled[n].revents != 0)
            PL_TRY(accept_peer(listener, &all));
        const int n_now = n_missing(options, watch);
        if (n_now < n_left)
            wait.silence = (pli_stopwatch){0};
        n_left = n_now;
    }
done:
    for (int i = 0; i < all.n; i++)
        refuse(all.all[i].fd, "rank 0 accepts no more ranks");
    return st;
}

pl_status pli_handshake_answer(int socket, const pli_handshake_reply *reply, int fd)
{
    pl_status st = PL_OK;
    pli_handshake_reply message = *reply;
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {.iov_base = &message, .iov_len = sizeof message};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    message.magic = HANDSHAKE_MAGIC;
    if (fd >= 0) {
        packet.msg_control = control;
        packet.msg_controllen = sizeof control;
        struct cmsghdr *head = CMSG_FIRSTHDR(&packet);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(head), &fd, sizeof fd);
    }
    ssize_t n = 0;
    UNTIL_DONE(n, sendmsg(socket, &packet, MSG_NOSIGNAL));
    if (n < 0 && (errno == EPIPE || errno == ECONNRESET))
        PL_FAIL(PL_EPEER, "another rank died or gave up during construction");
    if (n != (ssize_t)sizeof message)
        PL_FAIL_ERRNO("cannot send shared memory to another rank");
done:
    return st;
}

/* Rank 0 is gone, or gave up because another rank is. */
static pl_status fail_without_rank_0(const pli_shm_options *options,
                                     const pli_watch *watch)
{
    const int dead = pli_watch_ended(watch, PLI_PROCESS_ENDED, 0);
    return pli_fail(PL_EPEER, "rank %d: rank %d died or gave up during construction",
                    options->first_rank + options->rank,
                    options->first_rank + (dead > 0 ? dead : 0));
}

static pl_status receive_reply(const pli_shm_options *options, pli_watch *watch,
                               int *out_fd)
{
    pl_status st = PL_OK;
    const int rank = options->rank;
    pli_handshake_reply reply = {0};
    int fd = -1;
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {.iov_base = &reply, .iov_len = sizeof reply};
    struct msghdr packet = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = control,
                            /* Exactly one: CMSG_SPACE() has room for two. */
                            .msg_controllen = CMSG_LEN(sizeof fd)};
    ssize_t n = 0;
    UNTIL_DONE(n, recvmsg(watch->ranks[0].socket, &packet, MSG_CMSG_CLOEXEC));
    const struct cmsghdr *head = n >= 0 ? CMSG_FIRSTHDR(&packet) : NULL;
    if (head != NULL && head->cmsg_type == SCM_RIGHTS)
        memcpy(&fd, CMSG_DATA(head), sizeof fd);
    if (n != (ssize_t)sizeof reply || reply.magic != HANDSHAKE_MAGIC)
        PL_TRY(fail_without_rank_0(options, watch));
    if (reply.status != PL_OK)
        PL_FAIL(PL_EPEER, "rank %d: rank 0 could not make the world: %.*s", rank,
                (int)sizeof reply.message - 1, reply.message);
    if (fd < 0)
        PL_FAIL(
            PL_ESYS,
            "rank %d: no descriptor came with rank 0's answer: raise the limit of open "
            "files (ulimit -n)",
            rank);
    watch->ranks[0].is_sure = reply.is_sure && pli_watch_is_sure(watch, 0);
    *out_fd = fd;
    fd = -1;
done:
    if (fd >= 0)
        (void)close(fd);
    return st;
}

static pl_status connect_to_rank_0(const pli_shm_options *options, const char *address,
                                   pli_watch *watch)
{
    pl_status st = PL_OK;
    struct sockaddr_un name;
    struct ucred peer = {0};
    socklen_t name_len;
    int status = 0;
    const int fd = PL_SYS(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd < 0)
        PL_FAIL_ERRNO("cannot make a Unix socket");
    watch->ranks[0].socket = fd;
    fill_address(address, &name, &name_len);
    UNTIL_DONE(status, connect(fd, (struct sockaddr *)&name, name_len));
    if (status != 0) {
        if (errno == ECONNREFUSED)
            PL_TRY(fail_without_rank_0(options, watch));
        PL_FAIL_ERRNO("rank %d: cannot connect to rank 0", options->rank);
    }
    if (watch->ranks[0].process == NULL && read_peer(fd, &peer) && peer.pid > 0)
        PL_TRY(pli_watch_add(watch, options->processes, 0, peer.pid));
done:
    return st;
}

pl_status pli_handshake_request(const pli_shm_options *options, const char *address,
                                pli_watch *watch, int *out_fd)
{
    pl_status st = PL_OK;
    pli_handshake_join request = {.magic = HANDSHAKE_MAGIC, .rank = options->rank};
    ssize_t n = 0;
    PL_TRY(connect_to_rank_0(options, address, watch));
    const int fd = watch->ranks[0].socket;
    request.is_sure = pli_watch_is_sure(watch, 0);
    UNTIL_DONE(n, send(fd, &request, sizeof request, MSG_NOSIGNAL));
    if (n < 0 && (errno == EPIPE || errno == ECONNRESET))
        PL_TRY(fail_without_rank_0(options, watch));
    if (n != (ssize_t)sizeof request)
        PL_FAIL_ERRNO("rank %d: cannot send to rank 0", options->rank);
    PL_TRY(wait_readable(options, watch, fd));
    PL_TRY(receive_reply(options, watch, out_fd));
done:
    return st;
}
