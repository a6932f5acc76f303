/* shm_counters.c - the last rank to post or finish an operation tells the rest.
 *
 * Posting an operation, or doing a part of it, is one store.  Each rank then looks at
 * the others up to the first that is behind.  The last rank finds none behind, writes
 * the operation's number into the header and wakes all.  So a waiting rank reads one
 * word, however many ranks there are, and is woken when it can go on.  As the last rank
 * may die before it writes, a rank also looks at every other before it sleeps.
 */
#include "shm_counters.h"

uint64_t pli_counter_done(const pli_shm_comm *self, int rank)
{
    pli_rank *state = pli_rank_of(self->segment, rank);
    const uint64_t done = atomic_load_explicit(&state->done, memory_order_seq_cst);
    return done >> PLI_EPOCH_SHIFT <= self->epoch
               ? done
               : atomic_load_explicit(&state->done_before, memory_order_relaxed);
}

uint64_t pli_tag_of(const pl_op *op)
{
    return op->kind == PL_BARRIER ? pli_barrier_tag(op->mark) : pli_op_hash(op);
}

static uint64_t tag_at(const pli_shm_comm *self, int rank, size_t slot)
{
    return atomic_load_explicit(&pli_tags_of(self->segment, rank)[slot],
                                memory_order_relaxed);
}

/* The rank with which the fewest agree.  Of several, one at a barrier, where a rank
 * that has changed its model waits, else the last: every rank finds the same one,
 * whichever looks first. */
static int odd_one_out(const pli_shm_comm *self, size_t slot)
{
    int odd = 0;
    int n_fewest = PL_MAX_RANKS + 1;
    for (int r = 0; r < self->super.world_size; r++) {
        int n_agree = 0;
        for (int other = 0; other < self->super.world_size; other++)
            n_agree += tag_at(self, other, slot) == tag_at(self, r, slot);
        if (n_agree < n_fewest ||
            (n_agree == n_fewest && !pli_is_barrier_tag(tag_at(self, odd, slot)))) {
            n_fewest = n_agree;
            odd = r;
        }
    }
    return odd;
}

static int is_same_everywhere(const pli_shm_comm *self, size_t slot)
{
    const uint64_t mine = pli_tag_of(&self->ring[slot]);
    for (int r = 0; r < self->super.world_size; r++) {
        if (tag_at(self, r, slot) == mine)
            continue;
        pli_epoch_fail(self, odd_one_out(self, slot), PLI_MISMATCH);
        return 0;
    }
    return 1;
}

/* Tells all ranks that all have reached `number`. */
static void say(const pli_shm_comm *self, _Atomic uint64_t *word, uint64_t number)
{
    uint64_t told = atomic_load(word);
    while (told < number)
        if (atomic_compare_exchange_weak(word, &told, number)) {
            pli_wake_ranks(self->segment);
            return;
        }
}

int pli_have_all_posted(const pli_shm_comm *self, uint64_t number)
{
    _Atomic uint64_t *word = &pli_header_of(self->segment)->all_posted;
    pli_failure failure;
    if (pli_all_have(self, word, number))
        return 1;
    if (pli_laggard(self, pli_counter_posted, number) >= 0 ||
        pli_failure_stands(self, &failure) ||
        !is_same_everywhere(self, number & (self->segment->ring_ops - 1)))
        return 0;
    say(self, word, number);
    return 1;
}

int pli_have_all_done(const pli_shm_comm *self, uint64_t number)
{
    _Atomic uint64_t *word = &pli_header_of(self->segment)->all_done;
    if (pli_all_have(self, word, number))
        return 1;
    if (pli_laggard(self, pli_counter_done, number) >= 0)
        return 0;
    say(self, word, number);
    return 1;
}
