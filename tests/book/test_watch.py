"""The explorable: one layer, the same in Python and in a browser."""

import json
import math
import random
import re

import numpy as np
import pytest

from bft_ref.notebook import watch as show
from bft_ref.notebook.watch import (
    DRIFTS,
    LEVELS,
    ODD,
    PARTS,
    REACH,
    READINGS,
    Watched,
    believed,
    drawing,
    plain,
    sentence,
)


def by_hand(h: list[float], s: list[float], drift: float) -> list[list]:
    """What :func:`believed` is due to be, one number at a time."""
    rows = []
    for i in range(len(h)):
        raw = [
            math.exp(-((i - j) ** 2) / (2 * REACH**2)) / s[j] ** 2
            for j in range(len(h))
        ]
        rows.append([a / math.fsum(raw) for a in raw])
    found = []
    for i, w in enumerate(rows):
        z = math.fsum(a * v for a, v in zip(w, h, strict=True))
        n = 1 / math.fsum(a * a for a in w)
        spread = math.fsum(a * (v - z) ** 2 for a, v in zip(w, h, strict=True))
        own = math.fsum(a * v**2 for a, v in zip(w, s, strict=True))
        scale = (own + n * spread) / (1 + n - 1)
        seen = scale * (n + 1) / n
        gain = s[i] ** 2 / (s[i] ** 2 + seen)
        left = (1 - gain) * s[i] ** 2 + drift**2
        gets = math.fsum(row[i] for row in rows) / len(h)
        found.append([gets, n, gain, h[i] + gain * (z - h[i]), left**0.5])
    return [list(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_the_layer_is_the_loop(seed):
    some = random.Random(seed)
    h = [some.gauss(20, 2) for _ in range(6)]
    s = [some.choice(LEVELS) for _ in h]
    drift = some.choice(DRIFTS)
    np.testing.assert_allclose(
        believed(h, s, drift), by_hand(h, s, drift), rtol=1e-9
    )


def test_what_the_reader_is_promised():
    usual, told = [0.3] * 8, [0.3] * 8
    told[ODD] = LEVELS[-1]
    before, after = (believed(READINGS, s, 0.1) for s in (usual, told))
    rest = np.arange(8) != ODD
    assert after.attention[ODD] < 0.02 * before.attention[ODD]
    assert (after.gain > 4 * before.gain).all()
    assert (after.deviation[rest] < 0.85 * before.deviation[rest]).all()
    known = plain(READINGS)
    np.testing.assert_allclose(before.attention, known.attention)
    np.testing.assert_allclose(before.n, known.n)


@pytest.mark.parametrize("name", PARTS)
def test_one_part_is_lit(name):
    lit = re.findall(r'class="(?:after )?lit"', drawing([name]))
    assert len(lit) == (1 if name == "noise" else 2)  # plain has no error
    assert ('data-range="drift"' in drawing([name])) == (name == "noise")
    assert "lit" not in drawing().split("</style>")[1].split("<script>")[0]


def test_a_name_that_is_none_is_refused():
    with pytest.raises(ValueError, match="lit: expected one of kriging"):
        show("gain")


PATHS = """() => [...document.querySelectorAll(".bft-watch path")].map(
  (path) => path.getAttribute("d"))"""


@pytest.mark.browser
def test_the_browser_computes_what_python_does(browser, tmp_path):
    page = browser.new_page(viewport={"width": 390, "height": 900})
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    file = tmp_path / "watch.html"
    file.write_text(f"<!doctype html><meta charset=utf8>{drawing(['noise'])}")
    still = tmp_path / "still.html"
    still.write_text(
        re.sub(r"<script>.*</script>", "", file.read_text(), flags=re.S)
    )
    page.goto(still.as_uri())
    without = page.evaluate(PATHS)
    page.goto(file.as_uri())
    assert page.evaluate(PATHS) == without  # the script redraws nothing
    deviations, drift, some = [0.3] * 8, DRIFTS[2], random.Random(4)
    for token in (4, 5, 0, 7):
        page.locator(f"input[type=radio][value='{token}']").check()
        noise = page.locator("[data-range=noise]")
        noise.focus()
        for _ in range(some.randrange(1, 7)):
            page.keyboard.press("ArrowRight" if token % 2 else "ArrowLeft")
        if token == 5:
            page.locator("[data-range=drift]").press("End")
            drift = DRIFTS[-1]
        deviations[token] = LEVELS[int(noise.input_value())]
        data = page.locator(".bft-watch").get_attribute("data-shown")
        shown = json.loads(data)
        assert shown.pop("deviations") == pytest.approx(deviations, rel=1e-12)
        assert shown.pop("drift") == drift
        due = believed(READINGS, deviations, drift)
        assert list(shown) == list(Watched._fields)
        np.testing.assert_allclose([*shown.values()], due, rtol=1e-12)
        assert page.inner_text(".readout") == sentence(due, token)
    page.locator("button").click()
    assert page.evaluate(PATHS) == without
    page.locator("[data-panel=filter] [data-token='2']").click()
    assert page.locator("input[type=radio][value='2']").is_checked()
    assert wrong == []
    page.close()
