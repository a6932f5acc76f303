"""Draws how fast each wrapper is against the plain module, model by model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline._cli.bench import models, steps
from paceline._cli.bench.report import StepRow

INSTALL = "matplotlib is not installed: pip install 'paceline[tools]'"
COLOURS = {steps.REPLICAS: "#e69f00", steps.TORCH: "#d55e00", steps.RANKS: "#0072b2"}
_ROW_INCHES, _FRAME_INCHES, _WIDTH_INCHES = 0.26, 1.5, 8.0


def formats() -> list[str]:
    """Return the kinds of files that can be written.

    Raises
    ------
    ImportError
        If matplotlib is not installed; it says what to do.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ImportError(INSTALL) from error
    return sorted(FigureCanvasAgg.get_supported_filetypes())


def draw(rows: Sequence[StepRow], note: str, path: str) -> None:
    """Write the picture.

    Parameters
    ----------
    rows : sequence of StepRow
        All that were measured.
    note : str
        What machine it was.
    path : str
        The file; its suffix says the format.
    """
    from matplotlib.figure import Figure  # no global state, and no window

    shown = [row for row in rows if row.against_plain is not None]
    names = list(dict.fromkeys(row.model for row in shown))
    height = _FRAME_INCHES + _ROW_INCHES * (len(shown) + len(names))
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    axes = figure.add_subplot()
    y, ticks, labels = 0, [], []
    for name in names:
        axes.text(
            0,
            y,
            f" {models.BY_NAME[name].title}",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=9,
            fontweight="bold",
        )
        for row in (row for row in shown if row.model == name):
            y += 1
            _draw_row(axes, y, row)
            ticks.append(y)
            labels.append(_label(row))
        y += 1
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_ylim(y - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.axvline(1, color="#bbbbbb", zorder=0)
    axes.set_xlabel("times as fast as the plain module on all cores or one GPU")
    axes.set_title(note, loc="left", fontsize=9, color="#555555")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [
        axes.plot([], [], "o", color=colour, label=steps.CONTESTANTS[name])[0]
        for name, colour in COLOURS.items()
        if any(row.contestant == name for row in shown)
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    figure.savefig(path, dpi=150)


def _draw_row(axes: Any, y: int, row: StepRow) -> None:
    assert row.against_plain is not None
    ratio, colour = row.against_plain, COLOURS[row.contestant]
    axes.plot([ratio.low, ratio.high], [y, y], color=colour, linewidth=3, alpha=0.4)
    axes.plot(ratio.median, y, "o", color=colour, markersize=6)
    axes.text(
        ratio.high,
        y,
        f"  {ratio.median:.2f}",
        va="center",
        fontsize=8,
        color="#333333",
    )


def _label(row: StepRow) -> str:
    kind = "replicas" if row.contestant == steps.REPLICAS else "ranks"
    return f"{row.n_parallel} {kind} x {row.n_threads}"
