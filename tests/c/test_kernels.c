/* test_kernels.c - the kernels, built for the host, against the CPU backend and against
 * naive kernels, bit for bit.
 *
 * Each of the three works in its own arena, filled alike; afterwards the whole arenas
 * are compared, so that a write to any wrong place is seen.  Two NaNs are equal,
 * whatever their payload.
 */
#define CHECK_OWN_MAIN
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "check.h"
#include "kernel_driver.h"
#include "naive_kernels.cu"
#include "naive_sum.h"

enum { ARENA_BYTES = 1 << 20, TO_AT = 256, FROM_AT = 1 << 19 };

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
}

static void arenas_begin(void)
{
    for (int w = 0; w < N_WORKERS; w++)
        memcpy(bench.arenas[w], bench.drawn, ARENA_BYTES);
}

/* Checks that the results at `at` are equal, and the rest of the arenas bit for bit. */
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
    pl_dtype dtype;
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
                     .dtype = t->dtype,
                     .n_elems = t->n_elems};
}

static void run_naive(void (*kernel)(naive_task, unsigned long long), const trial *t)
{
    const int is_copy = kernel == naive_copy;
    const size_t word_bytes = (size_t)naive_bytes(words[t->dtype]);
    const size_t n_bytes = t->n_elems * pl_dtype_bytes(t->dtype);
    const naive_task task = {.to = bench.arenas[NAIVE_ONE] + t->to,
                             .from = address(NAIVE_ONE, t->from),
                             .n = is_copy ? n_bytes : n_bytes / word_bytes,
                             .stride_bytes = t->stride_bytes,
                             .factor = t->ratio[0],
                             .divisor = t->ratio[1],
                             .n_ranks = (unsigned)t->n_ranks,
                             .word = (unsigned char)words[t->dtype],
                             .is_mean = t->reduction == PL_MEAN};
    for (unsigned long long i = 0; i < task.n; i++)
        kernel(task, i);
}

typedef enum operation { OP_COPY, OP_ADD, OP_SCALE, OP_SUM } operation;

static pl_status run_fast_or_twin(operation op, const trial *t, worker w)
{
    pl_backend *const twin = w == TWIN ? bench.twin : NULL;
    pli_kernels *const fast = bench.kernels;
    const pl_move move = move_of(t, w);
    const pl_rank_ranges ranges = {.to = move.to,
                                   .from = move.from,
                                   .stride_bytes = t->stride_bytes,
                                   .n_ranks = t->n_ranks,
                                   .dtype = t->dtype,
                                   .reduction = t->reduction,
                                   .n_elems = t->n_elems};
    const int up = t->ratio[0], down = t->ratio[1];
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
    default:
        return twin ? twin->ops->sum(twin, &ranges, NULL)
                    : pli_kernels_sum(fast, &ranges, NULL);
    }
}

static void run_trial(operation op, const trial *t)
{
    static void (*const naives[])(naive_task, unsigned long long) = {
        naive_copy, naive_add, naive_scale, naive_sum};
    arenas_begin();
    if (!CHECK_OK(run_fast_or_twin(op, t, FAST)) ||
        !CHECK_OK(run_fast_or_twin(op, t, TWIN)))
        return;
    run_naive(naives[op], t);
    const size_t n_bytes = t->n_elems * pl_dtype_bytes(t->dtype);
    if (!CHECK(arenas_are_equal(t->to, n_bytes, t->dtype)))
        CHECK_MORE("operation %d: %s, %zu elements, +%zu from +%zu, %d ranks", (int)op,
                   pl_dtype_text(t->dtype), t->n_elems, t->to - TO_AT,
                   t->from - FROM_AT, t->n_ranks);
}

/* ---- moves ---------------------------------------------------------------------- */

