"""The image's files, without building it; tests/image builds and tries it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "Dockerfile"
ENTRYPOINT = ROOT / "docker" / "entrypoint"
SSHD_CONFIG = ROOT / "docker" / "sshd_config"


def start(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point as a container would, but where nothing is installed."""
    return subprocess.run(
        [shutil.which("bash") or "bash", str(ENTRYPOINT), *words],
        env={"PATH": "/usr/bin:/bin", "HOME": tempfile.gettempdir()},
        capture_output=True,
        text=True,
    )


def instructions() -> list[str]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line]


def test_the_entrypoint_is_an_executable_script_of_bash():
    assert ENTRYPOINT.stat().st_mode & 0o111 == 0o111
    subprocess.run(["bash", "-n", str(ENTRYPOINT)], check=True)


def test_the_help_names_every_command_and_any_other_runs_as_it_stands():
    done = start("help")
    assert done.returncode == 0
    cases = ENTRYPOINT.read_text().partition("case $command in")[2]
    commands = re.findall(r"^(\w+)(?: \| [\w-]+)?\)", cases, re.MULTILINE)
    assert len(commands) == 5
    assert [c for c in commands if f"  {c}" not in done.stdout] == []
    done = start("printf", "%s|", "two words", "-n")
    assert (done.returncode, done.stdout) == (0, "two words|-n|")
    assert start("sh", "-c", "exit 7").returncode == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train",), "train needs a script"),
        (("train", "-n"), "train -n needs a number"),
        (("ssh", "now"), "ssh takes no words: now"),
    ],
)
def test_a_wrong_call_says_what_is_missing(words, message):
    done = start(*words)
    assert done.returncode == 2
    assert message in done.stderr


def test_sshd_lets_in_the_user_by_key_alone():
    lines = SSHD_CONFIG.read_text().splitlines()
    options = dict(line.split(None, 1) for line in lines if line and line[0] != "#")
    assert options["AuthenticationMethods"] == "publickey"
    assert options["AllowUsers"] == "user"
    forbidden = """PasswordAuthentication KbdInteractiveAuthentication
        PermitEmptyPasswords PermitRootLogin UsePAM"""
    assert {options[name] for name in forbidden.split()} == {"no"}


def test_the_image_has_no_token_password_or_key():
    for path in (DOCKERFILE, ENTRYPOINT):
        text = path.read_text()
        given = re.findall(r"(?i)\b\w*(?:token|password)[=:]\s*['\"]?\w+", text)
        assert not given, path.name
    assert not [line for line in instructions() if re.match("(ENV|ARG).*TOKEN", line)]
    assert any("rm -rf" in i and "/etc/ssh/ssh_host_*" in i for i in instructions())


def test_the_container_runs_as_its_user():
    users = [line for line in instructions() if line.startswith("USER ")]
    assert users == ["USER root", "USER root", "USER user"]
    after = instructions()[instructions().index("USER user") :]
    assert not [line for line in after if line.startswith("RUN ")]


def test_what_the_dockerfile_copies_is_there_and_sent():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in instructions():
        words = line.split()
        if words[0] != "COPY":
            continue
        for source in (w for w in words[1:-1] if not w.startswith("--")):
            assert list(ROOT.glob(source)), source
            assert source not in ignored


def test_the_base_and_the_pinned_torch_are_one_version():
    constraints = (ROOT / "requirements" / "constraints.txt").read_text()
    pinned = re.search(r"^torch==(.*)$", constraints, re.MULTILINE)
    assert pinned is not None
    assert f"ARG TORCH_VERSION={pinned[1]}" in instructions()
    assert instructions()[0].startswith(f"ARG BASE_IMAGE=pytorch/pytorch:{pinned[1]}-")
