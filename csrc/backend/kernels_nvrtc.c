/* kernels_nvrtc.c - where the kernels' code comes from: embedded in the extension by
 * the assembler, or compiled by NVRTC from the embedded source, and then cached in a
 * file.
 *
 *   PLI_KERNELS_FOLDER   the folder of the source, for the assembler; define it if the
 *                        compiler does not run in the project's root
 *   PLI_FATBIN_PATH      the fatbin from nvcc; not defined if there is no nvcc
 *
 * torch ships the NVRTC of its CUDA version, so a driver that runs torch accepts the
 * code.  If NVRTC is older than the device, it compiles to PTX for the newest
 * architecture that both support, and the driver compiles that.  Compiling takes
 * seconds, so later processes read
 *
 *     $XDG_CACHE_HOME/paceline/kernels-<key>.bin, else ~/.cache/paceline/...
 *
 * A file is written under a temporary name and then renamed, so that a process sees all
 * of it or none.  A file that is damaged, or that other users may write to, is ignored.
 * The cache reports no errors: if a file cannot be read, the kernels are compiled; if
 * they cannot be written, the next process compiles them again.
 */
#include "kernels_nvrtc.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/alloc.h"
#include "core/config.h"
#include "core/hash.h"

/* ---- embedded files ------------------------------------------------------------- */

#ifndef PLI_KERNELS_FOLDER
#define PLI_KERNELS_FOLDER "csrc/backend"
#endif

/* Embeds the file and a zero behind it, as the array `name`. */
#define EMBED(name, path)                                                              \
    __asm__(".pushsection .rodata\n"                                                   \
            ".balign 64\n" #name ":\n"                                                 \
            ".incbin \"" path "\"\n"                                                   \
            ".byte 0\n"                                                                \
            ".popsection\n");                                                          \
    extern const char name[] __attribute__((visibility("hidden")))

/* NOLINTBEGIN(portability-no-assembler): C11 has no other way to embed a file */
EMBED(pli_text_table, PLI_KERNELS_FOLDER "/kernels_table.h");
EMBED(pli_text_words, PLI_KERNELS_FOLDER "/kernels_words.h");
EMBED(pli_text_kernels, PLI_KERNELS_FOLDER "/kernels.cu");
#ifdef PLI_FATBIN_PATH
EMBED(pli_fatbin, PLI_FATBIN_PATH);
#endif
/* NOLINTEND(portability-no-assembler) */

const void *pli_kernels_fatbin(void)
{
#ifdef PLI_FATBIN_PATH
    return pli_fatbin;
#else
    return NULL;
#endif
}

/* A header's name in #include, and its text; the last entry is the source file. */
static const struct kernels_text {
    const char *name;
    const char *text;
} texts[] = {
    {"kernels_table.h", pli_text_table},
    {"kernels_words.h", pli_text_words},
    {"kernels.cu", pli_text_kernels},
};
enum { N_TEXTS = sizeof texts / sizeof texts[0] };

/* ---- the cache ------------------------------------------------------------------ */

enum { MOST_BYTES = 64 << 20 }; /* of an image; typical ones have some 100,000 */

typedef struct header {
    char magic[8];
    uint64_t key;
    uint64_t n_bytes; /* of the image behind it */
    uint64_t hash;
} header;

static header header_of(uint64_t key, const void *image, size_t n_bytes)
{
    return (header){.magic = "PLKERN1",
                    .key = key,
                    .n_bytes = n_bytes,
                    .hash = pli_hash_bytes(image, n_bytes)};
}

/* 0 if there is no cache folder, or if the path is too long. */
static int path_of(uint64_t key, char out[PATH_MAX])
{
    char folder[PATH_MAX];
    if (!pli_config_cache_folder(folder, sizeof folder))
        return 0;
    const int n = snprintf(out, PATH_MAX, "%s/paceline/kernels-%016llx.bin", folder,
                           (unsigned long long)key);
    return n > 0 && n < PATH_MAX;
}

/* Whether only this user can write to the file, and its size matches its header. */
static int is_sound(int file, const header *found)
{
    struct stat facts;
    return fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) &&
           facts.st_uid == geteuid() && (facts.st_mode & (S_IWGRP | S_IWOTH)) == 0 &&
           found->n_bytes <= MOST_BYTES &&
           (uint64_t)facts.st_size == sizeof *found + found->n_bytes;
}

