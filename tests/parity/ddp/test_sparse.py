"""Sparse gradients on ranks, including those that torch cannot average.

If torch's wrapper can train a model, bits are compared with it.  It raises if a rank
does not use a sparse embedding, if a gradient is dense that should be sparse, or sparse
without a declaration.  Then the reference is the mean by hand.

torch's class may crash a rank.  Two processes without Paceline all-reduced sparse and
dense tensors with Gloo (torch 2.13) on two cores with a load of 100; in 3 of about 60
runs of 90 s one died when malloc found an unaligned chunk.
"""

import copy
import random
import warnings

import paceline
import pytest
import torch
from cases import (
    as_torch,
    assert_equal,
    bits,
    grads_of,
    integer_weights,
    mean_over,
    on_gpus_too,
    on_ranks,
    step_of,
)
from paceline._compat import sparse_rows
from sparse_cases import (
    SPARSE,
    ByHand,
    Optional,
    Words,
    assert_means,
    means_by_hand,
    words_of,
)
from support.copies import pickled
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# ---- as torch does ------------------------------------------------------------------


TABLES = {
    "embedding": lambda: nn.Embedding(20, 6, sparse=True),
    "padding": lambda: nn.Embedding(20, 6, sparse=True, padding_idx=3),
    "largest norm": lambda: nn.Embedding(20, 6, sparse=True, max_norm=1.0),
    "bag of sums": lambda: nn.EmbeddingBag(20, 6, sparse=True, mode="sum"),
    "bag of means": lambda: nn.EmbeddingBag(20, 6, sparse=True, mode="mean"),
}

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}


@on_gpus_too(table=["embedding"], dtype=["float32"])
@as_torch(table=[*TABLES], dtype=["float32", "bf16"])
def test_sparse_gradients_are_averaged_as_torch_averages_them(
    ranks, wrap, table, dtype
):
    module = Words(table=TABLES[table](), dtype=DTYPES[dtype])
    offsets = (torch.tensor([0, 4, 8]),) if "bag" in table else ()
    if table == "largest norm":  # it scales rows: they are no small integers
        module.out.weight.requires_grad_(False)
    model = wrap(module)
    for step in range(3):
        yield step_of(model, words_of(ranks, key=step), *offsets)
        assert module.table.weight.grad.layout == torch.sparse_coo


@as_torch(how=["not", "to None", "to zero"])
def test_sparse_gradients_accumulate_however_they_are_zeroed(ranks, wrap, how):
    model = wrap(Words())
    for step in range(4):
        if how != "not":
            model.zero_grad(set_to_none=how == "to None")
        model(words_of(ranks, key=step)).sum().backward()
        yield grads_of(model)
        if step == 0:
            first = model.module.table.weight.grad
        if how != "to None" and wrap == ranks.wrap:
            assert model.module.table.weight.grad is first


class Towers(nn.Module):
    """Has several tables of several dtypes."""

    def __init__(self):
        super().__init__()
        sizes = [(7, 3), (400, 5), (5, 1), (90, 130), (30, 2)]
        self.tables = nn.ModuleList(nn.Embedding(*size, sparse=True) for size in sizes)
        self.tables[1].double()
        self.tables[2].bfloat16()
        integer_weights(self)

    def forward(self, words):
        return sum(
            table(words % table.num_embeddings).double().sum() for table in self.tables
        )


# The function that makes a model, and the words that it is given.
SIZES = {
    "several tables of any type": (Towers, {"n": 60, "n_rows": 400}),
    "several rounds of numbers": (
        lambda: nn.Embedding(300_000, 2, sparse=True),
        {"n": 80_000, "n_rows": 300_000},
    ),
    "rows longer than a segment": (
        lambda: nn.Embedding(5, 70_000, sparse=True),
        {"n": 3, "n_rows": 5},
    ),
    "several rounds of wide values": (
        lambda: nn.Embedding(4_000, 200, sparse=True, dtype=torch.float64),
        {"n": 3_000, "n_rows": 4_000},
    ),
}


@on_ranks()
def test_a_table_without_rows_may_have_a_dense_gradient(ranks):
    """torch's class raises that it expected a sparse one."""
    table = nn.Embedding(0, 4, sparse=True)
    model = ranks.wrap(nn.ModuleList([integer_weights(nn.Linear(2, 2)), table]))
    model.module.forward = lambda x: model.module[0](x).sum() + table.weight.sum()
    for _ in range(3):
        model(torch.ones(1, 2)).backward()
        assert table.weight.grad.layout is torch.strided


