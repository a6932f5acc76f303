/* reducer_list.c - reducers enter the list when they are made, and leave when they end.
 *
 * With a GIL no thread finds a reducer that has lost its last reference.  Without a GIL
 * a thread may; the weak reference that each reducer has to itself then shows the loss.
 */
#include "reducer_list.h"

int pli_reducers_enter(module_state *state, reducer_object *self)
{
    reducer_object **link = &state->reducers;
#ifdef Py_GIL_DISABLED
    self->weak_self = PyWeakref_NewRef((PyObject *)self, NULL);
    if (self->weak_self == NULL)
        return -1;
#endif
    while (*link != NULL)
        link = &(*link)->next;
    *link = self;
    return 0;
}

void pli_reducers_leave(module_state *state, reducer_object *self)
{
    PLI_ENTER(self);
    reducer_object **link = &state->reducers;
    while (*link != NULL && *link != self)
        link = &(*link)->next;
    if (*link != NULL)
        *link = self->next;
}

reducer_object *pli_reducer_ref(reducer_object *self)
{
#ifdef Py_GIL_DISABLED
    PyObject *object = NULL;
    if (PyWeakref_GetRef(self->weak_self, &object) < 0)
        PyErr_Clear(); /* set only if weak_self is no weak reference */
    return (reducer_object *)object;
#else
    return (reducer_object *)Py_NewRef((PyObject *)self);
#endif
}

reducer_object *pli_reducers_first(reducer_object *list)
{
    reducer_object *found = NULL;
    for (; list != NULL && found == NULL; list = list->next)
        found = pli_reducer_ref(list);
    return found;
}
