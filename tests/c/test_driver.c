/* test_driver.c - libcuda is found, gives the right functions, and is refused in
 * words. */
#include "fake/fake.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/driver.h"
#include "check.h"
#include "core/alloc.h"
#include "core/config.h"

/* The path of a library beside the fake; `detour` makes it a path that was not opened
 * before. */
static const char *beside_the_fake(const char *detour, const char *name)
{
    static char path[4096];
    const char *const fake = fake_path();
    const char *const slash = strrchr(fake, '/');
    const int n_folder = slash != NULL ? (int)(slash - fake) : 0;
    (void)snprintf(path, sizeof path, "%.*s/%s%s", n_folder, fake, detour,
                   name != NULL ? name : slash + 1);
    return path;
}

TEST(a_driver_is_opened_once_a_process_and_path)
{
    const pli_driver *first = NULL, *second = NULL, *other = NULL;
    fake_reset(NULL);
    if (!CHECK_OK(pli_driver_open(fake_path(), &first)))
        return;
    const int n_asked = fake_count("cuGetProcAddress");
    CHECK_OK(pli_driver_open(fake_path(), &second));
    CHECK(first == second);
    CHECK(fake_count("cuGetProcAddress") == n_asked);
    CHECK(first->version == fake_defaults().driver);
    CHECK_OK(pli_driver_open(beside_the_fake("./", NULL), &other));
    CHECK(other != NULL && other != first);
    CHECK(fake_errors() == 0);
}

TEST(the_environment_names_the_driver_where_nobody_else_does)
{
    const pli_driver *named = NULL, *found = NULL;
    fake_reset(NULL);
    CHECK_OK(pli_driver_open(fake_path(), &named));
    (void)setenv("PACELINE_LIBCUDA", fake_path(), 1);
    CHECK(pli_config_word("PACELINE_LIBCUDA") != NULL);
    CHECK_OK(pli_driver_open(NULL, &found));
    CHECK(found == named);
    (void)setenv("PACELINE_LIBCUDA", "", 1);
    CHECK(pli_config_word("PACELINE_LIBCUDA") == NULL);
    (void)unsetenv("PACELINE_LIBCUDA");
    CHECK(pli_config_word("PACELINE_LIBCUDA") == NULL);
}

TEST(where_there_is_no_driver_words_say_what_to_do)
{
    const pli_driver *driver = NULL;
    CHECK_FAILS(pli_driver_open("/nowhere/libcuda.so.1", &driver), PL_EUNSUPPORTED,
                "no CUDA driver", "/nowhere/libcuda.so.1", "--gpus all",
                "PACELINE_LIBCUDA");
    CHECK_FAILS(pli_driver_open("libm.so.6", &driver), PL_EUNSUPPORTED,
                "libm.so.6 is no CUDA driver");
    CHECK(driver == NULL);
}

TEST(a_driver_that_lacks_a_function_is_too_old)
{
    const pli_driver *driver = NULL;
    fake_options options = fake_defaults();
    options.driver = 10010;
    fake_reset(&options);
    fake_hide("cuStreamIsCapturing");
    const char *const path = beside_the_fake("././", NULL);
    CHECK_FAILS(pli_driver_open(path, &driver), PL_EUNSUPPORTED, "too old", "CUDA 10.1",
                "cuStreamIsCapturing");
    CHECK(driver == NULL);
    fake_reset(NULL); /* a newer driver was installed */
    CHECK_OK(pli_driver_open(path, &driver));
}

TEST(a_driver_that_does_not_start_says_why)
{
    const pli_driver *driver = NULL;
    fake_reset(NULL);
    fake_fail("cuInit", 1, CUDA_ERROR_NO_DEVICE);
    CHECK_FAILS(pli_driver_open(fake_path(), &driver), PL_EUNSUPPORTED,
                "sees no device");
    fake_fail("cuInit", 1, CUDA_ERROR_UNKNOWN);
    CHECK_FAILS(pli_driver_open(fake_path(), &driver), PL_EUNSUPPORTED,
                "CUDA error 999");
    CHECK(driver == NULL);
    CHECK_OK(pli_driver_open(fake_path(), &driver));
}

