/* gpu_memory.h - the gradients' memory on a device, and who still sees it.
 *
 * A world has one block of it.  The user's views have references to the block that they
 * lie in; where some still do when the world wants to write there, it takes another
 * block (pl_comm_ops.renew).  A block whose last reference was dropped is kept for the
 * next that is wanted: dropping one calls nothing of the device's, so any thread may do
 * it at any time.  Only once the world has gone is a block freed at once.
 */
#ifndef PLI_GPU_MEMORY_H
#define PLI_GPU_MEMORY_H

#include <stdatomic.h>

#include "nccl.h"

typedef struct pli_block {
    pli_memory_ref ref;
    struct pli_pool *pool;
    struct pli_block *next; /* of the pool's */
    pli_nccl_memory memory;
    int n_users;  /* under the pool's lock; 0: put aside */
    void *handle; /* NCCL's; NULL: it does not know of this memory */
} pli_block;

typedef struct pli_pool pli_pool;

/* Blocks of n_bytes.  library may be NULL; both are retained. */
pl_status pli_pool_create(pli_nccl_library *library, pl_backend *backend,
                          size_t n_bytes, pli_pool **out) PL_MUST_USE;

/* A block that was put aside, or a new one, with one share. */
pl_status pli_pool_take(pli_pool *pool, pli_block **out) PL_MUST_USE;

/* Frees a block of which nobody else has a share. */
void pli_pool_discard(pli_pool *pool, pli_block *block);

/* Frees what was put aside, but one. */
void pli_pool_trim(pli_pool *pool, pli_nccl *nccl);

/* The communicator ends: what it knows of, it forgets.  NULL: it has ended. */
void pli_pool_deregister(pli_pool *pool, pli_nccl *nccl);

/* The world has gone.  NULL is allowed. */
void pli_pool_close(pli_pool *pool);

pli_memory_ref *pli_block_retain(pli_block *block);

#endif
