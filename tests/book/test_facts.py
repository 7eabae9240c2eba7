"""Facts and the prose that quotes them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from bft_ref.notebook import chapter, fact, facts
from book.tools import cells, numerals, order, prose
from tests.book.small import NOTEBOOKS, ROOT, each_notebook

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("book/pages/*.md")])

FACTS = {
    "gain": {"value": 0.7714, "tol": 1e-8},
    "low": {"value": -0.25, "tol": 1e-8},
    "big": {"value": 15098.52, "tol": 1e-8},
    "ahead": {"value": 3.97, "tol": 1e-8},
    "three": {"value": 3.0, "tol": 1e-8},
    "two": {"value": 2.0, "tol": 1e-8},
    "tiny": {"value": 1.21e-9, "tol": 1e-8},
    "count": {"value": 1871.0, "tol": 0.0},
    "figure:x": {"value": [1.0, 2.0], "tol": 1e-6},
}


@each_notebook
def test_prose_states_the_facts(path: Path):
    notebook = nbformat.read(path, as_version=4)
    recorded = facts.read(path.parent / "facts", path.stem)
    assert [
        f"cell {at}: {complaint}"
        for at, source in cells.sources(notebook, "markdown")
        for complaint in prose.prose_complaints(source, recorded)
    ] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_pages_that_quote_a_fact_quote_it_right(path: Path):
    assert prose.page_complaints(path.read_text("utf8")) == []


def book() -> Iterator[tuple[str, facts.Facts]]:
    """Every sentence of the book that is checked, and its facts."""
    for path in NOTEBOOKS:
        recorded = facts.read(path.parent / "facts", path.stem)
        notebook = nbformat.read(path, as_version=4)
        for _, source in cells.sources(notebook, "markdown"):
            for sentence in prose.sentences(source):
                yield sentence, recorded
    for path in PAGES:
        for sentence in prose.sentences(path.read_text("utf8")):
            yield sentence, {}


def alt_texts() -> Iterator[str]:
    """The alternative text of every figure of the book."""
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            image = cell.metadata.get("mystnb", {}).get("image", {})
            yield image.get("alt", "")


def test_no_comparison_of_the_book_outlives_another_direction():
    survivors, seen = [], 0
    for text, recorded in book():
        for found in order.ORDER.finditer(text):
            word = order.LAST.search(text[: found.start()])
            assert word, text
            says = order.SAYS[order.spoken(word[0])]
            others = [one for one in order.SAYS if order.SAYS[one] != says]
            denied = [f"{no} {word[0]}" for no in ("not", "never", "hardly")]
            seen += 1
            survivors += [
                (one, text)
                for one in [*others, *denied, "odder", "the"]
                if not any(
                    found[0] in complaint
                    for complaint in prose.fact_complaints(
                        text[: word.start()] + one + text[word.end() :],
                        recorded,
                    )
                )
            ]
    assert seen > 20
    assert survivors == []


def test_no_course_of_the_book_outlives_the_other_direction():
    texts = [text for text, _ in book()]
    survivors = []
    for source in (texts, alt_texts()):
        seen = 0
        for text in source:
            plain = prose.COMMENT.sub("", text)
            for found in order.COURSE.finditer(plain):
                seen += 1
                old, new = found["old"], found["new"]
                other = "falls" if found["word"] in RISING else "rises"
                swapped = found[0].replace(old, "@").replace(new, old)
                survivors += [
                    slip
                    for slip in (
                        swapped.replace("@", new),
                        found[0].replace(found["word"], other),
                    )
                    if not list(order.misled(slip))
                ]
        assert seen > 3
    assert survivors == []


RISING = order.WORDS["changes"][">"]


def test_a_word_of_order_has_one_direction_and_one_place():
    listed = [
        word
        for kind in ("comparatives", "changes", "others")
        for words in order.WORDS[kind].values()
        for word in words
    ]
    assert len(listed) == len(set(listed))
    assert all(word == order.spoken(word) for word in listed)
    assert set(order.SAYS.values()) <= {*order.SIGNS, "better", "worse"}


def test_every_facts_file_has_its_notebook():
    stored = {path.stem for path in ROOT.glob("notebooks/facts/*.json")}
    assert stored == {path.stem for path in NOTEBOOKS}


RIGHT = [
    "A gain of 0.77<!-- fact: gain .2f --> here.",
    "So $K = 0.77$<!-- fact: gain .2f --> here.",
    "So $K = 0.77$.<!-- given --> No fact is meant: maths is not read.",
    "It is −0.25<!-- fact: low .2f --> there.",
    "It is $-0.25$<!-- fact: low .2f --> there.",
    "It is 15,098.5<!-- fact: big ,.1f --> there.",
    r"It is $15{,}098.5$<!-- fact: big ,.1f --> there.",
    "It is 1.2 × 10⁻⁹<!-- fact: tiny .1e --> there.",
    r"It is $1.2 \times 10^{-9}$<!-- fact: tiny .1e --> there.",
    "It is 77%<!-- fact: gain .0% --> there.",
    "From 1871<!-- fact: count d --> on.",
    "From 1871–1970<!-- given --> and 5 %<!-- given --> on.",
    "It is 0.77<!-- fact: gain .2f -->, higher<!-- fact: gain > low -->.",
    "A larger one. It is 0.77<!-- fact: gain .2f --> here.",
    "It is 0.77<!-- fact: gain .2f -->, a higher<!-- given --> aim.",
    "It is 0.77<!-- fact: gain .2f -->, no longer a claim.",
    "It is 0.77<!-- fact: gain .2f -->, less; more below.",
    "It is 3.97<!-- fact: ahead .2f --> there.",
    "It is more\nthan<!-- fact: gain > low --> that.",
    "*Lower*<!-- fact: low < 0 --> than 0.5<!-- given -->.",
    "It exceeds<!-- fact: gain > -0.5 --> that.",
    "It is not much lower<!-- fact: gain >= low --> than that.",
    "It doesn't ever fall<!-- fact: gain >= low -->.",
    "It does not move, and is higher<!-- fact: gain > low -->.",
    "It has at most<!-- fact: low <= gain --> that.",
    "It is better<!-- fact: low < gain, less is better --> so.",
    "It is better<!-- fact: gain > low, more is better --> so.",
    "It is slower<!-- fact: gain > low, less is faster --> so.",
    "It falls<!-- fact: low < gain --> from 0.77<!-- fact: gain .2f --> to "
    "−0.25<!-- fact: low .2f -->.",
    "It rose from 1871<!-- given --> to 1850<!-- given -->.",
    "It rises<!-- given --> from 3<!-- fact: three d --> to "
    "2<!-- fact: two d -->.",
    "It rises<!-- fact: gain > low --> by 0.77<!-- fact: gain .2f -->.",
    "It is lower<!-- fact: low < gain --> than the 0.77<!-- fact: gain .2f -->"
    " there.",
    "See (2.3), Chapter 3, equations (2.3)–(2.5), Exercise 2.1, float64.",
    "# 2 A title of 1871\n\n`x = 3`, $y = 4$, [a 5](https://x.y/6) text",
    "1. First\n2. Second, of CO₂\n\n```\nx = 12\n```",
    "| a | b |\n|---|---|\n| x | 0.77<!-- fact: gain .2f --> |",
    "<details><summary>Solution</summary>\n\nNone.\n\n</details>",
]
WRONG = [
    ("A gain of 0.78<!-- fact: gain .2f --> here.", "now reads '0.77'"),
    ("So $K = 0.7$<!-- fact: gain .2f --> here.", "now reads '0.77$'"),
    ("It is 0.25<!-- fact: low .2f --> there.", "now reads '−0.25'"),
    ("A gain of 0.77<!-- fact: gone .2f --> here.", "no fact 'gone'"),
    ("A gain of 0.77<!-- fact: gain .2q --> here.", "format '.2q'"),
    ("A gain of 0.77<!-- fact:gain .2f --> here.", "no number or word"),
    ("A gain of 0.77<!-- fact: gain --> here.", "no number or word"),
    ("A gain of 0.77 here.", "'0.77' in"),
    ("Since 1871.", "'1871"),
    ("Of 5<!-- given --> there are 3.", "'3"),
    ("| a |\n|---|\n| 12 |", "'12'"),
    ("<p>There are 12 of them</p>", "'12'"),
    ("> **Note.** Some 12 of them.", "'12'"),
    ("It is lower<!-- fact: gain < low -->.", "not true"),
    ("It is lower<!-- fact: low < -0.5 -->.", "not true"),
    ("It rises<!-- fact: low < gain -->.", "'rises' says >"),
    ("It rises<!-- fact: gain >= low -->.", "'rises' says >"),
    ("It is odder<!-- fact: gain > low -->.", "'odder' is no word of order"),
    ("It is odder<!-- fact: gain > low -->.", "words.toml"),
    ("It is flower<!-- fact: low < gain -->.", "'flower' is no word"),
    ("It is not lower<!-- fact: low < gain -->.", "not lower' says >="),
    ("It isn’t lower<!-- fact: low < gain -->.", "lower' says >="),
    ("It hardly rises<!-- fact: gain > low -->.", "what 'hardly' leaves of"),
    ("It is better<!-- fact: gain > low -->.", "less is better"),
    ("It is lower<!-- fact: low < gain, less is better -->.", "no other"),
    ("It is worse<!-- fact: low < gain, less is better -->.", "says >"),
    ("It is better<!-- fact: low < gain, more is better -->.", "says >"),
    ("It is better<!-- fact: low < gain, less is worse -->.", "for better"),
    (
        "It falls<!-- fact: low < gain --> from −0.25<!-- fact: low .2f --> "
        "to 0.77<!-- fact: gain .2f -->.",
        "'falls from −0.25 to 0.77': the numbers go the other way",
    ),
    (
        "It rises<!-- fact: gain > low --> by −0.25<!-- fact: low .2f -->.",
        "'rises by −0.25': by a negative number",
    ),
    (
        "A rise<!-- fact: gain > low --> from 1.2 × 10⁻⁹<!-- fact: tiny .1e "
        "--> to −0.25<!-- fact: low .2f -->.",
        "go the other way",
    ),
    (
        "It is lower<!-- fact: low < gain --> than "
        "the −0.25<!-- fact: low .2f --> there.",
        "'than' leads to low",
    ),
    ("It is 0.77<!-- fact: gain .2f -->, further than that.", "'further' in"),
    ("It is 0.77<!-- fact: gain .2f --> more often than.", "'more' in"),
    ("It is 0.77<!-- fact: gain .2f -->, no lower.", "'lower' in"),
    ("It is lower<!-- fact: gain < gone -->.", "no fact 'gone'"),
    ("It is lower<!-- fact: gain = low -->.", "no number or word"),
    ("Text\n\n<!-- fact: gain .2f --> 0.77", "a line begins"),
    ("It falls to 0.77<!-- fact: gain .2f -->.", "'falls' in"),
    ("No 1<!-- fact: 77:gain .0f -->.", "no facts of a chapter 77"),
]


@pytest.mark.parametrize("source", RIGHT)
def test_prose_that_is_right_passes(source: str):
    assert prose.prose_complaints(source, FACTS) == []
    assert numerals.render(source, FACTS) == source


@pytest.mark.parametrize(("source", "said"), WRONG)
def test_prose_that_is_wrong_is_noticed(source: str, said: str):
    complaints = prose.prose_complaints(source, FACTS)
    assert said in complaints[0]


def test_what_is_wrong_with_a_fact_on_a_page_is_noticed():
    page = "Its 12 are higher<!-- fact: {} -->."
    right = page.format("02:fused_sd < 02:sd_better")
    assert prose.page_complaints(right.replace("higher", "lower")) == []
    (found,) = prose.page_complaints(right)
    assert "'higher' says >" in found
    (found,) = prose.page_complaints(page.format("02:fused_sd = 1"))
    assert "no number or word of that form" in found
    (found,) = prose.page_complaints("55<!-- fact: 02:fused_sd .0f --> fell.")
    assert "a word of order beside a fact" in found


def test_rendering_mends_the_digits_and_nothing_else():
    stale = (
        "Of 3, 0.1<!-- fact: gain .3f --> and $K < 9$<!-- fact: low .1f -->\n"
        "`0.1<!-- fact -->`"
    )
    assert numerals.render(stale, FACTS) == (
        "Of 3, 0.771<!-- fact: gain .3f --> and "
        "$K < -0.2$<!-- fact: low .1f -->\n`0.1<!-- fact -->`"
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty notebooks folder to work in."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr(facts, "_current", None)
    return tmp_path / "notebooks"


@pytest.fixture
def mode(monkeypatch, folder):
    """Begin a chapter in a mode."""

    def begin(name: str) -> None:
        monkeypatch.setenv("BFT_FACTS", name)
        chapter("02-small")

    return begin


def test_facts_are_recorded_in_order_with_their_tolerance(folder, mode):
    mode("record")
    assert fact("b", torch.tensor([0.5])) == 0.5
    assert fact("a", np.float64(3), tol=0.1) == 3
    stored = json.loads((folder / "facts" / "02-small.json").read_text())
    assert list(stored) == ["b", "a"]
    assert stored["a"] == {"value": 3.0, "tol": 0.1}


def test_a_value_may_move_by_its_tolerance_and_no_more(folder, mode):
    mode("record")
    fact("small", 0.5, tol=1e-3)
    fact("large", 2500.0, tol=1e-3)
    mode("check")
    fact("small", 0.5009, tol=1e-3)
    fact("large", 2502.4, tol=1e-3)
    mode("check")
    with pytest.raises(facts.FactError, match=r"'small' is now 0.5011"):
        fact("small", 0.5011, tol=1.0)
    with pytest.raises(facts.FactError, match="'large' is now"):
        fact("large", 2502.6)


def test_a_fact_not_recorded_or_not_computed_is_noticed(folder, mode):
    notebook = folder / "02-small.ipynb"
    mode("record")
    fact("a", 2.5)
    fact("b", 3.5)
    mode("check")
    fact("a", 2.5)
    with pytest.raises(facts.FactError, match="'new' is not recorded"):
        fact("new", 1.5)
    assert facts.missing(notebook) == ["b"]
    fact("b", 3.5)
    assert facts.missing(notebook) == []


def test_a_new_check_forgets_what_an_older_one_computed(folder, mode):
    mode("record")
    fact("a", 2.5)
    mode("check")
    fact("a", 2.5)
    mode("check")
    assert facts.missing(folder / "02-small.ipynb") == ["a"]


def test_a_chapter_without_recorded_facts_cannot_be_checked(folder, mode):
    with pytest.raises(facts.FactError, match="does not exist"):
        mode("check")


def test_a_reader_never_sees_a_fact_fail(folder, mode):
    mode("record")
    fact("a", 2.5)
    before = (folder / "facts" / "02-small.json").read_text()
    mode("")
    fact("a", 99.0)
    fact("a", 98.0)
    fact("other", 1.5)
    assert (folder / "facts" / "02-small.json").read_text() == before
    assert not (folder.parent / "_build").exists()


def test_one_name_for_two_facts_is_an_error(folder, mode):
    mode("record")
    fact("a", 2.5)
    with pytest.raises(ValueError, match="'a': recorded twice"):
        fact("a", 2.5)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (True, TypeError),
        ("0.5", TypeError),
        (None, TypeError),
        ([1.5, 2.5], TypeError),
        (1j, TypeError),
        (math.nan, ValueError),
        (torch.tensor(math.inf), ValueError),
    ],
)
def test_a_fact_is_one_finite_number(mode, value, error):
    mode("")
    with pytest.raises(error, match="fact 'a'"):
        fact("a", value)


def test_bad_names_and_tolerances_say_so(mode, monkeypatch):
    mode("")
    with pytest.raises(ValueError, match="name: expected an identifier"):
        fact("a b", 1.5)
    with pytest.raises(ValueError, match="tol of fact 'a'"):
        fact("a", 1.5, tol=-1)
    with pytest.raises(ValueError, match="tol of fact 'a': expected 0 to 1"):
        fact("a", 15.0, tol=4)
    with pytest.raises(ValueError, match="file name without"):
        chapter("small")
    with pytest.raises(ValueError, match="BFT_FACTS"):
        mode("sometimes")


def test_a_fact_before_its_chapter_says_what_to_do(folder):
    with pytest.raises(RuntimeError, match="call chapter"):
        fact("a", 2.5)


def test_a_fact_on_the_last_line_shows_nothing(mode):
    from IPython.core.formatters import DisplayFormatter

    mode("")
    assert DisplayFormatter().format(fact("a", 2.5)) == ({}, {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_recorded_facts_are_found_by_name(path: Path):
    assert facts.recorded(path.stem)


def test_facts_of_no_chapter_say_where_they_were_looked_for():
    with pytest.raises(FileNotFoundError, match="nor in the package"):
        facts.recorded("99-none")
