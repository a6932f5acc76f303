"""What a replica raises is raised in the caller, who may then go on."""

import gc
import signal
import traceback
import weakref

import pytest
import torch
from programs import X, module
from replicas import (
    Twin,
    bare,
    integer_weights,
    integers,
    linear,
    loss_of,
    net,
    slopes_of,
    small,
    squares_of,
    step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

BAD = 77.0


class OwnError(Exception):
    """An exception of the user's own."""


class PickyError(Exception):
    """An exception that a message alone does not make."""

    def __init__(self, code, reason):
        super().__init__(f"{reason} ({code})")
        self.code = code


class KeywordError(Exception):
    """Can be made by a keyword alone."""

    def __new__(cls, *, code):
        return super().__new__(cls, code)

    def __init__(self, *, code):
        super().__init__(code)


class WordyError(Exception):
    """An exception that writes its message itself."""

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


def raises(error):
    raise error  # the line that raises


# name: (what is called with the number of the bad row, the error's type in the caller)
KINDS = {
    "own": (lambda row: raises(OwnError(f"row {row}")), OwnError),
    "key": (lambda row: raises(KeyError(f"row {row}")), KeyError),
    "picky": (lambda row: raises(PickyError(row, "bad row")), PickyError),
    "file": (lambda row: raises(OSError(2, f"row {row}", "x")), FileNotFoundError),
    "stop": (lambda row: raises(StopIteration(f"row {row}")), StopIteration),
    "memory": (lambda row: raises(torch.OutOfMemoryError(f"row {row}")), RuntimeError),
    "local": (lambda row: raises(local_error(row)), RuntimeError),
    "torch": (lambda row: torch.zeros(9 + row) + torch.zeros(4), RuntimeError),
    "chained": (out_of_list, OwnError),
    "keyword": (
        lambda row: raises(KeywordError(code=row)),
        (RuntimeError, KeywordError),
    ),
    "wordy": (lambda row: raises(WordyError()), WordyError),
    "exit": (lambda row: raises(SystemExit(f"row {row}")), (RuntimeError, SystemExit)),
    "interrupt": (
        lambda row: raises(KeyboardInterrupt(f"row {row}")),
        (RuntimeError, KeyboardInterrupt),
    ),
}


def fragile(m, x, kind="own"):
    """Raise where a row is bad; row 5 says 5 in its second column."""
    out = m.layer(x)
    bad = (x[:, 0] == BAD).nonzero()
    if len(bad):
        KINDS[kind][0](int(x[bad[0], 1]))
    return out


def fragile_twin(wrap, n=2):
    return Twin(wrap, module(fragile, layer=linear(2)), n)


def batch(*rows):
    x = integers(7, 3)
    for row in rows:
        x[row, 0], x[row, 1] = BAD, row
    return x


def check_next(twin):
    """Check that a wrapper works that has just failed."""
    for _ in range(2):
        twin.zero()
        twin.step(step, X.clone().requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_another_replica_keeps_its_type_and_place(wrap, kind):
    twin = fragile_twin(wrap)
    with pytest.raises(KINDS[kind][1]) as caught:
        twin.ours(batch(5), kind)
    words = str(caught.value) + str(caught.value.__cause__)
    if kind not in ("exit", "interrupt"):
        assert "in replica 1 on device cpu" in words
        assert "Original Traceback" in words
        assert f'File "{__file__}", line ' in words
    if kind == "picky":
        assert "bad row (5)" in words
    elif kind != "wordy":
        assert {"torch": "size of tensor", "keyword": "KeywordError"}.get(
            kind, "5"
        ) in words
    if kind == "chained":
        assert "IndexError" in words
    check_next(twin)


@pytest.mark.parametrize("rows", [[1], [1, 5]], ids=["first", "both"])
@pytest.mark.parametrize("kind", [*KINDS][:-4])
def test_an_exception_in_the_first_replica_keeps_its_type_and_place(wrap, kind, rows):
    twin = fragile_twin(wrap)
    with pytest.raises(KINDS[kind][1]) as caught:
        twin.ours(batch(*rows), kind)
    words = "".join(traceback.format_exception(caught.value))
    assert ("size of tensor" if kind == "torch" else "row") in words
    assert "row 5" not in str(caught.value)
    assert "replica 1" not in str(caught.value)
    check_next(twin)


def test_the_lowest_replica_that_fails_is_named(wrap):
    twin = fragile_twin(wrap, 4)
    with pytest.raises(OwnError, match="in replica 1 on device cpu") as caught:
        twin.ours(batch(3, 5))  # rows 0 1, 2 3, 4 5, 6
    assert "row 3" in str(caught.value)
    check_next(twin)


def test_exceptions_may_come_again_and_again(wrap):
    twin = fragile_twin(wrap, 3)
    for number in range(14):
        mode = torch.no_grad if number % 2 else torch.enable_grad
        with mode(), pytest.raises(OwnError, match=f"row {number % 7}"):
            twin.ours(batch(number % 7))
    check_next(twin)


@pytest.mark.parametrize("row", [1, 5])
def test_a_forward_that_fails_leaves_no_references_behind(wrap, row):
    seen = []

    def forward(m, x):
        if (x == BAD).any():
            seen.append(weakref.ref(x))
            raise ValueError("on purpose")
        return x

    ours = wrap(module(forward))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="on purpose"):
            ours(batch(row))
        assert [ref() for ref in seen] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("row", [1, 3, 5])
def test_an_exception_hides_no_change_of_the_form_of_outputs(wrap, row):
    def shifting(m, x, kind):
        if (x == BAD).any():
            raise OwnError("bad row")
        return {"tuple": (x, x + 1), "dict": {"a": x, "b": x + 1}}[kind]

    ours = wrap(module(shifting), 3)  # rows 0 1 2, 3 4, 5 6
    for kind in ("tuple", "dict", "tuple", "dict"):
        with pytest.raises(OwnError, match="bad row"):
            ours(batch(row), kind)
        out = ours(X, kind)
        values = list(out.values() if kind == "dict" else out)
        assert type(out).__name__ == kind
        assert torch.equal(torch.stack(values), torch.stack([X, X + 1]))


def test_a_graph_outlives_an_exception_in_a_later_forward(wrap):
    twin = fragile_twin(wrap)
    loss = step(twin.ours, X)
    with pytest.raises(OwnError, match="row 5"):
        twin.ours(batch(5))
    loss.backward()
    step(twin.plain, X).backward()
    twin.assert_same()


@pytest.mark.parametrize("row", [0, 6])
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
    assert torch.equal(caught.value.tensor, twin.plain.layers(rows))
    twin.step(step, X)


@pytest.mark.parametrize("row", [1, 5])
def test_an_interrupt_in_any_replica_leaves_the_wrapper_usable(wrap_on_cpu, row):
    def forward(m, x):
        if (x == BAD).any():
            signal.raise_signal(signal.SIGINT)
        return x * 2

    ours = wrap_on_cpu(module(forward))
    with pytest.raises(KeyboardInterrupt):
        ours(batch(row))
    assert torch.equal(ours(X), X * 2)


# ---- in backward --------------------------------------------------------------------


class Failing(torch.autograd.Function):
    """Passes on what it gets; its backward fails where told to, or at infinity."""

    @staticmethod
    def forward(ctx, x, fails=False):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails or not grad.isfinite().all():
            raise OwnError("in backward")
        return grad, None


class Second(torch.autograd.Function):
    """A square, of which a row of 60 breaks the second order."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return Failing.apply(2 * x * grad, bool((x == 60).any()))


def breaking(m, x):
    return Failing.apply(m.layer(Second.apply(x)), bool((x == -60).any()))


def penalised(model, x):
    return squares_of(slopes_of(loss_of(model(x)), [x]))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("rows", [[1], [6], [1, 6]], ids=str)
def test_an_error_is_raised_by_the_backward_it_belongs_to(wrap, rows, order):
    twin = Twin(wrap, module(breaking, layer=linear(2)))
    x = small(7, 3)
    x[rows, 0] = -60 if order == 1 else 60
    x.requires_grad_()
    value = loss_of(twin.ours(x)) if order == 1 else penalised(twin.ours, x)
    for create_graph in (True, False):
        with pytest.raises(OwnError, match="in backward") as caught:
            torch.autograd.grad(value, x, create_graph=create_graph)
    words = "".join(traceback.format_exception(caught.value))
    assert 'raise OwnError("in backward")' in words
    for _ in range(2):
        twin.zero()
        twin.step(penalised, small(7, 3).requires_grad_())


@pytest.mark.parametrize("row", [1, 5])
def test_a_backward_that_fails_leaves_no_sparse_gradient_behind(wrap, row):
    tables = {n: integer_weights(nn.Embedding(5, 3, sparse=True)) for n in ("a", "b")}
    twin = Twin(wrap, module(lambda m, i: Failing.apply(m.a(i)) + m.b(i), **tables))
    i = torch.arange(7) % 5
    for model in twin.models:
        out = model(i)
        gradient = torch.ones_like(out)
        gradient[row] = float("inf")
        with pytest.raises(OwnError, match="in backward"):
            out.backward(gradient)
        model.zero_grad()
        step(model, i).backward()
    twin.assert_same()


def fail(*_):
    raise OwnError("on purpose")


PLACES = {
    "parameter": lambda model, x: bare(model).weight.register_hook(fail),
    "sum": lambda model, x: bare(model).bias.register_post_accumulate_grad_hook(fail),
    "input": lambda model, x: x.register_hook(fail),
    "wrapper before": lambda model, x: model.register_forward_pre_hook(fail),
    "wrapper after": lambda model, x: model.register_forward_hook(fail),
    "wrapper backward": lambda model, x: model.register_full_backward_hook(fail),
}


def test_what_a_hook_raises_is_raised_and_the_next_call_works(wrap):
    twin = Twin(wrap, linear())
    for register in PLACES.values():
        x = X.clone().requires_grad_()
        handle = register(twin.ours, x)
        with pytest.raises(OwnError, match="on purpose"):
            step(twin.ours, x).backward()
        handle.remove()
        twin.zero()
        twin.step(step, X.clone().requires_grad_())


@pytest.mark.parametrize("which", ["pack", "unpack"])
def test_what_a_hook_on_saved_tensors_raises_is_raised(wrap, which):
    twin = Twin(wrap, net())
    hooks = (fail, fail) if which == "pack" else (lambda t: t, fail)

    def run():
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            out = twin.ours(X)
        loss_of(out).backward()

    with pytest.raises(OwnError, match="on purpose"):
        run()
    twin.zero()
    twin.step(step, X)


def test_hooks_on_saved_tensors_may_be_forbidden(wrap):
    def checkpointed(m, x):
        return checkpoint(m.layers, x, use_reentrant=False)

    twin = Twin(wrap, module(checkpointed, layers=net()))
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("none of these"),
        pytest.raises(RuntimeError, match="none of these"),
    ):
        twin.ours(X)
    twin.step(step, X)


def test_reentrant_checkpoints_have_no_second_order(wrap):
    ours = wrap(module(lambda m, x: checkpoint(m.a, x, use_reentrant=True), a=net()))
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="use_reentrant"):
        torch.autograd.grad(step(ours, x), x, create_graph=True)
    step(ours, x).backward()
