"""``paceline bench`` as a user runs it: figures, tables, pictures, wrong arguments."""

import json
import os
import sys
from pathlib import Path

import paceline
import pytest
from paceline._cli.bench import command
from support import warm

SECONDS = 300
QUICK = ["--quick", "--models", "digits", "--ranks", "2", "--cpu"]
CONTESTANTS = {"plain", "torch-ddp", "ranks"}


def bench(*words, **env):
    return warm.run(
        [sys.executable, "-m", "paceline", "bench", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def children():
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_quick_json_has_a_figure_for_every_contestant_and_leaves_nothing():
    warm.run([sys.executable, "-c", ""])  # whose server is a child of this process
    before = children()
    done = bench(*QUICK, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["version"] == paceline.__version__
    assert report["settings"]["models"] == ["digits"]
    assert {row["n_bytes"] for row in report["all_reduce"]} == {64 << 10, 1 << 20}
    for row in report["all_reduce"]:
        ratio = row["times_as_fast"]
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        assert row["gloo_us"] > 0 < row["paceline_us"]
    rows = {row["contestant"]: row for row in report["steps"]}
    assert set(rows) == CONTESTANTS
    assert all(row["step_ms"] > 0 for row in rows.values())
    assert {name: row["n_parallel"] for name, row in rows.items()} == {
        name: 1 if name == "plain" else 2 for name in CONTESTANTS
    }
    assert rows["plain"]["against_plain"] is None
    assert all(rows[name]["against_plain"] for name in CONTESTANTS - {"plain"})
    ratio = rows["ranks"]["against_torch"]
    assert 0 < ratio["low"] < ratio["median"] < ratio["high"]  # of several rounds
    assert report["advice"]["contestant"] in CONTESTANTS - {"torch-ddp"}
    assert report["advice"]["text"]
    assert children() == before


def test_text_has_two_tables_an_advice_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.png"
    done = bench(*QUICK, "--plot", str(picture), MPLCONFIGDIR=str(tmp_path / "mpl"))
    assert done.returncode == 0, done.stderr
    assert "All-reduce of float32" in done.stdout
    assert "paceline.DistributedDataParallel  " in done.stdout
    assert "On this model" in done.stdout
    assert "these are no figures to quote" in done.stdout
    assert done.stdout.endswith(f"written: {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_rank_that_fails_is_one_message():
    done = bench(*QUICK, PACELINE_TIMEOUT="soon")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "PACELINE_TIMEOUT" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--models", "resnet"], "--models has 'resnet': the models are digits, "),
        (["--ranks", "1"], "--ranks has '1': give whole numbers from 2 to 64"),
        (["--ranks", "2,x"], "--ranks has 'x'"),
        (["--seconds", "0"], "--seconds is 0: give more than 0"),
        (["--seconds", "nan"], "--seconds is nan: give more than 0"),
        (["--plot", "a.docx"], "the name must end in one of "),
        (["--plot", "/nowhere/a.png"], "/nowhere is no folder that can be written to"),
        (["--slow"], "unrecognized arguments: --slow"),
    ],
)
def test_a_wrong_argument_is_said_before_anything_runs(words, told, capsys):
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as ended:
        command.main(["--cpu", *words], "paceline")
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert told in errors


def test_without_matplotlib_a_picture_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError\n")
    done = bench("--cpu", "--plot", "a.png", PYTHONPATH=paths(tmp_path))
    assert done.returncode == 2
    assert "matplotlib is not installed: pip install 'paceline[tools]'" in done.stderr


def paths(folder):
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
