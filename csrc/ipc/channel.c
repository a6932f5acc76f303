/* channel.c - two pieces of shared memory, a count of messages in each, and a futex. */
#include "channel.h"

#include <stdio.h>
#include <string.h>

#include "core/alloc.h"
#include "core/backoff.h"

#define CHANNEL_MAGIC UINT64_C(0x6c656e6e61686370) /* "pchannel" */
enum { CHANNEL_VERSION = 2, SPINS_A_CHECK = 32, FRUITLESS = 50, WAITS_REMEMBERED = 8 };
#define FIRST_BYTES ((size_t)64 << 10)

enum { QUIET = 32, MUCH_SMALLER = 4 };
#define LEAST_KEPT_BYTES ((size_t)1 << 20)
#define MOST_AT_ONCE_BYTES ((size_t)64 << 20) /* to take away: 5 ms */
#define DEFAULT_SPIN_NS INT64_C(2000000)

/* At the beginning of a direction's memory; the message follows. */
typedef struct lane {
    uint64_t magic;
    uint64_t version;
    _Alignas(PL_CACHE_LINE) _Atomic uint32_t n_sent;    /* by who writes; futex word */
    _Alignas(PL_CACHE_LINE) _Atomic uint32_t is_asleep; /* who reads */
    size_t n_bytes;                                     /* of the message */
    _Alignas(PL_CACHE_LINE) char message[];
} lane;

static lane *lane_of(const pli_shared_memory *memory)
{
    return (lane *)(void *)memory->base;
}

/* ---- life ----------------------------------------------------------------------- */

static pl_status make_channel(pli_channel **out)
{
    pl_status st = PL_OK;
    pli_channel *channel = NULL;
    PL_TRY(pli_calloc(1, sizeof *channel, "channel", &channel));
    channel->spin_ns = DEFAULT_SPIN_NS;
    (void)snprintf(channel->peer, sizeof channel->peer, "the other process");
    *out = channel;
done:
    return st;
}

static pl_status make_lane(pli_shared_memory **out)
{
    pl_status st = PL_OK;
    pli_shared_memory *memory = NULL;
    PL_TRY(pli_shared_memory_create(PLI_MEMORY_GROWS, FIRST_BYTES, &memory));
    lane_of(memory)->magic = CHANNEL_MAGIC;
    lane_of(memory)->version = CHANNEL_VERSION;
    *out = memory;
done:
    return st;
}

static pl_status adopt_lane(int fd, pli_shared_memory **out)
{
    pl_status st = PL_OK;
    pli_shared_memory *memory = NULL;
    PL_TRY(pli_shared_memory_adopt(PLI_MEMORY_GROWS, fd, &memory));
    if (memory->n_bytes < sizeof(lane) || lane_of(memory)->magic != CHANNEL_MAGIC ||
        lane_of(memory)->version != CHANNEL_VERSION)
        PL_FAIL(PL_EMISMATCH,
                "descriptor %d is no channel of this version of paceline: is another "
                "version installed where the worker looks?",
                fd);
    *out = memory;
    memory = NULL;
done:
    pli_shared_memory_release(memory);
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
    pli_shared_memory_release(channel->out);
    pli_shared_memory_release(channel->in);
    pli_process_close(channel->process);
    pli_free(channel);
}

void pli_channel_forget(pli_channel *channel)
{
    pli_shared_memory_forget(channel->out);
    pli_shared_memory_forget(channel->in);
    pli_process_close(channel->process);
    channel->process = NULL;
}

/* ---- the peer's process --------------------------------------------------------- */

pl_status pli_channel_watch(pli_channel *channel, int pid, const char *name)
{
    pl_status st = PL_OK;
    pli_process *process = NULL;
    PL_TRY(pli_process_open(NULL, pid, &process));
    if (!pli_process_is_sure(process))
        PL_FAIL(PL_ESYS, "cannot watch %s (process %d): no pidfd", name, pid);
    pli_process_close(channel->process);
    channel->process = process;
    process = NULL;
    (void)snprintf(channel->peer, sizeof channel->peer, "%s", name);
done:
    pli_process_close(process);
    return st;
}

static pl_status report_end(const pli_channel *channel)
{
    char how[PLI_END_BYTES];
    pli_process_describe_end(channel->process, how, sizeof how);
    return pli_fail(PL_EPEER, "%s (process %d) %s while an answer was expected of it",
                    channel->peer, pli_process_pid(channel->process), how);
}

/* ---- messages ------------------------------------------------------------------- */

/* Records a message's size; non-zero where QUIET in a row were much smaller than the
 * largest one before. */
static int has_calmed(pli_sizes *sizes, size_t n_bytes)
{
    if (n_bytes > sizes->peak_bytes / MUCH_SMALLER) {
        if (n_bytes > sizes->peak_bytes)
            sizes->peak_bytes = n_bytes;
        sizes->n_small = 0;
        sizes->most_bytes = 0;
        return 0;
    }
    if (n_bytes > sizes->most_bytes)
        sizes->most_bytes = n_bytes;
    if (++sizes->n_small < QUIET || sizes->peak_bytes < LEAST_KEPT_BYTES)
        return 0;
    sizes->peak_bytes = sizes->most_bytes;
    sizes->n_small = 0;
    return 1;
}

