"""Subclasses that override what torch's class makes to be overridden, as libraries do.

The classes stand for torch_geometric's (a list of graphs), mmcv's (steps by name), the
"balanced" ones (an uneven first chunk), and those that keep outputs apart for a
criterion which is parallel too.
"""

import copy
import pickle
import threading

import paceline
import pytest
import torch
from programs import Made, X
from replicas import assert_same, assert_same_grads, integers, linear, loss_of, net
from torch import nn


class Rows(nn.Module):
    """Two layers, and what a library might ask of a model."""

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
    """Return a function: does a subclass compute what the plain module does?"""

    def check(kind, *args, n=2, **kwargs):
        plain, module = Rows(), Rows()
        ours = kind(module, *args, device_ids=wrap.devices(n), **kwargs)
        for seed in range(2):
            x = integers(7, 3, seed=seed)
            outs = [model(x, scale=2) for model in (plain, ours)]
            assert_same(outs[1], outs[0])
            for out in outs:
                loss_of(out).backward()
            assert_same_grads(ours, plain)
        return ours

    return check


# ---- scatter ------------------------------------------------------------------------


class Balanced(paceline.DataParallel):
    """Gives the first replica fewer rows, and takes an argument of its own."""

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
}


class Shaping(paceline.DataParallel):
    def __init__(self, *args, form, **kwargs):
        super().__init__(*args, **kwargs)
        self.form = form

    def scatter(self, inputs, kwargs, device_ids):
        return FORMS[self.form](*super().scatter(inputs, kwargs, device_ids))


@pytest.mark.parametrize("form", FORMS)
def test_scatter_may_return_any_form(check, form):
    check(Shaping, form=form)


class Odd(paceline.DataParallel):
    answer = None

    def scatter(self, inputs, kwargs, device_ids):
        return self.answer


def test_scatter_may_leave_out_keyword_arguments(wrap):
    ours = wrap(Rows(), kind=Odd)
    x = integers(7, 3)
    ours.answer = [(x[:3],), (x[3:],)], None
    assert_same(ours(x), ours.module(x))


def test_scatter_that_gives_too_many_parts_is_an_error(wrap):
    ours = wrap(Rows(), kind=Odd)
    x = integers(7, 3)
    ours.answer = [(part,) for part in x.split(2)], [{}] * 4
    with pytest.raises(ValueError, match="for 4 replicas, and there are 2"):
        ours(x)
    ours.answer = [(x[:3],), (x[3:],)], [{}] * 2
    assert_same(ours(x), ours.module(x))


# ---- replicate and parallel_apply ---------------------------------------------------


class Replicating(paceline.DataParallel):
    n_calls = 0

    def replicate(self, module, device_ids):
        self.n_calls += 1
        return super().replicate(module, device_ids)


class Applying(paceline.DataParallel):
    n_calls = 0

    def parallel_apply(self, replicas, inputs, kwargs):
        self.n_calls += 1
        return super().parallel_apply(replicas, inputs, kwargs)


@pytest.mark.parametrize("kind", [Replicating, Applying])
def test_methods_for_replicas_are_never_passed_over(check, kind):
    assert check(kind).n_calls == 2


