"""DataParallel on several GPUs where a program does what few do."""

import copy
import gc
import threading
import weakref

import paceline
import pytest
import torch
from gpu_programs import Parent, linear
from paceline._dp.gpus import segments
from replicas import assert_same, assert_same_grads, integer_weights, integers, loss_of
from support import fake_gpus
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def gpus():
    with fake_gpus.several(3) as machine:
        yield machine


def twins(module):
    """Return a module, and a copy of it behind a wrapper of three GPUs."""
    return module, paceline.DataParallel(copy.deepcopy(module))


# ---- gradients ----------------------------------------------------------------------


class SparseLookup(nn.Module):
    """A table of which some replicas have sparse gradients, and others dense ones."""

    def __init__(self, first_dense):
        super().__init__()
        self.table = nn.Parameter(integers(8, 3))
        self.last = linear(3, 2)
        self.first_dense = first_dense

    def forward(self, indices):
        is_dense = bool((indices >= self.first_dense).any())
        return self.last(functional.embedding(indices, self.table, sparse=not is_dense))


@pytest.mark.parametrize("first_dense", [8, 5], ids=["all", "some"])
def test_sparse_gradients_of_a_plain_parameter_are_added_up(first_dense):
    plain, ours = twins(SparseLookup(first_dense))
    indices = torch.tensor([1, 2, 3, 1, 0, 4, 1, 3, 7])
    for model in (plain, ours):
        loss_of(model(indices)).backward()
    mine, theirs = ours.module.table.grad, plain.table.grad
    assert_same(mine.to_dense(), theirs.to_dense())
    assert mine.is_sparse == (first_dense == 8)
    assert_same_grads(ours.module.last, plain.last)


def test_sparse_gradients_may_be_asked_for_with_a_graph():
    plain, ours = twins(SparseLookup(first_dense=8))
    indices = torch.tensor([1, 2, 3, 1, 0, 4, 1, 3, 7])
    found = []
    for model in (plain, ours):
        parameters = list(model.parameters())
        grads = torch.autograd.grad(
            loss_of(model(indices)), parameters, create_graph=True
        )
        found.append([grad.detach().to_dense() for grad in grads])
    assert_same(*found)


class GivesNone(torch.autograd.Function):
    """Adds two tensors, of which the first gets a gradient."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Addition(nn.Module):
    """Adds a parameter that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(integers(64, 64))
        self.last = linear(3, 2)

    def forward(self, x):
        return self.last(GivesNone.apply(x, self.table[0, :3]))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("segment_bytes", [1 << 10, 1 << 20], ids=["alone", "beside"])
def test_a_parameter_may_get_no_gradient_though_it_is_used(
    monkeypatch, create_graph, segment_bytes
):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", segment_bytes)
    plain, ours = twins(Addition())
    found = []
    for model in (plain, ours):
        loss = loss_of(model(integers(7, 3)))
        parameters = list(model.parameters())
        ways = {"create_graph": create_graph, "allow_unused": True}
        table, *grads = torch.autograd.grad(loss, parameters, **ways)
        assert table is None
        found.append([grad.detach() for grad in grads])
    assert_same(*found, exact=False)


class OddBuffers(nn.Module):
    """Has a buffer that is none yet, and one that is a parameter, too."""

    def __init__(self):
        super().__init__()
        self.layer = linear(3, 2)
        self.register_buffer("nothing", None)
        self.register_buffer("bias", self.layer.bias)

    def forward(self, x):
        assert self.nothing is None
        return self.layer(x) + self.bias


def test_a_buffer_may_be_none_or_a_parameter():
    plain, ours = twins(OddBuffers())
    for seed in range(2):
        for model in (plain, ours):
            loss_of(model(integers(7, 3, seed=seed))).backward()
        assert_same_grads(ours, plain)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_a_parameter_may_be_given_other_strides():
    plain, ours = twins(linear(4, 4))
    x = integers(7, 4)
    for lies_otherwise in (False, True, True):
        for model in (plain, ours.module):
            if lies_otherwise:
                model.weight.data = model.weight.data.t().contiguous().t()
        assert_same(ours(x), plain(x))
        for model in (plain, ours):
            loss_of(model(x)).backward()
        assert_same_grads(ours, plain)


