"""Check that making and dropping an object a thousand times leaves nothing."""

import ctypes
import gc
import os
import sys
import threading

from paceline import _native

from support.threads import IS_FREE_THREADED

N_TRIES = 1000


class _Heap(ctypes.Structure):
    """What the C library's mallinfo2() returns; the eighth counts bytes in use."""

    _fields_ = tuple((f"field_{i}", ctypes.c_size_t) for i in range(10))


def _n_bytes_of_c():
    heap = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 has it
    if heap is None:
        return 0
    heap.restype = _Heap
    return heap().field_7


def _n_entries(what):
    return len(os.listdir(f"/proc/self/{what}"))


def _counts(things):
    for _ in range(3):  # without a GIL, memory becomes free some collections later
        gc.collect()
    held = {str(k): k for k in vars(_native).values() if isinstance(k, type)}
    held |= dict(enumerate(things))
    if IS_FREE_THREADED:  # a type has a count in each thread, until that ends
        held = {name: x for name, x in held.items() if not isinstance(x, type)}
    return {
        **{f"references to {name}": sys.getrefcount(x) for name, x in held.items()},
        "references to the module": sys.getrefcount(_native),
        "descriptors": _n_entries("fd"),
        "threads": _n_entries("task"),
        "Python's threads": threading.active_count(),
        "objects": len(gc.get_objects()),
        "blocks of Python": sys.getallocatedblocks(),
        "bytes of C": _n_bytes_of_c(),
    }


def assert_leaves_nothing(make, *things, n=N_TRIES, c_bytes=0):
    """Check that calling `make` n times leaves all counts unchanged.

    Counted are the references to `things`, to the native module and to its types, and
    this process's descriptors, threads, objects and memory.  Each call may leave
    `c_bytes` of C memory: simulated CUDA keeps the objects that it has made.
    """
    for _ in range(3):
        make()
    before = _counts(things)
    for _ in range(n):
        make()
    after = _counts(things)
    # A thread of an earlier test may have ended in the meantime, and Python makes some
    # objects itself.  A leak of one object per call is twice these limits.
    most = {"objects": n // 2, "blocks of Python": 600}
    most["bytes of C"] = 16_000 + n * c_bytes
    left = {what: count - before[what] for what, count in after.items()}
    more = {what: k for what, k in left.items() if k > most.get(what, 0)}
    assert more == {}, more
    gone = {what: k for what, k in left.items() if "references" in what and k < 0}
    assert gone == {}, "dropped once too often"
