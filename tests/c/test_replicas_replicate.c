/* Copies of a model's tensors, brought up to date. */
#include <string.h>

#include "check.h"
#include "core/alloc.h"
#include "replicas/replicate.h"

enum { MOST = 16 };

/* A backend that counts what it is asked to copy, and has the CPU's do it. */
typedef struct counter {
    pl_backend super;
    pl_backend *cpu;
    size_t n_calls;
    size_t n_moves;
} counter;

static pl_status count_copy(pl_backend *backend, const pl_move *moves, size_t n_moves,
                            pl_stream *stream)
{
    counter *self = (counter *)(void *)backend;
    self->n_calls++;
    self->n_moves += n_moves;
    return self->cpu->ops->copy(self->cpu, moves, n_moves, stream);
}

static const pl_backend_ops counting = {.name = "counter", .copy = count_copy};

static int open_counter(counter *out)
{
    *out = (counter){.super = {&counting}};
    return CHECK_OK(pli_cpu_backend_create(&out->cpu));
}

/* Moves of eight bytes each, `gap` bytes apart. */
static void make_moves(pl_move *moves, size_t n, unsigned char *to,
                       const unsigned char *from, size_t gap)
{
    static const pl_dtype dtypes[] = {PL_F32, PL_U8, PL_F16, PL_C64, PL_I64};
    for (size_t i = 0; i < n; i++) {
        const pl_dtype dtype = dtypes[i % 5];
        moves[i] = (pl_move){to + i * (8 + gap), from + i * (8 + gap), dtype,
                             8 / pl_dtype_bytes(dtype)};
    }
}

static void what_differs_is_copied_and_nothing_else(void)
{
    static unsigned char to[256], from[256];
    pl_move moves[MOST];
    counter self;
    if (!open_counter(&self))
        return;
    for (int i = 0; i < 256; i++)
        from[i] = to[i] = (unsigned char)i;
    from[3] = from[16 * 5 + 7] = 0xEE;
    make_moves(moves, MOST, to, from, 8);
    from[8] = 0xEE; /* in a gap */
    CHECK_OK(pli_replicate(&self.super, moves, MOST));
    CHECK(self.n_calls == 1 && self.n_moves == 2);
    CHECK(to[3] == 0xEE && to[16 * 5 + 7] == 0xEE && to[8] == 8);
    make_moves(moves, MOST, to, from, 8);
    CHECK_OK(pli_replicate(&self.super, moves, MOST));
    CHECK(self.n_calls == 1); /* all is as it is to be */
    pli_backend_destroy(self.cpu);
}

static void neighbours_in_both_memories_go_as_one(void)
{
    static unsigned char to[128], from[128];
    pl_move moves[MOST];
    counter self;
    if (!open_counter(&self))
        return;
    memset(from, 7, sizeof from);
    from[4 * 8] = 0; /* so that only its other bytes differ */
    memset(to + 9 * 8, 7, 8);
    make_moves(moves, MOST, to, from, 0);
    CHECK_OK(pli_replicate(&self.super, moves, MOST));
    CHECK(self.n_calls == 1 && self.n_moves == 2); /* 0 to 8, 10 to 15 */
    CHECK(memcmp(to, from, sizeof to) == 0);
    memset(to, 1, sizeof to);
    make_moves(moves, MOST, to, from, 0);
    moves[1].from = from + 5 * 8; /* the source goes on elsewhere */
    CHECK_OK(pli_replicate(&self.super, moves, 3));
    CHECK(self.n_moves == 5);
    pli_backend_destroy(self.cpu);
}

static void bits_count_and_not_values(void)
{
    static const float zeros[] = {-0.0f, 0.0f};
    float to[] = {0.0f, 0.0f};
    pl_move moves[] = {{&to[0], &zeros[0], PL_F32, 1}, {&to[1], &zeros[1], PL_F32, 1}};
    counter self;
    if (!open_counter(&self))
        return;
    CHECK(pli_replicate_is_due(&moves[0]) && !pli_replicate_is_due(&moves[1]));
    CHECK_OK(pli_replicate(&self.super, moves, 2));
    CHECK(memcmp(to, zeros, sizeof to) == 0);
    pli_backend_destroy(self.cpu);
}

static void tensors_without_elements_are_never_due(void)
{
    pl_move none = {NULL, NULL, PL_F32, 0};
    counter self;
    if (!open_counter(&self))
        return;
    CHECK(!pli_replicate_is_due(&none));
    CHECK_OK(pli_replicate(&self.super, &none, 1));
    CHECK_OK(pli_replicate(&self.super, NULL, 0));
    CHECK(self.n_calls == 0);
    pli_backend_destroy(self.cpu);
}

static void replicating_allocates_nothing(void)
{
    static unsigned char to[128], from[128];
    pl_move moves[MOST];
    counter self;
    if (!open_counter(&self))
        return;
    memset(from, 1, sizeof from);
    make_moves(moves, MOST, to, from, 0);
    pli_fault_arm(PLI_FAULT_ALLOC, 1);
    CHECK_OK(pli_replicate(&self.super, moves, MOST));
    CHECK(pli_fault_count(PLI_FAULT_ALLOC) == 0);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
    pli_backend_destroy(self.cpu);
}

int main(void)
{
    RUN(what_differs_is_copied_and_nothing_else);
    RUN(neighbours_in_both_memories_go_as_one);
    RUN(bits_count_and_not_values);
    RUN(tensors_without_elements_are_never_due);
    RUN(replicating_allocates_nothing);
    return check_report();
}
