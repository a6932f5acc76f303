/* fake_order.c - whether memory of torch's allocator is used and freed in order.
 *
 * Each stream has a clock, which counts its operations.  An operation knows, of each
 * clock, up to where it comes after that stream's work: what it waits for tells, and
 * what the host has waited for.  When it runs does not matter, so an order that is
 * missing is an error even if everything happened to be done in time.
 *
 * As in torch, a block that is freed goes to the next one who asks in its stream.  So
 * each use must come after the allocation, in the order of that stream; and that
 * stream, or one that the block was recorded on, must come after each use before the
 * free.
 */
#include "state.h"

typedef struct use {
    uint64_t time;
    const char *what;
    int stream_id;
} use;

typedef struct block {
    const char *memory;
    size_t n_bytes;
    int device;
    int lane; /* of the stream that it was allocated on */
    uint64_t born;
    use uses[FK_LANES]; /* the last in each stream */
} block;

static block **blocks; /* by address */
static size_t n_blocks, room;

static void join(fk_clock *clock, const fk_clock *other)
{
    for (int lane = 0; lane < FK_LANES; lane++)
        if (clock->times[lane] < other->times[lane])
            clock->times[lane] = other->times[lane];
}

void fk_clock_follow(fk_op *op, const fk_op *on)
{
    join(&op->clock, &on->clock);
}

void fk_clock_host_follows(const fk_op *op)
{
    join(&fk.host, &op->clock);
}

void fk_clock_host_follows_device(int device)
{
    fk.host.times[device] = fk.ticks[device];
    for (fk_object *it = fk.objects; it != NULL; it = it->next) {
        const CUstream stream = (CUstream)it;
        if (it->kind == FAKE_STREAMS && stream->device == device)
            fk.host.times[stream->lane] = fk.ticks[stream->lane];
    }
}

void fk_clock_reset(void)
{
    while (n_blocks > 0)
        free(blocks[--n_blocks]);
}

/* The index of the first block above the address. */
static size_t above(const char *at)
{
    size_t low = 0;
    size_t high = n_blocks;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (blocks[middle]->memory <= at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static block *find(const char *at)
{
    const size_t i = above(at);
    return i > 0 && at < blocks[i - 1]->memory + blocks[i - 1]->n_bytes ? blocks[i - 1]
                                                                        : NULL;
}

static void note_use(const fk_op *op, block *it)
{
    if (op->clock.times[it->lane] < it->born)
        fk_error("%s in stream %d uses %zu bytes of device %d, and does not wait for "
                 "their allocation in another stream",
                 op->what, op->stream_id, it->n_bytes, it->device);
    it->uses[op->lane] = (use){op->clock.times[op->lane], op->what, op->stream_id};
}

void fk_clock_submit(fk_op *op)
{
    const void *at = NULL;
    join(&op->clock, &fk.host);
    op->clock.times[op->lane] = ++fk.ticks[op->lane];
    for (size_t i = 0; n_blocks > 0 && fk_op_address(op, i, &at); i++) {
        block *it = find(at);
        if (it != NULL)
            note_use(op, it);
    }
}

/* Streams of other libraries are only numbers here, and stand for the default one. */
static CUstream stream_of(int64_t handle, int device)
{
    for (fk_object *it = fk.objects; it != NULL; it = it->next)
        if (it->kind == FAKE_STREAMS && !it->is_dead && (int64_t)(intptr_t)it == handle)
            return (CUstream)it;
    return &fk.contexts[device].legacy;
}

void fake_allocated(const void *memory, size_t n_bytes, int device, int64_t stream)
{
    (void)pthread_mutex_lock(&fk.lock);
    const size_t i = above(memory);
    block *it = fk_new(sizeof *it);
    it->memory = memory;
    it->n_bytes = n_bytes;
    it->device = device;
    it->lane = stream_of(stream, device)->lane;
    it->born = ++fk.ticks[it->lane];
    if (n_blocks == room) {
        room = 2 * room + 64;
        blocks = realloc(blocks, room * sizeof(block *));
        if (blocks == NULL)
            abort();
    }
    memmove(&blocks[i + 1], &blocks[i], (n_blocks - i) * sizeof(block *));
    blocks[i] = it;
    n_blocks++;
    (void)pthread_mutex_unlock(&fk.lock);
}

static void check_uses(const block *it, const fk_clock *after)
{
    for (int lane = 0; lane < FK_LANES; lane++)
        if (it->uses[lane].time > after->times[lane])
            fk_error("%zu bytes of device %d were freed, and no stream of theirs waits "
                     "for %s in stream %d",
                     it->n_bytes, it->device, it->uses[lane].what,
                     it->uses[lane].stream_id);
}

static int is_in_flight(const block *it)
{
    for (const fk_op *op = fk.first; op != NULL; op = op->next)
        if (fk_op_touches(op, it->memory, it->memory + it->n_bytes))
            return 1;
    return 0;
}

int fake_freed(const void *memory, const int64_t *streams, int n_streams)
{
    (void)pthread_mutex_lock(&fk.lock);
    block *it = find(memory);
    int is_kept = 0;
    if (it != NULL) {
        fk_clock after = fk.host;
        for (int i = 0; i < n_streams; i++) {
            fk_op *next = fk_stream_next(stream_of(streams[i], it->device));
            join(&after, &next->clock);
            fk_op_drop(next);
        }
        check_uses(it, &after);
        memset(it->uses, 0, sizeof it->uses); /* each is said once */
        is_kept = is_in_flight(it);
    }
    if (it != NULL && !is_kept) {
        const size_t i = above(memory) - 1;
        n_blocks--;
        memmove(&blocks[i], &blocks[i + 1], (n_blocks - i) * sizeof(block *));
        free(it);
    }
    (void)pthread_mutex_unlock(&fk.lock);
    return is_kept;
}
