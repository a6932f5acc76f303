"""Random numbers: each replica has its own, the user's go on, and runs repeat."""

import functools
import random
import threading
import time

import numpy as np
import pytest
import torch
from paceline._dp.replicate import is_replica
from programs import Made, X, grown, module, parameter
from replicas import ON_EACH, Twin, assert_same, grads_of, linear, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

ONES = torch.ones(8, 64)
BOTH_KINDS = pytest.mark.parametrize(
    "use_reentrant", [False, True], ids=["saved", "again"]
)


def dropped():
    """Return a module with two dropouts; weights of 2 tell kept zeros from dropped."""

    def forward(m, x):
        return m.drop(m.drop(x) * m.scale)

    return module(
        forward, scale=parameter(torch.full((64,), 2.0)), drop=nn.Dropout(0.5)
    )


# ---- the user's numbers -------------------------------------------------------------


def test_dropout_is_repeatable_by_the_seed(wrap):
    ours = wrap(dropped(), 4)  # of 2 rows each

    def outputs(seed):
        torch.manual_seed(seed)
        return [ours(ONES).split(2) for _ in range(2)]

    ours(ONES)  # numbers drawn before do not matter
    first, again, other = outputs(5), outputs(5), outputs(6)
    assert_same(again, first)
    for masks in zip(first[0], first[1], other[0], strict=True):
        assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 3
    assert len({tuple(mask.flatten().tolist()) for mask in first[0]}) == 4


def test_the_first_replica_draws_from_the_users_numbers_which_go_on_behind_it(wrap):
    twin = Twin(wrap, dropped())
    for seed in range(3):
        torch.manual_seed(seed)
        theirs = twin.plain(ONES[:4]), torch.rand(3)
        torch.manual_seed(seed)
        assert_same((twin.ours(ONES)[:4], torch.rand(3)), theirs)


@ON_EACH
def test_the_users_numbers_go_on_after_a_failure(wrap):
    def draws_and_fails(m, x):
        drawn = torch.rand(())
        if (x == 9).any():
            raise ValueError("a row of 9")
        return x * drawn

    ours, x = wrap(module(draws_and_fails)), torch.ones(4, 2)
    ours(x)
    x[3] = 9
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="a row of 9"):
        ours(x)
    mine = torch.rand(())
    torch.manual_seed(3)
    torch.rand(())
    assert torch.equal(mine, torch.rand(()))


@ON_EACH
def test_the_numbers_of_a_replica_do_not_depend_on_those_before(wrap):
    def draws_by_rows(m, x):
        torch.rand(int(x[0, 0]))
        return torch.rand(len(x)).to(x)

    ours, drawn = wrap(module(draws_by_rows)), []
    for n in (0, 5):
        x = torch.zeros(8, 3)
        x[0, 0] = n
        torch.manual_seed(3)
        drawn.append(ours(x))
    assert torch.equal(drawn[0][4:], drawn[1][4:])
    assert not torch.equal(drawn[0][:4], drawn[1][:4])


def test_evaluation_draws_nothing(wrap):
    twin = Twin(wrap, dropped().eval())
    before = torch.get_rng_state()
    twin.compare(lambda model, x: model(x), ONES)
    assert torch.equal(torch.get_rng_state(), before)


def test_all_ways_to_draw_are_repeatable(wrap):
    def noisy(m, x):
        own = torch.Generator().manual_seed(len(x))
        fixed = torch.rand(len(x), 3, generator=own)
        noise = torch.randn_like(x) + torch.rand(len(x), 1)
        return noise, fixed, torch.randperm(100)[: len(x)]

    ours, outputs = wrap(module(noisy)), []
    for _ in range(2):
        torch.manual_seed(1)
        outputs.append([ours(X) for _ in range(3)])
    assert_same(*outputs)
    noise, fixed, permuted = outputs[0][0]
    own = torch.Generator().manual_seed(3)
    assert torch.equal(fixed[4:], torch.rand(3, 3, generator=own))
    for drawn in (noise, permuted):
        assert not torch.equal(drawn[:3], drawn[4:])


# ---- masks, and recomputation -------------------------------------------------------


def test_gradients_belong_to_the_masks_that_were_drawn(wrap):
    ours = wrap(dropped())
    for order in (1, 2, 1, 2):
        x = grown(ONES)
        out = ours(x)
        torch.rand(5)
        if order == 1:
            out.sum().backward()
            assert torch.equal(x.grad, out.detach())
        else:
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            assert torch.equal(slope, out)
            slope.sum().backward()
        assert torch.equal(ours.module.scale.grad * 2, out.detach().sum(0))
        ours.zero_grad()


@pytest.mark.parametrize("place", ["inside", "around"])
@BOTH_KINDS
def test_checkpoints_draw_the_same_masks_again(wrap, place, use_reentrant):
    again = functools.partial(checkpoint, use_reentrant=use_reentrant)
    if place == "inside":
        call = wrap(module(lambda m, x: again(m.inner, x), inner=dropped()))
    else:
        call = functools.partial(again, wrap(dropped()))
    for _ in range(3):
        x = grown(ONES)
        out = call(x)
        torch.rand(5)  # the stream goes on before backward
        out.sum().backward()
        assert torch.equal(x.grad, out.detach())


