"""Recorded steps: which files are read, their summaries, and when none are written."""

import dataclasses
import fcntl
import gc
import importlib
import itertools
import json
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
import time

import pytest
import torch
from paceline import DistributedDataParallel, _environment, _native, _recorder
from paceline._cli.steps import events, summary, top, trace
from paceline._recorder import BACKWARD, FINISHING, FORWARD, IDLE
from support import traces
from support.recordings import needs_memfd, planted  # noqa: F401
from torch import nn


@pytest.fixture
def name(request, monkeypatch):
    """Record under the name of the test; return the name in /proc."""
    short = f"{request.node.name[:100]}-{os.getpid()}"
    monkeypatch.setenv("PACELINE_RECORDER", short)
    yield f"paceline-steps-{short}"
    gc.collect()


def start(rank=0, **who):
    given = {"kind": "rank", "job": "host:1", "model": "Net", "world_size": 2}
    given |= {"rank": rank, "local_rank": rank, "device": "cpu", **who}
    recorder = _recorder.start(**given)
    assert recorder is not None
    return recorder


def take_steps(recorder, n, first=1):
    for step in range(first, first + n):
        for activity in (FORWARD, IDLE, BACKWARD, FINISHING, IDLE):
            recorder.record(activity, step)


def found(name):
    return [path for _, path in _recorder.find(name)]


# ---- reading ------------------------------------------------------------------------


def test_the_last_steps_are_read_in_order(name):
    recorder = start()
    take_steps(recorder, 100)
    (recording,) = _recorder.open_all(name)
    steps = recording.steps()
    assert [step.number for step in steps] == list(range(37, 101))
    for step in steps:
        times = [step.forward_begin, step.forward_end, step.backward_begin]
        times += [step.backward_end, step.end]
        assert sorted(times) == times
        assert step.awaited == _recorder.NOBODY
    assert recording.now.activity == "user's code"
    assert recording.now.step == 100
    assert abs(steps[-1].end - time.monotonic_ns()) < 60e9
    recorder.record(FORWARD, 101)  # the record of step 37 is being overwritten
    assert [step.number for step in recording.steps()] == list(range(38, 101))
    assert recording.now.activity == "forward"
    assert _recorder.own_step(recorder, 38) == recording.steps()[0]
    for number in (37, 101, 102):
        assert _recorder.own_step(recorder, number).end == 0
    with pytest.raises(OverflowError):
        recorder.read(-1)


def test_activities_have_the_names_of_the_core(name):
    recorder = start()
    (recording,) = _recorder.open_all(name)
    for activity, name in enumerate(_recorder.ACTIVITIES):
        recorder.record(activity, 1)
        assert recording.now.activity == name
    with pytest.raises(ValueError, match=f"give 0 to {activity}"):
        recorder.record(activity + 1, 1)


def whole_file(name):
    """Return the bytes that a process of 70 steps records."""
    recorder = start()
    take_steps(recorder, 70)
    (path,) = found(name)
    return path.read_bytes()


@pytest.mark.usefixtures("needs_memfd")
def test_a_file_of_another_layout_is_refused_in_one_sentence(name, capsys):
    text = bytearray(whole_file(name))
    text[8:12] = struct.pack("<I", 7)
    with planted(name, text) as path:
        sentence = (
            f"{path} was written by a Paceline that records in layout 7, and this one "
            "reads layout 1: use that of the training."
        )
        assert top.main(["--json"], "paceline") == 0
        assert json.loads(capsys.readouterr().out) == {
            "jobs": [],
            "problems": [sentence],
        }
        assert trace.main(["-o", "-"], "paceline") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert sentence in printed.err


@pytest.mark.usefixtures("needs_memfd")
@pytest.mark.parametrize(
    ("text", "words"), [(b"", "short"), (b"x" * 200, "holds no steps"), (b"x", "short")]
)
def test_a_file_that_holds_no_steps_is_no_recording(name, text, words):
    with planted(name, text):
        recordings, (problem,) = summary.read()
        assert recordings == []
        assert words in problem
    with planted(name, text, is_sealed=False):  # one that is still being made
        assert summary.read() == ([], [])


def damage(text, draw):
    """Overwrite some ranges of a file, mostly in its header and first steps."""
    for _ in range(draw.randint(1, 4)):
        at = draw.choice((draw.randrange(8, 128), draw.randrange(128, 400)))
        if draw.random() < 0.4:
            at = 4096 + draw.randrange(2 * 1024)
        run = draw.choice((b"\0", b"\xff", b"[", draw.randbytes(1)))
        run *= draw.randint(1, 9)
        text[at : at + len(run)] = run
    return text[: draw.choice((len(text), len(text), draw.randrange(len(text))))]


