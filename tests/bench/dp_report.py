"""From the rounds of `bench_dp.py` to a summary, a text table and a plot.

A *round* is what a group is to `report.py`: everybody's turn under the same load.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import dp_models
import matplotlib as mpl
from dp_contestants import (
    BY_NAME,
    FLOOR,
    PACELINE_DDP,
    PLAIN,
    PLAIN_1,
    PROCESS,
    THREAD,
    TORCH_DDP,
)
from paceline._cli.bench.stats import median_with_interval, percentile
from report import machine_lines, median, names_in, plot_steps, ratios_of_p10

Figures = dict[str, Any]

RATIOS = [
    (PLAIN, PROCESS),
    (PLAIN_1, PROCESS),
    (TORCH_DDP, PROCESS),
    (PACELINE_DDP, PROCESS),
    (THREAD, PROCESS),
    (PROCESS, FLOOR),
    (PLAIN, THREAD),
    (PLAIN_1, THREAD),
    (TORCH_DDP, THREAD),
    (PLAIN, PACELINE_DDP),
    (TORCH_DDP, PACELINE_DDP),
]
COLOURS = {  # told apart by everybody; in the order of the registry
    PLAIN: "#000000",
    PLAIN_1: "#999999",
    TORCH_DDP: "#d55e00",
    PACELINE_DDP: "#56b4e9",
    PROCESS: "#0072b2",
    THREAD: "#cc79a7",
    FLOOR: "#009e73",
}
MIB = 2.0**20
STATES = {"forward": "after a forward", "backward": "after backward"}


def pooled(groups: list[Figures], name: str, key: str) -> list[Any]:
    """Some figure of a contestant from every round that has it."""
    return [g["contestants"][name][key] for g in groups if name in g["contestants"]]


def summarise(groups: list[Figures]) -> Figures:
    """All that the table says about the steps of a model.

    min, p10 and median are over all timed steps of all rounds; a ratio is taken of the
    two p10 of one round, and its median and interval are over rounds.
    """
    names = names_in(groups, BY_NAME)
    lines = {}
    for name in names:
        times = [us for block in pooled(groups, name, "step_us") for us in block]
        lines[name] = {
            "min_ms": min(times) / 1e3,
            "p10_ms": percentile(times, 10) / 1e3,
            "median_ms": median(times) / 1e3,
            "cpu_ms": median(pooled(groups, name, "cpu_us")) / 1e3,
        }
    ratios = {}
    for a, b in RATIOS:
        if of_rounds := ratios_of_p10(groups, a, b):
            ratios[f"{a}/{b}"] = {
                **asdict(median_with_interval(of_rounds)),
                "min": lines[a]["min_ms"] / lines[b]["min_ms"],
                "median_step": lines[a]["median_ms"] / lines[b]["median_ms"],
                "cpu": lines[a]["cpu_ms"] / lines[b]["cpu_ms"],
            }
    return {"contestants": lines, "ratios": ratios}


def header_lines(results: Figures) -> list[str]:
    """Machine, versions and settings, and who is who."""
    settings = results["settings"]
    malloc = {
        "keep": "told to keep freed memory, in all processes alike",
        "default": "as it is, except in Paceline's workers, which set their own",
    }
    return [
        *machine_lines(results["machine"]),
        f"malloc {malloc[settings['malloc']]}; ranks of DDP "
        + ("pinned to a core each" if settings["pin"] else "not pinned"),
        *(f"{entry.name:10}{entry.what}" for entry in BY_NAME.values()),
    ]


def model_lines(model: Figures) -> list[str]:
    """The table of one model."""
    groups, summary = model["groups"], model["summary"]
    n_steps = len(next(iter(groups[0]["contestants"].values()))["step_us"])
    lines = [
        "",
        f"{model['title']}: {model['n_parameters']:,} parameters in "
        f"{model['n_tensors']} tensors",
        f"{len(groups)} rounds of {n_steps} steps each, "
        f"load {min(g['load'] for g in groups)} to {max(g['load'] for g in groups)}",
        f"{'':10}{'wall of a step, ms':>27}{'CPU, ms':>10}{'start':>8}"
        f"{'processes':>11}{'gradients':>11}",
        f"{'':10}{'min':>9}{'p10':>9}{'median':>9}{'all':>10}{'s':>8}"
        f"{'x threads':>11}{'off by':>11}",
    ]
    for name, line in summary["contestants"].items():
        built = model["built"][name]
        n_processes = built[-1]["n_processes"] * BY_NAME[name].ranks
        off = model["differences"].get(name)
        lines.append(
            f"{name:10}{line['min_ms']:9.3f}{line['p10_ms']:9.3f}"
            f"{line['median_ms']:9.3f}{line['cpu_ms']:10.3f}"
            f"{median([one['start_s'] for one in built]):8.2f}"
            f"{n_processes:7} x {built[-1]['threads']}"
            f"{'-' if off is None else format(off, '.1g'):>11}"
        )
    lines.append(
        f"{'ratio':22}{'p10, median over rounds [95 %]':>32}{'of min':>9}"
        f"{'of median':>11}{'CPU':>7}"
    )
    for name, ratio in summary["ratios"].items():
        interval = f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        lines.append(
            f"{name:22}{interval:>32}{ratio['min']:9.2f}{ratio['median_step']:11.2f}"
            f"{ratio['cpu']:7.2f}"
        )
    if more := fixed_cost_us(groups):
        lines.append(
            f"fixed cost, {PROCESS} - {FLOOR}: {more['median']:.0f} us "
            f"[{more['low']:.0f}, {more['high']:.0f}] of p10, over rounds"
        )
    return lines


def fixed_cost_us(groups: list[Figures]) -> dict[str, float]:
    """What the process engine takes beyond the floor, in each round."""
    both = [g["contestants"] for g in groups if {PROCESS, FLOOR} <= {*g["contestants"]}]
    if not both:
        return {}
    more = [
        percentile(one[PROCESS]["step_us"], 10) - percentile(one[FLOOR]["step_us"], 10)
        for one in both
    ]
    return asdict(median_with_interval(more))


def memory_lines(memory: Figures) -> list[str]:
    """The table of memory."""
    small, big = dp_models.SMALL, dp_models.BIG
    one = next(iter(memory.values()))
    n_bytes = 4 * (one[big.name]["n_parameters"] - one[small.name]["n_parameters"])
    lines = [
        "",
        f"Memory of all processes, PSS in MiB, with {big.title} and {small.title};",
        f"x: their difference in multiples of the parameters ({n_bytes / MIB:.0f} MiB);"
        " malloc as it is by default",
        f"{'':10}" + "".join(f"{words:>26}" for words in STATES.values()),
        f"{'':10}" + f"{'big':>10}{'small':>9}{'x':>7}" * len(STATES),
    ]
    for name, found in memory.items():
        line = f"{name:10}"
        for state in STATES:
            pss = found[big.name][state], found[small.name][state]
            times = (pss[0] - pss[1]) * MIB / n_bytes
            line += f"{pss[0]:10.0f}{pss[1]:9.0f}{times:7.2f}"
        lines.append(line)
    return lines


def as_text(results: Figures) -> str:
    """Everything as a plain text table."""
    lines = header_lines(results)
    for model in results["models"].values():
        if model["groups"]:
            lines += model_lines(model)
    if results["memory"]:
        lines += memory_lines(results["memory"])
    lines += [f"FAILED {failure['what']}" for failure in results["failures"]]
    return "\n".join(lines) + "\n"


def plot(results: Figures, path: Path) -> None:
    """Draw step times relative to the plain module with all threads."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after use(): it picks the backend

    models = [m for m in results["models"].values() if m["groups"]]
    if not models:
        return
    figure, axes = plt.subplots(figsize=(8, 1.5 + len(models)), layout="constrained")
    plot_steps(axes, models, COLOURS, PLAIN)
    axes.set_xscale("log")
    limits = axes.get_xlim()
    ticks = [0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlim(limits)
    axes.minorticks_off()
    machine = results["machine"]
    figure.suptitle(
        f"DataParallel, 2 replicas on {machine['cores']} cores, {machine['cpu']}, "
        f"torch {machine['torch']}, malloc {results['settings']['malloc']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
