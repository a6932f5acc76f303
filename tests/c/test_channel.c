/* test_channel.c - mappings that grow, and messages between two threads or processes.
 */
#include "ipc/channel.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "core/alloc.h"
#include "core/clock.h"
#include "draw.h"
#include "ipc/parent_watch.h"
#include "leaks.h"

enum { ALARM_S = 120, SLICE_MS = 50, MANY_SLICES = 1000 };

/* A message of these tests: its size, then bytes that follow from it. */
typedef struct note {
    uint64_t n_bytes;
    uint64_t seed;
    unsigned char bytes[];
} note;

static int await_message(pli_channel *end)
{
    if (pli_channel_spin(end))
        return 1;
    for (int i = 0; i < MANY_SLICES; i++) {
        const pl_status st = pli_channel_sleep(end, SLICE_MS * PLI_MS);
        if (st != PL_EAGAIN)
            return CHECK_OK(st);
    }
    return CHECK(0 && "a message within the test's patience");
}

static int send_note(pli_channel *end, uint64_t seed, size_t n_bytes)
{
    char *at = NULL;
    if (!CHECK_OK(pli_channel_reserve(end, sizeof(note) + n_bytes, &at)))
        return 0;
    note *it = (note *)(void *)at;
    it->n_bytes = n_bytes;
    it->seed = seed;
    for (size_t i = 0; i < n_bytes; i++)
        it->bytes[i] = (unsigned char)(seed + i * 7);
    pli_channel_send(end);
    return 1;
}

static const note *receive_note(pli_channel *end)
{
    const char *message = NULL;
    size_t n_bytes = 0;
    if (!CHECK_OK(pli_channel_receive(end, &message, &n_bytes)))
        exit(2);
    const note *it = (const note *)(const void *)message;
    CHECK(n_bytes == sizeof *it + it->n_bytes);
    return it;
}

static int check_note(pli_channel *end, uint64_t seed, size_t n_bytes)
{
    const note *it = receive_note(end);
    size_t n_wrong = 0;
    if (!CHECK(it->n_bytes == n_bytes) || !CHECK(it->seed == seed))
        return 0;
    for (size_t i = 0; i < n_bytes; i++)
        n_wrong += it->bytes[i] != (unsigned char)(seed + i * 7);
    return CHECK(n_wrong == 0);
}

/* ---- a worker that sends back what it is sent, with seed + 1, until seed 0 ------ */

typedef struct worker {
    pli_channel *end;
    int64_t rest_ns; /* before every eighth answer */
} worker;

static void *echo(void *argument)
{
    const worker *self = argument;
    while (await_message(self->end)) {
        const note *it = receive_note(self->end);
        const uint64_t seed = it->seed;
        if (self->rest_ns > 0 && seed % 8 == 0)
            pli_sleep_ns(self->rest_ns);
        if (seed == 0 || !send_note(self->end, seed + 1, it->n_bytes))
            break;
    }
    return NULL;
}

typedef struct pair {
    pli_channel *caller;
    worker worker;
    pthread_t thread;
} pair;

static int make_pair(pair *out, int64_t spin_ns)
{
    *out = (pair){.caller = NULL};
    if (!CHECK_OK(pli_channel_create(&out->caller)) ||
        !CHECK_OK(pli_channel_adopt(out->caller->out->fd, out->caller->in->fd,
                                    &out->worker.end)))
        return 0;
    out->caller->spin_ns = spin_ns;
    out->worker.end->spin_ns = spin_ns;
    return 1;
}

static int start_pair(pair *out, int64_t spin_ns, int64_t rest_ns)
{
    if (!make_pair(out, spin_ns))
        return 0;
    out->worker.rest_ns = rest_ns;
    return CHECK(pthread_create(&out->thread, NULL, echo, &out->worker) == 0);
}

static void end_pair(pair *it)
{
    (void)send_note(it->caller, 0, 0);
    (void)pthread_join(it->thread, NULL);
    pli_channel_destroy(it->worker.end);
    pli_channel_destroy(it->caller);
    CHECK(n_shared_mappings() == 0);
}

static void exchange(const pair *it, uint64_t seed, size_t n_bytes)
{
    if (send_note(it->caller, seed, n_bytes) && await_message(it->caller))
        (void)check_note(it->caller, seed + 1, n_bytes);
}

static void an_answer_follows_each_request(void)
{
    pair it;
    if (!start_pair(&it, 200000, 0))
        return;
    for (uint64_t seed = 1; seed <= 2000; seed++)
        exchange(&it, seed, seed % 300);
    end_pair(&it);
}

static void ends_that_only_sleep_wake_each_other(void)
{
    pair it;
    if (!start_pair(&it, 0, 2 * PLI_MS))
        return;
    for (uint64_t seed = 1; seed <= 500; seed++)
        exchange(&it, seed, 10);
    end_pair(&it);
}