#define FOR_EACH(type, it, ...)                                                        \
    for (const type it##_all[] = __VA_ARGS__, *it = it##_all;                          \
         it < it##_all + sizeof it##_all / sizeof it##_all[0]; it++)

TEST(bytes_are_copied_from_any_address_to_any_other)
{
    draw(PL_U8);
    FOR_EACH (size_t, n, {1, 3, 15, 16, 17, 100, 16384, 32768, 32769, 70001}) {
        FOR_EACH (size_t, to, {0, 1, 2, 4, 5, 8, 15}) {
            FOR_EACH (size_t, from, {0, 1, 2, 4, 5, 8, 15}) {
                run_trial(OP_COPY, &(trial){.to = TO_AT + *to,
                                            .from = FROM_AT + *from,
                                            .n_elems = *n,
                                            .dtype = PL_U8});
            }
            run_trial(OP_COPY, &(trial){.to = TO_AT + *to,
                                        .from = SIZE_MAX,
                                        .n_elems = *n,
                                        .dtype = PL_U8});
        }
    }
}

TEST(tensors_of_every_type_are_copied_and_added)
{
    for (int d = 0; d < PL_N_DTYPES; d++) {
        const size_t word_bytes = (size_t)naive_bytes(words[d]);
        draw((pl_dtype)d);
        FOR_EACH (size_t, n, {0, 1, 3, 5, 255, 4096, 4097, 8193, 20000}) {
            FOR_EACH (size_t, shift, {0, 1, 3, 16, 17}) {
                const trial t = {.to = TO_AT + *shift % 4 * word_bytes,
                                 .from = FROM_AT + *shift / 4 * word_bytes,
                                 .n_elems = *n,
                                 .dtype = (pl_dtype)d};
                run_trial(OP_COPY, &t);
                run_trial(OP_ADD, &t);
            }
        }
    }
}

TEST(tensors_of_every_type_are_scaled)
{
    for (int d = PL_F16; d < PL_N_DTYPES; d++) {
        draw((pl_dtype)d);
        FOR_EACH (size_t, n, {0, 1, 5, 257, 8193}) {
            FOR_EACH (int, numerator, {1, 2, 3, 1000}) {
                const trial t = {.to = TO_AT + *n % 2 * pl_dtype_bytes((pl_dtype)d),
                                 .from = FROM_AT,
                                 .n_elems = *n,
                                 .dtype = (pl_dtype)d,
                                 .ratio = {*numerator, 3}};
                run_trial(OP_SCALE, &t);
            }
        }
    }
}

/* Each 16-bit float at `from`, and at `to` the one `next` places further. */
static void draw_halves(unsigned base, unsigned n, unsigned next)
{
    for (unsigned i = 0; i < n; i++) {
        const uint16_t from = (uint16_t)(base + i), to = (uint16_t)(base + i + next);
        memcpy(bench.drawn + FROM_AT + i * sizeof from, &from, sizeof from);
        memcpy(bench.drawn + TO_AT + i * sizeof to, &to, sizeof to);
    }
}

/* The sum of a float and the next, or 3/2 of a float, lies half way between two floats;
 * 1001/1000 of a float lies next to it. */
TEST(every_16_bit_float_is_rounded_to_even)
{
    enum { N = 16384 };
    FOR_EACH (pl_dtype, half, {PL_F16, PL_BF16}) {
        for (unsigned base = 0; base < 65536; base += N) {
            trial t = {.to = TO_AT, .from = FROM_AT, .n_elems = N, .dtype = *half};
            FOR_EACH (unsigned, next, {1, 2, 3, 0x7f, 0x3ff, 0x8001, 0x8400}) {
                draw_halves(base, N, *next);
                run_trial(OP_ADD, &t);
            }
            FOR_EACH (int, numerator, {500, 1001, 1500, 3000, 0x7fffffff}) {
                t.ratio[0] = *numerator;
                t.ratio[1] = 1000;
                run_trial(OP_SCALE, &t);
            }
        }
    }
}

/* Computed by hand, independently of both references. */
TEST(known_numbers_are_rounded_as_they_must_be)
{
    static const struct {
        pl_dtype dtype;
        uint16_t x, y; /* added in float32 */
        uint16_t sum;
        uint16_t from; /* scaled in float64 */
        int ratio[2];
        uint16_t scaled;
    } examples[] = {
        /* 1 + 2^-11: a tie, down; 1 + 3 * 2^-11: a tie, up */
        {PL_F16, 0x3c00, 0x1000, 0x3c00, 0x3c00, {2049, 2048}, 0x3c00},
        {PL_F16, 0x3c00, 0x1600, 0x3c02, 0x3c00, {2051, 2048}, 0x3c02},
        /* 65,504 is the largest; 65,519 rounds to it, 65,520 to infinity */
        {PL_F16, 0x7bff, 0x4b80, 0x7bff, 0x7bff, {65519, 65504}, 0x7bff},
        {PL_F16, 0x7bff, 0x4c00, 0x7c00, 0x7bff, {65520, 65504}, 0x7c00},
        {PL_F16, 0xfbff, 0xcc00, 0xfc00, 0xfbff, {65520, 65504}, 0xfc00},
        /* denormals: 2^-24 twice; half of 2^-24: a tie, down; 3/2: up */
        {PL_F16, 0x0001, 0x0001, 0x0002, 0x0001, {1, 2}, 0x0000},
        {PL_F16, 0x03ff, 0x0001, 0x0400, 0x0001, {3, 2}, 0x0002},
        {PL_F16, 0x8001, 0x0001, 0x0000, 0x8001, {1, 2}, 0x8000},
        {PL_F16, 0x7c00, 0x3c00, 0x7c00, 0xfc00, {1, 2}, 0xfc00},
        {PL_F16, 0x7c00, 0xfc00, 0x7e00, 0x7e00, {1, 2}, 0x7e00},
        /* the same of bfloat16: 1 + 2^-8 and 1 + 3 * 2^-8 */
        {PL_BF16, 0x3f80, 0x3b80, 0x3f80, 0x3f80, {257, 256}, 0x3f80},
        {PL_BF16, 0x3f80, 0x3c40, 0x3f82, 0x3f80, {259, 256}, 0x3f82},
        {PL_BF16, 0x7f7f, 0x7b00, 0x7f80, 0x7f7f, {511, 510}, 0x7f80},
        {PL_BF16, 0x7f7f, 0x7a80, 0x7f7f, 0x7f7f, {1021, 1020}, 0x7f7f},
        {PL_BF16, 0x0001, 0x0001, 0x0002, 0x0001, {1, 2}, 0x0000},
        {PL_BF16, 0x007f, 0x0001, 0x0080, 0x0001, {3, 2}, 0x0002},
        {PL_BF16, 0x7f80, 0xff80, 0x7fc0, 0x7fc0, {1, 2}, 0x7fc0},
    };
    for (size_t i = 0; i < sizeof examples / sizeof examples[0]; i++) {
        const pl_dtype dtype = examples[i].dtype;
        uint16_t sum = examples[i].x, scaled = examples[i].from;
        const int *const ratio = examples[i].ratio;
        const pl_move add = {&sum, &examples[i].y, dtype, 1};
        const pl_move scale = {&scaled, NULL, dtype, 1};
        CHECK_OK(pli_kernels_add(bench.kernels, &add, 1, NULL));
        CHECK_OK(pli_kernels_scale(bench.kernels, &scale, 1, ratio[0], ratio[1], NULL));
        if (!CHECK((sum & 0x7fff) == (examples[i].sum & 0x7fff)))
            CHECK_MORE("row %zu: the sum is %04x", i, (unsigned)sum);
        if (!CHECK(scaled == examples[i].scaled))
            CHECK_MORE("row %zu: scaled, it is %04x", i, (unsigned)scaled);
    }
}

/* ---- ranges ---------------------------------------------------------------------- */

TEST(what_is_no_float_is_not_summed)
{
    static const pl_dtype none[] = {PL_U8, PL_I8, PL_I16, PL_I32, PL_I64};
    uint64_t memory[4] = {0};
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
        const pl_rank_ranges ranges = {.to = memory,
                                       .from = &memory[2],
                                       .stride_bytes = 8,
                                       .n_ranks = 2,
                                       .dtype = none[i],
                                       .n_elems = 1};
        CHECK(pli_kernels_sum(bench.kernels, &ranges, NULL) == PL_EINVAL);
        CHECK(bench.twin->ops->sum(bench.twin, &ranges, NULL) == PL_EINVAL);
    }
}

