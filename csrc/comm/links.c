/* links.c - bytes between the leaders of hosts, and what they say as they fail. */
#include "links.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
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

typedef enum notice_kind {
    NOTICE_FAILED,   /* a rank of that host failed the step */
    NOTICE_FOLLOWED, /* ... of yet another host */
    NOTICE_ENDED     /* the host can do no more */
} notice_kind;

/* One message of PLI_LINK_NOTICE. */
typedef struct notice {
    uint64_t epoch;
    uint32_t kind;    /* notice_kind */
    uint32_t n_bytes; /* of the text that is sent */
    char text[PLI_NOTICE_BYTES];
} notice;

enum { NOTICE_HEAD_BYTES = offsetof(notice, text) };

typedef struct connection {
    const pli_links *owner;
    int fds[PLI_N_LINK_STREAMS];
    char name[NAME_BYTES];
    notice told;   /* by this host */
    size_t n_told; /* bytes of it that have been sent */
    notice coming;
    size_t n_coming;
    notice last; /* the last that came whole */
    int has_notice;
    int has_ended; /* nothing more will come */
} connection;

struct pli_links {
    int n_hosts;
    int host;
    int rank;
    int owner_pid; /* a forked child says nothing */
    int has_ended;
    uint64_t epoch;         /* from 0 */
    atomic_flag is_telling; /* any thread may tell, or end */
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
    self->rank = options->rank;
    self->owner_pid = getpid();
    atomic_flag_clear(&self->is_telling);
    for (int h = 0; h < options->n_hosts; h++) {
        connection *it = &self->links[h];
        pli_text_print(it->name, sizeof it->name, "%s", options->names[h]);
        it->owner = self;
        it->n_told = NOTICE_HEAD_BYTES;
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

static size_t notice_bytes(const notice *it)
{
    return NOTICE_HEAD_BYTES + it->n_bytes;
}

/* Takes what has come whole. */
static void take_notice(connection *it)
{
    notice *coming = &it->coming;
    if (it->n_coming < NOTICE_HEAD_BYTES)
        return;
    if (coming->n_bytes >= sizeof coming->text) { /* no leader says that */
        it->has_ended = 1;
        return;
    }
    if (it->n_coming < notice_bytes(coming))
        return;
    coming->text[coming->n_bytes] = '\0';
    it->last = *coming;
    it->has_notice = 1;
    it->n_coming = 0;
}

/* Reads what a host has to say, without waiting. */
static void read_notices(connection *it)
{
    while (!it->has_ended) {
        const size_t n_bytes = it->n_coming < NOTICE_HEAD_BYTES
                                   ? NOTICE_HEAD_BYTES
                                   : notice_bytes(&it->coming);
        const ssize_t n =
            PL_SYS(recv(it->fds[PLI_LINK_NOTICE], (char *)&it->coming + it->n_coming,
                        n_bytes - it->n_coming, MSG_DONTWAIT));
        if (n > 0) {
            it->n_coming += (size_t)n;
            take_notice(it);
        } else if (n == 0 || (errno != EINTR && errno != EAGAIN)) {
            it->has_ended = 1;
        } else if (errno == EAGAIN) {
            return;
        }
    }
}

static int has_told_end(const connection *it)
{
    return it->has_notice && it->last.kind == NOTICE_ENDED;
}

/* Whether what a host has said is of what this one does now. */
static int concerns(const connection *it)
{
    return has_told_end(it) || (it->has_notice && it->last.epoch == it->owner->epoch);
}

static pl_status fail_by_notice(const connection *it)
{
    if (has_told_end(it))
        return pli_fail(PL_EPEER, "rank %d: %s failed: %s", it->owner->rank, it->name,
                        it->last.text);
    return pli_fail(PL_EPEER,
                    "rank %d: the step of %s failed, so this one cannot be "
                    "finished%s\n\nIts own failure message:\n%s",
                    it->owner->rank, it->name,
                    it->has_ended ? ", and that host died or left" : "", it->last.text);
}

/* Waits for the words that a host is about to send. */
static void await_notice(connection *it)
{
    struct pollfd more = {.fd = it->fds[PLI_LINK_NOTICE], .events = POLLIN};
    const int64_t until = pli_now_ns() + NOTICE_WAIT_MS * PLI_MS;
    read_notices(it);
    while (!it->has_ended && !concerns(it) && pli_now_ns() < until) {
        (void)poll(&more, 1, 10);
        read_notices(it);
    }
}

/* A connection has ended; its host may be about to say why. */
static pl_status fail_by_end(connection *it, int error)
{
    await_notice(it);
    if (concerns(it))
        return fail_by_notice(it);
    if (error != 0)
        return pli_fail(PL_EPEER,
                        "rank %d: %s: the connection to that host was lost: %s",
                        it->owner->rank, it->name, strerror(error));
    return pli_fail(PL_EPEER,
                    "rank %d: %s died or left: the connection to that host is closed "
                    "(every rank needs the same number of steps)",
                    it->owner->rank, it->name);
}

pl_status pli_links_check(pli_links *self)
{
    pl_status st = PL_OK;
    for (int h = 0; h < self->n_hosts; h++) {
        connection *it = &self->links[h];
        if (h == self->host)
            continue;
        read_notices(it);
        if (has_told_end(it)) /* one that leaves has sent its part */
            PL_TRY(fail_by_notice(it));
    }
done:
    return st;
}

pl_status pli_links_check_present(pli_links *self)
{
    pl_status st = PL_OK;
    PL_TRY(pli_links_check(self));
    for (int h = 0; h < self->n_hosts; h++)
        if (h != self->host && self->links[h].has_ended)
            PL_TRY(fail_by_end(&self->links[h], 0));
done:
    return st;
}

pl_status pli_links_hear(pli_links *self, int host)
{
    const connection *told = &self->links[host];
    await_notice(&self->links[host]);
    if (!concerns(told))
        return pli_fail(PL_EPEER, "rank %d: the step of %s failed", self->rank,
                        told->name);
    /* Better the words of the host where it began. */
    for (int h = 0; h < self->n_hosts && told->last.kind == NOTICE_FOLLOWED; h++) {
        connection *it = &self->links[h];
        if (h != self->host)
            read_notices(it);
        if (h != self->host && concerns(it) && it->last.kind == NOTICE_FAILED)
            told = it;
    }
    return fail_by_notice(told);
}

static void lock_told(pli_links *self)
{
    while (atomic_flag_test_and_set_explicit(&self->is_telling, memory_order_acquire))
        pli_cpu_relax();
}

static void unlock_told(pli_links *self)
{
    atomic_flag_clear_explicit(&self->is_telling, memory_order_release);
}

void pli_links_begin_epoch(pli_links *self, uint64_t epoch)
{
    lock_told(self);
    self->epoch = epoch;
    unlock_told(self);
}

static void send_notice(connection *it)
{
    while (it->n_told < notice_bytes(&it->told)) {
        const ssize_t n = PL_SYS(
            send(it->fds[PLI_LINK_NOTICE], (const char *)&it->told + it->n_told,
                 notice_bytes(&it->told) - it->n_told, MSG_DONTWAIT | MSG_NOSIGNAL));
        if (n > 0)
            it->n_told += (size_t)n;
        else if (n == 0 || errno != EINTR)
            return; /* later, or whoever sends data sees what is the matter */
    }
}

static int has_told(const connection *it)
{
    return it->n_told == notice_bytes(&it->told);
}

static void begin_notice(const pli_links *self, connection *it, const char *reason,
                         notice_kind kind)
{
    if (!has_told(it))
        send_notice(it);
    if (!has_told(it))
        return; /* what stands before it is heard first */
    it->told = (notice){.epoch = self->epoch, .kind = (uint32_t)kind};
    pli_text_print(it->told.text, sizeof it->told.text, "%s", reason);
    it->told.n_bytes = (uint32_t)strlen(it->told.text);
    it->n_told = 0;
    send_notice(it);
}

static void tell_all(pli_links *self, const char *reason, notice_kind kind)
{
    for (int h = 0; h < self->n_hosts; h++)
        if (h != self->host)
            begin_notice(self, &self->links[h], reason, kind);
}

void pli_links_tell(pli_links *self, const char *reason, int is_anothers)
{
    if (self->owner_pid != getpid())
        return;
    lock_told(self);
    if (!self->has_ended)
        tell_all(self, reason, is_anothers ? NOTICE_FOLLOWED : NOTICE_FAILED);
    unlock_told(self);
}

int pli_links_has_told(pli_links *self, int host)
{
    connection *it = &self->links[host];
    lock_told(self);
    if (!has_told(it))
        send_notice(it);
    const int has = has_told(it);
    unlock_told(self);
    return has;
}

static void say_no_more(const pli_links *self)
{
    for (int h = 0; h < self->n_hosts; h++)
        for (int s = 0; h != self->host && s < PLI_N_LINK_STREAMS; s++)
            (void)shutdown(self->links[h].fds[s], SHUT_WR);
}

void pli_links_end(pli_links *self, const char *reason)
{
    if (self->owner_pid != getpid())
        return; /* a child's copies of the sockets say nothing as they close */
    lock_told(self);
    if (!self->has_ended) {
        if (reason != NULL)
            tell_all(self, reason, NOTICE_ENDED);
        say_no_more(self);
        self->has_ended = 1;
    }
    unlock_told(self);
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
