"""Figures: their arrays are facts, their alt texts state what is seen."""

import colorsys
import io
import itertools
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from PIL import Image

from bft_ref.notebook import chapter, fact, facts, figure, figures

X = np.linspace(0.0, 2.5, 40)


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """What is displayed, in a chapter of a folder of its own."""
    outputs = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BFT_FACTS", "record")
    monkeypatch.setattr(facts, "_current", None)
    monkeypatch.setattr(
        "IPython.display.display",
        lambda data, **more: outputs.append((data, more)),
    )
    with mpl.rc_context():
        chapter("02-small")
        yield outputs
    plt.close("all")


def draw(**changed):
    """A figure with one of everything; ``changed`` replaces an array."""
    data = {
        "line": np.sin(X),
        "dots": np.cos(X),
        "bars": np.array([1.5, 2.5, 0.5]),
        "band": np.sin(X) + 0.5,
        "image": np.outer(X[:5], X[:7]),
        "whiskers": np.array([0.25, 0.5]),
    } | changed
    fig, (left, right) = plt.subplots(1, 2)
    left.plot(X, data["line"], label="line")
    left.scatter(X, data["dots"])
    left.bar([0, 1, 2], data["bars"])
    left.fill_between(X, 0, data["band"], alpha=0.2)
    left.errorbar([0.5, 1.5], [1.5, 2.0], yerr=data["whiskers"])
    right.imshow(data["image"])
    left.legend()
    return fig


def test_a_figure_is_one_png_with_its_alt_text(shown):
    fact("gain", 0.7714)
    figure(draw(), "one", alt="A curve, six\n  of them at {gain:.2f}.")
    ((data, more),) = shown
    assert set(data) == {"image/png", "text/plain"}
    assert data["text/plain"] == "A curve, six of them at 0.77."
    about = more["metadata"]["image/png"]
    assert about == {"alt": data["text/plain"], "width": 640, "height": 380}
    picture = Image.open(io.BytesIO(data["image/png"]))
    assert picture.width == 2 * about["width"]
    assert "Software" not in picture.info
    assert not plt.get_fignums(), "it would be shown once more"


def test_the_same_figure_has_the_same_bytes(shown):
    for name in ["one", "two"]:
        figure(draw(), name, alt="6 kinds of marks.")
    (first, _), (second, _) = shown
    assert first["image/png"] == second["image/png"]


CHANGES = ["line", "dots", "bars", "band", "image", "whiskers"]


@pytest.mark.parametrize("name", CHANGES)
def test_one_point_that_moves_is_noticed(shown, monkeypatch, name):
    figure(draw(), "one", alt="6 kinds of marks.")
    monkeypatch.setenv("BFT_FACTS", "check")
    chapter("02-small")
    figure(draw(), "one", alt="6 kinds of marks.")
    chapter("02-small")
    base = {
        "line": np.sin(X),
        "dots": np.cos(X),
        "bars": np.array([1.5, 2.5, 0.5]),
        "band": np.sin(X) + 0.5,
        "image": np.outer(X[:5], X[:7]),
        "whiskers": np.array([0.25, 0.5]),
    }[name].copy()
    base.flat[1] += 1e-3
    with pytest.raises(facts.FactError, match="figure:one"):
        figure(draw(**{name: base}), "one", alt="6 kinds of marks.")


def test_a_missing_curve_or_other_limits_are_noticed(shown, monkeypatch):
    figure(draw(), "one", alt="6 kinds of marks.")
    monkeypatch.setenv("BFT_FACTS", "check")
    chapter("02-small")
    fig = draw()
    fig.axes[0].lines[0].remove()
    with pytest.raises(facts.FactError, match="numbers, recorded are"):
        figure(fig, "one", alt="6 kinds of marks.")
    chapter("02-small")
    fig = draw()
    fig.axes[0].set_ylim(5, 6)
    with pytest.raises(facts.FactError, match="figure:one"):
        figure(fig, "one", alt="6 kinds of marks.")


def test_a_point_too_few_is_noticed_at_any_tolerance(shown, monkeypatch):
    figure(draw(), "one", alt="6 kinds of marks.", tol=1.0)
    monkeypatch.setenv("BFT_FACTS", "check")
    chapter("02-small")
    fig = draw()
    line = fig.axes[0].lines[0]
    line.set_data(*(x[:-1] for x in line.get_data()))
    with pytest.raises(facts.FactError, match="figure:one"):
        figure(fig, "one", alt="6 kinds of marks.", tol=1.0)


@pytest.mark.parametrize(
    "alt",
    ["", "   ", "Some curves.", "figure1.png", "_images/3f2a41.png"],
)
def test_an_alt_text_without_content_is_an_error(shown, alt):
    with pytest.raises(ValueError, match="alt: expected"):
        figure(draw(), "one", alt=alt)
    assert not shown


def test_an_alt_text_of_an_unknown_fact_is_an_error(shown):
    with pytest.raises(ValueError, match=r"recorded above, got 'gone'"):
        figure(draw(), "one", alt="A gain of {gone:.2f}.")


def test_a_reader_who_skips_a_cell_still_sees_the_figure(shown, monkeypatch):
    monkeypatch.setenv("BFT_FACTS", "")
    chapter("02-small")
    figure(draw(), "one", alt="A gain of {gone:.2f}.")
    assert shown[0][0]["text/plain"] == "A gain of …."


def test_an_empty_figure_is_an_error(shown):
    fig, axes = plt.subplots()
    axes.set_title("Nothing")
    with pytest.raises(ValueError, match="nothing is plotted"):
        figure(fig, "one", alt="2 axes.")


def luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance of sRGB, as WCAG defines it."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in colour
    ]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(one: float, other: float) -> float:
    low, high = sorted([one, other])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", figures.COLOURS)
def test_colours_stand_out_on_white_and_inverted_on_black(colour):
    rgb = mpl.colors.to_rgb(colour)
    assert contrast(luminance(rgb), 1.0) >= 3.0
    hue, light, saturation = colorsys.rgb_to_hls(*rgb)
    inverted = colorsys.hls_to_rgb(hue, 1 - light, saturation)
    dark_page = luminance(mpl.colors.to_rgb("#121212"))
    assert contrast(luminance(inverted), dark_page) >= 3.0


def test_curves_differ_without_their_colours(shown):
    cycle = list(mpl.rcParams["axes.prop_cycle"])
    assert len(cycle) >= 4
    for one, other in itertools.combinations(cycle[:4], 2):
        assert one["linestyle"] != other["linestyle"]
        assert one["color"] != other["color"]


def test_the_style_of_a_page_is_in_the_book():
    here = Path(__file__).resolve().parents[2]
    assert "figures.css" in (here / "_config.yml").read_text("utf8")
    assert "bft-figure" in (here / "book/site/figures.css").read_text("utf8")
