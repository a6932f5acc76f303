"""Worker processes: what they raise, what they print, and how they always end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import paceline
import pytest
import torch
from paceline import _native
from paceline._errors import unpack_exception
from paceline._workers import group, spawn
from support.echo import ECHO, RUN
from support.forked_workers import forked_workers
from support.processes import held_beyond, holdings, is_running, wait_until_gone
from support.waiting import until

HANDLER = "support.echo:Echo"
JOB = Path(__file__).parent / "jobs" / "worker_group_life.py"
TESTS = Path(__file__).parents[1]
LONG_SECONDS = 60.0
ERROR = 255


@pytest.fixture(scope="module")
def shared() -> Iterator[group.WorkerGroup]:
    workers = group.WorkerGroup(2, HANDLER)
    workers.wait_until_ready()
    yield workers
    workers.close()


def run_in(workers: group.WorkerGroup, code: str, tensors: Any = (), k: int = 0) -> Any:
    """Run code in a worker; return words and tensors, or raise what it raised."""
    channel = workers.channels[k]
    channel.post(RUN, code.encode(), list(tensors))
    kind, words, reply, _ = channel.wait(copy=True)
    if kind == ERROR:
        raise unpack_exception(words, k + 1, "cpu")
    return words, reply


def told(workers: group.WorkerGroup, expression: str, k: int = 0) -> str:
    words, _ = run_in(
        workers, f"import os, sys; words = repr({expression}).encode()", (), k
    )
    return words.decode()


# ---- work ---------------------------------------------------------------------------


def test_workers_answer_side_by_side(shared: group.WorkerGroup) -> None:
    for n in (3, 100_000, 5):
        for k, channel in enumerate(shared.channels):
            channel.post(ECHO, b"abc", [torch.arange(n) + k, None, np.arange(n)])
        for k, channel in enumerate(shared.channels):
            kind, words, (tensor, nothing, array), flags = channel.wait(copy=True)
            assert (kind, words, nothing, flags) == (ECHO, b"abc", None, bytes(3))
            assert torch.equal(tensor, torch.arange(n) + k)
            assert array.tolist() == list(range(n))


def test_shared_memory_is_one_in_all_processes(shared: group.WorkerGroup) -> None:
    memory = _native.SharedMemory(4096)
    view = memory.view(0, torch.ones(4))
    code = f"""
import os
from paceline import _native
with open(f"/proc/{{os.getppid()}}/fd/{memory.fd}", "r+b", 0) as file:
    view = _native.SharedMemory(4096, file.fileno()).view(0, tensors[0])
view += 2
"""
    run_in(shared, code, [torch.ones(4)])
    assert view.tolist() == [2.0] * 4


def test_a_worker_resembles_its_parent(shared: group.WorkerGroup) -> None:
    assert told(shared, "sys.path") == repr(sys.path)
    assert told(shared, "sys.argv") == repr(sys.argv)
    assert told(shared, "os.getcwd()") == repr(os.getcwd())
    assert told(shared, "sys.stdin.read()") == "''"
    assert told(shared, "os.environ['PACELINE_WORKER']") == "'1'"
    for name in ("PYTHONPATH", "PYTHONSAFEPATH", "MALLOC_TRIM_THRESHOLD_"):
        assert told(shared, f"os.environ.get({name!r})") == repr(os.environ.get(name))


def test_each_worker_has_its_share_of_the_cores(shared: group.WorkerGroup) -> None:
    mine = os.sched_getaffinity(0)
    for k, share in enumerate(shared.shares[1:]):
        cores = set(share.cores) or mine
        assert told(shared, "os.sched_getaffinity(0)", k) == repr(cores)
        n_threads = told(shared, "__import__('torch').get_num_threads()", k)
        assert n_threads == str(share.n_threads)


@pytest.mark.parametrize(
    ("n_cores", "n_parties", "expected"),
    [
        (8, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (7, 3, [(0, 1), (2, 3), (4, 5, 6)]),
        (2, 2, [(0,), (1,)]),
        (2, 3, [(), (), ()]),
        (1, 1, [(0,)]),
    ],
)
def test_cores_are_shared_fairly_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, n_cores: int, n_parties: int, expected: Any
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(n_cores)))
    monkeypatch.setattr(spawn, "_cgroup_cores", lambda: None)
    shares = spawn.share_cores(n_parties)
    assert [share.cores for share in shares] == expected
    assert [share.n_threads for share in shares] == [max(1, len(c)) for c in expected]


def test_a_limited_container_has_fewer_threads_but_all_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(spawn, "_cgroup_cores", lambda: 4)
    shares = spawn.share_cores(2)
    assert [len(share.cores) for share in shares] == [4, 4]
    assert [share.n_threads for share in shares] == [2, 2]


def test_the_parents_mask_is_as_it_was(shared: group.WorkerGroup) -> None:
    before = os.sched_getaffinity(0)
    for _ in range(50):
        run_in(shared, "import time; time.sleep(0.001)")
    assert os.sched_getaffinity(0) == before


# ---- exceptions ---------------------------------------------------------------------


class Detailed(Exception):
    """Its constructor wants other arguments than it leaves in `args`."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(f"{what} with {code}")
        self.code = code


