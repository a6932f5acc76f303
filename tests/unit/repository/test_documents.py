"""README.md and docs/: every block of code is run, every link leads somewhere.

The Python blocks of a page run in order in one fresh process, in an empty folder.  If
the text before a block calls it `name.py`, it is written to that file, for the shell
blocks.  Each line of a shell block is run, or NOT_RUN gives the reason and the check
that replaces it.  Programs and their ranks are forked (`support.warm`).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from itertools import pairwise
from pathlib import Path

import documents
import paceline
import pytest
from documents import README, ROOT, RUN_PAGES, commands_of, name_of
from paceline._cli import main
from paceline._cli.doctor import command as doctor
from paceline._cli.doctor import machine
from support import warm

SECONDS = 150

COMMANDS = {
    "python": [],
    "paceline": ["-m", "paceline"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
}
RUN = re.compile(r"(python|paceline(?! trace)|torchrun)\b(?!.*--nnodes)(?!.* tests/)")

RESULTS = ROOT / "tests" / "bench" / "results"
WRITTEN_LATER = {"tests/gpu/results"}  # tests/gpu/run.sh writes it


# ---- commands that are not run, the reasons, and the checks that replace them --------


def check_target(command: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    target = shlex.split(command)[1]
    assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"


def check_package(command: str) -> None:
    what = shlex.split(command)[2]
    extra = re.fullmatch(r"paceline\[(\w+)\]", what)
    if extra is not None:
        settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert f'{extra[1]} = {{ file = ["requirements/{extra[1]}.txt"] }}' in settings
        assert (ROOT / "requirements" / f"{extra[1]}.txt").is_file()
        return
    tools = (ROOT / "requirements" / "tools.txt").read_text(encoding="utf-8").split()
    assert what in ("torch", *tools) or (what == "." and (ROOT / "setup.py").exists())


def check_trace(command: str) -> None:
    words = shlex.split(command.partition("#")[0])
    assert words[1] == "trace"
    main = [sys.executable, "-m", "paceline", "trace", "--help"]
    known = subprocess.run(main, capture_output=True, text=True, check=True).stdout
    assert all(word in known for word in words if word.startswith("-"))


def check_image(command: str) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    entrypoint = (ROOT / "docker" / "entrypoint").read_text(encoding="utf-8")
    exposed = re.search(r"^EXPOSE (.*)$", text, re.MULTILINE)
    assert exposed is not None
    words = shlex.split(command)
    for inside in re.findall(r"-p (?:[\d.]+:)?\d+:(\d+)", command):
        assert inside in exposed[1].split()
    for name in re.findall(r"--build-arg (\w+)=", command):
        assert re.search(rf"^ARG {name}\b", text, re.MULTILINE), name
    for name in re.findall(r"-e (\w+)=", command):
        assert name in entrypoint
    for option, word in pairwise(words):
        if option == "--target":
            assert f" AS {word}\n" in text
        if option == "-v":  # FROM:TO[:ro]; FROM is a path of the user
            assert word.split(":")[1].startswith("/home/user/")
            assert word.split(":")[1].split("/")[3] in text
    if words[1] == "run":
        after = words[words.index("paceline") + 1 :]
        first, *_ = [*after, "jupyter"]
        assert first == "paceline" or re.search(
            rf"^{first}\)", entrypoint, re.MULTILINE
        )
        for name in documents.scripts_in(shlex.join(after)):
            assert name == "train.py" or (ROOT / "tests" / name).is_file()
    assert "docker build -t paceline ." in "\n".join(commands_of(README))


def check_login(command: str) -> None:
    port = re.fullmatch(r"ssh -p (\d+) user@localhost", command)
    assert port is not None
    page = "\n".join(commands_of(ROOT / "docs" / "image.md"))
    assert f"-p {port[1]}:22 " in page


def check_gpu_script(command: str) -> None:
    program, *words = shlex.split(command)
    assert os.access(ROOT / program, os.X_OK)
    main = [sys.executable, str(ROOT / "tests" / "gpu" / "main.py"), "--help"]
    known = subprocess.run(main, capture_output=True, text=True, check=True).stdout
    for word in words:
        assert word.isdigit() or re.search(rf"(?<![\w-]){word}\b", known), word


def check_completion(command: str) -> None:
    words = shlex.split(command)
    assert sorted(words[words.index("-W") + 1].split()) == sorted(main._COMMANDS)


def check_script(command: str) -> None:
    scripts = {name for page in RUN_PAGES for name in documents.scripts_of(page)}
    assert documents.scripts_in(command)
    for name in documents.scripts_in(command):
        assert name in scripts or (ROOT / name).is_file(), name


NOT_RUN: dict[str, tuple[str, Callable[[str], None]]] = {
    "make": ("builds and trains for minutes; .ci/run does it", check_target),
    "pip": ("needs a network; .ci/run installs by make", check_package),
    "docker": ("needs Docker; tests/image builds and tries the image", check_image),
    "complete": ("is for interactive shells", check_completion),
    "ssh": ("needs the container; tests/image logs in", check_login),
    "mpirun": ("needs MPI; tests/ranks has its variables", check_script),
    "paceline": ("needs a job that runs; test_watching.py", check_trace),
    "srun": ("needs SLURM; tests/ranks has its variables", check_script),
    "torchrun": ("is for several hosts, or has a test of its own", check_script),
    "tests/gpu/run.sh": ("needs a GPU; test_gpu_script.py", check_gpu_script),
}


# ---- jobs ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A line of a shell block, and the folder of its page."""

    folder: Path
    command: str


