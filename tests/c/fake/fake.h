/* fake.h - how a test drives the fake of CUDA and NCCL.
 *
 * build/c/<flavour>/libplfake.so has the functions of libcuda and of libnccl.  The
 * library under test finds it by path: fake_path() as PACELINE_LIBCUDA and
 * PACELINE_LIBNCCL, or as an argument.  A test program that calls anything here is
 * linked with it by itself.
 *
 *     fake_options options = fake_defaults();
 *     options.seed = seed;
 *     options.schedule = FAKE_LATE;
 *     fake_reset(&options);
 *     ... cuInit(0), or pli_driver_open(fake_path(), &driver) ...
 *     CHECK(fake_errors() == 0);       what no program may do, in words
 *     CHECK(fake_live_objects() == 0); what it did not give back
 *
 * What a device does is a graph of operations, each of which waits for others: for the
 * one before it in its stream, for what an event has recorded, for what the legacy
 * default stream orders.  An operation is executed when all of these are done:
 *
 *     FAKE_EARLY   at the call that enqueues it, or that makes it possible
 *     FAKE_LATE    when something waits on the host for it, and only what it needs
 *     FAKE_RANDOM  some at the end of any call, by seed
 *
 * So a program that lacks a wait gets a wrong number in FAKE_LATE or in FAKE_RANDOM, by
 * some seed.  Driven by one thread without the pump, a seed always does the same.
 *
 * With FAKE_CUDA="seed=7,schedule=random,pump=1" in the environment these are the
 * defaults when the library is loaded: the names are those of fake_options.
 */
#ifndef FAKE_FAKE_H
#define FAKE_FAKE_H

#include "cuda_api.h"
#include "nccl_api.h"

typedef enum fake_schedule { FAKE_RANDOM, FAKE_EARLY, FAKE_LATE } fake_schedule;

typedef struct fake_options {
    uint64_t seed;
    fake_schedule schedule;
    int devices;         /* how many there are: 0 .. 16 */
    int driver;          /* cuDriverGetVersion: 13000 */
    int nccl;            /* ncclGetVersion: 22809 */
    int compute;         /* the capability: 90 */
    int slots;           /* of each device; a kernel takes one while it is executed */
    int protect;         /* 1: the host may not touch device memory */
    int pump;            /* 1: a thread executes operations at random times */
    int foreign;         /* 1: addresses that are not of device memory are fine too; 2:
                            and stand for what is mapped for one device alone */
    int64_t capacity;    /* bytes of each device */
    int64_t taken;       /* of them, by caches of other libraries (torch's); see
                            fake_empty_caches() */
    int64_t granularity; /* NCCL's memory takes multiples of it: 0, or as NCCL 2.19 to
                            2.24 where there is NVLS */
    int patience_ms;     /* how long the host waits for what nobody has enqueued */
    int polls;           /* of ncclCommGetAsyncError with ncclInProgress, at the most */
    int alloc_waits;     /* cuMemAlloc waits for the device: 0 never, 1 always, 2 by
                            seed */
    int lazy_load;       /* 1: cuModuleGetFunction waits for the device, which loads the
                            kernel then (CUDA_MODULE_LOADING) */
    int one_queue;       /* 1: what a device does begins when all that was enqueued
                            before is done (CUDA_DEVICE_MAX_CONNECTIONS=1, with room for
                            one kernel) */
    int lazy_connect; /* 1: NCCL's first operation of a kind, of a size, and of memory
                         that is registered or not, blocks the host until the peers'
                         have come */
    int64_t connect_bytes; /* ... and allocates so much on the device */
    int net;          /* 1: what an operation has sent lies with NCCL's proxy when it is
                         done, and goes on from there some time later */
    int proxy_blocks; /* calls that wait for a proxy which never answers, until the
                         communicator is aborted: 1 ncclCommDeregister, 2 Finalize */
    int abort_ms;     /* that ncclCommAbort takes, before it does anything */
    int queue_depth;  /* launches of a communicator that its device takes; the next one
                         blocks the host until one is done.  0: any number */
    int64_t corrupt_bytes; /* the last element of an all-reduce of so many, or more, is
                              wrong; 0: none is */
    int peers;         /* 1: every device can be given access to every other's memory;
                          more: they say so, and then access is refused with this error */
    int corrupt_peers; /* 1: access to a peer makes the last byte of copies between the
                          two wrong */
    int share_device;  /* 1: ranks of one communicator may share a device */
    int one_bus;       /* 1: devices are parts of one card */
    int quiet;         /* 1: errors, and why a capture is invalid, go unprinted */
    int blocking;      /* 1: the host waits for whatever it puts into the legacy default
                          stream: for tests whose tensors are the CPU's */
} fake_options;

