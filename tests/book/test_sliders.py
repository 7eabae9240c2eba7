"""Sliders: one file of HTML, no ids, no network, checked numbers."""

import html
import json
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from bs4 import BeautifulSoup

from bft_ref.notebook import SliderState, chapter, facts, slider, sliders

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
X = np.linspace(0.0, 4.0, 9)
AXES = {"xlabel": "x", "ylabel": "y & z", "xlim": (0, 4), "ylim": (-2, 2)}
VALUES = [0.5, 1.5, 2.5]


def state(value: float) -> SliderState:
    """A line, dots and a named point, each moved by the value."""
    return SliderState(
        lines=[(X, np.sin(value * X), "a <wave>")],
        points=[(X, torch.tensor(X) / value - 1, "dots"), (2, 0.5, "here")],
        readout=f"It's {value / 3:.2f} & more",
        number=value / 3,
    )


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """What is displayed, in a chapter of a folder of its own."""
    outputs = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BFT_FACTS", "record")
    monkeypatch.setattr(facts, "_current", None)
    monkeypatch.setattr("IPython.display.display", outputs.append)
    chapter("02-small")
    return outputs


def only(shown: list) -> BeautifulSoup:
    (output,) = shown
    return BeautifulSoup(output.data, "html.parser")


def stored_sliders() -> list[tuple[str, str]]:
    """(chapter, HTML) of every slider that a notebook stores."""
    return [
        (path.stem, output.data["text/html"])
        for path in NOTEBOOKS
        for cell in nbformat.read(path, as_version=4).cells
        for output in cell.get("outputs", [])
        if 'class="bft-slider' in output.get("data", {}).get("text/html", "")
    ]


def test_stored_sliders_are_small():
    sizes = [(name, len(text.encode())) for name, text in stored_sliders()]
    assert [(name, size) for name, size in sizes if size > 150_000] == []


def test_the_first_state_stands_in_the_page(shown):
    slider("one", "Label <k>", VALUES, state, start=1.5, unit="m", **AXES)
    page = only(shown)
    root = page.select_one(".bft-slider")
    assert float(root["data-value"]) == 0.5
    assert page.output.get_text() == "It's 0.50 & more"
    assert page.select_one(".setting").get_text() == "1.5 m"
    assert page.input["value"] == "1"
    assert page.input["aria-label"] == "Label <k>"
    assert page.input["aria-valuetext"] == "1.5 m: It's 0.50 & more"
    assert page.input.has_attr("disabled"), "it moves only with a script"
    assert page.noscript
    assert page.select_one("svg[role=img]")["aria-label"].startswith("Chart")
    assert all(path["d"] for path in page.select(".plot path"))


