/* status.h - how a failure is born, travels and leaves.
 *
 * PL_FAIL makes one: it takes a code and words, and jumps to the function's only
 * label, `done`.  PL_TRY forwards one.  A function that can fail declares
 * `pl_status st = PL_OK`, and ends in `done:` with NULL-safe destroys and
 * `return st`.
 */
#ifndef PLI_STATUS_H
#define PLI_STATUS_H

#include "../include/paceline.h"

/* Records the words of a failure for this thread and returns `code`. */
pl_status pli_fail(pl_status code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The same for a failed system call: appends errno's text.  ENOMEM becomes
 * PL_ENOMEM, everything else PL_ESYS. */
pl_status pli_fail_errno(const char *format, ...) __attribute__((format(printf, 1, 2)));

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
