"""The workers of DataParallel end when they should, however a program ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paceline
import pytest
import torch
from paceline import DataParallel
from support.forked_workers import forked_workers
from support.processes import held_beyond, holdings, is_running, wait_until_gone
from torch import nn

JOB = Path(__file__).parent / "jobs" / "data_parallel_life.py"
MARK = "PACELINE_TEST_MARK"
LONG_SECONDS = 60.0
MIB = 1 << 20


# ---- scripts ------------------------------------------------------------------------


class Job:
    """A script in a session of its own, and all processes that come of it."""

    def __init__(self, words: list[str], given: str = "") -> None:
        self._mark = uuid.uuid4().hex
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by clean_up
        env = {**os.environ, MARK: self._mark, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env=env,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._out = self.process.stdout
        self.process.stdin.write(given)
        self.process.stdin.close()

    def wait_for(self, words: str) -> None:
        """Read lines until there is this one."""
        for line in self._out:
            if line == f"{words}\n":
                return
        pytest.fail(self.end()[2])

    def others(self) -> list[int]:
        """Return the processes that have this job's mark and run, all but itself."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                has_mark = mark in (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # somebody else's, or gone
                continue
            if has_mark and is_running(int(folder.name)):
                found.append(int(folder.name))
        return [pid for pid in found if pid != self.process.pid]

    def end(self) -> tuple[int, str, str]:
        """Return the exit status, and the rest of stdout and stderr."""
        watchdog = threading.Timer(LONG_SECONDS, self.process.kill)
        watchdog.start()
        out = self._out.read()
        code = self.process.wait()
        watchdog.cancel()
        self._errors.seek(0)
        return code, out, self._errors.read()

    def clean_up(self) -> None:
        for pid in self.others():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._out.close()
        self._errors.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    jobs = []

    def start_one(how: str) -> Job:
        jobs.append(Job([str(JOB), how]))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.clean_up()


ENDS = {
    "it ends": ([str(JOB), "ends"], 0, ""),
    "it closes the wrapper": ([str(JOB), "closes"], 0, ""),
    "it exits": ([str(JOB), "exits"], 3, ""),
    "it raises": ([str(JOB), "raises"], 1, "ValueError: on purpose\n"),
    "a replica raises": (
        [str(JOB), "raises in a replica"],
        1,
        "Caught ValueError in replica 1 on device cpu.",
    ),
    "python -c": (["-c", JOB.read_text(), "ends"], 0, ""),
    "from stdin": (["-", "ends"], 0, ""),
}


@pytest.fixture(scope="module")
def endings() -> Iterator[dict[str, Any]]:
    """Run every script of `ENDS`, two at a time; give what became of each."""

    def run(words: list[str]) -> tuple[int, str, str, list[int]]:
        job = Job(words, JOB.read_text() if words[0] == "-" else "")
        try:
            job.wait_for("ready")
            return *job.end(), job.others()
        finally:
            job.clean_up()

    with ThreadPoolExecutor(2) as pool:
        yield {how: pool.submit(run, words) for how, (words, _, _) in ENDS.items()}


@pytest.mark.parametrize("how", ENDS)
def test_a_script_without_main_guard_trains_and_ends_by_itself(
    endings: dict[str, Any], how: str
) -> None:
    _, code, words = ENDS[how]
    returned, out, err, left = endings[how].result()
    assert left == []
    assert returned == code, err
    assert words in err
    assert err == "" or words
    assert out == ("[replica 1] busy\n" if "replica" in how else "")


@pytest.mark.parametrize("how", ["is idle", "computes"])
def test_a_killed_script_leaves_no_worker(start: Callable[..., Job], how: str) -> None:
    job = start(how)
    job.wait_for("ready" if how == "is idle" else "[replica 1] busy")
    (worker,) = job.others()
    job.process.kill()
    assert wait_until_gone([worker], LONG_SECONDS) == []
    job.end()


def test_a_killed_script_leaves_no_worker_though_its_loaders_live(
    start: Callable[..., Job],
) -> None:
    job = start("with loaders")
    job.wait_for("ready")
    loaders = [pid for pid in job.others() if parent_of(pid) == job.process.pid]
    workers = [pid for pid in loaders if "paceline._workers.main" in command_of(pid)]
    loaders = [pid for pid in loaders if pid not in workers]
    assert (len(workers), len(loaders)) == (1, 2)
    job.process.kill()
    gone = wait_until_gone(workers, LONG_SECONDS)
    assert any(is_running(pid) for pid in loaders)
    assert gone == []


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_ctrl_c_in_forward_ends_the_script_and_its_workers(
    start: Callable[..., Job],
) -> None:
    job = start("computes")
    job.wait_for("[replica 1] busy")
    os.killpg(job.process.pid, signal.SIGINT)
    code, _, err = job.end()
    assert job.others() == []
    assert code != 0
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_a_caught_ctrl_c_leaves_the_wrapper_usable(start: Callable[..., Job]) -> None:
    job = start("caught")
    job.wait_for("[replica 1] busy")
    os.killpg(job.process.pid, signal.SIGINT)
    code, out, err = job.end()
    assert job.others() == []
    assert (code, out) == (0, "goes on\n"), err


