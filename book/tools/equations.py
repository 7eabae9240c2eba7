"""Numbered equations: one tag a display, one test a tag, no dead citation.

Each check returns what is wrong, as lines; ``tests/book`` proves each by a
notebook that breaks it on purpose.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from nbformat import NotebookNode

from book.tools.cells import normal, parsed, sources

TAG = re.compile(r"\\tag\*?\{([^}]*)\}")
CITED = re.compile(r"\((\d{1,2})\.(\d{1,2})\)")
IN_CODE = re.compile(
    r"(?i)\bequations?\s(?:\s*(?:#\s*)?(?:\(\d+\.\d+\)|,|–|and\b|to\b))+"
)


def displays(notebook: NotebookNode) -> Iterator[tuple[int, str]]:
    """Position and LaTeX of every display formula on lines of its own."""
    for at, source in sources(notebook, "markdown"):
        for token in parsed(source):
            if token.type == "math_block":
                yield at, token.content


def tagged(notebook: NotebookNode) -> dict[str, str]:
    """Label -> LaTeX without its tag, of every tagged display."""
    found = {}
    for _, latex in displays(notebook):
        for label in TAG.findall(latex):
            found[label] = normal(TAG.sub("", latex))
    return found


def numbering_complaints(notebook: NotebookNode, chapter: int) -> list[str]:
    """Tags that are not chapter.1, chapter.2, … one to a display."""
    found, labels = [], []
    for at, latex in displays(notebook):
        here = TAG.findall(latex)
        labels += here
        if len(here) > 1:
            found.append(f"cell {at}: {len(here)} tags in one display")
    due = [f"{chapter}.{n}" for n in range(1, len(labels) + 1)]
    if labels != due:
        found.append(f"expected the tags {due}, got {labels}")
    for at, source in sources(notebook, "markdown"):
        written = len(TAG.findall(source))
        read_ = sum(
            len(TAG.findall(token.content))
            for token in parsed(source)
            if token.type == "math_block"
        )
        if written != read_:
            found.append(
                f"cell {at}: {written - read_} tags outside a display on "
                "lines of its own"
            )
    return found


def proofs(path: Path) -> list[tuple[str, str, str]]:
    """(label, LaTeX, function) of every ``@equation`` in a test module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if (
                isinstance(mark, ast.Call)
                and getattr(mark.func, "id", "") == "equation"
            ):
                label, latex = (ast.literal_eval(arg) for arg in mark.args)
                found.append((label, normal(latex), node.name))
    return found


def proof_complaints(
    tags: dict[str, str], proven: list[tuple[str, str, str]]
) -> list[str]:
    """Where the equations of notebooks and those of tests differ."""
    found = []
    for label, latex, test in proven:
        if not test.startswith("test_"):
            found.append(f"({label}): {test} is no test that pytest runs")
        if label not in tags:
            found.append(f"({label}): proven by {test}, in no notebook")
        elif tags[label] != latex:
            found.append(
                f"({label}): {test} proves\n    {latex}\n  the notebook has"
                f"\n    {tags[label]}"
            )
    unproven = tags.keys() - {label for label, _, _ in proven}
    return found + [f"({label}): has no test" for label in sorted(unproven)]


def plain(source: str) -> str:
    """The text of Markdown without its code and maths."""
    found = []
    for token in parsed(source):
        found += [token.content] if token.type == "html_block" else []
        children = token.children or []
        found += [child.content for child in children if child.type == "text"]
    return "\n".join(found)


def code_citations(source: str) -> str:
    """What Python source cites as "equation (c.n)"; 3.0 in f(3.0) is none.

    That is what its docstrings and comments say.
    """
    return "\n".join(IN_CODE.findall(source))


def citation_complaints(
    text: str, where: str, tags: dict[str, str]
) -> list[str]:
    """Equations cited as (c.n) in a written chapter that has none of them.

    ``text`` is what :func:`plain` or :func:`code_citations` returns.
    """
    written = {int(label.split(".")[0]) for label in tags}
    return [
        f"{where}: cites ({c}.{n}), which no display has"
        for c, n in CITED.findall(text)
        if int(c) in written and f"{c}.{n}" not in tags
    ]
