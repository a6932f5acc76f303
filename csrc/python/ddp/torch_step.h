/* torch_step.h - what a step calls: torch's tensors, and torch's engine.  Its context
 * is the reducer_object; a pl_grad is a PyObject. */
#ifndef PLI_TORCH_STEP_H
#define PLI_TORCH_STEP_H

#include "reducer_object.h"

extern const pl_grad_ops pli_torch_grads;
extern const pl_step_host pli_torch_host;

#endif
