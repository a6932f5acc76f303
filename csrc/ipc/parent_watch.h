/* parent_watch.h - a process that ends with its parent, whatever it is doing.
 *
 * A native thread waits for the end of the process behind `pidfd`, and for the end of
 * file of `pipe_fd`, whichever comes first, and then ends this process at once: no
 * handler, no destructor, no flush.  The parent opened both, so neither can be mistaken
 * for another process; the pidfd tells of its death though its forked children hold
 * copies of its descriptors, and the pipe tells where it became another program (exec).
 */
#ifndef PLI_PARENT_WATCH_H
#define PLI_PARENT_WATCH_H

#include "core/status.h"

/* Either descriptor may be -1; both are taken over on success. */
pl_status pli_parent_watch_start(int pidfd, int pipe_fd) PL_MUST_USE;

#endif
