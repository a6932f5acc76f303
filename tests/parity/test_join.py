"""Ranks with different numbers of batches, against torch's own join contexts."""

import contextlib
import copy
import gc
import os
import pickle
import threading

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import assert_equal, integer_weights, mean_over, on_ranks
from paceline._ddp import join
from paceline._ddp.session import JoinState
from support.ranks import run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

# How many batches a rank has.
COUNTS = {
    "one more each": lambda rank, n: 1 + rank,
    "one fewer each": lambda rank, n: n - rank,
    "rank 0 has none": lambda rank, n: 3 if rank else 0,
    "the last has none": lambda rank, n: 0 if rank == n - 1 else 2,
    "all the same": lambda rank, n: 2,
    "all none": lambda rank, n: 0,
}
CONTEXTS = ["join()", "Join([])"]


class Wide(nn.Module):
    """Gradients depend on the input alone, so any training is exact.

    One parameter is large enough to become a view, three are not.
    """

    def __init__(self, has_unused=True):
        super().__init__()
        self.large = nn.Linear(100, 200)
        self.small = nn.Linear(100, 3)
        if has_unused:
            self.unused = nn.Linear(2, 2)
        integer_weights(self)

    def forward(self, x, skip=False):
        out = self.large(x).sum()
        return out if skip else out + 2 * self.small(x).sum()


def context_of(model, context, **options):
    return model.join(**options) if context == "join()" else Join([model], **options)


def pair_of(ranks, module, **options):
    """Return our wrapper and torch's, of equal modules."""
    options.setdefault("find_unused_parameters", True)
    ours = ranks.wrap(copy.deepcopy(module), **options)
    return ours, ranks.wrap_by_torch(module, **options)


def grads_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_all_equal(mine, theirs, what):
    there = [[g is not None for g in grads] for grads in (mine, theirs)]
    assert there[0] == there[1], f"{what}: {there}"
    for i, (m, t) in enumerate(zip(mine, theirs, strict=True)):
        if t is not None:
            assert_equal(m, t, f"{what} of tensor {i}")


def assert_same_models(ours, theirs, ranks):
    mine, other = ours.module.state_dict(), theirs.module.state_dict()
    for name in other:
        assert_equal(mine[name], other[name], name)
    ranks.assert_same(list(mine.values()), "the model")


