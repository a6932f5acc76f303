"""Ranks with different numbers of batches, compared with torch's join contexts."""

import copy

import paceline
import pytest
import torch
from cases import (
    Counting,
    as_torch,
    assert_equal,
    grads_of,
    integer_weights,
    mean_over,
    on_gpus_too,
    on_ranks,
    step_of,
)
from join_cases import CONTEXTS, FIND, Wide, context_of, steps_over_active, train
from paceline._ddp.session import JoinState
from support.copies import pickled
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

# The number of batches of a rank.
COUNTS = {
    "one more each": lambda rank, n: 1 + rank,
    "one fewer each": lambda rank, n: n - rank,
    "rank 0 has none": lambda rank, n: 3 if rank else 0,
    "the last has none": lambda rank, n: 0 if rank == n - 1 else 2,
    "all the same": lambda rank, n: 2,
    "all none": lambda rank, n: 0,
}


# ---- as in torch --------------------------------------------------------------------


@on_gpus_too(counts=["one more each", "rank 0 has none"])
@as_torch(4, counts=[*COUNTS], context=CONTEXTS)
def test_uneven_batches_train_as_in_torch(ranks, wrap, counts, context):
    # On a rank without any backward, torch reduces an uninitialised map of used
    # parameters: it may bind gradients of zeros to parameters that no rank has used.
    model = wrap(Wide(has_unused="none" not in counts), **FIND)
    params = list(model.parameters())
    count = COUNTS[counts](ranks.rank, ranks.n)
    for _ in range(2):  # the first context must not affect the second
        yield train(model, ranks, context, count)
        yield params
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    yield step_of(model, ranks.integers(3, 100, key="after"))  # a step without join


@on_gpus_too()
@on_ranks(2, 4, dtype=[torch.float32, torch.bfloat16], context=CONTEXTS)
def test_means_over_active_ranks_are_sums_divided(ranks, dtype, context):
    """Also for 3 active ranks of 4, with which torch rounds more than once."""
    model = ranks.wrap(nn.Linear(150, 140, bias=False, dtype=dtype))
    xs = [
        [12.0 * (1 + (r + i) % 3) * torch.ones(1, 150, dtype=dtype) for i in range(4)]
        for r in range(ranks.n)
    ]
    with context_of(model, context, divide_by_initial_world_size=False):
        for i in range(1 + ranks.rank):
            step_of(model, xs[ranks.rank][i])
            active = range(i, ranks.n)
            total = sum(xs[r][i][0, 0].item() for r in active)
            expected = torch.full_like(model.module.weight, total / len(active))
            assert_equal(model.module.weight.grad, expected, f"step {i}")


@as_torch(
    how=[
        ("join()", "round both"),
        ("join()", "round backward"),
        ("Join([])", "round both"),
    ]
)
def test_accumulation_in_a_join_is_that_of_torch(ranks, wrap, how):
    """Each rank has its own number of pairs; torch and Join need both in no_sync."""
    context, where = how

    def step(model, i):
        xs = [ranks.integers(3, 100, key=(i, k)) for k in range(3)]
        for x in xs[:2]:
            if wrap == ranks.wrap and where == "round backward":
                loss = model(x)
                with model.no_sync():
                    loss.backward()
            else:
                with model.no_sync():
                    model(x).backward()
        model(xs[2]).backward()

    model = wrap(Wide(), **FIND)
    yield train(model, ranks, context, COUNTS["one fewer each"](ranks.rank, 2), step)
    yield [*model.parameters()]


@on_ranks(context=CONTEXTS)
def test_what_no_active_rank_uses_keeps_its_gradient(ranks, context):
    """torch counts what a joined rank once used as used, and would halve means here."""
    model = ranks.wrap(Wide())
    params = [*model.parameters()]
    small = model.module.small.weight
    rows = ranks.all(ranks.integers(3, 100, key=0))
    expected = 2 * mean_over([x.sum(0) for x in rows]).expand(3, 100)
    with context_of(model, context):
        for i in range(1 + 2 * ranks.rank):
            model(ranks.integers(3, 100, key=i), skip=i > 0).backward()
            assert_equal(small.grad, expected, f"step {i}")
            assert model.module.unused.weight.grad is None
        objects, kept = [p.grad for p in params], grads_of(model)
    if context == "join()":  # leaves the gradients of a joined rank alone
        for p, grad, values in zip(params, objects, kept, strict=True):
            assert p.grad is grad
            assert_equal(grad, values, "what was kept")


@on_ranks(counts=["one more each", "one fewer each", "rank 0 has none"])
def test_backward_may_end_wrappers_in_another_order_than_the_list(ranks, counts):
    """torch's class cannot do this: it would issue all-reduces in different orders."""
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


