"""Odd programs with replicas on GPUs, each beside the plain module.

What a program returns, its gradients and its state must be the plain module's.
"""

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
from torch.nn.utils import parametrizations, parametrize

pytestmark = pytest.mark.usefixtures("n_gpus")


# ---- optimizers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "fused": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Rprop, {}),
        (torch.optim.LBFGS, {"max_iter": 4}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_optimizers_of_all_kinds_see_the_same_gradients(kind, options):
    def program(model):
        kept, optimizer = [], kind(model.parameters(), **options)
        if kind is not torch.optim.LBFGS:
            train(model, kept, optimizer)
            return kept

        def closure():
            optimizer.zero_grad()
            loss = model(integers(N_ROWS, 3)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            kept.append(optimizer.step(closure).detach())
        return kept

    compare(smooth_net, program)


def test_an_optimizer_may_step_in_backward():
    def program(model):
        kept = []
        optimizers = {p: torch.optim.SGD([p], 1e-3) for p in model.parameters()}

        def update(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        train(model, kept)
        return kept

    compare(smooth_net, program)


def test_gradients_may_be_clipped_scaled_and_kept_between_steps():
    def program(model):
        kept = []
        for _ in range(3):
            train(model, kept, seeds=(1, 2))
            kept.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            kept += [p.grad.clone() for p in model.parameters()]
            for p in model.parameters():
                p.grad.mul_(0.5)
        return kept

    compare(smooth_net, program)


def test_gradients_may_be_views_of_one_vector():
    def program(model):
        kept = []
        parameters = list(model.parameters())
        vector = torch.zeros(sum(p.numel() for p in parameters), **F64)
        at = 0
        for p in parameters:
            p.grad = vector[at : at + p.numel()].view_as(p)
            at += p.numel()
        train(model, kept)
        return [*kept, vector]

    compare(smooth_net, program)


def test_parameters_may_be_views_of_one_vector():
    def program(model):
        kept = []
        parameters = list(model.parameters())
        vector = nn.utils.parameters_to_vector(parameters).detach()
        at = 0
        for p in parameters:
            p.data = vector[at : at + p.numel()].view_as(p)
            at += p.numel()
        for _ in range(3):
            train(model, kept, seeds=(1,))
            vector.mul_(0.5)
        return kept

    compare(smooth_net, program)


# ---- weights that change between forward and backward ------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_loaded_between_forward_and_backward_is_as_with_the_module(assign):
    """In place is an error where a graph needs the old ones; assigned, it is not."""

    def program(model):
        state = {n: v * 2 for n, v in bare(model).state_dict().items()}
        out = model(integers(N_ROWS, 3).requires_grad_())
        bare(model).load_state_dict(state, assign=assign)
        try:
            loss_of(out).backward()
            error = "none"
        except RuntimeError as raised:
            error = "modified by an inplace" if "inplace" in str(raised) else "other"
        kept = []
        train(model, kept)
        return [error, kept]

    compare(smooth_net, program)


def test_averages_of_weights_are_kept_beside_the_training():
    def program(model):
        kept, optimizer = [], torch.optim.SGD(model.parameters(), 1e-2)
        average = torch.optim.swa_utils.AveragedModel(
            bare(model), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for seed in range(4):
            train(model, kept, optimizer, seeds=(seed,))
            average.update_parameters(bare(model))
            with torch.no_grad():
                kept.append(average(integers(N_ROWS, 3)))
        return kept

    compare(smooth_net, program)


def test_the_average_of_a_wrapper_is_a_wrapper():
    ours, plain = paceline.DataParallel(smooth_net()), smooth_net()
    averages = [torch.optim.swa_utils.AveragedModel(m) for m in (ours, plain)]
    for _ in range(2):
        for model, average in zip((ours, plain), averages, strict=True):
            loss_of(model(integers(N_ROWS, 3))).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad * 1e-3)
            average.update_parameters(model)
        with torch.no_grad():
            outs = [average(integers(N_ROWS, 3)) for average in averages]
        assert_same(outs[0], outs[1], exact=False)


def test_weights_are_tied_untied_and_tied_again():
    def make():
        module = nn.Sequential(linear(3, 3), nn.Tanh(), linear(3, 3))
        module[2].weight = module[0].weight
        return module

    def program(model):
        kept, module = [], bare(model)
        train(model, kept)
        module[2].weight = nn.Parameter(module[0].weight.detach().clone())
        train(model, kept)
        module[2].weight = module[0].weight
        train(model, kept)
        return kept

    compare(make, program)


def test_layers_are_frozen_and_thawed_while_gradients_add_up():
    def program(model):
        kept, module = [], bare(model)
        for k in range(4):
            module[0].requires_grad_(k % 2 == 0)
            module[2].weight.requires_grad_(k % 3 != 0)
            train(model, kept, seeds=(k,))
        return kept

    compare(smooth_net, program)


def test_layers_come_and_go():
    def program(model):
        kept, module = [], bare(model)
        train(model, kept)
        module.append(integer_weights(nn.Linear(2, 4)))
        train(model, kept)
        module[0] = integer_weights(nn.Linear(3, 4), seed=9)
        train(model, kept)
        del module[3]
        module.insert(1, nn.BatchNorm1d(4).double().eval())
        train(model, kept)
        return kept

    compare(smooth_net, program)


def test_a_module_is_cast_back_and_forth():
    def program(model):
        kept, module = [], bare(model)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float64):
            module.to(dtype)
            model.zero_grad()
            out = model(integers(N_ROWS, 3, dtype=dtype))
            out.sum().backward()
        train(model, kept)
        return kept

    compare(lambda: nn.Sequential(linear(3, 4), linear(4, 2)), program)


# ---- buffers ------------------------------------------------------------------------


class Counts(nn.Module):
    """A buffer that each forward adds to, in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = linear(3, 2), how
        self.register_buffer("count", torch.zeros(1, **F64))

    def forward(self, x):
        if self.how == "in place":
            self.count += 1
        elif self.how == "through data":
            self.count.data.add_(1)
        elif self.how == "anew":
            self.count = self.count + 1
        elif self.how == "swapped":
            self._buffers["count"] = self.count.clone().add_(1)
        else:
            self.count.copy_(torch.full((1,), float(self.count) + 1, **F64))
        return self.layer(x) * self.count


@pytest.mark.parametrize(
    "how", ["in place", "through data", "anew", "swapped", "copied"]
)
@pytest.mark.parametrize("is_training", [False, True])
def test_a_buffer_that_forwards_change_counts_calls(how, is_training):
    def program(model):
        kept = []
        model.train(is_training)
        for k in range(4):
            if is_training:
                train(model, kept, seeds=(k,))
            else:
                with torch.no_grad() if k % 2 else torch.inference_mode():
                    kept.append(model(integers(N_ROWS, 3)).clone())
        return [torch.stack([torch.as_tensor(k.tolist(), **F64) for k in kept])]

    compare(lambda: Counts(how), program)


def test_spectral_norm_iterates_as_in_the_first_replica():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)
        ).double()

    def program(model):
        kept = []
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        train(model, kept, optimizer)
        model.eval()
        kept.append(model(integers(N_ROWS, 3)).detach())
        return kept

    compare(make, program)


def test_parametrized_spectral_norm_iterates_as_in_the_first_replica():
    def make():
        torch.manual_seed(0)
        return parametrizations.spectral_norm(nn.Linear(3, 4)).double()

    def program(model):
        kept = []
        train(model, kept, torch.optim.SGD(model.parameters(), 1e-2))
        parametrize.remove_parametrizations(bare(model), "weight")
        train(model, kept)
        return kept

    compare(make, program)


def test_a_running_mean_of_momentum_none_counts_its_batches():
    def make():
        norm = nn.BatchNorm1d(4, momentum=None).double()
        return nn.Sequential(linear(3, 4), norm.eval(), linear(4, 2))

    def program(model):
        kept = []
        train(model, kept)
        bare(model)[1].running_mean.add_(1)
        bare(model)[1].num_batches_tracked += 3
        train(model, kept)
        return kept

    compare(make, program)


# ---- graphs -------------------------------------------------------------------------


def test_a_graph_is_kept_and_run_for_each_output():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = smooth_net()

        def forward(self, x):
            out = self.net(x)
            return out, {"sums": out.sum(1), "square": [out.square()]}

    def program(model):
        x = integers(N_ROWS, 3).requires_grad_()
        out, others = model(x)
        loss_of(out).backward(retain_graph=True)
        others["sums"].prod().backward(retain_graph=True)
        others["square"][0].sum().backward(retain_graph=True)
        grads = torch.autograd.grad(
            loss_of(out), [x, *model.parameters()], retain_graph=True
        )
        vectors = torch.eye(14, **F64).reshape(14, 7, 2)
        (batched,) = torch.autograd.grad(out, x, vectors, is_grads_batched=True)
        return [x.grad, *grads, batched]

    compare(Several, program)


def test_a_penalty_on_gradients_reaches_weights():
    def program(model):
        x = integers(N_ROWS, 3).requires_grad_()
        for _ in range(2):
            (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            (grad.norm(2, dim=1) - 1).square().mean().backward()
        return [x.grad]

    compare(smooth_net, program)


def test_backwards_of_several_forwards_come_in_any_order():
    def program(model):
        outs = [model(integers(n, 3, seed=n)) for n in (7, 2, 5, 1)]
        for k in (2, 0, 3, 1):
            with torch.no_grad():
                model(integers(4, 3))
            loss_of(outs[k]).backward()

    compare(smooth_net, program)


def test_an_output_is_fed_back():
    def program(model):
        x = integers(N_ROWS, 3).requires_grad_()
        out = x
        for _ in range(4):
            out = model(out)
        loss_of(out).backward()
        return [x.grad]

    def make():
        return nn.Sequential(linear(3, 3), nn.Tanh())

    compare(make, program)


def test_outputs_may_be_changed_in_place_before_the_backward():
    def program(model):
        x = integers(N_ROWS, 3).requires_grad_()
        out = model(x)
        out.mul_(2)
        out[1:3] = 0
        out[:, 1].add_(x[:, 0])
        loss_of(out).backward()
        return [x.grad, out.detach()]

    compare(smooth_net, program)


def test_inputs_may_be_changed_in_place_after_the_forward():
    """As with the module: an error where the graph needs them."""

    def program(model):
        x = integers(N_ROWS, 3)
        out = model(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            loss_of(out).backward()
        model.zero_grad()
        train(model, [])

    compare(smooth_net, program)


def test_some_rows_alone_are_run_backward():
    def program(model):
        x = integers(N_ROWS, 3).requires_grad_()
        out = model(x)
        out[-1].sum().backward(retain_graph=True)
        out[0].sum().backward(retain_graph=True)
        out[2:4].prod().backward()
        return [x.grad]

    compare(smooth_net, program)
