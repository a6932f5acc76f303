/* fake_schedule.c - operations, their dependencies, and the choice of the next one. */
#include "state.h"

void fk_moved(void)
{
    (void)pthread_cond_broadcast(&fk.moved);
}

/* ---- operations ----------------------------------------------------------------- */

fk_op *fk_op_new(fk_op_kind kind, int device, const char *what)
{
    fk_op *op = fk_new(sizeof *op);
    op->n_refs = 1;
    op->kind = kind;
    op->device = device;
    op->what = what;
    op->id = ++fk.n_ids;
    op->lane = FK_GRAPH_LANE;
    return op;
}

fk_op *fk_op_hold(fk_op *op)
{
    if (op != NULL)
        op->n_refs++;
    return op;
}

/* ---- lists of operations -------------------------------------------------------- */

void fk_list_add(fk_list *list, fk_op *op)
{
    if (list->n == list->room) {
        list->room = list->room == 0 ? 4 : 2 * list->room;
        list->ops = realloc(list->ops, list->room * sizeof(fk_op *));
        if (list->ops == NULL)
            abort();
    }
    list->ops[list->n++] = op;
}

void fk_list_remove(fk_list *list, const fk_op *op)
{
    for (size_t i = 0; i < list->n; i++) {
        if (list->ops[i] == op) {
            memmove(&list->ops[i], &list->ops[i + 1],
                    (list->n - i - 1) * sizeof(fk_op *));
            list->n--;
            return;
        }
    }
}

void fk_list_free(fk_list *list)
{
    free(list->ops);
    *list = (fk_list){0};
}

/* ---- dependencies --------------------------------------------------------------- */

static void drop_deps(fk_op *op)
{
    for (size_t i = 0; i < op->deps.n; i++) {
        fk_op *on = op->deps.ops[i];
        if (on->state != FK_DONE)
            fk_list_remove(&on->dependents, op);
        fk_op_drop(on);
    }
    fk_list_free(&op->deps);
}

/* Chains of operations are done, or taken apart, from their beginning, so this does not
 * recurse deeply, except for chains of a capture. */
void fk_op_drop(fk_op *op)
{
    if (op == NULL || --op->n_refs > 0)
        return;
    drop_deps(op);
    fk_list_free(&op->dependents);
    if (op->kind == FK_KERNEL)
        free(op->args);
    if (op->kind == FK_COPY)
        free(op->staged);
    if (op->kind == FK_LAUNCH)
        fk_launch_free(op->launch);
    free(op);
}

void fk_op_depend(fk_op *op, fk_op *on)
{
    if (on == NULL)
        return;
    fk_clock_follow(op, on);
    if (on->state == FK_DONE)
        return;
    for (size_t i = 0; i < op->deps.n; i++)
        if (op->deps.ops[i] == on)
            return;
    fk_list_add(&op->deps, fk_op_hold(on));
    fk_list_add(&on->dependents, op);
    op->n_waits++;
}

/* Puts it behind all earlier work of its device: options.one_queue. */
static void queue_up(fk_op *op)
{
    fk_op *before = fk.last;
    while (before != NULL && before->device != op->device)
        before = before->previous;
    fk_op_depend(op, before);
}

void fk_op_submit(fk_op *op)
{
    if (fk.options.one_queue)
        queue_up(op);
    if (op->kind == FK_LAUNCH)
        fk_launch_number(op);
    fk_clock_submit(op);
    op->is_submitted = 1;
    op->previous = fk.last;
    if (fk.last != NULL)
        fk.last->next = op;
    else
        fk.first = op;
    fk.last = op;
    fk.n_pending++;
    if (op->n_waits == 0)
        fk_list_add(&fk.ready, op);
    if (op->kind == FK_LAUNCH && fk_launch_is_wanted(op))
        fk_need(op);
    fk_moved();
}

static void release_dependents(fk_op *op)
{
    for (size_t i = 0; i < op->dependents.n; i++) {
        fk_op *next = op->dependents.ops[i];
        if (--next->n_waits == 0 && next->is_submitted)
            fk_list_add(&fk.ready, next);
    }
    fk_list_free(&op->dependents);
}