def train(model, ranks, context, count, step=None, **options):
    """Train in a context; return the gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    with context_of(model, context, **options):
        for i in range(count):
            optimizer.zero_grad()
            if step is None:
                model(ranks.integers(3, 100, key=i)).backward()
            else:
                step(model, i)
            seen.append(grads_of(model))
            optimizer.step()
    return seen


# ---- as in torch --------------------------------------------------------------------


@on_ranks(2, 4, counts=[*COUNTS], context=CONTEXTS)
def test_uneven_batches_train_as_in_torch(ranks, counts, context):
    # On a rank without any backward, torch reduces a map of what was used that nobody
    # has written: it may bind gradients of zeros to what no rank has used.
    ours, theirs = pair_of(ranks, Wide(has_unused="none" not in counts))
    params = list(ours.parameters())
    count = COUNTS[counts](ranks.rank, ranks.n)
    for _ in range(2):  # what the first context leaves behind does not harm the second
        mine = train(ours, ranks, context, count)
        other = train(theirs, ranks, context, count)
        for step, (m, t) in enumerate(zip(mine, other, strict=True)):
            assert_all_equal(m, t, f"step {step}: the gradient")
        assert_same_models(ours, theirs, ranks)
    assert all(a is b for a, b in zip(params, ours.parameters(), strict=True))
    for model in (ours, theirs):  # and ordinary steps follow
        model.zero_grad()
        model(ranks.integers(3, 100, key="after")).backward()
    assert_all_equal(grads_of(ours), grads_of(theirs), "the gradient after")


@on_ranks(2, context=CONTEXTS)
def test_means_over_active_ranks_are_those_of_torch(ranks, context):
    ours, theirs = pair_of(ranks, Wide())
    options = {"divide_by_initial_world_size": False}
    count = 1 + 2 * ranks.rank
    mine = train(ours, ranks, context, count, **options)
    other = train(theirs, ranks, context, count, **options)
    for step, (m, t) in enumerate(zip(mine, other, strict=True)):
        assert_all_equal(m, t, f"step {step}: the gradient")
    assert_same_models(ours, theirs, ranks)


@on_ranks(
    4,
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
    context=CONTEXTS,
)
def test_means_over_active_ranks_are_sums_divided(ranks, dtype, context):
    """Also for 3 active ranks of 4, where torch rounds more than once."""
    model = ranks.wrap(nn.Linear(150, 140, bias=False, dtype=dtype))
    xs = [
        [12.0 * (1 + (r + i) % 3) * torch.ones(1, 150, dtype=dtype) for i in range(4)]
        for r in range(4)
    ]
    with context_of(model, context, divide_by_initial_world_size=False):
        for i in range(1 + ranks.rank):
            model.zero_grad()
            model(xs[ranks.rank][i]).sum().backward()
            active = range(i, 4)
            total = sum(xs[r][i][0, 0].item() for r in active)
            expected = torch.full_like(model.module.weight, total / len(active))
            assert_equal(model.module.weight.grad, expected, f"step {i}")


@on_ranks(2, 4, context=CONTEXTS, where=["round both", "round backward"])
def test_accumulation_in_a_join_is_that_of_torch(ranks, context, where):
    """Each rank has its number of pairs; torch and Join need both in no_sync."""
    if where == "round backward" and context == "Join([])":
        return
    ours, theirs = pair_of(ranks, Wide())
    count = COUNTS["one fewer each"](ranks.rank, ranks.n)

    def step(model, i):
        xs = [ranks.integers(3, 100, key=(i, k)) for k in range(3)]
        for x in xs[:2]:
            if model is ours and where == "round backward":
                loss = model(x)
                with model.no_sync():
                    loss.backward()
            else:
                with model.no_sync():
                    model(x).backward()
        model(xs[2]).backward()

    mine = train(ours, ranks, context, count, step)
    other = train(theirs, ranks, context, count, step)
    for i, (m, t) in enumerate(zip(mine, other, strict=True)):
        assert_all_equal(m, t, f"step {i}: the gradient")
    assert_same_models(ours, theirs, ranks)


@on_ranks(2, context=CONTEXTS)
def test_what_no_active_rank_uses_keeps_its_gradient(ranks, context):
    """In torch, what a joined rank once used counts as used: means are halved here."""
    model = ranks.wrap(Wide())
    small = model.module.small.weight
    rows = ranks.all(ranks.integers(3, 100, key=0))
    expected = 2 * mean_over([x.sum(0) for x in rows]).expand(3, 100)
    with context_of(model, context):
        for i in range(1 + 2 * ranks.rank):
            model(ranks.integers(3, 100, key=i), skip=i > 0).backward()
            assert_equal(small.grad, expected, f"step {i}")
            assert model.module.unused.weight.grad is None


@on_ranks(2, 4, counts=["one more each", "one fewer each", "rank 0 has none"])
def test_two_wrappers_share_a_join_as_in_torch(ranks, counts):
    count = COUNTS[counts](ranks.rank, ranks.n)
    pairs = [pair_of(ranks, Wide(False), find_unused_parameters=False) for _ in "ab"]
    seen = []
    for wrappers in zip(*pairs, strict=True):
        with Join(list(wrappers)):
            for i in range(count):
                for k, model in enumerate(wrappers):
                    model.zero_grad()
                    model(ranks.integers(3, 100, key=(i, k))).backward()
                    seen.append(grads_of(model))
    for m, t in zip(seen[: len(seen) // 2], seen[len(seen) // 2 :], strict=True):
        assert_all_equal(m, t, "the gradient")
    for ours, theirs in pairs:
        assert_same_models(ours, theirs, ranks)


@on_ranks(2, 4, counts=["one more each", "one fewer each", "rank 0 has none"])
def test_backward_may_end_wrappers_in_another_order_than_the_list(ranks, counts):
    """Torch's class does not take this: its all-reduces come in another order."""
    first, second = (integer_weights(nn.Linear(4, n)) for n in (90, 100))
    a, b = ranks.wrap(first), ranks.wrap(second)
    has = [COUNTS[counts](r, ranks.n) for r in range(ranks.n)]
    rows = [ranks.all(ranks.integers(2, 4, key=i)) for i in range(max(has))]
    weight = second.weight.detach().sum(0)
    with Join([a, b]):
        for i in range(has[ranks.rank]):
            a.zero_grad()
            b.zero_grad()
            hidden = a(rows[i][ranks.rank])
            b(hidden[:, :4]).sum().backward()
            active = [r for r in range(ranks.n) if has[r] > i]
            total = sum(rows[i][r].sum(0) for r in active) / ranks.n
            assert_equal(first.weight.grad[:4], weight[:, None] * total, f"step {i}")
            assert not first.weight.grad[4:].any()


