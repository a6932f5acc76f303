/* links.c - sends and receives bytes between the leaders of hosts; the notices by which
 * they tell one another about failures. */
#include "links.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/backoff.h"
#include "core/clock.h"
#include "core/config.h"
#include "core/crc32c.h"

enum {
    MOST_PIECES = 72, /* per system call */
    LIMIT_S = 10,     /* a host that does not answer for so long is down */
    MOST_LIMIT_S = 1000000,
    NOTICE_WAIT_MS = 300, /* for the notice of a host whose connection has ended */
    LINK_NAME_BYTES = 160
};

typedef enum notice_kind {
    NOTICE_FAILED,   /* the host has failed */
    NOTICE_FOLLOWED, /* ... after another host */
    NOTICE_LOST,     /* ... because a rank there is gone */
    NOTICE_WAITS     /* the host waits for another */
} notice_kind;

/* One message of PLI_LINK_NOTICE. */
typedef struct notice {
    uint32_t crc;     /* CRC-32C of what follows */
    uint32_t host;    /* of NOTICE_WAITS: the host it waits for */
    uint64_t number;  /* of NOTICE_WAITS: the operation's; else the last finished */
    uint32_t kind;    /* notice_kind */
    uint32_t n_bytes; /* of `text`, as sent */
    char text[PLI_NOTICE_BYTES];
} notice;

enum { NOTICE_HEAD_BYTES = offsetof(notice, text) };

typedef struct connection {
    const pli_links *owner;
    int fds[PLI_N_LINK_STREAMS];
    char name[LINK_NAME_BYTES];
    notice sent;   /* by this host */
    size_t n_sent; /* bytes of it already sent */
    notice coming;
    size_t n_coming;
    notice failure; /* the first complete one, except NOTICE_WAITS */
    int has_failed;
    notice waits;     /* the last complete NOTICE_WAITS */
    int has_ended;    /* nothing more will come */
    atomic_int error; /* of the stream of notices; 0: none.  Any thread may send */
} connection;

struct pli_links {
    int n_hosts;
    int host;
    int rank;
    int owner_pid; /* a forked child sends nothing */
    int has_ended;
    int limit_s;            /* how long a host may not answer */
    atomic_flag is_sending; /* any thread may send, or end */
    connection *links;
};

/* Bytes of a notice as sent. */
static size_t notice_bytes(const notice *self)
{
    return NOTICE_HEAD_BYTES + self->n_bytes;
}

static uint32_t notice_crc(const notice *self)
{
    return pli_crc32c(0, &self->host, notice_bytes(self) - offsetof(notice, host));
}

static void close_connection(connection *link)
{
    for (int s = 0; s < PLI_N_LINK_STREAMS; s++) {
        if (link->fds[s] >= 0)
            (void)close(link->fds[s]);
        link->fds[s] = -1;
    }
}

/* Has the kernel probe the host while nothing is sent.  The other kernel answers even
 * if the processes there are busy or stopped.  The streams of data have no such limit:
 * a stopped process leaves its buffer full, and must be waited for.  Notices are too
 * few and short to fill one. */
static void probe_host(int fd, int limit_s)
{
    const int options[][3] = {{SOL_SOCKET, SO_KEEPALIVE, 1},
                              {IPPROTO_TCP, TCP_KEEPIDLE, (limit_s + 1) / 2},
                              {IPPROTO_TCP, TCP_KEEPINTVL, (limit_s + 9) / 10},
                              {IPPROTO_TCP, TCP_USER_TIMEOUT, limit_s * 1000}};
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++)
        (void)setsockopt(fd, options[i][0], options[i][1], &options[i][2],
                         sizeof options[i][2]); /* other sockets than TCP lack some */
}

static pl_status take_sockets(connection *link, const int *fds)
{
    pl_status st = PL_OK;
    for (int s = 0; s < PLI_N_LINK_STREAMS; s++) {
        link->fds[s] = PL_SYS(fcntl(fds[s], F_DUPFD_CLOEXEC, 0));
        if (link->fds[s] < 0)
            PL_FAIL_ERRNO("cannot take over the connection to %s", link->name);
    }
    probe_host(link->fds[PLI_LINK_NOTICE], link->owner->limit_s);
done:
    return st;
}

