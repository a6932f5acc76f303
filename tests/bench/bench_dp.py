"""Benchmark of DataParallel on CPU: against the plain module and against DDP.

    python tests/bench/bench_dp.py                   all models
    python tests/bench/bench_dp.py --quick           some minutes: does it work?
    python tests/bench/bench_dp.py --models mlp --rounds 30
    python tests/bench/bench_dp.py --models lstm --add   a piece more of an earlier run
    python tests/bench/bench_dp.py --only memory

What is measured, and how
-------------------------
steps   Whole training steps on the same whole batch: zero_grad() with its default,
        forward, loss, backward, SGD.  Ranks of DDP get half of the batch each.
        Before anything is timed, the gradients of three steps are compared with those
        of the bare module.
start   Construction and the first forward, less a plain forward.  What a rank of DDP
        takes to start is not in it: its interpreter, torch, the process group.
memory  PSS of all processes of a contestant, with a model of 100 MB and one of next to
        nothing; the difference is what parameters and gradients take.

Each contestant is a persistent process of its own, or two for DDP, beside the workers
that it starts itself.  In every round each takes one turn, in an order that is shuffled
anew; meanwhile the others are blocked in a read and take nothing.  A turn begins with
some untimed steps.  Step times of ranks are averaged, CPU time is summed over all
processes of the contestant, workers included.

A ratio is formed of the two 10th percentiles of one round, since its turns are seconds
apart, under the same load.  It is summarised over rounds, with a bootstrap interval.
`--groups` starts all processes anew: one start may be luckier than another with its
memory, of which the rounds of a single group would know nothing.

`floor` is no wrapper: it runs half of the batch on one thread, between two autograd
nodes that do nothing, and joins the outputs with the other half's, which is there at
once.  No design that cuts the remote replica out of the graph can be faster.

No contestant is tuned.  `plain` and DataParallel find all cores and divide them as they
like, the others have one thread a process.  `--pin` binds the ranks of DDP to a core
each.  glibc's thresholds are the same for all: with `--malloc keep`, the default here,
freed memory is kept in every process, as Paceline's workers ask for it in any case.
For the memory alone they are left as they are, so that what is free is given back.

Writes dp-<malloc>[-pin].json, .txt and .png under --out.  The .json has all raw times
and is written after each group; Ctrl-C reports what there is by then.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import dp_contestants
import dp_models
import dp_report
from dp_runner import Bench
from options import present_names, split_names

TASKS = ["steps", "memory"]


def parse_arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__ or "", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", default="all", help="default: " + ",".join(dp_models.BY_NAME))
    add("--contestants", help="default: " + ",".join(dp_contestants.BY_NAME))
    add("--only", choices=TASKS, action="append", help="one task; may be repeated")
    add("--rounds", type=int, help="turns of each in a group: default 10, --quick 2")
    add("--groups", type=int, help="sets of fresh processes: default 2, --quick 1")
    add("--malloc", choices=["default", "keep"], default="keep")
    add("--pin", action="store_true", help="bind each rank of DDP to a core")
    add("--quick", action="store_true", help="few short turns: no figures to quote")
    add("--add", action="store_true", help="go on with the file under --out")
    add("--timeout", type=float, default=120.0, help="seconds that an answer may take")
    add("--out", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    args.models = split_names(parser, args.models, dp_models.BY_NAME)
    args.contestants = present_names(
        parser, args.contestants, dp_contestants.BY_NAME, dp_contestants.why_missing
    )
    args.only = args.only or TASKS
    args.rounds = args.rounds or (2 if args.quick else 10)
    args.groups = args.groups or (1 if args.quick else 2)
    return args


def main() -> None:
    """Run, print, and exit with 1 when something failed."""
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    bench.run()
    bench.write()
    text = dp_report.as_text(bench.results)
    print(text)
    bench.path.with_suffix(".txt").write_text(text)
    dp_report.plot(bench.results, bench.path.with_suffix(".png"))
    print(f"written: {bench.path} and .txt, .png")
    sys.exit(bool(bench.results["failures"]))


if __name__ == "__main__":
    main()
