/* status.c - texts of the codes, and the last words of each thread. */
#include "status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Room for a traceback: PL_EPEER carries another rank's. */
static _Thread_local char last_words[8192];

const char *pl_error_message(void)
{
    return last_words;
}

const char *pl_status_text(pl_status st)
{
    switch (st) {
#define STATUS_TEXT(name, number, text, exception)                                     \
    case name:                                                                         \
        return text;
        PL_STATUS_MAP(STATUS_TEXT)
#undef STATUS_TEXT
    }
    return "unknown status";
}

pl_status pli_fail(pl_status code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    (void)vsnprintf(last_words, sizeof last_words, format, args);
    va_end(args);
    return code;
}

pl_status pli_fail_errno(const char *format, ...)
{
    const int error = errno;
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(last_words, sizeof last_words, format, args);
    va_end(args);
    if (n > 0 && (size_t)n < sizeof last_words)
        (void)snprintf(last_words + n, sizeof last_words - (size_t)n, ": %s",
                       strerror(error));
    return error == ENOMEM ? PL_ENOMEM : PL_ESYS;
}

size_t pl_dtype_bytes(pl_dtype dtype)
{
    switch (dtype) {
#define DTYPE_BYTES(name, number, bytes, text)                                         \
    case name:                                                                         \
        return bytes;
        PL_DTYPE_MAP(DTYPE_BYTES)
#undef DTYPE_BYTES
    case PL_N_DTYPES:
        break;
    }
    return 0;
}

const char *pl_dtype_text(pl_dtype dtype)
{
    switch (dtype) {
#define DTYPE_TEXT(name, number, bytes, text)                                          \
    case name:                                                                         \
        return text;
        PL_DTYPE_MAP(DTYPE_TEXT)
#undef DTYPE_TEXT
    case PL_N_DTYPES:
        break;
    }
    return "no dtype";
}
