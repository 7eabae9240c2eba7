"""The reader sees the story; the proof is there, folded and out of the way."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_output

from book.tools import folding
from tests.book.small import (
    APART,
    book,
    code,
    each_notebook,
    md,
)


@each_notebook
def test_the_reader_sees_the_story_and_not_the_proof(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert folding.folding_complaints(notebook) == []


@each_notebook
def test_every_figure_has_its_caption(path: Path):
    notebook = nbformat.read(path, as_version=4)
    letter, _ = APART.get(path.stem, (None, None))
    number = letter or int(path.stem[:2])
    assert folding.caption_complaints(notebook, number) == []


@each_notebook
def test_no_cell_shows_more_than_a_reader_takes_in_at_once(path: Path):
    assert folding.long_cells(nbformat.read(path, as_version=4)) == {}


def folded(*cells: Any) -> Any:
    """A notebook of these cells, folded as their titles ask."""
    notebook = book(*cells)
    folding.fold(notebook)
    return notebook


PRINTS = [new_output("stream", name="stdout", text="1\n")]


def printing(source: str) -> Any:
    """A code cell that has printed something."""
    cell = code(source)
    cell.outputs = PRINTS
    return cell


def drawing(source: str, **data: str) -> Any:
    """A code cell that has shown a figure."""
    return code(source, **(data or {"image_png": "", "text_plain": "1"}))


SLIDER = '<div class="bft-slider x"></div>'


def test_a_title_folds_a_cell_on_every_platform():
    notebook = folded(
        printing("print(1)"),
        code("# @title Proof: one is one\nassert 1 == 1"),
        drawing("# @title Figure: a line\nfigure(fig, 'a', alt='1')"),
        printing("# @title Solution 2.1\nprint(1)"),
    )
    shown, proof, figure, solution = (c.metadata for c in notebook.cells)
    assert shown == {}
    assert proof == {
        "cellView": "form",
        "jupyter": {"source_hidden": True},
        "tags": ["hide-cell"],
    }
    assert figure == proof | {"tags": ["hide-input"]}  # what it draws is seen
    hidden = {"source_hidden": True, "outputs_hidden": True}
    assert solution == proof | {"jupyter": hidden}


def test_folding_is_undone_with_the_title_and_keeps_other_tags():
    cell = code("# @title Proof: one is one\nassert 1 == 1", "trained")
    notebook = folded(cell)
    assert notebook.cells[0].metadata.tags == ["trained", "hide-cell"]
    notebook.cells[0].source = "print(1)"
    assert "not folded as" in folding.folding_complaints(notebook)[0]
    folding.fold(notebook)
    assert notebook.cells[0].metadata == {"tags": ["trained"]}


def test_a_story_with_its_proofs_folded_passes():
    assert not folding.folding_complaints(
        folded(
            code("# @title Set-up: imports\nimport math\nchapter('02-a')"),
            printing("for x in y:\n    assert x\n    print(x)"),
            code("def same(a, b):\n    assert_close(a, b)"),
            code("# @title Numbers of the text: a\nfact('a', 1)"),
            printing("# @title Compute: a table\nprint(1)\nfact('b', 1)"),
            drawing("# @title Slider: a\nslider('a')", text_html=SLIDER),
            code("# Your answer"),
            printing("# @title Solution 2.1\nprint(1)\nassert x"),
        )
    )


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (printing("print(1)\nfact('a', 1)"), "fact() in a cell that"),
        (printing("print(fact('a', 1))"), "fact() in a cell that"),
        (printing("for a in b:\n    fact(a, 1)"), "fact() in a cell that"),
        (code("chapter('02-a')"), "chapter() in a cell that"),
        (code("x = 1\nassert x"), "an assertion in a cell that"),
        (code("np.testing.assert_allclose(x, y)"), "an assertion in a cell"),
        (code("torch.testing.assert_close(x, y)"), "an assertion in a cell"),
        (code("from math import pi"), "an import in a cell that"),
        (drawing("figure(fig, 'a', alt='1')"), "draws, and is not folded"),
        (drawing("slider('a')", text_html=SLIDER), "draws, and is not folded"),
        (code("#@title Proof: a\nx = 1"), "expected '# @title …', got"),
        (code("# @title\nx = 1"), "expected '# @title …', got"),
        (printing("# @title Proof: a\nprint(1)"), "is folded and prints"),
        (printing("# @title Helpers: a\nprint(1)"), "is folded and prints"),
        (code("# @title Figure: a\nx = 1"), "shows no figure or slider"),
        (drawing("# @title Compute: a\nfigure(f)"), "shows a figure or slid"),
    ],
)
def test_a_proof_that_is_seen_or_a_story_that_is_not(cell: Any, said: str):
    (complaint,) = folding.folding_complaints(folded(cell))
    assert said in complaint


@pytest.mark.parametrize(
    "change",
    [
        {"tags": []},
        {"tags": ["hide-input"]},
        {"jupyter": {}},
        {"cellView": "both"},
    ],
)
def test_a_cell_folded_on_some_platforms_only_is_noticed(change: dict):
    notebook = folded(code("# @title Proof: a\nassert 1"))
    assert folding.folding_complaints(notebook) == []
    notebook.cells[0].metadata.update(change)
    (complaint,) = folding.folding_complaints(notebook)
    assert "not folded as its first line says" in complaint


def test_a_long_cell_is_counted_unless_it_is_folded():
    lines = "\n".join(["x = 1"] * 26)
    notebook = folded(
        code(lines), code(lines[:-6]), code(f"# @title Helpers: x\n{lines}")
    )
    assert folding.long_cells(notebook) == {notebook.cells[0].id: 26}


def captioned(*captions: str) -> Any:
    """A notebook with a figure above each caption."""
    return folded(
        *[
            cell
            for caption in captions
            for cell in (drawing("# @title Figure: a\nfigure(f)"), md(caption))
        ]
    )


def test_captions_numbered_in_order_pass():
    fine = captioned("**Figure 2.1.** A line.", "**Figure 2.2.** Two. Lines.")
    assert folding.caption_complaints(fine, 2) == []


@pytest.mark.parametrize(
    ("captions", "said"),
    [
        (["A line."], "expected '**Figure 2.1.** …'"),
        (["**Figure 2.1.**"], "expected '**Figure 2.1.** …'"),
        (["**Figure 2.1.** A line"], "expected '**Figure 2.1.** …'"),
        (["**Figure 2.2.** A line."], "expected Figure 2.1, got Figure 2.2"),
        (["**Figure 3.1.** A line."], "expected Figure 2.1, got Figure 3.1"),
        (
            ["**Figure 2.1.** A line.", "**Figure 2.1.** A line."],
            "expected Figure 2.2, got Figure 2.1",
        ),
    ],
)
def test_a_missing_or_misnumbered_caption_is_noticed(captions, said):
    (complaint,) = folding.caption_complaints(captioned(*captions), 2)
    assert said in complaint


def test_a_caption_without_a_figure_is_noticed():
    notebook = book(code("x = 1"), md("Text.\n\n**Figure 2.1.** A line."))
    (complaint,) = folding.caption_complaints(notebook, 2)
    assert "a caption without a figure" in complaint
    notebook = book(drawing("figure(f)"), code("x"), md("**Figure 2.1.** A."))
    assert len(folding.caption_complaints(notebook, 2)) == 2
