/* sparse_exchange.h - means of gradients of which each rank has a few rows.
 *
 * A *table* is a parameter of n_rows rows.  Each rank has some of its gradient's rows,
 * in ascending order, or all of them.  Nothing but a fixed *staging* range of the arena
 * is needed, however many rows there are:
 *
 *     find   counts, then row numbers, are gathered from all ranks: the rows that any
 *            rank has, in ascending order, are the *union*; all rows, where a rank has
 *            all
 *     mean   each rank lays its values out over the union, zeros where it has no row,
 *            a segment of the staging at a time, and each segment is all-reduced
 *
 * So the sums are those of the dense buckets: in rank order, in fp32 for 16-bit types,
 * by the same instructions, each row by one rank for all.  What is gathered is eight
 * bytes a row; the values of a row that several ranks have travel once.
 *
 * Every rank calls the same in the same order with the same tables.  One thread at a
 * time; no other operation of the world may be under way.
 */
#ifndef PLI_SPARSE_EXCHANGE_H
#define PLI_SPARSE_EXCHANGE_H

#include "comm/comm.h"

enum {
    PLI_EXCHANGE_SEGMENTS = 16, /* all-reduced at the same time, at the most */
    PLI_EXCHANGE_LINES = 64,    /* of staging, at the least */
    PLI_EXCHANGE_BYTES = PLI_EXCHANGE_SEGMENTS * 64 * 1024 /* ... that suits */
};

typedef struct pl_table {
    size_t n_rows;
    size_t row_elems;
    pl_dtype dtype;
} pl_table;

/* What this rank has of a table, or the room for what all have. */
typedef struct pl_sparse_rows {
    int64_t *indices; /* ascending, each once; NULL: `values` holds every row */
    void *values;     /* row after row */
    size_t n_rows;
} pl_sparse_rows;

typedef struct pl_exchange_spec {
    pl_comm *comm;              /* borrowed */
    size_t offset_bytes;        /* of the staging, in the arena; a multiple of a line */
    size_t staging_bytes;       /* a line a rank, and 64 at the least */
    const pl_table *tables;     /* borrowed */
    const pl_sparse_rows *rows; /* this rank's; borrowed, read until `mean` is done */
    size_t n_tables;
} pl_exchange_spec;

typedef struct pl_exchange pl_exchange;

/* PL_EINVAL where rows are not in ascending order, or leave their table. */
pl_status pl_exchange_create(const pl_exchange_spec *spec,
                             pl_exchange **out) PL_MUST_USE;
void pl_exchange_destroy(pl_exchange *exchange);

/* PL_EAGAIN after about slice_ns: call again. */
pl_status pl_exchange_find(pl_exchange *exchange, int64_t slice_ns) PL_MUST_USE;

/* After `find`: the union's rows; `values` is NULL. */
pl_sparse_rows pl_exchange_union(const pl_exchange *exchange, size_t table);

/* Where table's means are to go, of as many rows as the union has; may be where this
 * rank's own are, if it has all.  Before the first `mean`; borrowed until its end. */
void pl_exchange_set_room(pl_exchange *exchange, size_t table, void *values);

/* PL_EAGAIN after about slice_ns. */
pl_status pl_exchange_mean(pl_exchange *exchange, int64_t slice_ns) PL_MUST_USE;

#endif
