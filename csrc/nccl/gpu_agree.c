/* gpu_agree.c - agreement between the ranks of a GPU world, through its base.
 *
 * To agree, each rank sends one word to all others.  If a rank has failed, no rank
 * enters NCCL or goes on, and every rank gets the failed rank's message.
 */
#include <stdio.h>
#include <string.h>

#include "core/clock.h"
#include "core/hash.h"
#include "gpu_comm_state.h"

enum {
    SLICE_MS = 100,
    HEARSAY_MS = 200,  /* for the base to see what NCCL reports; at most ... */
    HEARSAY_PART = 100 /* ... deadline / 100 */
};
_Static_assert((int)PLI_NCCL_ID_BYTES <= (int)PLI_GPU_BOARD_BYTES,
               "the id has its place");

size_t pli_gpu_board_bytes(int world_size)
{
    const size_t n_bytes = (size_t)world_size * sizeof(uint32_t);
    return n_bytes < PLI_GPU_BOARD_BYTES ? PLI_GPU_BOARD_BYTES : n_bytes;
}

char *pli_gpu_comm_board(const pli_gpu_comm *self)
{
    return self->super.arena + self->super.host_bytes;
}

pl_status pli_gpu_comm_check_signals(const pli_gpu_comm *self)
{
    pl_status st = PL_OK;
    if (self->is_interrupted != NULL && self->is_interrupted(self->context))
        PL_FAIL(PL_ESTATE, "interrupted");
done:
    return st;
}

pl_status pli_gpu_comm_poll_base(void *context)
{
    const pli_gpu_comm *self = context;
    const pl_status st = pli_gpu_comm_check_signals(self);
    return st == PL_OK ? pli_comm_check_peers(self->super.base) : st;
}

pl_status pli_gpu_comm_talk(const pli_gpu_comm *self, pl_op_kind kind, int root,
                            size_t n_bytes)
{
    pl_status st = PL_OK;
    pl_ticket ticket = 0;
    const pl_op op = {.kind = kind,
                      .dtype = PL_U8,
                      .root = root,
                      .offset_bytes = self->super.host_bytes,
                      .n_elems = n_bytes};
    PL_TRY(pl_comm_issue(self->super.base, &op, &ticket));
    while ((st = pl_comm_wait(self->super.base, ticket, SLICE_MS * PLI_MS)) ==
           PL_EAGAIN)
        PL_TRY(pli_gpu_comm_check_signals(self));
done:
    return st;
}

/* A rank's word: its status, and a hash of its sizes. */
static uint32_t state_of_rank(const pli_gpu_comm *self, pl_status st)
{
    const uint64_t sizes =
        pli_hash_with(self->super.host_bytes, self->super.arena_bytes);
    return (uint32_t)(sizes & 0xffffff) << 8 | (uint32_t)st;
}

/* Sends the failed rank's message to every rank, and fails with it. */
static pl_status report(pli_gpu_comm *self, int culprit, const char *own)
{
    pl_status st = PL_OK;
    char *board = pli_gpu_comm_board(self);
    if (culprit == self->super.rank)
        (void)snprintf(board, PLI_GPU_BOARD_BYTES, "%.*s", PLI_GPU_BOARD_BYTES - 1,
                       own);
    PL_TRY(pli_gpu_comm_talk(self, PL_BROADCAST, culprit, PLI_GPU_BOARD_BYTES));
    board[PLI_GPU_BOARD_BYTES - 1] = '\0';
    PL_FAIL(PL_EPEER, "rank %d: rank %d could not go on: %s", self->super.rank, culprit,
            board);
done:
    return st;
}

static pl_status compare(const pli_gpu_comm *self, const uint32_t *states)
{
    pl_status st = PL_OK;
    for (int r = 0; r < self->super.world_size; r++)
        if (states[r] >> 8 != states[self->super.rank] >> 8)
            PL_FAIL(PL_EMISMATCH,
                    "rank %d: rank %d has a world of different sizes: all ranks must "
                    "wrap the same model with the same options",
                    self->super.rank, r);
done:
    return st;
}

pl_status pli_gpu_comm_agree(pli_gpu_comm *self, pl_status own)
{
    pl_status st = PL_OK;
    char own_message[PLI_GPU_MESSAGE_BYTES];
    uint32_t *states = (uint32_t *)(void *)pli_gpu_comm_board(self);
    const size_t n_bytes = (size_t)self->super.world_size * sizeof *states;
    int culprit = -1;
    pli_text_print(own_message, sizeof own_message, "%s",
                   own != PL_OK ? pl_error_message() : "");
    if (self->super.world_size == 1)
        return own;
    states[self->super.rank] = state_of_rank(self, own);
    PL_TRY(pli_gpu_comm_talk(self, PL_ALL_GATHER, 0, n_bytes));
    for (int r = 0; r < self->super.world_size && culprit < 0; r++)
        if ((states[r] & 0xff) != PL_OK)
            culprit = r;
    PL_TRY(culprit >= 0 ? report(self, culprit, own_message) : compare(self, states));
done:
    return own != PL_OK ? pli_fail(own, "%s", own_message) : st;
}

pl_status pli_gpu_comm_query_base(const pli_gpu_comm *self, pl_status st)
{
    /* NCCL may report a peer's end shortly before this process can see it. */
    const int is_of_network = st == PL_ESYS || st == PL_EPEER;
    const int64_t most_ns = self->deadline_ns / HEARSAY_PART;
    pli_backoff waiting = pli_backoff_begin(
        most_ns < HEARSAY_MS * PLI_MS ? most_ns : HEARSAY_MS * PLI_MS, NULL, NULL);
    pl_status found = PL_OK;
    if (pli_comm_is_group_comm(self->super.base))
        return PL_OK;
    do {
        found = pli_comm_query(self->super.base, PLI_QUERY_WORLD);
        if (found == PL_OK)
            found = pli_comm_query(self->super.base, PLI_QUERY_STEP);
    } while (found == PL_OK && is_of_network &&
             pli_backoff_pause(&waiting, "a check of the peers") == PL_OK);
    return found;
}
