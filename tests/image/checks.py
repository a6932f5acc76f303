"""Check the promises of docs/image.md in a container; run.py starts this.

This is the first process of its namespaces: it adopts processes that a container leaves
behind, and the loopback that it has brought up is the only network.  `buildah run`
ignores ENTRYPOINT, so the command comes from the image's configuration.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from run import GROUP_ID, NOT_STARTED, USER_ID, run_started

CONTAINER, *STORE = sys.argv[1:]
SECONDS = 180  # a step that takes longer hangs
OTHER = 4321  # a user id that the image does not have

TRAIN = """\
import os
import sys
import torch
import paceline
from torch.nn.parallel import DistributedDataParallel

world = paceline.init()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
model(torch.ones(4, 8)).sum().backward()
with open(f"rank{world.rank}", "w") as file:
    file.write(f"{world.world_size} {type(model).__module__} {sys.argv[1]}")
torch.distributed.destroy_process_group()
"""

checks: list[Callable[[Path], None]] = []


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    checks.append(function)
    return function


# ---- containers ----------------------------------------------------------------------


def buildah(*words: str) -> list[str]:
    return ["buildah", *STORE, *words]


def configuration() -> dict[str, object]:
    """Return the image's configuration, as Docker reads it."""
    found = good(run_started(buildah("inspect", CONTAINER), stderr=subprocess.PIPE))
    config = json.loads(found)["Docker"]["config"]
    assert isinstance(config, dict)
    return config


def run_words(
    words: Sequence[str], env: dict[str, str], options: Sequence[str]
) -> list[str]:
    """Return the command that runs the same as `docker run IMAGE WORDS`."""
    entrypoint = configuration()["Entrypoint"]
    assert isinstance(entrypoint, list)
    # Without this, only the first process of a namespace reaps others.
    env = {**env, "TINI_SUBREAPER": "1"}
    variables = [word for name in env for word in ("--env", f"{name}={env[name]}")]
    # Docker writes the container's name to /etc/hosts; buildah does not.
    command = buildah("run", "--hostname", "localhost", "--terminal=false")
    return [*command, *variables, *options, CONTAINER, "--", *entrypoint, *words]