class Leaves(nn.Module):
    """Uses two of three layers."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.last = linear(3, 3), linear(3, 3), linear(3, 2)

    def forward(self, x):
        return self.last(self.first(x))


def test_hooks_of_what_no_replica_uses_are_not_called():
    plain, ours = twins(Leaves())
    called = []
    for model in (plain, ours.module):
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda grad, name=name: called.append(name))
    for model in (plain, ours):
        loss_of(model(integers(7, 3))).backward()
        assert sorted(set(called)) == [
            "first.bias",
            "first.weight",
            "last.bias",
            "last.weight",
        ]
        called.clear()
    assert_same_grads(ours, plain)


@pytest.mark.parametrize("name", ["left.weight", "left.bias"])
@pytest.mark.parametrize("is_late", [False, True])
def test_hooks_of_one_parameter_that_no_replica_uses_are_not_called(name, is_late):
    plain, ours = twins(Leaves())
    called = []
    if is_late:
        ours(integers(7, 3))
    for model in (plain, ours.module):
        model.get_parameter(name).register_hook(called.append)
    for model in (plain, ours):
        loss_of(model(integers(7, 3))).backward()
    assert called == []
    assert_same_grads(ours, plain)


class Descends(nn.Module):
    """Runs a backward within its forward, where its first row wants one."""

    def __init__(self):
        super().__init__()
        self.layer = linear(3, 2)

    def forward(self, x):
        if x[0, 0] > 0:
            with torch.enable_grad():
                self.layer(x).square().sum().backward()
        return self.layer(x)


@torch.no_grad()
def test_other_replicas_alone_may_run_a_backward_within_a_forward():
    plain, ours = twins(Descends())
    x = integers(7, 3)
    x[:3, 0], x[3:, 0] = -1, 1
    ours(x)
    plain(x[3:])
    assert_same_grads(ours, plain)


def test_several_threads_run_backward_through_one_graph():
    plain, ours = twins(nn.Sequential(linear(3, 4), linear(4, 2)))
    x = integers(7, 3)
    ours(x)  # the first forward is another one
    wanted = torch.autograd.grad(loss_of(plain(x)), list(plain.parameters()))
    loss = loss_of(ours(x))
    parameters = list(ours.parameters())
    found = []

    def run():
        for _ in range(20):
            try:
                found.append(torch.autograd.grad(loss, parameters, retain_graph=True))
            except Exception as error:
                found.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    for gradients in found:
        assert_same(gradients, wanted)


class Checkpointed(nn.Module):
    """A layer in a checkpoint, before or behind one that is in none."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = linear(3, 3), linear(3, 3)

    def forward(self, x):
        if x.detach()[0, 0] > 0:
            return checkpoint(
                self.inner, self.outer(x), use_reentrant=True, preserve_rng_state=False
            )
        for _ in range(5):  # the checkpoint's backward goes before another replica's
            x = x * 1
        within = checkpoint(self.inner, x, use_reentrant=True, preserve_rng_state=False)
        return self.outer(within)


def test_a_reentrant_checkpoint_runs_in_the_middle_of_a_backward():
    plain, ours = twins(Checkpointed())
    x = integers(6, 3)
    x[::2, 0] = torch.tensor([-1, -1, 1], dtype=x.dtype)
    for _ in range(1000):
        torch.ones(1, requires_grad=True) * 1  # the caller's nodes come first
    for _ in range(2):
        rows = x.clone().requires_grad_()
        loss_of(ours(rows)).backward()
    weights = torch.arange(1.0, 19, dtype=x.dtype).reshape(6, 3)
    for _ in range(2):  # each replica has two rows
        for part, weight in zip(x.split(2), weights.split(2), strict=True):
            (plain(part.clone().requires_grad_()) * weight).sum().backward()
    assert_same_grads(ours, plain)


class Unused(nn.Module):
    """A layer that is used, and one that is not."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = linear(3, 2), linear(3, 2)

    def forward(self, x):
        return self.used(x)


def test_hooks_set_after_the_forward_get_zeros_for_unused_parameters_as_in_torch():
    _, ours = twins(Unused())
    output = ours(integers(7, 3))
    unused, called = ours.module.unused, []
    unused.weight.register_hook(called.append)
    unused.bias.register_post_accumulate_grad_hook(lambda p: called.append(p.grad))
    output.sum().backward()
    assert [grad.shape for grad in called] == [(2, 3), (2,)]
    assert not any(grad.any() for grad in called)


class Counting(nn.Module):
    """A buffer that the graph needs, and another one that each forward changes."""

    def __init__(self):
        super().__init__()
        self.layer = linear(3, 3)
        self.register_buffer("scale", integers(3))
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.n_calls += 1
        return self.layer(x) * self.scale


def test_two_forwards_before_two_backwards_while_a_counter_goes_on():
    plain, ours = twins(Counting())
    for model in (plain, ours):
        first, second = model(integers(7, 3)), model(integers(7, 3, seed=1))
        loss_of(first).backward()
        loss_of(second).backward()
    assert_same_grads(ours, plain)
    assert_same(ours.module.n_calls, plain.n_calls)


class Heads(nn.Module):
    """Two halves that have nothing in common."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(linear(3, 3), linear(3, 2))
        self.other = nn.Sequential(linear(3, 3), linear(3, 2))

    def forward(self, x):
        return self.one(x), self.other(x)


def step_one_half(model, bare):
    """Run backward of the other half after a step, and a forward, of the one."""
    x = integers(7, 3)
    optimizer = torch.optim.SGD(bare.one.parameters(), lr=1.0)
    one, other = model(x)
    loss_of(one).backward()
    optimizer.step()
    model(x)
    loss_of(other).backward()
    return one


def test_a_graph_lives_on_while_other_parameters_are_trained():
    plain, ours = twins(Heads())
    step_one_half(plain, plain)
    step_one_half(ours, ours.module)
    assert_same_grads(ours, plain)


