/* gradient_sum.c - sums rows of gradients on the members that packed them.
 *
 * The adder copies the rows to its room, adds them up, and copies the sum to member 0,
 * which has the least memory to spare.  Members take turns, so that all links are used.
 * Long rows are cut into shards, one a member:
 *
 *                      shard 0   shard 1   shard 2
 *     member of row 0   adds      sends     sends
 *     member of row 1   sends     adds      sends
 *     member of row 2   sends     sends     adds
 *
 * Each adder begins with its own row, so only one of them reads a row at a time.  Its
 * copies and its sum run in order on its side stream, so its room needs no events.
 * Reading the rows in place would hold multiprocessors, which backward needs, until the
 * link has carried the rows.
 */
#include "core/alloc.h"
#include "device_group_state.h"

typedef struct sum_member {
    const void *row;  /* packed but not summed yet; or NULL */
    pl_event *packed; /* after the row is packed */
    pl_event *added;  /* after this member's shard is added, if it has one */
} sum_member;

struct pli_gradient_sum {
    pli_device_group *group;
    uint64_t adders; /* bits: members whose `added` end() must wait for */
    sum_member members[];
};

/* ---- a sum ---------------------------------------------------------------------- */

typedef struct addition {
    const pli_gradient_sum *of;
    int rows[PLI_MOST_MEMBERS]; /* the member of each */
    int n_rows;
    int first; /* the row whose member adds the first shard */
    const pl_move *to;
    const pli_room *rooms;
    size_t n_bytes;
    size_t row_bytes; /* of each row that fit into all rooms */
} addition;

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static const pli_group_member *member_of_row(const addition *it, int row)
{
    return &it->of->group->members[it->rows[row]];
}

static int adder_of_shard(const addition *it, int shard)
{
    return (it->first + shard) % it->n_rows;
}

/* How many members add up rows of n_bytes. */
static int count_shards(const addition *it, size_t n_bytes)
{
    const size_t n = least(n_bytes / it->of->group->shard_bytes, (size_t)it->n_rows);
    return n > 0 ? (int)n : 1;
}

static pl_status add_shard(const addition *it, int shard, size_t offset, size_t n_bytes)
{
    pl_status st = PL_OK;
    const int adder = adder_of_shard(it, shard);
    const pli_group_member *const first = &it->of->group->members[0];
    const pli_group_member *const own = member_of_row(it, adder);
    char *const memory = it->rooms[it->rows[adder]].memory;
    const size_t stride = (n_bytes + PL_CACHE_LINE - 1) / PL_CACHE_LINE * PL_CACHE_LINE;
    const pl_rank_ranges ranges = {.to = memory,
                                   .from = memory,
                                   .stride_bytes = stride,
                                   .n_ranks = it->n_rows,
                                   .dtype = it->to->dtype,
                                   .reduction = PL_SUM,
                                   .n_elems = n_bytes / pl_dtype_bytes(it->to->dtype)};
    for (int turn = 0; turn < it->n_rows; turn++) {
        const int row = (adder + turn) % it->n_rows;
        PL_TRY(copy_on(own, own->side, in(own, memory + (size_t)row * stride),
                       in(member_of_row(it, row),
                          (const char *)it->of->members[it->rows[row]].row + offset),
                       n_bytes));
    }
    PL_TRY(own->backend->ops->sum(own->backend, &ranges, own->side));
    PL_TRY(copy_on(own, own->side, in(first, (char *)it->to->to + offset),
                   in(own, memory), n_bytes));
done:
    return st;
}

/* Adds the rows piece by piece, each as large as the rooms allow. */
static pl_status add_rows(const addition *it)
{
    pl_status st = PL_OK;
    for (size_t at = 0; at < it->n_bytes;) {
        const size_t n_shards = (size_t)count_shards(it, it->n_bytes - at);
        const size_t n_bytes = least(it->n_bytes - at, n_shards * it->row_bytes);
        const size_t shard =
            ((n_bytes - 1) / n_shards / PL_CACHE_LINE + 1) * PL_CACHE_LINE;
        for (size_t i = 0; i * shard < n_bytes; i++)
            PL_TRY(add_shard(it, (int)i, at + i * shard,
                             least(shard, n_bytes - i * shard)));
        at += n_bytes;
    }
done:
    return st;
}

static pl_status copy_row(const addition *it)
{
    const pli_group_member *const own = member_of_row(it, 0);
    return copy_on(own, own->side, in(&it->of->group->members[0], it->to->to),
                   in(own, it->of->members[it->rows[0]].row), it->n_bytes);
}

