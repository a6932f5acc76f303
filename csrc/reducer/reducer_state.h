/* reducer_state.h - the state of a reducer; for reducer*.c, step*.c and tests. */
#ifndef PLI_REDUCER_STATE_H
#define PLI_REDUCER_STATE_H

#include "core/config.h"
#include "reducer.h"

typedef enum reducer_phase {
    REDUCER_IDLE,          /* between steps */
    REDUCER_FILLING,       /* begin .. close */
    REDUCER_WAITING,       /* close .. wait */
    REDUCER_REDUCED,       /* wait .. end: means are in place */
    REDUCER_FILLING_AGAIN, /* after the first late write, until the second close */
    REDUCER_WAITING_AGAIN, /* ... until the second wait */
    REDUCER_FAILED,        /* permanently */
} reducer_phase;

/* What earlier steps have shown. */
typedef enum reducer_learning {
    LEARNING_NOTHING,     /* no step yet: nothing is posted before close */
    LEARNING_ORDER_KNOWN, /* a step has shown the order: the next begin adopts it */
    LEARNING_DONE,        /* the plan follows that order */
} reducer_learning;

/* Values of a parameter's byte in `used`; others: the number of sparse dimensions.  The
 * ranks' maximum counts, so dense and sparse together are dense. */
enum { USED_BY_NONE = 0, USED_DENSE = UINT8_MAX };

typedef struct slot_state {
    uint16_t n_ready;
    uint16_t n_expected; /* n_ready of the last step; 0 also if unknown */
    uint32_t ready_at;   /* position of its latest gradient in this step */
} slot_state;

/* Within one step, in this order. */
typedef enum bucket_phase {
    BUCKET_FILLING, /* gradients arrive */
    BUCKET_READY,   /* all that are expected are in */
    BUCKET_POSTED,  /* the peers may read and write it, until the step is waited for */
} bucket_phase;

typedef struct bucket_state {
    bucket_phase phase;
    uint32_t n_pending; /* params expected to get ready; one more if close must come */
    size_t n_issued;    /* elements, from the bucket's start */
} bucket_state;

typedef enum copy_state {
    COPY_NONE,     /* no gradient in this step */
    COPY_DEFERRED, /* it is at `data`; NULL: zeros */
    COPY_IN_SLOT,  /* `stream` has put it into the slot */
} copy_state;

/* A parameter's gradient in this step. */
typedef struct deferred_copy {
    const void *data;
    pl_stream *stream;
    copy_state state;
} deferred_copy;

typedef struct deferred_copies {
    deferred_copy *copies; /* by parameter; NULL: copies are not deferred */
    pl_move *batch;        /* of one launch: room for all parameters */
    pl_stream **streams;   /* ... */
    pl_event **ready;      /* by bucket */
    size_t n_ready;
    pl_event *any_event;  /* for any two streams */
    pl_event *side_event; /* for what is in no bucket */
} deferred_copies;

/* The first mean during the second all-reduce.  On a device the memory is kept for the
 * next time, because freeing it may wait. */
typedef struct backup {
    void *memory;
    int is_taken;
} backup;

/* The check of means: reducer_finish.c. */
typedef struct means_check {
    pli_check_kind kind;
    int has_failed; /* the ranks' weights differ */
    uint32_t crc;   /* of means of `step`, in two buckets and those between; 0: none */
    uint64_t step;
    size_t first_bucket, last_bucket;
    uint64_t n_steps; /* taken by all ranks since the start */
} means_check;

/* Where the parts of the arena begin: reducer.h. */
typedef struct arena_layout {
    size_t late, ranks, order, extra, staging, buckets;
} arena_layout;

