"""``paceline doctor`` as a user runs it, on this machine and with broken settings."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import paceline
import pytest
from support import warm
from support.forbidden import is_known
from support.processes import children, wait_until_gone
from support.waiting import until

SECONDS = 300
HOME = str(Path(paceline.__file__).parents[1])
NAMES = {"torch", "cores", "links", "gpu_links"}

needs_seccomp = pytest.mark.skipif(
    not is_known(), reason="the numbers of this machine's system calls are not known"
)


COMMAND = [sys.executable, "-m", "paceline", "doctor"]


def start(*words, env=None, start=warm.Popen, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    env = {**os.environ, **(env or {})}
    return start([*COMMAND, *words], env=env, text=True, **options)


def doctor(*words, **options):
    """Run the doctor; return its exit status, standard output and standard error."""
    with start(*words, **options) as process:
        output, errors = process.communicate(timeout=SECONDS)
    return process.returncode, output, errors


def findings(**options):
    """Run the doctor with --json; return its findings by name."""
    status, output, errors = doctor("--json", **options)
    assert errors == ""
    return read(status, output)


def read(status, output):
    """Check the output as a whole; return its findings by name."""
    report = json.loads(output)
    assert set(report) == {"version", "status", "verdict", "checks"}
    keys = {"name", "status", "found", "advice"}
    assert all(set(check) == keys for check in report["checks"])
    statuses = [check["status"] for check in report["checks"]]
    assert status == ("problem" in statuses)
    found = {check["name"]: check for check in report["checks"]}
    assert set(found) > NAMES
    return found


def assert_said(finding, status, *words):
    text = f"{finding['found']} {finding['advice']}"
    assert finding["status"] == status, text
    assert all(word in text for word in words), text


def assert_well(found, *names):
    """Check that these findings report no problem, so that others are not noise."""
    assert [name for name in names if found[name]["status"] == "problem"] == []


# ---- a working machine --------------------------------------------------------------


def test_text_and_json_say_the_same_and_nothing_is_left(tmp_path):
    cache = tmp_path / "cache"
    env = {"XDG_CACHE_HOME": str(cache), "HOME": str(tmp_path)}
    warm.run([sys.executable, "-c", ""])  # starts its server, a child of this process
    before = children()
    found = findings(env=env, cwd=tmp_path, start=subprocess.Popen)
    status, output, errors = doctor(env=env, cwd=tmp_path)
    assert errors == ""
    lines = output.splitlines()
    heads = {line.split()[1]: line.split()[0] for line in lines if line[0] in "owp"}
    assert heads == {name: finding["status"] for name, finding in found.items()}
    is_well = status == 0
    assert is_well == (lines[-1] == "All is well." or "can train here" in lines[-1])
    assert_said(found["links"], "ok", "2 ranks added up", "every element right")
    assert_said(found["extension"], "ok", f"paceline {paceline.__version__}")
    assert_said(found["torch"], "ok", "torch ")
    assert children() == before
    assert list(tmp_path.iterdir()) == [], "it writes nothing"


@pytest.mark.parametrize("closed", ["0<&- 2>&-", "0<&- 1>&- 2>&-"])
def test_standard_streams_may_be_closed(closed):
    command = f"{sys.executable} -m paceline doctor --json {closed}"
    ended = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=SECONDS
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    if "1>&-" not in closed:
        assert json.loads(ended.stdout)["status"] != "problem"


def test_an_output_that_cannot_be_written_is_said_in_a_line():
    with open("/dev/full", "w") as full:
        status, _, errors = doctor(stdout=full)
    assert status == 1
    assert errors == "paceline: [Errno 28] No space left on device\n"


def test_the_output_may_be_cut_short():
    with start() as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""


HANGING_TORCH = """
import pathlib, sys, time
class Hang:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            pathlib.Path({path!r}).touch()
            time.sleep(300)
sys.meta_path.insert(0, Hang())
"""


def test_an_interrupt_ends_it_without_a_traceback_and_with_all_it_started(tmp_path):
    asked = tmp_path / "asked"
    (tmp_path / "sitecustomize.py").write_text(HANGING_TORCH.format(path=str(asked)))
    env = {"PYTHONPATH": f"{tmp_path}:{HOME}"}
    with start(env=env, start=subprocess.Popen) as process:
        assert until(asked.exists)
        probes = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")
    pids = [int(pid) for pid in probes.split()]
    assert pids
    assert wait_until_gone(pids, 5.0) == []


# ---- broken settings ----------------------------------------------------------------


ONE_CORE = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
LIMIT = "import resource as r; r.setrlimit(r.RLIMIT_{}, ({}, {}))"
FORBID = "import errno, support.forbidden as f; f.forbid({})"


@pytest.mark.parametrize(
    ("first", "said", "well"),
    [
        (ONE_CORE, {"cores": ("warning", "1 of ", "less than two cores")}, None),
        (
            LIMIT.format("FSIZE", 1 << 20, 1 << 20),
            {"links": ("problem", "shared memory", "ulimit -f")},
            [],
        ),
        pytest.param(
            FORBID.format("'memfd_create'"),
            {"links": ("problem", "not permitted", "seccomp")},
            ["torch", "cores"],
            marks=needs_seccomp,
        ),
    ],
)
def test_what_the_system_withholds_is_said_with_what_it_breaks(first, said, well):
    found = findings(first=first)
    for name, words in said.items():
        assert_said(found[name], *words)
    assert_well(found, *(found if well is None else well))


def test_threads_that_are_bound_to_one_core_are_said():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one core")
    found = findings(env={"OMP_PROC_BIND": "true"}, start=subprocess.Popen)
    if found["cores"]["status"] == "ok":
        pytest.skip("this torch's OpenMP does not bind the main thread")
    assert_said(found["cores"], "warning", "OMP_PROC_BIND", "bound to 1 of")


def test_variables_and_libraries_that_are_wrong_are_said():
    env = {"PACELINE_TIMOUT": "3", "PACELINE_STRICT": "yes"}
    env |= {"PACELINE_LIBNCCL": "/nowhere", "PACELINE_LIBCUDA": "/not/here"}
    found = findings(env=env)
    assert_said(found["environment"], "problem", "PACELINE_TIMEOUT?", "'yes'")
    assert_said(found["gpus"], "problem", "/nowhere", "PACELINE_LIBNCCL is set")
    assert_said(found["driver"], "problem", "/not/here", "PACELINE_LIBCUDA is set")


def block(folder, name, line):
    """Write a sitecustomize with which the import of a module fails."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            {line}
