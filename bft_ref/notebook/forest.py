"""Paired differences as the book shows them: a forest plot and a table.

In per cent of the rival, with 95 % intervals. What was fixed before the runs
were made is *confirmatory*, all else *exploratory*; the two differ in colour
and in marker. A hollow marker is one seed: its interval covers users only.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from bft_ref.notebook.figures import COLOURS
from bft_ref.recsys.metrics import Difference
from bft_ref.support.checks import choice, count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["confirmatory", "exploratory"]

#: kind -> colour and marker
MARKS: dict[str, tuple[str, str]] = {
    "confirmatory": (COLOURS[0], "o"),
    "exploratory": (COLOURS[1], "D"),
}
WIDTH = 27  # characters of a label before it breaks


@dataclass(frozen=True)
class Estimate:
    """A paired difference with its claim in words, one row of a forest.

    Raises: ValueError for a label without a letter, fewer than one seed, or
    another kind; TypeError for what is no ``Difference``.
    """

    label: str
    difference: Difference
    seeds: int
    kind: Kind = "exploratory"
    group: str | None = None

    def __post_init__(self) -> None:
        if not self.label.strip():
            raise ValueError("label: expected what is compared, got nothing")
        if not isinstance(self.difference, Difference):
            raise TypeError(
                "difference: expected a Difference, as paired_bootstrap "
                f"returns, got {type(self.difference).__name__}"
            )
        count("seeds", self.seeds, 1)
        choice("kind", self.kind, tuple(MARKS))

    @property
    def percent(self) -> tuple[float, float, float]:
        """The difference and its interval's ends, in per cent of the rival.

        The ends are NaN where a resample of the rival has mean 0.
        """
        found = self.difference
        ends = (found.relative, found.relative_low, found.relative_high)
        return tuple(100 * end for end in ends)  # type: ignore[return-value]

    @property
    def named(self) -> str:
        """The label with its number of seeds."""
        seeds = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        return f"{self.label} ({seeds})"

    def __str__(self) -> str:
        middle, low, high = self.percent
        if math.isnan(low):
            return f"{signed(middle)} (no interval)"
        return f"{signed(middle)} ({signed(low)} to {signed(high)})"


def signed(number: float) -> str:
    """One decimal and a sign; "–" for NaN, and no sign on zero."""
    if math.isnan(number):
        return "–"
    text = f"{number:+.1f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def verdict(difference: Difference, kind: Kind, seeds: int = 3) -> str:
    """What an interval says: "above zero", "below zero" or "open".

    "Open" is an interval that holds zero, its ends included, or none at all.
    An exploratory comparison says that it is one; from fewer than three
    seeds follows a direction, no verdict. Raises: ValueError for another
    kind or no seed.
    """
    choice("kind", kind, tuple(MARKS))
    count("seeds", seeds, 1)
    if difference.absolute_low > 0:
        said = "above zero"
    elif difference.absolute_high < 0:
        said = "below zero"
    else:
        return "open"
    if seeds < 3:
        said = f"direction only: {said}"
    return said if kind == "confirmatory" else f"{said}, exploratory"


def verdict_table(rows: Sequence[Estimate]) -> pd.DataFrame:
    """Claim → estimate → verdict, a row each; a notebook shows it as HTML.

    Rows of several groups are indexed by group and label, others by label.
    Raises: ValueError for no rows.
    """
    _some(rows)
    table = pd.DataFrame(
        {
            "difference in %": str(row),
            "seeds": row.seeds,
            "verdict": verdict(row.difference, row.kind, row.seeds),
        }
        for row in rows
    )
    if len({row.group for row in rows}) > 1:
        names = [(row.group or "", row.label) for row in rows]
        return table.set_index(pd.MultiIndex.from_tuples(names))
    return table.set_index(pd.Index([row.label for row in rows]))


def forest(
    rows: Sequence[Estimate],
    *,
    title: str | None = None,
    xlabel: str = "difference in %",
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw estimates with their intervals, first row first; give the axes.

    Rows of one ``group``, given one after the other, stand under its name.
    An interval that is much wider than the others is cut, and an arrow says
    so; the numbers at the right edge are the whole interval's. An estimate
    that has no interval is told there alone.
    Without ``ax`` the figure is as high as the rows need: ``.figure`` of what
    is returned. Raises: ValueError for no rows.
    """
    _some(rows)
    labels, places = _lines(rows)
    height = sum(1 + text.count("\n") for text, _ in labels)
    if ax is None:
        from matplotlib import pyplot as plt

        _, ax = plt.subplots(figsize=(6.4, 1.35 + 0.23 * height))
    low, high = window(rows)
    ax.axvline(0, color="#777777", linewidth=1, linestyle="-", zorder=1)
    for row, y in zip(rows, places, strict=True):
        _draw(ax, row, y, low, high)
    ax.set_xlim(low, high)
    ax.set_ylim(max(places) + 0.7, min(y for _, y in labels) - 0.7)
    ax.set_yticks([y for _, y in labels], [text for text, _ in labels])
    ax.tick_params(axis="y", length=0, labelsize=10)
    headings = {row.group for row in rows}
    for tick in ax.get_yticklabels():
        if tick.get_text() in headings:
            tick.set_fontweight("bold")
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.set(xlabel=xlabel, title=title or "")
    _legend(ax, rows)
    return ax


