"""Odd modes, copies, failures and threads, with replicas on GPUs.

What a program returns, its gradients and its state must be the plain module's.
"""

import copy
import gc
import io
import pickle
import threading
import weakref

import paceline
import pytest
import torch
from gpu_programs import F64, N_ROWS, Parent, bare, compare, train
from replicas import (
    assert_same,
    assert_same_grads,
    integers,
    loss_of,
    smooth_net,
)
from torch import nn
from torch.func import functional_call

pytestmark = pytest.mark.usefixtures("n_gpus")


# ---- modes --------------------------------------------------------------------------


def test_modes_alternate_from_call_to_call():
    def program(model):
        kept = []
        modes = [
            torch.no_grad,
            torch.inference_mode,
            torch.enable_grad,
            torch.inference_mode,
            torch.no_grad,
        ]
        for k, mode in enumerate(modes):
            train(model, kept, seeds=(k,))
            with mode():
                values = model(integers(N_ROWS, 3)).tolist()
            kept.append(torch.tensor(values, **F64))
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
        return kept

    compare(smooth_net, program)


def test_training_follows_a_first_forward_in_inference_mode():
    """What passes through memory of that mode is in no graph."""

    def program(model):
        kept = []
        for _ in range(2):
            with torch.inference_mode():
                values = model(integers(N_ROWS, 3)).tolist()
            kept.append(torch.tensor(values, **F64))
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        train(model, kept, optimizer)
        return kept

    compare(smooth_net, program)


def test_parameters_made_in_inference_mode_are_those_of_the_module():
    def make():
        with torch.inference_mode():
            return smooth_net()

    def program(model):
        kept = []
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                kept.append(torch.tensor(model(integers(N_ROWS, 3)).tolist(), **F64))
        return kept

    compare(make, program)


def test_evaluation_and_training_alternate_with_dropout_off():
    def make():
        net = smooth_net()
        net.insert(1, nn.Dropout(0.5))
        net.insert(2, nn.BatchNorm1d(4).double())
        return net

    def program(model):
        kept = []
        for k in range(3):
            model.eval()
            with torch.no_grad():
                kept.append(model(integers(N_ROWS, 3, seed=k)))
            train(model, kept, seeds=(k,))  # gradients in evaluation mode
            with torch.no_grad():
                bare(model)[2].running_mean.add_(1)
        return kept

    compare(make, program)


# ---- other weights ------------------------------------------------------------------


def test_a_functional_call_round_the_wrapper_trains_what_it_is_given():
    def program(model):
        parent = Parent(model)
        names = [name for name, _ in parent.named_parameters()]
        leaves = {
            name: integers(*p.shape, seed=5).mul(0.5).requires_grad_()
            for name, p in zip(names, bare(model).parameters(), strict=True)
        }
        kept = []
        for _ in range(2):
            given = {name: leaf * 2 for name, leaf in leaves.items()}
            out = functional_call(parent, given, (integers(N_ROWS, 3),))
            loss_of(out).backward()
            kept.append(out.detach())
        train(model, kept)
        return [*kept, *(leaf.grad for leaf in leaves.values())]

    compare(smooth_net, program)


def test_an_inner_step_is_differentiated():
    """As in meta-learning."""

    def program(model):
        parent = Parent(model)
        names = [name for name, _ in parent.named_parameters()]
        parameters = list(parent.parameters())
        for k in range(2):
            loss = loss_of(model(integers(N_ROWS, 3, seed=k)))
            grads = torch.autograd.grad(loss, parameters, create_graph=True)
            fast = {
                name: p - 0.01 * grad
                for name, p, grad in zip(names, parameters, grads, strict=True)
            }
            out = functional_call(parent, fast, (integers(5, 3, seed=k),))
            loss_of(out).backward()

    compare(smooth_net, program)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "file"])
def test_a_copy_of_a_wrapper_trains_by_itself(how):
    def copied(model):
        if how == "deepcopy":
            return copy.deepcopy(model)
        if how == "pickle":
            return pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def program(model):
        kept = []
        train(model, kept)
        other = copied(model)
        train(other, kept, torch.optim.SGD(other.parameters(), 1e-3))
        train(model, kept)
        other.load_state_dict(model.state_dict())
        train(other, kept)
        return [*kept, *(p.grad for p in other.parameters())]

    compare(smooth_net, program)


def test_a_module_is_wrapped_anew_again_and_again():
    module, plain = smooth_net(), smooth_net()
    gone = []
    for k in range(4):
        ours = paceline.DataParallel(module)
        outs = [model(integers(N_ROWS, 3, seed=k)) for model in (plain, ours)]
        if k % 2:
            gone.append(weakref.ref(ours))
            del ours
        for out in outs:
            loss_of(out).backward()
        assert_same_grads(module, plain, exact=False)
    gc.collect()
    assert all(ref() is None for ref in gone)


