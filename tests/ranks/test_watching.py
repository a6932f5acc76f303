"""``paceline top`` and ``paceline trace`` beside real jobs, without affecting them."""

import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline import DataParallel, DistributedDataParallel, _recorder
from support import traces, warm
from support.ranks import start_ranks, tell
from support.waiting import until
from torch import nn

HOME = str(Path(paceline.__file__).parents[1])
SECONDS = 60
N_STEPS = 5
_numbers = itertools.count()


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def train_until_stopped(rank, _, folder):
    """Train; rank 1 is slow.  All take the same number of steps."""
    model = DistributedDataParallel(net())
    is_over = torch.zeros(1)
    n_steps = 0
    while not is_over.item():
        if rank == 1:
            time.sleep(0.002)
        model(torch.ones(3, 4)).sum().backward()
        n_steps += 1
        if n_steps == N_STEPS:
            tell("trains")
        is_over[0] = Path(folder, "stop").exists()
        dist.broadcast(is_over, 0)
    return n_steps, model.module[0].weight.grad.sum().item()


def command(*words, name):
    return [sys.executable, "-m", "paceline", *words], {
        **os.environ,
        "PACELINE_RECORDER": name,
        "PYTHONPATH": HOME,
    }


def run(*words, name):
    """Run a paceline command; return its exit status, standard output and error."""
    line, env = command(*words, name=name)
    done = subprocess.run(
        line, env=env, capture_output=True, text=True, timeout=SECONDS
    )
    return done.returncode, done.stdout, done.stderr


def top(name, *words):
    status, output, errors = run("top", "--once", "--json", *words, name=name)
    assert (status, errors) == (0, "")
    return json.loads(output)


def processes(name):
    """Return the processes that hold recordings, one for each."""
    return [pid for pid, _ in _recorder.find(f"paceline-steps-{name}")]


@pytest.fixture
def name():
    """Return a name of recordings for one test."""
    return f"watching-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def job(tmp_path, name):
    """Provide two ranks that train, and the name of their recordings."""
    env = {"PACELINE_RECORDER": name}
    with start_ranks(train_until_stopped, 2, str(tmp_path), env=env) as ranks:
        for rank in range(2):
            assert ranks.hear(rank) == "trains"
        yield ranks, name


