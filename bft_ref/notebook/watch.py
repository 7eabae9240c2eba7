"""Watch a layer believe: eight readings, how noisy each is, one layer.

A reader chooses a reading, says how noisy it is, and sees what the layer
makes of that beside a plain one, which cannot be told. The stored output is
self-contained HTML: it needs no kernel and no network; without JavaScript it
shows its first state. What its script computes is :func:`believed`.
"""

import html
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bft_ref import Belief, discount, kriging_weights, update
from bft_ref.kriging import dispersion, effective_sample_size
from bft_ref.notebook.facts import current
from bft_ref.notebook.sliders import part
from bft_ref.reml import log_precision, observation_variance
from bft_ref.support import checks

READINGS = [20.6, 21.1, 20.9, 21.3, 23.9, 21.0, 21.2, 20.7]  # degrees
ODD = READINGS.index(max(READINGS))
REACH = 3.0  # hours within which readings are alike
USUAL = 4  # the place of 0.3 degrees among LEVELS
LEVELS = [0.3 * 2 ** ((step - USUAL) / 4) for step in range(18)]  # degrees
DRIFTS = [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8]  # √Q, degrees
DRIFT = 2
PARTS = ("kriging", "reml", "update", "noise")


class Watched(NamedTuple):
    """What a layer makes of T readings: arrays (T,)."""

    attention: np.ndarray  #: the mean weight that a reading gets from all
    n: np.ndarray  #: effective sample size of what it hears
    gain: np.ndarray  #: K, how far it moves towards what it hears
    state: np.ndarray  #: afterwards, in degrees
    deviation: np.ndarray  #: its standard deviation afterwards, in degrees


def scores(tokens: int) -> torch.Tensor:
    """Readings near in time are alike: −(i − j)²/(2·REACH²), (T, T)."""
    hours = torch.arange(tokens, dtype=torch.float64)
    return -(hours[:, None] - hours).square() / (2 * REACH**2)


def believed(
    readings: Sequence[float], deviations: Sequence[float], drift: float
) -> Watched:
    """One layer without matrices: kriging, REML, prior, update, noise.

    A token's value is its state, the innovation is z − h, and the network
    leaves a state where it is: precision is lost by Q = drift² alone.

    Shapes: ``readings``, ``deviations`` (T,), in degrees, as ``drift``.
    Equations (3.15), (4.1), (4.2), (5.8), (6.3), (6.4) and (8.1).
    """
    h = torch.tensor(readings, dtype=torch.float64)
    log = -2 * torch.tensor(deviations, dtype=torch.float64).log()
    weights = kriging_weights(scores(len(h)), log)
    n = effective_sample_size(weights)
    spread = dispersion(weights, h[:, None]).squeeze(-1)
    heard = log_precision(
        observation_variance(spread, n, weights @ (-log).exp())
    )
    after, moved = update(Belief(h, log), weights @ h - h, heard)
    noise = torch.tensor(drift, dtype=torch.float64).square().log()
    deviation = (-discount(after.log_precision, noise) / 2).exp()
    found = (weights.mean(0), n, moved, after.mean, deviation)
    return Watched(*(x.numpy() for x in found))


def plain(readings: Sequence[float]) -> Watched:
    """A layer that takes all readings for equally good, and moves half way.

    That is a residual connection, h + z, over two, which a norm takes off.
    Shapes: ``readings`` (T,), in degrees. It knows no deviation: NaN.
    """
    h = torch.tensor(readings, dtype=torch.float64)
    weights = kriging_weights(scores(len(h)), torch.zeros_like(h))
    found = (
        weights.mean(0),
        effective_sample_size(weights),
        torch.full_like(h, 0.5),
        (h + weights @ h) / 2,
        torch.full_like(h, torch.nan),
    )
    return Watched(*(x.numpy() for x in found))


# The picture: WIDTH × HEIGHT units for each layer. Its upper part are the
# readings; below it are strips of bars, one for each of STRIPS.
WIDTH, HEIGHT = 400, 432
FIRST, STEP = 66, 44  # the columns of the readings
LOWEST, HIGHEST, TOP, GROUND = 18.0, 26.0, 12, 196
STRIPS = {  # label, baseline, value that is BAR high, part
    "attention": ("attention that it gets", 272, 0.3, "kriging"),
    "n": ("n: how many it hears", 346, 8.0, "reml"),
    "gain": ("gain K: how far it moves", 420, 1.0, "update"),
}
BAR = 44


