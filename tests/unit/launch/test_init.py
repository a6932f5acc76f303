"""`paceline.init()` in one process: devices, the environment, existing worlds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline._compat import torch_groups
from paceline._launch import init as init_module
from paceline._launch.variables import Launch
from support.prints import without_gloo

ONE_OF_MPI = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}
EVALUATOR = (
    '{"cluster": {"chief": ["a:1"], "evaluator": ["a:2"]}, '
    '"task": {"type": "evaluator", "index": 0}}'
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Provide an empty environment, without a process group before and after."""
    assert not dist.is_initialized()
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    own: dict[str, str] = dict(kept)
    monkeypatch.setattr(os, "environ", own)
    monkeypatch.setattr(init_module, "_added", {})
    yield own
    if dist.is_initialized():
        dist.destroy_process_group()


class Gpus:
    """Simulated GPUs; records the calls of torch."""

    def __init__(self, n_gpus: int) -> None:
        self.n_gpus = n_gpus
        self.chosen: list[int] = []
        self.backends: list[str] = []
        self.options: dict[str, Any] = {}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    found = Gpus(2)
    make = dist.init_process_group

    def make_group(backend: str, **options: Any) -> None:
        found.backends.append(backend)
        found.options = options
        make("fake" if backend == "fake" else "gloo", **options)

    def choose(device: torch.device) -> None:
        found.chosen.append(device.index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: found.n_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found.n_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.chosen[-1])
    monkeypatch.setattr(dist, "init_process_group", make_group)
    return found


# ---- devices -------------------------------------------------------------------------


def test_a_world_of_one_takes_the_first_gpu_and_torchs_timeout(gpus, environ):
    environ.update(ONE_OF_MPI)
    world = paceline.init()
    assert world.device == torch.device("cuda", 0)
    assert gpus.backends == ["cpu:gloo,cuda:nccl"]
    assert set(gpus.chosen) == {0}
    assert "timeout" not in gpus.options


def test_the_gpu_is_chosen_before_others_wait(gpus, environ, monkeypatch):
    environ.update(RANK="2", WORLD_SIZE="4", LOCAL_RANK="2")
    environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")
    with pytest.raises(RuntimeError, match="local rank 2 has no GPU: torch sees 2"):
        paceline.init()
    assert gpus.backends == []
    gpus.n_gpus = 3

    def fail(backend: str, **options: Any) -> None:
        assert gpus.chosen == [2]
        raise KeyboardInterrupt

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(KeyboardInterrupt):
        paceline.init()


def test_the_one_visible_gpu_is_each_ranks_own(gpus, environ):
    assert init_module._choose_device(True, 1) == torch.device("cuda", 1)
    gpus.n_gpus = 1
    with pytest.raises(RuntimeError, match="at most 1 ranks per host"):
        init_module._choose_device(True, 1)
    environ["CUDA_VISIBLE_DEVICES"] = "5"
    assert init_module._choose_device(True, 3) == torch.device("cuda", 0)
    gpus.n_gpus = 2
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES=5"):
        init_module._choose_device(True, 3)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_a_backend_of_the_cpu_leaves_gpus_alone(gpus, backend):
    assert paceline.init(backend=backend).device == CPU
    assert paceline.init().device == CPU
    assert gpus.backends == [backend]
    assert gpus.chosen == []


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "NCCL", "cuda:gloo"])
def test_a_backend_of_gpus_needs_one(gpus, backend):
    assert paceline.init(backend=backend).device == torch.device("cuda", 0)
    dist.destroy_process_group()
    gpus.n_gpus = 0
    with pytest.raises(RuntimeError, match=f"'{backend}', but torch sees no GPU"):
        paceline.init(backend=backend)
    assert paceline.init().device == CPU
    assert gpus.backends[-1] == "gloo"  # for all tensors


def test_an_evaluator_takes_a_gpu_that_no_rank_has(gpus, environ):
    environ["TF_CONFIG"] = EVALUATOR
    assert paceline.init() == paceline.World(
        -1, 1, 1, torch.device("cuda", 1), "tf_config"
    )
    assert gpus.chosen == [1]
    assert paceline.init(backend="gloo").device == CPU
    gpus.n_gpus = 1
    assert paceline.init().device == CPU
    assert not dist.is_initialized()


# ---- the process group and the environment -------------------------------------------


@pytest.mark.parametrize("timeout", [5, 5.0, timedelta(seconds=5)])
def test_a_timeout_may_be_a_number_of_seconds(gpus, timeout):
    paceline.init(timeout=timeout)
    assert gpus.options["timeout"] == timedelta(seconds=5)


def test_what_is_missing_is_set_and_nothing_changed(environ):
    environ.update(ONE_OF_MPI, MASTER_ADDR="head", LOCAL_RANK="")
    before = dict(environ)
    world = paceline.init()
    assert world == paceline.World(0, 1, 0, CPU, "mpich")
    added = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert environ == {**before, **added}


