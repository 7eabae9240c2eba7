"""The built book in a browser, from its folder, with the network off.

Every page is opened in light and dark, wide and at phone width. It asks
nothing outside its folder, logs no error, typesets its maths, passes axe's
rules inside the article and never scrolls sideways. Every slider is moved
by keyboard through all its values, and its numbers are the recorded facts.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from bft_ref.notebook import SliderState, facts, figures, sliders
from tests.book.conftest import executable
from tests.book.small import APART

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.browser, pytest.mark.slow]

VIEWS = {
    "light": (1280, "light"),
    "dark": (1280, "dark"),
    "phone": (360, "light"),
    "dark phone": (360, "dark"),
}
# What axe finds depends hardly on the width, and in the dark on colours alone.
AXE = {"light": None, "dark": ["color-contrast"]}
# The theme's own faults; the list only shrinks.
THEME_PARTS = [
    ".citation-list",  # docutils gives it roles that ARIA has withdrawn
]
# Pages that the theme writes, without an article of ours.
THEME_PAGES = {"genindex.html", "search.html", "py-modindex.html"}


@contextmanager
def opened(
    browser: Browser, path: Path, view: str = "light", **settings: object
) -> Iterator[tuple[Page, list[str]]]:
    """A page from its folder, and what it did wrong while it loaded."""
    width, scheme = VIEWS[view]
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
        offline=True,
        **settings,
    )
    page, wrong = context.new_page(), []
    page.on(
        "request",
        lambda request: (
            None
            if re.match(r"(file|data|blob|about):", request.url)
            else wrong.append(f"asks for {request.url}")
        ),
    )
    page.on(
        "requestfailed",
        lambda request: wrong.append(f"does not find {request.url}"),
    )
    page.on(
        "console",
        lambda message: (
            wrong.append(f"logs {message.text}")
            if message.type == "error"
            else None
        ),
    )
    page.on("pageerror", lambda error: wrong.append(f"raises {error}"))
    page.goto(path.resolve().as_uri(), wait_until="load")
    if settings.get("java_script_enabled", True):
        page.evaluate("async () => await window.MathJax?.startup?.promise")
    try:
        yield page, wrong
    finally:
        context.close()


MATHS = """() => [...document.querySelectorAll(".math")].filter(
  (node) => !node.querySelector("mjx-container")
  || node.querySelector("[data-mjx-error], mjx-merror, [data-mml-node=merror]")
).map((node) => node.textContent.trim().slice(0, 80))"""
PICTURES = """() => [...document.querySelectorAll(".cell_output img")].map(
  (image) => image.getAttribute("alt"))"""
SIDEWAYS = """() => document.documentElement.scrollWidth
  - document.documentElement.clientWidth"""


def faults(
    page: Page, wrong: list[str], axe: list[str] | None = None
) -> list[str]:
    """Everything that is wrong with an open page, by axe's rules of a kind.

    None: by all of them. They are slow.
    """
    found = [*wrong]
    found += [f"maths not typeset: {text}" for text in page.evaluate(MATHS)]
    found += [
        f"alt text {alt!r}: {complaint}"
        for alt in page.evaluate(PICTURES)
        if (complaint := figures.wrong_alt(alt))
    ]
    if (pixels := page.evaluate(SIDEWAYS)) > 0:
        found.append(f"scrolls sideways by {pixels} pixels")
    for rule in violations(page, axe):
        nodes = "; ".join(node["html"][:120] for node in rule["nodes"][:3])
        found.append(f"axe: {rule['id']} ({len(rule['nodes'])}): {nodes}")
    return found


def violations(page: Page, rules: list[str] | None) -> list[dict]:
    """Those of these rules of axe, or of all, that the article breaks."""
    if rules == []:
        return []
    where = {
        "include": [["article"]],
        "exclude": [[part] for part in THEME_PARTS],
    }
    only: dict[str, list[str]] = {"resultTypes": ["violations"]}
    if rules:
        only["runOnly"] = rules
    return Axe().run(page, where, only).response["violations"]


def pages(site: Path) -> list[Path]:
    """The pages of the book."""
    return [
        path
        for path in sorted(site.rglob("*.html"))
        if "_static" not in path.parts
        and path.name not in THEME_PAGES
        and "article" in path.read_text("utf8")
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_every_page_is_in_order(browser: Browser, site: Path, view: str):
    assert pages(site)
    found = []
    for path in pages(site):
        with opened(browser, path, view) as (page, wrong):
            name = path.relative_to(site)
            here = faults(page, wrong, AXE.get(view, []))
            found += [f"{name}: {fault}" for fault in here]
    assert not found, "\n".join(found)


CUT = """() => [...document.querySelectorAll(
  "article div.math, article table, article pre, article figure"
)].filter((node) => node.checkVisibility()
  && node.getBoundingClientRect().right > innerWidth + 1
).map((node) => node.textContent.trim().slice(0, 60))"""


def test_nothing_is_cut_on_paper(browser: Browser, site: Path):
    found = []
    for path in pages(site):
        with opened(browser, path) as (page, _):
            page.set_viewport_size({"width": 720, "height": 1000})
            page.emulate_media(media="print")
            page.evaluate("dispatchEvent(new Event('beforeprint'))")
            name = path.relative_to(site)
            found += [f"{name}: {text}" for text in page.evaluate(CUT)]
    assert not found, "\n".join(found)


SLIDER = """(root) => {
  const one = (name) => root.querySelector(name);
  return {
    index: root.dataset.index,
    value: root.dataset.value,
    readout: one(".readout").innerText,
    setting: one(".setting").innerText,
    spoken: one("input").getAttribute("aria-valuetext"),
    curves: [...root.querySelectorAll("[data-curve]")].map(
      (path) => path.getAttribute("d")).join(),
  };
}"""


def move(page: Page, name: str) -> list[tuple[float, str, str]]:
    """Move a slider by keyboard from end to end: (value, readout, curves)."""
    root = page.locator(f'.bft-slider[data-name="{name}"]')
    control = root.locator("input")
    control.focus()
    page.keyboard.press("Home")
    seen = []
    for index in range(int(control.get_attribute("max")) + 1):
        if index:
            page.keyboard.press("ArrowRight")
        shown = root.evaluate(SLIDER)
        assert shown["index"] == str(index)
        assert shown["spoken"].endswith(shown["readout"])
        assert shown["setting"] in shown["spoken"]
        value = float(shown["value"])
        seen.append((value, shown["readout"], shown["curves"]))
    return seen


def misread(readout: str, value: float) -> bool:
    """Whether no numeral of a readout is ``value`` to its own digits."""
    text = readout.replace("−", "-").replace(",", "")
    for digits, decimals, percent in re.findall(
        r"(-?\d+(?:\.(\d+))?(?:e[-+]?\d+)?)\s?(%?)", text
    ):
        due = value * 100 if percent else value
        unit = 10.0 ** -len(decimals)
        if "e" in digits:
            unit *= 10 ** float(digits.partition("e")[2])
        if abs(float(digits) - due) <= 0.501 * unit:
            return False
    return True


def slider_faults(page: Page, name: str, numbers: list[float]) -> list[str]:
    """What is wrong with a slider that should show ``numbers``."""
    control = page.locator(f'.bft-slider[data-name="{name}"] input')
    found = []
    box = control.bounding_box()
    if box["height"] < 44 or box["width"] < 44:
        found.append(f"slider {name}: smaller than 44 pixels")
    seen = move(page, name)
    if page.evaluate(
        "getComputedStyle(document.activeElement).outlineStyle"
    ) in {"none", "hidden"}:
        found.append(f"slider {name}: its focus is not seen")
    values = [value for value, _, _ in seen]
    if len(values) != len(numbers) or any(
        abs(new - old) > 1e-6 * max(1.0, abs(old))
        for new, old in zip(values, numbers, strict=False)
    ):
        found.append(f"slider {name}: shows {values}, computed are {numbers}")
    found += [
        f"slider {name}: reads {readout!r} at {value}"
        for value, readout, _ in seen
        if misread(readout, value)
    ]
    if len({curves for _, _, curves in seen}) == 1:
        found.append(f"slider {name}: nothing moves")
    return found


def recorded_sliders(path: Path) -> dict[str, list[float]]:
    """Name -> numbers of the sliders in a chapter's facts."""
    return {
        name.removeprefix("slider:"): fact["value"]
        for name, fact in facts.read(path.parent, path.stem).items()
        if re.fullmatch(r"slider:[^:]+", name)
    }