def run(
    *words: str, env: dict[str, str] | None = None, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command in the container to its end; its output includes its errors."""
    return run_started(
        run_words(words, env or {}, options), stdin=subprocess.DEVNULL, timeout=SECONDS
    )


def good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout}"
    return done.stdout


def processes() -> dict[int, str]:
    """Return the live processes of this namespace, without this one."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue
        name, state = re.match(r"\d+ \((.*)\) (\S)", stat).groups()  # type: ignore[union-attr]
        if int(folder.name) != os.getpid() and state not in "ZX":
            found[int(folder.name)] = name
    return found


@contextmanager
def server(
    folder: Path,
    *words: str,
    ready: str,
    env: dict[str, str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[re.Match[str]]:
    """Run a server in the container for a block; yield the match in its log."""
    log = folder / "log"

    def begin() -> subprocess.Popen[bytes]:
        command, no_input = run_words(words, env or {}, options), subprocess.DEVNULL
        with open(log, "w") as file:
            return subprocess.Popen(command, stdin=no_input, stdout=file, stderr=file)

    process, is_last = begin(), False
    try:
        deadline = time.monotonic() + SECONDS
        while (match := re.search(ready, log.read_text())) is None:
            if process.poll() and not is_last and NOT_STARTED in log.read_text():
                process, is_last = begin(), True
            assert process.poll() is None, f"it has ended:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"not ready:\n{log.read_text()}"
            time.sleep(0.2)
        yield match
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Do as `docker stop`: signal the first process, and after 10 seconds kill all.

    Jupyter sometimes must be killed: it logs in its handler of SIGTERM, and continues
    serving if the signal arrives while it logs a request.
    """
    for pid, name in processes().items():
        if name == "tini":
            os.kill(pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        for pid, name in processes().items():
            if not name.startswith("buildah"):
                os.kill(pid, signal.SIGKILL)
        process.wait(SECONDS)


def is_healthy() -> bool:
    """Return the result of the image's HEALTHCHECK in the container."""
    health = configuration()["Healthcheck"]
    assert isinstance(health, dict)
    kind, *words = health["Test"]
    assert kind == "CMD"
    command = buildah("run", "--terminal=false", CONTAINER, "--", *words)
    return run_started(command, timeout=SECONDS).returncode == 0


# ---- the image -----------------------------------------------------------------------


@check
def the_image_has_what_it_says(folder: Path) -> None:
    config = configuration()
    assert config["User"] == "user"
    assert set(config["ExposedPorts"]) == {"22/tcp", "8888/tcp"}  # type: ignore[call-overload]
    assert config["Cmd"] == ["jupyter"]
    assert not re.search("TOKEN|PASS|KEY", " ".join(config["Env"]))  # type: ignore[arg-type]
    numbers = f"{USER_ID}:{GROUP_ID}"
    good(run("sh", "-c", f"test $(id -u):$(id -g) = {numbers} && test $HOME = $PWD"))
    found = good(run("find", "/home/user", "-printf", "%U:%G\n"))
    assert {*found.split()} == {numbers}
    good(run("sh", "-c", "! command -v gcc && ! ls /etc/ssh/ssh_host_* .sshd/*"))
    good(run("sh", "-c", "! test -s /etc/pip.conf && test -w notebooks"))
    assert "usage: docker run" in good(run("help"))
    good(run("paceline", "--version"))


@check
def pip_is_held_to_the_torch_that_is_there(folder: Path) -> None:
    words = good(run("cat", "/opt/paceline/requirements/constraints.txt"))
    version = "from importlib.metadata import version; print(version('torch'))"
    torch = good(run("python", "-c", version)).splitlines()[-1]
    pinned = re.search(r"^torch==(.*)$", words, re.MULTILINE)
    assert pinned is not None
    assert torch.split("+")[0] == pinned[1].split("+")[0], f"{torch}, {pinned[0]}"


# ---- Jupyter -------------------------------------------------------------------------


def answer_of(path: str, token: str = "") -> tuple[int, str]:
    """Return the status and text of Jupyter's answer, without following redirects."""
    request = urllib.request.Request(f"http://127.0.0.1:8888{path}")
    if token:
        request.add_header("Authorization", f"token {token}")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


ADDRESS = r"http://127\.0\.0\.1:8888/lab\?token=(\S+)"
STARTED = r"Jupyter Server \S+ is running"


@check
def jupyter_answers_to_the_token_that_it_prints(folder: Path) -> None:
    with server(folder, "jupyter", ready=ADDRESS) as match:
        token = match[1]
        assert len(token) >= 32
        assert answer_of("/api/contents")[0] == 403
        assert answer_of("/api/contents", "wrong")[0] == 403
        status, text = answer_of("/api/contents", token)
        assert status == 200
        names = {entry["name"] for entry in json.loads(text)["content"]}
        assert names == {"examples", "notebooks", "work"}
        status, text = answer_of("/lab", token)
        assert status == 200
        assert "JupyterLab" in text
        assert "token" in answer_of("/lab")[1]  # the page asks for it
        assert is_healthy()
    assert not is_healthy()
    with server(folder, ready=ADDRESS, env={"JUPYTER_TOKEN": ""}) as match:
        assert match[1] != token
        assert answer_of("/api/contents")[0] == 403


@check
def jupyter_takes_a_token_and_does_not_print_it(folder: Path) -> None:
    env = {"JUPYTER_TOKEN": "given-by-hand"}
    with server(folder, "jupyter", ready=STARTED, env=env):
        assert answer_of("/api/contents", "given-by-hand")[0] == 200
        assert answer_of("/api/contents", "wrong")[0] == 403
        assert "given-by-hand" not in (folder / "log").read_text()


@check
def the_lessons_run(folder: Path) -> None:
    names = good(run("sh", "-c", "cd notebooks && ls *.ipynb")).split()
    assert len(names) >= 2
    words = ["jupyter", "nbconvert", "--execute", "--to=notebook", "--output-dir=/tmp"]
    for name in names:
        good(run(*words, f"notebooks/{name}"))


# ---- training ------------------------------------------------------------------------


def try_train(folder: Path, owner: int, options: Sequence[str]) -> None:
    work = folder / "work"
    work.mkdir()
    (work / "train.py").write_text(TRAIN)
    os.chown(work, owner, owner)
    mount = ["-v", f"{work}:/home/user/work", "--workingdir", "/home/user/work"]
    good(run("train", "-n", "2", "train.py", "word", options=[*mount, *options]))
    for rank in (0, 1):
        file = work / f"rank{rank}"
        count, module, word = file.read_text().split()
        assert (count, word) == ("2", "word")
        assert module.startswith("paceline")
        assert file.stat().st_uid == owner


@check
def train_runs_ranks_on_a_mounted_script(folder: Path) -> None:
    try_train(folder, USER_ID, [])


@check
def any_user_trains_and_owns_what_is_written(folder: Path) -> None:
    try_train(folder, OTHER, ["--user", f"{OTHER}:{OTHER}"])


@check
def jupyter_starts_for_any_user(folder: Path) -> None:
    options = ["--user", f"{OTHER}:{OTHER}"]
    with server(folder, "jupyter", ready=ADDRESS, options=options) as match:
        assert answer_of("/api/contents", match[1])[0] == 200


@check
def a_failing_script_is_a_failing_container(folder: Path) -> None:
    done = run("train", "-n", "2", "absent.py")
    assert done.returncode not in (0, 2)
    done = run("train")
    assert done.returncode == 2
    assert "train needs a script" in done.stdout


# ---- SSH -----------------------------------------------------------------------------


def make_key(path: Path) -> str:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)
    return path.with_suffix(".pub").read_text()


def ssh(
    folder: Path, *words: str, key: str = "key", login: str = "user", port: int = 22
) -> subprocess.CompletedProcess[str]:
    """Log in over the loopback, without this machine's user settings."""
    options = {
        "BatchMode": "yes",
        "IdentitiesOnly": "yes",
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": str(folder / "known_hosts"),
    }
    command = ["ssh", "-F", "none", "-p", str(port), "-i", str(folder / key)]
    command += [word for name in options for word in ("-o", f"{name}={options[name]}")]
    return subprocess.run(
        [*command, f"{login}@127.0.0.1", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def refused(done: subprocess.CompletedProcess[str]) -> None:
    # The brackets list all login methods that the server offers.
    assert done.returncode == 255
    assert "Permission denied (publickey)." in done.stderr, done.stderr


LISTENS = r"Server listening on"


@check
def ssh_does_not_start_without_a_key(folder: Path) -> None:
    for keys in ("", "no key\n"):
        done = run("ssh", env={"AUTHORIZED_KEYS": keys})
        assert done.returncode == 2
        assert "ssh needs a public key" in done.stdout
    done = run("ssh", env={"AUTHORIZED_KEYS": ""}, options=["--user", "0:0"])
    assert done.returncode == 2
    assert "not as uid 0" in done.stdout


@check
def ssh_logs_in_the_user_by_key_alone(folder: Path) -> None:
    env = {"AUTHORIZED_KEYS": make_key(folder / "key"), "OMP_NUM_THREADS": "3"}
    make_key(folder / "other")
    with server(folder, "ssh", ready=LISTENS, env=env):
        done = ssh(folder, "whoami; echo $OMP_NUM_THREADS; paceline --version")
        assert good(done).split()[:2] == ["user", "3"]
        assert "paceline" in good(ssh(folder, "bash -lc 'command -v paceline'"))
        refused(ssh(folder, "true", key="other"))
        refused(ssh(folder, "true", key="none"))
        refused(ssh(folder, "true", login="root"))
        by_password = "PreferredAuthentications=password,keyboard-interactive"
        refused(ssh(folder, "-o", by_password, "true"))
        assert is_healthy()


@check
def ssh_takes_a_mounted_key_and_keeps_its_own(folder: Path) -> None:
    # The second start must have the host key of the first.
    public = folder / "authorized_keys"
    public.write_text(make_key(folder / "key"))
    public.chmod(0o644)
    mount = ["-v", f"{public}:/home/user/.ssh/authorized_keys:ro"]
    for env in ({}, {"SSH_PORT": "2222"}):
        port = int(env.get("SSH_PORT", "22"))
        with server(folder, "ssh", ready=LISTENS, env=env, options=mount):
            assert good(ssh(folder, "id -un", port=port)) == "user\n"
    hosts = (folder / "known_hosts").read_text().splitlines()
    keys = {line.split(" ", 1)[1] for line in hosts}
    assert len(keys) == 1


# ---- all of it -----------------------------------------------------------------------


def main() -> int:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # As in a container of Docker.
    Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")
    failed = 0
    for function in checks:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            folder.chmod(0o755)  # a mount for the container's user is in it
            try:
                function(folder)
                left = processes()
                assert not left, f"processes are left: {left}"
                word = "ok"
            except Exception as error:
                failed += 1
                word = f"FAILED: {type(error).__name__}: {error}"
        what = function.__name__.replace("_", " ")
        print(f"{time.monotonic() - start:5.1f} s  {what}: {word}", flush=True)
    print(f"{len(checks) - failed} of {len(checks)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
