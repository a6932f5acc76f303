/* step.h - one backward, from its first gradient to its reduced ones. */
#ifndef PLI_STEP_H
#define PLI_STEP_H

#include "reducer_object.h"

/* -1, with an exception, in a process forked from the rank. */
int pli_step_check_process(const reducer_object *self);

/* Leaves a failed step behind, together with every rank; at once where none failed. */
int pli_step_recover(reducer_object *self);

int pli_step_begin(reducer_object *self);

/* Also raises, after a step without fault, where a join context is to end with it. */
int pli_step_finish(reducer_object *self);

/* The outermost backward of this thread is over: posts what is left of every step in
 * it, since another rank may wait for them in another order, and then finishes them in
 * the order in which the reducers were made: the operations that follow those of the
 * buckets (second all-reduces, sparse rows) are then in one order on all ranks. */
int pli_step_finish_all(reducer_object *self);

/* The step failed here: sends the text to the peers; an exception that is set stays
 * set. */
void pli_step_fail(reducer_object *self, const char *text);

/* ... with the text of the exception that is set. */
void pli_step_fail_with_exception(reducer_object *self);

#endif