def test_a_second_world_is_found_as_the_first_was(environ):
    environ.update(ONE_OF_MPI)
    world = paceline.init()
    for _ in range(2):
        assert paceline.init() == world
        dist.destroy_process_group()
    environ["RANK"] = "1"  # now the user's
    with pytest.raises(ValueError, match="RANK is 1, but 0"):
        paceline.init()


def test_a_world_of_one_has_local_rank_0(environ):
    environ.update(RANK="0", WORLD_SIZE="1")
    make_group(0, 1)
    for _ in range(2):
        assert paceline.init() == paceline.World(0, 1, 0, CPU, "environment")
        dist.destroy_process_group()
    assert environ["LOCAL_RANK"] == "0"


def test_a_failure_leaves_no_trace(environ, monkeypatch):
    environ.update(ONE_OF_MPI, RANK="0")
    before = dict(environ)

    def fail(*_: Any) -> None:
        raise OSError("no such host")

    monkeypatch.setattr(init_module, "_exchange_hosts", fail)
    with pytest.raises(OSError, match="no such host"):
        paceline.init()
    assert environ == before
    assert init_module._added == {}
    assert not dist.is_initialized()


def test_rank_0_prints_one_line_to_stderr_and_sets_nothing_without_a_launcher(
    environ, capfd
):
    environ.update(SLURM_NTASKS="4")
    before = dict(environ)
    paceline.init()
    paceline.init()
    assert environ == before
    out, err = capfd.readouterr()
    assert without_gloo(out) == ""
    lines = [line for line in err.splitlines() if line.startswith("paceline: ")]
    assert lines == [
        "paceline: 1 rank on 1 host, backend gloo, launcher none (SLURM_NTASKS is 4, "
        "but srun did not start this process)"
    ]


# ---- an existing world ---------------------------------------------------------------


def make_group(rank: int, size: int) -> None:
    store = dist.HashStore()
    dist.init_process_group(
        "fake" if size > 1 else "gloo", store=store, rank=rank, world_size=size
    )


def test_a_world_that_is_there_is_described(environ):
    make_group(0, 1)
    assert paceline.init() == paceline.World(0, 1, 0, CPU, "none")
    assert paceline.init(backend="gloo", timeout=1).rank == 0
    with pytest.raises(
        ValueError, match=r"'nccl', but .* exists already, with 'cpu:gloo"
    ):
        paceline.init(backend="nccl")
    environ["LOCAL_RANK"] = "3"
    assert paceline.init() == paceline.World(0, 1, 3, CPU, "unknown")


def test_a_world_of_others_has_no_known_launcher(environ):
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    make_group(1, 3)
    assert paceline.init() == paceline.World(1, 3, -1, CPU, "unknown")
    environ["LOCAL_RANK"] = "-1"
    assert paceline.init().local_rank == -1
    environ["LOCAL_RANK"] = "1"
    assert paceline.init() == paceline.World(1, 3, 1, CPU, "unknown")


@pytest.fixture
def on_gpu_1(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.chosen = [1]
    config = "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(torch_groups, "backends_by_device", lambda: config)


@pytest.mark.usefixtures("on_gpu_1")
def test_a_world_on_gpus_is_described():
    make_group(0, 1)
    for backend in (None, "nccl", "NCCL", "gloo", "cuda:nccl,cpu:gloo"):
        assert paceline.init(backend=backend).device == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="mpi"):
        paceline.init(backend="cpu:mpi,cuda:nccl")


@pytest.mark.usefixtures("on_gpu_1")
def test_a_gpu_tells_the_local_rank_where_nothing_else_does():
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    make_group(1, 3)
    assert paceline.init().local_rank == 1


def test_a_world_cannot_be_changed():
    world = paceline.init()
    with pytest.raises(AttributeError):
        world.rank = 1  # type: ignore[misc]
    assert (type(world).__module__, type(world).__qualname__) == ("paceline", "World")


@pytest.mark.parametrize("is_agents", ["True", ""])
def test_no_rank_goes_on_before_all_have_joined(
    monkeypatch: pytest.MonkeyPatch, is_agents: str
) -> None:
    """A rank that ended at once would be lost to those that still connect to it."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", is_agents)
    monkeypatch.setattr(torch_groups, "default_group", lambda: None)
    monkeypatch.setattr(torch_groups, "group_store", lambda group: store)
    launches = [Launch("environment", rank, 3, rank) for rank in range(3)]
    for launch in launches[1:]:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            init_module._exchange_hosts(launch)
    assert [init_module._exchange_hosts(launch) for launch in launches] == [
        (0, 1),
        (1, None),
        (2, None),
    ]


def test_a_rank_whose_store_ended_with_rank_0_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 ends once all have joined, maybe before another rank reads that."""
    options = {"is_master": True, "wait_for_workers": False}
    host = dist.TCPStore("127.0.0.1", 0, **options)
    store = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    monkeypatch.setattr(torch_groups, "default_group", lambda: None)
    monkeypatch.setattr(torch_groups, "group_store", lambda group: store)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(
            init_module._exchange_hosts, Launch("environment", 1, 2, 1)
        )
        host.get("paceline/init/host/1")
        del host
        assert joined.result(60) == (1, None)
