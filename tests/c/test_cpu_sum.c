/* test_cpu_sum.c - every table against a naive reference, bit for bit.
 *
 * The reference and the inputs are those of naive_sum.h.  Ranges have guards, inputs
 * that are not outputs must not change, and two NaNs are equal, whatever their payload.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu_sum.h"
#include "check.h"
#include "naive_sum.h"

enum {
    GUARD_BYTES = 192, /* before and after a range; no write may reach it */
    GUARD = 0xa5,
    MAX_ELEMS = 5000,
    MAX_BYTES = MAX_ELEMS * 16
};

typedef struct range {
    unsigned char *memory; /* guard, data, guard */
    unsigned char *data;
} range;

/* ---- ranges --------------------------------------------------------------------- */

static void ranges_create(range *ranges, int n)
{
    for (int i = 0; i < n; i++) {
        ranges[i].memory = malloc(MAX_BYTES + 2 * GUARD_BYTES);
        if (ranges[i].memory == NULL)
            exit(2);
        ranges[i].data = ranges[i].memory + GUARD_BYTES;
    }
}

static void ranges_destroy(range *ranges, int n)
{
    for (int i = 0; i < n; i++)
        free(ranges[i].memory);
}

/* Puts guards around `n_bytes` of data, `shift` bytes from an aligned address. */
static void range_guard(range *it, size_t shift, size_t n_bytes)
{
    const size_t before = 64 + shift;
    it->data = it->memory + before;
    memset(it->memory, GUARD, before);
    memset(it->data + n_bytes, GUARD, 64);
}

static int range_is_guarded(const range *it, size_t n_bytes)
{
    for (const unsigned char *p = it->memory; p < it->data; p++)
        if (*p != GUARD)
            return 0;
    for (size_t i = 0; i < 64; i++)
        if (it->data[n_bytes + i] != GUARD)
            return 0;
    return 1;
}

/* ---- one reduction -------------------------------------------------------------- */

typedef enum placement {
    APART,       /* one output, separate from the inputs */
    APART_TWICE, /* two of these */
    IN_PLACE,    /* every input is an output */
    IN_LAST,     /* the last input is the first output; the second is separate */
    N_PLACEMENTS
} placement;

typedef struct bench {
    range in[PL_MAX_RANKS];
    range kept[PL_MAX_RANKS]; /* copies of the inputs */
    range apart[2];
    range expected;
} bench;

typedef struct trial {
    const pli_sum_table *table;
    pl_dtype dtype;
    pl_reduction reduction;
    placement placement;
    int n_in;
    size_t n_elems;
    size_t shift;
} trial;

static void bench_create(bench *b)
{
    ranges_create(b->in, PL_MAX_RANKS);
    ranges_create(b->kept, PL_MAX_RANKS);
    ranges_create(b->apart, 2);
    ranges_create(&b->expected, 1);
}

static void bench_destroy(bench *b)
{
    ranges_destroy(b->in, PL_MAX_RANKS);
    ranges_destroy(b->kept, PL_MAX_RANKS);
    ranges_destroy(b->apart, 2);
    ranges_destroy(&b->expected, 1);
}

/* Draws the inputs, and computes the expected results. */
static void bench_draw(bench *b, pl_dtype dtype, pl_reduction reduction, int n_in,
                       size_t n_elems)
{
    const size_t n_bytes = n_elems * pl_dtype_bytes(dtype);
    const unsigned char *in[PL_MAX_RANKS];
    for (int r = 0; r < n_in; r++) {
        naive_fill(b->kept[r].data, n_bytes, dtype);
        in[r] = b->kept[r].data;
    }
    naive_reduce(in, n_in, n_bytes, dtype, reduction, b->expected.data);
}

/* Fills out[], and returns the number of outputs. */
static int place_outputs(bench *b, const trial *t, void **out)
{
    switch (t->placement) {
    case IN_PLACE:
        for (int r = 0; r < t->n_in; r++)
            out[r] = b->in[r].data;
        return t->n_in;
    case IN_LAST:
        out[0] = b->in[t->n_in - 1].data;
        out[1] = b->apart[0].data;
        return 2;
    default:
        out[0] = b->apart[0].data;
        out[1] = b->apart[1].data;
        return t->placement == APART ? 1 : 2;
    }
}

