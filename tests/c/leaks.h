/* leaks.h - what a process holds: descriptors, and mappings of shared memory. */
#ifndef PLT_LEAKS_H
#define PLT_LEAKS_H

#include <dirent.h>
#include <stdio.h>
#include <string.h>

static inline int n_open_descriptors(void)
{
    int n = -1; /* the directory's own */
    DIR *folder = opendir("/proc/self/fd");
    if (folder == NULL)
        return -1;
    for (const struct dirent *entry = readdir(folder); entry != NULL;
         entry = readdir(folder))
        n += entry->d_name[0] != '.';
    (void)closedir(folder);
    return n;
}

static inline int n_mappings_of(const char *name)
{
    int n = 0;
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == NULL)
        return -1;
    while (fgets(line, sizeof line, maps) != NULL)
        n += strstr(line, name) != NULL;
    (void)fclose(maps);
    return n;
}

static inline int n_shared_mappings(void)
{
    return n_mappings_of("memfd:paceline");
}

/* Mappings of worlds of one rank, which are anonymous: the kernel names them so. */
static inline int n_lone_mappings(void)
{
    return n_mappings_of("/dev/zero");
}

#endif
