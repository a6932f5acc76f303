/* links_notices.c - what leaders tell one another about failures. */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/backoff.h"
#include "links_state.h"

enum { NOTICE_WAIT_MS = 300 }; /* for the notice of a host whose connection has ended */

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
    if (coming->kind == NOTICE_WAITS) {
        link->waits = *coming;
        return;
    }
    link->last = *coming;
    link->has_notice = 1;
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

static int has_received_end(const connection *link)
{
    return link->has_notice && link->last.kind == NOTICE_ENDED;
}

/* Whether a host's last notice concerns what this host does now. */
static int concerns(const connection *link)
{
    return has_received_end(link) ||
           (link->has_notice && link->last.epoch == link->owner->epoch);
}

static pl_status fail_by_notice(const connection *link)
{
    if (has_received_end(link))
        return pli_fail(PL_EPEER, "rank %d: %s failed: %s", link->owner->rank,
                        link->name, link->last.text);
    return pli_fail(PL_EPEER,
                    "rank %d: the step of %s failed, so this one cannot be "
                    "finished%s\n\nIts own failure message:\n%s",
                    link->owner->rank, link->name,
                    link->has_ended ? ", and that host died or left" : "",
                    link->last.text);
}

/* Waits for a notice that the host is about to send. */
static void await_notice(connection *link)
{
    struct pollfd more = {.fd = link->fds[PLI_LINK_NOTICE], .events = POLLIN};
    const int64_t until = pli_now_ns() + NOTICE_WAIT_MS * PLI_MS;
    read_notices(link);
    while (!link->has_ended && !concerns(link) && pli_now_ns() < until) {
        (void)poll(&more, 1, 10);
        read_notices(link);
    }
}

pl_status pli_links_fail_by_end(connection *link, int error)
{
    await_notice(link);
    if (concerns(link))
        return fail_by_notice(link);
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

pl_status pli_links_check(pli_links *self)
{
    pl_status st = PL_OK;
    for (int h = 0; h < self->n_hosts; h++) {
        connection *link = &self->links[h];
        if (h == self->host)
            continue;
        read_notices(link);
        const int error = atomic_load(&link->error);
        /* A host that left normally has sent its part, and ends without an error. */
        if (has_received_end(link) || error != 0)
            PL_TRY(pli_links_fail_by_end(link, error));
    }
done:
    return st;
}

pl_status pli_links_check_step(pli_links *self)
{
    pl_status st = PL_OK;
    PL_TRY(pli_links_check(self));
    for (int h = 0; h < self->n_hosts; h++)
        if (h != self->host && concerns(&self->links[h]))
            PL_TRY(pli_links_read_notice(self, h));
done:
    return st;
}

pl_status pli_links_check_present(pli_links *self)
{
    pl_status st = PL_OK;
    PL_TRY(pli_links_check(self));
    for (int h = 0; h < self->n_hosts; h++)
        if (h != self->host && self->links[h].has_ended)
            PL_TRY(pli_links_fail_by_end(&self->links[h], self->links[h].error));
done:
    return st;
}

pl_status pli_links_read_notice(pli_links *self, int host)
{
    const connection *from = &self->links[host];
    await_notice(&self->links[host]);
    if (!concerns(from))
        return pli_fail(PL_EPEER, "rank %d: the step of %s failed", self->rank,
                        from->name);
    /* Prefer the reason of the host where the failure began. */
    for (int h = 0; h < self->n_hosts && from->last.kind == NOTICE_FOLLOWED; h++) {
        connection *link = &self->links[h];
        if (h != self->host)
            read_notices(link);
        if (h != self->host && concerns(link) && link->last.kind == NOTICE_FAILED)
            from = link;
    }
    return fail_by_notice(from);
}

void pli_links_begin_epoch(pli_links *self, uint64_t epoch)
{
    pli_spin_lock(&self->is_sending);
    self->epoch = epoch;
    pli_spin_unlock(&self->is_sending);
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

static void send_locked(pli_links *self, notice *sent, const char *reason)
{
    pli_text_print(sent->text, sizeof sent->text, "%s", reason);
    sent->n_bytes = (uint32_t)strlen(sent->text);
    sent->crc = notice_crc(sent);
    for (int h = 0; h < self->n_hosts && !self->has_ended; h++)
        if (h != self->host)
            begin_notice(&self->links[h], sent);
}

/* Any thread may call it.  A forked child sends nothing. */
static void send_to_all(pli_links *self, notice *sent, const char *reason)
{
    if (self->owner_pid != getpid())
        return;
    pli_spin_lock(&self->is_sending);
    send_locked(self, sent, reason);
    pli_spin_unlock(&self->is_sending);
}

void pli_links_send_failure(pli_links *self, const char *reason, int is_anothers)
{
    notice sent = {.epoch = self->epoch,
                   .kind = is_anothers ? NOTICE_FOLLOWED : NOTICE_FAILED};
    send_to_all(self, &sent, reason);
}

void pli_links_send_waiting(pli_links *self, uint64_t number, int host)
{
    notice sent = {.epoch = number, .kind = NOTICE_WAITS, .host = (uint32_t)host};
    send_to_all(self, &sent, "");
}

int pli_links_waited_for(pli_links *self, uint64_t number, int host)
{
    for (int n = 0; n < self->n_hosts; n++) { /* they may wait in a cycle */
        connection *link = &self->links[host];
        if (host == self->host)
            break;
        read_notices(link);
        if (link->waits.kind != NOTICE_WAITS || link->waits.epoch != number ||
            link->waits.host >= (uint32_t)self->n_hosts ||
            link->waits.host == (uint32_t)self->host)
            break;
        host = (int)link->waits.host;
    }
    return host;
}

int pli_links_has_sent_failure(pli_links *self, int host)
{
    connection *link = &self->links[host];
    pli_spin_lock(&self->is_sending);
    if (!is_sent(link))
        send_notice(link);
    const int has = is_sent(link);
    pli_spin_unlock(&self->is_sending);
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
    notice sent = {.epoch = self->epoch, .kind = NOTICE_ENDED};
    if (self->owner_pid != getpid())
        return; /* a child's copies of the sockets close silently */
    pli_spin_lock(&self->is_sending);
    if (!self->has_ended) {
        if (reason != NULL)
            send_locked(self, &sent, reason);
        say_no_more(self);
        self->has_ended = 1;
    }
    pli_spin_unlock(&self->is_sending);
}