static int trial_is_right(bench *b, const trial *t, size_t n_bytes, void *const *out,
                          int n_out)
{
    int is_right = 1;
    for (int k = 0; k < n_out; k++)
        is_right &= first_difference(out[k], b->expected.data, n_bytes, t->dtype) < 0;
    for (int r = 0; r < t->n_in; r++) {
        int is_output = 0;
        for (int k = 0; k < n_out; k++)
            is_output |= out[k] == b->in[r].data;
        if (!is_output && n_bytes > 0)
            is_right &= memcmp(b->in[r].data, b->kept[r].data, n_bytes) == 0;
        is_right &= range_is_guarded(&b->in[r], n_bytes);
    }
    return is_right && range_is_guarded(&b->apart[0], n_bytes) &&
           range_is_guarded(&b->apart[1], n_bytes);
}

static void run_trial(bench *b, const trial *t)
{
    const size_t n_bytes = t->n_elems * pl_dtype_bytes(t->dtype);
    const void *in[PL_MAX_RANKS];
    void *out[PL_MAX_RANKS];
    for (int r = 0; r < t->n_in; r++) {
        range_guard(&b->in[r], t->shift * (size_t)(r + 1) % 64, n_bytes);
        memcpy(b->in[r].data, b->kept[r].data, n_bytes);
        in[r] = b->in[r].data;
    }
    range_guard(&b->apart[0], t->shift * 3 % 64, n_bytes);
    range_guard(&b->apart[1], t->shift * 5 % 64, n_bytes);
    const int n_out = place_outputs(b, t, out);
    const pli_sum_args args = {in, t->n_in, out, n_out, t->n_elems};
    t->table->fn[t->dtype][t->reduction](&args);
    if (!CHECK(trial_is_right(b, t, n_bytes, out, n_out)))
        (void)fprintf(
            stderr, "    %s %s reduction %d, %d ranks, %zu elements, %d+%zu\n",
            pli_isa_text(t->table->isa), pl_dtype_text(t->dtype), (int)t->reduction,
            t->n_in, t->n_elems, (int)t->placement, t->shift);
}

/* Runs every table and placement, aligned and not, on inputs drawn once. */
static void run_trials(bench *b, trial t)
{
    static const size_t shifts[] = {0, 1, 7};
    bench_draw(b, t.dtype, t.reduction, t.n_in, t.n_elems);
    for (int i = 0; i < PLI_N_ISAS; i++) {
        t.table = pli_sum_table_of((pli_isa)i);
        if (t.table == NULL)
            continue;
        for (int p = 0; p < N_PLACEMENTS; p++) {
            t.placement = (placement)p;
            for (size_t s = 0; s < sizeof shifts / sizeof shifts[0]; s++) {
                t.shift = shifts[s];
                run_trial(b, &t);
            }
        }
    }
}

/* ---- tests ---------------------------------------------------------------------- */

static int is_allowed(pl_dtype dtype, pl_reduction reduction)
{
    const int is_integer = dtype <= PL_I64;
    if (reduction == PL_SUM)
        return 1;
    return reduction == PL_MAX ? is_integer : !is_integer;
}

TEST(every_table_gives_the_bits_of_the_naive_reference)
{
    static const int n_ins[] = {1, 2, 3, 4, 5, 64};
    static const size_t sizes[] = {0, 1, 3, 15, 16, 17, 63, 64, 65, 1000, 4097};
    bench b;
    bench_create(&b);
    for (int d = 0; d < PL_N_DTYPES; d++) {
        for (int k = 0; k < PL_N_REDUCTIONS; k++) {
            if (!is_allowed((pl_dtype)d, (pl_reduction)k))
                continue;
            for (size_t i = 0; i < sizeof n_ins / sizeof n_ins[0]; i++) {
                for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
                    const trial t = {.dtype = (pl_dtype)d,
                                     .reduction = (pl_reduction)k,
                                     .n_in = n_ins[i],
                                     .n_elems = sizes[s]};
                    run_trials(&b, t);
                }
            }
        }
    }
    bench_destroy(&b);
}

