"""Have the kernel refuse system calls of this process from now on, as in a sandbox.

This uses a seccomp filter, which any process may set but none can remove.  So use it
only in ranks, which end after their test.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_NUMBERS = {
    "x86_64": {"memfd_create": 319, "pidfd_open": 434, "getsockopt": 55},
    "aarch64": {"memfd_create": 279, "pidfd_open": 434, "getsockopt": 209},
}
_LOAD_NUMBER = (0x20, 0, 0, 0)  # seccomp_data.nr
_LOAD_THIRD = (0x20, 0, 0, 32)  # the third argument
_ALLOW = (0x06, 0, 0, 0x7FFF0000)
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38


def is_known() -> bool:
    """Tell whether the numbers of this machine's system calls are known here."""
    return platform.machine() in _NUMBERS


def forbid(
    name: str, error: int = errno.EPERM, third_argument: int | None = None
) -> None:
    """Make a system call fail in this thread and in the threads that it starts."""
    number = _NUMBERS[platform.machine()][name]
    more = []
    if third_argument is not None:
        more = [_LOAD_THIRD, (0x15, 0, 1, third_argument)]
    rows = [
        _LOAD_NUMBER,
        (0x15, 0, 1 + len(more), number),  # if it is another system call, skip rows
        *more,
        (0x06, 0, 0, 0x00050000 | error),
        _ALLOW,
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *r) for r in rows))

    class Program(ctypes.Structure):
        _fields_ = (("n", ctypes.c_ushort), ("rows", ctypes.c_void_p))

    program = Program(len(rows), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "cannot set a seccomp filter")
