/* test_kernels_load.c - where kernels are loaded from, and how launches are cut. */
#define CHECK_OWN_MAIN
#include <dirent.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "core/alloc.h"
#include "fake/fake.h"
#include "fake/fake_nvrtc.h"
#include "kernel_driver.h"

enum { MISFIT = 222, COMPILATION = 6 };

static char cache[] = "/tmp/test_kernels_load.XXXXXX"; /* these tests' cache */

/* Finds the cache's only file, or one of several; returns their number. */
static int find_cached(char out[PATH_MAX])
{
    char folder[PATH_MAX / 2];
    int n = 0;
    (void)snprintf(folder, sizeof folder, "%s/caches/paceline", cache);
    DIR *listing = opendir(folder);
    for (struct dirent *it; listing != NULL && (it = readdir(listing)) != NULL;) {
        if (it->d_name[0] == '.')
            continue;
        (void)snprintf(out, PATH_MAX, "%s/%s", folder, it->d_name);
        n++;
    }
    if (listing != NULL)
        (void)closedir(listing);
    return n;
}

static void forget_cached(void)
{
    char path[PATH_MAX];
    while (find_cached(path) > 0 && CHECK(unlink(path) == 0))
        continue;
}

static void start_over(void)
{
    forget_cached();
    memset(&driver_said, 0, sizeof driver_said);
    fake_nvrtc_reset(120);
}

/* Loads for a device of `compute`; NULL on failure. */
static pli_kernels *load(int compute, pl_status expected)
{
    pli_kernels *kernels = NULL;
    const pl_status st =
        pli_kernels_load(&kernel_driver, compute, fake_path(), &kernels);
    if (!CHECK(st == expected))
        CHECK_MORE("%s: %s", pl_status_text(st), pl_error_message());
    CHECK((kernels != NULL) == (st == PL_OK));
    return kernels;
}

static void unload(pli_kernels *kernels)
{
    pli_kernels_unload(kernels);
    CHECK(driver_said.n_live_modules == 0);
    CHECK(fake_nvrtc_live() == 0);
}

/* ---- loading -------------------------------------------------------------------- */

TEST(the_fatbin_is_taken_where_the_driver_takes_it)
{
    start_over();
    pli_kernels *kernels = load(90, PL_OK);
    if (kernels != NULL)
        CHECK(strcmp(pli_kernels_origin(kernels), "fatbin") == 0);
    CHECK(driver_said.n_loads == 1);
    unload(kernels);
}

TEST(an_old_driver_has_the_kernels_compiled_for_its_device)
{
    static const int misfits[] = {200, 209, 218, 221, 222, 223, 300, 801};
    for (size_t i = 0; i < sizeof misfits / sizeof misfits[0]; i++) {
        start_over();
        driver_said.load_results[0] = misfits[i];
        pli_kernels *kernels = load(86, PL_OK);
        if (kernels != NULL)
            CHECK(strcmp(pli_kernels_origin(kernels), "nvrtc") == 0);
        CHECK(strcmp(driver_said.image, "fake cubin for --gpu-architecture=sm_86") ==
              0);
        unload(kernels);
    }
}

TEST(a_driver_of_small_parameters_is_given_no_kernels_of_large_ones)
{
    pli_driver driver = kernel_driver;
    pli_kernels *kernels = NULL;
    driver.version = 12000;
    start_over();
    driver_said.load_results[0] = MISFIT;
    CHECK_OK(pli_kernels_load(&driver, 86, fake_path(), &kernels));
    unload(kernels);
    CHECK(strcmp(driver_said.image,
                 "fake cubin for --gpu-architecture=sm_86, small parameters") == 0);
}

TEST(an_old_compiler_makes_ptx_for_the_newest_device_it_knows)
{
    start_over();
    fake_nvrtc_reset(90);
    driver_said.load_results[0] = MISFIT;
    unload(load(120, PL_OK));
    CHECK(strcmp(driver_said.image, "fake PTX for --gpu-architecture=compute_90") == 0);
}

