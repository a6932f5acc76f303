/* reducer_state.h - what a reducer holds; for the files reducer*.c alone. */
#ifndef PLI_REDUCER_STATE_H
#define PLI_REDUCER_STATE_H

#include "bucket.h"
#include "reducer.h"
#include "reducer_moves.h"

typedef enum reducer_phase {
    REDUCER_IDLE,          /* between steps */
    REDUCER_FILLING,       /* begin .. close */
    REDUCER_WAITING,       /* close .. wait */
    REDUCER_REDUCED,       /* wait .. end: means are in place */
    REDUCER_AMENDING,      /* after the first amend, until the second close */
    REDUCER_WAITING_AGAIN, /* ... until the second wait */
    REDUCER_FAILED,        /* until recovered */
} reducer_phase;

/* What the next begin knows of the steps before. */
typedef enum reducer_learning {
    LEARNING_NOTHING,     /* no step yet: nothing is posted before close */
    LEARNING_ORDER_KNOWN, /* a step has shown the order: the next begin takes it up */
    LEARNING_DONE,        /* the plan follows that order */
} reducer_learning;

/* What a parameter's byte of `used` says; the ranks' maximum counts, so that dense and
 * sparse together are dense.  Between the two: dimensions in which it is sparse. */
enum { USED_BY_NONE = 0, USED_DENSE = UINT8_MAX };

typedef struct slot_state {
    uint16_t n_fires;
    uint16_t n_expected; /* fires of the last step; 0 too where none is known */
    uint32_t fired_at;   /* position among this step's fires, of the latest */
} slot_state;

typedef struct bucket_state {
    pl_bucket_phase phase;
    uint32_t n_pending; /* expected fires yet to come; one more where close must come */
    size_t n_issued;    /* elements, from the bucket's start */
} bucket_state;

/* A mean put aside while it is amended.  On a device the memory is kept for the next
 * time: freeing it may wait. */
typedef struct backup {
    void *memory;
    int is_taken;
} backup;

struct pl_reducer {
    pl_comm *comm;
    pl_backend *backend;
    pl_reducer_spec spec; /* params, caps.each: own copies */
    pl_param *params;
    size_t *each_cap;
    pl_carrier carrier; /* post: NULL where there is none */
    pl_plan *plan;
    slot_state *slots;
    bucket_state *buckets; /* room for n_params of them */
    backup *backups;       /* by parameter */
    reducer_moves moves; /* those put off, where the backend takes them by the bucket */
    pl_stream *stream;   /* of all but what is delivered */
    int is_ordered;      /* the stream is behind all that was issued */
    char *arena;         /* the words; on the CPU all of it */
    size_t late_at, roll_at, order_at, extra_at, buckets_at;
    reducer_phase phase;
    reducer_learning learning;
    unsigned generation;
    uint64_t step;
    size_t n_posted; /* buckets, in order */
    uint32_t n_fires;
    size_t n_fired_params;
    pl_roll roll; /* of the last step */
    int root;     /* of this step's broadcasts */
    pl_ticket last_ticket;
};

static inline unsigned char *used_of(const pl_reducer *self)
{
    return (unsigned char *)self->arena;
}

static inline unsigned char *late_of(const pl_reducer *self)
{
    return (unsigned char *)self->arena + self->late_at;
}

/* A pl_part a rank. */
static inline unsigned char *roll_of(const pl_reducer *self)
{
    return (unsigned char *)self->arena + self->roll_at;
}

/* The bytes that every step reduces: used, late and roll. */
static inline size_t n_flag_bytes(const pl_reducer *self)
{
    return 2 * self->spec.n_params + (size_t)pl_comm_world_size(self->comm);
}

static inline char *slot_memory(const pl_reducer *self, size_t param)
{
    const size_t at = self->buckets_at + self->plan->slots[param].offset_bytes;
    return reducer_defers(&self->moves) ? pli_comm_memory(self->comm, at)
                                        : self->arena + at;
}

static inline pl_move slot_move(const pl_reducer *self, size_t param, const void *from)
{
    return (pl_move){.to = slot_memory(self, param),
                     .from = from,
                     .dtype = self->params[param].dtype,
                     .n_elems = self->params[param].n_elems};
}

/* Takes up a plan of that order, and of those caps. */
pl_status reducer_lay_out(pl_reducer *self, const uint32_t *order,
                          const pl_plan_caps *caps) PL_MUST_USE;

/* Counts what each bucket waits for, and puts all in PL_BUCKET_FILLING. */
void reducer_arm_buckets(pl_reducer *self);

static inline int reducer_is_active_rank(const pl_reducer *self)
{
    return roll_of(self)[pl_comm_rank(self->comm)] == PL_ACTIVE;
}

/* Takes this rank as active, and the step before for who is likely to be. */
void reducer_open_roll(pl_reducer *self);

/* Reads what the ranks said of themselves. */
void reducer_read_roll(pl_reducer *self);

/* As if every rank had been active: what a reducer knows at first. */
pl_roll reducer_full_roll(const pl_reducer *self);

/* Posts every bucket that is ready and whose turn it is; what was put off is moved on
 * `stream`. */
pl_status reducer_post_ready(pl_reducer *self, pl_stream *stream) PL_MUST_USE;

/* Frees what was put aside for amended means, and all memory for that. */
void reducer_drop_backups(pl_reducer *self);

#endif
