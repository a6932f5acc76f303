"""Random programs: models of all kinds, with changes of all kinds between calls.

    python tests/parity/dp/drawn_programs.py --programs 1000 --seed 7

draws programs from `drawn_features.py`, and runs each twice, in separate namespaces:
with the plain module, and with ``DataParallel`` of two replicas.  After every call it
compares outputs, gradients, buffers, attributes and globals to the bit.  If one of the
two raises, the other must raise the same.  Prints each program that went wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import paceline
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for `support`

from drawn_features import (
    ANYWHERE,
    CODE,
    HEAD,
    INPUTS,
    LAYERS,
    OUTPUTS,
    STATE,
    Feature,
)
from replicas import assert_close, assert_same, graphs_of, integers
from support import devices, fake_gpus

ALL = {**LAYERS, **STATE, **CODE, **INPUTS}
LARGEST = 1e6  # of an output: squares, and sums of their gradients, are still exact
PLAIN = (int, float, str, bool, type(None), tuple, list, dict, set)


class Differs(AssertionError):
    """A program behaves differently with replicas than with the plain module."""


@dataclass(frozen=True)
class Step:
    """Changes, then a call with a batch of `rows`."""

    changes: tuple[str, ...]
    rows: int
    mode: str  # "train": with a backward; "twice": two calls in one; "no_grad"


@dataclass
class Program:
    """The text of a script that defines `Net`, and the steps to take with it.

    `given` has the code that makes each keyword argument, and the code that reads it
    after a call.
    """

    seed: int
    text: str
    steps: list[Step]
    given: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"# seed {self.seed}", self.text]
        lines += [f"# given {name}: {make}" for name, (make, _) in self.given.items()]
        for number, step in enumerate(self.steps):
            lines.append(f"# step {number}: {step.mode}, {step.rows} rows")
            lines += step.changes
        return "\n".join(lines)


# ---- drawing ------------------------------------------------------------------------


def _numbered(text: str, number: int) -> str:
    return text.replace("$", str(number))


def _class_text(chance: random.Random, drawn: list[tuple[int, Feature]]) -> str:
    init = [_numbered(one.init, at) for at, one in drawn if one.init]
    order = chance.sample(drawn, len(drawn))
    forward = [_numbered(one.forward, at) for at, one in order]
    methods = [_numbered(one.methods, at) for at, one in drawn]
    indent = "\n        "
    return (
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        f"        super().__init__(){indent}{indent.join(init)}\n"
        f"{''.join(methods)}\n"
        "    def forward(self, x, **given):\n"
        f"        {indent.join(forward)}\n"
        f"        return {chance.choice(OUTPUTS)}\n"
    )


Given = dict[str, tuple[str, str]]


def _program(chance: random.Random, names: list[str]) -> tuple[str, list[str], Given]:
    """Return a program's text with these features, possible changes and arguments."""
    drawn = [(at, ALL[name]) for at, name in enumerate(names)]
    outside = [_numbered(one.outside, at) for at, one in drawn if one.outside]
    outside = list(dict.fromkeys(outside))
    text = "\n\n".join([HEAD, *outside, _class_text(chance, drawn)])
    given = {
        f"g{at}": (_numbered(one.make, at), _numbered(one.seen, at))
        for at, one in drawn
        if one.make
    }
    changes = [_numbered(text, at) for at, one in drawn for text in one.changes]
    return text, changes, given


def each_change() -> Iterator[Program]:
    """Yield programs with each change of each feature after a call.

    Two more have all changes of a feature: at once, and one after the other.
    """
    for name in ALL:
        text, changes, given = _program(random.Random(0), [name])
        first, last = Step((), 7, "train"), Step((), 7, "no_grad")
        all_ = [Step((c,), 7, "train") for c in changes]
        yield Program(0, text, [Step((*changes,), 7, "train"), first, last], given)
        yield Program(0, text, [first, *all_, last], given)
        for change in (*changes, *(ANYWHERE if name == "linear" else ())):
            yield Program(0, text, [first, Step((change,), 7, "twice"), last], given)