@BOTH_KINDS
def test_checkpoints_in_checkpoints_repeat_the_random_numbers(wrap, use_reentrant):
    def keep(m, function, x):
        again = functools.partial(checkpoint, use_reentrant=use_reentrant)
        return again(function, x) if m.saves_memory else function(x)

    def forward(m, x):
        def block(x):
            return m.drop(m.layer(x)).square()

        return keep(m, lambda x: keep(m, block, x) + x, x)

    ours = wrap(module(forward, layer=linear(), drop=nn.Dropout(0.5)))
    results = []
    for ours.module.saves_memory in (True, False):
        ours.zero_grad()
        torch.manual_seed(5)
        x = grown()
        out = ours(x)
        loss_of(out).backward()
        results.append([out, x.grad, grads_of(ours)])
    assert_same(*results)


# ---- generators that the model holds ------------------------------------------------

shared = torch.Generator()


def drawing(draw, **held):
    """Return a module that adds a number from `draw(m)` to each row."""

    def forward(m, x):
        return x.new_full((len(x),), float(m.draw(m))) + 0 * m.weight

    weight = nn.Parameter(torch.zeros(()))
    return Made(forward, {"weight": weight, "draw": draw, **held})


def seeded(seed):
    """Return models that draw from generators with this seed, by place of generator."""
    shared.manual_seed(seed)
    own = torch.Generator().manual_seed(seed)
    rng, plain = np.random.default_rng(seed), random.Random(seed)
    return {
        "torch": drawing(lambda m: torch.rand((), generator=m.g), g=own),
        "numpy": drawing(lambda m: m.rng.random(), rng=rng),
        "python": drawing(lambda m: m.rng.random(), rng=plain),
        "a dict": drawing(lambda m: m.all["a"][0].random(), all={"a": [rng]}),
        "a bound method": drawing(lambda m: m.roll(), roll=rng.random),
        "a global": drawing(lambda m: torch.rand((), generator=shared)),
        "a closure": drawing(lambda m: rng.random()),
    }


@pytest.mark.parametrize("name", list(seeded(0)))
@ON_EACH
def test_generators_of_the_model_are_drawn_from_in_order(wrap, name):
    runs = []
    for _ in range(2):
        ours = wrap(seeded(5)[name], 3)
        runs.append([ours(X).tolist() for _ in range(6)])
        drawn = [run[i] for run in runs[-1] for i in (0, 3, 5)]
        assert len(set(drawn)) == len(drawn)
    assert runs[0] == runs[1]
    theirs = seeded(5)[name]
    assert drawn == [theirs(X[:1]).item() for _ in range(18)]


@ON_EACH
def test_a_generator_that_is_drawn_from_later_is_drawn_from_in_order(wrap):
    active = []
    rng, theirs = np.random.default_rng(3), np.random.default_rng(3)
    ours = wrap(drawing(lambda m: m.rng.random() if active else 0.0, rng=rng))
    for _ in range(2):
        ours(X)
    active.append(True)
    assert ours(X).tolist() == [theirs.random()] * 4 + [theirs.random()] * 3


@ON_EACH
def test_a_generator_that_each_forward_seeds_is_drawn_from_in_order(wrap):
    """Its state is the same before and after a forward: only taking turns works."""
    threads = set()

    def draw(m):
        threads.add(threading.get_ident())
        return torch.rand((), generator=m.g.manual_seed(3))

    ours = wrap(drawing(draw, g=torch.Generator().manual_seed(3)), 3)
    draw(ours.module)
    for mode in (torch.enable_grad, torch.no_grad):
        for _ in range(2):
            assert len(set(mode()(ours)(X).tolist())) == 1
    assert threads == {threading.get_ident()}


DRAWS = {
    "random": lambda x, generator: random.random(),
    "numpy": lambda x, generator: np.random.rand(),
    "argument": lambda x, g: torch.randn(len(x), 1, generator=g).to(x),
}


@pytest.mark.parametrize("kind", DRAWS)
@ON_EACH
def test_replicas_take_turns_at_a_generator(wrap, kind):
    """From the time they may draw; replica 0 may be late then."""

    def forward(m, x, generator=None):
        if m.is_late and not is_replica(m):
            time.sleep(0.05)
        return m.layer(x) * (DRAWS[kind](x, generator) if m.is_drawing else 1)

    made = module(forward, layer=linear(), is_late=False, is_drawing=False)
    ours, generator = wrap(made), torch.Generator()
    arguments = (X, generator) if kind == "argument" else (X,)
    for _ in range(2):
        ours(*arguments)
    made.is_drawing = True
    ours(*arguments)  # on GPUs the first forward that draws warns
    drawn = []
    for made.is_late in (False, True, False, True):
        generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        drawn.append(ours(*arguments))
    assert all(torch.equal(each, drawn[0]) for each in drawn)
