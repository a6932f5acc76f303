/* config.c - reads the environment at each call, and stores nothing. */
#include "config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *pli_config_word(const char *name)
{
    const char *word = getenv(name);
    return word != NULL && word[0] != '\0' ? word : NULL;
}

/* The XDG Base Directory Specification says to ignore relative paths. */
int pli_config_cache_folder(char *out, size_t n_bytes)
{
    const char *cache = pli_config_word("XDG_CACHE_HOME");
    const char *home = pli_config_word("HOME");
    int n = -1;
    if (cache != NULL && cache[0] == '/')
        n = snprintf(out, n_bytes, "%s", cache);
    else if (home != NULL && home[0] == '/')
        n = snprintf(out, n_bytes, "%s/.cache", home);
    return n > 0 && (size_t)n < n_bytes;
}

pl_status pli_config_timeout_ns(const char *name, int64_t otherwise_ns, int64_t *out)
{
    pl_status st = PL_OK;
    const char *word = pli_config_word(name);
    if (word == NULL) {
        *out = otherwise_ns;
        goto done;
    }
    char *end = NULL;
    const double seconds = strtod(word, &end);
    if (*end != '\0' || !(seconds >= 1e-9) || seconds > 1e9)
        PL_FAIL(PL_EINVAL, "%s is '%s': give a positive number of seconds, as in %s=60",
                name, word, name);
    *out = (int64_t)(seconds * 1e9);
done:
    return st;
}

pl_status pli_config_check(pli_check_kind *out)
{
    static const char *const words[] = {[PLI_CHECK_ROTATE] = "rotate",
                                        [PLI_CHECK_OFF] = "off",
                                        [PLI_CHECK_ALL] = "all"};
    const char *word = pli_config_word("PACELINE_CHECK");
    int kind = PLI_CHECK_ROTATE;
    while (word != NULL && kind <= PLI_CHECK_ALL && strcmp(word, words[kind]) != 0)
        kind++;
    if (kind > PLI_CHECK_ALL)
        return pli_fail(PL_EINVAL, "PACELINE_CHECK is '%s': give off, rotate or all",
                        word);
    *out = (pli_check_kind)kind;
    return PL_OK;
}
