/* replicate.c - compares, coalesces, copies. */
#include "replicate.h"

#include <string.h>

static size_t bytes_of(const pl_move *move)
{
    return move->n_elems * pl_dtype_bytes(move->dtype);
}

int pli_replicate_is_due(const pl_move *move)
{
    const size_t n_bytes = bytes_of(move);
    return n_bytes > 0 && memcmp(move->to, move->from, n_bytes) != 0;
}

/* Non-zero where `next`, whose elements are bytes, goes on where `last` ends. */
static int follows(const pl_move *last, const pl_move *next)
{
    return (const char *)last->to + last->n_elems == next->to &&
           (const char *)last->from + last->n_elems == next->from;
}

pl_status pli_replicate(pl_backend *backend, pl_move *moves, size_t n_moves)
{
    pl_status st = PL_OK;
    size_t n = 0;
    for (size_t i = 0; i < n_moves; i++) {
        if (!pli_replicate_is_due(&moves[i]))
            continue;
        const pl_move due = {moves[i].to, moves[i].from, PL_U8, bytes_of(&moves[i])};
        if (n > 0 && follows(&moves[n - 1], &due))
            moves[n - 1].n_elems += due.n_elems;
        else
            moves[n++] = due;
    }
    if (n > 0)
        PL_TRY(backend->ops->copy(backend, moves, n, NULL));
done:
    return st;
}
