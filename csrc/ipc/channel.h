/* channel.h - ipc/: memory and messages between a process and its workers.
 *
 *     python/dp
 *       \--> channel, parent_watch        \--> shared_memory, affinity \--> core
 *
 * A channel carries one request at a time, from a caller's process to one worker's.
 *
 *     caller                                   worker
 *     writes into `out`, sends  ---------->   receives, reads `in`
 *     receives, reads `in`   <----------   writes into `out`, sends
 *
 * Each direction is shared memory (shared_memory.h) with a header at its beginning.  A
 * message is plain bytes; who sent one does not touch its memory again before the next
 * message of the other.  Sending is one store, and a system call where the other
 * sleeps.  Who waits spins for a while, then sleeps, and checks between sleeps whether
 * the other's process still runs.
 *
 * Memory that a large message made large gives memory back when QUIET messages in a row
 * (channel.c) needed less than a quarter of the largest one: what is beyond twice the
 * largest of these, by and by, after messages were sent.
 *
 * An end belongs to one thread at a time.
 */
#ifndef PLI_CHANNEL_H
#define PLI_CHANNEL_H

#include <stdint.h>

#include "affinity.h"
#include "core/process.h"
#include "shared_memory.h"

enum { PLI_NAME_BYTES = 64 };

/* How large messages in one direction have been lately. */
typedef struct pli_sizes {
    size_t peak_bytes; /* the largest since the last lull */
    size_t most_bytes; /* of the small ones in a row */
    int n_small;
} pli_sizes;

typedef struct pli_channel {
    pli_shared_memory *out;
    pli_shared_memory *in;
    uint32_t n_sent;
    uint32_t n_received;
    pli_sizes sent;
    pli_sizes received;
    size_t message_bytes; /* of the one that is written */
    size_t kept_bytes;    /* of `out`, which is to shrink to that */
    int has_calmed;       /* see pli_channel_has_calmed() */
    int64_t spin_ns;      /* before it sleeps, at the most */
    int64_t since_ns;     /* since when it waits; 0: it does not */
    int64_t usual_ns;     /* how long a wait took lately */
    pli_cores others;     /* cores of pinned workers, which this end leaves alone */
    pli_process *process; /* the peer's; NULL: it is not watched */
    char peer[PLI_NAME_BYTES]; /* "replica 1" */
} pli_channel;

/* The caller's end of a new channel. */
pl_status pli_channel_create(pli_channel **out) PL_MUST_USE;

/* The worker's end, over descriptors of the caller's `out` and `in`, which stay whose
 * they were. */
pl_status pli_channel_adopt(int request_fd, int answer_fd,
                            pli_channel **out) PL_MUST_USE;

void pli_channel_destroy(pli_channel *channel);

/* In a forked child: closes what it holds of its parent's channel. */
void pli_channel_forget(pli_channel *channel);

/* From now on a wait fails, naming `name`, where process `pid` has ended. */
pl_status pli_channel_watch(pli_channel *channel, int pid,
                            const char *name) PL_MUST_USE;

/* Where the next message is to be written, n_bytes of it, aligned to a cache line.
 * Borrowed until it is sent. */
pl_status pli_channel_reserve(pli_channel *channel, size_t n_bytes,
                              char **out) PL_MUST_USE;
void pli_channel_send(pli_channel *channel);

/* Non-zero, once, where messages have lately become much smaller, in either direction:
 * the time to give back what large ones have left elsewhere. */
int pli_channel_has_calmed(pli_channel *channel);

/* Non-zero where a message has come that was not received. */
int pli_channel_has_message(const pli_channel *channel);

/* Spins for a message; non-zero where it came.  Where waits have lately been longer
 * than spin_ns, which would be spent for nothing, it spins hardly at all. */
int pli_channel_spin(pli_channel *channel);

/* Sleeps until a message comes: PL_EAGAIN after most_ns or where a signal came,
 * PL_EPEER where the peer's process has ended without one. */
pl_status pli_channel_sleep(const pli_channel *channel, int64_t most_ns) PL_MUST_USE;

/* Takes the message that has come, and its size.  Borrowed until this end sends the
 * next.  PL_EMISMATCH where it would end behind the memory that is shared. */
pl_status pli_channel_receive(pli_channel *channel, const char **out,
                              size_t *n_bytes) PL_MUST_USE;

#endif
