/* fake_nccl_task.c - one collective, or half of a pair: post, take, reduce. */
#include "nccl_state.h"

size_t fk_dtype_bytes(ncclDataType_t dtype)
{
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return (unsigned)dtype < sizeof bytes / sizeof bytes[0] ? bytes[dtype] : 0;
}

static int is_pair(const fk_task *task)
{
    return task->kind == FK_SEND || task->kind == FK_RECV;
}

/* Number of elements that this rank reads, and writes. */
static size_t n_read(const ncclComm_t comm, const fk_task *task)
{
    switch (task->kind) {
    case FK_BROADCAST:
        return comm->rank == task->peer ? task->count : 0;
    case FK_RECV:
        return 0;
    default:
        return task->count;
    }
}

static size_t n_written(const ncclComm_t comm, const fk_task *task)
{
    switch (task->kind) {
    case FK_ALL_GATHER:
        return task->count * (size_t)comm->n_ranks;
    case FK_REDUCE:
        return comm->rank == task->peer ? task->count : 0;
    case FK_SEND:
        return 0;
    default:
        return task->count;
    }
}

/* ---- room for posts ------------------------------------------------------------- */

static void drop_taken(ncclComm_t comm)
{
    size_t n = 0;
    for (size_t i = 0; i < comm->n_chunks; i++) {
        const fk_chunk *it = &comm->chunks[i];
        const int n_takers = it->n_takers;
        if (atomic_load(&it->post->n_taken) < n_takers)
            comm->chunks[n++] = *it;
    }
    comm->n_chunks = n;
}

/* The chunks lie in the order of their addresses. */
static char *make_chunk(ncclComm_t comm, fk_post *post, int n_takers)
{
    uint64_t offset = 0;
    size_t at = 0;
    drop_taken(comm);
    while (at < comm->n_chunks && offset + post->n_bytes > comm->chunks[at].offset) {
        offset = comm->chunks[at].offset + comm->chunks[at].n_bytes;
        at++;
    }
    if (offset + post->n_bytes > FK_DATA_BYTES) {
        fk_error("the fake has no room for more than %zu bytes of a rank",
                 FK_DATA_BYTES);
        abort();
    }
    comm->chunks = realloc(comm->chunks, (comm->n_chunks + 1) * sizeof *comm->chunks);
    if (comm->chunks == NULL)
        abort();
    memmove(&comm->chunks[at + 1], &comm->chunks[at],
            (comm->n_chunks - at) * sizeof *comm->chunks);
    comm->chunks[at] =
        (fk_chunk){offset, (post->n_bytes + 63) / 64 * 64, n_takers, post};
    comm->n_chunks++;
    post->offset = offset;
    return comm->world->data + (size_t)comm->rank * FK_DATA_BYTES + offset;
}

static fk_post *coll_post(const ncclComm_t comm, int rank, uint64_t number)
{
    return &comm->world->board->colls[rank][number % FK_RING_COLLS];
}

static fk_post *pair_post(const ncclComm_t comm, int from, int to, uint64_t number)
{
    return &comm->world->board->pairs[from][to][number % FK_RING_PAIRS];
}

static const char *post_data(const ncclComm_t comm, int rank, const fk_post *post)
{
    return comm->world->data + (size_t)rank * FK_DATA_BYTES + post->offset;
}

/* The factor by which each rank's values are multiplied, as NCCL does for floats. */
static double scale_of(const ncclComm_t comm, const fk_task *task)
{
    if (task->op == ncclAvg)
        return fk_round(1.0 / comm->n_ranks, task->dtype);
    return 1.0;
}

void fk_task_post(ncclComm_t comm, fk_task *task, const char *what)
{
    if (task->kind == FK_RECV)
        return;
    const size_t n = n_read(comm, task);
    fk_post *post = is_pair(task)
                        ? pair_post(comm, comm->rank, task->peer, task->number)
                        : coll_post(comm, comm->rank, task->number);
    post->n_bytes = n * fk_dtype_bytes(task->dtype);
    post->kind = (int)task->kind;
    post->dtype = (int)task->dtype;
    post->op = task->op;
    post->peer = task->peer;
    post->count = task->count;
    post->is_registered = fk_is_registered(comm, task->from);
    atomic_store(&post->n_taken, 0);
    char *data = make_chunk(comm, post, is_pair(task) ? 1 : comm->n_ranks);
    if (fk_check_range(task->from, post->n_bytes, what)) {
        memcpy(data, task->from, post->n_bytes);
        const double scale = scale_of(comm, task);
        if (scale != 1.0 && !is_pair(task))
            fk_scale(data, n, task->dtype, scale);
    }
    fk_proxy_send(comm, post, task->number + 1);
}

/* A send has its answer once it is taken. */
int fk_has_posted(const ncclComm_t comm, const fk_task *task, int r)
{
    if (task->kind == FK_SEND) /* a proxy has taken it at once */
        return fk.options.net ||
               atomic_load(&pair_post(comm, comm->rank, r, task->number)->n_taken) > 0;
    const fk_post *post = task->kind == FK_RECV
                              ? pair_post(comm, r, comm->rank, task->number)
                              : coll_post(comm, r, task->number);
    if (r == comm->rank && fk_proxy_has(comm, post, task->number + 1))
        return 1;
    return atomic_load(&post->number) == task->number + 1;
}