class Graph:
    """Knows how to go to a device, as torch_geometric's data do."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        assert isinstance(device, int) or device.type == "cpu"
        return self


class OfGraphs(paceline.DataParallel):
    """Has a forward of its own, for a list of graphs, and another scatter."""

    def __init__(self, module, device_ids=None, output_device=None, follow=None, **kw):
        super().__init__(module, device_ids, output_device, **kw)
        self.follow = follow
        self.src_device = self.device_ids[0]

    def forward(self, graphs):
        if not graphs:
            return None
        inputs = self.scatter(graphs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        outputs = self.parallel_apply(replicas, inputs, None)
        return self.gather(outputs, self.output_device)

    def scatter(self, graphs, device_ids):
        n = -(-len(graphs) // len(device_ids))
        parts = [graphs[k : k + n] for k in range(0, len(graphs), n)]
        together = [Graph(torch.stack([graph.x for graph in part])) for part in parts]
        return [one.to(d) for one, d in zip(together, device_ids, strict=False)]


def test_forward_may_be_written_anew_for_lists_of_data(wrap):
    plain, module = [Made(lambda m, g: m.layers(g.x), {"layers": net()}) for _ in "ab"]
    ours = wrap(module, kind=OfGraphs)
    x = integers(7, 3)
    outs = [plain(Graph(x)), ours([Graph(row) for row in x])]
    assert_same(outs[1], outs[0])
    for out in outs:
        loss_of(out).backward()
    assert_same_grads(module, plain)
    assert ours([]) is None
    assert ours([Graph(x[0])]).shape == (1, 2)


class Stepping(paceline.DataParallel):
    """Has steps beside forward, which run the module on the first part alone."""

    def forward(self, *inputs, **kwargs):
        return super().forward(*inputs, **kwargs)

    def train_step(self, *inputs, **kwargs):
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids[:1])
        return self.module(*inputs[0], **kwargs[0])


def test_steps_may_stand_beside_forward(check):
    ours = check(Stepping)
    x = integers(7, 3)
    assert_same(ours.train_step(x, scale=3), ours.module(x, scale=3))


# ---- gather -------------------------------------------------------------------------


class Apart(paceline.DataParallel):
    def gather(self, outputs, output_device):
        return list(outputs)


class Criterion(paceline.DataParallel):
    """Takes outputs that lie apart, and splits the targets alone."""

    def forward(self, outputs, *targets, **kwargs):
        targets, kwargs = self.scatter(targets, kwargs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(outputs)])
        pairs = [(out, *some) for out, some in zip(outputs, targets, strict=True)]
        return sum(self.parallel_apply(replicas, pairs, kwargs))


def test_a_criterion_may_take_outputs_that_were_kept_apart(wrap):
    plain, module = Rows(), Rows()
    model = wrap(module, kind=Apart)
    loss = nn.MSELoss(reduction="sum")
    criterion = wrap(loss, kind=Criterion)
    x, y = integers(7, 3), integers(7, 2)
    outputs = model(x)
    model(x + 1)  # overwrites no output
    assert [len(out) for out in outputs] == [4, 3]
    losses = [loss(plain(x), y), criterion(outputs, y)]
    assert_same(losses[1], losses[0])
    for one in losses:
        one.backward()
    assert_same_grads(module, plain)


def test_a_gather_may_call_the_wrapper(wrap):
    class CallsAgain(paceline.DataParallel):
        is_within = False

        def gather(self, outputs, output_device):
            joined = super().gather(outputs, output_device)
            if self.is_within:
                return joined
            self.is_within = True
            try:
                return joined - self(torch.zeros(7, 3).double())
            finally:
                self.is_within = False

    module, found = linear(), []
    ours = wrap(module, kind=CallsAgain)
    thread = threading.Thread(target=lambda: found.append(ours(X)), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert_same(found[0], module(X) - module.bias)


def test_a_subclass_may_change_forward(wrap):
    class Scaled(paceline.DataParallel):
        def forward(self, x):
            return super().forward(2 * x) + 1

    module = linear()
    assert torch.equal(wrap(module, kind=Scaled)(X), module(2 * X) + 1)


# ---- attributes ---------------------------------------------------------------------


class Forwarding(paceline.DataParallel):
    """Answers for its module, in the way that ends in itself where it is done wrong."""

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
    assert ours.describe() == "5 wide"
    assert ours.layers is ours.module.layers
    with pytest.raises(AttributeError, match="nothing"):
        _ = ours.nothing
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), copy.copy(ours)]
    x = integers(7, 3)
    for other in copies:
        assert other.describe() == "5 wide"
        assert_same(other(x), ours(x))


NAMES = ("_forward", "_run", "_start", "_gather", "lock", "state", "config", "device")


def test_names_that_a_subclass_takes_do_no_harm(check):
    attributes = {name: (lambda self, *_: "mine") for name in NAMES}
    ours = check(type("Named", (paceline.DataParallel,), attributes))
    assert [getattr(ours, name)() for name in NAMES] == ["mine"] * len(NAMES)


def test_a_wrapper_is_one_of_torch_to_every_check():
    ours = Balanced(Rows(), 1)
    assert isinstance(ours, torch.nn.DataParallel)
    assert isinstance(ours, nn.parallel.DataParallel)
    model = ours.module if isinstance(ours, nn.DataParallel) else ours
    assert type(model) is Rows
    kinds = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    assert issubclass(paceline.DataParallel[Rows].__origin__, kinds)


def test_a_scatter_that_sets_the_module_sets_it_for_this_call(wrap):
    class Switching(paceline.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            self.module = self.other[0]
            return super().scatter(inputs, kwargs, device_ids)

    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    ours = wrap(first, kind=Switching)
    ours.other = [second]
    x = torch.ones(3, 2)
    assert torch.equal(ours(x), second(x))
