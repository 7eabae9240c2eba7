"""What Jupyter, Colab, GitHub or the page would not show as it is meant.

Each check returns what is wrong, as lines; ``tests/book`` proves each by a
notebook that breaks it on purpose.
"""

import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from nbformat import NotebookNode

from book.tools.cells import calls, parsed, sources
from book.tools.equations import TAG, displays
from book.tools.order import misled

COLUMNS = 79
MEGABYTE = 1_000_000


def myst_in(source: str) -> Iterator[str]:
    """MyST directives, roles and targets in Markdown."""
    for token in parsed(source):
        if token.type == "fence" and token.info.startswith("{"):
            yield token.info
        children = token.children or []
        for child, after in zip_longest(children, children[1:]):
            text = child.content if child.type == "text" else ""
            yield from re.findall(r"^:{3,}.*|^\(\w[\w-]*\)=$", text)
            code = after is not None and after.type == "code_inline"
            yield from re.findall(r"\{\w[\w:-]*\}$", text) if code else ()


def portability_complaints(notebook: NotebookNode) -> list[str]:
    """What Jupyter, Colab, GitHub or the page would not show as meant."""
    found = []
    for at, source in sources(notebook, "markdown"):
        found += [f"cell {at}: MyST's {text!r}" for text in myst_in(source)]
        if re.search(r"\\begin\{(align|eqnarray|equation)", source):
            found.append(f"cell {at}: align or equation; use one $$ a step")
        if re.search(r"(?m)(?<=\S)[ \t]*\$\$|\$\$[ \t]*(?=\S)", source):
            found.append(f"cell {at}: $$ not on a line of its own")
        opened = len(re.findall(r"<details\b", source))
        if opened != source.count("</details>"):
            found.append(f"cell {at}: <details> and </details> differ")
        if "](attachment:" in source:
            found.append(f"cell {at}: an attachment")
    for at, latex in displays(notebook):
        if TAG.search(latex) and r"\\" in latex:
            found.append(f"cell {at}: \\\\ in a tagged display")
    for at, source in sources(notebook, "code"):
        for line in source.splitlines():
            if len(line) > COLUMNS:
                found.append(f"cell {at}: {len(line)} columns: {line!r}")
    for at, cell in enumerate(notebook.cells):
        pictures = [
            output
            for output in cell.get("outputs", [])
            if any(k.startswith("image/") for k in output.get("data", {}))
        ]
        if len(pictures) > 1:
            found.append(f"cell {at}: {len(pictures)} figures in one cell")
        for output in pictures:
            kinds = {k for k in output.data if k.startswith("image/")}
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt")
            if kinds != {"image/png"} or "figure" not in calls(cell.source):
                found.append(f"cell {at}: a picture not from figure()")
            elif alt != output.metadata.get("image/png", {}).get("alt"):
                found.append(f"cell {at}: its alt text is not the figure's")
            found += [
                f"cell {at}: in its alt text {complaint}"
                for complaint in misled(alt or "")
            ]
    return found


def size_complaints(path: Path) -> list[str]:
    """A notebook file that is too large to read in a browser."""
    size = path.stat().st_size
    return [f"{size} bytes, more than a megabyte"] * (size > MEGABYTE)