@on_ranks(2, 4, counts=["one more each", "one fewer each"])
def test_a_sharded_optimizer_in_the_list_steps_by_the_true_averages(ranks, counts):
    """Torch's wrapper leaves joined ranks their old gradients, and goes astray here."""
    count = COUNTS[counts](ranks.rank, ranks.n)
    module = Wide()
    plain = ranks.wrap(copy.deepcopy(module))
    train(plain, ranks, "join()", count)
    sharded = ranks.wrap(module)
    optimizer = ZeroRedundancyOptimizer(
        sharded.parameters(), torch.optim.SGD, process_group=ranks.group, lr=1.0
    )
    with Join([sharded, optimizer]):
        for i in range(count):
            optimizer.zero_grad()
            sharded(ranks.integers(3, 100, key=i)).backward()
            optimizer.step()
    assert_same_models(sharded, plain, ranks)


# ---- buffers ------------------------------------------------------------------------


class Counting(nn.Module):
    """A buffer that tells whose it is: rank, and number of forwards."""

    def __init__(self, rank):
        super().__init__()
        self.linear = integer_weights(nn.Linear(4, 2))
        self.register_buffer("mark", torch.zeros(2, dtype=torch.int64))
        self.rank = rank

    def forward(self, x):
        self.taken = self.mark.tolist()
        if self.training:
            self.mark = torch.tensor([self.rank, self.mark[1].item() + 1])
        return self.linear(x).sum()


@on_ranks(2, 4, context=CONTEXTS)
def test_buffers_come_from_the_lowest_rank_that_trains(ranks, context):
    model = ranks.wrap(Counting(ranks.rank))
    marks = []
    with context_of(model, context):
        for i in range(1 + 2 * ranks.rank):
            model(ranks.integers(2, 4, key=i)).backward()
            marks.append(model.module.taken)
    for i, mark in enumerate(marks[1:]):  # what the forward after batch i has found
        root = (i + 1) // 2  # the lowest rank that has this batch
        is_new = i > 0 and root != i // 2
        sender = ranks.rank if is_new else root
        assert mark == [sender, i + 1], f"batch {i}"
    last = ranks.n - 1
    assert model.module.mark.tolist() == [last, 1 + 2 * last]
    for i in range(2):  # rank 0's again
        model(ranks.integers(2, 4)).backward()
        assert model.module.taken == [(last, 0)[i], 1 + i + 2 * last]


@on_ranks(2, 4, counts=["one more each", "one fewer each"], context=CONTEXTS)
def test_batch_norm_ends_with_the_statistics_of_torch(ranks, counts, context):
    """With momentum 1, statistics are those of one batch, of the same as in torch."""
    count = COUNTS[counts](ranks.rank, ranks.n)
    module = nn.Sequential(
        integer_weights(nn.Linear(4, 2)), nn.BatchNorm1d(2, momentum=1.0)
    )
    ours, theirs = pair_of(ranks, module)
    for model in (ours, theirs):
        with context_of(model, context):
            for i in range(count):
                model(ranks.integers(4, 4, key=i)).sum().backward()
    assert_same_models(ours, theirs, ranks)


@on_ranks(2)
def test_buffers_that_are_not_sent_stay_each_ranks_own(ranks):
    model = ranks.wrap(Counting(ranks.rank), broadcast_buffers=False)
    with model.join():
        for i in range(1 + ranks.rank):
            model(ranks.integers(2, 4, key=i)).backward()
    assert model.module.mark.tolist() == [ranks.rank, 1 + ranks.rank]


# ---- a rank that has run out --------------------------------------------------------


@on_ranks(2, counts=["one more each", "one fewer each"])
def test_gradients_of_a_joined_rank_are_left_alone(ranks, counts):
    model = ranks.wrap(Wide())
    count = COUNTS[counts](ranks.rank, ranks.n)
    with model.join():
        for i in range(count):
            model.zero_grad()
            model(ranks.integers(3, 100, key=i)).backward()
        objects, kept = [p.grad for p in model.parameters()], grads_of(model)
    assert all(p.grad is g for p, g in zip(model.parameters(), objects, strict=True))
    assert_all_equal(grads_of(model), kept, "what was kept")


