/* retain.c - when the memory of a large gradient is freed that was copied to its slot.
 *
 * At once is best where malloc hands it to the next gradient while it is warm: layers
 * of tens of megabytes.  Where it is the top of the heap, though, freeing it can make
 * malloc give the top back to the kernel, and the next layer takes a page fault for
 * each of its pages: for a ResNet 14,000 a step, a tenth of its time.  Kept until the
 * end of the step, as without data parallelism, the heap is left as large as it was.
 *
 * Which of the two it is hangs on the model, on the allocator and on the rest of the
 * program.  So each rank tries both for some steps, counts its own page faults, and
 * keeps to the better, until it looks again.  Keeping comes first: it can leave the
 * heap so large that freeing at once costs no fault from then on, while the other way
 * round the top of the heap is given back again and again.
 */
#include "grads.h"

#include <sys/resource.h>

enum {
    FIRST_STEPS = 2,      /* which find the order of the gradients */
    TRIAL_STEPS = 5,      /* of each kind */
    STEPS_BETWEEN = 1000, /* two trials */
    LEAST_GAIN = 64,      /* page faults a step */
    MOST_BYTES = 64 << 20 /* that may be kept */
};

static int64_t page_faults(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_minflt : 0;
}

static grad_release kind_in_trial(unsigned step)
{
    return step < TRIAL_STEPS ? RELEASE_AT_END : RELEASE_AT_ONCE;
}

/* The better one of two trials: it has to be clearly better to cost memory. */
static grad_release decide(const grad_retention *self)
{
    const int64_t at_once = self->fewest_faults[RELEASE_AT_ONCE];
    const int64_t at_end = self->fewest_faults[RELEASE_AT_END];
    const int is_better = at_end + LEAST_GAIN < at_once && at_end * 10 < at_once * 9;
    return is_better ? RELEASE_AT_END : RELEASE_AT_ONCE;
}

void pli_retention_init(grad_retention *self, const grad_slot *slots, size_t n_slots)
{
    size_t n_bytes = 0;
    for (size_t i = 0; i < n_slots; i++)
        if (slots[i].policy == POLICY_VIEW)
            n_bytes += pli_layout_bytes(slots[i].layout);
    const int can_keep = n_bytes > 0 && n_bytes <= MOST_BYTES;
    *self = (grad_retention){.release = can_keep ? RELEASE_AT_END : RELEASE_AT_ONCE,
                             .can_keep = can_keep};
}

void pli_retention_begin_step(grad_retention *self)
{
    if (!self->can_keep)
        return;
    const unsigned step = self->n_steps++;
    if (step < FIRST_STEPS)
        return;
    const unsigned in_trial = (step - FIRST_STEPS) % STEPS_BETWEEN;
    if (in_trial > 2 * TRIAL_STEPS)
        return;
    /* What the last step cost, with all that came between it and this one; the first
     * of its kind pays for what the other kind left behind. */
    const int64_t now = page_faults();
    const int64_t cost = now - self->faults_before;
    self->faults_before = now;
    if (in_trial == 0) {
        self->fewest_faults[RELEASE_AT_ONCE] = INT64_MAX;
        self->fewest_faults[RELEASE_AT_END] = INT64_MAX;
    } else if (in_trial % TRIAL_STEPS != 1) {
        int64_t *fewest = &self->fewest_faults[self->release];
        *fewest = cost < *fewest ? cost : *fewest;
    }
    self->release = in_trial < 2 * TRIAL_STEPS ? kind_in_trial(in_trial) : decide(self);
}
