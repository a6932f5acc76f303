/* test_shared_memory.c - mappings of all kinds: who sees what is written, and what is
 * left. */
#include "ipc/shared_memory.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "core/alloc.h"
#include "leaks.h"

enum {
    ALARM_S = 120,
    PAGE = 4096,
    N_PAGES = 4,
    N_BYTES = N_PAGES * PAGE,
    N_FORKS = 50
};

/* In a forked process: runs `body`, and tells whether it returned non-zero. */
static int holds_in_child(int (*body)(pli_shared_memory *), pli_shared_memory *memory)
{
    int how = 0;
    (void)fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        (void)alarm(ALARM_S);
        _Exit(body(memory) ? 0 : 1);
    }
    (void)waitpid(pid, &how, 0);
    return WIFEXITED(how) && WEXITSTATUS(how) == 0;
}

static pli_shared_memory *make(void)
{
    pli_shared_memory *memory = NULL;
    if (!CHECK_OK(pli_shared_memory_create(PLI_MEMORY_FIXED, N_BYTES, &memory)))
        return NULL;
    CHECK(memory->n_bytes >= N_BYTES);
    for (int i = 0; i < N_PAGES; i++)
        memory->base[i * PAGE] = (char)('a' + i);
    return memory;
}

static int has(const pli_shared_memory *memory, const char *pages)
{
    for (int i = 0; i < N_PAGES; i++)
        if (memory->base[i * PAGE] != pages[i])
            return 0;
    return 1;
}

/* ---- users ---------------------------------------------------------------------- */

static void a_mapping_lives_until_its_last_user_leaves(void)
{
    pli_shared_memory *memory = make();
    if (memory == NULL)
        return;
    pli_shared_memory_retain(memory);
    pli_shared_memory_release(memory);
    CHECK(has(memory, "abcd"));
    pli_shared_memory_release(memory);
    pli_shared_memory_release(NULL);
    CHECK(n_shared_mappings() == 0);
    CHECK(pli_shared_memory_create(PLI_MEMORY_FIXED, PTRDIFF_MAX, &memory) ==
          PL_ENOMEM);
}

static void an_address_leads_to_its_mapping(void)
{
    pli_shared_memory *first = make(), *second = make();
    const int local = 0;
    if (first == NULL || second == NULL)
        return;
    pli_shared_memory *found = pli_shared_memory_find(second->base + N_BYTES - 1);
    CHECK(found == second);
    pli_shared_memory_release(second); /* what was found is held */
    CHECK(has(found, "abcd"));
    CHECK(pli_shared_memory_find(first->base + first->n_bytes) != first);
    CHECK(pli_shared_memory_find(&local) == NULL);
    const char *gone = second->base;
    pli_shared_memory_release(found);
    CHECK(pli_shared_memory_find(gone) == NULL);
    pli_shared_memory_release(first);
}

/* ---- forks ---------------------------------------------------------------------- */

static int write_one(pli_shared_memory *memory)
{
    memory->base[PAGE] = 'x';
    return memory->kind == PLI_MEMORY_COPIED && memory->base[PAGE] == 'x' &&
           memory->base[2 * PAGE] == 'c';
}

static void what_a_forked_child_writes_is_its_own(void)
{
    pli_shared_memory *memory = make();
    if (memory == NULL)
        return;
    CHECK(holds_in_child(write_one, memory));
    CHECK(memory->kind == PLI_MEMORY_FIXED && has(memory, "abcd"));
    pli_shared_memory_release(memory);
}

static int write_in_a_grandchild(pli_shared_memory *memory)
{
    memory->base[0] = 'y';
    return holds_in_child(write_one, memory) && has(memory, "ybcd");
}

static void a_child_of_a_child_has_its_own_too(void)
{
    pli_shared_memory *memory = make();
    if (memory == NULL)
        return;
    CHECK(holds_in_child(write_in_a_grandchild, memory));
    CHECK(has(memory, "abcd"));
    pli_shared_memory_release(memory);
}

static int share_anew(pli_shared_memory *memory)
{
    pli_shared_memory *other = NULL;
    memory->base[0] = 'x';
    if (pli_shared_memory_share(memory) != PL_OK || memory->kind != PLI_MEMORY_FIXED ||
        pli_shared_memory_adopt(PLI_MEMORY_FIXED, memory->fd, &other) != PL_OK)
        return 0;
    other->base[PAGE] = 'y';
    const int is_right = has(memory, "xycd");
    pli_shared_memory_release(other);
    pli_shared_memory_release(memory);
    return is_right && n_shared_mappings() == 0;
}

static void a_forked_child_may_share_what_it_has_with_others(void)
{
    pli_shared_memory *memory = make();
    if (memory == NULL)
        return;
    CHECK(holds_in_child(share_anew, memory));
    CHECK(has(memory, "abcd"));
    pli_shared_memory_release(memory);
}

static void *come_and_go(void *argument)
{
    const atomic_int *is_over = argument;
    while (!atomic_load(is_over)) {
        pli_shared_memory *memory = make();
        if (memory == NULL || !CHECK_OK(pli_shared_memory_share(memory)) ||
            !CHECK_OK(pli_shared_memory_unshare(memory)) ||
            !CHECK_OK(pli_shared_memory_share(memory)))
            break;
        pli_shared_memory_release(memory);
    }
    return NULL;
}

static int make_one_more(pli_shared_memory *memory)
{
    pli_shared_memory *other = make();
    pli_shared_memory_release(other);
    return other != NULL && write_one(memory);
}

