"""What a replica raises is raised in the caller, who may then go on."""

import gc
import signal
import traceback
import weakref

import pytest
import torch
from replicas import Twin, integer_weights, integers, loss_of
from torch import nn


class OwnError(Exception):
    """An exception of the user's own."""


class PickyError(Exception):
    """An exception that a message alone does not make."""

    def __init__(self, code, reason):
        super().__init__(f"{reason} ({code})")
        self.code = code


class WordyError(Exception):
    """An exception that writes its message itself."""

    def __str__(self):
        return "always the same"


BAD = 77.0


class FailingFunction(torch.autograd.Function):
    """Passes numbers on, and fails at gradients that are not finite."""

    @staticmethod
    def forward(ctx, x, number):
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if not grad.isfinite().all():
            raise OwnError(f"gradient of call {ctx.number}")  # the line in backward
        return grad, None


class Fragile(nn.Module):
    """Raises where it meets a bad row."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, x, kind="own", number=0):
        out = FailingFunction.apply(self.linear(x), number)
        bad = (x[:, 0] == BAD).nonzero()
        if len(bad):
            self.fail(kind, int(x[bad[0], 1]))
        return out

    def fail(self, kind, row):
        if kind == "own":
            raise OwnError(f"row {row}")  # the line in own
        if kind == "value":
            raise ValueError(f"row {row}")  # the line in value
        if kind == "key":
            raise KeyError(f"row {row}")  # the line in key
        if kind == "picky":
            raise PickyError(row, "bad row")  # the line in picky
        if kind == "file":
            raise FileNotFoundError(2, f"row {row}", "name")  # the line in file
        if kind == "stop":
            raise StopIteration(f"row {row}")  # the line in stop
        if kind == "memory":
            raise torch.OutOfMemoryError(f"row {row}")  # the line in memory
        if kind == "local":

            class LocalError(RuntimeError):
                pass

            raise LocalError(f"row {row}")  # the line in local
        if kind == "torch":
            torch.zeros(3) + torch.zeros(4)  # the line in torch
        if kind == "chained":
            try:
                [][row]
            except IndexError as error:
                raise OwnError(f"row {row}") from error  # the line in chained


def batch(*rows):
    """Return seven rows, of which some are bad: row 5 says 5 in its second column."""
    x = integers(7, 3)
    for row in rows:
        x[row, 0], x[row, 1] = BAD, row
    return x


def check_next(twin):
    """Check that a wrapper works that has just failed."""
    for _ in range(2):
        twin.zero()
        x = batch().requires_grad_()
        twin.step(lambda model, x: loss_of(model(x)), x)


KINDS = {
    "own": OwnError,
    "value": ValueError,
    "key": KeyError,
    "picky": PickyError,
    "file": FileNotFoundError,
    "stop": StopIteration,
    "memory": torch.OutOfMemoryError,
    "torch": RuntimeError,
    "chained": OwnError,
    "local": RuntimeError,
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_another_replica_keeps_its_type_and_place(wrap, kind):
    twin = Twin(wrap, Fragile())
    x = batch(5)
    with pytest.raises(KINDS[kind]) as caught:
        twin.ours(x, kind)
    words = str(caught.value) + str(caught.value.__cause__)
    assert "in replica 1 on device cpu" in words
    assert "Original Traceback" in words
    assert f"# the line in {kind}" in words
    assert ("size of tensor" if kind == "torch" else "5") in words
    assert isinstance(caught.value, KINDS[kind])
    if kind == "own":
        assert type(caught.value) is OwnError
    if kind == "picky":
        assert type(caught.value) is PickyError
        assert "bad row (5)" in words
    if kind == "chained":
        assert "IndexError" in words
    check_next(twin)


@pytest.mark.parametrize("rows", [[1], [1, 5]], ids=["first", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_the_first_replica_keeps_its_type_and_place(wrap, kind, rows):
    twin = Twin(wrap, Fragile())
    x = batch(*rows)
    with pytest.raises(KINDS[kind]) as caught:
        twin.ours(x, kind)
    words = "".join(traceback.format_exception(caught.value))
    assert f"# the line in {kind}" in words
    assert ("size of tensor" if kind == "torch" else "row") in words
    assert "row 5" not in str(caught.value)
    assert "replica 1" not in str(caught.value)
    check_next(twin)


class Raising(nn.Module):
    """Raises an exception that was made before, or that a function makes."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        if (x == BAD).any():
            raise self.make(x)
        return x * 2


def test_an_exception_that_writes_its_message_is_told_by_its_cause(wrap):
    with pytest.raises(WordyError, match="always the same") as caught:
        wrap(Raising(lambda x: WordyError()))(batch(5))
    assert "in replica 1 on device cpu" in str(caught.value.__cause__)