TEST(a_table_has_a_function_where_type_and_reduction_go_together)
{
    for (int i = 0; i < PLI_N_ISAS; i++) {
        const pli_sum_table *table = pli_sum_table_of((pli_isa)i);
        (void)printf("%s: %s\n", pli_isa_text((pli_isa)i),
                     table != NULL ? "tested" : "not on this machine");
        if (table == NULL)
            continue;
        CHECK(table->isa == (pli_isa)i);
        for (int d = 0; d < PL_N_DTYPES; d++)
            for (int k = 0; k < PL_N_REDUCTIONS; k++)
                CHECK((table->fn[d][k] != NULL) ==
                      is_allowed((pl_dtype)d, (pl_reduction)k));
    }
}

/* Sums all 65536 values with `n_in - 1` negative zeros, which change no value.  A NaN
 * keeps its bits, except that it gets quiet: hosts with different instruction sets
 * compare the bits of their means. */
static void check_halves_survive(const pli_sum_table *table, pl_dtype dtype, int n_in)
{
    static uint16_t values[65536];
    static uint16_t zeros[65536];
    static uint16_t sums[65536];
    const void *in[PL_MAX_RANKS];
    void *out[1] = {sums};
    for (unsigned i = 0; i < 65536; i++) {
        values[i] = (uint16_t)i;
        zeros[i] = 0x8000;
    }
    for (int r = 0; r < n_in; r++)
        in[r] = r == n_in - 1 ? values : zeros;
    const pli_sum_args args = {in, n_in, out, 1, 65536};
    table->fn[dtype][PL_SUM](&args);
    CHECK(first_difference((unsigned char *)sums, (unsigned char *)values, sizeof sums,
                           dtype) < 0);
    const unsigned quiet = dtype == PL_F16 ? 0x0200 : 0x0040;
    for (unsigned i = 0; i < 65536; i++)
        CHECK((sums[i] | quiet) == (i | quiet) ||
              !is_nan_at((const unsigned char *)&values[i], dtype));
}

TEST(every_16_bit_float_widens_and_rounds_back_to_itself)
{
    for (int i = 0; i < PLI_N_ISAS; i++) {
        const pli_sum_table *table = pli_sum_table_of((pli_isa)i);
        for (int n_in = 1; table != NULL && n_in <= 4; n_in++) {
            check_halves_survive(table, PL_F16, n_in);
            check_halves_survive(table, PL_BF16, n_in);
        }
    }
}

/* Each of the 65536 values plus three small ones of up to half a last place on either
 * side, so that ties and near ties meet every digit. */
static void check_halves_round(bench *b, pl_dtype dtype, pl_reduction reduction)
{
    const size_t n_elems = 4096;
    const unsigned char *in[3] = {b->kept[0].data, b->kept[1].data, b->kept[2].data};
    for (unsigned base = 0; base < 65536; base += (unsigned)n_elems) {
        for (size_t i = 0; i < n_elems; i++) {
            const unsigned bits = base + (unsigned)i;
            const double x = naive_decode(bits, n_frac_of(dtype), e_min_of(dtype));
            const int n_more = n_frac_of(dtype) + 1;
            const double tie = isfinite(x) ? ldexp(x, -n_more) : 0.0;
            const double off = ldexp(tie, (int)(random_u64() >> 62) - n_more);
            const uint16_t parts[3] = {
                (uint16_t)bits,
                (uint16_t)naive_encode(tie, n_frac_of(dtype), e_min_of(dtype)),
                (uint16_t)naive_encode((bits & 1u) != 0 ? off : -0.0, n_frac_of(dtype),
                                       e_min_of(dtype))};
            for (int r = 0; r < 3; r++)
                memcpy(b->kept[r].data + 2 * i, &parts[r], 2);
        }
        naive_reduce(in, 3, 2 * n_elems, dtype, reduction, b->expected.data);
        for (int i = 0; i < PLI_N_ISAS; i++) {
            const trial t = {.table = pli_sum_table_of((pli_isa)i),
                             .dtype = dtype,
                             .reduction = reduction,
                             .n_in = 3,
                             .n_elems = n_elems};
            if (t.table != NULL)
                run_trial(b, &t);
        }
    }
}

TEST(ties_of_16_bit_floats_go_to_even_and_near_ties_do_not)
{
    bench b;
    bench_create(&b);
    check_halves_round(&b, PL_F16, PL_SUM);
    check_halves_round(&b, PL_F16, PL_MEAN);
    check_halves_round(&b, PL_BF16, PL_SUM);
    check_halves_round(&b, PL_BF16, PL_MEAN);
    bench_destroy(&b);
}

