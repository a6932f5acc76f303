"""Run known problems of torch's DistributedDataParallel with torch and with paceline.

    python tests/parity/ddp/sixteen.py            # prints the table, in about a minute
    python tests/parity/ddp/sixteen.py --write    # writes it to ../README.md

There are sixteen experiments and five more, each on two ranks in fresh processes over
Gloo.  A rank that raises ends, as a script does after an uncaught exception.  A rank
that has finished stays alive until its peer has finished too.  An experiment returns
pairs of numbers by name, (found, expected); for a gradient, the expected number is the
average over ranks.  Rank r's gradients are r + 1, so averages are 1.5.

A row says "works" if all numbers are as expected, and "raises at once" if ranks raised
within `AT_ONCE` seconds.  The deadline of both libraries is `DEADLINE`.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib
import os
import pickle
import platform
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import paceline
import torch
import torch.distributed as dist
from support.ranks import RanksFailedError, RanksTimeoutError, start_ranks, tell
from torch import nn

DEADLINE = 4.0  # seconds, of the process group and as PACELINE_TIMEOUT
AT_ONCE = DEADLINE / 2
LIMIT = 20.0  # seconds after which a run is killed

CLASSES = {
    "torch": nn.parallel.DistributedDataParallel,
    "paceline": paceline.DistributedDataParallel,
}

Pairs = dict[str, tuple[float, float]]  # name: (found, expected)
Body = Callable[[Any, int], Pairs]


@dataclass(frozen=True)
class Experiment:
    """A program for two ranks, which takes a class to wrap models with, and a note."""

    body: Body
    note: str

    @property
    def name(self) -> str:
        return self.body.__name__

    @property
    def sentence(self) -> str:
        assert self.body.__doc__ is not None
        return self.body.__doc__.strip().rstrip(".")


EXPERIMENTS: dict[str, Experiment] = {}


def experiment(note: str) -> Callable[[Body], Body]:
    """Add a function to the table, with a note."""

    def enter(body: Body) -> Body:
        EXPERIMENTS[body.__name__] = Experiment(body, note)
        return body

    return enter


class LeaveError(Exception):
    """Ends the rank's process silently when an experiment raises it."""


_kept: list[Any] = []  # outlives its experiment, like a script's globals


# ---- the models ----------------------------------------------------------------------


def line(n_outputs: int = 4) -> nn.Linear:
    return nn.Linear(4, n_outputs)


class TwoLines(nn.Module):
    """Two layers; the argument of a forward says which of them it uses."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or ("first", "second"):
            self.add_module(name, nn.Linear(4, 4, bias=False))

    def forward(self, x: torch.Tensor, used: tuple[str, ...] = ("first",)) -> Any:
        return sum(getattr(self, name)(x) for name in used)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))


def ones(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return an input with which a weight's gradient is rank + 1."""
    return torch.full((1, 4), rank + 1.0, dtype=dtype)


def grad(parameter: torch.Tensor) -> float:
    """Return the gradient's first number; NaN if there is no gradient."""
    return (
        float("nan") if parameter.grad is None else parameter.grad.flatten()[0].item()
    )


def step(model: nn.Module, rank: int) -> torch.Tensor:
    """Take a step; return its loss, which a script's loop keeps until the next step."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = model(ones(rank, dtype)).sum()
    loss.backward()
    return loss


# ---- the ranks' models differ --------------------------------------------------------


@experiment("torch compares shapes at construction, not dtypes")
def rank_1_has_a_float64_model(wrap: Any, rank: int) -> Pairs:
    """Rank 0's model is float32, rank 1's is float64."""
    module = line().double() if rank == 1 else line()
    model = wrap(module)
    step(model, rank)
    return {"weight.grad": (grad(module.weight), 1.5)}


@experiment("torch takes parameters by position, whatever their names")
def rank_1_registers_its_layers_in_another_order(wrap: Any, rank: int) -> Pairs:
    """The ranks' models register two layers of one shape in different orders."""
    module = TwoLines(*(("first", "second") if rank == 0 else ("second", "first")))
    model = wrap(module)
    x = torch.ones(1, 4)
    (model(x, ("first",)) + 10 * model.module.second(x)).sum().backward()
    return {
        "first.grad": (grad(module.first.weight), 1.0),
        "second.grad": (grad(module.second.weight), 10.0),
    }


