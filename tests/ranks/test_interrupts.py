"""After Ctrl-C in a backward, all ranks have the averages, or none, or the world ends.

One rank of two is interrupted in turn at every Python function that begins while the
autograd engine runs.  Only there, within a backward, does Python raise the exception of
a pending signal.
"""

import sys
from contextlib import contextmanager

import paceline
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values
from torch import nn
from torch.nn import functional

MOST_CALLS = 60  # of Python functions in one backward; tests check that it is enough


class Interrupts:
    """Raises KeyboardInterrupt in the n-th Python function of a backward."""

    def __init__(self, n):
        self.n = n
        self.n_calls = 0
        self._is_in_engine = False

    def begin(self, _):
        """Start counting; a hook of an output, which runs when the engine does."""
        self._is_in_engine = True

    def _profile(self, frame, event, _):
        if event != "call" or not self._is_in_engine:
            return
        self.n_calls += 1
        if self.n_calls == self.n:
            sys.setprofile(None)
            raise KeyboardInterrupt(frame.f_code.co_name)

    @contextmanager
    def on(self):
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)


class Table(nn.Module):
    """An embedding with a sparse gradient, declared by the module or not."""

    def __init__(self, is_declared):
        super().__init__()
        self.table = nn.Embedding(12, 3, sparse=is_declared)
        self.out = nn.Linear(3, 2)

    def forward(self, rows):
        found = functional.embedding(rows, self.table.weight, sparse=True)
        return self.out(found.sum(1))


class Normed(nn.Module):
    """A model with buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)

    def forward(self, rows):
        return self.out(self.norm(rows[:, :3].float()))


def mean_by_group(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    future = work.get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size())


MODELS = {
    "sparse rows": lambda: Table(is_declared=True),
    "rows of an undeclared table": lambda: Table(is_declared=False),
    "buffers": Normed,
}


OVER = ("wrap the model anew", "no longer be in the same order")


def train_interrupted(rank, n_ranks, kind, way):
    """Interrupt each step later than the one before, until one completes; report."""
    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(MODELS[kind]())
    if way == "hook":
        model.register_comm_hook(None, mean_by_group)
    group = dist.new_group()  # an interrupted hook leaves the default one out of sync
    told = {"interrupted": [], "over": False, "same": []}
    for n in range(1, MOST_CALLS):
        interrupts = Interrupts(n if rank == 1 else 0)
        out = model(torch.randint(12, (4, 5)))
        out.register_hook(interrupts.begin)
        model.zero_grad(set_to_none=n % 2 == 0)
        words = ""
        try:
            with interrupts.on():
                out.sum().backward(create_graph=way == "recorded")
        except (KeyboardInterrupt, paceline.PeerError, RuntimeError) as error:
            words = f"{type(error).__name__}: {error}"
            told["interrupted"].append(words)
        mine = words, [values_of(p) for p in model.parameters()]
        both = [None, None]
        dist.all_gather_object(both, mine, group)
        # If rank 0 has the averages, rank 1 must, whatever its backward raised.
        told["same"].append(bool(both[0][0]) or both[0][1] == both[1][1])
        told["over"] = any(over in words for words, _ in both for over in OVER)
        if told["over"]:
            break
    return told


def values_of(parameter):
    grad = parameter.grad
    return None if grad is None else grad.detach().to_dense().flatten().tolist()


@pytest.mark.parametrize("way", ["plain", "recorded", "hook"])
@pytest.mark.parametrize("kind", MODELS)
def test_an_interrupt_leaves_a_step_on_both_ranks_or_on_neither(kind, way):
    first, second = values(run_ranks(train_interrupted, 2, kind, way))
    interrupted = second["interrupted"]
    assert all(first["same"]), interrupted
    assert interrupted[0].startswith("KeyboardInterrupt")
    assert first["over"] == second["over"]
    if not first["over"]:
        assert len(interrupted) < MOST_CALLS - 1, "some interrupts were not reached"
