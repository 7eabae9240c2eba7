"""The list of slips, the page made from it, and that the check can fail."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.slips import PAGE, ROOT, Outcome, Slip, module, page, read, silent

TRIED = ["swapped prior and observation", "λ̄ as a geometric mean"]


def test_every_slip_changes_one_place_and_still_compiles():
    for slip in read():
        path = ROOT / "bft_ref" / slip.file
        changed = slip.applied(path.read_text("utf8"))
        assert changed != path.read_text("utf8"), slip.name
        compile(changed, slip.name, "exec")
        assert slip.lesson.endswith("."), slip.name
        for name in slip.tests:
            assert (ROOT / module(name)).exists(), slip.name


def test_there_are_thirty_slips_and_more_each_with_its_name():
    names = [slip.name for slip in read()]
    assert len(set(names)) == len(names) >= 30


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of the one table of a page, as text."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    cells = [
        "".join(child.content for child in token.children)
        for before, token in pairwise(tokens)
        if before.type == "td_open"
    ]
    return [cells[at : at + 3] for at in range(0, len(cells), 3)]


def test_the_page_lists_exactly_these_slips_all_caught():
    text, slips = PAGE.read_text("utf8"), read()
    found = rows(text)
    assert [row[:2] for row in found] == [[s.name, s.lesson] for s in slips]
    for slip, (*_, by) in zip(slips, found, strict=True):
        file, name = by.split(": ")
        test = "test_" + name.replace(" ", "_")
        (path,) = (ROOT / "tests" / "unit").rglob(f"{file}.py")
        source = path.read_text("utf8")
        assert f"\ndef {test}(" in source, slip.name
    caught = re.findall(r"caught by\n`tests/unit/([\w/]+)\.py::(\w+)`", text)
    assert len(caught) == len(slips)
    # written by the script, line by line, with nothing added by hand
    outcomes = [
        (slip, Outcome(f"tests/unit/{file}.py::{test}", "", 0.0))
        for slip, (file, test) in zip(slips, caught, strict=True)
    ]
    assert page(outcomes) == text


def test_a_slip_that_is_not_found_once_is_an_error():
    slip = Slip("lost", "belief.py", "a b", "c", "Gone.", ["belief"])
    for source, times in [("a c", 0), ("a b a b", 2)]:
        with pytest.raises(ValueError, match=f"'lost'.* {times} times"):
            slip.applied(source)


def test_a_crash_is_no_catch():
    assert not silent(Outcome("a", "NameError: name 'x'", 0.0))
    assert silent(Outcome("a", "AssertionError: Tensor-likes", 0.0))


def test_slips_are_caught_and_a_change_that_is_none_survives(tmp_path: Path):
    before = (ROOT / "bft_ref" / "belief.py").read_text("utf8")
    chosen = [slip for slip in read() if slip.name in TRIED]
    no_slip = chosen[0]._replace(
        name="no slip",
        old="sigmoid(p - q) * x + torch.sigmoid(q - p) * y",
        new="sigmoid(q - p) * y + torch.sigmoid(p - q) * x",
    )
    text = "".join(
        "[[slip]]\n"
        + "".join(
            f"{name} = {value!r}\n"
            for name, value in one._replace(tests=["belief"])._asdict().items()
        )
        for one in [*chosen, no_slip]
    )
    (tmp_path / "slips.toml").write_text(text, "utf8")
    done = subprocess.run(
        [
            *[sys.executable, ROOT / "tests" / "slips.py"],
            *["--slips", "slips.toml", "--page", "slips.md"],
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 of 3 caught" in done.stdout
    assert "survived: no slip" in done.stdout
    found = {
        name: by
        for name, _, by in rows((tmp_path / "slips.md").read_text("utf8"))
    }
    assert found["no slip"] == "nothing"
    assert all(found[name].startswith("test_belief: ") for name in TRIED)
    assert (ROOT / "bft_ref" / "belief.py").read_text("utf8") == before


def test_an_unknown_name_is_refused():
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "slips.py", "--only", "x y z"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "no slip is called" in done.stderr
