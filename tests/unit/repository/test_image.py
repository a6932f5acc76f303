"""Check the image's files without building it; tests/image builds and tests it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from documents import blocks_of, commands_of

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "Dockerfile"
ENTRYPOINT = ROOT / "docker" / "entrypoint"
SSHD_CONFIG = ROOT / "docker" / "sshd_config"


def start(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point as in a container, but with nothing installed."""
    env = {"PATH": "/usr/bin:/bin", "HOME": tempfile.gettempdir(), **variables}
    return subprocess.run(
        [shutil.which("bash") or "bash", str(ENTRYPOINT), *words],
        env=env,
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


def test_what_strangers_plant_in_tmp_is_neither_read_nor_written(tmp_path):
    """Root makes a file another user's; otherwise a link of this user's must do."""
    programs, victim = tmp_path / "bin", tmp_path / "victim"
    programs.mkdir()
    victim.mkdir(mode=0o755)
    (victim / "served").write_text("kept")
    (programs / "jupyter").write_text("#!/bin/sh\necho serves\n")
    (programs / "jupyter").chmod(0o755)
    user = os.getuid()
    (tmp_path / f".paceline-served-{user}").symlink_to(victim / "served")
    (tmp_path / f"paceline-{user}.0").symlink_to(victim)
    if user == 0:
        (tmp_path / "paceline-0.1").mkdir()
        os.chown(tmp_path / "paceline-0.1", 1, 1)
    before = set(tmp_path.iterdir())
    variables = {"TMPDIR": str(tmp_path), "PATH": f"{programs}:/usr/bin:/bin"}
    assert start("health", **variables).returncode == 0  # nothing is served yet
    for _ in range(2):  # the container is started again
        done = start("jupyter", JUPYTER_PORT="1", **variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, "serves\n", "")
    assert start("health", **variables).returncode == 1  # and port 1 does not answer
    (own,) = set(tmp_path.iterdir()) - before
    assert own.stat().st_mode & 0o777 == 0o700
    assert (own / "served").read_text() == "http 1\n"
    assert start("true", **variables).returncode == 0
    assert start("health", **variables).returncode == 0
    assert (victim / "served").read_text() == "kept"


def test_no_variable_of_the_container_is_on_the_command_line_of_sshd():
    command = ENTRYPOINT.read_text().partition("exec /usr/sbin/sshd")[2]
    assert "login_variables" not in command.partition("\n}")[0]


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


_, BUILD, COMMON, TRAIN, LAST = "\n".join(instructions()).split("FROM ")


def test_each_container_runs_as_its_user():
    users = {BUILD: "root", COMMON: "root", TRAIN: "user", LAST: "user"}
    for stage, user in users.items():
        assert re.findall("^USER (.*)", stage, re.MULTILINE) == [user]
        assert "RUN " not in stage.partition("USER user")[2]


def test_the_build_has_no_docs_and_the_image_for_training_no_server():
    assert not re.search(r"^COPY .*(docs|\*|notebooks|tests)", BUILD, re.MULTILINE)
    servers = re.compile("openssh|sshd_|notebook|examples|EXPOSE|HEALTH|jupyter")
    assert not servers.search(COMMON + TRAIN)
    assert servers.search(LAST)
    # Users' images are based on the image that their page builds.
    page = ROOT / "docs" / "image.md"
    built = re.findall(r"-t (\S+) --target", "\n".join(commands_of(page)))
    text = "\n".join(b.text for b in blocks_of(page) if b.language == "dockerfile")
    assert re.findall(r"(?:FROM |--from=)(paceline\S*)", text) == built


NOT_STARTED = "sealing memfd copy: Device or resource busy"


@pytest.mark.parametrize(("words", "n"), [(NOT_STARTED, 2), ("no such package", 1)])
def test_only_a_runtime_that_could_not_start_is_started_again(words, n, tmp_path):
    code = f"""
import subprocess, sys
sys.path.insert(0, {str(ROOT / "tests" / "image")!r})
import run
script = "echo start; echo {words} >&2; exit 1"
sys.exit(run.run_started(["sh", "-c", "echo x >>{tmp_path}/n; " + script]).returncode)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 1
    assert len((tmp_path / "n").read_text().split()) == n


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
