/* check.h - all that a C test needs: checks that no build flag turns off.
 *
 *     static void a_sentence_that_holds(void)
 *     {
 *         CHECK(1 + 1 == 2);
 *         if (!CHECK_OK(pl_something(&thing)))
 *             return;
 *     }
 *
 *     int main(void)
 *     {
 *         RUN(a_sentence_that_holds);
 *         return check_report();
 *     }
 *
 * A failed check is printed and counted, and the test goes on; a check is true
 * where it passed, so a test that cannot go on can return.  Any thread may check.
 */
#ifndef PLT_CHECK_H
#define PLT_CHECK_H

#include <stdatomic.h>
#include <stdio.h>

#include "include/paceline.h"

enum { CHECK_MAX_PRINTED = 10 }; /* of one test: a broken loop fails thousands */

static atomic_int check_n_failures; /* in the test that runs */
static int check_n_passed;
static int check_n_failed;

static inline int check_that(int is_true, const char *words, const char *more,
                             const char *file, int line)
{
    if (is_true)
        return 1;
    if (atomic_fetch_add(&check_n_failures, 1) < CHECK_MAX_PRINTED)
        (void)fprintf(stderr, "%s:%d: %s%s\n", file, line, words, more);
    return 0;
}

/* More about a check that has just failed, as long as failures are printed. */
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

static inline void check_run(void (*test)(void), const char *name)
{
    atomic_store(&check_n_failures, 0);
    test();
    const int n = atomic_load(&check_n_failures);
    if (n == 0) {
        check_n_passed++;
    } else {
        check_n_failed++;
        (void)fprintf(stderr, "FAILED %s: %d checks\n", name, n);
    }
}

/* Prints the count, and gives main's exit status. */
static inline int check_report(void)
{
    (void)printf("%d passed, %d failed\n", check_n_passed, check_n_failed);
    return check_n_failed == 0 ? 0 : 1;
}

#define CHECK(cond) check_that((cond) ? 1 : 0, #cond, " is false", __FILE__, __LINE__)
#define CHECK_OK(status) check_ok((status), #status, __FILE__, __LINE__)
#define RUN(test) check_run((test), #test)

#endif