def draw(seed: int) -> Program:
    """Return the program of a seed: the same text in every process."""
    chance = random.Random(seed)
    names = chance.sample(sorted(LAYERS), chance.randint(1, 3))
    names += chance.sample(sorted(STATE), chance.randint(0, 3))
    names += chance.sample(sorted(CODE), chance.randint(0, 2))
    names += chance.sample(sorted(INPUTS), chance.choice([0, 0, 1, 2]))
    text, changes, given = _program(chance, names)
    steps = []
    for number in range(chance.randint(3, 6)):
        n = chance.choice([0, 1, 1, 1, 2]) if number else 0
        some = tuple(
            chance.choice(changes)
            if changes and chance.random() < 0.85
            else chance.choice(ANYWHERE)
            for _ in range(n)
        )
        mode = chance.choice(["train", "train", "train", "no_grad", "twice"])
        steps.append(Step(some, chance.choice([5, 7, 7, 8, 1]), mode))
    return Program(seed, text, steps, given)


# ---- running ------------------------------------------------------------------------


class Side:
    """A program in its own namespace, with its model or a wrapper around it."""

    def __init__(self, program: Program, device_ids: list[Any] | None) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.given = program.given
        is_on_gpus = device_ids is not None and device_ids[0] != "cpu"
        self.device = torch.device(devices.KIND if is_on_gpus else "cpu")
        with self.device:
            exec(compile(program.text, "<program>", "exec"), self.names)
            self.names["m"] = self.inner = self.names["Net"]()
        self.model = self.inner
        if device_ids is not None:
            self.model = paceline.DataParallel(self.inner, device_ids=device_ids)

    def change(self, text: str) -> None:
        exec(compile(text, "<change>", "exec"), self.names)

    def call(self, step: Step, number: int) -> list[Any]:
        """Return inputs' gradients and outputs of a step."""
        if step.mode == "no_grad":
            with torch.no_grad():
                given = self._made(step.rows)
                x = integers(step.rows, 4, seed=number)
                return [self._called(x, given), self._seen(given)]
        inputs, given, outputs, loss = [], [], [], 0
        for at in range(2 if step.mode == "twice" else 1):
            x = integers(step.rows, 4, seed=number + 9 * at).requires_grad_()
            inputs.append(x)
            given.append(self._made(step.rows))
            outputs.append(self._called(x, given[-1]))
            loss = loss + sum(t.square().sum() for t in graphs_of(outputs[-1]))
        if loss.requires_grad:
            loss.backward()
        with torch.no_grad():
            for p in self.inner.parameters():
                if p.grad is not None and p.requires_grad and not p.is_complex():
                    p.sub_(p.grad.sign())
        return [[x.grad for x in inputs], outputs, [*map(self._seen, given)]]

    def _made(self, rows: int) -> dict[str, Any]:
        """Return the keyword arguments of a call."""
        return {
            name: eval(make, self.names, {"n": rows})
            for name, (make, _) in self.given.items()
        }

    def _called(self, x: torch.Tensor, given: dict[str, Any]) -> Any:
        return _opened(self.model(x, **given))

    def _seen(self, given: dict[str, Any]) -> list[Any]:
        """Return what is compared of the keyword arguments after a call."""
        return [
            eval(seen, self.names, {"given": given}) if seen else None
            for _, seen in self.given.values()
        ]

    def attempt(self, step: Step, number: int) -> tuple[Any, Exception | None]:
        """Return a step's result or its error; new tensors are on the device."""
        with self.device:
            return self._attempt(step, number)

    def _attempt(self, step: Step, number: int) -> tuple[Any, Exception | None]:
        for text in step.changes:
            try:
                self.change(text)
            except Exception as error:  # the other side must raise the same
                return ("changing", type(error)), None
        try:
            return self.call(step, number), None
        except Exception as error:
            return None, error


def _opened(value: Any) -> Any:
    """Return what links lead to: a comparison of linked objects would not end."""
    if type(value).__name__ == "Link":
        return value.x, value.next.x, value.next.next is value
    return value


def _largest(value: Any) -> float:
    return max((float(t.detach().abs().max()) for t in graphs_of(value)), default=0.0)


def _bare(value: Any) -> Any:
    """Return a value without the classes of its program's namespace."""
    if type(value) in (tuple, list):
        return type(value)(map(_bare, value))
    if isinstance(value, tuple):
        return type(value).__name__, [*map(_bare, value)]
    if type(value).__module__ == "__main__":
        return type(value).__name__, dict(vars(value))
    return value


