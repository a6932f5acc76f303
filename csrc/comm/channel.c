/* channel.c - two rooms, a count of messages in each, and a futex. */
#include "channel.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../core/alloc.h"
#include "../core/clock.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3; one number on all architectures */
#endif

#define CHANNEL_MAGIC UINT64_C(0x6c656e6e61686370) /* "pchannel" */
enum { CHANNEL_VERSION = 1, SPINS_A_LOOK = 32, FRUITLESS = 50, WAITS_REMEMBERED = 8 };
#define FIRST_BYTES ((size_t)64 << 10)
#define DEFAULT_SPIN_NS INT64_C(2000000)

/* At the beginning of a room; the message follows. */
typedef struct lane {
    uint64_t magic;
    uint64_t version;
    _Alignas(PL_CACHE_LINE) _Atomic uint32_t n_sent;    /* by who writes; futex word */
    _Alignas(PL_CACHE_LINE) _Atomic uint32_t is_asleep; /* who reads */
    _Alignas(PL_CACHE_LINE) char message[];
} lane;

static lane *lane_of(const pli_room *room)
{
    return (lane *)(void *)room->base;
}

/* ---- life ----------------------------------------------------------------------- */

static pl_status make_channel(pli_channel **out)
{
    pl_status st = PL_OK;
    pli_channel *channel = NULL;
    PL_TRY(pli_calloc(1, sizeof *channel, "channel", &channel));
    channel->pidfd = -1;
    channel->spin_ns = DEFAULT_SPIN_NS;
    (void)snprintf(channel->peer, sizeof channel->peer, "the other process");
    *out = channel;
done:
    return st;
}

static pl_status make_lane(pli_room **out)
{
    pl_status st = PL_OK;
    pli_room *room = NULL;
    PL_TRY(pli_room_create(PLI_ROOM_GROWS, FIRST_BYTES, &room));
    lane_of(room)->magic = CHANNEL_MAGIC;
    lane_of(room)->version = CHANNEL_VERSION;
    *out = room;
done:
    return st;
}

static pl_status adopt_lane(int fd, pli_room **out)
{
    pl_status st = PL_OK;
    pli_room *room = NULL;
    PL_TRY(pli_room_adopt(PLI_ROOM_GROWS, fd, &room));
    if (room->n_bytes < sizeof(lane) || lane_of(room)->magic != CHANNEL_MAGIC ||
        lane_of(room)->version != CHANNEL_VERSION)
        PL_FAIL(PL_EMISMATCH,
                "descriptor %d is no channel of this version of paceline: is another "
                "version installed where the worker looks?",
                fd);
    *out = room;
    room = NULL;
done:
    pli_room_release(room);
    return st;
}

pl_status pli_channel_create(pli_channel **out)
{
    pl_status st = PL_OK;
    pli_channel *channel = NULL;
    PL_TRY(make_channel(&channel));
    PL_TRY(make_lane(&channel->out));
    PL_TRY(make_lane(&channel->in));
    *out = channel;
    channel = NULL;
done:
    pli_channel_destroy(channel);
    return st;
}

pl_status pli_channel_adopt(int request_fd, int answer_fd, pli_channel **out)
{
    pl_status st = PL_OK;
    pli_channel *channel = NULL;
    PL_TRY(make_channel(&channel));
    PL_TRY(adopt_lane(answer_fd, &channel->out));
    PL_TRY(adopt_lane(request_fd, &channel->in));
    *out = channel;
    channel = NULL;
done:
    pli_channel_destroy(channel);
    return st;
}

void pli_channel_destroy(pli_channel *channel)
{
    if (channel == NULL)
        return;
    pli_room_release(channel->out);
    pli_room_release(channel->in);
    if (channel->pidfd >= 0)
        (void)close(channel->pidfd);
    pli_free(channel);
}

void pli_channel_forget(pli_channel *channel)
{
    pli_room_forget(channel->out);
    pli_room_forget(channel->in);
    if (channel->pidfd >= 0)
        (void)close(channel->pidfd);
    channel->pidfd = -1;
}

/* ---- the peer's process --------------------------------------------------------- */

pl_status pli_channel_watch(pli_channel *channel, int pid, const char *name)
{
    pl_status st = PL_OK;
    const int fd = (int)PL_SYS(syscall(SYS_pidfd_open, pid, 0));
    if (fd < 0)
        PL_FAIL_ERRNO("cannot watch %s (process %d)", name, pid);
    if (channel->pidfd >= 0)
        (void)close(channel->pidfd);
    channel->pidfd = fd;
    channel->peer_pid = pid;
    (void)snprintf(channel->peer, sizeof channel->peer, "%s", name);
done:
    return st;
}

static int has_ended(const pli_channel *channel)
{
    struct pollfd one = {.fd = channel->pidfd, .events = POLLIN};
    return channel->pidfd >= 0 && poll(&one, 1, 0) > 0;
}

