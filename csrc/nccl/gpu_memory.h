/* gpu_memory.h - the gradients' memory on a device, and who still sees it.
 *
 * A world has one block of it.  The user's views have references to the block that they
 * lie in; where some still do when the world wants to write there, it takes another
 * block (pli_device_ops.renew).  A block whose last reference was dropped is kept for
 * the next that is wanted: dropping one calls nothing of the device's, so any thread
 * may do it at any time.  Once the world has gone, blocks are freed.
 *
 *     in use -> kept as a spare -> retired -> deregistered and freed
 *
 * Neither NCCL nor the driver waits for what the device still does with memory that is
 * deregistered or freed, and while anybody captures a graph nobody may wait for the
 * whole device.  So a retired block has events behind it, on the side stream, the
 * default stream, and the streams that last came behind an operation; it is freed once
 * these are done.  Where that cannot be known now, because such a stream is being
 * captured, or takes its time, the block stays in a list, and whoever next allocates,
 * renews or ends a world frees it.
 */
#ifndef PLI_GPU_MEMORY_H
#define PLI_GPU_MEMORY_H

#include <stdatomic.h>

#include "nccl.h"

/* As many as torch makes for a device: a program with more has the newest in mind. */
enum { PLI_POOL_READERS = 32, PLI_POOL_MARKS = PLI_POOL_READERS + 2 };

typedef struct pli_block {
    pli_memory_ref ref;
    struct pli_pool *pool;
    struct pli_block *next; /* of the list that it is in */
    pli_nccl_memory memory;
    int n_users;                     /* under the pool's lock; 0: a spare, or retired */
    void *handle;                    /* NCCL's; NULL: it does not know of this memory */
    pl_event *marks[PLI_POOL_MARKS]; /* of a retired one: behind all that touches it */
    int n_marks;                     /* 0: not recorded yet */
} pli_block;

typedef struct pli_pool pli_pool;

typedef struct pli_pool_options {
    pli_nccl_library *library; /* may be NULL; retained, as is the backend */
    pl_backend *backend;
    size_t n_bytes; /* of a block */
    /* Has others give back device memory that they have no use for; called once where
     * there is none left, before the second try.  NULL: nobody has any. */
    void (*empty_caches)(void *context);
    void *context; /* borrowed until closed */
} pli_pool_options;

pl_status pli_pool_create(const pli_pool_options *options, pli_pool **out) PL_MUST_USE;

/* A block that was put aside, or a new one, with one share. */
pl_status pli_pool_take(pli_pool *pool, pli_block **out) PL_MUST_USE;

/* Further memory of the world's, which lives until the pool is closed. */
pl_status pli_pool_alloc(pli_pool *pool, size_t n_bytes,
                         pli_nccl_memory *out) PL_MUST_USE;

/* What `stream` does from now on may touch the block that the world has. */
void pli_pool_add_reader(pli_pool *pool, pl_stream *stream);

/* Retires a block of which nobody else has a share. */
void pli_pool_discard(pli_pool *pool, pli_block *block);

/* Retires what was put aside, but one, and frees what the device is through with. */
void pli_pool_trim(pli_pool *pool, pli_nccl *nccl);

/* Waits, for a while, until the device is through with all that may touch the memory;
 * 0 where it is not, or a stream is being captured. */
int pli_pool_await(pli_pool *pool);

/* The communicator ends: what it knows of, it forgets.  NULL: it has ended. */
void pli_pool_deregister(pli_pool *pool, pli_nccl *nccl);

/* The world has gone.  NULL is allowed. */
void pli_pool_close(pli_pool *pool);

pli_memory_ref *pli_block_retain(pli_block *block);

/* Whether somebody beside the world still sees it. */
int pli_block_is_shared(pli_block *block);

#endif
