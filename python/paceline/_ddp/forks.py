"""What a forked child must not destroy: torch's groups, stores, and work in flight.

Destroying a Gloo group joins its threads, and destroying rank 0's store joins that of
its server.  A forked child has none of these threads: it would hang or crash.  So the
child keeps a reference to each object, even beyond the end of its interpreter.
"""

from __future__ import annotations

import functools
import os
import weakref
from contextlib import suppress
from typing import Any, TypeVar

from paceline import _native
from paceline._compat import torch_core, torch_groups

_Object = TypeVar("_Object")

_noted: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note(thing: _Object) -> _Object:
    """Return a group, store, Work, future or hook, which children must keep."""
    prepare()
    with suppress(TypeError):  # None, or what else a group in Python may return
        _noted[id(thing)] = thing
    return thing


@functools.cache  # registers once
def prepare() -> None:
    """Make forked children keep torch's objects, and leave the worlds of the parent."""
    os.register_at_fork(before=_native.before_fork, after_in_child=_keep)


def _keep() -> None:
    _native.after_fork_in_child([*_noted.values(), *torch_groups.registered()])


# This runs in backwards, which torch.compile may trace.
torch_core.skip_frames(note)
