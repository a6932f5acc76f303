/* nccl_state.h - what a communicator is made of; for nccl*.c alone. */
#ifndef PLI_NCCL_STATE_H
#define PLI_NCCL_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "nccl.h"

struct pli_nccl {
    const pli_nccl_library *library;
    pl_backend *backend;
    int rank;
    int world_size;
    int64_t deadline_ns;
    pl_status (*poll)(void *context);
    void *context;
    pid_t owner_pid;
    pthread_mutex_t lock;        /* round each call */
    _Atomic(pli_nccl_comm) comm; /* NULL: not made, or aborted, where need be without
                                    the lock */
    _Atomic int64_t entered_ns;  /* when a call began last */
    atomic_int is_captured;      /* a graph may hold operations of it */
};

/* Whether NCCL has taken what it was asked for, be it that it is still at it. */
static inline int pli_nccl_is_taken(pli_nccl_result result)
{
    return result == PLI_NCCL_SUCCESS || result == PLI_NCCL_IN_PROGRESS;
}

/* Puts an error into a message, with NCCL's own text. */
pl_status pli_nccl_fail(const pli_nccl_library *library, pli_nccl_comm comm,
                        pli_nccl_result result, const char *doing);

/* Waits until NCCL has ended what it was called for. */
pl_status pli_nccl_await_call(pli_nccl *self, const char *doing) PL_MUST_USE;

#endif
