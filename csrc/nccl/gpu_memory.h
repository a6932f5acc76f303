/* gpu_memory.h - the gradients' memory on a device, and the references to it.
 *
 * A world uses one block.  The user's views hold references to their block; if some
 * remain when the world must write there, it takes another block
 * (pli_device_ops.renew).  A block without references is kept as a spare.  While the
 * world lives, dropping a reference calls no function of the device, so any thread may
 * do it at any time; afterwards the last drop frees the block.
 *
 *     in use -> kept as a spare -> retired -> deregistered and freed
 *
 * Neither NCCL nor the driver waits for device work on memory that is deregistered or
 * freed, and during a capture no thread may wait for the whole device.  So a retired
 * block gets events on the side stream, the default stream, and the streams that last
 * waited for an operation; it is freed once these are done.  If that cannot be known
 * now, because such a stream is being captured or is slow, or because NCCL has not
 * ended the communicator, the block stays in a list, and the next call that allocates,
 * renews or ends a world frees it.
 */
#ifndef PLI_GPU_MEMORY_H
#define PLI_GPU_MEMORY_H

#include <stdatomic.h>

#include "nccl.h"

/* As many as torch makes for a device; of more, the newest are kept. */
enum { PLI_POOL_READERS = 32, PLI_POOL_MARKS = PLI_POOL_READERS + 2 };

typedef struct pli_block {
    pli_memory_ref ref;
    struct pli_pool *pool;
    struct pli_block *next; /* in its list */
    pli_nccl_memory memory;
    int n_users;                     /* under the pool's lock; 0: a spare, or retired */
    void *handle;                    /* NCCL's; NULL: not registered */
    pl_event *marks[PLI_POOL_MARKS]; /* of a retired block: after all that touches it */
    int n_marks;                     /* 0: not recorded yet */
} pli_block;

typedef struct pli_pool pli_pool;

typedef struct pli_pool_options {
    pli_nccl_library *library; /* may be NULL; retained, as is the backend */
    pl_backend *backend;
    size_t n_bytes; /* of a block */
    /* Makes other allocators free their unused device memory.  Called once when an
     * allocation fails, before the second try.  May be NULL. */
    void (*empty_caches)(void *context);
    void *context; /* borrowed until closed */
} pli_pool_options;

pl_status pli_pool_create(const pli_pool_options *options, pli_pool **out) PL_MUST_USE;

/* Takes a spare block, or makes one; with one reference. */
pl_status pli_pool_take(pli_pool *pool, pli_block **out) PL_MUST_USE;

/* Work on `stream` from now on may touch the world's block. */
void pli_pool_add_reader(pli_pool *pool, pl_stream *stream);

/* Retires a block to which only the caller has a reference. */
void pli_pool_discard(pli_pool *pool, pli_block *block);

/* Retires all spares but one, and frees retired blocks that the device is done with. */
void pli_pool_trim(pli_pool *pool, pli_nccl *nccl);

/* Waits a limited time for all device work that may touch the memory; 0 if it has not
 * finished, or a stream is being captured. */
int pli_pool_await(pli_pool *pool);

/* Deregisters all blocks: the communicator ends. */
void pli_pool_deregister(pli_pool *pool, pli_nccl *nccl);

/* Frees none of the memory until pli_pool_let_go(), which any thread may call, also
 * after the pool was closed.  NULL is allowed. */
void pli_pool_hold(pli_pool *pool);
void pli_pool_let_go(void *pool);

/* The world is destroyed.  NULL is allowed. */
void pli_pool_close(pli_pool *pool);

pli_memory_ref *pli_block_retain(pli_block *block);

/* Whether there is a reference beside the world's. */
int pli_block_is_shared(pli_block *block);

#endif
