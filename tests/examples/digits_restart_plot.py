"""Draw the effect of kills on a training: losses of two runs of `digits_restart.py`.

    python tests/examples/digits_restart_plot.py UNBROKEN BROKEN OUT.svg LABEL WORDS...

The example writes UNBROKEN and BROKEN with ``--losses``; BROKEN has a step twice that
was repeated after a restart.  LABEL is the label of BROKEN.  Each further argument
describes a restart.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl


def read(path: str) -> list[tuple[int, float]]:
    """Return the steps of a file, in the order in which they ran."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def draw(
    unbroken: list[tuple[int, float]],
    broken: list[tuple[int, float]],
    out: str,
    label: str,
    words: list[str],
) -> None:
    from matplotlib import pyplot as plt  # after use(): it picks the backend

    figure, axes = plt.subplots(figsize=(8, 3.0), layout="constrained")
    axes.plot(*zip(*unbroken, strict=True), color="#bbbbbb", lw=5, label="never broken")
    restarts = [k for k, (a, b) in enumerate(pairwise(broken), 1) if b[0] <= a[0]]
    for n, (begin, end) in enumerate(pairwise([0, *restarts, len(broken)])):
        axes.plot(
            *zip(*broken[begin:end], strict=True),
            color="#d55e00",
            lw=1,
            label=label if n == 0 else None,
        )
    for k, what in zip(restarts, words, strict=True):
        step, loss = broken[k - 1]
        axes.plot(step, loss, "x", color="#d55e00", ms=9, mew=2)
        axes.annotate(
            f"{what};\nstep {broken[k][0]} is next",
            (step, loss),
            textcoords="offset points",
            xytext=(8, 28),
            fontsize=8,
        )
    twice = {step for step, _ in broken}
    expected = dict(unbroken)
    off = max(abs(loss - expected[step]) for step, loss in broken)
    found = "the same, to the last bit" if off == 0 else f"the same within {off:.0e}"
    axes.set_title(
        f"{len(twice)} steps, {len(broken) - len(twice)} of them taken again: "
        f"every loss is {found}",
        fontsize=10,
        loc="left",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss on rank 0")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    mpl.use("Agg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "paceline"})
    draw(read(sys.argv[1]), read(sys.argv[2]), *sys.argv[3:5], sys.argv[5:])