@pytest.mark.parametrize("row", [1, 5])
def test_a_forward_that_fails_leaves_no_references_behind(wrap, row):
    seen = []

    def make(x):
        seen.append(weakref.ref(x))
        return ValueError("on purpose")

    ours = wrap(Raising(make))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="on purpose"):
            ours(batch(row))
        assert [ref() for ref in seen] == [None]
    finally:
        gc.enable()


def test_the_lowest_replica_that_fails_is_named(wrap):
    twin = Twin(wrap, Fragile(), 4)
    x = batch(3, 5)  # rows 0 1, 2 3, 4 5, 6
    with pytest.raises(OwnError, match="in replica 1 on device cpu") as caught:
        twin.ours(x)
    assert "row 3" in str(caught.value)
    check_next(twin)


def test_exceptions_may_come_again_and_again(wrap):
    twin = Twin(wrap, Fragile(), 3)
    for round_ in range(20):
        x = batch(round_ % 7)
        with pytest.raises(OwnError, match=f"row {round_ % 7}"):
            twin.ours(x)
    check_next(twin)


class Shifting(nn.Module):
    """Has another form of output whenever it is asked to."""

    def forward(self, x, kind):
        if (x == BAD).any():
            raise OwnError("bad row")
        return {"tuple": (x, x + 1), "dict": {"a": x, "b": x + 1}}[kind]


@pytest.mark.parametrize("row", [1, 3, 5])
def test_an_exception_hides_no_change_of_the_form_of_outputs(wrap, row):
    ours = wrap(Shifting(), 3)  # rows 0 1 2, 3 4, 5 6
    x = batch()
    for kind in ("tuple", "dict", "tuple", "dict"):
        bad = batch(row)
        with pytest.raises(OwnError, match="bad row"):
            ours(bad, kind)
        out = ours(x, kind)
        values = list(out.values() if kind == "dict" else out)
        assert type(out).__name__ == kind
        assert torch.equal(torch.stack(values), torch.stack([x, x + 1]))


def test_an_exception_may_come_without_gradients(wrap):
    twin = Twin(wrap, Fragile())
    x = batch(5)
    with torch.no_grad(), pytest.raises(OwnError, match="in replica 1"):
        twin.ours(x)
    check_next(twin)


def test_a_graph_outlives_an_exception_in_a_later_forward(wrap):
    twin = Twin(wrap, Fragile())
    x = batch()
    loss = loss_of(twin.ours(x))
    bad = batch(5)
    with pytest.raises(OwnError, match="row 5"):
        twin.ours(bad)
    loss.backward()
    loss_of(twin.plain(x)).backward()
    twin.assert_same()


def test_a_class_sent_by_value_shows_the_line_that_raised(wrap):
    class Local(nn.Linear):
        def forward(self, x):
            if BAD in x[:, 0]:
                raise OwnError("a bad row")  # the line in a local class
            return super().forward(x)

    twin = Twin(wrap, integer_weights(Local(3, 2)))
    with pytest.raises(OwnError) as caught:
        twin.ours(batch(5))
    words = str(caught.value)
    assert "in replica 1 on device cpu" in words
    assert f'File "{__file__}", line ' in words
    assert "# the line in a local class" in words
    check_next(twin)


@pytest.mark.parametrize("row", [1, 5])
def test_an_exception_in_backward_is_raised_in_the_caller(wrap, row):
    twin = Twin(wrap, Fragile())
    x = batch().requires_grad_()
    out = twin.ours(x, number=12)
    weights = torch.ones_like(out)
    weights[row] = torch.inf
    loss = (out * weights).sum()
    with pytest.raises(OwnError, match="gradient of call 12") as caught:
        loss.backward()
    words = "".join(traceback.format_exception(caught.value))
    assert "# the line in backward" in words
    check_next(twin)


def test_wrong_arguments_are_the_type_error_of_the_module(wrap):
    twin = Twin(wrap, Fragile())
    x = batch()
    with pytest.raises(TypeError, match="unexpected keyword argument 'words'"):
        twin.ours(x, words=3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        twin.ours(x[:, :2])
    check_next(twin)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_replica_that_wants_to_leave_only_fails(wrap, error):
    ours = wrap(Raising(lambda x: error("leaving")))
    with pytest.raises((RuntimeError, error), match="leaving"):
        ours(batch(5))
    assert torch.equal(ours(batch()), batch() * 2)


@pytest.mark.parametrize("row", [1, 5])
def test_an_interrupt_in_any_replica_leaves_the_wrapper_usable(wrap_on_cpu, row):
    def interrupt(x):
        signal.raise_signal(signal.SIGINT)
        return AssertionError("it was not interrupted")

    ours = wrap_on_cpu(Raising(interrupt))
    with pytest.raises(KeyboardInterrupt):
        ours(batch(row))
    assert torch.equal(ours(batch()), batch() * 2)
