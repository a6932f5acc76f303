/* sparse_exchange.c - finds the union of all ranks' rows, and their means. */
#include "sparse_exchange.h"

#include <string.h>

#include "core/alloc.h"

static const uint64_t ALL_ROWS = UINT64_MAX; /* as a number of rows: no list follows */

typedef enum exchange_phase {
    EXCHANGE_COUNTING, /* numbers of rows are gathered */
    EXCHANGE_LISTING,  /* row numbers are gathered */
    EXCHANGE_FOUND,    /* the unions are known */
    EXCHANGE_AVERAGED,
} exchange_phase;

/* Gathers bytes of every rank on every rank, a block of the staging a round. */
typedef struct gather {
    const char *mine;
    char **received; /* by rank */
    size_t *n_bytes; /* ... */
    size_t n_longest;
    size_t n_done;    /* bytes of each rank, or all that it has */
    size_t n_issued;  /* the same, with the round under way */
    pl_ticket ticket; /* of that round */
} gather;

/* A run of elements of one table's union, in one segment of the staging. */
typedef struct union_piece {
    size_t table;
    size_t first; /* element of the union */
    size_t n;
    pl_ticket ticket;
} union_piece;

/* How far a table's elements are laid out. */
typedef struct union_cursor {
    size_t table;
    size_t elem;      /* of the union */
    size_t local_row; /* this rank's first row that is not before `elem` */
} union_cursor;

/* Rows of one rank. */
typedef struct list {
    const int64_t *indices;
    size_t n;
} list;

struct pl_exchange {
    pl_exchange_spec spec;
    const pl_table *tables;     /* the spec's */
    const pl_sparse_rows *rows; /* ... */
    pl_sparse_rows *unions; /* indices inside `merged`; values: the caller's memory */
    exchange_phase phase;
    char *staging;
    uint64_t *counts;    /* [rank][table] */
    int64_t *local_list; /* this rank's row numbers, table after table */
    int64_t *lists;      /* all ranks' */
    int64_t *merged, *spare;
    const int64_t **next; /* by rank: the rest of its lists to merge */
    list *table_lists;    /* by rank: of the table that is being merged */
    gather gather;
    union_cursor cursor;
    union_piece pieces[PLI_EXCHANGE_SEGMENTS]; /* those in flight, a ring */
    size_t n_laid, n_taken;                    /* pieces */
};

int64_t *pl_no_indices(void)
{
    static int64_t none;
    return &none;
}

/* ---- life ----------------------------------------------------------------------- */

/* PL_OK if the rows of table t, which has n_rows, are in ascending order, each once. */
static pl_status check_order(const pl_sparse_rows *rows, size_t t, size_t n_rows,
                             pl_status code)
{
    for (size_t k = 0; rows->indices != NULL && k < rows->n_rows; k++) {
        const int64_t index = rows->indices[k];
        if (index < 0 || (uint64_t)index >= n_rows)
            return pli_fail(code, "row %lld is outside table %zu, which has %zu rows",
                            (long long)index, t, n_rows);
        if (k > 0 && index <= rows->indices[k - 1])
            return pli_fail(code, "row %lld of table %zu comes after row %lld",
                            (long long)index, t, (long long)rows->indices[k - 1]);
    }
    return PL_OK;
}

static pl_status check_rows(const pl_exchange_spec *spec)
{
    pl_status st = PL_OK;
    for (size_t t = 0; t < spec->n_tables; t++) {
        const pl_sparse_rows *rows = &spec->rows[t];
        const size_t n_rows = spec->tables[t].n_rows;
        if (rows->indices == NULL && rows->n_rows != n_rows)
            PL_FAIL(PL_EINVAL, "table %zu has %zu rows, and %zu are given as all", t,
                    n_rows, rows->n_rows);
        PL_TRY(check_order(rows, t, n_rows, PL_EINVAL));
    }
done:
    return st;
}

