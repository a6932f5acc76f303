/* test_kernels.c - the kernels, built for the host, against the CPU backend and against
 * naive kernels, bit for bit.
 *
 * Each of the three works in an arena of its own, drawn the same; afterwards the arenas
 * are compared whole, so that a write to any wrong place is seen.  Two NaNs are equal,
 * whatever their payload.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/backend/backend.h"
#include "check.h"
#include "kernel_driver.h"
#include "naive_kernels.cu"
#include "naive_sum.h"

enum { ARENA_BYTES = 1 << 20, TO_AT = 256, FROM_AT = 1 << 19, FLAG_AT = 64 };

typedef enum worker { FAST, TWIN, NAIVE_ONE, N_WORKERS } worker;

static struct {
    pli_kernels *kernels;
    pl_backend *twin;
    unsigned char *drawn;
    unsigned char *arenas[N_WORKERS];
} bench;

static const pli_word words[PL_N_DTYPES] = {
    PLI_WORD_U8,   PLI_WORD_U8,  PLI_WORD_U16, PLI_WORD_U32, PLI_WORD_U64, PLI_WORD_F16,
    PLI_WORD_BF16, PLI_WORD_F32, PLI_WORD_F64, PLI_WORD_F32, PLI_WORD_F64};

static int bench_create(void)
{
    memset(&driver_said, 0, sizeof driver_said);
    bench.drawn = aligned_alloc(64, ARENA_BYTES);
    for (int w = 0; w < N_WORKERS; w++)
        bench.arenas[w] = aligned_alloc(64, ARENA_BYTES);
    return CHECK_OK(pli_kernels_load(&kernel_driver, 90, NULL, &bench.kernels)) &&
           CHECK_OK(pli_cpu_backend_create(&bench.twin));
}

static void bench_destroy(void)
{
    pli_kernels_unload(bench.kernels);
    pli_backend_destroy(bench.twin);
    free(bench.drawn);
    for (int w = 0; w < N_WORKERS; w++)
        free(bench.arenas[w]);
}

static void draw(pl_dtype dtype)
{
    naive_fill(bench.drawn, ARENA_BYTES, dtype);
    memset(bench.drawn + FLAG_AT, 0, sizeof(uint32_t));
}

static void arenas_begin(void)
{
    for (int w = 0; w < N_WORKERS; w++)
        memcpy(bench.arenas[w], bench.drawn, ARENA_BYTES);
}

/* That the results at `at` are equal, and the arenas but for NaNs there, too. */
static int arenas_are_equal(size_t at, size_t n_bytes, pl_dtype dtype)
{
    int are_equal = 1;
    for (int w = TWIN; w < N_WORKERS; w++) {
        const unsigned char *const expected = bench.arenas[w] + at;
        are_equal &=
            first_difference(bench.arenas[FAST] + at, expected, n_bytes, dtype) < 0;
        memcpy(bench.arenas[w] + at, bench.arenas[FAST] + at, n_bytes);
        are_equal &= memcmp(bench.arenas[FAST], bench.arenas[w], ARENA_BYTES) == 0;
    }
    return are_equal;
}

/* One operation on one tensor; offsets are into the arenas. */
typedef struct trial {
    size_t to;
    size_t from; /* SIZE_MAX: NULL */
    size_t n_elems;
    pl_dtype to_dtype;
    pl_dtype from_dtype;
    double scale;
    int ratio[2];
    int n_ranks;
    size_t stride_bytes;
    pl_reduction reduction;
} trial;

static const void *address(worker w, size_t offset)
{
    return offset == SIZE_MAX ? NULL : bench.arenas[w] + offset;
}

static pl_move move_of(const trial *t, worker w)
{
    return (pl_move){.to = bench.arenas[w] + t->to,
                     .from = address(w, t->from),
                     .dtype = t->to_dtype,
                     .n_elems = t->n_elems};
}

static void run_naive(void (*kernel)(naive_task, unsigned long long), const trial *t)
{
    const int is_copy = kernel == naive_copy;
    const size_t word_bytes = (size_t)naive_bytes(words[t->to_dtype]);
    const size_t n_bytes = t->n_elems * pl_dtype_bytes(t->to_dtype);
    const naive_task task = {
        .to = bench.arenas[NAIVE_ONE] + t->to,
        .from = address(NAIVE_ONE, t->from),
        .n = is_copy ? n_bytes : n_bytes / word_bytes,
        .stride_bytes = t->stride_bytes,
        .factor = t->ratio[1] != 0 ? t->ratio[0] : t->scale,
        .divisor = t->ratio[1],
        .flag = (unsigned *)(void *)(bench.arenas[NAIVE_ONE] + FLAG_AT),
        .n_ranks = (unsigned)t->n_ranks,
        .to_word = (unsigned char)words[t->to_dtype],
        .from_word = (unsigned char)words[t->from_dtype],
        .is_mean = t->reduction == PL_MEAN};
    for (unsigned long long i = 0; i < task.n; i++)
        kernel(task, i);
}

