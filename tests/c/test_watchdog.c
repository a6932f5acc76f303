/* test_watchdog.c - a thread that checks all that have joined. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "core/alloc.h"
#include "draw.h"
#include "nccl/watchdog.h"

#ifdef __SANITIZE_THREAD__
enum { IS_SANITIZED_BY_THREADS = 1 }; /* TSan cannot start threads in a forked child */
#else
enum { IS_SANITIZED_BY_THREADS = 0 };
#endif

typedef struct ward {
    atomic_int n_checks;
    atomic_int n_inside;
    atomic_int is_gone; /* it has left: no check may follow */
    int64_t rest_ns;    /* duration of a check */
} ward;

static void check(void *context)
{
    ward *it = context;
    CHECK(atomic_fetch_add(&it->n_inside, 1) == 0);
    CHECK(atomic_load(&it->is_gone) == 0);
    pli_sleep_ns(it->rest_ns);
    CHECK(atomic_load(&it->is_gone) == 0);
    atomic_fetch_add(&it->n_checks, 1);
    atomic_fetch_sub(&it->n_inside, 1);
}

static void await_checks(ward *it, int n)
{
    while (atomic_load(&it->n_checks) < n)
        pli_sleep_ns(PLI_MS);
}

static void leave(pli_watchdog *watchdog, ward *it)
{
    pli_watchdog_leave(watchdog, it);
    atomic_store(&it->is_gone, 1);
}

/* 0 if a sanitizer has its own threads. */
static int n_threads(void)
{
    int n = 0;
    if (IS_SANITIZED_BY_THREADS)
        return 0;
    FILE *file = fopen("/proc/self/status", "re");
    char line[256];
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        (void)sscanf(line, "Threads: %d", &n);
    if (file != NULL)
        (void)fclose(file);
    return n;
}

TEST(each_that_has_joined_is_looked_at)
{
    ward wards[9] = {0};
    pli_watchdog *watchdog = NULL;
    const int n_before = n_threads();
    if (!CHECK_OK(pli_watchdog_create(&watchdog)))
        return;
    for (int round = 0; round < 2; round++) {
        CHECK(n_threads() == n_before); /* none before the first, none after the last */
        for (int k = 0; k < 9; k++) {
            wards[k] = (ward){.rest_ns = k * 10000};
            CHECK_OK(pli_watchdog_join(watchdog, check, &wards[k]));
        }
        CHECK(n_threads() == n_before + !IS_SANITIZED_BY_THREADS);
        for (int k = 0; k < 9; k++)
            await_checks(&wards[k], 2);
        for (int k = 0; k < 9; k++)
            leave(watchdog, &wards[(k * 4 + round) % 9]);
    }
    CHECK(n_threads() == n_before);
    pli_watchdog_leave(watchdog, &wards[0]); /* it has left already */
    pli_watchdog_destroy(watchdog);
    pli_watchdog_destroy(NULL);
}

TEST(who_leaves_waits_for_the_look_that_is_under_way)
{
    for (int k = 0; k < 5; k++) {
        ward slow = {.rest_ns = 30 * PLI_MS};
        pli_watchdog *watchdog = NULL;
        if (!CHECK_OK(pli_watchdog_create(&watchdog)) ||
            !CHECK_OK(pli_watchdog_join(watchdog, check, &slow)))
            return;
        while (atomic_load(&slow.n_inside) == 0)
            pli_cpu_relax();
        leave(watchdog, &slow);
        CHECK(atomic_load(&slow.n_inside) == 0);
        pli_watchdog_destroy(watchdog);
    }
}

static void *come_and_go(void *memory)
{
    pli_watchdog *watchdog = memory;
    draw random = draw_of((uint64_t)(uintptr_t)&random);
    for (int k = 0; k < 30; k++) {
        ward it = {.rest_ns = (int64_t)draw_below(&random, 100000)};
        if (!CHECK_OK(pli_watchdog_join(watchdog, check, &it)))
            return NULL;
        draw_rest(&random, 20 * PLI_MS);
        leave(watchdog, &it);
    }
    return NULL;
}

TEST(any_thread_joins_and_leaves_at_any_time)
{
    pthread_t threads[4];
    pli_watchdog *watchdog = NULL;
    if (!CHECK_OK(pli_watchdog_create(&watchdog)))
        return;
    for (int k = 0; k < 4; k++)
        if (pthread_create(&threads[k], NULL, come_and_go, watchdog) != 0)
            exit(2);
    for (int k = 0; k < 4; k++)
        (void)pthread_join(threads[k], NULL);
    pli_watchdog_destroy(watchdog);
}

TEST(signals_are_not_for_its_thread)
{
    ward it = {0};
    pli_watchdog *watchdog = NULL;
    sigset_t mine;
    if (!CHECK_OK(pli_watchdog_create(&watchdog)) ||
        !CHECK_OK(pli_watchdog_join(watchdog, check, &it)))
        return;
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &mine) == 0);
    CHECK(!sigismember(&mine, SIGUSR1)); /* this thread's mask is unchanged */
    leave(watchdog, &it);
    pli_watchdog_destroy(watchdog);
}

TEST(a_forked_child_may_forget_it_and_begin_anew)
{
    ward it = {.rest_ns = 5 * PLI_MS};
    pli_watchdog *watchdog = NULL;
    int how = 0;
    if (!CHECK_OK(pli_watchdog_create(&watchdog)) ||
        !CHECK_OK(pli_watchdog_join(watchdog, check, &it)))
        return;
    while (atomic_load(&it.n_inside) == 0)
        pli_cpu_relax();
    const pid_t pid = fork(); /* its thread may hold the lock now */
    if (pid == 0) {
        ward own = {0};
        (void)alarm(20);
        pli_watchdog_leave(watchdog, &it);
        pli_watchdog_forget(watchdog);
        if (!IS_SANITIZED_BY_THREADS &&
            CHECK_OK(pli_watchdog_join(watchdog, check, &own))) {
            await_checks(&own, 1);
            leave(watchdog, &own);
        }
        pli_watchdog_destroy(watchdog);
        _exit(atomic_load(&check_n_failures) == 0 ? 0 : 1);
    }
    CHECK(waitpid(pid, &how, 0) == pid && WIFEXITED(how) && WEXITSTATUS(how) == 0);
    pli_watchdog_forget(watchdog); /* no effect here */
    await_checks(&it, atomic_load(&it.n_checks) + 1);
    leave(watchdog, &it);
    pli_watchdog_destroy(watchdog);
}

TEST(a_watchdog_without_memory_or_thread_says_so)
{
    ward it = {0};
    pli_watchdog *watchdog = NULL;
    pli_fault_arm(PLI_FAULT_ALLOC, 1);
    CHECK(pli_watchdog_create(&watchdog) == PL_ENOMEM);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
    if (!CHECK_OK(pli_watchdog_create(&watchdog)))
        return;
    pli_fault_arm(PLI_FAULT_ALLOC, 1);
    CHECK(pli_watchdog_join(watchdog, check, &it) == PL_ENOMEM);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
    pli_fault_arm(PLI_FAULT_SYSCALL, 1);
    CHECK(pli_watchdog_join(watchdog, check, &it) == PL_ENOMEM);
    pli_fault_arm(PLI_FAULT_SYSCALL, 0);
    CHECK_OK(pli_watchdog_join(watchdog, check, &it));
    leave(watchdog, &it);
    pli_watchdog_destroy(watchdog);
}