TEST(slots_of_several_ranks_are_summed_in_rank_order)
{
    for (int d = PL_F16; d < PL_N_DTYPES; d++) {
        const size_t elem_bytes = pl_dtype_bytes((pl_dtype)d);
        const size_t word_bytes = (size_t)naive_bytes(words[d]);
        draw((pl_dtype)d);
        FOR_EACH (size_t, n, {0, 1, 5, 1025, 4099}) {
            FOR_EACH (int, n_ranks, {1, 2, 3, 4, 5, 7}) {
                FOR_EACH (size_t, shift, {0, 1, 4, 5, 16, 20, 21}) {
                    trial t = {.to = TO_AT + *shift % 4 * word_bytes,
                               .from = FROM_AT + *shift / 4 % 4 * word_bytes,
                               .n_elems = *n,
                               .dtype = (pl_dtype)d,
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

/* ---- checksums, and copies where they differ ------------------------------------- */

/* Sums word by word of eight bytes. */
static uint64_t naive_checksum(const unsigned char *from, size_t n_bytes, size_t offset)
{
    uint64_t sum = 0;
    for (size_t at = 0; at < n_bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, from + at, n_bytes - at < 8 ? n_bytes - at : 8);
        word ^= (offset + at) / 8 * 0x9e3779b97f4a7c15u;
        word = (word ^ word >> 32) * 0xbf58476d1ce4e5b9u;
        word = (word ^ word >> 29) * 0x94d049bb133111ebu;
        sum += word ^ word >> 32;
    }
    return sum;
}

static uint64_t checksum(const unsigned char *from, size_t n_bytes, size_t offset)
{
    uint64_t sums[3] = {1, 2, 3};
    const pli_piece piece = {NULL, from, n_bytes, offset, 1};
    CHECK_OK(pli_kernels_checksum(bench.kernels, &piece, 1, sums, NULL));
    CHECK(sums[0] == 1 && sums[2] == 3);
    return sums[1] - 2;
}

TEST(a_checksum_depends_on_bytes_and_place_but_not_on_the_address)
{
    unsigned char *const arena = bench.arenas[FAST];
    draw(PL_U8);
    FOR_EACH (size_t, n,
              {0, 1, 7, 8, 9, 15, 16, 17, 31, 100, 16384, 32768, 32769, 70001}) {
        FOR_EACH (size_t, offset, {0, 64, 1 << 20, (size_t)1 << 34}) {
            const uint64_t expected = naive_checksum(bench.drawn, *n, *offset);
            FOR_EACH (size_t, shift, {0, 1, 2, 4, 5, 8, 12, 15, 16}) {
                memcpy(arena + *shift, bench.drawn, *n);
                CHECK(checksum(arena + *shift, *n, *offset) == expected);
            }
            if (*n > 0)
                CHECK(checksum(bench.drawn, *n, *offset + 64) != expected);
        }
    }
}

TEST(a_checksum_shows_every_bit_that_changes)
{
    enum { N = 200 };
    unsigned char bytes[N];
    memset(bytes, 0, N);
    const uint64_t before = checksum(bytes, N, 0);
    for (size_t bit = 0; bit < 8 * (size_t)N; bit++) {
        bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
        CHECK(checksum(bytes, N, 0) != before);
        bytes[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    bytes[8] = 1; /* the same word in another place */
    const uint64_t one = checksum(bytes, N, 0);
    bytes[8] = 0, bytes[16] = 1;
    CHECK(checksum(bytes, N, 0) != one);
}

/* A tensor's checksum is the sum of its parts'; 1,500 parts take two launches. */
TEST(the_pieces_of_a_segment_are_added_up)
{
    enum { N = 1500 };
    static pli_piece pieces[N];
    uint64_t sums[2] = {0, 0};
    draw(PL_U8);
    for (size_t i = 0; i < N; i++)
        pieces[i] = (pli_piece){NULL, bench.drawn + 64 * i, 64, 64 * i, 1};
    driver_said.n_launches = 0;
    CHECK_OK(pli_kernels_checksum(bench.kernels, pieces, N, sums, NULL));
    CHECK(driver_said.n_launches == 2);
    CHECK(sums[0] == 0 && sums[1] == checksum(bench.drawn, 64 * (size_t)N, 0));
}

TEST(a_place_that_no_span_can_name_is_refused)
{
    unsigned char byte = 0;
    uint64_t sum = 0;
    FOR_EACH (size_t, offset, {(size_t)1 << 35, 4}) {
        const pli_piece piece = {NULL, &byte, 1, *offset, 0};
        CHECK(pli_kernels_checksum(bench.kernels, &piece, 1, &sum, NULL) == PL_EINVAL);
    }
    CHECK(checksum(&byte, 1, ((size_t)1 << 35) - 8) != 0);
}

TEST(segments_whose_checksums_differ_are_copied)
{
    enum { N = 40000 };
    unsigned char *const arena = bench.arenas[FAST];
    const uint64_t sums[] = {5, 6, 7}, wanted[] = {5, 60, 7};
    const unsigned long long n_before = host_kernel_fetched();
    draw(PL_U8);
    FOR_EACH (size_t, shift, {0, 1, 4}) {
        pli_piece pieces[4];
        arenas_begin();
        for (size_t i = 0; i < 4; i++)
            pieces[i] = (pli_piece){arena + i * 65536, bench.drawn + FROM_AT + *shift,
                                    N + i, 0, (unsigned)i % 3};
        CHECK_OK(pli_kernels_refresh(bench.kernels, pieces, 4, sums, wanted, NULL));
        CHECK(memcmp(arena + 65536, bench.drawn + FROM_AT + *shift, N + 1) == 0);
        memcpy(arena + 65536, bench.drawn + 65536, N + 1);
        CHECK(memcmp(arena, bench.drawn, ARENA_BYTES) == 0);
    }
    CHECK(host_kernel_fetched() - n_before == 3 * (N + 1));
}

/* ---- coverage ------------------------------------------------------------------- */

TEST(every_branch_of_every_kernel_was_taken)
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
        return 1;
    const int result = check_run_tests();
    bench_destroy();
    return result;
}
