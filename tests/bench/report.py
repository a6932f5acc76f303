"""Summarise the figures of all groups, and print them as a table.

If a run with --apart was interrupted or a contestant failed, a group may lack it.  Each
figure is over the groups that have it, a ratio over those that have both.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

import contestants
from contestants import FLOOR, PACELINE, TORCH, TORCH_VIEW, UNRECORDED
from stats import median_with_interval, percentile

Figures = dict[str, Any]

RATIOS = [
    (TORCH, PACELINE),
    (TORCH_VIEW, PACELINE),
    (PACELINE, FLOOR),
    (TORCH, FLOOR),
    (PACELINE, UNRECORDED),
]


def median(values: list[float]) -> float:
    return percentile(values, 50)


def names_in(groups: list[Figures]) -> list[str]:
    """Return the contestants of these groups, in the order of their registry."""
    present = {name for group in groups for name in group["contestants"]}
    return [name for name in contestants.WRAP if name in present]


def ratios_of_p10(groups: list[Figures], a: str, b: str) -> list[float]:
    """Return the ratio of two contestants' p10 in each group that has both."""
    pairs = [
        (group["contestants"][a]["step_us"], group["contestants"][b]["step_us"])
        for group in groups
        if a in group["contestants"] and b in group["contestants"]
    ]
    return [percentile(ours, 10) / percentile(theirs, 10) for ours, theirs in pairs]


def summarise_contestant(groups: list[Figures], name: str) -> Figures:
    """Return a line of the table: wall times in ms, CPU time in ms, page faults.

    System time is a part of CPU time, and a mean over blocks; see `steps.py`.
    """
    runs = [g["contestants"][name] for g in groups if name in g["contestants"]]
    p10s = [percentile(run["step_us"], 10) / 1e3 for run in runs]
    return {
        "wall_min_ms": min(min(run["step_us"]) for run in runs) / 1e3,
        "wall_p10_ms": median(p10s),
        "wall_p10_best_ms": min(p10s),
        "wall_median_ms": median([median(run["step_us"]) / 1e3 for run in runs]),
        "cpu_median_ms": median([median(run["cpu_us"]) / 1e3 for run in runs]),
        "cpu_min_ms": min(min(run["cpu_us"]) for run in runs) / 1e3,
        "system_mean_ms": median([fmean(run["system_us"]) / 1e3 for run in runs]),
        "faults": median([median(run["faults"]) for run in runs]),
    }


def summarise_steps(groups: list[Figures]) -> Figures:
    """Return all figures of the table about a model.

    A ratio is that of two p10 of one group; its median and interval are over groups.
    `best` is the ratio of the best p10 of each, from any groups.
    """
    names = names_in(groups)
    lines = {name: summarise_contestant(groups, name) for name in names}
    ratios = {}
    for a, b in RATIOS:
        if of_groups := ratios_of_p10(groups, a, b):
            best = lines[a]["wall_p10_best_ms"] / lines[b]["wall_p10_best_ms"]
            cpu = lines[a]["cpu_median_ms"] / lines[b]["cpu_median_ms"]
            ratios[f"{a}/{b}"] = {
                "groups": of_groups,
                **asdict(median_with_interval(of_groups)),
                "best": best,
                "cpu": cpu,
            }
    return {"contestants": lines, "ratios": ratios}


def mode(settings: Figures) -> str:
    """Return how steps were timed; `bench_ddp.py` describes the consequences."""
    if settings["apart"]:
        return "--apart, each contestant alone in separate processes"
    return "together, contestants take turns in the same processes"


def header_lines(results: Figures) -> list[str]:
    settings = results["settings"]
    return [
        *machine_lines(results["machine"]),
        f"{settings['ranks']} ranks of 1 thread, malloc {settings['malloc']}, "
        f"{settings['pairs']} groups of processes",
        f"steps: {mode(settings)}",
    ]


def machine_lines(machine: Figures) -> list[str]:
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"load {machine['load_at_start']} at the start, {machine['date']}",
        f"Linux {machine['kernel']}, {machine['libc']}, Python {machine['python']}, "
        f"torch {machine['torch']}, paceline {machine['paceline'] or '-'}",
    ]
    if machine["environment"]:
        set_here = (f"{k}={v}" for k, v in machine["environment"].items())
        lines.append("environment: " + " ".join(set_here))
    return lines


def spread_of(groups: list[Figures]) -> str:
    """Name the interval beside a median: with few groups a bootstrap is their range."""
    return "95 %" if len(groups) > 5 else "least, most"


def model_lines(model: Figures) -> list[str]:
    groups, summary, memory = model["groups"], model["summary"], model["memory"]
    lines = [
        "",
        f"{model['title']}: {groups[0]['n_parameters']:,} parameters in "
        f"{groups[0]['n_tensors']} tensors, {len(groups)} groups, "
        f"load {min(g['load'] for g in groups)} to {max(g['load'] for g in groups)}",
        f"{'':13}{'wall of a step, ms':32}{'CPU, ms':>17}{'page':>7}"
        f"{'PSS, MiB, after':>19}",
        f"{'':10}{'min':>8}{'p10':>9}{'median':>9}{'best p10':>9}"
        f"{'all':>9}{'system':>8}{'faults':>7}{'backward':>9}{'zero_grad':>10}",
    ]
    for name, line in summary["contestants"].items():
        pss = memory.get(name, {})
        kept = [
            f"{pss[f'pss_after_{when}_mib']:.0f}" if pss else "-"
            for when in ("backward", "zero_grad")
        ]
        lines.append(
            f"{name:10}{line['wall_min_ms']:8.2f}{line['wall_p10_ms']:9.2f}"
            f"{line['wall_median_ms']:9.2f}{line['wall_p10_best_ms']:9.2f}"
            f"{line['cpu_median_ms']:9.2f}{line['system_mean_ms']:8.2f}"
            f"{line['faults']:7.0f}{kept[0]:>9}{kept[1]:>10}"
        )
    title = f"median over groups [{spread_of(groups)}]"
    lines.append(f"ratio of p10   {title:>36}   best p10   CPU")
    for name, ratio in summary["ratios"].items():
        interval = f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        lines.append(
            f"{name:24} {interval:>26} {ratio['best']:10.2f} {ratio['cpu']:5.2f}"
        )
    differences: dict[str, float] = {}
    for group in groups:
        for name, value in group["gradient_difference"].items():
            differences[name] = max(value, differences.get(name, 0.0))
    said = ", ".join(f"{name} {value:g}" for name, value in differences.items())
    lines.append(f"gradients off an average by hand, of the largest element: {said}")
    return lines


def as_text(results: Figures) -> str:
    lines = header_lines(results)
    for model in results["models"].values():
        if model["groups"]:
            lines += model_lines(model)
    lines += [f"FAILED {failure['what']}" for failure in results["failures"]]
    return "\n".join(lines) + "\n"