@experiment("paceline names the parameter, on both ranks")
def rank_1_has_a_wider_layer(wrap: Any, rank: int) -> Pairs:
    """Rank 0's model is Linear(4, 4), rank 1's is Linear(4, 5)."""
    module = line(4 + rank)
    step(wrap(module), rank)
    return {"weight.grad": (grad(module.weight), 1.5)}


@experiment("both name the counts; paceline also the parameter")
def rank_1_has_more_parameters(wrap: Any, rank: int) -> Pairs:
    """Rank 0's model has 2 parameters, rank 1's has 4."""
    module = nn.Sequential(*(line() for _ in range(rank + 1)))
    step(wrap(module), rank)
    return {"weight.grad": (grad(module[0].weight), 1.5)}


# ---- the model has changed, or is partly unused --------------------------------------


@experiment("torch needs find_unused_parameters=True")
def a_layer_is_never_used(wrap: Any, rank: int) -> Pairs:
    """A layer is never used, and a second step is taken."""
    module = TwoLines()
    model = wrap(module)
    step(model, rank)
    step(model, rank)
    assert module.second.weight.grad is None
    return {"first.grad": (grad(module.first.weight), 1.5)}


@experiment("paceline wraps the model anew at its next forward")
def the_model_becomes_float64_after_wrapping(wrap: Any, rank: int) -> Pairs:
    """`.double()` after wrapping."""
    module = line()
    model = wrap(module)
    step(model, rank)
    model.double()
    step(model, rank)
    return {"weight.grad": (grad(module.weight), 1.5)}


@experiment("likewise")
def a_parameter_is_replaced_after_wrapping(wrap: Any, rank: int) -> Pairs:
    """A parameter is replaced by another object after wrapping."""
    module = line()
    model = wrap(module)
    step(model, rank)
    module.weight = nn.Parameter(torch.zeros(4, 4))
    step(model, rank)
    return {
        "weight.grad": (grad(module.weight), 1.5),
        "bias.grad": (grad(module.bias), 1.0),
    }


@experiment("to paceline it is unused from then on; not of the sixteen")
def a_parameter_is_frozen_after_wrapping(wrap: Any, rank: int) -> Pairs:
    """A parameter is frozen after wrapping, and two more steps are taken."""
    module = line()
    model = wrap(module)
    step(model, rank)
    module.bias.requires_grad_(False)
    step(model, rank)
    step(model, rank)
    return {"weight.grad": (grad(module.weight), 1.5)}


@experiment("likewise; not of the sixteen")
def a_parameter_is_unfrozen_after_wrapping(wrap: Any, rank: int) -> Pairs:
    """A parameter that was frozen at wrapping is unfrozen."""
    module = line()
    module.weight.requires_grad_(False)
    model = wrap(module)
    step(model, rank)
    module.weight.requires_grad_(True)
    step(model, rank)
    return {
        "weight.grad": (grad(module.weight), 1.5),
        "bias.grad": (grad(module.bias), 1.0),
    }


# ---- the ranks do not do the same ----------------------------------------------------


@experiment("Gloo's TCP connection tells torch of it; shared memory tells paceline")
def rank_1_exits_before_its_backward(wrap: Any, rank: int) -> Pairs:
    """Rank 1 exits after its forward."""
    module = line()
    model = wrap(module)
    loss = model(ones(rank)).sum()
    if rank == 1:
        raise LeaveError
    loss.backward()
    return {"weight.grad": (grad(module.weight), 1.5)}


@experiment("rank 1 may be busy: none can know it is not before the deadline")
def rank_1_takes_a_step_fewer_and_stays(wrap: Any, rank: int) -> Pairs:
    """Rank 1 takes one step fewer but stays alive, with its model."""
    module = line()
    model = wrap(module)
    _kept.append(model)
    step(model, rank)
    if rank == 0:
        step(model, rank)
    return {"weight.grad": (grad(module.weight), 1.5)}


