/* fake_nccl_launch.c - NCCL's work on a stream: one call, or a group of calls.
 *
 * A launch is resident, and holds its slots, from its turn in the stream until each of
 * its parts has met its peers.
 */
#include <unistd.h>

#include "nccl_state.h"

void fk_launch_free(fk_launch *launch)
{
    if (launch != NULL)
        free(launch->tasks);
    free(launch);
}

fk_launch *fk_launch_clone(const fk_launch *launch)
{
    fk_launch *it = fk_new(sizeof *it);
    *it = *launch;
    it->tasks = fk_new(launch->n_tasks * sizeof *it->tasks);
    memcpy(it->tasks, launch->tasks, launch->n_tasks * sizeof *it->tasks);
    return it;
}

void fk_launch_check(const fk_op *op)
{
    if (op->launch->comm->object.is_dead)
        fk_error("a graph is launched whose communicator %d has ended",
                 op->launch->comm->object.id);
}

void fk_launch_count_graph(const fk_op *op, int by)
{
    op->launch->comm->n_in_graphs += by;
    if (by < 0)
        fk_moved();
}

int fk_launch_address(const fk_op *op, size_t i, const void **out)
{
    if (i / 2 >= op->launch->n_tasks)
        return 0;
    const fk_task *task = &op->launch->tasks[i / 2];
    *out = i % 2 == 0 ? task->to : task->from;
    return 1;
}

/* All ranks must issue operations in the same order. */
void fk_launch_number(fk_op *op)
{
    ncclComm_t comm = op->launch->comm;
    for (size_t i = 0; i < op->launch->n_tasks; i++)
        op->launch->tasks[i].number = comm->n_colls++;
    fk_op_depend(op, comm->last);
    fk_op_drop(comm->last);
    comm->last = fk_op_hold(op);
    fk_list_add(&comm->launches, op);
}

void fk_launch_done(fk_op *op)
{
    fk_list_remove(&op->launch->comm->launches, op);
}

void fk_launch_begin(fk_op *op)
{
    const fk_launch *launch = op->launch;
    if (launch->comm->is_aborted || launch->comm->world == NULL)
        return;
    for (size_t i = 0; i < launch->n_tasks; i++)
        fk_task_post(launch->comm, &launch->tasks[i], op->what);
}

int fk_launch_poll(fk_op *op)
{
    int has_moved = 0;
    size_t n_done = 0;
    const fk_launch *launch = op->launch;
    const int is_over = launch->comm->is_aborted || launch->comm->world == NULL;
    for (size_t i = 0; i < launch->n_tasks; i++) {
        fk_task *task = &launch->tasks[i];
        if (!task->is_done) {
            fk_memory_open();
            if (is_over)
                fk_task_garbage(launch->comm, task);
            task->is_done = is_over || fk_task_poll(launch->comm, task, op->what);
            has_moved |= task->is_done;
        }
        n_done += task->is_done != 0;
    }
    if (n_done == launch->n_tasks) {
        fk_op_done(op);
        has_moved = 1;
    }
    return has_moved;
}

/* ---- peers ---------------------------------------------------------------------- */

static int has_coll(const fk_launch *launch, uint64_t number)
{
    for (size_t i = 0; i < launch->n_tasks; i++)
        if (launch->tasks[i].number == number)
            return 1;
    return 0;
}

fk_op *fk_find_peer(ncclComm_t comm, const fk_task *task, int rank)
{
    const ncclComm_t peer = comm->world->comms[rank];
    for (size_t i = 0; peer != NULL && i < peer->launches.n; i++) {
        fk_op *op = peer->launches.ops[i];
        if (has_coll(op->launch, task->number))
            return op;
    }
    return NULL;
}

/* Tells other processes, whose pump looks for wanted operations. */
static void want(const ncclComm_t comm, const fk_task *task)
{
    _Atomic uint64_t *wanted = &comm->world->board->wanted_colls;
    uint64_t old = atomic_load(wanted);
    while (old <= task->number &&
           !atomic_compare_exchange_weak(wanted, &old, task->number + 1))
        continue;
}

int fk_launch_is_wanted(const fk_op *op)
{
    const fk_launch *launch = op->launch;
    const ncclComm_t comm = launch->comm;
    if (comm->is_aborted || comm->world == NULL)
        return 0;
    const uint64_t wanted = atomic_load(&comm->world->board->wanted_colls);
    for (size_t i = 0; i < launch->n_tasks; i++)
        if (!launch->tasks[i].is_done && wanted > launch->tasks[i].number)
            return 1;
    return 0;
}

/* Operations are executed in order, so marks only those up to the first wanted one. */
int fk_need_wanted(const ncclComm_t comm)
{
    int is_wanted = 0;
    for (size_t i = 0; i < comm->launches.n; i++) {
        if (!fk_launch_is_wanted(comm->launches.ops[i]))
            break;
        fk_need(comm->launches.ops[i]);
        is_wanted = 1;
    }
    return is_wanted;
}

void fk_launch_need(const fk_op *op, fk_list *list)
{
    const fk_launch *launch = op->launch;
    const ncclComm_t comm = launch->comm;
    if (comm->is_aborted || comm->world == NULL)
        return;
    for (size_t i = 0; i < launch->n_tasks; i++) {
        const fk_task *task = &launch->tasks[i];
        if (task->is_done)
            continue;
        want(comm, task);
        for (int r = 0; r < comm->n_ranks; r++) {
            fk_op *peer = fk_find_peer(comm, task, r);
            if (peer != NULL && !peer->is_needed) {
                peer->is_needed = 1;
                fk_list_add(list, peer);
            }
        }
    }
}

void fk_launch_print(const fk_op *op, FILE *to)
{
    static const char *const kinds[] = {"all-reduce", "reduce", "all-gather",
                                        "broadcast"};
    const fk_launch *launch = op->launch;
    (void)fprintf(to, "; communicator %d, rank %d of %d:", launch->comm->object.id,
                  launch->comm->rank, launch->comm->n_ranks);
    for (size_t i = 0; i < launch->n_tasks; i++)
        (void)fprintf(to, " %s %d of %zu", kinds[launch->tasks[i].kind],
                      (int)launch->tasks[i].number, launch->tasks[i].count);
}

FAKE_GETTER(int, fake_connections, (void), fk.n_connections)

/* ---- calls ---------------------------------------------------------------------- */

static int enqueue(CUstream stream, fk_op *op)
{
    const int result = fk_enqueue(op, stream);
    return result == CUDA_SUCCESS ? ncclSuccess : ncclUnhandledCudaError;
}

/* Waits as a device does that accepts no more launches. */
static int await_room(ncclComm_t comm, const char *what)
{
    const int64_t since = fk_now();
    while (fk.options.queue_depth > 0 && !comm->is_aborted &&
           comm->launches.n >= (size_t)fk.options.queue_depth) {
        fk_need(comm->launches.ops[0]);
        fk_need_residents();
        if (fk_run_one(1) || fk_proxy_step(comm->device))
            continue;
        if (!fk_pause(since)) {
            fk_error("%s: there is no room in the device's queue", what);
            return ncclInternalError;
        }
    }
    return comm->is_aborted ? ncclInternalError : ncclSuccess;
}

int fk_start_launch(ncclComm_t comm, CUstream stream, fk_launch *launch,
                    const char *what)
{
    const int room = stream->capture == NULL ? await_room(comm, what) : ncclSuccess;
    if (room != ncclSuccess) {
        fk_launch_free(launch);
        return room;
    }
    fk_op *op = fk_op_new(FK_LAUNCH, comm->device, what);
    op->launch = launch;
    return enqueue(stream, op);
}
