"""Whose memory parameters are in: shared, forked, given back, and what is a view of it.

The expectation is always what the plain module does: a view stays a view, and nobody
else's process writes into it.
"""

import gc
import os
from pathlib import Path

import paceline
import pytest
import torch
from replicas import assert_same_state, integers, leaf, loss_of, net
from torch import nn

CPUS = ["cpu"] * 2


def wrap_in_processes(module):
    return paceline.DataParallel(module, CPUS, engine="process")


@pytest.fixture
def ours(idle_workers):
    with wrap_in_processes(net()) as model:
        model(integers(4, 3))
        yield model


def holds_in_child(check):
    """Run a function in a forked process; tell whether it returned True."""
    pid = os.fork()
    if pid == 0:
        try:
            is_right = check()
        except BaseException as error:
            print(f"in the child: {type(error).__name__}: {error}", flush=True)
            is_right = False
        os._exit(0 if is_right is True else 1)
    return os.waitpid(pid, 0)[1] == 0


def add_to_weights(module, number):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(number)


def is_shared(module):
    """Tell whether the parameters lie in memory that other processes can map."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        for p in module.parameters():
            if begin <= p.data_ptr() < end:
                found.add("memfd:paceline" in line)
    (answer,) = found
    return answer


def values_of(module):
    return [parameter.tolist() for parameter in module.parameters()]


# ---- forked processes ---------------------------------------------------------------


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_forked_child_writes_into_its_own_weights(ours, is_closed):
    if is_closed:
        ours.close()
    before = values_of(ours.module)
    add_to_weights(ours.module, 1)
    sums = [parameter.sum().item() for parameter in ours.parameters()]

    def check():
        add_to_weights(ours.module, 10)
        return all(
            p.sum().item() == total + 10 * p.numel()
            for p, total in zip(ours.parameters(), sums, strict=True)
        )

    assert holds_in_child(check)
    add_to_weights(ours.module, -1)
    assert values_of(ours.module) == before
    assert torch.equal(ours(integers(4, 3)), ours.module(integers(4, 3)))


def test_a_forked_child_trains_weights_of_its_own_by_workers_of_its_own(ours):
    before = values_of(ours.module)
    view = ours.module[0].weight.detach()

    def check():
        add_to_weights(ours.module, 1)
        plain = net()
        add_to_weights(plain, 1)
        for model in (ours, plain):
            optimizer = torch.optim.SGD(model.parameters(), lr=1)
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(model(integers(7, 3))).backward()
                optimizer.step()
        assert_same_state(ours, plain)
        assert torch.equal(view, plain[0].weight)
        ours.close()
        assert_same_state(ours, plain)
        return True

    assert holds_in_child(check)
    assert values_of(ours.module) == before
    assert torch.equal(ours(integers(4, 3)), ours.module(integers(4, 3)))


# ---- closed, and opened again -------------------------------------------------------


def test_a_closed_wrapper_leaves_ordinary_memory_at_the_same_addresses():
    module = net()
    ours = wrap_in_processes(module)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1)
    loss_of(ours(integers(7, 3))).backward()
    optimizer.step()
    assert is_shared(module)
    addresses = [p.data_ptr() for p in module.parameters()]
    state, array = module.state_dict(), module[0].weight.detach().numpy()
    before = values_of(module)
    ours.close()
    optimizer.zero_grad()
    gc.collect()
    assert not is_shared(module)
    assert values_of(module) == before
    for number in (1, 2):
        add_to_weights(module, number)
        array += 5
        assert [p.data_ptr() for p in module.parameters()] == addresses
        assert (array == module[0].weight.detach().numpy()).all()
        for name, parameter in module.named_parameters():
            assert torch.equal(state[name], parameter)
        assert torch.equal(ours(integers(7, 3)), module(integers(7, 3)))  # shared anew
    assert is_shared(module)
    ours.close()


def test_a_model_that_is_replaced_gets_ordinary_memory(ours):
    first, second = ours.module, net(seed=5)
    view = first[0].weight.detach()
    ours.module = second
    assert torch.equal(ours(integers(7, 3)), second(integers(7, 3)))
    add_to_weights(first, 1)
    assert torch.equal(view, first[0].weight)
    ours.module = first
    assert torch.equal(ours(integers(7, 3)), first(integers(7, 3)))
    assert torch.equal(view, first[0].weight)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_wrappers_of_one_module_close_one_after_the_other(idle_workers, order):
    module = net()
    both = [wrap_in_processes(module), wrap_in_processes(nn.Sequential(module))]
    x = integers(7, 3)
    for number, ours in enumerate(both):
        add_to_weights(module, number)
        assert torch.equal(ours(x), module(x))
    state = module.state_dict()
    for k in order:
        both[k].close()
        add_to_weights(module, 1)
        other = both[order[1]]
        assert torch.equal(other(x), module(x))  # or opens again, at the end
        loss_of(other(leaf(x))).backward()
        for name, parameter in module.named_parameters():
            assert torch.equal(state[name], parameter)
    both[order[1]].close()
    assert torch.equal(both[order[0]](x), module(x))
    both[order[0]].close()


def test_a_collected_wrapper_leaves_weights_that_no_child_can_change(idle_workers):
    module = net()
    ours = wrap_in_processes(module)
    ours(integers(4, 3))
    before = values_of(module)
    view = module[0].weight.detach()
    del ours
    gc.collect()

    def check():
        add_to_weights(module, 3)
        return True

    assert holds_in_child(check)
    assert values_of(module) == before
    with wrap_in_processes(module) as again:
        assert torch.equal(again(integers(4, 3)), module(integers(4, 3)))
    add_to_weights(module, 1)
    assert torch.equal(view, module[0].weight)


# ---- what is a view of a parameter before the first forward -------------------------


def replace_weight(layer):
    made = layer.weight.detach().clone()
    layer.weight = nn.Parameter(made)
    return made


VIEWS = {
    "a state dict": lambda module: module.state_dict(),
    "an array": lambda module: module[2].weight.detach().numpy(),
    "a row": lambda module: module[2].weight.data[1],
    "what it was made of": lambda module: replace_weight(module[2]),
    "the other way round": lambda module: module[2].weight.detach().t(),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_a_view_from_before_the_first_forward_keeps_the_model_here(make):
    module = net()
    view = make(module)
    name = "0.weight" if isinstance(view, dict) else "2.weight"
    words = rf"'{name}' shares its memory .*: let go of that before the first forward"
    ours = wrap_in_processes(module)
    with pytest.raises(RuntimeError, match=words):
        ours(integers(4, 3))
    with paceline.DataParallel(module, CPUS) as auto:
        auto(integers(4, 3))
        assert auto.engine == "thread"
        assert f"'{name}' shares its memory" in auto.engine_reason
    del view
    with ours:
        assert torch.equal(ours(integers(4, 3)), module(integers(4, 3)))


def test_memory_that_other_processes_share_stays_theirs():
    module = net().share_memory()
    with pytest.raises(RuntimeError, match=r"'0\.weight' lies in .* \(share_memory"):
        wrap_in_processes(module)(integers(4, 3))


def test_parameters_assigned_later_part_from_no_view(ours):
    layer = ours.module[0]
    fresh = integers(*layer.weight.shape, seed=3)
    layer.weight.data = fresh
    with pytest.raises(RuntimeError, match=r"'0\.weight' shares its memory"):
        ours(integers(4, 3))
    del fresh
    assert torch.equal(ours(integers(4, 3)), ours.module(integers(4, 3)))
    layer.bias.data = ours.module[2].weight.data.new_ones(8)[2:6]
    ours.module[2].bias.data = layer.bias.data[1:3]
    with pytest.raises(RuntimeError, match=r"'2\.bias' and '0\.bias' share"):
        ours(integers(4, 3))


# ---- after a large batch ------------------------------------------------------------


def memory_of(pid):
    """Return the MiB that a process takes, its part of what is shared (PSS)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) >> 10


def peak_of(pid):
    """Return the most MiB that a process has had at once."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return (
        next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) >> 10
    )


def test_a_worker_gives_back_what_a_large_batch_took():
    def step(n_rows):
        loss_of(ours(torch.ones(n_rows, 3, dtype=torch.float64))).backward()

    with wrap_in_processes(net()) as ours:
        step(16)
        (pid,) = ours._engine._workers.group.pids
        before, peak = memory_of(pid), peak_of(pid)
        step(4_000_000)
        assert peak_of(pid) > peak + 100  # of which it may have given back some by now
        for _ in range(50):
            step(16)
        ours(integers(4, 3))  # the worker is done with the last answer
        after = memory_of(pid)
    assert after < before + 50, f"{before} MiB before, {after} after"
    print(f"a fresh worker takes {before} MiB")