@experiment("torch sends buffers in evaluation, paceline does not")
def rank_0_alone_evaluates(wrap: Any, rank: int) -> Pairs:
    """Rank 0 alone evaluates a model with BatchNorm, and rank 1 waits at a barrier."""
    asked = averaged_gradient(normed(), lambda m: m(batch(rank)).square().sum())
    module = normed()
    model = wrap(module)
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(batch(0))
        model.train()
    dist.barrier()
    model(batch(rank)).square().sum().backward()
    return {"weight.grad": (grad(module[2].weight), asked)}


@experiment("the wrapper's end tells paceline's peers of it; not of the sixteen")
def rank_1_takes_a_step_fewer_and_drops_its_model(wrap: Any, rank: int) -> Pairs:
    """Rank 1 takes one step fewer and drops its model, but stays alive."""
    module = line()
    model = wrap(module)
    step(model, rank)
    if rank == 0:
        step(model, rank)
    return {"weight.grad": (grad(module.weight), 1.5)}


@experiment("only rank 1 wants to wrap anew; not of the sixteen")
def rank_1_alone_makes_its_model_float64(wrap: Any, rank: int) -> Pairs:
    """`.double()` after wrapping, on rank 1 only."""
    module = line()
    model = wrap(module)
    _kept.append(step(model, rank))
    if rank == 1:
        model.double()
    step(model, rank)
    return {"weight.grad": (grad(module.weight), 1.5)}


@experiment("to paceline it is unused on rank 1; not of the sixteen")
def rank_1_alone_freezes_a_parameter(wrap: Any, rank: int) -> Pairs:
    """A parameter is frozen after wrapping, on rank 1 only."""
    module = line()
    model = wrap(module)
    _kept.append(step(model, rank))
    module.bias.requires_grad_(rank == 0)
    step(model, rank)
    step(model, rank)
    return {"weight.grad": (grad(module.weight), 1.5)}


# ---- the step is unusual -------------------------------------------------------------


@experiment("torch documents that the forward must be inside")
def no_sync_is_round_backward_only(wrap: Any, rank: int) -> Pairs:
    """`no_sync()` round `backward()` only."""
    module = line()
    model = wrap(module)
    loss = model(ones(rank)).sum()
    with model.no_sync():
        loss.backward()
    return {"weight.grad": (grad(module.weight), rank + 1.0)}


@experiment("torch 1.13 left the first micro-step's gradients unaveraged")
def a_parameter_is_used_in_the_first_micro_step_only(wrap: Any, rank: int) -> Pairs:
    """A layer is used under `no_sync()` only, with find_unused_parameters."""
    module = TwoLines()
    model = wrap(module, find_unused_parameters=True)
    with model.no_sync():
        model(ones(rank), ("first", "second")).sum().backward()
    model(ones(rank), ("second",)).sum().backward()
    return {
        "first.grad": (grad(module.first.weight), 1.5),
        "second.grad": (grad(module.second.weight), 3.0),
    }


@experiment("torch 1.13 raised 'modified by an inplace operation'")
def two_forwards_come_before_one_backward(wrap: Any, rank: int) -> Pairs:
    """Two forwards through BatchNorm, then one backward."""

    def loss(model: nn.Module) -> torch.Tensor:
        outputs = model(batch(rank)), model(batch(rank + 2))
        return outputs[0].square().sum() + outputs[1].square().sum()

    asked = averaged_gradient(normed(), loss)
    module = normed()
    model = wrap(module)
    loss(model).backward()
    return {"weight.grad": (grad(module[2].weight), asked)}


