/* sparse_exchange.c - finds the union of all ranks' rows, and their means. */
#include "sparse_exchange.h"

#include <string.h>

#include "core/alloc.h"

static const uint64_t ALL_ROWS = UINT64_MAX; /* as a number of rows: no list follows */

/* Row numbers of one table on one rank. */
typedef struct list {
    int64_t *indices;
    size_t n;
} list;

/* What `find` gathers, for the tables that no rank has whole. */
typedef struct search {
    uint64_t *counts; /* [rank][table]: numbers of rows */
    size_t *n_bytes;  /* [rank]: of the counts, then of all row numbers */
    list *lists;      /* [table][rank] */
    int64_t *indices; /* of the lists: rank after rank, table after table */
    int64_t *merged, *spare;
} search;

/* Rows of a union that fit into a segment of the staging, or a part of a longer row. */
typedef struct block {
    size_t row_bytes;
    size_t first, n;      /* rows */
    size_t column, width; /* bytes of each: from which on, how many */
    size_t local;         /* this rank's first row that is not before `first` */
} block;

/* A block that is all-reduced. */
typedef struct segment {
    char *to;
    size_t n_bytes;
    pl_ticket ticket;
} segment;

/* The means that are under way: a ring, one in each segment of the staging. */
typedef struct flight {
    segment ring[PLI_EXCHANGE_SEGMENTS];
    size_t n_issued, n_taken;
} flight;

