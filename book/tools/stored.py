"""What a notebook stores of its execution, and what a test may not compare.

Each check returns what is wrong, as lines; ``tests/book`` proves each by a
notebook that breaks it on purpose.
"""

import re

from nbformat import NotebookNode

from book.tools.cells import calls, code_cells

GUARDS = {
    "fact",
    "figure",
    "slider",
    "assert",
    "assert_close",
    "assert_allclose",
}


def execution_complaints(notebook: NotebookNode) -> list[str]:
    """Cells not stored executed in order, or with an error."""
    found, due = [], 1
    for at, cell in code_cells(notebook):
        if not cell.source.strip():
            found.append(f"cell {at}: an empty code cell")
        elif cell.execution_count != due:
            found.append(
                f"cell {at}: expected execution count {due}, "
                f"got {cell.execution_count}; run make notebooks"
            )
        due += 1
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"cell {at}: stores the error {output.ename}")
            if output.get("name") == "stderr":
                found.append(f"cell {at}: stores a warning on stderr")
            widget = "application/vnd.jupyter.widget-view+json"
            if widget in output.get("data", {}):
                found.append(f"cell {at}: stores a widget view")
    return found


def ignored_complaints(
    notebook: NotebookNode, trained: tuple[str, ...] = ()
) -> list[str]:
    """Cells left out of nbval's comparison without need or safeguard.

    A figure or a slider may be, and so may a cell tagged ``trained``. Each
    records a fact itself, or is followed by a code cell that asserts or
    records something.
    """
    found = []
    code = list(code_cells(notebook))
    for nth, (at, cell) in enumerate(code):
        tags = cell.metadata.get("tags", [])
        odd = {"nbval-skip", "raises-exception", "nbval-raises-exception"}
        if odd & set(tags):
            found.append(f"cell {at}: tagged {sorted(odd & set(tags))}")
        if re.search(r"(?m)^\s*#\s*(NBVAL_|PYTEST_)", cell.source):
            found.append(f"cell {at}: a comment that steers nbval; use tags")
        if "nbval-ignore-output" not in tags:
            continue
        called = calls(cell.source)
        if not called & {"figure", "slider"} and "trained" not in tags:
            found.append(
                f"cell {at}: left out of the comparison, but neither figure "
                "nor slider nor tagged trained"
            )
        after = code[nth + 1][1].source if nth + 1 < len(code) else ""
        if not (called | calls(after)) & GUARDS:
            found.append(
                f"cell {at}: left out of the comparison; expected an "
                "assertion or a fact in it or in the next code cell"
            )
    return found