typedef struct example {
    pl_dtype dtype;
    pl_reduction reduction;
    uint16_t in[2];
    uint16_t out;
} example;

/* Computed by hand, independently of the reference. */
TEST(known_sums_of_16_bit_floats_come_out)
{
    static const example examples[] = {
        {PL_F16, PL_SUM, {0x3c00, 0x1000}, 0x3c00},   /* 1 + 2^-11: a tie, down */
        {PL_F16, PL_SUM, {0x3c01, 0x1000}, 0x3c02},   /* the next: a tie, up */
        {PL_F16, PL_SUM, {0x3c00, 0x1001}, 0x3c01},   /* just above the tie */
        {PL_F16, PL_SUM, {0x7bff, 0x4c00}, 0x7c00},   /* 65504 + 16 is infinite */
        {PL_F16, PL_SUM, {0x7bff, 0x4bff}, 0x7bff},   /* 65504 + 15.99 is not */
        {PL_F16, PL_SUM, {0xfbff, 0xcc00}, 0xfc00},   /* the same for its negative */
        {PL_F16, PL_SUM, {0x0001, 0x0001}, 0x0002},   /* denormals add exactly */
        {PL_F16, PL_SUM, {0x03ff, 0x0001}, 0x0400},   /* up to the least normal */
        {PL_F16, PL_SUM, {0x8000, 0x8000}, 0x8000},   /* -0 + -0 */
        {PL_F16, PL_SUM, {0x7c00, 0x3c00}, 0x7c00},   /* infinity stays */
        {PL_F16, PL_MEAN, {0x0001, 0x0000}, 0x0000},  /* 0.5 of the least: down */
        {PL_F16, PL_MEAN, {0x0003, 0x0000}, 0x0002},  /* 1.5 of the least: a tie, up */
        {PL_F16, PL_MEAN, {0x7bff, 0x7bff}, 0x7bff},  /* no sum overflows */
        {PL_BF16, PL_SUM, {0x3f80, 0x3b80}, 0x3f80},  /* 1 + 2^-8: a tie, down */
        {PL_BF16, PL_SUM, {0x3f81, 0x3b80}, 0x3f82},  /* the next: a tie, up */
        {PL_BF16, PL_SUM, {0x3f80, 0x3b81}, 0x3f81},  /* just above the tie */
        {PL_BF16, PL_SUM, {0x0001, 0x0001}, 0x0002},  /* denormals add exactly */
        {PL_BF16, PL_SUM, {0x007f, 0x0001}, 0x0080},  /* up to the least normal */
        {PL_BF16, PL_SUM, {0x7f7f, 0x7b00}, 0x7f80},  /* rounds over to infinity */
        {PL_BF16, PL_SUM, {0x8000, 0x8000}, 0x8000},  /* -0 + -0 */
        {PL_BF16, PL_SUM, {0xff80, 0x3f80}, 0xff80},  /* infinity stays */
        {PL_BF16, PL_MEAN, {0x0001, 0x0000}, 0x0000}, /* 0.5 of the least: down */
        {PL_BF16, PL_MEAN, {0x0003, 0x0000}, 0x0002}, /* 1.5 of the least: a tie, up */
        {PL_BF16, PL_MEAN, {0x7f7f, 0x7f7f}, 0x7f7f}, /* no sum overflows */
    };
    for (int i = 0; i < PLI_N_ISAS; i++) {
        const pli_sum_table *table = pli_sum_table_of((pli_isa)i);
        for (size_t k = 0; table && k < sizeof examples / sizeof examples[0]; k++) {
            const example *e = &examples[k];
            const void *in[2] = {&e->in[0], &e->in[1]};
            uint16_t sum = 0;
            void *out[1] = {&sum};
            const pli_sum_args args = {in, 2, out, 1, 1};
            table->fn[e->dtype][e->reduction](&args);
            if (!CHECK(sum == e->out))
                (void)fprintf(stderr, "    %s, example %zu: %04x\n",
                              pli_isa_text((pli_isa)i), k, (unsigned)sum);
        }
    }
}