@pytest.mark.usefixtures("needs_memfd")
def test_what_others_have_overwritten_is_read_or_refused(name):
    whole = whole_file(name)
    n_read = 0
    for seed in range(120):
        with planted(name, damage(bytearray(whole), random.Random(seed))):
            recordings, problems = summary.read()
        assert len(recordings) + len(problems) <= 1
        assert json.dumps(summary.as_json(summary.jobs(recordings), problems))
        assert json.dumps(events.trace(recordings))
        n_read += len(recordings)
        for recording in recordings:
            assert recording.now.activity
            recording.close()
    assert 12 < n_read < 108


# ---- which files are made -----------------------------------------------------------


def step(model):
    model(torch.ones(2, 3)).sum().backward()


def wrap():
    """Return a wrapper that has a reducer although its rank is alone."""
    return DistributedDataParallel(nn.Linear(3, 1), strict=True)


@pytest.mark.usefixtures("alone")
def test_a_wrapper_records_and_ends_with_its_file(name):
    model = wrap()
    for _ in range(3):
        step(model)
    (recording,) = _recorder.open_all(name)
    assert [s.number for s in recording.steps()] == [1, 2, 3]
    for s in recording.steps():
        assert s.n_buckets == 1
        assert s.n_bytes >= 16
        assert 0 < s.buckets[0].ready <= s.buckets[0].begin <= s.buckets[0].end
        assert s.buckets[0].end <= s.reduced <= s.end
    del model
    assert len(recording.steps()) == 3  # while a reader has it open
    recording.close()
    assert found(name) == []


@pytest.mark.usefixtures("alone")
def test_logging_data_have_the_times_of_the_recording(name):
    model = wrap()
    for _ in range(2):
        step(model)
    (recording,) = _recorder.open_all(name)
    first, second = recording.steps()
    data = model._get_ddp_logging_data()
    assert data["forward_compute_time"] == first.forward_end - first.forward_begin
    assert data["backward_compute_time"] == first.backward_end - first.forward_end
    assert data["backward_comm_time"] == first.end - first.buckets[0].ready
    since = second.buckets[0].ready - second.forward_end
    assert model.reducer.get_backward_stats() == [since, since]
    recording.close()


@pytest.mark.usefixtures("alone")
def test_each_wrapper_of_a_process_has_a_file(name):
    models = [wrap(), wrap()]
    for k in (0, 1, 1):
        step(models[k])
    (job,) = summary.jobs(summary.read()[0])
    assert sorted(row.steps for row in job.rows) == [1, 2]
    assert {row.pid for row in job.rows} == {os.getpid()}
    lanes = traces.check(events.trace(summary.read()[0]))
    assert {pid for pid, _ in lanes} == {1, 2}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("value", ["0", "n" * 300])
def test_training_goes_on_unrecorded_if_it_must(value, monkeypatch):
    monkeypatch.setenv("PACELINE_RECORDER", value)
    model = wrap()
    step(model)
    assert model.module.weight.grad.tolist() == [[2.0, 2.0, 2.0]]
    assert summary.read() == ([], [])
    step(model)
    data = model._get_ddp_logging_data()
    assert (data["iteration"], data["backward_comm_time_end"]) == (1, 0)


@pytest.mark.parametrize(
    ("value", "name"),
    [("0", None), ("", ""), ("1", ""), ("mine", "-mine"), ("/a", "-/a")],
)
def test_the_variable_turns_recording_off_or_names_it(value, name, monkeypatch):
    monkeypatch.setenv("PACELINE_RECORDER", value)
    whole = None if name is None else f"paceline-steps{name}"
    assert _environment.recorder_name() == whole


def test_names_that_are_too_long_are_cut(name):
    recorder = start(model="N" * 5000)
    (recording,) = _recorder.open_all(name)
    assert recording.who["model"] == "N" * 200
    with pytest.raises(ValueError, match="give less than"):
        _native.Recorder(name, "x" * 4000)
    assert len(found(name)) == 1
    recorder.close()


# ---- output -------------------------------------------------------------------------


def test_steps_that_are_not_next_to_one_another_have_no_time(name):
    recorder = start()
    take_steps(recorder, 2)
    take_steps(recorder, 1, first=9)
    (recording,) = _recorder.open_all(name)
    assert len(summary.step_times(recording.steps())) == 1
    row = summary.row_of(recording)
    assert (row.steps, len(row.history), row.step) == (3, 1, 9)


