/* fake_torch.c - torch's caching allocator, as far as our memory goes.
 *
 * Memory that is freed is reused once the work is done that is then in the streams that
 * were recorded with it; an operation that still touches it is an error.  While such a
 * stream is being captured, that is put off.
 */
#include "state.h"

enum { MOST_STREAMS = 256 };

typedef struct lent {
    struct lent *next;
    void *memory;
    int is_freed, is_marked;
    size_t n_streams;
    CUstream streams[MOST_STREAMS];
    fk_op *marks[MOST_STREAMS];
} lent;

static lent *all;

static lent *find(const void *memory)
{
    lent *it = all;
    while (it != NULL && (it->memory != memory || it->is_freed))
        it = it->next;
    if (it == NULL)
        fk_error("%p is no memory of torch's", memory);
    return it;
}

static void mark(lent *it)
{
    for (size_t k = 0; k < it->n_streams; k++)
        if (it->streams[k]->capture != NULL)
            return;
    for (size_t k = 0; k < it->n_streams; k++) {
        if (it->streams[k]->object.is_dead)
            fk_error("torch uses stream %d after its end", it->streams[k]->object.id);
        it->marks[k] = fk_op_hold(it->streams[k]->tail);
    }
    it->is_marked = 1;
}

/* An operation that precedes its reuse and is not done. */
static fk_op *undone(lent *it)
{
    if (!it->is_marked)
        mark(it);
    for (size_t k = 0; k < it->n_streams; k++)
        if (it->marks[k] != NULL && it->marks[k]->state != FK_DONE)
            return it->marks[k];
    return NULL;
}

void fk_torch_reuse(void)
{
    for (lent **at = &all; *at != NULL;) {
        lent *it = *at;
        if (!it->is_freed || undone(it) != NULL || !it->is_marked) {
            at = &it->next;
            continue;
        }
        const fk_op *op = fk_in_flight(it->memory);
        if (op != NULL)
            fk_error("torch reuses memory that #%d (%s), in flight, touches", op->id,
                     op->what);
        for (size_t k = 0; k < it->n_streams; k++)
            fk_op_drop(it->marks[k]);
        (void)fk_free(it->memory);
        *at = it->next;
        free(it);
    }
    fk_memory_close();
}

void fk_torch_reset(void)
{
    while (all != NULL) {
        lent *it = all;
        all = it->next;
        for (size_t k = 0; k < it->n_streams; k++)
            fk_op_drop(it->marks[k]);
        free(it);
    }
}

void *fake_torch_alloc(int device, size_t n_bytes)
{
    void *memory = NULL;
    if (fk_enter("cuMemAlloc") != CUDA_SUCCESS)
        return NULL;
    fk_torch_reuse();
    if (fk_alloc(device, n_bytes, &memory) == CUDA_SUCCESS) {
        lent *it = fk_new(sizeof *it);
        it->memory = memory;
        it->next = all;
        all = it;
    }
    (void)fk_leave(CUDA_SUCCESS);
    return memory;
}

void fake_torch_record(void *memory, CUstream stream)
{
    (void)pthread_mutex_lock(&fk.lock);
    lent *it = find(memory);
    if (it != NULL && it->n_streams < MOST_STREAMS)
        it->streams[it->n_streams++] =
            stream != NULL ? stream : &fk.contexts[fk_device_of(memory)].legacy;
    (void)pthread_mutex_unlock(&fk.lock);
}

void fake_torch_free(void *memory)
{
    (void)pthread_mutex_lock(&fk.lock);
    lent *it = find(memory);
    if (it != NULL)
        it->is_freed = 1;
    fk_torch_reuse();
    (void)pthread_mutex_unlock(&fk.lock);
}

static fk_op *first_undone(void)
{
    fk_op *op = NULL;
    for (lent *it = all; it != NULL && op == NULL; it = it->next)
        op = it->is_freed ? undone(it) : NULL;
    return fk_op_hold(op);
}

void fake_torch_settle(void)
{
    int result = CUDA_SUCCESS;
    (void)pthread_mutex_lock(&fk.lock);
    for (fk_op *op; result == CUDA_SUCCESS && (op = first_undone()) != NULL;) {
        result = fk_wait_for(op, "torch's allocator");
        fk_op_drop(op);
    }
    fk_torch_reuse();
    (void)pthread_mutex_unlock(&fk.lock);
}
