/* device_meet.c - how the ranks of a device world get their communicator.
 *
 *     every rank   makes what it needs of its own; they agree
 *     rank 0       makes NCCL's id; they agree, and it spreads that
 *     every rank   meets the others in NCCL; they agree
 *     every rank   tells NCCL of its memory, if all can
 *
 * To agree, each rank gives all the others one word by the base: none enters NCCL, or
 * goes on, where another could not, and which that was is told to all.  While ranks
 * meet in NCCL a failure is told by failing the base, at which each of them looks.
 */
#include <stdio.h>
#include <string.h>

#include "../core/clock.h"
#include "device_state.h"

enum { SLICE_MS = 100 };
_Static_assert(PL_MAX_RANKS * sizeof(uint32_t) <= PLI_DEVICE_WORDS_BYTES,
               "each rank has a word");
_Static_assert((int)PLI_NCCL_ID_BYTES <= (int)PLI_DEVICE_WORDS_BYTES,
               "the id has its place");

/* The base's memory for what is said here. */
static char *board_of(const pli_device *self)
{
    return (char *)pli_comm_arena(self->base) + self->super.host_bytes;
}

static pl_status check_signals(const pli_device *self)
{
    pl_status st = PL_OK;
    if (self->is_interrupted != NULL && self->is_interrupted(self->context))
        PL_FAIL(PL_ESTATE, "interrupted");
done:
    return st;
}

/* Does one of the base's operations on the board's first n_bytes. */
static pl_status talk(const pli_device *self, pl_op_kind kind, int root, size_t n_bytes)
{
    pl_status st = PL_OK;
    pl_ticket ticket = 0;
    const pl_op op = {.kind = kind,
                      .dtype = PL_U8,
                      .root = root,
                      .offset_bytes = self->super.host_bytes,
                      .n_elems = n_bytes};
    PL_TRY(pl_comm_issue(self->base, &op, &ticket));
    while ((st = pl_comm_wait(self->base, ticket, SLICE_MS * PLI_MS)) == PL_EAGAIN)
        PL_TRY(check_signals(self));
done:
    return st;
}

/* What each rank says: a status, and how it was made. */
static uint32_t word_of(const pli_device *self, pl_status st)
{
    uint64_t made = self->super.host_bytes * UINT64_C(0x9e3779b97f4a7c15);
    made = (made ^ made >> 29 ^ self->super.arena_bytes) * UINT64_C(0xbf58476d1ce4e5b9);
    made = (made ^ made >> 32) * 2 + (uint64_t)self->accumulation;
    return (uint32_t)(made & 0xffffff) << 8 | (uint32_t)st;
}

/* The first failed rank's words, on every rank. */
static pl_status report(pli_device *self, int culprit, const char *own)
{
    pl_status st = PL_OK;
    char *board = board_of(self);
    if (culprit == self->super.rank)
        (void)snprintf(board, PLI_DEVICE_WORDS_BYTES, "%.*s",
                       PLI_DEVICE_WORDS_BYTES - 1, own);
    PL_TRY(talk(self, PL_BROADCAST, culprit, PLI_DEVICE_WORDS_BYTES));
    board[PLI_DEVICE_WORDS_BYTES - 1] = '\0';
    PL_FAIL(PL_EPEER, "rank %d: rank %d could not go on: %s", self->super.rank, culprit,
            board);
done:
    return st;
}

static pl_status compare(const pli_device *self, const uint32_t *words)
{
    pl_status st = PL_OK;
    for (int r = 0; r < self->super.world_size; r++)
        if (words[r] >> 8 != words[self->super.rank] >> 8)
            PL_FAIL(PL_EMISMATCH,
                    "rank %d: rank %d has a world of other sizes, or adds in another "
                    "way: the ranks must wrap the same model, with the same options",
                    self->super.rank, r);
done:
    return st;
}