# ---- what fails ---------------------------------------------------------------------


class Fails(nn.Module):
    """Fails for a row of 99, after a while, in one of several ways."""

    def __init__(self, error):
        super().__init__()
        self.net, self.error = smooth_net(), error
        self.register_buffer("count", torch.zeros(1, **F64))

    def forward(self, x):
        out = self.net(x)
        if (x == 99).any():
            raise self.error
        return out


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        StopIteration("end"),
        KeyError("a key"),
        MemoryError("full"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("row", [0, 3, 6])
def test_a_replica_that_fails_raises_its_own_kind_and_training_goes_on(error, row):
    def program(model):
        kept, x = [], integers(N_ROWS, 3)
        bad = x.clone()
        bad[row] = 99
        out = model(x)
        for _ in range(2):
            with pytest.raises(type(error)):
                model(bad)
            with torch.no_grad(), pytest.raises(type(error)):
                model(bad)
        loss_of(out).backward()
        train(model, kept)
        return kept

    compare(lambda: Fails(error), program)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ArithmeticError("in backward")
        return grad, None


@pytest.mark.parametrize("row", [0, 3, 6])
def test_a_backward_that_fails_in_one_replica_leaves_the_next_one_whole(row):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = smooth_net()

        def forward(self, x):
            return FailsInBackward.apply(self.net(x), bool((x == 99).any()))

    def program(model):
        kept, x = [], integers(N_ROWS, 3)
        bad = x.clone()
        bad[row] = 99
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                loss_of(model(bad)).backward()
            model.zero_grad()
            train(model, kept)
        return kept

    compare(Net, program)


@pytest.mark.parametrize("name", ["empty", "empty_like", "zeros"])
@pytest.mark.parametrize("way", ["train", "evaluate", "two orders"])
def test_a_device_without_memory_is_an_error_and_the_next_step_is_whole(
    monkeypatch, name, way
):
    """At each allocation in turn: on any device, in forward or in backward."""
    allocate = getattr(torch, name)
    left = [10**9]

    def scarce(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(*args, **kwargs)

    def run(model, x):
        if way == "evaluate":
            with torch.no_grad():
                return model(x)
        loss = loss_of(model(x))
        if way == "two orders":
            parameters = list(model.parameters())
            grads = torch.autograd.grad(loss, parameters, create_graph=True)
            loss = sum(grad.square().sum() for grad in grads)
        return loss.backward()

    plain, ours = smooth_net(), paceline.DataParallel(smooth_net())
    n_failed = 0
    for k in range(1, 100):
        x = integers(N_ROWS, 3, seed=k)
        with monkeypatch.context() as patched:
            patched.setattr(torch, name, scarce)
            left[0] = k
            try:
                run(ours, x)
            except torch.OutOfMemoryError:
                n_failed += 1
            is_over = left[0] > 0
        for model in (plain, ours):
            with torch.no_grad():
                for p in model.parameters():
                    (p if k % 2 else p.data).mul_(1.25)
            model.zero_grad()
        assert_same(run(ours, x), run(plain, x), exact=False)
        assert_same_grads(ours, plain, exact=False)
        if is_over:
            break
    assert is_over
    assert n_failed > 0 or name != "empty"


# ---- threads ------------------------------------------------------------------------


def test_several_threads_train_wrappers_of_their_own():
    def program(model):
        kept = []
        train(model, kept, torch.optim.SGD(model.parameters(), 1e-3), range(5))
        return [*kept, *(p.detach() for p in model.parameters())]

    # Made here: they draw their weights from a generator that threads share.
    models = [paceline.DataParallel(smooth_net()) for _ in range(3)]
    expected, found = program(smooth_net()), {}
    threads = [
        threading.Thread(target=lambda k=k: found.update({k: program(models[k])}))
        for k in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(3):
        assert_same(found[k], expected, exact=False)


def test_a_backward_may_be_run_by_another_thread():
    def program(model):
        out = model(integers(N_ROWS, 3))
        thread = threading.Thread(target=lambda: loss_of(out).backward())
        thread.start()
        thread.join()

    compare(smooth_net, program)


def test_a_generator_of_batches_may_call_the_wrapper():
    def program(model):
        kept = []

        def batches():
            for k in range(3):
                with torch.no_grad():
                    target = model(integers(N_ROWS, 3, seed=k)) * 0.5
                yield integers(N_ROWS, 3, seed=k), target

        for x, target in batches():
            loss = (model(x) - target).square().sum()
            loss.backward()
            kept.append(loss.detach())
        return kept

    compare(smooth_net, program)