/* A part at a time, so that no message has to wait for long. */
static void shrink(pli_channel *channel)
{
    const size_t n_bytes = channel->out->n_bytes;
    const size_t kept = channel->kept_bytes;
    if (kept == 0 || n_bytes <= kept)
        return;
    pli_shared_memory_shrink(channel->out, n_bytes - kept > MOST_AT_ONCE_BYTES
                                               ? n_bytes - MOST_AT_ONCE_BYTES
                                               : kept);
}

/* After a message was sent: the other side is at work on it. */
static void update_size(pli_channel *channel)
{
    const size_t n_bytes = channel->message_bytes;
    if (sizeof(lane) + n_bytes > channel->kept_bytes)
        channel->kept_bytes = 0;
    if (has_calmed(&channel->sent, n_bytes)) {
        channel->kept_bytes = 2 * (sizeof(lane) + channel->sent.peak_bytes);
        if (channel->kept_bytes < LEAST_KEPT_BYTES)
            channel->kept_bytes = LEAST_KEPT_BYTES;
        channel->has_calmed = 1;
    }
    shrink(channel);
}

int pli_channel_has_calmed(pli_channel *channel)
{
    const int is_so = channel->has_calmed;
    channel->has_calmed = 0;
    return is_so;
}

pl_status pli_channel_reserve(pli_channel *channel, size_t n_bytes, char **out)
{
    pl_status st = PL_OK;
    if (n_bytes > PTRDIFF_MAX / 2)
        PL_FAIL(PL_ENOMEM, "a message of %zu bytes is more than there can be", n_bytes);
    PL_TRY(pli_shared_memory_grow(channel->out, sizeof(lane) + n_bytes));
    channel->message_bytes = n_bytes;
    *out = lane_of(channel->out)->message;
done:
    return st;
}

void pli_channel_send(pli_channel *channel)
{
    lane *mine = lane_of(channel->out);
    pli_cores_step_off(&channel->others);
    mine->n_bytes = channel->message_bytes;
    /* Sequentially consistent, as are the reader's flag and load: either this sees the
     * sleeper, or the sleeper sees the message. */
    atomic_store(&mine->n_sent, ++channel->n_sent);
    if (atomic_load(&mine->is_asleep) != 0)
        pli_futex_wake(&mine->n_sent, 1);
    update_size(channel);
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
    do {
        int n_spins = SPINS_A_CHECK;
        while (pli_spin(&n_spins))
            if (pli_channel_has_message(channel))
                return 1;
    } while (pli_now_ns() < until_ns);
    return 0;
}

pl_status pli_channel_sleep(const pli_channel *channel, int64_t most_ns)
{
    pl_status st = PL_OK;
    lane *theirs = lane_of(channel->in);
    cpu_set_t before;
    /* Asked first: what it sent before its end is here by then. */
    const int is_over =
        channel->process != NULL && pli_process_has_ended(channel->process);
    if (pli_channel_has_message(channel))
        goto done;
    if (is_over)
        PL_TRY(report_end(channel));
    const int has_left = pli_cores_leave(&channel->others, &before);
    atomic_store(&theirs->is_asleep, 1);
    if (!pli_channel_has_message(channel))
        pli_futex_wait(&theirs->n_sent, channel->n_received, most_ns);
    atomic_store(&theirs->is_asleep, 0);
    if (has_left)
        pli_cores_return(&before);
    if (!pli_channel_has_message(channel))
        st = PL_EAGAIN;
done:
    return st;
}

pl_status pli_channel_receive(pli_channel *channel, const char **out, size_t *n_bytes)
{
    pl_status st = PL_OK;
    const lane *theirs = lane_of(channel->in);
    const int64_t waited_ns =
        channel->since_ns != 0 ? pli_now_ns() - channel->since_ns : 0;
    channel->usual_ns += (waited_ns - channel->usual_ns) / WAITS_REMEMBERED;
    channel->since_ns = 0;
    channel->n_received = atomic_load(&theirs->n_sent);
    const size_t n_sent_bytes = theirs->n_bytes;
    if (n_sent_bytes > channel->in->n_bytes - sizeof *theirs)
        pli_shared_memory_see_growth(channel->in);
    if (n_sent_bytes > channel->in->n_bytes - sizeof *theirs)
        PL_FAIL(PL_EMISMATCH,
                "a message of %zu bytes from %s does not fit the %zu that are shared: "
                "they were overwritten",
                n_sent_bytes, channel->peer, channel->in->n_bytes);
    channel->has_calmed |= has_calmed(&channel->received, n_sent_bytes);
    *out = theirs->message;
    *n_bytes = n_sent_bytes;
done:
    return st;
}
