/* state.h - what the files of the fake share.
 *
 * One lock guards all.  A public function begins with FAKE_CALL, which takes the lock,
 * counts the call, and returns if a failure was ordered; it ends with fk_leave(), which
 * lets the schedule execute operations and releases the lock.  Objects that a program
 * has destroyed are kept until fake_reset(), to detect their further use.
 */
#ifndef FAKE_STATE_H
#define FAKE_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

enum { FK_SLOTS = 4 }; /* per device; a kernel takes one while it is executed */
enum { FK_MAX_DEVICES = 16, FK_MAX_RANKS = 16, FK_MAX_CONTEXTS = 32 };

typedef struct fk_op fk_op;
typedef struct fk_launch fk_launch;
typedef struct fk_capture fk_capture;
typedef struct fk_world fk_world;

/* The streams' clocks: fake_order.c.  Those of many streams share a lane. */
enum { FK_LANES = 64, FK_GRAPH_LANE = FK_LANES - 1 };

typedef struct fk_clock {
    uint64_t times[FK_LANES];
} fk_clock;

typedef struct fk_list {
    fk_op **ops;
    size_t n, room;
} fk_list;

/* Kinds that are not counted. */
enum { FK_FUNCTION = FAKE_N_KINDS, FK_CAPTURE };

/* Every object begins with this. */
typedef struct fk_object {
    struct fk_object *next; /* in the list of all, dead ones too */
    int kind;               /* fake_kind */
    int is_dead;
    int id;
} fk_object;

struct CUstream_st {
    fk_object object;
    int device;
    unsigned flags;
    int lane;
    fk_op *tail; /* the newest operation; counted */
    fk_capture *capture;
    fk_op *node; /* the newest in the capture; counted */
};

struct CUctx_st {
    int device;
    int n_retained;
    struct CUstream_st legacy;
    int n_slots_taken;
    int64_t n_bytes;  /* of live allocations */
    unsigned peers;   /* bits: devices with accessible memory */
    unsigned strange; /* bits: devices that never give access */
    int64_t sent_bytes[FK_MAX_DEVICES];
};

struct CUevent_st {
    fk_object object;
    int device;
    unsigned flags;
    fk_op *record; /* the newest; NULL: never recorded */
};

struct fk_capture {
    fk_object object;
    int mode;
    int status; /* CU_STREAM_CAPTURE_STATUS_NONE: it has ended */
    CUstream origin;
    const void *thread;
    fk_list nodes;   /* counted; each after those that it waits for */
    char reason[64]; /* why it was invalidated */
};

typedef struct fk_kernel {
    struct fk_kernel *next;
    char name[96];
    size_t n_args;
    const size_t *arg_bytes;
    fake_kernel_fn run;
    int is_ours; /* of csrc/backend/kernels.cu */
} fk_kernel;

struct CUmod_st {
    fk_object object;
    int device;
};

struct CUfunc_st {
    fk_object object;
    CUmodule module;
    const fk_kernel *kernel;
};

typedef enum fk_op_kind {
    FK_MARK, /* a record or a wait: only an order */
    FK_KERNEL,
    FK_COPY,
    FK_FILL,
    FK_LAUNCH, /* NCCL's */
} fk_op_kind;

typedef enum fk_op_state { FK_QUEUED, FK_RESIDENT, FK_DONE } fk_op_state;

/* A node of a capture stays FK_QUEUED. */
struct fk_op {
    fk_op *next, *previous; /* in the order of issue, while it is not done */
    int n_refs;
    fk_op_kind kind;
    fk_op_state state;
    int is_submitted;
    int is_needed; /* the host waits for it, or for what waits for it */
    int n_queries;
    fk_capture *capture; /* a node of its graph; NULL: it is executed */
    int node;            /* its number there */
    int device;
    int id;
    int stream_id;
    int lane;
    fk_clock clock;     /* what it comes after, itself included */
    int event_id;       /* of a record or a wait */
    const char *what;   /* the call that enqueued it */
    fk_list deps;       /* counted; what it waits for, or did */
    fk_list dependents; /* what waits for it */
    size_t n_waits;     /* of deps, those that are not done */
    union {
        struct {
            const fk_kernel *kernel;
            unsigned grid[3], block[3];
            char *args; /* one after the other, each aligned to 16 bytes */
        };
        struct {
            char *to;
            const char *from; /* NULL: `staged` */
            char *staged;
            size_t n_bytes;
            int value;
            int is_to_device, is_from_device, is_corrupt;
        };
        fk_launch *launch;
    };
};

typedef struct fk_failure {
    int nth; /* count at which it fails; 0: free */
    int code;
} fk_failure;

