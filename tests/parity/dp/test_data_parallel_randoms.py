"""Random numbers: each replica has its own, the user's go on, and runs repeat."""

import functools
import queue
import random
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paceline._dp.replicate import is_replica
from programs import InParts, Made, X, grown, module, parameter
from replicas import ON_EACH, ON_GPUS, Twin, assert_same, linear
from support import devices
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


@ON_EACH
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


class Draws:
    """Draws a number of each of the process's generators for a test."""

    def __init__(self):
        self.ask, self.answer, self.drawn = queue.Queue(), queue.Queue(), []
        self.thread = threading.Thread(target=self._serve)

    @staticmethod
    def here(n=1):
        return [float(torch.rand(n)[0]), random.random(), np.random.rand()]

    def in_another_thread(self):
        self.ask.put(True)
        self.drawn.append(self.answer.get(timeout=60))

    def _serve(self):
        while self.ask.get():
            self.answer.put(self.here())

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *ignored):
        self.ask.put(False)
        self.thread.join()


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "fails"])
@ON_EACH
def test_replicas_draw_as_the_module_called_on_each_part(wrap, fails):
    """The numbers of another thread and those after the call are the same, too."""

    def draws_by_rows(m, x):
        drawn = draws.here(int(x[0, 0]))
        draws.in_another_thread()
        if (x == 9).any():
            raise ValueError("a row of 9")
        return x.new_tensor([drawn]).expand(len(x), -1) + 0 * m.weight

    made = module(draws_by_rows, weight=parameter(torch.zeros(())))
    rows = torch.tensor([[3.0], [0], [2], [0]])
    if fails:
        rows[3] = 9
    runs, twin = [], Twin(wrap, made)
    with Draws() as draws:
        for call in (InParts(twin.plain, 2), twin.ours, twin.ours):
            seed_all(3)
            draws.drawn.clear()
            if fails:
                with pytest.raises(ValueError, match="a row of 9"):
                    call(rows)
            out = None if fails else call(rows).tolist()
            runs.append([out, draws.drawn.copy(), draws.here()])
    assert runs[0] == runs[1] == runs[2]


@ON_GPUS
def test_a_number_of_another_thread_puts_no_replicas_in_order_for_long(wrap, caplog):
    """It is drawn while the replica with these numbers of rows runs."""
    threads, n_threads, n_rows = [], [], set()

    def forward(m, x):
        threads.append(threading.get_ident())
        if len(x) in n_rows:
            draws.in_another_thread()
        return x * m.weight

    ours = wrap(module(forward, weight=parameter(torch.ones(()))))
    with Draws() as draws:
        for which in ({3}, {3}, {4}, {}, {3, 4}, {3, 4}, {}, {}):
            threads.clear()
            n_rows = which
            ours(X)
            n_threads.append(len(set(threads)))
    assert n_threads == [1, 2, 1, 2, 2, 1, 1, 2]
    (line,) = [r.getMessage() for r in caplog.records if r.name == "paceline"]
    assert "until a forward draws none" in line


@ON_GPUS
def test_a_forward_that_draws_is_told_of_in_its_first_call(wrap, caplog):
    ours = wrap(module(lambda m, x: x + torch.rand(()), weight=parameter(ONES)))
    for _ in range(3):
        ours(X)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "paceline"]
    assert "until a forward draws none" in line


# ---- generators of GPUs --------------------------------------------------------------


@ON_GPUS
@pytest.mark.parametrize("seeds", [(3, 3, 3), (3, 5, 3), (3, 5, 7)])
def test_gpus_with_one_seed_draw_apart_and_others_as_they_would(wrap, seeds):
    made = module(lambda m, x: m.drop(x) * m.scale, drop=nn.Dropout(0.5))
    made.scale, generators = parameter(torch.ones(64)), devices.native.generators[:3]
    wrapped, rows = wrap(made, 3), torch.ones(6, 64)

    def in_replicas():
        return wrapped(rows).split(2)

    def on_each_gpu():
        parts = [part.to(wrap.device(k)) for k, part in enumerate(rows.split(2))]
        return [F.dropout(part) for part in parts]

    def drawn(call):
        """Return the masks of two calls, and the generators' states, by GPU."""
        for generator, seed in zip(generators, seeds, strict=True):
            generator.manual_seed(seed)
        masks = [call(), call()]
        states = [generator.get_state() for generator in generators]
        return [[each.cpu() for each in of] for of in zip(*masks, states, strict=True)]

    ours, theirs = drawn(in_replicas), drawn(on_each_gpu)
    assert_same(drawn(in_replicas), ours)
    for k, pair in enumerate(zip(ours, theirs, strict=True)):
        are_same = [torch.equal(*each) for each in zip(*pair, strict=True)]
        assert are_same == [seeds[k] not in seeds[:k]] * 3
    assert len({str(mask.tolist()) for *masks, _ in ours for mask in masks}) == 6


def test_evaluation_draws_nothing(wrap):
    twin = Twin(wrap, dropped().eval())
    before = torch.get_rng_state()
    twin.compare(lambda model, x: model(x), ONES)
    assert torch.equal(torch.get_rng_state(), before)


# ---- masks, and recomputation -------------------------------------------------------


@ON_EACH
def test_gradients_belong_to_the_masks_that_were_drawn(wrap):
    ours = wrap(dropped())
    for order in (1, 2, 1, 2):
        x = grown(ONES)
        out = ours(x)
        torch.rand(5)
        if order == 1:
            out.sum().backward()
            assert torch.equal(x.grad, out.detach().cpu())
        else:
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            assert torch.equal(slope, out.cpu())
            slope.sum().backward()
        assert torch.equal(ours.module.scale.grad * 2, out.detach().sum(0))
        ours.zero_grad()


@pytest.mark.parametrize(
    ("wrap", "place"),
    [("cpu", "inside"), ("cpu", "around"), ("gpu", "inside")],
    indirect=["wrap"],
)
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
        assert torch.equal(x.grad, out.detach().cpu())


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


def in_a_fork(m):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        return torch.rand(())


elsewhere = {"seed_all": seed_all}
exec("def seeded_elsewhere(m):\n seed_all(3)\n return m.roll()", elsewhere)

SEEDED = {
    "its own": lambda m: torch.rand((), generator=m.g.manual_seed(3)),
    "torch's": lambda m: torch.manual_seed(3) and torch.rand(()),
    "a fork of torch's": in_a_fork,
    "Python's": lambda m: seed_all(3) or random.random(),
    "NumPy's, by a function of another file": elsewhere["seeded_elsewhere"],
}


@pytest.mark.parametrize("name", SEEDED)
@ON_EACH
def test_a_generator_that_each_forward_seeds_is_drawn_from_in_order(wrap, name):
    """Its state is the same before and after a forward: only taking turns works."""
    threads = set()

    def draw(m):
        threads.add(threading.get_ident())
        return m.rolls(m)

    held = {"g": torch.Generator()} if name == "its own" else {"roll": np.random.rand}
    ours = wrap(drawing(draw, rolls=SEEDED[name], **held), 3)
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