void fk_op_done(fk_op *op)
{
    if (op->state == FK_RESIDENT) {
        fk.contexts[op->device].n_slots_taken--;
        fk_list_remove(&fk.residents, op);
        fk_launch_done(op);
    }
    op->state = FK_DONE;
    release_dependents(op);
    drop_deps(op);
    *(op->previous != NULL ? &op->previous->next : &fk.first) = op->next;
    *(op->next != NULL ? &op->next->previous : &fk.last) = op->previous;
    op->next = op->previous = NULL;
    fk.n_pending--;
    fk_moved();
    fk_op_drop(op);
}

/* ---- execution ------------------------------------------------------------------ */

static void execute_kernel(const fk_op *op)
{
    void *args[64];
    char *at = op->args;
    for (size_t i = 0; i < op->kernel->n_args; i++) {
        args[i] = at;
        at += (op->kernel->arg_bytes[i] + 15) / 16 * 16;
    }
    if (!fk_kernel_may_run(op))
        return;
    op->kernel->run(args, op->grid, op->block);
    fk_kernel_check(op);
}

static void execute(fk_op *op)
{
    fk_memory_open();
    switch (op->kind) {
    case FK_KERNEL:
        execute_kernel(op);
        break;
    case FK_COPY:
        if (!fk_check_copy(op))
            break;
        memmove(op->to, op->staged != NULL ? op->staged : op->from, op->n_bytes);
        if (op->is_corrupt)
            op->to[op->n_bytes - 1] ^= 0x5a;
        break;
    case FK_FILL:
        if (fk_check_copy(op))
            memset(op->to, op->value, op->n_bytes);
        break;
    case FK_MARK:
    case FK_LAUNCH:
        break;
    }
    fk_op_done(op);
}

static void begin(fk_op *op)
{
    fk_list_remove(&fk.ready, op);
    if (op->kind != FK_LAUNCH) {
        execute(op);
        return;
    }
    fk_memory_open();
    op->state = FK_RESIDENT;
    fk_list_add(&fk.residents, op);
    fk.contexts[op->device].n_slots_taken++;
    fk_launch_begin(op);
    fk_moved();
}

static int can_begin(const fk_op *op)
{
    return fk.contexts[op->device].n_slots_taken + fk_slots_needed(op) <= FK_SLOTS;
}

int fk_poll_residents(void)
{
    int has_moved = 0;
    size_t i = 0;
    fk_proxy_some();
    while (i < fk.residents.n) {
        fk_op *op = fk.residents.ops[i];
        has_moved |= fk_launch_poll(op);
        if (i < fk.residents.n && fk.residents.ops[i] == op)
            i++;
    }
    return has_moved;
}

/* In FAKE_RANDOM some streams rest for a while, unless a thread waits for them. */
static int is_resting(const fk_op *op)
{
    return fk.options.schedule == FAKE_RANDOM && !op->is_needed &&
           (fk.resting >> (op->stream_id + op->device) % 64 & 1) != 0;
}

/* Sometimes chooses other streams to rest: about half of them, or all, or none. */
static void draw_resting(void)
{
    if (fk_below(8) == 0)
        fk.resting = fk_draw();
    if (fk_below(32) == 0)
        fk.resting = fk_below(2) == 0 ? 0 : UINT64_MAX;
}

static int run_one(int only_needed)
{
    unsigned n = 0;
    fk_op *chosen = NULL;
    for (size_t i = 0; i < fk.ready.n; i++) {
        fk_op *op = fk.ready.ops[i];
        if ((only_needed && !op->is_needed) || is_resting(op) || !can_begin(op))
            continue;
        if (fk.options.schedule == FAKE_EARLY) {
            if (chosen == NULL || op->id < chosen->id)
                chosen = op;
        } else if (fk_below(++n) == 0) {
            chosen = op;
        }
    }
    if (chosen != NULL)
        begin(chosen);
    return fk_poll_residents() || chosen != NULL;
}

static _Thread_local int64_t executed_ns;

static int64_t thread_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

