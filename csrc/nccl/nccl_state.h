/* nccl_state.h - the state of a communicator; for nccl*.c only. */
#ifndef PLI_NCCL_STATE_H
#define PLI_NCCL_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "core/clock.h"
#include "nccl.h"

struct pli_nccl {
    const pli_nccl_library *library;
    pl_backend *backend;
    int rank;
    int world_size;
    int64_t deadline_ns;
    pid_t owner_pid;
    pthread_mutex_t lock;        /* held during each call */
    _Atomic(pli_nccl_comm) comm; /* NULL: not made, or aborted; an abort may not have
                                    the lock */
    _Atomic uint64_t n_calls;    /* begun */
    uint64_t n_checked;          /* pli_nccl_check()'s: the call that it last saw */
    pli_stopwatch inside;        /* ... since it saw that call begun */
    atomic_int is_captured;      /* a graph may hold its operations */
};

/* Turns NCCL's result into a status, with NCCL's own text in the message. */
pl_status pli_nccl_fail(const pli_nccl_library *library, pli_nccl_comm comm,
                        pli_nccl_result result, const char *doing);

#endif
