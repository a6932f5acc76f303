"""Draw docs/speed.svg, the picture of the README, from a text of results/.

    python tests/bench/plot_readme.py            # writes docs/speed.svg

A dot is the step time of a contestant as a multiple of the step without communication,
with its interval over groups of processes.  This script measures nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from contestants import FLOOR, PACELINE, TORCH
from stats import Interval

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "2026-11-21-2cores-apart.txt"
PICTURE = HERE.parents[1] / "docs" / "speed.svg"

NAMES = {
    TORCH: "torch's DistributedDataParallel",
    PACELINE: "paceline.DistributedDataParallel",
}
COLOURS = {TORCH: "#d55e00", PACELINE: "#0072b2"}  # safe for colour-blind readers


@dataclass(frozen=True)
class Model:
    """The ratios of a model's step times, by the two names compared."""

    title: str
    ratios: dict[tuple[str, str], Interval]


def read(text: str) -> tuple[str, list[Model]]:
    """Return the lines about the machine, and the models of a text of results."""
    head, *parts = text.strip().split("\n\n")
    models = []
    for part in parts:
        title = part.split(":")[0]
        found = re.findall(
            r"^(\S+)/(\S+) +([\d.]+) \[([\d.]+), ([\d.]+)\]", part, re.MULTILINE
        )
        ratios = {(a, b): Interval(*map(float, n)) for a, b, *n in found}
        models.append(Model(title, ratios))
    return head, models


def draw(head: str, models: list[Model], path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after use(): it picks the backend

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "paceline"})
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    for row, model in enumerate(models):
        draw_model(axes, row, model)
    axes.set_yticks(range(len(models)), [model.title for model in models])
    axes.set_ylim(len(models) - 0.6, -0.4)
    axes.axvline(1, color="#999999", zorder=0)
    axes.set_xlim(0.85, 3.3)
    axes.set_xlabel("time of a training step; 1 = the same step without communication")
    axes.legend(frameon=False, loc="center right", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    # At the left edge of the figure: the axes are too narrow for it.
    figure.suptitle(note_of(head), x=0.01, ha="left", fontsize=8, color="#555555")
    metadata = {"Date": None, "Title": "Step times of torch and of Paceline"}
    figure.savefig(path, metadata=metadata, facecolor="white")
    plt.close(figure)


def draw_model(axes: Any, row: int, model: Model) -> None:
    """Draw a row: two dots, the line between them, and the speedup."""
    dots = {name: model.ratios[name, FLOOR] for name in NAMES}
    ends = [dots[name].median for name in NAMES]
    axes.plot(ends, [row, row], color="#dddddd", linewidth=5, zorder=1)
    for name, spread in dots.items():
        axes.errorbar(
            spread.median,
            row,
            xerr=[[spread.median - spread.low], [spread.high - spread.median]],
            fmt="o",
            color=COLOURS[name],
            capsize=3,
            label=NAMES[name] if row == 0 else None,
        )
    ratio = model.ratios[TORCH, PACELINE]
    axes.annotate(
        f"{ratio.median:.2f} times as fast",
        (max(dots[TORCH].high, ends[0]), row),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
    )


def note_of(head: str) -> str:
    machine, software, mode = head.splitlines()[:3]
    cpu = ", ".join(machine.split(", ")[:2])
    torch = re.search(r"torch [\d.]+", software)
    assert torch is not None, software
    groups = re.search(r"\d+ groups", mode)
    assert groups is not None, mode
    where = f"{mode.split(',')[0]} on {cpu}; {torch[0]} with Gloo"
    return f"{where}; bars: least and most of {groups[0]}"


if __name__ == "__main__":
    draw(*read(RESULTS.read_text(encoding="utf-8")), PICTURE)