class Plain:
    """An output in which no library can find tensors."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Hiding(TwoLines):
    def forward(self, x: torch.Tensor, used: tuple[str, ...] = ("first",)) -> Any:
        return Plain(super().forward(x, used))


@experiment("torch does not find the graph in such an output")
def the_output_is_hidden_in_a_plain_class(wrap: Any, rank: int) -> Pairs:
    """The output is an object of a plain class, with find_unused_parameters."""
    module = Hiding()
    model = wrap(module, find_unused_parameters=True)
    model(ones(rank)).value.sum().backward()
    return {"first.grad": (grad(module.first.weight), 1.5)}


@experiment("both leave the gradients of `autograd.grad` the rank's own")
def gradients_are_taken_by_autograd_grad(wrap: Any, rank: int) -> Pairs:
    """`torch.autograd.grad`, then a `backward()`."""
    module = line()
    model = wrap(module)
    own = torch.autograd.grad(model(ones(rank)).sum(), [module.weight])[0]
    step(model, rank)
    return {
        "autograd.grad": (own[0, 0].item(), rank + 1.0),
        "weight.grad": (grad(module.weight), 1.5),
    }


@experiment("with the default process group")
def the_wrapper_is_pickled_and_copied(wrap: Any, rank: int) -> Pairs:
    """The wrapper is pickled and loaded, and deep-copied."""
    model = wrap(line())
    loaded, copied = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    found = {}
    for name, one in (("loaded", loaded), ("copied", copied), ("itself", model)):
        step(one, rank)
        found[name] = (grad(one.module.weight), 1.5)
    return found


def averaged_gradient(
    module: nn.Sequential, loss: Callable[[nn.Module], torch.Tensor]
) -> float:
    """Return the last layer's gradient, averaged over ranks without a wrapper."""
    loss(module).backward()
    gradient = module[2].weight.grad
    dist.all_reduce(gradient)
    return gradient.flatten()[0].item() / dist.get_world_size()


# ---- in a rank -----------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """The outcome of a rank, with times of the host's clock."""

    began: float
    ended: float
    pairs: Pairs | None = None
    error: str | None = None  # "RuntimeError: its whole message"
    has_left: bool = False
    exitcode: int | None = None  # -6: it was aborted

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def is_as_asked(self) -> bool:
        if self.pairs is None:
            return self.has_left
        return all(_are_close(*pair) for pair in self.pairs.values())

    def words(self) -> str:
        if self.exitcode is not None:
            return _describe_exit(self.exitcode)
        if self.has_left:
            return "left"
        if self.error is not None:
            return _shorten(next(filter(None, self.error.splitlines())))
        assert self.pairs is not None
        return ", ".join(
            f"{name} {found:g}"
            + ("" if _are_close(found, asked) else f", not {asked:g}")
            for name, (found, asked) in self.pairs.items()
        )


def _are_close(found: float, asked: float) -> bool:
    return abs(found - asked) <= 1e-5 * max(1.0, abs(asked))  # NaN is not


def _shorten(words: str) -> str:
    """Shorten a message: drop Gloo's source lines and advice, and cut the rest."""
    words = re.sub(r"\[/[^]]*\] | \[[\d.]*\]:\d+|\. This is typically .*", "", words)
    return textwrap.shorten(words, 240, placeholder=" ...")


def _describe_exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def on_rank(rank: int, n_ranks: int, library: str, name: str) -> None:
    """Run an experiment; send its begin and its report to the test."""
    if library == "torch":
        importlib.import_module("torch._dynamo")  # slow: else the constructor does it
    dist.barrier()  # so that both ranks begin at the same time
    began = time.monotonic()
    tell(began)
    try:
        pairs = EXPERIMENTS[name].body(CLASSES[library], rank)
    except LeaveError:
        tell(Report(began, time.monotonic(), has_left=True))
        os._exit(0)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        tell(Report(began, time.monotonic(), error=words))
        os._exit(1)
    tell(Report(began, time.monotonic(), pairs=pairs))


# ---- in the script or the test -------------------------------------------------------

