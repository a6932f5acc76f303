"""Process groups that are neither Gloo nor NCCL: their own collectives carry all.

Groups in Python over Gloo stand for any other kind; torch's own class over the same
group, or over Gloo itself, is the reference.  Two ranks, where bits are compared: then
a sum is rounded once, whoever takes it.
"""

import copy
import gc
import pickle
import threading
import time
import weakref

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import (
    FailsInBackward,
    apart,
    assert_equal,
    gloo_takes_complex,
    integer_weights,
    mean_over,
    net,
    on_ranks,
)
from support.ranks import run_ranks, values
from support.waiting import until
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


class WaitOnly(dist.Work):
    def __init__(self, work, counts):
        super().__init__()
        self.work, self.counts = work, counts

    def wait(self, timeout=None):
        self.counts["wait"] = self.counts.get("wait", 0) + 1
        return self.work.wait()


class FutureOnly(dist.Work):
    """The inherited wait() of such a Work never returns."""

    def __init__(self, work, counts):
        super().__init__()
        self.work, self.counts = work, counts

    def get_future(self):
        self.counts["get_future"] = self.counts.get("get_future", 0) + 1
        return self.work.get_future()


class Over(dist.ProcessGroup):
    """A group in Python over another; it counts its calls."""

    def __init__(self, inner, works=None):
        super().__init__(inner.rank(), inner.size())
        self.inner, self.works, self.counts = inner, works, {}
        self.fails_at = None

    def begin(self, kind, *args):
        n = self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.fails_at is not None and kind == "allreduce" and n >= self.fails_at:
            raise ConnectionError("the cable is out")
        work = getattr(self.inner, kind)(*args)
        return work if self.works is None else self.works(work, self.counts)

    # As torch calls them, with options.
    def allreduce(self, tensors, opts):
        return self.begin("allreduce", tensors, opts)

    def broadcast(self, tensors, opts):
        return self.begin("broadcast", tensors, opts)

    def allgather(self, outputs, inputs, opts):
        return self.begin("allgather", outputs, inputs, opts)

    def getBackendName(self):
        return "over"


KINDS = {"its own": None, "wait only": WaitOnly, "get_future only": FutureOnly}


def wrap_over(group, module, **options):
    return paceline.DistributedDataParallel(module, process_group=group, **options)