struct pl_reducer {
    pl_comm *comm;
    pl_backend *backend;
    pl_reducer_spec spec; /* params, caps.each: own copies */
    pl_param *params;
    pl_comm_hook comm_hook; /* post: NULL if there is none */
    pl_plan *plan;
    slot_state *slots;
    bucket_state *buckets;    /* room for n_params of them */
    backup *backups;          /* by parameter */
    deferred_copies deferred; /* used if the backend copies by the bucket */
    pl_stream *stream;        /* of all but mark_ready */
    int is_ordered;           /* the stream waits for all that was issued */
    char *arena;              /* the header; on the CPU all of it */
    arena_layout at;
    reducer_phase phase;
    reducer_learning learning;
    unsigned generation;
    uint64_t step;
    uint64_t n_taken; /* steps that have ended, also those of `failed` in follow() */
    size_t n_posted;  /* buckets, in order */
    uint32_t n_ready;
    size_t n_ready_params;
    pl_participation participation; /* of the last step */
    means_check check;
    int root; /* of this step's broadcasts */
    pl_ticket last_ticket;
};

static inline int pli_reducer_defers(const pl_reducer *self)
{
    return self->deferred.copies != NULL;
}

static inline unsigned char *used_of(const pl_reducer *self)
{
    return (unsigned char *)self->arena;
}

static inline unsigned char *late_of(const pl_reducer *self)
{
    return (unsigned char *)self->arena + self->at.late;
}

/* What a rank sends of its synchronised forwards, each number up to 255. */
typedef struct forward_bytes {
    uint8_t n;            /* forwards since the last step */
    uint8_t n_answered;   /* backwards begun since then, also of earlier forwards */
    uint8_t n_unanswered; /* of the n: backward would be seen, and has not begun */
} forward_bytes;

typedef struct rank_flags {
    uint8_t role; /* pl_role */
    forward_bytes forwards;
    uint8_t check[4]; /* checksum of means */
} rank_flags;

static inline rank_flags *flags_of(const pl_reducer *self, int rank)
{
    return (rank_flags *)(self->arena + self->at.ranks) + rank;
}

/* The bytes that every step reduces: used, late, and the flags of ranks. */
static inline size_t n_flag_bytes(const pl_reducer *self)
{
    return self->at.ranks + sizeof(rank_flags) * (size_t)self->comm->world_size;
}

static inline char *slot_memory(const pl_reducer *self, size_t param)
{
    const size_t at = self->at.buckets + self->plan->slots[param].offset_bytes;
    return pli_reducer_defers(self) ? pli_comm_memory(self->comm, at)
                                    : self->arena + at;
}

static inline pl_move slot_move(const pl_reducer *self, size_t param, const void *from)
{
    return (pl_move){.to = slot_memory(self, param),
                     .from = from,
                     .dtype = self->params[param].dtype,
                     .n_elems = self->params[param].n_elems};
}

/* ---- queries -------------------------------------------------------------------- */

/* Non-zero between begin and end. */
static inline int pl_reducer_is_active(const pl_reducer *self)
{
    return self->phase != REDUCER_IDLE && self->phase != REDUCER_FAILED;
}

/* Non-zero after a step has failed. */
static inline int pl_reducer_has_failed(const pl_reducer *self)
{
    return self->phase == REDUCER_FAILED;
}

/* After `wait`: non-zero if some rank had a gradient for the parameter. */
static inline int pl_reducer_is_used(const pl_reducer *self, size_t param)
{
    return used_of(self)[param] != USED_BY_NONE;
}

/* After `wait`: the number of sparse dimensions of the gradients, the same on every
 * rank; 0 if a rank had a dense gradient, or no rank had a gradient. */
static inline unsigned pl_reducer_sparse_dims(const pl_reducer *self, size_t param)
{
    const unsigned used = used_of(self)[param];
    return used == USED_DENSE ? 0 : used;
}

/* Byte of the arena at which the parameter's slot begins; a new plan moves it. */
static inline size_t pl_reducer_slot_offset(const pl_reducer *self, size_t param)
{
    return self->at.buckets + self->plan->slots[param].offset_bytes;
}

static inline void *pl_reducer_extra(const pl_reducer *self)
{
    return pli_comm_memory(self->comm, self->at.extra);
}

/* The rank that broadcasts its `extra` in the next step. */
static inline int pl_reducer_next_root(const pl_reducer *self)
{
    return self->participation.first_active >= 0 ? self->participation.first_active : 0;
}

static inline int pl_reducer_root_is_active(const pl_reducer *self)
{
    return flags_of(self, self->root)->role == PL_ACTIVE;
}

