"""The shape that all chapters share, and that of their exercises.

Each check returns what is wrong, as lines; ``tests/book`` proves each by a
notebook that breaks it on purpose.
"""

import ast
import re

from nbformat import NotebookNode

from book.tools.cells import calls, sources, tree
from book.tools.folding import ANSWER, title

EXERCISE = re.compile(
    r"(?m)^### Exercise (\d+)\.(\d+) \((\d+) minutes, level [123]\)$"
)


def skeleton_complaints(notebook: NotebookNode, chapter: int) -> list[str]:
    """Where a chapter departs from the shape that all share."""
    found = page_complaints(notebook, f"{chapter} ")
    code = [source for _, source in sources(notebook, "code")]
    if not any("slider" in calls(source) for source in code):
        found.append("no slider")
    if not any("exercises" in heading for heading in _headings(notebook)):
        found.append("no heading 'exercises'")
    return found + exercise_complaints(notebook, chapter)


def page_complaints(notebook: NotebookNode, begins: str) -> list[str]:
    """Where a page departs from what chapters, laboratory and cookbook share.

    ``begins``: how its title does.
    """
    found = []
    cells = notebook.cells
    title = cells[0].source.splitlines()[0] if cells[0].source else ""
    if not title.startswith(f"# {begins}"):
        found.append(f"expected a title '# {begins}…', got {title!r}")
    if "colab.research.google.com" not in cells[0].source:
        found.append("the first cell has no Colab badge")
    if "install" not in cells[1].metadata.get("tags", []):
        found.append("the second cell is not tagged install")
    code = [source for _, source in sources(notebook, "code")]
    named = [source for source in code if "chapter" in calls(source)]
    if len(named) != 1:
        found.append(f"chapter() is called in {len(named)} cells, not in one")
    headings = _headings(notebook)
    if sum(heading.startswith("# ") for heading in headings) != 1:
        found.append("expected one heading of the first level")
    for part in ["where this breaks", "what to remember"]:
        if not any(part in heading for heading in headings):
            found.append(f"no heading {part!r}")
    if not any("figure" in calls(source) for source in code):
        found.append("no figure")
    return found + _device(notebook)


def _device(notebook: NotebookNode) -> list[str]:
    """Whether it reads the device that the install cell sets, or says why."""
    read = any(
        isinstance(node, ast.Name) and node.id == "device"
        for cell in notebook.cells[2:]
        if cell.cell_type == "code"
        for node in ast.walk(tree(cell.source))
    )
    text = " ".join(source for _, source in sources(notebook, "markdown"))
    said = "GPU" if read else "runs on the CPU"
    return [] if said in text else [f"device: no {said!r} in its text"]


def _headings(notebook: NotebookNode) -> list[str]:
    """The headings of a notebook, in small letters."""
    text = "\n\n".join(source for _, source in sources(notebook, "markdown"))
    bare = re.sub(r"(?s)```.*?```", "", text)
    return [line.lower() for line in re.findall(r"(?m)^#+ .*$", bare)]


def exercise_complaints(notebook: NotebookNode, chapter: int) -> list[str]:
    """Exercises without id, minutes, level, answer cell or folded solution."""
    found: list[str] = []
    exercises: list[list[NotebookNode]] = []
    labels: list[tuple[str, str]] = []
    loose = 0
    for cell in notebook.cells:
        text = cell.source if cell.cell_type == "markdown" else ""
        loose += len(re.findall(r"(?m)^#+ Exercise\b", text))
        if match := EXERCISE.search(text):
            labels.append((match[1], match[2]))
            exercises.append([])
        elif re.search(r"(?m)^#{1,2} ", text) and exercises:
            break
        if exercises:
            exercises[-1].append(cell)
    due = [(str(chapter), str(n + 1)) for n in range(len(labels))]
    if labels != due:
        found.append(f"expected exercises {due}, got {labels}")
    if loose != len(exercises):
        found.append(
            "an exercise's heading is not '### Exercise 2.1 (10 minutes, "
            "level 1)', or two share a cell"
        )
    solved = [
        cells
        for cells in exercises
        if any("<summary>Solution</summary>" in c.source for c in cells)
    ]
    if len(solved) < 4:
        found.append(f"{len(solved)} exercises with a solution, not four")
    if exercises and len(exercises) - len(solved) != 1:
        found.append("expected one exercise without a published solution")
    for (n, k), cells in zip(labels, exercises, strict=True):
        label, solution = f"Exercise {n}.{k}", f"Solution {n}.{k}"
        answers = [at for at, c in enumerate(cells) if c.source == ANSWER]
        if len(answers) != 1:
            found.append(
                f"{label}: {len(answers)} code cells that hold only "
                f"{ANSWER!r}, not one"
            )
        solving = [at for at, c in enumerate(cells) if solves(c, solution)]
        if cells in solved and not any(
            title(cells[at].source) for at in solving
        ):
            found.append(
                f"{label}: no code cell that begins with '# @title {solution}'"
            )
        if solving and answers and solving[0] < answers[0]:
            found.append(f"{label}: its solution stands before {ANSWER!r}")
    return found


def solves(cell: NotebookNode, name: str) -> bool:
    """Whether a cell has the reasoning or the code of a solution."""
    if cell.cell_type == "markdown":
        return "<summary>Solution</summary>" in cell.source
    return title(cell.source) == name
