/* test_fuzz_corpus.c - runs the inputs kept by `make fuzz-bytes` through its targets:
 * each ends without a crash, a leak or an open descriptor.
 *
 * A child reads them, and keeps the name of the current one where the parent can print
 * it if the child fails.
 */
#define CHECK_OWN_MAIN
#include <dirent.h>
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
static char *corpus_path; /* of the current input; shared with the parent */

static void run_file(corpus_target target)
{
    static uint8_t data[CORPUS_MOST_BYTES];
    FILE *file = fopen(corpus_path, "rb");
    if (!CHECK(file != NULL))
        return;
    const size_t n = fread(data, 1, sizeof data, file);
    (void)fclose(file);
    if (!CHECK(target(data, n) == 0))
        CHECK_MORE("by %s", corpus_path);
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

TEST(a_segment_of_another_rank_breaks_none)
{
    run_corpus("segment", fuzz_segment);
}

TEST(strangers_break_no_handshake)
{
    run_corpus("handshake", fuzz_handshake);
}

TEST(what_other_hosts_send_breaks_no_leader)
{
    run_corpus("hosts", fuzz_hosts);
}

TEST(rows_of_another_rank_break_no_exchange)
{
    run_corpus("rows", fuzz_rows);
}

static int run_all(void)
{
    (void)alarm(CORPUS_ALARM_S);
    (void)printf("%d inputs read\n", corpus_n_files);
    return check_run_tests();
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
