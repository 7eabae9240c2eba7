"""Sliders: one control, one chart, a state of it for each value.

The stored output is self-contained HTML: a range input, inline SVG in the
page's own colour and a few lines of script. It needs no kernel and no
network; without JavaScript it shows its first state. Where a kernel runs,
an ipywidgets control that calls ``state`` again is added below it.

The chart scales with the page while its text does not: curves are drawn in
a box of :data:`GRID` units that stretches, ticks and names are HTML.
"""

import html
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from bft_ref.notebook.facts import as_array, as_number, current
from bft_ref.notebook.figures import digest

GRID = (2400, 1200)  # units of the chart's box: finer than a screen
DASHES = ["", "9 5", "2 4", "12 4 2 4"]
LAYERS = ["dots", "line", "mark"]
Curves = Sequence[tuple[Any, Any, str]]


@dataclass(frozen=True)
class SliderState:
    """What a slider shows at one value.

    ``lines`` and ``points`` hold (x, y, label): arrays of equal length, or
    numbers for a single point, which carries its label in the chart.
    ``readout`` is the sentence shown, ``number`` the number in it at full
    precision. Raises ValueError where x and y differ in shape.
    """

    lines: Curves = ()
    points: Curves = ()
    readout: str = ""
    number: float = 0.0

    def __post_init__(self) -> None:
        as_number("number", self.number)
        for kind in ("lines", "points"):
            for x, y, label in getattr(self, kind):
                what = f"{kind} {label!r}"
                shapes = [as_array(what, v).shape for v in (x, y)]
                if shapes[0] != shapes[1] or len(shapes[0]) > 1:
                    raise ValueError(
                        f"{what}: expected x and y of one and the same "
                        f"length, got shapes {shapes[0]} and {shapes[1]}"
                    )


class Curve(NamedTuple):
    """One legend entry: ``kind`` is line, dots or mark."""

    kind: str
    label: str


class Box(NamedTuple):
    """The chart's limits; maps data to units of :data:`GRID`."""

    xlim: tuple[float, float]
    ylim: tuple[float, float]

    def units(self, x: Any, y: Any) -> np.ndarray:
        """Integer units (n, 2) of the finite points among x, y (n,)."""
        points = np.column_stack(
            [as_array("x", x).ravel(), as_array("y", y).ravel()]
        )
        points = points[np.isfinite(points).all(1)]
        low = np.array([self.xlim[0], self.ylim[1]])
        span = np.array(
            [self.xlim[1] - self.xlim[0], self.ylim[0] - self.ylim[1]]
        )
        units = (points - low) / span * GRID
        # Far outside the box one unit more or less is not seen.
        return np.clip(np.rint(units), -9 * GRID[0], 9 * GRID[0]).astype(int)


def slider(
    name: str,
    label: str,
    values: Iterable[float],
    state: Callable[[Any], SliderState],
    *,
    xlabel: str,
    ylabel: str,
    xlim: tuple[float, float],
    ylim: tuple[float, float],
    start: float | None = None,
    unit: str = "",
    tol: float = 1e-8,
) -> None:
    """Show a slider over ``values``; ``state(value)`` says what it shows.

    It begins at ``start``, one of ``values`` (the first by default), and
    writes ``unit`` behind each value. Numbers and curves of all states are
    kept as facts with tolerance ``tol``. Raises ValueError for fewer than
    two values, a start that is none of them, empty limits, or a state that
    draws nothing, and TypeError where ``state`` returns no SliderState.
    """
    from IPython.display import HTML, display

    settings = list(values)
    if len(settings) < 2:
        raise ValueError(f"values: expected two or more, got {len(settings)}")
    numbers = [as_number("values", value) for value in settings]
    first = 0
    if start is not None:
        if start not in settings:
            raise ValueError(f"start: expected one of values, got {start!r}")
        first = settings.index(start)
    box = Box(limits("xlim", xlim), limits("ylim", ylim))
    states = [checked(state(value), value) for value in settings]
    here = current()
    here.keep(
        f"slider:{name}",
        [as_number("number", shown.number) for shown in states],
        tol,
    )
    here.keep(
        f"slider:{name}:curves",
        np.concatenate([digest_of(shown, box) for shown in states]).tolist(),
        max(tol, 1e-6),
    )
    texts = [f"{number:.6g}{unit and ' '}{unit}" for number in numbers]
    rest = (texts, states, box, (xlabel, ylabel), first)
    display(HTML(render(name, label, *rest)))
    if live():

        def again(index: int) -> str:
            states[index] = checked(state(settings[index]), settings[index])
            return render(name, label, *rest[:-1], index, control=False)

        show_widget(label, texts, again, first)


