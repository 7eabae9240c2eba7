"""What is wrong with the numbers and the words of order in the text.

What is read is the text of paragraphs, lists, tables and raw HTML; headings,
code, maths without a fact, links, tags and comments are not. There

- every number that refers to a fact shows the fact's digits
  (:mod:`book.tools.numerals`);
- every other numeral is waived with ``<!-- given -->``, but for references
  such as (2.3), Chapter 3, Exercise 2.1, Python 3.11, and for names such as
  float64;
- every comparison of two facts is true, and the word before it states it
  (:mod:`book.tools.order`);
- what rises from one number to another does rise, in alt texts too;
- a sentence that quotes a fact and holds a word of order ("larger",
  "falls") has a comparison right after that word, or ``<!-- given -->``.
  A sentence without facts may compare as it likes.

No check reads numbers in words (half, twice), quantifiers (all, never), the
unit after a number, or above and below without a comparison. Each check
returns what is wrong, as lines; ``tests/book`` proves each by a text that
breaks it on purpose.
"""

import re
from collections.abc import Iterator

from markdown_it.token import Token

from bft_ref.notebook.facts import FactError, Facts
from book.tools import order
from book.tools.cells import normal, parsed
from book.tools.numerals import FACT, render

GIVEN = "<!-- given -->"
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
NUMERAL = re.compile(
    r"(?<![\w.])\d(?:[\d.,:/×–—−-]*\d)?(?:\s?%)?(?P<given><!-- given -->)?"
)
REFERENCE = re.compile(
    r"\(\d+\.\d+\)|\b(?:Chapters?|Sections?|Exercises?|Figures?|Parts?|"
    r"Equations?|Labs?|Python|torch|PyTorch) \(?\d+(?:\.\d+)*\)?"
    r"(?:(?:–|, | and | to )\d+(?:\.\d+)*)*",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z*(])")


def prose_complaints(source: str, facts: Facts) -> list[str]:
    """What is wrong with the numbers of one Markdown cell."""
    return [
        complaint
        for sentence in sentences(source)
        for complaint in (
            *fact_complaints(sentence, facts),
            *numeral_complaints(sentence),
        )
    ]


def page_complaints(source: str) -> list[str]:
    """What is wrong with the facts that a page of the book quotes.

    Its other numbers are its own.
    """
    return [
        complaint
        for sentence in sentences(source)
        for complaint in fact_complaints(sentence, {})
    ]


def sentences(source: str) -> Iterator[str]:
    """The sentences of Markdown that prose checks read."""
    for text in paragraphs(source):
        yield from SENTENCE.split(text)


def paragraphs(source: str) -> Iterator[str]:
    """The text of each block of Markdown that prose checks read.

    Comments stay; maths stays only before a comment that names a fact;
    code, links, tags, headings and images go.
    """
    tokens = parsed(source)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if before is not None and before.type == "heading_open":
            continue
        if token.type == "inline":
            yield "".join(pieces(token.children or []))
        elif token.type == "html_block":
            yield re.sub(r"<(?!!--)[^>]*>", " ", token.content)


def pieces(tokens: list[Token]) -> Iterator[str]:
    """The text of inline tokens, as :func:`paragraphs` keeps it."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += {"link_open": 1, "link_close": -1}.get(token.type, 0)
        if depth:
            continue
        if token.type == "text":
            yield token.content
        elif token.type in {"softbreak", "hardbreak"}:
            yield "\n"
        elif token.type == "html_inline" and token.content[:4] == "<!--":
            yield token.content
        elif token.type == "math_inline":
            after = tokens[at + 1] if at + 1 < len(tokens) else None
            referred = after and after.content.startswith("<!-- fact")
            yield f"${token.content}$" if referred else "$ $"
        elif token.type == "code_inline":
            yield "` `"


def fact_complaints(text: str, facts: Facts) -> Iterator[str]:
    """What is wrong with the facts and order words of one sentence."""
    if text.lstrip().startswith("<!-- fact"):
        yield f"a line begins with a comment: {text.strip()!r}"
        return
    for match in FACT.finditer(text):
        try:
            due = render(match[0], facts)
        except FactError as error:
            yield f"{match[0]!r}: {error}"
            continue
        if due != match[0]:
            yield (
                f"{match[0]!r}: the fact now reads "
                f"{due.partition('<!--')[0]!r}; run make notebooks"
            )
    for match in order.ORDER.finditer(text):
        try:
            if not order.holds(match, facts):
                yield f"{match[0]!r}: not true of the recorded facts"
        except FactError as error:
            yield f"{match[0]!r}: {error}"
        if discord := order.discord(text, match):
            yield f"{match[0]!r} in {normal(text)!r}: {discord}"
    yield from order.misled(text)
    if FACT.search(text):
        for match in order.ASKED.finditer(text):
            after = match["after"] or ""
            if match["word"] and not (
                after == GIVEN or order.ORDER.fullmatch(after)
            ):
                yield (
                    f"{match[0]!r} in {normal(text)!r}: a word of order "
                    "beside a fact needs a comparison right after it"
                )
    for comment in COMMENT.findall(unreferred(text)):
        if "fact" in comment:
            yield f"{comment!r}: no number or word of that form before it"


def unreferred(text: str) -> str:
    """``text`` without the numbers and comparisons that name facts."""
    return order.ORDER.sub("", FACT.sub("", text))


def numeral_complaints(text: str) -> Iterator[str]:
    """Numerals of one sentence that are neither facts nor waived."""
    rest = COMMENT.sub(
        lambda match: match[0] if match[0] == GIVEN else "", unreferred(text)
    )
    for match in NUMERAL.finditer(REFERENCE.sub("", rest)):
        if not match["given"]:
            yield (
                f"{match[0]!r} in {normal(rest)!r}: neither a fact nor "
                "waived with <!-- given -->"
            )
