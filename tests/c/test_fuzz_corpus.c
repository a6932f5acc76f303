/* test_fuzz_corpus.c - the inputs that `make fuzz-bytes` has kept, through its targets:
 * each ends without a crash, a leak or a descriptor left open.
 */
#include <dirent.h>
#include <signal.h>

#include "check.h"

#define LLVMFuzzerTestOneInput fuzz_message
#include "tests/fuzz/fuzz_message.c"
#undef LLVMFuzzerTestOneInput
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

enum { CORPUS_MOST_BYTES = 1 << 13, CORPUS_ALARM_S = 120 };

typedef int (*corpus_target)(const uint8_t *data, size_t n);

static void run_file(const char *path, corpus_target target)
{
    static uint8_t data[CORPUS_MOST_BYTES];
    FILE *file = fopen(path, "rb");
    if (!CHECK(file != NULL))
        return;
    const size_t n = fread(data, 1, sizeof data, file);
    (void)fclose(file);
    (void)fprintf(stderr, "%s\n", path); /* a crash says no more */
    CHECK(target(data, n) == 0);
}

static void run_corpus(const char *name, corpus_target target)
{
    char path[512];
    (void)snprintf(path, sizeof path, "tests/fuzz/corpus/%s", name);
    DIR *folder = opendir(path);
    int n_files = 0;
    if (!CHECK(folder != NULL))
        return;
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        if (entry->d_name[0] == '.')
            continue;
        (void)snprintf(path, sizeof path, "tests/fuzz/corpus/%s/%s", name,
                       entry->d_name);
        run_file(path, target);
        n_files++;
    }
    (void)closedir(folder);
    CHECK(n_files > 0);
}

static void messages_of_a_caller_break_no_worker(void)
{
    run_corpus("message", fuzz_message);
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

int main(void)
{
    (void)alarm(CORPUS_ALARM_S);
    RUN(messages_of_a_caller_break_no_worker);
    RUN(a_segment_of_another_rank_breaks_none);
    RUN(strangers_break_no_handshake);
    RUN(what_other_hosts_send_breaks_no_leader);
    RUN(rows_of_another_rank_break_no_exchange);
    return check_report();
}
