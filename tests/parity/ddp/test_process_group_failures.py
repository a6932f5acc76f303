"""Failures in process groups of other kinds, and orders in which objects end."""

import copy
import gc
import threading
import time
import weakref

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import apart, assert_same_grads, net, on_ranks, step_of
from support.failing import FailsInBackward
from support.groups import Over, wrap_over
from support.waiting import until
from torch import nn

# ---- failures -----------------------------------------------------------------------


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
    del model, caught  # its traceback refers to the loss, and so to the wrapper
    gc.collect()
    again = wrap_over(group, module)
    again(ranks.integers(2, 6)).sum().backward()


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
    """Raises on request, between its layers: in forward or in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, fails=False):
        y = self.first(x)
        if fails == "forward":
            raise KeyError("mine")
        return self.second(FailsInBackward.apply(y, KeyError("mine")) if fails else y)


@on_ranks(n_before=[0, 1, 3], fails=["forward", "backward"])
def test_what_failed_on_all_ranks_of_a_group_is_left_behind(ranks, n_before, fails):
    model, plain = wrap_over(Over(ranks.group), FailsWhenAsked()), FailsWhenAsked()
    plain.load_state_dict(model.module.state_dict())
    theirs = ranks.wrap_by_torch(plain)
    for k in range(n_before):
        model(ranks.integers(2, 6, key=(k,))).sum().backward()
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            model(ranks.integers(2, 6), fails).sum().backward()
    for k in range(3):
        for one in (model, theirs):
            one.zero_grad()
            one(ranks.integers(2, 6, key=(k, 1))).sum().backward()
        assert_same_grads(model, theirs, k)


@on_ranks(has_buffer=[False, True])
def test_a_rank_that_leaves_out_a_step_alone_is_told_of_over_a_group(ranks, has_buffer):
    model = FailsWhenAsked()
    if has_buffer:
        model.register_buffer("seen", torch.zeros(1))
    model = wrap_over(Over(ranks.group), model)
    model(torch.ones(1, 6)).sum().backward()
    if ranks.rank == 0:
        with pytest.raises(KeyError, match="mine"):
            model(torch.ones(1, 6), "forward").sum().backward()
    x = torch.full((1, 6), 1.0 + ranks.rank)
    alone = copy.deepcopy(model.module)
    model.zero_grad()
    step_of(alone, x)
    with pytest.raises(paceline.MismatchError, match="not in the same step"):
        model(x).sum().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), "no mean of two steps is given out"
    step_of(model, x)
    ranks.assert_same([p.grad for p in model.parameters()], "gradients")


@on_ranks(2, 3, why=["early", "late", "in a hook", "buffers"])
def test_a_backward_that_fails_on_a_rank_fails_on_all_over_a_group(ranks, why):
    """The group cannot tell of it: the rank ends the step with zeros."""
    model = FailsWhenAsked()
    if why == "buffers":
        model.register_buffer("seen", torch.zeros(1))
    caps = {} if why == "early" else {"bucket_cap_mb": 1e-5}
    model = wrap_over(Over(ranks.group), model, **caps)
    for i in range(12):
        culprit = i // 3 % ranks.n if i % 3 == 2 else None
        x = torch.full((1, 6), 1.0 + ranks.rank + i)
        model.zero_grad()
        if ranks.rank == culprit:
            hook = None
            if why == "in a hook":
                hook = model.module.first.weight.register_hook(lambda grad: {}["mine"])
            with pytest.raises(KeyError, match="mine"):
                model(x, why != "in a hook").sum().backward()
            if hook is not None:
                hook.remove()
        elif culprit is not None:
            with pytest.raises(
                paceline.PeerError, match=f"step of rank {culprit} fail"
            ):
                model(x).sum().backward()
        else:
            model(x).sum().backward()
            grads = [p.grad for p in model.parameters()]
            ranks.assert_same(grads, "gradients")
            plain = copy.deepcopy(model.module)
            step_of(plain, torch.full((1, 6), 1.0 + (ranks.n - 1) / 2 + i))
            for p, q in zip(grads, plain.parameters(), strict=True):
                torch.testing.assert_close(p, q.grad)


# ---- ends ---------------------------------------------------------------------------


@on_ranks(first=["wrapper", "group"], by=["a group in Python", "no shared memory"])
def test_wrapper_and_group_may_go_in_any_order(ranks, first, by):
    held = dist.new_group()
    group = Over(held)
    if by == "a group in Python":
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
    # A thread of Gloo may still hold the last operation and its memory.
    assert until(lambda: gone() is None)


def test_a_work_in_flight_when_its_wrapper_dies_keeps_its_memory_and_no_more(ranks):
    ends = []

    class Slow(dist.Work):
        """Holds the tensors until the test ends it, as a real Work does."""

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
                    tensor.add_(1)  # writes to memory that must still exist
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