@as_torch(of=[*SIZES])
def test_sparse_gradients_of_any_size_and_type_are_averaged(ranks, wrap, of):
    make, words = SIZES[of]
    model = wrap(make())
    for step in range(3):
        yield step_of(model, words_of(ranks, key=step, **words))


@as_torch()
def test_recorded_backwards_average_sparse_gradients(ranks, wrap):
    model = wrap(Words())
    for step in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(words_of(ranks, key=step)).sum().backward(create_graph=True)
        yield grads_of(model)
        model.zero_grad()


@as_torch()
def test_a_frozen_sparse_embedding_has_no_gradient(ranks, wrap):
    module = Words()
    module.table.weight.requires_grad_(False)
    yield step_of(wrap(module), words_of(ranks))
    assert module.table.weight.grad is None


# ---- kept, shared, late -------------------------------------------------------------


def test_gradients_that_are_kept_do_not_change(ranks):
    ours = ranks.wrap(Words())
    kept, values = [], []
    for step in range(4):
        step_of(ours, words_of(ranks, key=step))
        kept.append(ours.module.table.weight.grad)
        values.append(kept[-1].to_dense().clone())
    for step, (grad, value) in enumerate(zip(kept, values, strict=True)):
        assert_equal(grad.to_dense(), value, f"the gradient of step {step}")


class Checkpointed(nn.Module):
    """Two checkpointed blocks use its embedding, whose hook fires once for each."""

    def __init__(self, declared, reentrant):
        super().__init__()
        self.table = nn.Embedding(3000, 6, sparse=declared)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.reentrant = reentrant

    def block(self, layer, words, x):
        rows = functional.embedding(words, self.table.weight, sparse=True)
        return layer(rows + x).clamp(-2, 2)

    def forward(self, words):
        x = torch.ones(1, requires_grad=True)
        for layer in (self.first, self.second):
            x = checkpoint(self.block, layer, words, x, use_reentrant=self.reentrant)
        return x


@on_ranks(declared=[True, False], reentrant=[True, False])
def test_an_embedding_may_be_used_in_two_checkpoints(ranks, declared, reentrant):
    module = integer_weights(Checkpointed(declared, reentrant), -1, 2)
    both = ByHand(ranks, module, bucket_cap_mb=0.001)
    for step in range(4):
        both.zero()
        both.step(words_of(ranks, key=step, n_rows=3000))


@on_ranks(3, is_sparse=[True, False])
def test_one_backward_may_reach_two_wrappers_in_opposite_order(ranks, is_sparse):
    plain = [Words(table=nn.Embedding(20, 6, sparse=is_sparse)) for _ in range(2)]
    models = [ranks.wrap(copy.deepcopy(one)) for one in plain]
    turn = ranks.rank % 2
    for step in range(3):
        words = words_of(ranks, key=step)
        for pair in (plain, models):
            for model in pair:
                model.zero_grad()
            outs = [pair[k](words) for k in (turn, 1 - turn)]
            (outs[0].sum() + outs[1].sum()).backward()
        for one, model in zip(plain, models, strict=True):
            layouts = SPARSE if is_sparse else {}
            assert_means(model.module, means_by_hand(ranks, one), layouts)


# ---- drawn uses: used by some, dense and sparse together, not declared --------------


class Tables(nn.Module):
    """A table that is declared sparse, and one that is not."""

    def __init__(self, n_rows):
        super().__init__()
        self.table = nn.Embedding(n_rows, 6, sparse=True)
        self.weight = nn.Parameter(torch.ones(n_rows, 6))
        self.other = nn.Parameter(torch.ones(6))

    def forward(self, uses):
        """Look up rows of a table, unless they are None; add the whole table."""
        total = self.other.sum()
        for weight, (words, factor) in zip(self.tables(), uses, strict=True):
            if words is not None:
                rows = functional.embedding(words, weight, sparse=True)
                total = total + (rows * self.other).sum()
            if factor:
                total = total + factor * weight.sum()
        return total

    def tables(self):
        return self.table.weight, self.weight


def dense(parameter):
    return None if parameter.grad is None else parameter.grad.to_dense()


def by_elements(grad):
    return grad.to_dense().to_sparse(2) if grad.is_sparse else grad


