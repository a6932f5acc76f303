"""Gradients of gradients, of any order; and torch's transforms of functions."""

import pytest
import torch
from replicas import (
    F64,
    Parent,
    Power,
    bare,
    beside,
    grads_of,
    integer_weights,
    integers,
    linear,
    loss_of,
    penalty_on,
    slopes_of,
    small,
    squares_of,
    step,
)
from support.failing import FailsInBackward
from torch import func, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from programs import THREE, buffer, module, pairs, parameter, uses


def grown(seed=0, n=7):
    return small(n, 3, seed=seed).requires_grad_()


@uses(Power, on=THREE)
def every_order_is_exact(model):
    seen = []
    for seed in range(2):  # the second time relies on the first
        x, y = grown(seed + 1), grown(seed + 2)
        targets = [x, y, *model.parameters()]
        value = loss_of(model(x) * model(y))
        for _ in range(3):
            slopes = [s for s in slopes_of(value, targets) if s is not None]
            assert len(slopes) == 6
            assert all(slope.requires_grad for slope in slopes)
            seen += slopes
            value = sum(slope.sum() for slope in slopes)
        value.backward()
        seen += [x.grad, y.grad]
    return seen


TARGETS = {
    "input": lambda model, x: [x],
    "one weight": lambda model, x: [next(iter(model.parameters()))],
    "both": lambda model, x: [x, *model.parameters()],
}


@uses(Power, pairs(TARGETS, TARGETS))
def what_is_asked_for_may_differ_by_order(model, first, second):
    seen = []
    for seed in range(2):
        model.zero_grad()
        x = grown(seed)
        out = model(x)
        penalty = squares_of(slopes_of(loss_of(out), first(model, x)))
        seen += slopes_of(penalty, second(model, x), retain_graph=True)
        (penalty + loss_of(out)).backward(inputs=second(model, x))
        seen += [x.grad, *grads_of(model)]
    return seen


# ---- loops --------------------------------------------------------------------------


@uses(Power)
def gradients_in_place_may_have_a_graph(model):
    kept = []
    for seed in range(2):
        x = grown(seed)
        loss_of(model(x)).backward(create_graph=True)
        slopes = [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]
        assert all(slope.requires_grad for slope in slopes)
        kept += torch.autograd.grad(squares_of(slopes), x)
        kept += [slope.detach() for slope in slopes]
        model.zero_grad()
        x.grad = None  # a cycle
    return kept


@uses(Power, on=THREE)
def calls_of_every_size_may_go_into_one_graph(model):
    for _ in range(2):
        model.zero_grad()
        # Of one row, only replica 0 has a part.
        batches = [grown(seed=n, n=n) for n in (7, 1, 2, 7, 4)]
        penalties = [penalty_on(model, x) for x in batches]
        values = [loss_of(model(x.detach())) for x in batches]
        sum([*penalties, *values]).backward()
    return [x.grad for x in batches]


@uses(Power)
def wrappers_in_a_row_pass_graphs_on(model):
    last = beside(model, Power(5))
    x = grown()
    middle = model(x)
    out = last(torch.cat([middle, x[:, :1]], 1))
    slopes = slopes_of(loss_of(out), [x, middle, *model.parameters()])
    squares_of(slopes).backward()
    return slopes, x.grad, grads_of(last)


# ---- models -------------------------------------------------------------------------


@uses(linear)
def what_a_slope_does_not_depend_on_has_no_gradient(model):
    x, fired = grown(), []
    weight, bias = model.parameters()
    for leaf in (x, bias):
        leaf.register_hook(lambda grad: fired.append(grad.clone()))
    penalty = penalty_on(model, x)
    some = {"retain_graph": True, "allow_unused": True}
    seen = torch.autograd.grad(penalty, [x, weight, bias], **some)
    assert [grad is None for grad in seen] == [True, False, True]
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(penalty, x, retain_graph=True)
    penalty.backward()
    return seen, fired, x.grad


def partly(m, x):
    out = m.always(x).square()
    if (x[:, 0] > 50).any():
        out = out + (x[:, :1] > 50) * m.rarely(x).square()
    return out.detach() if (x[:, 0] < -50).all() else out


PARTLY = module(partly, always=linear(2), rarely=linear(2))


