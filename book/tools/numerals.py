"""The numbers of the text, written from the facts that they state.

In a Markdown cell::

    a gain of 0.77<!-- fact: gain_rare .2f -->
    $K = 0.77$<!-- fact: gain_rare .2f -->

A number is followed by a comment that names its fact and its format (one of
Python's, without type letters of its own invention); inside ``$…$`` it is
the last number of the formula, and the comment follows the closing ``$``.
``02:name`` names a fact of chapter 2. A comment never begins a line, where
Markdown would take the line for HTML.
"""

import re
from functools import cache
from pathlib import Path

from bft_ref.notebook.facts import FactError, Facts, read, values

ROOT = Path(__file__).resolve().parents[2]
# 15,099.5 or 1.2 × 10⁻⁹ or 77 %; in maths 1{,}871, 1.2 \times 10^{-9}, 77\%
NUMBER = (
    r"[-−+]?\d+(?:(?:,|\{,\})\d{3})*(?:\.\d+)?"
    r"(?:\s?(?:×|\\times)\s?10(?:[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+|\^\{?-?\d+\}?))?\\?%?"
)
FACT = re.compile(
    rf"(?P<shown>{NUMBER})(?P<rest>[^$\n\d]*\$)?"
    r"<!-- fact: (?P<name>(?:\d\d:)?\w+) (?P<spec>[-+,.\w%]+) -->"
)
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
PLAIN = str.maketrans("−⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "--0123456789", ",{}%\\")


@cache
def facts_of(number: int) -> Facts:
    """The facts of the chapter of that number."""
    folder = ROOT / "notebooks" / "facts"
    paths = sorted(folder.glob(f"{number:02d}-*.json"))
    if not paths:
        raise FactError(f"no facts of a chapter {number} in {folder}")
    return read(folder, paths[0].stem)


def look_up(name: str, facts: Facts) -> float:
    """The value of a fact; FactError where it is not recorded."""
    if ":" in name:
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


def value_of(number: str) -> float:
    """The value of a number as :func:`write` shows it."""
    digits, _, power = re.sub(
        r"\s?(?:×|\\times)\s?10\^?", "e", number
    ).partition("e")
    return float(digits.translate(PLAIN)) * 10.0 ** int(
        power.translate(PLAIN) or 0
    )