@on_ranks(counts=["one more each", "one fewer each"])
def test_a_sharded_optimizer_in_the_list_steps_by_the_true_averages(ranks, counts):
    """torch's wrapper leaves old gradients on joined ranks, so its steps are wrong."""
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
    for mine, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert_equal(mine, other, "a parameter")


# ---- buffers ------------------------------------------------------------------------


@on_ranks(4, context=CONTEXTS)
def test_buffers_come_from_the_lowest_rank_that_trains(ranks, context):
    model = ranks.wrap(Counting(ranks.rank))
    marks = []
    with context_of(model, context):
        for i in range(1 + 2 * ranks.rank):
            model(ranks.integers(2, 4, key=i)).backward()
            marks.append(model.module.taken.tolist())
    for i, mark in enumerate(marks[1:]):  # the buffer before the forward after batch i
        root = (i + 1) // 2  # the lowest rank that has this batch
        is_new = i > 0 and root != i // 2
        sender = ranks.rank if is_new else root
        assert mark == [sender, i + 1], f"batch {i}"
    last = ranks.n - 1
    assert model.module.mark.tolist() == [last, 1 + 2 * last]
    for i in range(2):  # rank 0's buffers again
        model(ranks.integers(2, 4)).backward()
        assert model.module.taken.tolist() == [(last, 0)[i], 1 + i + 2 * last]


@on_gpus_too()
@as_torch(counts=["one more each", "one fewer each"], context=CONTEXTS)
def test_batch_norm_ends_with_the_statistics_of_torch(ranks, wrap, counts, context):
    """With momentum 1, statistics are those of one batch, the same as in torch."""
    layer = integer_weights(nn.Linear(4, 2))
    model = wrap(nn.Sequential(layer, nn.BatchNorm1d(2, momentum=1.0)), **FIND)
    with context_of(model, context):
        for i in range(COUNTS[counts](ranks.rank, ranks.n)):
            model(ranks.integers(4, 4, key=i)).sum().backward()
    yield [*model.state_dict().values()]


def test_buffers_that_are_not_sent_stay_each_ranks_own(ranks):
    model = ranks.wrap(Counting(ranks.rank), broadcast_buffers=False)
    with model.join():
        for i in range(1 + ranks.rank):
            model(ranks.integers(2, 4, key=i)).backward()
    assert model.module.mark.tolist() == [ranks.rank, 1 + ranks.rank]


# ---- a rank without further batches -------------------------------------------------


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
    """Has a layer that reentrant checkpoints use once more with every batch."""

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


@on_ranks(late_rank=[0, 1])
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


# ---- copies, and models changed before ----------------------------------------------


def changed(model):
    model(torch.ones(3, 100)).backward()
    model.module.large = integer_weights(nn.Linear(100, 150))
    return model


@on_ranks(
    counts=["one more each", "rank 0 has none", "all none"],
    context=CONTEXTS,
    how=[copy.deepcopy, pickled, changed],
)
def test_a_model_joins_as_it_is_then(ranks, counts, context, how):
    """A copy has not met its peers yet; a changed model must be wrapped anew."""
    model = how(paceline.DistributedDataParallel(Wide()))
    has = [COUNTS[counts](rank, ranks.n) for rank in range(ranks.n)]
    with context_of(model, context, divide_by_initial_world_size=False):
        for i, mean in steps_over_active(ranks, model, has):
            expected = mean.expand(model.module.large.weight.shape)
            assert_equal(model.module.large.weight.grad, expected, f"step {i}")
        with torch.no_grad():
            model.module.small.weight += 1 + ranks.rank
    ranks.assert_same(list(model.parameters()), "parameters")


@on_ranks(context=CONTEXTS)
def test_a_frozen_copy_needs_no_peers_in_a_join(ranks, context):
    model = paceline.DistributedDataParallel(Wide())
    teacher = copy.deepcopy(model).requires_grad_(False)
    if ranks.rank == 0:
        with context_of(teacher, context, enable=context == "join()"):
            assert not teacher(torch.ones(1, 100)).requires_grad
    model(torch.ones(1, 100)).backward()


def test_a_copy_made_in_a_join_of_torch_is_in_no_join(ranks):
    model = paceline.DistributedDataParallel(Wide())
    with Join([model], divide_by_initial_world_size=False):
        model(ranks.integers(3, 100)).backward()
        made = [copy.deepcopy(model), pickled(model)]
    xs = ranks.all(ranks.integers(3, 100, key="after"))
    for other in made:
        assert not other._join_config.enable
        assert other._session.join == JoinState()
        other.zero_grad()
        other(xs[ranks.rank]).backward()
        expected = mean_over([x.sum(0) for x in xs]).expand(200, 100)
        assert_equal(other.module.large.weight.grad, expected, "the gradient")
