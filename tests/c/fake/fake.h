/* fake.h - how a test drives the fake of CUDA and NCCL.
 *
 * build/c/<flavour>/libplfake.so has the functions of libcuda and of libnccl.  The
 * library under test finds it by path: fake_path() as PACELINE_LIBCUDA and
 * PACELINE_LIBNCCL, or as an argument.  A test program that calls functions of this
 * file is itself linked with it.
 *
 *     fake_options options = fake_defaults();
 *     options.seed = seed;
 *     options.schedule = FAKE_LATE;
 *     fake_reset(&options);
 *     ... cuInit(0), or pli_driver_open(fake_path(), &driver) ...
 *     CHECK(fake_errors() == 0);       errors that no program may make
 *     CHECK(fake_live_objects() == 0); objects that it did not free
 *
 * A device's work is a graph of operations, each of which waits for others: for the one
 * before it in its stream, for what an event has recorded, for what the legacy default
 * stream orders.  An operation is executed when all of these are done:
 *
 *     FAKE_EARLY   at the call that enqueues it, or that makes it possible
 *     FAKE_LATE    when the host waits for it, and only what it needs
 *     FAKE_RANDOM  some at the end of any call, by seed
 *
 * So a program that lacks a wait gets a wrong number in FAKE_LATE, or in FAKE_RANDOM
 * with some seed.  With one thread and no pump, a seed always does the same.
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
    int devices; /* number of devices: 0 .. 16 */
    int driver;  /* cuDriverGetVersion: 13000 */
    int nccl;    /* ncclGetVersion: 22809 */
    int compute; /* compute capability: 90 */
    int protect; /* 1: the host may not touch device memory */
    int pump;    /* 1: a thread executes operations at random times */
    int foreign; /* 1: addresses that are not of device memory are allowed too; 2: and
                    stand for memory that is mapped for one device only */
    int64_t capacity; /* bytes per device */
    int alloc_waits;  /* cuMemAlloc waits for the device: 0 never, 1 always, 2 by
                         seed */
    int lazy_load;    /* 1: cuModuleGetFunction waits for the device, which loads the
                         kernel then (CUDA_MODULE_LOADING) */
    int one_queue;    /* 1: an operation begins when all earlier ones of the device are
                         done (CUDA_DEVICE_MAX_CONNECTIONS=1, with room for one kernel) */
    int lazy_connect; /* 1: NCCL's first operation of a kind and of a size blocks the
                         host until the peers have come */
    int64_t connect_bytes; /* ... and allocates so many bytes on the device */
    int net; /* 1: data that an operation has sent lies with NCCL's proxy when the
                operation is done, and is sent on some time later */
    int proxy_blocks; /* 1: ncclCommFinalize waits for a proxy which never answers,
                         until the communicator is aborted */
    int abort_ms;     /* ncclCommAbort takes this long before it does anything */
    int queue_depth; /* launches of a communicator that its device accepts; the next one
                        blocks the host until one is done.  0: any number */
    int64_t corrupt_bytes; /* the last element of an all-reduce of this many bytes or
                              more is wrong; 0: no error */
    int peers; /* 1: every device can get access to every other's memory; more: they
                  report so, and then refuse access with this error */
    int corrupt_peers; /* 1: access to a peer makes the last byte of copies between the
                          two wrong */
    int share_device;  /* 1: ranks of one communicator may share a device */
    int one_bus;       /* 1: devices are parts of one card */
    int quiet;         /* 1: errors, and why a capture is invalid, are not printed */
    int blocking; /* 1: the host waits for all work in the legacy default stream: for
                     tests whose tensors are on the CPU */
} fake_options;

#define FAKE_API FAKE_EXPORT

/* The options of fake_reset(NULL); at first from the environment. */
FAKE_API fake_options fake_defaults(void);

/* Resets everything: objects, memory, pending operations, errors, counts, ordered
 * failures.  No other thread may be in a call. */
FAKE_API void fake_reset(const fake_options *options);

/* The same with "name=value,..." over the defaults; for ctypes.  Returns 0 if a name is
 * unknown. */
FAKE_API int fake_reset_text(const char *text);

/* The path of the library itself. */
FAKE_API const char *fake_path(void);

/* ---- failures ------------------------------------------------------------------- */