/* A name of CUDA means its newest form; for these that is name_v2. */
static int has_two_forms(const char *name)
{
    static const char *const names[] = {"cuDevicePrimaryCtxRelease",
                                        "cuCtxPushCurrent",
                                        "cuCtxPopCurrent",
                                        "cuStreamDestroy",
                                        "cuEventDestroy",
                                        "cuMemAlloc",
                                        "cuMemFree",
                                        "cuMemGetInfo",
                                        "cuMemcpyHtoDAsync",
                                        "cuMemcpyDtoHAsync",
                                        "cuMemcpyDtoDAsync"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(names[i], name) == 0)
            return 1;
    return 0;
}

static void check_form(void *library, const char *name, const void *field)
{
    char symbol[96];
    void *bound = NULL;
    memcpy(&bound, field, sizeof bound);
    (void)snprintf(symbol, sizeof symbol, "%s%s", name,
                   has_two_forms(name) ? "_v2" : "");
    if (!CHECK(bound != NULL && bound == dlsym(library, symbol)))
        CHECK_MORE("%s is not %s", name, symbol);
}

TEST(of_each_function_the_form_is_taken_that_our_prototype_means)
{
    /* with the first form of cuGetProcAddress, and without any */
    const char *const names[] = {"libplold_asked.so", "libplold_plain.so"};
    for (size_t i = 0; i < 2; i++) {
        const pli_driver *driver = NULL;
        fake_reset(NULL);
        const char *const path = beside_the_fake("", names[i]);
        if (!CHECK_OK(pli_driver_open(path, &driver)))
            continue;
        void *const library = dlopen(path, RTLD_NOW);
        if (!CHECK(library != NULL))
            continue;
#define CHECK_FORM(name, version, arguments)                                           \
    check_form(library, #name, (const char *)driver + offsetof(pli_driver, name));
        PLI_DRIVER_MAP(CHECK_FORM)
#undef CHECK_FORM
        (void)dlclose(library);
    }
}

TEST(results_become_codes_of_ours_with_the_drivers_text)
{
    const pli_driver *driver = NULL;
    fake_reset(NULL);
    if (!CHECK_OK(pli_driver_open(fake_path(), &driver)))
        return;
    CHECK_OK(pli_driver_check(driver, 0, "anything"));
    CHECK_FAILS(pli_driver_check(driver, CUDA_ERROR_OUT_OF_MEMORY, "taking"), PL_ENOMEM,
                "taking: ", "(CUDA error 2)");
    CHECK_FAILS(pli_driver_check(driver, CUDA_ERROR_ILLEGAL_ADDRESS, "doing"), PL_ESYS,
                "doing: ", "(CUDA error 700)");
    fake_fail("cuGetErrorString", 1, CUDA_ERROR_INVALID_VALUE);
    CHECK_FAILS(pli_driver_check(driver, 12345, "doing"), PL_ESYS, "no text",
                "(CUDA error 12345)");
}

TEST(no_memory_for_the_table_is_an_error_and_no_leak)
{
    const pli_driver *driver = NULL;
    fake_reset(NULL);
    pli_fault_arm(PLI_FAULT_ALLOC, 1);
    const char *const path = beside_the_fake("./././", NULL);
    CHECK(pli_driver_open(path, &driver) == PL_ENOMEM);
    pli_fault_arm(PLI_FAULT_ALLOC, 0);
    CHECK(driver == NULL);
    CHECK_OK(pli_driver_open(path, &driver));
}

TEST(a_forked_child_is_told_to_start_otherwise)
{
    const pli_driver *driver = NULL;
    fake_reset(NULL);
    if (!CHECK_OK(pli_driver_open(fake_path(), &driver)))
        return;
    const pid_t pid = fork();
    if (pid == 0) {
        const pli_driver *again = NULL;
        /* opened by the parent, and by other code in it: torch */
        const char *const paths[] = {fake_path(), beside_the_fake(".///", NULL)};
        int is_told = 1;
        for (int i = 0; i < 2; i++)
            is_told &= pli_driver_open(paths[i], &again) == PL_ESTATE &&
                       strstr(pl_error_message(), "spawn") != NULL;
        _exit(is_told && again == NULL ? 0 : 1);
    }
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
}
