/* device_group.c - each call enqueues waits, copies and kernels.
 *
 * A wait refers to its event as last recorded when the wait is enqueued, so one event a
 * member (`mark`) serves all orders.  A wait enqueued later needs a separate event.
 */
#include "device_group.h"

#include "backend/cuda.h"
#include "core/alloc.h"

enum {
    /* One more hop takes about 10 us, and a link takes about 0.1 ms for this many
     * bytes.  Smaller segments arrive sooner if member 0 sends them to all members. */
    PASSED_BYTES = 1 << 20,
    /* One member adds up shorter rows of gradients: each shard costs a dozen calls. */
    SHARD_BYTES = 8 << 20,
    PIECES_AT_ONCE = 1022, /* a launch takes as many */
};

/* ---- steps ---------------------------------------------------------------------- */

static pl_status record(const pli_group_member *member, pl_event *event,
                        pl_stream *stream)
{
    return member->backend->ops->event_record(member->backend, event, stream);
}

static pl_status wait_for(const pli_group_member *member, pl_event *event,
                          pl_stream *stream)
{
    return member->backend->ops->event_wait(member->backend, event, stream);
}

/* Makes `then` wait for all work that `first` holds. */
static pl_status order(const pli_group_member *of_first, pl_stream *first,
                       const pli_group_member *of_then, pl_stream *then)
{
    pl_status st = PL_OK;
    if (of_first->backend == of_then->backend && first == then)
        goto done;
    PL_TRY(record(of_first, of_first->mark, first));
    PL_TRY(wait_for(of_then, of_first->mark, then));
done:
    return st;
}

/* Memory of a member; a source of a copy is only read, so the cast is safe. */
static pli_cuda_place in(const pli_group_member *member, const void *memory)
{
    return (pli_cuda_place){member->backend, (void *)memory};
}

