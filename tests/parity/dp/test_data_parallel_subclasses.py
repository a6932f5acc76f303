"""Subclasses that override methods of torch's class, as libraries do.

The classes imitate torch_geometric's (a list of graphs), mmcv's (steps by name), the
"balanced" ones (an uneven first chunk), and those that keep outputs separate for a
parallel criterion.
"""

import abc
import copy
import itertools
import warnings

import paceline
import pytest
import torch
from programs import X, module
from replicas import (
    ON_EACH,
    assert_same,
    assert_same_grads,
    integers,
    linear,
    loss_of,
    net,
)
from support.copies import saved_and_loaded
from torch import nn


class Rows(nn.Module):
    """Two layers, and attributes that a library might read from a model."""

    hidden = 5

    def __init__(self):
        super().__init__()
        self.layers = net()

    def forward(self, x, scale=1):
        return self.layers(x) * scale

    def describe(self):
        return f"{self.hidden} wide"


@pytest.fixture
def check(wrap):
    """Return a function that checks a subclass against the plain module."""

    def check(kind, *args, n=2, **kwargs):
        plain = Rows()
        ours = wrap(Rows(), n, lambda m, **own: kind(m, *args, **own), **kwargs)
        for seed in range(2):
            x = integers(7, 3, seed=seed)
            outs = [model(x, scale=2) for model in (plain, ours)]
            assert_same(outs[1], outs[0])
            for out in outs:
                loss_of(out).backward()
            assert_same_grads(ours, plain)
        return ours

    return check


class Balanced(paceline.DataParallel):
    """Gives the first replica fewer rows, and takes one more argument."""

    def __init__(self, module, n_first, *args, **kwargs):
        super().__init__(module, *args, **kwargs)
        self.n_first = n_first

    def scatter(self, inputs, kwargs, device_ids):
        (x,) = inputs
        n = len(device_ids) - 1
        rest = len(x) - self.n_first
        sizes = [self.n_first] + [rest // n + (k < rest % n) for k in range(n)]
        return [(part,) for part in x.split(sizes)], [dict(kwargs)] * len(sizes)


def test_chunks_may_be_uneven(check):
    check(Balanced, 1)
    check(Balanced, 2, n=3)


FORMS = {
    "lists": lambda args, kwargs: ([list(some) for some in args], list(kwargs)),
    "generators": lambda args, kwargs: ((some for some in args), iter(kwargs)),
    "maps": lambda args, kwargs: (map(tuple, args), map(dict, kwargs)),
    "bare tensors": lambda args, kwargs: ([some[0] for some in args], kwargs),
    "without keywords": lambda args, kwargs: (args, None),
}


class Shaping(paceline.DataParallel):
    form = staticmethod(lambda args, kwargs: (args * 2, kwargs * 2))

    def scatter(self, inputs, kwargs, device_ids):
        return self.form(*super().scatter(inputs, kwargs, device_ids))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_scatter_may_return_any_form_but_not_too_many_parts(wrap, form):
    ours = wrap(Rows(), kind=Shaping)
    with pytest.raises(ValueError, match="for 4 replicas, but there are 2"):
        ours(X)
    ours.form = form
    assert_same(ours(X), ours.module(X))


# ---- replicate and parallel_apply ---------------------------------------------------


# ---- gather -------------------------------------------------------------------------


class Apart(paceline.DataParallel):
    def gather(self, outputs, output_device):
        return list(outputs)


class Criterion(paceline.DataParallel):
    """Takes separate outputs of replicas, and splits only the targets."""

    def forward(self, outputs, *targets, **kwargs):
        targets, kwargs = self.scatter(targets, kwargs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(outputs)])
        pairs = [(out, *some) for out, some in zip(outputs, targets, strict=True)]
        return sum(self.parallel_apply(replicas, pairs, kwargs))


def test_a_criterion_may_take_outputs_that_were_kept_apart(wrap):
    plain, made, y = Rows(), Rows(), integers(7, 2)
    model = wrap(made, kind=Apart)
    loss = nn.MSELoss(reduction="sum")
    criterion = wrap(loss, kind=Criterion)
    outputs = model(X)
    model(X + 1)  # overwrites no output
    assert [len(out) for out in outputs] == [4, 3]
    losses = [loss(plain(X), y), criterion(outputs, y)]
    assert_same(losses[1], losses[0])
    for one in losses:
        one.backward()
    assert_same_grads(made, plain)


class CallsAgain(paceline.DataParallel):
    is_within = False

    def gather(self, outputs, output_device):
        joined = super().gather(outputs, output_device)
        if self.is_within:
            return joined
        self.is_within = True
        return joined - self(torch.zeros_like(X))


def test_a_gather_may_call_the_wrapper(wrap):
    made = linear()
    assert_same(wrap(made, kind=CallsAgain)(X), made(X) - made.bias)


# ---- attributes ---------------------------------------------------------------------


