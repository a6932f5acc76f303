"""Whole programs with replicas on GPUs, beside the plain module.

Weights change hands, forms and memory between forwards, and between a forward and its
backward; all that a program returns, gradients and state must be the plain module's.
"""

import copy
import pickle

import paceline
import pytest
import torch
from gpu_programs import F64, Parent, bare, compare, linear, step
from replicas import (
    assert_same,
    assert_same_grads,
    integer_weights,
    integers,
    loss_of,
    smooth_net,
)
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("n_gpus")


class Scaled:
    """Has weights be three times as large for a while."""

    def __init__(self, model, how):
        self.parameters, self.how = list(model.parameters()), how

    def __enter__(self):
        kept = [p.data for p in self.parameters]
        if self.how == "written":
            kept = [p.data.clone() for p in self.parameters]
        self.kept = kept
        for p in self.parameters:
            if self.how == "written":
                p.data.mul_(3)
            elif self.how == "replaced":
                p.data = p.data * 3
            else:
                other = nn.Parameter(p.detach() * 3)
                torch.utils.swap_tensors(p, other)

    def __exit__(self, *_):
        for p, values in zip(self.parameters, self.kept, strict=True):
            if self.how == "written":
                p.data.copy_(values)
            elif self.how == "replaced":
                p.data = values
            else:
                torch.utils.swap_tensors(p, nn.Parameter(values))


# ---- parameters that are no parameters ----------------------------------------------


class TwoWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(integers(3, 3))
        self.last = nn.Parameter(integers(3, 3, seed=1))

    def forward(self, x):
        return (x @ self.first).tanh() @ self.last


