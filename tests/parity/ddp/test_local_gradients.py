"""If a program changes a rank's own gradients, results equal those of torch's class.

Gradients are changed by hooks registered after wrapping, lazily conjugated by complex
operations, near the limit of their dtype, of parameters outside of the wrapped module,
or kept by the program from one step to the next.
"""

import contextlib
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import (
    Terms,
    apart,
    as_torch,
    assert_equal,
    factors,
    grads_of,
    integer_weights,
    net,
    on_gpus_too,
    on_ranks,
    skip_without_complex,
    step_of,
)
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

SMALL, LARGE = (3, 2), (120, 100)
SHAPES = [SMALL, LARGE, (4,)]


# ---- hooks of the user --------------------------------------------------------------


def clip(parameter):
    parameter.grad.clamp_(-1, 1)


def replace(parameter):
    parameter.grad = parameter.grad * 2


def drop(parameter):
    parameter.grad = None


CHANGES = {"clip": clip, "clip on rank 1": clip, "replace": replace, "drop": drop}


@on_gpus_too(change=["clip"], when=["before", "after"])
@as_torch(change=[*CHANGES], when=["before", "after", "between", "removed"])
def test_hooks_change_the_gradient_before_it_is_averaged(ranks, wrap, change, when):
    module, handles = Terms(SHAPES), []

    def register():
        # If every rank drops it, torch sets zeros, and we keep the old gradient.
        if ranks.rank == {"drop": 1, "clip on rank 1": 0}.get(change):
            return
        for p in module.parameters():
            handles.append(p.register_post_accumulate_grad_hook(CHANGES[change]))

    if when == "before":
        register()
    model = wrap(module)
    if when in ("after", "removed"):
        register()
    for step in range(3):
        while when == "removed" and step > 0 and handles:
            handles.pop().remove()
        loss = model(factors(ranks, model, step))
        if when == "between" and step == 0:
            register()
        loss.backward()
        yield grads_of(model)
        ranks.assert_same(grads_of(model), "gradients")


@as_torch()
def test_hooks_see_what_hooks_before_them_have_made(ranks, wrap):
    model, found = wrap(Terms(SHAPES)), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(replace)
        p.register_post_accumulate_grad_hook(lambda q: found.append(q.grad.sum()))
    for step in range(2):
        step_of(model, factors(ranks, model, step))
    yield found


@as_torch()
def test_a_hook_may_replace_the_gradients_of_other_parameters(ranks, wrap):
    model = wrap(Terms(SHAPES))
    every = list(model.parameters())

    def replace_all(_):
        for p in every:
            if p.grad is not None:
                p.grad = p.grad.clone()

    for p in every:
        p.register_post_accumulate_grad_hook(replace_all)
    for step in range(3):
        model(factors(ranks, model, step)).backward()
    ranks.assert_same(grads_of(model), "gradients")
    yield grads_of(model)


