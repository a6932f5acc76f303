/* step_forwards.c - which backward is a step: that of a synchronised forward through
 * the wrapper.
 *
 * Hooks on the outputs of most forwards see when their backward begins; then that whole
 * backward is a step.  If no output has a hook (the module keeps the loss, or the
 * output hides its tensors), torch's rule holds: after a synchronised forward each
 * parameter awaits its next gradient, and the first to arrive begins a step.  With
 * find_unused_parameters or a static graph, nothing is awaited after that step;
 * otherwise parameters without a gradient in it await one in later backwards.  Any
 * other backward, such as that of the bare module, is local.
 *
 * The counts of forwards go with each step's flags.
 */
#include <stdio.h>

#include "step_state.h"

enum { MOST_NAMED = 8 }; /* ranks, in a message */

/* ---- forwards ------------------------------------------------------------------- */

pl_status pl_step_forward_begins(pl_step *self)
{
    pl_status st = PL_OK;
    PL_TRY(pl_step_check_process(self));
    /* The optimizer has run since, on gradients that were not averaged. */
    if (pl_reducer_is_active(self->reducer))
        PL_FAIL(PL_ESTATE,
                "the last backward's gradients were not averaged, since its end was "
                "never seen: run the model's forward through the wrapper");
    self->backward = SYNC_ON;
    if (is_on_device(self))
        PL_TRY(pl_step_apply_buffers(self));
    /* Drop an old exception, unless it failed a step: peers must still read it. */
    if (!pl_reducer_has_failed(self->reducer))
        pli_comm_set_failure_message(self->comm, NULL);
    pli_comm_record_activity(self->comm, PL_FORWARD, self->reducer->step + 1);
done:
    return st;
}

static uint64_t end_forward(pl_step *self, pl_outputs outputs, pl_forward_mode mode)
{
    forward_counts *forwards = &self->forwards;
    forwards->n++;
    forwards->n_training += mode == PL_TRAINS;
    if (outputs == PL_OUTPUTS_UNWATCHED)
        return 0;
    forwards->n_unanswered[mode]++;
    return forwards->n << 1 | mode;
}

uint64_t pl_step_forward_ends(pl_step *self, pl_outputs outputs, pl_forward_mode mode)
{
    uint64_t token = 0;
    if (self->settings->is_on)
        token = end_forward(self, outputs, mode);
    else if (outputs == PL_OUTPUTS_UNWATCHED) /* no backward of it can be seen */
        self->forwards.n_over = self->forwards.n;
    if (!pl_reducer_is_active(self->reducer))
        pli_comm_record_activity(self->comm, PL_IDLE, self->reducer->step + 1);
    return token;
}

void pl_step_await_backward(pl_step *self)
{
    (void)end_forward(self, PL_OUTPUTS_UNWATCHED, PL_TRAINS);
}

void pl_step_forward_raises(pl_step *self, pl_forward_mode mode)
{
    if (pl_reducer_has_failed(self->reducer))
        self->forwards.n_failed += mode == PL_TRAINS;
    else
        self->forwards.n_raised[mode]++;
}

/* No backward of it follows.  If a peer has failed the step, this rank has given up the
 * same one. */
void pl_step_forward_fails(pl_step *self, pl_forward_mode mode)
{
    if (!self->settings->is_on || is_forked(self))
        return;
    if (pl_reducer_has_failed(self->reducer)) { /* it could not leave a failed step */
        self->forwards.n_failed++;
        self->forwards.n_failed_unanswered++;
        return;
    }
    if (pl_reducer_notice_failure(self->reducer) != PL_OK)
        pli_forwards_fail_step(self);
    pl_step_forward_raises(self, mode);
}

/* ---- backwards ------------------------------------------------------------------ */

static void answer(pl_step *self, uint64_t token)
{
    forward_counts *forwards = &self->forwards;
    const pl_forward_mode mode = token & 1 ? PL_TRAINS : PL_EVALUATES;
    forwards->n_answered[mode]++;
    if (token >> 1 > forwards->n_before && forwards->n_unanswered[mode] > 0)
        forwards->n_unanswered[mode]--;
}