class Picky(ValueError):
    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.sum = first + second

    def __str__(self) -> str:
        return f"the sum is {self.sum}"


HERE = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("raise ValueError('bad value')", ValueError, "bad value"),
        ("{}['a key']", KeyError, "a key"),
        ("import torch; torch.ones(2) + torch.ones(3)", RuntimeError, "size of tensor"),
        ("1 / 0", ZeroDivisionError, "division"),
        ("assert False, 'a reason'", AssertionError, "a reason"),
        ("raise OSError(28, 'full')", OSError, "full"),
        ("open('/no/such/file')", FileNotFoundError, "No such file"),
        ("b'\\xff'.decode()", UnicodeDecodeError, "invalid start byte"),
        ("raise SystemExit(3)", RuntimeError, "SystemExit: 3"),
        ("raise KeyboardInterrupt", RuntimeError, "KeyboardInterrupt"),
        ("raise StopIteration(1)", StopIteration, "StopIteration"),
        (
            "import subprocess as s; s.run('false', check=True)",
            Exception,
            "exit status",
        ),
        ("raise ExceptionGroup('two', [ValueError(1)])", Exception, "two"),
    ],
)
def test_an_exception_keeps_its_type_and_says_where_it_was(
    shared: group.WorkerGroup, code: str, kind: type[Exception], words: str
) -> None:
    if "ExceptionGroup" in code and sys.version_info < (3, 11):
        pytest.skip("groups came with Python 3.11")
    with pytest.raises(kind) as caught:
        run_in(shared, code, k=1)
    text = f"{caught.value} {caught.value.__cause__}"
    assert words in text
    assert "in replica 2 on device cpu.\nOriginal " in text
    assert "Traceback (most recent call last):" in text
    assert 'File "<string>", line 1, in <module>' in text
    assert told(shared, "1 + 1", 1) == "2"


def test_a_key_error_is_readable(shared: group.WorkerGroup) -> None:
    with pytest.raises(KeyError) as caught:
        run_in(shared, "{}['a key']")
    assert "cpu.\nOriginal" in str(caught.value)


def raise_as(make: Any) -> str:
    words = cloudpickle.dumps(make)
    return f"import pickle; raise pickle.loads({words!r})()"


def test_an_exception_with_a_constructor_of_its_own_keeps_type_and_attributes(
    shared: group.WorkerGroup,
) -> None:
    with pytest.raises(Detailed, match="Caught Detailed in replica 1") as caught:
        run_in(shared, HERE + raise_as(lambda: Detailed("odd", code=7)))
    assert caught.value.code == 7


def test_an_exception_with_words_of_its_own_has_ours_as_its_cause(
    shared: group.WorkerGroup,
) -> None:
    with pytest.raises(Picky, match="the sum is 5") as caught:
        run_in(shared, HERE + raise_as(lambda: Picky(2, 3)))
    assert "Caught Picky in replica 1" in str(caught.value.__cause__)


