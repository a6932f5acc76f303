/* fake_nccl.c - communicators: made, watched, ended. */
#include <stdarg.h>
#include <unistd.h>

#include "nccl_state.h"

static _Thread_local struct {
    uint64_t generation;
    int depth;
    size_t n_tasks;
    struct {
        ncclComm_t comm;
        CUstream stream;
        fk_task task;
    } tasks[FK_RING_COLLS];
    int n_inits;
    ncclComm_t inits[FK_MAX_RANKS];
    ncclResult_t error;
} group;

static void freshen_group(void)
{
    if (group.generation != fk.generation) {
        group.generation = fk.generation;
        group.depth = 0;
        group.n_tasks = 0;
        group.n_inits = 0;
        group.error = ncclSuccess;
    }
}

ncclResult_t ncclGetVersion(int *out)
{
    FAKE_CALL(ncclGetVersion);
    *out = fk.options.nccl;
    return fk_leave(ncclSuccess);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *out)
{
    FAKE_CALL(ncclGetUniqueId);
    return fk_leave(fk_make_id(out));
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network "
                                        "error",
                                        "NCCL operation in progress",
                                        "operation timed out"};
    return (unsigned)result < sizeof texts / sizeof texts[0] ? texts[result]
                                                             : "unknown result code";
}

static _Thread_local char last_error[256];

void fk_set_last_error(const char *format, ...)
{
    va_list rest;
    va_start(rest, format);
    (void)vsnprintf(last_error, sizeof last_error, format, rest);
    va_end(rest);
}

/* The thread's latest error. */
const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return last_error;
}

/* ---- making --------------------------------------------------------------------- */

static int become_ready(ncclComm_t comm)
{
    int one = 0;
    int other = 0;
    comm->is_ready = 1;
    if (!fk_has_duplicate(comm->world, &one, &other))
        return ncclSuccess;
    if (fk.options.nccl >= 23000)
        fk_set_last_error("Multiple Ranks are using the same GPU/Partition. Set "
                          "NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this: ranks %d, %d",
                          one, other);
    else
        fk_set_last_error("Duplicate GPU detected : rank %d and rank %d both on CUDA "
                          "device %x000",
                          one, other, 0x1a + comm->device);
    comm->error = ncclInvalidUsage;
    return ncclInvalidUsage;
}

static int await_all(ncclComm_t comm)
{
    const int64_t since = fk_now();
    const int n_let_go = fk.n_let_go;
    while (!fk_all_joined(comm->world)) {
        if (fk.n_let_go != n_let_go)
            return ncclSystemError;
        if (!fk_pause(since)) {
            fk_error("rank %d of %d waits for others in ncclCommInitRank that never "
                     "come",
                     comm->rank, comm->n_ranks);
            return ncclInternalError;
        }
    }
    return become_ready(comm);
}

static int init_rank(ncclComm_t *out, int n_ranks, const ncclUniqueId *id, int rank)
{
    const CUcontext context = fk_current();
    if (out == NULL || n_ranks < 1 || n_ranks > FK_MAX_RANKS || rank < 0 ||
        rank >= n_ranks)
        return ncclInvalidArgument;
    freshen_group();
    last_error[0] = '\0';
    ncclComm_t comm = fk_new(sizeof *comm);
    comm->rank = rank;
    comm->n_ranks = n_ranks;
    comm->device = context != NULL ? context->device : 0;
    fk_object_add(&comm->object, FAKE_COMMS);
    int result = fk_join(comm, id);
    if (result == ncclSuccess && group.depth > 0)
        group.inits[group.n_inits++] = comm;
    else if (result == ncclSuccess)
        result = await_all(comm);
    if (result != ncclSuccess) {
        fk_leave_world(comm);
        fk_object_kill(&comm->object);
        return result;
    }
    *out = comm;
    return result;
}

ncclResult_t ncclCommInitRank(ncclComm_t *out, int n_ranks, ncclUniqueId id, int rank)
{
    FAKE_CALL(ncclCommInitRank);
    return fk_leave(init_rank(out, n_ranks, &id, rank));
}

void fake_let_go(void)
{
    (void)pthread_mutex_lock(&fk.lock);
    fk.n_let_go++;
    fk_moved();
    (void)pthread_mutex_unlock(&fk.lock);
}

