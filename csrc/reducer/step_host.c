/* step_host.c - what all parts of a step do through its caller: let other threads run,
 * wait, read the stream, copy; and whether it may run in this process. */
#include "step_state.h"

pl_status pl_step_check_process(const pl_step *self)
{
    if (!is_forked(self))
        return PL_OK;
    return pli_fail(
        PL_ESTATE,
        "this process (%d) was forked from rank %d (process %d) and is not a rank "
        "itself: use the bare model (wrapper.module) here",
        (int)getpid(), pl_comm_rank(self->comm), self->owner_pid);
}

pl_status pli_step_wait(pl_step *self, slice_fn slice, void *argument)
{
    for (;;) {
        void *lock = self->host->let_go(self->context);
        pl_status st = slice(argument, PLI_SLICE_NS);
        self->host->take_back(lock);
        if (st != PL_EAGAIN)
            return st;
        st = self->host->check_signals(self->context);
        if (st != PL_OK)
            return st;
    }
}

typedef struct ticket_wait {
    pl_comm *comm;
    pl_ticket ticket;
} ticket_wait;

static pl_status ticket_slice(void *context, int64_t slice_ns)
{
    const ticket_wait *wait = context;
    return pl_comm_wait(wait->comm, wait->ticket, slice_ns);
}

pl_status pli_step_wait_for(pl_step *self, pl_ticket ticket)
{
    ticket_wait wait = {.comm = self->comm, .ticket = ticket};
    return pli_step_wait(self, ticket_slice, &wait);
}

pl_status pli_step_let_go(pl_step *self, pl_status (*call)(pl_reducer *))
{
    void *lock = self->host->let_go(self->context);
    const pl_status st = call(self->reducer);
    self->host->take_back(lock);
    return st;
}

pl_status pli_step_current_stream(pl_step *self, pl_stream **out)
{
    pl_status st = PL_OK;
    PL_TRY(self->host->current_stream(self->context, out));
    PL_TRY(self->comm->device->outlive(self->comm, *out));
done:
    return st;
}

pl_status pli_step_read_stream(pl_step *self)
{
    pl_status st = PL_OK;
    pl_stream *stream = NULL;
    PL_TRY(pli_step_current_stream(self, &stream));
    set_stream(self, stream);
done:
    return st;
}

void pli_step_defer_copy(pl_step *self, void *to, const void *from,
                         const pli_layout *layout)
{
    if (layout->n_elems > 0)
        self->moves[self->n_moves++] = (pl_move){
            .to = to, .from = from, .dtype = layout->dtype, .n_elems = layout->n_elems};
}

pl_status pli_step_copy(pl_step *self, pl_stream *stream)
{
    const size_t n_moves = self->n_moves;
    self->n_moves = 0;
    if (n_moves == 0)
        return PL_OK;
    void *lock = let_go_if(self, is_on_device(self));
    const pl_status st =
        self->backend->ops->copy(self->backend, self->moves, n_moves, stream);
    take_back(self, lock);
    return st;
}