TEST(a_failure_that_is_no_misfit_is_told_as_it_is)
{
    start_over();
    driver_said.load_results[0] = PLI_CU_OUT_OF_MEMORY;
    unload(load(90, PL_ENOMEM));
    CHECK(driver_said.n_loads == 1);
    driver_said.n_loads = 0;
    driver_said.load_results[0] = MISFIT;
    driver_said.load_results[1] = 700;
    unload(load(90, PL_ESYS));
    CHECK_SAYS("loading the kernels that NVRTC compiled");
    CHECK(driver_said.n_loads == 2);
}

/* If no way works, the error always gives the same advice. */
TEST(without_any_kernels_one_error_says_what_to_do)
{
    static const char *const failing[] = {"nvrtcCreateProgram", "nvrtcCompileProgram",
                                          "nvrtcGetCUBINSize", "nvrtcGetCUBIN",
                                          "none, but the driver"};
    for (size_t i = 0; i < sizeof failing / sizeof failing[0]; i++) {
        start_over();
        driver_said.load_results[0] = MISFIT;
        driver_said.load_results[1] = MISFIT;
        fake_nvrtc_fail(failing[i], COMPILATION);
        unload(load(90, PL_EUNSUPPORTED));
        CHECK_SAYS("the driver serves CUDA 13.0",
                   "words of the driver (CUDA error 222)",
                   i < 4 ? "NVRTC" : "kernels that NVRTC compiled",
                   "install a driver for CUDA 13 or later");
        if (i == 1)
            CHECK_SAYS("kernels.cu(1): what is this");
    }
}

TEST(a_compiler_that_knows_no_fitting_device_is_an_error)
{
    static const char *const failing[] = {
        "nvrtcGetNumSupportedArchs", "nvrtcGetSupportedArchs", "nvrtcGetPTXSize",
        "nvrtcGetPTX", "none, but the device is older than all"};
    for (size_t i = 0; i < sizeof failing / sizeof failing[0]; i++) {
        start_over();
        fake_nvrtc_reset(90);
        fake_nvrtc_fail(failing[i], COMPILATION);
        driver_said.load_results[0] = MISFIT;
        unload(load(i < 4 ? 120 : 70, PL_EUNSUPPORTED));
        CHECK_SAYS("install a driver for CUDA 13 or later");
    }
    CHECK_SAYS("capability 7.0");
}

TEST(a_kernel_that_is_missing_is_named)
{
    start_over();
    driver_said.missing = "pl_sum";
    unload(load(90, PL_ESYS));
    CHECK_SAYS("pl_sum");
    driver_said.missing = "pl_add_small";
    unload(load(90, PL_ESYS));
    CHECK_SAYS("pl_add_small");
}

TEST(no_allocation_that_fails_leaves_anything_behind)
{
    long n = 1;
    for (;; n++) {
        pli_kernels *kernels = NULL;
        start_over();
        driver_said.load_results[0] = MISFIT;
        pli_fault_arm(PLI_FAULT_ALLOC, n);
        const pl_status st =
            pli_kernels_load(&kernel_driver, 90, fake_path(), &kernels);
        pli_fault_arm(PLI_FAULT_ALLOC, 0);
        unload(kernels);
        if (st == PL_OK)
            break;
        CHECK(st == PL_ENOMEM);
        CHECK(kernels == NULL);
    }
    CHECK(n == 3);
}

/* ---- images of earlier processes ------------------------------------------------ */

/* Loads the kernels; returns how often NVRTC compiled for that. */
static int n_compiled_for(int compute)
{
    const int n_before = fake_nvrtc_compiled();
    memset(&driver_said, 0, sizeof driver_said);
    driver_said.load_results[0] = MISFIT;
    unload(load(compute, PL_OK));
    return fake_nvrtc_compiled() - n_before;
}