@on_ranks(2)
def test_the_version_of_what_a_join_overwrites_is_raised(ranks):
    model = ranks.wrap(Wide())
    with model.join():
        for i in range(2 - ranks.rank):
            model(ranks.integers(3, 100, key=i)).backward()
        out = (model.module.large.weight**2).sum()  # saves the weight
    if ranks.rank == 0:
        torch.autograd.grad(out, model.module.large.weight)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, model.module.large.weight)


@on_ranks(2)
def test_evaluation_and_many_forwards_fit_in_a_join(ranks):
    model = ranks.wrap(Wide())
    rows = [
        ranks.all([ranks.integers(3, 100, key=(i, k)) for k in (0, 1)])
        for i in range(3)
    ]
    with model.join():
        for i in range(3 - 2 * ranks.rank):
            model.zero_grad()
            with torch.no_grad():
                model(rows[i][ranks.rank][0])
            losses = [model(x) for x in rows[i][ranks.rank]]
            sum(losses).backward()
            active = [0, 1] if i == 0 else [0]
            total = sum(rows[i][r][k].sum(0) for r in active for k in (0, 1))
            expected = (total / 2).expand(200, 100)
            assert_equal(model.module.large.weight.grad, expected, f"step {i}")


class Shared(nn.Module):
    """A layer that reentrant checkpoints use once more with every batch."""

    def __init__(self):
        super().__init__()
        self.layer = integer_weights(nn.Linear(100, 100))
        self.n_uses = 0

    def forward(self, x):
        self.n_uses += 1
        x = x.requires_grad_()
        outs = [
            checkpoint(self.layer, x * k, use_reentrant=True)
            for k in range(1, self.n_uses + 1)
        ]
        return sum(out.sum() for out in outs)


@on_ranks(2, 4, late_rank=[0, 1])
def test_gradients_that_come_late_are_amended_with_nothing(ranks, late_rank):
    model = ranks.wrap(Shared())
    xs = [ranks.all(ranks.integers(3, 100, key=i)) for i in range(4)]
    with model.join():
        for i in range(4 if ranks.rank == late_rank else 1):
            model.zero_grad()
            model(xs[i][ranks.rank].clone()).backward()
            active = range(ranks.n) if i == 0 else [late_rank]
            total = sum(xs[i][r].sum(0) for r in active) * sum(range(1, i + 2))
            expected = (total / ranks.n).expand(100, 100)
            assert_equal(model.module.layer.weight.grad, expected, f"step {i}")


# ---- options, and ends before the end -----------------------------------------------


@on_ranks(2, context=CONTEXTS)
def test_a_join_that_is_not_enabled_does_nothing(ranks, context):
    model = ranks.wrap(Wide())
    with context_of(model, context, enable=False):
        model(ranks.integers(3, 100)).backward()
        before = model.module.large.weight.detach().clone()
        with torch.no_grad():
            model.module.large.weight += ranks.rank
    assert_equal(model.module.large.weight, before + ranks.rank, "the weight")


@on_ranks(2, 4, context=CONTEXTS)
def test_early_termination_raises_everywhere_in_the_words_of_torch(ranks, context):
    ours, theirs = pair_of(ranks, Wide())
    for model in (ours, theirs):
        words = f"Rank {ranks.rank} exhausted all inputs."
        if ranks.rank > 0:
            words = "Detected at least one rank that exhausted inputs. Throwing across"
        with pytest.raises(RuntimeError, match=words) as caught:
            train(
                model, ranks, context, 1 + ranks.rank, throw_on_early_termination=True
            )
        assert type(caught.value) is RuntimeError
        del caught
    if context == "join()":  # nothing has failed: ordinary steps go on
        ours.zero_grad()
        rows = ranks.all(ranks.integers(3, 100))
        ours(rows[ranks.rank]).backward()
        expected = mean_over([x.sum(0) for x in rows]).expand(200, 100)
        assert_equal(ours.module.large.weight.grad, expected, "afterwards")


@on_ranks(2, context=CONTEXTS)
def test_early_termination_lets_even_ranks_through(ranks, context):
    ours, theirs = pair_of(ranks, Wide())
    for model in (ours, theirs):
        train(model, ranks, context, 2, throw_on_early_termination=True)
    assert_same_models(ours, theirs, ranks)


