/* test_recorder.c - the file of the last steps: what a reader sees during and after a
 * write, and when the writer is gone. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "core/alloc.h"
#include "core/clock.h"
#include "ipc/recorder.h"

enum { N_STEPS = 30000, N_KEPT = PLI_RECORDER_RECORDS };

static pli_recorder *create(void)
{
    pli_recorder *out = NULL;
    return CHECK_OK(pli_recorder_create("steps", "{\"rank\": 3}", &out)) ? out : NULL;
}

/* Opens the file that a process records in, as a reader does; -1 if there is none. */
static int open_of(pid_t pid, int flags)
{
    char path[64], link[64];
    for (int fd = 0; fd < 64; fd++) {
        (void)snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
        const ssize_t n = readlink(path, link, sizeof link - 1);
        link[n < 0 ? 0 : n] = '\0';
        if (strcmp(link, "/memfd:steps (deleted)") == 0)
            return open(path, flags);
    }
    return -1;
}

static const pli_recorder_file *map_of(pid_t pid)
{
    const int fd = open_of(pid, O_RDONLY);
    void *base = mmap(NULL, sizeof(pli_recorder_file), PROT_READ, MAP_SHARED, fd, 0);
    (void)close(fd);
    return base == MAP_FAILED ? NULL : base;
}

static const pli_recorder_file *map(void)
{
    return map_of(getpid());
}

static int is_found(void)
{
    const int fd = open_of(getpid(), O_RDONLY);
    return fd >= 0 && close(fd) == 0;
}

/* The recorder of the current test, and its file as a reader has it. */
static pli_recorder *recorder;
static const pli_recorder_file *file;

static void unmap(void)
{
    (void)munmap((void *)(uintptr_t)file, sizeof *file);
}

#define RECORDER_TEST(name)                                                            \
    TEST_BY(name, void, {                                                              \
        recorder = create();                                                           \
        file = map();                                                                  \
        if (CHECK(recorder != NULL && file != NULL)) {                                 \
            name##_by();                                                               \
            unmap();                                                                   \
        }                                                                              \
        pli_recorder_destroy(recorder);                                                \
        CHECK(!is_found());                                                            \
    })

/* The values that a reader copies from a record. */
typedef struct copied {
    int64_t step, begin, backward, end, waiting, n_buckets, bucket_bytes;
} copied;

static int64_t load(const _Atomic int64_t *field)
{
    return atomic_load_explicit(field, memory_order_acquire);
}

/* 0 if the record is empty, being written, or was written meanwhile. */
static int read_record(const pli_record *record, copied *out)
{
    const uint64_t before =
        atomic_load_explicit(&record->sequence, memory_order_acquire);
    *out = (copied){.step = load(&record->step),
                    .begin = load(&record->forward_begin_ns),
                    .backward = load(&record->backward_begin_ns),
                    .end = load(&record->end_ns),
                    .waiting = load(&record->waiting_ns),
                    .n_buckets = load(&record->n_buckets),
                    .bucket_bytes = load(&record->buckets[0].n_bytes)};
    return before != 0 && before % 2 == 0 &&
           before == atomic_load_explicit(&record->sequence, memory_order_relaxed);
}

/* Records a step whose values all follow from its number. */
static void take_step(pli_recorder *self, uint64_t step)
{
    pli_recorder_activity(self, PL_FORWARD, step);
    pli_recorder_activity(self, PL_IDLE, step);
    pli_recorder_activity(self, PL_BACKWARD, step);
    pli_recorder_plan(self, (size_t)step, 7 * (size_t)step);
    pli_recorder_ready(self, 0, 5 * (size_t)step);
    pli_recorder_activity(self, PL_FINISHING, step);
    pli_recorder_reduced(self);
    pli_recorder_activity(self, PL_IDLE, step);
}

RECORDER_TEST(a_step_is_there_once_it_has_ended)
{
    copied found;
    CHECK(file->magic == PLI_RECORDER_MAGIC && file->version == PLI_RECORDER_VERSION);
    CHECK(strcmp(file->who, "{\"rank\": 3}") == 0);
    CHECK(!read_record(&file->records[5], &found));
    pli_recorder_activity(recorder, PL_FORWARD, 5);
    CHECK(file->activity == PL_FORWARD && file->step == 5);
    CHECK(!read_record(&file->records[5], &found));
    take_step(recorder, 5); /* its forward again: the first had no backward */
    CHECK(read_record(&file->records[5], &found));
    CHECK(found.step == 5 && found.n_buckets == 5 && found.bucket_bytes == 25);
    CHECK(found.begin > 0 && found.begin <= found.backward &&
          found.backward <= found.end);
    CHECK(file->activity == PL_IDLE && file->awaiting == PLI_RECORDER_NOBODY);
}

