"""Story and proof: which cells of a notebook are folded, and how.

The reader came for the story. A code cell whose first line is a title,
``# @title Kind: what it does``, is folded on the site, in JupyterLab and on
Colab; whatever else the platforms need follows from that line
(:func:`fold`). The kinds are

``Proof: …``, ``Numbers of the text: …``
    asserts, cross-checks and recorded facts; they print nothing;
``Figure: …``, ``Slider: …``, ``Compute: …``
    code whose output is shown while it is folded itself;
``Solution 4.1``
    the code that solves an exercise, folded with its output;
anything else
    set-up, helpers, an install: they print nothing either.
"""

import ast
import copy
import re

from nbformat import NotebookNode

from book.tools.cells import code_cells, tree

LINES = 25  # that a reader is shown at a time
ANSWER = "# Your answer"
SHOWN = ("Figure: ", "Slider: ", "Compute: ")
TITLE = re.compile(r"# @title (\S.*)")
SOLUTION = re.compile(r"Solution (\d+\.\d+)")
CAPTION = re.compile(
    r"\*\*Figure (\d+|[CL])\.(\d+)\.\*\* \S.*[.?!]", re.DOTALL
)
BEGINS_CAPTION = re.compile(r"(?m)^\*\*Figure\b")
BOOKKEEPING = {"fact", "chapter"}
FOLDED = ("hide-cell", "hide-input")


def title(source: str) -> str | None:
    """What a folded cell says of itself; None for a cell that is shown."""
    found = TITLE.match(source)
    return found[1].strip() if found else None


def fold(notebook: NotebookNode) -> None:
    """Fold each code cell that has a title, on every platform; no other."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        data = cell.metadata
        tags = [tag for tag in data.pop("tags", []) if tag not in FOLDED]
        for key in ("jupyter", "cellView"):
            data.pop(key, None)
        if name := title(cell.source):
            solves = SOLUTION.fullmatch(name) is not None
            shows = cell.outputs and not solves
            tags.append("hide-input" if shows else "hide-cell")
            data["cellView"] = "form"
            data["jupyter"] = {"source_hidden": True}
            if solves:
                data["jupyter"]["outputs_hidden"] = True
        if tags:
            data["tags"] = tags


def draws(cell: NotebookNode) -> bool:
    """Whether a cell shows a figure or a slider."""
    return any(
        "image/png" in data or "bft-slider" in data.get("text/html", "")
        for data in (output.get("data", {}) for output in cell.outputs)
    )


def bookkeeping(source: str) -> list[str]:
    """What only a proof needs: fact(), chapter(), and asserts by themselves.

    An assertion within a loop or a function that does something else may
    stay with it.
    """
    read = tree(source)
    found = {
        f"{node.func.id}()"
        for node in ast.walk(read)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in BOOKKEEPING
    }
    for node in read.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.add("an import")
        called = node.value if isinstance(node, ast.Expr) else None
        name = ast.unparse(called.func) if isinstance(called, ast.Call) else ""
        if isinstance(node, ast.Assert) or re.search(
            r"(^|\.)assert_\w+$", name
        ):
            found.add("an assertion")
    return sorted(found)


def long_cells(notebook: NotebookNode) -> dict[str, int]:
    """Lines of each cell that shows more than a reader takes in at once."""
    return {
        cell.id: lines
        for _, cell in code_cells(notebook)
        if not title(cell.source)
        and (lines := len(cell.source.splitlines())) > LINES
    }


def folding_complaints(notebook: NotebookNode) -> list[str]:
    """Cells that show the reader a proof, or fold what should be seen."""
    found = []
    for at, cell in code_cells(notebook):
        name = title(cell.source)
        if name is None:
            found += [
                f"cell {at}: {what} in a cell that the reader sees; move it "
                "to a cell that begins with '# @title Proof: …'"
                for what in bookkeeping(cell.source)
            ]
            if draws(cell):
                found.append(
                    f"cell {at}: draws, and is not folded; begin it with "
                    "'# @title Figure: …' or '# @title Slider: …'"
                )
            if re.match(r"#\s*@\s*title", cell.source):
                found.append(
                    f"cell {at}: expected '# @title …', got "
                    f"{cell.source.splitlines()[0]!r}"
                )
        elif draws(cell) != name.startswith(("Figure: ", "Slider: ")):
            found.append(
                f"cell {at}: {name!r}, but it "
                f"{'shows a' if draws(cell) else 'shows no'} figure or slider"
            )
        elif cell.outputs and not (
            name.startswith(SHOWN) or SOLUTION.fullmatch(name)
        ):
            found.append(
                f"cell {at}: {name!r} is folded and prints; a folded proof "
                "prints nothing, what the reader needs is printed before it"
            )
    folded = copy.deepcopy(notebook)
    fold(folded)
    for at, cell in code_cells(notebook):
        if cell.metadata != folded.cells[at].metadata:
            found.append(
                f"cell {at}: not folded as its first line says; run make "
                "notebooks"
            )
    return found


def caption_complaints(
    notebook: NotebookNode, chapter: int | str
) -> list[str]:
    """Figures and sliders without a caption beneath them, and its number.

    ``chapter`` is "L" for the laboratory, "C" for the cookbook.
    """
    found, due = [], 1
    beneath = set()
    for at, cell in code_cells(notebook):
        if not draws(cell):
            continue
        after = notebook.cells[at + 1 : at + 2]
        text = after[0].source if after else ""
        caption = CAPTION.fullmatch(text)
        if not caption or after[0].cell_type != "markdown":
            found.append(
                f"cell {at}: expected '**Figure {chapter}.{due}.** …' in a "
                "Markdown cell of its own beneath it, one sentence or two"
            )
        elif caption.groups() != (str(chapter), str(due)):
            found.append(
                f"cell {at + 1}: expected Figure {chapter}.{due}, got "
                f"Figure {'.'.join(caption.groups())}"
            )
        beneath.add(at + 1)
        due += 1
    return found + [
        f"cell {at}: a caption without a figure above it"
        for at, cell in enumerate(notebook.cells)
        if cell.cell_type == "markdown"
        and at not in beneath
        and BEGINS_CAPTION.search(cell.source)
    ]
