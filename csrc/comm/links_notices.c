/* links_notices.c - what leaders send one another of failures. */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/clock.h"
#include "links_state.h"

enum { NOTICE_WAIT_MS = 300 }; /* for the words of a host whose connection has ended */

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
    if (coming->kind == NOTICE_WAITS) {
        it->waits = *coming;
        it->n_coming = 0;
        return;
    }
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

static int has_received_end(const connection *it)
{
    return it->has_notice && it->last.kind == NOTICE_ENDED;
}

/* Whether what a host has said is of what this one does now. */
static int concerns(const connection *it)
{
    return has_received_end(it) ||
           (it->has_notice && it->last.epoch == it->owner->epoch);
}

static pl_status fail_by_notice(const connection *it)
{
    if (has_received_end(it))
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

pl_status pli_links_fail_by_end(connection *it, int error)
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
        if (has_received_end(it)) /* one that leaves has sent its part */
            PL_TRY(fail_by_notice(it));
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
            PL_TRY(pli_links_fail_by_end(&self->links[h], 0));
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
    /* Better the words of the host where it began. */
    for (int h = 0; h < self->n_hosts && from->last.kind == NOTICE_FOLLOWED; h++) {
        connection *it = &self->links[h];
        if (h != self->host)
            read_notices(it);
        if (h != self->host && concerns(it) && it->last.kind == NOTICE_FAILED)
            from = it;
    }
    return fail_by_notice(from);
}

static void lock_sent(pli_links *self)
{
    while (atomic_flag_test_and_set_explicit(&self->is_sending, memory_order_acquire))
        pli_cpu_relax();
}

static void unlock_sent(pli_links *self)
{
    atomic_flag_clear_explicit(&self->is_sending, memory_order_release);
}

void pli_links_begin_epoch(pli_links *self, uint64_t epoch)
{
    lock_sent(self);
    self->epoch = epoch;
    unlock_sent(self);
}

static void send_notice(connection *it)
{
    while (it->n_sent < notice_bytes(&it->sent)) {
        const ssize_t n = PL_SYS(
            send(it->fds[PLI_LINK_NOTICE], (const char *)&it->sent + it->n_sent,
                 notice_bytes(&it->sent) - it->n_sent, MSG_DONTWAIT | MSG_NOSIGNAL));
        if (n > 0)
            it->n_sent += (size_t)n;
        else if (n == 0 || errno != EINTR)
            return; /* later, or whoever sends data sees what is the matter */
    }
}

static int is_sent(const connection *it)
{
    return it->n_sent == notice_bytes(&it->sent);
}

static void begin_notice(connection *it, const notice *said)
{
    if (!is_sent(it))
        send_notice(it);
    if (!is_sent(it))
        return; /* what stands before it is sent first */
    it->sent = *said;
    it->n_sent = 0;
    send_notice(it);
}

static void send_locked(pli_links *self, notice *said, const char *reason)
{
    pli_text_print(said->text, sizeof said->text, "%s", reason);
    said->n_bytes = (uint32_t)strlen(said->text);
    for (int h = 0; h < self->n_hosts && !self->has_ended; h++)
        if (h != self->host)
            begin_notice(&self->links[h], said);
}

/* Any thread's; in a forked child nothing is said. */
static void send_to_all(pli_links *self, notice *said, const char *reason)
{
    if (self->owner_pid != getpid())
        return;
    lock_sent(self);
    send_locked(self, said, reason);
    unlock_sent(self);
}

void pli_links_send_failure(pli_links *self, const char *reason, int is_anothers)
{
    notice said = {.epoch = self->epoch,
                   .kind = is_anothers ? NOTICE_FOLLOWED : NOTICE_FAILED};
    send_to_all(self, &said, reason);
}

void pli_links_send_waiting(pli_links *self, uint64_t number, int host)
{
    notice said = {.epoch = number, .kind = NOTICE_WAITS, .host = (uint32_t)host};
    send_to_all(self, &said, "");
}

int pli_links_waited_for(pli_links *self, uint64_t number, int host)
{
    for (int n = 0; n < self->n_hosts; n++) { /* or they wait for one another */
        connection *it = &self->links[host];
        if (host == self->host)
            break;
        read_notices(it);
        if (it->waits.kind != NOTICE_WAITS || it->waits.epoch != number ||
            it->waits.host >= (uint32_t)self->n_hosts ||
            it->waits.host == (uint32_t)self->host)
            break;
        host = (int)it->waits.host;
    }
    return host;
}

int pli_links_has_sent_failure(pli_links *self, int host)
{
    connection *it = &self->links[host];
    lock_sent(self);
    if (!is_sent(it))
        send_notice(it);
    const int has = is_sent(it);
    unlock_sent(self);
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
    notice said = {.epoch = self->epoch, .kind = NOTICE_ENDED};
    if (self->owner_pid != getpid())
        return; /* a child's copies of the sockets say nothing as they close */
    lock_sent(self);
    if (!self->has_ended) {
        if (reason != NULL)
            send_locked(self, &said, reason);
        say_no_more(self);
        self->has_ended = 1;
    }
    unlock_sent(self);
}