pl_status pl_step_output(pl_step *self, uint64_t token, int is_synchronised)
{
    pl_status st = PL_OK;
    if (token > 0)
        answer(self, token);
    if (is_synchronised) {
        self->backward = SYNC_ON;
        if (!self->settings->is_in_no_sync)
            PL_TRY(self->host->await_end(self->context, PL_END_OF_OUTPUT));
    } else if (self->settings->n_ends == 0 && self->backward == SYNC_ON) {
        /* If the backward also reaches a synchronised output, all of it is. */
        PL_TRY(self->host->await_end(self->context, PL_END_OF_LOCAL_OUTPUT));
        self->backward = SYNC_OFF;
    }
done:
    return st;
}

void pl_step_end_local(pl_step *self)
{
    self->backward = SYNC_ON;
}

int pli_forwards_begin_step(const pl_step *self, size_t i)
{
    const forward_counts *forwards = &self->forwards;
    const pl_step_settings *settings = self->settings;
    if (settings->is_in_no_sync || self->backward == SYNC_OFF)
        return 0;
    if (!settings->follows_forwards)
        return settings->is_on;
    if (settings->n_ends > 0)
        return 1;
    return forwards->n > forwards->n_over && forwards->n > self->slots[i].answered;
}

/* ---- the same step -------------------------------------------------------------- */

/* Steps are paired by their order alone.  A rank that catches an exception between
 * forward and backward, or runs one more backward, is one step off from then on, and
 * each mean is of batches that do not belong together.  So each rank sends with the
 * flags how many synchronised forwards it has run since the last step.
 *
 * Correct ranks may differ in that number: one cuts its batch into more parts, another
 * leaves an output out of its loss.  If the number of forwards without a backward
 * differs too, torch cannot run the program the same on all ranks either.  If no output
 * shows the step on either rank (say, the module keeps its loss), this second number is
 * not known, and the first must be the same.
 *
 * Only counts are compared, not to which forward a backward belongs.  If one rank has
 * skipped the first of two backwards, the next step shows it.
 */
static uint8_t byte_of(unsigned n)
{
    return n < UINT8_MAX ? (uint8_t)n : UINT8_MAX;
}

/* Whether the step is in training mode, as the forwards whose backward it holds.  If no
 * output shows them, any training forward since the last step counts. */
static int is_in_training(const forward_counts *forwards)
{
    if (forwards->n_answered[PL_TRAINS] > 0)
        return 1;
    return forwards->n_answered[PL_EVALUATES] == 0 && forwards->n_training > 0;
}

/* A rank that evaluates alone may forget torch.no_grad().  So forwards in evaluation
 * mode count only if the step's own forward is in that mode. */
void pli_forwards_send(pl_step *self)
{
    const forward_counts *forwards = &self->forwards;
    const unsigned n_raised = forwards->n_raised[PL_TRAINS];
    unsigned n = forwards->n_training + n_raised + forwards->n_failed;
    unsigned n_answered = forwards->n_answered[PL_TRAINS];
    unsigned n_unanswered =
        forwards->n_unanswered[PL_TRAINS] + n_raised + forwards->n_failed_unanswered;
    if (!is_in_training(forwards)) {
        const unsigned n_more = forwards->n_raised[PL_EVALUATES];
        n = (unsigned)(forwards->n - forwards->n_before) + n_raised + n_more;
        n_answered += forwards->n_answered[PL_EVALUATES];
        n_unanswered += forwards->n_unanswered[PL_EVALUATES] + n_more;
    }
    flags_of(self->reducer, pl_comm_rank(self->comm))->forwards =
        (forward_bytes){.n = byte_of(n),
                        .n_answered = byte_of(n_answered),
                        .n_unanswered = byte_of(n_unanswered)};
}

/* Whether no output has announced the backward, although outputs of a forward would
 * have. */
static int is_unannounced(const forward_bytes *counts)
{
    return counts->n_answered == 0 && counts->n_unanswered > 0;
}