class Talkative(Wide):
    """Its forward has a collective of its own, and counts how often it was run."""

    n_forwards = 0

    def forward(self, x):
        self.n_forwards += 1
        dist.all_reduce(torch.ones(1))
        return super().forward(x)


@on_ranks(2, 4)
def test_early_termination_comes_before_the_collectives_of_the_module(ranks):
    for model in pair_of(ranks, Talkative()):
        with pytest.raises(RuntimeError, match="exhausted"):
            train(
                model, ranks, "join()", 2 + ranks.rank, throw_on_early_termination=True
            )
        assert model.module.n_forwards == 2


@on_ranks(2)
def test_early_termination_counts_forwards_as_torch_does(ranks):
    def step(model, i):
        with model.no_sync() if i == 0 else contextlib.nullcontext():
            model(ranks.integers(3, 100, key=i)).backward()
        with torch.no_grad():
            model(ranks.integers(3, 100))

    counts = []
    for model in pair_of(ranks, Wide()):
        n_steps = 2 + 2 * ranks.rank
        with pytest.raises(RuntimeError, match="exhausted"):
            train(
                model, ranks, "join()", n_steps, step, throw_on_early_termination=True
            )
        counts.append(grads_of(model))
    if ranks.rank == 0:
        assert_all_equal(*counts, "gradients of the last step")


@on_ranks(3)
def test_an_exception_reaches_ranks_that_ask_for_early_termination(ranks):
    model = ranks.wrap(Wide())
    kind = KeyError if ranks.rank == 1 else paceline.PeerError
    with pytest.raises(kind, match="my own words"):
        leave_early(model, ranks)


def leave_early(model, ranks):
    with model.join(throw_on_early_termination=True):
        for i in range(3):
            if ranks.rank == 1 and i == 1:
                raise KeyError("my own words")
            model(ranks.integers(3, 100, key=i)).backward()


def leave(model, ranks, context, where):
    """Rank 1 leaves by an exception in its second batch; rank 0 has one, 2 has five."""
    with context_of(model, context):
        for i in range((1, 3, 5)[ranks.rank]):
            if ranks.rank == 1 and i == 1 and where == "between steps":
                raise KeyError("my own words")
            model.module.is_bad = ranks.rank == 1 and i == 1 and where == "in forward"
            model(ranks.integers(3, 100, key=i)).backward()


class Bad(Wide):
    is_bad = False

    def forward(self, x):
        if self.is_bad:
            raise KeyError("my own words")
        return super().forward(x)


@on_ranks(3, where=["between steps", "in forward"])
def test_an_exception_in_a_join_reaches_every_rank_and_is_overcome(ranks, where):
    model = ranks.wrap(Bad())
    for _ in range(2):
        if ranks.rank == 1:
            with pytest.raises(KeyError, match="my own words"):
                leave(model, ranks, "join()", where)
        else:
            with pytest.raises(paceline.PeerError, match=r"(?s)rank 1.*my own words"):
                leave(model, ranks, "join()", where)
    rows = ranks.all(ranks.integers(3, 100))
    model.module.is_bad = False
    model.zero_grad()
    model(rows[ranks.rank]).backward()
    total = sum(x.sum(0) for x in rows)
    assert torch.equal(model.module.large.weight.grad, (total / 3).expand(200, 100))


@on_ranks(2)
def test_an_exception_in_a_join_of_torch_reaches_ranks_that_still_train(ranks):
    model = ranks.wrap(Wide())
    kinds = (paceline.PeerError, KeyError)
    words = ("rank 1 failed(?s:.*)it left a join context", "my own words")

    def run():
        with Join([model]):
            for i in range(3):
                if ranks.rank == 1 and i == 1:
                    raise KeyError("my own words")
                model(ranks.integers(3, 100, key=i)).backward()

    with pytest.raises(kinds[ranks.rank], match=words[ranks.rank]):
        run()
    assert not model._join_config.enable


def die_in_a_join(rank, n_ranks):
    model = paceline.DistributedDataParallel(Wide())
    caught = None
    try:
        with model.join():
            for i in range((1, 3, 5)[rank]):
                if rank == 1 and i == 1:
                    os._exit(7)
                model(torch.ones(1, 100)).backward()
    except paceline.PeerError as error:
        caught = str(error)
    return caught