RECORDER_TEST(the_last_steps_are_kept)
{
    copied found;
    for (uint64_t step = 1; step <= 3 * N_KEPT + 7; step++)
        take_step(recorder, step);
    for (int i = 0; i < N_KEPT; i++) {
        CHECK(read_record(&file->records[i], &found));
        CHECK(found.step % N_KEPT == i && found.step > 2 * N_KEPT + 7);
    }
}

RECORDER_TEST(a_step_that_fails_is_never_shown)
{
    copied found;
    pli_recorder_activity(recorder, PL_FORWARD, 1);
    pli_recorder_activity(recorder, PL_IDLE, 1);
    pli_recorder_activity(recorder, PL_BACKWARD, 1);
    take_step(recorder, 2);
    CHECK(!read_record(&file->records[1], &found));
    CHECK(read_record(&file->records[2], &found));
}

RECORDER_TEST(a_forward_without_a_backward_is_a_step_when_the_next_begins)
{
    copied found;
    for (uint64_t step = 1; step <= 2; step++) {
        pli_recorder_activity(recorder, PL_FORWARD, step);
        pli_recorder_activity(recorder, PL_IDLE, step);
    }
    CHECK(read_record(&file->records[1], &found));
    CHECK(found.step == 1 && found.backward == 0 && found.end >= found.begin);
    CHECK(!read_record(&file->records[2], &found));
}

RECORDER_TEST(a_wait_does_not_count_the_work_done_in_it)
{
    const pli_record *record = &file->records[1];
    pli_recorder_activity(recorder, PL_BACKWARD, 1);
    const int64_t begin = pli_recorder_wait_begins(recorder);
    pli_sleep_ns(2 * PLI_MS);
    pli_recorder_part_begins(recorder, 1);
    pli_sleep_ns(2 * PLI_MS);
    pli_recorder_part_ends(recorder, 1);
    pli_recorder_wait_ends(recorder, begin, 4);
    const int64_t all = pli_now_ns() - begin;
    CHECK(record->reducing_ns >= 2 * PLI_MS && record->waiting_ns >= 2 * PLI_MS);
    CHECK(record->reducing_ns + record->waiting_ns <= all);
    CHECK(record->awaited == 4);
    CHECK(record->buckets[0].end_ns - record->buckets[0].begin_ns ==
          record->reducing_ns);
    pli_recorder_wait_ends(recorder, begin, PLI_RECORDER_NOBODY);
    CHECK(record->awaited == 4);
}

RECORDER_TEST(more_buckets_than_have_room_are_counted)
{
    const pli_record *record = &file->records[1];
    pli_recorder_activity(recorder, PL_BACKWARD, 1);
    pli_recorder_plan(recorder, 1000, 1);
    for (unsigned b = 0; b < 1000; b++) {
        pli_recorder_ready(recorder, b, 1);
        pli_recorder_part_begins(recorder, b + 1);
        pli_recorder_part_ends(recorder, b + 1);
    }
    CHECK(record->n_buckets == 1000);
    CHECK(file->records[2].sequence == 0 && file->records[2].step == 0);
}

static void *write_steps(void *none)
{
    for (uint64_t step = 1; step <= N_STEPS; step++)
        take_step(recorder, step);
    return none;
}

/* The reader reads the records that are written next. */
RECORDER_TEST(no_reader_sees_half_a_step)
{
    copied found;
    pthread_t writer;
    if (!CHECK(pthread_create(&writer, NULL, write_steps, NULL) == 0))
        return;
    while (load(&file->step) < N_STEPS || load(&file->activity) != PL_IDLE) {
        for (int64_t ahead = 0; ahead < 3; ahead++) {
            const size_t at = (size_t)(load(&file->step) + ahead) % N_KEPT;
            if (!read_record(&file->records[at], &found))
                continue;
            if (!CHECK(found.n_buckets == found.step &&
                       found.bucket_bytes == 5 * found.step &&
                       found.begin <= found.backward && found.backward <= found.end))
                goto done;
        }
    }
done:
    (void)pthread_join(writer, NULL);
    CHECK(read_record(&file->records[N_STEPS % N_KEPT], &found));
    CHECK(found.step == N_STEPS);
}

