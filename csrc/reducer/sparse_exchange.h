/* sparse_exchange.h - means of gradients that have a few rows on each rank.
 *
 * A *table* is a parameter of n_rows rows.  Each rank has some of its gradient's rows,
 * in ascending order, or all of them.  The exchange needs only a fixed *staging* range
 * of the arena, however many rows there are:
 *
 *     find   gathers counts, then row numbers, from all ranks: the *union* is the rows
 *            that any rank has, in ascending order; all rows, if a rank has all
 *     mean   each rank lays its values out over the union, with zeros for the rows that
 *            it lacks; they are all-reduced, a segment of the staging at a time
 *
 * So the sums are those of the dense buckets: in rank order, in fp32 for 16-bit types,
 * by the same instructions, each row by one rank for all.  Gathering takes eight bytes
 * a row; the values of a row travel once, even if several ranks have it.  To gather
 * values too, and to sum them on every rank, takes 4 to 5 times as long if 16 ranks
 * have the same rows, and memory for the rows of all ranks.
 *
 * Every rank makes the same calls in the same order with the same tables, in host
 * memory.  One thread at a time; no other operation of the world may be under way.
 */
#ifndef PLI_SPARSE_EXCHANGE_H
#define PLI_SPARSE_EXCHANGE_H

#include "comm/comm.h"

enum {
    PLI_EXCHANGE_SEGMENTS = 16, /* all-reduced at the same time, at the most */
    PLI_EXCHANGE_BYTES = PLI_EXCHANGE_SEGMENTS * 64 * 1024 /* of staging: a good size */
};

typedef struct pl_table {
    size_t n_rows;
    size_t row_elems;
    pl_dtype dtype;
} pl_table;

/* A rank's rows of a table, or the union's. */
typedef struct pl_sparse_rows {
    int64_t *indices; /* ascending, each once; NULL: `values` holds every row */
    void *values;     /* row after row */
    size_t n_rows;
} pl_sparse_rows;

/* The indices of no row: an empty list may have no memory, and NULL means all rows. */
int64_t *pl_no_indices(void);

typedef struct pl_exchange_part {
    pl_table table;
    pl_sparse_rows local; /* this rank's */
    /* The union's.  `find` sets indices and n_rows.  Before `mean`, the caller sets
     * `values` to memory for the means: this rank's own, perhaps, if that has all. */
    pl_sparse_rows all;
} pl_exchange_part;

typedef struct pl_exchange {
    pl_comm *comm;
    size_t offset_bytes;  /* of the staging, in the arena; a multiple of a line */
    size_t staging_bytes; /* a line per rank and per segment, at the least */
    pl_exchange_part *parts;
    size_t n_parts;
    /* Returns once pl_comm_wait() has; never PL_EAGAIN, except to give up. */
    pl_status (*wait)(void *context, pl_ticket ticket);
    void *context;
} pl_exchange;

/* *out: memory of the unions' indices, for pli_free().  PL_EMISMATCH, on every rank, if
 * a rank's rows are not in ascending order, or outside their table. */
pl_status pl_exchange_find(const pl_exchange *self, int64_t **out) PL_MUST_USE;
pl_status pl_exchange_mean(const pl_exchange *self) PL_MUST_USE;

#endif
