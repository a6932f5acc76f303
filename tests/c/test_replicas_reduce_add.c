/* Sums of replicas' rows over the CPU backend, against a plain sum of each element. */
#include <string.h>

#include "check.h"
#include "core/alloc.h"
#include "naive_sum.h"
#include "replicas/reduce_add.h"

enum { MOST_ROWS = 8, MOST_ELEMS = 1000, ROW_BYTES = MOST_ELEMS * 16 + 128 };

static _Alignas(PL_CACHE_LINE) unsigned char memory[MOST_ROWS + 2][ROW_BYTES];

/* Sums n_rows rows, of any values, into a place of its own or into the first row. */
static void check_sum(pl_backend *backend, pl_dtype dtype, int n_rows, size_t n_elems,
                      int is_in_place)
{
    const size_t n_bytes = n_elems * pl_dtype_bytes(dtype);
    const unsigned char *rows[MOST_ROWS];
    unsigned char *to = is_in_place ? memory[0] : memory[MOST_ROWS];
    unsigned char *expected = memory[MOST_ROWS + 1];
    memset(memory, 0xEE, sizeof memory);
    for (int k = 0; k < n_rows; k++) {
        rows[k] = memory[(k * 5) % MOST_ROWS]; /* not in the order of their addresses */
        naive_fill(memory[(k * 5) % MOST_ROWS], n_bytes, dtype);
    }
    if (n_rows == 1)
        memcpy(expected, rows[0], n_bytes);
    else
        naive_reduce(rows, n_rows, n_bytes, dtype, PL_SUM, expected);
    if (!CHECK_OK(pli_reduce_add(backend, (const void *const *)rows, n_rows, to, dtype,
                                 n_elems)))
        return;
    const long at = first_difference(to, expected, n_bytes, dtype);
    if (!CHECK(at < 0))
        CHECK_MORE("%s, %d rows of %zu: element %ld", pl_dtype_text(dtype), n_rows,
                   n_elems, at);
    CHECK(to[n_bytes] == 0xEE);
}

static void rows_of_any_dtype_are_summed_in_their_order(void)
{
    static const size_t sizes[] = {0, 1, 7, 64, 129, MOST_ELEMS};
    pl_backend *backend = NULL;
    if (!CHECK_OK(pli_cpu_backend_create(&backend)))
        return;
    for (int dtype = PL_F16; dtype < PL_N_DTYPES; dtype++)
        for (int n_rows = 1; n_rows <= MOST_ROWS; n_rows++)
            for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
                for (int is_in_place = 0; is_in_place < 2; is_in_place++)
                    check_sum(backend, (pl_dtype)dtype, n_rows, sizes[s], is_in_place);
    pli_backend_destroy(backend);
}

static void sixteen_bits_are_rounded_once(void)
{
    static const uint16_t rows[3][1] = {{0x6800}, {0x3c00}, {0x3c00}}; /* 2048, 1, 1 */
    const void *const in[] = {rows[0], rows[1], rows[2]};
    uint16_t sum = 0;
    pl_backend *backend = NULL;
    if (!CHECK_OK(pli_cpu_backend_create(&backend)))
        return;
    CHECK_OK(pli_reduce_add(backend, in, 3, &sum, PL_F16, 1));
    CHECK(sum == 0x6801); /* 2050, where 2048 + 1 is 2048 */
    pli_backend_destroy(backend);
}

static void what_cannot_be_summed_is_refused(void)
{
    const void *const rows[PL_MAX_RANKS + 1] = {memory[0], memory[1]};
    pl_backend *backend = NULL;
    if (!CHECK_OK(pli_cpu_backend_create(&backend)))
        return;
    CHECK(pli_reduce_add(backend, rows, 0, memory[2], PL_F32, 1) == PL_EINVAL);
    CHECK(pli_reduce_add(backend, rows, PL_MAX_RANKS + 1, memory[2], PL_F32, 1) ==
          PL_EINVAL);
    for (int dtype = 0; dtype < PL_F16; dtype++)
        CHECK(pli_reduce_add(backend, rows, 2, memory[2], (pl_dtype)dtype, 1) ==
              PL_EINVAL);
    pli_backend_destroy(backend);
}

static void a_sum_allocates_nothing(void)
{
    pl_backend *backend = NULL;
    if (!CHECK_OK(pli_cpu_backend_create(&backend)))
        return;
    pli_fault_arm(PLI_FAULT_ALLOC, 1);
    check_sum(backend, PL_BF16, MOST_ROWS, MOST_ELEMS, 0);
    CHECK(pli_fault_count(PLI_FAULT_ALLOC) == 0);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
    pli_backend_destroy(backend);
}

int main(void)
{
    RUN(rows_of_any_dtype_are_summed_in_their_order);
    RUN(sixteen_bits_are_rounded_once);
    RUN(what_cannot_be_summed_is_refused);
    RUN(a_sum_allocates_nothing);
    return check_report();
}
