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

uint64_t pli_forwards_end(reducer_object *self, forward_outputs outputs,
                          forward_mode mode)
{
    forward_counts *forwards = &self->forwards;
    forwards->n++;
    forwards->n_training += mode == MODE_TRAINING;
    if (outputs == OUTPUTS_UNWATCHED)
        return 0;
    forwards->n_unanswered[mode]++;
    return forwards->n << 1 | mode;
}

void pli_forwards_answer(reducer_object *self, uint64_t token)
{
    forward_counts *forwards = &self->forwards;
    const forward_mode mode = token & 1 ? MODE_TRAINING : MODE_EVALUATION;
    forwards->n_answered[mode]++;
    if (token >> 1 > forwards->n_before && forwards->n_unanswered[mode] > 0)
        forwards->n_unanswered[mode]--;
}

int pli_forwards_begin_step(const reducer_object *self, size_t i)
{
    const forward_counts *forwards = &self->forwards;
    if (self->sync.is_in_no_sync || self->sync.backward == SYNC_OFF)
        return 0;
    if (!self->options.follows_forwards)
        return self->sync.is_on;
    if (self->n_backward_ends > 0)
        return 1;
    return forwards->n > forwards->n_over && forwards->n > self->slots[i].answered;
}

/* Whether the step is of training mode: that of a forward whose backward is in it, or
 * of any since the last step where no output shows which. */
static int is_in_training(const forward_counts *forwards)
{
    if (forwards->n_answered[MODE_TRAINING] > 0)
        return 1;
    return forwards->n_answered[MODE_EVALUATION] == 0 && forwards->n_training > 0;
}

/* A rank that evaluates alone may forget torch.no_grad(): forwards in evaluation mode
 * count only in a step of such a forward, where the model is trained in that mode. */
void pli_forwards_send(reducer_object *self)
{
    const forward_counts *forwards = &self->forwards;
    pl_forwards counts = {.n = forwards->n_training,
                          .n_answered = forwards->n_answered[MODE_TRAINING],
                          .n_unanswered = forwards->n_unanswered[MODE_TRAINING]};
    if (!is_in_training(forwards)) {
        counts.n = (unsigned)(forwards->n - forwards->n_before);
        counts.n_answered += forwards->n_answered[MODE_EVALUATION];
        counts.n_unanswered += forwards->n_unanswered[MODE_EVALUATION];
    }
    pl_reducer_set_forwards(self->reducer, &counts);
}

/* The last step is taken to have ended n forwards ago, all of training mode. */
static void count_from(forward_counts *forwards, unsigned n)
{
    *forwards = (forward_counts){.n = forwards->n,
                                 .n_before = forwards->n >= n ? forwards->n - n : 0,
                                 .n_over = forwards->n_over,
                                 .n_training = n,
                                 .n_answered[MODE_TRAINING] = n};
}

void pli_forwards_end_step(reducer_object *self)
{
    forward_counts *forwards = &self->forwards;
    for (size_t i = 0; i < self->n_slots; i++)
        if (pl_reducer_ready_count(self->reducer, i) > 0)
            self->slots[i].answered = forwards->n;
    if (self->options.ends_with_step)
        forwards->n_over = forwards->n;
    count_from(forwards, 0);
}

void pli_forwards_take_back(reducer_object *self)
{
    forward_counts *forwards = &self->forwards;
    const unsigned n = (unsigned)(forwards->n - forwards->n_before);
    forwards->n_unanswered[MODE_TRAINING] = forwards->n_training;
    forwards->n_unanswered[MODE_EVALUATION] = n - forwards->n_training;
}

void pli_forwards_restart(reducer_object *self, unsigned n)
{
    count_from(&self->forwards, n);
    pli_buffers_forget(self);
}
