/* step.h - one backward, from its first gradient to its reduced gradients. */
#ifndef PLI_STEP_H
#define PLI_STEP_H

#include "reducer_object.h"

/* Returns -1, with an exception, in a process forked from the rank. */
int pli_step_check_process(const reducer_object *self);

int pli_step_begin(reducer_object *self);

/* Finishes a step.  After a successful step it raises if a join context must end. */
int pli_step_finish(reducer_object *self);

/* Ends this thread's outermost backward.  First posts the rest of all its steps, since
 * another rank may wait for them in another order.  Then finishes the steps in the
 * order in which their reducers were made, so that all ranks issue later operations
 * (second all-reduces, sparse rows) in one order. */
int pli_step_finish_all(reducer_object *self);

/* The step failed here: sends the text to the peers.  Leaves an exception that is set
 * unchanged. */
void pli_step_fail(reducer_object *self, const char *text);

/* pli_step_fail() with the text of the exception that is set. */
void pli_step_fail_with_exception(reducer_object *self);

/* Methods of the Reducer for ranks that ran out of batches. */
PyObject *pli_join_shadow_step(PyObject *object, PyObject *args);
PyObject *pli_join_abandon(PyObject *object, PyObject *text);
PyObject *pli_join_set(PyObject *object, PyObject *args);

#endif
