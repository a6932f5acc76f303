"""``python -m paceline`` is ``python``; and the processes of a program are reached."""

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
from test_launchers import run_command, run_until_torch_survives

OURS, TORCHS = "paceline", "torch.nn.parallel.data_parallel"
SECONDS = 120
WHO = "import torch; print(torch.nn.DataParallel.__module__)"
# The same question without the seconds of torch: whether its import is hooked.
WATCHED = (
    "import sys; "
    "print(any(hasattr(f, 'is_paceline_import_hook') for f in sys.meta_path))"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to be in, and the environment of a user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def python(*words, **options):
    """Run Python with some words; return the exit code, and what it printed."""
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


def test_a_safe_path_has_nothing_put_in_front(here):
    if sys.version_info < (3, 11):
        pytest.skip("this Python has no -P")
    write(here / "train.py", "import sys; print(sys.path)")
    expected, found = (
        lines(python("-P", *words, "train.py")) for words in ([], ["-m", "paceline"])
    )
    assert found == expected


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
    for words in (["train.py"], ["-m", "package.train"]):
        expected, found = python(*words), ours(*words)
        assert found.returncode == expected.returncode
        assert found.stdout == expected.stdout
        assert found.stderr == expected.stderr


def test_a_script_that_is_missing_is_said_with_code_2(here):
    expected, found = python("none.py"), ours("none.py")
    assert found.returncode == expected.returncode == 2
    assert (found.stdout, found.stderr) == ("", expected.stderr)
    assert f"can't open file '{here}/none.py'" in found.stderr


def test_a_module_that_is_missing_is_said_as_python_does(here):
    expected, found = python("-m", "no_such"), ours("-m", "no_such")
    assert (found.returncode, found.stderr) == (1, expected.stderr)


def test_help_and_version_go_to_standard_output(here):
    for flag in ("-h", "--help"):
        assert (
            lines(ours(flag))[0] == "usage: python -m paceline script.py [argument ...]"
        )
    for flag in ("-V", "--version"):
        assert lines(ours(flag)) == [f"paceline {paceline.__version__}"]


@pytest.mark.parametrize("words", [[], ["-m"], ["-c"], ["--no-such"], ["-x", "a.py"]])
def test_words_that_mean_nothing_are_refused_with_code_2(here, words):
    found = ours(*words)
    assert found.returncode == 2
    assert found.stdout == ""
    assert re.match(r"paceline: .*\nusage: python -m paceline", found.stderr)


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


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_a_python_that_cannot_be_reached_is_refused(here, flag, monkeypatch):
    if flag == "-S":
        monkeypatch.setenv("PYTHONPATH", str(Path(paceline.__file__).parents[1]))
    found = python(flag, "-m", "paceline", "-c", "print('ran')")
    assert (found.returncode, found.stdout) == (2, "")
    assert "-I, -E or -S" in found.stderr


def test_a_paceline_of_the_current_folder_is_refused(here):
    (here / "paceline").symlink_to(Path(paceline.__file__).parent)
    found = ours("-c", "print('ran')")
    assert (found.returncode, found.stdout) == (2, "")
    assert "found in the current folder" in found.stderr


def test_an_environment_that_reaches_nothing_is_refused(here, monkeypatch):
    # As a parent leaves it that has taken back half of what reached its children.
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(paceline.__file__).parent / "_install/startup")
    )
    monkeypatch.delenv("PACELINE_INSTALL", raising=False)
    found = ours("-c", "print('ran')")
    assert (found.returncode, found.stdout) == (2, "")
    assert "the environment does not reach programs" in found.stderr


def test_a_start_by_other_means_is_refused(here):
    code = "import runpy; runpy.run_module('paceline', run_name='__main__')"
    found = python("-c", code, "train.py")
    assert (found.returncode, found.stdout) == (2, "")
    assert "start it by python -m paceline" in found.stderr


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
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_are_reached(here, how, method):
    call = "import paceline; paceline.install()" if how == "call" else ""
    question, answer = (WHO, OURS) if how == "script" else (WATCHED, "True")
    write(
        here / "train.py",
        f"""
        import multiprocessing, sys
        def child(queue):
            exec({question!r}, {{"print": queue.put}})
            queue.put([p for p in sys.path if "startup" in p])
        if __name__ == "__main__":
            {call}
            context = multiprocessing.get_context({method!r})
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            print(queue.get(timeout=60), queue.get(timeout=60))
            process.join()
        """,
    )
    run = python if how == "call" else ours
    words = ["-m", "train"] if how == "module" else ["train.py"]
    assert lines(run(*words)) == [f"{answer} []"]


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
        {WHO}
        """,
    )
    expected = [word for n in (2, 1, 0) for word in ("True", f"['{n}']")]
    assert lines(ours("train.py", "2")) == [*expected, OURS]


def test_a_child_that_needs_no_torch_has_nothing_of_ours(here):
    code = "import sys; print([m for m in sys.modules if m[:8] == 'paceline'])"
    write(
        here / "train.py",
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])\n",
    )
    assert lines(ours("train.py")) == ["[]"]


@pytest.mark.parametrize(
    ("flag", "seen"), [("-I", False), ("-E", False), ("-S", False), ("-B", True)]
)
def test_a_child_that_reads_no_environment_is_not_reached(here, flag, seen):
    write(
        here / "train.py",
        f"import subprocess, sys\n"
        f"subprocess.run([sys.executable, {flag!r}, '-c', {WATCHED!r}])\n",
    )
    assert lines(ours("train.py")) == [str(seen)]


def test_undoing_lets_go_of_children_too(here):
    write(
        here / "train.py",
        f"""
        import paceline, subprocess, sys
        with paceline.install():
            subprocess.run([sys.executable, "-c", {WATCHED!r}])
        subprocess.run([sys.executable, "-c", {WATCHED!r}])
        """,
    )
    assert lines(python("train.py")) == ["True", "False"]


def test_a_child_may_undo_it_for_itself_and_its_children(here):
    code = f"""