static const char *signal_text(int number)
{
    static const struct {
        int number;
        const char *text;
    } table[] = {
        {SIGKILL, "SIGKILL (the kernel does so where memory runs out)"},
        {SIGSEGV, "SIGSEGV"},
        {SIGBUS, "SIGBUS"},
        {SIGABRT, "SIGABRT"},
        {SIGILL, "SIGILL"},
        {SIGFPE, "SIGFPE"},
        {SIGTERM, "SIGTERM"},
        {SIGHUP, "SIGHUP"},
        {SIGINT, "SIGINT"},
        {SIGQUIT, "SIGQUIT"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i].number == number)
            return table[i].text;
    return "a signal";
}

static pl_status report_end(const pli_channel *channel)
{
    siginfo_t info = {0};
    char how[2 * PLI_NAME_BYTES] = "has ended";
    const int got = waitid((idtype_t)P_PIDFD, (id_t)channel->pidfd, &info,
                           WEXITED | WNOHANG | WNOWAIT);
    if (got == 0 && info.si_code == CLD_EXITED)
        (void)snprintf(how, sizeof how, "ended by itself with status %d",
                       info.si_status);
    else if (got == 0 && (info.si_code == CLD_KILLED || info.si_code == CLD_DUMPED))
        (void)snprintf(how, sizeof how, "was killed by %s",
                       signal_text(info.si_status));
    return pli_fail(PL_EPEER, "%s (process %d) %s while an answer was expected of it",
                    channel->peer, channel->peer_pid, how);
}

/* ---- messages ------------------------------------------------------------------- */

pl_status pli_channel_room(pli_channel *channel, size_t n_bytes, char **out)
{
    pl_status st = PL_OK;
    if (n_bytes > PTRDIFF_MAX / 2)
        PL_FAIL(PL_ENOMEM, "a message of %zu bytes is more than there can be", n_bytes);
    PL_TRY(pli_room_grow(channel->out, sizeof(lane) + n_bytes));
    *out = lane_of(channel->out)->message;
done:
    return st;
}

void pli_channel_send(pli_channel *channel)
{
    lane *mine = lane_of(channel->out);
    pli_cores_step_off(&channel->others);
    /* Sequentially consistent, as are the reader's flag and look: either this sees the
     * sleeper, or the sleeper sees the message. */
    atomic_store(&mine->n_sent, ++channel->n_sent);
    if (atomic_load(&mine->is_asleep) != 0)
        (void)syscall(SYS_futex, &mine->n_sent, FUTEX_WAKE, 1, NULL, NULL, 0);
}

int pli_channel_has_message(const pli_channel *channel)
{
    return atomic_load(&lane_of(channel->in)->n_sent) != channel->n_received;
}

int pli_channel_spin(pli_channel *channel)
{
    if (pli_channel_has_message(channel))
        return 1;
    channel->since_ns = pli_now_ns();
    if (channel->spin_ns <= 0)
        return 0;
    pli_cores_step_off(&channel->others);
    const int64_t until_ns = channel->since_ns + (channel->usual_ns > channel->spin_ns
                                                      ? channel->spin_ns / FRUITLESS
                                                      : channel->spin_ns);
    do
        for (int i = 0; i < SPINS_A_LOOK; i++) {
            if (pli_channel_has_message(channel))
                return 1;
            pli_pause();
        }
    while (pli_now_ns() < until_ns);
    return 0;
}

pl_status pli_channel_sleep(const pli_channel *channel, int64_t patience_ns)
{
    pl_status st = PL_OK;
    lane *theirs = lane_of(channel->in);
    const struct timespec rest = {.tv_sec = (time_t)(patience_ns / INT64_C(1000000000)),
                                  .tv_nsec = (long)(patience_ns % INT64_C(1000000000))};
    cpu_set_t before;
    /* Asked first: what it sent before its end is here by then. */
    const int is_over = has_ended(channel);
    if (pli_channel_has_message(channel))
        goto done;
    if (is_over)
        PL_TRY(report_end(channel));
    const int has_left = pli_cores_leave(&channel->others, &before);
    atomic_store(&theirs->is_asleep, 1);
    if (!pli_channel_has_message(channel))
        (void)syscall(SYS_futex, &theirs->n_sent, FUTEX_WAIT, channel->n_received,
                      &rest, NULL, 0);
    atomic_store(&theirs->is_asleep, 0);
    if (has_left)
        pli_cores_return(&before);
    if (!pli_channel_has_message(channel))
        st = PL_EAGAIN;
done:
    return st;
}

const char *pli_channel_receive(pli_channel *channel)
{
    const lane *theirs = lane_of(channel->in);
    const int64_t waited_ns =
        channel->since_ns != 0 ? pli_now_ns() - channel->since_ns : 0;
    channel->usual_ns += (waited_ns - channel->usual_ns) / WAITS_REMEMBERED;
    channel->since_ns = 0;
    channel->n_received = atomic_load(&theirs->n_sent);
    return theirs->message;
}
