/* fake_nccl_task.c - one collective: post, take, reduce. */
#include "nccl_state.h"

size_t fk_dtype_bytes(ncclDataType_t dtype)
{
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return (unsigned)dtype < sizeof bytes / sizeof bytes[0] ? bytes[dtype] : 0;
}

/* Number of elements that this rank reads, and writes. */
static size_t n_read(const ncclComm_t comm, const fk_task *task)
{
    return task->kind == FK_BROADCAST && comm->rank != task->root ? 0 : task->count;
}

static size_t n_written(const ncclComm_t comm, const fk_task *task)
{
    switch (task->kind) {
    case FK_ALL_GATHER:
        return task->count * (size_t)comm->n_ranks;
    case FK_REDUCE:
        return comm->rank == task->root ? task->count : 0;
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
        if (atomic_load(&it->post->n_taken) < comm->n_ranks)
            comm->chunks[n++] = *it;
    }
    comm->n_chunks = n;
}

/* The chunks lie in the order of their addresses. */
static char *make_chunk(ncclComm_t comm, fk_post *post)
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
    comm->chunks[at] = (fk_chunk){offset, (post->n_bytes + 63) / 64 * 64, post};
    comm->n_chunks++;
    post->offset = offset;
    return comm->world->data + (size_t)comm->rank * FK_DATA_BYTES + offset;
}

static fk_post *coll_post(const ncclComm_t comm, int rank, uint64_t number)
{
    return &comm->world->board->colls[rank][number % FK_RING_COLLS];
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
    const size_t n = n_read(comm, task);
    fk_post *post = coll_post(comm, comm->rank, task->number);
    post->n_bytes = n * fk_dtype_bytes(task->dtype);
    post->kind = (int)task->kind;
    post->dtype = (int)task->dtype;
    post->op = task->op;
    post->root = task->root;
    post->count = task->count;
    atomic_store(&post->n_taken, 0);
    char *data = make_chunk(comm, post);
    if (fk_check_range(task->from, post->n_bytes, what)) {
        memcpy(data, task->from, post->n_bytes);
        const double scale = scale_of(comm, task);
        if (scale != 1.0)
            fk_scale(data, n, task->dtype, scale);
    }
    fk_proxy_send(comm, post, task->number + 1);
}

int fk_has_posted(const ncclComm_t comm, const fk_task *task, int r)
{
    const fk_post *post = coll_post(comm, r, task->number);
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
           (!has_root || post->root == task->root);
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
                (int)task->dtype, task->op, task->root, r, post->kind,
                (size_t)post->count, post->dtype, post->op, post->root);
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
               post_data(comm, task->root, coll_post(comm, task->root, task->number)),
               n_bytes);
        break;
    case FK_REDUCE:
        if (comm->rank == task->root)
            reduce(comm, task);
        break;
    default:
        reduce(comm, task);
        if (fk.options.corrupt_bytes > 0 && n_bytes >= (size_t)fk.options.corrupt_bytes)
            ((char *)task->to)[n_bytes - 1] ^= 0x55;
        break;
    }
}

int fk_task_poll(ncclComm_t comm, fk_task *task, const char *what)
{
    const size_t n_bytes = n_written(comm, task) * fk_dtype_bytes(task->dtype);
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