import paceline, subprocess, sys
paceline.uninstall()
{WHO}
subprocess.run([sys.executable, "-c", {WATCHED!r}])
"""
    write(
        here / "train.py",
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-uc', {code!r}])\n",
    )
    assert lines(ours("train.py")) == [TORCHS, "False"]


def test_a_child_where_paceline_is_not_there_is_left_alone(here):
    # What another environment looks like: torch is there, paceline cannot be imported.
    write(
        here / "other/paceline/__init__.py", "raise ImportError('for another Python')"
    )
    code = f"import sys; sys.path.insert(0, {str(here / 'other')!r}); {WHO}"
    write(
        here / "train.py",
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])\n",
    )
    result = ours("train.py")
    assert (lines(result), result.stderr) == ([TORCHS], "")


def test_replicas_of_ours_work_in_a_reached_child(here):
    write(
        here / "train.py",
        """
        import subprocess, sys
        if len(sys.argv) > 1:
            import torch
            model = torch.nn.DataParallel(torch.nn.Linear(2, 1), ["cpu", "cpu"])
            print(model(torch.ones(4, 2)).shape, len(model.device_ids))
        else:
            subprocess.run([sys.executable, *sys.argv, "again"], check=True)
        """,
    )
    result = ours("train.py")
    assert lines(result) == ["torch.Size([4, 1]) 2"]
    assert result.stderr == ""


# ---- the sitecustomize of others ----------------------------------------------------

SITES = {
    "none": None,
    "good": "import sys; sys.theirs = __file__, __name__",
    "broken": "raise ValueError('their own')",
    "needing": "import no_such_module",
    "wrong": "this is no Python",
    "leaving": "raise SystemExit(5)",
}


@pytest.mark.parametrize("kind", SITES)
def test_a_sitecustomize_that_is_there_runs_as_ever(here, kind, monkeypatch):
    if SITES[kind] is not None:
        write(here / "site/sitecustomize.py", SITES[kind])
    write(here / "site/usercustomize.py", "import sys; sys.user = True")
    paths = [str(here / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    code = """
import sys
module = sys.modules.get("sitecustomize")
print(getattr(sys, "theirs", None), getattr(sys, "user", None), sys.path)
print(module and (module.__file__, module.__spec__.name))
try:
    import sitecustomize
    print(sitecustomize.__file__)
except Exception as error:
    print(type(error), error)
"""
    expected = python("-c", code)
    with paceline_for_children():
        found = python("-c", code)
        who = python("-c", WATCHED)
    assert found.stdout == expected.stdout
    # Where Python shows any, with the marks of Python 3.13 under it.
    frame = r'  File ".*/startup/sitecustomize.py".*\n.*\n(?: *[~^]+\n)?'
    assert re.sub(frame, "", found.stderr) == expected.stderr
    assert found.returncode == expected.returncode == int(kind == "leaving")
    if kind != "leaving":
        assert who.stdout.strip() == "True"


def paceline_for_children():
    """Install, for the sake of children; this process holds torch's own."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return paceline.install()


def test_a_python_of_another_version_may_meet_the_hook():
    hook = (
        Path(paceline.__file__).with_name("_install") / "startup" / "sitecustomize.py"
    )
    text = hook.read_text()
    assert hook.parent.parent.joinpath("import_hook.py").exists()
    for word in ("annotations", "nonlocal", ":=", ' f"', "async "):
        assert word not in text


# ---- launchers ----------------------------------------------------------------------

TRAIN = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
again = os.environ["TORCHELASTIC_RESTART_COUNT"]
store = dist.FileStore(os.path.abspath("store" + again), 2)  # a round, a store
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = DDP(torch.nn.Linear(2, 1, bias=False))
for step in range(3):
    if "fail" in sys.argv and again == "0" and step == 1 and rank == 1:
        raise SystemExit(3)
    model.zero_grad()
    model(torch.full((1, 2), 2.0 * rank + step)).sum().backward()
grad = model.module.weight.grad.tolist()
kind = type(model).__module__
print(f"rank {rank} round {again} {kind} {grad} {__name__}\\n", end="")
dist.destroy_process_group()
"""


def launch(n_restarts, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", str(n_restarts)]
    command += ["-m", "paceline", *words]

    def start():
        for store in Path.cwd().glob("store*"):
            store.unlink()
        return run_command(command)

    out, _ = run_until_torch_survives(start)
    return sorted(re.findall(r"rank .*", out))


def test_torchrun_runs_it_as_a_module(here):
    write(here / "package/train.py", TRAIN)
    assert launch(0, "-m", "package.train", "arg") == [
        f"rank {rank} round 0 paceline [[3.0, 3.0]] __main__" for rank in (0, 1)
    ]


def test_a_round_after_a_failure_starts_afresh(here):
    write(here / "train.py", TRAIN)
    assert launch(1, "train.py", "fail") == [
        f"rank {rank} round 1 paceline [[3.0, 3.0]] __main__" for rank in (0, 1)
    ]


def test_an_interrupt_from_outside_ends_it_as_python(here):
    write(
        here / "train.py", "import time\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
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
        # It stands in its second or third line when the signal arrives; Python 3.13
        # marks the call under it.
        assert re.fullmatch(
            r'Traceback .*\n  File ".*/train.py", line [23].*\n'
            r"(?: {4}.*\n){1,2}KeyboardInterrupt\n",
            err,
        )
    assert codes == [-signal.SIGINT] * 2