def height(value: float) -> float:
    """Where degrees are in the picture, within its upper part."""
    inside = min(max(value, LOWEST), HIGHEST)
    share = (inside - LOWEST) / (HIGHEST - LOWEST)
    return GROUND - share * (GROUND - TOP)


def dots(values: Iterable[float], aside: int) -> str:
    """A dot for each reading, ``aside`` of the middle of its column."""
    return "".join(
        f"M{FIRST + STEP * i + aside} {height(v):.2f}h0"
        for i, v in enumerate(values)
    )


def errors(
    values: Iterable[float], deviations: Iterable[float], aside: int
) -> str:
    """A bar from one deviation below to one above each value."""
    return "".join(
        f"M{FIRST + STEP * i + aside} {height(v - s):.2f}V{height(v + s):.2f}"
        for i, (v, s) in enumerate(zip(values, deviations, strict=True))
        if np.isfinite(s)
    )


def bars(values: Iterable[float], ground: int, full: float) -> str:
    """A bar for each value, BAR units high at ``full`` or the largest."""
    values = [*values]
    scale = BAR / max(full, *values)
    return "".join(
        f"M{FIRST + STEP * i} {ground}V{ground - scale * v:.2f}"
        for i, v in enumerate(values)
    )


def spoken(strip: str, value: float) -> str:
    """A strip's value, as it stands beside the strip's name."""
    return f"{100 * value:.0f} %" if strip == "attention" else f"{value:.2f}"


def panel(
    title: str,
    name: str,
    deviations: Sequence[float],
    shown: Watched,
    chosen: int,
    lit: Sequence[str],
) -> str:
    """One layer's picture, as HTML."""
    grid = "".join(f"M44 {height(v):.2f}H392" for v in range(18, 27, 2))
    ticks = "".join(
        f'<text class="tick" x="38" y="{height(v) + 5:.2f}">{v}°</text>'
        for v in range(18, 27, 2)
    )
    known = "lit" if "noise" in lit and name == "filter" else ""
    strips = ""
    for strip, (label, ground, full, of) in STRIPS.items():
        values = getattr(shown, strip)
        mark = "lit" if of in lit else ""
        strips += (
            f'<g class="{mark}"><text x="44" y="{ground - BAR - 8}">{label}'
            f'</text><text class="value" data-value="{strip}" x="392" '
            f'y="{ground - BAR - 8}">{spoken(strip, values[chosen])}</text>'
            f'<path class="ground" d="M44 {ground}H392"/><path class="bar" '
            f'data-bar="{strip}" d="{bars(values, ground, full)}"/></g>'
        )
    columns = "".join(
        f'<rect class="column" data-token="{i}" x="{FIRST + STEP * (i - 0.5)}"'
        f' y="0" width="{STEP}" height="{HEIGHT}"/>'
        for i in range(len(READINGS))
    )
    return f"""\
<figure data-panel="{name}"><figcaption>{title}</figcaption>
<svg role="img" aria-label="{title}: eight readings before and after, and \
bars below them" viewBox="0 0 {WIDTH} {HEIGHT}">
<rect class="chosen" x="{FIRST + STEP * (chosen - 0.5)}" y="0" \
width="{STEP}" height="{HEIGHT}"/><path class="grid" d="{grid}"/>{ticks}
<path class="error" data-error="before" \
d="{errors(READINGS, deviations, -8) if name == "filter" else ""}"/>\
<path class="dot" d="{dots(READINGS, -8)}"/>
<g class="after {known}"><path class="error" data-error="after" \
d="{errors(shown.state, shown.deviation, 8)}"/><path class="dot" \
data-dot d="{dots(shown.state, 8)}"/></g>
{strips}{columns}</svg></figure>"""


