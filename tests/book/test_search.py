"""The search of the built book: what answers first, and what it shows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Browser

from tests.book.test_browser import opened

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FOUND = """() => [...document.querySelectorAll("ul.search > li")]
  .map((one) => [
    one.querySelector("a").getAttribute("href").replace(/[?#].*/, ""),
    one.querySelector("a").textContent,
    one.querySelector(".context")?.textContent ?? ""])"""


class Result(NamedTuple):
    """One line of what was found."""

    page: str
    title: str
    excerpt: str


@pytest.fixture(scope="module")
def search(
    browser: Browser, site: Path
) -> Iterator[Callable[[str], list[Result]]]:
    """Ask the built search page, as if the book lay on a server."""
    context = browser.new_context()
    context.route(
        "http://book/**",
        lambda route: route.fulfill(
            path=site / urlsplit(route.request.url).path[1:]
        ),
    )

    def ask(words: str) -> list[Result]:
        page = context.new_page()
        page.goto(f"http://book/search.html?q={quote(words)}")
        page.wait_for_function(
            "/finished|did not/.test(Search.status?.innerText)"
        )
        page.wait_for_load_state("networkidle")
        found = [Result(*one) for one in page.evaluate(FOUND)]
        page.close()
        return found

    yield ask
    context.close()


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("gain", ["notebooks/02", "notebooks/06"]),
        ("Kalman gain", ["notebooks/02", "notebooks/06"]),
        ("REML", ["notebooks/04"]),
        ("kriging", ["notebooks/03"]),
        ("bfloat16", ["notebooks/cookbook", "notebooks/10"]),
        ("bf16", ["notebooks/cookbook", "notebooks/10"]),
        ("half precision", ["notebooks/cookbook", "notebooks/10"]),
        ("cold start", ["notebooks/15", "notebooks/13"]),
        ("kriging_attention", ["book/pages/api-core"]),
    ],
)
def test_what_answers_first(search, words: str, first: list[str]):
    found = [result.page for result in search(words)]
    head = found[: len(first) + 1]  # a page's section may stand beside it
    for page in first:
        assert any(one.startswith(page) for one in head), found[:6]


def test_excerpts_are_prose_about_what_was_asked(search):
    results = search("gain")
    told = [r for r in results if r.page.startswith("notebooks/0")]
    assert told
    for result in told:
        assert "gain" in result.excerpt.lower(), result
        for code in ["import ", "fact(", "assert", "@title", "Contents"]:
            assert code not in result.excerpt, result


def test_nothing_folded_is_found(search):
    found = search("assert_close")
    assert not [one for one in found if one.page.startswith("notebooks/0")]


def test_from_a_folder_the_search_has_no_excerpts_and_no_errors(
    browser: Browser, site: Path
):
    with opened(browser, site / "search.html") as (page, wrong):
        page.goto(page.url + "?q=gain")
        page.wait_for_function("/finished/.test(Search.status?.innerText)")
        assert page.locator("ul.search > li").count() > 5
        assert page.locator("ul.search .context").count() == 0
        assert wrong == []