/* 1,001 elements make whole vector steps, and leave a rest. */
TEST(means_of_the_largest_numbers_are_those_numbers)
{
    enum { N = 1001 };
    static float f32[N];
    static double f64[N];
    static float f32_mean[N];
    static double f64_mean[N];
    const void *in_f32[PL_MAX_RANKS];
    const void *in_f64[PL_MAX_RANKS];
    void *out_f32[1] = {f32_mean};
    void *out_f64[1] = {f64_mean};
    for (int i = 0; i < N; i++) {
        f32[i] = i % 2 == 0 ? FLT_MAX : -FLT_MAX;
        f64[i] = i % 2 == 0 ? DBL_MAX : -DBL_MAX;
    }
    for (int r = 0; r < PL_MAX_RANKS; r++) {
        in_f32[r] = f32;
        in_f64[r] = f64;
    }
    for (int i = 0; i < PLI_N_ISAS; i++) {
        const pli_sum_table *table = pli_sum_table_of((pli_isa)i);
        for (int n = 2; table != NULL && n <= PL_MAX_RANKS; n *= 2) {
            table->fn[PL_F32][PL_MEAN](&(pli_sum_args){in_f32, n, out_f32, 1, N});
            table->fn[PL_F64][PL_MEAN](&(pli_sum_args){in_f64, n, out_f64, 1, N});
            CHECK(memcmp(f32_mean, f32, sizeof f32) == 0);
            CHECK(memcmp(f64_mean, f64, sizeof f64) == 0);
        }
        if (table != NULL) {
            table->fn[PL_F32][PL_MEAN](&(pli_sum_args){in_f32, 3, out_f32, 1, N});
            CHECK(isfinite(f32_mean[0]) && isfinite(f32_mean[N - 1]));
        }
    }
}

/* 2^24 + 1 + 1 is 2^24 from the left, and 2^24 + 2 from the right. */
TEST(floats_are_added_in_rank_order)
{
    for (int i = 0; i < PLI_N_ISAS; i++) {
        const pli_sum_table *table = pli_sum_table_of((pli_isa)i);
        float ranks[3] = {0x1p24F, 1.0F, 1.0F};
        float sums[2] = {0.0F, 0.0F};
        const void *in[3] = {&ranks[0], &ranks[1], &ranks[2]};
        const void *reversed[3] = {&ranks[2], &ranks[1], &ranks[0]};
        void *out[2] = {&sums[0], &sums[1]};
        const pli_sum_args forward = {in, 3, &out[0], 1, 1};
        const pli_sum_args backward = {reversed, 3, &out[1], 1, 1};
        if (table == NULL)
            continue;
        table->fn[PL_F32][PL_SUM](&forward);
        table->fn[PL_F32][PL_SUM](&backward);
        CHECK(sums[0] == 0x1p24F);
        CHECK(sums[1] == 0x1p24F + 2.0F);
    }
}

TEST(the_best_table_is_the_last_that_there_is)
{
    const pli_sum_table *best = pli_sum_table_best();
    CHECK(pli_sum_table_of(PLI_ISA_PLAIN) != NULL);
    CHECK(pli_sum_table_of(PLI_N_ISAS) == NULL);
    if (!CHECK(best != NULL))
        return;
    CHECK(best == pli_sum_table_of(best->isa));
    for (int i = (int)best->isa + 1; i < PLI_N_ISAS; i++)
        CHECK(pli_sum_table_of((pli_isa)i) == NULL);
}

TEST(the_words_of_instruction_sets_parse_and_others_do_not)
{
    static const char *const bad[] = {"", "AVX2", "avx", "avx2 ", "avx5120", "best"};
    for (int i = 0; i < PLI_N_ISAS; i++) {
        pli_isa isa = PLI_N_ISAS;
        CHECK_OK(pli_isa_parse(pli_isa_text((pli_isa)i), &isa));
        CHECK(isa == (pli_isa)i);
    }
    CHECK(strcmp(pli_isa_text(PLI_ISA_AVX512), "avx512") == 0);
    for (size_t k = 0; k < sizeof bad / sizeof bad[0]; k++) {
        pli_isa isa = PLI_ISA_NEON;
        CHECK(pli_isa_parse(bad[k], &isa) == PL_EINVAL);
        CHECK(isa == PLI_ISA_NEON);
        for (int i = 0; i < PLI_N_ISAS; i++)
            CHECK_SAYS(pli_isa_text((pli_isa)i));
    }
}
