/* nccl_state.h - communicators, their launches, and the boards of their ranks.
 *
 * The ranks of a communicator, threads or processes, meet in memory that they share:
 * *its board*.  The unique id names the descriptor of an unlinked file that its maker
 * holds, so no file is ever left over.  A launch that becomes resident posts the data
 * that it reads; each rank takes what it needs from the others' posts, reduces by
 * itself, and is done.
 */
#ifndef FAKE_NCCL_STATE_H
#define FAKE_NCCL_STATE_H

#include "state.h"

enum {
    FK_RING_COLLS = 1024, /* posts of one rank at the same time, at the most */
};
#define FK_DATA_BYTES ((size_t)1 << 30) /* per rank */

typedef enum fk_task_kind {
    FK_ALL_REDUCE,
    FK_REDUCE,
    FK_ALL_GATHER,
    FK_BROADCAST,
} fk_task_kind;

typedef struct fk_task {
    fk_task_kind kind;
    const void *from;
    void *to;
    size_t count; /* as in the call */
    ncclDataType_t dtype;
    int op; /* ncclRedOp_t */
    int root;
    uint64_t number; /* among its rank's collectives */
    int is_done;
} fk_task;

struct fk_launch {
    ncclComm_t comm;
    CUstream stream; /* until it is enqueued */
    fk_task *tasks;
    size_t n_tasks;
};

/* A rank's post; `number` + 1 is written last. */
typedef struct fk_post {
    _Atomic uint64_t number;
    uint64_t number_to_be; /* while the proxy has it */
    _Atomic int n_taken;
    int kind, dtype, op, root;
    uint64_t count;
    uint64_t offset;
    uint64_t n_bytes;
    double scale;
} fk_post;

typedef struct fk_board {
    _Atomic int n_ranks;
    _Atomic int n_joined;
    _Atomic int has_joined[FK_MAX_RANKS];
    _Atomic int pids[FK_MAX_RANKS];
    _Atomic int devices[FK_MAX_RANKS];
    _Atomic uint64_t hosts[FK_MAX_RANKS];      /* NCCL_HOSTID */
    _Atomic unsigned connecting[FK_MAX_RANKS]; /* as bits, see fake_nccl_connect.c */
    _Atomic uint64_t wanted_colls;             /* a rank waits for those below */
    fk_post colls[FK_MAX_RANKS][FK_RING_COLLS];
} fk_board;

/* This process's part of a world. */
struct fk_world {
    fk_world *next;
    char id[NCCL_UNIQUE_ID_BYTES];
    int n_ranks;
    int descriptor; /* its maker's, until all have joined; else -1 */
    fk_board *board;
    char *data;
    size_t n_mapped_bytes;
    int n_comms;
    ncclComm_t comms[FK_MAX_RANKS];
};

typedef struct fk_chunk {
    uint64_t offset, n_bytes;
    fk_post *post;
} fk_chunk;

struct ncclComm {
    fk_object object;
    fk_world *world;
    int rank, n_ranks, device;
    int is_ready;
    int is_aborted;
    ncclResult_t error;
    int n_in_graphs;         /* launches that graphs hold */
    unsigned connected;      /* as the board's `connecting` */
    int64_t n_connect_bytes; /* of device memory */
    fk_post **unsent;        /* posts that the proxy has, the oldest first */
    size_t n_unsent;
    uint64_t n_colls;
    fk_list launches; /* not done, in order */
    fk_op *last;      /* its launches are executed in order; counted */
    fk_chunk *chunks;
    size_t n_chunks;
};

/* ---- fake_nccl_world.c ---------------------------------------------------------- */

int fk_make_id(ncclUniqueId *out);
int fk_join(ncclComm_t comm, const ncclUniqueId *id);
int fk_all_joined(const fk_world *world);
void fk_leave_world(ncclComm_t comm);
int fk_has_duplicate(const fk_world *world, int *one, int *other);

/* ---- fake_nccl_task.c ----------------------------------------------------------- */

size_t fk_dtype_bytes(ncclDataType_t dtype); /* 0: unknown */
void fk_task_post(ncclComm_t comm, fk_task *task, const char *what);
int fk_task_poll(ncclComm_t comm, fk_task *task, const char *what);
void fk_task_garbage(ncclComm_t comm, fk_task *task);
int fk_has_posted(const ncclComm_t comm, const fk_task *task, int r);

/* ---- fake_nccl_launch.c --------------------------------------------------------- */

int fk_need_wanted(const ncclComm_t comm); /* by other processes; 0: none wanted */
fk_op *fk_find_peer(ncclComm_t comm, const fk_task *task, int rank);
int fk_start_launch(ncclComm_t comm, CUstream stream, fk_launch *launch,
                    const char *what);

/* Sets the result of ncclGetLastError() in this thread. */
void fk_set_last_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- fake_nccl_connect.c -------------------------------------------------------- */

/* With options.lazy_connect: announces that this rank is at its first collectives of
 * their kinds, and waits for all others; for a group of communicators, both at once. */
void fk_connect_begin(ncclComm_t comm, const fk_task *task);
int fk_connect_wait(ncclComm_t comm, const fk_task *task, const char *what);
void fk_disconnect(ncclComm_t comm);

/* ---- fake_nccl_proxy.c ---------------------------------------------------------- */

/* Gives a post to the others, now, or once the proxy has sent it. */
void fk_proxy_send(ncclComm_t comm, fk_post *post, uint64_t number);
int fk_proxy_has(const ncclComm_t comm, const fk_post *post, uint64_t number);
void fk_proxy_flush(ncclComm_t comm);
void fk_proxy_drop(ncclComm_t comm); /* unsent data is lost */

/* With options.proxy_blocks: waits until the communicator is aborted. */
int fk_proxy_block(ncclComm_t comm, const char *what);

/* ---- fake_sum.c ----------------------------------------------------------------- */

/* to = to + from, in the dtype, rounded at once. */
void fk_add(void *to, const void *from, size_t n, ncclDataType_t dtype);
void fk_scale(void *to, size_t n, ncclDataType_t dtype, double scale); /* of floats */
double fk_round(double value, ncclDataType_t dtype);

#endif
