"""What others can do to `paceline top`, and to the steps that a rank records."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from paceline import DataParallel, DistributedDataParallel, _recorder
from paceline._cli.doctor import command as doctor
from paceline._cli.steps import events, summary
from support.recordings import needs_memfd, planted  # noqa: F401
from torch import nn

HOSTILE = "Net[/x] :bomb: [red]\033[2J\033]0;mine\a\n\u202e"
SHOWN = "Net[/x] :bomb: [red]\\x1b[2J\\x1b]0;mine\\x07\\n\\u202e"
NOBODY = 65534
SECONDS = 30.0


@pytest.fixture(autouse=True)
def name(request, monkeypatch):
    """Record under a name of this test; return the whole name."""
    short = f"{request.node.name[:100]}-{os.getpid()}"
    monkeypatch.setenv("PACELINE_RECORDER", short)
    return f"paceline-steps-{short}"


def train(kind="Net"):
    """Return a wrapper that has recorded three steps of a class of this name."""
    model = DataParallel(type(kind, (nn.Linear,), {})(2, 1), ["cpu"] * 2)
    for _ in range(3):
        step(model)
    return model


@torch.no_grad()
def step(model):
    model(torch.ones(4, 2))  # a child may not use autograd if its parent has


def pids():
    """Return the processes that `top` shows."""
    jobs = summary.jobs(summary.read()[0])
    return [row.pid for job in jobs for row in job.rows]


@contextlib.contextmanager
def child(act):
    """Fork a child that acts, says so, and waits; give its pid and kill it."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os.write(theirs, b"!")
            time.sleep(SECONDS)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)
    os.close(theirs)
    try:
        assert os.read(ours, 1) == b"!"
        yield pid
    finally:
        os.close(ours)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_class_of_any_name_neither_ends_top_nor_drives_the_terminal():
    pytest.importorskip("rich")
    model = train(HOSTILE)
    line = [sys.executable, "-m", "paceline", "top", "--once"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert SHOWN in done.stdout
    assert done.stdout.replace("\n", "").isprintable()
    lanes = events.trace(summary.read()[0])["traceEvents"]
    (title,) = [
        lane["args"]["name"] for lane in lanes if lane["name"] == "process_name"
    ]
    assert SHOWN in title
    del model


def test_the_doctor_prints_no_control_characters():
    assert doctor._wrapped("PACELINE_X=\033[2J\u202e\ud800 \n ok", 80) == [
        "PACELINE_X=\\x1b[2J\\u202e\\ud800 ok"
    ]


def test_a_recording_cannot_be_cut_under_its_rank_or_a_reader(name):
    model = train()
    ((_, path),) = _recorder.find(name)
    with open(path, "r+b") as file:
        for size in (0, 4096, 1 << 20):
            with pytest.raises(PermissionError):
                file.truncate(size)
    step(model)
    (recording,) = _recorder.open_all(name)
    assert [each.number for each in recording.steps()] == [1, 2, 3]


@pytest.mark.usefixtures("needs_memfd")
def test_files_that_anybody_has_planted_hide_no_job(name, tmp_path):
    with (
        planted(name, b"", is_sealed=False),
        planted(name, b"x" * 8192, is_sealed=False),
        planted(name, b"x" * 8192),
        open(tmp_path / name, "wb"),
    ):
        model = train()
        assert pids() == [os.getpid()]
        _, problems = summary.read()
    assert len(problems) == 1
    assert "holds no steps" in problems[0]
    del model


def test_a_descriptor_in_other_processes_shows_no_second_rank(name):
    """A descriptor may be sent elsewhere, and outlive the rank that was killed."""
    models = []
    with child(lambda: models.append(train())) as rank:
        assert pids() == [rank]
        ((_, path),) = _recorder.find(name)
        kept = os.open(path, os.O_RDONLY)
        assert pids() == [rank]
        with child(lambda: None):  # which inherits the copy
            assert pids() == [rank]
    assert len(list(_recorder.find(name))) == 1  # the copy is still there
    assert summary.read() == ([], [])
    os.close(kept)


def test_a_forked_child_of_a_rank_drops_the_descriptor(name):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(2, 1), strict=True)  # has a reducer
    with child(lambda: None) as pid:
        assert pids() == [os.getpid()] != [pid]
        assert [each for each, _ in _recorder.find(name)] == [os.getpid()]
    del model
    dist.destroy_process_group()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_the_jobs_of_other_users_are_left_alone():
    def record():
        os.setresuid(NOBODY, NOBODY, NOBODY)
        models.append(train())

    models = [train()]
    with child(record):
        assert pids() == [os.getpid()]
        assert summary.read()[1] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a PID namespace")
def test_a_job_in_another_pid_namespace_is_shown_as_seen_from_here():
    program = (
        "import sys, torch, paceline;"
        "m = paceline.DataParallel(torch.nn.Linear(2, 1), ['cpu'] * 2);"
        "m(torch.ones(4, 2)).sum().backward(); print('!', flush=True);"
        "sys.stdin.read()"
    )
    line = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", program]
    try:
        outer = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except FileNotFoundError:
        pytest.skip("needs unshare of util-linux")
    with outer:
        if outer.stdout.readline() != b"!\n":
            pytest.skip("no PID namespace can be made here")
        (job,) = summary.jobs(summary.read()[0])
        (row,) = job.rows
        status = Path(f"/proc/{row.pid}/status").read_text()
        inner = int(status.split("NSpid:")[1].split()[1])
        assert job.job.endswith(f":{inner}")
        assert row.pid != inner
        assert row.rss_bytes > 1 << 20
        outer.stdin.close()
