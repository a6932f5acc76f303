"""``python -m paceline`` acts like ``python``, and also reaches child processes."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import paceline
import pytest
from support.prints import without_gloo

SECONDS = 120
# Print whether the import of torch is hooked, without importing torch.
WATCHED = (
    "import sys; print(any(type(f).__name__ == '_ImportHook' for f in sys.meta_path))"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Provide a current folder and a user's environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def python(*words, **options):
    """Run Python with arguments; return its exit code and its output."""
    options = {"capture_output": True, "text": True, "timeout": SECONDS, **options}
    return subprocess.run([sys.executable, *map(str, words)], **options)


def ours(*words, **options):
    return python("-m", "paceline", *words, **options)


def lines(result):
    assert result.returncode == 0, result.stderr
    return without_gloo(result.stdout).splitlines()


# ---- the same program ---------------------------------------------------------------

FACTS = """
import json, os, sys
import __main__
names = ["__name__", "__file__", "__package__", "__doc__", "__cached__"]
facts = {name: globals().get(name, "missing") for name in names}
facts["names"] = sorted(set(globals()) - {"json", "os", "sys", "names", "facts"})
facts["argv"] = sys.argv
facts["path"] = sys.path[:2]
facts["spec"] = getattr(__spec__, "name", None)
facts["origin"] = getattr(__spec__, "origin", None)
facts["loader"] = getattr(__loader__, "__name__", type(__loader__).__name__)
facts["main"] = __main__.__dict__ is globals()
facts["builtins"] = type(__builtins__).__name__
facts["hook"] = sys.excepthook is sys.__excepthook__
print(json.dumps(facts))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "-x", "--help", "a b"],
        ["./train.py"],
        ["sub/train.py", "-m", "other"],
        ["{here}/sub/train.py"],
        ["../{name}/train.py"],
        ["link.py"],
        ["-m", "package.train", "-c", "1"],
        ["-mpackage.train"],
        ["-m", "package"],
        ["-c", FACTS, "-m", "x"],
        ["sub"],
        ["packed.zip", "1"],
    ],
    ids=lambda words: words[0][:12] + words[1][:8] if len(words) > 1 else words[0],
)
def test_a_program_sees_what_python_shows_it(here, words):
    for path in ("train", "sub/train", "package/train", "package/__main__"):
        write(here / f"{path}.py", FACTS)
    write(here / "sub/__main__.py", FACTS)
    write(here / "package/__init__.py", "")
    (here / "link.py").symlink_to(here / "sub/train.py")
    with zipfile.ZipFile(here / "packed.zip", "w") as packed:
        packed.writestr("__main__.py", FACTS)
    words = [w.replace("{here}", str(here)).replace("{name}", here.name) for w in words]
    expected, found = (json.loads(lines(run(*words))[0]) for run in (python, ours))
    assert found == expected
    assert found["main"]


@pytest.mark.parametrize(
    "words", [["-", "a"], ["/dev/stdin", "a"], ["{pipe}"]], ids=lambda words: words[0]
)
def test_a_program_may_come_through_a_pipe(here, words):
    text = "import sys\nprint(sys.argv, sys.path[0], __name__)\nprint(1 / 0)\n"

    def run(*start):
        read, write = os.pipe()
        os.write(write, text.encode())
        os.close(write)
        try:
            full = [w.replace("{pipe}", f"/dev/fd/{read}") for w in words]
            result = python(*start, *full, input=text, pass_fds=(read,))
        finally:
            os.close(read)
        said = re.sub(r"/dev/fd/\d+", "PIPE", result.stdout + result.stderr)
        return result.returncode, said

    assert run("-m", "paceline") == run()


def compare(*words, before=()):
    """Run a program with Python and with Paceline; compare exit codes and output."""
    expected, found = python(*before, *words), python(*before, "-m", "paceline", *words)
    assert found.returncode == expected.returncode
    assert (found.stdout, found.stderr) == (expected.stdout, expected.stderr)
    return found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python has no -P")
def test_a_safe_path_has_nothing_put_in_front(here):
    write(here / "train.py", "import sys; print(sys.path)")
    assert compare("train.py", before=["-P"]).returncode == 0


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "raise SystemExit(7)",
        "raise SystemExit('words')",
        "raise SystemExit",
        "import os; os._exit(9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "raise KeyboardInterrupt",
        "def f(): raise ValueError('no')\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('then')",
        "import no_such_module",
        "this is no Python",
        "import sys; sys.excepthook = lambda *a: print('hook', a[0]); 1 / 0",
        "import atexit; atexit.register(print, 'at exit'); 1 / 0",
    ],
)
def test_an_end_is_the_same_in_code_and_words(here, end):
    write(here / "train.py", f"print('begun')\n{end}\n")
    write(here / "package/train.py", f"print('begun')\n{end}\n")
    compare("train.py")
    compare("-m", "package.train")