/* ---- taking --------------------------------------------------------------------- */

void fk_task_garbage(ncclComm_t comm, fk_task *task)
{
    const size_t n_bytes = n_written(comm, task) * fk_dtype_bytes(task->dtype);
    if (n_bytes > 0 && fk_check_range(task->to, n_bytes, "an aborted operation"))
        memset(task->to, 0xc3, n_bytes);
}

static int has_come(const ncclComm_t comm, const fk_task *task)
{
    for (int r = 0; r < comm->n_ranks; r++)
        if (!fk_has_posted(comm, task, r))
            return 0;
    return 1;
}

static int fits(const fk_task *task, const fk_post *post)
{
    const int has_op = task->kind <= FK_REDUCE;
    const int has_root = task->kind == FK_REDUCE || task->kind == FK_BROADCAST;
    return post->kind == (int)task->kind && post->count == task->count &&
           post->dtype == (int)task->dtype && (!has_op || post->op == task->op) &&
           (!has_root || post->peer == task->peer);
}

static int all_fit(const ncclComm_t comm, const fk_task *task)
{
    for (int r = 0; r < comm->n_ranks; r++) {
        const fk_post *post = coll_post(comm, r, task->number);
        if (!fits(task, post)) {
            fk_error(
                "collective %d differs: rank %d has kind %d of %zu of type %d, "
                "op %d, root %d; rank %d kind %d of %zu of type %d, op %d, root %d",
                (int)task->number, comm->rank, (int)task->kind, task->count,
                (int)task->dtype, task->op, task->peer, r, post->kind,
                (size_t)post->count, post->dtype, post->op, post->peer);
            return 0;
        }
        if (post->is_registered != coll_post(comm, 0, task->number)->is_registered) {
            fk_error("collective %d: memory is registered on some ranks alone",
                     (int)task->number);
            return 0;
        }
    }
    return 1;
}

static void reduce(const ncclComm_t comm, const fk_task *task)
{
    for (int r = 0; r < comm->n_ranks; r++) {
        const fk_post *post = coll_post(comm, r, task->number);
        const char *from = post_data(comm, r, post);
        if (r == 0)
            memcpy(task->to, from, task->count * fk_dtype_bytes(task->dtype));
        else
            fk_add(task->to, from, task->count, task->dtype);
    }
}

static void take(const ncclComm_t comm, const fk_task *task)
{
    const size_t n_bytes = task->count * fk_dtype_bytes(task->dtype);
    switch (task->kind) {
    case FK_ALL_GATHER:
        for (int r = 0; r < comm->n_ranks; r++)
            memcpy((char *)task->to + (size_t)r * n_bytes,
                   post_data(comm, r, coll_post(comm, r, task->number)), n_bytes);
        break;
    case FK_BROADCAST:
        memcpy(task->to,
               post_data(comm, task->peer, coll_post(comm, task->peer, task->number)),
               n_bytes);
        break;
    case FK_REDUCE:
        if (comm->rank == task->peer)
            reduce(comm, task);
        break;
    default:
        reduce(comm, task);
        if (fk.options.corrupt_bytes > 0 && n_bytes >= (size_t)fk.options.corrupt_bytes)
            ((char *)task->to)[n_bytes - 1] ^= 0x55;
        break;
    }
}

static int poll_pair(ncclComm_t comm, fk_task *task, const char *what)
{
    const size_t n_bytes = task->count * fk_dtype_bytes(task->dtype);
    if (task->kind == FK_SEND)
        return fk_has_posted(comm, task, task->peer);
    fk_post *post = pair_post(comm, task->peer, comm->rank, task->number);
    if (atomic_load(&post->number) != task->number + 1)
        return 0;
    if (post->n_bytes != n_bytes) {
        fk_error("%s: rank %d receives %zu bytes of the %zu that rank %d sends", what,
                 comm->rank, n_bytes, (size_t)post->n_bytes, task->peer);
        fk_task_garbage(comm, task);
    } else if (fk_check_range(task->to, n_bytes, what)) {
        memcpy(task->to, post_data(comm, task->peer, post), n_bytes);
    }
    atomic_store(&post->n_taken, 1);
    return 1;
}

int fk_task_poll(ncclComm_t comm, fk_task *task, const char *what)
{
    const size_t n_bytes = n_written(comm, task) * fk_dtype_bytes(task->dtype);
    if (is_pair(task))
        return poll_pair(comm, task, what);
    if (!has_come(comm, task))
        return 0;
    if (!all_fit(comm, task))
        fk_task_garbage(comm, task);
    else if (fk_check_range(task->to, n_bytes, what))
        take(comm, task);
    for (int r = 0; r < comm->n_ranks; r++)
        (void)atomic_fetch_add(&coll_post(comm, r, task->number)->n_taken, 1);
    return 1;
}