/* The first gather: each rank's numbers of rows. */
static void begin_counting(pl_exchange *self)
{
    const size_t n = self->spec.n_tables;
    const int rank = pl_comm_rank(self->spec.comm);
    uint64_t *mine = self->counts + (size_t)rank * n;
    for (size_t t = 0; t < n; t++)
        mine[t] = self->rows[t].indices != NULL ? self->rows[t].n_rows : ALL_ROWS;
    self->gather.mine = (const char *)mine;
    self->gather.n_longest = n * sizeof *mine;
    for (int r = 0; r < pl_comm_world_size(self->spec.comm); r++) {
        self->gather.received[r] = (char *)(self->counts + (size_t)r * n);
        self->gather.n_bytes[r] = n * sizeof *mine;
    }
}

pl_status pl_exchange_create(const pl_exchange_spec *spec, pl_exchange **out)
{
    pl_status st = PL_OK;
    pl_exchange *self = NULL;
    const size_t n = spec->n_tables;
    const size_t n_ranks = (size_t)pl_comm_world_size(spec->comm);
    const size_t least_bytes =
        PL_CACHE_LINE * (n_ranks < PLI_EXCHANGE_LINES ? PLI_EXCHANGE_LINES : n_ranks);
    if (spec->staging_bytes < least_bytes)
        PL_FAIL(PL_EINVAL, "a staging of %zu bytes is too small: give %zu",
                spec->staging_bytes, least_bytes);
    if (spec->comm->backend != NULL)
        PL_FAIL(PL_EUNSUPPORTED,
                "rows are exchanged in host memory, and a world of kind '%s' has its "
                "gradients on a device: average them densely",
                spec->comm->ops->name);
    PL_TRY(check_rows(spec));
    PL_TRY(pli_calloc(1, sizeof *self, "an exchange of rows", &self));
    PL_TRY(pli_calloc(n, sizeof *self->unions, "rows of ranks", &self->unions));
    PL_TRY(pli_calloc(n_ranks * n, sizeof *self->counts, "numbers of rows",
                      &self->counts));
    PL_TRY(pli_calloc(n_ranks, sizeof(char *), "ranks' rows", &self->gather.received));
    PL_TRY(pli_calloc(n_ranks, sizeof(size_t), "ranks' rows", &self->gather.n_bytes));
    PL_TRY(pli_calloc(n_ranks, sizeof(int64_t *), "ranks' rows", &self->next));
    PL_TRY(pli_calloc(n_ranks, sizeof(list), "ranks' rows", &self->table_lists));
    self->spec = *spec;
    self->tables = spec->tables;
    self->rows = spec->rows;
    self->staging = spec->comm->arena + spec->offset_bytes;
    begin_counting(self);
    *out = self;
    self = NULL;
done:
    pl_exchange_destroy(self);
    return st;
}

void pl_exchange_destroy(pl_exchange *self)
{
    if (self == NULL)
        return;
    pli_free(self->unions);
    pli_free(self->counts);
    pli_free(self->gather.received);
    pli_free(self->gather.n_bytes);
    pli_free(self->next);
    pli_free(self->table_lists);
    pli_free(self->local_list);
    pli_free(self->lists);
    pli_free(self->merged);
    pli_free(self->spare);
    pli_free(self);
}

/* ---- gathering ------------------------------------------------------------------ */

/* Bytes that a rank has for a round of n bytes, from byte `first` on. */
static size_t share_of(const gather *gathered, int rank, size_t first, size_t n)
{
    const size_t n_left =
        first < gathered->n_bytes[rank] ? gathered->n_bytes[rank] - first : 0;
    return n_left < n ? n_left : n;
}

static pl_status issue_round(pl_exchange *self)
{
    pl_status st = PL_OK;
    gather *gathered = &self->gather;
    const int rank = pl_comm_rank(self->spec.comm);
    const size_t n_ranks = (size_t)pl_comm_world_size(self->spec.comm);
    const size_t room =
        self->spec.staging_bytes / n_ranks / PL_CACHE_LINE * PL_CACHE_LINE;
    const size_t n_left = gathered->n_longest - gathered->n_done;
    const size_t n = n_left < room ? n_left : room;
    const size_t n_mine = share_of(gathered, rank, gathered->n_done, n);
    const pl_op op = {.kind = PL_ALL_GATHER,
                      .dtype = PL_U8,
                      .offset_bytes = self->spec.offset_bytes,
                      .n_elems = n * n_ranks,
                      .ends_step = 1}; /* if no rank has any row */
    if (n_mine > 0)
        memcpy(self->staging + (size_t)rank * n, gathered->mine + gathered->n_done,
               n_mine);
    PL_TRY(pl_comm_issue(self->spec.comm, &op, &gathered->ticket));
    gathered->n_issued = gathered->n_done + n;
done:
    return st;
}