typedef struct fk_function {
    const char *name;
    int n_calls;
    int is_hidden;
    fk_failure failures[8];
} fk_function;

typedef struct fk_state {
    pthread_mutex_t lock;
    pthread_cond_t moved; /* something was enqueued, executed or aborted */
    fake_options options;
    uint64_t draw;
    int is_forked;    /* in a child, after the parent's cuInit */
    uint64_t resting; /* bits: streams that rest for now */
    int n_lanes;
    uint64_t ticks[FK_LANES];
    fk_clock host; /* what the host has waited for */
    int is_initialized;
    int is_stuck; /* something that never comes was reported */
    int sticky;   /* a kernel has failed: the result of all later calls */
    int n_let_go; /* calls of fake_let_go() */
    int n_connections;
    int n_ids;
    struct CUctx_st contexts[FK_MAX_DEVICES];
    fk_object *objects;
    int n_live[FAKE_N_KINDS];
    fk_op *first, *last; /* operations that are not done */
    fk_list ready;       /* those of them that wait for nothing */
    fk_list residents;
    int n_pending;
    fk_kernel *kernels;
    fk_world *worlds;
    uint64_t generation; /* of fake_reset() */
} fk_state;

extern fk_state fk;

/* ---- fake_control.c ------------------------------------------------------------- */