/* Sets it->row_bytes, or fails if one of the first n adders has no room. */
static pl_status measure_rooms(addition *it, int n)
{
    pl_status st = PL_OK;
    it->row_bytes = SIZE_MAX / PLI_MOST_MEMBERS / PL_CACHE_LINE * PL_CACHE_LINE;
    for (int i = 0; i < n; i++) {
        const int member = it->rows[adder_of_shard(it, i)];
        const pli_room *const room = &it->rooms[member];
        const size_t row_bytes =
            room->n_bytes / (size_t)it->n_rows / PL_CACHE_LINE * PL_CACHE_LINE;
        if (room->memory == NULL || row_bytes == 0)
            PL_FAIL(PL_EINVAL, "%zu bytes of member %d have no room for %d rows",
                    room->memory == NULL ? 0 : room->n_bytes, member, it->n_rows);
        it->row_bytes = least(it->row_bytes, row_bytes);
    }
done:
    return st;
}

static pl_status wait_for_rows(const addition *it, const pli_group_member *adder)
{
    pl_status st = PL_OK;
    for (int row = 0; row < it->n_rows; row++)
        PL_TRY(wait_for(adder, it->of->members[it->rows[row]].packed, adder->side));
done:
    return st;
}

static pl_status begin_locked(pli_gradient_sum *self, addition *it)
{
    pl_status st = PL_OK;
    const int is_copy = it->n_rows == 1;
    const int n_adders = is_copy ? 1 : count_shards(it, it->n_bytes);
    it->first = (int)(self->group->n_sums++ % (unsigned)it->n_rows);
    if (!is_copy)
        PL_TRY(measure_rooms(it, n_adders));
    for (int i = 0; i < n_adders; i++)
        PL_TRY(wait_for_rows(it, member_of_row(it, adder_of_shard(it, i))));
    PL_TRY(is_copy ? copy_row(it) : add_rows(it));
    for (int i = 0; i < n_adders; i++) {
        const int member = it->rows[adder_of_shard(it, i)];
        const pli_group_member *const own = &self->group->members[member];
        PL_TRY(record(own, self->members[member].added, own->side));
        self->adders |= UINT64_C(1) << member;
    }
done:
    return st;
}

pl_status pli_gradient_sum_begin(pli_gradient_sum *self, const pl_move *to,
                                 const pli_room *rooms)
{
    pl_status st = PL_OK;
    addition it = {.of = self,
                   .to = to,
                   .n_bytes = to->n_elems * pl_dtype_bytes(to->dtype),
                   .rooms = rooms};
    for (int k = 1; k < self->group->n_members; k++)
        if (self->members[k].row != NULL)
            it.rows[it.n_rows++] = k;
    if (it.n_rows == 0)
        PL_FAIL(PL_EINVAL, "a sum of gradients that no member has packed");
    (void)pthread_mutex_lock(&self->group->lock);
    st = pli_device_group_end_call(self->group, begin_locked(self, &it));
    for (int i = 0; i < it.n_rows; i++)
        self->members[it.rows[i]].row = NULL;
done:
    return st;
}

static pl_status end_locked(pli_gradient_sum *self, pl_stream *stream)
{
    pl_status st = PL_OK;
    for (int k = 1; k < self->group->n_members; k++)
        if (self->adders >> k & 1)
            PL_TRY(wait_for(&self->group->members[0], self->members[k].added, stream));
    self->adders = 0;
done:
    return st;
}

pl_status pli_gradient_sum_end(pli_gradient_sum *self, pl_stream *stream)
{
    (void)pthread_mutex_lock(&self->group->lock);
    return pli_device_group_end_call(self->group, end_locked(self, stream));
}

/* ---- rows ----------------------------------------------------------------------- */

pl_status pli_gradient_sum_pack(pli_gradient_sum *self, int member, pl_stream *stream,
                                const pl_move *moves, size_t n_moves, const void *row)
{
    pl_status st = PL_OK;
    const pli_group_member *const own = &self->group->members[member];
    PL_TRY(own->backend->ops->copy(own->backend, moves, n_moves, stream));
    PL_TRY(record(own, self->members[member].packed, stream));
    self->members[member].row = row;
done:
    return st;
}

/* ---- life ----------------------------------------------------------------------- */

pl_status pli_gradient_sum_create(pli_device_group *group, pli_gradient_sum **out)
{
    pl_status st = PL_OK;
    pli_gradient_sum *self = NULL;
    PL_TRY(pli_calloc(1, sizeof *self + (size_t)group->n_members * sizeof(sum_member),
                      "a sum of gradients", &self));
    self->group = group;
    for (int k = 1; k < group->n_members; k++) {
        pl_backend *const backend = group->members[k].backend;
        PL_TRY(backend->ops->event_create(backend, &self->members[k].packed));
        PL_TRY(backend->ops->event_create(backend, &self->members[k].added));
    }
    *out = self;
    self = NULL;
done:
    pli_gradient_sum_destroy(self);
    return st;
}

void pli_gradient_sum_destroy(pli_gradient_sum *self)
{
    if (self == NULL)
        return;
    for (int k = 1; k < self->group->n_members; k++) {
        pl_backend *const backend = self->group->members[k].backend;
        backend->ops->event_destroy(backend, self->members[k].packed);
        backend->ops->event_destroy(backend, self->members[k].added);
    }
    pli_free(self);
}
