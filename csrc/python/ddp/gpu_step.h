/* gpu_step.h - streams and copies of a step; what is not about copies has no effect on
 * the CPU. */
#ifndef PLI_GPU_STEP_H
#define PLI_GPU_STEP_H

#include "reducer_object.h"

/* Asks for this thread's current stream: what the reducer enqueues from now on goes
 * there. */
int pli_gpu_step_read_stream(reducer_object *self);

/* Whether a graph is captured on that stream; on a GPU alone. */
int pli_gpu_step_is_capturing(const reducer_object *self, int *out);

/* Before a step: -1 where a graph is captured, and the reducer has yet to learn. */
int pli_gpu_step_check_capture(reducer_object *self);

/* Adds a copy to those that the next pli_step_copy() makes. */
void pli_step_defer_copy(reducer_object *self, void *to, const void *from,
                         const pli_layout *layout);

/* Makes all deferred copies: on a GPU in one launch, on `stream`. */
int pli_step_copy(reducer_object *self, pl_stream *stream);

/* Drops the gradients that were retained for buckets that have been posted since. */
void pli_gpu_step_release_posted(reducer_object *self);

#endif
