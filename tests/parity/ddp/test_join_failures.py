"""Ranks leave join() early, fail in it, or use it concurrently: no rank hangs."""

import contextlib
import gc
import os
import threading

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import (
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
from paceline._ddp import join
from support.failing import FailsInBackward
from support.ranks import run_ranks
from support.threads import in_threads
from torch import nn
from torch.distributed.algorithms.join import Join

# ---- options, and early ends --------------------------------------------------------


@on_ranks(context=CONTEXTS)
def test_a_join_that_is_not_enabled_does_nothing(ranks, context):
    model = ranks.wrap(Wide())
    with context_of(model, context, enable=False):
        model(ranks.integers(3, 100)).backward()
        before = model.module.large.weight.detach().clone()
        with torch.no_grad():
            model.module.large.weight += ranks.rank
    assert_equal(model.module.large.weight, before + ranks.rank, "the weight")


@on_gpus_too()
@as_torch(context=CONTEXTS)
def test_early_termination_raises_everywhere_in_the_words_of_torch(
    ranks, wrap, context
):
    model = wrap(Wide(), **FIND)
    words = f"Rank {ranks.rank} exhausted all inputs."
    if ranks.rank > 0:
        words = "Detected at least one rank that exhausted inputs. Throwing across"
    with pytest.raises(RuntimeError, match=words) as caught:
        train(model, ranks, context, 1 + ranks.rank, throw_on_early_termination=True)
    assert type(caught.value) is RuntimeError
    del caught
    if context == "join()" and wrap == ranks.wrap:  # nothing has failed: steps continue
        rows = ranks.all(ranks.integers(3, 100))
        step_of(model, rows[ranks.rank])
        expected = mean_over([x.sum(0) for x in rows]).expand(200, 100)
        assert_equal(model.module.large.weight.grad, expected, "afterwards")
    yield None


class Talkative(Wide):
    """Its forward issues a collective and counts its calls."""

    n_forwards = 0

    def forward(self, x):
        self.n_forwards += 1
        dist.all_reduce(torch.ones(1))
        return super().forward(x)


@as_torch()
def test_early_termination_comes_before_the_collectives_of_the_module(ranks, wrap):
    model = wrap(Talkative(), **FIND)
    with pytest.raises(RuntimeError, match="exhausted"):
        train(model, ranks, "join()", 2 + ranks.rank, throw_on_early_termination=True)
    assert model.module.n_forwards == 2
    yield model.module.n_forwards


@as_torch(context=CONTEXTS, more=[0, 2])
def test_early_termination_counts_forwards_as_torch_does(ranks, wrap, context, more):
    def step(model, i):
        with model.no_sync() if i == 0 else contextlib.nullcontext():
            model(ranks.integers(3, 100, key=i)).backward()
        with torch.no_grad():
            model(ranks.integers(3, 100))

    model = wrap(Wide(), **FIND)
    n_steps = 2 + more * ranks.rank
    fails = pytest.raises(RuntimeError, match="exhausted")
    with fails if more else contextlib.nullcontext():
        train(model, ranks, context, n_steps, step, throw_on_early_termination=True)
    if ranks.rank == 0 or not more:
        yield [*grads_of(model), *model.parameters()]  # after the last step


def leave(model, ranks, context, where, **options):
    """Rank 1 raises in its second batch; rank 0 has one batch, rank 2 has five."""
    n_batches = 3 if options else (1, 3, 5)[ranks.rank]
    with context_of(model, context, **options):
        for i in range(n_batches):
            if ranks.rank == 1 and i == 1 and where == "between steps":
                raise KeyError("my own words")
            is_bad = ranks.rank == 1 and i == 1 and where == "in forward"
            model.module.where = where if is_bad else None
            model(ranks.integers(3, 100, key=i)).backward()


class Fails(Wide):
    """Raises on request, in its forward or in its backward."""

    where = None

    def forward(self, x):
        if self.where == "in forward":
            raise KeyError("my own words")
        out = super().forward(x)
        return FailsInBackward.apply(out, KeyError) if self.where else out


@on_ranks(3, where=["between steps", "in forward"], early=[False, True])
def test_an_exception_in_a_join_reaches_every_rank_and_is_overcome(ranks, where, early):
    model = ranks.wrap(Fails())
    options = {"throw_on_early_termination": True} if early else {}
    kind, words = paceline.PeerError, r"(?s)rank 1.*my own words"
    if ranks.rank == 1:
        kind, words = KeyError, "my own words"
    for _ in range(2):
        with pytest.raises(kind, match=words):
            leave(model, ranks, "join()", where, **options)
    rows = ranks.all(ranks.integers(3, 100))
    model.module.where = None
    model.zero_grad()
    model(rows[ranks.rank]).backward()
    total = sum(x.sum(0) for x in rows)
    assert torch.equal(model.module.large.weight.grad, (total / 3).expand(200, 100))


@on_ranks(3, context=CONTEXTS, raises=[False, True])
def test_steps_that_fail_in_a_join_do_not_end_it(ranks, context, raises):
    """Every rank catches the error, and goes on; the last step fails, too."""
    model, taken = ranks.wrap(Fails()), []

    def step(model, i):
        fails_here = i % 2 == 1 and i // 2 == ranks.rank
        model.module.where = "in backward" if fails_here else None
        fails = pytest.raises((KeyError, paceline.PeerError))
        with fails if i % 2 == 1 else contextlib.nullcontext():
            model(ranks.integers(3, 100, key=i)).backward()
            taken.append(i)
            rows = ranks.all(ranks.integers(3, 100, key=i))
            mean = mean_over([x.sum(0) for x in rows])
            assert torch.equal(model.module.large.weight.grad, mean.expand(200, 100))

    train(model, ranks, context, 6, step, throw_on_early_termination=raises)
    assert taken == [0, 2, 4]


def test_an_exception_in_a_join_of_torch_reaches_ranks_that_still_train(ranks):
    model = ranks.wrap(Wide())
    kinds = (paceline.PeerError, KeyError)
    words = (r"rank 1\b.* failed(?s:.*)it left a join context", "my own words")

    def step(model, i):
        if ranks.rank == 1 and i == 1:
            raise KeyError("my own words")
        model(ranks.integers(3, 100, key=i)).backward()

    with pytest.raises(kinds[ranks.rank], match=words[ranks.rank]):
        train(model, ranks, "Join([])", 3, step)
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


def test_a_model_changed_after_a_rank_has_joined_is_refused(ranks):
    model = ranks.wrap(Wide())
    kind = paceline.PeerError if ranks.rank else RuntimeError

    def step(model, i):
        if i == 2:
            model.module.small.bias = nn.Parameter(torch.zeros(3))
        model(ranks.integers(3, 100, key=i)).backward()

    with pytest.raises(kind, match="the model was changed in a join"):
        train(model, ranks, "join()", 3 - 2 * ranks.rank, step)


def test_a_model_changed_on_every_rank_joins_as_it_is_then(ranks):
    model = ranks.wrap(Wide())
    with model.join(divide_by_initial_world_size=False):
        for i, mean in steps_over_active(ranks, model, [3, 2]):
            expected = mean.expand(200, 100)
            assert_equal(model.module.large.weight.grad, expected, f"step {i}")
            if i == 0:
                model.module.small.bias = nn.Parameter(torch.zeros(3))
    ranks.assert_same(list(model.parameters()), "parameters")


def test_contexts_of_two_wrappers_are_not_nested(ranks):
    first, second = ranks.wrap(Wide()), ranks.wrap(Wide())
    with (
        pytest.raises(RuntimeError, match=r"use torch.*Join\(\[first, second\]\)"),
        first.join(),
        second.join(),
    ):
        pass


@on_ranks(context=CONTEXTS)
def test_a_single_rank_joins_itself(ranks, context):
    ranks.group = ranks.alone()
    model = ranks.wrap(Wide())
    seen = train(model, ranks, context, 3)
    assert len(seen) == 3
    with contextlib.suppress(KeyError), context_of(model, context):
        raise KeyError("no one to tell")


def test_a_join_of_torch_that_is_dropped_unused_disturbs_nobody(ranks):
    model = ranks.wrap(Wide())
    for _ in range(3):
        Join([model])
    gc.collect()
    kept = Join([model])  # the other context does not count its forwards
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

    def forward(self, rows, factor, is_dense=False):
        out = self.table(rows).sum() + (self.table.weight.sum() if is_dense else 0)
        return factor * out + self.dense.weight.sum()


@on_ranks(context=CONTEXTS, over=["initial", "active"])
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


@on_ranks(last=["dense", "sparse"])
def test_a_joined_rank_keeps_the_dense_gradient_of_a_sparse_table(ranks, last):
    model = ranks.wrap(integer_weights(Table()))
    weight = model.module.table.weight
    with model.join():
        for step in range(1 + 2 * ranks.rank):
            model.zero_grad()
            is_dense = step == 0 or last == "dense"
            model(torch.tensor([0]), float(4**step), is_dense).backward()
        kept, value = weight.grad, weight.grad.to_dense().clone()
    expected = torch.zeros(9, 40)
    expected[0] = 1
    if ranks.rank == 0 or last == "dense":
        expected += 1
    expected *= 8 if ranks.rank else 1
    assert weight.grad is kept
    assert_equal(weight.grad.to_dense(), value, "what was kept")
    assert_equal(value, expected, "the gradient")


# ---- other ends, processes and threads ----------------------------------------------


@on_ranks(part=["_take_shadow_steps", "_take_model_of"])
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
    train(model, ranks, "join()", 1 + ranks.rank)  # all ranks may catch it and continue
    ranks.assert_same(list(model.parameters()), "parameters")


def leave_as_child(context, out):
    """Fork in a context; the child writes which error its own exception becomes."""
    with context:
        child = os.fork()
        if child == 0:
            raise KeyError("my own words")
    os.waitpid(child, 0)
    return os.read(out, 99)


@on_ranks(context=CONTEXTS)
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


def test_two_threads_may_each_be_in_a_join(ranks):
    models = [ranks.wrap(Wide()) for _ in range(2)]
    both = threading.Barrier(2, timeout=20)

    def work(which):
        model = models[which]
        with model.join():
            both.wait()  # until both contexts are open
            for i in range(1 + ranks.rank):
                model.zero_grad()
                model(torch.full((1, 100), 2.0**i)).backward()
            found = model.module.large.weight.grad[0, 0].item()
            both.wait()
        return found

    # The mean over two ranks, and half of the 2 of a single rank.
    assert in_threads(work, 2) == [1.0, 1.0]


def test_a_join_may_end_in_another_thread_than_it_began(ranks):
    model = ranks.wrap(Wide())
    context = model.join()
    context.__enter__()
    with torch.no_grad():
        model.module.small.weight += ranks.rank
    in_threads(lambda _: context.__exit__(None, None, None), 1)
    ranks.assert_same(list(model.parameters()), "parameters")
    train(model, ranks, "join()", 1 + ranks.rank)


def test_a_wrapper_without_a_context_of_its_own_is_an_error_in_a_join(ranks):
    """The rank without batches stands in for one wrapper, but not for the other."""
    inside, outside = ranks.wrap(Wide()), ranks.wrap(Wide())

    def run():
        with inside.join():
            for i in range(1 + ranks.rank):
                outside(ranks.integers(3, 100, key=i)).backward()
                inside(ranks.integers(3, 100, key=i)).backward()

    with pytest.raises(paceline.MismatchError, match="wait for one another"):
        run()


def test_tables_in_another_order_than_they_were_made_in_are_an_error(ranks):
    first, second = ranks.wrap(Table()), ranks.wrap(Table())

    def run():
        with Join([second, first]):
            for _ in range(1 + ranks.rank):
                rows = torch.tensor([ranks.rank])
                (second(rows, 1.0) + first(rows, 1.0)).backward()

    with pytest.raises(paceline.MismatchError, match="order of their creation"):
        run()
