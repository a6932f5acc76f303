"""Training resumes after ranks and hosts were killed: tests of the example."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from support import warm
from support.hosts import make_network
from support.namespaces import INTERFACE, enter

SCRIPT = Path(__file__).parents[1] / "examples" / "digits_restart.py"
ENV = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
ENV_OF_HOST = dict(
    ENV,
    GLOO_SOCKET_IFNAME=INTERFACE,
    # Else a joining torchrun waits for an address that was published before it joined.
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
)
SECONDS = 240
N_STEPS = 400
JOIN_SECONDS = 20.0  # until another torchrun has noticed a new one


class Training:
    """The example under torchrun, with separate files."""

    def __init__(self, folder, *options):
        folder.mkdir()
        self.checkpoint = folder / "checkpoint.pt"
        self.losses_file = folder / "losses"
        self.options = options

    @contextmanager
    def launched(self, namespace="", *options):
        """Start torchrun on a host; at the end of the context, it and its ranks end."""
        command = [sys.executable, "-m", "torch.distributed.run", *self.options]
        command += options
        command += [str(SCRIPT), "--checkpoint", str(self.checkpoint)]
        command += ["--losses", str(self.losses_file), "--steps", str(N_STEPS)]
        start = subprocess.Popen if namespace else warm.Popen
        with start(
            command,
            env=ENV_OF_HOST if namespace else ENV,
            preexec_fn=(lambda: enter(namespace)) if namespace else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            ranks = set()
            process.ranks = ranks
            try:
                yield process
            finally:
                for pid in {*ranks, *ranks_of(process.pid), process.pid}:
                    end(pid)

    def run(self):
        """Run the training to its end; return its output."""
        with self.launched() as process:
            said, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, said
        return said

    def losses(self):
        """Return the last computed loss of each step."""
        if not self.losses_file.exists():
            return {}
        lines = self.losses_file.read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["loss"] for row in rows}

    def await_step(self, step, process):
        """Wait until the step is done."""
        until = time.monotonic() + SECONDS
        while step not in self.losses():
            assert time.monotonic() < until
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)

    def weights(self):
        state = torch.load(self.checkpoint)
        assert state["n_steps"] == N_STEPS
        found = state["model"]
        return found


def ranks_of(agent):
    """Return the processes that a torchrun has started, in order of their ranks."""
    try:
        text = Path(f"/proc/{agent}/task/{agent}/children").read_text()
    except FileNotFoundError:
        return []
    return sorted(pid for pid in map(int, text.split()) if name_of(pid) != warm.SERVER)


def name_of(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return warm.SERVER


def end(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return a training on two ranks without failures."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    training = Training(folder, "--standalone", "--nproc-per-node", "2")
    training.run()
    assert list(training.losses()) == list(range(N_STEPS))
    return training


def test_training_goes_on_after_killed_ranks_as_if_nothing_had_happened(
    unbroken, tmp_path
):
    options = "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"
    broken = Training(tmp_path / "run", *options)
    with broken.launched() as process:
        for step, victim in ((30, 1), (N_STEPS // 2, 0)):
            broken.await_step(step, process)
            ranks = ranks_of(process.pid)
            assert len(ranks) == 2
            end(ranks[victim])
        said, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
    assert said.count("going on after step") == 2, said
    assert broken.losses() == unbroken.losses()
    theirs, ours = unbroken.weights(), broken.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.hand  # torchrun waits half a minute for more hosts
def test_training_goes_on_where_a_host_is_killed_and_another_joins(unbroken, tmp_path):
    network, hosts = make_network((1, 1))
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "5"]
    options += ["--rdzv-backend", "c10d", "--rdzv-id", "restarts"]
    options += ["--rdzv-endpoint", f"{network.addresses[0]}:29400"]
    broken = Training(tmp_path / "run", *options)
    first_way, second_way = (
        (name, "--local-addr", address, "--rdzv-conf", f"is_host={k == 0}")
        for k, (name, address) in enumerate(
            zip(hosts.names, network.addresses, strict=True)
        )
    )
    try:
        with broken.launched(*first_way) as first:
            with broken.launched(*second_way) as second:
                broken.await_step(95, first)
                for pid in (*ranks_of(second.pid), second.pid):
                    end(pid)
            broken.await_step(275, first)
            (alone,) = ranks_of(first.pid)
            os.kill(alone, signal.SIGSTOP)  # else it would finish before another joins
            with broken.launched(*second_way):
                time.sleep(JOIN_SECONDS)
                os.kill(alone, signal.SIGCONT)
                said, _ = first.communicate(timeout=SECONDS)
        assert first.returncode == 0, said
    finally:
        network.close()
    worlds = [line.split()[-2] for line in said.splitlines() if "going on" in line]
    assert worlds == ["1", "2"], said
    for step, loss in broken.losses().items():
        assert loss == pytest.approx(unbroken.losses()[step], abs=1e-4), step
