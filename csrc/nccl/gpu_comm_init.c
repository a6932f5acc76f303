/* gpu_comm_init.c - makes the communicator of a GPU world.
 *
 *     every rank   makes its own objects; all agree
 *     rank 0       makes NCCL's id; all agree, and rank 0 broadcasts it
 *     every rank   joins the communicator; all agree
 *     every rank   registers its memory with NCCL, if all ranks can
 *     every rank   tries what steps will do (gpu_comm_trial.c); all agree
 *
 * To report a failure while ranks are inside NCCL, a rank aborts the base, which every
 * rank polls.
 */
#include <stdio.h>
#include <string.h>

#include "gpu_comm_state.h"

static pl_status meet_in_nccl(pli_gpu_comm *self, const char *id, pli_nccl **out)
{
    const pli_nccl_options options = {.library = self->library,
                                      .backend = self->backend,
                                      .rank = self->super.rank,
                                      .world_size = self->super.world_size,
                                      .id = id,
                                      .deadline_ns = self->deadline_ns,
                                      .poll = pli_gpu_comm_poll_base,
                                      .context = self};
    return pli_nccl_create(&options, out);
}

pl_status pli_gpu_comm_agree_on(pli_gpu_comm *self, pl_status st)
{
    char message[PLI_GPU_MESSAGE_BYTES];
    if (st != PL_OK && !pli_comm_is_group_comm(self->super.base)) {
        pli_text_print(message, sizeof message, "%s", pl_error_message());
        const pl_status theirs = pli_gpu_comm_query_base(self, st);
        if (theirs == PL_OK) {
            pl_comm_abort(self->super.base, message);
            (void)pli_fail(st, "%s", message);
        } else {
            st = theirs;
        }
    }
    return pli_gpu_comm_agree(self, st);
}

/* Registers the memory of all ranks, or of none. */
static pl_status register_memory(pli_gpu_comm *self, pli_nccl *nccl)
{
    pl_status st = PL_OK;
    char *board = pli_gpu_comm_board(self);
    self->is_registered = 0;
    self->block->handle = pli_nccl_register(nccl, &self->block->memory);
    board[self->super.rank] = self->block->handle != NULL ? 1 : 0;
    PL_TRY(pli_gpu_comm_talk(self, PL_ALL_GATHER, 0, (size_t)self->super.world_size));
    self->is_registered = 1;
    for (int r = 0; r < self->super.world_size; r++)
        self->is_registered &= board[r] != 0;
done:
    if (st == PL_OK && !self->is_registered)
        pli_pool_deregister(self->pool, nccl);
    return st;
}

pl_status pli_gpu_comm_meet(pli_gpu_comm *self)
{
    pl_status st = PL_OK;
    char *board = pli_gpu_comm_board(self);
    char id[PLI_NCCL_ID_BYTES] = {0};
    pli_nccl *nccl = NULL; /* given to the world at once, which ends it */
    if (self->super.world_size == 1)
        return PL_OK;
    if (self->super.rank == 0)
        st = pli_nccl_new_id(self->library, self->backend, id);
    PL_TRY(pli_gpu_comm_agree(self, st));
    memcpy(board, id, self->super.rank == 0 ? sizeof id : 0);
    PL_TRY(pli_gpu_comm_talk(self, PL_BROADCAST, 0, sizeof id));
    memcpy(id, board, sizeof id);
    st = meet_in_nccl(self, id, &nccl);
    (void)pthread_mutex_lock(&self->lock);
    self->nccl = nccl;
    self->is_given_up = 0;
    (void)pthread_mutex_unlock(&self->lock);
    PL_TRY(pli_gpu_comm_agree_on(self, st));
    PL_TRY(register_memory(self, nccl));
    PL_TRY(pli_gpu_comm_agree_on(self, pli_gpu_comm_try(self)));
done:
    return st;
}
