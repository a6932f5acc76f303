/* test_window.c - second mappings of a rank's own arena: what they show, what they
 * keep, and when they go.
 *
 * One process is the whole world: a rank needs no peer to map its own memory.
 */
#include <pthread.h>
#include <string.h>

#include "check.h"
#include "comm/shm_init.h"
#include "comm/window.h"
#include "core/alloc.h"
#include "leaks.h"
#include "ranks.h"

enum { N_SLOTS = 4, AT = 65536, N_BYTES = 20000 }; /* not a whole number of pages */

static int create_world(pl_comm **out)
{
    static const int nobody[1] = {0};
    char address[PLI_ADDRESS_BYTES];
    pli_listener *listener = NULL;
    const pli_shm_options options = {.world_size = 1,
                                     .arena_bytes = 200000,
                                     .n_ops = 1,
                                     .deadline_ns = RANKS_DEADLINE_NS,
                                     .pids = nobody};
    if (!CHECK_OK(pli_listener_create(address, &listener)))
        return 0;
    const int is_made = CHECK_OK(pli_shm_create(&options, listener, NULL, out));
    pli_listener_destroy(listener);
    return is_made;
}

/* A world, the part of its arena that a window shows, and the window, which the test
 * releases. */
typedef struct scene {
    pl_comm *comm;
    char *arena;
    pli_window *window;
} scene;

static int scene_open(scene *out)
{
    *out = (scene){0};
    if (!create_world(&out->comm))
        return 0;
    out->arena = out->comm->arena + AT;
    return CHECK_OK(pli_window_create(out->comm, AT, N_BYTES, N_SLOTS, &out->window));
}

#define WINDOW_TEST(name)                                                              \
    TEST_BY(name, scene *it, {                                                         \
        scene its;                                                                     \
        if (scene_open(&its))                                                          \
            name##_by(&its);                                                           \
        pl_comm_destroy(its.comm);                                                     \
        CHECK(n_lone_mappings() == 0);                                                 \
    })

WINDOW_TEST(a_window_shows_the_arena_and_writes_to_it)
{
    pli_window *const window = it->window;
    CHECK(window->base != it->arena);
    memset(it->arena, 1, N_BYTES);
    CHECK(window->base[0] == 1 && window->base[N_BYTES - 1] == 1);
    window->base[N_BYTES - 1] = 2;
    CHECK(it->arena[N_BYTES - 1] == 2);
    pli_window_release(window);
}

WINDOW_TEST(views_are_counted_by_slot)
{
    pli_window *const window = it->window;
    CHECK(pli_window_n_views(window) == 0);
    pli_window_see(window, 0);
    pli_window_see(window, 3);
    pli_window_see(window, 3);
    CHECK(pli_window_n_views(window) == 3);
    CHECK(atomic_load(&window->n_views[0]) == 1);
    CHECK(atomic_load(&window->n_views[1]) == 0);
    CHECK(atomic_load(&window->n_views[3]) == 2);
    pli_window_unsee(window, 3);
    CHECK(atomic_load(&window->n_views[3]) == 1);
    pli_window_unsee(window, 3);
    pli_window_unsee(window, 0);
    CHECK(pli_window_n_views(window) == 0);
    pli_window_release(window);
}

WINDOW_TEST(a_retired_window_keeps_its_values_at_its_address)
{
    pli_window *const old = it->window;
    pli_window *new = NULL;
    char *arena = it->arena;
    const char *base = old->base;
    const int n_mappings = n_lone_mappings();
    memset(arena, 5, N_BYTES);
    pli_window_see(old, 1);
    CHECK_OK(pli_window_retire(old));
    CHECK(old->base == base);
    CHECK(n_lone_mappings() == n_mappings - 1);
    if (!CHECK_OK(pli_window_create(it->comm, AT, N_BYTES, N_SLOTS, &new)))
        return;
    memset(arena, 6, N_BYTES);
    CHECK(base[0] == 5 && base[N_BYTES - 1] == 5);
    CHECK(new->base[0] == 6 && new->base[N_BYTES - 1] == 6);
    old->base[0] = 7; /* the user may write to a kept gradient */
    CHECK(arena[0] == 6);
    CHECK_OK(pli_window_retire(old)); /* a second time has no effect */
    CHECK(base[0] == 7 && base[1] == 5);
    pli_window_release(old);
    CHECK(base[1] == 5); /* the view holds it still */
    pli_window_unsee(old, 1);
    pli_window_release(new);
}