class Net(nn.Module):
    """Sparse and dense, small and large, unused and frozen, with buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(30, 8, sparse=True)
        self.norm = nn.BatchNorm1d(8)
        self.wide = nn.Linear(8, 1500)
        self.out = nn.Linear(1500, 2).double()
        kind = torch.complex64 if gloo_takes_complex() else torch.float32
        self.turn = nn.Parameter(torch.randn(2, dtype=kind))
        self.brief = nn.Parameter(torch.randn(3).bfloat16())
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        x = self.out(self.wide(self.norm(self.table(x))).tanh().double())
        x = (x.to(self.turn.dtype) * self.turn).abs()
        return self.frozen(x) * self.brief.float().sum()


def train(ranks, model, steps=3, key=()):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        words = torch.randint(30, (5,), generator=ranks.generator("w", step, *key))
        model(words).square().sum().backward()
        optimizer.step()


def assert_alike(ours, theirs, has_buffers=True):
    named = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    for (name, mine), other in named:
        assert_equal(mine, other, name)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        if has_buffers:
            assert torch.equal(mine, other)


# ---- groups in Python ---------------------------------------------------------------


@on_ranks(2, works=[*KINDS])
@pytest.mark.filterwarnings("ignore")
def test_a_group_in_python_carries_all_and_gives_the_bits_of_torch(ranks, works):
    group = Over(ranks.group, KINDS[works])
    ours = wrap_over(group, Net())
    at_construction = dict(group.counts)
    theirs = ranks.wrap_by_torch(Net(), find_unused_parameters=True)
    train(ranks, ours)
    train(ranks, theirs)
    assert_alike(ours, theirs, ranks.rank == 0)
    assert group.counts["allreduce"] > 3
    assert group.counts["broadcast"] > at_construction["broadcast"]  # of buffers
    if works != "its own":
        assert group.counts[{"wait only": "wait"}.get(works, "get_future")] > 3


@on_ranks(4)
def test_four_ranks_over_a_group_in_python_have_exact_means(ranks):
    module = net()
    plain = copy.deepcopy(module)
    ours = wrap_over(Over(ranks.group, WaitOnly), module)
    for step in range(3):
        for model in (ours, plain):
            model.zero_grad()
            model(ranks.integers(2, 6, key=step)).sum().backward()
        for p, mine in zip(plain.parameters(), module.parameters(), strict=True):
            assert_equal(mine.grad, mean_over(ranks.all(p.grad)), f"step {step}")


@on_ranks(2)
def test_gradients_that_a_group_in_python_carries_are_averaged_once(ranks):
    """Also where they are views that stay, and accumulate."""
    module = nn.Linear(200, 100, bias=False)
    nn.init.zeros_(module.weight)
    model = wrap_over(Over(ranks.group), module)
    for step in range(1, 4):
        model(torch.full((1, 200), 2.0 * ranks.rank)).sum().backward()
        assert module.weight.grad.unique().tolist() == [float(step)]
        with model.no_sync():
            model(torch.zeros(1, 200)).sum().backward()


class LazyWork(dist.Work):
    def __init__(self, run):
        super().__init__()
        self._run = run
        self._future = torch.futures.Future()

    def wait(self, timeout=None):
        if not self._future.done():
            self._future.set_result(self._run())
        return True

    def get_future(self):
        return self._future


def test_a_work_that_makes_progress_in_wait_is_waited_for():
    from paceline._ddp.group_comm import wait_for

    done = []
    work = LazyWork(lambda: done.append(1))
    wait_for(work)
    assert done == [1]


# ---- groups of some ranks -----------------------------------------------------------


@on_ranks(4)
def test_a_slice_of_a_mesh_averages_over_its_own_ranks(ranks):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = ranks.integers(2, 3)
    grads = []
    for wrap in (ranks.ours, nn.parallel.DistributedDataParallel):
        wrapper = wrap(copy.deepcopy(model), device_mesh=mesh["dp"])
        wrapper(x).sum().backward()
        grads.append(wrapper.module.weight.grad)
    assert_equal(grads[0], grads[1], "the gradient")


@on_ranks(4)
def test_groups_of_some_ranks_are_averaged_apart(ranks):
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = nn.Linear(100, 100)
    wrapper = paceline.DistributedDataParallel(
        model, process_group=halves[ranks.rank % 2]
    )
    wrapper(torch.full((1, 100), float(ranks.rank))).sum().backward()
    assert model.weight.grad.unique().tolist() == [[1.0], [2.0]][ranks.rank % 2]


# ---- hosts that share no memory -----------------------------------------------------


@on_ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_ranks_that_share_no_memory_give_the_bits_of_torch(ranks):
    with apart():
        ours = ranks.wrap(Net())
    theirs = ranks.wrap_by_torch(Net(), find_unused_parameters=True)
    train(ranks, ours)
    train(ranks, theirs)
    assert_alike(ours, theirs, ranks.rank == 0)


@on_ranks(4)
def test_four_ranks_that_share_no_memory_agree(ranks):
    with apart():
        ours = ranks.wrap(Net())
    train(ranks, ours)
    ranks.assert_same(list(ours.parameters()), "parameters")


# ---- all that a wrapper does --------------------------------------------------------

WORLDS = ["group in Python", "no shared memory"]


def wrapper(ranks, world, module, **options):
    """Wrap over a group in Python, or over ranks apart."""
    if world == "group in Python":
        return wrap_over(Over(ranks.group, FutureOnly), module, **options)
    with apart():
        return ranks.wrap(module, **options)


@on_ranks(2)
def test_hooks_that_issue_more_as_their_futures_come_have_the_group_alone(ranks):
    ends = []
    with apart():
        ours = ranks.wrap(net())
    for model in (ours, ranks.wrap_by_torch(net())):
        state = powerSGD_hook.PowerSGDState(
            ranks.group, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for step in range(5):
            model.zero_grad()
            model(ranks.integers(2, 6, key=step)).sum().backward()
        ends.append([p.grad for p in model.parameters()])
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs)


def plain_step(ranks, model, step):
    model(ranks.integers(2, 6, key=step)).sum().backward()


def accumulating_step(ranks, model, step):
    with model.no_sync():
        plain_step(ranks, model, (step, 0))
    plain_step(ranks, model, step)


def step_of_one_branch(ranks, model, step):
    model.module.goes_left = (step & 1) ^ (step >> 1 & ranks.rank)
    plain_step(ranks, model, step)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 100), nn.Linear(6, 2)
        self.goes_left = True
        integer_weights(self)

    def forward(self, x):
        return (self.left if self.goes_left else self.right)(x)


LOOPS = {
    "accumulation": (net, accumulating_step),
    "a branch left out": (Branches, step_of_one_branch),
    "a communication hook": (net, plain_step),
}


@on_ranks(2, world=WORLDS, loop=[*LOOPS])
@pytest.mark.filterwarnings("ignore")
def test_gradients_over_any_group_are_those_of_torch(ranks, world, loop):
    make, step_of = LOOPS[loop]
    ours = wrapper(ranks, world, make())
    theirs = ranks.wrap_by_torch(make(), find_unused_parameters=make is Branches)
    for model in (ours, theirs):
        if loop == "a communication hook":
            model.register_comm_hook(ranks.group, default_hooks.fp16_compress_hook)
    for step in range(4):
        for model in (ours, theirs):
            model.zero_grad()
            step_of(ranks, model, step)
        for mine, p in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_equal(mine.grad, p.grad, f"step {step}")


@on_ranks(2, world=WORLDS, throws=[False, True])
def test_uneven_inputs_are_those_of_torch(ranks, world, throws):
    ends = []
    for make in (lambda m: wrapper(ranks, world, m), ranks.wrap_by_torch):
        model = make(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        said = None
        try:
            with model.join(throw_on_early_termination=throws):
                for step in range(1 + 2 * ranks.rank):
                    optimizer.zero_grad()
                    model(ranks.integers(2, 6, key=step)).sum().backward()
                    optimizer.step()
        except RuntimeError as error:
            said = str(error).split(".")[0]
        ends.append((said, [p.detach().clone() for p in model.parameters()]))
    assert ends[0][0] == ends[1][0]
    for mine, theirs in zip(ends[0][1], ends[1][1], strict=True):
        if not throws:
            assert_equal(mine, theirs, "a parameter")


@on_ranks(2, world=WORLDS)
def test_a_model_that_is_changed_is_wrapped_anew(ranks, world):
    module = integer_weights(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)))
    with apart():
        model = wrapper(ranks, world, module)
        model(ranks.integers(2, 6)).sum().backward()
        module.append(integer_weights(nn.Linear(2, 2)))
        module.double()
        model.zero_grad()
        model(ranks.integers(2, 6, dtype=torch.float64)).sum().backward()
    ranks.assert_same([p.grad for p in module.parameters()], "gradients")
    assert module[2].weight.grad is not None


@on_ranks(2, how=["deepcopy", "pickle"])
def test_a_copy_trains_over_ranks_that_share_no_memory(ranks, how):
    with apart():
        model = paceline.DistributedDataParallel(net())
        model(ranks.integers(2, 6)).sum().backward()
        clone = (
            copy.deepcopy(model)
            if how == "deepcopy"
            else pickle.loads(pickle.dumps(model))
        )
        clone.zero_grad()
        clone(ranks.integers(2, 6, key=1)).sum().backward()
    ranks.assert_same([p.grad for p in clone.parameters()], "gradients")


@on_ranks(2)
def test_a_wrapper_over_a_group_in_python_is_not_copied_in_the_words_of_torch(ranks):
    model = wrap_over(Over(ranks.group), net())
    with pytest.raises(RuntimeError, match="only supported when using DDP with"):
        copy.deepcopy(model)


@on_ranks(2, world=WORLDS)
def test_models_that_differ_are_an_error_on_every_rank(ranks, world):
    module = nn.Linear(2, 3 + ranks.rank)
    with pytest.raises(paceline.MismatchError, match="rank 0 has parameter 'weight'"):
        wrapper(ranks, world, module)
    wrapper(ranks, world, nn.Linear(2, 3))  # the group is usable


# ---- the fake backend ---------------------------------------------------------------


def train_over_a_fake_group(rank, n_ranks):
    """The backend that torch's own tests use: its collectives do nothing.

    So the sum of two ranks is this rank's own share.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    plain = copy.deepcopy(module)
    model = paceline.DistributedDataParallel(module)
    for step in range(3):
        for one in (model, plain):
            one.zero_grad()
            one(torch.randn(5, 6, generator=torch.Generator().manual_seed(step)))[
                0
            ].sum().backward()
    for mine, p in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, p)
        assert torch.equal(mine.grad, p.grad / 2)
    for mine, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, other)
    return True


