/* gpu_memory.c - blocks in lists, under a lock. */
#include "gpu_memory.h"

#include <pthread.h>
#include <unistd.h>

#include "backend/cuda.h"
#include "core/alloc.h"

enum { FREE_MS = 10000, MESSAGE_BYTES = 768 }; /* how long a free waits */

struct pli_pool {
    pthread_mutex_t lock;
    pli_pool_options options;
    pid_t owner_pid;
    atomic_int n_refs; /* the world's, and each block's */
    int is_closed;
    atomic_int is_held;                   /* pli_pool_hold() */
    pli_block *blocks;                    /* in use, or spares */
    pli_block *retired;                   /* the world's thread alone */
    pl_stream *readers[PLI_POOL_READERS]; /* the newest first; under the lock */
};

/* Retired blocks of destroyed worlds. */
static pthread_mutex_t leftovers_lock = PTHREAD_MUTEX_INITIALIZER;
static pli_block *leftovers;

pl_status pli_pool_create(const pli_pool_options *options, pli_pool **out)
{
    pl_status st = PL_OK;
    pli_pool *pool = NULL;
    PL_TRY(pli_calloc(1, sizeof *pool, "gradients' memory", &pool));
    (void)pthread_mutex_init(&pool->lock, NULL); /* cannot fail on Linux */
    pool->options = *options;
    pli_nccl_library_retain(options->library);
    pli_cuda_backend_retain(options->backend);
    pool->owner_pid = getpid();
    atomic_store(&pool->n_refs, 1);
    *out = pool;
done:
    return st;
}

static void drop(pli_pool *pool)
{
    if (atomic_fetch_sub(&pool->n_refs, 1) > 1)
        return;
    pli_backend_destroy(pool->options.backend);
    pli_nccl_library_release(pool->options.library);
    (void)pthread_mutex_destroy(&pool->lock);
    pli_free(pool);
}

/* ---- what the device still does with a block ------------------------------------ */

void pli_pool_add_reader(pli_pool *pool, pl_stream *stream)
{
    pl_stream *newer = stream;
    if (stream == NULL)
        return; /* the default stream is always included */
    (void)pthread_mutex_lock(&pool->lock);
    /* Puts it first; the oldest makes room. */
    for (int i = 0; i < PLI_POOL_READERS; i++) {
        pl_stream *older = pool->readers[i];
        pool->readers[i] = newer;
        newer = older;
        if (older == stream || older == NULL)
            break;
    }
    (void)pthread_mutex_unlock(&pool->lock);
}

/* The user may have destroyed a stream in the meantime; querying it then fails. */
static void forget_lost_readers(pli_pool *pool)
{
    int n_left = 0;
    (void)pthread_mutex_lock(&pool->lock);
    for (int i = 0; i < PLI_POOL_READERS && pool->readers[i] != NULL; i++) {
        pl_stream *reader = pool->readers[i];
        int ignored = 0;
        pool->readers[i] = NULL;
        if (pli_cuda_is_capturing(pool->options.backend, reader, &ignored) == PL_OK)
            pool->readers[n_left++] = reader;
    }
    (void)pthread_mutex_unlock(&pool->lock);
}

static int streams_of(pli_pool *pool, pl_stream *out[PLI_POOL_MARKS])
{
    int n = 2;
    out[0] = pli_cuda_side_stream(pool->options.backend);
    out[1] = NULL; /* the default stream */
    (void)pthread_mutex_lock(&pool->lock);
    for (int i = 0; i < PLI_POOL_READERS && pool->readers[i] != NULL; i++)
        out[n++] = pool->readers[i];
    (void)pthread_mutex_unlock(&pool->lock);
    return n;
}

static void drop_marks(pli_block *block)
{
    pl_backend *backend = block->pool->options.backend;
    for (int i = 0; i < PLI_POOL_MARKS; i++) {
        backend->ops->event_destroy(backend, block->marks[i]);
        block->marks[i] = NULL;
    }
    block->n_marks = 0;
}

/* Records the marks, if that has not been done and is possible now. */
static void mark(pli_block *block)
{
    pl_backend *backend = block->pool->options.backend;
    pl_stream *streams[PLI_POOL_MARKS];
    if (block->n_marks > 0)
        return;
    forget_lost_readers(block->pool);
    const int n = streams_of(block->pool, streams);
    int n_recorded = 0;
    if (pli_cuda_may_any_be_captured(backend, streams, n))
        return; /* the capture would take the events into its graph */
    for (; n_recorded < n; n_recorded++)
        if (backend->ops->event_create(backend, &block->marks[n_recorded]) != PL_OK ||
            backend->ops->event_record(backend, block->marks[n_recorded],
                                       streams[n_recorded]) != PL_OK)
            break;
    if (n_recorded == n)
        block->n_marks = n;
    else
        drop_marks(block);
}

typedef enum block_use { THROUGH, NOT_YET, UNKNOWN } block_use;

