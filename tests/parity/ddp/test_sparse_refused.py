"""Sparse gradients that torch refuses, and that are averaged here."""

import copy

import torch
from cases import assert_equal, integer_weights, on_ranks
from sparse_cases import SPARSE, Words, assert_means, means_by_hand, words_of
from torch import nn
from torch.nn import functional

# ---- what torch refuses: used by some -----------------------------------------------


class Optional(Words):
    """Leaves the embedding out where there are no words."""

    def forward(self, words):
        if len(words) == 0:
            return self.out(torch.ones(2, self.out.in_features))
        return super().forward(words)


@on_ranks(2, 4)
def test_ranks_that_left_a_sparse_embedding_out_get_the_mean_too(ranks):
    module = integer_weights(Optional())
    plain, ours = copy.deepcopy(module), ranks.wrap(module)
    for step in range(4):
        plain.zero_grad()
        ours.zero_grad()
        words = words_of(ranks, key=step)[: 0 if (ranks.rank + step) % 2 else 12]
        plain(words).sum().backward()
        ours(words).sum().backward()
        assert_means(ours.module, means_by_hand(ranks, plain), SPARSE)


@on_ranks(2)
def test_a_sparse_embedding_that_no_rank_used_keeps_its_gradient(ranks):
    ours = ranks.wrap(integer_weights(Optional()))
    nothing = torch.empty(0, dtype=torch.int64)
    ours(nothing).sum().backward()
    assert ours.module.table.weight.grad is None
    ours(words_of(ranks)).sum().backward()
    kept = ours.module.table.weight.grad
    values = kept.to_dense().clone()
    ours(nothing).sum().backward()
    assert ours.module.table.weight.grad is kept
    assert_equal(kept.to_dense(), values, "the gradient")


@on_ranks(2)
def test_what_a_rank_accumulated_counts_where_only_others_use_the_embedding(ranks):
    module = integer_weights(Optional())
    plain, ours = copy.deepcopy(module), ranks.wrap(module)
    words = words_of(ranks)
    plain(words).sum().backward()
    with ours.no_sync():
        ours(words).sum().backward()
    words = words_of(ranks, key=1)[: 0 if ranks.rank else 12]
    plain(words).sum().backward()
    ours(words).sum().backward()
    assert_means(ours.module, means_by_hand(ranks, plain), SPARSE)


@on_ranks(2)
def test_what_only_unsynchronised_backwards_used_is_averaged_at_the_next(ranks):
    module = integer_weights(Optional())
    plain, ours = copy.deepcopy(module), ranks.wrap(module)
    for words in (words_of(ranks), torch.empty(0, dtype=torch.int64)):
        plain(words).sum().backward()
    with ours.no_sync():
        ours(words_of(ranks)).sum().backward()
    ours(torch.empty(0, dtype=torch.int64)).sum().backward()
    assert_means(ours.module, means_by_hand(ranks, plain), SPARSE)


# ---- what torch refuses: dense and sparse together ----------------------------------


@on_ranks(2, 4, who=["one rank", "all ranks"])
def test_a_dense_gradient_on_any_rank_makes_the_mean_dense_on_all(ranks, who):
    module = Words()
    plain, ours = copy.deepcopy(module), ranks.wrap(module)
    for step in range(4):
        for model in (plain, ours):
            model.zero_grad()
            is_dense = step % 2 == 0 and (who == "all ranks" or ranks.rank == 1)
            loss = model(words_of(ranks, key=step)).sum()
            if is_dense:
                table = model.module.table if model is ours else model.table
                loss = loss + (2 + ranks.rank) * table.weight.sum()
            loss.backward()
        layouts = {} if step % 2 == 0 else SPARSE
        assert_means(ours.module, means_by_hand(ranks, plain), layouts)


@on_ranks(2)
def test_dense_means_go_where_the_dense_gradient_was(ranks):
    """And accumulate from there, in a layout of the user's too."""
    module = nn.Embedding(8, 4, sparse=True)
    plain, ours = copy.deepcopy(module), ranks.wrap(module)
    for model in (plain, ours):
        weight = model.module.weight if model is ours else model.weight
        weight.grad = torch.zeros(4, 8).t()
    mine = ours.module.weight.grad
    for step in range(3):
        words = words_of(ranks, n_rows=8, key=step)
        plain(words).sum().backward()
        ours(words).sum().backward()
        means = means_by_hand(ranks, plain)
        assert_means(ours.module, means, {})
        assert ours.module.weight.grad is mine
        plain.weight.grad = means["weight"]


class Tied(nn.Module):
    """The output layer has the embedding's weight, as in language models."""

    def __init__(self, n_rows):
        super().__init__()
        self.table = nn.Embedding(n_rows, 6, sparse=True)
        self.out = nn.Linear(6, n_rows, bias=False)
        self.out.weight = self.table.weight

    def forward(self, words):
        return self.out(self.table(words))