@pytest.mark.parametrize("view", ["light", "dark phone"])
def test_sliders_show_pythons_numbers(
    browser: Browser, site: Path, root: Path, view: str
):
    found = []
    for path in sorted((root / "notebooks" / "facts").glob("*.json")):
        due = recorded_sliders(path)
        html = site / "notebooks" / f"{path.stem}.html"
        with opened(browser, html, view) as (page, wrong):
            there = page.locator(".bft-slider").evaluate_all(
                "all => all.map((slider) => slider.dataset.name)"
            )
            assert sorted(there) == sorted(due), path.stem
            for name, numbers in due.items():
                found += slider_faults(page, name, numbers)
            found += wrong
    assert not found, "\n".join(found)


def test_sliders_show_a_state_without_javascript(browser: Browser, site: Path):
    count = 0
    for path in sorted((site / "notebooks").glob("*.html")):
        with opened(browser, path, java_script_enabled=False) as (page, _):
            for root in page.locator(".bft-slider").all():
                count += 1
                assert re.search(r"\d", root.locator(".readout").inner_text())
                assert root.locator("[data-curve]:not([d=''])").count()
                assert root.locator("input").is_disabled()
                assert root.locator("noscript").is_visible()
    assert count


def test_folded_cells_have_their_titles_and_proofs_one_button(
    browser: Browser, site: Path
):
    for path in sorted((site / "notebooks").glob("*.html")):
        with opened(browser, path) as (page, wrong):
            titles = page.locator("details.hide > summary").evaluate_all(
                "all => all.map((one) => [one.ariaLabel, "
                "one.querySelector('p').textContent])"
            )
            assert titles and not [one for one in titles if one[0]]
            assert not [name for _, name in titles if "code cell" in name]
            assert "@title" not in page.locator("article").inner_html()
            button = page.get_by_role("button", name="Show all proofs")
            proofs = page.locator(".cell:not(.solution) details.hide")
            solutions = page.locator(".cell.solution details.hide")
            assert proofs.count(), path.stem
            # laboratory and cookbook have no exercises
            assert solutions.count() or path.stem in APART, path.stem
            for pressed in ["false", "true", "false"]:
                assert button.get_attribute("aria-pressed") == pressed
                assert proofs.evaluate_all(
                    "(all, due) => all.every((one) => `${one.open}` === due)",
                    pressed,
                )
                assert solutions.evaluate_all(
                    "all => all.every((one) => !one.open)"
                )
                button.press("Enter" if pressed == "false" else "Space")
                page.wait_for_timeout(50)  # toggle events come later
            proofs.first.locator("summary").press("Enter")
            page.wait_for_timeout(50)
            assert button.get_attribute("aria-pressed") == "false"
            assert wrong == []