def given(model, seed):
    """Return tensors without a graph for the parameters of a model."""
    return {
        name: integers(*p.shape, seed=seed) * 0.5
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("how", ["new", "written"])
def test_tensors_for_parameters_belong_to_the_graphs_that_saved_them(how):
    """As a hypernetwork, or an evaluation with drawn weights, gives them."""
    found = []
    for model in (TwoWeights(), paceline.DataParallel(TwoWeights())):
        parent = Parent(model)
        x = integers(7, 3).requires_grad_()
        weights = given(parent, 5)
        kept = {name: tensor.clone() for name, tensor in weights.items()}
        one = torch.func.functional_call(parent, weights, (x,))
        if how == "new":
            other = given(parent, 6)
        else:
            other = weights
            for tensor in weights.values():
                tensor.data.mul_(2)
        two = torch.func.functional_call(parent, other, (x.detach(),))
        for name, tensor in weights.items():
            tensor.data.copy_(kept[name])
        loss_of(one).backward()
        found.append((one.detach(), two, x.grad))
    assert_same(found[1], found[0], exact=False)


def test_tensors_for_parameters_that_a_forward_hands_out_stay_as_they_are():
    found = []

    class Shows(paceline.DataParallel):
        def gather(self, outputs, output_device):
            found.append(outputs[1])
            return super().gather(outputs, output_device)

    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(integers(3, 3))

        def forward(self, x):
            return self.weight

    parent = Parent(Shows(Weight()))
    weights = given(parent, 5)
    with torch.no_grad():
        torch.func.functional_call(parent, weights, (integers(7, 3),))
        (shown,) = found
        expected = shown.clone()
        for tensor in weights.values():
            tensor.data.mul_(2)
        torch.func.functional_call(parent, weights, (integers(7, 3),))
    assert_same(shown, expected)


# ---- a backward within a forward ----------------------------------------------------


class Descends(nn.Module):
    """Runs a backward in its forward, whatever the caller's mode."""

    def __init__(self, thaws=False):
        super().__init__()
        self.layer, self.table = linear(3, 2), nn.Embedding(4, 3, sparse=True).double()
        self.thaws = thaws
        if thaws:
            self.layer.requires_grad_(False)

    def forward(self, x):
        self.layer.weight.requires_grad_(True)
        with torch.enable_grad():
            rows = self.table(x[:, 0].long().abs())
            loss_of(self.layer(x) + self.layer(rows)).backward()
        self.layer.weight.requires_grad_(not self.thaws)
        return self.layer(x)


@pytest.mark.parametrize("thaws", [False, True])
@pytest.mark.parametrize("has_grads", [False, True])
def test_a_backward_in_a_forward_without_gradients_reaches_all_of_them(
    thaws, has_grads
):
    def make():
        torch.manual_seed(0)
        return Descends(thaws)

    def totals(model):
        if has_grads:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        with torch.no_grad():
            model(integers(6, 3))
            model(integers(6, 3))
        return [p.grad for p in model.parameters()]

    class Thirds(nn.Module):
        """What replicas do: the loss weighs the rows of each from 1 on."""

        def __init__(self, n):
            super().__init__()
            self.inner, self.n = make(), n

        def forward(self, x):
            return torch.cat([self.inner(part) for part in x.tensor_split(self.n)])

    ours = paceline.DataParallel(make())
    expected = totals(Thirds(len(ours.device_ids)))
    for mine, theirs in zip(totals(ours), expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.equal(mine.to_dense(), theirs.to_dense())


# ---- weights that change hands ------------------------------------------------------


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_checkpoint_repeats_its_forward_with_the_weights_put_back(how):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = smooth_net(), linear(2, 2)
            self.register_buffer("n_calls", torch.zeros(1, **F64))

        def forward(self, x):
            self.n_calls = self.n_calls + 1
            out = checkpoint(self.inner, x, use_reentrant=False)
            return self.last(out) * self.n_calls

    def program(model):
        out = model(integers(7, 3))
        with Scaled(model, how), torch.no_grad():
            other = model(integers(7, 3))
        loss_of(out).backward()
        return other

    compare(Checkpointed, program)


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_three_orders_of_gradients_with_other_weights_between_them(how):
    def program(model):
        parameters = list(model.parameters())
        loss = loss_of(model(integers(7, 3))) + model(integers(5, 3)).exp().sum()
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        with Scaled(model, how), torch.no_grad():
            model(integers(7, 3))
        norm = sum((g * g).sum() for g in first)
        second = torch.autograd.grad(norm, parameters, create_graph=True)
        with Scaled(model, how):
            model(integers(7, 3))
        sum((g * g).sum() for g in second).backward()
        return [g.detach() for g in (*first, *second)]

    compare(smooth_net, program)


@pytest.mark.parametrize("how", ["written", "replaced", "swapped"])
def test_evaluations_with_averages_between_accumulated_steps(how):
    def program(model):
        kept = []
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.9, foreach=True)
        for k in range(6):
            step(model, integers(7, 3, seed=k), kept)
            if k % 2 == 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=k % 4 == 1)
            with Scaled(model, how), torch.inference_mode():
                values = model(integers(5, 3)).tolist()
            kept.append(torch.tensor(values, **F64))
        return kept

    compare(smooth_net, program)


def test_saved_tensors_on_the_host_outlive_a_forward_with_other_weights():
    def program(model):
        with torch.autograd.graph.save_on_cpu():
            out = model(integers(7, 3))
        with Scaled(model, "written"), torch.no_grad():
            other = model(integers(7, 3))
        loss_of(out).backward()
        return other

    compare(smooth_net, program)


def test_conversions_may_swap_tensors(monkeypatch):
    monkeypatch.setattr(
        torch.__future__, "_swap_module_params_on_conversion", True, raising=True
    )

    def program(model):
        kept = []
        for dtype in (torch.float64, torch.float32, torch.float64):
            bare(model).to(dtype)
            step(model, integers(7, 3).to(dtype), kept)
            model.zero_grad()
        step(model, integers(7, 3), kept)
        return kept

    compare(lambda: nn.Sequential(linear(3, 4), linear(4, 2)), program)


def test_parameters_may_take_over_memory():
    def program(model):
        kept = []
        for k in range(3):
            with torch.no_grad():
                bare(model).weight.set_(integers(2, 3, seed=k).clone())
            step(model, integers(7, 3), kept)
        return kept

    compare(lambda: linear(3, 2), program)


def test_parameters_may_share_memory():
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(integers(3, 3).clone())
            self.same = nn.Parameter(self.first.data)
            self.part = nn.Parameter(self.first.data[:2])

        def forward(self, x):
            return (x @ self.first).tanh() @ self.same @ self.part.t()

    def program(model):
        kept = []
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            step(model, integers(7, 3), kept)
            optimizer.step()
        return kept

    compare(Shares, program)