def stop(ranks, tmp_path):
    """Stop the ranks; return their values."""
    (tmp_path / "stop").touch()
    outcomes = ranks.wait()
    assert all(outcome.is_ok for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def test_top_shows_each_rank_of_a_running_job(job, tmp_path):
    ranks, name = job
    (found,) = top(name)["jobs"]
    assert found["job"].endswith(f":{ranks.pids[0]}")
    assert [row["pid"] for row in found["rows"]] == ranks.pids
    for rank, row in enumerate(found["rows"]):
        assert (row["kind"], row["rank"], row["world_size"]) == ("rank", rank, 2)
        assert (row["local_rank"], row["device"]) == (rank, "cpu")
        assert row["model"] == "Sequential"
        assert row["step"] >= N_STEPS - 1
        assert row["steps"] >= N_STEPS - 1
        assert row["step_ms"] > 0
        assert len(row["history"]) >= N_STEPS - 2
        assert 0 <= row["reducing"] <= 1
        assert 0 <= row["waiting"] <= 1
        assert row["rss_bytes"] > 1 << 20
    assert "1" in found["rows"][0]["awaited"]  # rank 1 sleeps in every step
    by_pid = top(name, "--pid", str(ranks.pids[1]))["jobs"]
    assert [row["rank"] for row in by_pid[0]["rows"]] == [1]
    assert top(name, "--job", "elsewhere:1")["jobs"] == []
    stop(ranks, tmp_path)


def test_top_prints_a_table_where_there_is_no_terminal(job, tmp_path):
    pytest.importorskip("rich")
    ranks, name = job
    for words in (["--once"], []):
        status, output, errors = run("top", *words, name=name)
        assert (status, errors) == (0, "")
        assert all(str(pid) in output for pid in ranks.pids)
        assert "Sequential, 2 ranks" in output
        assert "\033" not in output
    stop(ranks, tmp_path)


def test_a_trace_has_the_steps_of_all_ranks_on_one_clock(job, tmp_path):
    ranks, name = job
    path = tmp_path / "trace.json"
    pid = str(ranks.pids[0])
    status, output, errors = run("trace", "-o", str(path), "--job", pid, name=name)
    assert (status, errors) == (0, "")
    assert str(path) in output
    lanes = traces.check(json.loads(path.read_text()))
    spans = [{}, {}]
    for rank in range(2):
        events = [
            e for (pid, _), lane in lanes.items() if pid == rank + 1 for e in lane
        ]
        counted = Counter(event["cat"] for event in events)
        assert set(counted) == {"steps", "forward", "backward", "waits", "reduction"}
        assert counted["steps"] >= N_STEPS - 1
        for event in events:
            if event["cat"] == "backward":
                number = event["args"]["step"]
                spans[rank][number] = event["ts"], event["ts"] + event["dur"]
    both = set(spans[0]) & set(spans[1])
    assert both
    ends = {
        (event["pid"], event["args"]["step"]): event["ts"] + event["dur"]
        for lane in lanes.values()
        for event in lane
        if event["cat"] == "waits"
    }
    for number in both:  # no rank gets means before the other's backward begins
        assert ends[1, number] > spans[1][number][0]
        assert ends[2, number] > spans[0][number][0]
    stop(ranks, tmp_path)


def test_a_reader_that_is_killed_leaves_the_job_alone(job, tmp_path):
    pytest.importorskip("rich")
    ranks, name = job
    ours, theirs = pty.openpty()
    line, env = command("top", "--interval", "0.05", name=name)
    env |= {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    with subprocess.Popen(line, env=env, stdout=theirs, stderr=theirs) as reader:
        os.close(theirs)
        shown = b""
        while str(ranks.pids[1]).encode() not in shown:
            shown += os.read(ours, 4096)  # raises OSError after it has ended
        before = top(name)["jobs"][0]["rows"][0]["step"]
        reader.kill()
    os.close(ours)
    assert reader.returncode == -signal.SIGKILL
    assert until(lambda: top(name)["jobs"][0]["rows"][0]["step"] > before)
    (n_steps, grad), other = stop(ranks, tmp_path)
    assert n_steps > before
    assert (n_steps, grad) == other


def end_well(rank, _):
    """Train in a child, which ends as a script does; return what it leaves."""
    name = os.environ["PACELINE_RECORDER"]
    model = DistributedDataParallel(net())
    model(torch.ones(3, 4)).sum().backward()
    dist.barrier()
    assert len(processes(name)) == 2
    dist.barrier()
    model._session.world.leave()
    return os.getpid() not in processes(name)


def test_a_rank_that_leaves_takes_its_file_away(name):
    env = {"PACELINE_RECORDER": name}
    with start_ranks(end_well, 2, env=env) as ranks:
        assert [outcome.value for outcome in ranks.wait()] == [True, True]
    assert processes(name) == []


# ---- DataParallel -------------------------------------------------------------------


def one_job(name):
    (found,) = top(name)["jobs"]
    (row,) = found["rows"]
    return row


def test_a_data_parallel_is_shown_and_traced(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RECORDER", name)
    model = DataParallel(net(), ["cpu"] * 2)
    for _ in range(N_STEPS):
        model(torch.ones(4, 4)).sum().backward()
    row = one_job(name)
    assert (row["kind"], row["pid"], row["world_size"]) == ("replicas", os.getpid(), 2)
    n_over = N_STEPS - 1  # the last step would end with the next forward
    assert (row["step"], row["steps"]) == (N_STEPS, n_over)
    assert row["step_ms"] > 0
    path = tmp_path / "trace.json"
    assert run("trace", "-o", str(path), name=name)[0] == 0
    lanes = traces.check(json.loads(path.read_text()))
    counted = Counter(e["name"] for lane in lanes.values() for e in lane)
    assert counted["forward"] == n_over
    del model
    assert processes(name) == []


SCRIPT = """
import os, sys, torch, paceline, paceline._recorder
model = paceline.DataParallel(torch.nn.Linear(2, 1), ["cpu"] * 2)
model(torch.ones(4, 2)).sum().backward()
assert [pid for pid, _ in paceline._recorder.find(sys.argv[1])] == [os.getpid()]
keep = model, model  # until the interpreter's end
sys.modules["kept"] = keep
"""


def test_a_script_that_ends_takes_its_file_away(name, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PACELINE_RECORDER": name, "PYTHONPATH": HOME}
    line = [sys.executable, str(tmp_path / "script.py"), f"paceline-steps-{name}"]
    warm.run(line, env=env, check=True, timeout=SECONDS, is_whole=True)
    assert processes(name) == []
