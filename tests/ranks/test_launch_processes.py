"""`paceline.launch()` in scripts and notebooks: begin and end of its ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import forbidden, waiting, warm
from support.kernel import MISSING, SECONDS, Kernel
from support.prints import without_gloo
from support.processes import is_running, wait_until_gone

JOB = Path(__file__).parent / "jobs" / "launching.py"


class Script:
    """launching.py, in a new session.  `pids`: its ranks, and what ranks have started.

    One such script and its ranks start as a user's do; the others are forked.
    """

    def __init__(self, how):
        start = subprocess.Popen if how == "trains" else warm.Popen
        self.process = start(
            [sys.executable, str(JOB), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # else readline() may buffer data that communicate() misses
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.pids = []

    def read_pids(self, n=2):
        """Wait until both ranks run, or n processes; read their ids."""
        while len(self.pids) < n:
            _, _, pids = self.read("pid").partition("pid")
            self.pids += map(int, pids.split())

    def read(self, word):
        """Return the next line that contains a word."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline().decode():
            if word in line:
                return line
        pytest.fail(self.process.communicate()[1].decode())

    def go_on(self):
        """Let the script continue."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def end(self):
        out, err = self.process.communicate(timeout=SECONDS)
        lines = without_gloo(out.decode()).splitlines()
        return self.process.returncode, lines, err.decode()

    def clean_up(self):
        """Kill processes that a failed test has left."""
        for pid in [self.process.pid, *self.pids]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def script(request):
    script = Script(request.param)
    yield script
    script.clean_up()


@pytest.mark.parametrize("script", ["trains"], indirect=True)
def test_a_script_needs_no_main_guard(script):
    status, out, err = script.end()
    assert status == 0, err
    assert [line for line in out if "pid" not in line] == [
        "begins",
        "results [6.0, 6.0]",
    ]
    assert err == ""


@pytest.mark.parametrize("script", ["ends slowly"], indirect=True)
def test_a_rank_ends_as_a_program_does(script):
    status, out, err = script.end()
    assert status == 0, err
    for line in ("threads end", "handlers run"):
        assert line in out
        assert f"[rank 1] {line}" in out
    assert out[-1] == "results [0.0, 0.0]"


@pytest.mark.parametrize("script", ["waits"], indirect=True)
def test_ctrl_c_ends_a_script_and_its_ranks(script):
    script.read_pids()
    os.killpg(script.process.pid, signal.SIGINT)
    status, out, err = script.end()
    assert (status, out) == (-signal.SIGINT, ["interrupted"])
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert "Exception ignored" not in err
    assert not any(map(is_running, script.pids))


needs_seccomp = pytest.mark.skipif(
    not forbidden.is_known(), reason="the numbers of system calls are unknown here"
)


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("waits", signal.SIGKILL),
        ("waits", signal.SIGTERM),
        ("starts", signal.SIGKILL),
        pytest.param("is refused", signal.SIGKILL, marks=needs_seccomp),
    ],
    indirect=["script"],
)
def test_ranks_end_with_their_caller(script, how):
    script.read_pids()
    assert all(map(is_running, script.pids))
    script.process.send_signal(how)
    assert wait_until_gone(script.pids, SECONDS) == []


@pytest.mark.parametrize("script", ["stops"], indirect=True)
def test_stopped_ranks_and_programs_of_ranks_end_with_the_caller(script):
    script.read_pids(4)

    def is_one_stopped():
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in script.pids]
        return [stat.rpartition(")")[2].split()[0] for stat in stats].count("T") == 1

    assert waiting.until(is_one_stopped)
    script.process.kill()
    assert wait_until_gone(script.pids, SECONDS) == []


@pytest.mark.parametrize("script", ["exits"], indirect=True)
def test_ranks_end_when_their_caller_exits(script):
    script.read_pids()
    script.go_on()
    status, _, err = script.end()
    assert (status, err) == (0, "")
    assert wait_until_gone(script.pids, SECONDS) == []


@pytest.mark.parametrize("script", ["becomes another"], indirect=True)
def test_ranks_end_when_their_caller_becomes_another_program(script):
    script.read_pids()
    script.go_on()
    script.read("becomes another")
    assert wait_until_gone(script.pids, SECONDS) == []
    assert is_running(script.process.pid)


@pytest.mark.parametrize("script", ["forks"], indirect=True)
def test_ranks_end_with_their_caller_though_its_forked_child_lives(script):
    script.read_pids()
    script.go_on()
    child = int(script.read("forked").split()[-1])
    kinds = [os.readlink(path) for path in Path(f"/proc/{child}/fd").iterdir()]
    assert not [kind for kind in kinds if "pidfd" in kind or "memfd" in kind]
    assert all(map(is_running, script.pids))  # though the child closed its pipes
    script.process.kill()
    gone = wait_until_gone(script.pids, SECONDS)
    assert is_running(child)
    os.kill(child, signal.SIGKILL)
    assert gone == []


# ---- notebooks ----------------------------------------------------------------------

CELL = """
import os, time, paceline, torch
from torch import nn
import torch.distributed as dist

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(x)

SCALE = 2.0

def train():
    net = Net()
    model = paceline.DistributedDataParallel(net)
    (model(torch.ones(1, 3)).sum() * SCALE * dist.get_rank()).backward()
    print(f"gradient {float(net.linear.bias.grad)}", flush=True)
    return net

def fail():
    raise LookupError("no such batch")  # as a cell says it

def hang():
    open(str(os.getpid()), "w").close()
    dist.barrier()
    if dist.get_rank() == 0:
        print("busy", flush=True)
    time.sleep(600)
"""


FORK_RANKS = (
    "from support import warm\nforks = warm.ranks_of_launch()\nforks.__enter__()"
)


@pytest.fixture
def kernel(tmp_path):
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.end()


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_cells_launch_print_fail_and_are_stopped(kernel):
    assert kernel.run(CELL) == ""
    printed = kernel.run("nets = paceline.launch(train, 2)")
    assert sorted(printed.splitlines()) == ["[rank 1] gradient 1.0", "gradient 1.0"]
    assert kernel.run("print([type(net) is Net for net in nets])") == "[True, True]\n"
    assert kernel.run(FORK_RANKS) == ""
    assert kernel.run("SCALE = 4.0\nnets = paceline.launch(train, 1)") == (
        "gradient 0.0\n"
    )

    catch = "try:\n    paceline.launch(fail, 2)\nexcept paceline.RankError as error:\n"
    shown = kernel.run(catch + "    print(type(error.__cause__).__name__, error)")
    assert shown.startswith("LookupError rank ")
    assert "# as a cell says it" in shown
    assert kernel.run("paceline.launch(fail, 2)") == "RankError"

    stopped = kernel.run("paceline.launch(hang, 2)", interrupt_at="busy")
    assert stopped == "KeyboardInterrupt"
    pids = [int(name) for name in kernel.run("print(*os.listdir('.'))").split()]
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    assert "gradient" in kernel.run("nets = paceline.launch(train, 1)")