static void *read_cached(int file, uint64_t key)
{
    header found;
    char *image = NULL;
    if (read(file, &found, sizeof found) != (ssize_t)sizeof found ||
        !is_sound(file, &found) ||
        pli_calloc(found.n_bytes + 1, 1, "kernels", &image) != PL_OK)
        return NULL;
    if (read(file, image, found.n_bytes) == (ssize_t)found.n_bytes) {
        const header expected = header_of(key, image, found.n_bytes);
        if (memcmp(&found, &expected, sizeof found) == 0)
            return image;
    }
    pli_free(image);
    return NULL;
}

/* The image of that key and a zero behind it, or NULL; free it by pli_free(). */
static void *cache_read(uint64_t key)
{
    char path[PATH_MAX];
    if (!path_of(key, path))
        return NULL;
    /* O_NONBLOCK: if the path is a pipe without a writer, open() must not wait. */
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file < 0)
        return NULL;
    void *image = read_cached(file, key);
    (void)close(file);
    return image;
}

/* Makes the user's cache folder and ours in it, with mode 0700, if they are missing. */
static void make_folders(void)
{
    char folder[PATH_MAX];
    char ours[PATH_MAX + sizeof "/paceline"];
    if (!pli_config_cache_folder(folder, sizeof folder))
        return;
    (void)snprintf(ours, sizeof ours, "%s/paceline", folder);
    (void)mkdir(folder, S_IRWXU);
    (void)mkdir(ours, S_IRWXU);
}

static void cache_write(uint64_t key, const void *image, size_t n_bytes)
{
    char path[PATH_MAX];
    char fresh[PATH_MAX];
    const header head = header_of(key, image, n_bytes);
    if (n_bytes > MOST_BYTES || !path_of(key, path))
        return;
    make_folders();
    const int n = snprintf(fresh, sizeof fresh, "%s.XXXXXX", path);
    const int file = n > 0 && n < PATH_MAX ? mkostemp(fresh, O_CLOEXEC) : -1;
    if (file < 0)
        return;
    const int is_written = write(file, &head, sizeof head) == (ssize_t)sizeof head &&
                           write(file, image, n_bytes) == (ssize_t)n_bytes;
    if (close(file) != 0 || !is_written || rename(fresh, path) != 0)
        (void)unlink(fresh);
}

/* ---- NVRTC ---------------------------------------------------------------------- */

typedef int nvrtc_result; /* 0: success */
typedef struct nvrtc_job *nvrtc_program;

enum { INVALID_OPTION = 5 };
static const char rounding[] = "--fmad=false"; /* rounds each step, as the CPU does */
enum { MAX_ARCHS = 64, MAX_WORDS = 300, N_OPTIONS = 3 };

#define NVRTC_MAP(X)                                                                   \
    X(nvrtcVersion, nvrtc_result, (int *major, int *minor))                            \
    X(nvrtcGetErrorString, const char *, (nvrtc_result result))                        \
    X(nvrtcGetNumSupportedArchs, nvrtc_result, (int *out))                             \
    X(nvrtcGetSupportedArchs, nvrtc_result, (int *out))                                \
    X(nvrtcCreateProgram, nvrtc_result,                                                \
      (nvrtc_program * out, const char *text, const char *name, int n_headers,         \
       const char *const *headers, const char *const *names))                          \
    X(nvrtcDestroyProgram, nvrtc_result, (nvrtc_program * program))                    \
    X(nvrtcCompileProgram, nvrtc_result,                                               \
      (nvrtc_program program, int n_options, const char *const *options))              \
    X(nvrtcGetProgramLogSize, nvrtc_result, (nvrtc_program program, size_t *out))      \
    X(nvrtcGetProgramLog, nvrtc_result, (nvrtc_program program, char *out))            \
    X(nvrtcGetCUBINSize, nvrtc_result, (nvrtc_program program, size_t *out))           \
    X(nvrtcGetCUBIN, nvrtc_result, (nvrtc_program program, char *out))                 \
    X(nvrtcGetPTXSize, nvrtc_result, (nvrtc_program program, size_t *out))             \
    X(nvrtcGetPTX, nvrtc_result, (nvrtc_program program, char *out))

