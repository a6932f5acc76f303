"""Where replicas may come to differ without a word: absence, change, shared memory."""

import copy
import os
import pickle
import random
import sys

import numpy as np
import paceline
import pytest
import torch
from paceline._dp.process import ordered_sets
from paceline._dp.process.model_memory import ReplicaGradients
from replicas import (
    Twin,
    assert_same_grads,
    integer_weights,
    integers,
    linear,
    loss_of,
    modules_of,
    net,
    step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---- replicas that have no part in a call -------------------------------------------


class Moody(nn.Module):
    """Computes by all that may change between two calls."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.scale = 1
        self.table = torch.ones(3, dtype=torch.float64)
        self.register_buffer("shift", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        mood = self.scale * (2 if self.training else 3)
        if torch.is_autocast_enabled("cpu"):
            mood *= 5
        return self.linear(x) * self.table * mood + self.shift


def assign(name, value):
    return lambda module: setattr(module, name, value)


def double_the_table(module):
    module.table.mul_(2)


CHANGES = {
    "evaluation": lambda module: module.eval(),
    "attribute": assign("scale", 7),
    "freezing": lambda module: module.linear.bias.requires_grad_(False),
    "buffer": lambda module: module.shift.add_(1),
    "new buffer": assign("shift", torch.full((3,), 4.0, dtype=torch.float64)),
    "tensor in place": double_the_table,
    "weights": lambda module: module.linear.weight.data.add_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_replica_hears_what_changed_while_it_was_absent(wrap, change):
    twin = Twin(wrap, Moody(), 3)
    x = integers(7, 3)
    twin.step(step, x)
    for module in modules_of(twin):
        change(module)
    for rows in (2, 7, 1, 2, 7):
        twin.zero()
        twin.step(step, x[:rows])


def test_a_replica_hears_of_autocast_that_began_while_it_was_absent(wrap):
    twin = Twin(wrap, Moody(), 3)
    x = integers(7, 3)
    twin.step(step, x)
    with torch.autocast("cpu", torch.bfloat16):
        twin.step(step, x[:2])
        twin.step(step, x)
    twin.step(step, x[:2])
    twin.step(step, x)


class Counting(nn.Module):
    """Computes by how many calls there have been."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = linear(), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


def test_an_absent_replica_counts_the_calls_of_the_others(wrap):
    twin = Twin(wrap, Counting(), 3)
    x = integers(7, 3)
    for rows in (7, 2, 7, 1, 2, 7):
        twin.step(step, x[:rows])
    assert twin.inner.calls == 6


@pytest.mark.parametrize("sizes", [(7, 2), (2, 7), (7, 1, 7), (1, 2, 7)])
def test_calls_of_different_sizes_may_share_a_backward(wrap, sizes):
    twin = Twin(wrap, net(), 3)
    x = integers(7, 3)
    for _ in range(3):
        twin.zero()
        twin.step(lambda model, x: sum(step(model, x[:n]) for n in sizes), x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_different_sizes_may_share_a_backward(wrap, use_reentrant):
    twin = Twin(wrap, net(), 3)

    def loss(model, x):
        parts = (x, x[:2])
        outs = [checkpoint(model, part, use_reentrant=use_reentrant) for part in parts]
        return sum(map(loss_of, outs))

    for _ in range(3):
        twin.step(loss, integers(7, 3).requires_grad_())


# ---- news ---------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["evaluation", "attribute", "buffer"])
def test_a_tensor_changed_in_place_is_told_beside_other_news(wrap, other):
    twin = Twin(wrap, Moody())
    x = integers(7, 3)
    twin.step(step, x)
    for _ in range(2):
        for module in modules_of(twin):
            double_the_table(module)
            CHANGES[other](module)
        twin.step(step, x)
        twin.step(step, x)


def test_news_survives_an_interrupt_before_it_is_sent(wrap, monkeypatch):
    twin = Twin(wrap, Moody())
    x = integers(7, 3)
    twin.step(step, x)
    for module in modules_of(twin):
        module.eval()
        double_the_table(module)

    def interrupt(*_):
        raise KeyboardInterrupt

    if wrap.engine == "process":
        with monkeypatch.context() as patch:
            patch.setattr(ReplicaGradients, "hooked", interrupt)
            with pytest.raises(KeyboardInterrupt):
                twin.ours(x)
    twin.step(step, x)
    twin.step(step, x)


class Late(nn.Module):
    """Makes a buffer in its first forward, from its rows."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("first", None)

    def forward(self, x):
        if self.first is None:
            self.first = x[0].detach() * 2
        return self.linear(x) - self.first


def test_a_buffer_made_in_forward_is_that_of_the_first_replica(wrap):
    twin = Twin(wrap, Late())
    x = integers(7, 3)
    twin.ours(x)
    twin.plain(x)
    assert torch.equal(twin.inner.first, x[0] * 2)
    twin.step(step, x)
    for module in modules_of(twin):
        module.first = integers(3, seed=2)
    twin.step(step, x)


class Sharing(nn.Module):
    """Has one buffer in two places."""

    def __init__(self):
        super().__init__()
        self.linear, self.x, self.y = linear(), nn.Module(), nn.Module()
        table = integers(3)
        self.x.register_buffer("table", table)
        self.y.register_buffer("table", table)

    def forward(self, x):
        return self.linear(x) * self.x.table + self.y.table


@pytest.mark.parametrize("order", ["xy", "yx", "y", "xx"])
def test_owners_of_one_buffer_may_part(wrap, order):
    twin = Twin(wrap, Sharing())
    x = integers(7, 3)
    twin.step(step, x)
    for seed, owner in enumerate(order, start=5):
        for module in modules_of(twin):
            getattr(module, owner).table = integers(3, seed=seed)
        twin.step(step, x)
        for module in modules_of(twin):
            getattr(module, owner).table.add_(1)
        twin.step(step, x)


class Louder(nn.Module):
    """Is twice as loud in training."""

    def forward(self, x):
        return x * 2 if self.training else x


class Chosen(nn.Module):
    """Runs the parts that a list names."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.linear = Louder(), Louder(), linear()
        self.parts = [self.a]

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.linear(x)


def test_a_list_of_own_parts_holds_the_parts_of_the_replica(wrap):
    twin = Twin(wrap, Chosen())
    x = integers(7, 3)
    twin.step(step, x)
    for module in modules_of(twin):
        module.parts = [module.a, module.b, module.linear]
    twin.step(step, x)
    for model in twin.models:
        model.eval()
    twin.step(step, x)


class Taught(nn.Module):
    """Hides a frozen teacher in a list."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.teacher = [linear().requires_grad_(False)]

    def forward(self, x):
        return self.linear(x) - self.teacher[0](x)


def test_a_teacher_hidden_in_a_list_is_followed(wrap):
    twin = Twin(wrap, Taught())
    x = integers(7, 3)
    for _ in range(3):
        twin.step(step, x)
        for module in modules_of(twin):
            with torch.no_grad():
                module.teacher[0].weight.mul_(2).add_(module.linear.weight)


def own_parameter(tensor):
    class Own(nn.Parameter):
        pass

    return Own(tensor)


def parameter_with_a_function(tensor):
    parameter = nn.Parameter(tensor)
    parameter.load = lambda tensor: tensor
    return parameter


@pytest.mark.parametrize("make", [own_parameter, parameter_with_a_function])
def test_parameters_may_hold_code_of_the_script(wrap, make):
    twin = [linear(), linear()]
    for module in twin:
        module.weight = make(module.weight.detach())
    models = [wrap(twin[0]), twin[1]]
    for model in models:
        step(model, integers(7, 3)).backward()
    assert_same_grads(*models)


# ---- what replicas draw -------------------------------------------------------------


class Drawing(nn.Module):
    """Draws from the generators that are not torch's."""

    def forward(self, x):
        shape = (len(x),)
        return torch.full(shape, random.random()), torch.full(shape, np.random.rand())


def test_draws_of_python_and_numpy_differ_from_step_to_step(wrap):
    ours = wrap(Drawing())

    def run():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        return torch.stack([torch.stack(ours(integers(7, 3))) for _ in range(5)])

    first = run()
    for kind in range(2):
        numbers = first[:, kind, [0, -1]]
        assert len(numbers.unique()) == numbers.numel()
    assert torch.equal(run(), run())


# ---- the order of sets --------------------------------------------------------------

WORDS = [f"word {i}" for i in range(12)]


class GoesThroughSets(nn.Module):
    """Weighs its rows by the places that numbers and words have in sets."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.numbers = set([33, 1, 17, 9])  # noqa: C405 (it grows, and so it is ordered)
        self.words = set(WORDS)
        self.same_words = [self.words]
        self.pairs = frozenset((word, i) for i, word in enumerate(WORDS))

    def forward(self, x, among=()):
        out = self.linear(x)
        found = [sum((i + 1) * n for i, n in enumerate(self.numbers))]
        of_words = (self.words, self.same_words[0], among)
        found += [self.places(word for word in words) for words in of_words]
        found.append(self.places(word for word, _ in self.pairs))
        return out * torch.tensor(found, dtype=out.dtype).sum()

    @staticmethod
    def places(words):
        return sum((i + 1) * WORDS.index(word) ** 2 for i, word in enumerate(words))


def test_sets_have_the_callers_order_in_every_replica(wrap):
    module = GoesThroughSets()  # itself, and no copy: that has orders of its own
    model = wrap(module)
    x = integers(7, 3)
    for among in ((), set(WORDS[3:]), frozenset(WORDS)):
        assert torch.equal(model(x, among), module(x, among))
    changes = (
        lambda: module.words.discard("word 3"),
        lambda: module.words.add("word 3"),
        lambda: module.numbers.update([65, 41]),
        lambda: setattr(module, "pairs", frozenset([("word 2", 1)])),
    )
    for change in changes:
        change()
        assert torch.equal(model(x), module(x))


def test_a_set_made_anew_is_changed_like_any_other():
    for words in (WORDS, WORDS[::-1]):
        made = ordered_sets.made(False, tuple(words))
        assert made == set(words)
        assert list(made) == list(made.copy()) == list(copy.copy(made)) == words
        made.discard(words[0])
        made.add("another")
        assert list(made) == [*words[1:], "another"]
        assert pickle.loads(pickle.dumps(made)) == made
        assert type(pickle.loads(pickle.dumps(made))) is set
        assert [made.pop() for _ in range(len(made))] == [*words[1:], "another"]
        with pytest.raises(KeyError):
            made.pop()
        frozen = ordered_sets.made(True, tuple(words))
        assert list(frozen) == words
        assert hash(frozen) == hash(frozenset(words))
        assert type(pickle.loads(pickle.dumps(frozen))) is frozenset


# ---- hashes -------------------------------------------------------------------------


class Hashes(nn.Module):
    """Puts words into one of some thousand drawers, as hash() has it."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, word):
        return self.linear(x) * self.drawer(word)

    @staticmethod
    def drawer(word):
        return hash(word) % 4096


class HasAHash(nn.Linear):
    """Hashes nothing but itself, and has a method of the builtin's name."""

    def __hash__(self):
        return hash(id(self))

    def hash(self, x):
        return 2 * x

    def forward(self, x):
        return self.hash(super().forward(x))


@pytest.mark.skipif(
    not sys.flags.hash_randomization or os.environ.get("PYTHONHASHSEED", "").isdigit(),
    reason="strings have the same hash in every process",
)
def test_a_model_that_hashes_strings_has_its_replicas_as_threads():
    module = Hashes()
    model = paceline.DataParallel(module, ["cpu"] * 2)
    x = integers(7, 3)
    assert torch.equal(model(x, "a word"), module(x, "a word"))
    assert model.engine == "thread"
    assert "hash()" in model.engine_reason
    model.close()


def test_a_hash_of_ones_own_disturbs_no_processes(wrap):
    module = integer_weights(HasAHash(3, 3))
    model = wrap(module)
    x = integers(7, 3)
    assert torch.equal(model(x), module(x))