def test_a_program_that_is_missing_is_said_as_python_does(here):
    assert compare("none.py").returncode == 2
    assert compare("-m", "no_such").returncode == 1


@pytest.mark.parametrize(
    "words", [[], ["-m"], ["-c"], ["--no-such"], ["-x", "a.py"], ["run"], ["run", "-m"]]
)
def test_words_that_mean_nothing_are_refused_with_code_2(here, words):
    found = ours(*words)
    assert found.returncode == 2
    assert found.stdout == ""
    run = " run" if words[:1] == ["run"] else ""
    line = rf"paceline{run}: [^\n]* \(python -m paceline{run} --help says more\)\n"
    assert re.fullmatch(line, found.stderr)


@pytest.mark.parametrize("start", [["-m", "paceline"], ["-mpaceline"]])
def test_options_of_python_hold_for_the_program(here, start):
    code = "import sys; print(sys.flags, sys.warnoptions, sys._xoptions)"
    flags = ["-O", "-W", "error", "-X", "utf8", "-u"]
    expected, found = (lines(python(*flags, *w, "-c", code)) for w in ([], start))
    assert found == expected


def test_options_of_python_may_be_one_word_with_ours(here):
    code = "import sys; print(sys.flags.optimize, sys.flags.bytes_warning)"
    for start in (["-Obmpaceline"], ["-Obm", "paceline"]):
        assert lines(python(*start, "-c", code)) == ["1 1"]


def test_what_would_not_reach_the_program_is_refused(here, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(paceline.__file__).parents[1]))
    code = "import runpy; runpy.run_module('paceline', run_name='__main__')"
    for words, said in (
        (["-c", code, "train.py"], "start it by python -m paceline"),
        (["-Sm", "paceline", "-c", "print('ran')"], "reads no paceline.pth"),
    ):
        found = python(*words)
        assert (found.returncode, found.stdout) == (2, "")
        assert said in found.stderr
    code = "from paceline._cli.doctor import machine; print(machine.look_environment())"
    assert "reads no paceline.pth" in python("-Sc", code).stdout


def test_what_a_script_defines_can_be_pickled_and_found_later(here):
    write(
        here / "train.py",
        """
        import atexit, pickle, sys
        class Thing: pass
        words = pickle.dumps(Thing())
        def late():
            print(type(pickle.loads(words)) is sys.modules["__main__"].Thing is Thing)
        atexit.register(late)
        """,
    )
    assert lines(ours("train.py")) == ["True"]


# ---- children -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["script", "module", "call"])
def test_children_of_multiprocessing_are_reached(here, how):
    call = "import paceline; paceline.install()" if how == "call" else ""
    write(
        here / "train.py",
        f"""
        import multiprocessing, sys
        def child(queue):
            exec({WATCHED!r}, {{"print": queue.put}})
        if __name__ == "__main__":
            {call}
            for method in ("fork", "spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                print(queue.get(timeout=60))
                process.join()
        """,
    )
    run = python if how == "call" else ours
    words = ["-m", "train"] if how == "module" else ["train.py"]
    assert lines(run(*words)) == ["True"] * 3


def test_ranks_of_torch_multiprocessing_train_by_ours(here):
    write(
        here / "train.py",
        """
        import os, torch, torch.distributed as dist, torch.multiprocessing as mp
        from torch.nn.parallel import DistributedDataParallel as DDP
        def train(rank, path):
            dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2)
            model = DDP(torch.nn.Linear(2, 1, bias=False))
            model(torch.full((1, 2), 2.0 * rank)).sum().backward()
            grad = model.module.weight.grad.tolist()
            print(f"{type(model).__module__} {grad}\\n", end="")  # at once
            dist.destroy_process_group()
        if __name__ == "__main__":
            mp.spawn(train, (os.path.abspath("store"),), nprocs=2)
        """,
    )
    assert lines(ours("train.py")) == ["paceline [[1.0, 1.0]]"] * 2


def test_a_script_that_runs_itself_again_is_reached_each_time(here):
    write(
        here / "train.py",
        f"""
        import os, subprocess, sys
        {WATCHED}
        print(sys.argv[1:], flush=True)
        depth = int(sys.argv[1])
        command = [sys.executable, os.path.abspath(sys.argv[0]), str(depth - 1)]
        if depth == 1:
            os.execv(command[0], command)
        if depth:
            sys.exit(subprocess.run(command).returncode)
        """,
    )
    expected = [word for n in (2, 1, 0) for word in ("True", f"['{n}']")]
    assert lines(ours("train.py", "2")) == expected


