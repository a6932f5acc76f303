"""Check that making and dropping an object a thousand times leaves nothing."""

import gc
import os
import sys
import threading

from paceline import _native

N_TRIES = 1000


def _n_entries(what):
    return len(os.listdir(f"/proc/self/{what}"))


def _counts(things):
    gc.collect()
    kinds = {k for k in vars(_native).values() if isinstance(k, type)}
    return {
        **{f"references to {kind}": sys.getrefcount(kind) for kind in kinds},
        **{f"references to {i}": sys.getrefcount(x) for i, x in enumerate(things)},
        "references to the module": sys.getrefcount(_native),
        "descriptors": _n_entries("fd"),
        "threads": _n_entries("task"),
        "Python's threads": threading.active_count(),
        "objects": len(gc.get_objects()),
    }


def assert_leaves_nothing(make, *things, n=N_TRIES):
    """Check that calling `make` n times leaves all counts unchanged.

    Counted are the references to `things`, to the native module and to its types, and
    this process's descriptors, threads and objects.
    """
    for _ in range(3):
        make()
    before = _counts(things)
    for _ in range(n):
        make()
    after = _counts(things)
    # A thread of an earlier test may have ended in the meantime, and Python makes some
    # objects itself.  A leak of one object per call is twice this limit.
    most = {"objects": n // 2}
    left = {what: count - before[what] for what, count in after.items()}
    assert {what: k for what, k in left.items() if k > most.get(what, 0)} == {}
    gone = {what: k for what, k in left.items() if "references" in what and k < 0}
    assert gone == {}, "dropped once too often"