TEST(what_was_compiled_once_is_loaded_from_then_on)
{
    char path[PATH_MAX];
    start_over();
    CHECK(n_compiled_for(86) == 1);
    CHECK(n_compiled_for(86) == 0);
    CHECK(strcmp(driver_said.image, "fake cubin for --gpu-architecture=sm_86") == 0);
    CHECK(find_cached(path) == 1);
    CHECK(n_compiled_for(90) == 1); /* another device */
    fake_nvrtc_set_version(12, 8);  /* another compiler */
    CHECK(n_compiled_for(86) == 1);
    CHECK(n_compiled_for(86) == 0);
    CHECK(find_cached(path) == 3);
}

static void resize(const char *path, long by)
{
    struct stat facts;
    CHECK(stat(path, &facts) == 0);
    CHECK(truncate(path, facts.st_size + by) == 0);
}

static void overwrite(const char *path, long at)
{
    FILE *file = fopen(path, "r+b");
    if (CHECK(file != NULL && fseek(file, at, SEEK_SET) == 0)) {
        CHECK(fputc(0xff, file) == 0xff);
        CHECK(fclose(file) == 0);
    }
}

TEST(a_file_that_is_not_as_it_was_written_is_compiled_anew)
{
    char path[PATH_MAX];
    for (int how = 0; how < 7; how++) {
        start_over();
        CHECK(n_compiled_for(86) == 1);
        CHECK(find_cached(path) == 1);
        if (how == 0)
            resize(path, -1);
        else if (how == 1)
            resize(path, 1);
        else if (how == 2)
            CHECK(truncate(path, 10) == 0);
        else if (how == 3)
            overwrite(path, 0); /* of another program */
        else if (how == 4)
            overwrite(path, 40); /* in the image */
        else if (how == 5)
            CHECK(chmod(path, 0666) == 0); /* writable by all */
        else
            CHECK(unlink(path) == 0 && mkfifo(path, 0600) == 0);
        CHECK(n_compiled_for(86) == 1);
        CHECK(n_compiled_for(86) == 0); /* written again */
        CHECK(find_cached(path) == 1);
    }
}

/* Root may write everywhere, so a file takes the folder's place. */
TEST(a_folder_that_cannot_be_used_is_done_without)
{
    char folder[PATH_MAX];
    start_over();
    (void)snprintf(folder, sizeof folder, "%s/caches/paceline", cache);
    (void)rmdir(folder);
    FILE *file = fopen(folder, "wb");
    CHECK(file != NULL && fclose(file) == 0);
    CHECK(n_compiled_for(86) == 1);
    CHECK(n_compiled_for(86) == 1);
    CHECK(unlink(folder) == 0);
    CHECK(mkdir(folder, 0500) == 0);
    CHECK(n_compiled_for(86) == 1);
    CHECK(n_compiled_for(86) == (geteuid() == 0 ? 0 : 1));
    CHECK(chmod(folder, 0700) == 0);
    CHECK(setenv("XDG_CACHE_HOME", "relative", 1) == 0); /* is not used */
    CHECK(unsetenv("HOME") == 0);
    forget_cached();
    CHECK(n_compiled_for(86) == 1);
    CHECK(n_compiled_for(86) == 1);
    CHECK(setenv("HOME", cache, 1) == 0);
    CHECK(n_compiled_for(86) == 1);
    CHECK(n_compiled_for(86) == 0); /* in ~/.cache/paceline */
    CHECK(access("relative", F_OK) != 0);
    (void)snprintf(folder, sizeof folder, "rm -r %s/.cache", cache);
    CHECK(system(folder) == 0);
    (void)snprintf(folder, sizeof folder, "%s/caches", cache);
    CHECK(setenv("XDG_CACHE_HOME", folder, 1) == 0);
}

