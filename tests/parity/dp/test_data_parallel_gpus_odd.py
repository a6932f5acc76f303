"""Odd programs with replicas on GPUs, each beside the plain module.

What a program returns, its gradients and its state must be the plain module's.
"""

import threading

import paceline
import pytest
import torch
from gpu_programs import F64, N_ROWS, Parent, bare, compare, linear, train
from replicas import assert_same, assert_same_grads, integers, loss_of, smooth_net
from torch import nn
from torch.func import functional_call

pytestmark = pytest.mark.usefixtures("n_gpus")


# ---- optimizers ---------------------------------------------------------------------


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


# ---- graphs -------------------------------------------------------------------------


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


# ---- modules ------------------------------------------------------------------------


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


# ---- other weights ------------------------------------------------------------------


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


# ---- what fails ---------------------------------------------------------------------


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
