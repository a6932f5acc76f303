"""Sparse gradients that torch refuses and Paceline averages."""

import torch
from cases import assert_equal, integer_weights, on_ranks
from sparse_cases import SPARSE, ByHand, Words, words_of
from torch import nn
from torch.nn import functional

# ---- used by some -------------------------------------------------------------------


class Optional(Words):
    """Does not use the embedding if there are no words."""

    def forward(self, words):
        if len(words) == 0:
            return self.out(torch.ones(2, self.out.in_features))
        return super().forward(words)


def test_ranks_that_left_a_sparse_embedding_out_get_the_mean_too(ranks):
    both = ByHand(ranks, Optional())
    for step in range(4):
        both.zero()
        both.step(words_of(ranks, key=step)[: 0 if (ranks.rank + step) % 2 else 12])


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


@on_ranks(used=["by one rank", "by none"])
def test_what_a_rank_accumulated_counts_where_it_is_not_used_again(ranks, used):
    both = ByHand(ranks, Optional())
    both.local(words_of(ranks))
    is_used = used == "by one rank" and ranks.rank == 0
    both.step(words_of(ranks, key=1)[: 12 if is_used else 0])


# ---- dense and sparse together ------------------------------------------------------


class AlsoDense(Words):
    """Also adds the whole table times a factor, if one is given."""

    def forward(self, words, factor=0):
        out = super().forward(words).sum()
        return out + factor * self.table.weight.sum() if factor else out


@on_ranks(who=["one rank", "all ranks"])
def test_a_dense_gradient_on_any_rank_makes_the_mean_dense_on_all(ranks, who):
    both = ByHand(ranks, AlsoDense())
    for step in range(4):
        both.zero()
        is_dense = step % 2 == 0 and (who == "all ranks" or ranks.rank == 1)
        both.step(
            words_of(ranks, key=step),
            2 + ranks.rank if is_dense else 0,
            layouts={} if step % 2 == 0 else SPARSE,
        )


def test_dense_means_go_where_the_dense_gradient_was(ranks):
    """They also accumulate there, in a layout of the user's choice too."""
    both = ByHand(ranks, nn.Embedding(8, 4, sparse=True))
    for module in (both.plain, both.ours.module):
        module.weight.grad = torch.zeros(4, 8).t()
    mine = both.ours.module.weight.grad
    for step in range(3):
        means = both.step(words_of(ranks, n_rows=8, key=step), layouts={})
        assert both.ours.module.weight.grad is mine
        both.plain.weight.grad = means["weight"]


class Tied(nn.Module):
    """The output layer shares the embedding's weight, as in language models."""

    def __init__(self, n_rows):
        super().__init__()
        self.table = nn.Embedding(n_rows, 6, sparse=True)
        self.out = nn.Linear(6, n_rows, bias=False)
        self.out.weight = self.table.weight

    def forward(self, words):
        return self.out(self.table(words))


@on_ranks(n_rows=[20, 3000])
def test_a_weight_tied_to_an_output_layer_is_averaged(ranks, n_rows):
    both = ByHand(ranks, integer_weights(Tied(n_rows)))
    for step in range(3):
        both.zero()
        both.step(words_of(ranks, key=step), layouts={})


def test_a_gradient_that_is_sparse_in_every_element_is_averaged_by_rows(ranks):
    both = ByHand(ranks, Words())
    weight = both.ours.module.table.weight
    weight.register_hook(lambda grad: grad.to_dense().to_sparse(2))
    both.step(words_of(ranks))


# ---- sparse, but not declared -------------------------------------------------------

UNDECLARED = {"weight": torch.sparse_coo}


class Looked(nn.Module):
    """Looks up a weight by a function, without declaring that it is sparse."""

    def __init__(self, n_rows):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_rows, 6))
        self.other = nn.Parameter(torch.ones(6))

    def forward(self, words, is_dense=False):
        if len(words) == 0:
            return self.other.sum()
        rows = functional.embedding(words, self.weight, sparse=True)
        out = (rows * self.other).sum()
        return out + 3 * self.weight.sum() if is_dense else out


@on_ranks(n_rows=[20, 3000], dims=[1, 2])
def test_undeclared_sparse_gradients_are_averaged_and_stay_sparse(ranks, n_rows, dims):
    both = ByHand(ranks, Looked(n_rows))
    weight = both.ours.module.weight
    if dims == 2:
        weight.register_hook(lambda grad: grad.to_dense().to_sparse(2))
    for step in range(4):
        both.zero()
        is_left_out = step >= 2 and ranks.rank == step % 2  # it gets a sparse mean
        words = words_of(ranks, key=step)[: 0 if is_left_out else 12]
        both.step(words, layouts=UNDECLARED)
        assert weight.grad.sparse_dim() == dims


@on_ranks(n_rows=[20, 3000], how=["not", "to zero"])
def test_undeclared_sparse_gradients_accumulate(ranks, n_rows, how):
    both = ByHand(ranks, Looked(n_rows))
    for step in range(4):
        if step > 0 and how == "to zero":
            both.zero(set_to_none=False)
        if step == 1:  # the next step averages both
            both.local(words_of(ranks, key=step))
            continue
        means = both.step(words_of(ranks, key=step), layouts=UNDECLARED)
        both.plain.weight.grad = means["weight"].to_sparse(1)
        both.plain.other.grad = means["other"]


@on_ranks(n_rows=[20, 3000])
def test_undeclared_sparse_gradients_of_unsynchronised_backwards_stay_sparse(
    ranks, n_rows
):
    both = ByHand(ranks, Looked(n_rows))
    for step in range(3):
        both.zero()
        words = words_of(ranks, key=step)
        both.local(words)
        both.step(words[:0], layouts=UNDECLARED)  # again without use on any rank


@on_ranks(n_rows=[20, 3000])
def test_undeclared_sparse_and_dense_gradients_together_are_dense(ranks, n_rows):
    both = ByHand(ranks, Looked(n_rows))
    for step in range(6):
        both.zero()
        # All dense, all sparse, one of each, and so on.
        is_dense = [True, False, ranks.rank == 0][step % 3]
        layouts = UNDECLARED if step % 3 == 1 else {}
        both.step(words_of(ranks, key=step), is_dense, layouts=layouts)