def limits(name: str, given: tuple[float, float]) -> tuple[float, float]:
    """Two increasing numbers; an error that names ``name`` otherwise."""
    low, high = (as_number(name, value) for value in given)
    if not low < high:
        raise ValueError(f"{name}: expected low < high, got {given!r}")
    return low, high


def checked(shown: Any, value: float) -> SliderState:
    """``shown``, if it is a SliderState that draws something."""
    if not isinstance(shown, SliderState):
        raise TypeError(
            f"state: expected a SliderState at {value!r}, got "
            f"{type(shown).__name__}"
        )
    if not shown.lines and not shown.points:
        raise ValueError(f"state: nothing is drawn at {value!r}")
    if not shown.readout:
        raise ValueError(f"state: expected a readout at {value!r}")
    return shown


def digest_of(shown: SliderState, box: Box) -> np.ndarray:
    """A digest of all that a state draws, relative to the chart's limits."""
    scale = [max(abs(low), abs(high)) for low, high in (box.xlim, box.ylim)]
    parts = [
        as_array(label, data).ravel() / size
        for x, y, label in [*shown.lines, *shown.points]
        for data, size in zip((x, y), scale, strict=True)
    ]
    return digest(np.concatenate(parts))


def curves_of(states: Sequence[SliderState]) -> list[Curve]:
    """The legend of all states together, from the back to the front."""
    found: dict[Curve, None] = {}
    for shown in states:
        for _, _, label in shown.lines:
            found[Curve("line", label)] = None
        for x, _, label in shown.points:
            kind = "dots" if as_array(label, x).ndim else "mark"
            found[Curve(kind, label)] = None
    return sorted(found, key=lambda curve: LAYERS.index(curve.kind))


def drawn(shown: SliderState, curve: Curve, box: Box) -> np.ndarray:
    """Where a state draws a curve: integer units (n, 2), n = 0 if not."""
    group = shown.lines if curve.kind == "line" else shown.points
    for x, y, label in group:
        if label == curve.label and (
            curve.kind != "mark" or not as_array(label, x).ndim
        ):
            return box.units(x, y)
    return np.empty((0, 2), int)


def path(points: np.ndarray, kind: str) -> str:
    """SVG path data through ``points`` (n, 2), or a dot at each."""
    if not len(points):
        return ""
    steps = np.diff(points, axis=0)
    if kind == "line":
        steps = steps[(steps != 0).any(1)]
        parts = [f"{dx} {dy}" for dx, dy in steps]
        tail = "l" + " ".join(parts) if parts else "h0"
    else:
        tail = "h0" + "".join(f"m{dx} {dy}h0" for dx, dy in steps)
    text = f"M{points[0][0]} {points[0][1]}{tail}"
    return text.replace(" -", "-")


def beside(points: np.ndarray, below: bool) -> str:
    """CSS that puts the name of a single point next to it."""
    if not len(points):
        return "display:none"
    x, y = points[0] / GRID
    if not (0 <= x <= 1 and 0 <= y <= 1):
        return "display:none"
    below = y < 0.12 or (below and y < 0.85)
    across = "0" if x < 0.25 else "-100%" if x > 0.75 else "-50%"
    return (
        f"left:{100 * x:.1f}%;top:{100 * y:.1f}%;"
        f"transform:translate({across},{'8px' if below else '-130%'})"
    )


def ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Round numbers between the limits: (share of the way, text)."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(
        low, high
    )
    slack = 1e-9 * (high - low)
    inside = [t for t in found if low - slack <= t <= high + slack]
    texts = [f"{round(t, 12) + 0.0:.10g}" for t in inside]
    places = max(len(t.partition(".")[2]) for t in texts)
    if not any("e" in t for t in texts):
        texts = [f"{t + 0.0:.{places}f}" for t in inside]
    texts = [t.replace("-", "−") for t in texts]
    return [
        ((t - low) / (high - low), text)
        for t, text in zip(inside, texts, strict=True)
    ]


def strokes(curves: Sequence[Curve]) -> list[str]:
    """Class and style of each curve: lines and points differ twice over."""
    styles = []
    for i, curve in enumerate(curves):
        colour = f"stroke:var(--bft-{i % 6})"
        if curve.kind == "line":
            nth = sum(c.kind == "line" for c in curves[:i])
            dash = DASHES[nth % len(DASHES)]
            dash = f";stroke-dasharray:{dash}" if dash else ""
            styles.append(f'class="line" style="{colour}{dash}"')
        else:
            nth = sum(c.kind != "line" for c in curves[:i])
            shape = " square" if nth % 2 else ""
            styles.append(f'class="{curve.kind}{shape}" style="{colour}"')
    return styles


def views_of(
    settings: Sequence[str],
    states: Sequence[SliderState],
    box: Box,
    names: tuple[str, str],
) -> tuple[list[str], list[dict[str, Any]]]:
    """All path data, each once, and what the page shows at each setting."""
    curves = curves_of(states)
    paths: dict[str, int] = {}
    views = []
    for setting, shown in zip(settings, states, strict=True):
        units = [drawn(shown, curve, box) for curve in curves]
        both = list(zip(units, curves, strict=True))
        marks = [points for points, curve in both if curve.kind == "mark"]
        views.append(
            {
                "paths": [
                    paths.setdefault(path(points, curve.kind), len(paths))
                    for points, curve in both
                ],
                "names": [beside(p, bool(i % 2)) for i, p in enumerate(marks)],
                "setting": setting,
                "readout": shown.readout,
                "number": repr(as_number("number", shown.number)),
                "spoken": f"{setting}: {shown.readout}",
                "chart": f"Chart of {names[1]} against {names[0]}. "
                f"{shown.readout}",
            }
        )
    return list(paths), views


def chart(
    curves: Sequence[Curve],
    paths: Sequence[str],
    view: dict[str, Any],
    box: Box,
    names: tuple[str, str],
) -> str:
    """Legend, axes and curves in one view, as HTML."""
    styles = strokes(curves)
    both = list(zip(curves, styles, strict=True))
    shapes = "".join(
        f'<path data-curve {style} d="{paths[index]}"/>'
        for style, index in zip(styles, view["paths"], strict=True)
    )
    labels = [curve.label for curve in curves if curve.kind == "mark"]
    marks = "".join(
        f'<span class="name" style="{style}">{html.escape(label)}</span>'
        for style, label in zip(view["names"], labels, strict=True)
    )
    legend = "".join(
        f'<li><svg viewBox="0 0 34 12" aria-hidden="true"><path {style} '
        f'd="{"M1 6h32" if curve.kind == "line" else "M17 6h0"}"/></svg>'
        f"{html.escape(curve.label)}</li>"
        for curve, style in both
        if curve.kind != "mark"
    )
    legend = legend and f'<ul class="legend">{legend}</ul>\n'
    xticks, yticks = ticks(*box.xlim), ticks(*box.ylim)
    grid = "".join(
        [f"M{share * GRID[0]:.0f} 0v{GRID[1]}" for share, _ in xticks]
        + [f"M0 {(1 - share) * GRID[1]:.0f}h{GRID[0]}" for share, _ in yticks]
    )
    gutter = max(len(text) for _, text in yticks) + 1.5
    across = "".join(
        f'<span class="x-tick" style="left:{100 * share:.2f}%">{text}</span>'
        for share, text in xticks
    )
    up = "".join(
        f'<span style="top:{100 * (1 - share):.2f}%">{text}</span>'
        for share, text in yticks
    )
    return f"""\
{legend}<div class="y-name">{html.escape(names[1])}</div>
<div class="chart"><div class="y-ticks" style="width:{gutter}ch">{up}</div>
<div class="plot"><svg role="img" aria-label="{html.escape(view["chart"])}" \
viewBox="0 0 {GRID[0]} {GRID[1]}" preserveAspectRatio="none">\
<path class="grid" d="{grid}"/>{shapes}</svg>{marks}{across}</div></div>
<div class="x-name">{html.escape(names[0])}</div>"""


