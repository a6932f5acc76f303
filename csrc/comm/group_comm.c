/* group_comm.c - a world over a user's process group. */
#include "group_comm.h"

#include <stdatomic.h>
#include <stdio.h>

#include "core/alloc.h"

enum { MESSAGE_BYTES = 512 };

typedef enum group_phase { GROUP_RUNNING, GROUP_FAILING, GROUP_FAILED } group_phase;

typedef struct group_comm {
    pl_comm super;
    pli_group_callbacks callbacks;
    pl_ticket n_issued;
    pl_ticket n_done;
    atomic_int phase;            /* group_phase; any thread may abort */
    char message[MESSAGE_BYTES]; /* why it failed */
} group_comm;

static group_comm *group_comm_of(pl_comm *comm)
{
    return (group_comm *)(void *)comm;
}

static pl_status check_phase(const group_comm *self)
{
    pl_status st = PL_OK;
    if (atomic_load(&self->phase) == GROUP_FAILED)
        PL_FAIL(PL_EPEER,
                "a step has failed on rank %d (%s), and its process group cannot tell "
                "the other ranks: wrap the model anew on every rank",
                self->super.rank, self->message);
done:
    return st;
}

static void fail(group_comm *self, const char *message)
{
    int running = GROUP_RUNNING;
    if (!atomic_compare_exchange_strong(&self->phase, &running, GROUP_FAILING))
        return;
    pli_text_print(self->message, sizeof self->message, "%s",
                   message != NULL ? message : "an exception in its backward");
    atomic_store(&self->phase, GROUP_FAILED);
    self->callbacks.drop(self->callbacks.context);
}

static pl_status group_issue(pl_comm *comm, const pl_op *op, const pli_order *order,
                             pl_ticket *out)
{
    pl_status st = PL_OK;
    group_comm *self = group_comm_of(comm);
    (void)order;
    PL_TRY(check_phase(self));
    st = self->callbacks.issue(self->callbacks.context, op, self->n_issued + 1);
    if (st != PL_OK) {
        fail(self, pl_error_message());
        goto done;
    }
    *out = ++self->n_issued;
done:
    return st;
}

static pl_status group_progress(pl_comm *comm)
{
    return check_phase(group_comm_of(comm));
}

static pl_status group_query(pl_comm *comm, pli_query what)
{
    (void)what; /* a failed group comm stays failed */
    return check_phase(group_comm_of(comm));
}

static pl_status group_wait(pl_comm *comm, pl_ticket ticket, int64_t slice_ns)
{
    pl_status st = PL_OK;
    group_comm *self = group_comm_of(comm);
    (void)slice_ns;
    if (ticket > self->n_issued)
        PL_FAIL(PL_EINVAL, "ticket %llu, but only %llu operations were issued",
                (unsigned long long)ticket, (unsigned long long)self->n_issued);
    PL_TRY(check_phase(self));
    if (ticket <= self->n_done)
        goto done;
    st = self->callbacks.wait(self->callbacks.context, ticket);
    if (st == PL_OK)
        self->n_done = ticket;
    else if (st != PL_EAGAIN)
        fail(self, pl_error_message());
done:
    return st;
}

static void group_abort(pl_comm *comm, const char *message)
{
    fail(group_comm_of(comm), message);
}

/* Only the group's own wait can tell, in the rank's thread. */
static int group_is_done(pl_comm *comm, pl_ticket ticket)
{
    (void)comm;
    return ticket == 0;
}

static void group_destroy(pl_comm *comm)
{
    pl_comm_destroy(comm->base);
    pli_free(comm);
}

static const pl_comm_ops group_ops = {
    .name = "group",
    .issue = group_issue,
    .work = pli_base_work,
    .progress = group_progress,
    .check_peers = group_progress,
    .query = group_query,
    .is_done = group_is_done,
    .wait = group_wait,
    .abort = group_abort,
    .record_activity = pli_base_record_activity,
    .set_failure_message = pli_base_set_failure_message,
    .forget = pli_base_forget,
    .leave = pli_base_leave,
    .destroy = group_destroy,
};

pl_status pli_group_comm_create(const pli_group_comm_options *options, pl_comm **out)
{
    pl_status st = PL_OK;
    group_comm *self = NULL;
    if (options->world_size < 1 || options->world_size > PLI_MAX_GROUP_RANKS ||
        options->rank < 0 || options->rank >= options->world_size)
        PL_FAIL(PL_EINVAL, "rank %d of world_size %d: a world has 1 to %d ranks",
                options->rank, options->world_size, PLI_MAX_GROUP_RANKS);
    if (pl_comm_world_size(options->base) != 1)
        PL_FAIL(PL_EINVAL, "a group comm's base has %d ranks: give a world of one",
                pl_comm_world_size(options->base));
    PL_TRY(pli_calloc(1, sizeof *self, "a group comm", &self));
    self->super = (pl_comm){.ops = &group_ops,
                            .base = options->base,
                            .arena = options->base->arena,
                            .rank = options->rank,
                            .world_size = options->world_size,
                            .arena_bytes = pl_comm_arena_bytes(options->base),
                            .host_bytes = pl_comm_arena_bytes(options->base),
                            .chunk_bytes = SIZE_MAX,
                            .is_group_comm = 1};
    self->callbacks = options->callbacks;
    *out = &self->super;
done:
    return st;
}
