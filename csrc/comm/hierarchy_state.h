/* hierarchy_state.h - what a hierarchy holds; for the files hierarchy*.c alone. */
#ifndef PLI_HIERARCHY_STATE_H
#define PLI_HIERARCHY_STATE_H

#include <stdatomic.h>

#include "backend/cpu_sum.h"
#include "core/backoff.h"
#include "hierarchy.h"
#include "segment.h"

enum { HIERARCHY_MESSAGE_BYTES = PLI_NOTICE_BYTES };

/* A leader's: its host's ranks ask their own world. */
typedef enum hierarchy_phase {
    HIERARCHY_RUNNING,
    HIERARCHY_FAILED, /* until all hosts have left the step behind */
    HIERARCHY_ENDED   /* for good */
} hierarchy_phase;

/* Which side has given this epoch's step up: it sends no more of it. */
typedef enum hierarchy_given_up {
    GIVEN_UP_NOWHERE,
    GIVEN_UP_ELSEWHERE, /* another host has, or is about to */
    GIVEN_UP_HERE       /* marks are sent */
} hierarchy_given_up;

/* What stands before each operation's bytes. */
typedef struct head {
    uint64_t number;
    uint64_t hash;
    uint64_t n_bytes; /* behind it: whoever leaves a step behind skips them */
} head;

/* How far a stream of messages has come, one an operation. */
typedef struct message_flow {
    uint64_t n_done;
    size_t at;    /* bytes of the next, its head among them */
    head head;    /* of the next */
    char *from;   /* what is sent behind it */
    int is_reset; /* it has come to the mark between this epoch and the next */
} message_flow;

enum { HIERARCHY_N_STREAMS = 2 }; /* PLI_LINK_DATA and PLI_LINK_BACK, in this order */

typedef struct peer {
    message_flow out[HIERARCHY_N_STREAMS], in[HIERARCHY_N_STREAMS];
    char *staging; /* what it has sent, to be added up */
    size_t staging_bytes;
    int first_rank;
    int n_ranks;
} peer;

typedef struct operation {
    pl_op op;
    pl_ticket up;    /* of the host's own world; 0: nothing goes up */
    pl_ticket whole; /* ... and when all is done there, of those before, too */
} operation;

/* Operations are counted from 1 in each epoch, and their numbers are epoch <<
 * PLI_EPOCH_SHIFT | count.  On a leader n_down <= n_exchanged <= n_added <= n_reduced
 * <= n_up <= n_issued; the three in the middle are a leader's alone. */
typedef struct hierarchy {
    pl_comm super;    /* its base: the host's own world */
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
    uint64_t epoch;      /* how often a step was left behind; alike on all leaders */
    atomic_int given_up; /* hierarchy_given_up; any thread sends failures */
    uint64_t n_issued;
    uint64_t n_up;        /* handed to the host's own world */
    uint64_t n_reduced;   /* have gone up, on all ranks of the host */
    uint64_t n_added;     /* this leader's part is added up, by at most one ahead of: */
    uint64_t n_exchanged; /* between hosts */
    uint64_t n_down;      /* handed to the host's own world again */
    uint64_t n_whole;     /* the last that nothing follows */
    pl_ticket last_inner; /* of the host's own world */
    _Atomic uint64_t n_done;
    int64_t last_sign_ns;     /* when anything went on; while somebody waits */
    int64_t sent_waiting_ns;  /* ... of the silence that others know of */
    atomic_flag busy;         /* a thread is at what stands above */
    atomic_int phase;         /* hierarchy_phase; any thread may abort */
    atomic_int is_unsent;     /* failed, and the other hosts do not know yet */
    atomic_flag message_lock; /* any thread may fail the step, and any other read why */
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
    return self->super.arena + op->offset_bytes;
}

/* The count in an operation's number. */
static inline unsigned long long count_of(uint64_t number)
{
    return number & ((UINT64_C(1) << PLI_EPOCH_SHIFT) - 1);
}