def window(rows: Sequence[Estimate]) -> tuple[float, float]:
    """The ends of the axis: zero and all with an interval, and room beside.

    An end of an interval lies inside too, unless it is four times as far
    from zero as the farthest estimate and as the median interval, or more.
    """
    percent = np.array([row.percent for row in rows])
    percent = percent[np.isfinite(percent).all(1)]
    far = np.median(np.abs(percent).max(1)) if len(percent) else 1.0
    reach = 4 * max(np.abs(percent[:, 0]).max(initial=0.0), far)
    shown = np.append(percent.clip(-reach, reach), 0.0)
    room = 0.06 * np.ptp(shown) or 1.0
    return float(shown.min() - room), float(shown.max() + room)


def _some(rows: Sequence[Estimate]) -> None:
    if not rows:
        raise ValueError("rows: expected at least one Estimate, got none")


def _lines(
    rows: Sequence[Estimate],
) -> tuple[list[tuple[str, float]], list[float]]:
    """Labels and headings with their heights; the heights of the rows."""
    labels: list[tuple[str, float]] = []
    places: list[float] = []
    y, group = 0.0, None
    for row in rows:
        if row.group != group:
            y += 0.35 if labels else 0.0
            if row.group is not None:
                labels.append((row.group, y))
                y += 1
        group = row.group
        text = textwrap.fill(row.named.replace(" seed", "\u00a0seed"), WIDTH)
        y += 0.5 * text.count("\n")
        labels.append((text, y))
        places.append(y)
        y += 1 + 0.5 * text.count("\n")
    return labels, places


def _draw(
    ax: "Axes", row: Estimate, y: float, low: float, high: float
) -> None:
    """One row: interval, marker, an arrow where it is cut, its numbers."""
    colour, marker = MARKS[row.kind]
    middle, start, end = row.percent
    line: dict[str, Any] = {"color": colour, "linestyle": "-", "zorder": 2}
    numbers = ax.text(1.05, y, str(row), fontsize=10)
    numbers.set(transform=ax.get_yaxis_transform(), va="center_baseline")
    if math.isnan(start):
        return
    ax.plot([max(start, low), min(end, high)], [y, y], **line)
    for cut, place, arrow in [
        (start < low, low, "<"),
        (end > high, high, ">"),
    ]:
        if cut:
            ax.plot([place], [y], arrow, **line, clip_on=False)
    face = colour if row.seeds > 1 else "white"
    ax.plot([middle], [y], marker, **line | {"zorder": 3}, mfc=face)


def _legend(ax: "Axes", rows: Sequence[Estimate]) -> None:
    """What the markers mean, beneath the axis, as far as they occur."""
    from matplotlib.lines import Line2D
    from matplotlib.transforms import offset_copy

    kinds = dict.fromkeys(row.kind for row in rows)
    entries: list[tuple[str, str, str, str]] = [
        (kind, *MARKS[kind], MARKS[kind][0]) for kind in kinds
    ]
    if any(row.seeds == 1 for row in rows):
        entries.append(("hollow: one seed, users only", "#444444", "o", "w"))
    handles = [
        Line2D([], [], color=colour, marker=mark, mfc=face, ls="", label=name)
        for name, colour, mark, face in entries
    ]
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=offset_copy(
            ax.transAxes,
            ax.get_figure(root=True),
            y=-42,
            units="points",
        ),
        ncols=len(handles),
        fontsize=10,
        handletextpad=0.1,
        columnspacing=1.2,
    )
