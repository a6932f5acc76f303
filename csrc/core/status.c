/* status.c - texts of the codes, and the error message of each thread. */
#include "status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Room for a traceback: PL_EPEER carries another rank's. */
static _Thread_local char error_message[8192];

/* Whether a byte continues a UTF-8 character, rather than begins one. */
static int is_inside_character(char byte)
{
    return ((unsigned char)byte & 0xc0) == 0x80;
}

/* Removes the last character if vsnprintf() has cut into it. */
static void end_whole(char *text, size_t n)
{
    size_t n_inside = 0;
    while (n_inside < 3 && n_inside < n && is_inside_character(text[n - 1 - n_inside]))
        n_inside++;
    if (n_inside == n)
        return;
    const unsigned char first = (unsigned char)text[n - 1 - n_inside];
    const size_t n_more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : first >= 0xc0 ? 1 : 0;
    if (n_more > n_inside)
        text[n - 1 - n_inside] = '\0';
}

const char *pli_text_tail(const char *text, size_t n_bytes)
{
    const size_t n = strlen(text);
    const char *from = n > n_bytes ? text + (n - n_bytes) : text;
    while (from > text && is_inside_character(*from))
        from++;
    return from;
}

void pli_text_print(char *out, size_t out_bytes, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(out, out_bytes, format, args);
    va_end(args);
    if (n > 0 && (size_t)n >= out_bytes)
        end_whole(out, out_bytes - 1);
}

const char *pl_error_message(void)
{
    return error_message;
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
    const int n = vsnprintf(error_message, sizeof error_message, format, args);
    va_end(args);
    if (n > 0 && (size_t)n >= sizeof error_message)
        end_whole(error_message, sizeof error_message - 1);
    return code;
}

pl_status pli_fail_errno(const char *format, ...)
{
    const int error = errno;
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(error_message, sizeof error_message, format, args);
    va_end(args);
    if (n > 0 && (size_t)n < sizeof error_message)
        (void)snprintf(error_message + n, sizeof error_message - (size_t)n, ": %s",
                       strerror(error));
    return error == ENOMEM ? PL_ENOMEM : PL_ESYS;
}

size_t pl_dtype_bytes(pl_dtype dtype)
{
#define DTYPE_BYTES(name, number, bytes, text) [name] = (bytes),
    static const size_t all[PL_N_DTYPES] = {PL_DTYPE_MAP(DTYPE_BYTES)};
#undef DTYPE_BYTES
    return (unsigned)dtype < PL_N_DTYPES ? all[dtype] : 0;
}

const char *pl_dtype_text(pl_dtype dtype)
{
#define DTYPE_TEXT(name, number, bytes, text) [name] = (text),
    static const char *const texts[PL_N_DTYPES] = {PL_DTYPE_MAP(DTYPE_TEXT)};
#undef DTYPE_TEXT
    return (unsigned)dtype < PL_N_DTYPES ? texts[dtype] : "no dtype";
}