int fk_run_one(int only_needed)
{
    const int64_t begin = thread_ns();
    const int has_run = run_one(only_needed);
    executed_ns += thread_ns() - begin;
    return has_run;
}

int64_t fake_executed_ns(void)
{
    return executed_ns;
}

/* Executes as a device does by itself. */
void fk_run_at_random(unsigned n)
{
    draw_resting();
    while (n-- > 0 && fk.first != NULL && fk_run_one(0))
        continue;
}

void fk_run_some(void)
{
    if (fk.options.schedule == FAKE_EARLY)
        while (fk.first != NULL && fk_run_one(0))
            continue;
    else if (fk.options.schedule == FAKE_RANDOM && !fk.options.pump)
        fk_run_at_random(fk_below(4));
}

/* Marks all that `op` waits for, with a list instead of recursion, because chains are
 * long.  A mark stays until the operation is done. */
void fk_need(fk_op *op)
{
    fk_list list = {0};
    if (op == NULL || op->state == FK_DONE || op->is_needed || op->capture != NULL)
        return;
    op->is_needed = 1;
    fk_list_add(&list, op);
    while (list.n > 0) {
        const fk_op *it = list.ops[--list.n];
        for (size_t i = 0; i < it->deps.n; i++) {
            fk_op *dep = it->deps.ops[i];
            if (dep->state != FK_DONE && !dep->is_needed) {
                dep->is_needed = 1;
                fk_list_add(&list, dep);
            }
        }
        if (it->kind == FK_LAUNCH)
            fk_launch_need(it, &list);
    }
    fk_list_free(&list);
}

/* Marks resident launches, because they hold slots. */
void fk_need_residents(void)
{
    for (size_t i = 0; i < fk.residents.n; i++)
        fk_need(fk.residents.ops[i]);
}

int fake_step(int n)
{
    int i = 0;
    (void)pthread_mutex_lock(&fk.lock);
    while (i < n && fk_run_one(0))
        i++;
    fk_memory_close();
    (void)pthread_mutex_unlock(&fk.lock);
    return i;
}

/* ---- the end -------------------------------------------------------------------- */

/* Drops the newest first, so that no chain is dropped recursively. */
void fk_schedule_reset(void)
{
    for (int i = 0; i < FK_MAX_DEVICES; i++)
        fk_op_drop(fk.contexts[i].legacy.tail);
    for (fk_object *it = fk.objects; it != NULL; it = it->next) {
        if (it->kind == FAKE_STREAMS) {
            fk_op_drop(((CUstream)it)->tail);
            fk_op_drop(((CUstream)it)->node);
        }
        if (it->kind == FAKE_EVENTS)
            fk_op_drop(((CUevent)it)->record);
    }
    while (fk.last != NULL) {
        fk_op *op = fk.last;
        fk.last = op->previous;
        fk_op_drop(op);
    }
    fk.first = NULL;
    fk.n_pending = 0;
    fk_list_free(&fk.ready);
    fk_list_free(&fk.residents);
}

static void print_op(const fk_op *op)
{
    static const char *const states[] = {"queued", "resident", "done"};
    (void)fprintf(stderr, "  #%d device %d stream %d: %s, %s", op->id, op->device,
                  op->stream_id, op->what, states[op->state]);
    if (op->event_id != 0)
        (void)fprintf(stderr, ", event %d", op->event_id);
    for (size_t i = 0; i < op->deps.n; i++)
        (void)fprintf(stderr, "%s#%d", i == 0 ? ", waits for " : " ",
                      op->deps.ops[i]->id);
    if (op->kind == FK_LAUNCH)
        fk_launch_print(op, stderr);
    (void)fputc('\n', stderr);
}

void fk_print_queues(void)
{
    (void)fprintf(stderr, "fake: %d operations are not done\n", fk.n_pending);
    for (const fk_op *op = fk.first; op != NULL; op = op->next)
        print_op(op);
    for (int i = 0; i < fk.options.devices; i++)
        (void)fprintf(stderr, "  device %d: %d of %d slots are taken\n", i,
                      fk.contexts[i].n_slots_taken, FK_SLOTS);
}