class Forwarding(paceline.DataParallel):
    """Forwards attributes to its module, which recurses without end if done wrong."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class ForwardingFirst(paceline.DataParallel):
    def __getattr__(self, name):
        if name == "module":
            return super().__getattr__(name)
        return getattr(self.module, name)


@pytest.mark.parametrize("kind", [Forwarding, ForwardingFirst])
def test_attributes_may_be_those_of_the_module(check, kind):
    ours = check(kind)
    assert ours.layers is ours.module.layers
    with pytest.raises(AttributeError, match="nothing"):
        _ = ours.nothing
    for other in (ours, copy.deepcopy(ours), copy.copy(ours), saved_and_loaded(ours)):
        assert other.describe() == "5 wide"
        assert_same(other(X), ours.module(X))


NAMES = ("_forward", "_run", "_start", "_gather", "lock", "state", "config", "device")


def test_names_that_a_subclass_takes_do_no_harm(check):
    attributes = {name: (lambda self, *_: "mine") for name in NAMES}
    ours = check(type("Named", (paceline.DataParallel,), attributes))
    assert [getattr(ours, name)() for name in NAMES] == ["mine"] * len(NAMES)


def test_a_wrapper_is_one_of_torch_to_every_check():
    ours = Balanced(Rows(), 1)
    assert isinstance(ours, nn.DataParallel)
    kinds = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    assert issubclass(paceline.DataParallel[Rows].__origin__, kinds)


class Switching(paceline.DataParallel):
    def scatter(self, inputs, kwargs, device_ids):
        self.module = self.other[0]
        return super().scatter(inputs, kwargs, device_ids)


def test_a_scatter_that_sets_the_module_sets_it_for_this_call(wrap):
    ours = wrap(linear(), kind=Switching)
    ours.other = [linear(2)]
    assert torch.equal(ours(X), ours.other[0](X))


# ---- shapes found in public code ----------------------------------------------------


class Scaled(nn.Module):
    """A module by itself, like a kernel of gpytorch."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))


class Named:
    """A mixin that passes on what is not its own."""

    def __init__(self, *args, name="mine", **kwargs):
        super().__init__(*args, **kwargs)
        self.name = name


def beside_another_module(base):
    class Shape(base, Scaled):
        def __init__(self, module, device_ids=None):
            base.__init__(self, module=module, device_ids=device_ids)

    return Shape


def after_a_mixin(base):
    return type("Shape", (Named, base), {})


def with_an_abstract_base(base):
    return type("Shape", (base, abc.ABC), {})


def in_another_order(base):
    class Shape(base):
        def __init__(self, module, dim=0, device_ids=None, output_device=None):
            super().__init__(module, device_ids, output_device, dim)
            self.module = module

    return Shape


def round_a_second_wrapper(base):
    class Shape(base):
        def __init__(self, module, device_ids=None):
            super(base, self).__init__()
            self.model = base(module, device_ids)

        def forward(self, *inputs, **kwargs):
            return self.model(*inputs, **kwargs)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.model.module, name)

    return Shape


def made_by_hand(base):
    class Shape(base):
        def __init__(self, module, device_ids=None):
            super(base, self).__init__()
            self.module, self.dim, self.device_ids = module, 0, device_ids
            self.output_device = device_ids[0]
            self.src_device_obj = next(module.parameters()).device

    return Shape


def on_the_cpu_by_hand(base):
    class Shape(base):
        def __init__(self, module, device_ids=None):
            super(base, self).__init__()
            self.module, self.dim, self.device_ids = module, 0, []

    return Shape


def with_a_forward_like_torchs(base):
    class Shape(base):
        def forward(self, *inputs, **kwargs):
            tensors = itertools.chain(self.module.parameters(), self.module.buffers())
            assert all(t.device == self.src_device_obj for t in tensors)
            if not self.device_ids:
                return self.module(*inputs, **kwargs)
            inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            outputs = self.parallel_apply(replicas, inputs, kwargs)
            return self.gather(outputs, self.output_device)

    return Shape


def with_the_state_of_its_module(base):
    class Shape(base):
        def state_dict(self, *args, **kwargs):
            return self.module.state_dict(*args, **kwargs)

        def load_state_dict(self, state_dict, strict=True):
            self.module.load_state_dict(state_dict, strict)

    return Shape


SHAPES = [
    beside_another_module,
    after_a_mixin,
    with_an_abstract_base,
    in_another_order,
    round_a_second_wrapper,
    made_by_hand,
    on_the_cpu_by_hand,
    with_a_forward_like_torchs,
    with_the_state_of_its_module,
]


@ON_EACH
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_of_subclass_trains_and_keeps_its_state(wrap, check, shape):
    if wrap.is_gpu and shape is on_the_cpu_by_hand:
        pytest.skip("there is nothing to call plainly")
    kind = shape(paceline.DataParallel)
    ours = check(kind)
    state, twin = ours.state_dict(), copy.deepcopy(ours)
    others = [twin] if wrap.is_gpu else [twin, shape(nn.DataParallel)(Rows(), ["cpu"])]
    for other in others:
        assert [*state] == [*other.state_dict()]
        ours.load_state_dict(other.state_dict())
        other.load_state_dict(state)
        assert other.train(False).double().training is False
    assert_same(twin(X, scale=3), ours(X, scale=3))


# ---- torch's functions, which subclasses and loops call ------------------------------