def test_a_rank_that_dies_in_a_join_is_named_by_every_other():
    outcomes = run_ranks(die_in_a_join, 3, env={"PACELINE_TIMEOUT": "30"}, timeout=25)
    assert outcomes[1].exitcode == 7
    for survivor in (0, 2):
        assert "rank 1" in outcomes[survivor].value
        assert "died" in outcomes[survivor].value


@on_ranks(2)
def test_a_model_changed_after_a_rank_has_joined_is_refused(ranks):
    model = ranks.wrap(Wide())
    kind = paceline.PeerError if ranks.rank else RuntimeError

    def run():
        with model.join():
            for i in range(3 - 2 * ranks.rank):
                if i == 2:
                    model.module.small.bias = nn.Parameter(torch.zeros(3))
                model(ranks.integers(3, 100, key=i)).backward()

    with pytest.raises(kind, match="the model was changed in a join"):
        run()


@on_ranks(2)
def test_a_model_changed_on_every_rank_joins_as_it_is_then(ranks):
    model = ranks.wrap(Wide())
    xs = [ranks.all(ranks.integers(3, 100, key=i)) for i in range(3)]
    with model.join(divide_by_initial_world_size=False):
        for i in range(3 - ranks.rank):
            if i == 1:
                model.module.small.bias = nn.Parameter(torch.zeros(3))
            model.zero_grad()
            model(xs[i][ranks.rank]).backward()
            active = [0] if i == 2 else [0, 1]
            expected = mean_over([xs[i][r].sum(0) for r in active]).expand(200, 100)
            assert_equal(model.module.large.weight.grad, expected, f"step {i}")
    ranks.assert_same(list(model.parameters()), "parameters")


@on_ranks(2)
def test_contexts_of_two_wrappers_are_not_nested(ranks):
    first, second = ranks.wrap(Wide()), ranks.wrap(Wide())
    with (
        pytest.raises(RuntimeError, match=r"use torch.*Join\(\[first, second\]\)"),
        first.join(),
        second.join(),
    ):
        pass


@on_ranks(1, context=CONTEXTS)
def test_a_single_rank_joins_itself(ranks, context):
    model = ranks.wrap(Wide())
    seen = train(model, ranks, context, 3)
    assert len(seen) == 3
    with contextlib.suppress(KeyError), context_of(model, context):
        raise KeyError("no one to tell")


@on_ranks(2)
def test_a_join_of_torch_that_is_dropped_unused_disturbs_nobody(ranks):
    model = ranks.wrap(Wide())
    for _ in range(3):
        Join([model])
    gc.collect()
    kept = Join([model])  # its forwards are not counted in the other context
    seen = train(model, ranks, "join()", 1 + ranks.rank)
    assert [len(row) for row in ranks.all(seen)] == [1, 2]
    ranks.assert_same(list(model.parameters()), "parameters")
    with kept:
        for i in range(1 + ranks.rank):
            model(ranks.integers(3, 100, key=i)).backward()
    ranks.assert_same(list(model.parameters()), "parameters")
    assert model._join_config.enable  # as in torch, until the context is dropped
    del kept
    assert not model._join_config.enable


class Table(nn.Module):
    """An embedding with sparse gradients beside a dense layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 40, sparse=True)
        self.dense = nn.Linear(80, 300)

    def forward(self, rows, factor):
        return factor * self.table(rows).sum() + self.dense.weight.sum()


@on_ranks(2, 4, context=CONTEXTS, over=["initial", "active"])
def test_rows_of_sparse_gradients_are_averaged_in_a_join(ranks, context, over):
    model = ranks.wrap(integer_weights(Table()))
    table = model.module.table.weight

    def rows(rank, step):
        return torch.tensor([rank, 4 + step % 3])

    with context_of(model, context, divide_by_initial_world_size=over == "initial"):
        for step in range(1 + ranks.rank):
            model.zero_grad()
            model(rows(ranks.rank, step), 3.0 * 2**ranks.rank).backward()
            active = range(step, ranks.n)
            expected = torch.zeros(9, 40)
            for rank in active:
                expected[rows(rank, step)] += 3.0 * 2**rank
            expected /= ranks.n if over == "initial" else len(active)
            assert table.grad.is_sparse
            assert_equal(table.grad.to_dense(), expected, f"step {step}")
            with torch.no_grad():
                table -= table.grad.to_dense()
    ranks.assert_same(list(model.parameters()), "the model")


class Wordy(nn.Module):
    """A table that is declared sparse, and looked up in, or multiplied by as well."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True)
        self.large = nn.Linear(100, 200)

    def forward(self, x, is_dense):
        out = self.table(torch.tensor([0])).sum() + self.large.weight.sum()
        return x * (out + self.table.weight.sum() if is_dense else out)