@on_ranks(n_rows=[20, 3000], seed=range(6))
def test_drawn_uses_of_tables_are_averaged_in_the_layout_of_their_gradients(
    ranks, n_rows, seed
):
    """Each rank draws its uses and resets; one dense gradient makes the mean dense."""
    same, own = random.Random(seed), random.Random(f"{seed} {ranks.rank}")
    both = ByHand(ranks, integer_weights(Tables(n_rows)))
    plain, ours = both.plain, both.ours.module
    for model in (plain, ours) if seed % 2 else ():
        model.weight.register_hook(by_elements)
    touched = set()

    def draw(key):
        uses = []
        for i in range(2):
            words = words_of(ranks, own.choice([0, 12]), n_rows, key=(seed, key, i))
            words = None if own.random() < 0.4 else words
            factor = own.choice([0, 0, 0, 2 + ranks.rank])
            if words is not None or factor:
                touched.add(i)
            uses.append((words, factor))
        return uses

    for step in range(12):
        way = own.choice(["nothing", "to None", "to None", "to zero"])
        if way != "nothing":
            both.zero(set_to_none=way == "to None")
        for micro in range(same.choice([0, 0, 1, 2])):
            uses = draw((step, micro))
            both.local(uses)
        uses = draw(step)
        plain(uses).backward()
        both.ours(uses).backward()
        grads = [p.grad for p in plain.tables()]
        mine = [
            (g is None or g.is_sparse, g if g is None else g.to_dense()) for g in grads
        ]
        rows = ranks.all((touched, mine))
        for i in set().union(*(row[0] for row in rows)):
            # A rank that has not used an undeclared table says nothing of its layout.
            users = [row[1][i] for row in rows if i == 0 or i in row[0]]
            is_sparse = all(user[0] for user in users)
            mean = mean_over([row[1][i][1] for row in rows])
            dims = 1 + (i == 1 and seed % 2)
            plain.tables()[i].grad = mean.to_sparse(dims) if is_sparse else mean
        touched.clear()
        for i, (p, q) in enumerate(zip(ours.tables(), plain.tables(), strict=True)):
            what = f"table {i}, step {step}"
            assert (p.grad is None) == (q.grad is None), what
            if q.grad is not None:
                assert p.grad.layout == q.grad.layout, what
                if q.grad.is_sparse:
                    assert p.grad.sparse_dim() == q.grad.sparse_dim(), what
                assert_equal(p.grad.to_dense(), q.grad.to_dense(), what)


def test_a_gradient_that_is_sparse_in_every_element_is_averaged_by_rows(ranks):
    both = ByHand(ranks, Words())
    both.ours.module.table.weight.register_hook(by_elements)
    both.step(words_of(ranks))


# ---- left out, and dense -----------------------------------------------------------


def test_a_sparse_embedding_that_no_rank_used_keeps_its_gradient(ranks):
    ours = ranks.wrap(Optional())
    nothing = torch.empty(0, dtype=torch.int64)
    ours(nothing).sum().backward()
    assert ours.module.table.weight.grad is None
    ours(words_of(ranks)).sum().backward()
    kept = ours.module.table.weight.grad
    values = kept.to_dense().clone()
    ours(nothing).sum().backward()
    assert ours.module.table.weight.grad is kept
    assert_equal(kept.to_dense(), values, "the gradient")


def test_rows_that_accumulated_and_were_reset_do_not_count_as_used(ranks):
    model = ranks.wrap(Optional())
    with model.no_sync():
        model(words_of(ranks)).sum().backward()
    model.zero_grad()
    model(words_of(ranks)[:0]).sum().backward()
    assert model.module.table.weight.grad is None


def test_dense_means_go_where_the_dense_gradient_was(ranks):
    """They also accumulate there, in a layout of the user's choice too."""
    both = ByHand(ranks, nn.Embedding(8, 4, sparse=True))
    for module in (both.plain, both.ours.module):
        module.weight.grad = torch.zeros(4, 8).t()
    mine = both.ours.module.weight.grad
    for step in range(3):
        version = mine._version
        means = both.step(words_of(ranks, n_rows=8, key=step), layouts={})
        assert both.ours.module.weight.grad is mine
        assert mine._version > version
        both.plain.weight.grad = means["weight"]


# ---- construction, copies, changes --------------------------------------------------


def test_what_only_one_rank_declares_sparse_is_named_on_every_rank(ranks):
    with pytest.raises(paceline.MismatchError, match=r"'table\.weight'.*sparse grad"):
        ranks.wrap(Words(table=nn.Embedding(20, 6, sparse=ranks.rank == 1)))


