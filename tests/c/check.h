/* check.h - all that a C test needs: tests that run by themselves, and checks that no
 * build flag turns off.
 *
 *     TEST(a_sentence_that_holds)
 *     {
 *         CHECK(1 + 1 == 2);
 *         if (!CHECK_OK(pl_something(&thing)))
 *             return;
 *         CHECK_FAILS(pl_something(NULL), PL_EINVAL, "give a thing", "not NULL");
 *     }
 *
 * The main() of this file runs a program's tests in the order of its text; a program
 * that defines CHECK_OWN_MAIN first has its own main(), which calls check_run_tests().
 * If it defines CHECK_AT_ONCE as more than 1, so many tests run side by side, each in a
 * process of its own: for tests that wait.
 * A failed check is printed and counted, and the test goes on.  A check is true if it
 * passed, so a test that cannot go on can return.  Any thread may check.
 */
#ifndef PLT_CHECK_H
#define PLT_CHECK_H

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "include/paceline.h"

#ifndef CHECK_AT_ONCE
#define CHECK_AT_ONCE 1
#endif

enum { CHECK_MAX_PRINTED = 10 }; /* per test: a broken loop fails thousands */

typedef struct check_test {
    const char *name;
    void (*run)(void);
    pid_t pid; /* of its own process, if it has one */
    struct check_test *next;
} check_test;

static check_test *check_first;
static check_test **check_end = &check_first;
static atomic_int check_n_failures; /* in the current test */

#define TEST(name)                                                                     \
    static void name(void);                                                            \
    __attribute__((constructor)) static void check_add_##name(void)                    \
    {                                                                                  \
        static check_test test = {#name, name, 0, NULL};                               \
        *check_end = &test;                                                            \
        check_end = &test.next;                                                        \
    }                                                                                  \
    static void name(void)

/* A test whose body has a parameter: the statement calls name##_by with an argument. */
#define TEST_BY(name, parameter, statement)                                            \
    static void name##_by(parameter);                                                  \
    TEST(name)                                                                         \
    {                                                                                  \
        statement;                                                                     \
    }                                                                                  \
    static void name##_by(parameter)

static inline int check_that(int is_true, const char *words, const char *more,
                             const char *file, int line)
{
    if (is_true)
        return 1;
    if (atomic_fetch_add(&check_n_failures, 1) < CHECK_MAX_PRINTED)
        (void)fprintf(stderr, "%s:%d: %s%s\n", file, line, words, more);
    return 0;
}

/* Prints more about a check that has just failed, unless too many have. */
#define CHECK_MORE(...)                                                                \
    do {                                                                               \
        if (atomic_load(&check_n_failures) <= CHECK_MAX_PRINTED) {                     \
            (void)fprintf(stderr, "    " __VA_ARGS__);                                 \
            (void)fputc('\n', stderr);                                                 \
        }                                                                              \
    } while (0)

static inline int check_ok(pl_status st, const char *words, const char *file, int line)
{
    if (st == PL_OK)
        return 1;
    (void)check_that(0, words, " did not return PL_OK:", file, line);
    CHECK_MORE("%s: %s", pl_status_text(st), pl_error_message());
    return 0;
}

/* Whether a call has failed with this status, and with a message that has all the
 * words; NULL ends their list. */
static inline int check_fails(pl_status st, const char *call, const char *file,
                              int line, pl_status expected, ...)
{
    va_list all;
    int is_so = check_that(st == expected, call, " failed otherwise:", file, line);
    if (!is_so)
        CHECK_MORE("%s: %s", pl_status_text(st), pl_error_message());
    va_start(all, expected);
    for (const char *words; is_so && (words = va_arg(all, const char *)) != NULL;) {
        is_so = strstr(pl_error_message(), words) != NULL;
        if (!check_that(is_so, call, " failed in other words:", file, line))
            CHECK_MORE("'%s' is not in '%s'", words, pl_error_message());
    }
    va_end(all);
    return is_so;
}

/* Returns whether it passed. */
static inline int check_run(const check_test *test)
{
    atomic_store(&check_n_failures, 0);
    test->run();
    const int n = atomic_load(&check_n_failures);
    if (n > 0)
        (void)fprintf(stderr, "FAILED %s: %d checks\n", test->name, n);
    return n == 0;
}

/* Begins a test in a process of its own. */
static inline void check_begin(check_test *test)
{
    (void)fflush(NULL);
    test->pid = fork();
    if (test->pid == 0)
        exit(check_run(test) ? 0 : 1);
}

/* Waits for the end of any; returns whether it passed. */
static inline int check_end_one(void)
{
    int how = 0;
    const check_test *test = check_first;
    const pid_t pid = wait(&how);
    while (test != NULL && test->pid != pid)
        test = test->next;
    if (test != NULL && (!WIFEXITED(how) || WEXITSTATUS(how) > 1))
        (void)fprintf(stderr, "FAILED %s: status %d\n", test->name, how);
    return WIFEXITED(how) && WEXITSTATUS(how) == 0;
}

/* Returns main's exit status. */
static inline int check_run_tests(void)
{
    int n_passed = 0;
    int n_failed = 0;
    int n_begun = 0;
    for (check_test *test = check_first; test != NULL; test = test->next) {
        if (CHECK_AT_ONCE > 1) {
            check_begin(test);
            if (++n_begun < CHECK_AT_ONCE)
                continue;
        }
        const int is_passed = CHECK_AT_ONCE > 1 ? check_end_one() : check_run(test);
        n_passed += is_passed;
        n_failed += !is_passed;
    }
    for (int k = 1; k < CHECK_AT_ONCE && k <= n_begun; k++) {
        const int is_passed = check_end_one();
        n_passed += is_passed;
        n_failed += !is_passed;
    }
    (void)printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed == 0 ? 0 : 1;
}

#define CHECK(cond) check_that((cond) ? 1 : 0, #cond, " is false", __FILE__, __LINE__)
#define CHECK_OK(status) check_ok((status), #status, __FILE__, __LINE__)

/* Arguments: a status, and words of the message. */
#define CHECK_FAILS(call, ...)                                                         \
    check_fails((call), #call, __FILE__, __LINE__, __VA_ARGS__, (const char *)NULL)
/* Checks that the message of this thread's last failure has all these words. */
#define CHECK_SAYS(...)                                                                \
    check_fails(PL_OK, "the last call", __FILE__, __LINE__, PL_OK, __VA_ARGS__,        \
                (const char *)NULL)

#ifndef CHECK_OWN_MAIN
static char **check_words; /* of the command line; NULL: none */

int main(int n_words, char **words)
{
    check_words = n_words > 1 ? words + 1 : NULL;
    return check_run_tests();
}
#endif

#endif
