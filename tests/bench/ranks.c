/* ranks.c - the cost of a step by the number of ranks: processes on one host or on
 * several, with Unix sockets between the hosts' leaders.  `make bench-ranks` builds and
 * runs it; `bench-ranks 16x4` measures only 16 hosts of 4 ranks.
 *
 * A step is that of the reducer: all-reduces of a bucket (64 KiB, or none) and of
 * flags. If there are more ranks than cores, they take turns, so the time of a step
 * includes the scheduler's.  So the CPU time of a rank in a step, and its sleeps, are
 * printed too.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/hierarchy.h"
#include "comm/shm_init.h"
#include "core/clock.h"
#include "reducer/reducer_state.h"
#include "tests/c/secret.h"

enum {
    MOST_HOSTS = 64,
    N_WARM = 5,
    RANK_STEPS = 20000, /* over all ranks of a world */
    MOST_STEPS = 2000,
    LEAST_STEPS = 50,
    BUCKET_BYTES = 64 << 10,
    N_OPS = 64
};

/* Memory that the ranks of a world share; one of them measures the time. */
typedef struct world {
    int n_hosts;
    int n_ranks; /* per host */
    size_t n_elems;
    int n_steps;
    int pids[MOST_HOSTS][PL_MAX_RANKS];
    char addresses[MOST_HOSTS][PLI_ADDRESS_BYTES];
    atomic_int is_started;
    atomic_int n_listening; /* hosts whose rank 0 can be found */
    double seconds;
    atomic_long cpu_us;
    atomic_long n_sleeps;
} world;

typedef int sockets[MOST_HOSTS][MOST_HOSTS * PLI_N_LINK_STREAMS];

static void must(pl_status st)
{
    if (st == PL_OK)
        return;
    (void)fprintf(stderr, "%s\n", pl_error_message());
    exit(1);
}

static pl_status wait_for_step(pl_reducer *reducer)
{
    pl_status st = PL_EAGAIN;
    while (st == PL_EAGAIN)
        st = pl_reducer_wait(reducer, 100 * PLI_MS);
    return st;
}

static void step(pl_reducer *reducer)
{
    static char gradient[BUCKET_BYTES];
    pl_ready_result result;
    must(pl_reducer_begin(reducer));
    must(pl_reducer_mark_ready(reducer, 0, gradient, PL_REPLACE, NULL, &result));
    must(pl_reducer_close(reducer));
    must(wait_for_step(reducer));
    must(pl_reducer_end(reducer));
}

static void measure(world *it, pl_reducer *reducer, int is_timer)
{
    struct rusage before, after;
    for (int n = 0; n < N_WARM; n++)
        step(reducer);
    (void)getrusage(RUSAGE_SELF, &before);
    const int64_t begin = pli_now_ns();
    for (int n = 0; n < it->n_steps; n++)
        step(reducer);
    if (is_timer)
        it->seconds = (double)(pli_now_ns() - begin) / 1e9;
    (void)getrusage(RUSAGE_SELF, &after);
    atomic_fetch_add(&it->cpu_us, (after.ru_utime.tv_sec - before.ru_utime.tv_sec +
                                   after.ru_stime.tv_sec - before.ru_stime.tv_sec) *
                                          1000000 +
                                      after.ru_utime.tv_usec - before.ru_utime.tv_usec +
                                      after.ru_stime.tv_usec - before.ru_stime.tv_usec);
    atomic_fetch_add(&it->n_sleeps, after.ru_nvcsw - before.ru_nvcsw);
}

static void join_hosts(const world *it, int host, int rank, const int *fds,
                       pl_comm **comm)
{
    const char *names[MOST_HOSTS];
    int n_ranks[MOST_HOSTS];
    pli_hierarchy_options options = {.rank = host * it->n_ranks + rank,
                                     .world_size = it->n_hosts * it->n_ranks,
                                     .n_hosts = it->n_hosts,
                                     .n_ranks = n_ranks,
                                     .inner = *comm,
                                     .n_ops = N_OPS,
                                     .deadline_ns = 60000 * PLI_MS};
    for (int h = 0; h < it->n_hosts; h++) {
        names[h] = "a host";
        n_ranks[h] = it->n_ranks;
    }
    const pli_links_options links = {.n_hosts = it->n_hosts,
                                     .host = host,
                                     .rank = options.rank,
                                     .fds = fds,
                                     .names = names};
    if (rank == 0)
        must(pli_links_create(&links, &options.links));
    must(pli_hierarchy_create(&options, comm));
}

