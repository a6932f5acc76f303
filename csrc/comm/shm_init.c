/* shm_init.c - ranks that are processes prove a secret over Unix sockets; rank 0 makes
 * the segment and sends its descriptor.
 *
 *     rank 0                            another rank
 *       greeting: nonce             -->
 *                                   <-- join: rank, nonce, proof
 *       reply: proof, or a refusal  -->
 *       reply: the segment          --> once all ranks have joined
 *
 * Each proof covers both nonces, and needs the secret that the ranks share.
 */
#include "shm_init.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/clock.h"
#include "shm_comm.h"

enum {
    POLL_MS = 20,
    ASK_EVERY = 5,   /* checks */
    READ_FIRST = 50, /* checks: how long messages are read before a death is told */
    PROOF_TIMEOUT_S = 2,
    MOST_PEERS = 2 * PL_MAX_RANKS
};

/* Repeats a system call that a signal has interrupted. */
#define UNTIL_DONE(n, call)                                                            \
    do                                                                                 \
        (n) = PL_SYS(call);                                                            \
    while ((n) < 0 && errno == EINTR)

/* ---- the listener --------------------------------------------------------------- */

/* Writes a listener's name; returns its length. */
static socklen_t listener_name(const char *address, struct sockaddr_un *out)
{
    const size_t n = strnlen(address, PLI_ADDRESS_BYTES - 1);
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out->sun_path + 1, address, n); /* after a zero: abstract, no file */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
}