def test_a_fake_group_carries_gradients_nowhere():
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    outcomes = run_ranks(train_over_a_fake_group, 2, rendezvous="none")
    assert values(outcomes) == [True, True]


# ---- failures -----------------------------------------------------------------------


@on_ranks(2)
def test_what_a_group_raises_comes_out_of_backward_and_is_said_from_then_on(ranks):
    group = Over(ranks.alone())
    model = wrap_over(group, net())
    model(ranks.integers(2, 6)).sum().backward()
    group.fails_at = group.counts["allreduce"] + 1
    with pytest.raises(ConnectionError, match="the cable is out"):
        model(ranks.integers(2, 6)).sum().backward()
    group.fails_at = None
    for _ in range(2):
        with pytest.raises(paceline.PeerError) as caught:
            model(ranks.integers(2, 6)).sum().backward()
        assert "rank 0" in str(caught.value)
        assert "the cable is out" in str(caught.value)
        assert "wrap the model anew on every rank" in str(caught.value)
    module = model.module
    del model, caught  # whose traceback has the loss, and so the wrapper
    gc.collect()
    again = wrap_over(group, module)
    again(ranks.integers(2, 6)).sum().backward()


@on_ranks(2)
def test_what_a_group_raises_at_its_wait_comes_out_of_backward(ranks):
    class Broken(dist.Work):
        def __init__(self, work, counts):
            super().__init__()
            self.work = work

        def get_future(self):
            future = self.work.get_future()
            return future.then(lambda fut: {}["mine"]) if armed else future

    armed = []
    model = wrap_over(Over(ranks.alone(), Broken), net())
    armed.append(1)
    with pytest.raises(RuntimeError, match="mine"):
        model(ranks.integers(2, 6)).sum().backward()
    armed.clear()
    with pytest.raises(paceline.PeerError, match="mine"):
        model(ranks.integers(2, 6)).sum().backward()