@on_ranks(2, last=["dense", "sparse"])
def test_a_joined_rank_keeps_the_dense_gradient_of_a_sparse_table(ranks, last):
    model = ranks.wrap(integer_weights(Wordy()))
    weight = model.module.table.weight
    with model.join():
        for step in range(1 + 2 * ranks.rank):
            model.zero_grad()
            model(float(4**step), step == 0 or last == "dense").backward()
        kept, value = weight.grad, weight.grad.to_dense().clone()
    rows = torch.tensor([[2.0, 2.0], [1.0, 1.0], [1.0, 1.0]])
    if ranks.rank == 0:
        expected = rows
    elif last == "dense":
        expected = 8 * rows
    else:
        expected = 8 * torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    assert weight.grad is kept
    assert_equal(weight.grad.to_dense(), value, "what was kept")
    assert_equal(value, expected, "the gradient")


# ---- copies, and models changed before ----------------------------------------------


def copy_of(model, how):
    return (
        copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    )


@on_ranks(
    2,
    counts=["one more each", "rank 0 has none", "all none"],
    context=CONTEXTS,
    how=["deepcopy", "pickle"],
)
def test_a_copy_joins_though_it_has_not_met_its_peers(ranks, counts, context, how):
    model = copy_of(paceline.DistributedDataParallel(Wide()), how)
    has = [COUNTS[counts](rank, ranks.n) for rank in range(ranks.n)]
    xs = [ranks.all(ranks.integers(3, 100, key=i)) for i in range(3)]
    with context_of(model, context, divide_by_initial_world_size=False):
        for i in range(has[ranks.rank]):
            model.zero_grad()
            model(xs[i][ranks.rank]).backward()
            active = [r for r in range(ranks.n) if has[r] > i]
            expected = mean_over([xs[i][r].sum(0) for r in active]).expand(200, 100)
            assert_equal(model.module.large.weight.grad, expected, f"step {i}")
        with torch.no_grad():
            model.module.small.weight += 1 + ranks.rank
    ranks.assert_same(list(model.parameters()), "parameters")


@on_ranks(2, context=CONTEXTS)
def test_a_frozen_copy_needs_no_peers_in_a_join(ranks, context):
    model = paceline.DistributedDataParallel(Wide())
    teacher = copy.deepcopy(model).requires_grad_(False)
    if ranks.rank == 0:
        with context_of(teacher, context, enable=context == "join()"):
            assert not teacher(torch.ones(1, 100)).requires_grad
    model(torch.ones(1, 100)).backward()


@on_ranks(2)
def test_a_copy_made_in_a_join_of_torch_is_in_no_join(ranks):
    model = paceline.DistributedDataParallel(Wide())
    with Join([model], divide_by_initial_world_size=False):
        model(ranks.integers(3, 100)).backward()
        made = [copy_of(model, how) for how in ("deepcopy", "pickle")]
    xs = ranks.all(ranks.integers(3, 100, key="after"))
    for other in made:
        assert not other._join_config.enable
        assert other._session.join == JoinState()
        other.zero_grad()
        other(xs[ranks.rank]).backward()
        expected = mean_over([x.sum(0) for x in xs]).expand(200, 100)
        assert_equal(other.module.large.weight.grad, expected, "the gradient")


@on_ranks(2, counts=["one more each", "rank 0 has none"], context=CONTEXTS)
def test_a_model_changed_before_a_join_joins_as_it_is_then(ranks, counts, context):
    model = ranks.wrap(Wide())
    model(ranks.integers(3, 100)).backward()
    model.module.small = integer_weights(nn.Linear(100, 7))
    has = [COUNTS[counts](rank, ranks.n) for rank in range(ranks.n)]
    xs = [ranks.all(ranks.integers(3, 100, key=i)) for i in range(3)]
    with context_of(model, context, divide_by_initial_world_size=False):
        for i in range(has[ranks.rank]):
            model.zero_grad()
            model(xs[i][ranks.rank]).backward()
            active = [r for r in range(ranks.n) if has[r] > i]
            mean = 2 * mean_over([xs[i][r].sum(0) for r in active])
            assert_equal(model.module.small.weight.grad, mean.expand(7, 100), f"{i}")
        with torch.no_grad():
            model.module.small.weight += 1 + ranks.rank
    ranks.assert_same(list(model.parameters()), "parameters")