sys.meta_path.insert(0, Block())
"""
    )
    return {"PYTHONPATH": f"{folder}:{HOME}"}


def test_a_torch_that_is_missing_is_said_and_the_rest_is_looked_at(tmp_path):
    env = block(tmp_path, "torch", "raise ModuleNotFoundError(\"No module 'torch'\")")
    found = findings(env=env, start=subprocess.Popen)
    assert_said(found["torch"], "problem", "No module 'torch'", "pip install")
    for name in ("cores", "gpus", "gpu_links"):
        assert_said(found[name], "warning", "not looked at")
    assert_said(found["links"], "ok", "every element right")


def test_an_extension_that_does_not_load_is_said_and_the_rest_is_looked_at(tmp_path):
    line = 'raise ImportError("GLIBC_2.99 not found")'
    found = findings(
        env=block(tmp_path, "paceline._native", line), start=subprocess.Popen
    )
    assert_said(found["extension"], "problem", "GLIBC_2.99", "pip install")
    assert_said(found["links"], "warning", "not looked at, because of extension")
    assert_said(found["dev_shm"], found["dev_shm"]["status"], " free of ")


def test_a_torch_that_crashes_does_not_take_the_doctor_along(tmp_path):
    env = block(tmp_path, "torch", "import os; os.abort()")
    found = findings(env=env, start=subprocess.Popen)
    assert_said(found["torch"], "problem", "SIGABRT", "reinstall torch")
    assert_said(found["cores"], "warning", "not looked at, because of torch")
    assert_said(found["links"], "ok")


# ---- the command line ---------------------------------------------------------------


@pytest.fixture
def console_script(tmp_path):
    """Write the script that an installer makes from the entry point."""
    path = tmp_path / "bin/paceline"
    path.parent.mkdir()
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom paceline._cli.main import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    path.chmod(0o755)
    return str(path)


def run(*command, cwd, **env):
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": HOME, **env},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


WATCHED = "any(type(f).__name__ == '_ImportHook' for f in sys.meta_path)"
WHO = f"import sys; print({WATCHED}, sys.argv, __name__, sys.flags.optimize)\n"


def test_a_script_runs_by_the_command_and_by_the_module_alike(console_script, tmp_path):
    (tmp_path / "train.py").write_text(WHO)
    python = [sys.executable, "-O"]
    for start in (
        [console_script],
        [*python, "-m", "paceline"],
        [*python, console_script],
    ):
        for words in ([], ["run"]):
            ended = run(*start, *words, "train.py", "-x", "run", cwd=tmp_path)
            flag = int(start[0] != console_script)  # the script has no option of Python
            assert ended.stdout == f"True ['train.py', '-x', 'run'] __main__ {flag}\n"


def test_a_script_may_be_called_as_a_command_is(tmp_path):
    for name in ("doctor", "doctor.py"):
        (tmp_path / name).write_text("print('mine')\n")
    module = [sys.executable, "-m", "paceline"]
    for words in (["doctor.py"], ["./doctor"], ["run", "doctor"], ["run", "doctor.py"]):
        assert run(*module, *words, cwd=tmp_path).stdout == "mine\n", words
    assert "usage" in run(*module, "doctor", "--help", cwd=tmp_path).stdout


def test_help_names_the_program_as_it_was_started(console_script, tmp_path):
    for start, name in (
        ([console_script], "paceline"),
        ([sys.executable, "-m", "paceline"], "python -m paceline"),
    ):
        ended = run(*start, "--help", cwd=tmp_path)
        assert ended.returncode == 0
        assert ended.stdout.startswith(f"usage: {name} script.py [argument ...]\n")
        assert f"{name} doctor [--json]" in ended.stdout
        assert f"{name} run -n RANKS [torchrun option ...] script.py" in ended.stdout
        ended = run(*start, "run", "--help", cwd=tmp_path)
        assert ended.returncode == 0
        assert ended.stdout.startswith(f"usage: {name} run script.py [argument ...] ")
        assert f"{name} run -n RANKS [option ...] script.py" in ended.stdout
        ended = run(*start, "doctor", "--help", cwd=tmp_path)
        assert ended.stdout.startswith(f"usage: {name} doctor [-h] [--json]")
        assert "Exit status" in ended.stdout
        version = run(*start, "--version", cwd=tmp_path).stdout
        assert version == f"paceline {paceline.__version__}\n"
