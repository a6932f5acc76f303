/* config.c - reads the environment at each call, and stores nothing. */
#include "config.h"

#include <stdio.h>
#include <stdlib.h>

static const char *word_of(const char *name)
{
    const char *word = getenv(name);
    return word != NULL && word[0] != '\0' ? word : NULL;
}

const char *pli_config_isa(void)
{
    return word_of("PACELINE_ISA");
}

const char *pli_config_libcuda(void)
{
    return word_of("PACELINE_LIBCUDA");
}

const char *pli_config_libnccl(void)
{
    return word_of("PACELINE_LIBNCCL");
}

int pli_config_nccl_blocks(void)
{
    const char *word = word_of("PACELINE_NCCL_BLOCKING");
    return word == NULL || word[0] != '0';
}

/* The XDG Base Directory Specification says to ignore relative paths. */
int pli_config_cache_folder(char *out, size_t n_bytes)
{
    const char *cache = word_of("XDG_CACHE_HOME");
    const char *home = word_of("HOME");
    int n = -1;
    if (cache != NULL && cache[0] == '/')
        n = snprintf(out, n_bytes, "%s", cache);
    else if (home != NULL && home[0] == '/')
        n = snprintf(out, n_bytes, "%s/.cache", home);
    return n > 0 && (size_t)n < n_bytes;
}

pl_status pli_config_timeout_ns(int64_t otherwise_ns, int64_t *out)
{
    pl_status st = PL_OK;
    const char *word = word_of("PACELINE_TIMEOUT");
    if (word == NULL) {
        *out = otherwise_ns;
        goto done;
    }
    char *end = NULL;
    const double seconds = strtod(word, &end);
    if (*end != '\0' || !(seconds >= 1e-9) || seconds > 1e9)
        PL_FAIL(PL_EINVAL,
                "PACELINE_TIMEOUT is '%s': give a positive number of seconds, as in "
                "PACELINE_TIMEOUT=1800",
                word);
    *out = (int64_t)(seconds * 1e9);
done:
    return st;
}
