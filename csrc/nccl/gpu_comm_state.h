/* gpu_comm_state.h - what a GPU world is made of; for gpu_*.c alone. */
#ifndef PLI_GPU_COMM_STATE_H
#define PLI_GPU_COMM_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "gpu_comm.h"
#include "gpu_inflight.h"
#include "gpu_memory.h"

enum { PLI_GPU_MESSAGE_BYTES = 768 };

typedef enum pli_gpu_comm_phase { PLI_GPU_RUNNING, PLI_GPU_FAILED } pli_gpu_comm_phase;

/* Whether operations are captured into a graph.  All of a step are, or none, up to its
 * first agreement, so that is asked once a step; elsewhere at each operation. */
typedef enum pli_gpu_capture {
    PLI_GPU_CAPTURE_VARIES,  /* no step is under way */
    PLI_GPU_CAPTURE_UNKNOWN, /* a step has begun */
    PLI_GPU_CAPTURE_OFF,
    PLI_GPU_CAPTURE_ON,
} pli_gpu_capture;

/* The rank's thread changes it all; what the watchdog and who aborts touch too says so.
 */
typedef struct pli_gpu_comm {
    pl_comm super;
    pl_backend *backend;
    pl_stream *side;
    pli_nccl_library *library; /* NULL: a world of one */
    pli_watchdog *watchdog;    /* NULL: none, or not joined */
    int64_t deadline_ns;
    pli_accumulation accumulation;
    int (*is_interrupted)(void *context); /* NULL: never */
    void *context;
    pid_t owner_pid;

    pli_pool *pool;
    pli_block *block;
    pli_nccl_memory staging; /* of sums in float32 */
    void *staging_handle;
    int is_registered; /* NCCL knows of every rank's memory */
    int is_left;       /* a helper thread was left behind, in this world */

    uint64_t hash; /* of all device operations since the world began */
    _Atomic uint64_t step;
    pli_inflight inflight; /* any thread queries */
    pli_gpu_capture capture;
    pl_event *captured;     /* behind the last operation that was captured */
    atomic_int is_captured; /* there was one */
    int64_t gone_since_ns;  /* the watchdog's: 0: every rank was there */
    pl_event *drained;      /* behind the last of a failed step, or trial,
                          or what follow() is behind */
    pl_event *last;         /* behind the last operation; NULL: there was none */

    pthread_mutex_t lock;  /* round the end of a step, and of all below */
    atomic_int phase;      /* pli_gpu_comm_phase; read without the lock */
    uint64_t generation;   /* of the communicator */
    pli_nccl *nccl;        /* NULL: a world of one, or none yet */
    int is_given_up;       /* the rank's thread ends that, and tells why */
    pl_ticket base_ticket; /* of the base's last operation */
    uint64_t n_at_ticket;  /* device operations before that */
    uint64_t n_agreed;     /* ... of which every rank has said that it has enqueued
                              them: those of steps that are over */
    int is_lost;           /* one of these was not done: the ranks may differ */
    pl_status failure;     /* PL_OK: the base knows more */
    char message[PLI_GPU_MESSAGE_BYTES];
} pli_gpu_comm;

/* ---- gpu_agree.c ---------------------------------------------------------------- */

/* The base's memory for what is said by pli_gpu_comm_talk(). */
char *pli_gpu_comm_board(const pli_gpu_comm *self);

/* Does one of the base's operations on the board's first n_bytes. */
pl_status pli_gpu_comm_talk(const pli_gpu_comm *self, pl_op_kind kind, int root,
                            size_t n_bytes) PL_MUST_USE;

/* Collective: `own` is what this rank has to say so far.  Returns its failure, else
 * that of the first other rank, with its message. */
pl_status pli_gpu_comm_agree(pli_gpu_comm *self, pl_status own) PL_MUST_USE;

/* What another rank has failed of is a better reason than `st`: that, or PL_OK where
 * the base knows of none. */
pl_status pli_gpu_comm_query_base(const pli_gpu_comm *self, pl_status st) PL_MUST_USE;

pl_status pli_gpu_comm_check_signals(const pli_gpu_comm *self) PL_MUST_USE;

/* For who waits beside the base: signals, and the peers.  context: a pli_gpu_comm. */
pl_status pli_gpu_comm_poll_base(void *context) PL_MUST_USE;

/* ---- gpu_comm_init.c ------------------------------------------------------------ */

/* Collective: makes the communicator, tells it of the memory, and tries it.  Where that
 * fails there may be one, of no use. */
pl_status pli_gpu_comm_meet(pli_gpu_comm *self) PL_MUST_USE;

/* Collective: what has come of something that all ranks are at in NCCL.  Where this
 * rank has failed the others are told, who may wait for it.  Else as agree. */
pl_status pli_gpu_comm_agree_on(pli_gpu_comm *self, pl_status st) PL_MUST_USE;

/* ---- gpu_comm_trial.c ----------------------------------------------------------- */

/* Does once what every world does, with the new communicator. */
pl_status pli_gpu_comm_try(pli_gpu_comm *self) PL_MUST_USE;

/* PL_EINVAL for what cannot be tried. */
pl_status pli_gpu_comm_check_ranges(const pli_op_range *ranges,
                                    size_t n_ranges) PL_MUST_USE;

/* Does these, behind `ready`, in the world's memory. */
pl_status pli_gpu_comm_try_ranges(pli_gpu_comm *self, const pli_op_range *ranges,
                                  size_t n_ranges, pl_event *ready) PL_MUST_USE;

/* ---- gpu_comm_fail.c ------------------------------------------------------------ */

/* Ends the step of `generation`, unless it has ended: here at once, and by the base on
 * the other ranks.  Any thread may call.  `st`: with this thread's error message;
 * PL_OK: the base has failed already, and knows why. */
void pli_gpu_comm_fail(pli_gpu_comm *self, uint64_t generation, pl_status st);

/* The base's last operation is done everywhere: the step is over. */
void pli_gpu_comm_agreed_locked(pli_gpu_comm *self);

/* PL_OK, or why the means of what was issued so far will never be there. */
pl_status pli_gpu_comm_check_means(pli_gpu_comm *self) PL_MUST_USE;

/* Waits for the operations of steps that are over; 0 where some never end. */
int pli_gpu_comm_drain(pli_gpu_comm *self);

/* PL_OK, or why the step has ended. */
pl_status pli_gpu_comm_check(pli_gpu_comm *self) PL_MUST_USE;

/* What the base has answered: fails the step where it is over, and tells why. */
pl_status pli_gpu_comm_after(pli_gpu_comm *self, pl_status st) PL_MUST_USE;

/* Of the watchdog. */
void pli_gpu_comm_watch(void *context);

pl_status pli_gpu_comm_recover(pl_comm *comm, int64_t slice_ns,
                               pl_recovery *out) PL_MUST_USE;

/* ---- gpu_ordered_sum.c ---------------------------------------------------------- */

/* Bytes of staging for ranges of up to n_bytes. */
size_t pli_gpu_comm_staging_bytes(int world_size, size_t n_bytes);

/* Enqueues an operation on the side stream. */
pl_status pli_gpu_comm_carry(pli_gpu_comm *self, const pl_op *op) PL_MUST_USE;

#endif