@uses(PARTLY, [[], [1], [6], [1, 6]])
def replicas_may_use_different_weights(model, rows):
    seen = []
    for used in (rows, [], rows):  # the use in one step does not determine the next
        x = small(7, 3)
        x[used, 0] = 60
        x.requires_grad_()
        model.zero_grad()
        targets = [x, *model.parameters()]
        slopes = slopes_of(loss_of(model(x)), targets)
        seen += slopes_of(squares_of(slopes), targets)
        squares_of(slopes).backward()
        seen += [*slopes, x.grad, *grads_of(model)]
    return seen


@uses(PARTLY, [1, 2], in_parts=True, on=THREE)
def a_replica_may_need_no_gradient(model, order):
    x = small(7, 3)
    x[3:, 0] = -60  # all rows of replica 1, and of replica 2
    targets = [x.requires_grad_(), *model.parameters()]
    slopes = torch.autograd.grad(
        loss_of(model(x)), targets, create_graph=order == 2, allow_unused=True
    )
    return [*slopes, *(slopes_of(squares_of(slopes), targets) if order == 2 else ())]


@uses(module(lambda m, x: x + m.by, by=parameter(small(3))))
def a_gradient_may_be_that_of_the_output_itself(model):
    x = grown()
    slopes = slopes_of(model(x).pow(3).sum(), [x])
    return [*slopes, *slopes_of(squares_of(slopes), [x])]


@uses(
    module(
        lambda m, words: (m.sparse(words) * m.dense(words)).square().sum(1),
        sparse=integer_weights(nn.Embedding(6, 3, sparse=True), 1),
        dense=integer_weights(nn.Embedding(6, 3), 2),
    )
)
def sparse_gradients_have_gradients(model):
    words = torch.tensor([[0, 1], [1, 2], [5, 0], [1, 1], [0, 1], [2, 2], [5, 3]])
    weights = list(model.parameters())
    sparse, dense = slopes_of(loss_of(model(words)), weights)
    assert sparse.is_sparse
    (again,) = torch.autograd.grad(squares_of([dense]), weights[1:], retain_graph=True)
    return sparse.to_dense(), dense, again


@uses(Power, [torch.float32, torch.complex128])
def other_dtypes_have_second_orders(model, dtype):
    bare(model).to(dtype)
    x = torch.complex(small(7, 3), small(7, 3, seed=1))
    x = (x if dtype.is_complex else x.real).to(dtype).requires_grad_()
    out, targets = model(x), [x, *model.parameters()]
    slopes = slopes_of((out * out.conj()).real.sum(), targets)
    value = sum((s * s.conj()).real.sum() for s in slopes if s is not None)
    return slopes, torch.autograd.grad(value, targets[:3])


def saved(function, x):
    return checkpoint(function, x, use_reentrant=False)


@uses(
    module(lambda m, x: m.call(m.power, x), power=Power(), call=saved),
    {"inside": True, "around": False},
)
def checkpoints_have_second_orders(model, is_inside):
    if not is_inside:
        bare(model).call = lambda power, x: power(x)
    x = grown()
    out = model(x) if is_inside else saved(model, x)
    slopes = slopes_of(loss_of(out), [x, *model.parameters()])
    squares_of(slopes).backward()
    return slopes, x.grad


@uses(
    module(
        lambda m, x: nn.functional.linear(
            x.square(), FailsInBackward.apply(m.weight, ArithmeticError)
        ),
        weight=parameter(small(2, 3)),
    )
)
def what_nobody_asks_for_is_not_computed(model):
    x = grown()
    return slopes_of(penalty_on(model, x), [x])


# ---- hooks, and how long graphs live ------------------------------------------------


@uses(Power)
def hooks_of_parameters_see_totals_with_a_graph(model):
    fired = {name: [] for name, _ in bare(model).named_parameters()}
    for name, p in bare(model).named_parameters():

        def hook(grad, p=p, seen=fired[name]):
            seen.append((grad.detach().clone(), grad.requires_grad))
            return grad * p  # which adds to the graph

        p.register_hook(hook)
    x = grown()
    slopes = slopes_of(loss_of(model(x)), list(model.parameters())[:2])
    squares_of(slopes).backward()
    assert len(fired["first.weight"]) == 2
    return fired, slopes, x.grad


@uses(Power)
def graphs_of_gradients_may_be_retained(model):
    x = grown()
    (slope,) = slopes_of(loss_of(model(x)), [x])
    first = torch.autograd.grad(slope.sum(), x, retain_graph=True)
    second = torch.autograd.grad(squares_of([slope]), x, retain_graph=True)
    (third,) = slopes_of(slope.sum(), [x])
    total = squares_of([slope, third])
    total.backward()
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()
    return first, second, third, x.grad


