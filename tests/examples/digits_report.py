"""The output of the examples with digits: progress, figures, a plot, a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

WARM_UP = 11  # the first steps are not timed: memory and threads are not settled
COLOURS = "#d55e00", "#0072b2"  # theirs and ours, safe for colour-blind readers


@dataclass(frozen=True)
class Side:
    """One of the two trainings, with the loss and the seconds of each step."""

    name: str
    loss: list[float]
    seconds: list[float]
    accuracy: float


@dataclass(frozen=True)
class Outcome:
    """Two trainings to compare, and how closely their losses must agree."""

    theirs: Side
    ours: Side
    title: str
    compared_steps: int
    loss_tolerance: float  # absolute
    parameter_difference: float
    checkpoint_difference: float

    @classmethod
    def load(cls, saved: dict[str, Any]) -> Outcome:
        sides = Side(**saved.pop("theirs")), Side(**saved.pop("ours"))
        return cls(*sides, **saved)

    @property
    def loss_difference(self) -> float:
        """The largest distance between the loss curves, over steps that must agree."""
        curves = np.subtract(self.theirs.loss, self.ours.loss)
        return float(np.abs(curves[: self.compared_steps]).max())

    def timed_ms(self) -> tuple[np.ndarray, np.ndarray]:
        """Step times in milliseconds after the warm-up: theirs and ours."""
        both = np.array([self.theirs.seconds, self.ours.seconds]) * 1e3
        return tuple(both[:, min(WARM_UP, both.shape[1] // 2) :])


def show_epoch(epoch: int, epochs: int, **losses: float) -> None:
    """Show the last loss of both trainings, as computed by this process, rank 0."""
    words = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    print(f"epoch {epoch + 1:2d}/{epochs}  loss: {words}", flush=True)


def report(outcome: Outcome) -> None:
    theirs, ours = outcome.theirs, outcome.ours
    print(f"\n{outcome.title}, {len(theirs.loss)} steps each")
    print(f"{'':16}{theirs.name:>10}{ours.name:>11}   {theirs.name}/{ours.name}")
    print(f"{'test accuracy':16}{theirs.accuracy:10.2%}{ours.accuracy:11.2%}")
    times = outcome.timed_ms()
    for name, value in ("median", 50), ("p10", 10):
        a, b = (np.percentile(one, value) for one in times)
        print(f"{'step, ' + name + ' ms':16}{a:10.2f}{b:11.2f}{a / b:11.2f}")
    print(
        f"largest difference of the losses in {outcome.compared_steps} steps: "
        f"{outcome.loss_difference:g}, allowed {outcome.loss_tolerance:g}\n"
        "largest difference of parameters and buffers: "
        f"{outcome.parameter_difference:g} at the end, "
        f"{outcome.checkpoint_difference:g} after saving and loading"
    )


def judge(outcome: Outcome, least_accuracy: float) -> list[str]:
    """Return the problems of the run; an empty list if all is well."""
    faults = [
        f"{side.name}: test accuracy {side.accuracy:.2%} is below {least_accuracy:.0%}"
        for side in (outcome.theirs, outcome.ours)
        if not side.accuracy >= least_accuracy
    ]
    if not outcome.loss_difference <= outcome.loss_tolerance:
        faults.append(
            f"the loss curves are {outcome.loss_difference:g} apart, "
            f"more than {outcome.loss_tolerance:g}"
        )
    if outcome.checkpoint_difference != 0:
        faults.append("the loaded checkpoint is not the model that was saved")
    return faults


def plot(outcome: Outcome, path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after use(): it picks the backend

    sides = (outcome.theirs, outcome.ours)
    times = outcome.timed_ms()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")

    # The curves coincide: draw a broad line below, and a thin one above it.
    for side, colour, width in zip(sides, COLOURS, (4, 1.2), strict=True):
        left.plot(side.loss, color=colour, linewidth=width, label=side.name)
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    left.set_title("The same training")

    both = np.concatenate(times)
    edges = np.linspace(both.min(), np.percentile(both, 97), 40)  # without stragglers
    for side, colour, taken in zip(sides, COLOURS, times, strict=True):
        median = np.median(taken)
        label = f"{side.name}: median {median:.2f} ms"
        right.hist(taken, edges, color=colour, alpha=0.65, label=label)
        right.axvline(median, color=colour, linestyle="--")
    right.set(xlabel="step time, ms", ylabel="steps")
    right.set_title(f"Time of a step, {outcome.title}")
    right.set_ylim(top=1.35 * right.get_ylim()[1])  # room for the legend

    for axes in left, right:
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"plot: {path}")