WINDOW_TEST(a_window_that_nobody_sees_is_not_copied)
{
    pli_window *const window = it->window;
    const int n_mappings = n_lone_mappings();
    CHECK_OK(pli_window_retire(window));
    CHECK(n_lone_mappings() == n_mappings);
    pli_window_release(window);
    CHECK(n_lone_mappings() == n_mappings - 1);
}

TEST(a_window_lives_as_long_as_its_last_view_even_without_its_world)
{
    scene it;
    const int n_descriptors = n_open_descriptors();
    if (!scene_open(&it))
        return;
    memset(it.arena, 9, N_BYTES);
    pli_window *const window = it.window;
    const char *base = window->base;
    pli_window_see(window, 0);
    pli_window_see(window, 2);
    pli_window_release(window);
    pl_comm_destroy(it.comm);
    CHECK(n_open_descriptors() == n_descriptors);
    CHECK(n_lone_mappings() == 1);
    CHECK(base[0] == 9 && base[N_BYTES - 1] == 9);
    pli_window_unsee(window, 0);
    CHECK(n_lone_mappings() == 1);
    pli_window_unsee(window, 2);
    CHECK(n_lone_mappings() == 0);
    pli_window_release(NULL);
}

TEST(a_window_beyond_what_there_is_is_refused)
{
    pl_comm *comm = NULL;
    pli_window *window = NULL;
    if (!create_world(&comm))
        return;
    const int n_mappings = n_lone_mappings();
    CHECK(pli_window_create(comm, 1, N_BYTES, N_SLOTS, &window) == PL_ESYS);
    CHECK_FAILS(pli_window_create(comm, AT, 0, N_SLOTS, &window), PL_ESYS,
                "cannot map");
    CHECK(window == NULL);
    CHECK(n_lone_mappings() == n_mappings);
    pl_comm_destroy(comm);
}

static long n_virtual_pages(void)
{
    long n_pages = -1;
    FILE *sizes = fopen("/proc/self/statm", "re");
    if (sizes == NULL || fscanf(sizes, "%ld", &n_pages) != 1)
        n_pages = -1;
    if (sizes != NULL)
        (void)fclose(sizes);
    return n_pages;
}

WINDOW_TEST(a_window_that_cannot_be_retired_keeps_no_copy_and_shows_the_arena)
{
    pli_window *const window = it->window;
    pli_window_see(window, 0);
    const long n_pages = n_virtual_pages();
    for (int round = 0; round < 1000; round++) {
        pli_fault_arm(PLI_FAULT_SYSCALL, 2); /* the copy is made, but not moved */
        CHECK(pli_window_retire(window) == PL_ENOMEM);
        pli_fault_arm(PLI_FAULT_SYSCALL, 0);
    }
    CHECK(n_virtual_pages() - n_pages < 1000);
    *it->arena = 3;
    CHECK(window->base[0] == 3);
    pli_window_unsee(window, 0);
    pli_window_release(window);
}

static void *see_and_unsee(void *memory)
{
    pli_window *window = memory;
    for (int round = 0; round < 2000; round++) {
        pli_window_see(window, (size_t)round % N_SLOTS);
        pli_window_unsee(window, (size_t)round % N_SLOTS);
    }
    pli_window_unsee(window, 0); /* the view that it received */
    return NULL;
}

WINDOW_TEST(views_come_and_go_on_any_thread)
{
    pli_window *const window = it->window;
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        pli_window_see(window, 0);
        if (pthread_create(&threads[i], NULL, see_and_unsee, window) != 0)
            exit(2);
    }
    CHECK_OK(pli_window_retire(window));
    pli_window_release(window); /* the last thread frees it */
    for (int i = 0; i < 3; i++)
        (void)pthread_join(threads[i], NULL);
}
