/* device_group_sum.c - gradients, added up by those who have them.
 *
 * The rows' members share the work: the one of row i brings shard i of every row to its
 * own memory, adds these up, and copies the sum to its place on member 0.
 *
 *                      shard 0   shard 1   shard 2
 *     member of row 0   adds      sends     sends
 *     member of row 1   sends     adds      sends
 *     member of row 2   sends     sends     adds
 *
 * So each member sends as much as one row, and receives less, and member 0 receives
 * one; it would receive all if it added them up itself.  Each begins with another row,
 * its own: at any time a row is read by one of them.  What comes to a member, the sum
 * and what leaves it are in order on its side stream, so its room needs no events.
 *
 * A short shard would take longer to enqueue than to travel.  So short rows are cut
 * into fewer, and the shortest are added up by the first row's member alone: by that of
 * a row in any case, so that member 0, whose memory is scarcest, needs no room.
 */
#include "device_group_state.h"

typedef struct addition {
    const pli_row *rows;
    int n_rows;
    const pl_move *to;
    size_t n_bytes;
    const pli_room *rooms;
    size_t row_bytes; /* of each row, that there is room for */
} addition;

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* How many members add up rows of so many bytes. */
static int count_shards(const pli_device_group *self, const addition *it,
                        size_t n_bytes)
{
    const size_t n = least(n_bytes / self->shard_bytes, (size_t)it->n_rows);
    return n > 0 ? (int)n : 1;
}

static const pli_group_member *member_of_row(const pli_device_group *self,
                                             const addition *it, int row)
{
    return &self->members[it->rows[row].member];
}

/* What the member of row i does. */
static pl_status add_shard(pli_device_group *self, const addition *it, int i,
                           size_t offset, size_t n_bytes)
{
    pl_status st = PL_OK;
    const pli_group_member *const first = &self->members[0];
    const pli_group_member *const own = member_of_row(self, it, i);
    char *const memory = it->rooms[it->rows[i].member].memory;
    const size_t stride = (n_bytes + PL_CACHE_LINE - 1) / PL_CACHE_LINE * PL_CACHE_LINE;
    const pl_rank_ranges ranges = {.to = memory,
                                   .from = memory,
                                   .stride_bytes = stride,
                                   .n_ranks = it->n_rows,
                                   .dtype = it->to->dtype,
                                   .reduction = PL_SUM,
                                   .n_elems = n_bytes / pl_dtype_bytes(it->to->dtype)};
    for (int turn = 0; turn < it->n_rows; turn++) {
        const int row = (i + turn) % it->n_rows;
        PL_TRY(copy_on(own, own, memory + (size_t)row * stride,
                       member_of_row(self, it, row),
                       (const char *)it->rows[row].memory + offset, n_bytes));
    }
    PL_TRY(own->backend->ops->sum(own->backend, &ranges, own->side));
    PL_TRY(wait_for(own, first->mark, own->side)); /* which has allocated `to` */
    PL_TRY(copy_on(own, first, (char *)it->to->to + offset, own, memory, n_bytes));
done:
    return st;
}

static pl_status add_rows(pli_device_group *self, const addition *it)
{
    pl_status st = PL_OK;
    for (size_t at = 0; at < it->n_bytes;) {
        const size_t n_shards = (size_t)count_shards(self, it, it->n_bytes - at);
        const size_t n_bytes = least(it->n_bytes - at, n_shards * it->row_bytes);
        const size_t shard =
            ((n_bytes - 1) / n_shards / PL_CACHE_LINE + 1) * PL_CACHE_LINE;
        for (size_t i = 0; i * shard < n_bytes; i++)
            PL_TRY(add_shard(self, it, (int)i, at + i * shard,
                             least(shard, n_bytes - i * shard)));
        at += n_bytes;
    }
done:
    return st;
}