typedef struct nvrtc {
#define FIELD(name, type, arguments) type(*name) arguments;
    NVRTC_MAP(FIELD)
#undef FIELD
} nvrtc;

typedef struct image_bytes {
    void *bytes;
    size_t n_bytes;
} image_bytes;

static const struct entry {
    const char *name;
    size_t offset;
} entries[] = {
#define ENTRY(name, type, arguments) {#name, offsetof(nvrtc, name)},
    NVRTC_MAP(ENTRY)
#undef ENTRY
};

/* ---- the library ---------------------------------------------------------------- */

/* The library stays open: it keeps state, and does not support unloading. */
static void *open_library(const char *path)
{
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12",
                                        "libnvrtc.so.11.2"};
    static const int ways[] = {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW};
    void *library = path != NULL ? dlopen(path, RTLD_NOW) : NULL;
    for (size_t w = 0; w < sizeof ways / sizeof ways[0]; w++)
        for (size_t i = 0; library == NULL && i < sizeof names / sizeof names[0]; i++)
            library = dlopen(names[i], ways[w]);
    return library;
}

static pl_status find_nvrtc(const char *path, nvrtc *out)
{
    pl_status st = PL_OK;
    void *const library = open_library(path);
    if (library == NULL)
        PL_FAIL(PL_EUNSUPPORTED,
                "there is no NVRTC to compile them (%s%slibnvrtc.so.13, .12, .11.2)",
                path != NULL ? path : "", path != NULL ? ", " : "");
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        void *const found = dlsym(library, entries[i].name);
        if (found == NULL)
            PL_FAIL(PL_EUNSUPPORTED, "NVRTC is too old: it has no %s", entries[i].name);
        memcpy((char *)out + entries[i].offset, &found, sizeof found);
    }
done:
    return st;
}

/* ---- one program ---------------------------------------------------------------- */

/* Writes ": " and the beginning of the compiler's log; empty if there is no log. */
static void read_log(const nvrtc *self, nvrtc_program program, char out[MAX_WORDS])
{
    size_t n_bytes = 0;
    char *log = NULL;
    out[0] = '\0';
    if (self->nvrtcGetProgramLogSize(program, &n_bytes) == 0 &&
        pli_calloc(n_bytes + 1, 1, "NVRTC's log", &log) == PL_OK &&
        self->nvrtcGetProgramLog(program, log) == 0)
        (void)snprintf(out, MAX_WORDS, ": %s", log);
    pli_free(log);
}

static pl_status check(const nvrtc *self, nvrtc_result result, const char *doing)
{
    if (result == 0)
        return PL_OK;
    return pli_fail(PL_EUNSUPPORTED, "NVRTC could not %s: %s", doing,
                    self->nvrtcGetErrorString(result));
}

static pl_status create_program(const nvrtc *self, nvrtc_program *out)
{
    enum { N_HEADERS = N_TEXTS - 1 };
    const char *headers[N_HEADERS];
    const char *names[N_HEADERS];
    for (int i = 0; i < N_HEADERS; i++) {
        headers[i] = texts[i].text;
        names[i] = texts[i].name;
    }
    /* NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage): found by its name */
    const nvrtc_result result = self->nvrtcCreateProgram(
        out, texts[N_HEADERS].text, texts[N_HEADERS].name, N_HEADERS, headers, names);
    return check(self, result, "create a program");
}

/* Compiles for options[0], such as --gpu-architecture=sm_90.  *is_known is zero if this
 * NVRTC is too old for that architecture. */
static pl_status compile(const nvrtc *self, nvrtc_program program,
                         const char *const options[N_OPTIONS], int *is_known)
{
    pl_status st = PL_OK;
    char words[MAX_WORDS];
    const nvrtc_result result = self->nvrtcCompileProgram(program, N_OPTIONS, options);
    *is_known = result != INVALID_OPTION;
    if (result == 0 || result == INVALID_OPTION)
        goto done;
    read_log(self, program, words);
    PL_FAIL(PL_EUNSUPPORTED, "NVRTC did not compile the kernels (%s, %s)%s", options[0],
            self->nvrtcGetErrorString(result), words);
done:
    return st;
}