static pl_status run_gather(pl_exchange *self, int64_t slice_ns)
{
    pl_status st = PL_OK;
    gather *gathered = &self->gather;
    while (gathered->n_done < gathered->n_longest) {
        if (gathered->n_issued == gathered->n_done)
            PL_TRY(issue_round(self));
        PL_TRY(pl_comm_wait(self->spec.comm, gathered->ticket, slice_ns));
        const size_t n = gathered->n_issued - gathered->n_done;
        for (int r = 0; r < pl_comm_world_size(self->spec.comm); r++) {
            const size_t n_theirs = share_of(gathered, r, gathered->n_done, n);
            if (n_theirs > 0)
                memcpy(gathered->received[r] + gathered->n_done,
                       self->staging + (size_t)r * n, n_theirs);
        }
        gathered->n_done = gathered->n_issued;
    }
done:
    return st;
}

/* ---- the union ------------------------------------------------------------------ */

static uint64_t count_of(const pl_exchange *self, int rank, size_t t)
{
    return self->counts[(size_t)rank * self->spec.n_tables + t];
}

/* Whether some rank has all rows: then no list of this table is sent. */
static int is_whole(const pl_exchange *self, size_t t)
{
    for (int r = 0; r < pl_comm_world_size(self->spec.comm); r++)
        if (count_of(self, r, t) == ALL_ROWS)
            return 1;
    return 0;
}

/* The second gather: each rank's row numbers, of the tables that are lists. */
static pl_status begin_listing(pl_exchange *self)
{
    pl_status st = PL_OK;
    const int rank = pl_comm_rank(self->spec.comm);
    const int n_ranks = pl_comm_world_size(self->spec.comm);
    size_t n_all = 0;
    size_t n_local = 0;
    gather *gathered = &self->gather;
    gathered->n_longest = gathered->n_done = gathered->n_issued = 0;
    memset(gathered->n_bytes, 0, (size_t)n_ranks * sizeof *gathered->n_bytes);
    for (size_t t = 0; t < self->spec.n_tables; t++) {
        const int n_lists = is_whole(self, t) ? 0 : n_ranks;
        for (int r = 0; r < n_lists; r++) {
            if (count_of(self, r, t) > self->tables[t].n_rows)
                PL_FAIL(PL_EMISMATCH, "rank %d has more rows than table %zu", r, t);
            gathered->n_bytes[r] += count_of(self, r, t) * sizeof(int64_t);
        }
    }
    for (int r = 0; r < n_ranks; r++) {
        n_all += gathered->n_bytes[r] / sizeof(int64_t);
        if (gathered->n_bytes[r] > gathered->n_longest)
            gathered->n_longest = gathered->n_bytes[r];
    }
    const size_t n_local_rows = gathered->n_bytes[rank] / sizeof(int64_t);
    PL_TRY(pli_calloc(n_local_rows + 1, sizeof(int64_t), "row numbers",
                      &self->local_list));
    PL_TRY(pli_calloc(n_all + 1, sizeof(int64_t), "row numbers", &self->lists));
    PL_TRY(pli_calloc(n_all + 1, sizeof(int64_t), "row numbers", &self->merged));
    PL_TRY(pli_calloc(n_all + 1, sizeof(int64_t), "row numbers", &self->spare));
    for (size_t t = 0; t < self->spec.n_tables; t++) {
        if (is_whole(self, t) || self->rows[t].n_rows == 0)
            continue;
        memcpy(self->local_list + n_local, self->rows[t].indices,
               self->rows[t].n_rows * sizeof(int64_t));
        n_local += self->rows[t].n_rows;
    }
    gathered->mine = (const char *)self->local_list;
    gathered->received[0] = (char *)self->lists;
    for (int r = 1; r < n_ranks; r++)
        gathered->received[r] = gathered->received[r - 1] + gathered->n_bytes[r - 1];
done:
    return st;
}

