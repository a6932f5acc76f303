"""``paceline doctor`` as a user runs it, on this machine and on broken settings."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import paceline
import pytest
from support.forbidden import forbid, is_known
from support.processes import wait_until_gone

SECONDS = 300
HOME = str(Path(paceline.__file__).parents[1])
NAMES = {"python", "torch", "cores", "links", "gpu_links"}

needs_seccomp = pytest.mark.skipif(
    not is_known(), reason="the numbers of this machine's system calls are not known"
)


def start(*words, env=None, before=None, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "doctor", *words],
        env={**os.environ, **(env or {})},
        preexec_fn=before,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def doctor(*words, **options):
    """Run it; return the exit status, standard output, and standard error."""
    with start(*words, **options) as process:
        output, errors = process.communicate(timeout=SECONDS)
    return process.returncode, output, errors


def findings(**options):
    """Run it with --json; return the findings by name, and check the whole."""
    status, output, errors = doctor("--json", **options)
    assert errors == ""
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
    """Check that nothing is wrong with these, so that what is said is not noise."""
    assert [name for name in names if found[name]["status"] == "problem"] == []


def children():
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


# ---- as it should be ----------------------------------------------------------------


def test_text_and_json_say_the_same_and_nothing_is_left(tmp_path):
    cache = tmp_path / "cache"
    env = {"XDG_CACHE_HOME": str(cache), "HOME": str(tmp_path)}
    before = children()
    found = findings(env=env, cwd=tmp_path)
    status, output, errors = doctor(env=env, cwd=tmp_path)
    assert errors == ""
    lines = output.splitlines()
    heads = {line.split()[1]: line.split()[0] for line in lines if line[0] in "owp"}
    assert heads == {name: finding["status"] for name, finding in found.items()}
    is_well = status == 0
    assert is_well == (lines[-1] == "All is well." or "can train here" in lines[-1])
    assert_said(found["links"], "ok", "2 ranks added up", "every element right")
    assert_said(found["shared_memory"], "ok", "written and read")
    assert_said(found["extension"], "ok", f"paceline {paceline.__version__}")
    assert_said(found["torch"], "ok", "torch ")
    assert children() == before
    assert list(tmp_path.iterdir()) == [], "it writes nothing"


def test_values_that_are_no_text_are_printed_too():
    env = {**os.environb, b"NCCL_DEBUG": b"\xff\x1b"}
    with subprocess.Popen(
        [sys.executable, "-m", "paceline", "doctor"], env=env, stdout=subprocess.PIPE
    ) as process:
        output = process.communicate(timeout=SECONDS)[0].decode()
    assert process.returncode == 0
    assert "NCCL_DEBUG=\\udcff" in output


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
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
        ended = subprocess.run(
            [sys.executable, "-m", "paceline", "doctor"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
        )
    assert ended.returncode == 1
    assert ended.stderr == "paceline: [Errno 28] No space left on device\n"


def test_the_output_may_be_cut_short():
    command = f"{sys.executable} -m paceline doctor | head -1"
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.stdout.count("\n") == 1
    assert ended.stderr == ""


def test_an_interrupt_ends_it_without_a_traceback_and_with_all_it_started():
    env = {"PYTHONPATH": f"{Path(__file__).parent / 'jobs/no_host_name'}:{HOME}"}
    with start(env=env) as process:
        for line in process.stdout:
            if line.split()[1:2] == ["processes"]:  # a long path has a line of its own
                break
        time.sleep(0.5)  # it is at the host's name, which takes for ever
        probes = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")
    pids = [int(pid) for pid in probes.split()]
    assert pids
    assert wait_until_gone(pids, 5.0) == []


# ---- broken settings ----------------------------------------------------------------


def test_one_core_is_said():
    core = min(os.sched_getaffinity(0))
    found = findings(before=lambda: os.sched_setaffinity(0, {core}))
    assert_said(found["cores"], "warning", "1 of ", "less than two cores")
    assert_well(found, *found)


def test_threads_that_are_bound_to_one_core_are_said():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one core")
    found = findings(env={"OMP_PROC_BIND": "true"})
    if found["threads"]["status"] == "ok":
        pytest.skip("this torch's OpenMP does not bind the main thread")
    assert_said(found["threads"], "warning", "OMP_PROC_BIND=true", "bound to 1 of")


def test_few_descriptors_are_said():
    def before():
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    found = findings(before=before)
    assert_said(found["limits"], "problem", "100 open files", "ulimit -n")


def test_a_limit_of_file_sizes_is_said_with_what_it_breaks():
    def before():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    found = findings(before=before)
    assert_said(found["limits"], "warning", "files of 1 MiB", "ulimit -f")
    assert_said(found["shared_memory"], "problem", "memfd_create")
    assert_said(found["links"], "problem", "shared memory")


@needs_seccomp
def test_a_sandbox_without_memfd_is_said():
    found = findings(before=lambda: forbid("memfd_create"))
    assert_said(found["shared_memory"], "problem", "not permitted", "seccomp")
    assert_said(found["links"], "problem", "not permitted")
    assert_well(found, "torch", "cores", "processes")


@needs_seccomp
def test_a_kernel_without_pidfds_is_said():
    found = findings(before=lambda: forbid("pidfd_open", errno.ENOSYS))
    assert_said(found["processes"], "warning", "pidfd_open", "Linux 5.3")
    assert_well(found, *found)


def test_a_tiny_dev_shm_is_said():
    mount = "mount -t tmpfs -o size=1m none /dev/shm"
    command = ["unshare", "-rm", "bash", "-c"]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    tried = subprocess.run([*command, mount], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"no mounts of one's own here: {tried.stderr.strip()}")
    ours = f"{sys.executable} -m paceline doctor --json"
    ended = subprocess.run(
        [*command, f"{mount} && {ours}"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    found = {check["name"]: check for check in json.loads(ended.stdout)["checks"]}
    assert_said(found["dev_shm"], "warning", "1 MiB free of 1 MiB", "--shm-size")
    assert_said(found["links"], "ok")
    assert ended.returncode == 0


def test_libraries_that_are_not_where_they_are_said_to_be_are_named():
    env = {"PACELINE_LIBNCCL": "/nowhere", "PACELINE_LIBCUDA": "/not/here"}
    found = findings(env=env)
    assert_said(found["nccl"], "problem", "/nowhere", "PACELINE_LIBNCCL is set")
    assert_said(found["driver"], "problem", "/not/here", "PACELINE_LIBCUDA is set")


def test_variables_that_are_wrong_are_said():
    env = {"PACELINE_TIMOUT": "3", "PACELINE_STRICT": "yes", "PACELINE_ISA": "mmx"}
    found = findings(env=env)
    assert_said(found["environment"], "problem", "PACELINE_TIMEOUT?", "'yes'", "'mmx'")
    assert_said(found["extension"], "problem", "mmx")


def block(folder, name, line):
    """Write a sitecustomize that has a module fail to be imported."""
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
    found = findings(env=env)
    assert_said(found["torch"], "problem", "No module 'torch'", "pip install")
    for name in ("threads", "gpus", "kernels", "nccl", "gpu_links"):
        assert_said(found[name], "warning", "not looked at")
    assert_said(found["links"], "ok", "every element right")


def test_an_extension_that_does_not_load_is_said_and_the_rest_is_looked_at(tmp_path):
    line = 'raise ImportError("GLIBC_2.99 not found")'
    found = findings(env=block(tmp_path, "paceline._native", line))
    assert_said(found["extension"], "problem", "GLIBC_2.99", "pip install")
    assert_said(found["links"], "warning", "not looked at: the extension")
    assert_said(found["shared_memory"], "ok", "written and read")
    assert_said(found["cores"], found["cores"]["status"], " by affinity")


def test_a_torch_that_crashes_does_not_take_the_doctor_along(tmp_path):
    env = block(tmp_path, "torch", "import os; os.abort()")
    found = findings(env=env)
    for name in ("torch", "threads"):
        assert_said(found[name], "problem", "SIGABRT", "install torch anew")
    assert_said(found["links"], "ok")


# ---- the command line ---------------------------------------------------------------


@pytest.fixture
def console_script(tmp_path):
    """The script that an installer makes of the entry point."""
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


WATCHED = "any(hasattr(f, 'is_paceline_import_hook') for f in sys.meta_path)"
WHO = f"import sys; print({WATCHED}, sys.argv, __name__)\n"


def test_a_script_runs_by_the_command_and_by_the_module_alike(console_script, tmp_path):
    (tmp_path / "train.py").write_text(WHO)
    module = [sys.executable, "-m", "paceline"]
    outputs = [
        run(*start, *words, "train.py", "-x", "run", cwd=tmp_path)
        for start in ([console_script], module, [sys.executable, "-O", console_script])
        for words in ([], ["run"])
    ]
    expected = "True ['train.py', '-x', 'run'] __main__\n"
    assert [ended.stdout for ended in outputs] == [expected] * 6


def test_options_of_python_hold_for_a_script_that_is_run_by_name(
    console_script, tmp_path
):
    code = "import sys; print(sys.flags.optimize)"
    for start in ([console_script], ["-m", "paceline"], ["-mpaceline"]):
        ended = run(sys.executable, "-O", *start, "run", "-c", code, cwd=tmp_path)
        assert ended.stdout == "1\n", ended.stderr


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
        for words in (["--help"], ["run", "--help"]):
            ended = run(*start, *words, cwd=tmp_path)
            assert ended.returncode == 0
            assert ended.stdout.startswith(f"usage: {name} script.py [argument ...]\n")
            assert f"{name} doctor [--json]" in ended.stdout
        ended = run(*start, "doctor", "--help", cwd=tmp_path)
        assert ended.stdout.startswith(f"usage: {name} doctor [-h] [--json]")
        assert "Exit status" in ended.stdout
        version = run(*start, "--version", cwd=tmp_path).stdout
        assert version == f"paceline {paceline.__version__}\n"


@pytest.mark.parametrize("words", [["run"], ["run", "-m"], ["run", "--no"], []])
def test_a_run_of_nothing_is_refused(console_script, tmp_path, words):
    ended = run(console_script, *words, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("paceline: ")
    assert "\nusage: paceline script.py" in ended.stderr


def test_an_argument_that_doctor_does_not_know_is_refused(tmp_path):
    ended = run(sys.executable, "-m", "paceline", "doctor", "--jsn", cwd=tmp_path)
    assert ended.returncode == 2
    assert "unrecognized arguments: --jsn" in ended.stderr
