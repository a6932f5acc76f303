/* forwards.c - which backward is a step: that of a synchronised forward through the
 * wrapper.
 *
 * The hooks on most forwards' outputs see when their backward begins, and all of it is
 * then a step.  Where none has (the loss was kept by the module, or the output hides
 * its tensors), torch's rule holds: after a synchronised forward each parameter's next
 * gradient is awaited, and the first that comes begins a step.  With
 * find_unused_parameters, and with a static graph, that step is also the last; without,
 * parameters that got no gradient in it are awaited in the backwards that follow.  Any
 * other backward, that of the bare module say, is local.
 *
 * The numbers of forwards go with each step's flags: reducer/reducer_forwards.c.
 */
#include "forwards.h"

#include "module_buffers.h"

uint64_t pli_forwards_end(reducer_object *self, forward_outputs outputs)
{
    self->forwards.n++;
    self->forwards.n_unanswered += outputs == OUTPUTS_AWAITED;
    return self->forwards.n;
}

void pli_forwards_supersede(reducer_object *self)
{
    self->forwards.n_over = self->forwards.n;
}

void pli_forwards_answer(reducer_object *self, uint64_t number, int is_awaited)
{
    self->forwards.n_answered++;
    if (is_awaited && number > self->forwards.n_before &&
        self->forwards.n_unanswered > 0)
        self->forwards.n_unanswered--;
}

int pli_forwards_begin_step(const reducer_object *self, size_t i)
{
    const forward_counts *forwards = &self->forwards;
    if (!self->is_sync || self->sync_backward == SYNC_OFF)
        return 0;
    if (!self->follows_forwards || self->n_backward_ends > 0)
        return 1;
    return forwards->n > forwards->n_over && forwards->n > self->slots[i].answered;
}

void pli_forwards_send(reducer_object *self)
{
    const forward_counts *forwards = &self->forwards;
    const pl_forwards counts = {.n = (unsigned)(forwards->n - forwards->n_before),
                                .n_answered = forwards->n_answered,
                                .n_unanswered = forwards->n_unanswered};
    pl_reducer_set_forwards(self->reducer, &counts);
}

void pli_forwards_end_step(reducer_object *self)
{
    forward_counts *forwards = &self->forwards;
    for (size_t i = 0; i < self->n_slots; i++)
        if (pl_reducer_ready_count(self->reducer, i) > 0)
            self->slots[i].answered = forwards->n;
    if (self->ends_with_step)
        forwards->n_over = forwards->n;
    forwards->n_before = forwards->n;
    forwards->n_answered = forwards->n_unanswered = 0;
}

void pli_forwards_take_back(reducer_object *self)
{
    forward_counts *forwards = &self->forwards;
    forwards->n_unanswered = (unsigned)(forwards->n - forwards->n_before);
}

void pli_forwards_restart(reducer_object *self, unsigned n)
{
    forward_counts *forwards = &self->forwards;
    forwards->n_before = forwards->n >= n ? forwards->n - n : 0;
    forwards->n_answered = n;
    forwards->n_unanswered = 0;
    pli_buffers_forget(self);
}
