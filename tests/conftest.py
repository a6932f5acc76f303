"""Makes `support` importable by every test, and by the ranks that tests start."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

_TESTS = str(Path(__file__).parent)
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

# A shell starts what runs in the background with interrupts ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Record steps where no other run, and no other test of memory, sees them."""
    if "PACELINE_RECORDER" not in os.environ:  # else the run's workers have it
        config.recorder_folder = tempfile.mkdtemp(prefix="recorded-")
        os.environ["PACELINE_RECORDER"] = config.recorder_folder


def pytest_unconfigure(config):
    """Remove what ranks have left that were killed."""
    if hasattr(config, "recorder_folder"):
        shutil.rmtree(config.recorder_folder, ignore_errors=True)


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
