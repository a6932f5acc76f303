/* fake_deadlock.c - whether an operation that the host waits for can ever be done.
 *
 * The schedule is simulated in the best case: peers enqueue their missing parts at
 * once, and are ready.  An operation that cannot be done even then waits in a circle:
 * for itself, or for slots of operations that wait for it.
 */
#include <dirent.h>

#include "nccl_state.h"

static struct {
    fk_list to_begin;
    fk_list starving; /* ready, but without slots */
    int n_slots[FK_MAX_DEVICES];
} play;

static int can_finish(const fk_op *op)
{
    const fk_launch *launch = op->launch;
    for (size_t i = 0; i < launch->n_tasks; i++)
        for (int r = 0; r < launch->comm->n_ranks; r++)
            if (!launch->tasks[i].is_done &&
                !fk_peer_can_come(launch->comm, &launch->tasks[i], r))
                return 0;
    return 1;
}

static void finish(fk_op *op)
{
    if (op->imagined == FK_RESIDENT) {
        play.n_slots[op->device] += fk_slots_needed(op);
        while (play.starving.n > 0)
            fk_list_add(&play.to_begin, play.starving.ops[--play.starving.n]);
    }
    op->imagined = FK_DONE;
    for (size_t i = 0; i < op->dependents.n; i++) {
        fk_op *next = op->dependents.ops[i];
        if (--next->n_imagined == 0 && next->is_submitted)
            fk_list_add(&play.to_begin, next);
    }
}

/* The operation and the resident parts of its peers can be done now. */
static void finish_with_peers(fk_op *op)
{
    const fk_launch *launch = op->launch;
    const ncclComm_t comm = launch->comm;
    for (size_t i = 0; comm->world != NULL && i < launch->n_tasks; i++) {
        for (int r = 0; r < comm->n_ranks; r++) {
            fk_op *peer = fk_find_peer(comm, &launch->tasks[i], r);
            if (peer != NULL && peer->imagined == FK_RESIDENT && can_finish(peer))
                finish(peer);
        }
    }
    if (op->imagined == FK_RESIDENT && can_finish(op))
        finish(op);
}

static void begin(fk_op *op)
{
    const int n_slots = fk_slots_needed(op);
    if (op->imagined == FK_QUEUED) {
        if (n_slots > play.n_slots[op->device]) {
            fk_list_add(&play.starving, op);
            return;
        }
        if (op->kind == FK_LAUNCH) {
            op->imagined = FK_RESIDENT;
            play.n_slots[op->device] -= n_slots;
        }
    }
    if (op->kind == FK_LAUNCH)
        finish_with_peers(op);
    else
        finish(op);
}

int fk_can_ever(const fk_op *target)
{
    for (int i = 0; i < FK_MAX_DEVICES; i++)
        play.n_slots[i] = fk.options.slots - fk.contexts[i].n_slots_taken;
    for (fk_op *op = fk.first; op != NULL; op = op->next) {
        op->imagined = op->state;
        op->n_imagined = op->n_waits;
        if (op->n_waits == 0)
            fk_list_add(&play.to_begin, op);
    }
    while (play.to_begin.n > 0 && target->imagined != FK_DONE)
        begin(play.to_begin.ops[--play.to_begin.n]);
    fk_list_free(&play.to_begin);
    fk_list_free(&play.starving);
    return target->imagined == FK_DONE;
}

/* Whether no other thread of this process can enqueue anything.  The pump does not, and
 * ThreadSanitizer has its own thread. */
int fk_is_alone(void)
{
#if defined(__SANITIZE_THREAD__)
    const int n_own = 2;
#else
    const int n_own = 1;
#endif
    int n = 0;
    for (const fk_world *it = fk.worlds; it != NULL; it = it->next)
        if (atomic_load(&it->board->n_joined) > it->n_comms ||
            atomic_load(&it->board->n_joined) < it->n_ranks)
            return 0;
    DIR *folder = opendir("/proc/self/task");
    if (folder == NULL)
        return 0;
    for (const struct dirent *it = readdir(folder); it != NULL; it = readdir(folder))
        n += it->d_name[0] != '.';
    (void)closedir(folder);
    return n <= n_own + fk_pump_is_running();
}