def render(
    name: str,
    label: str,
    settings: Sequence[str],
    states: Sequence[SliderState],
    box: Box,
    names: tuple[str, str],
    first: int,
    control: bool = True,
) -> str:
    """The slider as HTML, showing state ``first``; or its chart alone."""
    paths, views = views_of(settings, states, box, names)
    view = views[first]
    picture = chart(curves_of(states), paths, view, box, names)
    readout = html.escape(view["readout"])
    style = part("slider.css")
    if not control:
        return f"""\
<div class="bft-slider mathjax_ignore" data-on><style>{style}</style>
<div class="readout">{readout}</div>
{picture}
</div>"""
    data = json.dumps(
        {"paths": paths, "frames": views},
        ensure_ascii=False,
        separators=(",", ":"),
    )
    # One single-quoted attribute, which no notebook front end rewrites.
    packed = html.escape(data, quote=False).replace("'", "&#39;")
    title = html.escape(label)
    return f"""\
<div class="bft-slider mathjax_ignore tex2jax_ignore" \
data-name="{html.escape(name)}" data-index="{first}" \
data-value="{view["number"]}" data-frames='{packed}'>
<style>{style}</style>
<label class="control"><span class="control-text"><span>{title}</span>
<span class="setting">{html.escape(view["setting"])}</span></span>
<input type="range" min="0" max="{len(views) - 1}" step="1" value="{first}" \
aria-label="{title}" aria-valuetext="{html.escape(view["spoken"])}" disabled>
</label>
<output class="readout" aria-live="off">{readout}</output>
<noscript>Without JavaScript the slider stays at this value.</noscript>
{picture}
<script>{{{part("slider.js")}}}</script>
</div>"""


def part(name: str) -> str:
    """A file of this package, as text."""
    return (resources.files(__package__) / name).read_text("utf8").strip()


def live() -> bool:
    """Whether a reader's kernel runs this, and can show a widget."""
    if os.environ.get("BFT_FACTS"):
        return False  # a widget view beside HTML hides the HTML on a page
    from importlib.util import find_spec

    from IPython import get_ipython

    shell = get_ipython()
    return hasattr(shell, "kernel") and find_spec("ipywidgets") is not None


def show_widget(
    label: str,
    settings: Sequence[str],
    again: Callable[[int], str],
    first: int,
) -> None:
    """The same slider as an ipywidgets control, computed by the kernel."""
    import ipywidgets as widgets
    from IPython.display import display

    control = widgets.SelectionSlider(
        options=[(text, index) for index, text in enumerate(settings)],
        value=first,
        description=label,
        style={"description_width": "initial"},
        layout={"width": "100%", "max_width": "640px"},
    )
    view = widgets.HTML()

    def update(change: Any = None) -> None:
        view.value = again(control.value)

    control.observe(update, names="value")
    update()
    box = widgets.Accordion([widgets.VBox([control, view])])
    box.set_title(0, "The same, computed by this kernel as you move it")
    box.selected_index = None
    display(box)
