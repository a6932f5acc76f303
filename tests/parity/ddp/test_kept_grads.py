"""A gradient that somebody keeps is the parameter's, as with torch's class."""

import itertools

import torch
from cases import compare_with_torch, integer_weights, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

# Of 40 kB: what a backward makes of it is a view of its bucket; the others are copied.
SIZES = 100, 100, 3


def net():
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(SIZES)]
    return integer_weights(nn.Sequential(*layers))


def data(ranks, key):
    return ranks.integers(2, SIZES[0], key=key)


def are_kept(model, kept):
    pairs = zip(model.parameters(), kept, strict=True)
    return torch.tensor([p.grad is grad for p, grad in pairs])


def flat_gradients(model):
    """Return one tensor for all gradients, and its views, which become them."""
    n = sum(p.numel() for p in model.parameters())
    flat, at, views = torch.zeros(n), 0, []
    for p in model.parameters():
        views.append(flat[at : at + p.numel()].view_as(p))
        at += p.numel()
        p.grad = views[-1]
    return flat, views


@on_ranks(2, 4, when=["before wrapping", "after", "each step", "after forward"])
def test_a_flat_buffer_of_the_users_own_has_the_gradients(ranks, when):
    def program(ranks, wrap):
        model, found = net(), []
        if when == "before wrapping":
            flat, views = flat_gradients(model)
        model = wrap(model)
        if when != "before wrapping":
            flat, views = flat_gradients(model)
        for step in range(4):
            if when == "each step":
                flat, views = flat_gradients(model)
            flat.zero_()
            out = model(data(ranks, step))
            if when == "after forward":
                flat, views = flat_gradients(model)
            out.square().sum().backward()
            found += [flat.clone(), are_kept(model, views)]
            with torch.no_grad():
                for p, view in zip(model.parameters(), views, strict=True):
                    p -= view.clamp(-1, 1)
        return [*found, *model.parameters()]

    compare_with_torch(ranks, program)


@on_ranks(2, first=[0, 1, 3], zero=[False, True])
def test_gradients_kept_from_a_step_follow_those_to_come(ranks, first, zero):
    def program(ranks, wrap):
        model, kept, found = wrap(net()), [], []
        for step in range(6):
            if step <= first:
                model.zero_grad()
            elif zero:
                for grad in kept:
                    grad.zero_()
            model(data(ranks, step)).sum().backward()
            if step == first:
                kept = [p.grad for p in model.parameters()]
            found += [grad.clone() for grad in kept]
            if kept:
                found.append(are_kept(model, kept))
        return found

    compare_with_torch(ranks, program)


@on_ranks(2, how=["no_sync", "bare"])
def test_gradients_kept_from_a_local_backward_are_averaged_in_place(ranks, how):
    def program(ranks, wrap):
        model, found = wrap(net()), []
        for step in range(4):
            model.zero_grad()
            if how == "no_sync":
                with model.no_sync():
                    model(data(ranks, (step, "local"))).sum().backward()
            else:
                model.module(data(ranks, (step, "local"))).sum().backward()
            kept = [p.grad for p in model.parameters()]
            model(data(ranks, step)).sum().backward()
            found += [*(grad.clone() for grad in kept), are_kept(model, kept)]
        return found

    compare_with_torch(ranks, program)


class Either(nn.Module):
    """Uses one of two nets, or both."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList([net(), net()])

    def forward(self, x, which):
        return sum(self.nets[i](x) for i in which)


USED = {
    "by one rank": [[0, 1], [1]],
    "by none": [[1], [1]],
    "by each alone": [[0], [1]],
}


@on_ranks(2, used=[*USED])
def test_a_kept_gradient_of_what_is_used_by_some_ranks_stays(ranks, used):
    def program(ranks, wrap):
        model, found = wrap(Either(), find_unused_parameters=True), []
        model(data(ranks, 0), [0, 1]).sum().backward()
        kept = [p.grad for p in model.parameters()]
        for step in range(3):
            model(data(ranks, step), USED[used][ranks.rank]).sum().backward()
            found += [*(grad.clone() for grad in kept), are_kept(model, kept)]
        return found

    compare_with_torch(ranks, program)


class Checkpointed(nn.Module):
    """Its parameters get all gradients late, or one by one in the same backward."""

    def __init__(self, is_reentrant):
        super().__init__()
        self.net, self.is_reentrant = net(), is_reentrant

    def forward(self, x):
        out = 0
        for n in range(1 + self.is_reentrant):
            out = out + checkpoint(self.net, x + n, use_reentrant=self.is_reentrant)
        return out


@on_ranks(2, is_reentrant=[False, True])
def test_gradients_kept_over_checkpoints_are_averaged_in_place(ranks, is_reentrant):
    def program(ranks, wrap):
        model = wrap(Checkpointed(is_reentrant), static_graph=is_reentrant)
        flat, views = flat_gradients(model)
        found = []
        for step in range(3):
            model(data(ranks, step).requires_grad_()).sum().backward()
            found += [flat.clone(), are_kept(model, views)]
        return found

    compare_with_torch(ranks, program)


@on_ranks(2)
def test_as_bucket_views_gradients_are_exchanged_as_torch_exchanges_them(ranks):
    def program(ranks, wrap):
        model, found = wrap(net(), gradient_as_bucket_view=True), []
        for step in range(3):
            model(data(ranks, step)).sum().backward()
            found += [p.grad.clone() for p in model.parameters()]
            for p in model.parameters():
                p.grad.zero_()
        return found

    compare_with_torch(ranks, program)
