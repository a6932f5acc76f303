/* sparse_exchange.h - means of gradients that have a few rows on each rank.
 *
 * A *table* is a parameter of n_rows rows.  Each rank has some of its gradient's rows,
 * in ascending order, or all of them.  The exchange needs only a fixed *staging* range
 * of the arena, however many rows there are:
 *
 *     find   gathers counts, then row numbers, from all ranks: the *union* is the rows
 *            that any rank has, in ascending order; all rows, if a rank has all
 *     mean   each rank lays its values out over the union, with zeros for the rows that
 *            it lacks, a segment of the staging at a time; each segment is all-reduced
 *
 * So the sums are those of the dense buckets: in rank order, in fp32 for 16-bit types,
 * by the same instructions, each row by one rank for all.  Gathering takes eight bytes
 * a row; the values of a row travel once, even if several ranks have it.
 *
 * Every rank makes the same calls in the same order with the same tables.  One thread
 * at a time; no other operation of the world may be under way.
 */
#ifndef PLI_SPARSE_EXCHANGE_H
#define PLI_SPARSE_EXCHANGE_H

#include "comm/comm.h"

enum {
    PLI_EXCHANGE_SEGMENTS = 16, /* all-reduced at the same time, at the most */
    PLI_EXCHANGE_LINES = 64,    /* of staging, at the least */
    PLI_EXCHANGE_BYTES = PLI_EXCHANGE_SEGMENTS * 64 * 1024 /* ... a good size */
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

typedef struct pl_exchange_spec {
    pl_comm *comm;              /* borrowed */
    size_t offset_bytes;        /* of the staging, in the arena; a multiple of a line */
    size_t staging_bytes;       /* a line per rank, and 64 at the least */
    const pl_table *tables;     /* borrowed */
    const pl_sparse_rows *rows; /* this rank's; borrowed, read until `mean` is done */
    size_t n_tables;
} pl_exchange_spec;

typedef struct pl_exchange pl_exchange;

/* PL_EINVAL if rows are not in ascending order, or outside their table. */
pl_status pl_exchange_create(const pl_exchange_spec *spec,
                             pl_exchange **out) PL_MUST_USE;
void pl_exchange_destroy(pl_exchange *exchange);

/* PL_EAGAIN after about slice_ns: call again. */
pl_status pl_exchange_find(pl_exchange *exchange, int64_t slice_ns) PL_MUST_USE;

/* After `find`: the union's rows; `values` is NULL. */
pl_sparse_rows pl_exchange_union(const pl_exchange *exchange, size_t table);

/* Sets the memory for the table's means, of as many rows as the union; it may be this
 * rank's own, if that has all.  Before the first `mean`; borrowed until its end. */
void pl_exchange_set_room(pl_exchange *exchange, size_t table, void *values);

/* PL_EAGAIN after about slice_ns. */
pl_status pl_exchange_mean(pl_exchange *exchange, int64_t slice_ns) PL_MUST_USE;

#endif