/* Copies on a stream of `by`. */
static pl_status copy_on(const pli_group_member *by, pl_stream *stream,
                         pli_cuda_place to, pli_cuda_place from, size_t n_bytes)
{
    return pli_cuda_copy_between(to, from, n_bytes, by->backend, stream);
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* ---- the end of a call ---------------------------------------------------------- */

/* Ends a call that also used `stream`, which belongs to `member`, and returns its
 * status.  A failed call leaves no work on the devices, so that memory may be freed. */
static pl_status end_call_on(pli_device_group *self, pl_status st, int member,
                             pl_stream *stream)
{
    const pli_group_member *own = &self->members[member];
    char message[512];
    if (st != PL_OK) {
        pli_text_print(message, sizeof message, "%s", pl_error_message());
        for (int k = 0; k < self->n_members; k++) {
            const pli_group_member *each = &self->members[k];
            (void)!each->backend->ops->synchronize(each->backend, each->side);
        }
        (void)!own->backend->ops->synchronize(own->backend, stream);
        (void)pli_fail(st, "%s", message);
    }
    (void)pthread_mutex_unlock(&self->lock);
    return st;
}

static pl_status end_call(pli_device_group *self, pl_status st)
{
    return end_call_on(self, st, 0, self->members[0].side);
}

/* ---- copies --------------------------------------------------------------------- */

pl_status pli_device_group_copy(pli_device_group *self, pl_stream *const *streams,
                                int source, int target, const pl_move *moves,
                                size_t n_moves)
{
    pl_status st = PL_OK;
    const pli_group_member *from = &self->members[source];
    const pli_group_member *to = &self->members[target];
    const int k = target != 0 ? target : source; /* the member whose stream copies */
    const int j = source + target - k;
    const pli_group_member *by = &self->members[k];
    const pli_group_member *other = &self->members[j];
    pl_stream *stream = streams[k];
    (void)pthread_mutex_lock(&self->lock);
    PL_TRY(order(other, streams[j], by, stream));
    if (from->backend == to->backend)
        PL_TRY(by->backend->ops->copy(by->backend, moves, n_moves, stream));
    for (size_t i = 0; from->backend != to->backend && i < n_moves; i++)
        PL_TRY(copy_on(by, stream, in(to, moves[i].to), in(from, moves[i].from),
                       moves[i].n_elems * pl_dtype_bytes(moves[i].dtype)));
    PL_TRY(order(by, stream, other, streams[j]));
done:
    return end_call_on(self, st, k, stream);
}

/* ---- broadcasts ----------------------------------------------------------------- */

/* Packs a segment into the ring's next slot, once all readers are done with the
 * slot. */
static pl_status pack(pli_device_group *self, const pli_segment *segment, pli_ring ring,
                      unsigned slot, char *block)
{
    pl_status st = PL_OK;
    enum { AT_ONCE = 64 };
    const pli_group_member *first = &self->members[0];
    pl_move moves[AT_ONCE];
    if (segment->n_bytes > ring.slot_bytes)
        PL_FAIL(PL_EINVAL, "a segment of %zu bytes does not fit into a slot of %zu",
                segment->n_bytes, ring.slot_bytes);
    for (int k = 1; k < self->n_members; k++)
        if (self->slot_readers[slot] >> k & 1)
            PL_TRY(wait_for(first, self->members[k].has_read[slot], first->side));
    self->slot_readers[slot] = 0;
    for (size_t i = 0; i < segment->n_moves; i += AT_ONCE) {
        const size_t n = least(segment->n_moves - i, AT_ONCE);
        for (size_t j = 0; j < n; j++) {
            moves[j] = segment->moves[i + j];
            moves[j].to = block + (uintptr_t)moves[j].to;
        }
        PL_TRY(first->backend->ops->copy(first->backend, moves, n, first->side));
    }
done:
    return st;
}

/* Whether one move covers the segment, which then needs no packing. */
static int is_one_block(const pli_segment *segment)
{
    const pl_move *only = segment->moves;
    return segment->n_moves == 1 && only->to == NULL &&
           only->n_elems * pl_dtype_bytes(only->dtype) == segment->n_bytes;
}

/* A part of a segment in transit. */
typedef struct load {
    const pli_segment *segment;
    const char *memory; /* on member 0 */
    int slot;           /* of the ring, if packed; or -1 */
    int is_passed;      /* from member to member */
    size_t offset, n_bytes;
} load;

static pl_status send_load(pli_device_group *self, const load *part)
{
    pl_status st = PL_OK;
    pli_group_member *first = &self->members[0];
    pli_group_member *from = first;
    const char *memory = part->memory;
    const int slot = part->slot;
    if (slot >= 0)
        PL_TRY(record(first, first->mark, first->side));
    for (int k = 1; k < self->n_members; k++) {
        pli_group_member *to = &self->members[k];
        if (part->segment->targets[k] == NULL)
            continue;
        char *target = (char *)part->segment->targets[k] + part->offset;
        if (from != first)
            PL_TRY(record(from, from->mark, from->side));
        if (from != first || slot >= 0)
            PL_TRY(wait_for(to, from->mark, to->side));
        PL_TRY(copy_on(to, to->side, in(to, target), in(from, memory), part->n_bytes));
        if (from == first && slot >= 0) {
            PL_TRY(record(to, to->has_read[slot], to->side));
            self->slot_readers[slot] |= UINT64_C(1) << k;
        }
        from->readers |= UINT64_C(1) << k;
        if (part->is_passed) {
            from = to;
            memory = target;
        }
    }
done:
    return st;
}

/* A segment that members pass on travels in parts of at most one slot: a member
 * receives a part while it sends the previous one. */
static pl_status send(pli_device_group *self, const pli_segment *segment, pli_ring ring)
{
    pl_status st = PL_OK;
    const int is_packed = !is_one_block(segment);
    const unsigned slot = self->n_sent % PLI_RING_SLOTS;
    char *packed = (char *)ring.memory + slot * ring.slot_bytes;
    const char *block = is_packed ? packed : segment->moves->from;
    load part = {.segment = segment,
                 .slot = is_packed ? (int)slot : -1,
                 .is_passed = segment->n_bytes >= self->passed_bytes};
    const size_t n_most =
        part.is_passed && ring.slot_bytes > 0 ? ring.slot_bytes : segment->n_bytes;
    if (is_packed)
        PL_TRY(pack(self, segment, ring, slot, packed));
    for (size_t at = 0; at < segment->n_bytes; at += part.n_bytes) {
        part.memory = block + at;
        part.offset = at;
        part.n_bytes = least(segment->n_bytes - at, n_most);
        PL_TRY(send_load(self, &part));
    }
    self->n_sent += (unsigned)is_packed;
done:
    return st;
}

/* A member's stream waits until the member has all blocks and others have read theirs
 * from it.  Member 0's waits for all reads, because its replica may write to parameters
 * and buffers. */
static pl_status end_broadcast(pli_device_group *self, pl_stream *const *streams)
{
    pl_status st = PL_OK;
    const pli_group_member *first = &self->members[0];
    PL_TRY(order(first, first->side, first, streams[0]));
    for (int k = 1; k < self->n_members; k++) {
        const pli_group_member *member = &self->members[k];
        PL_TRY(record(member, member->mark, member->side));
        PL_TRY(wait_for(first, member->mark, streams[0]));
    }
    for (int k = 1; k < self->n_members; k++) {
        const pli_group_member *member = &self->members[k];
        for (int j = k + 1; j < self->n_members; j++)
            if (member->readers >> j & 1)
                PL_TRY(wait_for(member, self->members[j].mark, member->side));
        PL_TRY(order(member, member->side, member, streams[k]));
    }
done:
    return st;
}

/* Sends all segments, within a call. */
static pl_status send_all(pli_device_group *self, pl_stream *const *streams,
                          const pli_segment *segments, size_t n_segments, pli_ring ring)
{
    pl_status st = PL_OK;
    const pli_group_member *first = &self->members[0];
    PL_TRY(record(first, first->mark, streams[0]));
    PL_TRY(wait_for(first, first->mark, first->side));
    for (int k = 1; k < self->n_members; k++) {
        pli_group_member *member = &self->members[k];
        PL_TRY(wait_for(member, first->mark, member->side));
        PL_TRY(order(member, streams[k], member, member->side));
        member->readers = 0;
    }
    for (size_t i = 0; i < n_segments; i++)
        PL_TRY(send(self, &segments[i], ring));
    PL_TRY(end_broadcast(self, streams));
done:
    return st;
}

/* ---- what members already have -------------------------------------------------- */

/* A broadcast skips parameters which members already have.  The host cannot detect
 * every write to a tensor since the last forward, because some leave no trace.  So the
 * devices compare.  Member 0 computes a checksum for each segment of the model's
 * tensors, and each other member for its own blocks.  The model's checksums travel to
 * the members; a kernel on each then reads, from member 0's memory, the segments whose
 * checksums differ.  A device reads memory 20 to 100 times as fast as a link carries
 * it, and the host goes on at once.
 *
 * If a kernel of a member that has a target cannot read member 0's memory, all segments
 * travel. */
typedef struct refresh {
    const pli_segment *segments;
    size_t n_segments;
    const pli_room *sums; /* NULL: compare nothing */
} refresh;

/* A position among the pieces of a member. */
typedef struct cursor {
    const refresh *of;
    int member;
    size_t segment, move;
} cursor;

/* Fills *out with the next pieces of the model's tensors and their copies, and returns
 * how many.  `to` is NULL for member 0, which has no copies. */
static size_t next_pieces(cursor *at, pli_piece *out)
{
    size_t n = 0;
    for (; at->segment < at->of->n_segments; at->segment++, at->move = 0) {
        const pli_segment *segment = &at->of->segments[at->segment];
        char *block = segment->targets[at->member];
        if (block == NULL && at->member != 0)
            continue;
        for (; at->move < segment->n_moves; at->move++) {
            const pl_move *move = &segment->moves[at->move];
            const size_t offset = (uintptr_t)move->to;
            if (n == PIECES_AT_ONCE)
                return n;
            out[n++] =
                (pli_piece){.to = block != NULL ? block + offset : NULL,
                            .from = move->from,
                            .n_bytes = move->n_elems * pl_dtype_bytes(move->dtype),
                            .offset = offset,
                            .segment = (unsigned)at->segment};
        }
    }
    return n;
}

/* Computes a member's own checksums, at the start of its memory for sums. */
static pl_status sum_up(pli_device_group *self, const refresh *all, int k)
{
    pl_status st = PL_OK;
    pli_piece pieces[PIECES_AT_ONCE];
    const pli_group_member *member = &self->members[k];
    uint64_t *sums = all->sums[k].memory;
    const pl_move zeros = {sums, NULL, PL_I64, all->n_segments};
    cursor at = {all, k, 0, 0};
    PL_TRY(member->backend->ops->copy(member->backend, &zeros, 1, member->side));
    for (size_t n; (n = next_pieces(&at, pieces)) > 0;) {
        for (size_t i = 0; k != 0 && i < n; i++)
            pieces[i].from = pieces[i].to;
        PL_TRY(pli_cuda_checksum(member->backend, pieces, n, sums, member->side));
    }
done:
    return st;
}

static pl_status take(pli_device_group *self, const refresh *all, int k)
{
    pl_status st = PL_OK;
    pli_piece pieces[PIECES_AT_ONCE];
    const pli_group_member *member = &self->members[k];
    const uint64_t *sums = all->sums[k].memory;
    cursor at = {all, k, 0, 0};
    for (size_t n; (n = next_pieces(&at, pieces)) > 0;)
        PL_TRY(pli_cuda_refresh(member->backend, pieces, n, sums,
                                sums + all->n_segments, member->side));
done:
    return st;
}

/* *out: whether all members that have a target can compare. */
static pl_status can_compare(const pli_device_group *self, const refresh *all, int *out)
{
    pl_status st = PL_OK;
    int is_elsewhere = 0;
    *out = all->sums != NULL;
    for (int k = 1; k < self->n_members; k++) {
        const pli_group_member *member = &self->members[k];
        is_elsewhere |= member->backend != self->members[0].backend;
        for (size_t i = 0; i < all->n_segments && *out; i++)
            *out = all->segments[i].targets[k] == NULL || member->reads_first;
    }
    for (size_t i = 0; i < all->n_segments && *out && is_elsewhere; i++)
        PL_TRY(pli_cuda_are_shared(self->members[0].backend, all->segments[i].moves,
                                   all->segments[i].n_moves, out));
done:
    return st;
}

static pl_status begin_refresh(pli_device_group *self, pl_stream *const *streams,
                               const refresh *all)
{
    pl_status st = PL_OK;
    const pli_group_member *first = &self->members[0];
    for (int k = 0; k < self->n_members; k++) {
        const size_t n_bytes = all->n_segments * sizeof(uint64_t) * (k == 0 ? 1 : 2);
        if (all->sums[k].n_bytes < n_bytes)
            PL_FAIL(PL_EINVAL, "%zu bytes of member %d have no room for %zu checksums",
                    all->sums[k].n_bytes, k, all->n_segments);
        PL_TRY(order(&self->members[k], streams[k], &self->members[k],
                     self->members[k].side));
    }
    PL_TRY(sum_up(self, all, 0));
    PL_TRY(record(first, first->mark, first->side));
done:
    return st;
}

static pl_status refresh_member(pli_device_group *self, pl_stream *const *streams,
                                const refresh *all, int k)
{
    pl_status st = PL_OK;
    const pli_group_member *first = &self->members[0];
    const pli_group_member *member = &self->members[k];
    uint64_t *wanted = (uint64_t *)all->sums[k].memory + all->n_segments;
    PL_TRY(sum_up(self, all, k));
    PL_TRY(wait_for(member, first->mark, member->side));
    PL_TRY(copy_on(member, member->side, in(member, wanted),
                   in(first, all->sums[0].memory), all->n_segments * sizeof *wanted));
    PL_TRY(take(self, all, k));
    PL_TRY(order(member, member->side, member, streams[k]));
    PL_TRY(wait_for(first, member->mark, streams[0]));
done:
    return st;
}

pl_status pli_device_group_broadcast(pli_device_group *self, pl_stream *const *streams,
                                     const pli_segment *segments, size_t n_segments,
                                     pli_ring ring, const pli_room *sums)
{
    pl_status st = PL_OK;
    const refresh all = {segments, n_segments, sums};
    int can = 0;
    (void)pthread_mutex_lock(&self->lock);
    PL_TRY(can_compare(self, &all, &can));
    if (!can) {
        PL_TRY(send_all(self, streams, segments, n_segments, ring));
        goto done;
    }
    PL_TRY(begin_refresh(self, streams, &all));
    for (int k = 1; k < self->n_members; k++)
        PL_TRY(refresh_member(self, streams, &all, k));
done:
    return end_call(self, st);
}

/* ---- sums of gradients ---------------------------------------------------------- */

pl_status pli_device_group_fence(pli_device_group *self, pl_stream *const *streams)
{
    pl_status st = PL_OK;
    const pli_group_member *first = &self->members[0];
    (void)pthread_mutex_lock(&self->lock);
    PL_TRY(record(first, first->mark, streams[0]));
    for (int k = 1; k < self->n_members; k++)
        PL_TRY(wait_for(&self->members[k], first->mark, self->members[k].side));
done:
    return end_call(self, st);
}

pl_status pli_device_group_settle(pli_device_group *self, pl_stream *const *streams)
{
    pl_status st = PL_OK;
    (void)pthread_mutex_lock(&self->lock);
    for (int k = 1; k < self->n_members; k++) {
        const pli_group_member *member = &self->members[k];
        PL_TRY(record(member, member->mark, member->side));
        for (int j = 0; j < self->n_members; j++)
            PL_TRY(wait_for(&self->members[j], member->mark, streams[j]));
    }
done:
    return end_call(self, st);
}

/* The adder copies the rows to its room, adds them up, and copies the sum to member 0,
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
 * link has carried the rows. */
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

static const pli_group_member *member_of_row(const addition *adding, int row)
{
    return &adding->of->group->members[adding->rows[row]];
}

static int adder_of_shard(const addition *adding, int shard)
{
    return (adding->first + shard) % adding->n_rows;
}

/* How many members add up rows of n_bytes; one, if there is one row. */
static int count_shards(const addition *adding, size_t n_bytes)
{
    const size_t n =
        least(n_bytes / adding->of->group->shard_bytes, (size_t)adding->n_rows);
    return n > 0 ? (int)n : 1;
}

static pl_status add_shard(const addition *adding, int shard, size_t offset,
                           size_t n_bytes)
{
    pl_status st = PL_OK;
    const int adder = adder_of_shard(adding, shard);
    const pli_group_member *first = &adding->of->group->members[0];
    const pli_group_member *own = member_of_row(adding, adder);
    char *memory = adding->rooms[adding->rows[adder]].memory;
    const size_t stride = pli_line_up(n_bytes);
    const pl_rank_ranges ranges = {.to = memory,
                                   .from = memory,
                                   .stride_bytes = stride,
                                   .n_ranks = adding->n_rows,
                                   .dtype = adding->to->dtype,
                                   .reduction = PL_SUM,
                                   .n_elems =
                                       n_bytes / pl_dtype_bytes(adding->to->dtype)};
    for (int turn = 0; turn < adding->n_rows; turn++) {
        const int row = (adder + turn) % adding->n_rows;
        PL_TRY(copy_on(
            own, own->side, in(own, memory + (size_t)row * stride),
            in(member_of_row(adding, row),
               (const char *)adding->of->members[adding->rows[row]].row + offset),
            n_bytes));
    }
    PL_TRY(own->backend->ops->sum(own->backend, &ranges, own->side));
    PL_TRY(copy_on(own, own->side, in(first, (char *)adding->to->to + offset),
                   in(own, memory), n_bytes));
done:
    return st;
}

/* Adds the rows piece by piece, each as large as the rooms allow. */
static pl_status add_rows(const addition *adding)
{
    pl_status st = PL_OK;
    for (size_t at = 0; at < adding->n_bytes;) {
        const size_t n_shards = (size_t)count_shards(adding, adding->n_bytes - at);
        const size_t n_bytes =
            least(adding->n_bytes - at, n_shards * adding->row_bytes);
        const size_t shard =
            ((n_bytes - 1) / n_shards / PL_CACHE_LINE + 1) * PL_CACHE_LINE;
        for (size_t i = 0; i * shard < n_bytes; i++)
            PL_TRY(add_shard(adding, (int)i, at + i * shard,
                             least(shard, n_bytes - i * shard)));
        at += n_bytes;
    }
done:
    return st;
}

static pl_status copy_row(const addition *adding)
{
    const pli_group_member *own = member_of_row(adding, 0);
    return copy_on(own, own->side, in(&adding->of->group->members[0], adding->to->to),
                   in(own, adding->of->members[adding->rows[0]].row), adding->n_bytes);
}

/* Sets adding->row_bytes, or fails if one of the first n adders has no room. */
static pl_status measure_rooms(addition *adding, int n)
{
    pl_status st = PL_OK;
    adding->row_bytes = SIZE_MAX / PLI_MOST_MEMBERS / PL_CACHE_LINE * PL_CACHE_LINE;
    for (int i = 0; i < n; i++) {
        const int member = adding->rows[adder_of_shard(adding, i)];
        const pli_room *room = &adding->rooms[member];
        const size_t row_bytes =
            room->n_bytes / (size_t)adding->n_rows / PL_CACHE_LINE * PL_CACHE_LINE;
        if (room->memory == NULL || row_bytes == 0)
            PL_FAIL(PL_EINVAL, "%zu bytes of member %d have no room for %d rows",
                    room->memory == NULL ? 0 : room->n_bytes, member, adding->n_rows);
        adding->row_bytes = least(adding->row_bytes, row_bytes);
    }
done:
    return st;
}

static pl_status begin_locked(pli_gradient_sum *self, addition *adding)
{
    pl_status st = PL_OK;
    const int is_copy = adding->n_rows == 1;
    const int n_adders = count_shards(adding, adding->n_bytes);
    adding->first = (int)(self->group->n_sums++ % (unsigned)adding->n_rows);
    if (!is_copy)
        PL_TRY(measure_rooms(adding, n_adders));
    for (int i = 0; i < n_adders; i++) {
        const pli_group_member *own = member_of_row(adding, adder_of_shard(adding, i));
        for (int row = 0; row < adding->n_rows; row++)
            PL_TRY(wait_for(own, self->members[adding->rows[row]].packed, own->side));
    }
    PL_TRY(is_copy ? copy_row(adding) : add_rows(adding));
    for (int i = 0; i < n_adders; i++) {
        const int member = adding->rows[adder_of_shard(adding, i)];
        const pli_group_member *own = &self->group->members[member];
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
    addition adding = {.of = self,
                       .to = to,
                       .n_bytes = to->n_elems * pl_dtype_bytes(to->dtype),
                       .rooms = rooms};
    for (int k = 1; k < self->group->n_members; k++)
        if (self->members[k].row != NULL)
            adding.rows[adding.n_rows++] = k;
    if (adding.n_rows == 0)
        PL_FAIL(PL_EINVAL, "a sum of gradients that no member has packed");
    (void)pthread_mutex_lock(&self->group->lock);
    st = end_call(self->group, begin_locked(self, &adding));
    for (int i = 0; i < adding.n_rows; i++)
        self->members[adding.rows[i]].row = NULL;
done:
    return st;
}

pl_status pli_gradient_sum_end(pli_gradient_sum *sum, pl_stream *stream)
{
    pl_status st = PL_OK;
    pli_device_group *self = sum->group;
    (void)pthread_mutex_lock(&self->lock);
    for (int k = 1; k < self->n_members; k++)
        if (sum->adders >> k & 1)
            PL_TRY(wait_for(&self->members[0], sum->members[k].added, stream));
    sum->adders = 0;
done:
    return end_call(self, st);
}

pl_status pli_gradient_sum_pack(pli_gradient_sum *sum, int member, pl_stream *stream,
                                const pl_move *moves, size_t n_moves, const void *row)
{
    pl_status st = PL_OK;
    const pli_device_group *self = sum->group;
    const pli_group_member *own = &self->members[member];
    PL_TRY(own->backend->ops->copy(own->backend, moves, n_moves, stream));
    PL_TRY(record(own, sum->members[member].packed, stream));
    sum->members[member].row = row;
done:
    return st;
}

/* ---- life ----------------------------------------------------------------------- */

pl_status pli_device_group_create(pl_backend *const *members, int n_members,
                                  pli_device_group **out)
{
    pl_status st = PL_OK;
    pli_device_group *self = NULL;
    int ignored;
    if (n_members < 1 || n_members > PLI_MOST_MEMBERS)
        PL_FAIL(PL_EINVAL, "a group of %d devices: give 1 to %d", n_members,
                (int)PLI_MOST_MEMBERS);
    PL_TRY(pli_calloc(1, sizeof *self + (size_t)n_members * sizeof(pli_group_member),
                      "a group of devices", &self));
    (void)pthread_mutex_init(&self->lock, NULL);
    self->n_members = n_members;
    self->passed_bytes = PASSED_BYTES;
    self->shard_bytes = SHARD_BYTES;
    for (int k = 0; k < n_members; k++) {
        pli_group_member *member = &self->members[k];
        pl_backend *backend = members[k];
        pli_cuda_backend_retain(backend);
        member->backend = backend;
        member->side = pli_cuda_side_stream(backend);
        PL_TRY(backend->ops->event_create(backend, &member->mark));
        for (int i = 0; i < PLI_RING_SLOTS; i++)
            PL_TRY(backend->ops->event_create(backend, &member->has_read[i]));
    }
    /* Many devices have access to eight peers only: member 0 comes first. */
    for (int j = 0; j < n_members; j++)
        for (int k = j + 1; k < n_members; k++) {
            int *can_read = j == 0 ? &self->members[k].reads_first : &ignored;
            PL_TRY(pli_cuda_join_peers(members[j], members[k], can_read));
        }
    *out = self;
    self = NULL;
done:
    pli_device_group_destroy(self);
    return st;
}

int pli_device_group_reads_first(const pli_device_group *self, int member)
{
    return self->members[member].reads_first;
}

void pli_device_group_destroy(pli_device_group *self)
{
    if (self == NULL)
        return;
    for (int k = 0; k < self->n_members; k++) {
        const pli_group_member *member = &self->members[k];
        if (member->backend == NULL)
            continue;
        member->backend->ops->event_destroy(member->backend, member->mark);
        for (int i = 0; i < PLI_RING_SLOTS; i++)
            member->backend->ops->event_destroy(member->backend, member->has_read[i]);
        pli_backend_destroy(member->backend);
    }
    (void)pthread_mutex_destroy(&self->lock);
    pli_free(self);
}

pl_status pli_gradient_sum_create(pli_device_group *group, pli_gradient_sum **out)
{
    pl_status st = PL_OK;
    pli_gradient_sum *self = NULL;
    PL_TRY(pli_calloc(1, sizeof *self + (size_t)group->n_members * sizeof(sum_member),
                      "a sum of gradients", &self));
    self->group = group;
    for (int k = 1; k < group->n_members; k++) {
        pl_backend *backend = group->members[k].backend;
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
        pl_backend *backend = self->group->members[k].backend;
        backend->ops->event_destroy(backend, self->members[k].packed);
        backend->ops->event_destroy(backend, self->members[k].added);
    }
    pli_free(self);
}
