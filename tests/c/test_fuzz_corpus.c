/* test_fuzz_corpus.c - the inputs that `make fuzz-bytes` has kept, through its targets:
 * each ends without a crash, a leak or a descriptor left open.
 *
 * A child reads them, and leaves the name of the one that it is at where its parent
 * says it when the child has failed.
 */
#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define LLVMFuzzerTestOneInput fuzz_segment
#include "tests/fuzz/fuzz_segment.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_handshake
#include "tests/fuzz/fuzz_handshake.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_hosts
#include "tests/fuzz/fuzz_hosts.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_rows
#include "tests/fuzz/fuzz_rows.c"

enum { CORPUS_MOST_BYTES = 1 << 13, CORPUS_PATH_BYTES = 512, CORPUS_ALARM_S = 120 };

typedef int (*corpus_target)(const uint8_t *data, size_t n);

static int corpus_n_files;
static char *corpus_path; /* of the input that is read; shared with the parent */

static void run_file(corpus_target target)
{
    static uint8_t data[CORPUS_MOST_BYTES];
    const int n_failed = check_n_failed;
    FILE *file = fopen(corpus_path, "rb");
    if (!CHECK(file != NULL))
        return;
    const size_t n = fread(data, 1, sizeof data, file);
    (void)fclose(file);
    CHECK(target(data, n) == 0);
    if (check_n_failed > n_failed)
        (void)fprintf(stderr, "by %s\n", corpus_path);
}

static void run_corpus(const char *name, corpus_target target)
{
    (void)snprintf(corpus_path, CORPUS_PATH_BYTES, "tests/fuzz/corpus/%s", name);
    DIR *folder = opendir(corpus_path);
    int n_files = 0;
    if (!CHECK(folder != NULL))
        return;
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        if (entry->d_name[0] == '.')
            continue;
        (void)snprintf(corpus_path, CORPUS_PATH_BYTES, "tests/fuzz/corpus/%s/%s", name,
                       entry->d_name);
        run_file(target);
        n_files++;
    }
    (void)closedir(folder);
    CHECK(n_files > 0);
    corpus_n_files += n_files;
}

static void a_segment_of_another_rank_breaks_none(void)
{
    run_corpus("segment", fuzz_segment);
}

static void strangers_break_no_handshake(void)
{
    run_corpus("handshake", fuzz_handshake);
}

static void what_other_hosts_send_breaks_no_leader(void)
{
    run_corpus("hosts", fuzz_hosts);
}

static void rows_of_another_rank_break_no_exchange(void)
{
    run_corpus("rows", fuzz_rows);
}

static int run_all(void)
{
    (void)alarm(CORPUS_ALARM_S);
    RUN(a_segment_of_another_rank_breaks_none);
    RUN(strangers_break_no_handshake);
    RUN(what_other_hosts_send_breaks_no_leader);
    RUN(rows_of_another_rank_break_no_exchange);
    (void)printf("%d inputs read\n", corpus_n_files);
    return check_report();
}

int main(void)
{
    void *shared = mmap(NULL, CORPUS_PATH_BYTES, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    corpus_path = shared;
    const pid_t child = fork();
    if (child == 0)
        return run_all();
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child)
        return 1;
    if (status != 0)
        (void)fprintf(stderr, "ended with wait status %#x; the last input was %s\n",
                      (unsigned)status, corpus_path);
    return status != 0;
}
