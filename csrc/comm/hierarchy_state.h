/* hierarchy_state.h - what a hierarchy holds; for the files hierarchy*.c alone. */
#ifndef PLI_HIERARCHY_STATE_H
#define PLI_HIERARCHY_STATE_H

#include <stdatomic.h>

#include "backend/cpu_sum.h"
#include "core/clock.h"
#include "hierarchy.h"

enum { HIERARCHY_MESSAGE_BYTES = PLI_NOTICE_BYTES };

typedef enum hierarchy_phase {
    HIERARCHY_RUNNING,
    HIERARCHY_FAILING,
    HIERARCHY_FAILED
} hierarchy_phase;

/* What stands before each operation's bytes. */
typedef struct head {
    uint64_t number;
    uint64_t hash;
} head;

/* How far a stream of messages has come, one an operation. */
typedef struct cursor {
    uint64_t n_done;
    size_t at; /* bytes of the next */
} cursor;

typedef struct peer {
    cursor sent, received;           /* PLI_LINK_DATA */
    cursor sent_back, received_back; /* PLI_LINK_BACK */
    head out, in;                    /* of the messages under way */
    char *staging;                   /* what it has sent, to be added up */
    size_t staging_bytes;
    int first_rank;
    int n_ranks;
} peer;

typedef struct operation {
    pl_op op;
    pl_ticket up;    /* of the host's own world; 0: nothing goes up */
    pl_ticket whole; /* ... and when all is done there, of those before, too */
} operation;

/* Operations are counted from 1.  n_down <= n_exchanged <= n_reduced <= n_up <=
 * n_issued on a leader; `n_exchanged` and `n_reduced` are the leader's alone. */
typedef struct hierarchy {
    pl_comm super;
    pl_comm *inner;
    pli_links *links; /* NULL: this rank is no leader */
    pli_progress *progress;
    const pli_sum_table *sums;
    peer *peers; /* a host */
    int n_hosts;
    int host;
    int is_even; /* every host has as many ranks */
    int64_t deadline_ns;
    operation *ring;
    size_t ring_ops;
    uint64_t n_issued;
    uint64_t n_up;        /* handed to the host's own world */
    uint64_t n_reduced;   /* have gone up, on all ranks of the host */
    uint64_t n_exchanged; /* between hosts */
    uint64_t n_down;      /* handed to the host's own world again */
    uint64_t n_whole;     /* the last that nothing follows */
    pl_ticket last_inner; /* of the host's own world */
    _Atomic uint64_t n_done;
    int is_added_up;      /* of the operation behind n_exchanged: this leader's part */
    int64_t last_sign_ns; /* when anything went on; while somebody waits */
    atomic_flag busy;     /* a thread is at what stands above */
    atomic_int phase;     /* hierarchy_phase; any thread may abort */
    atomic_int is_untold; /* failed, and the other hosts wait for its words */
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

static inline char *range_of(const hierarchy *self, const pl_op *op)
{
    return (char *)pli_comm_arena(self->inner) + op->offset_bytes;
}

/* PL_EPEER once the world has failed (hierarchy_failure.c). */
pl_status pli_hierarchy_check(hierarchy *self) PL_MUST_USE;

/* The first failure counts, and is told to all; NULL: its words follow. */
void pli_hierarchy_fail(hierarchy *self, const char *message);

/* Tells the other hosts of a failure, once. */
void pli_hierarchy_tell(hierarchy *self);

/* Of pl_comm_ops. */
void pli_hierarchy_set_failure_message(pl_comm *comm, const char *message);

/* Sees what has gone up, sends it, and takes in what other hosts have sent. */
pl_status pli_hierarchy_exchange(hierarchy *self) PL_MUST_USE;

/* Lists what a leader waits for between hosts, and how long it may sleep for it. */
int64_t pli_hierarchy_list_waited(const hierarchy *self, pli_links_waited *waited);

/* PL_ETIMEOUT where nothing has come for too long; it names a host. */
pl_status pli_hierarchy_check_deadline(hierarchy *self) PL_MUST_USE;

#endif
