"""Benchmark of data parallelism on CPUs: Paceline against torch's DDP over Gloo.

    python tests/bench/bench_ddp.py                  all but the manual ones
    python tests/bench/bench_ddp.py --quick          a minute or two: does it work?
    python tests/bench/bench_ddp.py --models mlp100m --malloc keep
    python tests/bench/bench_ddp.py --ranks 4        more ranks than cores
    python tests/bench/bench_ddp.py --models digits --only steps \\
        --contestants paceline,unrecorded     what the recorder costs
    python tests/bench/bench_ddp.py --apart --only steps
    python tests/bench/bench_ddp.py --ranks 4 --hosts 2 --rate 1gbit --only steps

What is measured, and how
-------------------------
steps       Whole training steps of several contestants that take turns in the same
            processes; `steps.py` describes what makes this fair.  Before timing, all
            contestants' gradients are compared with an average made by hand.
memory      PSS of a rank, with each contestant alone in separate processes.

A *group* is one set of fresh rank processes (a pair, with two ranks).  Each task is
repeated in `--pairs` groups, and the groups of all models are interleaved, so that a
slow quarter of an hour does not affect only one model.  Ratios are computed within a
group and summarised over groups; see `stats.py`.  Figures of a busy
machine are of little use: the load at the start of each group is part of the output.

Together or apart
-----------------
There are two ways to time steps, for two questions.  Other tasks are equal in both.

default     How much work is in each contestant's code?  All take turns in the same
            processes, within seconds of each other, so load and heap are equal for all
            and small differences show.  But the others' tensors keep the top of the
            heap in use, so glibc returns no memory, and a step that frees and allocates
            its gradients looks cheaper than it is for a user.
--apart     How long does a user's step take?  A user's processes hold one contestant,
            and so do these: a group is one set of fresh processes per contestant, one
            after another, in a random order for each group.  Steps now include the cost
            of malloc: if it trims the heap in each step, the next step has page faults
            for all pages (see the columns "system" and "faults").  The check of
            gradients, which would change the heap, runs before, once per model, in
            separate processes.  Contestants are minutes apart, so load differs more
            between them and intervals are wider.

No contestant is tuned: each has its defaults, one intra-op thread per rank and the same
environment.  `--malloc keep` changes glibc's thresholds for all contestants.

Writes ddp-<ranks>r-<malloc>[-apart].json and .txt under --out.  The .json has all raw
times and is written after each group; Ctrl-C reports the results so far.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import bench_models as models
import contestants
import report
from contestants import split_names
from runner import Bench

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.namespaces import Network

TASKS = ["steps", "memory"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    by_default = [spec.name for spec in models.ALL if not spec.by_hand]
    add = parser.add_argument
    add(
        "--models",
        default=",".join(by_default),
        help=f"all, or some of {', '.join(models.BY_NAME)}",
    )
    add(
        "--contestants",
        default=",".join(contestants.BY_DEFAULT),
        help=f"all, or some of {', '.join(contestants.WRAP)}",
    )
    add("--only", choices=TASKS, action="append", help="one task; may be repeated")
    add("--ranks", type=int, default=2)
    add("--hosts", type=int, help="number of network namespaces; needs root")
    add("--rate", help="rate of each host's link, as 1gbit; default: unlimited")
    add("--pairs", type=int, help="groups of processes: default 5, with --quick 1")
    add("--blocks", type=int, help="turns of each contestant in a group: default 8")
    add(
        "--apart",
        action="store_true",
        help="time the steps of each contestant in separate processes",
    )
    add("--malloc", choices=["default", "keep"], default="default")
    add("--quick", action="store_true", help="few short turns: no figures to quote")
    add("--timeout", type=float, default=300.0, help="seconds that a group may take")
    add("--out", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    args.models = split_names(parser, args.models, models.BY_NAME)
    args.contestants = split_names(parser, args.contestants, contestants.WRAP)
    args.only = args.only or TASKS
    args.pairs = args.pairs or (1 if args.quick else 5)
    args.blocks = args.blocks or (2 if args.quick else 8)
    if args.ranks < 2:
        parser.error("--ranks must be at least 2: there is nothing to reduce")
    if args.hosts and (args.ranks % args.hosts or args.hosts < 2):
        parser.error("--hosts must be 2 or more, and a divisor of --ranks")
    return args


def main() -> None:
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    network = Network(args.hosts) if args.hosts else None
    try:
        if network is not None:
            if args.rate:
                network.limit(
                    "tbf", "rate", args.rate, "burst", "64k", "latency", "50ms"
                )
            bench.namespaces = [
                network.names[rank * args.hosts // args.ranks]
                for rank in range(args.ranks)
            ]
        bench.run()
    finally:
        if network is not None:
            network.close()
    bench.write()
    text = report.as_text(bench.results)
    print(text)
    bench.path.with_suffix(".txt").write_text(text)
    print(f"written: {bench.path} and .txt")
    sys.exit(bool(bench.results["failures"]))


if __name__ == "__main__":
    main()