def test_no_proofs_no_button(browser: Browser, site: Path):
    with opened(browser, site / "book" / "pages" / "notation.html") as (
        page,
        _,
    ):
        assert page.locator("article h1").count() == 1
        assert page.get_by_role("button", name="proofs").count() == 0


# ------------------------------------------- each check, broken on purpose

NUMBERS = [0.25, 0.5, 0.75]


def slider_html() -> str:
    """A slider of three states."""
    states = [
        SliderState(
            lines=[([0, 1], [0, number], "line")],
            readout=f"K = {number:.2f}",
            number=number,
        )
        for number in NUMBERS
    ]
    box = sliders.Box((0.0, 1.0), (0.0, 1.0))
    settings = ["1", "2", "3"]
    return sliders.render("one", "Label", settings, states, box, ("x", "y"), 1)


@pytest.fixture
def write(tmp_path: Path):
    """Write a page around some HTML; its path."""

    def page(body: str) -> Path:
        path = tmp_path / "page.html"
        path.write_text(
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            "<title>Page</title></head><body><main><article><h1>Page</h1>"
            f"{body}</article></main></body></html>",
            "utf8",
        )
        return path

    return page


@pytest.mark.parametrize("view", VIEWS)
def test_a_page_in_order_passes(browser: Browser, write, view: str):
    body = (
        slider_html()
        + '<div class="math"><mjx-container>x</mjx-container></div>'
        + '<div class="cell_output"><img alt="5 curves that fall." '
        'src="data:image/gif;base64,R0lGODlhAQABAAAAACw="></div>'
    )
    with opened(browser, write(body), view) as (page, wrong):
        assert faults(page, wrong) == []
        assert slider_faults(page, "one", NUMBERS) == []


