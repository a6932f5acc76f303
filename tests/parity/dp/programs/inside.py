"""Forwards that run a backward themselves."""

import threading

import torch
from replicas import (
    bare,
    integer_weights,
    integers,
    linear,
    loss_of,
    net,
)
from torch import nn

from programs import GPUS, Made, X, buffer, program, steps, trains, uses

# ---- a backward inside forward ------------------------------------------------------


def clear(m):
    for p in m.parameters():
        p.grad = None


UNCLEARED = "a replica on a GPU cannot clear what its own backward has given"

for label, (n, clears) in {
    "one": (1, False),
    "three": (3, False),
    "one, cleared": (1, True),
    "three, cleared": (3, True),
}.items():

    @program(
        steps(evaluates=False, zero=clears),
        label=label,
        first=linear(),
        last=linear(2),
        n=n,
        clears=clears,
        broken_on=dict.fromkeys(["gpu2", "gpu3"], UNCLEARED) if clears else None,
    )
    def a_backward_inside_forward_leaves_the_plain_gradients(m, x):
        for _ in range(m.n):
            m.last(m.first(x.detach())).square().sum().backward()
            if m.clears:
                clear(m)
        return m.last(m.first(x))


def switch_on(m):
    m.is_on = True


for n_wide in (2, 8000):
    for is_on in (True, False):

        @program(
            steps(switch_on, switch_on, n=1, evaluates=False),
            label=f"{n_wide}, {'at first' if is_on else 'later'}",
            wide=integer_weights(nn.Linear(3, n_wide)),
            linear=linear(),
            is_on=is_on,
        )
        def a_backward_inside_forward_reaches_a_layer_of_its_own(m, x):
            if m.is_on:
                m.wide(x.detach()).square().sum().backward()
            return m.linear(x)


@program(steps(evaluates=False), linear=linear())
def a_backward_for_an_input_alone_may_run_in_forward(m, x):
    x = x.detach().requires_grad_()
    m.linear(x).square().sum().backward(inputs=[x])
    return m.linear(x.grad)


for label, held in {
    "weights": {"layer": linear()},
    "a buffer": {"scale": buffer(integers(3).requires_grad_())},
}.items():

    @program(
        lambda model: [
            torch.no_grad()(model)(X),
            [t.grad for t in bare(model).buffers()],
        ],
        label=label,
        **held,
    )
    def a_backward_in_a_forward_without_gradients(m, x):
        with torch.enable_grad():
            out = x * m.scale if hasattr(m, "scale") else m.layer(x)
            out.square().sum().backward()
        return out.detach()


@program(
    lambda model: torch.no_grad()(model)(
        torch.cat([-X[:4].abs() - 1, X[:3].abs() + 1])
    ),
    layer=linear(2),
    in_parts=False,
    on="cpu gpu2",
)
def other_replicas_alone_may_run_a_backward_within_a_forward(m, x):
    asks = x[:, 0] > 0
    if asks.any():
        with torch.enable_grad():
            m.layer(x[asks]).square().sum().backward()
    return m.layer(x)


@uses(
    lambda: Made(differentiates_itself, {"weight": nn.Parameter(integers(3))}), on=GPUS
)
def gradients_of_a_backward_in_forward_have_gradients(model):
    with torch.no_grad():
        model(X)
    return [p.grad.requires_grad for p in model.parameters()]


def differentiates_itself(m, x):
    with torch.enable_grad():
        (x * m.weight.square()).sum().backward(create_graph=True)
    return x.detach()


for thaws in (False, True):
    for has_grads in (False, True):

        def without_gradients(model, has_grads=has_grads):
            if has_grads:
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
            with torch.no_grad():
                for _ in range(2):
                    model(integers(6, 3))

        @program(
            without_gradients,
            label=f"{'thaws' if thaws else 'trained'}{', has .grad' * has_grads}",
            layer=linear(2),
            table=integer_weights(nn.Embedding(4, 3, sparse=not has_grads)),
            thaws=thaws,
            init=(lambda m: m.layer.requires_grad_(False)) if thaws else None,
        )
        def a_backward_in_a_forward_reaches_all_gradients(m, x):
            m.layer.weight.requires_grad_(True)
            with torch.enable_grad():
                rows = m.table(x[:, 0].long().abs())
                (m.layer(x) + m.layer(rows)).square().sum().backward()
            m.layer.weight.requires_grad_(not m.thaws)
            return m.layer(x)


class Force(nn.Module):
    """Takes the gradient of an energy in forward, and tells the grad mode."""

    def __init__(self):
        super().__init__()
        self.energy = linear(1)

    def forward(self, x):
        mode = torch.full((len(x),), float(torch.is_grad_enabled()))
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = self.energy(x).pow(3).sum()
        return torch.autograd.grad(energy, x)[0], mode


trains(
    {"a_frozen_module_takes_gradients_itself": lambda: Force().requires_grad_(False)},
    needs_grad=False,
)


@uses(net)
def one_backward_may_go_through_two_wrappers_in_a_thread(model):
    other = (
        type(model)(net(1), model.device_ids) if bare(model) is not model else net(1)
    )
    total = loss_of(model(X)) + 2 * loss_of(other(X[:5]))
    thread = threading.Thread(target=total.backward)
    thread.start()
    thread.join()
    return [p.grad for p in other.parameters()]
