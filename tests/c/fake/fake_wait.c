/* fake_wait.c - the host waits, and gives up what never comes. */
#include <time.h>

#include "state.h"

int64_t fk_now(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

int fk_pause(int64_t since)
{
    struct timespec until;
    if (fk_now() - since > INT64_C(20000000000))
        return 0;
    fk_memory_close();
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 200000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    (void)pthread_cond_timedwait(&fk.moved, &fk.lock, &until);
    return 1;
}

static int give_up(fk_op *op, const char *who)
{
    if (!fk.is_stuck && !fk.options.quiet)
        fk_print_queues();
    fk.is_stuck = 1;
    fk_error("%s waits for #%d (%s), which never comes", who, op->id, op->what);
    return CUDA_ERROR_LAUNCH_TIMEOUT;
}

int fk_wait_for(fk_op *op, const char *who)
{
    int64_t since = fk_now();
    int result = CUDA_SUCCESS;
    (void)fk_op_hold(op);
    fk_need(op);
    while (op->state != FK_DONE && result == CUDA_SUCCESS) {
        fk_need_residents();
        if (fk_run_one(fk.options.schedule == FAKE_LATE)) {
            since = fk_now();
        } else if (op->state == FK_DONE || fk_proxy_step(op->device)) {
            continue;
        } else if (fk.is_stuck) {
            result = CUDA_ERROR_LAUNCH_TIMEOUT;
        } else if (!fk_pause(since) && op->state != FK_DONE) {
            result = give_up(op, who);
        }
    }
    fk_clock_host_follows(op);
    fk_op_drop(op);
    return result;
}

int fk_wait_stream(CUstream stream, const char *who)
{
    int result = CUDA_SUCCESS;
    fk_op *tails[2] = {fk_op_hold(stream->tail), NULL};
    CUstream legacy = &fk.contexts[stream->device].legacy;
    if (stream == legacy) {
        fk_op *op = fk_op_hold(fk_op_new(FK_MARK, stream->device, who));
        result = fk_enqueue(op, stream);
        tails[1] = op;
    }
    for (int i = 0; i < 2; i++) {
        if (tails[i] != NULL && result == CUDA_SUCCESS)
            result = fk_wait_for(tails[i], who);
        fk_op_drop(tails[i]);
    }
    return result;
}

/* Waits for the work enqueued so far, as a device does. */
int fk_wait_device(int device, const char *who)
{
    int result = CUDA_SUCCESS;
    fk_list list = {0};
    for (fk_op *op = fk.first; op != NULL; op = op->next)
        if (op->device == device)
            fk_list_add(&list, fk_op_hold(op));
    for (size_t i = 0; i < list.n && result == CUDA_SUCCESS; i++)
        result = fk_wait_for(list.ops[i], who);
    for (size_t i = 0; i < list.n; i++)
        fk_op_drop(list.ops[i]);
    fk_list_free(&list);
    fk_clock_host_follows_device(device);
    return result;
}

/* Programs may poll: by then some operation must be done. */
int fk_query(fk_op *op)
{
    if (op == NULL)
        return CUDA_SUCCESS;
    if (op->state != FK_DONE && op->n_queries++ > (int)fk_below(16)) {
        fk_need(op);
        while (op->state != FK_DONE && (fk_run_one(1) || fk_proxy_step(op->device)))
            continue;
    }
    if (op->state != FK_DONE)
        return CUDA_ERROR_NOT_READY;
    fk_clock_host_follows(op);
    return CUDA_SUCCESS;
}

int fake_synchronize_all(void)
{
    int result = CUDA_SUCCESS;
    (void)pthread_mutex_lock(&fk.lock);
    for (int i = 0; i < fk.options.devices && result == CUDA_SUCCESS; i++)
        result = fk_wait_device(i, "fake_synchronize_all");
    fk_memory_close();
    (void)pthread_mutex_unlock(&fk.lock);
    return result == CUDA_SUCCESS;
}