PIXEL = "src='data:image/gif;base64,R0lGODlhAQABAAAAACw='"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("<img alt='3' src='https://example.org/a.png'>", "asks for https:"),
        ("<script>fetch('https://example.org/')</script>", "asks for https:"),
        ("<img alt='3' src='missing.png'>", "does not find file:"),
        ("<script>console.error('Oh')</script>", "logs Oh"),
        ("<script>undefined_name()</script>", "raises"),
        ("<span class='math'>\\(x\\)</span>", "maths not typeset"),
        (
            "<span class='math'><mjx-container><mjx-merror>Undefined"
            "</mjx-merror></mjx-container></span>",
            "maths not typeset: Undefined",
        ),
        (
            "<span class='math'><mjx-container><g data-mml-node='merror'>x"
            "</g></mjx-container></span>",
            "maths not typeset: x",
        ),
        (f"<div class='cell_output'><img {PIXEL}></div>", "found none"),
        (
            f"<div class='cell_output'><img alt='_images/3a.png' {PIXEL}>"
            "</div>",
            "a file name",
        ),
        (
            f"<div class='cell_output'><img alt='Two curves' {PIXEL}></div>",
            "found no number",
        ),
        ("<p style='width: 3000px'>Wide</p>", "scrolls sideways"),
        ("<p style='color: #aaa'>Pale</p>", "axe: color-contrast"),
        ("<input type='range'>", "axe: label"),
    ],
)
def test_a_fault_of_a_page_is_noticed(
    browser: Browser, write, body: str, said: str
):
    with opened(browser, write(body)) as (page, wrong):
        page.wait_for_timeout(100)
        found = faults(page, wrong)
    assert any(said in fault for fault in found), found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"number":"0.75"', '"number":"0.7501"', "computed are"),
        ('"readout":"K = 0.75"', '"readout":"K = 0.76"', "reads 'K = 0.76'"),
        ("height: 44px", "height: 30px", "smaller than 44"),
        ("outline: 3px solid", "outline: 0 none", "focus is not seen"),
        ('path.setAttribute("d",', 'path.setAttribute("e",', "nothing moves"),
    ],
)
def test_a_fault_of_a_slider_is_noticed(
    browser: Browser, write, old: str, new: str, said: str
):
    text = slider_html()
    assert old in text
    text = text.replace(old, new)
    spoken = '"spoken":"3: K = 0.75"'
    text = (
        text.replace(spoken, spoken.replace("0.75", "0.76"))
        if ("0.76" in new)
        else text
    )
    with opened(browser, write(text)) as (page, _):
        found = slider_faults(page, "one", NUMBERS)
    assert any(said in fault for fault in found), found


def test_two_sliders_on_a_page_do_not_meddle(browser: Browser, write):
    two = slider_html() + slider_html().replace(
        'data-name="one"', 'data-name="two"'
    )
    with opened(browser, write(two)) as (page, wrong):
        assert slider_faults(page, "two", NUMBERS) == []
        first = page.locator('[data-name="one"]')
        assert first.get_attribute("data-index") == "1"
        assert wrong == []


def test_without_a_browser_only_ci_fails(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CI", "")
    with pytest.raises(pytest.skip.Exception, match="no browser"):
        executable()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI needs one"):
        executable()
