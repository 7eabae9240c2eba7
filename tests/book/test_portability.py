"""Notebooks read the same in Jupyter, on Colab, on GitHub and in the book."""

from pathlib import Path

import nbformat
import pytest

from book.tools import portability, skeleton
from book.tools.folding import ANSWER
from tests.book.small import (
    APART,
    ROOT,
    book,
    code,
    each_chapter,
    each_notebook,
    md,
)


@each_notebook
def test_portable(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert portability.portability_complaints(notebook) == []
    assert portability.size_complaints(path) == []


@each_chapter
def test_has_the_shape_of_a_chapter(path: Path):
    notebook = nbformat.read(path, as_version=4)
    number = int(path.stem[:2])
    assert skeleton.skeleton_complaints(notebook, number) == []


@pytest.mark.parametrize("name", APART)
def test_what_is_no_chapter_has_the_shape_of_a_page(name: str):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert skeleton.page_complaints(notebook, APART[name][1]) == []
    (found,) = skeleton.page_complaints(notebook, "16 ")
    assert "expected a title '# 16 …'" in found


FINE = r"""
> **Note.** Plain Markdown, `code {x}`, $a_{b}$ and (2.1).

$$
a = b \tag{2.1}
$$

```python
x = ":::"
```

<details><summary>Solution</summary>

Text.

</details>
"""


def test_plain_markdown_passes():
    notebook = book(md(FINE), code("x = 1" + 74 * " "))
    assert portability.portability_complaints(notebook) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("```{note}\nText\n```", "MyST's '{note}'"),
        (":::{note}\nText\n:::", "MyST's ':::"),
        ("See {eq}`2.1`.", "MyST's '{eq}'"),
        ("(target)=\n\n# Title", "MyST's '(target)='"),
        ("\\begin{align*}\na\n\\end{align*}", "align or equation"),
        ("So $$a = b$$ here.", "$$ not on a line of its own"),
        ("$$\na \\\\ b \\tag{2.1}\n$$", r"\\ in a tagged display"),
        ("<details><summary>S</summary>", "<details> and </details>"),
        ("![A picture](attachment:x.png)", "attachment"),
    ],
)
def test_what_is_not_portable_is_noticed(source: str, said: str):
    found = portability.portability_complaints(book(md(source)))
    assert any(said in complaint for complaint in found), found


def test_a_long_line_of_code_is_noticed():
    (found,) = portability.portability_complaints(book(code("x" * 80)))
    assert "80 columns" in found


def test_a_picture_without_its_alt_text_is_noticed():
    cell = code("figure(fig, 'a', alt=alt)", image_png="", text_plain="Two.")
    cell.outputs[0].metadata["image/png"] = {"alt": "2 curves."}
    (found,) = portability.portability_complaints(book(cell))
    assert "alt text is not the figure's" in found
    cell.metadata["mystnb"] = {"image": {"alt": "2 curves."}}
    assert portability.portability_complaints(book(cell)) == []
    alt = {"alt": "A curve that falls from 3 to 4.5 km."}
    cell.outputs[0].metadata["image/png"] = alt
    cell.metadata["mystnb"] = {"image": alt}
    (found,) = portability.portability_complaints(book(cell))
    assert "'falls from 3 to 4.5': the numbers go the other way" in found
    cell.outputs[0].metadata["image/png"] = {"alt": "2 curves."}
    cell.metadata["mystnb"] = {"image": {"alt": "2 curves."}}
    cell.source = "plt.show()"
    (found,) = portability.portability_complaints(book(cell))
    assert "not from figure()" in found
    cell.source, cell.outputs = "figure(a)", cell.outputs * 2
    (found,) = portability.portability_complaints(book(cell))
    assert "2 figures in one cell" in found


def test_a_large_notebook_is_noticed(tmp_path: Path):
    path = tmp_path / "02-large.ipynb"
    path.write_text("x" * 1_000_001)
    (found,) = portability.size_complaints(path)
    assert "1000001 bytes" in found


def exercise(number: int, solved: bool = True) -> list:
    """An exercise's cells."""
    head = f"### Exercise 2.{number} (10 minutes, level 2)\n\nShow it."
    asked = [md(head), code(ANSWER)]
    if not solved:
        return asked
    folded = "<details><summary>Solution</summary>\n\nSo.\n\n</details>"
    return [
        *asked,
        md(folded),
        code(f"# @title Solution 2.{number}\nassert x"),
    ]


def chapter() -> list:
    """The cells of a small chapter that has every part."""
    badge = "[Open](https://colab.research.google.com/github/a/b)"
    return [
        md(f"# 2 A chapter\n\n{badge}\n\nIt runs on the CPU."),
        code("import importlib", "install"),
        code("chapter('02-a-chapter')"),
        code("figure(fig, 'a', alt='1')"),
        code("slider('a', 'b', v, f)"),
        md("## Where this breaks\n\nText."),
        md("## Exercises"),
        *exercise(1),
        *exercise(2),
        *exercise(3),
        *exercise(4),
        *exercise(5, solved=False),
        md("## What to remember\n\nText."),
    ]


def test_a_chapter_with_every_part_passes():
    assert skeleton.skeleton_complaints(book(*chapter()), 2) == []


@pytest.mark.parametrize(
    ("at", "new", "said"),
    [
        (0, md("# A chapter\n\ncolab.research.google.com"), "a title '# 2"),
        (0, md("# 2 A chapter"), "no Colab badge"),
        (0, md("# 2 A chapter"), "device: no 'runs on the CPU'"),
        (3, code("model.to(device)"), "device: no 'GPU'"),
        (1, code("import importlib"), "not tagged install"),
        (2, code("x = 1"), "chapter() is called in 0 cells"),
        (3, code("x = 1"), "no figure"),
        (4, code("x = 1"), "no slider"),
        (5, md("## Else"), "no heading 'where this breaks'"),
        (5, md("# Where this breaks"), "one heading of the first level"),
        (6, md("## Tasks"), "no heading 'exercises'"),
        (7, exercise(9)[0], "expected exercises"),
        (7, md("### Exercise 2.1 (10 min)"), "heading is not"),
        (9, md("None."), "3 exercises with a solution"),
        (8, code("x = 1"), "Exercise 2.1: 0 code cells that hold only"),
        (9, code(ANSWER), "Exercise 2.1: 2 code cells that hold only"),
        (10, code("assert x"), "begins with '# @title Solution 2.1'"),
        (10, code("# @title Solution 2.2\n"), "'# @title Solution 2.1'"),
        (24, code("x = 1"), "Exercise 2.5: 0 code cells that hold only"),
        (24, exercise(5)[2], "without a published solution"),
        (25, md("## Else"), "no heading 'what to remember'"),
    ],
)
def test_a_missing_part_is_noticed(at: int, new, said: str):
    cells = chapter()
    cells[at] = new
    found = skeleton.skeleton_complaints(book(*cells), 2)
    assert any(said in complaint for complaint in found), found


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [0, 3, 1, 2]])
def test_a_solution_before_the_answer_is_noticed(order: list[int]):
    cells = chapter()
    first = exercise(1)
    cells[7:11] = [first[at] for at in order]
    (found,) = skeleton.exercise_complaints(book(*cells), 2)
    assert "Exercise 2.1: its solution stands before" in found