def drawing(lit: Sequence[str] = ()) -> str:
    """The explorable as HTML, with the parts of those names lit.

    With ``noise`` among them Q can be changed too.
    Raises: ValueError for a name that is none of :data:`PARTS`.
    """
    for name in lit:
        checks.choice("lit", name, list(PARTS))
    usual = [LEVELS[USUAL]] * len(READINGS)
    here = believed(READINGS, usual, DRIFTS[DRIFT])
    other = plain(READINGS)
    data = {
        "readings": READINGS,
        "levels": LEVELS,
        "usual": USUAL,
        "drifts": DRIFTS,
        "drift": DRIFT,
        "odd": ODD,
        "reach": REACH,
        "picture": {
            "first": FIRST,
            "step": STEP,
            "bar": BAR,
            "top": TOP,
            "ground": GROUND,
            "lowest": LOWEST,
            "highest": HIGHEST,
        },
        "strips": {k: [v[1], v[2]] for k, v in STRIPS.items()},
        "plain": {k: getattr(other, k).tolist() for k in STRIPS},
    }
    packed = html.escape(json.dumps(data), quote=False)
    group = "-".join(["watch", *lit])
    tokens = "".join(
        f'<label><input type="radio" name="{group}" value="{i}"'
        f"{' checked' if i == ODD else ''} disabled><span>{i + 1}</span>"
        "</label>"
        for i in range(len(READINGS))
    )
    drift = control("drift", "√Q, lost by each layer", len(DRIFTS), DRIFT)
    panels = panel("A layer that filters", "filter", usual, here, ODD, lit)
    panels += panel("A plain layer", "plain", usual, other, ODD, lit)
    return f"""\
<div class="bft-watch mathjax_ignore tex2jax_ignore" data-watch='{packed}'>
<style>{part("watch.css")}</style>
<div class="controls"><fieldset><legend>Reading</legend>{tokens}</fieldset>
{control("noise", "How noisy it is", len(LEVELS), USUAL)}
{drift if "noise" in lit else ""}</div>
<output class="readout" aria-live="off">{sentence(here)}</output>
<noscript>Without JavaScript the picture stays as it is.</noscript>
<div class="panels">{panels}</div>
<p class="key"><svg viewBox="0 0 16 12" aria-hidden="true"><path class="dot" \
d="M8 6h0"/></svg> before <svg class="after" viewBox="0 0 16 12" \
aria-hidden="true"><path class="dot" d="M8 6h0"/></svg> after one layer; \
error bars are one standard deviation up and down. The layer has no matrices \
and subtracts the state from what it hears.
<button type="button" disabled>Begin again</button></p>
<script>{{{part("watch.js")}}}</script>
</div>"""


def control(name: str, label: str, count: int, first: int) -> str:
    """A labelled range over the places of a list."""
    level = (LEVELS if name == "noise" else DRIFTS)[first]
    return f"""\
<label class="range"><span>{label}: <b data-setting="{name}">± {level:.2f}°\
</b></span><input type="range" data-range="{name}" min="0" \
max="{count - 1}" value="{first}" aria-valuetext="± {level:.2f} degrees" \
disabled></label>"""


def sentence(shown: Watched, chosen: int = ODD) -> str:
    """What happens to the chosen reading, in words."""
    return (
        f"Reading {chosen + 1} says {READINGS[chosen]:.1f}°. It gets "
        f"{100 * shown.attention[chosen]:.0f} % of the attention and ends at "
        f"{shown.state[chosen]:.1f} ± {shown.deviation[chosen]:.2f}°. The "
        f"others move by a gain of {others(shown.gain, chosen):.2f} and end "
        f"at ± {others(shown.deviation, chosen):.2f}°."
    )


def others(values: np.ndarray, chosen: int = ODD) -> float:
    """The mean of ``values`` (T,) over all readings but the chosen one."""
    return float(np.delete(values, chosen).mean())


def watch(*lit: str) -> tuple[Watched, Watched]:
    """Show the explorable, some parts lit: ``watch("kriging", "reml")``.

    Returns: what the layer makes of readings that are equally good, and of
    them with a very noisy odd one; both are kept as facts.
    Raises: ValueError for a name that is none of :data:`PARTS`.
    """
    from IPython.display import display

    picture = drawing(lit)
    usual = [LEVELS[USUAL]] * len(READINGS)
    told = [*usual]
    told[ODD] = LEVELS[-1]
    first, last = (believed(READINGS, x, DRIFTS[DRIFT]) for x in (usual, told))
    current().keep("watch:usual", np.concatenate(first).tolist(), 1e-9)
    current().keep("watch:told", np.concatenate(last).tolist(), 1e-9)
    words = f"Watch a layer believe. {sentence(first)}"
    display({"text/html": picture, "text/plain": words}, raw=True)
    return first, last
