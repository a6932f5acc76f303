/* gpu_ordered_sum.c - an all-reduce with the same bits on every run; NCCL only moves
 * data.
 *
 *     rank r gets block r of every rank, adds the blocks in rank order in float32, and
 *     rounds once; then all blocks go to all ranks.
 *
 * A block is a multiple of 32 elements, so that all blocks are aligned.  The rest at
 * the end has less than 32 elements per rank: each rank gathers the whole rest from all
 * ranks, and adds it up itself.  A long range is done in pieces, one after another on
 * the same stream, in the same staging:
 *
 *     [rank 0's block r] [rank 1's] ...   [rank 0's rest] [rank 1's] ...
 *
 * NCCL does every other operation itself.
 */
#include "gpu_comm_state.h"

enum { MOST_PIECE_BYTES = 32 << 20, ELEM_BYTES = 2, BLOCK_ELEMS = 32 };

typedef struct sum_piece {
    pl_dtype dtype;
    pl_reduction reduction;
    char *memory;
    size_t n_block; /* elements of a rank's block */
    size_t n_rest;
    char *rests; /* in the staging */
    size_t rest_stride_bytes;
} sum_piece;

static size_t rounded(size_t n_bytes)
{
    return (n_bytes + PL_CACHE_LINE - 1) / PL_CACHE_LINE * PL_CACHE_LINE;
}

size_t pli_gpu_comm_staging_bytes(int world_size, size_t n_bytes)
{
    const size_t n_ranks = (size_t)world_size;
    const size_t piece_bytes = n_bytes < MOST_PIECE_BYTES ? n_bytes : MOST_PIECE_BYTES;
    const size_t most_rest = n_ranks * BLOCK_ELEMS * ELEM_BYTES;
    return rounded(piece_bytes) + n_ranks * rounded(most_rest);
}

static pl_status gather(pli_gpu_comm *self, char *memory, size_t n_bytes)
{
    const pl_op op = {.kind = PL_ALL_GATHER, .dtype = PL_U8, .n_elems = n_bytes};
    return pli_nccl_enqueue(self->nccl, &op, memory, self->side);
}

/* Copies this rank's block and rest to their places in the staging. */
static pl_status copy_own(pli_gpu_comm *self, const sum_piece *part)
{
    const size_t rank = (size_t)self->super.rank;
    const size_t block_bytes = part->n_block * ELEM_BYTES;
    const size_t at_rest = (size_t)self->super.world_size * block_bytes;
    char *staging = self->staging->memory.address;
    pl_move moves[2];
    size_t n_moves = 0;
    if (part->n_block > 0)
        moves[n_moves++] = (pl_move){.to = staging + rank * block_bytes,
                                     .from = part->memory + rank * block_bytes,
                                     .dtype = part->dtype,
                                     .n_elems = part->n_block};
    if (part->n_rest > 0)
        moves[n_moves++] = (pl_move){.to = part->rests + rank * part->rest_stride_bytes,
                                     .from = part->memory + at_rest,
                                     .dtype = part->dtype,
                                     .n_elems = part->n_rest};
    return self->backend->ops->copy(self->backend, moves, n_moves, self->side);
}

static pl_status sum_up(pli_gpu_comm *self, const sum_piece *part,
                        const pl_rank_ranges *ranges)
{
    pl_rank_ranges all = *ranges;
    all.n_ranks = self->super.world_size;
    all.dtype = part->dtype;
    all.reduction = part->reduction;
    if (all.n_elems == 0)
        return PL_OK;
    return self->backend->ops->sum(self->backend, &all, self->side);
}

static pl_status add_piece(pli_gpu_comm *self, const sum_piece *part)
{
    pl_status st = PL_OK;
    const size_t n_ranks = (size_t)self->super.world_size;
    const size_t block_bytes = part->n_block * ELEM_BYTES;
    const pli_nccl_swap swap = {.from = part->memory,
                                .to = self->staging->memory.address,
                                .from_stride_bytes = block_bytes,
                                .to_stride_bytes = block_bytes,
                                .n_bytes = block_bytes};
    const pl_rank_ranges blocks = {.to = part->memory +
                                         (size_t)self->super.rank * block_bytes,
                                   .from = self->staging->memory.address,
                                   .stride_bytes = block_bytes,
                                   .n_elems = part->n_block};
    const pl_rank_ranges rests = {.to = part->memory + n_ranks * block_bytes,
                                  .from = part->rests,
                                  .stride_bytes = part->rest_stride_bytes,
                                  .n_elems = part->n_rest};
    PL_TRY(copy_own(self, part));
    PL_TRY(pli_nccl_swap_blocks(self->nccl, &swap, self->side));
    PL_TRY(gather(self, part->rests,
                  part->n_rest > 0 ? n_ranks * part->rest_stride_bytes : 0));
    PL_TRY(sum_up(self, part, &blocks));
    PL_TRY(sum_up(self, part, &rests));
    PL_TRY(gather(self, part->memory, n_ranks * block_bytes));
done:
    return st;
}

/* An all-reduce of 16-bit floats, in rank order and in float32. */
static pl_status sum_in_order(pli_gpu_comm *self, const pl_op *op, char *memory)
{
    pl_status st = PL_OK;
    const size_t n_ranks = (size_t)self->super.world_size;
    const size_t n_most = MOST_PIECE_BYTES / ELEM_BYTES;
    for (size_t n_done = 0; n_done < op->n_elems;) {
        const size_t n_left = op->n_elems - n_done;
        const size_t n = n_left < n_most ? n_left : n_most;
        sum_piece one = {.dtype = op->dtype,
                         .reduction = op->reduction,
                         .memory = memory + n_done * ELEM_BYTES,
                         .n_block = n / n_ranks / BLOCK_ELEMS * BLOCK_ELEMS};
        one.n_rest = n - n_ranks * one.n_block;
        one.rest_stride_bytes = rounded(one.n_rest * ELEM_BYTES);
        one.rests = (char *)self->staging->memory.address +
                    rounded(n_ranks * one.n_block * ELEM_BYTES);
        PL_TRY(add_piece(self, &one));
        n_done += n;
    }
done:
    return st;
}

pl_status pli_gpu_comm_carry(pli_gpu_comm *self, const pl_op *op)
{
    char *memory = pli_comm_memory(&self->super, op->offset_bytes);
    const int is_short = op->dtype == PL_F16 || op->dtype == PL_BF16;
    if (self->super.world_size == 1)
        return PL_OK; /* the data is its own sum and mean */
    if (self->accumulation == PLI_ACCUMULATE_IN_F32 && is_short &&
        op->kind == PL_ALL_REDUCE)
        return sum_in_order(self, op, memory);
    return pli_nccl_enqueue(self->nccl, op, memory, self->side);
}
