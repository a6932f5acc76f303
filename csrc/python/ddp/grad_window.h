/* grad_window.h - the window through which gradients see their slots (comm/window.h).
 */
#ifndef PLI_GRAD_WINDOW_H
#define PLI_GRAD_WINDOW_H

#include "reducer_object.h"

/* If the window has views, leaves it to them; they keep their values. */
int pli_grad_window_retire(reducer_object *self);

/* Makes the window show the current plan; holders of old views keep their values. */
int pli_grad_window_refresh(reducer_object *self);

#endif