static void a_fork_may_come_at_any_moment(void)
{
    pthread_t thread;
    atomic_int is_over = 0;
    pli_shared_memory *memory = make();
    if (memory == NULL ||
        !CHECK(pthread_create(&thread, NULL, come_and_go, &is_over) == 0))
        return;
    for (int i = 0; i < N_FORKS; i++)
        CHECK(holds_in_child(make_one_more, memory));
    atomic_store(&is_over, 1);
    (void)pthread_join(thread, NULL);
    pli_shared_memory_release(memory);
    CHECK(n_shared_mappings() == 0);
}

/* ---- shared, and not ------------------------------------------------------------ */

static void what_is_shared_no_longer_is_ordinary_memory_at_its_address(void)
{
    const int n_before = n_open_descriptors();
    pli_shared_memory *memory = make();
    if (memory == NULL || !CHECK_OK(pli_shared_memory_share(memory)))
        return;
    const char *base = memory->base;
    CHECK_OK(pli_shared_memory_unshare(memory));
    CHECK(memory->base == base && has(memory, "abcd"));
    CHECK(memory->kind == PLI_MEMORY_OWN && memory->fd == -1);
    CHECK(n_shared_mappings() == 0 && n_open_descriptors() == n_before);
    memory->base[0] = 'x';
    pli_shared_memory *again = pli_shared_memory_find(base);
    CHECK(again == memory);
    CHECK_OK(pli_shared_memory_share(again));
    CHECK(again->base == base && has(memory, "xbcd") && n_shared_mappings() == 1);
    pli_shared_memory_release(again);
    pli_shared_memory_release(memory);
    CHECK(n_shared_mappings() == 0 && n_open_descriptors() == n_before);
}

static void a_mapping_is_shared_as_long_as_somebody_shares_it(void)
{
    pli_shared_memory *memory = make();
    if (memory == NULL || !CHECK_OK(pli_shared_memory_share(memory)) ||
        !CHECK_OK(pli_shared_memory_share(memory)) ||
        !CHECK_OK(pli_shared_memory_share(memory)))
        return;
    CHECK_OK(pli_shared_memory_unshare(memory));
    pli_shared_memory_share_ends(memory);
    CHECK(memory->kind == PLI_MEMORY_FIXED);
    CHECK_OK(pli_shared_memory_unshare(memory));
    CHECK(memory->kind == PLI_MEMORY_OWN);
    pli_shared_memory_release(memory);
}

static void sharing_that_fails_leaves_the_mapping_as_it_was(void)
{
    pli_shared_memory *memory = make();
    if (memory == NULL || !CHECK_OK(pli_shared_memory_share(memory)))
        return;
    for (long n = 1;; n++) {
        pli_fault_arm(PLI_FAULT_SYSCALL, n);
        const pl_status st = pli_shared_memory_unshare(memory);
        pli_fault_arm(PLI_FAULT_SYSCALL, 0);
        if (st == PL_OK)
            break;
        CHECK(memory->kind == PLI_MEMORY_FIXED && has(memory, "abcd"));
        if (!CHECK_OK(pli_shared_memory_share(memory)) || !CHECK(n < 10))
            break;
    }
    const int n_descriptors = n_open_descriptors();
    for (long n = 1;; n++) {
        pli_fault_arm(PLI_FAULT_SYSCALL, n);
        const pl_status st = pli_shared_memory_share(memory);
        pli_fault_arm(PLI_FAULT_SYSCALL, 0);
        if (st == PL_OK)
            break;
        CHECK(memory->kind == PLI_MEMORY_OWN && has(memory, "abcd"));
        CHECK(n_open_descriptors() == n_descriptors && n_shared_mappings() == 0);
        if (!CHECK(n < 20))
            break;
    }
    CHECK(memory->kind == PLI_MEMORY_FIXED && has(memory, "abcd"));
    pli_shared_memory_release(memory);
}

/* ---- copied on writing ---------------------------------------------------------- */

static void what_is_written_into_a_copied_mapping_can_be_dropped(void)
{
    pli_shared_memory *memory = make(), *copied = NULL;
    if (memory == NULL ||
        !CHECK_OK(pli_shared_memory_adopt(PLI_MEMORY_COPIED, memory->fd, &copied)))
        return;
    copied->base[0] = 'x';
    copied->base[3 * PAGE] = 'y';
    memory->base[PAGE] = 'z';
    CHECK(has(copied, "xzcy") && has(memory, "azcd"));
    pli_shared_memory_reload(copied);
    CHECK(has(copied, "azcd") && has(memory, "azcd"));
    pli_shared_memory_release(copied);
    pli_shared_memory_release(memory);
}

int main(void)
{
    (void)alarm(ALARM_S);
    RUN(a_mapping_lives_until_its_last_user_leaves);
    RUN(an_address_leads_to_its_mapping);
    RUN(what_a_forked_child_writes_is_its_own);
    RUN(a_child_of_a_child_has_its_own_too);
    RUN(a_forked_child_may_share_what_it_has_with_others);
    RUN(a_fork_may_come_at_any_moment);
    RUN(what_is_shared_no_longer_is_ordinary_memory_at_its_address);
    RUN(a_mapping_is_shared_as_long_as_somebody_shares_it);
    RUN(sharing_that_fails_leaves_the_mapping_as_it_was);
    RUN(what_is_written_into_a_copied_mapping_can_be_dropped);
    return check_report();
}
