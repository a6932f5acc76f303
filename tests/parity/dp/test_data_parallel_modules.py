"""Modules of many makes, and wrappers among threads, processes and other wrappers."""

import copy

import paceline
import pytest
import torch
from replicas import (
    Twin,
    assert_close,
    assert_same_state,
    integer_weights,
    integers,
    leaf,
    loss_of,
    net,
    reals,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Embedded(nn.Module):
    def __init__(self, is_sparse):
        super().__init__()
        self.table = integer_weights(nn.Embedding(10, 3, sparse=is_sparse))
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, index):
        return self.linear(self.table(index))


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_embeddings_get_the_plain_kind_of_gradient(wrap, is_sparse):
    twin = Twin(wrap, Embedded(is_sparse))
    for step in range(3):
        index = torch.tensor([1, 3, 3, 9, step, 1, 2])
        for model in twin.models:
            loss_of(model(index)).backward()
        mine, theirs = twin.inner.table.weight.grad, twin.plain.table.weight.grad
        assert mine.is_sparse == theirs.is_sparse == is_sparse
        assert_close(mine.to_dense(), theirs.to_dense())
        assert_close(twin.inner.linear.weight.grad, twin.plain.linear.weight.grad)
        if step == 0:
            twin.zero()


class Scale(nn.Parameter):
    """A parameter of a class that a forward asks for."""


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = Scale(integers(3))
        self.kept = Scale(integers(3, seed=1), requires_grad=False)

    def forward(self, x):
        is_kind = [isinstance(p, Scale) for p in self.parameters()]
        return x * self.scale * self.kept * (1 + sum(is_kind))


@pytest.mark.parametrize("is_recorded", [False, True])
def test_parameters_keep_their_class_in_replicas(wrap, is_recorded):
    twin = Twin(wrap, Scaled())
    with torch.set_grad_enabled(is_recorded):
        for _ in range(3):
            twin.compare(lambda model: model(integers(7, 3)))
    if is_recorded:
        twin.step(lambda model, x: loss_of(model(x)), integers(7, 3))


def transformer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double()


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


class Attention(nn.Module):
    """Returns weights too, and takes one input three times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True).double()

    def forward(self, x):
        out, weights = self.attention(x, x, x)
        return torch.cat([out, weights], 2)


MAKES = {
    "transformer": (transformer, (7, 5, 8)),
    "convolutions": (convolutions, (7, 2, 4, 4)),
    "attention": (Attention, (7, 5, 8)),
}


@pytest.mark.parametrize(("make", "shape"), MAKES.values(), ids=MAKES)
def test_modules_of_every_make_train_as_plain_ones(wrap, make, shape):
    twin = Twin(wrap, make())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in twin.models]
    for step in range(3):
        twin.zero()
        x = reals(*shape, seed=step).requires_grad_()
        twin.step(lambda model, x: model(x).square().mean(), x, exact=False)
        for optimizer in optimizers:
            optimizer.step()
    for model in twin.models:
        model.eval()
    with torch.no_grad():
        twin.compare(lambda model, x: model(x), reals(*shape, seed=9), exact=False)


def test_a_lazy_module_has_to_be_initialized_first(wrap):
    ours = wrap(nn.Sequential(nn.LazyLinear(2), nn.ReLU()).double())
    x = integers(7, 3)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        ours(x)
    ours.module(x)  # as the words advise
    assert torch.equal(ours(x), ours.module(x))


# ---- wrappers -----------------------------------------------------------------------


def test_a_wrapper_works_inside_another(wrap):
    module = net()
    ours = wrap(nn.Sequential(nn.Identity(), wrap(copy.deepcopy(module))), 3)
    twin = Twin(lambda inner, n: ours, module)
    for _ in range(2):
        twin.zero()
        x = integers(7, 3).requires_grad_()
        twin_x = leaf(x)
        loss_of(module(x)).backward()
        loss_of(ours(twin_x)).backward()
        assert_close(twin_x.grad, x.grad)
        for p, q in zip(ours.parameters(), module.parameters(), strict=True):
            assert_close(p.grad, q.grad)


def test_a_subclass_may_change_forward(wrap):
    class Scaled(paceline.DataParallel):
        def forward(self, x):
            return super().forward(2 * x) + 1

    twin = Twin(lambda module, n: wrap(module, n, Scaled), net())
    x = integers(7, 3)
    assert torch.equal(twin.ours(x), twin.plain(2 * x) + 1)


# ---- threads and processes of the user's --------------------------------------------


def test_batches_of_a_loader_with_processes_train_it(wrap):
    twin = Twin(wrap, net())
    twin.compare(lambda model, x: model(x), integers(7, 3))
    data = TensorDataset(integers(21, 3))
    for _ in range(2):
        for (x,) in DataLoader(data, batch_size=7, num_workers=2):
            twin.zero()
            twin.step(lambda model, x: loss_of(model(x)), x)


class ModelData(torch.utils.data.Dataset):
    """Runs a model in the loader's process."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(torch.full((1, 3), float(index), dtype=torch.float64))


def test_a_forked_process_may_run_the_bare_module(wrap):
    twin = Twin(wrap, net())
    twin.step(lambda model, x: loss_of(model(x)), integers(7, 3))
    mine, theirs = [
        torch.cat(list(DataLoader(ModelData(model), num_workers=1)))
        for model in (twin.inner, twin.plain)
    ]
    assert torch.equal(mine, theirs)
    assert_same_state(twin.ours, twin.plain)
    twin.zero()
    twin.step(lambda model, x: loss_of(model(x)), integers(7, 3))
