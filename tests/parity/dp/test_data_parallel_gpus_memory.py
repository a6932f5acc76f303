"""What replicas on GPUs compute with stays as it is while anything else holds it.

Parameters and buffers of a replica lie in blocks that each forward brings up to date.
What graphs have saved, and tensors that users keep, are views of those blocks.
"""

import gc
from types import SimpleNamespace

import pytest
import torch
from gpu_programs import F64
from paceline._dp.gpus import segments
from replicas import (
    Twin,
    Wrap,
    assert_close,
    assert_same_grads,
    assert_same_state,
    integer_weights,
    integers,
    loss_of,
    modules_of,
    smooth_net,
)
from torch import nn
from torch.ao import quantization
from torch.multiprocessing.reductions import StorageWeakRef


@pytest.fixture
def wrap(n_gpus):
    """Return a function that wraps a module for all GPUs that there are."""
    wrap = Wrap(is_gpu=True)
    return lambda module, _=2: wrap(module, n_gpus)


def run_both(twin, program):
    """Run `program(model, module)` with both models; compare all that it leaves."""
    theirs = program(twin.plain, twin.plain)
    assert_close(program(twin.ours, twin.inner), theirs, exact=False)
    assert_same_grads(twin.ours, twin.plain, exact=False)
    assert_same_state(twin.ours, twin.plain, exact=False)


# ---- weights that change between forward and backward -------------------------------


def scale(module):
    kept = [p.data.clone() for p in module.parameters()]
    for p in module.parameters():
        p.data.mul_(0.5)
    return kept


def write_back(module, kept):
    for p, values in zip(module.parameters(), kept, strict=True):
        p.data.copy_(values)


def replace(module):
    kept = [p.data for p in module.parameters()]
    for p in module.parameters():
        p.data = p.data * 0.5
    return kept


def put_back(module, kept):
    for p, values in zip(module.parameters(), kept, strict=True):
        p.data = values


SWAPS = {"written": (scale, write_back), "replaced": (replace, put_back)}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_an_evaluation_with_averaged_weights_leaves_a_graph_alone(
    wrap, swap, is_frozen
):
    """As a mean teacher in the student's module has them for a moment."""
    there, back = SWAPS[swap]
    twin = Twin(wrap, smooth_net())
    for module in modules_of(twin):
        module[2].requires_grad_(not is_frozen)

    def program(model, module):
        out = model(integers(7, 3))
        kept = there(module)
        with torch.no_grad():
            target = model(integers(7, 3, seed=1))
        back(module, kept)
        loss = (out - target).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        run_both(twin, program)


def test_a_gradient_of_gradients_sees_the_weights_of_its_forward(wrap):
    def program(model, module):
        x = integers(7, 3).requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        kept = scale(module)
        model(x)
        write_back(module, kept)
        loss = slope.square().sum()
        loss.backward()
        return loss

    run_both(Twin(wrap, smooth_net()), program)


class Statistics(nn.Module):
    """Buffers that training writes, of a replica's rows, and that the graph needs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(integers(3))
        self.norm = nn.BatchNorm1d(3, momentum=1.0, affine=False).double()

    def forward(self, x):
        return self.norm(x) + x * self.weight * self.norm.running_mean


def test_an_evaluation_leaves_statistics_that_a_graph_needs_alone(wrap):
    ours = wrap(Statistics())
    slopes = []
    for evaluates in (False, True):
        out = ours.train()(integers(9, 3))
        if evaluates:
            with torch.no_grad():
                ours.eval()(integers(9, 3))
        slopes += torch.autograd.grad(loss_of(out), ours.module.weight)
    assert_close(slopes[1], slopes[0])


# ---- programs that change nothing a graph needs -------------------------------------


class Renewed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(integers(3, 3))
        self.last = nn.Parameter(integers(3, 3, seed=1))

    def forward(self, x):
        self.last.data = self.last.data.clone()
        return (x @ self.first).tanh() @ self.last


class Initialised(nn.Module):
    """Scales that the first batch decides on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(integers(3, 3))
        self.register_buffer("scale", torch.ones(3, **F64))
        self.register_buffer("is_made", torch.tensor(0))

    def forward(self, x):
        if not self.is_made:
            self.scale.copy_(torch.tensor([2.0, 3.0, 4.0]))
            self.is_made.fill_(1)
        return (x @ self.weight).tanh() * self.scale


@pytest.mark.parametrize("kind", [Renewed, Initialised])
def test_two_forwards_before_one_backward(wrap, kind):
    def program(model, module):
        loss = loss_of(model(integers(7, 3))) + model(integers(7, 3, seed=1)).sum()
        loss.backward()
        return loss

    run_both(Twin(wrap, kind()), program)


