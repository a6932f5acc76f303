/* paceline.h - the public face of Paceline's core.
 *
 * A *world* is a set of ranks that hold arenas of one size: what a rank has at
 * byte k of its arena corresponds to what every other rank has at byte k of its
 * own.  Ranks talk by *operations* on ranges of those arenas, issued by every
 * rank in the same order.
 *
 * Declared here: status codes, data types, operations, and pl_comm, a rank's end of a
 * world.  Above it stand core/plan.h, which lays parameters out in buckets of an arena,
 * and reducer/reducer.h, which fills the buckets and issues them.
 *
 * Every fallible call returns pl_status and leaves its message in
 * pl_error_message(), which is the calling thread's own.  Out-parameters come
 * last and are written on success alone.  `destroy` takes NULL and cannot fail.
 * No call exits, aborts, prints, or knows of Python.
 */
#ifndef PACELINE_H
#define PACELINE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PL_MUST_USE __attribute__((warn_unused_result))
#define PL_API __attribute__((visibility("default")))
#else
#define PL_MUST_USE
#define PL_API
#endif

enum { PL_MAX_RANKS = 1024 }; /* of one host; its memory ends before */
enum { PL_CACHE_LINE = 64 };  /* alignment of every slot, and of what ranks share */

/* ---- status --------------------------------------------------------------------- */

/* name, number, text, Python exception (see csrc/python/raise.c) */
#define PL_STATUS_MAP(X)                                                               \
    X(PL_OK, 0, "success", "")                                                         \
    X(PL_EINVAL, 1, "invalid argument", "ValueError")                                  \
    X(PL_ENOMEM, 2, "out of memory", "MemoryError")                                    \
    X(PL_ESTATE, 3, "call not allowed in this state", "RuntimeError")                  \
    X(PL_ESYS, 4, "system call failed", "OSError")                                     \
    X(PL_EPEER, 5, "another rank failed", "PeerError")                                 \
    X(PL_ETIMEOUT, 6, "deadline passed", "PeerTimeoutError")                           \
    X(PL_EMISMATCH, 7, "ranks disagree", "MismatchError")                              \
    X(PL_EUNSUPPORTED, 8, "not supported", "NotImplementedError")                      \
    X(PL_EAGAIN, 9, "not done yet", "RuntimeError")

typedef enum pl_status {
#define PL_STATUS_ENUM(name, number, text, exception) name = number,
    PL_STATUS_MAP(PL_STATUS_ENUM)
#undef PL_STATUS_ENUM
} pl_status;

/* The fixed text of a code; never NULL. */
PL_API const char *pl_status_text(pl_status st);

/* What went wrong in this thread's last failed call.  Borrowed until this
 * thread's next failed call; never NULL. */
PL_API const char *pl_error_message(void);

/* ---- data types ----------------------------------------------------------------- */

/* name, number, bytes of one element, text */
#define PL_DTYPE_MAP(X)                                                                \
    X(PL_U8, 0, 1, "uint8")                                                            \
    X(PL_I8, 1, 1, "int8")                                                             \
    X(PL_I16, 2, 2, "int16")                                                           \
    X(PL_I32, 3, 4, "int32")                                                           \
    X(PL_I64, 4, 8, "int64")                                                           \
    X(PL_F16, 5, 2, "float16")                                                         \
    X(PL_BF16, 6, 2, "bfloat16")                                                       \
    X(PL_F32, 7, 4, "float32")                                                         \
    X(PL_F64, 8, 8, "float64")                                                         \
    X(PL_C64, 9, 8, "complex64")                                                       \
    X(PL_C128, 10, 16, "complex128")

typedef enum pl_dtype {
#define PL_DTYPE_ENUM(name, number, bytes, text) name = number,
    PL_DTYPE_MAP(PL_DTYPE_ENUM)
#undef PL_DTYPE_ENUM
        PL_N_DTYPES
} pl_dtype;

/* Bytes of one element; 0 for a number that is no pl_dtype. */
PL_API size_t pl_dtype_bytes(pl_dtype dtype);
PL_API const char *pl_dtype_text(pl_dtype dtype);

