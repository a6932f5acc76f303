/* switch.h - the active mutant; included before every source of a build with mutants.
 *
 * PL_MUTANTS names a file that all processes of a test map: a word with the number of
 * the active mutant, 0 for none, and for each mutant a byte that records whether its
 * place was reached.
 */
#ifndef PL_MUTANT_SWITCH_H
#define PL_MUTANT_SWITCH_H

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define PL_MUTANTS_BYTES 65536

__attribute__((weak, visibility("hidden"))) volatile unsigned *pl_mutant_map;

__attribute__((constructor(101))) static void pl_mutant_open(void)
{
    const char *path = getenv("PL_MUTANTS");
    const int fd = path != NULL ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (pl_mutant_map == NULL)
        pl_mutant_map = mmap(NULL, PL_MUTANTS_BYTES, PROT_READ | PROT_WRITE,
                             fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
    if (fd >= 0)
        close(fd);
}

static inline int pl_mutant(unsigned n)
{
    ((volatile char *)pl_mutant_map)[sizeof *pl_mutant_map + n] = 1;
    return *pl_mutant_map == n;
}

#endif