def test_an_exception_of_a_type_made_here_is_caught_as_that_type(
    shared: group.WorkerGroup,
) -> None:
    class Own(Exception):
        pass

    with pytest.raises(Own, match="mine"):
        run_in(shared, raise_as(lambda: Own("mine")))


def test_what_does_not_pickle_of_an_exception_is_left_behind(
    shared: group.WorkerGroup,
) -> None:
    code = (
        "e = ValueError('kept'); import threading; e.lock = threading.Lock(); raise e"
    )
    with pytest.raises(ValueError, match="kept") as caught:
        run_in(shared, code)
    assert not hasattr(caught.value, "lock")


def test_a_type_that_does_not_pickle_arrives_as_a_runtime_error(
    shared: group.WorkerGroup,
) -> None:
    code = """
import threading
class Stuck(Exception):
    lock = threading.Lock()
raise Stuck('words')
"""
    with pytest.raises(RuntimeError, match="Caught Stuck in replica 1") as caught:
        run_in(shared, code)
    assert "words" in str(caught.value)


def test_an_answer_that_cannot_be_sent_is_an_exception_of_the_worker(
    shared: group.WorkerGroup,
) -> None:
    with pytest.raises(TypeError, match="Caught TypeError in replica 1"):
        run_in(shared, "reply = [object()]")


# ---- prints -------------------------------------------------------------------------


def test_prints_arrive_with_their_replica_before_the_answer(
    shared: group.WorkerGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print('one\\ntwo'); print('é', file=sys.stderr)"
    run_in(shared, code)
    run_in(shared, "print('other', end='')", k=1)
    run_in(shared, "print(' line')", k=1)
    shared.drain_output()
    out, err = capsys.readouterr()
    assert out == "[replica 1] one\n[replica 1] two\n[replica 2] other line\n"
    assert err == "[replica 1] é\n"


def test_a_worker_that_prints_much_is_not_stopped(
    shared: group.WorkerGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(shared, "for i in range(50_000): print(i, 'x' * 20)")
    shared.drain_output()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 50_000
    assert lines[-1] == "[replica 1] 49999 " + "x" * 20


def test_prints_arrive_while_the_worker_goes_on(
    shared: group.WorkerGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    channel = shared.channels[0]
    go = Path(os.environ.get("TMPDIR", "/tmp")) / f"paceline-go-{os.getpid()}"
    code = f"import os, time; print('early')\nwhile not os.path.exists({str(go)!r}): "
    channel.post(RUN, (code + "time.sleep(0.01)").encode(), [])
    seen: list[str] = []

    def has_arrived() -> bool:
        seen.append(capsys.readouterr().out)
        return "early" in "".join(seen)

    assert until(has_arrived, LONG_SECONDS)
    go.touch()
    channel.wait(copy=True)
    go.unlink()
    assert "".join(seen) == "[replica 1] early\n"


# ---- starts that fail ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "kind", "words"),
    [
        ("support.echo:Broken", LookupError, "no such model"),
        ("support.echo:Missing", AttributeError, "Missing"),
        ("no_such_module:Echo", ModuleNotFoundError, "no_such_module"),
    ],
)
def test_a_worker_that_cannot_start_says_why(
    capsys: pytest.CaptureFixture[str], handler: str, kind: type[Exception], words: str
) -> None:
    workers = group.WorkerGroup(1, handler)
    pids = workers.pids
    with pytest.raises(kind, match="in replica 1 on device cpu") as caught:
        workers.wait_until_ready()
    assert words in str(caught.value)
    workers.close()
    assert wait_until_gone(pids, 0.0) == []
    if "Broken" in handler:
        assert capsys.readouterr().out == "[replica 1] about to fail\n"


def test_an_interpreter_that_cannot_start_is_a_peer_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spawn.spawn, "get_executable", lambda: "/bin/false")
    before = holdings()
    workers = group.WorkerGroup(1, HANDLER)
    with pytest.raises(paceline.PeerError, match=r"replica 1 .* with status 1"):
        workers.wait_until_ready()
    workers.close()
    del workers
    assert held_beyond(before) == []


def test_an_interpreter_that_is_not_there_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = holdings()
    for path in ("/no/such/python", ""):
        monkeypatch.setattr(spawn.spawn, "get_executable", lambda path=path: path)
        with pytest.raises((OSError, RuntimeError)):
            group.WorkerGroup(2, HANDLER)
    assert held_beyond(before) == []


# ---- the end of a worker ------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.abort()", "was killed by SIGABRT"),
        ("import os; os._exit(7)", "ended by itself with status 7"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
    ],
)
def test_a_worker_that_ends_in_a_request_is_reported(code: str, words: str) -> None:
    workers = group.WorkerGroup(1, HANDLER)
    workers.wait_until_ready()
    pid = workers.pids[0]
    with pytest.raises(paceline.PeerError, match=words) as caught:
        run_in(workers, code)
    assert f"replica 1 (process {pid})" in str(caught.value)
    with pytest.raises(paceline.PeerError, match=words):
        workers.channels[0].post(ECHO, b"", [])
    workers.close()
    assert workers.pids == []


