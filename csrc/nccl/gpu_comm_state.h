/* gpu_comm_state.h - the state of a GPU world; for gpu_*.c only. */
#ifndef PLI_GPU_COMM_STATE_H
#define PLI_GPU_COMM_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "gpu_comm.h"
#include "gpu_inflight.h"

enum { PLI_GPU_MESSAGE_BYTES = 768 };
enum { PLI_GPU_STREAMS = 32 }; /* as many as torch makes for a device */

typedef enum pli_gpu_comm_phase { PLI_GPU_RUNNING, PLI_GPU_FAILED } pli_gpu_comm_phase;

/* Whether operations are captured into a graph.  A step captures all its operations up
 * to its first agreement, or none, so the driver is queried once per step, and outside
 * of steps for each operation. */
typedef enum pli_gpu_capture {
    PLI_GPU_CAPTURE_VARIES,  /* no step is under way */
    PLI_GPU_CAPTURE_UNKNOWN, /* a step has begun */
    PLI_GPU_CAPTURE_OFF,
    PLI_GPU_CAPTURE_ON,
} pli_gpu_capture;

/* Former memory of the world, which graphs of the user may write. */
typedef struct pli_replayed {
    struct pli_replayed *next;
    void *owner;
} pli_replayed;

/* The rank's thread changes all fields; comments mark those other threads touch. */
typedef struct pli_gpu_comm {
    pl_comm super;
    pl_backend *backend;
    pl_stream *side;
    pli_nccl_library *library; /* NULL: a world of one rank */
    pli_watchdog *watchdog;    /* NULL: none, or not joined */
    int64_t deadline_ns;
    int (*is_interrupted)(void *context); /* NULL: never */
    void (*report_loss)(void *context, const char *message);
    void *context;
    pid_t owner_pid;

    pli_device_allocator allocator;
    pl_stream *recorded[PLI_GPU_STREAMS]; /* with the memory; the last ones */
    size_t n_recorded;
    int is_replayed;        /* an operation on the memory was captured */
    pli_replayed *replayed; /* until the world ends */
    int is_left;            /* a helper thread that uses this world was left behind */

    uint64_t hash; /* of all device operations */
    _Atomic uint64_t step;
    pli_inflight inflight; /* any thread queries */
    pli_gpu_capture capture;
    pl_event *captured;     /* after the last captured operation */
    atomic_int is_captured; /* an operation was captured */
    pli_stopwatch gone;     /* the watchdog's: since a rank is gone */
    pl_event *drained;      /* after a trial */
    pl_event *last;         /* after the last operation; NULL: none yet */

    pthread_mutex_t lock;  /* guards the end of a step, and all fields below */
    atomic_int phase;      /* pli_gpu_comm_phase; read without the lock */
    pli_nccl *nccl;        /* NULL: a world of one rank, or none yet */
    int is_given_up;       /* the rank's thread aborts `nccl`, and reports why */
    pl_ticket base_ticket; /* of the base's latest operation */
    uint64_t n_at_ticket;  /* device operations before it */
    uint64_t n_agreed; /* device operations of finished steps: every rank has enqueued
                          them */
    int is_lost;       /* one of these did not finish: the ranks may differ */
    pl_status failure; /* PL_OK: the base has the reason */
    char message[PLI_GPU_MESSAGE_BYTES];
} pli_gpu_comm;

/* ---- gpu_comm.c ----------------------------------------------------------------- */

/* Collective: `own` is this rank's status so far.  Returns it if it is a failure, else
 * the first failure of another rank, with its message. */
pl_status pli_gpu_comm_agree(pli_gpu_comm *self, pl_status own) PL_MUST_USE;

/* A poll for waits outside the base: signals and peers.  context: a pli_gpu_comm. */
pl_status pli_gpu_comm_poll_base(void *context) PL_MUST_USE;

/* The watchdog's check.  context: a pli_gpu_comm. */
void pli_gpu_comm_watch(void *context);

/* ---- gpu_comm_trial.c ----------------------------------------------------------- */

/* Tries the operations that every world uses, with the new communicator. */
pl_status pli_gpu_comm_try(pli_gpu_comm *self) PL_MUST_USE;

/* Tries means in the range, after the event `ready`. */
pl_status pli_gpu_comm_try_means(pli_gpu_comm *self, const pli_reduced_range *range,
                                 pl_event *ready) PL_MUST_USE;

#endif
