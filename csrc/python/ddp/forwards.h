/* forwards.h - which backward is a step. */
#ifndef PLI_FORWARDS_H
#define PLI_FORWARDS_H

#include "reducer_object.h"

/* Whether pli_forwards_answer() is called when a forward's backward begins. */
typedef enum forward_outputs { OUTPUTS_UNWATCHED, OUTPUTS_WATCHED } forward_outputs;

/* A synchronised forward has ended; what to answer it by, 0 if it is unwatched. */
uint64_t pli_forwards_end(reducer_object *self, forward_outputs outputs,
                          forward_mode mode);

/* The backward of the forward of this token begins. */
void pli_forwards_answer(reducer_object *self, uint64_t token);

/* Whether a gradient that comes for slot i while no step is under way begins one. */
int pli_forwards_begin_step(const reducer_object *self, size_t i);

/* Before `close`: sends this rank's counts with the step's flags. */
void pli_forwards_send(reducer_object *self);

/* A step is over. */
void pli_forwards_end_step(reducer_object *self);

/* A backward has failed: no forward since the last step has one. */
void pli_forwards_take_back(reducer_object *self);

/* A failed step was left behind, in the n-th forward of the step to come. */
void pli_forwards_restart(reducer_object *self, unsigned n);

#endif