int64_t *pl_no_indices(void)
{
    static int64_t none;
    return &none;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static char *staging_of(const pl_exchange *self)
{
    return self->comm->arena + self->offset_bytes;
}

/* ---- gathering ------------------------------------------------------------------ */

/* `all` has a block of n_bytes[r] for each rank r, one after the other, and this rank's
 * is filled.  Fills the others: a part of each block a round. */
static pl_status gather(const pl_exchange *self, void *all, const size_t *n_bytes)
{
    pl_status st = PL_OK;
    const int rank = pl_comm_rank(self->comm);
    const int n_ranks = pl_comm_world_size(self->comm);
    const size_t most =
        self->staging_bytes / (size_t)n_ranks / PL_CACHE_LINE * PL_CACHE_LINE;
    const char *mine = all;
    size_t n_longest = 0;
    for (int r = 0; r < n_ranks; r++) {
        mine += r < rank ? n_bytes[r] : 0;
        n_longest = n_bytes[r] > n_longest ? n_bytes[r] : n_longest;
    }
    for (size_t first = 0; first < n_longest; first += most) {
        const size_t n = smaller(n_longest - first, most);
        const pl_op op = {.kind = PL_ALL_GATHER,
                          .dtype = PL_U8,
                          .offset_bytes = self->offset_bytes,
                          .n_elems = n * (size_t)n_ranks,
                          .ends_step = 1}; /* if no rank has any row */
        char *from = staging_of(self);
        char *theirs = all;
        pl_ticket ticket = 0;
        if (first < n_bytes[rank])
            memcpy(from + (size_t)rank * n, mine + first,
                   smaller(n_bytes[rank] - first, n));
        PL_TRY(pl_comm_issue(self->comm, &op, &ticket));
        PL_TRY(self->wait(self->context, ticket));
        for (int r = 0; r < n_ranks; r++) {
            if (first < n_bytes[r])
                memcpy(theirs + first, from, smaller(n_bytes[r] - first, n));
            theirs += n_bytes[r];
            from += n;
        }
    }
done:
    return st;
}

/* Gathers numbers of rows, and sees which tables are whole. */
static pl_status gather_counts(const pl_exchange *self, search *found)
{
    pl_status st = PL_OK;
    const size_t n = self->n_parts;
    const size_t rank = (size_t)pl_comm_rank(self->comm);
    const size_t n_ranks = (size_t)pl_comm_world_size(self->comm);
    for (size_t t = 0; t < n; t++)
        found->counts[rank * n + t] = self->parts[t].local.indices != NULL
                                          ? self->parts[t].local.n_rows
                                          : ALL_ROWS;
    for (size_t r = 0; r < n_ranks; r++)
        found->n_bytes[r] = n * sizeof *found->counts;
    PL_TRY(gather(self, found->counts, found->n_bytes));
    memset(found->n_bytes, 0, n_ranks * sizeof *found->n_bytes);
    for (size_t t = 0; t < n; t++) {
        const size_t n_rows = self->parts[t].table.n_rows;
        int is_whole = 0;
        for (size_t r = 0; r < n_ranks; r++)
            is_whole = is_whole || found->counts[r * n + t] == ALL_ROWS;
        self->parts[t].all = is_whole ? (pl_sparse_rows){.n_rows = n_rows}
                                      : (pl_sparse_rows){.indices = pl_no_indices()};
        for (size_t r = 0; r < n_ranks; r++) {
            uint64_t *count = &found->counts[r * n + t];
            *count = is_whole ? 0 : *count;
            if (*count > n_rows)
                PL_FAIL(PL_EMISMATCH, "rank %zu has more rows than table %zu", r, t);
            found->n_bytes[r] += *count * sizeof *found->indices;
        }
    }
done:
    return st;
}

static pl_status gather_lists(const pl_exchange *self, search *found)
{
    const size_t rank = (size_t)pl_comm_rank(self->comm);
    const size_t n_ranks = (size_t)pl_comm_world_size(self->comm);
    int64_t *next = found->indices;
    for (size_t r = 0; r < n_ranks; r++) {
        for (size_t t = 0; t < self->n_parts; t++) {
            const size_t n = found->counts[r * self->n_parts + t];
            found->lists[t * n_ranks + r] = (list){next, n};
            if (r == rank && n > 0)
                memcpy(next, self->parts[t].local.indices, n * sizeof *next);
            next += n;
        }
    }
    return gather(self, found->indices, found->n_bytes);
}

/* ---- the union ------------------------------------------------------------------ */

/* PL_OK if rank r's rows of table t are in ascending order, each once. */
static pl_status check_order(const list *rows, size_t r, size_t t, size_t n_rows)
{
    for (size_t k = 0; k < rows->n; k++) {
        const int64_t index = rows->indices[k];
        if (index < 0 || (uint64_t)index >= n_rows)
            return pli_fail(PL_EMISMATCH,
                            "rank %zu has row %lld of table %zu, which has %zu rows", r,
                            (long long)index, t, n_rows);
        if (k > 0 && index <= rows->indices[k - 1])
            return pli_fail(PL_EMISMATCH,
                            "rank %zu has row %lld of table %zu after row %lld", r,
                            (long long)index, t, (long long)rows->indices[k - 1]);
    }
    return PL_OK;
}

/* Writes the union of `n` lists, in ascending order; returns its length.  `out` and
 * `spare` have room for all lists together. */
static size_t merge(const list *lists, size_t n, int64_t *out, int64_t *spare)
{
    if (n == 1) {
        memcpy(out, lists->indices, lists->n * sizeof *out);
        return lists->n;
    }
    const size_t n_left = merge(lists, n / 2, spare, out);
    const int64_t *left = spare;
    const int64_t *right = spare + n_left;
    const int64_t *end =
        right + merge(lists + n / 2, n - n / 2, spare + n_left, out + n_left);
    const int64_t *middle = right;
    size_t n_out = 0;
    while (left < middle && right < end) {
        const int64_t a = *left;
        const int64_t b = *right;
        out[n_out++] = a < b ? a : b;
        left += a <= b;
        right += b <= a;
    }
    while (left < middle)
        out[n_out++] = *left++;
    while (right < end)
        out[n_out++] = *right++;
    return n_out;
}

static pl_status merge_lists(const pl_exchange *self, search *found)
{
    pl_status st = PL_OK;
    const size_t n_ranks = (size_t)pl_comm_world_size(self->comm);
    int64_t *next = found->merged;
    for (size_t t = 0; t < self->n_parts; t++) {
        const list *lists = &found->lists[t * n_ranks];
        pl_sparse_rows *all = &self->parts[t].all;
        if (all->indices == NULL)
            continue;
        for (size_t r = 0; r < n_ranks; r++)
            PL_TRY(check_order(&lists[r], r, t, self->parts[t].table.n_rows));
        all->indices = next;
        all->n_rows = merge(lists, n_ranks, next, found->spare);
        next += all->n_rows;
    }
done:
    return st;
}

pl_status pl_exchange_find(const pl_exchange *self, int64_t **out)
{
    pl_status st = PL_OK;
    const size_t n_ranks = (size_t)pl_comm_world_size(self->comm);
    const size_t n_lists = n_ranks * self->n_parts;
    search found = {NULL};
    size_t n = 1; /* an empty list has memory */
    if (self->staging_bytes / PL_CACHE_LINE < n_ranks)
        PL_FAIL(PL_EINVAL, "a staging of %zu bytes is too small for %zu ranks",
                self->staging_bytes, n_ranks);
    PL_TRY(pli_calloc(n_lists, sizeof *found.counts, "numbers of rows", &found.counts));
    PL_TRY(pli_calloc(n_ranks, sizeof *found.n_bytes, "ranks' rows", &found.n_bytes));
    PL_TRY(pli_calloc(n_lists, sizeof *found.lists, "ranks' rows", &found.lists));
    PL_TRY(gather_counts(self, &found));
    for (size_t r = 0; r < n_ranks; r++)
        n += found.n_bytes[r] / sizeof *found.indices;
    PL_TRY(pli_calloc(n, sizeof *found.indices, "row numbers", &found.indices));
    PL_TRY(pli_calloc(n, sizeof *found.merged, "row numbers", &found.merged));
    PL_TRY(pli_calloc(n, sizeof *found.spare, "row numbers", &found.spare));
    PL_TRY(gather_lists(self, &found));
    PL_TRY(merge_lists(self, &found));
    *out = found.merged;
    found.merged = NULL;
done:
    pli_free(found.counts);
    pli_free(found.n_bytes);
    pli_free(found.lists);
    pli_free(found.indices);
    pli_free(found.merged);
    pli_free(found.spare);
    return st;
}

/* ---- means ---------------------------------------------------------------------- */

static size_t segment_bytes(const pl_exchange *self)
{
    return self->staging_bytes / PLI_EXCHANGE_SEGMENTS / PL_CACHE_LINE * PL_CACHE_LINE;
}

/* Writes this rank's values of a block, with zeros for the rows that it lacks. */
static void lay_out(const pl_exchange_part *part, block *rows, char *to)
{
    const pl_sparse_rows *local = &part->local;
    const int64_t *all = part->all.indices;
    const char *from = (const char *)local->values + rows->column;
    if (local->indices == NULL) { /* then the union is all rows */
        memcpy(to, from + rows->first * rows->row_bytes, rows->n * rows->width);
        return;
    }
    for (size_t k = rows->first; k < rows->first + rows->n; k++) {
        const int64_t index = all != NULL ? all[k] : (int64_t)k;
        while (rows->local < local->n_rows && local->indices[rows->local] < index)
            rows->local++;
        if (rows->local < local->n_rows && local->indices[rows->local] == index)
            memcpy(to, from + rows->local * rows->row_bytes, rows->width);
        else
            memset(to, 0, rows->width);
        to += rows->width;
    }
}

static pl_status take(const pl_exchange *self, flight *means)
{
    pl_status st = PL_OK;
    const size_t k = means->n_taken % PLI_EXCHANGE_SEGMENTS;
    const segment *oldest = &means->ring[k];
    PL_TRY(self->wait(self->context, oldest->ticket));
    memcpy(oldest->to, staging_of(self) + k * segment_bytes(self), oldest->n_bytes);
    means->n_taken++;
done:
    return st;
}

static pl_status issue(const pl_exchange *self, const pl_exchange_part *part,
                       block *rows, flight *means)
{
    pl_status st = PL_OK;
    if (means->n_issued - means->n_taken == PLI_EXCHANGE_SEGMENTS)
        PL_TRY(take(self, means));
    const size_t k = means->n_issued % PLI_EXCHANGE_SEGMENTS;
    const size_t at = k * segment_bytes(self);
    segment *next = &means->ring[k];
    next->to = (char *)part->all.values + rows->first * rows->row_bytes + rows->column;
    next->n_bytes = rows->n * rows->width;
    const pl_op op = {.kind = PL_ALL_REDUCE,
                      .reduction = PL_MEAN,
                      .dtype = part->table.dtype,
                      .offset_bytes = self->offset_bytes + at,
                      .n_elems = next->n_bytes / pl_dtype_bytes(part->table.dtype),
                      .ends_step = 1};
    lay_out(part, rows, staging_of(self) + at);
    PL_TRY(pl_comm_issue(self->comm, &op, &next->ticket));
    means->n_issued++;
    /* A failure of the world is reported by the wait for the segment: peers may have
     * finished the step by then, and this rank must finish it too. */
    self->comm->ops->work(self->comm);
done:
    return st;
}

static pl_status average(const pl_exchange *self, const pl_exchange_part *part,
                         flight *means)
{
    pl_status st = PL_OK;
    const size_t most = segment_bytes(self);
    const size_t n_rows = part->all.n_rows;
    block rows = {.row_bytes =
                      part->table.row_elems * pl_dtype_bytes(part->table.dtype)};
    if (rows.row_bytes == 0)
        goto done;
    const size_t n_most = most / smaller(rows.row_bytes, most);
    for (; rows.first < n_rows; rows.first += n_most) {
        rows.n = smaller(n_rows - rows.first, n_most);
        for (rows.column = 0; rows.column < rows.row_bytes; rows.column += most) {
            rows.width = smaller(rows.row_bytes - rows.column, most);
            PL_TRY(issue(self, part, &rows, means));
        }
    }
done:
    return st;
}

pl_status pl_exchange_mean(const pl_exchange *self)
{
    pl_status st = PL_OK;
    flight means = {.n_issued = 0};
    for (size_t t = 0; t < self->n_parts; t++)
        PL_TRY(average(self, &self->parts[t], &means));
    while (means.n_taken < means.n_issued)
        PL_TRY(take(self, &means));
done:
    return st;
}
