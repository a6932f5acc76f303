/* comm.h - the table behind which every kind of communication stands.
 *
 * An operation is data (pl_op) and passes one door, pl_comm_issue(), which checks
 * it and hands it to the kind's `issue`.  Issuing never waits: on shared memory it
 * stores a counter, on a device it would enqueue on the communication stream
 * behind the event that `order->ready` names and record `order->done` after it.
 * Completion is asked for by ticket alone, so the reducer does not know which kind
 * it drives.
 */
#ifndef PLI_COMM_H
#define PLI_COMM_H

#include "../backend/backend.h"
#include "../core/status.h"

/* What a rank says it is doing; read by its peers when they must name it. */
#define PLI_ACTIVITY_MAP(X)                                                            \
    X(PL_CONSTRUCTING, "construction")                                                 \
    X(PL_IDLE, "the user's code")                                                      \
    X(PL_FORWARD, "forward")                                                           \
    X(PL_BACKWARD, "backward")                                                         \
    X(PL_FINISHING, "the end of backward")                                             \
    X(PL_JOINED, "a join, out of batches")

typedef enum pl_activity {
#define PLI_ACTIVITY_ENUM(name, text) name,
    PLI_ACTIVITY_MAP(PLI_ACTIVITY_ENUM)
#undef PLI_ACTIVITY_ENUM
        PL_N_ACTIVITIES
} pl_activity;

/* The device-side order of one operation; NULL members on the CPU. */
typedef struct pli_order {
    pl_event *ready; /* the range is valid once this has happened */
    pl_event *done;  /* to be recorded after the operation */
} pli_order;

typedef struct pl_comm_ops {
    const char *name;
    pl_status (*issue)(pl_comm *comm, const pl_op *op, const pli_order *order,
                       pl_ticket *out);
    void (*work)(pl_comm *comm); /* progress, but failures are left to be met later */
    pl_status (*progress)(pl_comm *comm);
    pl_status (*wait)(pl_comm *comm, pl_ticket ticket, int64_t slice_ns);
    pl_status (*recover)(pl_comm *comm, int64_t slice_ns, pl_recovery *out);
    void (*abort)(pl_comm *comm, const char *words);
    void (*note)(pl_comm *comm, pl_activity activity, uint64_t step);
    void (*last_words)(pl_comm *comm, const char *words);
    void *(*arena)(pl_comm *comm);
    void (*leave)(pl_comm *comm);
    void (*destroy)(pl_comm *comm);
} pl_comm_ops;

/* Every kind's struct begins with this. */
struct pl_comm {
    const pl_comm_ops *ops;
    int rank;
    int world_size;
    size_t arena_bytes;
};

/* Says what this rank is doing, in which step: two plain stores. */
static inline void pli_comm_note(pl_comm *comm, pl_activity activity, uint64_t step)
{
    comm->ops->note(comm, activity, step);
}

/* Keeps `words` (a traceback, say) for peers that will have to name this rank;
 * NULL forgets them. */
static inline void pli_comm_last_words(pl_comm *comm, const char *words)
{
    comm->ops->last_words(comm, words);
}

/* The start of this rank's own arena. */
static inline void *pli_comm_arena(pl_comm *comm)
{
    return comm->ops->arena(comm);
}

const char *pli_op_kind_text(pl_op_kind kind);

#endif
