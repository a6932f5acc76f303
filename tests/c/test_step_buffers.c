/* test_step_buffers.c - the root's buffers reach the other ranks: with each step, and
 * in a forward; a buffer that was written, replaced or resized since keeps its value.
 */
#include "step_ranks.h"

enum { N_BUFFERS = 2, N_RANKS = 2 };

static const array_param params[] = {{2, 2, 0}};
static const size_t buffer_elems[N_BUFFERS] = {3, 20};
static const array_model model = {.params = params,
                                  .n_params = 1,
                                  .buffer_elems = buffer_elems,
                                  .n_buffers = N_BUFFERS,
                                  .view_bytes = 1000,
                                  .caps = {.bucket_bytes = 64, .last_bytes = 64}};

static pl_grad *array_of_value(rank_arrays *self, int n_rows, int n_cols, float value)
{
    float values[ARRAYS_MOST_ELEMS];
    const pli_layout layout = layout_of(n_rows, n_cols);
    for (size_t k = 0; k < layout.n_elems; k++)
        values[k] = value;
    return array_dense_of(self, &layout, values);
}

static void write_buffer(rank_arrays *self, size_t b, float value)
{
    float values[ARRAYS_MOST_ELEMS];
    for (size_t k = 0; k < buffer_elems[b]; k++)
        values[k] = value + (float)k;
    array_fill(self->buffers[b], values);
}

static int buffer_is(const rank_arrays *self, size_t b, float value)
{
    float values[ARRAYS_MOST_ELEMS];
    for (size_t k = 0; k < buffer_elems[b]; k++)
        values[k] = value + (float)k;
    return array_holds(self->buffers[b], values);
}

static int take_step(rank_arrays *self)
{
    arrays_zero(self);
    return CHECK_OK(arrays_arrive(self, 0, array_of_value(self, 2, 2, 1),
                                  PL_ARRIVES_ALONE)) &&
           CHECK_OK(arrays_end_backward(self));
}

/* ---- after a step --------------------------------------------------------------- */

/* What a rank does with a buffer between the step and its next forward. */
typedef enum change {
    NO_CHANGE,
    WRITTEN,     /* keeps its value */
    REPLACED,    /* likewise */
    RESIZED,     /* is skipped */
    GONE,        /* likewise */
    LAZY_BUFFER, /* its sign is; takes the values over */
    GAPS,        /* its memory has gaps; likewise */
    LAZY_GAPS,   /* both; likewise */
    SET_BACK,    /* another tensor in between; takes over */
    N_CHANGES
} change;

static void replace_buffer(rank_arrays *self, size_t b, pl_grad *buffer)
{
    pl_grad *before = self->buffers[b];
    self->buffers[b] = buffer;
    array_drop(before);
}

/* Before the step, so that it sees the buffer so. */
static void prepare_buffer(rank_arrays *self, size_t b, change what)
{
    pli_layout layout = layout_of(2, (int)buffer_elems[b]);
    if (what != LAZY_BUFFER && what != GAPS && what != LAZY_GAPS)
        return;
    pl_grad *buffer = array_new(self, &layout);
    layout = layout_of(1, (int)buffer_elems[b]);
    if (what != LAZY_BUFFER)
        layout.dims[1].stride = 2;
    if (what != GAPS)
        buffer->lazy = LAZY_SHOWN;
    buffer->layout = layout;
    replace_buffer(self, b, buffer);
}

static void change_buffer(rank_arrays *self, size_t b, change what)
{
    switch (what) {
    case WRITTEN:
        write_buffer(self, b, 7000);
        break;
    case REPLACED:
        replace_buffer(self, b, array_of_value(self, 1, (int)buffer_elems[b], 0));
        write_buffer(self, b, 7000);
        break;
    case RESIZED:
        replace_buffer(self, b,
                       array_of_value(self, 1, (int)buffer_elems[b] + 1, 7000));
        break;
    case GONE:
        replace_buffer(self, b, NULL);
        break;
    case SET_BACK: {
        pl_grad *own = self->buffers[b];
        self->buffers[b] = array_of_value(self, 1, 1, 0);
        CHECK(!buffer_is(self, b, 7000));
        replace_buffer(self, b, own);
        break;
    }
    default:
        break;
    }
}

/* A buffer is written only if it lacks the values that were sent. */
static void apply_buffers(rank_arrays *self, size_t b, int is_written)
{
    const pl_grad *buffer = self->buffers[b];
    const long n_writes = buffer != NULL ? buffer->n_writes : 0;
    CHECK_OK(pl_step_apply_buffers(self->step));
    CHECK(buffer == NULL || (buffer->n_writes > n_writes) == is_written);
    CHECK(arrays_n_in_step(self) == 0);
}