static void run_rank(world *it, int host, int rank, const int *fds)
{
    pli_listener *listener = NULL;
    pl_comm *comm = NULL;
    pl_backend *backend = NULL;
    pl_reducer *reducer = NULL;
    const pl_param param = {.n_elems = it->n_elems, .dtype = PL_F32};
    const pl_reducer_spec spec = {.params = &param,
                                  .n_params = 1,
                                  .world_size = it->n_hosts * it->n_ranks,
                                  .caps = {.bucket_bytes = 1 << 20}};
    const pli_shm_options options = {.rank = rank,
                                     .world_size = it->n_ranks,
                                     .first_rank = host * it->n_ranks,
                                     .arena_bytes = pl_reducer_arena_bytes(&spec),
                                     .n_ops = pli_hierarchy_inner_ops(N_OPS),
                                     .deadline_ns = 60000 * PLI_MS,
                                     .pids = it->pids[host],
                                     .prove = secret_prove};
    if (rank == 0) { /* the listener is of the process that rank 0 is */
        must(pli_listener_create(it->addresses[host], &listener));
        atomic_fetch_add(&it->n_listening, 1);
    }
    while (!atomic_load(&it->is_started) || atomic_load(&it->n_listening) < it->n_hosts)
        pli_sleep_ns(PLI_MS);
    must(pli_shm_create(&options, listener, it->addresses[host], &comm));
    if (it->n_hosts > 1)
        join_hosts(it, host, rank, fds, &comm);
    must(pli_cpu_backend_create(&backend));
    must(pl_reducer_create(&spec, comm, backend, &reducer));
    measure(it, reducer, host == 0 && rank == 0);
    pl_reducer_destroy(reducer);
    pli_backend_destroy(backend);
    pl_comm_destroy(comm);
    pli_listener_destroy(listener);
    exit(0);
}

static void connect_hosts(const world *it, sockets fds)
{
    for (int a = 0; a < it->n_hosts; a++) {
        for (int b = a + 1; b < it->n_hosts; b++) {
            for (int s = 0; s < PLI_N_LINK_STREAMS; s++) {
                int pair[2];
                if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
                    exit(1);
                fds[a][b * PLI_N_LINK_STREAMS + s] = pair[0];
                fds[b][a * PLI_N_LINK_STREAMS + s] = pair[1];
            }
        }
    }
}

static void start_host(world *it, int host, sockets fds)
{
    for (int r = 0; r < it->n_ranks; r++) {
        const pid_t pid = fork();
        if (pid < 0)
            exit(1);
        if (pid == 0)
            run_rank(it, host, r, fds[host]);
        it->pids[host][r] = pid;
    }
}

static void run_world(int n_hosts, int n_ranks, size_t n_elems)
{
    static sockets fds;
    world *it = mmap(NULL, sizeof *it, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (it == MAP_FAILED)
        exit(1);
    const int n_all = n_hosts * n_ranks;
    const int n_steps = RANK_STEPS / n_all;
    *it = (world){.n_hosts = n_hosts, .n_ranks = n_ranks, .n_elems = n_elems};
    it->n_steps = n_steps < LEAST_STEPS  ? LEAST_STEPS
                  : n_steps > MOST_STEPS ? MOST_STEPS
                                         : n_steps;
    connect_hosts(it, fds);
    for (int h = 0; h < n_hosts; h++)
        start_host(it, h, fds);
    for (int h = 0; h < n_hosts; h++)
        for (int k = 0; k < n_hosts * PLI_N_LINK_STREAMS; k++)
            if (k / PLI_N_LINK_STREAMS != h)
                (void)close(fds[h][k]);
    atomic_store(&it->is_started, 1);
    for (int n = 0; n < n_all; n++) {
        int how = 0;
        if (wait(&how) < 0 || how != 0)
            exit(1);
    }
    const double n_rank_steps = (double)n_all * it->n_steps;
    (void)printf(
        "%3d x %-4d %6zu KiB  %9.0f us a step  %7.1f us of CPU  %5.1f sleeps\n",
        n_hosts, n_ranks, n_elems * sizeof(float) >> 10,
        it->seconds * 1e6 / it->n_steps,
        (double)atomic_load(&it->cpu_us) / n_rank_steps,
        (double)atomic_load(&it->n_sleeps) / n_rank_steps);
    (void)fflush(stdout);
    (void)munmap(it, sizeof *it);
}

static void run_both(int n_hosts, int n_ranks)
{
    run_world(n_hosts, n_ranks, 0);
    run_world(n_hosts, n_ranks, BUCKET_BYTES / sizeof(float));
}

int main(int argc, char **argv)
{
    static const int shapes[][2] = {{2, 2}, {2, 8},  {4, 4},   {2, 128},
                                    {8, 8}, {16, 4}, {16, 16}, {64, 1}};
    int n_hosts = 1;
    int n_ranks = 1;
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    (void)printf(
        "hosts x ranks of each, bucket: a step of all; of a rank, in a step\n");
    for (int k = 1; k < argc; k++) {
        if (sscanf(argv[k], "%dx%d", &n_hosts, &n_ranks) != 2 || n_hosts < 1 ||
            n_hosts > MOST_HOSTS || n_ranks < 1 || n_ranks > PL_MAX_RANKS)
            return 2;
        run_both(n_hosts, n_ranks);
    }
    for (n_ranks = 2; argc == 1 && n_ranks <= 256; n_ranks *= 2)
        run_both(1, n_ranks);
    for (size_t k = 0; argc == 1 && k < sizeof shapes / sizeof shapes[0]; k++)
        run_both(shapes[k][0], shapes[k][1]);
    return 0;
}
