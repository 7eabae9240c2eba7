"""Figures: one PNG a cell, with an alt text whose numbers are facts.

nbval does not compare pictures, so a digest of everything that is plotted
is kept as a fact: for each array its size, its scale and two weighted sums,
which move when any one of its points does.

The style prints black on white, with line styles beside the colours, so
that a figure reads in grey and by the colour-blind. The book's style sheet
inverts it in dark mode and keeps the hues.
"""

import io
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from bft_ref.notebook.facts import Chapter, current, values

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

COLOURS = ["#0072b2", "#d55e00", "#222222", "#009e73", "#aa4499", "#8c6d00"]
DASHES = ["-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6))]
WIDTH = 640  # CSS pixels; the picture has twice as many


def set_style() -> None:
    """Give matplotlib the book's style, where it is installed."""
    if find_spec("matplotlib") is None:
        return
    import matplotlib as mpl
    from cycler import cycler

    styles = [DASHES[i % len(DASHES)] for i in range(len(COLOURS))]
    mpl.rcdefaults()
    mpl.rcParams.update(
        {
            "axes.prop_cycle": cycler(color=COLOURS)
            + cycler(linestyle=styles),
            "axes.axisbelow": True,
            "axes.edgecolor": "#555555",
            "axes.grid": True,
            "axes.labelcolor": "#222222",
            "axes.linewidth": 0.8,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlelocation": "left",
            "axes.titlesize": "medium",
            "figure.constrained_layout.use": True,
            "figure.figsize": (6.4, 3.8),
            "font.size": 12.0,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.7,
            "image.cmap": "cividis",
            "legend.fontsize": 11.0,
            "legend.frameon": False,
            "lines.linewidth": 1.9,
            "lines.markersize": 5,
            "xtick.color": "#444444",
            "ytick.color": "#444444",
        }
    )


def figure(fig: "Figure", name: str, *, alt: str, tol: float = 1e-6) -> None:
    """Show a matplotlib figure as one PNG, and close it.

    ``alt`` says what is to be seen; ``{…}`` in it is filled from this
    chapter's facts, as in ``"a gain of {gain_rare:.2f}"``. ``tol`` bounds
    how far the plotted arrays may move, relative to their scale. Raises
    ValueError when ``alt`` states no number or nothing is plotted.
    """
    from IPython.display import display
    from matplotlib import pyplot as plt

    here = current()
    text = fill(alt, here)
    arrays = [digest(array) for array in plotted(fig)]
    if not arrays:
        raise ValueError(f"fig: nothing is plotted in figure {name!r}")
    here.keep(f"figure:{name}", np.concatenate(arrays).tolist(), tol)
    size = dict(zip(("width", "height"), css_size(fig), strict=True))
    display(
        {"image/png": png(fig), "text/plain": text},
        metadata={"image/png": {"alt": text, **size}},
        raw=True,
    )
    plt.close(fig)


def fill(alt: str, here: Chapter) -> str:
    """``alt`` with its numbers; ValueError when it has none."""
    try:
        text = alt.format_map(values(here.computed))
    except KeyError as error:
        if here.mode:
            raise ValueError(
                f"alt: expected facts recorded above, got {error}"
            ) from error
        # Cells run out of order: a reader never sees a fact fail.
        return re.sub(r"\{[^}]*\}", "…", alt)
    text = " ".join(text.split())
    if complaint := wrong_alt(text):
        raise ValueError(f"alt: {complaint}, got {text!r}")
    return text


def wrong_alt(text: str | None) -> str | None:
    """What is wrong with an alternative text; None when nothing is."""
    if not text or not text.strip():
        return "expected a description, found none"
    if re.fullmatch(r"\S+\.\w{2,4}|_images/\S+|\S{20,}", text.strip()):
        return "expected a description, found a file name"
    if not re.search(r"\d", text):
        return "expected what is to be seen with its numbers, found no number"
    return None


def png(fig: "Figure") -> bytes:
    """The figure as a PNG of 256 colours, without date or version in it."""
    from PIL import Image

    drawn, out = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=2 * WIDTH / 6.4)
    # a palette of its own takes a third of the bytes, and nobody sees it
    Image.open(drawn).convert("RGB").quantize(256).save(
        out, "png", optimize=True
    )
    return out.getvalue()


def css_size(fig: "Figure") -> tuple[int, int]:
    """Width and height to show a figure with, in CSS pixels."""
    width, height = fig.get_size_inches() * WIDTH / 6.4
    return round(width), round(height)


def plotted(fig: "Figure") -> list[np.ndarray]:
    """Every array that a figure shows, with the limits of its axes."""
    arrays: list[np.ndarray] = []
    for axes in fig.axes:
        frame = {axes.patch, *axes.spines.values()}
        shown = [
            array
            for artist in axes.get_children()
            if artist not in frame and artist.get_visible()
            for array in data_of(artist)
            if array.size
        ]
        if shown:
            limits = np.array([axes.get_xlim(), axes.get_ylim()])
            arrays += [*shown, limits]
    return arrays


def data_of(artist: "Artist") -> Iterator[np.ndarray]:
    """The arrays behind one line, collection, patch or image."""
    from matplotlib.collections import Collection
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if isinstance(artist, Line2D):
        yield np.asarray(artist.get_xydata(), float)
    elif isinstance(artist, Patch):
        path = artist.get_patch_transform().transform_path(artist.get_path())
        yield np.asarray(path.vertices, float)
    elif isinstance(artist, Collection | AxesImage):
        if isinstance(artist, Collection):
            yield unmasked(artist.get_offsets())
            for path in artist.get_paths():
                yield np.asarray(path.vertices, float)
        if artist.get_array() is not None:
            yield unmasked(artist.get_array())


def unmasked(array: object) -> np.ndarray:
    """A float array with NaN where it is masked."""
    return np.ma.filled(np.ma.asarray(array).astype(float), np.nan)


def digest(array: np.ndarray) -> np.ndarray:
    """``DIGEST`` numbers that move when a point of ``array`` does.

    Its size, how many of it are not finite, its scale, and two sums of the
    scaled values with irregular weights.
    """
    flat = np.asarray(array, float).ravel()
    finite = np.isfinite(flat)
    flat = np.where(finite, flat, 0.0)
    scale = np.abs(flat).max(initial=0.0)
    scale = scale if scale > 1e-9 else 1.0  # rounding noise about zero
    k = np.arange(1, flat.size + 1)
    sums = [
        weights @ flat / scale
        for weights in (np.cos(np.sqrt(2) * k), np.sin(np.sqrt(3) * k))
    ]
    numbers = [flat.size, (~finite).sum(), scale, *sums]
    return np.array([float(f"{number:.9g}") for number in numbers])
