/* comm.c - pl_comm_issue(): checks every operation, whatever carries it. */
#include "comm.h"

#include "core/hash.h"

const char *pli_op_kind_text(pl_op_kind kind)
{
    static const char *const texts[PL_N_OP_KINDS] = {
        [PL_ALL_REDUCE] = "all-reduce", [PL_REDUCE] = "reduce",
        [PL_ALL_GATHER] = "all-gather", [PL_BROADCAST] = "broadcast",
        [PL_BARRIER] = "barrier",
    };
    return (unsigned)kind < PL_N_OP_KINDS ? texts[kind] : "no operation";
}

uint64_t pli_op_hash(const pl_op *op)
{
    const uint64_t what =
        ((uint64_t)op->kind | (uint64_t)op->reduction << 4 | (uint64_t)op->dtype << 8 |
         (uint64_t)(uint32_t)op->root << 16) ^
        (uint64_t)op->mark << 32; /* a root has fewer than 16 bits */
    return pli_hash_with(pli_hash_with(what, op->offset_bytes), op->n_elems);
}

void pli_part_of(size_t n_elems, size_t elem_bytes, int world_size, int rank,
                 size_t *first, size_t *n)
{
    const size_t line = elem_bytes < PL_CACHE_LINE ? PL_CACHE_LINE / elem_bytes : 1;
    const size_t n_lines = (n_elems + line - 1) / line;
    const size_t share = (n_lines + (size_t)world_size - 1) / (size_t)world_size * line;
    const size_t begin = share * (size_t)rank;
    *first = begin < n_elems ? begin : n_elems;
    *n = n_elems - *first < share ? n_elems - *first : share;
}

static int is_reducing(pl_op_kind kind)
{
    return kind == PL_ALL_REDUCE || kind == PL_REDUCE;
}

static pl_status check_range(const pl_comm *comm, const pl_op *op)
{
    pl_status st = PL_OK;
    const size_t elem_bytes = pl_dtype_bytes(op->dtype);
    if (elem_bytes == 0)
        PL_FAIL(PL_EINVAL, "dtype %d is not a pl_dtype", (int)op->dtype);
    if (op->offset_bytes % elem_bytes != 0)
        PL_FAIL(PL_EINVAL, "offset_bytes %zu is not a multiple of %s's %zu bytes",
                op->offset_bytes, pl_dtype_text(op->dtype), elem_bytes);
    if (op->offset_bytes > comm->arena_bytes ||
        op->n_elems > (comm->arena_bytes - op->offset_bytes) / elem_bytes)
        PL_FAIL(PL_EINVAL,
                "range of %zu %s at byte %zu leaves the arena, which has %zu bytes",
                op->n_elems, pl_dtype_text(op->dtype), op->offset_bytes,
                comm->arena_bytes);
done:
    return st;
}

static pl_status check_op(const pl_comm *comm, const pl_op *op)
{
    pl_status st = PL_OK;
    if ((unsigned)op->kind >= PL_N_OP_KINDS)
        PL_FAIL(PL_EINVAL, "kind %d is not a pl_op_kind", (int)op->kind);
    if (op->kind == PL_BARRIER)
        goto done;
    PL_TRY(check_range(comm, op));
    if ((op->kind == PL_REDUCE || op->kind == PL_BROADCAST) &&
        (op->root < 0 || op->root >= comm->world_size))
        PL_FAIL(PL_EINVAL, "root %d is not one of the %d ranks", op->root,
                comm->world_size);
    if (is_reducing(op->kind) && (unsigned)op->reduction >= PL_N_REDUCTIONS)
        PL_FAIL(PL_EINVAL, "reduction %d is not a pl_reduction", (int)op->reduction);
    if (op->kind == PL_ALL_GATHER && op->n_elems % (size_t)comm->world_size != 0)
        PL_FAIL(PL_EINVAL, "%s of %zu elements cannot be split over %d ranks",
                pli_op_kind_text(op->kind), op->n_elems, comm->world_size);
done:
    return st;
}

pl_status pli_comm_issue_ordered(pl_comm *comm, const pl_op *op, const pli_order *order,
                                 pl_ticket *out)
{
    pl_status st = PL_OK;
    PL_TRY(check_op(comm, op));
    PL_TRY(comm->ops->issue(comm, op, order, out));
done:
    return st;
}

pl_status pl_comm_issue(pl_comm *comm, const pl_op *op, pl_ticket *out)
{
    static const pli_order no_order = {NULL};
    return pli_comm_issue_ordered(comm, op, &no_order, out);
}

/* ---- for a kind built on another ----------------------------------------------- */

void pli_base_work(pl_comm *comm)
{
    comm->base->ops->work(comm->base);
}

pl_status pli_base_query(pl_comm *comm, pli_query what)
{
    return comm->base->ops->query(comm->base, what);
}

int pli_base_is_done(pl_comm *comm, pl_ticket ticket)
{
    return comm->base->ops->is_done(comm->base, ticket);
}

void pli_base_record_activity(pl_comm *comm, pl_activity activity, uint64_t step)
{
    comm->base->ops->record_activity(comm->base, activity, step);
}

void pli_base_set_failure_message(pl_comm *comm, const char *message)
{
    comm->base->ops->set_failure_message(comm->base, message);
}

void pli_base_forget(pl_comm *comm)
{
    comm->base->ops->forget(comm->base);
}

void pli_base_leave(pl_comm *comm)
{
    comm->base->ops->leave(comm->base);
}
