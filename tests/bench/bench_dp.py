"""Benchmark of DataParallel on the CPU: the cost of replicas, and the gain of ranks.

    python tests/bench/bench_dp.py                    all models, a quarter of an hour
    python tests/bench/bench_dp.py --quick            a minute or two: does it work?
    python tests/bench/bench_dp.py --models lstm,deep --groups 9

Three contestants train the same model on the same whole batches:

plain     the module, with a thread for each core;
replicas  `DataParallel` on two CPU replicas, which take turns with the same threads;
ranks     two ranks by `paceline.launch` in a `DistributedDataParallel`, each with half
          of the batch and its share of the threads.

A *group* is a world of two fresh processes.  In it all contestants take short turns, in
a random order for each round; rank 1 sleeps in the turns of the first two.
See `paceline._cli.bench.steps`.  A ratio is that of two turns of one round, which are
seconds apart.  A group's ratio is the median over its rounds; the table has the median,
minimum and maximum over groups.  Above 1 means faster than the plain module.
Before a model is timed, `paceline.check` compares gradients with the plain module's.

Load slows down threads most that wait for each other.  `--quiet 0.1` waits before each
group until other processes leave the cores free, and repeats a group in which they used
more than a tenth of the cores.

Writes dp.txt under --out.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import dp_models
import machine
import paceline
import torch
from contestants import split_names
from paceline._cli.bench.command import StepRow, rows_of
from paceline._cli.bench.steps import PLAIN, RANKS, REPLICAS, Plan, run
from report import machine_lines

N = 2  # ranks, and replicas
Group = dict[tuple[str, str], StepRow]  # by model and contestant


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__ or "", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", default="all", help="default: " + ",".join(dp_models.BY_NAME))
    add("--groups", type=int, help="sets of fresh processes: default 5, --quick 1")
    add("--rounds", type=int, help="turns of each in a group: default 12, --quick 2")
    add("--seconds", type=float, default=0.5, help="length of a turn; --quick: a tenth")
    add("--quiet", type=float, default=1.0, help="share of the cores for others")
    add("--quick", action="store_true", help="few short turns: no figures to quote")
    add("--out", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    args.models = split_names(parser, args.models, dp_models.BY_NAME)
    args.groups = args.groups or (1 if args.quick else 5)
    args.rounds = args.rounds or (2 if args.quick else 12)
    args.seconds /= 10 if args.quick else 1
    return args


def check(name: str) -> None:
    """Compare gradients in eval mode, as in training each replica has its BatchNorm."""
    spec = dp_models.BY_NAME[name]
    inputs, targets = spec.make_batch(torch.Generator().manual_seed(0))
    found = paceline.check(
        spec.build().eval(), inputs, loss=lambda y: spec.loss(y, targets), replicas=N
    )
    if not found:
        sys.exit(f"{spec.title}: not timed\n{found}")


def measure(plan: Plan) -> dict[str, dict[str, object]]:
    import dp_models

    return run(plan, dp_models.BY_NAME)


def busy_seconds() -> float:
    """Return the CPU time of all processes without this one and its ended children."""
    words = Path("/proc/stat").read_text().split(maxsplit=9)
    user, nice, system, _idle, _disk, *more = map(int, words[1:9])
    busy = (user + nice + system + sum(more)) / 100
    for who in resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN:
        usage = resource.getrusage(who)
        busy -= usage.ru_utime + usage.ru_stime
    return busy


def share_of_others(call: Callable[[], object]) -> float:
    """Run `call`; return the share of the cores that other processes used meanwhile."""
    begin, busy = time.monotonic(), busy_seconds()
    call()
    seconds = (time.monotonic() - begin) * (os.cpu_count() or 1)
    return (busy_seconds() - busy) / seconds


def run_quiet_group(args: argparse.Namespace, name: str, n_cores: int) -> Group:
    """Run a group on quiet cores; repeat it while other processes use too much."""
    found: Group = {}
    while True:
        while args.quiet < 1 and share_of_others(partial(time.sleep, 2)) > args.quiet:
            pass
        group = partial(run_group, args, name, n_cores, found)
        share = share_of_others(group)
        print(f"{name}: others took {share:.0%}", file=sys.stderr, flush=True)
        if args.quiet >= 1 or share <= args.quiet:
            args.most_of_others = max(args.most_of_others, share)
            return found


def run_group(args: argparse.Namespace, name: str, n_cores: int, found: Group) -> None:
    plan = Plan(
        models=[name],
        contestants=[PLAIN, REPLICAS, RANKS],
        n_parts=N,
        n_cores=n_cores,
        rounds=args.rounds,
        turn_seconds=args.seconds,
    )
    rows = rows_of(paceline.launch(measure, N, plan, backend="gloo"), n_cores)
    found.update({(row.model, row.contestant): row for row in rows})


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def as_text(args: argparse.Namespace, groups: Sequence[Group], n_cores: int) -> str:
    lines = [
        *args.machine,
        f"{N} CPU replicas, and {N} ranks, on {n_cores} threads; {len(groups)} groups "
        f"of {args.rounds} rounds, turns of {args.seconds:g} s; other processes took "
        f"{args.most_of_others:.0%} of the cores at most",
        "",
        f"{'rows are of a replica':48}{'plain, ms':>10}{'plain/replicas':>20}"
        f"{'plain/ranks':>20}",
    ]
    for name in args.models:
        plain = median(group[name, PLAIN].step_ms for group in groups)
        line = f"{dp_models.BY_NAME[name].title:48}{plain:10.2f}"
        for contestant in REPLICAS, RANKS:
            ratios = [group[name, contestant].against_plain for group in groups]
            line += f"{spread([median(each) for each in ratios if each]):>20}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    described = {**machine.describe(), "environment": machine.environment()}
    args.machine, n_cores = machine_lines(described), torch.get_num_threads()
    for name in args.models:
        check(name)
    groups: list[Group] = []
    args.most_of_others = 0.0
    for number in range(args.groups):
        print(f"group {number + 1}, load {machine.load()}", file=sys.stderr, flush=True)
        groups.append({})
        for name in args.models:
            groups[-1].update(run_quiet_group(args, name, n_cores))
        text = as_text(args, groups, n_cores)
        (args.out / "dp.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