def test_jobs_are_told_apart_and_chosen(name):
    recorders = [start(rank=1), start(rank=0), start(job="host:2")]
    jobs = summary.jobs(summary.read()[0])
    found = {job.job: [row.rank for row in job.rows] for job in jobs}
    assert found == {"host:1": [0, 1], "host:2": [0]}
    assert len(summary.read(job="2")[0]) == len(summary.read(job="host:2")[0]) == 1
    assert len(summary.read(pid=os.getpid())[0]) == 3
    assert summary.read(pid=1)[0] == []
    del recorders


def test_top_keeps_its_numbers_in_a_terminal_of_80_columns(name):
    pytest.importorskip("rich")
    recorders = [start(rank=rank, device="cuda:0") for rank in (0, 1)]
    for recorder in recorders:
        take_steps(recorder, 3, first=1234567)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    line = [sys.executable, "-m", "paceline", "top", "--once"]
    subprocess.run(line, env=env | {"TERM": "xterm"}, stdout=theirs, check=True)
    shown = os.read(ours, 1 << 16).decode()
    lines = re.sub(r"\x1b\[\d+m", "", shown).splitlines()
    os.close(ours), os.close(theirs)
    assert max(map(len, lines)) <= 80
    assert "waits  for" in lines[1]
    assert "last steps" not in lines[1]
    (job,) = summary.jobs(summary.read()[0])
    for row, text in zip(job.rows, lines[2:], strict=True):
        numbers = [str(row.rank), str(row.pid), "1234569", f"{row.step_ms:.2f}"]
        assert [w for w in text.split() if w in numbers][:4] == numbers, lines


@pytest.mark.parametrize(
    ("height", "n_rows", "said"),
    [
        (33, [12, 12, 1], []),
        (30, [12, 12], ["... 1 more: --job"]),
        (26, [12, 8], ["... 4 more ranks: --pid", "... 1 more: --job"]),
        (20, [12], ["... 2 more: --job"]),
        (12, [8], ["... 4 more ranks: --pid", "... 2 more: --job"]),
        (5, [], ["... 3 more: --job"]),
    ],
)
def test_top_says_what_a_low_terminal_has_no_room_for(name, height, n_rows, said):
    console = pytest.importorskip("rich.console").Console(width=80, height=height)
    table = importlib.import_module("paceline._cli.steps.table")
    recorders = [start(job=f"h:{j}", rank=r) for j in (1, 2) for r in range(12)]
    recorders.append(start(job="h:3"))
    picture = table.picture(summary.jobs(summary.read()[0]), [], 80, height)
    lines = ["".join(s.text for s in line) for line in console.render_lines(picture)]
    heads = [i for i, line in enumerate(lines) if line.startswith("h:")]
    rows = [
        sum(line.split()[0].isdigit() for line in lines[i:j])
        for i, j in itertools.pairwise([*heads, len(lines)])
    ]
    assert rows == n_rows
    assert len(lines) <= height
    notes = [line for line in lines if line.startswith("...")]
    assert all(a.startswith(b) for a, b in zip(notes, said, strict=True))
    del recorders


def test_the_help_of_top_has_each_column_and_key():
    pytest.importorskip("rich")
    table = importlib.import_module("paceline._cli.steps.table")
    fields = [*dataclasses.fields(summary.RankRow), *dataclasses.fields(summary.Job)]
    for name in (*table._COLUMNS, *(field.name for field in fields), "problems"):
        assert re.search(rf"\b{name}\b", " ".join(top.EPILOGUE.split())), name
    assert max(map(len, top.EPILOGUE.splitlines())) < 80


def test_top_says_what_to_install_without_rich(name, monkeypatch, capsys):
    for name in [n for n in sys.modules if n.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "paceline._cli.steps.table", raising=False)
    monkeypatch.delattr("paceline._cli.steps.table", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert top.main(["--once"], "paceline") == 1
    assert "pip install rich" in capsys.readouterr().err
    assert top.main(["--json"], "paceline") == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == []


@pytest.mark.usefixtures("name")
def test_trace_says_that_there_is_nothing_to_write(tmp_path, capsys):
    path = tmp_path / "trace.json"
    assert trace.main(["-o", str(path)], "paceline") == 1
    assert "no steps" in capsys.readouterr().err
    assert not path.exists()


def test_reductions_that_overlap_get_lanes_of_their_own():
    lanes = events._Lanes(1, 0)
    for begin, end in ((10, 30), (20, 40), (30, 50), (45, 60)):
        lanes.add_reduction("bucket", begin, end)
    assert [event["tid"] - events.REDUCTION for event in lanes.events] == [0, 1, 0, 1]
    assert [name for _, name in lanes.used][-2:] == ["reduction 1", "reduction 2"]