static inline int pl_reducer_is_late(const pl_reducer *self, size_t param)
{
    return late_of(self)[param] != 0;
}

/* After `wait`: the parameters that were late on some rank.  Every rank writes data for
 * each.  The data's mean is added to the first mean (PL_ADD) or replaces it. */
static inline size_t pl_reducer_n_late(const pl_reducer *self)
{
    size_t n_late = 0;
    for (size_t i = 0; i < self->spec.n_params; i++)
        n_late += late_of(self)[i] != 0;
    return n_late;
}

/* Whether the next gradient of the parameter would make mark_ready post a bucket. */
static inline int pl_reducer_may_post(const pl_reducer *self, size_t param)
{
    const slot_state *slot = &self->slots[param];
    const size_t b = self->plan->slots[param].bucket;
    const bucket_state *bucket = &self->buckets[b];
    return b == self->n_posted && bucket->phase == BUCKET_FILLING &&
           bucket->n_pending == 1 && slot->n_ready + 1 == slot->n_expected;
}

/* Keeps the parameter's bucket back until `close`, so that no gradient for it can be
 * late.  Call before the slot is first written in a step. */
static inline void pl_reducer_defer_bucket(pl_reducer *self, size_t param)
{
    self->buckets[self->plan->slots[param].bucket].n_pending++;
}

/* Before `close`: the gradient just marked ready, or unused with PL_USED, is sparse in
 * its first n_dims dimensions (1 to 254); its slot holds it densely. */
static inline void pl_reducer_set_sparse(pl_reducer *self, size_t param,
                                         unsigned n_dims)
{
    if (used_of(self)[param] != USED_BY_NONE)
        used_of(self)[param] = (unsigned char)n_dims;
}

/* Sets the stream of all calls but `mark_ready`, which takes one.  NULL at first. */
static inline void pl_reducer_set_stream(pl_reducer *self, pl_stream *stream)
{
    self->is_ordered &= self->stream == stream;
    self->stream = stream;
}

/* Records that a bucket has all its gradients. */
static inline void pli_reducer_record_ready(const pl_reducer *self, size_t b)
{
    const pl_bucket_plan *bucket = &self->plan->buckets[b];
    pli_recorder_ready(self->comm->recorder, b,
                       bucket->n_elems * pl_dtype_bytes(bucket->dtype));
}

/* Moves a filled bucket on: it may be posted. */
static inline void pli_reducer_bucket_is_ready(pl_reducer *self, size_t b)
{
    pli_reducer_record_ready(self, b);
    self->buckets[b].phase = BUCKET_READY;
}

/* Posts the ready buckets whose turn it is; makes their deferred copies on `stream`. */
pl_status pli_reducer_post_ready(pl_reducer *self, pl_stream *stream) PL_MUST_USE;

/* Frees the memory of a backup. */
void pli_reducer_free_backup(pl_reducer *self, backup *saved);

/* ---- deferred copies (reducer_deliver.c) ---------------------------------------- */

pl_status pli_deferred_copies_init(pl_reducer *self) PL_MUST_USE;
void pli_deferred_copies_fini(pl_reducer *self);

/* Makes events for that many buckets. */
pl_status pli_deferred_copies_make_room(pl_reducer *self, size_t n_buckets) PL_MUST_USE;

/* A step begins: no copy is deferred. */
void pli_deferred_copies_begin(pl_reducer *self);

/* Defers the copy of a gradient whose bucket is not posted; PL_ADD adds at once. */
pl_status pli_reducer_defer(pl_reducer *self, size_t param, const void *data,
                            pl_write_mode mode, pl_stream *stream,
                            pl_ready_result *out) PL_MUST_USE;

/* Copies late data into the slot, after the stream that made it. */
pl_status pli_reducer_copy_late(pl_reducer *self, size_t param,
                                const void *data) PL_MUST_USE;

/* *out: an event after all that `stream` has put into the arena, or NULL on the CPU. */
pl_status pli_reducer_record_side(pl_reducer *self, pl_stream *stream,
                                  pl_event **out) PL_MUST_USE;

#endif