def _assert_alike(mine: Any, theirs: Any, what: str) -> None:
    """Compare the values of an attribute or a global, if they are of a plain kind."""
    if isinstance(theirs, (torch.Tensor, np.ndarray)):
        assert_same(mine, theirs, what)
    elif isinstance(theirs, dict) and isinstance(mine, dict):
        names = [name for name in theirs if isinstance(name, str)]
        assert [name for name in mine if isinstance(name, str)] == names, what
        for name in names:
            _assert_alike(mine[name], theirs[name], f"{what}[{name!r}]")
    elif isinstance(theirs, PLAIN):
        assert type(mine) is type(theirs), what
        if not isinstance(theirs, (list, tuple)):
            assert mine == theirs, f"{what}: {mine} against {theirs}"
            return
        assert len(mine) == len(theirs), what
        for at, pair in enumerate(zip(mine, theirs, strict=True)):
            _assert_alike(*pair, f"{what}[{at}]")


def _assert_same_sides(ours: Side, plain: Side) -> None:
    parts = [dict(side.inner.named_modules()) for side in (ours, plain)]
    assert list(parts[0]) == list(parts[1])
    for path, theirs in parts[1].items():
        mine = parts[0][path]
        for name, p in theirs._parameters.items():
            q = mine._parameters[name]
            _assert_alike(q, p, f"{path}.{name}")
            if p is not None:
                assert_close(q.grad, p.grad, f"{path}.{name}.grad")
        _assert_alike(mine._buffers, theirs._buffers, f"{path}._buffers")
        held = [
            {k: v for k, v in vars(part).items() if k == "training" or k[0] != "_"}
            for part in (mine, theirs)
        ]
        _assert_alike(*held, f"{path} attributes")
    skipped = {"__builtins__", "m"}
    names = [name for name in plain.names if name not in skipped]
    _assert_alike(
        {name: ours.names[name] for name in names if name in ours.names},
        {name: plain.names[name] for name in names},
        "globals",
    )


CPUS = ["cpu", "cpu"]
ONLY_ON_THE_CPU = "_neg_view", ".data.conj()"  # torch refuses such .data on devices


def run(program: Program, device_ids: list[Any] = CPUS) -> str | None:
    """Run a program both ways; return the name of what both raised, if they did.

    Raises
    ------
    Differs
        With the program and the first difference.
    """
    plain, ours = Side(program, None), Side(program, device_ids)
    left_out = () if device_ids == CPUS else ONLY_ON_THE_CPU
    for number, step in enumerate(program.steps):
        changes = [c for c in step.changes if not any(word in c for word in left_out)]
        step = replace(step, changes=tuple(changes))
        theirs, their_error = plain.attempt(step, number)
        mine, my_error = ours.attempt(step, number)
        where = f"at step {number}: "
        if type(my_error) is not type(their_error):
            raise Differs(f"{where}{my_error!r} against {their_error!r}\n{program}")
        if their_error is not None:
            return type(their_error).__name__
        try:
            assert_same(_bare(mine), _bare(theirs))
            _assert_same_sides(ours, plain)
        except AssertionError as error:
            raise Differs(f"{where}{error}\n{program}") from None
        if _largest(theirs) > LARGEST:
            break
    return None


# ---- by hand ------------------------------------------------------------------------


def _gpus(n_gpus: int, seed: int, *options: str) -> AbstractContextManager[Any]:
    """Return a context with that many GPUs, if any, which run late by this seed."""
    drawn = "schedule=random", "pump=1", f"seed={seed}"
    return fake_gpus.several(n_gpus, *drawn, *options) if n_gpus else nullcontext()


def main() -> int:
    """Draw and run programs; return 1 if one went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__ or "", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    parser.add_argument(
        "--gpus",
        type=int,
        default=0,
        help="replicas on so many GPUs, 2 to 4: fakes, whose schedule a program draws",
    )
    parser.add_argument(
        "--fake", nargs="*", default=[], help="options of the fake, such as peers=0"
    )
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.programs} programs", flush=True)
    device_ids = list(range(given.gpus)) or CPUS
    errors: Counter[str] = Counter()
    n_wrong = n_steps = 0
    torch.set_num_threads(1)
    if given.gpus:
        devices.load()
    for seed in range(given.seed, given.seed + given.programs):
        program = draw(seed)
        try:
            with _gpus(given.gpus, seed, *given.fake):
                error = run(program, device_ids)
        except Differs as difference:
            n_wrong += 1
            print(f"\n==== seed {seed}: {difference}", flush=True)
            continue
        n_steps += len(program.steps)
        if error:
            errors[error] += 1
    print(f"{given.programs} programs, {n_wrong} went wrong, {n_steps} steps")
    print("both raised:", dict(errors))
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
