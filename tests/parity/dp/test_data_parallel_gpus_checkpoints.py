"""Hooks on saved tensors, and checkpoints, round a wrapper with replicas on GPUs.

They are replica 0's alone: a backward on several GPUs has a thread for each, and those
would call the hooks side by side.
"""

import paceline
import pytest
import torch
from gpu_programs import N_ROWS
from paceline._compat import torch_modes
from replicas import (
    assert_same,
    assert_same_grads,
    integer_weights,
    integers,
    loss_of,
    smooth_net,
)
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("n_gpus")


class Draws(nn.Module):
    """A layer and random numbers of the CPU, for which replicas run in order."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = integer_weights(nn.Linear(3, 2)), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.layer(x).tanh()).square()


def packed_by(model, x):
    """Return what hooks are given of a forward, and its output."""
    found = []

    def pack(tensor):
        found.append(tensor.clone())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    return found, out


class Nothing(TorchDispatchMode):
    """Sees each operation, and does nothing about it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_mode", [False, True])
@pytest.mark.parametrize("make", [smooth_net, Draws])
def test_hooks_on_saved_tensors_see_those_of_replica_0(n_gpus, make, has_mode):
    plain, ours = make(), paceline.DataParallel(make())
    x = integers(N_ROWS, 3).requires_grad_()
    rows = x.tensor_split(n_gpus)[0].detach().requires_grad_()
    for _ in range(3):  # in order at first
        results = []
        for model, given in ((plain, rows), (ours, x)):
            torch.manual_seed(0)
            if has_mode:
                with Nothing():
                    results.append(packed_by(model, given)[0])
            else:
                results.append(packed_by(model, given)[0])
        assert len(results[0]) > 0
        assert_same(results[1], results[0])


def test_hooks_are_on_again_behind_the_replicas_that_have_none():
    ours = paceline.DataParallel(smooth_net())
    seen = []

    def hooks(name):
        return saved_tensors_hooks(
            lambda tensor: seen.append(name) or tensor, lambda tensor: tensor
        )

    x = integers(2, 3).requires_grad_()
    with hooks("outer"):
        with hooks("inner"):
            ours(x)
            seen.clear()
            x.tanh()
            assert seen == ["inner"]
        x.tanh()
    x.tanh()
    assert seen == ["inner", "outer"]


class Keeps(nn.Module):
    """Notes what its replicas have saved."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = integer_weights(nn.Linear(3, 2)), []

    def forward(self, x):
        out = self.layer(x).tanh()
        self.kept.append(out)
        return out * 2


@pytest.mark.parametrize("member", [0, 1])
def test_a_saved_tensor_that_was_changed_in_place_is_an_error_under_hooks(member):
    """Of replica 0 the hooks have it, which torch trusts."""
    if member and torch_modes._top_hooks is None:
        pytest.skip("this torch cannot be asked for hooks: others are put over them")
    ours = paceline.DataParallel(Keeps())
    for _ in range(2):
        ours.module.kept.clear()
        with saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            out = ours(integers(N_ROWS, 3))
        kept = sorted(ours.module.kept, key=len, reverse=True)
        with torch.no_grad():
            kept[-1 if member else 0].add_(1)
        if member:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss_of(out).backward()
        else:
            loss_of(out).backward()


# ---- checkpoints --------------------------------------------------------------------


class Drifts(nn.Module):
    """What draws from a generator that a checkpoint does not put back.

    As the one of each GPU but the first: the rows of replica 0 begin with a zero.
    """

    def __init__(self):
        super().__init__()
        self.layer, self.draws = integer_weights(nn.Linear(3, 2)), {0: 0, 1: 0, 2: 0}

    def forward(self, x):
        which = int(x[0, 0])
        self.draws[which] += which
        return (self.layer(x) * (1 + self.draws[which])).square()


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_a_checkpoint_does_not_need_the_random_numbers_of_other_gpus(
    n_gpus, use_reentrant
):
    parts = integers(N_ROWS, 3).tensor_split(n_gpus)
    for k, part in enumerate(parts):
        part[:, 0] = k
    plain, ours = Drifts(), paceline.DataParallel(Drifts())
    for _ in range(3):
        for model in (plain, ours):
            model.zero_grad()
        loss_of(torch.cat([plain(part) for part in parts])).backward()
        x = torch.cat(parts)
        if use_reentrant is None:
            out = ours(x)
        else:
            out = checkpoint(ours, x, use_reentrant=False, determinism_check="none")
        loss_of(out).backward()
        plain.draws = dict.fromkeys(plain.draws, 0)
        ours.module.draws = dict.fromkeys(plain.draws, 0)
        assert_same_grads(ours, plain)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.last = smooth_net(), integer_weights(nn.Linear(2, 3))

    def forward(self, x):
        out = self.net(x)
        return {"first": out.sigmoid(), "last": [self.last(out).t().contiguous().t()]}


def loss_of_both(out):
    return loss_of(out["first"]) + out["last"][0].exp().sum()


@pytest.mark.parametrize("output_device", [0, 1])
@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
def test_a_checkpoint_round_the_wrapper_gives_the_gradients_of_the_plain_module(
    n_gpus, early, output_device
):
    plain = TwoOutputs()
    ours = paceline.DataParallel(TwoOutputs(), output_device=output_device)
    with torch.utils.checkpoint.set_checkpoint_early_stop(early):
        for n_rows in (N_ROWS, 1, 5, N_ROWS):
            inputs = []
            for model in (plain, ours):
                model.zero_grad()
                x = integers(n_rows, 3).requires_grad_()
                inputs.append(x)
                for _ in range(2):  # gradients add up
                    loss = loss_of_both(checkpoint(model, x, use_reentrant=False))
                    loss.backward(retain_graph=True)
                    loss.backward()
            assert_same_grads(ours, plain, exact=False)
            assert_same(inputs[1].grad, inputs[0].grad, exact=False)
            with torch.no_grad():
                for model in (plain, ours):
                    for p in model.parameters():
                        p.sub_(p.grad.sign() / 8)


def test_a_checkpoint_repeats_its_forward_once():
    calls = []
    model = paceline.DataParallel(smooth_net())
    out = checkpoint(model, integers(N_ROWS, 3), use_reentrant=False)
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    loss_of(out).backward()
    assert len(calls) == 1


def test_a_checkpoint_may_keep_some_results():
    make_contexts = getattr(checkpoints, "create_selective_checkpoint_contexts", None)
    if make_contexts is None:
        pytest.skip("this torch has no selective checkpoints")
    kept = [torch.ops.aten.addmm.default, torch.ops.aten.tanh.default]
    plain, ours = smooth_net(), paceline.DataParallel(smooth_net())
    for _ in range(2):
        for model in (plain, ours):
            model.zero_grad()
            x = integers(N_ROWS, 3).requires_grad_()
            out = checkpoint(
                model,
                x,
                use_reentrant=False,
                context_fn=lambda: make_contexts(kept),
            )
            loss_of(out).backward()
        assert_same_grads(ours, plain, exact=False)


def test_a_gradient_of_gradients_goes_through_a_checkpoint():
    plain, ours = smooth_net(), paceline.DataParallel(smooth_net())
    for model in (plain, ours):
        x = integers(N_ROWS, 3).requires_grad_()
        out = checkpoint(model, x, use_reentrant=False)
        (grad,) = torch.autograd.grad(loss_of(out), x, create_graph=True)
        grad.square().sum().backward()
    assert_same_grads(ours, plain, exact=False)
