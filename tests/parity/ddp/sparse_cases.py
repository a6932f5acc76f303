"""Helpers for tests of sparse gradients."""

import torch
from cases import Twin, assert_equal, integer_weights, mean_over
from torch import nn


def means_by_hand(ranks, module):
    """Return the dense mean of each parameter's gradient, by name."""
    rows = ranks.all(
        {
            name: None if p.grad is None else p.grad.detach().to_dense()
            for name, p in module.named_parameters()
        }
    )
    return {name: mean_over([row[name] for row in rows]) for name in rows[0]}


def assert_means(module, means, layouts):
    """Compare gradients with means by hand, and check their layouts."""
    for name, p in module.named_parameters():
        layout = layouts.get(name, torch.strided)
        assert p.grad is not None, f"{name} has no gradient"
        assert p.grad.layout == layout, f"the layout of {name}: {p.grad.layout}"
        assert_equal(p.grad.detach().to_dense(), means[name], f"the mean of {name}")
        if layout == torch.sparse_coo:
            assert p.grad.is_coalesced(), name


SPARSE = {"table.weight": torch.sparse_coo}


class Words(nn.Module):
    """An embedding, and a layer whose gradients are dense."""

    def __init__(self, n_rows=20, width=6, table=None, dtype=torch.float32):
        super().__init__()
        self.table = table or nn.Embedding(n_rows, width, sparse=True)
        self.out = nn.Linear(self.table.embedding_dim, 3)
        integer_weights(self.to(dtype))

    def forward(self, words, *more):
        return self.out(self.table(words, *more))


class Optional(Words):
    """Does not use the embedding if there are no words."""

    def forward(self, words):
        if len(words) == 0:
            return self.out(torch.ones(2, self.out.in_features))
        return super().forward(words)


def words_of(ranks, n=12, n_rows=20, key=0):
    """Return this rank's row numbers; some occur more than once."""
    return torch.randint(0, n_rows, (n,), generator=ranks.generator("words", key, n))


class ByHand(Twin):
    """A plain model and the same model wrapped; gradients are averaged by hand."""

    def local(self, *inputs):
        """Run backward on both without averaging."""
        super().local(lambda model: model(*inputs).sum())

    def step(self, *inputs, layouts=SPARSE):
        """Run backward on both; check the means and return them."""
        self.plain(*inputs).sum().backward()
        self.ours(*inputs).sum().backward()
        means = means_by_hand(self.ranks, self.plain)
        assert_means(self.ours.module, means, layouts)
        return means
