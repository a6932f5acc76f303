"""Helpers for ranks on several hosts that meet, train and fail, on CPUs and on GPUs.

Ranks claim to be on different hosts, or are in network namespaces.  GPUs are simulated.
"""

import contextlib
import os
import signal
import time

import paceline
import pytest
import torch
from support import fake_gpus
from support.hosts import Net
from support.processes import descriptors, leftovers
from support.ranks import start_ranks, tell, values
from torch.nn.parallel import DistributedDataParallel as TorchDDP

N_STEPS = 6
SECONDS = 60.0
NOTICED_SECONDS = 20.0  # for a loaded machine; usually it takes at most two


# ---- in the ranks -------------------------------------------------------------------


def on_host(rank, _, body, hosts, store, device, seconds, *args):
    """Run a rank's function on its host, and on its GPU if it has one."""
    hosts.join(rank, store, seconds)
    on_gpu = fake_gpus.on_gpu(rank) if device == "gpu" else contextlib.nullcontext()
    with on_gpu:
        return body(rank, hosts, *args)


def fail(*_):
    """Raise, as a failing hook does."""
    raise OSError("no port is free")


@contextlib.contextmanager
def failing(model):
    """Make the backwards of a model fail within this context."""
    hook = model.module.norm.weight.register_hook(fail)
    yield
    hook.remove()


def steps(model, rank):
    """Train a model; return its parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    random = torch.Generator().manual_seed(rank)
    for step in range(N_STEPS):
        x = torch.randn(6, 20, generator=random)
        if step == 2:
            with model.no_sync():
                model(x, True).square().mean().backward()
        model(x, (step + rank) % 3 > 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.clone() for tensor in model.module.state_dict().values()]


def steps_of_both(ours, rank):
    """Train with our wrapper and with torch's, from the same state."""
    theirs = TorchDDP(Net(), find_unused_parameters=True)
    theirs.module.load_state_dict(ours.module.state_dict())
    return steps(ours, rank), steps(theirs, rank)


def fail_in_turn(rank, hosts):
    """Have each rank fail in a step; return the model, which can train on."""
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(Net())
    for culprit in range(hosts.world_size):
        x = torch.full((4, 20), 0.1 * rank)
        model(x, True).square().mean().backward()
        is_mine = rank == culprit
        # A slow rank raises in its forward, when it waits for buffers.
        with (
            failing(model) if is_mine else contextlib.nullcontext(),
            pytest.raises(
                OSError if is_mine else paceline.PeerError, match="no port"
            ) as caught,
        ):
            model(x, True).square().mean().backward()
        host = hosts.host_of(culprit)
        is_near = host == hosts.host_of(rank) or hosts.n_ranks[host] > 1
        name = f"rank {culprit}" if is_near else f"rank {culprit} (host {host})"
        assert is_mine or name in str(caught.value)
    model.zero_grad()
    return model


def fork_one_that_sleeps():
    child = os.fork()
    if child == 0:
        time.sleep(SECONDS)
        os._exit(0)
    return child


def step_until_it_fails(rank, hosts, how, culprit):
    """Take steps; return the error that ends them, and its time."""
    files = descriptors()
    model = paceline.DistributedDataParallel(Net())
    x = torch.ones(4, 20)
    told = None
    is_culprit = rank == culprit
    try:
        for step in range(100_000):
            if step == 5:
                has_child = is_culprit and how == "kill a parent"
                tell(fork_one_that_sleeps() if has_child else 0)
            if step == 20 and is_culprit:
                if how == "raise":
                    raise KeyError("its own")
                if how == "fewer":
                    return "left", time.monotonic(), ""
                if how == "backward":
                    model.module.norm.weight.register_hook(fail)
            model(x, True).square().mean().backward()
    except (RuntimeError, OSError, KeyError) as error:
        told = type(error).__name__, time.monotonic(), str(error)
        tell("told")
        if how == "stop":  # both live: they go on, unless one has ended that step
            with contextlib.suppress(paceline.MismatchError):
                model(x, True).sum().backward()
        elif how != "drawn":
            with pytest.raises(RuntimeError, match="rank"):
                model(x, True).sum().backward()
    del model
    assert len(hosts.n_ranks) > 1 or leftovers(files) == []
    return told


# ---- in the test --------------------------------------------------------------------


def start_on_hosts(body, hosts, store, *args, device="cpu", seconds=SECONDS, **options):
    """Start `body(rank, hosts, *args)` on each rank; `options` are for fake GPUs."""
    return start_ranks(
        on_host,
        hosts.world_size,
        *(body, hosts, store, device, seconds, *args),
        rendezvous="none",
        timeout=90.0,
        env=fake_gpus.environment(**options) if device == "gpu" else None,
    )


def run_on_hosts(*args, **options):
    """Return the values of each rank's function; arguments as `start_on_hosts`."""
    with start_on_hosts(*args, **options) as ranks:
        return values(ranks.wait())


def fail_on(hosts, how, culprit, store, act=lambda ranks: None, **options):
    """Have a rank fail; return the time, all ranks' outcomes, and their processes."""
    with start_on_hosts(
        step_until_it_fails, hosts, store, how, culprit, **options
    ) as ranks:
        children = [ranks.hear(rank) for rank in range(hosts.world_size)]
        began = time.monotonic()
        if how.startswith("kill"):
            ranks.kill(culprit)
        act(ranks)
        outcomes = ranks.wait()
        for child in filter(None, children):
            os.kill(child, signal.SIGKILL)
        return began, outcomes, ranks.pids


def assert_trained(found):
    """Check the results of `steps_of_both` on each rank."""
    first = found[0][0]
    n_parameters = len(list(Net().parameters()))
    for ours, theirs in found:
        for k, (a, b, c) in enumerate(zip(first, ours, theirs, strict=True)):
            torch.testing.assert_close(b, c, rtol=1e-4, atol=1e-5)
            if k < n_parameters and a.dim() > 1:
                assert torch.equal(a, b), "ranks differ"