typedef enum pl_reduction {
    PL_SUM,  /* in rank order; 16-bit floats in fp32 with one rounding */
    PL_MEAN, /* PL_SUM, then divided by the world size; floats and complex only */
    PL_MAX,  /* integers only */
    PL_N_REDUCTIONS
} pl_reduction;

/* ---- operations ----------------------------------------------------------------- */

typedef enum pl_op_kind {
    PL_ALL_REDUCE, /* every rank's range becomes the reduction over ranks */
    PL_REDUCE,     /* ... only in the root's range */
    PL_ALL_GATHER, /* every rank's block r becomes rank r's block r */
    PL_BROADCAST,  /* every rank's range becomes the root's */
    PL_BARRIER,    /* no data: done once every rank has issued it */
    PL_N_OP_KINDS
} pl_op_kind;

/* One collective, on the same range of every rank's arena.  All-gather splits the range
 * into world-size blocks of n_elems / world size. */
typedef struct pl_op {
    pl_op_kind kind;
    pl_reduction reduction; /* read by the two reducing kinds */
    pl_dtype dtype;
    int root;            /* read by PL_REDUCE and PL_BROADCAST */
    size_t offset_bytes; /* from the start of the arena */
    size_t n_elems;
    /* Another operation is issued behind this one before either is waited for: between
     * hosts both travel in one round.  Equal on all ranks. */
    int is_followed;
    /* A rank that has its result takes the step for ended.  Equal on all ranks. */
    int ends_step;
    unsigned mark;   /* compared between ranks: stands for what else they have done */
    unsigned bucket; /* whose part it is, from 1, for a recorder; 0: none's */
} pl_op;

/* Counts the operations of a world from 1; tickets only grow. */
typedef uint64_t pl_ticket;

/* ---- communication -------------------------------------------------------------- */

typedef struct pl_comm pl_comm;

/* Issues op: says that this rank's range is ready, and returns at once.  Until it is
 * waited for, the range is not this rank's, and no other operation may overlap it.
 * PL_EINVAL for a bad range; PL_EPEER, PL_EMISMATCH once the world has failed. */
PL_API pl_status pl_comm_issue(pl_comm *comm, const pl_op *op,
                               pl_ticket *out) PL_MUST_USE;

/* Does whatever part of this rank's work can be done without waiting. */
PL_API pl_status pl_comm_progress(pl_comm *comm) PL_MUST_USE;

/* Waits until every rank has done its part of all operations up to `ticket`,
 * working meanwhile for every world that shares this one's pl_progress.
 * PL_EAGAIN after about slice_ns, so that the caller can look at signals and
 * call again; PL_EPEER, PL_ETIMEOUT, PL_EMISMATCH name the rank at fault.  On one host,
 * where a rank has done its part of what ends a step, so that peers may see the end
 * at any moment, it waits for that without slices, unless slice_ns is 0. */
PL_API pl_status pl_comm_wait(pl_comm *comm, pl_ticket ticket,
                              int64_t slice_ns) PL_MUST_USE;

/* Declares this rank's step failed: every rank gets PL_EPEER with `message` from
 * what it waits for, and may go on after pl_comm_recover().  NULL is allowed. */
PL_API void pl_comm_abort(pl_comm *comm, const char *message);

typedef enum pl_recovery {
    PL_NOTHING_FAILED, /* and nothing was waited for */
    PL_RECOVERED,      /* every rank has left the failed step behind */
} pl_recovery;

/* Leaves a failed step behind: waits like pl_comm_wait() until every rank has
 * called it too.  PL_EPEER for good when a rank is gone. */
PL_API pl_status pl_comm_recover(pl_comm *comm, int64_t slice_ns,
                                 pl_recovery *out) PL_MUST_USE;

/* Says goodbye to the peers: whoever waits for this rank from now on is told that it
 * has left.  Never waits; may be called twice. */
PL_API void pl_comm_leave(pl_comm *comm);

/* Leaves, then frees everything.  Never waits. */
PL_API void pl_comm_destroy(pl_comm *comm);

PL_API int pl_comm_rank(const pl_comm *comm);
PL_API int pl_comm_world_size(const pl_comm *comm);
PL_API size_t pl_comm_arena_bytes(const pl_comm *comm);

#endif
