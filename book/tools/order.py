"""Words of order in the text, and the comparisons that they state.

In a Markdown cell::

    lower<!-- fact: error_bft < error_plain -->
    better<!-- fact: error_bft < error_plain, less is better -->

A word is followed by the comparison that it states: the fact of what the
word is about (after a change: of what has come of it), the sign that
``words.toml`` has for the word, and the fact or the number that it is
compared with.
"""

import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bft_ref.notebook.facts import Facts
from book.tools.numerals import FACT, NUMBER, look_up, value_of

NUMERIC = re.compile(r"-?\d+(?:\.\d+)?")
ORDER = re.compile(
    r"<!-- fact: (?P<left>(?:\d\d:)?\w+) (?P<sign>[<>]=?) "
    rf"(?P<right>(?:\d\d:)?\w+|{NUMERIC.pattern})"
    r"(?:, (?P<preferred>less|more) is (?P<good>\w+))? -->"
)
SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
DENIED = {"<": ">=", ">": "<=", "<=": ">", ">=": "<"}
WORDS: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("words.toml").read_text("utf8")
)


def says(*kinds: str) -> dict[str, str]:
    """What each word of these kinds says: a sign, "better" or "worse"."""
    return {
        word: relation
        for kind in kinds
        for relation, words in WORDS[kind].items()
        for word in words
    }


SAYS = says("comparatives", "changes", "others")


def any_of(words: Iterable[str]) -> str:
    """A pattern of any of these words, the longest first."""
    longest = sorted(words, key=len, reverse=True)
    return rf"\b(?:{'|'.join(longest)})\b".replace(" ", r"\s+")


ASKED = re.compile(
    # "no longer" is about time
    r"<!--.*?-->|\bno\s+longer\b|(?P<word>"
    + any_of(says("comparatives", "changes"))
    + rf"|{any_of(says('others'))}(?=\s+(?:\w+\s+)?than\b)"
    + r")(?P<after><!--.*?-->)?",
    re.IGNORECASE,
)
LAST = re.compile(any_of(SAYS) + r"$", re.IGNORECASE)
WAIVED = re.compile(r"\S+<!-- given -->")
THAN = re.compile(rf"[^,;:<]{{0,60}}?\bthan\b[^,;:<]{{0,60}}?{FACT.pattern}")
CLAUSE = re.compile(r"<!--.*?-->|[,;:()—–]|[.!?]\s", re.DOTALL)
COURSE = re.compile(
    rf"(?P<word>{any_of(WORDS['changes']['<'] + WORDS['changes']['>'])})"
    rf"(?:[^;:!?\d]{{0,60}}?\bfrom\s+(?P<old>{NUMBER})"
    rf"[^;:!?\d]{{0,60}}?\bto\s+(?P<new>{NUMBER})"
    rf"|\s+by\s+(?P<minus>[-−]{NUMBER}))",
    re.IGNORECASE,
)


def amount(text: str, facts: Facts) -> float:
    """A number as it is written, or the value of the fact of that name."""
    return float(text) if NUMERIC.fullmatch(text) else look_up(text, facts)


def holds(found: re.Match[str], facts: Facts) -> bool:
    """Whether the comparison of an order word is true."""
    left, right = (amount(found[side], facts) for side in ("left", "right"))
    return SIGNS[found["sign"]](left, right)


def spoken(words: str) -> str:
    """Words as the lists have them."""
    return " ".join(words.lower().split())


def discord(text: str, found: re.Match[str]) -> str | None:
    """Why the word before a comparison in ``text`` does not state it.

    None when it does.
    """
    before = text[: found.start()]
    word = LAST.search(before)
    if word is None:
        odd = (before.split() or [""])[-1]
        return (
            f"{odd!r} is no word of order that is known; expected one of "
            "book/tools/words.toml right before the comparison, or add it "
            "there to what it says of the first number: <, >, better, worse"
        )
    sign = SAYS[spoken(word[0])]
    if (sign in {"better", "worse"}) != bool(found["good"]):
        return (
            f"{word[0]!r} says {sign!r}; expected ', less is better' or "
            "', more is better' in the comparison after a word that says "
            "better or worse, and after no other"
        )
    if found["good"]:
        if SAYS.get(found["good"]) != "better":
            return f"{found['good']!r} is no word for better"
        sign = (
            "<"
            if (found["preferred"] == "less") == (sign == "better")
            else ">"
        )
    near = spoken(CLAUSE.split(before[: word.start()])[-1]).split()[-3:]
    if blurred := set(near) & set(WORDS["negations"]["blur"]):
        return (
            f"no comparison says what {blurred.pop()!r} leaves of "
            f"{word[0]!r}; say it in other words, or waive it with "
            "<!-- given -->"
        )
    turns = sum(
        one in WORDS["negations"]["turn"] or one.endswith(("n't", "n’t"))
        for one in near
    )
    due = DENIED[sign] if turns % 2 else sign
    if due != found["sign"]:
        said = " ".join([*near, word[0]]) if turns else word[0]
        return (
            f"{said!r} says {due}; expected what the word is about (after a "
            f"change: the new value) {due} what it is compared with"
        )
    than = THAN.match(text, found.end())
    if than and than["name"] == found["left"] != found["right"]:
        return f"'than' leads to {than['name']}, the first of the two"
    return None


def misled(text: str) -> Iterator[str]:
    """Where ``text`` as it is read rises from 3 to 2, or rises by −1.

    What is waived is passed over.
    """
    seen = re.sub(r"<!--.*?-->", "", re.sub(WAIVED, "…", text), flags=re.S)
    for found in COURSE.finditer(seen):
        shown = " ".join(found[0].split())
        if found["minus"]:
            yield f"{shown!r}: by a negative number"
        elif not SIGNS[SAYS[spoken(found["word"])]](
            value_of(found["new"]), value_of(found["old"])
        ):
            yield f"{shown!r}: the numbers go the other way"
