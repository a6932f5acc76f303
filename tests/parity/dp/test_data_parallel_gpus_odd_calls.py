"""Odd modules, and odd ways to call them, with replicas on GPUs.

What a program returns, its gradients and its state must be the plain module's.
"""

import collections
import dataclasses

import paceline
import pytest
import torch
from gpu_programs import F64, N_ROWS, bare, compare, linear, train
from replicas import (
    assert_same,
    integer_weights,
    integers,
    loss_of,
    smooth_net,
)
from torch import nn

pytestmark = pytest.mark.usefixtures("n_gpus")


# ---- inputs and outputs -------------------------------------------------------------


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    pair: tuple
    name: str = "batch"


class TakesAnything(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = smooth_net()

    def forward(self, batch, *, more=None, scale=1):
        a, b = batch.pair
        out = self.net(batch.x + a) + self.net(b["inner"])
        if more:
            out = out + sum(more["terms"])
        out = out * scale
        kind = collections.namedtuple("Result", "out, others")
        return {
            "all": [Batch(out, (out.sum(1), None))],
            "mean": out.square().mean(1),
        }, (kind(out * 2, (out.relu(),)).out)


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 7, 13])
def test_arguments_and_outputs_may_be_structures(n_rows):
    def program(model):
        x, a, b = (integers(n_rows, 3, seed=k).requires_grad_() for k in range(3))
        more = {"terms": [integers(n_rows, 2), integers(n_rows, 1)]}
        batch = Batch(x, (a, {"inner": b}))
        found, twice = model(batch, more=more, scale=torch.tensor(3.0, **F64))
        (inner,) = found["all"]
        (loss_of(inner.x) + inner.pair[0].prod() + loss_of(twice)).backward()
        assert inner.name == "batch"
        return [x.grad, a.grad, b.grad, found["mean"].detach(), twice.detach()]

    compare(TakesAnything, program)


def test_one_tensor_may_be_several_arguments():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = smooth_net()

        def forward(self, x, y, *, z):
            return self.net(x) * self.net(y).exp() + self.net(z)

    def program(model):
        x = integers(N_ROWS, 3).requires_grad_()
        loss_of(model(x, x, z=x)).backward()
        return [x.grad]

    compare(Both, program)


def test_inputs_may_be_views_of_all_sorts():
    def program(model):
        grads = []
        whole = integers(9, 14).requires_grad_()
        for x in (
            whole.t()[:7, 1:4],
            whole[1:8, ::5],
            whole[0, :3].expand(7, 3),
            whole.flatten()[:21].view(3, 7).t(),
            whole.flip(0)[:7, :3],
        ):
            whole.grad = None
            loss_of(model(x)).backward()
            grads.append(whole.grad.clone())
        return grads

    compare(smooth_net, program)


def test_batches_of_all_sizes_follow_one_another():
    def program(model):
        kept = []
        for n_rows in (7, 1, 2, 1, 3, 8, 1, 5, 2):
            out = model(integers(n_rows, 3, seed=n_rows))
            loss_of(out).backward()
            kept.append(out.detach())
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.25)
        return kept

    compare(smooth_net, program)


def test_a_batch_may_lie_along_another_dimension():
    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(integers(2, 3).clone())

        def forward(self, x):
            return (self.weight @ x).tanh()

    def program(model):
        x = integers(3, N_ROWS).requires_grad_()
        for _ in range(2):
            loss_of(model(x)).backward()
        return [x.grad]

    compare(Columns, program, dim=1)


# ---- modules ------------------------------------------------------------------------


def test_wrappers_may_be_parts_of_a_model():
    class Parts(nn.Module):
        def __init__(self, wraps):
            super().__init__()
            self.parts = nn.ModuleList([smooth_net(), linear(2, 3), smooth_net()])
            if wraps:
                for k in (0, 2):
                    self.parts[k] = paceline.DataParallel(self.parts[k])

        def forward(self, x):
            return self.parts[2](self.parts[1](self.parts[0](x)).tanh())

    plain, inner = Parts(False), Parts(True)
    for ours in (inner, paceline.DataParallel(inner)):
        for model in (plain, ours):
            model.zero_grad()
            loss_of(model(integers(N_ROWS, 3))).backward()
        theirs = [p.grad for p in plain.parameters()]
        assert_same([p.grad for p in ours.parameters()], theirs, exact=False)


class Notes(nn.Linear):
    """Notes how many rows each of its calls has."""

    def __init__(self):
        super().__init__(3, 2, dtype=torch.float64)
        self.n_rows = []

    def forward(self, x):
        self.n_rows.append(len(x))
        return super().forward(x)


