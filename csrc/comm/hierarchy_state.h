/* hierarchy_state.h - what hierarchy.c and hierarchy_exchange.c share. */
#ifndef PLI_HIERARCHY_STATE_H
#define PLI_HIERARCHY_STATE_H

#include <stdatomic.h>

#include "backend/cpu_sum.h"
#include "core/backoff.h"
#include "hierarchy.h"

enum { HIERARCHY_MESSAGE_BYTES = PLI_NOTICE_BYTES };

/* Phase of a leader.  The other ranks of a host read it from their host's world. */
typedef enum hierarchy_phase {
    HIERARCHY_RUNNING,
    HIERARCHY_SILENT, /* failed; the message may follow */
    HIERARCHY_FAILED, /* ... has a message; the other hosts do not have it yet */
    HIERARCHY_TOLD    /* ... and they have */
} hierarchy_phase;

/* A message: the head; if n_bytes > 0, so much data, and a checksum of both. */
typedef struct head {
    uint64_t number;
    uint64_t hash;
    uint64_t n_bytes;
    uint64_t crc; /* CRC-32C of the fields above */
} head;

/* Progress of a stream of messages, one message per operation. */
typedef struct message_flow {
    uint64_t n_done;
    size_t at;         /* bytes done of the next message, including its head */
    head head;         /* of the next message */
    char *data;        /* sent or received after the head */
    size_t n_summed;   /* bytes of data that `crc` includes */
    uint32_t crc;      /* CRC-32C of the head and these bytes */
    uint32_t received; /* after the data */
} message_flow;

enum { HIERARCHY_N_STREAMS = 2 }; /* PLI_LINK_DATA and PLI_LINK_BACK, in this order */

typedef struct peer {
    message_flow out[HIERARCHY_N_STREAMS], in[HIERARCHY_N_STREAMS];
    char *staging; /* data it sent, to be added up */
    size_t staging_bytes;
    int first_rank;
    int n_ranks;
} peer;

typedef struct operation {
    pl_op op;
    pl_ticket up;    /* in the host's own world; 0: nothing goes up */
    pl_ticket whole; /* ... when this and all operations before it are done there */
} operation;

/* Operations are counted from 1.  On a leader n_down <= n_exchanged <= n_added <=
 * n_reduced <= n_up <= n_issued; only leaders use the three in the middle. */
typedef struct hierarchy {
    pl_comm super;    /* its base is the host's own world */
    pli_links *links; /* NULL unless this rank is a leader */
    pli_progress *progress;
    const pli_sum_table *sums;
    peer *peers; /* one per host */
    int n_hosts;
    int host;
    int is_even; /* all hosts have the same number of ranks */
    int64_t deadline_ns;
    int owner_pid; /* a forked child lacks most of the host's memory */
    operation *ring;
    size_t ring_ops;
    uint64_t n_issued;
    uint64_t n_up;        /* passed to the host's own world */
    uint64_t n_reduced;   /* gone up, on all ranks of the host */
    uint64_t n_added;     /* this leader's part is added up; at most n_exchanged + 1 */
    uint64_t n_exchanged; /* exchanged between hosts */
    uint64_t n_down;      /* passed to the host's own world again */
    uint64_t n_whole;     /* the last one without is_followed */
    pl_ticket last_inner; /* the last ticket of the host's own world */
    _Atomic uint64_t n_done;
    pli_stopwatch silence;    /* since the last progress during a wait */
    int64_t sent_waiting_ns;  /* start of the silence that other hosts know of */
    atomic_flag busy;         /* held while a thread uses the fields above */
    atomic_int phase;         /* hierarchy_phase; any thread may abort */
    atomic_int has_lost;      /* a rank of this host is gone */
    atomic_flag message_lock; /* any thread may fail the world, and another read why */
    char message[HIERARCHY_MESSAGE_BYTES];
} hierarchy;

static inline hierarchy *hierarchy_of(pl_comm *comm)
{
    return (hierarchy *)(void *)comm;
}

static inline operation *operation_at(const hierarchy *self, uint64_t number)
{
    return &self->ring[number % self->ring_ops];
}

static inline int is_alone_on_host(const hierarchy *self)
{
    return self->peers[self->host].n_ranks == 1;
}

static inline int host_of_rank(const hierarchy *self, int rank)
{
    int h = self->n_hosts - 1;
    while (self->peers[h].first_rank > rank)
        h--;
    return h;
}

/* Fails the world with the failure `st` that the host's own world has just met, and its
 * message; the host's ranks know of it.  Returns `st`. */
pl_status pli_hierarchy_fail_as_inside(hierarchy *self, pl_status st) PL_MUST_USE;

/* Likewise, with what leaders have just met. */
void pli_hierarchy_fail_between(hierarchy *self);

/* Passes operations to the host's own world in its order: of operations that follow one
 * another, all go up before the first goes down.  Leaders exchange what has gone up. */
pl_status pli_hierarchy_pass_on(hierarchy *self) PL_MUST_USE;

/* Lists what a leader waits for between hosts; returns how long it may sleep. */
int64_t pli_hierarchy_list_waited(const hierarchy *self, pli_links_waited *waited);

/* PL_ETIMEOUT, with the name of a host, if nothing has come for too long. */
pl_status pli_hierarchy_check_deadline(hierarchy *self) PL_MUST_USE;

#endif