/* UNKNOWN: a stream is being captured, or the driver has failed. */
static block_use use_of(pli_block *block)
{
    pl_backend *backend = block->pool->options.backend;
    mark(block);
    for (int i = 0; i < block->n_marks; i++) {
        int is_done = 0;
        if (backend->ops->event_is_done(backend, block->marks[i], &is_done) != PL_OK)
            return UNKNOWN;
        if (!is_done)
            return NOT_YET;
    }
    return block->n_marks > 0 ? THROUGH : UNKNOWN;
}

/* Waits a limited time; queries once more if the use is unknown. */
static block_use await(pli_block *block)
{
    pli_backoff waiting = pli_backoff_begin(FREE_MS * PLI_MS, NULL, NULL);
    int n_unknown = 0;
    for (;;) {
        const block_use now = use_of(block);
        n_unknown += now == UNKNOWN;
        if (now == THROUGH || n_unknown > 1 ||
            pli_backoff_pause(&waiting, "work on the device") != PL_OK)
            return now;
    }
}

/* Memory may be freed after a failure, whose message must stay. */
typedef struct message {
    char text[MESSAGE_BYTES];
} message;

static message keep_message(void)
{
    message kept;
    pli_text_print(kept.text, sizeof kept.text, "%s", pl_error_message());
    return kept;
}

static void restore_message(const message *kept)
{
    (void)pli_fail(PL_OK, "%s", kept->text);
}

/* ---- freeing -------------------------------------------------------------------- */

/* Frees a block that is in no list, and that the device is done with. */
static void free_block(pli_block *block)
{
    pli_pool *pool = block->pool;
    drop_marks(block);
    pli_nccl_free(pool->options.library, pool->options.backend, &block->memory);
    pli_free(block);
    drop(pool);
}

static void push(pli_block **list, pli_block *block)
{
    block->next = *list;
    *list = block;
}

static void push_all(pli_block **list, pli_block *blocks)
{
    while (blocks != NULL) {
        pli_block *next = blocks->next;
        push(list, blocks);
        blocks = next;
    }
}

/* Frees the blocks that the device is done with, and returns the others.  is_waiting:
 * waits for each block, for a limited time. */
static pli_block *free_list(pli_block *list, pli_nccl *nccl, int is_waiting)
{
    pli_block *rest = NULL;
    const message kept = keep_message();
    while (list != NULL) {
        pli_block *next = list->next;
        const block_use now = is_waiting ? await(list) : use_of(list);
        if (now == THROUGH) {
            pli_nccl_deregister(nccl, list->handle);
            free_block(list);
        } else {
            push(&rest, list);
        }
        list = next;
    }
    restore_message(&kept);
    return rest;
}

static void leave_over(pli_block *blocks)
{
    (void)pthread_mutex_lock(&leftovers_lock);
    push_all(&leftovers, blocks);
    (void)pthread_mutex_unlock(&leftovers_lock);
}

/* Frees the leftovers of one device that no communicator holds. */
static void free_leftovers(const pl_backend *backend, int is_waiting)
{
    pli_block *list = NULL;
    (void)pthread_mutex_lock(&leftovers_lock);
    for (pli_block **at = &leftovers; *at != NULL;) {
        pli_block *block = *at;
        if (block->pool->options.backend != backend ||
            atomic_load(&block->pool->is_held)) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        push(&list, block);
    }
    (void)pthread_mutex_unlock(&leftovers_lock);
    leave_over(free_list(list, NULL, is_waiting));
}

/* Blocks of a closed pool: streams that read them may be gone later. */
static void mark_all(pli_block *list)
{
    const message kept = keep_message();
    for (pli_block *block = list; block != NULL; block = block->next)
        mark(block);
    restore_message(&kept);
}

/* ---- references ----------------------------------------------------------------- */

static void unlink_locked(pli_pool *pool, const pli_block *block)
{
    pli_block **at = &pool->blocks;
    while (*at != block)
        at = &(*at)->next;
    *at = block->next;
}

static void release(pli_memory_ref *ref)
{
    pli_block *block = (pli_block *)(void *)ref;
    pli_pool *pool = block->pool;
    if (pool->owner_pid != getpid())
        return; /* a thread that does not exist here may hold the lock */
    (void)pthread_mutex_lock(&pool->lock);
    const int is_last = --block->n_users == 0 && pool->is_closed;
    if (is_last)
        unlink_locked(pool, block);
    (void)pthread_mutex_unlock(&pool->lock);
    if (!is_last)
        return;
    block->next = NULL;
    const pl_backend *backend = pool->options.backend;
    const int is_held = atomic_load(&pool->is_held);
    mark_all(block);
    leave_over(is_held ? block : free_list(block, NULL, 1)); /* may end the pool */
    free_leftovers(backend, 0); /* in between the pool may have been let go */
}

pli_memory_ref *pli_block_retain(pli_block *block)
{
    (void)pthread_mutex_lock(&block->pool->lock);
    block->n_users++;
    (void)pthread_mutex_unlock(&block->pool->lock);
    return &block->ref;
}

/* ---- taking --------------------------------------------------------------------- */