class FailsWhenAsked(nn.Module):
    """Has a backward that raises, between its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, fails=False):
        y = self.first(x)
        return self.second(FailsInBackward.apply(y, KeyError("mine")) if fails else y)


@on_ranks(2, n_before=[0, 1, 3], again=[1, 2])
def test_a_backward_that_failed_on_all_ranks_of_a_group_is_left_behind(
    ranks, n_before, again
):
    """Nothing of it had been issued: to the group it has not begun."""
    model, plain = wrap_over(Over(ranks.group), FailsWhenAsked()), FailsWhenAsked()
    plain.load_state_dict(model.module.state_dict())
    theirs = ranks.wrap_by_torch(plain)
    for k in range(n_before):
        model(ranks.integers(2, 6, key=(k,))).sum().backward()
    for _ in range(again):
        with pytest.raises(KeyError, match="mine"):
            model(ranks.integers(2, 6), True).sum().backward()
    for k in range(3):
        for one in (model, theirs):
            one.zero_grad()
            one(ranks.integers(2, 6, key=(k, 1))).sum().backward()
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


@on_ranks(2)
def test_a_backward_that_failed_is_run_again_over_a_group(ranks):
    """On one rank alone, on the same graph: the other waits, and knows of nothing."""
    model = wrap_over(Over(ranks.group), FailsWhenAsked())
    loss = model(torch.ones(1, 6)).sum()
    if ranks.rank == 0:
        handle = model.module.second.weight.register_hook(lambda grad: {}["mine"])
        with pytest.raises(KeyError, match="mine"):
            loss.backward(retain_graph=True)
        handle.remove()
    model.zero_grad()
    loss.backward()
    ranks.assert_same([p.grad for p in model.parameters()], "gradients")


@on_ranks(2)
def test_a_rank_that_skips_a_failed_backward_alone_is_told_of_over_a_group(ranks):
    model = wrap_over(Over(ranks.group), FailsWhenAsked())
    model(torch.ones(1, 6)).sum().backward()
    if ranks.rank == 0:
        with pytest.raises(KeyError, match="mine"):
            model(torch.ones(1, 6), True).sum().backward()
    x = torch.full((1, 6), 1.0 + ranks.rank)
    alone = copy.deepcopy(model.module)
    model.zero_grad()
    alone.zero_grad()
    alone(x).sum().backward()
    with pytest.raises(paceline.MismatchError, match="not in the same step"):
        model(x).sum().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), "no mean of two steps is given out"
    model.zero_grad()
    model(x).sum().backward()
    ranks.assert_same([p.grad for p in model.parameters()], "gradients")


@on_ranks(2, why=["buckets", "buffers"])
def test_a_backward_that_failed_late_over_a_group_is_said_from_then_on(ranks, why):
    """Operations were issued, or the next forward has to issue some."""
    model = FailsWhenAsked()
    if why == "buffers":
        model.register_buffer("seen", torch.zeros(1))
    model = wrap_over(Over(ranks.group), model, bucket_cap_mb=1e-5)
    for _ in range(2):
        model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(1, 6), True).sum().backward()
    with pytest.raises(paceline.PeerError, match="wrap the model anew on every rank"):
        model(torch.ones(1, 6)).sum().backward()


def lose_a_peer(rank, n_ranks):
    import os

    with apart():
        model = paceline.DistributedDataParallel(net())
        model(torch.ones(2, 6)).sum().backward()
        if rank == 1:
            os._exit(3)
        model(torch.ones(2, 6)).sum().backward()


def test_ranks_that_share_no_memory_hear_of_a_death_from_their_group():
    first, second = run_ranks(lose_a_peer, 2, timeout=30)
    assert second.exitcode == 3
    assert first.error is not None
    assert first.error.kind in ("RuntimeError", "PeerError")


# ---- ends ---------------------------------------------------------------------------


@on_ranks(2, first=["wrapper", "group"], world=WORLDS)
def test_wrapper_and_group_may_go_in_any_order(ranks, first, world):
    held = dist.new_group()
    group = Over(held)
    if world == "group in Python":
        model = wrap_over(group, net())
    else:
        with apart():
            model = wrap_over(held, net())
    x = ranks.integers(2, 6)
    model(x).sum().backward()
    gone = weakref.ref(model._session.world)
    grads = [p.grad for p in model.parameters()]
    expected = [g.clone() for g in grads]
    parameters = list(model.parameters())
    if first == "wrapper":
        del model
        gc.collect()
        dist.destroy_process_group(held)
    else:
        dist.destroy_process_group(held)
        del group
        gc.collect()
        model.module(x).sum()
        del model
    for grad, values_then in zip(grads, expected, strict=True):
        assert torch.equal(grad, values_then)
    del grads, grad, parameters, values_then
    gc.collect()
    # A thread of Gloo's may still hold the last operation, and the memory that it used.
    assert until(lambda: gone() is None)


@on_ranks(2)
def test_a_work_in_flight_when_its_wrapper_dies_keeps_its_memory_and_no_more(ranks):
    ends = []

    class Slow(dist.Work):
        """Holds the tensors until it is told to end, as a real one does."""

        def __init__(self, tensors):
            super().__init__()
            self.future = torch.futures.Future()
            self.tensors = tensors

        def get_future(self):
            return self.future

    class Sluggish(Over):
        def allreduce(self, tensors, opts):
            if not armed:
                return super().allreduce(tensors, opts)
            work = Slow(tensors)
            kept.append(work)

            def end():
                time.sleep(0.2)
                for tensor in work.tensors:
                    tensor.add_(1)  # into memory that must still be there
                ends.append(work.tensors[0].clone())
                kept.remove(work)
                del work.tensors

            threads.append(threading.Thread(target=end))
            threads[-1].start()
            return work

    armed, kept, threads = [], [], []
    model = wrap_over(Sluggish(ranks.alone()), net(), bucket_cap_mb=0.001)

    def fail(grad):
        raise KeyError("mine")

    model(ranks.integers(2, 6)).sum().backward()
    armed.append(1)
    x = ranks.integers(2, 6).requires_grad_()
    x.register_hook(fail)
    with pytest.raises(KeyError):
        model(x).sum().backward()
    gone = weakref.ref(model._session.world)
    del model, x
    gc.collect()
    for thread in threads:
        thread.join()
    assert ends
    gc.collect()
    assert gone() is None


@on_ranks(2)
def test_a_hundred_wrappers_over_groups_in_python_leave_nothing(ranks):
    def count():
        gc.collect()
        return len(gc.get_objects())

    alone = ranks.alone()

    def make():
        model = wrap_over(Over(alone), nn.Linear(6, 2))
        for _ in range(2):
            model(torch.ones(1, 6)).sum().backward()

    for _ in range(3):
        make()
    before = count()
    for _ in range(100):
        make()
    assert abs(count() - before) < 50
