/* reducer_forwards.c - checks that the ranks are in the same step.
 *
 * Steps are paired by their order alone.  A rank that catches an exception between
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
 * Ranks may also differ in the forward to which they assign a backward: each takes the
 * best match.  If one has skipped the first of two backwards, the next step shows it.
 */
#include <stdio.h>

#include "reducer.h"
#include "reducer_state.h"

enum { MOST_NAMED = 8 }; /* ranks, in a message */

static uint8_t byte_of(unsigned n)
{
    return n < UINT8_MAX ? (uint8_t)n : UINT8_MAX;
}

void pl_reducer_set_forwards(pl_reducer *self, const pl_forwards *forwards)
{
    flags_of(self, pl_comm_rank(self->comm))->forwards =
        (forward_bytes){.n = byte_of(forwards->n),
                        .n_answered = byte_of(forwards->n_answered),
                        .n_unanswered = byte_of(forwards->n_unanswered)};
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

static pl_status report(const pl_reducer *self)
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

pl_status pl_reducer_check_forwards(const pl_reducer *self)
{
    const forward_bytes *first = NULL;
    for (int r = 0; r < pl_comm_world_size(self->comm); r++) {
        const forward_bytes *counts = &flags_of(self, r)->forwards;
        if (flags_of(self, r)->role != PL_ACTIVE)
            continue;
        if (first == NULL)
            first = counts;
        else if (!is_same_step(first, counts))
            return report(self);
    }
    return PL_OK;
}