/* Writes the union of both, in ascending order; returns its length. */
static size_t merge_two(list left, list right, int64_t *out)
{
    size_t n = 0, l = 0, r = 0;
    while (l < left.n && r < right.n) {
        const int64_t a = left.indices[l];
        const int64_t b = right.indices[r];
        out[n++] = a < b ? a : b;
        l += a <= b;
        r += b <= a;
    }
    if (l < left.n)
        memcpy(out + n, left.indices + l, (left.n - l) * sizeof *out);
    n += left.n - l;
    if (r < right.n)
        memcpy(out + n, right.indices + r, (right.n - r) * sizeof *out);
    return n + right.n - r;
}

/* Merges neighbours until one list is left, which it puts into `out`.  `out` and
 * `other` have room for all lists together. */
static size_t merge_all(list *lists, int n_lists, int64_t *out, int64_t *other)
{
    int64_t *to = out;
    do { /* at least once, so that the result is a copy */
        int n_left = 0;
        size_t at = 0;
        for (int k = 0; k < n_lists; k += 2) {
            const list none = {NULL, 0};
            const list right = k + 1 < n_lists ? lists[k + 1] : none;
            const size_t n = merge_two(lists[k], right, to + at);
            lists[n_left++] = (list){to + at, n};
            at += n;
        }
        n_lists = n_left;
        to = to == out ? other : out;
    } while (n_lists > 1);
    if (lists[0].n > 0 && lists[0].indices != out)
        memcpy(out, lists[0].indices, lists[0].n * sizeof *out);
    return lists[0].n;
}

static pl_status find_unions(pl_exchange *self)
{
    pl_status st = PL_OK;
    const int n_ranks = pl_comm_world_size(self->spec.comm);
    const int64_t **next = self->next;
    list *lists = self->table_lists;
    size_t n_merged = 0;
    for (int r = 0; r < n_ranks; r++)
        next[r] = (const int64_t *)(const void *)self->gather.received[r];
    for (size_t t = 0; t < self->spec.n_tables; t++) {
        if (is_whole(self, t)) {
            self->unions[t].n_rows = self->tables[t].n_rows;
            continue;
        }
        for (int r = 0; r < n_ranks; r++) {
            lists[r] = (list){next[r], count_of(self, r, t)};
            next[r] += lists[r].n;
        }
        int64_t *out = self->merged + n_merged;
        self->unions[t].indices = out;
        self->unions[t].n_rows = merge_all(lists, n_ranks, out, self->spare);
        n_merged += self->unions[t].n_rows;
        PL_TRY(check_order(&self->unions[t], t, self->tables[t].n_rows, PL_EMISMATCH));
    }
done:
    return st;
}

pl_status pl_exchange_find(pl_exchange *self, int64_t slice_ns)
{
    pl_status st = PL_OK;
    if (self->phase == EXCHANGE_COUNTING) {
        PL_TRY(run_gather(self, slice_ns));
        PL_TRY(begin_listing(self));
        self->phase = EXCHANGE_LISTING;
    }
    if (self->phase == EXCHANGE_LISTING) {
        PL_TRY(run_gather(self, slice_ns));
        PL_TRY(find_unions(self));
        self->phase = EXCHANGE_FOUND;
    }
done:
    return st;
}

pl_sparse_rows pl_exchange_union(const pl_exchange *self, size_t table)
{
    return self->unions[table];
}

/* ---- means ---------------------------------------------------------------------- */

void pl_exchange_set_room(pl_exchange *self, size_t table, void *values)
{
    self->unions[table].values = values;
}

static size_t union_elems(const pl_exchange *self, size_t t)
{
    return self->unions[t].n_rows * self->tables[t].row_elems;
}