class Warming(nn.Module):
    """A buffer that is written in training alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(integers(3, 3))
        self.register_buffer("scale", torch.ones(3, **F64))

    def forward(self, x):
        if self.training:
            self.scale.mul_(2)
        return (x @ self.weight).square() * self.scale


def test_an_evaluation_may_come_before_the_backward(wrap):
    def program(model, module):
        model.train()
        loss = loss_of(model(integers(7, 3)))
        model.eval()
        with torch.no_grad():
            model(integers(7, 3, seed=1))
        loss.backward()
        return loss

    twin = Twin(wrap, Warming())
    for _ in range(2):
        run_both(twin, program)


def test_a_tensor_that_a_forward_keeps_stays_as_it_is(wrap):
    kept = []

    class Keeps(nn.Linear):
        def forward(self, x):
            kept.append(self.weight.detach())
            return super().forward(x)

    ours = wrap(integer_weights(Keeps(3, 2)))
    with torch.no_grad():
        ours(integers(7, 3))
        expected = kept[0].clone()
        ours.module.weight.mul_(2)
        ours(integers(7, 3))
    n_replicas = len(kept) // 2
    for tensor in kept[1:n_replicas]:  # replica 0's is the weight itself
        assert_close(tensor, expected)
    for tensor in kept[n_replicas:]:
        assert_close(tensor, ours.module.weight.detach())


# ---- and what it costs --------------------------------------------------------------


def blocks_of(ours):
    layout = ours._gpu_engine(ours.device_ids)._replicated._layout
    return [b for segment in layout.segments for b in segment.blocks if b is not None]


def norm_net():
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()


def test_a_loop_uses_the_same_blocks_in_all_steps(wrap):
    ours = wrap(norm_net())
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    seen = set()
    for is_training in (True, False):
        ours.train(is_training)
        for _ in range(20):
            optimizer.zero_grad()
            with torch.set_grad_enabled(is_training):
                loss = ours(integers(7, 3)).square().sum()
            if is_training:
                loss.backward()
                optimizer.step()
            blocks = blocks_of(ours)
            seen |= set(map(id, blocks))
    assert len(seen) == len(blocks)


def test_a_block_is_given_back_with_the_graph_that_held_it(wrap):
    ours = wrap(smooth_net())
    first = ours(integers(7, 3))
    (block, *_) = blocks_of(ours)
    second = ours(integers(7, 3))
    (other, *_) = blocks_of(ours)
    assert other is not block
    loss_of(first + second).backward()
    ours(integers(7, 3))
    assert blocks_of(ours)[0] is other


class Cyclic(nn.Module):
    """Its replicas lead to themselves: only the garbage collector frees them."""

    def __init__(self):
        super().__init__()
        self.inner = smooth_net()
        self.call = self.apply_inner

    def apply_inner(self, x):
        return self.inner(x)

    def forward(self, x):
        return self.call(x)


@pytest.mark.parametrize("is_old", [False, True], ids=["young", "old"])
def test_replicas_in_circles_do_not_take_ever_more_memory(wrap, monkeypatch, is_old):
    ours = wrap(Cyclic())
    kept = []
    collect = gc.collect
    if is_old:  # they have outlived collections, so that one of the young frees none
        old = {"collect": lambda generation: generation == 2 and collect()}
        monkeypatch.setattr(segments, "gc", SimpleNamespace(**old))
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            for _ in range(30):
                ours(integers(7, 3))
                kept += [StorageWeakRef(b.untyped_storage()) for b in blocks_of(ours)]
                n_blocks = len({ref.cdata for ref in kept if not ref.expired()})
                assert n_blocks <= 8 * len(blocks_of(ours))
    finally:
        gc.enable()


def test_the_garbage_collector_is_not_called_where_nothing_is_held(wrap, monkeypatch):
    calls = []
    monkeypatch.setattr(segments.gc, "collect", lambda *generation: calls.append(1))
    for model in (wrap(norm_net()), wrap(nn.ReLU())):
        for _ in range(5):
            model(integers(7, 3)).square().sum()
    assert not calls


# ---- buffers that change their size -------------------------------------------------


class Resizes(nn.Module):
    def __init__(self, n_elems, n_later=20):
        super().__init__()
        self.n_later = n_later
        self.weight = nn.Parameter(integers(3))
        self.register_buffer("range", torch.zeros(n_elems, **F64))
        self.register_buffer("after", integers(3, seed=2))
        self.frozen = nn.Parameter(integers(3, seed=3), requires_grad=False)

    def forward(self, x):
        self.range.resize_(self.n_later).fill_(5)
        return x * self.weight * self.after + self.frozen + self.range[1]


def test_a_buffer_without_elements_may_be_given_some(wrap):
    twin = Twin(wrap, Resizes(0))
    for _ in range(3):
        twin.zero()
        twin.step(lambda model, x: loss_of(model(x)), integers(7, 3))


def test_a_buffer_that_outgrows_its_place_is_an_error_that_names_it(wrap):
    twin = Twin(
        wrap, nn.Sequential(nn.BatchNorm1d(3, eps=0).double().eval(), Resizes(1))
    )
    with pytest.raises(
        RuntimeError, match=r"'1\.range'.*1 to 20 elements.*before it is"
    ):
        twin.ours(integers(7, 3))
    twin.plain(integers(7, 3))
    for _ in range(2):
        twin.zero()
        twin.step(lambda model, x: loss_of(model(x)), integers(7, 3))


def test_a_buffer_that_outgrows_its_place_explains_what_else_goes_wrong(wrap):
    class Fails(Resizes):
        def forward(self, x):
            out = super().forward(x)
            if self.after[0] == 5:
                raise IndexError("because of what lies behind it")
            return out

    with pytest.raises(RuntimeError, match="'range'"):
        wrap(Fails(1))(integers(7, 3))


def test_a_buffer_that_only_replicas_let_grow_does_no_lasting_harm(wrap):
    class GrowsLate(Resizes):
        def forward(self, x):
            if x[0, 0] == 0:
                return x * self.weight * self.after
            return super().forward(x)

    twin = Twin(wrap, GrowsLate(1))
    x = torch.zeros(6, 3, **F64)
    twin.step(lambda model, x: loss_of(model(x)), x)
    late = x.clone()
    late[-1] = late[-2] = late[-3] = 1
    with pytest.raises(RuntimeError, match="'range'"):
        twin.ours(late)
    twin.zero()
    twin.step(lambda model, x: loss_of(model(x)), x)


def test_a_buffer_may_take_other_memory_or_less_of_its_own(wrap):
    class Takes(Resizes):
        def forward(self, x):
            self.range.data = torch.full((30,), 7.0, **F64)
            self.after.resize_(1)
            return x * self.weight * self.after + self.range[1]

    twin = Twin(wrap, Takes(1))
    for _ in range(2):
        twin.zero()
        twin.step(lambda model, x: loss_of(model(x)), integers(7, 3))


class Observed(nn.Module):
    """Weights whose ranges an observer has, a channel each."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 5), dtype=torch.float32)
        self.observer = quantization.PerChannelMinMaxObserver()
        self.norm = nn.BatchNorm1d(5, eps=0).eval()

    def forward(self, x):
        self.observer(self.linear.weight)
        return self.norm(self.linear(x)) + self.observer.max_val