typedef enum operation {
    OP_COPY,
    OP_ADD,
    OP_SCALE,
    OP_CAST,
    OP_SUM,
    OP_FIND
} operation;

static pl_status run_fast_or_twin(operation op, const trial *t, worker w)
{
    pl_backend *const twin = w == TWIN ? bench.twin : NULL;
    pli_kernels *const fast = bench.kernels;
    const pl_move move = move_of(t, w);
    const pl_cast cast = {.to = move.to,
                          .from = move.from,
                          .to_dtype = t->to_dtype,
                          .from_dtype = t->from_dtype,
                          .n_elems = t->n_elems};
    const pl_slots slots = {.to = move.to,
                            .from = move.from,
                            .stride_bytes = t->stride_bytes,
                            .n_ranks = t->n_ranks,
                            .dtype = t->to_dtype,
                            .reduction = t->reduction,
                            .n_elems = t->n_elems};
    const int up = t->ratio[0], down = t->ratio[1];
    uint32_t *const flag = (uint32_t *)(void *)(bench.arenas[w] + FLAG_AT);
    switch (op) {
    case OP_COPY:
        return twin ? twin->ops->copy(twin, &move, 1, NULL)
                    : pli_kernels_copy(fast, &move, 1, NULL);
    case OP_ADD:
        return twin ? twin->ops->add(twin, &move, 1, NULL)
                    : pli_kernels_add(fast, &move, 1, NULL);
    case OP_SCALE:
        return twin ? twin->ops->scale(twin, &move, 1, up, down, NULL)
                    : pli_kernels_scale(fast, &move, 1, up, down, NULL);
    case OP_CAST:
        return twin ? twin->ops->cast(twin, &cast, 1, t->scale, NULL)
                    : pli_kernels_cast(fast, &cast, 1, t->scale, NULL);
    case OP_SUM:
        return twin ? twin->ops->sum(twin, &slots, NULL)
                    : pli_kernels_sum(fast, &slots, NULL);
    default:
        return twin ? twin->ops->find_nonfinite(twin, &move, 1, flag, NULL)
                    : pli_kernels_find_nonfinite(fast, &move, 1, flag, NULL);
    }
}

static void run_trial(operation op, const trial *t)
{
    static void (*const naives[])(naive_task, unsigned long long) = {
        naive_copy, naive_add, naive_scale, naive_cast, naive_sum, naive_find};
    arenas_begin();
    if (!CHECK_OK(run_fast_or_twin(op, t, FAST)) ||
        !CHECK_OK(run_fast_or_twin(op, t, TWIN)))
        return;
    run_naive(naives[op], t);
    const size_t n_bytes = t->n_elems * pl_dtype_bytes(t->to_dtype);
    if (!CHECK(arenas_are_equal(t->to, n_bytes, t->to_dtype)))
        CHECK_MORE("operation %d: %s from %s, %zu elements, +%zu from +%zu, %d ranks",
                   (int)op, pl_dtype_text(t->to_dtype), pl_dtype_text(t->from_dtype),
                   t->n_elems, t->to - TO_AT, t->from - FROM_AT, t->n_ranks);
}

/* ---- moves ------------------------------------------------------------------------
 */