/* Lays out n elements of this rank from the cursor on, and moves the cursor. */
static void lay_out(const pl_exchange *self, union_cursor *at, size_t n, char *to)
{
    const pl_table *table = &self->tables[at->table];
    const pl_sparse_rows *local = &self->rows[at->table];
    const pl_sparse_rows *all = &self->unions[at->table];
    const size_t elem_bytes = pl_dtype_bytes(table->dtype);
    if (local->indices == NULL) { /* then the union is all rows */
        memcpy(to, (const char *)local->values + at->elem * elem_bytes, n * elem_bytes);
        at->elem += n;
        return;
    }
    while (n > 0) {
        const size_t row = at->elem / table->row_elems;
        const size_t column = at->elem % table->row_elems;
        const size_t n_left = table->row_elems - column;
        const size_t n_now = n_left < n ? n_left : n;
        const int64_t index = all->indices != NULL ? all->indices[row] : (int64_t)row;
        const int is_local =
            at->local_row < local->n_rows && local->indices[at->local_row] == index;
        const size_t local_elem = at->local_row * table->row_elems + column;
        if (is_local)
            memcpy(to, (const char *)local->values + local_elem * elem_bytes,
                   n_now * elem_bytes);
        else
            memset(to, 0, n_now * elem_bytes);
        at->local_row += is_local && n_now == n_left;
        at->elem += n_now;
        to += n_now * elem_bytes;
        n -= n_now;
    }
}

static size_t segment_bytes(const pl_exchange *self)
{
    return self->spec.staging_bytes / PLI_EXCHANGE_SEGMENTS / PL_CACHE_LINE *
           PL_CACHE_LINE;
}

/* Moves the cursor past finished tables; returns whether another is left. */
static int has_more(pl_exchange *self)
{
    while (self->cursor.table < self->spec.n_tables &&
           self->cursor.elem == union_elems(self, self->cursor.table))
        self->cursor = (union_cursor){.table = self->cursor.table + 1};
    return self->cursor.table < self->spec.n_tables;
}

static pl_status issue_piece(pl_exchange *self)
{
    pl_status st = PL_OK;
    const size_t t = self->cursor.table;
    const size_t segment = self->n_laid % PLI_EXCHANGE_SEGMENTS;
    const size_t at = segment * segment_bytes(self);
    const size_t n_most = segment_bytes(self) / pl_dtype_bytes(self->tables[t].dtype);
    const size_t n_left = union_elems(self, t) - self->cursor.elem;
    union_piece *next = &self->pieces[segment];
    *next = (union_piece){
        .table = t, .first = self->cursor.elem, .n = n_left < n_most ? n_left : n_most};
    const pl_op op = {.kind = PL_ALL_REDUCE,
                      .reduction = PL_MEAN,
                      .dtype = self->tables[t].dtype,
                      .offset_bytes = self->spec.offset_bytes + at,
                      .n_elems = next->n,
                      .ends_step = 1};
    lay_out(self, &self->cursor, next->n, self->staging + at);
    PL_TRY(pl_comm_issue(self->spec.comm, &op, &next->ticket));
    self->n_laid++;
    /* A failure of the world is reported by the wait for the piece: peers may have
     * finished the step by then, and this rank must finish it too. */
    self->spec.comm->ops->work(self->spec.comm);
done:
    return st;
}

static pl_status take_piece(pl_exchange *self, int64_t slice_ns)
{
    pl_status st = PL_OK;
    const size_t segment = self->n_taken % PLI_EXCHANGE_SEGMENTS;
    const union_piece *oldest = &self->pieces[segment];
    const size_t elem_bytes = pl_dtype_bytes(self->tables[oldest->table].dtype);
    PL_TRY(pl_comm_wait(self->spec.comm, oldest->ticket, slice_ns));
    memcpy((char *)self->unions[oldest->table].values + oldest->first * elem_bytes,
           self->staging + segment * segment_bytes(self), oldest->n * elem_bytes);
    self->n_taken++;
done:
    return st;
}

pl_status pl_exchange_mean(pl_exchange *self, int64_t slice_ns)
{
    pl_status st = PL_OK;
    if (self->phase != EXCHANGE_FOUND)
        PL_FAIL(PL_ESTATE, "cannot average before rows are found, or twice");
    for (;;) {
        while (has_more(self) && self->n_laid - self->n_taken < PLI_EXCHANGE_SEGMENTS)
            PL_TRY(issue_piece(self));
        if (self->n_taken == self->n_laid)
            break;
        PL_TRY(take_piece(self, slice_ns));
    }
    self->phase = EXCHANGE_AVERAGED;
done:
    return st;
}