/* Makes the nth call from now (1: the next) of a function return `code` and do nothing
 * else.  Names have no suffix: "cuMemAlloc".  Several failures may be ordered. */
FAKE_API void fake_fail(const char *function, int nth, int code);

/* Calls since fake_reset(), failed ones included. */
FAKE_API int fake_count(const char *function);

/* CPU time in which the calling thread has executed copies and kernels, which a device
 * would execute by itself. */
FAKE_API int64_t fake_executed_ns(void);

/* Hides a function until fake_reset(), as if the driver, or NCCL, were too old for it.
 * Functions newer than options.driver or options.nccl are always hidden: a test must
 * find those as the library does, not by linking. */
FAKE_API void fake_hide(const char *function);

/* Makes calls return an error that now wait for ranks which never come: for threads
 * that are left behind in them. */
FAKE_API void fake_let_go(void);

/* Errors that no program may make, whatever the calls returned: host code that touches
 * device memory, operations on freed memory, a deadlock, ... */
FAKE_API int fake_errors(void);
FAKE_API const char *fake_error(int i); /* NULL past the last */
FAKE_API void fake_forget_errors(void);

/* ---- objects -------------------------------------------------------------------- */

typedef enum fake_kind {
    FAKE_CONTEXTS, /* retains of primary contexts */
    FAKE_STREAMS,
    FAKE_EVENTS,
    FAKE_ALLOCATIONS,
    FAKE_PINNED,
    FAKE_MODULES,
    FAKE_GRAPHS,
    FAKE_EXECS,
    FAKE_COMMS,
    FAKE_N_KINDS
} fake_kind;

FAKE_API int fake_live(fake_kind kind);
FAKE_API int fake_live_objects(void); /* of all kinds */
FAKE_API int64_t fake_bytes_in_use(int device);

/* Bytes that cuMemcpyPeerAsync was told to copy from one device to another. */
FAKE_API int64_t fake_sent_bytes(int device, int to);

/* From now on the allocation is mapped for its device only, as torch's expandable
 * segments: peer access does not reach it. */
FAKE_API void fake_unshare(const void *memory);

/* Memory of torch's allocator, on a device and a stream.  fake_freed(): it is an error
 * unless one of `streams` waits for each use: the stream of the allocation, and those
 * of record_stream().  Returns whether the memory must stay: work on it is not done. */
FAKE_API void fake_allocated(const void *memory, size_t n_bytes, int device,
                             int64_t stream);
FAKE_API int fake_freed(const void *memory, const int64_t *streams, int n_streams);

/* From now on neither device can get access to the other's memory. */
FAKE_API void fake_part(int device, int other);

/* Memory of torch's allocator (fake_torch.c); NULL: there is none.  What was freed is
 * used again once the device has finished with it; fake_torch_settle() has the device
 * do what that needs, and no more. */
FAKE_API void *fake_torch_alloc(int device, size_t n_bytes);
FAKE_API void fake_torch_record(void *memory, CUstream stream);
FAKE_API void fake_torch_free(void *memory);
FAKE_API void fake_torch_settle(void);

FAKE_API int fake_context_depth(void); /* of this thread's stack of contexts */

/* Since fake_reset(): connections that NCCL has made with options.lazy_connect. */
FAKE_API int fake_connections(void);

/* Enqueued operations that are not done. */
FAKE_API int fake_pending(void);

/* ---- execution ------------------------------------------------------------------ */

/* Executes all operations that can be; 0 if some are left that cannot.  This is not a
 * call of the program under test: it is always allowed. */
FAKE_API int fake_synchronize_all(void);

/* Executes at most n operations, drawn by seed among those that can be executed. */
FAKE_API int fake_step(int n);

/* Stops the operations in flight, and lets the host touch device memory until
 * fake_hide_memory(): for a test that reads numbers without a copy. */
FAKE_API void fake_show_memory(void);
FAKE_API void fake_hide_memory(void);

/* Adds a kernel for cuModuleGetFunction(), with n_args arguments of these sizes. */
typedef void (*fake_kernel_fn)(void *const *args, const unsigned grid[3],
                               const unsigned block[3]);
FAKE_API void fake_register_kernel(const char *name, size_t n_args,
                                   const size_t *arg_bytes, fake_kernel_fn run);

#endif