static void messages_grow_and_shrink_at_the_same_address(void)
{
    pair it;
    draw random = draw_of(5);
    if (!start_pair(&it, 20000, 0))
        return;
    const char *base = it.caller->out->base;
    for (uint64_t seed = 1; seed <= 60; seed++)
        exchange(&it, seed, draw_below(&random, 1u << (6 + seed / 4)));
    exchange(&it, 100, 9u << 20);
    exchange(&it, 101, 1);
    CHECK(it.caller->out->base == base);
    CHECK(it.caller->out->n_bytes >= 9u << 20);
    end_pair(&it);
}

/* Bytes of memory that the files of both directions have. */
static size_t taken_bytes(const pli_channel *end)
{
    struct stat out, in;
    if (!CHECK(fstat(end->out->fd, &out) == 0) || !CHECK(fstat(end->in->fd, &in) == 0))
        return 0;
    return ((size_t)out.st_blocks + (size_t)in.st_blocks) * 512;
}

static void a_large_message_leaves_no_memory_taken_when_small_ones_follow(void)
{
    enum { LARGE = 150 << 20, SMALL = 100 << 10, MANY = 50 };
    pair it;
    if (!start_pair(&it, 20000, 0))
        return;
    exchange(&it, 1, SMALL);
    for (int time = 0; time < 2; time++) {
        exchange(&it, 2, LARGE);
        CHECK(taken_bytes(it.caller) >= (size_t)2 * LARGE);
        for (uint64_t seed = 1; seed <= MANY; seed++)
            exchange(&it, seed, SMALL);
        CHECK(taken_bytes(it.caller) <= (size_t)4 << 20);
    }
    exchange(&it, 3, 3 << 20); /* more than is left */
    end_pair(&it);
}

static void a_mapping_stays_large_while_large_messages_come_in_between(void)
{
    enum { LARGE = 8 << 20, TIMES = 5, FEW = 20 };
    pair it;
    if (!start_pair(&it, 20000, 0))
        return;
    for (int time = 0; time < TIMES; time++) {
        exchange(&it, 2, LARGE);
        for (uint64_t seed = 1; seed <= FEW; seed++)
            exchange(&it, seed, 100);
        CHECK(it.caller->out->n_bytes >= LARGE);
    }
    CHECK(!pli_channel_has_calmed(it.caller));
    for (uint64_t seed = 1; seed <= FEW; seed++)
        exchange(&it, seed, 100);
    CHECK(it.caller->out->n_bytes < LARGE);
    CHECK(pli_channel_has_calmed(it.caller));
    CHECK(!pli_channel_has_calmed(it.caller));
    end_pair(&it);
}

static void memory_that_cannot_be_given_back_is_kept(void)
{
    enum { LARGE = 8 << 20 };
    pair it;
    if (!start_pair(&it, 20000, 0))
        return;
    exchange(&it, 1, LARGE);
    const size_t before = it.caller->out->n_bytes;
    pli_fault_arm(PLI_FAULT_SYSCALL, 1);
    pli_shared_memory_shrink(it.caller->out, 1);
    pli_fault_arm(PLI_FAULT_SYSCALL, 0);
    CHECK(it.caller->out->n_bytes == before);
    pli_shared_memory_shrink(it.caller->out, before + 1);
    CHECK(it.caller->out->n_bytes == before);
    exchange(&it, 1, LARGE);
    end_pair(&it);
}

/* ---- failures ------------------------------------------------------------------- */

static void a_request_that_finds_no_memory_leaves_the_channel_usable(void)
{
    pair it;
    char *at = NULL;
    if (!start_pair(&it, 20000, 0))
        return;
    exchange(&it, 1, 100);
    for (long n = 1; n <= 2; n++) { /* the second try is for just enough */
        const size_t before = it.caller->out->n_bytes;
        pli_fault_arm(PLI_FAULT_SYSCALL, n);
        const pl_status st = pli_channel_reserve(it.caller, before + 1, &at);
        pli_fault_arm(PLI_FAULT_SYSCALL, 0);
        CHECK(st == PL_OK);
        exchange(&it, (uint64_t)n, 200);
    }
    CHECK(pli_channel_reserve(it.caller, PTRDIFF_MAX, &at) == PL_ENOMEM);
    CHECK(pli_channel_reserve(it.caller, it.caller->out->reserved_bytes, &at) ==
          PL_ENOMEM);
    exchange(&it, 7, 300);
    end_pair(&it);
}

