/* forwards.h - which backward is a step. */
#ifndef PLI_FORWARDS_H
#define PLI_FORWARDS_H

#include "reducer_object.h"

/* Whether pli_forwards_answer() is called when a forward's backward begins. */
typedef enum forward_outputs { OUTPUTS_UNWATCHED, OUTPUTS_WATCHED } forward_outputs;

/* A synchronised forward ended.  Returns a token for its answer; 0 if unwatched. */
uint64_t pli_forwards_end(reducer_object *self, forward_outputs outputs,
                          forward_mode mode);

/* The backward of the forward with this token begins. */
void pli_forwards_answer(reducer_object *self, uint64_t token);

/* If no step is under way: whether a gradient for slot i begins one. */
int pli_forwards_begin_step(const reducer_object *self, size_t i);

/* Before `close`: sends this rank's counts with the step's flags. */
void pli_forwards_send(reducer_object *self);

/* A step is over; its results were taken, or dropped. */
void pli_forwards_end_step(reducer_object *self, int is_taken);

/* A synchronised forward raised: no backward of it follows.  If a peer has failed the
 * step, this rank has given up the same one. */
void pli_forwards_raise(reducer_object *self, forward_mode mode);

/* A step has failed. */
void pli_forwards_fail_step(reducer_object *self);

/* After a failed step: a synchronised forward could not begin. */
void pli_forwards_lose(reducer_object *self);

/* Continues the counts of a reducer whose step has failed. */
void pli_forwards_follow(reducer_object *self, const reducer_object *failed);

/* Forgets what steps that failed have counted.  For a join context that begins or ends:
 * ranks that left it by an exception are together. */
void pli_forwards_forget_failed(reducer_object *self);

#endif
