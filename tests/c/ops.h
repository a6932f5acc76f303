/* ops.h - one operation on arenas of known values: fills them, and checks the result.
 *
 * Part i of rank r holds a small integer that depends on rank, place and seed, so every
 * rank can compute the values of all others.  Values are multiples of the world size,
 * so that the mean is exact too.
 */
#ifndef PLT_OPS_H
#define PLT_OPS_H

#include <stdio.h>

#include "ranks.h"
#include "values.h"

enum { OPS_GUARD_BYTES = 64, OPS_GUARD = 0xa5 };

static inline int ops_value(const pl_op *op, unsigned seed, int world_size, int rank,
                            size_t i)
{
    const unsigned mixed =
        ((unsigned)i * 2654435761u + (unsigned)rank * 40503u + seed * 2246822519u) >>
        16;
    const int small = (int)(mixed % 7) - 3;
    return world_size * (op->dtype == PL_U8 && small < 0 ? -small : small);
}

static inline int ops_reduced(const pl_op *op, unsigned seed, int world_size, size_t i)
{
    int sum = 0;
    int most = -VALUE_MOST;
    for (int r = 0; r < world_size; r++) {
        const int value = ops_value(op, seed, world_size, r, i);
        sum += value;
        most = value > most ? value : most;
    }
    if (op->reduction == PL_MAX)
        return most;
    return op->reduction == PL_MEAN ? sum / world_size : sum;
}

/* The value that rank `rank` must hold in part i after the operation. */
static inline int ops_expected(const pl_op *op, unsigned seed, int world_size, int rank,
                               size_t i)
{
    const size_t block =
        value_n_parts(op->dtype, op->n_elems) / (size_t)world_size; /* of two kinds */
    switch (op->kind) {
    case PL_ALL_REDUCE:
        return ops_reduced(op, seed, world_size, i);
    case PL_REDUCE:
        if (rank == op->root)
            return ops_reduced(op, seed, world_size, i);
        break;
    case PL_ALL_GATHER:
        return ops_value(op, seed, world_size, (int)(i / block), i);
    case PL_BROADCAST:
        return ops_value(op, seed, world_size, op->root, i);
    case PL_BARRIER:
    case PL_N_OP_KINDS:
        break;
    }
    return ops_value(op, seed, world_size, rank, i);
}

/* Fills this rank's range, and guards it on both sides. */
static inline void ops_put(const pl_comm *comm, const pl_op *op, unsigned seed,
                           char *range)
{
    const size_t n_bytes = op->n_elems * pl_dtype_bytes(op->dtype);
    memset(range - OPS_GUARD_BYTES, OPS_GUARD, OPS_GUARD_BYTES);
    memset(range + n_bytes, OPS_GUARD, OPS_GUARD_BYTES);
    for (size_t i = 0; i < value_n_parts(op->dtype, op->n_elems); i++)
        value_put(range, value_part(op->dtype), i,
                  ops_value(op, seed, comm->world_size, comm->rank, i));
}

/* How much of the operation's result, and of the guards, is wrong. */
static inline size_t ops_n_wrong(const pl_comm *comm, const pl_op *op, unsigned seed,
                                 const char *range)
{
    const size_t n_bytes = op->n_elems * pl_dtype_bytes(op->dtype);
    size_t n_wrong = 0;
    for (size_t i = 0; i < OPS_GUARD_BYTES; i++)
        n_wrong += (unsigned char)range[n_bytes + i] != OPS_GUARD ||
                   (unsigned char)range[(ptrdiff_t)i - OPS_GUARD_BYTES] != OPS_GUARD;
    for (size_t i = 0; i < value_n_parts(op->dtype, op->n_elems); i++)
        n_wrong += !value_is(range, value_part(op->dtype), i,
                             ops_expected(op, seed, comm->world_size, comm->rank, i));
    return n_wrong;
}

static inline int ops_are_right(const pl_comm *comm, const pl_op *op, size_t n_wrong)
{
    const int is_so = CHECK(n_wrong == 0);
    if (!is_so)
        CHECK_MORE("%s of %zu %s, reduction %d, rank %d of %d: %zu wrong",
                   pli_op_kind_text(op->kind), op->n_elems, pl_dtype_text(op->dtype),
                   (int)op->reduction, comm->rank, comm->world_size, n_wrong);
    return is_so;
}

static inline void ops_fill(pl_comm *comm, const pl_op *op, unsigned seed)
{
    if (op->kind != PL_BARRIER)
        ops_put(comm, op, seed, comm->arena + op->offset_bytes);
}

static inline void ops_check(pl_comm *comm, const pl_op *op, unsigned seed)
{
    const char *range = comm->arena + op->offset_bytes;
    if (op->kind != PL_BARRIER)
        (void)ops_are_right(comm, op, ops_n_wrong(comm, op, seed, range));
}

/* Fills, does the operation, and checks the result. */
static inline pl_status ops_run(pl_comm *comm, const pl_op *op, unsigned seed)
{
    ops_fill(comm, op, seed);
    const pl_status st = do_op(comm, op);
    if (st == PL_OK)
        ops_check(comm, op, seed);
    return st;
}

/* Whether the dtype has this reduction. */
static inline int ops_is_allowed(pl_dtype dtype, pl_reduction reduction)
{
    if (reduction == PL_SUM)
        return 1;
    return (reduction == PL_MAX) == (value_is_integer(dtype) != 0);
}

static inline int ops_reduces(pl_op_kind kind)
{
    return kind == PL_ALL_REDUCE || kind == PL_REDUCE;
}

/* Bytes of an arena for such a range and its guards. */
static inline size_t ops_arena_bytes(size_t n_elems)
{
    return n_elems * 16 + 4 * (size_t)OPS_GUARD_BYTES;
}

#endif