def test_an_observer_by_channel_sees_its_first_batch(wrap):
    twin = Twin(wrap, Observed())
    for _ in range(2):
        twin.zero()
        x = integers(7, 3, dtype=torch.float32)
        twin.step(lambda model, x: loss_of(model(x)), x)


# ---- weights and gradients that are to be conjugated or negated ---------------------


class Times(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        out = x * self.weight
        return torch.view_as_real(out).sum(-1) if out.is_complex() else out


COMPLEX = torch.complex(integers(3), integers(3, seed=1))


@pytest.mark.parametrize(
    ("weight", "change"),
    [(COMPLEX, torch.conj), (integers(3), torch._neg_view)],
    ids=["conjugated", "negated"],
)
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_weight_may_be_a_lazy_view(wrap, weight, change, is_recorded):
    twin = Twin(wrap, Times(weight))
    with torch.set_grad_enabled(is_recorded):
        for _ in range(2):
            twin.compare(lambda model: model(integers(7, 3)))
            for module in modules_of(twin):
                module.weight.data = change(module.weight.data)
    if is_recorded:
        twin.step(lambda model: loss_of(model(integers(7, 3))))


class NegatedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch._neg_view(grad.clone())


def test_gradients_that_are_lazily_negated_keep_their_sign(wrap):
    class Negates(Times):
        def forward(self, x):
            return x * NegatedGradient.apply(self.weight)

    twin = Twin(wrap, Negates(integers(3)))
    twin.step(lambda model: loss_of(model(integers(7, 3))))


def test_the_imaginary_part_of_a_conjugate_is_trained(wrap):
    class Rotates(nn.Module):
        def __init__(self):
            super().__init__()
            self.real = nn.Parameter(torch.tensor(2.0, **F64))
            self.imag = nn.Parameter(torch.tensor(3.0, **F64))

        def forward(self, x):
            out = x * torch.complex(self.real, self.imag).conj()
            return torch.view_as_real(out.resolve_conj())

    twin = Twin(wrap, Rotates())
    twin.step(lambda model: loss_of(model(COMPLEX.repeat(3).unsqueeze(1))))