static void every_failure_to_make_a_channel_leaves_nothing(void)
{
    const int n_before = n_open_descriptors();
    for (int kind = 0; kind < PLI_N_FAULTS; kind++) {
        long n = 1;
        for (;; n++) {
            pair it;
            pli_channel *caller = NULL, *end = NULL;
            pli_fault_arm((enum pli_fault_kind)kind, n);
            pl_status st = pli_channel_create(&caller);
            if (st == PL_OK)
                st = pli_channel_adopt(caller->out->fd, caller->in->fd, &end);
            const long n_seen = pli_fault_count((enum pli_fault_kind)kind);
            pli_fault_arm((enum pli_fault_kind)kind, 0);
            if (st == PL_OK && n_seen >= n) { /* a smaller range was good enough */
                it = (pair){.caller = caller, .worker = {.end = end}};
                CHECK(send_note(it.caller, 3, 10) && await_message(it.worker.end));
            }
            pli_channel_destroy(end);
            pli_channel_destroy(caller);
            CHECK(n_open_descriptors() == n_before);
            CHECK(n_shared_mappings() == 0);
            if (n_seen < n)
                break;
        }
        CHECK(n > 3);
    }
}

static void a_descriptor_of_something_else_is_refused(void)
{
    pli_channel *end = NULL;
    pli_shared_memory *memory = NULL;
    const int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK(pli_channel_adopt(fd, fd, &end) == PL_EINVAL);
    CHECK(pli_channel_adopt(-1, -1, &end) == PL_ESYS);
    if (CHECK_OK(pli_shared_memory_create(PLI_MEMORY_FIXED, 4096, &memory)))
        CHECK(pli_channel_adopt(memory->fd, memory->fd, &end) == PL_EMISMATCH);
    pli_shared_memory_release(memory);
    (void)close(fd);
    CHECK(n_shared_mappings() == 0);
}

/* ---- processes ------------------------------------------------------------------ */

static void run_child(pli_channel *caller)
{
    worker self = {.end = NULL};
    const int request_fd = dup(caller->out->fd);
    const int answer_fd = dup(caller->in->fd);
    (void)alarm(ALARM_S);
    atomic_store(&check_n_failures, 0);
    pli_channel_forget(caller);
    pli_channel_destroy(caller); /* whose memory is not here */
    CHECK(n_shared_mappings() == 0);
    if (CHECK_OK(pli_channel_adopt(request_fd, answer_fd, &self.end)))
        (void)echo(&self);
    pli_channel_destroy(self.end);
    exit(atomic_load(&check_n_failures) == 0 ? 0 : 1);
}

static pid_t fork_worker(pli_channel *caller)
{
    (void)fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0)
        run_child(caller);
    if (CHECK(pid > 0))
        CHECK_OK(pli_channel_watch(caller, pid, "replica 1"));
    return pid;
}

static pl_status sleep_long(const pli_channel *end)
{
    pl_status st = PL_EAGAIN;
    for (int i = 0; i < MANY_SLICES && st == PL_EAGAIN; i++)
        st = pli_channel_sleep(end, SLICE_MS * PLI_MS);
    return st;
}

static void a_forked_child_has_nothing_of_its_parents_channel_but_what_it_adopts(void)
{
    pair it = {.caller = NULL};
    int how = 0;
    if (!CHECK_OK(pli_channel_create(&it.caller)))
        return;
    const pid_t pid = fork_worker(it.caller);
    for (uint64_t seed = 1; seed <= 100; seed++)
        exchange(&it, seed, (size_t)seed * 5000);
    (void)send_note(it.caller, 0, 0);
    (void)waitpid(pid, &how, 0);
    CHECK(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    pli_channel_destroy(it.caller);
}

static void a_worker_that_is_killed_is_reported(void)
{
    pair it = {.caller = NULL};
    if (!CHECK_OK(pli_channel_create(&it.caller)))
        return;
    const pid_t pid = fork_worker(it.caller);
    exchange(&it, 1, 10);
    (void)kill(pid, SIGKILL);
    CHECK(sleep_long(it.caller) == PL_EPEER);
    CHECK(strstr(pl_error_message(), "replica 1 (process ") != NULL);
    CHECK(strstr(pl_error_message(), "was killed by SIGKILL") != NULL);
    (void)waitpid(pid, NULL, 0);
    CHECK(sleep_long(it.caller) == PL_EPEER); /* nobody knows any more how */
    CHECK(strstr(pl_error_message(), "has ended") != NULL);
    pli_channel_destroy(it.caller);
}

static void the_last_answer_of_a_worker_that_ended_is_not_lost(void)
{
    pair it = {.caller = NULL};
    if (!CHECK_OK(pli_channel_create(&it.caller)))
        return;
    const pid_t pid = fork_worker(it.caller);
    (void)send_note(it.caller, 5, 1000);
    while (!pli_channel_has_message(it.caller))
        pli_sleep_ns(PLI_MS);
    (void)kill(pid, SIGTERM);
    siginfo_t info;
    (void)waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT);
    CHECK_OK(sleep_long(it.caller));
    (void)check_note(it.caller, 6, 1000);
    CHECK(sleep_long(it.caller) == PL_EPEER);
    CHECK(strstr(pl_error_message(), "SIGTERM") != NULL);
    (void)waitpid(pid, NULL, 0);
    pli_channel_destroy(it.caller);
}