static pl_status copy_row(pli_device_group *self, const addition *it)
{
    pl_status st = PL_OK;
    const pli_group_member *const first = &self->members[0];
    const pli_group_member *const own = member_of_row(self, it, 0);
    PL_TRY(wait_for(own, first->mark, own->side)); /* which has allocated `to` */
    PL_TRY(copy_on(own, first, it->to->to, own, it->rows[0].memory, it->n_bytes));
done:
    return st;
}

/* All who add come behind what the rows' members have.  Only the places of sums need
 * member 0. */
static pl_status begin(pli_device_group *self, pl_stream *const *streams,
                       const addition *it, int n_adding)
{
    pl_status st = PL_OK;
    const pli_row *const rows = it->rows;
    PL_TRY(record(&self->members[0], self->members[0].mark, streams[0]));
    for (int row = 0; row < it->n_rows; row++) {
        const pli_group_member *const source = member_of_row(self, it, row);
        PL_TRY(record(source, source->mark, streams[rows[row].member]));
        for (int i = 0; i < n_adding; i++) {
            const pli_group_member *const own = member_of_row(self, it, i);
            PL_TRY(wait_for(own, source->mark, own->side));
        }
    }
done:
    return st;
}

/* Rows are read, and the sum is there, before anybody goes on. */
static pl_status end(pli_device_group *self, pl_stream *const *streams,
                     const addition *it, int n_adding)
{
    pl_status st = PL_OK;
    const pli_row *const rows = it->rows;
    for (int i = 0; i < n_adding; i++) {
        const pli_group_member *const own = member_of_row(self, it, i);
        PL_TRY(record(own, own->mark, own->side));
        PL_TRY(wait_for(&self->members[0], own->mark, streams[0]));
        for (int row = 0; row < it->n_rows; row++)
            PL_TRY(wait_for(member_of_row(self, it, row), own->mark,
                            streams[rows[row].member]));
    }
done:
    return st;
}

/* The first n rows' members have room for a piece of each. */
static pl_status measure_rooms(addition *it, int n)
{
    pl_status st = PL_OK;
    it->row_bytes = SIZE_MAX / PL_MAX_RANKS / PL_CACHE_LINE * PL_CACHE_LINE;
    for (int i = 0; i < n; i++) {
        const pli_room *const room = &it->rooms[it->rows[i].member];
        const size_t row_bytes =
            room->n_bytes / (size_t)it->n_rows / PL_CACHE_LINE * PL_CACHE_LINE;
        if (room->memory == NULL || row_bytes == 0)
            PL_FAIL(PL_EINVAL, "%zu bytes of member %d have no room for %d rows",
                    room->memory == NULL ? 0 : room->n_bytes, it->rows[i].member,
                    it->n_rows);
        it->row_bytes = least(it->row_bytes, row_bytes);
    }
done:
    return st;
}

static pl_status sum_locked(pli_device_group *self, pl_stream *const *streams,
                            addition *it)
{
    pl_status st = PL_OK;
    const int is_copy = it->n_rows == 1;
    const int n_adding = is_copy ? 1 : count_shards(self, it, it->n_bytes);
    if (!is_copy)
        PL_TRY(measure_rooms(it, n_adding));
    PL_TRY(begin(self, streams, it, n_adding));
    PL_TRY(is_copy ? copy_row(self, it) : add_rows(self, it));
    PL_TRY(end(self, streams, it, n_adding));
done:
    return st;
}

pl_status pli_device_group_sum(pli_device_group *self, pl_stream *const *streams,
                               const pli_row *rows, int n_rows, const pl_move *to,
                               const pli_room *rooms)
{
    pl_status st = PL_OK;
    addition it = {.rows = rows,
                   .n_rows = n_rows,
                   .to = to,
                   .n_bytes = to->n_elems * pl_dtype_bytes(to->dtype),
                   .rooms = rooms};
    if (n_rows < 1 || n_rows >= self->n_members)
        PL_FAIL(PL_EINVAL, "%d rows of gradients: give 1 to %d", n_rows,
                self->n_members - 1);
    (void)pthread_mutex_lock(&self->lock);
    st = pli_device_group_end_call(self, sum_locked(self, streams, &it));
done:
    return st;
}
