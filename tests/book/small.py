"""The book's notebooks, and small ones that break a check on purpose."""

from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import (
    new_code_cell,
    new_markdown_cell,
    new_notebook,
    new_output,
)

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
#: Built like chapters, but pages of their own kind: no exercises, no slider.
#: By each the letter in place of a number, and how its title begins.
APART = {"laboratory": ("L", "Laboratory"), "cookbook": ("C", "Cookbook")}
NOTEBOOKS = [*CHAPTERS, *(ROOT / f"notebooks/{name}.ipynb" for name in APART)]
TEMPLATE = ROOT / "notebooks" / "template" / "00-template.ipynb"
each_notebook = pytest.mark.parametrize(
    "path", [*NOTEBOOKS, TEMPLATE], ids=lambda path: path.stem
)
each_chapter = pytest.mark.parametrize(
    "path", [*CHAPTERS, TEMPLATE], ids=lambda path: path.stem
)


def md(source: str) -> Any:
    """A Markdown cell."""
    return new_markdown_cell(source)


def code(source: str, *tags: str, **data: Any) -> Any:
    """A code cell; ``data`` are its outputs' kinds and contents."""
    outputs = [
        new_output("display_data", {kind.replace("_", "/"): text})
        for kind, text in data.items()
    ]
    return new_code_cell(
        source, outputs=outputs, metadata={"tags": list(tags)}
    )


def book(*cells: Any) -> Any:
    """A notebook of these cells, its code cells counted in order."""
    count = 0
    for cell in cells:
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
    return new_notebook(cells=list(cells))
