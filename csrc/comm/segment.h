/* segment.h - the memory that the ranks of a host share, and its layout.
 *
 *   +---------+-------------+------------------+---------+---------+-----
 *   | header  | rank states | tags, per rank   | arena 0 | arena 1 | ...
 *   +---------+-------------+------------------+---------+---------+-----
 *
 * The segment is one memfd.  It has no name, so nothing is left of it once every
 * process that mapped it has ended, in whatever way.  A segment of one process needs no
 * file.  Each counter has one writer, is read by all, and only grows.
 */
#ifndef PLI_SEGMENT_H
#define PLI_SEGMENT_H

#include <stdatomic.h>
#include <stdint.h>

#include "core/status.h"

enum { PLI_MESSAGE_BYTES = 6144 };

/* Why a world failed. */
typedef enum pli_reason {
    PLI_RAISED,   /* a rank's step failed, and the rank reported it */
    PLI_DIED,     /* a rank's process ended without a report */
    PLI_LEFT,     /* a rank left while others waited for it */
    PLI_LATE,     /* a rank kept the others waiting beyond the deadline */
    PLI_MISMATCH, /* a rank issued another operation than the rest */
    PLI_DEADLOCK, /* two ranks wait for each other, in two worlds */
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
    _Alignas(PL_CACHE_LINE) _Atomic uint32_t wakeup;  /* futex word */
    _Atomic uint32_t n_waiters;
    /* The last operation that all ranks are known to have posted, and to have done: see
     * shm_comm.c. */
    _Alignas(PL_CACHE_LINE) _Atomic uint64_t all_posted;
    _Alignas(PL_CACHE_LINE) _Atomic uint64_t all_done;
} pli_header;

/* What one rank writes and the others read. */
typedef struct pli_rank {
    _Alignas(PL_CACHE_LINE) _Atomic uint64_t posted; /* operations issued */
    _Alignas(PL_CACHE_LINE) _Atomic uint64_t done;   /* operations it did its part of */
    _Alignas(PL_CACHE_LINE) _Atomic uint64_t notice; /* see pli_host_ops */
    _Atomic uint64_t step;
    _Atomic uint32_t activity; /* pl_activity */
    _Atomic uint32_t thread;   /* the thread of the rank that set it */
    _Atomic uint32_t life;     /* pli_life */
    _Atomic int32_t pid;       /* as the rank itself sees it */
    _Atomic uint64_t process;  /* pli_progress_process(): equal in all its worlds */
    _Atomic uint32_t message_state;
    _Atomic uint32_t n_writes; /* begun and ended, of the message: odd during a write */
    char message[PLI_MESSAGE_BYTES];
} pli_rank;

typedef enum pli_segment_kind {
    PLI_SEGMENT_FILE,
    PLI_SEGMENT_ANONYMOUS
} pli_segment_kind;

typedef struct pli_shm_segment {
    atomic_int n_users; /* ranks in this process; tests have several */
    int fd;             /* -1: anonymous */
    int owner_pid;      /* a forked child lacks most of the mapping: see below */
    int world_size;
    int first_rank; /* number of rank 0 in messages: see hierarchy.h */
    uint32_t ring_ops;
    size_t arena_bytes; /* rounded up to pages */
    size_t map_bytes;
    size_t arenas_at; /* offset of arena 0 in the file */
    char *base;
} pli_shm_segment;

/* A power of two, at least 64, that holds n_ops operations in flight. */
uint32_t pli_ring_ops(size_t n_ops);

/* Makes the memory and maps it.  ring_ops is a power of two. */
pl_status pli_segment_create(pli_segment_kind kind, int world_size, size_t arena_bytes,
                             uint32_t ring_ops, pli_shm_segment *out) PL_MUST_USE;

/* Maps a segment that a peer made; on success owns the descriptor. */
pl_status pli_segment_adopt(int fd, int world_size, size_t arena_bytes,
                            uint32_t ring_ops, pli_shm_segment *out) PL_MUST_USE;

/* Allocates the pages of one rank's arena now, so that a memory limit is an error here
 * and not a SIGBUS later. */
pl_status pli_segment_populate(const pli_shm_segment *segment, int rank) PL_MUST_USE;

/* Keeps all but this rank's own arena out of forked children.  New memory of a child
 * may lie at these addresses, so a child neither reads nor unmaps them. */
void pli_segment_keep_from_children(const pli_shm_segment *segment, int rank);

/* Publishes that a rank is present, with its process and thread. */
void pli_segment_enter(const pli_shm_segment *segment, int rank, int pid,
                       uint64_t process, uint32_t thread);

/* Maps a range of a rank's arena a second time. */
pl_status pli_segment_map_again(const pli_shm_segment *segment, int rank,
                                size_t offset_bytes, size_t bytes,
                                void **out) PL_MUST_USE;

/* Makes such a mapping private, in place, and keeps its contents: with a file, also
 * what other threads write meanwhile. */
pl_status pli_segment_unshare(const pli_shm_segment *segment, int rank,
                              size_t offset_bytes, size_t bytes,
                              void *memory) PL_MUST_USE;

/* Does nothing in a forked child. */
void pli_segment_fini(pli_shm_segment *segment);

/* Drops one share of a segment on the heap; the last frees it.  NULL is allowed. */
void pli_segment_release(pli_shm_segment *segment);

static inline pli_header *pli_header_of(const pli_shm_segment *segment)
{
    return (pli_header *)(void *)segment->base;
}

static inline pli_rank *pli_rank_of(const pli_shm_segment *segment, int rank)
{
    return (pli_rank *)(void *)(segment->base + sizeof(pli_header)) + rank;
}

/* Tags of a rank's operations: one word each, in a ring of the last ring_ops. */
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
