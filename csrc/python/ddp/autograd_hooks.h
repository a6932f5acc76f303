/* autograd_hooks.h - what autograd calls: each parameter's hook, and the end of a
 * backward, with which the steps of live reducers end. */
#ifndef PLI_AUTOGRAD_HOOKS_H
#define PLI_AUTOGRAD_HOOKS_H

#include "reducer_object.h"

/* Puts a new reducer at the end of the module's list of live ones; 0 or -1. */
int pli_reducers_enter(module_state *state, reducer_object *self);

/* Takes it out, if it is there. */
void pli_reducers_leave(module_state *state, reducer_object *self);

/* The hook of parameter i; and the function behind it that torch calls: a builtin, the
 * cheapest callable. */
PyObject *pli_hook_new(const module_state *state, reducer_object *reducer, size_t i);
PyObject *pli_hook_function(PyObject *hook);

/* The reducer is gone: makes the hook do nothing. */
void pli_hook_detach(PyObject *hook);

/* Makes the engine call us when this backward ends, unless that is queued already. */
int pli_backward_end_queue(reducer_object *self, pl_end_origin origin);

/* On a GPU, and with RPC: waits up to a second until no callback is queued.  If a
 * backward fails in a thread of torch, the caller sees the exception possibly before
 * that thread has dropped its callbacks.  Must not be called inside a backward. */
int pli_backward_end_await(const reducer_object *self);

/* Finishes a step. */
int pli_step_finish(reducer_object *self);

/* Raises the exception of a failed status; if a step is under way, fails that with the
 * exception's text.  0, or -1. */
int pli_step_check(reducer_object *self, pl_status st);

/* The step failed here: sends the text to the peers.  Leaves an exception that is set
 * unchanged. */
void pli_step_fail(reducer_object *self, const char *text);

/* pli_step_fail() with the text of the exception that is set. */
void pli_step_fail_with_exception(reducer_object *self);

/* unwound_keeper(kept) -> callable, of the module */
PyObject *pli_unwound_keeper(PyObject *module, PyObject *kept);

#endif
