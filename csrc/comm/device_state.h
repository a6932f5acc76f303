/* device_state.h - what a device world is made of; for device*.c alone. */
#ifndef PLI_DEVICE_STATE_H
#define PLI_DEVICE_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "device.h"
#include "device_follow.h"
#include "device_memory.h"

enum { PLI_DEVICE_TEXT_BYTES = 768 };

typedef enum pli_device_phase {
    PLI_DEVICE_RUNNING,
    PLI_DEVICE_FAILED
} pli_device_phase;

/* The rank's thread changes it all; what the watchdog and who aborts touch too says so.
 */
typedef struct pli_device {
    pl_comm super;
    pl_comm *base;
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

    uint32_t hash; /* of all device operations since the world began */
    _Atomic uint64_t step;
    pli_follow follow;      /* any thread asks */
    pl_event *captured;     /* behind the last operation that was captured */
    atomic_int is_captured; /* there was one */
    int64_t gone_since_ns;  /* the watchdog's: 0: every rank was there */
    pl_event *drained;      /* behind the last of a failed step */
    pl_event *last;         /* behind the last operation; NULL: there was none */

    pthread_mutex_t lock;  /* round the end of a step, and of all below */
    atomic_int phase;      /* pli_device_phase; read without the lock */
    uint64_t generation;   /* of the communicator */
    pli_nccl *nccl;        /* NULL: a world of one, or none yet */
    pl_ticket base_ticket; /* of the base's last operation */
    uint64_t n_at_ticket;  /* device operations before that */
    uint64_t n_agreed;     /* ... of which every rank has said that it has enqueued
                              them: those of steps that are over */
    int is_lost;           /* one of these was not done: the ranks may differ */
    pl_status failure;     /* PL_OK: the base knows more */
    char words[PLI_DEVICE_TEXT_BYTES];
} pli_device;

/* ---- device_meet.c --------------------------------------------------------------- */

/* Collective: `own` is what this rank has to say so far.  Returns its failure, else
 * that of the first other rank, in its words. */
pl_status pli_device_agree(pli_device *self, pl_status own) PL_MUST_USE;

/* Collective: makes the communicator, and tells it of the memory. */
pl_status pli_device_meet(pli_device *self) PL_MUST_USE;

/* ---- device_fail.c --------------------------------------------------------------- */

/* Ends the step of `generation`, unless it has ended: here at once, and by the base on
 * the other ranks.  Any thread may call.  `st`: with this thread's last words; PL_OK:
 * the base has failed already, and knows why. */
void pli_device_fail(pli_device *self, uint64_t generation, pl_status st);

/* The base's last operation is done everywhere: the step is over. */
void pli_device_agreed_locked(pli_device *self);

/* PL_OK, or why the means of what was issued so far will never be there. */
pl_status pli_device_check_means(pli_device *self) PL_MUST_USE;

/* Waits for the operations of steps that are over; 0 where some never end. */
int pli_device_drain(pli_device *self);

/* What another rank has failed of is a better reason than `st`: that, or PL_OK where
 * the base knows of none. */
pl_status pli_device_ask_base(const pli_device *self, pl_status st) PL_MUST_USE;

/* PL_OK, or why the step has ended. */
pl_status pli_device_check(pli_device *self) PL_MUST_USE;

/* What the base has answered: fails the step where it is over, and tells why. */
pl_status pli_device_after(pli_device *self, pl_status st) PL_MUST_USE;

/* Of the watchdog. */
void pli_device_watch(void *context);

pl_status pli_device_recover(pl_comm *comm, int64_t slice_ns,
                             pl_recovery *out) PL_MUST_USE;

/* ---- device_sum.c ---------------------------------------------------------------- */

/* Bytes of staging for ranges of up to n_bytes. */
size_t pli_device_staging_bytes(int world_size, size_t n_bytes);

/* An all-reduce of 16-bit floats, in rank order and in float32. */
pl_status pli_device_sum(pli_device *self, const pl_op *op, char *memory) PL_MUST_USE;

#endif
