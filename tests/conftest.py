"""Makes `support` importable by every test, and by the ranks that tests start."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

_TESTS = str(Path(__file__).parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

# A shell starts what runs in the background with interrupts ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Record steps under a name that no other run reads."""
    os.environ.setdefault("PACELINE_RECORDER", f"tests-{os.getpid()}")


def pytest_collection_finish(session):
    """Leave what the imports have made, most of it torch's, out of all collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def forked_workers():
    """Start the file's ranks by fork, in milliseconds."""
    from support import warm

    with warm.ranks_of_launch():
        yield
