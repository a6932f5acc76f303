/* gpu_step.h - streams and copies of a step; on the CPU only the copies have effect. */
#ifndef PLI_GPU_STEP_H
#define PLI_GPU_STEP_H

#include "reducer_object.h"

/* Reads this thread's current stream: the reducer enqueues on it from now on. */
int pli_gpu_step_read_stream(reducer_object *self);

/* Whether a graph is captured on that stream; call it on a GPU only. */
int pli_gpu_step_is_capturing(const reducer_object *self, int *out);

/* Before a step: -1 if a graph is captured before the reducer's plan is final. */
int pli_gpu_step_check_capture(reducer_object *self);

/* Adds a copy to the next pli_step_copy(). */
void pli_step_defer_copy(reducer_object *self, void *to, const void *from,
                         const pli_layout *layout);

/* Makes all deferred copies: on a GPU in one launch, on `stream`. */
int pli_step_copy(reducer_object *self, pl_stream *stream);

/* Drops gradients that were retained for buckets posted in the meantime. */
void pli_gpu_step_release_posted(reducer_object *self);

#endif
