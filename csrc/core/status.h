/* status.h - core/: status, memory, time, processes and layouts, without devices.
 *
 *     backend, ipc, comm, nccl, reducer, python
 *       \--> core: status alloc config clock process backoff hash
 *              \                layout plan activity
 *               \--> include: paceline.h
 *
 * This header defines how a function reports a failure.  PL_FAIL makes one: it takes a
 * code and a message, and jumps to the function's only label, `done`.  PL_TRY forwards
 * the failure of a call.  A function that can fail declares `pl_status st = PL_OK` and
 * ends in `done:` with NULL-safe destroys and `return st`.
 */
#ifndef PLI_STATUS_H
#define PLI_STATUS_H

#include "include/paceline.h"

/* Records the message of a failure for this thread and returns `code`. */
pl_status pli_fail(pl_status code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The same for a failed system call: appends errno's text.  ENOMEM becomes
 * PL_ENOMEM, everything else PL_ESYS. */
pl_status pli_fail_errno(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* As snprintf(), but cuts a text that is too long between two UTF-8 characters. */
void pli_text_print(char *out, size_t out_bytes, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The longest tail of at most n_bytes that begins with a whole UTF-8 character. */
const char *pli_text_tail(const char *text, size_t n_bytes);

#define PL_FAIL(code, ...)                                                             \
    do {                                                                               \
        st = pli_fail((code), __VA_ARGS__);                                            \
        goto done;                                                                     \
    } while (0)

#define PL_FAIL_ERRNO(...)                                                             \
    do {                                                                               \
        st = pli_fail_errno(__VA_ARGS__);                                              \
        goto done;                                                                     \
    } while (0)

#define PL_TRY(call)                                                                   \
    do {                                                                               \
        st = (call);                                                                   \
        if (st != PL_OK)                                                               \
            goto done;                                                                 \
    } while (0)

#endif
