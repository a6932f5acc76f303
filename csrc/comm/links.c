/* links.c - bytes between the leaders of hosts, and what they say as they fail. */
#include "links.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/clock.h"

enum {
    NAME_BYTES = 160,
    NOTICE_WAIT_MS = 300, /* for the words of a host whose connection has ended */
    MOST_PIECES = 72      /* in one system call */
};

typedef struct connection {
    int fds[PLI_N_LINK_STREAMS];
    char name[NAME_BYTES];
    char notice[PLI_NOTICE_BYTES];
    size_t n_notice;
    int has_ended; /* its notices have come to their end */
} connection;

struct pli_links {
    int n_hosts;
    int host;
    int owner_pid; /* a forked child says nothing */
    int has_ended;
    connection *links;
};

static void close_connection(connection *it)
{
    for (int s = 0; s < PLI_N_LINK_STREAMS; s++) {
        if (it->fds[s] >= 0)
            (void)close(it->fds[s]);
        it->fds[s] = -1;
    }
}

static pl_status take_sockets(connection *it, const int *fds)
{
    pl_status st = PL_OK;
    for (int s = 0; s < PLI_N_LINK_STREAMS; s++) {
        it->fds[s] = PL_SYS(fcntl(fds[s], F_DUPFD_CLOEXEC, 0));
        if (it->fds[s] < 0)
            PL_FAIL_ERRNO("cannot take over the connection to %s", it->name);
    }
done:
    return st;
}

pl_status pli_links_create(const pli_links_options *options, pli_links **out)
{
    pl_status st = PL_OK;
    pli_links *self = NULL;
    const size_t n = (size_t)options->n_hosts;
    PL_TRY(pli_calloc(1, sizeof *self, "links between hosts", &self));
    PL_TRY(pli_calloc(n, sizeof *self->links, "links between hosts", &self->links));
    self->n_hosts = options->n_hosts;
    self->host = options->host;
    self->owner_pid = getpid();
    for (int h = 0; h < options->n_hosts; h++) {
        connection *it = &self->links[h];
        pli_text_print(it->name, sizeof it->name, "%s", options->names[h]);
        for (int s = 0; s < PLI_N_LINK_STREAMS; s++)
            it->fds[s] = -1;
    }
    for (int h = 0; h < options->n_hosts; h++)
        if (h != options->host)
            PL_TRY(take_sockets(&self->links[h],
                                options->fds + (ptrdiff_t)h * PLI_N_LINK_STREAMS));
    *out = self;
    self = NULL;
done:
    if (self != NULL) {
        for (int h = 0; self->links != NULL && h < self->n_hosts; h++)
            close_connection(&self->links[h]);
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
    pli_links_end(self, NULL);
    pli_links_forget(self);
    pli_free(self->links);
    pli_free(self);
}

const char *pli_links_name(const pli_links *self, int host)
{
    return self->links[host].name;
}

/* ---- notices -------------------------------------------------------------------- */

/* Reads what a host has to say, without waiting. */
static void read_notice(connection *it)
{
    while (!it->has_ended) {
        const size_t n_left = sizeof it->notice - 1 - it->n_notice;
        const ssize_t n = recv(it->fds[PLI_LINK_NOTICE], it->notice + it->n_notice,
                               n_left, MSG_DONTWAIT);
        if (n > 0) {
            it->n_notice += (size_t)n;
            it->notice[it->n_notice] = '\0';
        } else if (n == 0 || (errno != EINTR && errno != EAGAIN)) {
            it->has_ended = 1;
        } else if (errno == EAGAIN) {
            return;
        }
    }
}

static pl_status fail_by_notice(const connection *it)
{
    if (it->n_notice > 0)
        return pli_fail(PL_EPEER, "%s failed: %s", it->name, it->notice);
    return pli_fail(PL_EPEER,
                    "%s died or left: the connection to that host is closed (every "
                    "rank needs the same number of steps)",
                    it->name);
}

/* A connection has ended; its host may be about to say why. */
static pl_status fail_by_end(connection *it, int error)
{
    struct pollfd notice = {.fd = it->fds[PLI_LINK_NOTICE], .events = POLLIN};
    const int64_t until = pli_now_ns() + NOTICE_WAIT_MS * PLI_MS;
    read_notice(it);
    while (!it->has_ended && pli_now_ns() < until) {
        (void)poll(&notice, 1, 10);
        read_notice(it);
    }
    if (it->n_notice == 0 && error != 0)
        return pli_fail(PL_EPEER, "%s: the connection to that host was lost: %s",
                        it->name, strerror(error));
    return fail_by_notice(it);
}

pl_status pli_links_check(pli_links *self)
{
    pl_status st = PL_OK;
    for (int h = 0; h < self->n_hosts; h++) {
        connection *it = &self->links[h];
        if (h == self->host)
            continue;
        read_notice(it);
        if (it->has_ended && it->n_notice > 0)
            PL_TRY(fail_by_notice(it)); /* one that leaves has sent its part before */
    }
done:
    return st;
}

void pli_links_end(pli_links *self, const char *reason)
{
    if (self->has_ended || self->owner_pid != getpid())
        return; /* a child's copies of the sockets say nothing as they close */
    self->has_ended = 1;
    for (int h = 0; h < self->n_hosts; h++) {
        const connection *it = &self->links[h];
        if (h == self->host)
            continue;
        if (reason != NULL)
            (void)send(it->fds[PLI_LINK_NOTICE], reason,
                       strnlen(reason, PLI_NOTICE_BYTES - 1),
                       MSG_DONTWAIT | MSG_NOSIGNAL);
        for (int s = 0; s < PLI_N_LINK_STREAMS; s++)
            (void)shutdown(it->fds[s], SHUT_WR);
    }
}

/* ---- data ----------------------------------------------------------------------- */

/* What is left of a message behind its first `at` bytes. */
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

typedef ssize_t (*transfer)(int fd, const struct msghdr *message);

static ssize_t send_some(int fd, const struct msghdr *message)
{
    return PL_SYS(sendmsg(fd, message, MSG_DONTWAIT | MSG_NOSIGNAL));
}

static ssize_t receive_some(int fd, const struct msghdr *message)
{
    struct msghdr changed = *message;
    return PL_SYS(recvmsg(fd, &changed, MSG_DONTWAIT));
}

static pl_status go_on(connection *it, pli_link_stream stream,
                       const struct iovec *pieces, int n_pieces, size_t *at,
                       transfer transfer_some)
{
    pl_status st = PL_OK;
    struct iovec rest[MOST_PIECES];
    for (;;) {
        const int n_rest = rest_of(pieces, n_pieces, *at, rest);
        if (n_rest == 0)
            goto done;
        const struct msghdr message = {.msg_iov = rest, .msg_iovlen = (size_t)n_rest};
        const ssize_t n = transfer_some(it->fds[stream], &message);
        if (n > 0)
            *at += (size_t)n;
        else if (n == 0)
            PL_TRY(fail_by_end(it, 0));
        else if (errno == EAGAIN)
            goto done;
        else if (errno != EINTR)
            PL_TRY(fail_by_end(it, errno));
    }
done:
    return st;
}

pl_status pli_links_send(pli_links *self, int host, pli_link_stream stream,
                         const struct iovec *pieces, int n_pieces, size_t *at)
{
    return go_on(&self->links[host], stream, pieces, n_pieces, at, send_some);
}

pl_status pli_links_receive(pli_links *self, int host, pli_link_stream stream,
                            const struct iovec *pieces, int n_pieces, size_t *at)
{
    return go_on(&self->links[host], stream, pieces, n_pieces, at, receive_some);
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
