/* broadcast_many.c - packs ranges into loads of the arena's size, and unpacks them. */
#include "comm/broadcast_many.h"

#include <string.h>

#include "core/alloc.h"

typedef enum arena_direction { TO_ARENA, FROM_ARENA, PAST } arena_direction;

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void move(pli_broadcast_many *self, void *to, const void *from, size_t n_bytes)
{
    if (!self->is_on_device)
        memcpy(to, from, n_bytes);
    else
        self->moves[self->n_moves++] =
            (pl_move){.to = to, .from = from, .dtype = PL_U8, .n_elems = n_bytes};
}

/* Advances the cursor through the current load; moves its bytes, or lists the moves. */
static void move_load(pli_broadcast_many *self, pli_range_cursor *cursor,
                      arena_direction way)
{
    char *const arena = self->is_on_device
                            ? pli_comm_memory(self->comm, self->op.offset_bytes)
                            : self->comm->arena;
    self->n_moves = 0;
    for (size_t n_moved = 0; n_moved < self->op.n_elems;) {
        const pli_byte_range *range = &self->ranges[cursor->range];
        const size_t n_rest = range->n_bytes - cursor->offset;
        const size_t n = least(n_rest, self->op.n_elems - n_moved);
        char *data = (char *)range->data + cursor->offset;
        if (n > 0 && way == TO_ARENA)
            move(self, arena + n_moved, data, n);
        else if (n > 0 && way == FROM_ARENA)
            move(self, data, arena + n_moved, n);
        n_moved += n;
        cursor->offset += n;
        if (n == n_rest)
            *cursor = (pli_range_cursor){.range = cursor->range + 1};
    }
}

static pl_status launch_moves(pli_broadcast_many *self)
{
    pl_backend *backend = self->comm->backend;
    if (self->n_moves == 0)
        return PL_OK;
    return backend->ops->copy(backend, self->moves, self->n_moves, self->stream);
}

pl_status pli_broadcast_many_begin(pli_broadcast_many *self)
{
    pl_status st = PL_OK;
    pl_comm *comm = self->comm;
    self->next = (pli_range_cursor){0};
    self->n_left = 0;
    self->ready = NULL;
    self->moves = NULL;
    for (size_t i = 0; i < self->n_ranges; i++)
        self->n_left += self->ranges[i].n_bytes;
    self->op = (pl_op){.kind = PL_BROADCAST,
                       .dtype = PL_U8,
                       .root = self->root,
                       .offset_bytes = self->is_on_device ? comm->host_bytes : 0};
    self->most_bytes =
        self->is_on_device ? comm->arena_bytes - comm->host_bytes : comm->host_bytes;
    if (self->n_left > 0 && self->most_bytes == 0)
        PL_FAIL(PL_EINVAL, "an empty arena cannot carry a broadcast");
    if (!self->is_on_device)
        goto done;
    PL_TRY(pli_calloc(self->n_ranges, sizeof *self->moves, "moves", &self->moves));
    PL_TRY(comm->backend->ops->event_create(comm->backend, &self->ready));
done:
    return st;
}

pl_status pli_broadcast_many_issue(pli_broadcast_many *self, pl_ticket *out)
{
    pl_status st = PL_OK;
    pl_comm *comm = self->comm;
    const pli_order order = {.ready = self->ready};
    pli_range_cursor cursor = self->next;
    /* If a group's collectives do nothing, each rank must keep its own data. */
    const int gives = comm->rank == self->root || pli_comm_is_group_comm(comm);
    self->op.n_elems = least(self->n_left, self->most_bytes);
    move_load(self, &cursor, gives ? TO_ARENA : PAST);
    if (self->is_on_device) {
        PL_TRY(launch_moves(self));
        PL_TRY(
            comm->backend->ops->event_record(comm->backend, self->ready, self->stream));
    }
    PL_TRY(pli_comm_issue_ordered(comm, &self->op, &order, out));
done:
    return st;
}

pl_status pli_broadcast_many_receive(pli_broadcast_many *self)
{
    pl_status st = PL_OK;
    pl_comm *comm = self->comm;
    move_load(self, &self->next, comm->rank == self->root ? PAST : FROM_ARENA);
    if (self->is_on_device) {
        PL_TRY(pli_comm_order(comm, self->stream));
        PL_TRY(launch_moves(self));
    }
    self->n_left -= self->op.n_elems;
done:
    return st;
}

void pli_broadcast_many_end(pli_broadcast_many *self)
{
    if (self->ready != NULL)
        self->comm->backend->ops->event_destroy(self->comm->backend, self->ready);
    pli_free(self->moves);
}