static void check_change(rank_arrays *self, size_t b, change what, float sent)
{
    const pl_grad *buffer = self->buffers[b];
    int has_other = 0;
    CHECK_OK(pl_step_has_other_buffers(self->step, &has_other));
    CHECK(has_other == (what == RESIZED || what == GONE));
    if (what == WRITTEN || what == REPLACED)
        CHECK(buffer_is(self, b, 7000));
    else if (what == RESIZED)
        CHECK(array_get(buffer, 0) == 7000 &&
              array_get(buffer, buffer_elems[b]) == 7000);
    else if (what == GONE)
        CHECK(buffer == NULL);
    else
        CHECK(buffer_is(self, b, sent));
}

/* Each change of each buffer on rank 1, after a step of both. */
static void change_and_apply(rank_job *job)
{
    for (int n = 0; n < N_CHANGES * N_BUFFERS; n++) {
        const change what = (change)(n % N_CHANGES);
        const size_t b = (size_t)(n / N_CHANGES);
        rank_arrays self;
        const float sent = (float)(100 * (n + 1));
        if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
            if (job->rank > 0)
                prepare_buffer(&self, b, what);
            for (size_t k = 0; k < N_BUFFERS; k++)
                write_buffer(&self, k, sent + (float)(10 * job->rank));
            (void)take_step(&self);
            const float own = sent + (float)(10 * job->rank);
            CHECK(buffer_is(&self, 0, own) && buffer_is(&self, 1, own));
            CHECK(arrays_n_in_step(&self) == (job->rank > 0 ? N_BUFFERS : 0));
            if (job->rank > 0)
                change_buffer(&self, b, what);
            const int keeps = what == WRITTEN || what == REPLACED;
            apply_buffers(&self, b,
                          job->rank > 0 && !keeps && what != RESIZED && what != GONE);
            check_change(&self, b, job->rank > 0 ? what : NO_CHANGE, sent);
            CHECK(buffer_is(&self, 1 - b, sent));
            (void)take_step(&self); /* with the same buffers */
            apply_buffers(&self, b, job->rank > 0 && keeps);
            write_buffer(&self, 1 - b, 1); /* a second call takes nothing over */
            CHECK_OK(pl_step_apply_buffers(self.step));
            CHECK(buffer_is(&self, 1 - b, 1));
        }
        arrays_destroy(&self);
    }
}

TEST(the_buffers_of_a_step_are_taken_over_unless_they_were_changed)
{
    arrays_run(&model, N_RANKS, change_and_apply, NULL, 1);
}

/* ---- in a forward --------------------------------------------------------------- */

/* Rank 0 writes in every third forward; all take it over, and only then.  At the end
 * more forwards than notices follow each other. */
static void sync_in_forwards(rank_job *job)
{
    rank_arrays self;
    long n_writes = 0;
    float sent = 1;
    if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
        write_buffer(&self, 0, sent + (float)job->rank);
        write_buffer(&self, 1, sent + (float)job->rank);
        for (unsigned n = 0; n < 250; n++) {
            const int is_new = n % 3 == 0 && n > 0 && n < 100;
            sent += is_new ? 50 : 0;
            if (is_new && job->rank == 0)
                write_buffer(&self, n % 2, sent);
            const long n_read = self.n_calls[CALL_FIND_BUFFER];
            CHECK_OK(pl_step_sync_buffers(self.step));
            CHECK(buffer_is(&self, (n < 100 ? n : 99) / 3 % 2, sent));
            const long n_now = self.buffers[0]->n_writes + self.buffers[1]->n_writes;
            if (job->rank > 0 && n > 0)
                CHECK(n_now == n_writes + is_new);
            if (job->rank == 0) /* compares them, and packs those that it sends */
                CHECK((self.n_calls[CALL_FIND_BUFFER] - n_read > N_BUFFERS) == is_new);
            n_writes = n_now;
            if (n % 7 == 0 && n < 100)
                CHECK(take_step(&self));
        }
    }
    arrays_destroy(&self);
}

TEST(a_forward_sends_buffers_only_if_they_differ)
{
    arrays_run(&model, 3, sync_in_forwards, NULL, 1);
}

static void sync_buffers(rank_arrays *self, int has_notices)
{
    const pli_host_ops *host = self->comm->host;
    self->comm->host = has_notices ? host : NULL;
    CHECK_OK(pl_step_sync_buffers(self->step));
    self->comm->host = host;
}

/* A forward raises on both ranks, whose next forward sends the buffers again; or on
 * rank 1 only.  Without notices its next forward then sends nothing until the next
 * step. */
