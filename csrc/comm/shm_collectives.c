/* shm_collectives.c - what the owner of a part does, for each kind of operation. */
#include <string.h>

#include "shm_comm.h"

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

/* Reduces `n` elements at byte `at` of every arena into the arenas of ranks
 * [out_rank, out_rank + n_out). */
static void reduce(const pli_shm_comm *self, const pl_op *op, size_t at, size_t n,
                   int out_rank, int n_out)
{
    const void *in[PL_MAX_RANKS];
    void *out[PL_MAX_RANKS];
    const int world_size = self->super.world_size;
    if (n == 0)
        return;
    for (int r = 0; r < world_size; r++)
        in[r] = pli_arena_of(self->segment, r) + at;
    for (int i = 0; i < n_out; i++)
        out[i] = pli_arena_of(self->segment, out_rank + i) + at;
    self->sums->fn[op->dtype][op->reduction](&(pli_sum_args){
        .in = in, .n_in = world_size, .out = out, .n_out = n_out, .n_elems = n});
}

static void run_part(const pli_shm_comm *self, const pl_op *op)
{
    const int world_size = self->super.world_size;
    const int rank = self->super.rank;
    const size_t elem_bytes = pl_dtype_bytes(op->dtype);
    const size_t block = op->n_elems / (size_t)world_size;
    const size_t block_at = op->offset_bytes + (size_t)rank * block * elem_bytes;
    size_t first = 0;
    size_t n = 0;
    if (op->kind != PL_BARRIER)
        pli_part_of(op->n_elems, elem_bytes, world_size, rank, &first, &n);
    const size_t part_at = op->offset_bytes + first * elem_bytes;
    char *own = pli_arena_of(self->segment, rank);
    switch (op->kind) {
    case PL_ALL_REDUCE:
        reduce(self, op, part_at, n, 0, world_size);
        break;
    case PL_REDUCE:
        reduce(self, op, part_at, n, op->root, 1);
        break;
    case PL_ALL_GATHER:
        for (int r = 0; r < world_size; r++)
            if (r != rank)
                memcpy(pli_arena_of(self->segment, r) + block_at, own + block_at,
                       block * elem_bytes);
        break;
    case PL_BROADCAST:
        if (rank != op->root)
            memcpy(own + op->offset_bytes,
                   pli_arena_of(self->segment, op->root) + op->offset_bytes,
                   op->n_elems * elem_bytes);
        break;
    case PL_BARRIER:
    case PL_N_OP_KINDS:
        break;
    }
}

void pli_part_run(const pli_shm_comm *self, const pl_op *op)
{
    pli_recorder_part_begins(self->super.recorder, op->bucket);
    run_part(self, op);
    pli_recorder_part_ends(self->super.recorder, op->bucket);
}