pl_status pli_device_agree(pli_device *self, pl_status own)
{
    pl_status st = PL_OK;
    char own_words[PLI_DEVICE_TEXT_BYTES];
    uint32_t words[PL_MAX_RANKS] = {0};
    const size_t n_bytes = (size_t)self->super.world_size * sizeof *words;
    int culprit = -1;
    (void)snprintf(own_words, sizeof own_words, "%.*s", (int)sizeof own_words - 1,
                   own != PL_OK ? pl_error_message() : "");
    if (self->super.world_size == 1)
        return own;
    words[self->super.rank] = word_of(self, own);
    memcpy(board_of(self), words, n_bytes);
    PL_TRY(talk(self, PL_ALL_GATHER, 0, n_bytes));
    memcpy(words, board_of(self), n_bytes);
    for (int r = 0; r < self->super.world_size && culprit < 0; r++)
        if ((words[r] & 0xff) != PL_OK)
            culprit = r;
    PL_TRY(culprit >= 0 ? report(self, culprit, own_words) : compare(self, words));
done:
    return own != PL_OK ? pli_fail(own, "%s", own_words) : st;
}

static pl_status look(void *context)
{
    const pli_device *self = context;
    const pl_status st = check_signals(self);
    return st == PL_OK ? pli_comm_look(self->base) : st;
}

/* Meets the others in NCCL; where it cannot, those that are at it are told. */
static pl_status meet_in_nccl(pli_device *self, const char *id, pli_nccl **out)
{
    const pli_nccl_options options = {.library = self->library,
                                      .backend = self->backend,
                                      .rank = self->super.rank,
                                      .world_size = self->super.world_size,
                                      .id = id,
                                      .deadline_ns = self->deadline_ns,
                                      .look = look,
                                      .context = self};
    char words[PLI_DEVICE_TEXT_BYTES];
    pl_status st = pli_nccl_create(&options, out);
    if (st == PL_OK || pli_comm_is_relayed(self->base))
        return st;
    (void)snprintf(words, sizeof words, "%.*s", (int)sizeof words - 1,
                   pl_error_message());
    const pl_status theirs = pli_device_ask_base(self, st);
    if (theirs != PL_OK)
        return theirs;
    pl_comm_abort(self->base, words);
    return pli_fail(st, "%s", words);
}

/* All ranks' memory, or none's. */
static pl_status register_memory(pli_device *self, pli_nccl *nccl)
{
    pl_status st = PL_OK;
    char *board = board_of(self);
    self->is_registered = 0;
    self->block->handle = pli_nccl_register(nccl, &self->block->memory);
    if (self->staging.address != NULL)
        self->staging_handle = pli_nccl_register(nccl, &self->staging);
    const int is_known =
        self->block->handle != NULL &&
        (self->staging.address == NULL || self->staging_handle != NULL);
    board[self->super.rank] = is_known ? 1 : 0;
    PL_TRY(talk(self, PL_ALL_GATHER, 0, (size_t)self->super.world_size));
    self->is_registered = 1;
    for (int r = 0; r < self->super.world_size; r++)
        self->is_registered &= board[r] != 0;
done:
    if (st == PL_OK && !self->is_registered) {
        pli_nccl_deregister(nccl, self->staging_handle);
        self->staging_handle = NULL;
        pli_pool_deregister(self->pool, nccl);
    }
    return st;
}

pl_status pli_device_meet(pli_device *self)
{
    pl_status st = PL_OK;
    char *board = board_of(self);
    char id[PLI_NCCL_ID_BYTES] = {0};
    pli_nccl *nccl = NULL;
    if (self->super.world_size == 1)
        return PL_OK;
    if (self->super.rank == 0)
        st = pli_nccl_new_id(self->library, self->backend, id);
    PL_TRY(pli_device_agree(self, st));
    memcpy(board, id, self->super.rank == 0 ? sizeof id : 0);
    PL_TRY(talk(self, PL_BROADCAST, 0, sizeof id));
    memcpy(id, board, sizeof id);
    PL_TRY(pli_device_agree(self, meet_in_nccl(self, id, &nccl)));
    PL_TRY(register_memory(self, nccl));
    (void)pthread_mutex_lock(&self->lock);
    self->nccl = nccl;
    (void)pthread_mutex_unlock(&self->lock);
    nccl = NULL;
done:
    if (nccl != NULL) {
        self->staging_handle = NULL; /* they end with the communicator */
        pli_pool_deregister(self->pool, NULL);
    }
    pli_nccl_destroy(nccl);
    return st;
}
