/* device_group_refresh.c - a broadcast that skips parameters which members already
 * have.
 *
 * The host cannot detect every write to a tensor since the last forward, because some
 * leave no trace.  So the devices compare.  Member 0 computes a checksum for each
 * segment of the model's tensors, and each other member for its own blocks.  The
 * model's checksums travel to the members; a kernel on each then reads, from member 0's
 * memory, the segments whose checksums differ.  A device reads memory 20 to 100 times
 * as fast as a link carries it, and the host goes on at once.
 *
 * If a kernel of some member cannot read member 0's memory, all segments travel.
 */
#include "device_group_state.h"

enum { AT_ONCE = 1022 }; /* pieces: a launch takes as many */

typedef struct refresh {
    const pli_segment *segments;
    size_t n_segments;
    const pli_room *sums; /* NULL: compare nothing */
} refresh;

/* ---- pieces --------------------------------------------------------------------- */

/* A position among the pieces of a member. */
typedef struct cursor {
    const refresh *of;
    int member;
    size_t segment, move;
} cursor;

/* Fills *out with the next pieces of the model's tensors and their copies, and returns
 * how many.  `to` is NULL for member 0, which has no copies. */
static size_t next_pieces(cursor *at, pli_piece *out)
{
    size_t n = 0;
    for (; at->segment < at->of->n_segments; at->segment++, at->move = 0) {
        const pli_segment *const it = &at->of->segments[at->segment];
        char *const block = it->targets[at->member];
        if (block == NULL && at->member != 0)
            continue;
        for (; at->move < it->n_moves; at->move++) {
            const pl_move *const move = &it->moves[at->move];
            const size_t offset = (uintptr_t)move->to;
            if (n == AT_ONCE)
                return n;
            out[n++] =
                (pli_piece){.to = block != NULL ? block + offset : NULL,
                            .from = move->from,
                            .n_bytes = move->n_elems * pl_dtype_bytes(move->dtype),
                            .offset = offset,
                            .segment = (unsigned)at->segment};
        }
    }
    return n;
}

/* Computes a member's own checksums, at the start of its memory for sums. */
static pl_status sum_up(pli_device_group *self, const refresh *it, int k)
{
    pl_status st = PL_OK;
    pli_piece pieces[AT_ONCE];
    const pli_group_member *const member = &self->members[k];
    uint64_t *const sums = it->sums[k].memory;
    const pl_move zeros = {sums, NULL, PL_I64, it->n_segments};
    cursor at = {it, k, 0, 0};
    PL_TRY(member->backend->ops->copy(member->backend, &zeros, 1, member->side));
    for (size_t n; (n = next_pieces(&at, pieces)) > 0;) {
        for (size_t i = 0; k != 0 && i < n; i++)
            pieces[i].from = pieces[i].to;
        PL_TRY(pli_cuda_checksum(member->backend, pieces, n, sums, member->side));
    }
done:
    return st;
}

static pl_status take(pli_device_group *self, const refresh *it, int k)
{
    pl_status st = PL_OK;
    pli_piece pieces[AT_ONCE];
    const pli_group_member *const member = &self->members[k];
    const uint64_t *const sums = it->sums[k].memory;
    cursor at = {it, k, 0, 0};
    for (size_t n; (n = next_pieces(&at, pieces)) > 0;)
        PL_TRY(pli_cuda_refresh(member->backend, pieces, n, sums, sums + it->n_segments,
                                member->side));
done:
    return st;
}

/* ---- whether members can compare ------------------------------------------------ */

/* *out: whether all members can compare. */
static pl_status can_compare(const pli_device_group *self, const refresh *it, int *out)
{
    pl_status st = PL_OK;
    int is_elsewhere = 0;
    *out = it->sums != NULL;
    for (int k = 1; k < self->n_members; k++) {
        is_elsewhere |= self->members[k].backend != self->members[0].backend;
        *out &= self->members[k].reads_first;
    }
    for (size_t i = 0; i < it->n_segments && *out && is_elsewhere; i++)
        PL_TRY(pli_cuda_are_shared(self->members[0].backend, it->segments[i].moves,
                                   it->segments[i].n_moves, out));
done:
    return st;
}

/* ---- the call ------------------------------------------------------------------- */

static pl_status begin(pli_device_group *self, pl_stream *const *streams,
                       const refresh *it)
{
    pl_status st = PL_OK;
    const pli_group_member *const first = &self->members[0];
    for (int k = 0; k < self->n_members; k++) {
        const size_t n_bytes = it->n_segments * sizeof(uint64_t) * (k == 0 ? 1 : 2);
        if (it->sums[k].n_bytes < n_bytes)
            PL_FAIL(PL_EINVAL, "%zu bytes of member %d have no room for %zu checksums",
                    it->sums[k].n_bytes, k, it->n_segments);
        PL_TRY(order(&self->members[k], streams[k], &self->members[k],
                     self->members[k].side));
    }
    PL_TRY(sum_up(self, it, 0));
    PL_TRY(record(first, first->mark, first->side));
done:
    return st;
}

static pl_status refresh_member(pli_device_group *self, pl_stream *const *streams,
                                const refresh *it, int k)
{
    pl_status st = PL_OK;
    const pli_group_member *const first = &self->members[0];
    const pli_group_member *const member = &self->members[k];
    uint64_t *const wanted = (uint64_t *)it->sums[k].memory + it->n_segments;
    PL_TRY(sum_up(self, it, k));
    PL_TRY(wait_for(member, first->mark, member->side));
    PL_TRY(copy_on(member, member->side, in(member, wanted),
                   in(first, it->sums[0].memory), it->n_segments * sizeof *wanted));
    PL_TRY(take(self, it, k));
    PL_TRY(order(member, member->side, member, streams[k]));
    PL_TRY(wait_for(first, member->mark, streams[0]));
done:
    return st;
}

static pl_status broadcast_locked(pli_device_group *self, pl_stream *const *streams,
                                  const refresh *it, pli_ring ring)
{
    pl_status st = PL_OK;
    int can = 0;
    PL_TRY(can_compare(self, it, &can));
    if (!can) {
        PL_TRY(
            pli_device_group_send(self, streams, it->segments, it->n_segments, ring));
        goto done;
    }
    PL_TRY(begin(self, streams, it));
    for (int k = 1; k < self->n_members; k++)
        PL_TRY(refresh_member(self, streams, it, k));
done:
    return st;
}

pl_status pli_device_group_broadcast(pli_device_group *self, pl_stream *const *streams,
                                     const pli_segment *segments, size_t n_segments,
                                     pli_ring ring, const pli_room *sums)
{
    const refresh it = {segments, n_segments, sums};
    (void)pthread_mutex_lock(&self->lock);
    return pli_device_group_end_call(self, broadcast_locked(self, streams, &it, ring));
}
