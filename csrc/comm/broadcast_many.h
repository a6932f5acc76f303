/* broadcast_many.h - broadcasts one rank's ranges of memory, through the arena.
 *
 * The ranges are packed one after another, as many bytes as fit, and each load is one
 * operation; a range may span loads.  Ranges on a device use the device's part of the
 * arena, with one launch per load; ranges on the CPU use the host's part.
 *
 *     pli_broadcast_many_begin(&all);
 *     while (all.n_left > 0) {
 *         pli_broadcast_many_issue(&all, &ticket);
 *         ... wait for the ticket ...
 *         pli_broadcast_many_receive(&all);
 *     }
 *     pli_broadcast_many_end(&all);
 */
#ifndef PLI_BROADCAST_MANY_H
#define PLI_BROADCAST_MANY_H

#include "comm/comm.h"

typedef struct pli_byte_range {
    void *data;
    size_t n_bytes;
} pli_byte_range;

/* Position of the next byte in all ranges. */
typedef struct pli_range_cursor {
    size_t range;
    size_t offset; /* bytes into it */
} pli_range_cursor;

/* Every rank must give ranges of the same sizes, and the same root. */
typedef struct pli_broadcast_many {
    pl_comm *comm;
    int root;
    const pli_byte_range *ranges;
    size_t n_ranges;
    int is_on_device;
    pl_stream *stream; /* if so: has written the ranges, and will read them */
    /* set by begin: */
    size_t n_left;     /* bytes */
    size_t most_bytes; /* per load */
    pl_op op;
    pli_range_cursor next;
    pl_event *ready;
    pl_move *moves; /* one per range; NULL on the CPU, where bytes move at once */
    size_t n_moves;
} pli_broadcast_many;

/* Overwrites all of the arena: no operation may be in flight in it. */
pl_status pli_broadcast_many_begin(pli_broadcast_many *self) PL_MUST_USE;

/* Packs the next load and issues it. */
pl_status pli_broadcast_many_issue(pli_broadcast_many *self,
                                   pl_ticket *out) PL_MUST_USE;

/* Unpacks the load; call it when the load's ticket is done. */
pl_status pli_broadcast_many_receive(pli_broadcast_many *self) PL_MUST_USE;

/* Call it also after a failure of any of them. */
void pli_broadcast_many_end(pli_broadcast_many *self);

#endif