def test_a_tensor_is_a_buffer_and_a_parameter_in_turn():
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(integers(3))
            self.register_buffer("turn", integers(3, seed=3).clone())

        def forward(self, x):
            return x * self.weight + x.square() * self.turn

    def program(model):
        module, kept = bare(model), []
        for k in range(4):
            step(model, integers(7, 3, seed=k), kept)
            if k % 2 == 0:
                module.turn = nn.Parameter(module._buffers.pop("turn"))
            else:
                module.register_buffer("turn", module._parameters.pop("turn").data)
        return kept

    compare(Turns, program)


def test_buffers_made_in_inference_mode_come_and_go():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear(3, 3)
            self.register_buffer("shift", torch.zeros(3, **F64))

        def forward(self, x):
            return self.layer(x) + self.shift

    def program(model):
        module, kept = bare(model), []
        for k in range(3):
            with torch.inference_mode():
                module.shift = module.layer.weight.mean(0) * (k + 1)
                values = model(integers(7, 3)).tolist()
            kept.append(torch.tensor(values, **F64))
            module.shift = module.shift.clone()
            step(model, integers(7, 3), kept)
        return kept

    compare(Shifted, program)


# ---- weights that are computed ------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).t()


def test_parametrizations_may_be_cached_over_several_calls():
    def make():
        module = nn.Sequential(linear(3, 3), nn.Tanh(), linear(3, 3), linear(3, 3))
        for i in (0, 2, 3):
            parametrize.register_parametrization(module[i], "weight", Symmetric())
        return module

    def program(model):
        kept = []
        for k in range(4):
            with parametrize.cached():
                outs = [model(integers(n, 3, seed=k + n)) for n in (7, 5, 6)]
                sum(map(loss_of, outs)).backward()
            kept += [out.detach() for out in outs]
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
        return kept

    compare(make, program)


# ---- graphs and ends ----------------------------------------------------------------


def test_copies_may_be_made_and_trained_before_a_backward():
    def program(model):
        out = model(integers(7, 3))
        twin, read = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        kept = []
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2)
        step(twin, integers(7, 3), kept)
        step(read, integers(7, 3), kept)
        loss_of(out).backward()
        return [*kept, *[p.grad for p in (*twin.parameters(), *read.parameters())]]

    compare(smooth_net, program)


def test_a_call_that_fails_leaves_earlier_graphs_and_later_weights_alone():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = smooth_net()

        def forward(self, x):
            out = self.layer(x)
            if x[-1, 0] == 99:
                raise ValueError("a row of 99")
            return out

    def program(model):
        kept = []
        for k in range(4):
            x = integers(7, 3, seed=k)
            first, bad = model(x), x.clone()
            bad[-1] = 99
            with pytest.raises(ValueError, match="a row of 99"):
                model(bad)
            with Scaled(model, "written"), torch.no_grad():
                kept.append(model(x))
            loss_of(first).backward()
        return kept

    compare(Picky, program)


def test_two_wrappers_of_other_devices_share_a_module():
    plain = smooth_net()
    module = copy.deepcopy(plain)
    one, two = paceline.DataParallel(module), paceline.DataParallel(module, [1, 0])
    x = integers(7, 3)
    first, second = one(x), two(x * 2)
    with Scaled(module, "written"), torch.no_grad():
        one(x)
    (loss_of(first) + loss_of(second)).backward()
    (loss_of(plain(x)) + loss_of(plain(x * 2))).backward()
    assert_same_grads(module, plain, exact=False)


def test_casts_of_one_autocast_belong_to_their_step():
    def make():
        layers = nn.Linear(4, 4), nn.Linear(4, 2)
        return integer_weights(nn.Sequential(*layers), dtype=torch.float32)

    def program(model):
        kept = []
        x = integers(8, 4, dtype=torch.float32)
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                first = model(x)
                with torch.no_grad():
                    kept.append(model(x))
                second = model(x)
            (loss_of(first.float()) + second.float().sum()).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
        return kept

    compare(make, program)