OURS_LOADED = "import sys; print([m for m in sys.modules if m[:8] == 'paceline'])"
UNDONE = f"""
import paceline, subprocess, sys
paceline.uninstall()
{WATCHED}
subprocess.run([sys.executable, "-c", {WATCHED!r}])
"""
# What else a process may find in place of torch or Paceline: files, what Python prints.
FAILURES = {
    "no torch": ({"torch": "raise ImportError('none')"}, "none", ""),
    "another torch": ({"torch": ""}, "went on", "ModuleNotFoundError"),
    "a broken paceline": ({"paceline": "1\n1 / 0"}, "went on", "ZeroDivisionError"),
    "no paceline": ({"paceline": ""}, "went on", "ModuleNotFoundError"),
}


def test_children_are_reached_as_far_as_they_can_be(here):
    loaded = "['paceline', 'paceline._install', 'paceline._install.import_hook']"
    rows = [
        (["-c", OURS_LOADED], [loaded]),  # it does not need torch
        (["-I", "-c", WATCHED], ["True"]),
        (["-E", "-c", WATCHED], ["True"]),
        (["-S", "-c", WATCHED], ["False"]),
        (["-B", "-c", WATCHED], ["True"]),
        (["-uc", UNDONE], ["False", "False"]),  # in itself and its children
    ]
    children = [words for words, _ in rows]
    write(
        here / "train.py",
        f"import subprocess, sys\nfor words in {children!r}:\n"
        "    subprocess.run([sys.executable, *words], check=True)\n",
    )
    result = ours("train.py")
    assert lines(result) == [line for _, expected in rows for line in expected]
    assert result.stderr == ""


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_loaded_without_the_variable(value, monkeypatch):
    monkeypatch.delenv("PACELINE_INSTALL", raising=False)
    if value is not None:
        monkeypatch.setenv("PACELINE_INSTALL", value)
    assert lines(python("-c", OURS_LOADED)) == ["[]"]


@pytest.mark.parametrize("kind", FAILURES)
def test_a_program_that_cannot_have_paceline_starts_and_says_so(
    here, kind, monkeypatch
):
    files, printed, error = FAILURES[kind]
    for name, text in files.items():
        write(here / f"other/{name}/__init__.py", text)
    monkeypatch.setenv("PYTHONPATH", str(here / "other"))
    monkeypatch.setenv("PACELINE_INSTALL", "1")
    code = "try: import torch; print('went on')\nexcept ImportError as e: print(e)"
    found = python("-c", code)
    assert lines(found) == [printed]
    line = rf"paceline: PACELINE_INSTALL=1 has no effect: {error}\(.*\)\n"
    assert re.fullmatch(line if error else "", found.stderr)


# ---- launchers ----------------------------------------------------------------------

TRAIN = """
import os, sys
again = os.environ["TORCHELASTIC_RESTART_COUNT"]
rank = int(os.environ["RANK"])
if again == "0" and rank == 1:
    raise SystemExit(3)
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
store = dist.FileStore(os.path.abspath("store" + again), 2)  # a round, a store
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = DDP(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), 2.0 * rank + 2)).sum().backward()
grad = model.module.weight.grad.tolist()
kind = type(model).__module__
print(f"rank {rank} round {again} {kind} {grad} {__name__} {sys.argv[1:]}\\n", end="")
dist.destroy_process_group()
"""


# Gloo's threads outlive their group.  If a process ends while they run, torch sometimes
# aborts it, with or without paceline.  Such a run is inconclusive.
TORCH_ABORTS = "terminate called without an active exception"
TRIES = 5


def test_torchrun_runs_it_as_a_module_and_again_after_a_failure(here):
    write(here / "package/train.py", TRAIN)
    command = ["-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["-m", "paceline", "-m", "package.train", "word"]
    for _ in range(TRIES):
        for store in here.glob("store*"):
            store.unlink()
        done = python(*command)
        if TORCH_ABORTS not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank .*", done.stdout)) == [
        f"rank {rank} round 1 paceline [[3.0, 3.0]] __main__ ['word']"
        for rank in (0, 1)
    ]


def test_an_interrupt_from_outside_ends_it_as_python(here):
    # A signal just before a sleep is seen after it.
    wait = "for _ in range(600): time.sleep(0.1)"
    write(here / "train.py", f"import time\nprint('ready', flush=True)\n{wait}\n")
    codes = []
    for words in (["train.py"], ["-m", "paceline", "train.py"]):
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS)
        codes.append(process.returncode)
        # The program is in its second or third line when the signal arrives; Python
        # 3.13 marks the call in a line below.
        assert re.fullmatch(
            r'Traceback .*\n  File ".*/train.py", line [23].*\n'
            r"(?: {4}.*\n){1,2}KeyboardInterrupt\n",
            err,
        )
    assert codes == [-signal.SIGINT] * 2
