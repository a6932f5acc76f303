/* segment.h - the memory that the ranks of a host share, and its layout.
 *
 *   +---------+-------------+------------------+---------+---------+-----
 *   | header  | rank states | tags, per rank   | arena 0 | arena 1 | ...
 *   +---------+-------------+------------------+---------+---------+-----
 *
 * The segment is one memfd: it has no name, so nothing is left of it once every
 * process that mapped it is gone, however that went.  One that no other process maps
 * needs no file.  A counter is written by one rank, read by all, and only grows; its
 * number is epoch << PLI_EPOCH_SHIFT | n, so that a new epoch outruns everything of the
 * old one.
 */
#ifndef PLI_SEGMENT_H
#define PLI_SEGMENT_H

#include <stdatomic.h>
#include <stdint.h>

#include "core/status.h"

enum { PLI_EPOCH_SHIFT = 40, PLI_MESSAGE_BYTES = 6144 };

/* Why a world failed.  After PLI_RAISED it can go on in a new epoch; the other
 * reasons are final. */
typedef enum pli_reason {
    PLI_RAISED,   /* a rank's step failed, and the rank said so */
    PLI_DIED,     /* a rank's process ended without a word */
    PLI_LEFT,     /* a rank said goodbye while others waited for it */
    PLI_LATE,     /* a rank kept the others waiting beyond the deadline */
    PLI_MISMATCH, /* a rank issued another operation than the rest */
    PLI_DEADLOCK, /* two ranks wait for one another, in two worlds */
    PLI_ENDED,    /* the world of several hosts, to which this one belongs, is over */
    PLI_N_REASONS
} pli_reason;

typedef enum pli_life { PLI_ABSENT, PLI_PRESENT, PLI_GONE } pli_life;

/* Whether a rank has left a message for the peers. */
typedef enum pli_message_state {
    PLI_MESSAGE_NONE,
    PLI_MESSAGE_FOLLOWS,
    PLI_MESSAGE_READY
} pli_message_state;

typedef struct pli_header {
    uint64_t magic;
    uint32_t version;
    uint32_t world_size;
    uint32_t ring_ops;
    uint64_t arena_bytes;
    _Alignas(PL_CACHE_LINE) _Atomic uint64_t failure; /* see failure.h; 0: none */
    _Atomic uint64_t raised; /* the last that was not final: maybe its cause */
    _Alignas(PL_CACHE_LINE) _Atomic uint32_t wakeup; /* futex word */
    _Atomic uint32_t n_waiters;
    /* The last operation that all are known to have posted, and to have done: see
     * shm_counters.c. */
    _Alignas(PL_CACHE_LINE) _Atomic uint64_t all_posted;
    _Alignas(PL_CACHE_LINE) _Atomic uint64_t all_done;
} pli_header;

/* What one rank writes and the others read. */
typedef struct pli_rank {
    _Alignas(PL_CACHE_LINE) _Atomic uint64_t posted; /* operations issued */
    _Alignas(PL_CACHE_LINE) _Atomic uint64_t done;   /* operations it did its part of */
    _Alignas(PL_CACHE_LINE) _Atomic uint64_t epoch;
    _Atomic uint64_t done_before; /* `done` at the end of the last epoch that it ran */
    _Atomic uint64_t notice;      /* see pli_host_ops */
    _Atomic uint64_t step;
    _Atomic uint32_t activity; /* pl_activity */
    _Atomic uint32_t thread;   /* which of the rank's threads said so */
    _Atomic uint32_t life;     /* pli_life */
    _Atomic int32_t pid;       /* as the rank itself sees it */
    _Atomic uint64_t process;  /* pli_progress_process(): alike in all worlds of it */
    _Atomic uint32_t message_state;
    _Atomic uint32_t
        n_writes; /* of the message, begun and ended: odd while one is under way */
    char message[PLI_MESSAGE_BYTES];
} pli_rank;

typedef enum pli_segment_kind {
    PLI_SEGMENT_FILE,
    PLI_SEGMENT_ANONYMOUS
} pli_segment_kind;

typedef struct pli_shm_segment {
    atomic_int n_users; /* ranks of this process, as those of tests */
    int fd;             /* -1: anonymous */
    int owner_pid;      /* a forked child has holes where it was mapped: see below */
    int world_size;
    int first_rank; /* what rank 0 here is called in messages: see hierarchy.h */
    uint32_t ring_ops;
    size_t arena_bytes; /* rounded up to pages */
    size_t map_bytes;
    size_t arenas_at; /* offset of arena 0 in the file */
    char *base;
} pli_shm_segment;

/* The smallest power of two that holds n_ops operations in flight. */
uint32_t pli_ring_ops(size_t n_ops);

/* Makes the memory and maps it.  ring_ops is a power of two. */
pl_status pli_segment_create(pli_segment_kind kind, int world_size, size_t arena_bytes,
                             uint32_t ring_ops, pli_shm_segment *out) PL_MUST_USE;

/* Maps a segment that a peer made; takes the descriptor over on success. */
pl_status pli_segment_adopt(int fd, int world_size, size_t arena_bytes,
                            uint32_t ring_ops, pli_shm_segment *out) PL_MUST_USE;

/* Gives one rank's arena its pages now, so that a memory limit is an error here
 * and not a SIGBUS later. */
pl_status pli_segment_populate(const pli_shm_segment *segment, int rank) PL_MUST_USE;

/* Keeps the peers' part of the segment, and all of its own that is no arena, out of
 * forked children: new memory of a child may take their place, so a child neither reads
 * nor unmaps them. */
void pli_segment_keep_from_children(const pli_shm_segment *segment, int rank);

/* Says that a rank is there, and who it is. */
void pli_segment_enter(const pli_shm_segment *segment, int rank, int pid,
                       uint64_t process, uint32_t thread);

/* In a forked child, it leaves everything as it is. */
void pli_segment_fini(pli_shm_segment *segment);

static inline pli_header *pli_header_of(const pli_shm_segment *segment)
{
    return (pli_header *)(void *)segment->base;
}

static inline pli_rank *pli_rank_of(const pli_shm_segment *segment, int rank)
{
    return (pli_rank *)(void *)(segment->base + sizeof(pli_header)) + rank;
}

/* What a rank's operations were: one word each, the ring of its last ring_ops. */
static inline _Atomic uint64_t *pli_tags_of(const pli_shm_segment *segment, int rank)
{
    return (_Atomic uint64_t *)(void *)pli_rank_of(segment, segment->world_size) +
           (size_t)rank * segment->ring_ops;
}

static inline char *pli_arena_of(const pli_shm_segment *segment, int rank)
{
    return segment->base + segment->arenas_at + (size_t)rank * segment->arena_bytes;
}

#endif