static int begin_cache(void)
{
    char folder[PATH_MAX];
    if (!CHECK(mkdtemp(cache) != NULL))
        return 0;
    (void)snprintf(folder, sizeof folder, "%s/caches", cache);
    return CHECK(setenv("XDG_CACHE_HOME", folder, 1) == 0);
}

static void end_cache(void)
{
    char command[PATH_MAX];
    (void)snprintf(command, sizeof command, "rm -r %s", cache);
    CHECK(system(command) == 0);
}

/* ---- launches ------------------------------------------------------------------- */

enum { MANY = 2500, ELEMS = 3 };

typedef struct tensors {
    float to[MANY][ELEMS];
    float from[MANY][ELEMS];
    pl_move moves[MANY];
} tensors;

static tensors *tensors_create(void)
{
    tensors *self = calloc(1, sizeof *self);
    if (self == NULL)
        exit(2);
    for (int i = 0; i < MANY; i++) {
        for (int k = 0; k < ELEMS; k++)
            self->from[i][k] = (float)(i * ELEMS + k);
        self->moves[i] = (pl_move){.to = self->to[i],
                                   .from = self->from[i],
                                   .dtype = PL_F32,
                                   .n_elems = ELEMS};
    }
    return self;
}

/* Copies the first n tensors; checks that only these arrived, in so many launches. */
static void check_launches(pli_kernels *kernels, size_t n, int n_launches)
{
    tensors *self = tensors_create();
    driver_said.n_launches = 0;
    CHECK_OK(pli_kernels_copy(kernels, self->moves, n, NULL));
    if (!CHECK(driver_said.n_launches == n_launches))
        CHECK_MORE("%zu tensors: %d launches", n, driver_said.n_launches);
    CHECK(memcmp(self->to, self->from, n * sizeof self->to[0]) == 0);
    for (size_t i = n; i < MANY; i++)
        CHECK(self->to[i][1] == 0);
    free(self);
}

TEST(a_thousand_tensors_are_one_launch)
{
    start_over();
    pli_kernels *kernels = load(90, PL_OK);
    if (kernels == NULL)
        return;
    check_launches(kernels, 0, 0);
    check_launches(kernels, 1, 1);
    check_launches(kernels, PLI_SMALL_SPANS, 1);
    CHECK(strcmp(driver_said.kernel, "pl_copy_small") == 0);
    check_launches(kernels, PLI_SMALL_SPANS + 1, 1);
    CHECK(strcmp(driver_said.kernel, "pl_copy_large") == 0);
    check_launches(kernels, PLI_LARGE_SPANS, 1);
    check_launches(kernels, PLI_LARGE_SPANS + 1, 2);
    check_launches(kernels, MANY, 3);
    unload(kernels);
}

TEST(small_parameters_do_where_there_are_no_large_ones)
{
    start_over();
    driver_said.missing = "pl_scale_large";
    pli_kernels *kernels = load(90, PL_OK);
    if (kernels != NULL) {
        check_launches(kernels, PLI_SMALL_SPANS + 1, 2);
        check_launches(kernels, 1000, 8);
    }
    unload(kernels);
    pli_driver old = kernel_driver;
    old.version = PLI_LARGE_VERSION - 1;
    kernels = NULL;
    if (CHECK_OK(pli_kernels_load(&old, 90, NULL, &kernels)))
        check_launches(kernels, 1000, 8);
    unload(kernels);
}