def test_a_graph_does_not_use_parameters_that_were_overwritten():
    plain, ours = twins(Heads())
    for model, bare in ((plain, plain), (ours, ours.module)):
        x = integers(7, 3)
        one, _ = model(x)
        with torch.no_grad():
            bare.one[1].weight.add_(1)
        model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(one[5:]).backward()


# ---- parameters ---------------------------------------------------------------------


class Waiting(nn.Module):
    """A counter that a forward writes through ``data``."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        self.count.data += 1
        return x + self.count


def test_what_a_replica_writes_through_data_does_not_outlive_the_call():
    ours = paceline.DataParallel(Waiting()).eval()
    with torch.no_grad():
        for _ in range(3):
            ours.module.count.data.zero_()
            assert_same(ours(torch.zeros(6, 1).double()), torch.ones(6, 1).double())


CHANGES = {
    "dtype": lambda model: model.float(),
    "strides": lambda model: model.to(memory_format=torch.channels_last),
    "shape": lambda model: setattr(
        model[0].weight, "data", torch.ones(1, 2, 3, 3).double()
    ),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_parameters_take_another_form_between_forward_and_backward(what, create_graph):
    module = integer_weights(
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1))
    )
    found = []
    for model in twins(module):
        x = integers(7, 2, 4, 4, low=-1, high=1)
        output, bare = model(x), getattr(model, "module", model)
        CHANGES[what](bare)
        # Of the last layer alone: what the first one needs has changed.
        last = bare[1].parameters()
        try:
            gradients = torch.autograd.grad(
                loss_of(output), list(last), create_graph=create_graph
            )
            found.append([gradient.detach() for gradient in gradients])
        except RuntimeError as error:
            found.append(str(error))
    assert_same(found[1], found[0])


# ---- calls --------------------------------------------------------------------------


class CallsAgain(paceline.DataParallel):
    """Calls itself where it gathers, for rows of zeros."""

    is_within = False

    def gather(self, outputs, output_device):
        joined = super().gather(outputs, output_device)
        if self.is_within:
            return joined
        self.is_within = True
        try:
            return joined - self(torch.zeros(7, 3).double())
        finally:
            self.is_within = False


def test_a_gather_may_call_the_wrapper():
    plain = linear(3, 2)
    ours = CallsAgain(copy.deepcopy(plain))
    found = []
    thread = threading.Thread(
        target=lambda: found.append(ours(integers(7, 3))), daemon=True
    )
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert_same(found[0], plain(integers(7, 3)) - plain.bias)


class PackedPair(nn.Module):
    """Gives a packed sequence within a tuple."""

    def forward(self, x):
        packed = nn.utils.rnn.pack_sequence(list(x))
        return packed, x.sum(1)


def test_packed_sequences_are_joined_within_a_tuple():
    plain, ours = twins(PackedPair())
    assert_same(ours(integers(7, 3, 2)), plain(integers(7, 3, 2)))


class Buffered(nn.Module):
    """Scales its inputs by a buffer, and runs a backward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", integers(3).requires_grad_())

    def forward(self, x):
        with torch.enable_grad():
            out = x * self.scale
            out.square().sum().backward()
        return out.detach()


def test_a_backward_in_a_forward_without_gradients_reaches_a_buffer():
    plain, ours = twins(Buffered())
    for model in (plain, ours):
        with torch.no_grad():
            model(integers(7, 3))
    assert_same(ours.module.scale.grad, plain.scale.grad)


def test_a_buffer_that_becomes_part_of_a_graph_in_place_is_none_that_is_thawed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear(3, 2)
            self.register_buffer("shift", torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            self.shift.add_(self.layer.bias)
            return self.layer(x) + self.shift

    plain, ours = twins(Net())
    for model in (plain, ours):
        loss_of(model(integers(7, 3))).backward()
    assert_same_grads(ours, plain)


# ---- what is seen late --------------------------------------------------------------


@pytest.mark.parametrize("how", ["set", "replaced"])
def test_max_norm_may_come_after_wrapping(how):
    plain, ours = twins(nn.Sequential(nn.Embedding(8, 3).double(), linear(3, 2)))
    rows = torch.arange(8)
    ours(rows)
    for model in (plain, ours.module):
        if how == "replaced":
            model[0] = nn.Embedding(8, 3, _weight=integers(8, 3))
        model[0].max_norm = 0.5
    assert_same(ours(rows), plain(rows))
    assert_same(ours.module[0].weight, plain[0].weight)


# ---- memory -------------------------------------------------------------------------


def test_parameters_of_a_functional_call_are_let_go():
    parent = Parent(paceline.DataParallel(linear(3, 2)))
    given = {name: p * 2 for name, p in parent.named_parameters()}
    kept = [weakref.ref(tensor) for tensor in given.values()]
    torch.func.functional_call(parent, given, (integers(7, 3),)).sum().backward()
    del given
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_an_evaluation_within_one_autocast_does_not_grow():
    model = paceline.DataParallel(nn.Linear(1000, 1000))
    x = torch.ones(8, 1000)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            model(x)
        before = resident_bytes()
        for _ in range(30):
            model(x)
        assert resident_bytes() - before < 60e6  # of 120 MB that casts would be