@uses(Power)
def a_weight_changed_before_the_second_order_is_an_error(model):
    penalty = penalty_on(model, grown())
    with torch.no_grad():
        bare(model).last.weight.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()
    model.zero_grad()
    step(model, grown()).backward()


@uses(Power)
def a_batch_of_gradients_may_have_a_graph(model):
    x = grown()
    slopes = slopes_of(
        model(x),
        [x, *list(model.parameters())[:2]],
        grad_outputs=small(4, 7, 2, seed=5),
        is_grads_batched=True,
    )
    squares_of(slopes).backward()
    return slopes, x.grad


@uses(Power)
def vmaps_may_go_over_a_backward(model):
    directions, x = small(2, 3, 7, 2, seed=5), grown()
    out = model(x)

    def pull(direction, retain=True):
        return torch.autograd.grad(out, x, direction, retain_graph=retain)[0]

    once = torch.vmap(pull)(directions[0])
    twice = torch.vmap(torch.vmap(pull), in_dims=1, out_dims=1)(directions)
    last = torch.vmap(lambda v: pull(v, retain=False))(directions[1])
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    return once, twice, last


# ---- torch.func ----------------------------------------------------------------------


def forward_mode(f, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(f(dual)).tangent.detach()


OF_INPUTS = {
    "grad": lambda f, x: func.grad(lambda y: loss_of(f(y)))(x),
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "hessian": lambda f, x: func.hessian(lambda y: loss_of(f(y)))(x),
    "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, x + 1])).detach(),
    "forward mode": forward_mode,
}


@uses(Power, OF_INPUTS)
def transforms_of_a_forward_give_what_they_give_plainly(model, transform):
    seen = transform(model, small(5, 3))
    step(model, small(5, 3)).backward()
    return seen


def as_function(model):
    """Return a function of the model's parameters, buffers and input."""
    parent = Parent(model)
    prefix = "inner." if model is bare(model) else "inner.module."

    def run(state, x):
        named = {prefix + name: tensor for name, tensor in state.items()}
        return func.functional_call(parent, named, (x,))

    return run


def squared(f):
    return lambda *arguments: f(*arguments).square().sum()


def mapped(function, state):
    return {name: function(tensor) for name, tensor in state.items()}


def along(f, state, x):
    with forward_ad.dual_level():
        duals = mapped(lambda t: forward_ad.make_dual(t, torch.ones_like(t)), state)
        return forward_ad.unpack_dual(f(duals, x)).tangent


def by_sample(f, state, x):
    return func.vmap(lambda row: func.grad(squared(f))(state, row.expand(4, 3)))(x)


def of_an_ensemble(f, state, x):
    states = mapped(lambda t: torch.stack([t, t * 2]), state)
    return func.vmap(f, (0, None))(states, x)


def curvature(f, state, x):
    bias = "last.bias"
    return func.hessian(lambda b: squared(f)({**state, bias: b}, x))(state[bias])


OF_PARAMETERS = {
    "grad": lambda f, s, x: func.grad(squared(f), argnums=(0, 1))(s, x),
    "vjp": lambda f, s, x: func.vjp(f, s, x)[1](torch.ones(len(x), 2, **F64)),
    "jvp": lambda f, s, x: func.jvp(f, (s, x), (mapped(torch.ones_like, s), x)),
    "jacrev": lambda f, s, x: func.jacrev(f)(s, x),
    "jacfwd": lambda f, s, x: func.jacfwd(f)(s, x),
    "vmap": of_an_ensemble,
    "vmap of grad": lambda f, s, x: of_an_ensemble(func.grad(squared(f)), s, x),
    "by sample": by_sample,
    "hessian": curvature,
    "dual numbers": along,
}


@uses(
    module(
        lambda m, x: m.last(torch.tanh(m.first(x))) * m.scale,
        first=linear(4),
        last=linear(2, 4),
        scale=buffer(torch.tensor(2.0, **F64)),
    ),
    OF_PARAMETERS,
    exact=False,
)
def transforms_of_parameters_do_as_with_the_plain_module(model, transform):
    state = {n: t.detach().clone() for n, t in bare(model).state_dict().items()}
    run = as_function(model)
    return [transform(run, state, integers(7, 3)) for _ in range(2)]