@on_ranks(2, n_rows=[20, 3000])
def test_a_weight_tied_to_an_output_layer_is_averaged(ranks, n_rows):
    module = integer_weights(Tied(n_rows))
    plain, ours = copy.deepcopy(module), ranks.wrap(module)
    for step in range(3):
        plain.zero_grad()
        ours.zero_grad()
        words = words_of(ranks, key=step)
        plain(words).sum().backward()
        ours(words).sum().backward()
        assert_means(ours.module, means_by_hand(ranks, plain), {})


@on_ranks(2)
def test_a_gradient_that_is_sparse_in_every_element_is_averaged_by_rows(ranks):
    module = Words()
    plain, ours = copy.deepcopy(module), ranks.wrap(module)
    plain(words_of(ranks)).sum().backward()
    ours.module.table.weight.register_hook(lambda grad: grad.to_dense().to_sparse(2))
    ours(words_of(ranks)).sum().backward()
    assert_means(ours.module, means_by_hand(ranks, plain), SPARSE)


# ---- what torch refuses: sparse, but not declared -----------------------------------


class Looked(nn.Module):
    """A weight that is looked up by the function: nothing says that it is sparse."""

    def __init__(self, n_rows, n_sparse_dims=1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_rows, 6))
        self.other = nn.Parameter(torch.ones(6))
        if n_sparse_dims == 2:
            self.weight.register_hook(lambda grad: grad.to_dense().to_sparse(2))

    def forward(self, words, is_dense=False):
        if len(words) == 0:
            return self.other.sum()
        rows = functional.embedding(words, self.weight, sparse=True)
        out = (rows * self.other).sum()
        return out + 3 * self.weight.sum() if is_dense else out


@on_ranks(2, 4, n_rows=[20, 3000], dims=[1, 2])
def test_undeclared_sparse_gradients_are_averaged_and_stay_sparse(ranks, n_rows, dims):
    module = Looked(n_rows, dims)
    plain = Looked(n_rows)
    ours = ranks.wrap(module)
    for step in range(4):
        plain.zero_grad()
        ours.zero_grad()
        words = words_of(ranks, key=step)
        if step >= 2 and ranks.rank == step % 2:
            words = words[:0]  # left out here: sparse here too
        plain(words).backward()
        ours(words).backward()
        assert_means(
            ours.module, means_by_hand(ranks, plain), {"weight": torch.sparse_coo}
        )
        assert ours.module.weight.grad.sparse_dim() == dims


@on_ranks(2, n_rows=[20, 3000], how=["not", "to zero"])
def test_undeclared_sparse_gradients_accumulate(ranks, n_rows, how):
    plain, ours = Looked(n_rows), ranks.wrap(Looked(n_rows))
    for step in range(4):
        if step > 0 and how == "to zero":
            plain.zero_grad(set_to_none=False)
            ours.zero_grad(set_to_none=False)
        words = words_of(ranks, key=step)
        plain(words).backward()
        if step == 1:  # the next averages both
            with ours.no_sync():
                ours(words).backward()
            continue
        ours(words).backward()
        means = means_by_hand(ranks, plain)
        assert_means(ours.module, means, {"weight": torch.sparse_coo})
        for name, p in plain.named_parameters():
            p.grad = means[name].to_sparse(1) if name == "weight" else means[name]


@on_ranks(2, n_rows=[20, 3000])
def test_undeclared_sparse_gradients_of_unsynchronised_backwards_stay_sparse(
    ranks, n_rows
):
    plain, ours = Looked(n_rows), ranks.wrap(Looked(n_rows))
    for step in range(3):
        plain.zero_grad()
        ours.zero_grad()
        words = words_of(ranks, key=step)
        plain(words).backward()
        plain(words[:0]).backward()
        with ours.no_sync():
            ours(words).backward()
        ours(words[:0]).backward()  # uses it on no rank, and averages what there is
        means = means_by_hand(ranks, plain)
        assert_means(ours.module, means, {"weight": torch.sparse_coo})


@on_ranks(2, n_rows=[20, 3000])
def test_undeclared_sparse_and_dense_gradients_together_are_dense(ranks, n_rows):
    plain, ours = Looked(n_rows), ranks.wrap(Looked(n_rows))
    for step in range(6):
        plain.zero_grad()
        ours.zero_grad()
        words = words_of(ranks, key=step)
        # all dense, all sparse, one of each, and again
        is_dense = [True, False, ranks.rank == 0][step % 3]
        plain(words, is_dense).backward()
        ours(words, is_dense).backward()
        layouts = {"weight": torch.sparse_coo} if step % 3 == 1 else {}
        assert_means(ours.module, means_by_hand(ranks, plain), layouts)