static pli_block *take_spare(pli_pool *pool)
{
    (void)pthread_mutex_lock(&pool->lock);
    pli_block *block = pool->blocks;
    while (block != NULL && block->n_users > 0)
        block = block->next;
    if (block != NULL)
        block->n_users = 1;
    (void)pthread_mutex_unlock(&pool->lock);
    return block;
}

int pli_block_is_shared(pli_block *block)
{
    (void)pthread_mutex_lock(&block->pool->lock);
    const int n_users = block->n_users;
    (void)pthread_mutex_unlock(&block->pool->lock);
    return n_users > 1;
}

static pl_status alloc_memory(const pli_pool_options *options, pli_nccl_memory *out)
{
    pl_status st = PL_OK;
    free_leftovers(options->backend, 0);
    st = pli_nccl_alloc(options->library, options->backend, options->n_bytes, out);
    if (st != PL_ENOMEM || options->empty_caches == NULL)
        return st;
    free_leftovers(options->backend, 1);
    options->empty_caches(options->context);
    st = pli_nccl_alloc(options->library, options->backend, options->n_bytes, out);
    if (st == PL_ENOMEM) {
        const message first = keep_message();
        st = pli_fail(st, "%s, after torch.cuda.empty_cache()", first.text);
    }
    return st;
}

static pl_status make_block(pli_pool *pool, pli_block **out)
{
    pl_status st = PL_OK;
    pli_block *made = NULL;
    PL_TRY(pli_calloc(1, sizeof *made, "a block of gradients", &made));
    PL_TRY(alloc_memory(&pool->options, &made->memory));
    made->ref.release = release;
    made->pool = pool;
    made->n_users = 1;
    atomic_fetch_add(&pool->n_refs, 1);
    (void)pthread_mutex_lock(&pool->lock);
    push(&pool->blocks, made);
    (void)pthread_mutex_unlock(&pool->lock);
    *out = made;
    made = NULL;
done:
    pli_free(made);
    return st;
}

pl_status pli_pool_take(pli_pool *pool, pli_block **out)
{
    pl_status st = PL_OK;
    pli_block *block = take_spare(pool);
    if (block == NULL)
        PL_TRY(make_block(pool, &block));
    *out = block;
done:
    return st;
}

/* ---- giving back ---------------------------------------------------------------- */

void pli_pool_discard(pli_pool *pool, pli_block *block)
{
    (void)pthread_mutex_lock(&pool->lock);
    unlink_locked(pool, block);
    (void)pthread_mutex_unlock(&pool->lock);
    push(&pool->retired, block);
    pool->retired = free_list(pool->retired, NULL, 0);
}

/* Takes all spares but `n_kept` out of the list. */
static pli_block *cut_spares_locked(pli_pool *pool, int n_kept)
{
    pli_block *cut = NULL;
    for (pli_block **at = &pool->blocks; *at != NULL;) {
        pli_block *block = *at;
        if (block->n_users > 0 || n_kept-- > 0) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        block->next = cut;
        cut = block;
    }
    return cut;
}

void pli_pool_trim(pli_pool *pool, pli_nccl *nccl)
{
    (void)pthread_mutex_lock(&pool->lock);
    pli_block *cut = cut_spares_locked(pool, 1);
    (void)pthread_mutex_unlock(&pool->lock);
    push_all(&pool->retired, cut);
    pool->retired = free_list(pool->retired, nccl, 0);
    free_leftovers(pool->options.backend, 0);
}

int pli_pool_await(pli_pool *pool)
{
    pli_block nothing = {.pool = pool};
    const message kept = keep_message();
    const int is_done = await(&nothing) == THROUGH;
    drop_marks(&nothing);
    restore_message(&kept);
    return is_done;
}

static void deregister_list(pli_block *list, pli_nccl *nccl)
{
    for (; list != NULL; list = list->next) {
        pli_nccl_deregister(nccl, list->handle);
        list->handle = NULL;
    }
}

void pli_pool_deregister(pli_pool *pool, pli_nccl *nccl)
{
    /* While the world lives, only its thread adds or removes blocks. */
    deregister_list(pool->blocks, nccl);
    deregister_list(pool->retired, nccl);
}

void pli_pool_hold(pli_pool *pool)
{
    if (pool == NULL)
        return;
    atomic_fetch_add(&pool->n_refs, 1);
    atomic_store(&pool->is_held, 1);
}

void pli_pool_let_go(void *context)
{
    pli_pool *pool = context;
    if (pool == NULL)
        return;
    atomic_store(&pool->is_held, 0);
    free_leftovers(pool->options.backend, 1);
    drop(pool);
}

void pli_pool_close(pli_pool *pool)
{
    if (pool == NULL)
        return;
    if (pool->owner_pid != getpid())
        return; /* the memory belongs to the parent */
    (void)pthread_mutex_lock(&pool->lock);
    pool->is_closed = 1;
    pli_block *list = cut_spares_locked(pool, 0);
    (void)pthread_mutex_unlock(&pool->lock);
    push_all(&list, pool->retired);
    pool->retired = NULL;
    mark_all(list);
    leave_over(list);
    free_leftovers(pool->options.backend, 1);
    drop(pool);
}