static void a_worker_ends_with_the_process_that_it_watches(void)
{
    int pipe_fds[2];
    int how = 0;
    CHECK(pli_parent_watch_start(-1, -1) == PL_EINVAL);
    if (!CHECK(pipe(pipe_fds) == 0))
        return;
    (void)fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        (void)close(pipe_fds[1]);
        (void)alarm(ALARM_S);
        if (pli_parent_watch_start(-1, pipe_fds[0]) != PL_OK)
            exit(3);
        for (;;)
            pli_sleep_ns(1000 * PLI_MS);
    }
    (void)close(pipe_fds[0]);
    pli_sleep_ns(20 * PLI_MS);
    CHECK(waitpid(pid, &how, WNOHANG) == 0);
    (void)close(pipe_fds[1]);
    (void)waitpid(pid, &how, 0);
    CHECK(WIFEXITED(how) && WEXITSTATUS(how) == 1);
}

/* ---- signals and cores ---------------------------------------------------------- */

static void on_signal(int number)
{
    (void)number;
}

static void a_signal_ends_a_sleep_early(void)
{
    pli_channel *caller = NULL;
    const struct sigaction action = {.sa_handler = on_signal};
    if (!CHECK_OK(pli_channel_create(&caller)))
        return;
    (void)sigaction(SIGUSR1, &action, NULL);
    (void)fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        for (int i = 0; i < MANY_SLICES && getppid() != 1; i++) {
            pli_sleep_ns(10 * PLI_MS);
            (void)kill(getppid(), SIGUSR1);
        }
        _Exit(0);
    }
    /* Would otherwise last for as long as the test may. */
    CHECK(pli_channel_sleep(caller, INT64_C(1000) * ALARM_S * PLI_MS) == PL_EAGAIN);
    (void)kill(pid, SIGKILL);
    (void)waitpid(pid, NULL, 0);
    pli_channel_destroy(caller);
}

static void the_mask_of_a_thread_is_narrow_in_a_sleep_alone(void)
{
    pli_cores others = {.n = 0};
    cpu_set_t before, during, after;
    CPU_ZERO(&others.set);
    if (!CHECK(sched_getaffinity(0, sizeof before, &before) == 0))
        return;
    CHECK(!pli_cores_leave(&others, &during));
    pli_cores_step_off(&others);
    for (size_t core = 0; core < CPU_SETSIZE && others.n == 0; core++)
        if (CPU_ISSET(core, &before)) {
            CPU_SET(core, &others.set);
            others.n = 1;
        }
    if (pli_cores_leave(&others, &after)) {
        CHECK(CPU_EQUAL(&before, &after));
        (void)sched_getaffinity(0, sizeof during, &during);
        CHECK(CPU_COUNT(&during) == CPU_COUNT(&before) - 1);
        pli_cores_return(&after);
    } else {
        CHECK(CPU_COUNT(&before) == 1); /* nothing would be left */
    }
    pli_cores_step_off(&others);
    (void)sched_getaffinity(0, sizeof after, &after);
    CHECK(CPU_EQUAL(&before, &after));
    others.set = before;
    others.n = CPU_COUNT(&before);
    CHECK(!pli_cores_leave(&others, &during)); /* no core would be left */
}

int main(void)
{
    (void)alarm(ALARM_S);
    RUN(an_answer_follows_each_request);
    RUN(ends_that_only_sleep_wake_each_other);
    RUN(messages_grow_and_shrink_at_the_same_address);
    RUN(a_large_message_leaves_no_memory_taken_when_small_ones_follow);
    RUN(a_mapping_stays_large_while_large_messages_come_in_between);
    RUN(memory_that_cannot_be_given_back_is_kept);
    RUN(a_request_that_finds_no_memory_leaves_the_channel_usable);
    RUN(every_failure_to_make_a_channel_leaves_nothing);
    RUN(a_descriptor_of_something_else_is_refused);
    RUN(a_forked_child_has_nothing_of_its_parents_channel_but_what_it_adopts);
    RUN(a_worker_that_is_killed_is_reported);
    RUN(the_last_answer_of_a_worker_that_ended_is_not_lost);
    RUN(a_worker_ends_with_the_process_that_it_watches);
    RUN(a_signal_ends_a_sleep_early);
    RUN(the_mask_of_a_thread_is_narrow_in_a_sleep_alone);
    return check_report();
}