int fk_enter(const char *function); /* takes the lock if it returns 0 */
int fk_leave(int result);
#define FAKE_CALL(name)                                                                \
    do {                                                                               \
        const int fault = fk_enter(#name);                                             \
        if (fault != 0)                                                                \
            return fault;                                                              \
    } while (0)

/* Leaves the public function if a part of it has failed, with that result. */
#define FAKE_TRY(call)                                                                 \
    do {                                                                               \
        const int failed = (call);                                                     \
        if (failed != 0)                                                               \
            return fk_leave(failed);                                                   \
    } while (0)

/* Defines a function for tests that does or returns one thing under the lock. */
#define FAKE_GETTER(type, function, parameters, value)                                 \
    type function parameters                                                           \
    {                                                                                  \
        (void)pthread_mutex_lock(&fk.lock);                                            \
        const type found = (value);                                                    \
        (void)pthread_mutex_unlock(&fk.lock);                                          \
        return found;                                                                  \
    }

uint64_t fk_draw(void);
unsigned fk_below(unsigned n);
void fk_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
void *fk_new(size_t n_bytes); /* zeros; ends the process if there is no memory */
void fk_object_add(fk_object *object, int kind);
void fk_object_kill(fk_object *object);
int fk_is_hidden(const char *function);

/* ---- fake_driver.c -------------------------------------------------------------- */

CUcontext fk_current(void); /* NULL: none; of this thread */
int fk_need_context(CUcontext *out);
/* Whether kernels on `device` may touch the other's memory. */
int fk_has_access(int device, int other);
int fk_is_shared(const void *at);
/* Whether copies between them arrive wrong. */
int fk_is_corrupt(int device, int other);

/* ---- fake_memory.c -------------------------------------------------------------- */

/* Whether a range lies within one live allocation; reports an error if not. */
int fk_check_range(const void *at, size_t n_bytes, const char *what);
int fk_check_copy(const fk_op *op);
int fk_device_of(const void *memory); /* -1: not device memory */
int fk_owner_of(const void *at);      /* of allocated memory; -1: not allocated */
int fk_is_pinned(const void *at);
void fk_pin(void *memory, size_t n_bytes, int is_ours);
int fk_unpin(void *memory, int is_ours);
int fk_alloc(int device, size_t n_bytes, void **out);
int fk_free(void *memory);
/* An operation that is not done and touches the allocation; NULL if there is none. */
const fk_op *fk_in_flight(const void *memory);
/* The i-th address of device memory that an operation names; 0: there are fewer. */
int fk_op_address(const fk_op *op, size_t i, const void **out);
int fk_op_touches(const fk_op *op, const char *low, const char *high);
void fk_memory_open(void); /* while operations are executed */
void fk_memory_close(void);
void fk_memory_reset(void);

/* ---- fake_order.c --------------------------------------------------------------- */

void fk_clock_follow(fk_op *op, const fk_op *on);
void fk_clock_submit(fk_op *op); /* it gets its time, and its uses are noted */
void fk_clock_host_follows(const fk_op *op);
void fk_clock_host_follows_device(int device);
void fk_clock_reset(void);

/* ---- fake_torch.c --------------------------------------------------------------- */

void fk_torch_reuse(void); /* what is freed, and done with */
void fk_torch_reset(void);

/* ---- fake_module.c -------------------------------------------------------------- */

size_t fk_args_bytes(const fk_kernel *kernel);
int fk_kernel_may_run(const fk_op *op);
void fk_kernel_check(const fk_op *op); /* checks its execution */
int fk_kernel_address(const fk_op *op, size_t i, const void **out);

/* A kernel needs one, and an NCCL launch until its peers have come. */
static inline int fk_slots_needed(const fk_op *op)
{
    return op->kind == FK_KERNEL || op->kind == FK_LAUNCH;
}

/* ---- fake_schedule.c ------------------------------------------------------------ */

void fk_moved(void); /* wakes waiting threads */
fk_op *fk_op_new(fk_op_kind kind, int device, const char *what);
void fk_op_depend(fk_op *op, fk_op *on);
fk_op *fk_op_hold(fk_op *op);
void fk_op_drop(fk_op *op);   /* NULL is fine */
void fk_op_submit(fk_op *op); /* it may be executed from now on; takes the reference */
void fk_op_done(fk_op *op);
int fk_poll_residents(void);
int fk_run_one(int only_needed); /* 0: nothing can be executed */
void fk_run_some(void);          /* by the schedule, at the end of a call */
void fk_run_at_random(unsigned n);
void fk_need(fk_op *op); /* marks it and all that it waits for */
void fk_need_residents(void);
void fk_list_add(fk_list *list, fk_op *op);
void fk_list_remove(fk_list *list, const fk_op *op);
void fk_list_free(fk_list *list);
void fk_schedule_reset(void);
void fk_print_queues(void);

/* ---- fake_wait.c ---------------------------------------------------------------- */

int fk_wait_for(fk_op *op, const char *who); /* until done; 702: it never can be */
int fk_wait_stream(CUstream stream, const char *who);
int fk_wait_device(int device, const char *who);
int fk_query(fk_op *op); /* NULL: done */
/* Waits a little for other threads; 0 if `since` is longer ago than the patience. */
int fk_pause(int64_t since);
int64_t fk_now(void);

/* ---- fake_pump.c ---------------------------------------------------------------- */

void fk_pump_start(void);
void fk_pump_stop(void); /* without the lock */

/* ---- fake_hide.c ---------------------------------------------------------------- */

void fk_hide_symbol(const char *name);
void fk_hide_newer(int driver, int nccl);
void fk_unhide_all(void);

/* ---- fake_stream.c -------------------------------------------------------------- */

/* The stream of a handle; if that is NULL, of the current context. */
int fk_stream(CUstream handle, CUstream *out);
void fk_stream_init(CUstream stream, int device, unsigned flags);
fk_op *fk_stream_next(CUstream stream); /* an operation that comes next there */
/* Puts it into the stream, in CUDA's order, or into its capture; takes the caller's
 * reference, also on failure. */
int fk_enqueue(fk_op *op, CUstream stream);

/* ---- fake_capture.c ------------------------------------------------------------- */

/* Fails if a capture of this or another thread forbids the call; invalidates it. */
int fk_forbid_unsafe(const char *who);
int fk_forbid_captured(CUstream stream, const char *who);
int fk_forbid_captured_event(CUevent event, const char *who);
int fk_forbid_implicit(CUstream stream, const char *who);
int fk_forbid_beside_captures(int device, const char *who);
int fk_capture_take(fk_op *op, CUstream stream);
/* A stream is about to wait for `on`: may spread a capture to it. */
int fk_join_capture(CUstream stream, const fk_op *on);
void fk_capture_reset(void);

/* ---- fake_graph.c --------------------------------------------------------------- */

void fk_nodes_drop(fk_list *nodes);
CUgraph fk_graph_new(const fk_list *nodes);
void fk_graph_reset(void);

/* ---- fake_nccl_*.c -------------------------------------------------------------- */

void fk_launch_begin(fk_op *op); /* becomes resident */
int fk_launch_address(const fk_op *op, size_t i, const void **out);
int fk_launch_poll(fk_op *op); /* 1 if a part has come: it may be done now */
void fk_launch_done(fk_op *op);
void fk_launch_need(const fk_op *op, fk_list *list); /* marks its peers' */
void fk_launch_number(fk_op *op);
void fk_launch_free(fk_launch *launch);
int fk_launch_is_wanted(const fk_op *op); /* by another process */
/* Sends the oldest post of a proxy, the waiting device's own last; 0: there is none. */
int fk_proxy_step(int waiting_device);
void fk_proxy_some(void); /* by the schedule */
fk_launch *fk_launch_clone(const fk_launch *launch);
void fk_launch_check(const fk_op *op); /* its communicator must still exist */
void fk_launch_print(const fk_op *op, FILE *to);
void fk_launch_count_graph(const fk_op *op, int by); /* graphs that hold it */
void fk_nccl_reset(void);

#endif
