"""What replicas log reaches the caller's handlers; breakpoints stop in replica 0."""

import logging
import sys

import kept_workers
import paceline
import pytest
import torch
from paceline._workers import log_records
from replicas import Wrap, integer_weights, integers, loss_of
from torch import nn

NAME = "test_data_parallel_records.model"


@pytest.fixture
def wrap(idle_workers):
    """Return a function that wraps a module by processes."""
    wrap = Wrap("process")
    yield wrap
    wrap.close()


class Logging(nn.Module):
    """Says what a test wants it to say, in forward and in backward."""

    def __init__(self, say):
        super().__init__()
        self.layer = integer_weights(nn.Linear(3, 2))
        self.say = say

    def forward(self, x):
        say, log = self.say, logging.getLogger(NAME)
        out = self.layer(x)
        if out.requires_grad:
            out.register_hook(lambda grad: say(log, grad, "backward"))
        say(log, x, "forward")
        return out


def say_where(log, x, where):
    log.warning("%s of %d rows", where, len(x))


def test_records_reach_the_callers_handlers_in_order(wrap, caplog):
    ours = wrap(Logging(say_where), 3)
    for _ in range(2):
        caplog.clear()
        loss_of(ours(integers(6, 3))).backward()
        assert [record.getMessage() for record in caplog.records] == [
            "forward of 2 rows",
            "[replica 1] forward of 2 rows",
            "[replica 2] forward of 2 rows",
            "backward of 2 rows",
            "[replica 1] backward of 2 rows",
            "[replica 2] backward of 2 rows",
        ]
        replicas = [getattr(record, "replica", 0) for record in caplog.records]
        assert replicas == [0, 1, 2, 0, 1, 2]
        first, second, *_ = caplog.records
        assert (second.name, second.levelno) == (NAME, logging.WARNING)
        assert (second.args, second.funcName) == (first.args, first.funcName)
        assert second.process != first.process


def say_at_all_levels(log, x, where):
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        log.log(level, "at %d", level)


LEVELS = {
    "as they are": (lambda log: None, [30, 40]),
    "of the logger": (lambda log: log.setLevel(logging.DEBUG), [10, 20, 30, 40]),
    "of its parent": (lambda log: log.parent.setLevel(logging.ERROR), [40]),
    "of the root": (lambda log: logging.root.setLevel(logging.INFO), [20, 30, 40]),
    "disabled": (lambda log: logging.disable(logging.WARNING), [40]),
}


@pytest.fixture
def _loggers_as_they_were():
    logger = logging.getLogger(NAME)
    loggers = [logger, logging.getLogger(NAME.partition(".")[0]), logging.root]
    before = [each.level for each in loggers]
    yield
    logging.disable(logging.NOTSET)
    for each, level in zip(loggers, before, strict=True):
        each.setLevel(level)


@pytest.mark.usefixtures("_loggers_as_they_were")
def test_levels_are_those_of_the_call(wrap, caplog):
    ours, log = wrap(Logging(say_at_all_levels)), logging.getLogger(NAME)
    before = log.level, log.parent.level, logging.root.level
    for change, expected in LEVELS.values():
        change(log)
        caplog.clear()
        with torch.no_grad():
            ours(integers(7, 3))
        seen = [r.levelno for r in caplog.records if hasattr(r, "replica")]
        own = [r.levelno for r in caplog.records if not hasattr(r, "replica")]
        assert seen == own == expected
        logging.disable(logging.NOTSET)
        for each, level in zip((log, log.parent, logging.root), before, strict=True):
            each.setLevel(level)


def say_and_fail(log, x, where):
    log.warning("last words")
    if len(x) == 3:
        raise LookupError("on purpose")


def test_records_are_not_lost_with_an_exception(wrap, caplog):
    ours = wrap(Logging(say_and_fail))
    with pytest.raises(LookupError, match="replica 1"):
        ours(integers(7, 3))
    assert [record.getMessage() for record in caplog.records] == [
        "last words",
        "[replica 1] last words",
    ]


