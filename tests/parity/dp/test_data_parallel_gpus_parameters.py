"""What replicas on GPUs have of parameters, for how long, and what comes back."""

import copy
import gc
import weakref

import paceline
import pytest
import torch
from gpu_programs import compare, linear
from paceline._dp.gpus import segments
from paceline._dp.gpus.segments import HeldBlocks
from replicas import integers, loss_of
from torch import nn

pytestmark = pytest.mark.usefixtures("n_gpus")


# ---- gradients ----------------------------------------------------------------------


class UsesParts(nn.Module):
    """Uses a weight in a way by which its gradient is laid out in another one."""

    def __init__(self, use):
        super().__init__()
        self.first, self.use = linear(3, 3), use
        self.weight = nn.Parameter(integers(3, 4))

    def forward(self, x):
        return self.use(self.first(x), self.weight)


USES = {
    "transposed": lambda x, w: x @ w.t().contiguous().t(),
    "summed up": lambda x, w: x * w.sum(),
    "a row of it": lambda x, w: x * w[:, 1],
    "expanded": lambda x, w: (x[:, :, None] * w.expand(2, 3, 4).sum(0)).sum(2),
    "permuted": lambda x, w: torch.einsum("bi,oi->bo", x, w.t()),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_gradients_of_any_layout_come_back(use):
    def program(model):
        for k in range(2):
            loss_of(model(integers(7, 3, seed=k))).backward()

    compare(lambda: UsesParts(use), program)


class UsesOne(nn.Module):
    """Uses the first of two inputs."""

    def __init__(self):
        super().__init__()
        self.layer = linear(3, 3)

    def forward(self, x, _unused):
        return self.layer(x)


def test_an_input_that_no_replica_uses_has_no_gradient():
    ours = paceline.DataParallel(UsesOne())
    x, y = integers(7, 3).requires_grad_(), integers(7, 3).requires_grad_()
    loss_of(ours(x, y)).backward()
    assert x.grad is not None
    assert y.grad is None


class DifferentiatesItself(nn.Module):
    """Runs a backward in its forward, whose gradients have gradients."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(integers(3))

    def forward(self, x):
        with torch.enable_grad():
            (x * self.weight.square()).sum().backward(create_graph=True)
        return x.detach()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_a_backward_in_forward_have_gradients():
    plain, ours = DifferentiatesItself(), DifferentiatesItself()
    x = integers(7, 3)
    with torch.no_grad():
        plain(x), paceline.DataParallel(ours)(x)
    assert torch.equal(ours.weight.grad, plain.weight.grad)
    assert ours.weight.grad.requires_grad
    assert plain.weight.grad.requires_grad


# ---- for how long -------------------------------------------------------------------


class Looks(nn.Module):
    """Lets a function see each replica's parts."""

    def __init__(self):
        super().__init__()
        self.layer = linear(3, 3)
        self.register_buffer("odd", integers(3, 3).to_sparse())
        self.look = lambda part: None

    def forward(self, x):
        self.look(self)
        return self.layer(x)


def test_what_a_replica_had_goes_with_the_call(n_gpus):
    ours, seen = paceline.DataParallel(Looks()), []
    ours.module.look = lambda part: seen.extend(
        map(weakref.ref, (part.layer.weight, part.odd))
    )
    with torch.no_grad():
        ours(integers(7, 3))
    gc.collect()
    assert len(seen) == 2 * n_gpus
    assert sum(each() is not None for each in seen) == 2  # the module's own


def test_replicas_have_ordinary_tensors_in_inference_mode():
    ours, seen = paceline.DataParallel(Looks()), []
    ours.module.look = lambda part: seen.extend(
        tensor.is_inference() for tensor in (part.layer.weight, part.odd)
    )
    with torch.inference_mode():
        ours(integers(7, 3))
    assert not any(seen)


def test_memory_is_taken_once(n_gpus):
    ours = paceline.DataParallel(copy.deepcopy(linear(3, 3)))
    loss_of(ours(integers(7, 3))).backward()
    engine = ours._gpu_engine(ours.device_ids)
    group, layout = engine.group, engine._replicated._layout
    assert group.ring(layout.segment_bytes) is group.ring(layout.segment_bytes)
    assert group.rooms(64)[-1] is group.rooms(64)[-1]
    assert group.sums(1)[-1] is group.sums(1)[-1]


def test_a_tensor_alone_has_a_block_of_its_size():
    ours = paceline.DataParallel(nn.Linear(3, 5, bias=False))
    with torch.no_grad():
        ours(torch.ones(7, 3))
    (segment,) = ours._gpu_engine(ours.device_ids)._replicated._layout.segments
    assert segment.n_bytes == 3 * 5 * 4


def test_garbage_is_collected_once_for_blocks_that_stay_in_use(monkeypatch):
    collected = []
    monkeypatch.setattr(segments.gc, "collect", collected.append)
    held, blocks = HeldBlocks(), [torch.ones(1) for _ in range(5)]
    for block in blocks:
        held.add(block)
    held.limit(2)
    assert collected == [1, 2]
    held.limit(2)
    assert collected == [1, 2]
    held.limit(1)
    assert collected == [1, 2, 1, 2]


# ---- inputs -------------------------------------------------------------------------


class SeesInput(nn.Module):
    """Notes where each replica's input is."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.data_ptr())
        return x.to(torch.int64).sum(1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16])
def test_each_gpu_has_its_rows_of_an_input(n_gpus, dtype):
    module = SeesInput()
    x = integers(6, 3).abs().to(dtype)
    output = paceline.DataParallel(module)(x)
    assert torch.equal(output, x.to(torch.int64).sum(1))
    here = range(x.data_ptr(), x.data_ptr() + x.nbytes)
    assert len(module.seen) == n_gpus
    assert [place in here for place in module.seen].count(True) == 1