pl_status pli_listener_create(char address[PLI_ADDRESS_BYTES], pli_listener **out)
{
    pl_status st = PL_OK;
    pli_listener *listener = NULL;
    uint64_t noise[2];
    struct sockaddr_un name;
    PL_TRY(pli_calloc(1, sizeof *listener, "listener", &listener));
    listener->fd = PL_SYS(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (listener->fd < 0)
        PL_FAIL_ERRNO("cannot make a Unix socket");
    if (PL_SYS(getrandom(noise, sizeof noise, 0)) != (ssize_t)sizeof noise)
        PL_FAIL_ERRNO("cannot draw a random name");
    (void)snprintf(address, PLI_ADDRESS_BYTES, "paceline-%016llx%016llx",
                   (unsigned long long)noise[0], (unsigned long long)noise[1]);
    const socklen_t name_len = listener_name(address, &name);
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

/* The process at the other end of a connection; PL_ESYS if the kernel does not say. */
static pl_status read_peer(int fd, struct ucred *out)
{
    pl_status st = PL_OK;
    socklen_t n = sizeof *out;
    int status = 0;
    UNTIL_DONE(status, getsockopt(fd, SOL_SOCKET, SO_PEERCRED, out, &n));
    if (status != 0)
        PL_FAIL_ERRNO("cannot learn which process connects, which a sandbox may forbid "
                      "(SO_PEERCRED)");
done:
    return st;
}

/* ---- waiting -------------------------------------------------------------------- */

/* State of one wait during construction, across its wake-ups. */
typedef struct waiting {
    const pli_shm_options *options;
    const pli_watch *watch;
    pli_stopwatch silence; /* since a peer last showed life */
    int64_t checked_ns; /* when it last looked at the peers, signals and the deadline */
    int n_checks;
    int n_deaths; /* checks that found a rank ended */
} waiting;

/* Waits briefly for any of `fds`.  PL_EPEER if a watched rank has ended and none is
 * readable, or callers keep some readable; *n_ready may be 0. */
static pl_status poll_peers(waiting *self, struct pollfd *fds, nfds_t n_fds,
                            int *n_ready)
{
    pl_status st = PL_OK;
    const pli_shm_options *options = self->options;
    *n_ready = PL_SYS(poll(fds, n_fds, POLL_MS));
    if (*n_ready < 0 && errno != EINTR)
        PL_FAIL_ERRNO("cannot wait for the other ranks");
    const int64_t now_ns = pli_now_ns();
    if (*n_ready > 0 && now_ns - self->checked_ns < POLL_MS * PLI_MS)
        goto done;
    self->checked_ns = now_ns;
    int dead = pli_watch_ended(self->watch, PLI_PROCESS_ENDED, 0);
    if (dead < 0)
        dead = pli_watch_ended(self->watch, PLI_SOCKET_CLOSED, 0);
    if (dead >= 0 &&
        ((*n_ready = poll(fds, n_fds, 0)) <= 0 || self->n_deaths++ > READ_FIRST))
        PL_FAIL(PL_EPEER,
                "rank %d: rank %d (process %d) died or gave up during construction",
                options->first_rank + options->rank, options->first_rank + dead,
                options->pids[dead]);
    if (self->n_checks++ % ASK_EVERY == 0 && options->is_interrupted != NULL &&
        options->is_interrupted(options->context))
        PL_FAIL(PL_EAGAIN, "interrupted");
    if (pli_elapsed_ns(&self->silence) > options->deadline_ns)
        PL_FAIL(PL_ETIMEOUT,
                "rank %d: not every rank came to the construction before the deadline",
                options->first_rank + options->rank);
done:
    return st;
}

static pl_status wait_readable(waiting *wait, int fd)
{
    pl_status st = PL_OK;
    for (int n_ready = 0; n_ready <= 0;) {
        struct pollfd one = {.fd = fd, .events = POLLIN};
        PL_TRY(poll_peers(wait, &one, 1, &n_ready));
    }
done:
    return st;
}

/* ---- the secret ----------------------------------------------------------------- */

static pl_status draw_nonce(unsigned char out[PLI_NONCE_BYTES])
{
    pl_status st = PL_OK;
    ssize_t n = 0;
    UNTIL_DONE(n, getrandom(out, PLI_NONCE_BYTES, 0));
    if (n != PLI_NONCE_BYTES)
        PL_FAIL_ERRNO("cannot draw random bytes");
done:
    return st;
}

/* The proof of a side: "join" is the rank's, "reply" rank 0's.  Nonces of both sides
 * make it worthless for any other connection. */
static pl_status prove(const pli_shm_options *options, const char *side,
                       const unsigned char *nonce, const pli_handshake_join *join,
                       unsigned char out[PLI_PROOF_BYTES])
{
    struct {
        char side[8];
        unsigned char nonces[2][PLI_NONCE_BYTES];
        int32_t rank;
        int32_t is_sure;
    } message = {.rank = join->rank, .is_sure = join->is_sure};
    memcpy(message.side, side, strlen(side));
    memcpy(message.nonces[0], nonce, PLI_NONCE_BYTES);
    memcpy(message.nonces[1], join->nonce, PLI_NONCE_BYTES);
    return options->prove(options->context, &message, sizeof message, out);
}

/* Takes the same time wherever the two differ. */
static int is_same_proof(const unsigned char *a, const unsigned char *b)
{
    unsigned difference = 0;
    for (int i = 0; i < PLI_PROOF_BYTES; i++)
        difference |= (unsigned)(a[i] ^ b[i]);
    return difference == 0;
}

/* ---- connections to rank 0 ------------------------------------------------------ */

/* A process that has connected and not proven to be a rank. */
typedef struct caller {
    int fd;
    int is_named; /* it is a process of the ranks */
    pli_stopwatch age;
    struct ucred peer;
    pli_handshake_greeting greeting; /* sent to it */
} caller;

/* Oldest first. */
typedef struct callers {
    int n;
    caller all[MOST_PEERS];
} callers;

static caller take_caller(callers *self, int i)
{
    const caller taken = self->all[i];
    self->n--;
    memmove(&self->all[i], &self->all[i + 1],
            (size_t)(self->n - i) * sizeof self->all[0]);
    return taken;
}

static void refuse(int fd, const char *message)
{
    pli_handshake_reply reply = {.magic = PLI_HANDSHAKE_MAGIC, .status = PL_EPEER};
    pli_text_print(reply.message, sizeof reply.message, "%s", message);
    (void)send(fd, &reply, sizeof reply, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)close(fd);
}

/* The oldest caller that is not named; self->n if all are. */
static int oldest_stranger(const callers *self)
{
    int i = 0;
    while (i < self->n && self->all[i].is_named)
        i++;
    return i;
}

static pl_status accept_caller(const pli_shm_options *options,
                               const pli_listener *listener, callers *self)
{
    pl_status st = PL_OK;
    caller new = {.greeting = {.magic = PLI_HANDSHAKE_MAGIC}};
    const int stranger = oldest_stranger(self);
    new.fd = PL_SYS(accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC));
    if (new.fd < 0 && (errno == EINTR || errno == ECONNABORTED || errno == EAGAIN))
        goto done;
    if (new.fd < 0 && errno == EMFILE && stranger < self->n) {
        (void)close(take_caller(self, stranger).fd);
        goto done;
    }
    if (new.fd < 0)
        PL_FAIL_ERRNO("cannot accept another rank's connection");
    PL_TRY(read_peer(new.fd, &new.peer));
    PL_TRY(draw_nonce(new.greeting.nonce));
    for (int r = 1; r < options->world_size; r++)
        new.is_named |= new.peer.pid > 0 && new.peer.pid == options->pids[r];
    (void)send(new.fd, &new.greeting, sizeof new.greeting, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (self->n == MOST_PEERS)
        (void)close(take_caller(self, stranger < self->n ? stranger : 0).fd);
    self->all[self->n++] = new;
    new.fd = -1;
done:
    if (new.fd >= 0)
        (void)close(new.fd);
    return st;
}

/* Whether the caller is the rank it claims to be; PL_EINVAL if not, with a message for
 * the caller. */
static pl_status check_request(const pli_shm_options *options, const pli_watch *watch,
                               const pli_handshake_join *request, const caller *from)
{
    pl_status st = PL_OK;
    unsigned char proof[PLI_PROOF_BYTES];
    const int r = request->rank;
    if (r < 1 || r >= options->world_size || watch->ranks[r].socket >= 0)
        PL_FAIL(PL_EINVAL, "rank 0 does not wait for a rank %d", r);
    if (options->pids[r] > 0 && from->peer.pid != options->pids[r])
        PL_FAIL(PL_EINVAL, "process %d is not rank %d, which is process %d",
                (int)from->peer.pid, r, options->pids[r]);
    PL_TRY(prove(options, "join", from->greeting.nonce, request, proof));
    if (!is_same_proof(proof, request->proof))
        PL_FAIL(PL_EINVAL, "the caller as rank %d does not have this job's secret", r);
    if (from->peer.uid != geteuid()) /* it can never join: do not wait for it */
        PL_FAIL(PL_ESYS,
                "rank 0 runs as user %u and rank %d as user %u: they cannot share "
                "memory",
                (unsigned)geteuid(), r, (unsigned)from->peer.uid);
done:
    return st;
}

/* Makes a caller's socket the rank's, and proves to it that this is rank 0. */
static pl_status welcome(const pli_shm_options *options,
                         const pli_handshake_join *request, const caller *from,
                         pli_watch *watch)
{
    pl_status st = PL_OK;
    pli_watched *rank = &watch->ranks[request->rank];
    pli_handshake_reply reply = {.magic = PLI_HANDSHAKE_MAGIC};
    rank->socket = from->fd;
    PL_TRY(prove(options, "reply", from->greeting.nonce, request, reply.proof));
    (void)send(from->fd, &reply, sizeof reply, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (rank->process == NULL && from->peer.pid > 0)
        PL_TRY(pli_watch_add(watch, options->processes, request->rank, from->peer.pid));
    rank->is_sure = request->is_sure && pli_watch_is_sure(watch, request->rank);
done:
    return st;
}

/* Reads a caller's request; the socket is then a rank's, or closed. */
static pl_status read_request(const pli_shm_options *options, const caller *from,
                              pli_watch *watch)
{
    pl_status st = PL_OK;
    pli_handshake_join request = {0};
    ssize_t n = 0;
    UNTIL_DONE(n, recv(from->fd, &request, sizeof request, MSG_DONTWAIT));
    if (n != (ssize_t)sizeof request || request.magic != PLI_HANDSHAKE_MAGIC)
        PL_FAIL(PL_EINVAL, "rank 0 received no request from a rank of the same version "
                           "of paceline");
    PL_TRY(check_request(options, watch, &request, from));
    return welcome(options, &request, from, watch);
done:
    refuse(from->fd, pl_error_message());
    return st == PL_EINVAL ? PL_OK : st;
}

/* Reads from all callers, side by side. */
static pl_status read_requests(const pli_shm_options *options,
                               const struct pollfd *polled, callers *self,
                               pli_watch *watch)
{
    pl_status st = PL_OK;
    for (int i = self->n - 1; i >= 0; i--) {
        const int is_late =
            pli_elapsed_ns(&self->all[i].age) > PLI_MS * 1000 * PROOF_TIMEOUT_S;
        if (polled[i].revents == 0 && !is_late)
            continue;
        const caller from = take_caller(self, i);
        if (polled[i].revents == 0)
            (void)close(from.fd); /* a rank connects again */
        else
            PL_TRY(read_request(options, &from, watch));
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
    callers all = {0};
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
            PL_TRY(accept_caller(options, listener, &all));
        const int n_now = n_missing(options, watch);
        if (n_now < n_left)
            wait.silence = (pli_stopwatch){0};
        n_left = n_now;
    }
done:
    for (int i = 0; i < all.n; i++)
        if (st == PL_OK)
            refuse(all.all[i].fd, "rank 0 accepts no more ranks");
        else
            (void)close(all.all[i].fd); /* a rank finds the dead one itself */
    return st;
}

pl_status pli_handshake_answer(int socket, const pli_handshake_reply *reply, int fd)
{
    pl_status st = PL_OK;
    pli_handshake_reply message = *reply;
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {.iov_base = &message, .iov_len = sizeof message};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    message.magic = PLI_HANDSHAKE_MAGIC;
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
    /* NOLINTNEXTLINE(clang-analyzer-unix.StdCLibraryFunctions): each has a socket */
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

/* Connects, however long others fill rank 0's queue. */
static pl_status connect_to_rank_0(const char *address, waiting *wait, pli_watch *watch)
{
    pl_status st = PL_OK;
    const pli_shm_options *options = wait->options;
    const struct timeval most = {.tv_usec = POLL_MS * 1000L};
    struct sockaddr_un name;
    struct ucred peer = {0};
    socklen_t name_len;
    int status = 0, n_ready = 0;
    const int fd = PL_SYS(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (fd < 0)
        PL_FAIL_ERRNO("cannot make a Unix socket");
    watch->ranks[0].socket = fd;
    name_len = listener_name(address, &name);
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
    for (;;) {
        UNTIL_DONE(status, connect(fd, (struct sockaddr *)&name, name_len));
        if (status == 0 || errno != EAGAIN)
            break;
        PL_TRY(poll_peers(wait, NULL, 0, &n_ready));
    }
    if (status != 0 && errno == ECONNREFUSED)
        PL_TRY(fail_without_rank_0(options, watch));
    if (status != 0)
        PL_FAIL_ERRNO("rank %d: cannot connect to rank 0", options->rank);
    /* If the kernel does not name the listener, the proof of rank 0 must do. */
    const int is_told = read_peer(fd, &peer) == PL_OK;
    if (is_told && options->pids[0] > 0 && peer.pid != options->pids[0])
        PL_FAIL(PL_EPEER,
                "rank %d: process %d listens at rank 0's address, but rank 0 is "
                "process %d",
                options->first_rank + options->rank, (int)peer.pid, options->pids[0]);
    if (watch->ranks[0].process == NULL && peer.pid > 0)
        PL_TRY(pli_watch_add(watch, options->processes, 0, peer.pid));
done:
    return st;
}

/* Receives a message, and its descriptor unless out_fd is NULL; *out_fd is -1 if none
 * came.  *is_lost: rank 0 has closed the connection instead. */
static pl_status receive(waiting *wait, void *out, size_t n_bytes, int *is_lost,
                         int *out_fd)
{
    pl_status st = PL_OK;
    const pli_shm_options *options = wait->options;
    int fd = -1;
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {.iov_base = out, .iov_len = n_bytes};
    struct msghdr packet = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = control,
                            /* Exactly one: CMSG_SPACE() has room for two. */
                            .msg_controllen = CMSG_LEN(sizeof fd)};
    ssize_t n = 0;
    PL_TRY(wait_readable(wait, wait->watch->ranks[0].socket));
    UNTIL_DONE(n, recvmsg(wait->watch->ranks[0].socket, &packet, MSG_CMSG_CLOEXEC));
    const struct cmsghdr *head = n >= 0 ? CMSG_FIRSTHDR(&packet) : NULL;
    if (head != NULL && head->cmsg_type == SCM_RIGHTS)
        memcpy(&fd, CMSG_DATA(head), sizeof fd);
    *is_lost = n == 0 || (n < 0 && errno == ECONNRESET);
    if (!*is_lost &&
        (n != (ssize_t)n_bytes || *(const uint64_t *)out != PLI_HANDSHAKE_MAGIC))
        PL_FAIL(PL_EPEER,
                "rank %d: no rank of the same version of paceline listens at rank 0's "
                "address",
                options->first_rank + options->rank);
    if (out_fd != NULL) {
        *out_fd = fd;
        fd = -1;
    }
done:
    if (fd >= 0)
        (void)close(fd);
    return st;
}

/* Proves the secret, and has rank 0 prove it. */
static pl_status introduce(waiting *wait, int is_sure, int *is_lost)
{
    pl_status st = PL_OK;
    const pli_shm_options *options = wait->options;
    const int rank = options->first_rank + options->rank;
    pli_handshake_greeting greeting = {0};
    pli_handshake_join join = {
        .magic = PLI_HANDSHAKE_MAGIC, .rank = options->rank, .is_sure = is_sure};
    pli_handshake_reply reply = {0};
    unsigned char proof[PLI_PROOF_BYTES];
    ssize_t n = 0;
    PL_TRY(receive(wait, &greeting, sizeof greeting, is_lost, NULL));
    if (*is_lost)
        goto done;
    PL_TRY(draw_nonce(join.nonce));
    PL_TRY(prove(options, "join", greeting.nonce, &join, join.proof));
    PL_TRY(prove(options, "reply", greeting.nonce, &join, proof));
    /* A connection that rank 0 has closed is lost to receive() too. */
    UNTIL_DONE(n, send(wait->watch->ranks[0].socket, &join, sizeof join, MSG_NOSIGNAL));
    PL_TRY(receive(wait, &reply, sizeof reply, is_lost, NULL));
    if (*is_lost)
        goto done;
    if (reply.status != PL_OK)
        PL_FAIL(PL_EPEER,
                "rank %d: rank 0, or another process at its address, refuses this "
                "rank: %.*s",
                rank, (int)sizeof reply.message - 1, reply.message);
    if (!is_same_proof(proof, reply.proof))
        PL_FAIL(PL_EPEER,
                "rank %d: the process at rank 0's address does not have this job's "
                "secret",
                rank);
done:
    return st;
}

pl_status pli_handshake_request(const pli_shm_options *options, const char *address,
                                pli_watch *watch, int *out_fd)
{
    pl_status st = PL_OK;
    const int rank = options->first_rank + options->rank;
    pli_handshake_reply reply = {0};
    waiting wait = {.options = options, .watch = watch};
    int is_lost = 1, n_ready = 0, fd = -1;
    for (;;) {
        PL_TRY(connect_to_rank_0(address, &wait, watch));
        PL_TRY(introduce(&wait, pli_watch_is_sure(watch, 0), &is_lost));
        if (!is_lost)
            break;
        (void)close(watch->ranks[0].socket); /* too many called, or this rank is late */
        watch->ranks[0].socket = -1;
        PL_TRY(poll_peers(&wait, NULL, 0, &n_ready));
    }
    wait.silence = (pli_stopwatch){0};
    PL_TRY(receive(&wait, &reply, sizeof reply, &is_lost, &fd));
    if (is_lost)
        PL_TRY(fail_without_rank_0(options, watch));
    if (reply.status != PL_OK)
        PL_FAIL(PL_EPEER, "rank %d: rank 0 could not make the world: %.*s", rank,
                (int)sizeof reply.message - 1, reply.message);
    if (fd < 0)
        PL_FAIL(PL_ESYS,
                "rank %d: no descriptor came with rank 0's answer: raise the limit of "
                "open files (ulimit -n)",
                rank);
    watch->ranks[0].is_sure = reply.is_sure && pli_watch_is_sure(watch, 0);
    *out_fd = fd;
    fd = -1;
done:
    if (fd >= 0)
        (void)close(fd);
    return st;
}

/* ---- the world ------------------------------------------------------------------ */

static pl_status watch_everybody(const pli_shm_options *options, pli_watch *watch)
{
    pl_status st = PL_OK;
    for (int r = 0; r < options->world_size; r++)
        if (r != options->rank && options->pids[r] > 0)
            PL_TRY(pli_watch_add(watch, options->processes, r, options->pids[r]));
done:
    return st;
}

/* Rank 0: makes the segment and sends it to all, or tells all that it could not. */
static pl_status lead(const pli_shm_options *options, const pli_listener *listener,
                      pli_watch *watch, pli_shm_segment *out)
{
    pl_status st = PL_OK;
    pli_shm_segment segment = {.fd = -1};
    pli_handshake_reply reply = {.status = PL_OK};
    PL_TRY(pli_handshake_accept(options, listener, watch));
    PL_TRY(pli_segment_create(PLI_SEGMENT_FILE, options->world_size,
                              options->arena_bytes, pli_ring_ops(options->n_ops),
                              &segment));
    for (int r = 1; r < options->world_size; r++) {
        reply.is_sure = pli_watch_is_sure(watch, r);
        /* A rank that is gone by now is found, and named, when the ranks meet. */
        const pl_status answered =
            pli_handshake_answer(watch->ranks[r].socket, &reply, segment.fd);
        if (answered != PL_EPEER)
            PL_TRY(answered);
    }
    *out = segment;
    segment = (pli_shm_segment){.fd = -1};
done:
    if (st != PL_OK) {
        reply.status = st;
        pli_text_print(reply.message, sizeof reply.message, "%s", pl_error_message());
        for (int r = 1; r < options->world_size; r++)
            if (watch->ranks[r].socket >= 0)
                (void)!pli_handshake_answer(watch->ranks[r].socket, &reply, -1);
        (void)!pli_fail(st, "%s",
                        reply.message); /* keep the first message, not an answer's */
    }
    pli_segment_fini(&segment);
    return st;
}

static pl_status follow(const pli_shm_options *options, const char *address,
                        pli_watch *watch, pli_shm_segment *out)
{
    pl_status st = PL_OK;
    int fd = -1;
    PL_TRY(pli_handshake_request(options, address, watch, &fd));
    PL_TRY(pli_segment_adopt(fd, options->world_size, options->arena_bytes,
                             pli_ring_ops(options->n_ops), out));
    fd = -1;
done:
    if (fd >= 0)
        (void)close(fd);
    return st;
}

/* The first operation of every world: after it, all ranks have mapped the segment and
 * have their pages. */
static pl_status meet(const pli_shm_options *options, pl_comm *comm)
{
    pl_status st = PL_OK;
    pl_ticket ticket = 0;
    const pl_op barrier = {.kind = PL_BARRIER};
    PL_TRY(pl_comm_issue(comm, &barrier, &ticket));
    while ((st = pl_comm_wait(comm, ticket, 100 * INT64_C(1000000))) == PL_EAGAIN)
        if (options->is_interrupted != NULL &&
            options->is_interrupted(options->context))
            break;
done:
    return st;
}

pl_status pli_shm_create(const pli_shm_options *options, pli_listener *listener,
                         const char *address, pl_comm **out)
{
    pl_status st = PL_OK;
    pli_shm_segment *made = NULL;
    pli_shm_comm *comm = NULL;
    pli_watch watch;
    PL_TRY(pli_watch_init(&watch, options->world_size));
    PL_TRY(pli_calloc(1, sizeof *made, "a world of processes", &made));
    made->fd = -1;
    PL_TRY(watch_everybody(options, &watch));
    if (options->world_size > 1 && options->prove == NULL)
        PL_FAIL(PL_EINVAL, "several processes need a secret to share memory");
    if (options->world_size == 1)
        PL_TRY(pli_segment_create(PLI_SEGMENT_ANONYMOUS, 1, options->arena_bytes,
                                  pli_ring_ops(options->n_ops), made));
    else if (options->rank == 0)
        PL_TRY(lead(options, listener, &watch, made));
    else
        PL_TRY(follow(options, address, &watch, made));
    atomic_store(&made->n_users, 1);
    made->first_rank = options->first_rank;
    PL_TRY(
        pli_shm_comm_create(&(pli_shm_comm_options){.segment = made,
                                                    .progress = options->progress,
                                                    .rank = options->rank,
                                                    .deadline_ns = options->deadline_ns,
                                                    .pid = getpid()},
                            &comm));
    made = NULL; /* owned by the comm from here on */
    comm->watch = watch;
    watch = (pli_watch){.n_ranks = 0};
    PL_TRY(pli_segment_populate(comm->segment, options->rank));
    pli_segment_keep_from_children(comm->segment, options->rank);
    PL_TRY(meet(options, &comm->super));
    pli_watch_drop_sockets(&comm->watch);
    *out = &comm->super;
    comm = NULL;
done:
    if (comm != NULL) {
        pli_comm_set_failure_message(&comm->super, pl_error_message());
        pl_comm_destroy(&comm->super);
    }
    pli_listener_close(listener);
    pli_watch_fini(&watch);
    pli_segment_release(made);
    return st;
}
