"""Gradients of gradients, of any order; and torch's transforms of functions."""

import functools
import threading
import warnings

import pytest
import torch
from replicas import (
    F64,
    Parent,
    Power,
    bare,
    integer_weights,
    integers,
    linear,
    loss_of,
    reals,
    slopes_of,
    small,
    smooth_net,
    squares_of,
    step,
)
from torch import func, nn
from torch.autograd import forward_ad, functional
from torch.utils.checkpoint import checkpoint

from programs import THREE, Made, module, parameter, uses


def grown(seed=0):
    return small(7, 3, seed=seed).requires_grad_()


def detached(tensors):
    return [t if t is None else t.detach().clone() for t in tensors]


# ---- orders -------------------------------------------------------------------------


@uses(Power, on=THREE)
def every_order_is_exact(model):
    seen = []
    for seed in range(2):  # the second time foretells from the first
        x, y = grown(seed + 1), grown(seed + 2)
        targets = [x, y, *model.parameters()]
        value = loss_of(model(x) * model(y))
        for _ in range(3):
            slopes = [s for s in slopes_of(value, targets) if s is not None]
            assert len(slopes) == 6
            assert all(slope.requires_grad for slope in slopes)
            seen += detached(slopes)
            value = sum(slope.sum() for slope in slopes)
        value.backward()
        seen += [x.grad, y.grad]
    return seen


TARGETS = {
    "input": lambda model, x: [x],
    "weights": lambda model, x: list(model.parameters()),
    "one weight": lambda model, x: [next(iter(model.parameters()))],
    "both": lambda model, x: [x, *model.parameters()],
}


@uses(Power, {f"{a}, {b}": (TARGETS[a], TARGETS[b]) for a in TARGETS for b in TARGETS})
def what_is_asked_for_may_differ_by_order(model, case):
    first, second = case
    seen = []
    for seed in range(2):
        model.zero_grad()
        x = grown(seed)
        out = model(x)
        penalty = squares_of(slopes_of(loss_of(out), first(model, x)))
        seen += detached(slopes_of(penalty, second(model, x), retain_graph=True))
        (penalty + loss_of(out)).backward(inputs=second(model, x))
        seen += [x.grad, *detached([p.grad for p in model.parameters()])]
    return seen


@uses(Power)
def products_with_the_hessian_take_two_backwards(model):
    weights = list(model.parameters())
    slopes = slopes_of(loss_of(model(grown())), weights)
    dot = sum((s * small(*s.shape, seed=9)).sum() for s in slopes if s is not None)
    return torch.autograd.grad(dot, weights, allow_unused=True)


FUNCTIONAL = {
    "hessian": functional.hessian,
    "hessian at once": functools.partial(functional.hessian, vectorize=True),
    "hvp": lambda f, x: functional.hvp(f, x, torch.ones_like(x)),
    "vhp": lambda f, x: functional.vhp(f, x, torch.ones_like(x)),
    "jacobian": functools.partial(functional.jacobian, create_graph=True),
    "jvp": lambda f, x: functional.jvp(f, x, torch.ones_like(x), create_graph=True),
}


@uses(Power)
def the_functional_api_gives_what_it_gives_plainly(model):
    x = small(5, 3).requires_grad_()
    return [f(lambda y: loss_of(model(y)), x) for f in FUNCTIONAL.values()]


@uses(smooth_net, exact=False)
def gradgradcheck_finds_no_fault(model):
    x, weights = reals(3, 3).requires_grad_(), list(model.parameters())
    assert torch.autograd.gradgradcheck(lambda x, *_: model(x).exp(), (x, *weights))


# ---- loops --------------------------------------------------------------------------


def critic():
    torch.manual_seed(3)
    held = {"norm": nn.LayerNorm(4), "first": nn.Linear(3, 4), "last": nn.Linear(4, 1)}
    made = Made(normalised, held)
    made.register_buffer("direction", torch.ones(4))
    return made.double()


def normalised(m, x):
    """Divide a weight by its norm along a vector that each training call improves."""
    weight = m.first.weight
    if m.training:
        with torch.no_grad():
            there = weight @ (weight.T @ m.direction)
            m.direction.copy_(nn.functional.normalize(there, dim=0))
    size = (weight.T @ m.direction.clone()).norm()
    return m.last(torch.tanh(m.norm(x @ (weight / size).T)))


def penalty_of(model, mixed):
    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@uses(critic, exact=False)
def a_gan_with_a_gradient_penalty_trains_as_plainly(model):
    torch.manual_seed(4)
    maker = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    slow = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    fast = torch.optim.SGD(maker.parameters(), lr=0.1)
    for seed in range(3):
        real, noise = reals(7, 3, seed=seed), reals(7, 2, seed=seed)
        fake = maker(noise)
        mixed = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
        loss = model(fake.detach()).mean() - model(real).mean()
        slow.zero_grad()
        (loss + 10 * penalty_of(model, mixed)).backward()
        slow.step()
        fast.zero_grad()
        (penalty_of(model, maker(noise)) - model(maker(noise)).mean()).backward()
        fast.step()
    return [p.detach() for p in maker.parameters()]