#define FOR_EACH(type, it, ...)                                                        \
    for (const type it##_all[] = __VA_ARGS__, *it = it##_all;                          \
         it < it##_all + sizeof it##_all / sizeof it##_all[0]; it++)

static void bytes_are_copied_from_any_address_to_any_other(void)
{
    draw(PL_U8);
    FOR_EACH(size_t, n, {1, 3, 15, 16, 17, 100, 16384, 32768, 32769, 70001})
    {
        FOR_EACH(size_t, to, {0, 1, 2, 4, 5, 8, 15})
        {
            FOR_EACH(size_t, from, {0, 1, 2, 4, 5, 8, 15})
            {
                run_trial(OP_COPY, &(trial){.to = TO_AT + *to,
                                            .from = FROM_AT + *from,
                                            .n_elems = *n,
                                            .to_dtype = PL_U8});
            }
            run_trial(OP_COPY, &(trial){.to = TO_AT + *to,
                                        .from = SIZE_MAX,
                                        .n_elems = *n,
                                        .to_dtype = PL_U8});
        }
    }
}

static void tensors_of_every_type_are_copied_and_added(void)
{
    for (int d = 0; d < PL_N_DTYPES; d++) {
        const size_t word_bytes = (size_t)naive_bytes(words[d]);
        draw((pl_dtype)d);
        FOR_EACH(size_t, n, {0, 1, 3, 5, 255, 4096, 4097, 8193, 20000})
        {
            FOR_EACH(size_t, shift, {0, 1, 3, 16, 17})
            {
                const trial t = {.to = TO_AT + *shift % 4 * word_bytes,
                                 .from = FROM_AT + *shift / 4 * word_bytes,
                                 .n_elems = *n,
                                 .to_dtype = (pl_dtype)d,
                                 .from_dtype = (pl_dtype)d};
                run_trial(OP_COPY, &t);
                run_trial(OP_ADD, &t);
            }
        }
    }
}

static void tensors_of_every_type_are_scaled(void)
{
    for (int d = PL_F16; d < PL_N_DTYPES; d++) {
        draw((pl_dtype)d);
        FOR_EACH(size_t, n, {0, 1, 5, 257, 8193})
        {
            FOR_EACH(int, numerator, {1, 2, 3, 1000})
            {
                const trial t = {.to = TO_AT + *n % 2 * pl_dtype_bytes((pl_dtype)d),
                                 .from = FROM_AT,
                                 .n_elems = *n,
                                 .to_dtype = (pl_dtype)d,
                                 .ratio = {*numerator, 3}};
                run_trial(OP_SCALE, &t);
            }
        }
    }
}

static void every_float_is_cast_to_every_other(void)
{
    for (int pair = 0; pair < 16; pair++) {
        const pl_dtype to = (pl_dtype)(PL_F16 + pair % 4);
        const pl_dtype from = (pl_dtype)(PL_F16 + pair / 4);
        draw(from);
        FOR_EACH(size_t, n, {0, 1, 5, 257, 4096, 8193, 20000})
        {
            FOR_EACH(size_t, shift, {0, 1, 16, 17})
            {
                FOR_EACH(double, scale, {1.0, 1.0 / 3, 0x1p-12, 65536.0})
                {
                    const trial t = {.to = TO_AT + *shift % 4 * pl_dtype_bytes(to),
                                     .from =
                                         FROM_AT + *shift / 4 * pl_dtype_bytes(from),
                                     .n_elems = *n,
                                     .to_dtype = to,
                                     .from_dtype = from,
                                     .scale = *scale};
                    run_trial(OP_CAST, &t);
                }
            }
        }
    }
}

/* Each 16-bit float, the middle of it and the next, and what is next to the middle. */
static void draw_ties(pl_dtype half, unsigned base, unsigned n, pl_dtype wide)
{
    const int f = n_frac_of(half), e = e_min_of(half);
    for (unsigned i = 0; i < 4 * n; i++) {
        const double x = naive_decode((base + i / 4) & 0xffffu, f, e);
        const double next = naive_decode((base + i / 4 + 1) & 0xffffu, f, e);
        const double way = i % 4 == 2 ? (double)INFINITY : -(double)INFINITY;
        double value = i % 4 == 0 ? x : x / 2 + next / 2;
        float narrow = (float)value;
        if (i % 4 >= 2) {
            value = nextafter(value, way);
            narrow = nextafterf(narrow, (float)way);
        }
        if (wide == PL_F64)
            memcpy(bench.drawn + FROM_AT + i * sizeof value, &value, sizeof value);
        else
            memcpy(bench.drawn + FROM_AT + i * sizeof narrow, &narrow, sizeof narrow);
    }
}

static void ties_and_near_ties_are_rounded_to_even(void)
{
    enum { N = 16384 };
    FOR_EACH(pl_dtype, half, {PL_F16, PL_BF16})
    {
        FOR_EACH(pl_dtype, wide, {PL_F32, PL_F64})
        {
            for (unsigned base = 0; base < 65536; base += N) {
                draw_ties(*half, base, N, *wide);
                run_trial(OP_CAST, &(trial){.to = TO_AT,
                                            .from = FROM_AT,
                                            .n_elems = 4 * N,
                                            .to_dtype = *half,
                                            .from_dtype = *wide,
                                            .scale = 1.0});
            }
        }
    }
}

/* Worked out by hand, so that no reference is its own judge. */
static void known_numbers_are_rounded_as_they_must_be(void)
{
    static const struct {
        double value;
        uint16_t f16;
        uint16_t bf16;
    } examples[] = {
        {0.0, 0x0000, 0x0000},
        {-0.0, 0x8000, 0x8000},
        {1.0, 0x3c00, 0x3f80},
        {1.0 + 0x1p-11, 0x3c00, 0x3f80}, /* a tie, down */
        {1.0 + 0x3p-11, 0x3c02, 0x3f80}, /* a tie, up */
        {1.0 + 0x1p-8, 0x3c04, 0x3f80},  /* bfloat16's, down */
        {1.0 + 0x3p-8, 0x3c0c, 0x3f82},  /* and up */
        {65504.0, 0x7bff, 0x4780},       /* the largest float16 */
        {65519.0, 0x7bff, 0x4780},
        {65520.0, 0x7c00, 0x4780}, /* rounds to infinity */
        {-65520.0, 0xfc00, 0xc780},
        {0x1p-14, 0x0400, 0x3880},          /* the least normal float16 */
        {0x1p-24, 0x0001, 0x3380},          /* the least of all */
        {0x1p-25, 0x0000, 0x3300},          /* half of it: a tie, down */
        {0x3p-25, 0x0002, 0x3340 + 0x0080}, /* one and a half: a tie, up */
        {0x1p-133, 0x0000, 0x0001},         /* the least bfloat16 */
        {0x1p-134, 0x0000, 0x0000},         /* half of it: a tie, down */
        {0x1.ffp+127, 0x7c00, 0x7f80},      /* rounds to infinity */
        {0x1.fep+127, 0x7c00, 0x7f7f},      /* the largest bfloat16 */
        {(double)INFINITY, 0x7c00, 0x7f80},
        {-(double)INFINITY, 0xfc00, 0xff80},
        {(double)NAN, 0x7e00, 0x7fc0},
    };
    for (size_t i = 0; i < sizeof examples / sizeof examples[0]; i++) {
        const float narrow = (float)examples[i].value;
        uint16_t out[4] = {1, 1, 1, 1};
        const pl_cast casts[4] = {{&out[0], &examples[i].value, PL_F16, PL_F64, 1},
                                  {&out[1], &examples[i].value, PL_BF16, PL_F64, 1},
                                  {&out[2], &narrow, PL_F16, PL_F32, 1},
                                  {&out[3], &narrow, PL_BF16, PL_F32, 1}};
        CHECK_OK(pli_kernels_cast(bench.kernels, casts, 4, 1.0, NULL));
        for (int k = 0; k < 4; k++)
            if (!CHECK(out[k] == (k % 2 ? examples[i].bf16 : examples[i].f16)))
                CHECK_MORE("%a, way %d: %04x", examples[i].value, k, (unsigned)out[k]);
    }
}

/* ---- slots ------------------------------------------------------------------------
 */

static void what_is_no_float_is_neither_cast_nor_summed(void)
{
    static const pl_dtype none[] = {PL_U8, PL_I8, PL_I16, PL_I32, PL_I64};
    uint64_t memory[4] = {0};
    const pl_cast complex_cast = {memory, &memory[2], PL_C64, PL_C64, 1};
    CHECK(pli_kernels_cast(bench.kernels, &complex_cast, 1, 1.0, NULL) == PL_EINVAL);
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
        const pl_cast casts[2] = {{memory, &memory[2], none[i], PL_F32, 1},
                                  {memory, &memory[2], PL_F32, none[i], 1}};
        const pl_slots slots = {.to = memory,
                                .from = &memory[2],
                                .stride_bytes = 8,
                                .n_ranks = 2,
                                .dtype = none[i],
                                .n_elems = 1};
        for (int k = 0; k < 2; k++) {
            CHECK(pli_kernels_cast(bench.kernels, &casts[k], 1, 1.0, NULL) ==
                  PL_EINVAL);
            CHECK(bench.twin->ops->cast(bench.twin, &casts[k], 1, 1.0, NULL) ==
                  PL_EINVAL);
        }
        CHECK(pli_kernels_sum(bench.kernels, &slots, NULL) == PL_EINVAL);
        CHECK(bench.twin->ops->sum(bench.twin, &slots, NULL) == PL_EINVAL);
    }
}

