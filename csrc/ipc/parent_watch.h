/* parent_watch.h - ends this process and its group when its parent ends.
 *
 * A native thread waits until the process behind `pidfd` ends or `pipe_fd` reaches end
 * of file, whichever is first.  It then ends this process at once: no handler, no
 * destructor, no flush.  If this process leads its group, the programs that it has
 * started end too; if it is stopped (SIGSTOP), the kernel continues it for that.
 *
 * The parent opened both descriptors, so a reused process number cannot mislead the
 * thread.  The pidfd shows that the parent died, even if its forked children hold
 * copies of its descriptors; the pipe shows that it called exec().
 */
#ifndef PLI_PARENT_WATCH_H
#define PLI_PARENT_WATCH_H

#include "core/status.h"

/* One descriptor may be -1.  On success, the thread owns both. */
pl_status pli_parent_watch_start(int pidfd, int pipe_fd) PL_MUST_USE;

#endif