@pytest.mark.parametrize("n_rows", [1, N_ROWS])
def test_a_wrapper_in_a_replica_calls_its_module_plainly(n_gpus, n_rows):
    inner = Notes()
    ours = paceline.DataParallel(nn.Sequential(paceline.DataParallel(inner)))
    expected = [len(part) for part in torch.ones(n_rows).tensor_split(n_gpus)]
    for _ in range(3):  # in order at first
        inner.n_rows.clear()
        ours(integers(n_rows, 3))
        assert sorted(inner.n_rows, reverse=True) == [n for n in expected if n > 0]


def test_one_module_may_be_there_under_several_names():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear(3, 3)
            self.b = nn.Sequential(self.a, nn.Tanh())
            self.names = {"c": self.b, "list": [self.a]}
            self.d = nn.ModuleDict({"e": self.a})

        def forward(self, x):
            out = self.d["e"](self.b(self.a(x)))
            return out + self.a.weight.sum()

    def program(model):
        kept = []
        train(model, kept)
        bare(model).a = integer_weights(nn.Linear(3, 3), seed=4)
        train(model, kept)
        return kept

    compare(Shared, program)


def test_a_layer_may_be_made_in_a_forward():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = linear(3, 3), None

        def forward(self, x):
            if self.last is None:
                return self.first(x)
            return self.last(self.first(x).tanh())

    def program(model):
        kept = []
        train(model, kept)
        bare(model).last = linear(3, 2)
        train(model, kept)
        bare(model).last = None
        model.zero_grad(set_to_none=False)
        train(model, kept)
        return kept

    compare(Late, program)


def test_parameters_may_be_in_lists_and_dicts():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.some = nn.ParameterList([integers(3, 3, seed=k) for k in range(3)])
            self.named = nn.ParameterDict({"a": integers(3), "b": integers(3, seed=2)})

        def forward(self, x):
            for weight in self.some:
                x = (x @ weight * 0.1).tanh()
            return x * self.named["a"] + self.named["b"]

    def program(model):
        kept = []
        train(model, kept)
        bare(model).some.append(nn.Parameter(integers(3, 3, seed=8)))
        bare(model).named["a"] = nn.Parameter(integers(3, seed=9))
        train(model, kept)
        return kept

    compare(Lists, program)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.LSTM(3, 4, batch_first=True, bidirectional=True).double()

    def forward(self, x, state=None):
        out, (h, c) = self.rnn(x, state)
        return out, h.transpose(0, 1), c.transpose(0, 1)


def test_a_recurrent_net_carries_its_state():
    class Carries(Recurrent):
        def forward(self, x, h=None, c=None):
            if h is None:
                return super().forward(x)
            state = h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()
            return super().forward(x, state)

    def program(model):
        x = integers(N_ROWS, 5, 3)
        out, h, c = model(x)
        for _ in range(2):
            out, h, c = model(x, h, c)
        (out.sum() + loss_of(h)).backward()
        return [out.detach(), c.detach()]

    compare(Carries, program)


def test_attention_and_embeddings_train():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(5, 4, padding_idx=0)
            layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.double()

        def forward(self, tokens):
            return (
                self.layers(self.table(tokens), src_key_padding_mask=tokens == 0)
                @ self.table.weight.t()
            )

    def program(model):
        optimizer = torch.optim.SGD(model.parameters(), 1e-2, 0.9)
        kept = []
        for k in range(3):
            optimizer.zero_grad()
            tokens = integers(N_ROWS, 6, seed=k, low=0, high=4).long()
            tokens[:, 0] = 1
            out = model(tokens)
            out.square().mean().backward()
            optimizer.step()
            kept.append(out.detach())
        return kept

    compare(Attends, program)


# ---- hooks --------------------------------------------------------------------------


def test_hooks_on_the_module_and_its_parameters_see_the_whole():
    def program(model):
        seen = []
        module = bare(model)
        handles = [
            module[0].weight.register_hook(
                lambda grad: seen.append(grad.clone()) or grad * 2
            ),
            module[2].bias.register_post_accumulate_grad_hook(
                lambda p: seen.append(p.grad.clone())
            ),
            model.register_forward_hook(lambda m, args, out: out * 3),
            model.register_forward_pre_hook(lambda m, args: (args[0] + 1,)),
            model.register_full_backward_hook(
                lambda m, given, got: seen.append(got[0].clone())
            ),
        ]
        train(model, seen)
        for handle in handles[::2]:
            handle.remove()
        train(model, seen)
        return seen

    compare(smooth_net, program)


def test_hooks_of_parts_that_change_values_do_so_in_all_replicas():
    def program(model):
        module, kept = bare(model), []
        module[0].register_forward_hook(lambda m, args, out: out * m.weight.sum())
        module[1].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,))
        module[2].register_forward_pre_hook(lambda m, args: (args[0] - m.bias.sum(),))
        train(model, kept)
        return kept

    compare(smooth_net, program)