@on_ranks(clone=[pickled, copy.deepcopy])
def test_copies_of_a_wrapper_average_sparse_gradients(ranks, clone):
    first = paceline.DistributedDataParallel(Words())
    second = clone(first)
    plain = copy.deepcopy(first.module)
    plain(words_of(ranks)).sum().backward()
    means = means_by_hand(ranks, plain)
    for model in (first, second):
        model(words_of(ranks)).sum().backward()
        assert_means(model.module, means, SPARSE)


def test_an_embedding_that_is_swapped_for_a_sparse_one_is_noticed(ranks):
    both = ByHand(ranks, Words(table=nn.Embedding(20, 6)))
    both.step(words_of(ranks), layouts={})
    for module in (both.plain, both.ours.module):
        module.table = integer_weights(nn.Embedding(30, 6, sparse=True))
    for step in range(3):
        both.zero()
        both.step(words_of(ranks, key=step, n_rows=30))


def test_an_embedding_that_becomes_sparse_after_wrapping_is_averaged(ranks):
    both = ByHand(ranks, Words(table=nn.Embedding(20, 6)))
    for is_sparse in (False, True, False):
        both.plain.table.sparse = both.ours.module.table.sparse = is_sparse
        both.zero()
        both.step(words_of(ranks), layouts=SPARSE if is_sparse else {})


# ---- bits ---------------------------------------------------------------------------


@on_ranks(3, dtype=[*DTYPES])
def test_the_mean_of_rows_has_the_bits_of_the_dense_mean_on_every_rank(ranks, dtype):
    """Each rank has a row at most once, so nothing is rounded before the mean."""
    torch.manual_seed(3)
    tables = [nn.Embedding(50, 9, sparse=is_sparse) for is_sparse in (True, False)]
    models = [ranks.wrap(table.to(DTYPES[dtype])) for table in tables]
    words = torch.randperm(50, generator=ranks.generator("words"))[:20]
    factor = torch.randn(20, 9, generator=ranks.generator("factor")).to(DTYPES[dtype])
    for model in models:
        (model(words) * factor).sum().backward()
    thin, dense = (table.weight.grad for table in tables)
    assert bits(thin.to_dense()) == bits(dense)
    ranks.assert_same([thin.indices(), thin.values()], "rows")


# ---- failures -----------------------------------------------------------------------


def test_means_are_not_written_to_the_gradient_before_all_are_there():
    parameter = nn.Parameter(torch.zeros(4, 3))
    parameter.grad = torch.full((4, 3), 2.0)
    kept, version = parameter.grad, parameter.grad._version
    _, values, average = sparse_rows.room(parameter, None)
    values.fill_(5.0)
    assert_equal(average, torch.full((4, 3), 5.0), "the average")
    assert_equal(kept, torch.full((4, 3), 2.0), "the gradient")
    assert kept._version == version


def test_a_rank_stands_in_for_sparse_rows_while_another_device_is_the_default(ranks):
    model, plain = ranks.wrap(Words()), Words()
    words = words_of(ranks)
    (plain(words).sum() * ranks.rank).backward()
    means = means_by_hand(ranks, plain)
    with torch.device("meta"), model.join():
        if ranks.rank == 1:
            model(words).sum().backward()
    if ranks.rank == 1:
        grad = model.module.table.weight.grad.to_dense()
        assert_equal(grad, means["table.weight"], "the mean")


def spoil(grad):
    """Return a gradient with a row that its table does not have."""
    rows = torch.tensor([[10**6]])
    return torch.sparse_coo_tensor(
        rows, torch.ones(1, grad.shape[1]), (10**7, grad.shape[1])
    )


@on_ranks(3)
def test_a_rank_whose_rows_are_no_rows_fails_the_step_on_every_rank(ranks):
    both = ByHand(ranks, Words())
    weight = both.ours.module.table.weight
    kind, text = paceline.PeerError, r"the step of rank 1.* failed"
    if ranks.rank == 1:
        kind, text = RuntimeError, "wrap the model again"
    for step in range(4):
        both.zero()
        words = words_of(ranks, key=step)
        if step % 2 == 0:
            both.step(words)
            continue
        if ranks.rank == 1:
            handle = weight.register_post_accumulate_grad_hook(
                lambda p: setattr(p.grad, "data", spoil(p.grad))
            )
        with pytest.raises(kind, match=text):
            both.ours(words).sum().backward()
        if ranks.rank == 1:
            handle.remove()
