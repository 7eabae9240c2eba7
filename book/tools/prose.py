"""The numbers in prose, and the facts that they state.

In a Markdown cell::

    a gain of 0.77<!-- fact: gain_rare .2f -->
    $K = 0.77$<!-- fact: gain_rare .2f -->
    lower<!-- fact: error_bft < error_plain -->
    better<!-- fact: error_bft < error_plain, less is better -->
    since 1871<!-- given -->

A number is followed by a comment that names its fact and its format (one of
Python's, without type letters of its own invention); inside ``$…$`` it is
the last number of the formula, and the comment follows the closing ``$``.
``02:name`` names a fact of chapter 2. A comment never begins a line, where
Markdown would take the line for HTML. A word is followed by the comparison
that it states: the fact of what the word is about (after a change: of what
has come of it), the sign that ``words.toml`` has for the word, and the fact
or the number that it is compared with. :func:`render` writes the numbers
from the facts; ``checks.prose_complaints`` looks for what is wrong.
"""

import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bft_ref.notebook.facts import FactError, Facts, values

# 15,099.5 or 1.2 × 10⁻⁹ or 77 %; in maths 1{,}871, 1.2 \times 10^{-9}, 77\%
NUMBER = (
    r"[-−+]?\d+(?:(?:,|\{,\})\d{3})*(?:\.\d+)?"
    r"(?:\s?(?:×|\\times)\s?10(?:[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+|\^\{?-?\d+\}?))?\\?%?"
)
FACT = re.compile(
    rf"(?P<shown>{NUMBER})(?P<rest>[^$\n\d]*\$)?"
    r"<!-- fact: (?P<name>(?:\d\d:)?\w+) (?P<spec>[-+,.\w%]+) -->"
)
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
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
PLAIN = str.maketrans("−⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "--0123456789", ",{}%\\")

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


def look_up(name: str, facts: Facts) -> float:
    """The value of a fact; FactError where it is not recorded."""
    if ":" in name:
        from book.tools.checks import facts_of

        number, name = name.split(":")
        facts = facts_of(int(number))
    if name not in values(facts):
        raise FactError(f"no fact {name!r} is recorded")
    return values(facts)[name]


def write(value: float, spec: str, maths: bool) -> str:
    """``value`` in a format of Python's, as prose or as TeX."""
    try:
        text = format(int(value) if spec in {"d", ",d"} else value, spec)
    except ValueError as error:
        raise FactError(f"format {spec!r}: {error}") from error
    digits, _, power = text.partition("e")
    if maths:
        digits = digits.replace(",", "{,}").replace("%", r"\%")
        tail = rf" \times 10^{{{int(power)}}}" if power else ""
    else:
        digits = digits.replace("-", "−")
        tail = f" × 10{str(int(power)).translate(RAISED)}" if power else ""
    return digits + tail


def render(source: str, facts: Facts) -> str:
    """Markdown ``source`` with every referenced number as recorded."""

    def due(found: re.Match[str]) -> str:
        rest = found["rest"] or ""
        shown = write(look_up(found["name"], facts), found["spec"], bool(rest))
        comment = found[0][found[0].index("<!--") :]
        return shown + rest + comment

    return FACT.sub(due, source)


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
            read(found["new"]), read(found["old"])
        ):
            yield f"{shown!r}: the numbers go the other way"


def read(number: str) -> float:
    """The value of a number as :func:`write` shows it."""
    digits, _, power = re.sub(
        r"\s?(?:×|\\times)\s?10\^?", "e", number
    ).partition("e")
    return float(digits.translate(PLAIN)) * 10.0 ** int(
        power.translate(PLAIN) or 0
    )