# ---- ends in other ways, processes and threads --------------------------------------


@on_ranks(2, part=["_take_shadow_steps", "_take_model_of"])
def test_an_error_at_the_end_of_a_join_reaches_every_rank(ranks, part):
    model = ranks.wrap(Wide())
    context = model.join()

    def fail(*_):
        raise KeyError("my own words")

    patch = pytest.MonkeyPatch()
    if ranks.rank == 1:
        patch.setattr(join if part == "_take_model_of" else context, part, fail)
    kinds = (paceline.PeerError, KeyError)

    def run():
        with context:
            for i in range(1 + ranks.rank):
                model(ranks.integers(3, 100, key=i)).backward()

    with pytest.raises(kinds[ranks.rank], match="my own words"):
        run()
    patch.undo()
    train(model, ranks, "join()", 1 + ranks.rank)  # all may catch it and go on
    ranks.assert_same(list(model.parameters()), "parameters")


def leave_as_child(context, out):
    """Fork in a context; the child writes what its own exception becomes."""
    with context:
        child = os.fork()
        if child == 0:
            raise KeyError("my own words")
    os.waitpid(child, 0)
    return os.read(out, 99)


@on_ranks(2, context=CONTEXTS)
def test_a_forked_child_leaves_a_join_by_its_own_exception(ranks, context):
    model = ranks.wrap(Wide())
    out, into = os.pipe()
    parent = os.getpid()
    made = context_of(model, context)
    try:
        words = leave_as_child(made, out)
    except BaseException as error:
        if os.getpid() == parent:
            raise
        del made
        os.write(into, repr(error).encode())
        os._exit(0)
    assert words == b"KeyError('my own words')"
    del made
    train(model, ranks, context, 1 + ranks.rank)
    ranks.assert_same(list(model.parameters()), "parameters")


@on_ranks(2)
def test_two_threads_may_each_be_in_a_join(ranks):
    models = [ranks.wrap(Wide()) for _ in range(2)]
    both = threading.Barrier(2, timeout=20)
    found = []

    def work(model):
        with model.join():
            both.wait()  # both are open
            for i in range(1 + ranks.rank):
                model.zero_grad()
                model(torch.full((1, 100), 2.0**i)).backward()
            found.append(model.module.large.weight.grad[0, 0].item())
            both.wait()

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1.0, 1.0]  # of two ranks, and half of one rank's 2


def closed_by_another_thread(context):
    thread = threading.Thread(target=context.__exit__, args=(None, None, None))
    thread.start()
    thread.join()


@on_ranks(2)
def test_a_join_may_end_in_another_thread_than_it_began(ranks):
    model = ranks.wrap(Wide())
    context = model.join()
    context.__enter__()
    with torch.no_grad():
        model.module.small.weight += ranks.rank
    closed_by_another_thread(context)
    ranks.assert_same(list(model.parameters()), "parameters")
    train(model, ranks, "join()", 1 + ranks.rank)


@on_ranks(2)
def test_a_wrapper_without_a_context_of_its_own_is_an_error_in_a_join(ranks):
    """The rank without batches stands in for one, and is awaited in the other."""
    inside, outside = ranks.wrap(Wide()), ranks.wrap(Wide())

    def run():
        with inside.join():
            for i in range(1 + ranks.rank):
                outside(ranks.integers(3, 100, key=i)).backward()
                inside(ranks.integers(3, 100, key=i)).backward()

    with pytest.raises(paceline.MismatchError, match="wait for one another"):
        run()


@on_ranks(2)
def test_tables_in_another_order_than_they_were_made_in_are_an_error(ranks):
    first, second = ranks.wrap(Table()), ranks.wrap(Table())

    def run():
        with Join([second, first]):
            for _ in range(1 + ranks.rank):
                rows = torch.tensor([ranks.rank])
                (second(rows, 1.0) + first(rows, 1.0)).backward()

    with pytest.raises(paceline.MismatchError, match="order of their making"):
        run()