#define FAKE_API FAKE_EXPORT

/* What fake_reset(NULL) means; the environment's at first. */
FAKE_API fake_options fake_defaults(void);

/* "name=value,..." over the defaults; 0 where a name is unknown. */
FAKE_API int fake_parse(const char *text, fake_options *out);

/* Forgets everything: objects, memory, operations that were not executed, errors,
 * counts, ordered failures.  No other thread may be in a call. */
FAKE_API void fake_reset(const fake_options *options);

/* The same with fake_parse(); for ctypes.  Returns 0 where the text is wrong. */
FAKE_API int fake_reset_text(const char *text);

/* The path of the library itself. */
FAKE_API const char *fake_path(void);

/* ---- what goes wrong ------------------------------------------------------------ */

/* The nth call from now (1: the next) of a function returns `code` and does nothing
 * else.  Names have no suffix: "cuMemAlloc".  Several may be ordered. */
FAKE_API void fake_fail(const char *function, int nth, int code);

/* Calls since fake_reset(), failed ones too. */
FAKE_API int fake_count(const char *function);

/* As if the driver, or NCCL, were too old to have the function; until fake_reset().
 * So are functions newer than options.driver or options.nccl from the beginning: a test
 * must find those as the library does, not by linking. */
FAKE_API void fake_hide(const char *function);

/* Calls that wait now for ranks which never come return an error: for threads that are
 * left behind in them. */
FAKE_API void fake_let_go(void);

/* Errors that no program may make, whatever the calls returned: host code that touches
 * device memory, operations on freed memory, a deadlock, ... */
FAKE_API int fake_errors(void);
FAKE_API const char *fake_error(int i); /* NULL past the last */
FAKE_API void fake_forget_errors(void);

/* ---- what there is -------------------------------------------------------------- */

typedef enum fake_kind {
    FAKE_CONTEXTS, /* how often primary contexts are retained */
    FAKE_STREAMS,
    FAKE_EVENTS,
    FAKE_ALLOCATIONS,
    FAKE_PINNED,
    FAKE_MODULES,
    FAKE_GRAPHS,
    FAKE_EXECS,
    FAKE_COMMS,
    FAKE_REGISTRATIONS, /* and windows */
    FAKE_N_KINDS
} fake_kind;

FAKE_API int fake_live(fake_kind kind);
FAKE_API int fake_live_objects(void); /* of all kinds */
FAKE_API int64_t fake_bytes_in_use(int device);

/* That cuMemcpyPeerAsync was asked to bring from a device to another one. */
FAKE_API int64_t fake_sent_bytes(int device, int to);

/* An allocation is from now on one that is mapped for its device alone, as torch's
 * expandable segments: peer access does not reach it. */
FAKE_API void fake_unshare(const void *memory);

/* From now on neither of the two can be given access to the other's memory. */
FAKE_API void fake_part(int device, int other);

/* Gives back what options.taken has of each device. */
FAKE_API void fake_empty_caches(void);
FAKE_API int fake_context_depth(void); /* of this thread's stack of contexts */

/* Since fake_reset(): ways between ranks that NCCL has made with options.lazy_connect,
 * and launches that it has made in threads of its own. */
FAKE_API int fake_connections(void);
FAKE_API int fake_launch_threads(void);

/* Operations that were enqueued and are not done. */
FAKE_API int fake_pending(void);

/* ---- what happens --------------------------------------------------------------- */

/* Executes all that can be; 0 where something is left that cannot.  Not a call of the
 * program under test: it is always allowed. */
FAKE_API int fake_synchronize_all(void);

/* Executes at most n operations, drawn by seed among those that can be executed. */
FAKE_API int fake_step(int n);

/* The operations in flight are at rest, and the host may touch device memory until
 * fake_hide_memory(): for a test that looks at numbers without a copy. */
FAKE_API void fake_show_memory(void);
FAKE_API void fake_hide_memory(void);

/* A kernel for cuModuleGetFunction(): `arg_bytes` of each of n_args arguments. */
typedef void (*fake_kernel_fn)(void *const *args, const unsigned grid[3],
                               const unsigned block[3]);
FAKE_API void fake_register_kernel(const char *name, size_t n_args,
                                   const size_t *arg_bytes, fake_kernel_fn run);

#endif