def test_a_worker_killed_between_requests_is_reported_at_the_next() -> None:
    workers = group.WorkerGroup(2, HANDLER)
    workers.wait_until_ready()
    os.kill(workers.pids[1], signal.SIGKILL)
    with pytest.raises(paceline.PeerError, match=r"replica 2 .* SIGKILL"):
        run_in(workers, "pass", k=1)
    assert told(workers, "2") == "2"  # the other one goes on
    workers.close()


def test_a_worker_killed_in_its_work_is_reported(
    shared: group.WorkerGroup,
) -> None:
    workers = group.WorkerGroup(1, HANDLER)
    workers.wait_until_ready()
    killer = threading.Timer(0.3, os.kill, (workers.pids[0], signal.SIGKILL))
    killer.start()
    with pytest.raises(paceline.PeerError, match="SIGKILL"):
        run_in(workers, "while True: pass")
    killer.join()
    workers.close()


@pytest.mark.slow
def test_twenty_groups_come_and_go_and_leave_nothing() -> None:
    with forked_workers():
        come_and_go(1)  # starts the server
        before = holdings()
        come_and_go(20)
        assert held_beyond(before) == []


def come_and_go(n_groups: int) -> None:
    pids = []
    for _ in range(n_groups):
        workers = group.WorkerGroup(1, HANDLER)
        pids += workers.pids
        workers.wait_until_ready()
        assert told(workers, "1") == "1"
        workers.close()
        workers.close()
        assert not any(is_running(pid) for pid in pids)


def test_groups_closed_while_they_start_leave_nothing() -> None:
    before, pids = holdings(), []
    for _ in range(20):
        workers = group.WorkerGroup(2, HANDLER)
        pids += workers.pids
        workers.close()
    del workers
    assert held_beyond(before) == []
    assert wait_until_gone(pids, 0.0) == []


def test_a_group_that_is_collected_takes_its_workers_along() -> None:
    before = holdings()
    workers = group.WorkerGroup(2, HANDLER)
    pids = workers.pids
    workers.wait_until_ready()
    workers.channels[0].post(RUN, b"while True: pass", [])
    del workers
    gc.collect()
    assert wait_until_gone(pids, LONG_SECONDS) == []
    assert held_beyond(before, LONG_SECONDS) == []


def test_closing_does_not_wait_for_a_worker_that_computes() -> None:
    workers = group.WorkerGroup(2, HANDLER)
    pids = workers.pids
    workers.wait_until_ready()
    workers.channels[1].post(RUN, b"while True: pass", [])
    workers.close()
    assert wait_until_gone(pids, 0.0) == []
    with pytest.raises(RuntimeError, match="closed"):
        workers.channels[0].post(ECHO, b"", [])


def test_the_last_prints_of_a_worker_arrive_when_it_is_closed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = group.WorkerGroup(1, HANDLER)
    workers.wait_until_ready()
    run_in(workers, "print('no end', end='')")
    workers.close()
    assert capsys.readouterr().out == "[replica 1] no end\n"


# ---- the end of the parent ----------------------------------------------------------