def test_nothing_clashes_and_nothing_is_asked_for(shown):
    slider("one", "Label", VALUES, state, **AXES)
    text = shown[0].data
    assert not re.search(r"\bid=", text)
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(", text)
    assert list(only(shown).attrs) == []


def test_every_frame_is_in_the_page(shown):
    slider("one", "Label", VALUES, state, **AXES)
    data = json.loads(only(shown).div["data-frames"])
    numbers = [float(state["number"]) for state in data["frames"]]
    assert numbers == [value / 3 for value in VALUES]
    assert [s["readout"] for s in data["frames"]] == [
        state(value).readout for value in VALUES
    ]


def points_of(path: str) -> np.ndarray:
    """The points (n, 2) of SVG path data, read as SVG defines it."""
    at, found = np.zeros(2), []
    for command, rest in re.findall(r"([MlhmL])([^MlhmL]*)", path):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", rest)]
        if command == "h":
            continue
        for pair in np.reshape(numbers, (-1, 2)):
            at = pair if command == "M" else at + pair
            found.append(at)
    return np.array(found)


@pytest.mark.parametrize("kind", ["line", "dots"])
def test_what_is_drawn_is_the_data_to_half_a_unit(kind):
    rng = np.random.default_rng(7)
    x, y = np.sort(rng.uniform(0, 4, 30)), rng.uniform(-3, 3, 30)
    box = sliders.Box((0.0, 4.0), (-2.0, 2.0))
    drawn = points_of(sliders.path(box.units(x, y), kind))
    assert drawn.shape == (30, 2)
    width, height = sliders.GRID
    np.testing.assert_allclose(drawn[:, 0] * 4 / width, x, atol=2.1 / width)
    np.testing.assert_allclose(
        2 - drawn[:, 1] * 4 / height, y, atol=2.1 / height
    )


def test_points_that_are_not_finite_are_left_out():
    box = sliders.Box((0.0, 4.0), (0.0, 2.0))
    units = box.units([1, np.nan, 2], [1, 1, np.inf])
    assert units.tolist() == [[600, 600]]
    assert sliders.path(np.empty((0, 2), int), "line") == ""


def test_states_may_differ_in_what_they_draw(shown):
    def uneven(value: float) -> SliderState:
        lines = [(X, X - value, "always")]
        if value > 1:
            lines.append((X[:4], X[:4] / 2, "sometimes"))
        return SliderState(lines=lines, readout=f"{value:.1f}", number=value)

    slider("one", "Label", VALUES, uneven, **AXES)
    data = json.loads(only(shown).div["data-frames"])
    drawn = [[data["paths"][i] for i in s["paths"]] for s in data["frames"]]
    assert [bool(paths[1]) for paths in drawn] == [False, True, True]


def test_numbers_and_curves_are_facts(shown, monkeypatch):
    slider("one", "Label", VALUES, state, **AXES)
    stored = facts.read(Path("facts"), "02-small")
    assert stored["slider:one"]["value"] == [v / 3 for v in VALUES]
    monkeypatch.setenv("BFT_FACTS", "check")
    chapter("02-small")
    slider("one", "Label", VALUES, state, **AXES)

    def moved(value: float) -> SliderState:
        y = np.sin(value * X)
        y[3] += 1e-3 * (value == 2.5)
        kept = state(value)
        return SliderState([(X, y, "a <wave>")], kept.points, "1", kept.number)

    chapter("02-small")
    with pytest.raises(facts.FactError, match="'slider:one:curves' is now"):
        slider("one", "Label", VALUES, moved, **AXES)

    def other(value: float) -> SliderState:
        kept = state(value)
        return SliderState(kept.lines, kept.points, "1", value / 2.9)

    chapter("02-small")
    with pytest.raises(facts.FactError, match="'slider:one' is now"):
        slider("one", "Label", VALUES, other, **AXES)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"values": [1.5]}, ValueError, "values: expected two or more"),
        ({"values": ["a", "b"]}, TypeError, "values: expected numbers"),
        ({"start": 9.5}, ValueError, "start: expected one of values"),
        ({"xlim": (2, 2)}, ValueError, "xlim: expected low < high"),
        ({"ylim": (0, np.nan)}, ValueError, "ylim: expected a finite"),
        ({"state": lambda v: v}, TypeError, "expected a SliderState"),
        (
            {"state": lambda v: SliderState(readout="1")},
            ValueError,
            "nothing is",
        ),
        (
            {"state": lambda v: SliderState(lines=[(X, X, "a")])},
            ValueError,
            "expected a readout",
        ),
    ],
)
def test_bad_input_says_what_is_expected(shown, changed, error, said):
    given = {"values": VALUES, "state": state, **AXES} | changed
    with pytest.raises(error, match=said):
        slider(
            "one", "Label", given.pop("values"), given.pop("state"), **given
        )


def test_x_and_y_have_one_length():
    with pytest.raises(ValueError, match=r"lines 'a': .*\(9,\) and \(8,\)"):
        SliderState(lines=[(X, X[:8], "a")])
    with pytest.raises(ValueError, match="number: expected a finite"):
        SliderState(number=np.nan)


def test_ticks_are_round_and_inside():
    assert sliders.ticks(-2.0, 2.0)[0] == (0.0, "−2")
    for low, high in [(1870, 1971), (0.0, 0.03), (-4.0, 8.0), (0.0, 2e6)]:
        found = sliders.ticks(low, high)
        assert 3 <= len(found) <= 8
        for share, text in found:
            assert 0 <= share <= 1
            value = float(text.replace("−", "-"))
            assert value == pytest.approx(low + share * (high - low))


def test_a_stored_slider_has_no_widget(shown):
    slider("one", "Label", VALUES, state, **AXES)
    assert len(shown) == 1
    assert not sliders.live()


def test_a_live_kernel_adds_a_widget_that_computes(shown, monkeypatch):
    pytest.importorskip("ipywidgets")
    monkeypatch.setattr(sliders, "live", lambda: True)
    computed = []

    def watched(value: float) -> SliderState:
        computed.append(value)
        return state(value)

    slider("one", "Label", VALUES, watched, start=1.5, **AXES)
    _, accordion = shown
    control, view = accordion.children[0].children
    assert control.index == 1
    assert html.escape(state(1.5).readout) in view.value
    computed.clear()
    control.index = 2
    assert computed == [2.5]
    assert html.escape(state(2.5).readout) in view.value
    assert "<script" not in view.value
    assert "data-frames" not in view.value