pl_status pli_links_create(const pli_links_options *options, pli_links **out)
{
    pl_status st = PL_OK;
    pli_links *self = NULL;
    const int64_t second = 1000 * PLI_MS;
    int64_t limit_ns = 0;
    const size_t n = (size_t)options->n_hosts;
    PL_TRY(pli_calloc(1, sizeof *self, "links between hosts", &self));
    PL_TRY(pli_calloc(n, sizeof *self->links, "links between hosts", &self->links));
    self->host = options->host;
    self->rank = options->rank;
    self->owner_pid = getpid();
    atomic_flag_clear(&self->is_sending);
    PL_TRY(pli_config_timeout_ns("PACELINE_LINK_TIMEOUT", LIMIT_S * second, &limit_ns));
    self->limit_s = limit_ns < MOST_LIMIT_S * second /* whole ones, as the kernel */
                        ? (int)((limit_ns + second - 1) / second)
                        : MOST_LIMIT_S;
    for (int h = 0; h < options->n_hosts; h++) {
        connection *link = &self->links[h];
        pli_text_print(link->name, sizeof link->name, "%s", options->names[h]);
        link->owner = self;
        link->n_sent = NOTICE_HEAD_BYTES;
        for (int s = 0; s < PLI_N_LINK_STREAMS; s++)
            link->fds[s] = -1;
    }
    self->n_hosts = options->n_hosts; /* from here on, forget() closes sockets */
    for (int h = 0; h < options->n_hosts; h++)
        if (h != options->host)
            PL_TRY(take_sockets(&self->links[h],
                                options->fds + (ptrdiff_t)h * PLI_N_LINK_STREAMS));
    *out = self;
    self = NULL;
done:
    if (self != NULL) {
        pli_links_forget(self);
        pli_free(self->links);
        pli_free(self);
    }
    return st;
}

void pli_links_forget(pli_links *self)
{
    for (int h = 0; h < self->n_hosts; h++)
        close_connection(&self->links[h]);
}

void pli_links_destroy(pli_links *self)
{
    if (self == NULL)
        return;
    pli_links_end(self);
    pli_links_forget(self);
    pli_free(self->links);
    pli_free(self);
}

const char *pli_links_name(const pli_links *self, int host)
{
    return self->links[host].name;
}

/* ---- notices -------------------------------------------------------------------- */

/* Takes a notice that has arrived in full. */
static void take_notice(connection *link)
{
    notice *coming = &link->coming;
    if (link->n_coming < NOTICE_HEAD_BYTES)
        return;
    const int is_whole = link->n_coming == notice_bytes(coming);
    /* No leader sends as much as fills the text. */
    if (coming->n_bytes >= sizeof coming->text ||
        (is_whole && coming->crc != notice_crc(coming))) {
        atomic_store(&link->error, EBADMSG);
        link->has_ended = 1;
        return;
    }
    if (!is_whole)
        return;
    coming->text[coming->n_bytes] = '\0';
    link->n_coming = 0;
    if (coming->kind == NOTICE_WAITS)
        link->waits = *coming;
    else if (!link->has_failed)
        link->failure = *coming;
    link->has_failed |= coming->kind != NOTICE_WAITS;
}

/* Reads a host's notices, without waiting. */
static void read_notices(connection *link)
{
    while (!link->has_ended) {
        const size_t n_bytes = link->n_coming < NOTICE_HEAD_BYTES
                                   ? NOTICE_HEAD_BYTES
                                   : notice_bytes(&link->coming);
        const ssize_t n = PL_SYS(recv(link->fds[PLI_LINK_NOTICE],
                                      (char *)&link->coming + link->n_coming,
                                      n_bytes - link->n_coming, MSG_DONTWAIT));
        if (n > 0) {
            link->n_coming += (size_t)n;
            take_notice(link);
        } else if (n == 0 || (errno != EINTR && errno != EAGAIN)) {
            if (n < 0)
                atomic_store(&link->error, errno);
            link->has_ended = 1;
        } else if (errno == EAGAIN) {
            return;
        }
    }
}

static pl_status fail_by_notice(const connection *link)
{
    return pli_fail(PL_EPEER,
                    "rank %d: the step of %s failed, so this one cannot be "
                    "finished%s\n\nIts own failure message:\n%s",
                    link->owner->rank, link->name,
                    link->has_ended ? ", and that host died or left" : "",
                    link->failure.text);
}

/* Waits for a notice that the host is about to send. */
static void await_notice(connection *link)
{
    struct pollfd more = {.fd = link->fds[PLI_LINK_NOTICE], .events = POLLIN};
    const int64_t until = pli_now_ns() + NOTICE_WAIT_MS * PLI_MS;
    read_notices(link);
    while (!link->has_ended && !link->has_failed && pli_now_ns() < until) {
        (void)poll(&more, 1, 10);
        read_notices(link);
    }
}

