/* hosts.h - hosts as groups of threads: a world of several, joined by socket pairs. */
#ifndef PLT_HOSTS_H
#define PLT_HOSTS_H

#include <sys/resource.h>
#include <sys/socket.h>

#include "comm/hierarchy.h"
#include "comm/shm_comm.h"
#include "ranks.h"

enum { HOSTS_MOST = 68, HOSTS_OPS = 400, HOSTS_SOCKET_BYTES = 4096 };

typedef struct hosts {
    int n_hosts;
    int n_ranks[HOSTS_MOST];
    int64_t deadline_ns;
    int is_narrow; /* sockets hold little, so that every message is split */
} hosts;

static inline int hosts_world_size(const hosts *it)
{
    int n = 0;
    for (int h = 0; h < it->n_hosts; h++)
        n += it->n_ranks[h];
    return n;
}

static inline void narrow(int fd)
{
    const int n_bytes = HOSTS_SOCKET_BYTES;
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &n_bytes, sizeof n_bytes);
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &n_bytes, sizeof n_bytes);
}

/* fds[h]: the sockets of leader h, PLI_N_LINK_STREAMS per host. */
typedef int hosts_sockets[HOSTS_MOST][HOSTS_MOST * PLI_N_LINK_STREAMS];

static inline int hosts_connect(const hosts *it, hosts_sockets fds)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) { /* one process has those of all */
        files.rlim_cur = files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files);
    }
    for (int a = 0; a < it->n_hosts; a++) {
        for (int b = a + 1; b < it->n_hosts; b++) {
            for (int s = 0; s < PLI_N_LINK_STREAMS; s++) {
                int pair[2];
                if (!CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) ==
                           0))
                    return 0;
                fds[a][b * PLI_N_LINK_STREAMS + s] = pair[0];
                fds[b][a * PLI_N_LINK_STREAMS + s] = pair[1];
                if (it->is_narrow) {
                    narrow(pair[0]);
                    narrow(pair[1]);
                }
            }
        }
    }
    return 1;
}

static inline int hosts_link(const hosts *it, int host, const int *fds, pli_links **out)
{
    char texts[HOSTS_MOST][48];
    const char *names[HOSTS_MOST];
    int first = 0;
    int rank = 0;
    for (int h = 0; h < it->n_hosts; first += it->n_ranks[h++]) {
        names[h] = texts[h];
        rank = h == host ? first : rank;
        if (it->n_ranks[h] == 1)
            (void)snprintf(texts[h], sizeof texts[h], "rank %d (host %d)", first, h);
        else
            (void)snprintf(texts[h], sizeof texts[h], "ranks %d to %d (host %d)", first,
                           first + it->n_ranks[h] - 1, h);
    }
    const pli_links_options options = {
        .n_hosts = it->n_hosts, .host = host, .rank = rank, .fds = fds, .names = names};
    const int is_made = CHECK_OK(pli_links_create(&options, out));
    for (int h = 0; h < it->n_hosts; h++)
        for (int s = 0; h != host && s < PLI_N_LINK_STREAMS; s++)
            (void)close(fds[h * PLI_N_LINK_STREAMS + s]);
    return is_made;
}

/* out[r]: for the thread that is rank r. */
static inline int hosts_create(const hosts *it, size_t arena_bytes, pl_comm **out)
{
    hosts_sockets fds;
    int rank = 0;
    if (!hosts_connect(it, fds))
        return 0;
    for (int h = 0; h < it->n_hosts; h++) {
        pl_comm *inner[PL_MAX_RANKS] = {NULL};
        if (!CHECK_OK(local_create(it->n_ranks[h], arena_bytes,
                                   it->deadline_ns + 2000 * PLI_MS, inner)))
            return 0;
        /* As on a host of a binding, whose ranks share one segment. */
        ((pli_shm_comm *)(void *)inner[0])->segment->first_rank = rank;
        for (int r = 0; r < it->n_ranks[h]; r++, rank++) {
            pl_comm *comm = NULL;
            pli_hierarchy_options options = {.rank = rank,
                                             .world_size = hosts_world_size(it),
                                             .n_hosts = it->n_hosts,
                                             .n_ranks = it->n_ranks,
                                             .inner = inner[r],
                                             .n_ops = HOSTS_OPS,
                                             .deadline_ns = it->deadline_ns};
            if ((r == 0 && !hosts_link(it, h, fds[h], &options.links)) ||
                !CHECK_OK(pli_hierarchy_create(&options, &comm)))
                return 0;
            out[rank] = comm;
        }
    }
    return 1;
}

/* What became of a step in which, or after which, a rank failed. */
typedef struct verdicts {
    int culprit;
    int has_ended[PL_MAX_RANKS];
} verdicts;

/* If the culprit has seen the step's end, so has every rank. */
static inline void verdicts_check(const verdicts *it, int world_size)
{
    for (int r = 0; it->has_ended[it->culprit] && r < world_size; r++)
        if (!CHECK(it->has_ended[r]))
            CHECK_MORE("rank %d lacks the step that rank %d has", r, it->culprit);
}

/* Makes a world of hosts, runs it, and destroys it. */
static inline void hosts_run(const hosts *it, size_t arena_bytes,
                             void (*run)(rank_job *job), void *context, uint64_t seed)
{
    pl_comm *comms[PL_MAX_RANKS] = {NULL};
    const int world_size = hosts_world_size(it);
    if (hosts_create(it, arena_bytes, comms))
        ranks_run(world_size, comms, run, context, seed);
    for (int r = 0; r < world_size; r++)
        pl_comm_destroy(comms[r]);
}

#endif
