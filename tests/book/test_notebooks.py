"""Notebooks are stored executed; little is left out of the comparison."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_output

from book.tools import execute, stored
from tests.book.small import (
    NOTEBOOKS,
    ROOT,
    TEMPLATE,
    book,
    code,
    each_notebook,
    md,
)


def test_there_are_notebooks():
    assert NOTEBOOKS
    assert TEMPLATE.exists()


@each_notebook
def test_stored_executed_in_order_without_errors(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert stored.execution_complaints(notebook) == []


@each_notebook
def test_only_what_is_safeguarded_is_left_out(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert stored.ignored_complaints(notebook) == []


@each_notebook
def test_stored_without_anything_volatile(path: Path):
    notebook = nbformat.read(path, as_version=4)
    cleaned = nbformat.read(path, as_version=4)
    execute.clean(cleaned)
    assert notebook == cleaned


def said(complaints: list[str], text: str) -> bool:
    return len(complaints) == 1 and text in complaints[0]


def test_a_cell_not_executed_or_out_of_order_is_noticed():
    notebook = book(md("Text"), code("x = 1"), code("y = 2"))
    assert stored.execution_complaints(notebook) == []
    notebook.cells[2].execution_count = None
    assert said(stored.execution_complaints(notebook), "cell 2: expected")
    notebook.cells[2].execution_count = 3
    assert said(stored.execution_complaints(notebook), "count 2, got 3")


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (
            new_output("error", ename="ValueError", evalue="", traceback=[]),
            "the error ValueError",
        ),
        (new_output("stream", name="stderr", text="Oh"), "stderr"),
        (
            new_output(
                "display_data",
                {"application/vnd.jupyter.widget-view+json": {}},
            ),
            "widget view",
        ),
    ],
)
def test_a_stored_error_warning_or_widget_is_noticed(output, text):
    notebook = book(code("x = 1"))
    notebook.cells[0].outputs = [output]
    assert said(stored.execution_complaints(notebook), text)


IGNORED = "nbval-ignore-output"


def test_what_may_be_left_out():
    assert not stored.ignored_complaints(
        book(
            code("slider('a', 'b', v, f)", IGNORED),
            code("figure(fig, 'a', alt=alt)", IGNORED),
            code("train(model)", IGNORED, "trained"),
            code("fact('loss', model.loss, tol=0.1)"),
            code(
                "%time train(model)\nassert model.loss < 1", IGNORED, "trained"
            ),
        )
    )


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ([code("slider(a)\nprint(2)", "raises-exception")], "tagged"),
        ([code("slider(a)", "nbval-skip")], "tagged"),
        ([code("x = 1  \n# NBVAL_SKIP\n")], "steers nbval"),
        ([code("print(2)\nassert x", IGNORED)], "neither figure"),
        ([code("train()", IGNORED, "trained")], "expected an assertion"),
        (
            [
                code("train()", IGNORED, "trained"),
                code("x = 1"),
                code("fact()"),
            ],
            "expected an assertion",
        ),
    ],
)
def test_a_cell_left_out_without_need_or_safeguard_is_noticed(cells, text):
    assert said(stored.ignored_complaints(book(*cells)), text)


SMALL = """
    from bft_ref.notebook import chapter, fact
    chapter("02-small")
    ---
    gain = 0.7714
    fact("gain", gain)
    print(f"{gain:.2f}")
    ---
    fact("last", 2.5)
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A chapter with two facts and stale prose, not executed yet."""
    cells = [code(c.strip()) for c in textwrap.dedent(SMALL).split("---")]
    prose = md("A gain of 0.1<!-- fact: gain .2f --> is seen.")
    path = tmp_path / "notebooks" / "02-small.ipynb"
    path.parent.mkdir()
    nbformat.write(book(prose, *cells), path)
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf8")
    assert old in text
    path.write_text(text.replace(old, new), "utf8")


@pytest.fixture
def environment(monkeypatch):
    """Kernels find this package, and caches stay out of the way."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ["PYTHONHASHSEED", "BFT_FACTS"]:
        monkeypatch.setenv(name, os.environ.get(name, "0"))


def validated(path: Path) -> str:
    """What a check of the notebook by nbval prints."""
    options = ["-p", "no:cacheprovider", "-p", "tests.conftest"]
    options += ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=60"]
    options += [f"--nbval-sanitize-with={ROOT}/tests/sanitize.cfg"]
    options += [f"--rootdir={path.parent.parent}", str(path)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options],
        cwd=ROOT,
        env={**os.environ, "BFT_FACTS": "check"},
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout


@pytest.mark.slow
def test_a_notebook_is_stored_and_each_change_of_it_noticed(
    small: Path, environment
):
    assert execute.main([str(small)]) == 0
    kept = nbformat.read(small, as_version=4)
    assert kept.cells[0].source.startswith("A gain of 0.77<!--")
    assert not stored.execution_complaints(kept)
    assert "4 passed" in validated(small)

    edit(small, "gain = 0.7714", "gain = 0.7715")
    edit(small, 'fact(\\"last\\", 2.5)', "x = 2.5")
    output = validated(small)
    assert "'gain' is now 0.7715, recorded is 0.7714" in output
    assert "not computed again: ['last']" in output
    assert "2 failed, 2 passed" in output

    edit(small, "x = 2.5", "raise OSError")
    before = small.read_text("utf8")
    recorded = small.parent / "facts" / "02-small.json"
    facts = recorded.read_text("utf8")
    assert execute.main([str(small)]) == 1
    assert small.read_text("utf8") == before
    assert recorded.read_text("utf8") == facts