def run(job: Job) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    first, *words = shlex.split(job.command)
    return warm.run(
        [sys.executable, *COMMANDS[first], *words],
        cwd=job.folder,
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def diffs() -> list[str]:
    blocks = [block for page in RUN_PAGES for block in documents.blocks_of(page)]
    return sorted({block.text for block in blocks if block.language == "diff"})


def program_of_diffs() -> str:
    """Return a program with all diffs, before and after, in a world of one rank."""
    lines = ["import paceline", "import torch", "world = paceline.init()"]
    for text in diffs():
        for side in documents.sides_of(text):
            lines += ["model = torch.nn.Linear(8, 1)", side]
            lines += ["assert isinstance(model, torch.nn.Module)"]
            lines += ["model(torch.ones(4, 8)).sum().backward()"]
    return "\n".join([*lines, "torch.distributed.destroy_process_group()"])


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    """Return all jobs; the scripts of each page are in a folder for the page."""
    found: list[Job] = []
    for page in RUN_PAGES:
        folder = tmp_path_factory.mktemp(page.stem)
        scripts = {**documents.scripts_of(page)}
        if documents.program_of(page):
            scripts["_blocks.py"] = documents.program_of(page)
            found.append(Job(folder, "python _blocks.py"))
        for name, text in scripts.items():
            (folder / name).write_text(text, encoding="utf-8")
        for command in commands_of(page):
            is_new = command not in {job.command for job in found}
            if RUN.match(command) and (is_new or documents.scripts_in(command)):
                found.append(Job(folder, command))
    folder = tmp_path_factory.mktemp("diffs")
    (folder / "_diffs.py").write_text(program_of_diffs(), encoding="utf-8")
    return [*found, Job(folder, "python _diffs.py")]


def jobs_of(jobs: list[Job], page: Path) -> list[Job]:
    """Return the jobs of a page, by the name of their folder."""
    return [job for job in jobs if job.folder.name.rstrip("0123456789") == page.stem]


# ---- blocks --------------------------------------------------------------------------


def normal(text: str) -> str:
    """Return a text in one line, with all numbers replaced by one."""
    return re.sub(r"\d+(\.\d+)?", "N", " ".join(text.split()))


@pytest.mark.parametrize("page", RUN_PAGES, ids=name_of)
def test_every_block_of_a_page_runs(jobs, page):
    output = ""
    for job in jobs_of(jobs, page):
        done = run(job)
        good = (0, 1) if "doctor" in job.command else (0,)  # 1: it found a problem
        assert done.returncode in good, f"{job.command}\n{done.stdout}{done.stderr}"
        output += done.stdout
    for block in documents.blocks_of(page):
        for words in re.findall(r"^\s*print\(.*\)  # (.+)$", block.text, re.MULTILINE):
            assert words in output, f"{words!r} is not printed:\n{output}"
        if block.language == "text" and "->" not in block.text:
            assert normal(block.text) in normal(output), output


def test_every_diff_runs_before_and_after(jobs):
    (job,) = (job for job in jobs if job.command == "python _diffs.py")
    done = run(job)
    assert done.returncode == 0, done.stderr
    assert len(diffs()) == 2


@pytest.mark.parametrize("page", RUN_PAGES, ids=name_of)
def test_every_command_is_run_or_has_a_reason(page):
    for command in commands_of(page):
        if not RUN.match(command):
            reason, check = NOT_RUN[shlex.split(command)[0]]
            assert reason
            check(command)


def test_every_reason_has_a_command():
    commands = [c for page in RUN_PAGES for c in commands_of(page) if not RUN.match(c)]
    assert {shlex.split(command)[0] for command in commands} == set(NOT_RUN)


@pytest.mark.parametrize("page", RUN_PAGES, ids=name_of)
def test_every_script_is_started_on_its_page(page):
    commands = [command for command in commands_of(page) if RUN.match(command)]
    started = {name for c in commands for name in documents.scripts_in(c)}
    assert started == set(documents.scripts_of(page))


def test_every_block_has_a_language_that_is_checked():
    blocks = [block for page in RUN_PAGES for block in documents.blocks_of(page)]
    run_or_compared = {"python", "sh", "diff", "text"}
    # test_kubernetes.py, test_watching.py, test_image.py
    of_other_tests = {"yaml", "console", "dockerfile"}
    assert {b.language for b in blocks} == run_or_compared | of_other_tests


def test_the_doctor_prints_what_its_page_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    checks = {check.name: check for check in doctor.CHECKS}
    found = {
        "dev_shm": machine.judge_dev_shm(64 << 20, 64 << 20),
        "cores": machine.judge_cores(2, 1, None, 1, 1),
    }
    doctor._show_text((checks[name], finding) for name, finding in found.items())
    blocks = documents.blocks_of(ROOT / "docs" / "environment.md")
    (shown,) = (block.text for block in blocks if block.language == "text")
    assert capsys.readouterr().out == shown


# ---- links and names -----------------------------------------------------------------


@pytest.mark.parametrize("page", documents.PAGES, ids=name_of)
def test_every_link_leads_somewhere(page):
    for link in documents.links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: {link}"
        assert target.is_relative_to(ROOT)
        if anchor:
            assert anchor in documents.anchors_of(target), f"{name_of(page)}: {link}"


def test_the_readme_links_every_document_once():
    links = [link.partition("#")[0] for link in documents.links_of(README)]
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert links.count(name_of(page)) == 1, name_of(page)


@pytest.mark.parametrize("page", documents.PAGES, ids=name_of)
def test_every_path_and_target_in_the_text_exists(page):
    words = re.findall(r"`([^`\n]+)`", documents.prose_of(page))
    for path in (w for word in words for w in word.split()):
        if not re.match(r"(tests|docs|csrc|python|notebooks|requirements)/", path):
            continue
        path = path.rstrip("/")
        if "<" in path or path in WRITTEN_LATER:
            continue
        found = [*ROOT.glob(path), *ROOT.joinpath("csrc").glob(path)]
        assert found, f"{name_of(page)}: {path}"
    for word in words:
        if re.match(r"make [a-z-]+$", word):
            check_target(word)


def test_every_variable_is_documented_and_known():
    pages = {page: page.read_text(encoding="utf-8") for page in documents.PAGES}
    for name in machine.VARIABLES:
        own = pages[ROOT / "docs" / "environment.md"]
        assert name in own + pages[ROOT / "CONTRIBUTING.md"], name
    for page, text in pages.items():
        unknown = set(re.findall(r"PACELINE_\w+", text)) - set(machine.VARIABLES)
        assert not unknown, f"{name_of(page)}: {unknown}"


def test_every_public_name_is_in_the_documents():
    text = "\n".join(page.read_text(encoding="utf-8") for page in RUN_PAGES)
    missing = [n for n in paceline.__all__ if not re.search(rf"\b{n}\b", text)]
    assert missing == ["__version__"]


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs" / "site" / "reference.md").read_text(encoding="utf-8")
    named = re.findall(r"\.\. auto(?:class|function|exception):: (\w+)", page)
    assert sorted(named) == sorted({*paceline.__all__} - {"__version__"})


def test_the_tour_of_help_names_what_there_is():
    _, tour = (paceline.__doc__ or "").split("\n\n")
    assert len(tour.splitlines()) == 10
    assert set(re.findall(r"paceline\.(\w+)", tour)) <= set(paceline.__all__)


# ---- figures -------------------------------------------------------------------------

FIGURE = r"\d+\.\d+ \[\d+\.\d+, \d+\.\d+\]"


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_every_ratio_is_in_the_results(name):
    results = "\n".join(path.read_text() for path in RESULTS.glob("*.txt"))
    ratios = re.findall(FIGURE, (ROOT / name).read_text(encoding="utf-8"))
    assert len(ratios) >= 10
    assert not [ratio for ratio in ratios if ratio not in results]


def test_the_picture_has_the_ratios_of_the_readme():
    picture = (ROOT / "docs" / "speed.svg").read_text(encoding="utf-8")
    rows = re.findall(rf"^\|[^|]+\| ({FIGURE}) \|", README.read_text(), re.MULTILINE)
    drawn = re.findall(r">(\d\.\d\d) times as fast<", picture)
    assert [row.split()[0] for row in rows] == drawn
    textpath = pytest.importorskip("matplotlib.textpath")
    start = r"font-size: (\d+)px(?!.*anchor: (?:middle|end))"
    texts = re.findall(start + r'.*(?: x="|translate\()([\d.]+).*>(.+)<', picture)
    assert len(texts) == len(drawn) + 3
    for size, x, text in texts:
        extent = textpath.TextPath((0, 0), text, size=float(size)).get_extents()
        assert float(x) + extent.width < 576, text
    assert 'viewBox="0 0 576 ' in picture


@pytest.fixture(scope="module")
def package_metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """Return the package's metadata for an index."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("setup.py", "pyproject.toml", "README.md", "csrc", "requirements"):
        (tree / name).symlink_to(ROOT / name)
    (tree / "python").mkdir()
    (tree / "python" / "paceline").symlink_to(ROOT / "python" / "paceline")
    code = "import setuptools.build_meta as b; b.prepare_metadata_for_build_wheel('.')"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, timeout=SECONDS)
    (found,) = tree.glob("*.dist-info/METADATA")
    return message_from_string(found.read_text(encoding="utf-8"))


def test_the_package_describes_itself_without_links_to_files(package_metadata):
    text = package_metadata.get_payload()
    assert text.startswith("# Paceline\n")
    assert "failures (`docs/failures.md`)" in text
    assert not re.search(r"[^`]``[^`]|speed\.svg|further left", text)
    markdown_it = pytest.importorskip("markdown_it")
    tokens = markdown_it.MarkdownIt().parse(text)
    parts = [part for token in tokens for part in token.children or ()]
    links = [dict(part.attrs) for part in parts if part.type in ("link_open", "image")]
    assert all(link.get("href", "").startswith("https:") for link in links), links
    assert "pytorch" in package_metadata["Keywords"].split(",")