/* Fails because a connection has ended, with `error` or, if 0, without one. */
static pl_status fail_by_loss(const connection *link, int error)
{
    if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH)
        return pli_fail(PL_EPEER,
                        "rank %d: %s did not answer for %d s: the host is down, or "
                        "the network to it is cut",
                        link->owner->rank, link->name, link->owner->limit_s);
    if (error == EBADMSG)
        return pli_fail(PL_EPEER, "rank %d: %s sent a notice that arrived damaged",
                        link->owner->rank, link->name);
    if (error != 0)
        return pli_fail(PL_EPEER,
                        "rank %d: %s: the connection to that host was lost: %s",
                        link->owner->rank, link->name, strerror(error));
    return pli_fail(PL_EPEER,
                    "rank %d: %s died or left: the connection to that host is closed "
                    "(every rank needs the same number of steps)",
                    link->owner->rank, link->name);
}

/* Likewise, with the reason that the host sent, or is about to send. */
static pl_status fail_by_end(connection *link, int error)
{
    await_notice(link);
    return link->has_failed ? fail_by_notice(link) : fail_by_loss(link, error);
}

pl_status pli_links_check(pli_links *self)
{
    pl_status st = PL_OK;
    for (int h = 0; h < self->n_hosts; h++) {
        connection *link = &self->links[h];
        if (h == self->host)
            continue;
        read_notices(link);
        const int error = atomic_load(&link->error);
        /* A host that left normally has sent its part, and ends without an error.  What
         * one that failed had finished may still be on its way. */
        if (error != 0 && !link->has_failed)
            PL_TRY(fail_by_end(link, error));
    }
done:
    return st;
}

pl_status pli_links_check_present(pli_links *self, int is_after_failure)
{
    pl_status st = PL_OK;
    PL_TRY(pli_links_check(self));
    for (int h = 0; h < self->n_hosts; h++) {
        connection *link = &self->links[h];
        const int has_lost = link->has_failed && link->failure.kind == NOTICE_LOST;
        if (is_after_failure && link->has_ended && !has_lost)
            PL_TRY(fail_by_loss(link, atomic_load(&link->error)));
        if (link->has_ended || has_lost)
            PL_TRY(fail_by_end(link, atomic_load(&link->error)));
    }
done:
    return st;
}

uint64_t pli_links_least_finished(const pli_links *self)
{
    uint64_t least = UINT64_MAX;
    for (int h = 0; h < self->n_hosts; h++)
        if (self->links[h].has_failed && self->links[h].failure.number < least)
            least = self->links[h].failure.number;
    return least;
}

pl_status pli_links_report_failure(const pli_links *self)
{
    const connection *from = NULL;
    /* Prefer the reason of the host where the failure began. */
    for (int h = 0; h < self->n_hosts; h++)
        if (self->links[h].has_failed &&
            (from == NULL || from->failure.kind == NOTICE_FOLLOWED))
            from = &self->links[h];
    return from != NULL ? fail_by_notice(from) : PL_OK;
}

static void send_notice(connection *link)
{
    while (link->n_sent < notice_bytes(&link->sent)) {
        const ssize_t n = PL_SYS(send(
            link->fds[PLI_LINK_NOTICE], (const char *)&link->sent + link->n_sent,
            notice_bytes(&link->sent) - link->n_sent, MSG_DONTWAIT | MSG_NOSIGNAL));
        if (n > 0) {
            link->n_sent += (size_t)n;
        } else if (n == 0 || errno == EAGAIN || errno == EPIPE) {
            return; /* later */
        } else if (errno != EINTR) {
            atomic_store(&link->error, errno); /* a socket reports it only once */
            return;
        }
    }
}

static int is_sent(const connection *link)
{
    return link->n_sent == notice_bytes(&link->sent);
}

static void begin_notice(connection *link, const notice *sent)
{
    if (!is_sent(link))
        send_notice(link);
    if (!is_sent(link))
        return; /* the notice before it is sent first */
    link->sent = *sent;
    link->n_sent = 0;
    send_notice(link);
}

/* Any thread may call it.  A forked child sends nothing. */
static void send_to_all(pli_links *self, notice *sent, const char *reason)
{
    if (self->owner_pid != getpid())
        return;
    pli_text_print(sent->text, sizeof sent->text, "%s", reason);
    sent->n_bytes = (uint32_t)strlen(sent->text);
    sent->crc = notice_crc(sent);
    pli_spin_lock(&self->is_sending);
    for (int h = 0; h < self->n_hosts && !self->has_ended; h++)
        if (h != self->host)
            begin_notice(&self->links[h], sent);
    pli_spin_unlock(&self->is_sending);
}

