"""What setup.py builds; a script stands in for nvcc."""

import importlib.util
import runpy
import shutil
import stat
import subprocess
import sys
import venv
from pathlib import Path

import paceline
import pytest
import setuptools
from support.programs import run_python

ROOT = Path(__file__).resolve().parents[3]
NVCC = """#!/bin/sh
case "$1" in
--list-gpu-arch) echo "$NVCC_KNOWS" | tr ' ' '\\n'; exit ;;
--help) echo "$NVCC_HELP"; exit ;;
--version) echo "an nvcc of the tests"; exit ;;
esac
echo "$@" >> "$NVCC_LOG"
if [ -n "$NVCC_FAILS" ]; then echo "first words" >&2; echo "$NVCC_FAILS" >&2; exit 1; fi
for last; do :; done
echo a fatbin > "$last"
"""


@pytest.fixture
def build(monkeypatch, nvcc, tmp_path):
    """Return a function that builds as setup.py does: the fatbin's path, or None."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PACELINE_NVCC", raising=False)
    build_fatbin = runpy.run_path("setup.py")["build_fatbin"]
    return lambda: build_fatbin(tmp_path / "built")


@pytest.fixture
def nvcc(monkeypatch, tmp_path):
    """Make a fake CUDA at CUDA_HOME; return the log of the calls of its nvcc."""
    log = tmp_path / "log"
    log.touch()
    program = tmp_path / "cuda" / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text(NVCC)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("NVCC_LOG", str(log))
    monkeypatch.setenv("NVCC_KNOWS", "compute_70 compute_75 compute_90")
    return log


def test_only_devices_that_nvcc_knows_are_compiled_for(build, nvcc):
    assert build().read_text() == "a fatbin\n"
    words = nvcc.read_text().split()
    assert [w for w in words if w.startswith("arch=")] == [
        "arch=compute_75,code=sm_75",
        "arch=compute_90,code=sm_90",
        "arch=compute_75,code=compute_75",
    ]
    assert "-fmad=false" in words
    assert "--compress-mode=size" not in words


def test_a_fatbin_is_compressed_where_nvcc_can(build, nvcc, monkeypatch):
    monkeypatch.setenv("NVCC_HELP", "--compress-mode <mode>")
    build()
    assert "--compress-mode=size" in nvcc.read_text().split()


def test_what_was_compiled_already_is_taken_again(build, nvcc, monkeypatch):
    for _ in range(2):
        assert build() is not None
    assert len(nvcc.read_text().splitlines()) == 1
    monkeypatch.setenv("NVCC_KNOWS", "compute_80")
    build()
    assert len(nvcc.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "value", "words", "is_asked"),
    [
        ("NVCC_FAILS", "cc1plus: x", "nvcc failed: cc1plus: x); NVRTC will", True),
        ("PACELINE_NVCC", "0", "(PACELINE_NVCC=0)", False),
        ("NVCC_KNOWS", "compute_30", "knows none of the devices", False),
    ],
)
def test_a_build_goes_on_without_nvcc_and_says_so(
    build, nvcc, monkeypatch, capsys, name, value, words, is_asked
):
    monkeypatch.setenv(name, value)
    assert build() is None
    assert words in capsys.readouterr().out
    assert bool(nvcc.read_text()) == is_asked


def test_a_build_that_must_have_kernels_fails_without(build, monkeypatch):
    monkeypatch.setenv("PACELINE_NVCC", "1")
    monkeypatch.setenv("NVCC_FAILS", "cc1plus: not found")
    with pytest.raises(SystemExit, match="PACELINE_NVCC=1 asks for it"):
        build()


@pytest.mark.parametrize(
    ("lacks", "words"),
    [("CC", "compiler, no-cc: apt install gcc"), ("include", r"apt install python3\.")],
)
def test_what_a_build_needs_is_said_in_one_sentence(monkeypatch, build, lacks, words):
    import sysconfig

    monkeypatch.setenv("CC", "no-cc -O" if lacks == "CC" else sys.executable)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    command = runpy.run_path("setup.py")["CheckedBuild"](setuptools.Distribution())
    with pytest.raises(SystemExit, match=f"the build needs [^.]*{words}"):
        command.run()


BUILD = """
import sys
from setuptools import build_meta
from setuptools.command.build_ext import build_ext

build_ext.run = lambda self: None  # it would take a minute
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""
ON = "import sys; print([type(f).__name__ for f in sys.meta_path][0])"


def test_every_way_to_install_brings_the_start_up_line_and_takes_it_away(tmp_path):
    tree = tmp_path / "tree"
    for name in ("csrc", "python", "requirements"):
        shutil.copytree(ROOT / name, tree / name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    venv.create(tmp_path / "venv")
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    site.joinpath("tools.pth").write_text(str(tmp_path / "tools"))
    (tmp_path / "tools").mkdir()
    pip = importlib.util.find_spec("pip")  # setuptools fails once it is imported
    (tmp_path / "tools/pip").symlink_to(Path(pip.origin).parent)
    python = tmp_path / "venv/bin/python"

    def run(*words, **environ):
        done = subprocess.run(
            [python, *words], env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    for way in ("build_wheel", "build_editable"):
        run_python(BUILD, way, tmp_path / way, cwd=tree)
        (wheel,) = tmp_path.joinpath(way).glob("*.whl")
        run("-m", "pip", "install", "--no-deps", "--no-index", wheel)
        assert run("-Ic", ON, PACELINE_INSTALL="1") == "_ImportHook"
        run("-m", "pip", "uninstall", "-y", "paceline")
        assert list(site.glob("*paceline*")) == []


def test_the_extension_is_smaller_than_two_megabytes():
    (native,) = Path(paceline.__file__).parent.glob("_native*.so")
    text = native.read_bytes()
    if b".debug_info" in text:
        pytest.skip("built for debugging")
    assert len(text) < 2_000_000
