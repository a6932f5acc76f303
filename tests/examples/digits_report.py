"""What `digits_ddp.py` shows: progress, a few lines of figures, a plot, a verdict."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import matplotlib as mpl
import numpy as np
from tqdm import tqdm

WARM_UP = 11  # the first steps are not timed: memory and threads are still settling
TORCH_COLOUR, PACELINE_COLOUR = "#e69f00", "#0072b2"  # told apart by everybody


@dataclass(frozen=True)
class Outcome:
    """What rank 0 hands to the parent process."""

    ranks: int
    torch_loss: list[float]
    paceline_loss: list[float]
    torch_seconds: list[float]
    paceline_seconds: list[float]
    torch_accuracy: float
    paceline_accuracy: float
    parameter_difference: float
    checkpoint_difference: float

    @property
    def compared_steps(self) -> int:
        """How many losses must agree, and how nearly: see `loss_tolerance`."""
        return len(self.torch_loss) if self.ranks <= 2 else 40

    @property
    def loss_tolerance(self) -> float:
        """How far the two loss curves may be apart.

        A sum of two numbers is the same in either order: up to two ranks, every bit is
        the same to the end.  With more, the order of summation shows in the last bit of
        a gradient; training amplifies that from step to step, so only the beginning can
        be compared, up to rounding.
        """
        return 0.0 if self.ranks <= 2 else 1e-5

    @property
    def loss_difference(self) -> float:
        """The largest distance between the two loss curves, where they must agree."""
        curves = np.subtract(self.torch_loss, self.paceline_loss)
        return float(np.abs(curves[: self.compared_steps]).max())

    def timed_ms(self) -> tuple[np.ndarray, np.ndarray]:
        """Step times in milliseconds after the warm-up: torch's and Paceline's."""
        both = np.array([self.torch_seconds, self.paceline_seconds]) * 1e3
        return tuple(both[:, min(WARM_UP, both.shape[1] // 2) :])


class Progress:
    """A progress bar on a terminal, one plain line an epoch elsewhere."""

    def __init__(self, epochs: int, *, show: bool) -> None:
        self.show = show
        self.epochs = epochs
        on_terminal = show and sys.stderr.isatty()
        self.bar = tqdm(total=epochs, unit="epoch") if on_terminal else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def epoch_done(self, epoch: int, torch_loss: float, paceline_loss: float) -> None:
        """Show the last loss of both, as rank 0 saw it."""
        if self.bar is not None:
            self.bar.set_postfix(
                torch=f"{torch_loss:.4f}", paceline=f"{paceline_loss:.4f}"
            )
            self.bar.update()
        elif self.show:
            print(
                f"epoch {epoch + 1:2d}/{self.epochs}  rank 0's loss: "
                f"torch {torch_loss:.4f}, paceline {paceline_loss:.4f}",
                flush=True,
            )


def report(outcome: Outcome) -> None:
    """Print accuracy, agreement and step times."""
    theirs, ours = outcome.timed_ms()
    print(f"\n{outcome.ranks} ranks, {len(outcome.torch_loss)} steps each")
    print("                     torch   paceline   torch/paceline")
    print(
        f"test accuracy     {outcome.torch_accuracy:8.2%}   "
        f"{outcome.paceline_accuracy:8.2%}"
    )
    for name, value in ("median", 50), ("p10", 10):
        a, b = np.percentile(theirs, value), np.percentile(ours, value)
        print(f"step, {name + ' ms':10}  {a:8.2f}   {b:8.2f}   {a / b:8.2f}")
    n_compared = min(outcome.compared_steps, len(outcome.torch_loss))
    print(
        f"largest difference of the losses in {n_compared} steps: "
        f"{outcome.loss_difference:g}, allowed {outcome.loss_tolerance:g}\n"
        "largest difference of parameters and buffers: "
        f"{outcome.parameter_difference:g} at the end, "
        f"{outcome.checkpoint_difference:g} after saving and loading"
    )


def judge(outcome: Outcome, least_accuracy: float) -> list[str]:
    """Every reason why the run is not as it should be; empty if all is well."""
    faults = []
    for name in "torch", "paceline":
        reached = getattr(outcome, f"{name}_accuracy")
        if not reached >= least_accuracy:
            faults.append(
                f"{name}: test accuracy {reached:.2%} is below {least_accuracy:.0%}"
            )
    if not outcome.loss_difference <= outcome.loss_tolerance:
        faults.append(
            f"the loss curves are {outcome.loss_difference:g} apart, "
            f"more than {outcome.loss_tolerance:g}"
        )
    if outcome.checkpoint_difference != 0:
        faults.append("the loaded checkpoint is not the model that was saved")
    return faults


def plot(outcome: Outcome, path: Path) -> None:
    """Draw both loss curves and the distribution of both step times."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after use(): it picks the backend

    theirs, ours = outcome.timed_ms()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")

    # One curve lies on the other: a broad line below, a thin one above it.
    left.plot(outcome.torch_loss, color=TORCH_COLOUR, linewidth=4, label="torch")
    left.plot(
        outcome.paceline_loss, color=PACELINE_COLOUR, linewidth=1.2, label="paceline"
    )
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    left.set_title("The same training")

    both = np.concatenate([theirs, ours])
    edges = np.linspace(both.min(), np.percentile(both, 97), 40)  # without stragglers
    named = (("torch", theirs, TORCH_COLOUR), ("paceline", ours, PACELINE_COLOUR))
    for name, times, colour in named:
        median = np.median(times)
        label = f"{name}: median {median:.2f} ms"
        right.hist(times, edges, color=colour, alpha=0.65, label=label)
        right.axvline(median, color=colour, linestyle="--")
    right.set(xlabel="step time, mean over ranks, ms", ylabel="steps")
    right.set_title(f"Time of a step, {outcome.ranks} ranks")

    for axes in left, right:
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"plot: {path}")