/* ---- watching ------------------------------------------------------------------- */

static int check_comm(const ncclComm_t comm, const char *what)
{
    if (comm == NULL)
        return ncclInvalidArgument;
    if (comm->object.is_dead) {
        fk_error("%s: communicator %d was used after its end", what, comm->object.id);
        return ncclInvalidArgument;
    }
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out)
{
    FAKE_CALL(ncclCommGetAsyncError);
    FAKE_TRY(check_comm(comm, "ncclCommGetAsyncError"));
    *out = comm->error;
    return fk_leave(ncclSuccess);
}

/* ---- ending --------------------------------------------------------------------- */

static void end_comm(ncclComm_t comm)
{
    fk_leave_world(comm);
    fk_disconnect(comm);
    fk_proxy_drop(comm);
    fk_op_drop(comm->last);
    comm->last = NULL;
    fk_object_kill(&comm->object);
}

/* As NCCL, frees nothing while a graph holds operations of the communicator. */
static void wait_for_graphs(ncclComm_t comm, const char *what)
{
    const int64_t since = fk_now();
    while (comm->n_in_graphs > 0)
        if (!fk_pause(since)) {
            fk_error("%s: communicator %d waits for graphs", what, comm->object.id);
            return;
        }
}

/* Running operations end at once; queued ones when their turn comes. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    (void)usleep((unsigned)fk.options.abort_ms * 1000);
    FAKE_CALL(ncclCommAbort);
    FAKE_TRY(check_comm(comm, "ncclCommAbort"));
    comm->is_aborted = 1;
    fk_proxy_drop(comm);
    while (comm->launches.n > 0 && comm->launches.ops[0]->state == FK_RESIDENT)
        (void)fk_launch_poll(comm->launches.ops[0]);
    fk_moved();
    wait_for_graphs(comm, "ncclCommAbort");
    end_comm(comm);
    return fk_leave(ncclSuccess);
}

static int finish(ncclComm_t comm, const char *what)
{
    int result = check_comm(comm, what);
    if (result == ncclSuccess && !comm->is_ready)
        result = ncclInvalidUsage;
    if (result != ncclSuccess)
        return result;
    if (comm->last != NULL && fk_wait_for(comm->last, what) != CUDA_SUCCESS)
        return ncclUnhandledCudaError;
    wait_for_graphs(comm, what);
    fk_proxy_flush(comm);
    return fk_proxy_block(comm, what);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    FAKE_CALL(ncclCommFinalize);
    return fk_leave(finish(comm, "ncclCommFinalize"));
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    FAKE_CALL(ncclCommDestroy);
    FAKE_TRY(finish(comm, "ncclCommDestroy"));
    end_comm(comm);
    return fk_leave(ncclSuccess);
}

/* ---- groups --------------------------------------------------------------------- */

static int add_task(ncclComm_t comm, CUstream handle, const fk_task *task,
                    const char *what)
{
    CUstream stream = NULL;
    int result = check_comm(comm, what);
    if (result != ncclSuccess)
        return result;
    if (!comm->is_ready) {
        fk_error("%s: communicator %d is not ready", what, comm->object.id);
        return ncclInvalidArgument;
    }
    if (fk_dtype_bytes(task->dtype) == 0 ||
        (task->op != ncclSum && task->op != ncclAvg) ||
        (task->op == ncclAvg && task->dtype < ncclFloat16) || task->root < 0 ||
        task->root >= comm->n_ranks)
        return ncclInvalidArgument;
    if (handle == NULL || handle == CU_STREAM_LEGACY)
        stream = &fk.contexts[comm->device].legacy;
    else if (fk_stream(handle, &stream) != CUDA_SUCCESS ||
             stream->device != comm->device)
        return ncclInvalidArgument;
    freshen_group();
    if (group.n_tasks == FK_RING_COLLS)
        return ncclInternalError;
    group.tasks[group.n_tasks].comm = comm;
    group.tasks[group.n_tasks].stream = stream;
    group.tasks[group.n_tasks++].task = *task;
    return ncclSuccess;
}