Kind = Literal["works", "raises", "hangs", "wrong", "aborts"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of an experiment."""

    kind: Kind
    reports: tuple[Report, ...]  # by rank; empty if the run was killed

    @property
    def seconds(self) -> float:
        return max((report.seconds for report in self.reports), default=LIMIT)

    @property
    def errors(self) -> list[str | None]:
        """Each rank's whole error message, with the name of the error's type."""
        return [report.error for report in self.reports]

    def __str__(self) -> str:
        each = [report.words() for report in self.reports]
        words = "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(each))
        if len(set(each)) == 1:
            words = f"both ranks: {each[0]}"
        if self.kind == "works":
            return "works"
        if self.kind == "raises":
            return f"raises at once: {words}"
        if self.kind == "hangs":
            return f"hangs until timeout ({self.seconds:.1f} s): {words}"
        if self.kind == "wrong":
            return f"silently wrong: {words}"
        return f"aborts the process: {words}"


def judge(reports: tuple[Report, ...]) -> Verdict:
    """Return the verdict on the ranks' reports."""
    kind: Kind = "works"
    if any(report.exitcode is not None for report in reports):
        kind = "aborts"
    elif max(report.seconds for report in reports) > AT_ONCE:
        kind = "hangs"
    elif any(report.error is not None for report in reports):
        kind = "raises"
    elif not all(report.is_as_asked for report in reports):
        kind = "wrong"
    return Verdict(kind, reports)


def run(library: str, name: str) -> Verdict:
    """Run an experiment with "torch" or "paceline", in fresh processes."""
    reports = []
    try:
        with start_ranks(
            on_rank,
            2,
            library,
            name,
            timeout=LIMIT,
            group_timeout=DEADLINE,
            env={"PACELINE_TIMEOUT": f"{DEADLINE:g}"},
        ) as ranks:
            began = [ranks.hear(rank) for rank in range(2)]
            for rank in range(2):
                try:
                    reports.append(ranks.hear(rank))
                except RanksFailedError:
                    reports.append(Report(began[rank], time.monotonic()))
            outcomes = ranks.wait()
    except RanksTimeoutError:
        return Verdict("hangs", ())
    for rank, outcome in enumerate(outcomes):
        report = reports[rank]
        is_planned = report.pairs is not None or report.error or report.has_left
        if not is_planned:
            assert outcome.error is None, outcome.error
            reports[rank] = Report(
                report.began, report.ended, exitcode=outcome.exitcode
            )
    return judge(tuple(reports))


def _cell(verdict: Verdict) -> str:
    words = str(verdict).replace("|", "\\|")
    return f"{words} ({verdict.seconds:.2f} s)"


def table(names: list[str]) -> str:
    """Run experiments with both classes; return the table."""
    version = torch.__version__.split("+")[0]
    rows = [f"| experiment | torch {version} | paceline | note |", "|---|---|---|---|"]
    for name in names:
        one = EXPERIMENTS[name]
        cells = [_cell(run(library, name)) for library in CLASSES]
        rows.append(f"| {one.sentence} | {cells[0]} | {cells[1]} | {one.note} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return "\n".join(rows) + "\n"


README = """\
# Parity with torch

`test_gradients.py` and `test_accumulation.py` compare gradients with torch's, bit by
bit.  This table is about the rest: two ranks do things that torch's class does not
take well.  `python tests/parity/ddp/sixteen.py --write` writes it anew, and
`test_sixteen.py` checks paceline against its column.

{date}, torch {torch}, Python {python}, a machine of {cores} cores; 2 ranks over Gloo,
in fresh processes, with a deadline of {deadline:g} s.  In brackets are the seconds from
the beginning of the experiment until the last rank finished it.  The gradients of rank
r are r + 1, so that averages are 1.5.  Long messages are cut short.

{table}"""


def main() -> None:
    """Print the table, or write the README."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write README.md")
    parser.add_argument("names", nargs="*", help="of experiments; default: all")
    options = parser.parse_args()
    rows = table(options.names or list(EXPERIMENTS))
    if not options.write:
        print(rows)
        return
    readme = Path(__file__).parents[1] / "README.md"
    _, headline, others = readme.read_text(encoding="utf-8").partition("\n## ")
    readme.write_text(
        README.format(
            date=datetime.date.today().isoformat(),
            torch=torch.__version__,
            python=platform.python_version(),
            cores=os.cpu_count(),
            deadline=DEADLINE,
            table=rows,
        )
        + headline
        + others,
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
