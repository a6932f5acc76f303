/* test_status.c - codes and messages, the allocator, the environment. */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "backend/cpu_sum.h"
#include "check.h"
#include "core/alloc.h"
#include "core/clock.h"
#include "core/config.h"

/* ---- codes and messages --------------------------------------------------------- */

TEST(every_code_has_a_text_of_its_own)
{
    static const pl_status codes[] = {
#define CODE(name, number, text, exception) name,
        PL_STATUS_MAP(CODE)
#undef CODE
    };
    const size_t n = sizeof codes / sizeof codes[0];
    CHECK(n == 10);
    for (size_t i = 0; i < n; i++) {
        CHECK((size_t)codes[i] == i);
        CHECK(strlen(pl_status_text(codes[i])) > 3);
        for (size_t j = 0; j < i; j++)
            CHECK(strcmp(pl_status_text(codes[i]), pl_status_text(codes[j])) != 0);
    }
    CHECK(strcmp(pl_status_text(PL_OK), "success") == 0);
    CHECK(strcmp(pl_status_text(PL_EPEER), "another rank failed") == 0);
    CHECK(strcmp(pl_status_text((pl_status)99), "unknown status") == 0);
    CHECK(strcmp(pl_status_text((pl_status)-1), "unknown status") == 0);
}

TEST(a_failure_leaves_its_words_and_returns_its_code)
{
    CHECK(pli_fail(PL_EMISMATCH, "rank %d of %s", 3, "four") == PL_EMISMATCH);
    CHECK(strcmp(pl_error_message(), "rank 3 of four") == 0);
    CHECK(pli_fail(PL_EINVAL, "%s", "") == PL_EINVAL);
    CHECK(strcmp(pl_error_message(), "") == 0);
}

TEST(a_failed_system_call_appends_the_text_of_errno)
{
    errno = ENOENT;
    CHECK(pli_fail_errno("cannot open %s", "it") == PL_ESYS);
    CHECK(strcmp(pl_error_message(), "cannot open it: No such file or directory") == 0);
    errno = ENOMEM;
    CHECK(pli_fail_errno("cannot map") == PL_ENOMEM);
    CHECK(strcmp(pl_error_message(), "cannot map: Cannot allocate memory") == 0);
}

TEST(words_that_are_too_long_are_cut_and_not_overrun)
{
    static char endless[20000];
    memset(endless, 'x', sizeof endless - 1);
    CHECK(pli_fail(PL_EPEER, "%s", endless) == PL_EPEER);
    CHECK(strlen(pl_error_message()) == 8191);
    errno = ENOENT;
    CHECK(pli_fail_errno("%s", endless) == PL_ESYS);
    CHECK(strlen(pl_error_message()) == 8191);
    errno = ENOENT;
    CHECK(pli_fail_errno("%.8185s", endless) == PL_ESYS);
    CHECK(strlen(pl_error_message()) == 8191);
}

static void *fail_elsewhere(void *unused)
{
    (void)unused;
    CHECK(strcmp(pl_error_message(), "") == 0);
    CHECK(pli_fail(PL_EINVAL, "theirs") == PL_EINVAL);
    CHECK(strcmp(pl_error_message(), "theirs") == 0);
    return NULL;
}

TEST(each_thread_has_an_error_message_of_its_own)
{
    pthread_t thread;
    CHECK(pli_fail(PL_EINVAL, "ours") == PL_EINVAL);
    if (!CHECK(pthread_create(&thread, NULL, fail_elsewhere, NULL) == 0))
        return;
    (void)pthread_join(thread, NULL);
    CHECK(strcmp(pl_error_message(), "ours") == 0);
}

/* ---- dtypes --------------------------------------------------------------------- */

TEST(every_dtype_has_its_bytes_and_its_name)
{
    static const struct {
        pl_dtype dtype;
        size_t n_bytes;
        const char *text;
    } known[] = {
        {PL_U8, 1, "uint8"},      {PL_I8, 1, "int8"},          {PL_I16, 2, "int16"},
        {PL_I32, 4, "int32"},     {PL_I64, 8, "int64"},        {PL_F16, 2, "float16"},
        {PL_BF16, 2, "bfloat16"}, {PL_F32, 4, "float32"},      {PL_F64, 8, "float64"},
        {PL_C64, 8, "complex64"}, {PL_C128, 16, "complex128"},
    };
    CHECK(sizeof known / sizeof known[0] == PL_N_DTYPES);
    for (size_t i = 0; i < PL_N_DTYPES; i++) {
        CHECK((size_t)known[i].dtype == i);
        CHECK(pl_dtype_bytes(known[i].dtype) == known[i].n_bytes);
        CHECK(strcmp(pl_dtype_text(known[i].dtype), known[i].text) == 0);
        CHECK(PL_CACHE_LINE % known[i].n_bytes == 0);
    }
}

TEST(a_number_that_is_no_dtype_has_no_bytes)
{
    static const int strangers[] = {-1, PL_N_DTYPES, PL_N_DTYPES + 1, 1000};
    for (size_t i = 0; i < sizeof strangers / sizeof strangers[0]; i++) {
        CHECK(pl_dtype_bytes((pl_dtype)strangers[i]) == 0);
        CHECK(strcmp(pl_dtype_text((pl_dtype)strangers[i]), "no dtype") == 0);
    }
}

/* ---- memory --------------------------------------------------------------------- */