static void slots_of_several_ranks_are_summed_in_rank_order(void)
{
    for (int d = PL_F16; d < PL_N_DTYPES; d++) {
        const size_t elem_bytes = pl_dtype_bytes((pl_dtype)d);
        const size_t word_bytes = (size_t)naive_bytes(words[d]);
        draw((pl_dtype)d);
        FOR_EACH(size_t, n, {0, 1, 5, 1025, 4099})
        {
            FOR_EACH(int, n_ranks, {1, 2, 3, 4, 5, 7})
            {
                FOR_EACH(size_t, shift, {0, 1, 4, 5, 16, 20, 21})
                {
                    trial t = {.to = TO_AT + *shift % 4 * word_bytes,
                               .from = FROM_AT + *shift / 4 % 4 * word_bytes,
                               .n_elems = *n,
                               .to_dtype = (pl_dtype)d,
                               .n_ranks = *n_ranks,
                               .reduction = *n_ranks % 2 ? PL_SUM : PL_MEAN};
                    t.stride_bytes = (*n * elem_bytes + 63) / 64 * 64;
                    t.stride_bytes += *shift / 16 * word_bytes;
                    run_trial(OP_SUM, &t);
                    t.reduction = *n_ranks % 2 ? PL_MEAN : PL_SUM;
                    t.to = t.from + (size_t)(*n_ranks / 2) * t.stride_bytes;
                    run_trial(OP_SUM, &t);
                }
            }
        }
    }
}

