"""The same memory seen otherwise: shapes, strides, dtypes and gradients wanted."""

import numpy as np
import pytest
import torch
from replicas import Twin, integers, linear, loss_of, modules_of
from torch import nn


class Holder(nn.Module):
    """Computes by what its parameters, buffers, tensors and arrays are like."""

    def __init__(self):
        super().__init__()
        self.linear = linear(4)
        self.weight = nn.Parameter(integers(4, low=1))
        self.complex = nn.Parameter(torch.tensor([1 + 2j, 3j, 1, 2]))
        self.register_buffer("kept", integers(4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("phase", torch.tensor([1 + 2j, 3j, 1, 2]))
        self.held = [integers(4, low=1), integers(8)[::2]]
        self.array = np.arange(4.0)

    def forward(self, x):
        y = self.linear(x) + self.weight.flatten() * self.weight.dim()
        y = y + (self.complex * 1j).real.double() + self.kept
        y = y + (~self.mask).double() + self.phase.resolve_conj().imag.double()
        for tensor in self.held:
            y = y + tensor.flatten().double() * (1 + tensor.dim())
        y = y + torch.from_numpy(self.array).flatten().double() * self.array.ndim
        return y + sum(t.requires_grad for t in (*self.held, self.kept))


def set_data(find, make):
    def change(module):
        tensor = find(module)
        tensor.data = make(tensor.data)

    return change


def set_weight(module):
    module.weight.data = module.weight.data.as_strided((4,), (0,)).clone()


CHANGES = {
    "a tensor's shape": set_data(lambda m: m.held[0], lambda d: d.view(2, 2)),
    "a tensor's dtype": set_data(lambda m: m.held[0], lambda d: d.view(torch.int64)),
    "a tensor with gaps": lambda m: m.held[1].data.__setitem__(3, 9),
    "an array's shape": lambda m: setattr(m, "array", m.array.reshape(2, 2)),
    "an array's shape in place": lambda m: setattr(m.array, "shape", (4, 1)),
    "an array's dtype in place": lambda m: setattr(m.array, "dtype", np.int64),
    "a buffer's dtype": set_data(lambda m: m.kept, lambda d: d.view(torch.int64)),
    "truths as bytes": lambda m: setattr(m, "mask", m.mask.to(torch.uint8)),
    "truths as bytes in place": set_data(
        lambda m: m.mask, lambda d: d.view(torch.uint8)
    ),
    "bytes as truths": lambda m: setattr(m, "mask", m.mask.to(torch.bool)),
    "a parameter's values": set_weight,
}
TO_THREADS = {
    "a tensor wants a gradient": (
        lambda m: m.held[0].requires_grad_(),
        "requires a gradient, and is neither a parameter nor a buffer",
    ),
    "a buffer wants a gradient": (
        lambda m: m.kept.requires_grad_(),
        "buffer 'kept' requires a gradient",
    ),
    "a buffer's conjugate": (
        lambda m: setattr(m, "phase", m.phase.conj()),
        "'phase' is a conjugate",
    ),
    "a buffer's conjugate in place": (
        set_data(lambda m: m.phase, lambda d: d.conj()),
        "'phase' is a conjugate",
    ),
    "a parameter's conjugate": (
        set_data(lambda m: m.complex, lambda d: d.conj()),
        "'complex' is a conjugate",
    ),
}


def step(model, x):
    return loss_of(model(x))


def tensors_of(module):
    return [module.held[0], module.kept]


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype)")
def test_a_change_of_form_reaches_the_replicas(wrap):
    twin = Twin(wrap, Holder())
    for name, change in CHANGES.items():
        for module in modules_of(twin):
            change(module)
        twin.zero()
        twin.step(step, integers(7, 3, seed=len(name)))


@pytest.mark.parametrize(
    ("change", "reason"), TO_THREADS.values(), ids=list(TO_THREADS)
)
def test_a_form_that_processes_cannot_have_goes_to_threads(
    wrap_by_default, change, reason
):
    twin = Twin(wrap_by_default, Holder())
    twin.step(step, integers(7, 3))
    before = twin.ours.engine
    for module in modules_of(twin):
        change(module)
    for seed in range(2):
        twin.zero()
        twin.step(step, integers(7, 3, seed=seed))
        for mine, theirs in zip(*map(tensors_of, modules_of(twin)), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
    assert twin.ours.engine == "thread"
    assert before == "thread" or reason in twin.ours.engine_reason