/* PL_EPEER on a leader whose world has failed (hierarchy_failure.c). */
pl_status pli_hierarchy_check(hierarchy *self) PL_MUST_USE;

typedef enum failure_kind {
    STEP_FAILED, /* hosts can leave it behind */
    WORLD_FAILED
} failure_kind;

/* Fails this rank's world, and tells all ranks of all hosts; NULL: the words follow.
 * What has failed before stands. */
void pli_hierarchy_fail(hierarchy *self, failure_kind kind, const char *message);

/* ... with what the host's own world has just met, whose ranks know: st, which is
 * returned, and its words. */
pl_status pli_hierarchy_fail_as_inside(hierarchy *self, pl_status st) PL_MUST_USE;

/* ... with what leaders have just met. */
void pli_hierarchy_fail_between(hierarchy *self);

/* Of pl_comm_ops. */
pl_status pli_hierarchy_query(pl_comm *comm, pli_query what) PL_MUST_USE;

/* A leader's: what other hosts have to say of that. */
pl_status pli_hierarchy_query_hosts(hierarchy *self, pli_query what) PL_MUST_USE;

/* PL_EPEER where another host has said that it can do no more. */
pl_status pli_hierarchy_check_hosts(hierarchy *self) PL_MUST_USE;

/* Does what can be done of the operations that were issued, or fails where the world
 * has; the lock is held. */
pl_status pli_hierarchy_advance(hierarchy *self) PL_MUST_USE;

/* ... unless another thread is at it, or there is nothing to do. */
pl_status pli_hierarchy_advance_unless_busy(hierarchy *self) PL_MUST_USE;

/* A step has failed here: sends each other host, behind what it receives, the mark that
 * no more will come, as far as that can be sent now (hierarchy_failure.c). */
void pli_hierarchy_give_up(hierarchy *self);

/* ... by any thread, but not before the words of the failure. */
void pli_hierarchy_give_up_unless_words_follow(hierarchy *self);

/* Tells the other hosts of a failure, once. */
void pli_hierarchy_send_failure(hierarchy *self);

/* Of pl_comm_ops. */
void pli_hierarchy_abort(pl_comm *comm, const char *message);
void pli_hierarchy_set_failure_message(pl_comm *comm, const char *message);

/* Of pl_comm_ops (hierarchy_recover.c). */
pl_status pli_hierarchy_recover(pl_comm *comm, int64_t slice_ns,
                                pl_recovery *out) PL_MUST_USE;

/* Whether all ranks of this host have the result of an operation. */
int pli_hierarchy_is_finished(const hierarchy *self, uint64_t number);

/* Where an epoch's operations begin; on the wire the mark before it. */
static inline uint64_t first_number_of(uint64_t epoch)
{
    return epoch << PLI_EPOCH_SHIFT;
}

/* Sees what has gone up, sends it, and takes in what other hosts have sent. */
pl_status pli_hierarchy_exchange(hierarchy *self) PL_MUST_USE;

/* Goes on with a message, its head and what is behind it, as far as can be. */
pl_status pli_hierarchy_send(hierarchy *self, int host,
                             pli_link_stream link) PL_MUST_USE;

static inline int is_whole(const message_flow *flow)
{
    return flow->at == sizeof flow->head + flow->head.n_bytes;
}

/* Lists what a leader waits for between hosts, and how long it may sleep for it. */
int64_t pli_hierarchy_list_waited(const hierarchy *self, pli_links_waited *waited);

/* PL_ETIMEOUT where nothing has come for too long; it names a host. */
pl_status pli_hierarchy_check_deadline(hierarchy *self) PL_MUST_USE;

/* ... this one, in operation `number`, or one that it waits for; last_sign_ns is when
 * anything came, 0: just now. */
pl_status pli_hierarchy_check_silence(hierarchy *self, uint64_t number,
                                      int host) PL_MUST_USE;

#endif
