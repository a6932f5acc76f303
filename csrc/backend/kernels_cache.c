/* kernels_cache.c - reads and writes files of one header and one image. */
#include "kernels_cache.h"

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

static void *read_image(int file, uint64_t key)
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

void *pli_kernels_cache_read(uint64_t key)
{
    char path[PATH_MAX];
    if (!path_of(key, path))
        return NULL;
    /* O_NONBLOCK: if the path is a pipe without a writer, open() must not wait. */
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file < 0)
        return NULL;
    void *image = read_image(file, key);
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

void pli_kernels_cache_write(uint64_t key, const void *image, size_t n_bytes)
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
