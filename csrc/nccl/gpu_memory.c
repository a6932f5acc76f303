/* gpu_memory.c - blocks in a list, under a lock. */
#include "gpu_memory.h"

#include <pthread.h>
#include <unistd.h>

#include "backend/cuda.h"
#include "core/alloc.h"

struct pli_pool {
    pthread_mutex_t lock;
    pli_nccl_library *library;
    pl_backend *backend;
    size_t n_bytes;
    pid_t owner_pid;
    atomic_int n_refs; /* the world's, and each block's */
    int is_closed;
    pli_block *blocks; /* all there are */
};

pl_status pli_pool_create(pli_nccl_library *library, pl_backend *backend,
                          size_t n_bytes, pli_pool **out)
{
    pl_status st = PL_OK;
    pli_pool *pool = NULL;
    PL_TRY(pli_calloc(1, sizeof *pool, "gradients' memory", &pool));
    (void)pthread_mutex_init(&pool->lock, NULL); /* cannot fail on Linux */
    pool->library = library;
    if (library != NULL)
        pli_nccl_library_retain(library);
    pool->backend = backend;
    pli_cuda_backend_retain(backend);
    pool->n_bytes = n_bytes;
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
    pli_backend_destroy(pool->backend);
    pli_nccl_library_release(pool->library);
    (void)pthread_mutex_destroy(&pool->lock);
    pli_free(pool);
}

/* One that is in the list no more. */
static void free_block(pli_block *block)
{
    pli_pool *pool = block->pool;
    pli_nccl_free(pool->library, pool->backend, &block->memory);
    pli_free(block);
    drop(pool);
}

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
        return; /* the lock may be held by a thread that is not here */
    (void)pthread_mutex_lock(&pool->lock);
    const int is_last = --block->n_users == 0 && pool->is_closed;
    if (is_last)
        unlink_locked(pool, block);
    (void)pthread_mutex_unlock(&pool->lock);
    if (is_last)
        free_block(block);
}

pli_memory_ref *pli_block_retain(pli_block *block)
{
    (void)pthread_mutex_lock(&block->pool->lock);
    block->n_users++;
    (void)pthread_mutex_unlock(&block->pool->lock);
    return &block->ref;
}

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

pl_status pli_pool_take(pli_pool *pool, pli_block **out)
{
    pl_status st = PL_OK;
    pli_block *made = NULL;
    pli_block *block = take_spare(pool);
    if (block == NULL) {
        PL_TRY(pli_calloc(1, sizeof *made, "a block of gradients", &made));
        PL_TRY(
            pli_nccl_alloc(pool->library, pool->backend, pool->n_bytes, &made->memory));
        made->ref.release = release;
        made->pool = pool;
        made->n_users = 1;
        atomic_fetch_add(&pool->n_refs, 1);
        (void)pthread_mutex_lock(&pool->lock);
        made->next = pool->blocks;
        pool->blocks = made;
        (void)pthread_mutex_unlock(&pool->lock);
        block = made;
        made = NULL;
    }
    *out = block;
done:
    pli_free(made);
    return st;
}

void pli_pool_discard(pli_pool *pool, pli_block *block)
{
    (void)pthread_mutex_lock(&pool->lock);
    unlink_locked(pool, block);
    (void)pthread_mutex_unlock(&pool->lock);
    free_block(block);
}

/* Takes what is put aside, but `n_kept`, out of the list. */
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

static void free_list(pli_nccl *nccl, pli_block *list)
{
    while (list != NULL) {
        pli_block *next = list->next;
        pli_nccl_deregister(nccl, list->handle);
        free_block(list);
        list = next;
    }
}

void pli_pool_trim(pli_pool *pool, pli_nccl *nccl)
{
    (void)pthread_mutex_lock(&pool->lock);
    pli_block *cut = cut_spares_locked(pool, 1);
    (void)pthread_mutex_unlock(&pool->lock);
    free_list(nccl, cut);
}

void pli_pool_deregister(pli_pool *pool, pli_nccl *nccl)
{
    /* Blocks come and go in the world's own thread alone while it is there. */
    for (pli_block *block = pool->blocks; block != NULL; block = block->next) {
        pli_nccl_deregister(nccl, block->handle);
        block->handle = NULL;
    }
}

void pli_pool_close(pli_pool *pool)
{
    if (pool == NULL)
        return;
    if (pool->owner_pid != getpid())
        return; /* what its parent has stays the parent's */
    (void)pthread_mutex_lock(&pool->lock);
    pool->is_closed = 1;
    pli_block *cut = cut_spares_locked(pool, 0);
    (void)pthread_mutex_unlock(&pool->lock);
    free_list(NULL, cut);
    drop(pool);
}
