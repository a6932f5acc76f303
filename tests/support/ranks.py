"""Run a function on N ranks, fast and with a timeout.

    from support.ranks import run_ranks, values

    def train(rank, n_ranks, width):         # at the top level of a module
        model = paceline.DistributedDataParallel(torch.nn.Linear(width, 1))
        ...
        return model.module.weight.detach()

    def test_weights_are_equal():
        first, second = values(run_ranks(train, 2, 8))

`tests/conftest.py` puts `tests/` on `sys.path`, so every test file imports this as
`support.ranks`.  Ranks get the same path and import the test's module by its name.

Each rank is forked from a server that has imported torch and paceline once, so it
starts in about 30 ms.  It has one intra-op thread, a default process group (Gloo) over
a store of this run, and a file for its output.  It lives until every rank has reported.
Then it ends by `os._exit`, since torch's Gloo wrapper sometimes aborts in an ordinary
exit.  A run that exceeds its timeout is killed; the failure shows the stack of every
thread of every rank.

With `TEST_RANKS_PER_HOST=2`, ranks 0 and 1 appear to be on a different host than ranks
2 and 3 (`support.hosts`).  `make hosts` runs the tests that must hold there too.

For tests that act on ranks, `start_ranks()` returns a `Ranks`: a test can kill or stop
its `pids`, and `hear()` returns what a rank sent by `tell()`.  Ranks and the test share
the clock of `time.monotonic()`, so the times that they report can be compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import (
    connection,
    context,
    forkserver,
    get_context,
    set_start_method,
)
from pathlib import Path
from typing import Any, Literal

from support.hosts import Hosts

DEFAULT_TIMEOUT = 60.0
_DUMP_SECONDS = 1.0
_PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # 2 s, which every optimizer's first step would take
    "torch.profiler",  # imported by the first step of a DataLoader
    "paceline._ddp.distributed",
    "support.ranks",
]

Rendezvous = Literal["file", "tcp", "none"]


@dataclass(frozen=True)
class RankError:
    """The exception that ended a rank's function."""

    kind: str  # "PeerError"
    message: str
    traceback: str
    exception: BaseException | None = None  # None if it does not pickle

    def __str__(self) -> str:
        return self.traceback


@dataclass(frozen=True)
class Outcome:
    """The outcome of a rank: a value, an error, or an exit without either."""

    rank: int
    value: Any = None
    error: RankError | None = None
    exitcode: int | None = None  # None if it reported; -9 if it was killed
    output: str = ""  # stdout and stderr, mixed

    @property
    def is_ok(self) -> bool:
        return self.error is None and self.exitcode is None


class RanksTimeoutError(AssertionError):
    """A run exceeded its timeout; the message has the stacks of all ranks."""


class RanksFailedError(AssertionError):
    """A rank failed, so the values of the run are incomplete."""


@dataclass
class _Job:
    rank: int
    n_ranks: int
    folder: str
    rendezvous: Rendezvous
    group_timeout: float
    timeout: float
    env: dict[str, str]
    ranks_per_host: int  # 0: all are on one host
    function: bytes  # pickled, so that a failure to import it is reported as an error
    output: str = field(init=False)
    dump: str = field(init=False)

    def __post_init__(self) -> None:
        self.output = f"{self.folder}/output.{self.rank}"
        self.dump = f"{self.folder}/dump.{self.rank}"


# ---- in the rank --------------------------------------------------------------------

_to_test: connection.Connection | None = None


def tell(words: Any) -> None:
    """In a rank: send a picklable object to the test, for `Ranks.hear()`."""
    assert _to_test is not None, "tell() is for ranks"
    _to_test.send(("said", words))


def _make_group(job: _Job) -> None:
    import torch.distributed as dist

    store: dist.Store
    if job.rendezvous == "none":
        return
    if job.rendezvous == "file":
        store = dist.FileStore(f"{job.folder}/store", job.n_ranks)
    else:
        store = _make_tcp_store(job)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=job.rank,
        world_size=job.n_ranks,
        timeout=timedelta(seconds=job.group_timeout),
    )


def _make_tcp_store(job: _Job) -> Any:
    import torch.distributed as dist

    port_file = Path(job.folder, "port")
    limit = timedelta(seconds=job.group_timeout)
    if job.rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", 0, job.n_ranks, True, limit, wait_for_workers=False
        )
        port_file.with_suffix(".part").write_text(str(store.port))
        port_file.with_suffix(".part").rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.002)
    port = int(port_file.read_text())
    return dist.TCPStore("127.0.0.1", port, job.n_ranks, False, limit)