static void raise_in_forward(rank_job *job)
{
    for (int n = 0; n < 3; n++) {
        rank_arrays self;
        const int raises = n < 2 || job->rank == 1;
        if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
            for (size_t b = 0; b < N_BUFFERS; b++)
                write_buffer(&self, b, (float)(1 + job->rank));
            if (n == 1)
                CHECK(take_step(&self));
            else
                sync_buffers(&self, n == 0);
            if (raises)
                pl_step_forward_fails(self.step, PL_TRAINS);
            if (job->rank == 0)
                write_buffer(&self, 0, 50);
            if (raises)
                sync_buffers(&self, n == 0);
            CHECK(buffer_is(&self, 0, n < 2 || job->rank == 0 ? 50 : 1));
            CHECK_OK(arrays_arrive(&self, 0, array_of_value(&self, 2, 2, 1),
                                   PL_ARRIVES_ALONE));
            CHECK(arrays_end_backward(&self) == (n < 2 ? PL_OK : PL_EMISMATCH));
        }
        arrays_destroy(&self);
    }
}

TEST(a_forward_that_raised_on_some_ranks_sends_no_buffers_again)
{
    arrays_run(&model, N_RANKS, raise_in_forward, NULL, 1);
}

/* A second forward before the backward takes over what the root has written since. */
static void forward_twice(rank_job *job)
{
    rank_arrays self;
    if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
        uint64_t token = 0;
        for (int n = 1; n <= 2; n++) {
            CHECK_OK(pl_step_forward_begins(self.step));
            write_buffer(&self, 0, (float)(n * (1 + job->rank)));
            CHECK_OK(pl_step_sync_buffers(self.step));
            CHECK(buffer_is(&self, 0, (float)n));
            token = pl_step_forward_ends(self.step, PL_OUTPUTS_WATCHED, PL_TRAINS);
        }
        CHECK_OK(pl_step_output(self.step, token, 1));
        CHECK(take_step(&self));
    }
    arrays_destroy(&self);
}

TEST(each_of_two_forwards_takes_over_the_buffers)
{
    arrays_run(&model, N_RANKS, forward_twice, NULL, 1);
}

/* ---- other roots ---------------------------------------------------------------- */

/* Rank 0 runs out of batches after a step; then rank 1 is the root. */
static void join_as_root(rank_job *job)
{
    rank_arrays self;
    if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
        for (int n = 0; n < 4; n++) {
            const float sent = (float)(100 * n);
            for (size_t b = 0; b < N_BUFFERS; b++)
                write_buffer(&self, b, sent + (float)job->rank);
            if (job->rank > 0 || n == 0)
                CHECK(take_step(&self));
            else
                CHECK_OK(pl_step_shadow(self.step, n == 1 ? PL_JOINING : PL_SHADOWING,
                                        PL_LEAVES_GRADS));
            CHECK_OK(pl_step_apply_buffers(self.step));
            /* The root of the second step has no values: each rank keeps its own. */
            const float root = n == 1 ? (float)job->rank : n > 1;
            CHECK(buffer_is(&self, 0, sent + root) && buffer_is(&self, 1, sent + root));
        }
    }
    arrays_destroy(&self);
}

TEST(the_lowest_active_rank_sends_its_buffers)
{
    arrays_run(&model, 3, join_as_root, NULL, 1);
}

/* ---- a step that is not taken --------------------------------------------------- */

/* After a mismatch all ranks send anew, whatever was sent before, and forget what the
 * step before that has sent. */
static void mismatch_then_sync(rank_job *job)
{
    rank_arrays self;
    if (CHECK_OK(arrays_create(&model, job->comm, &self))) {
        write_buffer(&self, 0, (float)(10 + job->rank));
        CHECK(take_step(&self));
        for (int n = 0; n <= job->rank; n++) {
            CHECK_OK(pl_step_forward_begins(self.step));
            (void)pl_step_forward_ends(self.step, PL_OUTPUTS_UNWATCHED, PL_TRAINS);
        }
        if (job->rank == 0)
            write_buffer(&self, 0, 1);
        CHECK_OK(
            arrays_arrive(&self, 0, array_of_value(&self, 2, 2, 1), PL_ARRIVES_ALONE));
        CHECK(arrays_end_backward(&self) == PL_EMISMATCH);
        CHECK_OK(pl_step_apply_buffers(self.step));
        CHECK(buffer_is(&self, 0, job->rank == 0 ? 1 : 11));
        CHECK_OK(pl_step_sync_buffers(self.step));
        CHECK(buffer_is(&self, 0, 1));
    }
    arrays_destroy(&self);
}

TEST(the_buffers_of_a_step_that_was_dropped_are_not_taken_over)
{
    arrays_run(&model, N_RANKS, mismatch_then_sync, NULL, 1);
}
