"""Files in memory that look like recordings, for readers of recorded steps."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def needs_memfd() -> None:
    """Skip the test with a Python that cannot make files in memory."""
    if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        pytest.skip("this Python was built without memfd_create")


@contextlib.contextmanager
def planted(name: str, text: bytes, *, is_sealed: bool = True) -> Iterator[Path]:
    """Hold a file in memory of this name and content open; give its path."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, text)
        if is_sealed:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)