TEST(memory_comes_zeroed_and_on_a_cache_line)
{
    for (size_t n = 0; n < 300; n++) {
        unsigned char *memory = NULL;
        if (!CHECK_OK(pli_calloc(n, 1, "a test", &memory)))
            return;
        CHECK((uintptr_t)memory % PL_CACHE_LINE == 0);
        for (size_t i = 0; i < n; i++)
            CHECK(memory[i] == 0);
        memset(memory, 0xff, n);
        pli_free(memory);
    }
    pli_free(NULL);
}

TEST(more_memory_than_there_can_be_is_refused_by_its_purpose)
{
    static const size_t pairs[][2] = {{SIZE_MAX, 2},
                                      {2, SIZE_MAX},
                                      {SIZE_MAX / 8, 9},
                                      {SIZE_MAX, 1},
                                      {(size_t)1 << 32, (size_t)1 << 32}};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        void *memory = &memory;
        CHECK(pli_calloc(pairs[i][0], pairs[i][1], "the moon", &memory) == PL_ENOMEM);
        CHECK(memory == &memory);
        CHECK_SAYS("the moon");
    }
}

TEST(an_ordered_fault_hits_the_nth_allocation_alone)
{
    pli_fault_arm(PLI_FAULT_ALLOC, 3);
    for (int i = 1; i <= 5; i++) {
        void *memory = NULL;
        const pl_status st = pli_calloc(1, 1, "a test", &memory);
        CHECK(st == (i == 3 ? PL_ENOMEM : PL_OK));
        CHECK((memory == NULL) == (i == 3));
        pli_free(memory);
    }
    CHECK(pli_fault_count(PLI_FAULT_ALLOC) == 5);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
    CHECK(pli_fault_count(PLI_FAULT_ALLOC) == 0);
}

/* ---- time ----------------------------------------------------------------------- */

TEST(a_stopwatch_counts_little_of_a_time_in_which_its_process_was_stopped)
{
    const int64_t stopped_ns = 60000 * PLI_MS;
    pli_stopwatch watch = {0};
    CHECK(pli_elapsed_ns(&watch) == 0);
    watch.started_ns -= stopped_ns;
    watch.looked_ns -= stopped_ns;
    CHECK(pli_elapsed_ns(&watch) == PLI_LONGEST_LOOK_NS);
    watch.started_ns -= stopped_ns; /* the process ran, and looked all the time */
    CHECK(pli_elapsed_ns(&watch) >= stopped_ns + PLI_LONGEST_LOOK_NS);
}

/* ---- the environment ------------------------------------------------------------ */

TEST(a_timeout_that_is_a_positive_number_of_seconds_is_taken)
{
    static const struct {
        const char *word;
        int64_t ns;
    } good[] = {{"1", 1000000000},
                {"0.5", 500000000},
                {"1800", INT64_C(1800000000000)},
                {"1e3", INT64_C(1000000000000)},
                {"1e9", INT64_C(1000000000000000000)},
                {"1e-9", 1}};
    int64_t ns = 0;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        (void)setenv("PACELINE_TIMEOUT", good[i].word, 1);
        CHECK_OK(pli_config_timeout_ns("PACELINE_TIMEOUT", 7, &ns));
        CHECK(ns == good[i].ns);
    }
    (void)setenv("PACELINE_TIMEOUT", "", 1);
    CHECK_OK(pli_config_timeout_ns("PACELINE_TIMEOUT", 7, &ns));
    CHECK(ns == 7);
    (void)unsetenv("PACELINE_TIMEOUT");
    CHECK_OK(pli_config_timeout_ns("PACELINE_TIMEOUT", 8, &ns));
    CHECK(ns == 8);
}

TEST(a_timeout_that_is_not_is_refused_and_quoted)
{
    static const char *const bad[] = {
        "0",   "-1",  "abc", "1s", "1 ",   "nan", "-nan", "inf",   "1e10",
        "1,5", "--1", "0.0", " ",  "1e99", "5 5", "-0",   "1e-30", "seconds"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int64_t ns = 7;
        char quoted[32];
        (void)snprintf(quoted, sizeof quoted, "'%s'", bad[i]);
        (void)setenv("PACELINE_TIMEOUT", bad[i], 1);
        if (!CHECK(pli_config_timeout_ns("PACELINE_TIMEOUT", 1, &ns) == PL_EINVAL))
            CHECK_MORE("%s was taken", bad[i]);
        CHECK(ns == 7);
        CHECK_SAYS(quoted, "PACELINE_TIMEOUT=60");
    }
    (void)unsetenv("PACELINE_TIMEOUT");
}

TEST(the_instruction_set_is_the_one_that_is_asked_for)
{
    const pli_sum_table *sums = NULL;
    pl_backend *backend = NULL;
    (void)setenv("PACELINE_ISA", "plain", 1);
    CHECK(strcmp(pli_config_word("PACELINE_ISA"), "plain") == 0);
    CHECK_OK(pli_cpu_sums(&sums));
    CHECK(sums == pli_sum_table_of(PLI_ISA_PLAIN));
    (void)setenv("PACELINE_ISA", "abacus", 1);
    CHECK_FAILS(pli_cpu_backend_create(&backend), PL_EINVAL, "abacus");
    CHECK(backend == NULL);
    (void)setenv("PACELINE_ISA", "", 1);
    CHECK(pli_config_word("PACELINE_ISA") == NULL);
    (void)unsetenv("PACELINE_ISA");
    CHECK(pli_config_word("PACELINE_ISA") == NULL);
    CHECK_OK(pli_cpu_sums(&sums));
    CHECK(sums == pli_sum_table_best());
}