# ---- workers that are killed --------------------------------------------------------

IN_FORWARD, IN_BACKWARD = 101.0, 102.0


def wait_for_ever(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(10 * LONG_SECONDS)


class Stuck(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, path: Path) -> torch.Tensor:
        ctx.path = path
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        wait_for_ever(ctx.path)


class Net(nn.Module):
    """Never comes back from what a row's first number says; writes a file then."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] == IN_FORWARD:
            wait_for_ever(self.path)
        y: torch.Tensor = self.layer(x)
        if x[0, 0] == IN_BACKWARD:
            y = Stuck.apply(y, self.path)
        return y


def batch(order: float = 1.0) -> torch.Tensor:
    x = torch.arange(8.0).reshape(4, 2)
    x[2, 0] = order  # the first row of replica 1
    return x


def workers_of(wrapper: DataParallel) -> list[int]:
    engine: Any = wrapper._engine
    return list(engine._workers.group.pids)


def step(wrapper: DataParallel, order: float) -> None:
    wrapper(batch(order)).sum().backward()


@pytest.mark.parametrize(
    "order", [1.0, IN_FORWARD, IN_BACKWARD], ids=["idle", "forward", "backward"]
)
def test_a_killed_worker_is_named_and_the_next_call_works(
    tmp_path: Path, order: float
) -> None:
    path = tmp_path / "busy"
    wrapper = DataParallel(Net(path), ["cpu", "cpu"], engine="process")
    with wrapper:
        step(wrapper, 1.0)
        expected = wrapper.module.layer.weight.grad.clone()
        (pid,) = workers_of(wrapper)

        def kill() -> None:
            while order != 1.0 and not path.exists():
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        if order == 1.0:
            killer.join()
            assert wait_until_gone([pid], LONG_SECONDS) == []
        with pytest.raises(paceline.PeerError) as caught:
            step(wrapper, order)
        killer.join()
        words = f"replica 1 (process {pid}) was killed by SIGKILL"
        assert str(caught.value).startswith(words)
        wrapper.zero_grad()
        step(wrapper, 1.0)
        assert torch.equal(wrapper.module.layer.weight.grad, expected)
        (second,) = workers_of(wrapper)
    assert second != pid
    assert not is_running(second)


# ---- wrappers that come and go ------------------------------------------------------


def test_a_wrapper_that_is_collected_takes_its_workers_along() -> None:
    before = holdings()
    wrapper = DataParallel(nn.Linear(2, 1), ["cpu"] * 3, engine="process")
    step(wrapper, 1.0)
    pids = workers_of(wrapper)
    assert len(pids) == 2
    wrapper.itself = wrapper  # only the collector can free it
    del wrapper
    gc.collect()
    assert wait_until_gone(pids, LONG_SECONDS) == []
    assert held_beyond(before, LONG_SECONDS) == []


def resident_bytes() -> int:
    words = Path("/proc/self/statm").read_text().split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE")


def come_and_go(n_cycles: int) -> None:
    """Make, use and close wrappers, two at a time; check that they leave nothing."""
    x = torch.ones(4, 1024)

    def cycle() -> list[int]:
        nets = [nn.Linear(1024, 1024) for _ in range(2)]  # 4 MiB, and its gradients
        wrappers = [DataParallel(net, ["cpu"] * 2, engine="process") for net in nets]
        pids = []
        for wrapper in wrappers:
            wrapper._start_engine()  # both workers start side by side
        for wrapper in wrappers:
            wrapper(x).sum().backward()
            pids += workers_of(wrapper)
        for wrapper in wrappers:
            wrapper.close()
        return pids

    pids = cycle() + cycle()  # autograd and OpenMP start threads of their own
    before, n_bytes = holdings(), resident_bytes()
    for _ in range(n_cycles):
        pids += cycle()
        assert not any(is_running(pid) for pid in pids)
        assert held_beyond(before) == []
    # A wrapper has three tensors of 4 MiB; malloc keeps now more of them, now fewer.
    assert resident_bytes() - n_bytes < (16 + 2 * n_cycles) * MIB


@pytest.mark.slow
def test_twenty_wrappers_come_and_go_and_leave_nothing() -> None:
    with forked_workers():
        come_and_go(8)  # and two before


@pytest.mark.hand
def test_two_hundred_wrappers_come_and_go_and_leave_nothing() -> None:
    come_and_go(98)
