/* relay.c - a world whose operations somebody else carries. */
#include "relay.h"

#include <stdatomic.h>
#include <stdio.h>

#include "../core/alloc.h"

enum { WORDS_BYTES = 512 };

typedef enum relay_phase { RELAY_RUNNING, RELAY_FAILING, RELAY_FAILED } relay_phase;

typedef struct relay_comm {
    pl_comm super;
    pl_comm *base;
    pli_relay_carrier carrier;
    pl_ticket n_issued;
    pl_ticket n_done;
    atomic_int phase;        /* relay_phase; any thread may abort */
    char words[WORDS_BYTES]; /* why it failed */
} relay_comm;

static relay_comm *relay_of(pl_comm *comm)
{
    return (relay_comm *)(void *)comm;
}

static pl_status check_phase(const relay_comm *self)
{
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) == RELAY_FAILED)
        PL_FAIL(PL_EPEER,
                "a step has failed on rank %d (%s), and its process group cannot tell "
                "the other ranks: wrap the model anew on every rank",
                self->super.rank, self->words);
done:
    return st;
}

static void fail(relay_comm *self, const char *words)
{
    int running = RELAY_RUNNING;
    if (!atomic_compare_exchange_strong(&self->phase, &running, RELAY_FAILING))
        return;
    (void)snprintf(self->words, sizeof self->words, "%s",
                   words != NULL ? words : "an exception in its backward");
    atomic_store(&self->phase, RELAY_FAILED);
    self->carrier.drop(self->carrier.context);
}

static pl_status relay_issue(pl_comm *comm, const pl_op *op, const pli_order *order,
                             pl_ticket *out)
{
    pl_status st = PL_OK;
    relay_comm *self = relay_of(comm);
    (void)order;
    PL_TRY(check_phase(self));
    st = self->carrier.issue(self->carrier.context, op, self->n_issued + 1);
    if (st != PL_OK) {
        fail(self, pl_error_message());
        goto done;
    }
    *out = ++self->n_issued;
done:
    return st;
}

static void relay_work(pl_comm *comm)
{
    (void)comm; /* the carrier makes its own progress */
}

static pl_status relay_progress(pl_comm *comm)
{
    return check_phase(relay_of(comm));
}

static pl_status relay_survey(pl_comm *comm, pli_survey what)
{
    (void)what; /* one that has failed stays so */
    return check_phase(relay_of(comm));
}

static pl_status relay_wait(pl_comm *comm, pl_ticket ticket, int64_t slice_ns)
{
    pl_status st = PL_OK;
    relay_comm *self = relay_of(comm);
    (void)slice_ns;
    if (ticket > self->n_issued)
        PL_FAIL(PL_EINVAL, "ticket %llu of %llu operations issued",
                (unsigned long long)ticket, (unsigned long long)self->n_issued);
    PL_TRY(check_phase(self));
    if (ticket <= self->n_done)
        goto done;
    st = self->carrier.wait(self->carrier.context, ticket);
    if (st == PL_OK)
        self->n_done = ticket;
    else if (st != PL_EAGAIN)
        fail(self, pl_error_message());
done:
    return st;
}

static pl_status relay_recover(pl_comm *comm, int64_t slice_ns, pl_recovery *out)
{
    pl_status st = PL_OK;
    (void)slice_ns;
    PL_TRY(check_phase(relay_of(comm)));
    *out = PL_NOTHING_FAILED;
done:
    return st;
}

static void relay_abort(pl_comm *comm, const char *words)
{
    fail(relay_of(comm), words);
}

static void relay_note(pl_comm *comm, pl_activity activity, uint64_t step)
{
    (void)comm;
    (void)activity;
    (void)step;
}

static void *relay_arena(pl_comm *comm)
{
    return pli_comm_arena(relay_of(comm)->base);
}

static pl_status relay_map_own(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                               void **out)
{
    return pli_comm_map_own(relay_of(comm)->base, offset_bytes, n_bytes, out);
}

static void relay_unshare_own(pl_comm *comm, size_t offset_bytes, size_t n_bytes,
                              void *memory)
{
    pli_comm_unshare_own(relay_of(comm)->base, offset_bytes, n_bytes, memory);
}

static void relay_leave(pl_comm *comm)
{
    pl_comm_leave(relay_of(comm)->base);
}

static void relay_destroy(pl_comm *comm)
{
    pl_comm_destroy(relay_of(comm)->base);
    pli_free(comm);
}

static const pl_comm_ops relay_ops = {
    .name = "relay",
    .issue = relay_issue,
    .work = relay_work,
    .progress = relay_progress,
    .look = relay_progress,
    .survey = relay_survey,
    .wait = relay_wait,
    .recover = relay_recover,
    .abort = relay_abort,
    .note = relay_note,
    .arena = relay_arena,
    .map_own = relay_map_own,
    .unshare_own = relay_unshare_own,
    .leave = relay_leave,
    .destroy = relay_destroy,
};

pl_status pli_relay_create(const pli_relay_options *options, pl_comm **out)
{
    pl_status st = PL_OK;
    relay_comm *self = NULL;
    if (options->world_size < 1 || options->world_size > PL_MAX_RANKS ||
        options->rank < 0 || options->rank >= options->world_size)
        PL_FAIL(PL_EINVAL, "rank %d of world_size %d: a world has 1 to %d ranks",
                options->rank, options->world_size, PL_MAX_RANKS);
    if (pl_comm_world_size(options->base) != 1)
        PL_FAIL(PL_EINVAL, "a relay's base has %d ranks: give a world of one",
                pl_comm_world_size(options->base));
    PL_TRY(pli_calloc(1, sizeof *self, "a relay", &self));
    self->super = (pl_comm){.ops = &relay_ops,
                            .rank = options->rank,
                            .world_size = options->world_size,
                            .arena_bytes = pl_comm_arena_bytes(options->base),
                            .host_bytes = pl_comm_arena_bytes(options->base),
                            .chunk_bytes = SIZE_MAX,
                            .is_relayed = 1};
    self->base = options->base;
    self->carrier = options->carrier;
    *out = &self->super;
done:
    return st;
}
