/* forwards.c - which backward is a step: that of a synchronised forward through the
 * wrapper.
 *
 * Hooks on the outputs of most forwards see when their backward begins; then that whole
 * backward is a step.  If no output has a hook (the module keeps the loss, or the
 * output hides its tensors), torch's rule holds: after a synchronised forward each
 * parameter awaits its next gradient, and the first to arrive begins a step.  With
 * find_unused_parameters or a static graph, nothing is awaited after that step;
 * otherwise parameters without a gradient in it await one in later backwards.  Any
 * other backward, such as that of the bare module, is local.
 *
 * The counts of forwards go with each step's flags: reducer/reducer_finish.c.
 */
#include "forwards.h"

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

/* Whether the step is in training mode, as the forwards whose backward it holds.  If no
 * output shows them, any training forward since the last step counts. */
static int is_in_training(const forward_counts *forwards)
{
    if (forwards->n_answered[MODE_TRAINING] > 0)
        return 1;
    return forwards->n_answered[MODE_EVALUATION] == 0 && forwards->n_training > 0;
}

/* A rank that evaluates alone may forget torch.no_grad().  So forwards in evaluation
 * mode count only if the step's own forward is in that mode. */
void pli_forwards_send(reducer_object *self)
{
    const forward_counts *forwards = &self->forwards;
    const unsigned n_raised = forwards->n_raised[MODE_TRAINING];
    pl_forwards counts = {.n = forwards->n_training + n_raised + forwards->n_failed,
                          .n_answered = forwards->n_answered[MODE_TRAINING],
                          .n_unanswered = forwards->n_unanswered[MODE_TRAINING] +
                                          n_raised + forwards->n_failed_unanswered};
    if (!is_in_training(forwards)) {
        const unsigned n_more = forwards->n_raised[MODE_EVALUATION];
        counts.n = (unsigned)(forwards->n - forwards->n_before) + n_raised + n_more;
        counts.n_answered += forwards->n_answered[MODE_EVALUATION];
        counts.n_unanswered += forwards->n_unanswered[MODE_EVALUATION] + n_more;
    }
    pl_reducer_set_forwards(self->reducer, &counts);
}

void pli_forwards_end_step(reducer_object *self, int is_taken)
{
    forward_counts *forwards = &self->forwards;
    for (size_t i = 0; i < self->n_slots; i++)
        if (pl_reducer_ready_count(self->reducer, i) > 0)
            self->slots[i].answered = forwards->n;
    if (self->options.ends_with_step)
        forwards->n_over = forwards->n;
    if (is_taken)
        forwards->n_in_step =
            forwards->n_training - forwards->n_unanswered[MODE_TRAINING];
    *forwards = (forward_counts){.n = forwards->n,
                                 .n_before = forwards->n,
                                 .n_over = forwards->n_over,
                                 .n_in_step = forwards->n_in_step};
}

void pli_forwards_raise(reducer_object *self, forward_mode mode)
{
    if (pl_reducer_has_failed(self->reducer))
        self->forwards.n_failed += mode == MODE_TRAINING;
    else
        self->forwards.n_raised[mode]++;
}

void pli_forwards_fail_step(reducer_object *self)
{
    forward_counts *forwards = &self->forwards;
    forwards->n_failed_unanswered +=
        forwards->n_unanswered[MODE_TRAINING] + forwards->n_raised[MODE_TRAINING];
}

void pli_forwards_lose(reducer_object *self)
{
    self->forwards.n_failed++;
    self->forwards.n_failed_unanswered++;
}

/* If each step has one forward, the counts show which ranks have left out one, even
 * over failed steps.  If it has several, ranks differ in how many they have run when a
 * step fails, so they count afresh; so do ranks that all got a MismatchError, which may
 * have agreed where to go on. */
void pli_forwards_follow(reducer_object *self, const reducer_object *failed)
{
    const forward_counts *before = &failed->forwards;
    self->forwards.n_in_step = before->n_in_step;
    if (before->n_in_step > 1 || pl_comm_progress(failed->comm) == PL_EMISMATCH)
        return;
    self->forwards.n_failed =
        before->n_failed + before->n_training + before->n_raised[MODE_TRAINING];
    self->forwards.n_failed_unanswered = before->n_failed_unanswered;
}

void pli_forwards_forget_failed(reducer_object *self)
{
    forward_counts *forwards = &self->forwards;
    forwards->n_failed = forwards->n_failed_unanswered = 0;
    forwards->n_raised[MODE_TRAINING] = forwards->n_raised[MODE_EVALUATION] = 0;
}