class Drops(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@on_ranks(by=["a hook", "a Function"])
def test_a_gradient_that_is_dropped_on_every_rank_stays_none(ranks, by):
    """torch sets zeros."""
    module = Terms(SHAPES)
    terms = list(module.terms)
    if by == "a hook":
        terms[1].register_post_accumulate_grad_hook(drop)
    else:
        parts = [terms[0], Drops.apply(terms[1]), terms[2]]
        module.forward = lambda factors: Terms.forward(
            SimpleNamespace(parameters=lambda: parts), factors
        )
    for wrap, dropped in ((ranks.wrap_by_torch, 0.0), (ranks.wrap, None)):
        model = wrap(module)
        model.zero_grad()
        model(factors(ranks, model, 0)).backward()
        found = terms[1].grad
        assert (found if found is None else found.abs().max().item()) == dropped
        ranks.assert_same([terms[0].grad, terms[2].grad], "gradients")


# ---- lazy conjugates and signs ------------------------------------------------------


class Conjugated(nn.Module):
    """Gets gradients that are lazy conjugates."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.complex64))

    def forward(self):
        return self.weight.conj()


class Negated(nn.Module):
    """Gets gradients of one element with a lazy sign."""

    def __init__(self, shape):
        super().__init__()
        self.real = nn.Parameter(torch.zeros(shape))
        self.imag = nn.Parameter(torch.zeros(shape))

    def forward(self):
        return torch.complex(self.real, self.imag).conj()


def complex_integers(ranks, *shape, key=0):
    return torch.complex(
        ranks.integers(*shape, key=(key, 0)), ranks.integers(*shape, key=(key, 1))
    )


@as_torch(shape=[(3,), (1,), (), LARGE], kind=[Conjugated, Negated], view=[False, True])
def test_gradients_that_are_yet_to_be_conjugated_are_averaged(
    ranks, wrap, shape, kind, view
):
    skip_without_complex()
    plain = kind(shape)
    plain().backward(complex_integers(ranks, *shape))
    lazy = [p.grad.is_conj() or p.grad.is_neg() for p in plain.parameters()]
    assert any(lazy) or (kind is Negated and shape not in ((1,), ()))
    model = wrap(kind(shape), gradient_as_bucket_view=view)
    for step in range(3):
        model().backward(complex_integers(ranks, *shape, key=step))
        yield grads_of(model)
        yield [[p.grad.is_conj(), p.grad.is_neg()] for p in model.parameters()]
    model.zero_grad()
    model().backward(complex_integers(ranks, *shape, key="again"))
    yield grads_of(model)


@as_torch()
def test_a_gradient_may_be_conjugated_by_its_owner(ranks, wrap):
    """Between two backwards, and on only one rank."""
    skip_without_complex()
    model = wrap(Terms([SMALL, LARGE], [torch.complex64]))
    model(factors(ranks, model, 0)).backward()
    if ranks.rank == 0:
        for p in model.parameters():
            p.grad = p.grad.clone().conj()
    model(factors(ranks, model, 1)).backward()
    yield grads_of(model)


@as_torch()
def test_a_hook_of_a_node_may_conjugate_a_gradient_in_place(ranks, wrap):
    """The native code has read the gradient before."""
    skip_without_complex()
    terms = Terms([SMALL, (4,)], [torch.complex64])
    nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in terms.parameters()]
    model = wrap(terms)

    def conjugate(p, *_):
        p.grad.data = p.grad.data.conj()

    for node, p in zip(nodes, terms.parameters(), strict=True):
        node.register_hook(partial(conjugate, p))
    model(factors(ranks, model, 0)).backward()
    yield [p.grad for p in model.parameters()]


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.is_neg:
            raise NotImplementedError("is_neg")
        return super().__torch_function__(function, types, args, kwargs or {})


@as_torch()
def test_subclasses_are_not_asked_for_a_lazy_sign(ranks, wrap):
    plain = nn.Linear(3, 2)
    plain.register_buffer("scale", torch.ones(3).as_subclass(Refusing))
    model = wrap(integer_weights(plain, 0, 1))
    plain.weight.grad = torch.zeros(2, 3).as_subclass(Refusing)
    for step in range(2):
        model(ranks.integers(1, 3, key=step)).sum().backward()
        yield [p.grad.as_subclass(torch.Tensor) for p in plain.parameters()]


def negated(grad):
    return torch._neg_view(-grad)


def strided(grad):
    """Return the gradient as part of a lazy conjugate, without gaps in memory."""
    memory = grad.new_zeros(2 * grad.numel() + 2)
    memory[1 : 1 + grad.numel()] = -grad.flatten()
    lazy = torch.view_as_complex(memory.view(-1, 2)).conj().imag
    return lazy.as_strided(grad.shape, grad.stride())


@as_torch(how=[negated, strided], start=[0, 4], view=[False, True])
def test_gradients_of_one_rank_may_have_a_lazy_sign(ranks, wrap, how, start, view):
    skip_without_complex()
    terms = Terms([(), SMALL, LARGE])
    model = wrap(terms, gradient_as_bucket_view=view)
    for step in range(start + 4):
        for p in terms.parameters() if (ranks.rank, step) == (0, start) else ():
            p.register_hook(how)
        if step % 2 == 0:
            model.zero_grad()
        model(factors(ranks, model, step)).backward()
        yield grads_of(model)


class Halves(nn.Module):
    """Its second parameter has a gradient with a lazy sign if it is conjugated."""

    def __init__(self, shape, is_lazy):
        super().__init__()
        ones = torch.ones(shape, dtype=torch.float16)
        self.real, self.imag = nn.Parameter(ones), nn.Parameter(2 * ones)
        start = torch.complex(ones, 3 * ones).conj().imag
        self.register_buffer("lazy", start if is_lazy else start.resolve_neg())

    def forward(self, x, is_conjugated):
        z = torch.complex(self.real, self.imag)
        z = z.conj() if is_conjugated else z
        return (torch.view_as_real(z.resolve_conj()) * x).sum() * self.lazy.sum()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@as_torch(shape=[(), (1,)], view=[False, True])
def test_half_numbers_of_one_rank_may_have_a_lazy_sign(ranks, wrap, shape, view):
    skip_without_complex()
    model = wrap(Halves(shape, ranks.rank == 0), gradient_as_bucket_view=view)
    for step in range(6):
        model.zero_grad()
        x = ranks.integers(*shape, 2, key=step).half()
        model(x, ranks.rank == step % 3).backward()
        yield grads_of(model)
        yield list(model.buffers())


def test_a_parameter_that_is_a_lazy_conjugate_starts_equal(ranks):
    skip_without_complex()
    model = Conjugated((3,))
    start = complex_integers(ranks, 3)
    model.weight = nn.Parameter(start.conj() if ranks.rank == 0 else start.clone())
    ours = ranks.wrap(model)
    ranks.assert_same([ours.module.weight.detach().resolve_conj()], "the weight")
    first = ranks.all(start.conj().resolve_conj())[0]
    assert_equal(ours.module.weight.detach().resolve_conj(), first, "the weight")


def conjugate_sum(group, bucket):
    """Return a future of the sum as a lazy conjugate of its conjugate."""
    buffer = bucket.buffer()
    torch.distributed.all_reduce(buffer, group=group)
    future = torch.futures.Future()
    if bucket.parameters()[0].is_complex() and not buffer.is_complex():
        whole = torch.view_as_complex(buffer.view(-1, 2))
        future.set_result(whole.conj().resolve_conj().conj())
    else:
        future.set_result(buffer)
    return future


def test_a_communication_hook_may_return_a_lazy_conjugate(ranks):
    skip_without_complex()
    ours = ranks.wrap(Conjugated((3,)))
    ours.register_comm_hook(ranks.group, conjugate_sum)
    gradient = complex_integers(ranks, 3)
    ours().backward(gradient.clone())
    total = sum(ranks.all(gradient.conj().resolve_conj()))
    assert_equal(ours.module.weight.grad.resolve_conj(), total, "the gradient")


# ---- near the limit of a dtype ------------------------------------------------------

LIMIT = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@as_torch(dtype=LIMIT)
def test_averages_of_the_largest_gradients_are_finite(ranks, wrap, dtype):
    model = wrap(Terms(SHAPES, [dtype]))
    largest = torch.finfo(dtype).max
    model([torch.full_like(p, largest) for p in model.parameters()]).backward()
    yield grads_of(model)
    assert all(p.grad.isfinite().all() for p in model.parameters())


# ---- parameters outside of the module -----------------------------------------------


@as_torch(through=["wrapper", "module"], kind=["parameter", "tensor"])
def test_gradients_of_parameters_of_ones_own_are_local(ranks, wrap, through, kind):
    model = wrap(nn.Linear(3, 2, bias=False), find_unused_parameters=True)
    session = getattr(model, "_session", None)
    reducer = session and session.reducer
    x = ranks.integers(2, 3, key="x")
    for step in range(3):
        own = ranks.integers(2, 3, key=step).requires_grad_()
        if kind == "parameter":
            own = nn.Parameter(own.detach())
        if through == "wrapper":
            output = functional_call(model, {"module.weight": own}, x)
        else:
            output = functional_call(model.module, {"weight": own}, x)
        output.sum().backward()
        assert model.module.weight.grad is None
        assert_equal(own.grad, x.sum(0).expand(2, 3), "a gradient of the user")
    model(x).sum().backward()
    yield grads_of(model)
    assert session is None or session.reducer is reducer, "wrapped anew"


def test_one_rank_alone_may_call_with_parameters_of_its_own(ranks):
    ours = ranks.wrap(nn.Linear(3, 2))
    reducer = ours._session.reducer
    x = ranks.integers(2, 3)
    if ranks.rank == 0:
        own = {
            name: nn.Parameter(torch.ones_like(p))
            for name, p in ours.named_parameters()
        }
        functional_call(ours, own, x).sum().backward()
        assert_equal(own["module.bias"].grad, torch.full((2,), 2.0), "the gradient")
    ours(x).sum().backward()
    ranks.assert_same(grads_of(ours), "gradients")
    assert ours._session.reducer is reducer


# ---- tensors that torch swaps -------------------------------------------------------


@contextlib.contextmanager
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@on_ranks(by=["wrapper", "module", "float", "double", "half way"])
def test_parameters_that_were_swapped_are_averaged(ranks, by):
    """torch's own class refuses the swap, so the plain modules are the reference."""
    torch.manual_seed(1)
    ours = ranks.wrap(nn.Linear(3, 2))
    x = ranks.integers(2, 3)
    if by == "half way":
        ours(x).sum().backward()
        ours.zero_grad()
    start = {name: p.detach() + 1 for name, p in ours.module.named_parameters()}
    with swapping():
        if by == "wrapper":
            ours.load_state_dict({f"module.{k}": v for k, v in start.items()})
        elif by in ("float", "double"):
            getattr(ours, by)()
        else:
            ours.module.load_state_dict(start)
    x = x.to(ours.module.weight.dtype)
    for _ in range(2):
        step_of(ours, x)
        mean = sum(x.sum(0) for x in ranks.all(x)) / 2
        assert_equal(ours.module.weight.grad, mean.expand(2, 3), "the gradient")


# ---- gradients that a program keeps -------------------------------------------------

# The first is 40 kB: backward makes its gradient a view of its bucket, copies others.
SIZES = 100, 100, 3


make = partial(net, *SIZES)


def data(ranks, key):
    return ranks.integers(2, SIZES[0], key=key)


def are_kept(model, kept):
    pairs = zip(model.parameters(), kept, strict=True)
    return torch.tensor([p.grad is grad for p, grad in pairs])


def flat_gradients(model):
    """Return one tensor for all gradients, and its views, which become gradients."""
    n = sum(p.numel() for p in model.parameters())
    flat, at, views = torch.zeros(n), 0, []
    for p in model.parameters():
        views.append(flat[at : at + p.numel()].view_as(p))
        at += p.numel()
        p.grad = views[-1]
    return flat, views


@as_torch(when=["before wrapping", "after", "each step", "after forward"])
def test_a_flat_buffer_of_the_users_own_has_the_gradients(ranks, wrap, when):
    model = make()
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
        yield [flat, are_kept(model, views)]
        with torch.no_grad():
            for p, view in zip(model.parameters(), views, strict=True):
                p -= view.clamp(-1, 1)
    yield [*model.parameters()]


@on_gpus_too(first=[1], zero=[True])
@as_torch(first=[0, 1, 3], zero=[False, True])
def test_gradients_kept_from_a_step_follow_those_to_come(ranks, wrap, first, zero):
    model, kept = wrap(make()), []
    for step in range(6):
        if step <= first:
            model.zero_grad()
        elif zero:
            for grad in kept:
                grad.zero_()
        model(data(ranks, step)).sum().backward()
        if step == first:
            kept = [p.grad for p in model.parameters()]
        if kept:
            yield [*kept, are_kept(model, kept)]


@as_torch(how=["no_sync", "bare"])
def test_gradients_kept_from_a_local_backward_are_averaged_in_place(ranks, wrap, how):
    model = wrap(make())
    for step in range(4):
        model.zero_grad()
        x = data(ranks, (step, "local"))
        if how == "no_sync":
            with model.no_sync():
                model(x).sum().backward()
        else:
            model.module(x).sum().backward()
        kept = [p.grad for p in model.parameters()]
        model(data(ranks, step)).sum().backward()
        yield [*kept, are_kept(model, kept)]


USED = {
    "by one rank": [None, {0, 2}],
    "by none": [{0, 2}, {0, 2}],
    "by each alone": [{0, 2}, {1, 2}],
}


@as_torch(used=[*USED])
def test_a_kept_gradient_of_what_is_used_by_some_ranks_stays(ranks, wrap, used):
    model = wrap(Terms(SHAPES), find_unused_parameters=True)
    model(factors(ranks, model, 0)).backward()
    kept = [p.grad for p in model.parameters()]
    for step in range(3):
        model(factors(ranks, model, step, USED[used][ranks.rank])).backward()
        yield [*kept, are_kept(model, kept)]


class Checkpointed(nn.Module):
    """Its parameters get all gradients late, or one by one in the same backward."""

    def __init__(self, is_reentrant):
        super().__init__()
        self.net, self.is_reentrant = make(), is_reentrant

    def forward(self, x):
        out = 0
        for n in range(1 + self.is_reentrant):
            out = out + checkpoint(self.net, x + n, use_reentrant=self.is_reentrant)
        return out


@as_torch(is_reentrant=[False, True])
def test_gradients_kept_over_checkpoints_are_averaged_in_place(
    ranks, wrap, is_reentrant
):
    model = wrap(Checkpointed(is_reentrant), static_graph=is_reentrant)
    flat, views = flat_gradients(model)
    for step in range(3):
        model(data(ranks, step).requires_grad_()).sum().backward()
        yield [flat, are_kept(model, views)]


def test_a_large_gradient_cannot_grow_in_place(ranks):
    model = ranks.wrap(make())
    model(data(ranks, 0)).sum().backward()
    grad = model.module[0].weight.grad
    for grow in (
        lambda: grad.detach().resize_(200, 100),  # torch keeps the new size
        lambda: torch.ones(200, 100, out=grad.detach()),
        lambda: grad.untyped_storage().resize_(0),
    ):
        with pytest.raises(RuntimeError, match="storage that is not resizable"):
            grow()


@as_torch(view=[False, True], place=[contextlib.nullcontext, apart])
def test_a_forked_child_keeps_the_gradients_of_its_fork(ranks, wrap, view, place):
    with place():
        model = wrap(make(), gradient_as_bucket_view=view)
    model(data(ranks, 0)).sum().backward()
    of_fork = grads_of(model)
    (is_over, over), (seen, see) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(is_over, 1)
        same = [
            torch.equal(a, b) for a, b in zip(of_fork, grads_of(model), strict=True)
        ]
        os.write(see, bytes(same))
        os._exit(0)
    for step in range(3):
        for p in model.parameters():
            p.grad.zero_()
        model(data(ranks, step)).sum().backward()
        yield grads_of(model)
    os.write(over, b".")
    yield [*os.read(seen, 99)]
    os.waitpid(child, 0)
    for end in (is_over, over, seen, see):
        os.close(end)