/* The newest architecture that NVRTC supports and the device can run. */
static pl_status newest_arch(const nvrtc *self, int compute, int *out)
{
    pl_status st = PL_OK;
    int archs[MAX_ARCHS] = {0};
    int n_archs = 0;
    int newest = 0;
    PL_TRY(check(self, self->nvrtcGetNumSupportedArchs(&n_archs), "count devices"));
    if (n_archs > MAX_ARCHS)
        PL_FAIL(PL_EUNSUPPORTED,
                "NVRTC lists %d architectures: this version of paceline cannot read so "
                "many",
                n_archs);
    PL_TRY(check(self, self->nvrtcGetSupportedArchs(archs), "list devices"));
    for (int i = 0; i < n_archs; i++)
        if (archs[i] <= compute && archs[i] > newest)
            newest = archs[i];
    if (newest == 0)
        PL_FAIL(PL_EUNSUPPORTED, "NVRTC supports no device of capability %d.%d or less",
                compute / 10, compute % 10);
    *out = newest;
done:
    return st;
}

/* Appends a zero to the image. */
static pl_status read_image(const nvrtc *self, nvrtc_program program, int is_cubin,
                            image_bytes *out)
{
    pl_status st = PL_OK;
    size_t n_bytes = 0;
    char *image = NULL;
    PL_TRY(check(self,
                 is_cubin ? self->nvrtcGetCUBINSize(program, &n_bytes)
                          : self->nvrtcGetPTXSize(program, &n_bytes),
                 "return the size of its code"));
    PL_TRY(pli_calloc(n_bytes + 1, 1, "kernels", &image));
    PL_TRY(check(self,
                 is_cubin ? self->nvrtcGetCUBIN(program, image)
                          : self->nvrtcGetPTX(program, image),
                 "return its code"));
    *out = (image_bytes){image, n_bytes};
    image = NULL;
done:
    pli_free(image);
    return st;
}

static pl_status compile_for(const nvrtc *self, int compute, int has_large,
                             image_bytes *out)
{
    pl_status st = PL_OK;
    nvrtc_program program = NULL;
    char arch[64];
    const char *const options[N_OPTIONS] = {
        arch, rounding, has_large ? "-DPLI_TAKES_LARGE=1" : "-DPLI_TAKES_LARGE=0"};
    int is_cubin = 0;
    int is_known = 0;
    PL_TRY(create_program(self, &program));
    (void)snprintf(arch, sizeof arch, "--gpu-architecture=sm_%d", compute);
    PL_TRY(compile(self, program, options, &is_cubin));
    if (!is_cubin) {
        PL_TRY(newest_arch(self, compute, &compute));
        (void)snprintf(arch, sizeof arch, "--gpu-architecture=compute_%d", compute);
        PL_TRY(compile(self, program, options, &is_known));
        if (!is_known)
            PL_FAIL(PL_EUNSUPPORTED, "NVRTC does not accept %s", arch);
    }
    PL_TRY(read_image(self, program, is_cubin, out));
done:
    if (program != NULL)
        (void)self->nvrtcDestroyProgram(&program);
    return st;
}

/* A hash of everything that the image depends on. */
static uint64_t key_of(int compute, int has_large, int major, int minor)
{
    uint64_t key = pli_hash_with((uint64_t)compute, (uint64_t)has_large);
    key = pli_hash_with(key, (uint64_t)major * 1000 + (uint64_t)minor);
    key = pli_hash_with(key, pli_hash_bytes(rounding, sizeof rounding));
    for (int i = 0; i < N_TEXTS; i++)
        key = pli_hash_with(key, pli_hash_bytes(texts[i].text, strlen(texts[i].text)));
    return key;
}

pl_status pli_nvrtc_compile(const char *path, int compute, int has_large, void **out)
{
    pl_status st = PL_OK;
    nvrtc self = {0};
    image_bytes image = {NULL, 0};
    int major = 0, minor = 0;
    PL_TRY(find_nvrtc(path, &self));
    /* NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage): found by its name */
    PL_TRY(check(&self, self.nvrtcVersion(&major, &minor), "return its version"));
    const uint64_t key = key_of(compute, has_large, major, minor);
    *out = cache_read(key);
    if (*out == NULL) {
        PL_TRY(compile_for(&self, compute, has_large, &image));
        cache_write(key, image.bytes, image.n_bytes);
        *out = image.bytes;
    }
done:
    return st;
}
