/* paceline.h - the terms of Paceline's core: status codes, data types, operations.
 *
 * A *world* is a set of ranks.  Each rank has an arena, and all arenas have the same
 * size and layout: byte k of one corresponds to byte k of every other.  Ranks
 * communicate by *operations* on ranges of their arenas.  Every rank issues the same
 * operations in the same order.
 *
 * A pl_comm (comm/comm.h) is a rank's handle to a world.  core/plan.h lays parameters
 * out in buckets of an arena, reducer/reducer.h fills the buckets and issues them, and
 * reducer/step.h says when.
 *
 * Every fallible call returns pl_status and leaves its message in pl_error_message(),
 * which is per thread.  Out-parameters come last and are written only on success.
 * `destroy` takes NULL and cannot fail.  No call exits, aborts, prints, or uses Python.
 */
#ifndef PACELINE_H
#define PACELINE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PL_MUST_USE __attribute__((warn_unused_result))
#else
#define PL_MUST_USE
#endif

enum { PL_MAX_RANKS = 1024 }; /* per host; a host's memory runs out earlier */
enum { PL_CACHE_LINE = 64 };  /* alignment of slots and of memory that ranks share */

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
const char *pl_status_text(pl_status st);

/* The message of this thread's last failed call.  Borrowed until this thread's next
 * failed call; never NULL. */
const char *pl_error_message(void);

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

/* Bytes of one element; 0 if `dtype` is not a pl_dtype. */
size_t pl_dtype_bytes(pl_dtype dtype);
const char *pl_dtype_text(pl_dtype dtype);

typedef enum pl_reduction {
    PL_SUM,  /* in rank order; 16-bit floats are summed in fp32 and rounded once */
    PL_MEAN, /* PL_SUM, then divided by the world size; floats and complex only */
    PL_MAX,  /* integers only */
    PL_N_REDUCTIONS
} pl_reduction;

/* ---- operations ----------------------------------------------------------------- */

typedef enum pl_op_kind {
    PL_ALL_REDUCE, /* every rank's range becomes the reduction over ranks */
    PL_REDUCE,     /* the same, but only in the root's range */
    PL_ALL_GATHER, /* every rank's block r becomes rank r's block r */
    PL_BROADCAST,  /* every rank's range becomes the root's */
    PL_BARRIER,    /* no data; done once every rank has issued it */
    PL_N_OP_KINDS
} pl_op_kind;

/* One collective on the same range of every rank's arena.  An all-gather splits the
 * range into one block of n_elems / world size per rank. */
typedef struct pl_op {
    pl_op_kind kind;
    pl_reduction reduction; /* read by the two reducing kinds */
    pl_dtype dtype;
    int root;            /* read by PL_REDUCE and PL_BROADCAST */
    size_t offset_bytes; /* from the start of the arena */
    size_t n_elems;
    /* Set if the caller issues another operation before it waits for this one: between
     * hosts both then travel in one round.  Equal on all ranks. */
    int is_followed;
    /* Set if the step ends for a rank once it has the result.  Equal on all ranks. */
    int ends_step;
    unsigned mark;   /* compared between ranks: a hash of what else they did */
    unsigned bucket; /* bucket number for the recorder, from 1; 0 if none */
} pl_op;

/* The number of an operation in its world, from 1.  Tickets only grow. */
typedef uint64_t pl_ticket;

#endif
