"""The simulated devices of torch (support/devices) meet the other tests' needs.

The programs show that models train there as on the CPU.
"""

import copy
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from replicas import assert_close, assert_same_grads, reals
from support import devices
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def four_devices():
    devices.show(4)
    yield
    devices.show(0)


def device(index):
    return torch.device(devices.KIND, index)


def ones(*where):
    return [torch.ones(2, 2, device=each) for each in where]


MIXED = {
    "add": torch.add,
    "in place": torch.Tensor.add_,
    "matrices": torch.mm,
    "cat": lambda a, b: torch.cat([a, b]),
    "linear": F.linear,
}


@pytest.mark.parametrize("operation", MIXED.values(), ids=MIXED)
def test_tensors_of_two_devices_in_one_operation_are_an_error(operation):
    for where in ((device(0), device(1)), (device(1), "cpu"), ("cpu", device(1))):
        with pytest.raises(
            RuntimeError, match="Expected all tensors to be on the same"
        ):
            operation(*ones(*where))
    operation(*ones(device(1), device(1)))


class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        now = torch.gpu.current_device(), threading.get_ident()
        ctx.seen.append((grad.device.index, *now))
        return grad, None


@pytest.mark.parametrize("n", [2, 4])
def test_backward_runs_on_a_thread_for_each_device(n):
    seen, leaves = [], [torch.ones(3, device=device(i)) for i in range(n)]
    for x in leaves:
        x.requires_grad_()
    sum(Watched.apply(x * 2, seen).to(device(0)).sum() for x in leaves).backward()
    assert sorted((index, current) for index, current, _ in seen) == [
        (i, i) for i in range(n)
    ]
    threads = {thread for *_, thread in seen}
    assert len(threads) == n
    assert threading.get_ident() not in threads
    assert all(x.grad.tolist() == [2.0] * 3 for x in leaves)


ROWS = reals(6, 4)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_draws_the_same_again(is_reentrant):
    layers = nn.Linear(4, 50).double(), nn.Dropout(0.5), nn.Tanh()
    plain = nn.Sequential(*layers).to(device(1))
    twin = copy.deepcopy(plain)
    x = ROWS.to(device(1)).requires_grad_()
    torch.manual_seed(4)
    plain(x).square().sum().backward()
    torch.manual_seed(4)
    out = checkpoint(twin, x, use_reentrant=is_reentrant)
    out.square().sum().backward()
    assert_same_grads(twin, plain)


def test_each_device_draws_from_a_generator_of_its_own():
    draws = types.SimpleNamespace(cpu=torch.get_rng_state())
    x, y = (torch.ones(50, device=device(i)) for i in (1, 2))
    torch.manual_seed(3)
    draws.first, draws.second = F.dropout(x), F.dropout(x)
    assert not torch.equal(draws.first, draws.second)
    assert_close(F.dropout(y), draws.first)
    assert_close(F.dropout(torch.ones(50)), draws.first)
    own = torch.Generator(device(1)).manual_seed(3)
    here = {"generator": own, "device": device(1)}
    torch.manual_seed(3)
    assert_close(torch.rand(5, **here), torch.rand(5))
