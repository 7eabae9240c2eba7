"""Tables and long formulas of the built book, as a reader sees them."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.book.test_browser import opened

pytestmark = [pytest.mark.browser, pytest.mark.slow]

BROKEN = """() => [...document.querySelectorAll("article table code .pre")]
  .filter((word) => /^[\\w.]+$/.test(word.textContent)
    && word.getClientRects().length > 1)
  .map((word) => word.textContent)"""
# Where the text of neighbouring cells comes nearer than 8 pixels.
TOUCHING = """() => {
  const text = (cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return range.getBoundingClientRect();
  };
  return [...document.querySelectorAll("article td + td, article th + td")]
    .filter((cell) => cell.checkVisibility() && cell.textContent.trim()
      && cell.previousElementSibling.textContent.trim()
      && text(cell).left - text(cell.previousElementSibling).right < 8)
    .map((cell) => cell.textContent);
}"""
RAGGED = """() => [...document.querySelectorAll("article .numeric")]
  .filter((cell) => { const style = getComputedStyle(cell);
    return style.textAlign !== "right"
      || style.fontVariantNumeric !== "tabular-nums"; })
  .map((cell) => cell.textContent)"""
# How far the header is from where it should stay, once half is read.
STRAYED = """async (table) => {
  const head = table.tHead;
  const box = table.closest(".pst-scrollable-table-container, .output");
  const inside = getComputedStyle(box).overflowY === "auto";
  if (inside) {
    box.scrollIntoView({block: "center", behavior: "instant"});
    box.scrollTop = box.scrollHeight / 2;
  } else {
    const {top, height} = table.getBoundingClientRect();
    scrollTo({top: scrollY + top + height / 2, behavior: "instant"});
  }
  await new Promise((done) => setTimeout(done, 300));
  const bar = document.querySelector(".bd-header-article");
  const due = (inside ? box : bar).getBoundingClientRect();
  return [inside, Math.abs(head.getBoundingClientRect().top
    - (inside ? due.top : due.bottom))];
}"""
# (how far it goes on, whether that is seen, whether the keyboard gets there)
FORMULAS = """() => [...document.querySelectorAll("article div.math")]
  .filter((box) => box.checkVisibility())
  .map((box) => [box.scrollWidth - box.clientWidth,
    getComputedStyle(box).maskImage !== "none", box.tabIndex === 0])"""
CHAPTER = "notebooks/13-sequential-recommendation"


@pytest.mark.parametrize("view", ["light", "phone"])
@pytest.mark.parametrize(
    "name",
    ["book/pages/notation", "book/pages/replication", CHAPTER],
)
def test_tables_can_be_read(
    browser: Browser, site: Path, name: str, view: str
):
    with opened(browser, site / f"{name}.html", view) as (page, _):
        assert page.locator("article table").count()
        assert page.evaluate(BROKEN) == []
        assert page.evaluate(TOUCHING) == []
        assert page.evaluate(RAGGED) == []
        if name == CHAPTER:
            assert page.locator("article .numeric").count() > 50


@pytest.mark.parametrize(
    ("view", "boxed"), [("light", False), ("phone", True)]
)
def test_the_header_of_a_long_table_stays(
    browser: Browser, site: Path, view: str, boxed: bool
):
    for name in ["book/pages/notation", CHAPTER]:
        with opened(browser, site / f"{name}.html", view) as (page, _):
            page.wait_for_timeout(200)
            table = page.locator("article table").last
            inside, strayed = table.evaluate(STRAYED)
            assert inside == boxed, name
            assert strayed < 3, name


def formulas(page: Page) -> list[list]:
    """What the formulas of a page say of themselves, once typeset."""
    page.wait_for_timeout(200)
    return page.evaluate(FORMULAS)


def test_a_long_formula_says_that_it_goes_on(browser: Browser, site: Path):
    path = site / "notebooks" / "05-inverse-chi-square.html"
    with opened(browser, path, "phone") as (page, _):
        found = formulas(page)
        assert [long for long in found if long[0] > 1]
        for rest, faded, reached in found:
            assert faded == reached == (rest > 1)
        box = page.locator("article div.math[tabindex]").first
        box.evaluate("(box) => { box.scrollLeft = box.scrollWidth }")
        page.wait_for_timeout(200)
        mask = box.evaluate("(box) => getComputedStyle(box).maskImage")
        assert mask == "none"