/* Makes one launch of all that the group has for a communicator. */
static int start_first(const char *what)
{
    size_t n_left = 0;
    const ncclComm_t comm = group.tasks[0].comm;
    const CUstream stream = group.tasks[0].stream;
    fk_launch *launch = fk_new(sizeof *launch);
    launch->comm = comm;
    launch->tasks = fk_new(group.n_tasks * sizeof *launch->tasks);
    for (size_t i = 0; i < group.n_tasks; i++) {
        if (group.tasks[i].comm != comm) {
            group.tasks[n_left++] = group.tasks[i];
            continue;
        }
        if (group.tasks[i].stream != stream)
            fk_error("%s: the fake has no groups over several streams of a "
                     "communicator",
                     what);
        launch->tasks[launch->n_tasks++] = group.tasks[i].task;
    }
    group.n_tasks = n_left;
    return fk_start_launch(comm, stream, launch, what);
}

static int connect_group(const char *what)
{
    int result = ncclSuccess;
    for (size_t i = 0; i < group.n_tasks; i++)
        fk_connect_begin(group.tasks[i].comm, &group.tasks[i].task);
    for (size_t i = 0; i < group.n_tasks && result == ncclSuccess; i++)
        result = fk_connect_wait(group.tasks[i].comm, &group.tasks[i].task, what);
    return result;
}

static int end_group(const char *what)
{
    int result = connect_group(what);
    if (result != ncclSuccess)
        group.n_tasks = 0;
    while (group.n_tasks > 0) {
        const int one = start_first(what);
        if (result == ncclSuccess)
            result = one;
    }
    for (int i = 0; i < group.n_inits && result == ncclSuccess; i++)
        result = await_all(group.inits[i]);
    group.n_inits = 0;
    return result;
}

static int issue(ncclComm_t comm, CUstream stream, const fk_task *task,
                 const char *what)
{
    const int result = add_task(comm, stream, task, what);
    if (group.depth == 0 && result == ncclSuccess)
        return end_group(what);
    if (group.depth > 0 && result != ncclSuccess)
        group.error = (ncclResult_t)result;
    return result;
}

ncclResult_t ncclGroupStart(void)
{
    FAKE_CALL(ncclGroupStart);
    freshen_group();
    group.depth++;
    return fk_leave(ncclSuccess);
}

ncclResult_t ncclGroupEnd(void)
{
    FAKE_CALL(ncclGroupEnd);
    freshen_group();
    if (group.depth == 0)
        return fk_leave(ncclInvalidUsage);
    if (--group.depth > 0)
        return fk_leave(ncclSuccess);
    const ncclResult_t error = group.error;
    group.error = ncclSuccess;
    if (error != ncclSuccess)
        group.n_tasks = 0;
    const int result = end_group("ncclGroupEnd");
    return fk_leave(error != ncclSuccess ? (int)error : result);
}

/* ---- collectives ---------------------------------------------------------------- */

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count,
                           ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                           CUstream stream)
{
    FAKE_CALL(ncclAllReduce);
    const fk_task task = {FK_ALL_REDUCE, from, to, count, dtype, (int)op, 0, 0, 0};
    return fk_leave(issue(comm, stream, &task, "ncclAllReduce"));
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t dtype,
                        ncclRedOp_t op, int root, ncclComm_t comm, CUstream stream)
{
    FAKE_CALL(ncclReduce);
    const fk_task task = {FK_REDUCE, from, to, count, dtype, (int)op, root, 0, 0};
    return fk_leave(issue(comm, stream, &task, "ncclReduce"));
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count,
                           ncclDataType_t dtype, ncclComm_t comm, CUstream stream)
{
    FAKE_CALL(ncclAllGather);
    const fk_task task = {FK_ALL_GATHER, from, to, count, dtype, 0, 0, 0, 0};
    return fk_leave(issue(comm, stream, &task, "ncclAllGather"));
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count,
                           ncclDataType_t dtype, int root, ncclComm_t comm,
                           CUstream stream)
{
    FAKE_CALL(ncclBroadcast);
    const fk_task task = {FK_BROADCAST, from, to, count, dtype, 0, root, 0, 0};
    return fk_leave(issue(comm, stream, &task, "ncclBroadcast"));
}