@uses(Power)
def gradients_in_place_may_have_a_graph(model):
    kept = []
    for seed in range(2):
        x = grown(seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using backward.. with create_g")
            loss_of(model(x)).backward(create_graph=True)
        slopes = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(slope.requires_grad for slope in slopes)
        kept += torch.autograd.grad(squares_of([*slopes, x.grad]), x)
        kept += detached([*slopes, x.grad])
        model.zero_grad()
        x.grad = None  # a cycle
    return kept


@uses(Power)
def calls_of_every_size_may_go_into_one_graph(model):
    for _ in range(2):
        model.zero_grad()
        total, batches = 0, []
        for n in (7, 1, 2, 7, 4):  # of one row, only replica 0 has a part
            x = small(n, 3, seed=n).requires_grad_()
            batches.append(x)
            (slope,) = slopes_of(loss_of(model(x)), [x])
            total = total + squares_of([slope]) + loss_of(model(x.detach()))
        total.backward()
    return [x.grad for x in batches]


@uses(Power)
def wrappers_in_a_row_pass_graphs_on(model):
    last = Power(5)
    if model is not bare(model):
        last = type(model)(last, model.device_ids)
    x = grown()
    middle = model(x)
    out = last(torch.cat([middle, x[:, :1]], 1))
    slopes = slopes_of(loss_of(out), [x, middle, *model.parameters()])
    squares_of(slopes).backward()
    return detached(slopes), x.grad, [p.grad for p in last.parameters()]


@uses(Power)
def second_orders_may_run_in_another_thread(model):
    x, seen = grown(), []

    def work():
        slopes = slopes_of(loss_of(model(x)), [x])
        seen.extend(torch.autograd.grad(squares_of(slopes), x))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(seen) == 1
    return seen


# ---- models -------------------------------------------------------------------------


@uses(linear)
def what_a_slope_does_not_depend_on_has_no_gradient(model):
    x, fired = grown(), []
    x.register_hook(lambda grad: fired.append(grad.clone()))
    weight, bias = model.parameters()
    bias.register_hook(lambda grad: fired.append(grad.clone()))
    (slope,) = slopes_of(loss_of(model(x)), [x])
    seen = torch.autograd.grad(
        squares_of([slope]), [x, weight, bias], allow_unused=True, retain_graph=True
    )
    assert [grad is None for grad in seen] == [True, False, True]
    squares_of([slope]).backward()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(squares_of(slopes_of(loss_of(model(x)), [x])), x)
    return seen, fired, x.grad


def partly(m, x):
    out = m.always(x).square()
    if (x[:, 0] > 50).any():
        out = out + (x[:, :1] > 50) * m.rarely(x).square()
    return out.detach() if (x[:, 0] < -50).all() else out


PARTLY = module(partly, always=linear(2), rarely=linear(2))


@uses(PARTLY, {str(rows): rows for rows in ([], [1], [6], [1, 6])})
def replicas_may_use_different_weights(model, rows):
    seen = []
    for used in (rows, [], rows):  # and the use of one step says nothing of the next
        x = small(7, 3)
        x[used, 0] = 60
        x.requires_grad_()
        model.zero_grad()
        targets = [x, *model.parameters()]
        slopes = slopes_of(loss_of(model(x)), targets)
        seen += detached(slopes_of(squares_of(slopes), targets))
        squares_of(slopes).backward()
        seen += [*detached(slopes), x.grad]
        seen += detached([p.grad for p in model.parameters()])
    return seen


@uses(PARTLY, {"1": 1, "2": 2}, in_parts=True, on=THREE)
def a_replica_may_need_no_gradient(model, order):
    x = small(7, 3)
    x[3:, 0] = -60  # all rows of replica 1, and of replica 2
    x.requires_grad_()
    targets = [x, *model.parameters()]
    slopes = torch.autograd.grad(
        loss_of(model(x)), targets, create_graph=order == 2, allow_unused=True
    )
    if order == 2:
        slopes += slopes_of(squares_of(slopes), targets)
    return [s if s is None else s.detach() for s in slopes]


@uses(lambda: Made(lambda m, x: x + m.by, {"by": parameter(small(3))}))
def a_gradient_may_be_that_of_the_output_itself(model):
    x = grown()
    slopes = slopes_of(model(x).pow(3).sum(), [x])
    return detached([*slopes, *slopes_of(squares_of(slopes), [x])])


def looked_up(m, words):
    return (m.sparse(words) * m.dense(words)).square().sum(1)


@uses(
    module(
        looked_up,
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
    return sparse.to_dense().detach(), dense.detach(), again


@uses(Power, {"float32": torch.float32, "complex128": torch.complex128})
def other_dtypes_have_second_orders(model, dtype):
    bare(model).to(dtype)
    x = torch.complex(small(7, 3), small(7, 3, seed=1))
    x = (x if dtype.is_complex else x.real).to(dtype).requires_grad_()
    out, targets = model(x), [x, *model.parameters()]
    slopes = slopes_of((out * out.conj()).real.sum(), targets)
    value = sum((s * s.conj()).real.sum() for s in slopes if s is not None)
    return detached(slopes), torch.autograd.grad(value, targets[:3])


def checkpointed():
    held = {"power": Power(), "is_on": True}
    return Made(lambda m, x: inside(m, x) if m.is_on else m.power(x), held)


def inside(m, x):
    return checkpoint(m.power, x, use_reentrant=False)


@uses(checkpointed, {"inside": True, "around": False})
def checkpoints_have_second_orders(model, is_inside):
    bare(model).is_on = is_inside
    x = grown()
    out = model(x) if is_inside else checkpoint(model, x, use_reentrant=False)
    slopes = slopes_of(loss_of(out), [x, *model.parameters()])
    squares_of(slopes).backward()
    return detached(slopes), x.grad


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("nobody asks for this")


def unasked(m, x):
    return nn.functional.linear(x.square(), Broken.apply(m.weight))


@uses(lambda: Made(unasked, {"weight": parameter(small(2, 3))}))
def what_nobody_asks_for_is_not_computed(model):
    x = grown()
    return detached(slopes_of(squares_of(slopes_of(loss_of(model(x)), [x])), [x]))


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
    return fired, detached(slopes), x.grad


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
    return first, second, third.detach(), x.grad


@uses(Power)
def a_weight_changed_before_the_second_order_is_an_error(model):
    x = grown()
    penalty = squares_of(slopes_of(loss_of(model(x)), [x]))
    with torch.no_grad():
        bare(model).last.weight.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()
    model.zero_grad()
    step(model, grown()).backward()


# ---- many at once -------------------------------------------------------------------


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
    return detached(slopes), x.grad


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


# ---- torch.func ---------------------------------------------------------------------


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
    """Return a function of the model's parameters and buffers, and of its input."""
    parent = Parent(model)
    prefix = "inner." if model is bare(model) else "inner.module."

    def run(state, x):
        named = {prefix + name: tensor for name, tensor in state.items()}
        return func.functional_call(parent, named, (x,))

    return run


def squared(f):
    return lambda *arguments: f(*arguments).square().sum()


def ones_like(state):
    return {name: torch.ones_like(tensor) for name, tensor in state.items()}


def ensemble_of(state):
    return {name: torch.stack([t, t * 2]) for name, t in state.items()}


def along(f, state, x):
    with forward_ad.dual_level():
        pairs = [
            (n, forward_ad.make_dual(t, torch.ones_like(t))) for n, t in state.items()
        ]
        return forward_ad.unpack_dual(f(dict(pairs), x)).tangent


def by_sample(f, state, x):
    def gradient(row):
        return func.grad(squared(f))(state, row.expand(4, 3))

    return func.vmap(gradient)(x)


def curvature(f, state, x):
    def loss_of_bias(bias):
        return squared(f)({**state, "last.bias": bias}, x)

    return func.hessian(loss_of_bias)(state["last.bias"])


OF_PARAMETERS = {
    "grad": lambda f, s, x: func.grad(squared(f), argnums=(0, 1))(s, x),
    "vjp": lambda f, s, x: func.vjp(f, s, x)[1](torch.ones(len(x), 2, **F64)),
    "jvp": lambda f, s, x: func.jvp(f, (s, x), (ones_like(s), x)),
    "jacrev": lambda f, s, x: func.jacrev(f)(s, x),
    "jacfwd": lambda f, s, x: func.jacfwd(f)(s, x),
    "vmap": lambda f, s, x: func.vmap(f, (0, None))(ensemble_of(s), x),
    "vmap of grad": lambda f, s, x: func.vmap(func.grad(squared(f)), (0, None))(
        ensemble_of(s), x
    ),
    "by sample": by_sample,
    "hessian": curvature,
    "dual numbers": along,
}


def scaled():
    held = {"first": linear(4), "last": linear(2, 4)}
    made = Made(lambda m, x: m.last(torch.tanh(m.first(x))) * m.scale, held)
    made.register_buffer("scale", torch.tensor(2.0, **F64))
    return made


@uses(scaled, OF_PARAMETERS, exact=False)
def transforms_of_parameters_do_as_with_the_plain_module(model, transform):
    state = {n: t.detach().clone() for n, t in bare(model).state_dict().items()}
    run = as_function(model)
    return [transform(run, state, integers(7, 3)) for _ in range(2)]