void pli_links_send_failure(pli_links *self, const char *reason, uint64_t n_finished,
                            int has_lost)
{
    notice sent = {.number = n_finished, .kind = NOTICE_FAILED};
    if (has_lost)
        sent.kind = NOTICE_LOST;
    else if (pli_links_least_finished(self) != UINT64_MAX)
        sent.kind = NOTICE_FOLLOWED;
    send_to_all(self, &sent, reason);
}

void pli_links_send_waiting(pli_links *self, uint64_t number, int host)
{
    notice sent = {.number = number, .kind = NOTICE_WAITS, .host = (uint32_t)host};
    send_to_all(self, &sent, "");
}

int pli_links_waited_for(pli_links *self, uint64_t number, int host)
{
    for (int n = 0; n < self->n_hosts; n++) { /* they may wait in a cycle */
        connection *link = &self->links[host];
        if (host == self->host)
            break;
        read_notices(link);
        if (link->waits.kind != NOTICE_WAITS || link->waits.number != number ||
            link->waits.host >= (uint32_t)self->n_hosts ||
            link->waits.host == (uint32_t)self->host)
            break;
        host = (int)link->waits.host;
    }
    return host;
}

void pli_links_end(pli_links *self)
{
    if (self->owner_pid != getpid())
        return; /* a child's copies of the sockets close silently */
    pli_spin_lock(&self->is_sending);
    for (int h = 0; h < self->n_hosts && !self->has_ended; h++)
        for (int s = 0; h != self->host && s < PLI_N_LINK_STREAMS; s++)
            (void)shutdown(self->links[h].fds[s], SHUT_WR);
    self->has_ended = 1;
    pli_spin_unlock(&self->is_sending);
}

/* ---- data ----------------------------------------------------------------------- */

/* What is left of a message after its first `at` bytes. */
static int rest_of(const struct iovec *pieces, int n_pieces, size_t at,
                   struct iovec *rest)
{
    int n_rest = 0;
    for (int k = 0; k < n_pieces && n_rest < MOST_PIECES; k++) {
        if (at >= pieces[k].iov_len) {
            at -= pieces[k].iov_len;
            continue;
        }
        rest[n_rest++] = (struct iovec){.iov_base = (char *)pieces[k].iov_base + at,
                                        .iov_len = pieces[k].iov_len - at};
        at = 0;
    }
    return n_rest;
}

typedef enum link_direction { OUT, IN } link_direction;

static pl_status go_on(connection *link, pli_link_stream stream,
                       const struct iovec *pieces, int n_pieces, size_t *at,
                       link_direction way)
{
    pl_status st = PL_OK;
    struct iovec rest[MOST_PIECES];
    for (;;) {
        const int n_rest = rest_of(pieces, n_pieces, *at, rest);
        if (n_rest == 0)
            goto done;
        struct msghdr message = {.msg_iov = rest, .msg_iovlen = (size_t)n_rest};
        const int fd = link->fds[stream];
        const ssize_t n =
            way == OUT ? PL_SYS(sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL))
                       : PL_SYS(recvmsg(fd, &message, MSG_DONTWAIT));
        if (n > 0)
            *at += (size_t)n;
        else if (n == 0)
            PL_TRY(fail_by_end(link, 0));
        else if (errno == EAGAIN)
            goto done;
        else if (errno != EINTR)
            PL_TRY(fail_by_end(link, errno));
    }
done:
    return st;
}

pl_status pli_links_send(pli_links *self, int host, pli_link_stream stream,
                         const struct iovec *pieces, int n_pieces, size_t *at)
{
    return go_on(&self->links[host], stream, pieces, n_pieces, at, OUT);
}

pl_status pli_links_receive(pli_links *self, int host, pli_link_stream stream,
                            const struct iovec *pieces, int n_pieces, size_t *at)
{
    return go_on(&self->links[host], stream, pieces, n_pieces, at, IN);
}

/* ---- waiting -------------------------------------------------------------------- */

void pli_links_poll_init(const pli_links *self, pli_links_waited *waited)
{
    waited->n = 0;
    for (int h = 0; h < self->n_hosts; h++)
        if (h != self->host && !self->links[h].has_ended)
            pli_links_poll_add(self, waited, h, PLI_LINK_NOTICE, POLLIN);
}

void pli_links_poll_add(const pli_links *self, pli_links_waited *waited, int host,
                        pli_link_stream stream, short events)
{
    waited->fds[waited->n++] =
        (struct pollfd){.fd = self->links[host].fds[stream], .events = events};
}

void pli_links_poll(pli_links_waited *waited, int64_t most_ns)
{
    const struct timespec most = pli_timespec(most_ns);
    (void)ppoll(waited->fds, (nfds_t)waited->n, &most, NULL);
}