def _redirect(path: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    # The server's own stream objects may be closed or refer to the null device.
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)


def _describe_error(error: BaseException) -> RankError:
    keep: BaseException | None = error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        keep = None
    words = "".join(traceback.format_exception(error))
    return RankError(type(error).__name__, str(error), words, keep)


def _call(job: _Job) -> tuple[str, Any]:
    try:
        import torch

        torch.set_num_threads(1)
        _make_group(job)
        function, args = pickle.loads(job.function)
        value = function(job.rank, job.n_ranks, *args)
        return "value", pickle.dumps(value)
    except BaseException as error:
        return "error", _describe_error(error)


def _rank_main(job: _Job, to_test: connection.Connection) -> None:
    global _to_test
    _to_test = to_test
    gc.freeze()  # all that the server has imported
    os.environ.update(job.env)
    set_start_method(None, force=True)  # the default of a script, not this server
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _redirect(job.output)
    dump = open(job.dump, "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.enable(sys.stderr)
    with contextlib.suppress(OSError):  # it exists if `make` runs the tests
        ctypes.CDLL(str(Path(__file__).parents[2] / "build/crash.so"))
    faulthandler.register(signal.SIGUSR1, dump, all_threads=True)
    faulthandler.dump_traceback_later(job.timeout + 15.0, exit=True, file=dump)
    if job.ranks_per_host:
        n_hosts = -(-job.n_ranks // job.ranks_per_host)
        Hosts((job.ranks_per_host,) * n_hosts).place(job.rank)
    try:
        to_test.send(_call(job))
        to_test.recv()  # until every rank has reported, or the test has ended
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


# ---- in the test --------------------------------------------------------------------


_servers: list[context.ForkServerContext] = []


def preload(*modules: str) -> None:
    """Have the server import more modules; call it before the first run of ranks."""
    assert not _servers, "the server of this process runs already"
    _PRELOAD.extend(modules)


def _context() -> context.ForkServerContext:
    """Return the context of a server that has imported the slow modules."""
    ranks_of = get_context("forkserver")
    ranks_of.set_forkserver_preload(_PRELOAD)
    tests = str(Path(__file__).parents[1])
    paths = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    before = os.environ.copy()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    if not _servers:
        first = ranks_of.Process(target=os.getpid)
        first.start()
        first.join()  # wait for the imports, so that no run's timeout counts them
        _servers.append(ranks_of)
    return ranks_of


class Ranks:
    """Running ranks; as a context manager, it kills those that are left.

    Made by `start_ranks()`.
    """

    def __init__(self, jobs: list[_Job], folder: str, timeout: float) -> None:
        self._folder = folder
        ranks_of = _context()
        self._until = time.monotonic() + timeout
        self._timeout = timeout
        self._processes = []
        self._pipes: list[connection.Connection] = []
        self._heard: list[deque[Any]] = [deque() for _ in jobs]
        self._outcomes: dict[int, Outcome] = {}
        self._jobs = jobs
        for job in jobs:
            mine, theirs = ranks_of.Pipe()
            process = ranks_of.Process(target=_rank_main, args=(job, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank; return the time just before."""
        now = time.monotonic()
        os.kill(self.pids[rank], number)
        return now

    def kill(self, rank: int) -> float:
        """Send SIGKILL to a rank; return the time just before."""
        return self.signal(rank, signal.SIGKILL)

    def hear(self, rank: int) -> Any:
        """Return the next object that a rank sends by `tell()`.

        Raise `RanksFailedError` if the rank ends or reports before it sends one.
        """
        while not self._heard[rank]:
            if rank in self._outcomes:
                raise RanksFailedError(_show(self._outcomes[rank]))
            self._listen()
        return self._heard[rank].popleft()

    def wait(self) -> list[Outcome]:
        """Wait until all ranks are done; return their outcomes, by rank."""
        while len(self._outcomes) < len(self._jobs):
            self._listen()
        self._end()
        return [self._outcomes[rank] for rank in range(len(self._jobs))]

    def _listen(self) -> None:
        """Receive one round of messages; raise if the time is up."""
        left = self._until - time.monotonic()
        if left <= 0:
            self._fail()
        waiting = [job.rank for job in self._jobs if job.rank not in self._outcomes]
        objects = {self._pipes[rank]: rank for rank in waiting}
        sentinels = {self._processes[rank].sentinel: rank for rank in waiting}
        ready = connection.wait([*objects, *sentinels], timeout=left)
        for thing in ready:
            if isinstance(thing, connection.Connection):
                self._take(objects[thing])
        for thing in ready:
            if isinstance(thing, int) and sentinels[thing] not in self._outcomes:
                self._bury(sentinels[thing])

    def _take(self, rank: int) -> None:
        """Receive a rank's next message, or the end of its pipe."""
        try:
            kind, what = self._pipes[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(10)
            self._report(Outcome(rank, exitcode=self._processes[rank].exitcode))
            return
        if kind == "said":
            self._heard[rank].append(what)
        elif kind == "value":
            self._report(Outcome(rank, value=pickle.loads(what)))
        else:
            self._report(Outcome(rank, error=what))

    def _bury(self, rank: int) -> None:
        """Receive the remaining messages of a rank whose process has ended."""
        while rank not in self._outcomes and self._pipes[rank].poll(0):
            self._take(rank)
        # If its children hold the pipe open, its end cannot be read.
        if rank not in self._outcomes:
            self._processes[rank].join(10)
            self._report(Outcome(rank, exitcode=self._processes[rank].exitcode))

    def _report(self, outcome: Outcome) -> None:
        path = Path(self._jobs[outcome.rank].output)
        output = path.read_text(errors="replace") if path.exists() else ""
        self._outcomes[outcome.rank] = replace(outcome, output=output)

    def _end(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send("end")
        for process in self._processes:
            process.join(5)

    def _fail(self) -> None:
        words = [f"the ranks were not done after {self._timeout} s"]
        late = [job.rank for job in self._jobs if job.rank not in self._outcomes]
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGCONT)
                os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(_DUMP_SECONDS)
        for job in self._jobs:
            if job.rank in self._outcomes:
                words.append(_show(self._outcomes[job.rank]))
                continue
            for title, path in (("stands at", job.dump), ("printed", job.output)):
                text = Path(path).read_text(errors="replace")
                words.append(f"---- rank {job.rank} {title}\n{text}")
        self.close()
        raise RanksTimeoutError("\n".join(words))

    def close(self) -> None:
        """Kill ranks that still run, and remove the run's files."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_ranks(
    function: Callable[..., Any],
    n_ranks: int,
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT,
    rendezvous: Rendezvous = "file",
    group_timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> Ranks:
    """Start `function(rank, n_ranks, *args)` on each rank; return handles.

    The function must be at the top level of a module that ranks can import, with
    arguments that pickle.  `timeout` is for the whole run, in seconds.  The store of
    the default process group is a file, or a TCPStore that rank 0 hosts ("tcp"); with
    "none" there is no group.  `group_timeout` is the timeout of the group.  Each rank
    sets `env` before anything else.
    """
    folder = tempfile.mkdtemp(prefix="ranks-")
    pickled = pickle.dumps((function, args))
    per_host = int(os.environ.get("TEST_RANKS_PER_HOST", "0"))
    times, given = (group_timeout, timeout), dict(env or {})
    jobs = [
        _Job(rank, n_ranks, folder, rendezvous, *times, given, per_host, pickled)
        for rank in range(n_ranks)
    ]
    return Ranks(jobs, folder, timeout)


def run_ranks(
    function: Callable[..., Any], n_ranks: int, *args: Any, **options: Any
) -> list[Outcome]:
    """Run `function(rank, n_ranks, *args)` on each rank; options as `start_ranks()`.

    Return an Outcome by rank: `.value`, or `.error` (`.kind`, `.message`,
    `.traceback`), or `.exitcode`.  Raise `RanksTimeoutError`, with every rank's stack,
    if they are not done in time.
    """
    with start_ranks(function, n_ranks, *args, **options) as ranks:
        return ranks.wait()


def _show(outcome: Outcome) -> str:
    if outcome.error is not None:
        what = f"raised {outcome.error.traceback}"
    elif outcome.exitcode is not None:
        what = f"ended with exit code {outcome.exitcode}"
    else:
        what = f"returned {outcome.value!r}"[:500]
    return f"---- rank {outcome.rank} {what}\n{outcome.output}"


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return every rank's value; raise `RanksFailedError` if one has none."""
    if not all(outcome.is_ok for outcome in outcomes):
        raise RanksFailedError("\n".join(map(_show, outcomes)))
    return [outcome.value for outcome in outcomes]