RECORDER_TEST(a_forked_child_neither_writes_nor_shows_the_file)
{
    copied found;
    int status = -1;
    take_step(recorder, 1);
    const pid_t child = fork();
    if (child == 0) {
        take_step(recorder, 2);
        pli_recorder_awaits(recorder, 3);
        const int is_seen = pli_recorder_look(recorder, 1) != NULL;
        pli_recorder_hide(recorder);
        pli_recorder_destroy(recorder);
        _exit(is_seen || is_found() ? 1 : 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(is_found() && file->step == 1 && file->awaiting == PLI_RECORDER_NOBODY);
    CHECK(!read_record(&file->records[2], &found));
    take_step(recorder, 2);
    CHECK(read_record(pli_recorder_look(recorder, 2), &found) && found.step == 2);
}

RECORDER_TEST(a_child_of_a_fork_may_have_one_of_its_own)
{
    int status = -1;
    const pid_t child = fork();
    if (child == 0) {
        copied found;
        pli_recorder_hide(recorder);
        pli_recorder *own = create();
        const pli_recorder_file *owns = map();
        take_step(own, 1);
        const int is_good = own != NULL && read_record(&owns->records[1], &found);
        pli_recorder_destroy(own);
        pli_recorder_destroy(recorder);
        _exit(is_good && !is_found() ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* Killed in a step: who has the file open finds finished steps, and not this one. */
TEST(a_writer_that_is_killed_leaves_whole_steps)
{
    copied found;
    int status = 0;
    const pid_t child = fork();
    if (child == 0) {
        recorder = create();
        take_step(recorder, 1);
        pli_recorder_activity(recorder, PL_FORWARD, 2);
        (void)raise(SIGSTOP);
    }
    CHECK(waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status));
    file = map_of(child);
    CHECK(kill(child, SIGKILL) == 0);
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    if (!CHECK(file != NULL))
        return;
    CHECK(read_record(&file->records[1], &found) && found.step == 1);
    CHECK(!read_record(&file->records[2], &found));
    CHECK(file->activity == PL_FORWARD && file->step == 2);
    unmap();
}

RECORDER_TEST(nobody_can_change_the_size_of_the_file)
{
    const int fd = open_of(getpid(), O_RDWR);
    CHECK(fd >= 0 && fcntl(fd, F_GET_SEALS) == PLI_RECORDER_SEALS);
    CHECK(PLI_RECORDER_SEALS == (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW));
    CHECK(ftruncate(fd, 0) != 0 && errno == EPERM);
    CHECK(ftruncate(fd, 1 << 20) != 0 && errno == EPERM);
    CHECK(fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, 0, 1 << 16) == 0);
    take_step(recorder, 1); /* a hole is read as zeros and filled again */
    (void)close(fd);
    pli_recorder_hide(recorder);
    pli_recorder_hide(recorder);
    CHECK(!is_found());
    take_step(recorder, 2);
}

TEST(what_fails_leaves_no_file)
{
    char who[PLI_RECORDER_WHO_BYTES + 1];
    pli_recorder *none = NULL;
    memset(who, ' ', sizeof who - 1);
    who[sizeof who - 1] = '\0';
    CHECK(pli_recorder_create("steps", who, &none) == PL_EINVAL && !is_found());
    for (long n = 1; n <= 4; n++) {
        pli_fault_arm(PLI_FAULT_SYSCALL, n);
        CHECK(pli_recorder_create("steps", "{}", &none) != PL_OK);
        pli_fault_arm(PLI_FAULT_SYSCALL, 0);
        CHECK(none == NULL && !is_found());
    }
    pli_fault_arm(PLI_FAULT_ALLOC, 1);
    CHECK(pli_recorder_create("steps", "{}", &none) == PL_ENOMEM);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
    CHECK(none == NULL && !is_found());
}

TEST(without_a_recorder_nothing_is_recorded)
{
    take_step(NULL, 1);
    pli_recorder_part_begins(NULL, 1);
    pli_recorder_part_ends(NULL, 1);
    CHECK(pli_recorder_wait_begins(NULL) > 0);
    pli_recorder_wait_ends(NULL, 0, 0);
    pli_recorder_hide(NULL);
    pli_recorder_destroy(NULL);
}