class Job:
    """worker_group_life.py in a process group of its own."""

    def __init__(self, how: str, n_workers: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(JOB), how, str(n_workers)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # what readline() kept for itself, communicate() would not see
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(self.process.communicate()[1].decode())
        pids = [int(word) for word in line.split()]
        self.workers, self.rest = pids[1 : 1 + n_workers], pids[1 + n_workers :]
        assert len(self.workers) == n_workers

    def clean_up(self) -> None:
        """Kill what a test that failed has left."""
        for pid in [self.process.pid, *self.workers, *self.rest]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LONG_SECONDS)
        return self.process.returncode, out.decode(), err.decode()


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    jobs = []

    def start_one(how: str, n_workers: int = 1) -> Job:
        jobs.append(Job(how, n_workers))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.clean_up()


@pytest.mark.parametrize("how", ["starting", "busy in every way"])
def test_a_killed_parent_leaves_no_worker(start: Callable[..., Job], how: str) -> None:
    job = start(how, 1 if how == "starting" else 4)
    assert all(is_running(pid) for pid in job.workers)
    job.process.kill()
    assert wait_until_gone(job.workers, LONG_SECONDS) == []
    job.end()


def test_a_killed_parent_leaves_no_worker_though_its_forked_child_lives(
    start: Callable[..., Job],
) -> None:
    job = start("with a forked child")
    (child,) = job.rest
    assert until(lambda: not inherited(child), LONG_SECONDS)
    assert "memfd:paceline" not in Path(f"/proc/{child}/maps").read_text()
    job.process.kill()
    gone = wait_until_gone(job.workers, LONG_SECONDS)
    assert is_running(child)
    os.kill(child, signal.SIGKILL)
    job.end()
    assert gone == []


def inherited(pid: int) -> list[str]:
    """Return what of a worker group's kind a forked child has open."""
    links = [
        os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")
    ]
    kinds = ("memfd:paceline", "[pidfd]", "[eventfd]")
    return [link for link in links if any(kind in link for kind in kinds)]


def test_a_parent_that_becomes_another_program_leaves_no_worker(
    start: Callable[..., Job],
) -> None:
    job = start("becomes another")
    gone = wait_until_gone(job.workers, LONG_SECONDS)
    assert is_running(job.process.pid)
    job.process.kill()
    job.end()
    assert gone == []


def test_ctrl_c_ends_the_parent_and_leaves_no_process(
    start: Callable[..., Job],
) -> None:
    job = start("interrupted")
    os.killpg(job.process.pid, signal.SIGINT)
    code, _, err = job.end()
    assert code != 0
    assert "KeyboardInterrupt" in err
    assert wait_until_gone(job.workers, LONG_SECONDS) == []


def test_a_caught_ctrl_c_leaves_the_workers_usable(
    start: Callable[..., Job],
) -> None:
    job = start("caught")
    os.killpg(job.process.pid, signal.SIGINT)
    code, out, err = job.end()
    assert (code, out) == (0, "goes on\n"), err
    assert wait_until_gone(job.workers, LONG_SECONDS) == []


@pytest.mark.parametrize("how", ["exits", "raises", "exits busy"])
def test_a_parent_that_exits_without_closing_leaves_no_worker(
    start: Callable[..., Job], how: str
) -> None:
    job = start(how)
    code, out, err = job.end()
    assert (code, out) == (1 if how == "raises" else 0, "")
    assert err == "" or (how == "raises" and err.endswith("ValueError: on purpose\n"))
    assert wait_until_gone(job.workers, 0.0) == []


def test_a_forked_child_that_exits_leaves_the_workers_to_its_parent(
    start: Callable[..., Job],
) -> None:
    job = start("forks and exits")
    code, out, err = job.end()
    assert (code, out) == (0, "this channel is closed\nstill there\n"), err


def test_a_script_that_loses_a_worker_ends_in_order(
    start: Callable[..., Job],
) -> None:
    job = start("loses")
    code, out, err = job.end()
    assert code == 0, err
    assert out.startswith(f"replica 1 (process {job.workers[0]}) was killed by SIGKILL")