TEST(what_has_nothing_to_do_is_not_launched)
{
    start_over();
    pli_kernels *kernels = load(90, PL_OK);
    float x[4] = {1, 2, 3, 4};
    const pl_move empty = {.to = x, .from = x + 1, .dtype = PL_F32, .n_elems = 0};
    const pl_move zeros = {.to = x, .from = NULL, .dtype = PL_F32, .n_elems = 4};
    const pl_move whole = {.to = x, .from = x, .dtype = PL_I32, .n_elems = 4};
    const pl_rank_ranges ranges = {x, x, 4, 2, PL_F32, PL_SUM, 0};
    const pl_rank_ranges only = {x, x, 16, 1, PL_F32, PL_MEAN, 4};
    CHECK_OK(pli_kernels_copy(kernels, &empty, 1, NULL));
    CHECK_OK(pli_kernels_copy(kernels, &whole, 1, NULL));
    CHECK_OK(pli_kernels_add(kernels, &empty, 1, NULL));
    CHECK_OK(pli_kernels_add(kernels, &zeros, 1, NULL));
    CHECK_OK(pli_kernels_scale(kernels, &empty, 1, 1, 2, NULL));
    CHECK_OK(pli_kernels_scale(kernels, &whole, 1, 1, 2, NULL));
    CHECK_OK(pli_kernels_sum(kernels, &ranges, NULL));
    CHECK_OK(pli_kernels_sum(kernels, &only, NULL));
    CHECK(driver_said.n_launches == 0);
    CHECK(x[0] == 1 && x[3] == 4);
    unload(kernels);
}

/* 2^24 + 1 + 2 is 2^24 + 2 in this order, and 2^24 + 4 or + 3 in any other. */
TEST(additions_to_one_place_keep_their_order)
{
    start_over();
    pli_kernels *kernels = load(90, PL_OK);
    float sums[2] = {0x1p24F, 5};
    const float one = 1, two = 2;
    const pl_move moves[] = {{&sums[0], &one, PL_F32, 1},
                             {&sums[1], &one, PL_F32, 1},
                             {&sums[0], &two, PL_F32, 1},
                             {&sums[1], &two, PL_F32, 1}};
    CHECK_OK(pli_kernels_add(kernels, moves, 4, NULL));
    CHECK(driver_said.n_launches == 2);
    CHECK(driver_said.n_spans == 2);
    CHECK(sums[0] == 0x1p24F + 2);
    CHECK(sums[1] == 8);
    unload(kernels);
}

/* The launches do nothing, so memory of that size is not needed. */
TEST(more_blocks_than_a_grid_can_have_are_launched_apart)
{
    start_over();
    pli_kernels *kernels = load(90, PL_OK);
    char there[4];
    const size_t huge = (size_t)INT32_MAX / 3 * PLI_BLOCK_BYTES;
    const pl_move moves[] = {{&there[0], NULL, PL_U8, huge},
                             {&there[1], NULL, PL_U8, huge},
                             {&there[2], NULL, PL_U8, huge},
                             {&there[3], NULL, PL_U8, huge}};
    driver_said.is_idle = 1;
    CHECK_OK(pli_kernels_copy(kernels, moves, 4, NULL));
    CHECK(driver_said.n_launches == 2);
    CHECK(driver_said.n_blocks == 4 * (unsigned long long)(INT32_MAX / 3));
    unload(kernels);
}

TEST(a_launch_that_fails_says_what_it_was_for)
{
    start_over();
    pli_kernels *kernels = load(90, PL_OK);
    tensors *self = tensors_create();
    const pl_rank_ranges ranges = {self->to, self->from, 12, 2, PL_F32, PL_SUM, 3};
    driver_said.launch_result = 700;
    CHECK_FAILS(pli_kernels_copy(kernels, self->moves, MANY, NULL), PL_ESYS,
                "copying tensors: words of the driver (CUDA error 700)");
    CHECK(driver_said.n_launches == 1);
    CHECK_FAILS(pli_kernels_add(kernels, self->moves, 2, NULL), PL_ESYS,
                "adding tensors");
    CHECK_FAILS(pli_kernels_scale(kernels, self->moves, 2, 1, 2, NULL), PL_ESYS,
                "scaling tensors");
    CHECK_FAILS(pli_kernels_sum(kernels, &ranges, NULL), PL_ESYS, "summing ranges");
    free(self);
    unload(kernels);
}

int main(void)
{
    if (!begin_cache())
        return 1;
    const int result = check_run_tests();
    end_cache();
    return result;
}
