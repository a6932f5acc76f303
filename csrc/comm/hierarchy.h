/* hierarchy.h - a world of several hosts: shared memory inside each, links between.
 *
 *     host 0                          host 1
 *     rank 0 (leader) <-- links.h --> rank 2 (leader)
 *       | up    ^ down                  | up    ^ down
 *     rank 1    |                     rank 3    |
 *
 * An all-reduce goes *up*: a host's ranks reduce in shared memory, into their leader's
 * range.  Leaders exchange what they have, and each adds it up in the order of hosts:
 * whole ranges where these are small or hosts are two, else every leader one part,
 * which it sends back.  *Down*: the ranks of a host copy their leader's range.  The
 * same bits come out on every rank, in every run.
 *
 * Nobody waits but in pl_comm_wait(): what can go on does, whenever a rank comes by.
 * Inside a host operations have one order, the same on all of its ranks, whatever the
 * network does: those that follow one another (pl_op.is_followed) all go up, then all
 * go down.
 *
 * A failure is told to all ranks of all hosts.  A step that one of them gives up is
 * left behind by all together; a rank or a host that is gone ends the world.
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
    /* Of each host, which has those behind the last one's; the first is its leader. */
    const int *n_ranks;
    /* This host's ranks, in rising order; with room for pli_hierarchy_inner_ops().  The
     * hierarchy's on success, and destroyed with it. */
    pl_comm *inner;
    pli_links *links;       /* a leader's, likewise; NULL on other ranks */
    pli_progress *progress; /* borrowed until the world is destroyed; NULL: none */
    size_t n_ops;           /* the most in flight */
    int64_t deadline_ns;
} pli_hierarchy_options;

/* How many operations of a host's own world so many operations of all may take. */
size_t pli_hierarchy_inner_ops(size_t n_ops);

/* *out: for pl_comm_destroy(). */
pl_status pli_hierarchy_create(const pli_hierarchy_options *options,
                               pl_comm **out) PL_MUST_USE;

#endif
