"""The caller gets the exceptions of replicas, and may go on."""

import re
import signal
import traceback
import weakref

import pytest
import torch
from programs import X, module
from replicas import ON_EACH, Twin, integers, linear, net, step, without_collector

BAD = 77.0


class OwnError(Exception):
    """A user's exception."""


class PickyError(Exception):
    """An exception that cannot be constructed from a message alone."""

    def __init__(self, code, reason):
        super().__init__(f"{reason} ({code})")
        self.code = code


class KeywordError(Exception):
    """An exception that is constructed by keyword only."""

    def __new__(cls, *, code):
        return super().__new__(cls, code)

    def __init__(self, *, code):
        super().__init__(code)


class WordyError(Exception):
    """An exception that computes its message."""

    def __str__(self):
        return "always the same"


def local_error(row):
    class LocalError(RuntimeError):
        pass

    return LocalError(f"row {row}")


def out_of_list(row):
    try:
        return [][row]
    except IndexError as error:
        raise OwnError(f"row {row}") from error


# name: (makes or raises an error for the number of the bad row; its type in the caller;
# a pattern of its message)
KINDS = {
    "own": (lambda row: OwnError(f"row {row}"), OwnError, "row [5]"),
    "key": (lambda row: KeyError(f"row {row}"), KeyError, "row [5]"),
    "picky": (lambda row: PickyError(row, "row"), PickyError, r"row \(5\)"),
    "file": (lambda row: OSError(2, f"row {row}"), FileNotFoundError, "row [5]"),
    "stop": (lambda row: StopIteration(f"row {row}"), StopIteration, "row [5]"),
    "memory": (
        lambda row: torch.OutOfMemoryError(f"row {row}"),
        RuntimeError,
        "row [5]",
    ),
    "local": (local_error, RuntimeError, "row [5]"),
    "torch": (
        lambda row: torch.ones(9 + row) + torch.ones(4),
        RuntimeError,
        "size of t",
    ),
    "chained": (out_of_list, OwnError, "IndexError.*row [5]"),
    "keyword": (
        lambda row: KeywordError(code=row),
        (RuntimeError, KeywordError),
        "Keywo",
    ),
    "wordy": (lambda row: WordyError(), WordyError, "always the same"),
    "exit": (lambda row: SystemExit(row), (RuntimeError, SystemExit), "5"),
    "interrupt": (KeyboardInterrupt, (RuntimeError, KeyboardInterrupt), "5"),
}


def fragile(m, x, kind="own"):
    """Raise if a row is bad; row 5 has a 5 in its second column."""
    out = m.layer(x)
    bad = (x[:, 0] == BAD).nonzero()
    if len(bad):
        raise KINDS[kind][0](int(x[bad[0], 1]))
    return out


def fragile_twin(wrap, n=2):
    return Twin(wrap, module(fragile, layer=linear(2)), n)


def batch(*rows):
    x = integers(7, 3)
    for row in rows:
        x[row, 0], x[row, 1] = BAD, row
    return x


def check_next(twin):
    """Check that a wrapper works after a failure."""
    for _ in range(2):
        twin.zero()
        twin.step(step, X.clone().requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
@ON_EACH
def test_an_exception_in_another_replica_keeps_its_type_and_place(wrap, kind):
    twin = fragile_twin(wrap)
    _, error, expected = KINDS[kind]
    with pytest.raises(error) as caught:
        twin.ours(batch(5), kind)
    words = str(caught.value) + str(caught.value.__cause__)
    assert re.search(expected, words, re.DOTALL)
    if kind not in ("exit", "interrupt"):
        assert f"in replica 1 on device {wrap.device(1)}" in words
        assert "Original Traceback" in words
        assert f'File "{__file__}", line ' in words
    check_next(twin)


@pytest.mark.parametrize("rows", [[1], [1, 5]], ids=["first", "both"])
@pytest.mark.parametrize("kind", ["own", "picky", "stop", "local", "chained"])
@ON_EACH
def test_an_exception_in_the_first_replica_keeps_its_type_and_place(wrap, kind, rows):
    twin = fragile_twin(wrap)
    _, error, _ = KINDS[kind]
    with pytest.raises(error) as caught:
        twin.ours(batch(*rows), kind)
    assert "in fragile" in "".join(traceback.format_exception(caught.value))
    assert "row 5" not in str(caught.value)
    assert "replica 1" not in str(caught.value)
    check_next(twin)


@ON_EACH
def test_the_lowest_replica_that_fails_is_named_again_and_again(wrap):
    twin = fragile_twin(wrap, 4)  # rows 0 1, 2 3, 4 5, 6
    for row in (3, 5, 0, 4, 3, 3, 2):
        for mode in (torch.no_grad, torch.enable_grad):
            k = row // 2
            place = f"in replica {k} on device {wrap.device(k)}.*" if k else ""
            with mode(), pytest.raises(OwnError, match=f"(?s){place}row {row}"):
                twin.ours(batch(row, 6))
    check_next(twin)


@pytest.mark.parametrize("row", [1, 5])
@ON_EACH
def test_a_forward_that_fails_leaves_no_references_behind(wrap, row):
    seen = []

    def forward(m, x):
        if (x == BAD).any():
            seen.append(weakref.ref(x))
            raise ValueError("on purpose")
        return x

    ours = wrap(module(forward))
    with without_collector():
        with pytest.raises(ValueError, match="on purpose"):
            ours(batch(row))
        assert [ref() for ref in seen] == [None]


@pytest.mark.parametrize("row", [0, 6])
@ON_EACH
def test_an_exception_may_hold_a_tensor_of_the_graph(wrap, row):
    def carrying(m, x):
        out = m.layers(x)
        if (x[:, 0] == BAD).any():
            error = OwnError("too large")
            error.tensor = out
            raise error
        return out

    twin = Twin(wrap, module(carrying, layers=net()))
    with pytest.raises(OwnError, match="too large") as caught:
        twin.ours(batch(row))
    rows = batch(row)[0:4] if row == 0 else batch(row)[4:7]
    assert torch.equal(caught.value.tensor.cpu(), twin.plain.layers(rows))
    twin.step(step, X)


@pytest.mark.parametrize("row", [1, 5])
def test_an_interrupt_in_any_replica_leaves_the_wrapper_usable(wrap, row):
    twin = Twin(wrap, module(interrupted))
    with pytest.raises(KeyboardInterrupt):
        twin.ours(batch(row))
    assert torch.equal(twin.ours(X), X * 2)


def interrupted(m, x):
    if (x == BAD).any():
        signal.raise_signal(signal.SIGINT)
    return x * 2
