/* hierarchy.h - a world of several hosts: shared memory inside each, links between.
 *
 *     host 0                          host 1
 *     rank 0 (leader) <-- links.h --> rank 2 (leader)
 *       | up    ^ down                  | up    ^ down
 *     rank 1    |                     rank 3    |
 *
 * An all-reduce goes *up*: a host's ranks reduce in shared memory, into their leader's
 * range.  Leaders exchange their results, and each adds them up in the order of hosts:
 * whole ranges if they are small or there are two hosts, else one part per leader,
 * which it sends back.  *Down*: the ranks of a host copy their leader's range.  Every
 * rank gets the same bits, in every run.
 *
 * Only pl_comm_wait() waits; every call does what can be done at once.  Inside a host,
 * operations have one order, the same on all of its ranks, whatever the network does:
 * those that follow one another (pl_op.is_followed) all go up, then all go down.
 *
 * A failure reaches all ranks of all hosts, and stands as long as the world.  What one
 * host had finished before it failed, the others still finish before they fail.
 */
#ifndef PLI_HIERARCHY_H
#define PLI_HIERARCHY_H

#include "comm.h"
#include "links.h"
#include "progress.h"

typedef struct pli_hierarchy_options {
    int rank;
    int world_size;
    int n_hosts;
    /* Ranks per host.  A host has consecutive ranks; the first is its leader. */
    const int *n_ranks;
    /* The world of this host's ranks, in rising order, with room for
     * pli_hierarchy_inner_ops().  Owned by the hierarchy on success. */
    pl_comm *inner;
    pli_links *links;       /* of a leader, owned likewise; NULL on other ranks */
    pli_progress *progress; /* borrowed until the world is destroyed; NULL: none */
    size_t n_ops;           /* the most in flight */
    int64_t deadline_ns;
} pli_hierarchy_options;

/* How many operations of the host's own world `n_ops` operations may take. */
size_t pli_hierarchy_inner_ops(size_t n_ops);

/* *out: free it with pl_comm_destroy(). */
pl_status pli_hierarchy_create(const pli_hierarchy_options *options,
                               pl_comm **out) PL_MUST_USE;

/* The host of a rank; 0 unless the world is one of several hosts. */
int pli_hierarchy_host_of(const pl_comm *comm, int rank);

#endif
