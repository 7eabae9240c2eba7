"""One drawing of the layer, for every chapter, with that chapter's part lit.

Inline SVG in the page's own colour: it follows light and dark, needs no
network and scales with a phone. Where HTML is not shown, its description is.
"""

import html
from collections.abc import Iterable
from typing import NamedTuple

from bft_ref.support import checks

OBSERVED = "¹"  # in a formula: the index obs


class Part(NamedTuple):
    """A box: its place, what it is called, its formula, its chapter."""

    x: int
    y: int
    name: str
    formula: str
    chapter: str


WIDTH, HEIGHT, BOX = 480, 422, (212, 52)
LEFT, RIGHT = 12, 256
PARTS = {
    "belief": Part(LEFT, 8, "a belief", "state h, precision λ", "2, 12"),
    "update": Part(LEFT, 208, "Kalman update", "h + K∘e,  λ + λ¹", "6"),
    "dynamics": Part(
        LEFT, 280, "network as dynamics", "h + FFN,  (1 + J)²/λ", "7"
    ),
    "noise": Part(LEFT, 352, "process noise", "1/λ + Q", "8"),
    "kriging": Part(RIGHT, 64, "attention as kriging", "α̃ ∝ α·λ̄", "3"),
    "reml": Part(RIGHT, 136, "its spread, by REML", "nD/(n − 1)", "4"),
    "prior": Part(RIGHT, 208, "a prior for it", "s², from which λ¹", "5"),
}
DOWN, ASIDE, BACK = (
    " m-5 -7 l5 7 l5 -7",
    " m-7 -5 l7 5 l-7 5",
    " m7 -5 l-7 5 l7 5",
)
LINES = (  # from the state to attention, and what comes back
    f"M118 60 V206{DOWN} M118 90 H254{ASIDE} M362 116 V134{DOWN} "
    f"M362 188 V206{DOWN} M256 234 H226{BACK} M118 260 V278{DOWN} "
    f"M118 332 V350{DOWN} M118 404 V420{DOWN}"
)
STYLE = """\
.bft-schematic{max-width:30rem;margin:.5rem 0}
.bft-schematic svg{width:100%;height:auto;display:block;color:inherit}
.bft-schematic rect{fill:none;stroke:currentColor;stroke-width:1.2;rx:6}
.bft-schematic text{fill:currentColor;font:15px system-ui,sans-serif}
.bft-schematic .formula{font-size:14px;opacity:.8}
.bft-schematic path{fill:none;stroke:currentColor;stroke-width:1.2}
.bft-schematic .dim{opacity:.62}
.bft-schematic .lit rect{stroke:#d55e00;stroke-width:3}
.bft-schematic .lit .name{font-weight:700}"""


def drawing(lit: Iterable[str] = ()) -> str:
    """The layer as HTML, with the parts of those names lit; none: all equal.

    Raises: ValueError for a name that is none of :data:`PARTS`.
    """
    chosen = [*lit]
    for name in chosen:
        checks.choice("lit", name, list(PARTS))
    boxes = "".join(
        _box(part, "lit" if name in chosen else "dim" if chosen else "")
        for name, part in PARTS.items()
    )
    return f"""\
<div class="bft-schematic mathjax_ignore"><style>{STYLE}</style>
<svg role="img" aria-label="{html.escape(description(chosen))}" \
viewBox="0 0 {WIDTH} {HEIGHT}"><path d="{LINES}"/>{boxes}</svg></div>"""


def description(lit: Iterable[str] = ()) -> str:
    """The drawing in words."""
    parts = [PARTS[name] for name in lit]
    named = [
        f"{part.name} ({part.formula.replace(OBSERVED, '_obs')})"
        for part in parts
    ]
    told = (
        "A layer: a belief goes through attention as kriging, the spread of "
        "what it saw by REML, and a prior, to a Kalman update; then through "
        "the network as dynamics and process noise to the next belief."
    )
    return f"{told} Here: {', '.join(named)}." if named else told


def schematic(*lit: str) -> None:
    """Show the layer with some parts lit: ``schematic("reml", "prior")``.

    Raises: ValueError for a name that is none of :data:`PARTS`.
    """
    from IPython.display import display

    shown = {"text/html": drawing(lit), "text/plain": description(lit)}
    display(shown, raw=True)


def _box(part: Part, kind: str) -> str:
    x, y, name, formula, chapter = part
    wide, high = BOX
    below = '<tspan dy="4" font-size="11">obs</tspan><tspan dy="-4"> </tspan>'
    told = html.escape(formula).replace(OBSERVED, below)
    label = f'<tspan class="name">{html.escape(name)}</tspan>'
    return (
        f'<g class="{kind}"><rect x="{x}" y="{y}" width="{wide}" '
        f'height="{high}"/><text x="{x + 10}" y="{y + 21}">{label}</text>'
        f'<text class="formula" x="{x + 10}" y="{y + 42}">'
        f"{told}</text>"
        f'<text class="formula" text-anchor="end" x="{x + wide - 8}" '
        f'y="{y + 21}">{chapter}</text></g>'
    )