/* ---- what is not finite ------------------------------------------------------------
 */

static void one_infinity_or_nan_anywhere_is_found(void)
{
    for (int d = 0; d < PL_N_DTYPES; d++) {
        const pl_dtype part = part_of((pl_dtype)d);
        const size_t n_elems = 8192 + 37;
        const size_t n_parts =
            n_elems * pl_dtype_bytes((pl_dtype)d) / pl_dtype_bytes(part);
        for (int kind = 0; kind < 3; kind++) {
            const double value = kind == 0 ? 1.0 : kind == 1 ? -(double)INFINITY : NAN;
            FOR_EACH(size_t, at, {0, 1, 4, 4096, 8192 + 36})
            {
                const size_t from = FROM_AT + pl_dtype_bytes(part);
                memset(bench.drawn, 0x3c, ARENA_BYTES);
                memset(bench.drawn + FLAG_AT, 0, sizeof(uint32_t));
                if (d >= PL_F16)
                    naive_write(bench.drawn + from, words[d], *at % n_parts, value);
                arenas_begin();
                const trial t = {.from = from,
                                 .n_elems = n_elems,
                                 .to_dtype = (pl_dtype)d,
                                 .from_dtype = (pl_dtype)d};
                CHECK_OK(run_fast_or_twin(OP_FIND, &t, FAST));
                CHECK_OK(run_fast_or_twin(OP_FIND, &t, TWIN));
                if (d >= PL_F16)
                    run_naive(naive_find, &t);
                CHECK(bench.arenas[FAST][FLAG_AT] == (kind > 0 && d >= PL_F16));
                CHECK(arenas_are_equal(TO_AT, 0, PL_U8));
            }
        }
    }
}

/* ---- all of it ----------------------------------------------------------------------
 */

static void every_branch_of_every_kernel_was_taken(void)
{
    const char *name = NULL;
    int is_taken = 0;
    size_t n = 0;
    for (; (name = host_kernel_branch(n, &is_taken)) != NULL; n++)
        if (!CHECK(is_taken))
            CHECK_MORE("never: %s", name);
    CHECK(n > 50);
}

int main(void)
{
#ifdef __SANITIZE_THREAD__
    (void)printf("one thread: nothing to see for TSan, which takes minutes\n");
    return 0;
#endif
    if (!bench_create())
        return check_report();
    RUN(bytes_are_copied_from_any_address_to_any_other);
    RUN(tensors_of_every_type_are_copied_and_added);
    RUN(tensors_of_every_type_are_scaled);
    RUN(every_float_is_cast_to_every_other);
    RUN(ties_and_near_ties_are_rounded_to_even);
    RUN(known_numbers_are_rounded_as_they_must_be);
    RUN(what_is_no_float_is_neither_cast_nor_summed);
    RUN(slots_of_several_ranks_are_summed_in_rank_order);
    RUN(one_infinity_or_nan_anywhere_is_found);
    RUN(every_branch_of_every_kernel_was_taken);
    bench_destroy();
    return check_report();
}