def say_objects(log, x, where):
    log.warning("%s and %r", x.sum(), {1: len})
    changing = [1]
    log.warning("%s", changing, extra={"rows": len(x), "tensor": x[:1, 0]})
    changing.append(2)
    try:
        raise LookupError("inner")
    except LookupError:
        log.exception("caught %s", "it", stack_info=True)


def test_what_cannot_travel_is_formatted_where_it_was_logged(wrap, caplog):
    ours = wrap(Logging(say_objects))
    with torch.no_grad():
        ours(torch.ones(7, 3, dtype=torch.float64))
    first, second, third = [r for r in caplog.records if hasattr(r, "replica")]
    assert first.getMessage() == (
        "[replica 1] tensor(9., dtype=torch.float64) and {1: <built-in function len>}"
    )
    assert second.getMessage() == "[replica 1] [1]"
    assert second.rows == 3
    assert second.tensor == "tensor([1.], dtype=torch.float64)"
    assert third.getMessage() == "[replica 1] caught it"
    text = logging.Formatter().format(third)
    assert "LookupError: inner" in text
    assert "Stack (most recent call last)" in text


def say_much(log, x, where):
    for i in range(log_records.MOST_RECORDS + 5):
        log.warning("%d", i)


def test_the_records_of_one_call_are_bounded(wrap, caplog):
    ours = wrap(Logging(say_much))
    with torch.no_grad():
        ours(integers(7, 3))
    first, *rest = [r for r in caplog.records if hasattr(r, "replica")]
    assert "the first are missing" in first.getMessage()
    assert len(rest) == log_records.MOST_RECORDS
    assert rest[-1].args == (log_records.MOST_RECORDS + 4,)


class Talkative(logging.Handler):
    """Logs itself, and computes with the model's parameters, while it handles."""

    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, []

    def emit(self, record):
        self.seen.append(record.getMessage())
        if "again" not in record.msg:
            logging.getLogger(NAME).warning("again: %s", self.model.layer.bias.sum())


def test_a_handler_may_log_itself(wrap):
    model = Logging(say_where)
    handler, log = Talkative(model), logging.getLogger(NAME)
    log.addHandler(handler)
    try:
        with torch.no_grad():
            ours = wrap(model)
            for _ in range(2):
                ours(integers(7, 3))
    finally:
        log.removeHandler(handler)
    assert [words.partition(":")[0] for words in handler.seen] == [
        "forward of 4 rows",
        "again",
        "[replica 1] forward of 3 rows",
        "again",
    ] * 2


# ---- breakpoints --------------------------------------------------------------------


class Stopping(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = integer_weights(nn.Linear(3, 2)), how

    def forward(self, x):
        if self.how == "breakpoint":
            breakpoint()
        else:
            import pdb

            pdb.set_trace()
        return self.layer(x)


@pytest.mark.parametrize("how", ["breakpoint", "pdb"])
def test_a_breakpoint_stops_in_replica_0_alone(wrap, monkeypatch, capsys, how):
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append("breakpoint"))
    monkeypatch.setattr("pdb.set_trace", lambda: stops.append("pdb"))
    monkeypatch.setattr(log_records, "_printed", set())
    module = Stopping(how)
    ours, x = wrap(module, 3), integers(7, 3)
    for _ in range(2):
        assert torch.equal(ours(x), module.layer(x))
    assert stops == [how] * 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()  # once a place, whoever comes there
    assert line.startswith(f"paceline: the breakpoint at {__file__}:")
    assert line.endswith("stops in replica 0 alone; worker processes skip it")


def test_breakpoints_that_are_switched_off_are_not_told(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    monkeypatch.setattr(kept_workers, "_kept", None)  # workers that start with it
    monkeypatch.setattr(log_records, "_printed", set())
    with paceline.DataParallel(Stopping("breakpoint"), ["cpu"] * 2) as ours:
        ours(integers(7, 3))
        assert ours.engine == "process"
    assert capsys.readouterr() == ("", "")
