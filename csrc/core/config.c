/* config.c - the environment, read anew at each call: nothing is stored. */
#include "config.h"

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
    return word != NULL && word[0] != '0';
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
