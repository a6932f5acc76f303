/* links.c - sends and receives bytes between the leaders of hosts. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/clock.h"
#include "core/config.h"
#include "links_state.h"

enum {
    MOST_PIECES = 72, /* per system call */
    LIMIT_S = 10,     /* a host that does not answer for so long is down */
    MOST_LIMIT_S = 1000000
};

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
    self->n_hosts = options->n_hosts;
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
            PL_TRY(pli_links_fail_by_end(link, 0));
        else if (errno == EAGAIN)
            goto done;
        else if (errno != EINTR)
            PL_TRY(pli_links_fail_by_end(link, errno));
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
