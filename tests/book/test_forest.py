"""The forest plot: estimates as data, cut intervals, verdicts in words."""

import math
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt

from bft_ref.notebook import figures
from bft_ref.notebook.forest import (
    MARKS,
    Estimate,
    forest,
    verdict,
    verdict_table,
    window,
)
from bft_ref.recsys.metrics import Difference, paired_bootstrap


def between(low: float, middle: float, high: float) -> Difference:
    """A difference in per cent of a rival whose mean is 0.05."""
    relative = np.array([middle, low, high]) / 100
    return Difference(*(0.05 * relative), *relative, 0.95, 2000)


ROWS = [
    Estimate("filter − plain", between(1, 2, 3), 3, "confirmatory", "Beauty"),
    Estimate("filter − LiGR", between(-6, -4, -1), 1, "exploratory", "Beauty"),
    Estimate("filter − plain", between(-70, 3, 80), 3, "exploratory", "Toys"),
]


@pytest.fixture(autouse=True)
def style():
    with mpl.rc_context():
        figures.set_style()
        yield
    plt.close("all")


def lines(ax):
    """(x of each point, marker, colour, face) of each line drawn."""
    return [
        (
            line.get_xdata().tolist(),
            line.get_marker(),
            line.get_color(),
            line.get_markerfacecolor(),
        )
        for line in ax.lines
        if list(line.get_ydata()) != [0, 1]  # the line at zero
    ]


def test_each_row_is_its_estimate_and_its_interval():
    ax = forest(ROWS[:2])
    drawn = [x for x, *_ in lines(ax)]
    assert pytest.approx([1, 3]) in drawn and pytest.approx([2]) in drawn
    assert pytest.approx([-6, -1]) in drawn and pytest.approx([-4]) in drawn
    low, high = ax.get_xlim()
    assert low < -6 < 0 < 3 < high


def test_kinds_differ_in_colour_and_marker_and_one_seed_is_hollow():
    points = [line for line in lines(forest(ROWS[:2])) if line[1] in "oD"]
    (_, one, blue, full), (_, other, red, hollow) = points
    assert (blue, one) == MARKS["confirmatory"] and full == blue
    assert (red, other) == MARKS["exploratory"] and hollow == "white"
    assert one != other and blue != red


def test_an_interval_far_wider_than_the_rest_is_cut_with_arrows():
    ax = forest(ROWS)
    low, high = ax.get_xlim()
    assert -70 < low < -6 and 3 < high < 80
    drawn = {mark: x for x, mark, *_ in lines(ax) if mark in "<>"}
    assert drawn == {"<": [pytest.approx(low)], ">": [pytest.approx(high)]}
    assert "+3.0 (−70.0 to +80.0)" in [text.get_text() for text in ax.texts]


def test_groups_stand_apart_beneath_their_names():
    ax = forest(ROWS)
    ticks = {t.get_text(): t for t in ax.get_yticklabels()}
    assert next(iter(ticks)) == "Beauty"
    assert ticks["Toys"].get_fontweight() == "bold"
    assert ticks["filter − LiGR (1\u00a0seed)"].get_fontweight() == "normal"
    y = [text.get_position()[1] for text in ax.texts]
    assert y == sorted(y) and y[2] - y[1] > y[1] - y[0]


def test_the_legend_names_what_occurs():
    def named(rows):
        return [t.get_text() for t in forest(rows).get_legend().get_texts()]

    assert named(ROWS[:1]) == ["confirmatory"]
    assert named(ROWS[1:2]) == ["exploratory", "hollow: one seed, users only"]


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS, ROWS * 4])
def test_nothing_is_clipped_at_any_number_of_rows(rows):
    fig = forest(rows, title="NDCG@10").figure
    fig.canvas.draw()
    width, height = figures.css_size(fig)
    assert width == figures.WIDTH and height > 25 * len(rows)
    inside = fig.bbox.padded(1)
    ax = fig.axes[0]
    for artist in [*ax.texts, ax.get_legend(), *ax.get_yticklabels()]:
        box = artist.get_window_extent()
        assert inside.contains(*box.min) and inside.contains(*box.max)
    assert ax.get_position().width > 0.4


def test_other_axes_are_drawn_on():
    fig, axes = plt.subplots(2, 1, figsize=(6.4, 8))
    assert forest(ROWS, ax=axes[1], xlabel="%", title="rare") is axes[1]
    assert axes[1].get_title(loc="left") == "rare"
    assert axes[1].get_xlabel() == "%"
    assert len(fig.axes) == 2


def test_a_rival_that_never_hits_has_no_interval():
    none = paired_bootstrap(np.zeros(9), np.ones(9))
    row = Estimate("filter − nothing", none, 1)
    assert str(row) == "– (no interval)"
    assert "– (no interval)" in [t.get_text() for t in forest([row]).texts]
    rare = replace(
        none, relative=0.5, relative_low=math.nan, relative_high=math.nan
    )
    assert str(Estimate("rare", rare, 1)) == "+50.0 (no interval)"
    assert window([Estimate("rare", rare, 1)]) == (-1, 1)
    mixed = forest([*ROWS[:2], Estimate("rare", rare, 1)])
    assert mixed.get_xlim() == forest(ROWS[:2]).get_xlim()
    assert len(lines(mixed)) == len(lines(forest(ROWS[:2])))


def test_zero_has_no_sign():
    assert str(Estimate("a", between(-0.04, 0.01, 2), 2)) == (
        "0.0 (0.0 to +2.0)"
    )


@pytest.mark.parametrize(
    ("low", "middle", "high", "said"),
    [
        (1, 2, 3, "above zero"),
        (-3, -2, -1, "below zero"),
        (-1, 2, 3, "open"),
        (0, 2, 3, "open"),
        (-3, -2, 0, "open"),
    ],
)
def test_verdicts_never_say_more_than_the_interval(low, middle, high, said):
    found = between(low, middle, high)
    assert verdict(found, "confirmatory") == said
    more = ", exploratory" if said != "open" else ""
    assert verdict(found, "exploratory") == said + more
    few = "direction only: " if said != "open" else ""
    assert verdict(found, "confirmatory", seeds=2) == few + said


def test_an_interval_of_no_width_at_zero_is_open():
    same = paired_bootstrap(np.ones(9), np.ones(9))
    assert verdict(same, "confirmatory") == "open"


def test_a_table_has_claim_estimate_and_verdict():
    table = verdict_table(ROWS)
    assert table.loc[("Beauty", "filter − plain")].to_dict() == {
        "difference in %": "+2.0 (+1.0 to +3.0)",
        "seeds": 3,
        "verdict": "above zero",
    }
    assert table["verdict"].tolist()[1:] == [
        "direction only: below zero, exploratory",
        "open",
    ]
    assert list(verdict_table(ROWS[:2]).index) == [r.label for r in ROWS[:2]]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="rows: expected at least one"):
        forest([])
    with pytest.raises(ValueError, match="rows: expected at least one"):
        verdict_table([])
    good = between(1, 2, 3)
    with pytest.raises(ValueError, match="label: expected"):
        Estimate(" ", good, 1)
    with pytest.raises(TypeError, match="difference: expected.*float"):
        Estimate("a", 0.1, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seeds: expected"):
        Estimate("a", good, 0)
    with pytest.raises(ValueError, match="kind: expected.*'guess'"):
        Estimate("a", good, 1, "guess")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind: expected.*'guess'"):
        verdict(good, "guess")  # type: ignore[arg-type]