/* Whether only the number of the rank's forwards is known. */
static int is_hidden(const forward_bytes *counts)
{
    return counts->n_answered == 0 && counts->n_unanswered == 0;
}

static int is_same_step(const forward_bytes *a, const forward_bytes *b)
{
    if (a->n == b->n)
        return is_unannounced(a) == is_unannounced(b);
    return a->n > 0 && b->n > 0 && is_unannounced(a) == is_unannounced(b) &&
           a->n_unanswered == b->n_unanswered && !(is_hidden(a) && is_hidden(b));
}

static pl_status report_forwards(const pl_reducer *self)
{
    char text[MOST_NAMED * 64] = "";
    size_t at = 0;
    int n_named = 0;
    for (int r = 0; r < pl_comm_world_size(self->comm) && n_named < MOST_NAMED; r++) {
        const forward_bytes *counts = &flags_of(self, r)->forwards;
        if (flags_of(self, r)->role != PL_ACTIVE)
            continue;
        at += (size_t)snprintf(
            text + at, sizeof text - at, "%srank %d: %u, %u of them without a backward",
            n_named++ > 0 ? "; " : "", r, counts->n, counts->n_unanswered);
    }
    return pli_fail(
        PL_EMISMATCH,
        "rank %d: the ranks are not in the same step. Forwards through the "
        "wrapper since the last step: %s. Each rank needs one backward for each step: "
        "if one skips it (after a caught exception), all must. Run forwards that are "
        "not trained under torch.no_grad() or through wrapper.module",
        pl_comm_rank(self->comm), text);
}

pl_status pli_forwards_check(const pl_reducer *self)
{
    const forward_bytes *first = NULL;
    for (int r = 0; r < pl_comm_world_size(self->comm); r++) {
        const forward_bytes *counts = &flags_of(self, r)->forwards;
        if (flags_of(self, r)->role != PL_ACTIVE)
            continue;
        if (first == NULL)
            first = counts;
        else if (!is_same_step(first, counts))
            return report_forwards(self);
    }
    return PL_OK;
}

void pli_forwards_end_step(pl_step *self, int is_taken)
{
    forward_counts *forwards = &self->forwards;
    for (size_t i = 0; i < self->n_slots; i++)
        if (self->reducer->slots[i].n_ready > 0)
            self->slots[i].answered = forwards->n;
    if (self->settings->ends_with_step)
        forwards->n_over = forwards->n;
    if (is_taken)
        forwards->n_in_step = forwards->n_training - forwards->n_unanswered[PL_TRAINS];
    *forwards = (forward_counts){.n = forwards->n,
                                 .n_before = forwards->n,
                                 .n_over = forwards->n_over,
                                 .n_in_step = forwards->n_in_step};
}

void pli_forwards_fail_step(pl_step *self)
{
    forward_counts *forwards = &self->forwards;
    forwards->n_failed_unanswered +=
        forwards->n_unanswered[PL_TRAINS] + forwards->n_raised[PL_TRAINS];
}

/* If each step has one forward, the counts show which ranks have left out one, even
 * over failed steps.  If it has several, ranks differ in how many they have run when a
 * step fails, so they count afresh; so do ranks that all got a MismatchError, which may
 * have agreed where to go on. */
void pli_forwards_follow(pl_step *self, const pl_step *failed)
{
    const forward_counts *before = &failed->forwards;
    self->forwards.n_in_step = before->n_in_step;
    if (before->n_in_step > 1 || pl_comm_progress(failed->comm) == PL_EMISMATCH)
        return;
    self->forwards.n_failed =
        before->n_failed + before->n_training + before->n_raised[PL_TRAINS];
    self->forwards.n_failed_unanswered = before->n_failed_unanswered;
}

void pli_forwards_forget_failed(pl_step *self)
{
    forward_counts *forwards = &self->forwards;
    forwards->n_failed = forwards->n_failed_unanswered = 0;
    forwards->n_raised[PL_TRAINS] = forwards->n_raised[PL_EVALUATES] = 0;
}
