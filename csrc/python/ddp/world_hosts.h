/* world_hosts.h - World(hosts=...): a world whose ranks are on several hosts. */
#ifndef PLI_WORLD_HOSTS_H
#define PLI_WORLD_HOSTS_H

#include "comm/hierarchy.h"
#include "python/state.h"

typedef struct pli_world_hosts {
    int n_hosts; /* 0: all ranks are on one host */
    int host;    /* this rank's */
    int first_rank;
    int inner_rank; /* this rank's number among the ranks that share memory with it */
    int inner_size; /* number of those ranks */
    int n_ranks[PLI_MAX_HOSTS];
    const char *names[PLI_MAX_HOSTS]; /* borrowed */
    int fds[PLI_MAX_HOSTS * PLI_N_LINK_STREAMS];
    int has_links;
} pli_world_hosts;

/* Reads a sequence of integers, each at least `least`; returns their number, or -1. */
int pli_read_ints(PyObject *sequence, const char *what, int least, int *out,
                  Py_ssize_t n_most);

/* Reads (n_ranks, names, fds), or None. */
int pli_world_hosts_read(PyObject *hosts, int rank, int world_size,
                         pli_world_hosts *out);

/* Replaces *comm, the world of this host's ranks, by one of all hosts.  The caller
 * fills the fields of `options` that do not follow from `hosts` and *comm. */
pl_status pli_world_hosts_join(const pli_world_hosts *hosts,
                               pli_hierarchy_options *options,
                               pl_comm **comm) PL_MUST_USE;

#endif