@pytest.fixture
def parallel(monkeypatch):
    """Return the module of torch's functions, which serve replicas on the CPU."""
    monkeypatch.setenv("PACELINE_CPU_REPLICAS", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process holds torch's classes
        paceline.install()
    yield nn.parallel
    paceline.uninstall()


def in_pairs(base):
    """Return a subclass that takes a batch as ((x, ...), y)."""
    parallel = nn.parallel.scatter_gather

    class Pairs(base):
        def forward(self, *batch):
            inputs = self.scatter(batch, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
            return self.gather(
                self.parallel_apply(replicas, inputs, None), self.output_device
            )

        def scatter(self, batch, device_ids):
            (xs, ys) = (
                parallel.scatter_kwargs(one, None, device_ids)[0] for one in batch
            )
            return [(x[0], y[0]) for x, y in zip(xs, ys, strict=True)]

        def gather(self, outputs, output_device):
            names = outputs[0]
            return {
                name: nn.parallel.gather([out[name] for out in outputs], output_device)
                for name in names
            }

    return Pairs(module(lambda m, x, y: {"sum": m.layers(x) + y}, layers=net()))


def by_functions(model, x, n_gpus=2):
    """Run a model on the GPUs as loops without a wrapper do."""
    gpus, parallel = range(n_gpus), nn.parallel
    inputs = parallel.scatter((x,), gpus)
    kwargs = parallel.scatter({"scale": 2}, gpus)
    replicas = parallel.replicate(model, gpus[: len(inputs)])
    return parallel.gather(parallel.parallel_apply(replicas, inputs, kwargs), 0)


def test_torchs_functions_run_loops_of_ones_own(parallel):
    plain, made, y = Rows(), Rows(), integers(7, 2)
    ours = in_pairs(parallel.DataParallel)
    pairs = (plain(X, 2), by_functions(made, X)), (plain(X) + y, ours([X], [y])["sum"])
    for (theirs, mine), model in zip(pairs, (made, ours.module), strict=True):
        assert_same(mine, theirs)
        plain.zero_grad()
        for out in (theirs, mine):
            loss_of(out).backward()
        assert_same_grads(model, plain)


def test_torchs_functions_split_as_in_torch(parallel):
    scatter, kwargs_of = parallel.scatter, parallel.scatter_gather.scatter_kwargs
    halves = X[:4], X[4:]
    for inputs, parts in (
        (X, halves),
        ((X, "a"), [(x, "a") for x in halves]),
        ({"x": [X]}, [{"x": [x]} for x in halves]),
        ((3, None), [(3, None)] * 2),
    ):
        assert_same(scatter(inputs, [0, 1]), parts)
    args, kwargs = kwargs_of((), {"x": X}, [0, 1])
    assert_same((tuple(args), kwargs), (((), ()), tuple({"x": x} for x in halves)))
    copies = list(parallel.replicate(linear(), [0, 1], True)[1].parameters())
    assert [p.grad_fn for p in copies] == [None] * 2


def test_torchs_functions_are_torchs_without_replicas_on_the_cpu(parallel, monkeypatch):
    monkeypatch.delenv("PACELINE_CPU_REPLICAS")
    assert_same(parallel.scatter(X, ["cpu"] * 2), (X[:4], X[4:]))
    with pytest.raises(AssertionError, match="not implemented for CPU tensors"):
        parallel.gather([X, X], 0)
    with pytest.raises(ValueError, match="non cpu device"):
        parallel.scatter(X, [0, torch.device("cpu")])


# ---- which lines run: the table of docs/data-parallel.md ---------------------------

TAKEN = [
    "model.device_ids == [0, 1]",
    "x.to(model.output_device) is x and x.to(model.src_device_obj) is x",
    "x.to('cuda' if torch.cuda.is_available() else 'cpu') is x",
    "torch.equal(nn.parallel.data_parallel(model.module, x), model.module(x))",
    "torch.cuda.manual_seed_all(0) is torch.cuda.empty_cache()",
    "torch.cuda.amp.GradScaler().scale(x) is x",
    "not (torch.cuda.device_count() > 1 or x.is_cuda)",
]
REFUSED = [
    *(
        "x.cuda()",
        "x.to('cuda:0')",
        "x.to(f'cuda:{model.device_ids[0]}')",
        "model.cuda()",
    ),
    *("torch.ones(1, device='cuda')", "torch.cuda.set_device(0)"),
    *("torch.cuda.current_device()", "torch.cuda.synchronize()"),
    *("torch.cuda.Stream()", "torch.cuda.Event().record()"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
@pytest.mark.parametrize("line", [*TAKEN, *REFUSED])
@pytest.mark.filterwarnings("ignore")
def test_a_line_for_gpus_does_what_the_page_says(parallel, line):
    model = parallel.DataParallel(linear())
    names = {"nn": nn, "torch": torch, "model": model, "x": X}
    if line in TAKEN:
        assert eval(line, names)
        return
    with pytest.raises((RuntimeError, AssertionError, AttributeError)) as caught:
        eval(line, names)
    assert "paceline" not in str(caught.value)
