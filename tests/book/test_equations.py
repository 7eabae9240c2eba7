"""Every numbered equation has a test, every such test its equation."""

from pathlib import Path

import nbformat
import pytest

from book.tools import cells, equations
from tests.book.small import book, code, md

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
PROOFS = sorted((ROOT / "tests" / "equations").glob("test_*.py"))
MODULES = sorted(ROOT.glob("bft_ref/**/*.py"))
PAGES = sorted([*ROOT.glob("book/pages/*.md"), *ROOT.glob("*.md")])


@pytest.fixture(scope="module")
def tags() -> dict[str, str]:
    """Every tagged equation of the book."""
    return {
        label: latex
        for path in NOTEBOOKS
        for label, latex in equations.tagged(
            nbformat.read(path, as_version=4)
        ).items()
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_tags_are_numbered_in_order(path: Path):
    notebook = nbformat.read(path, as_version=4)
    assert equations.numbering_complaints(notebook, int(path.stem[:2])) == []


def test_equations_and_tests_are_the_same(tags):
    proven = [proof for path in PROOFS for proof in equations.proofs(path)]
    assert equations.proof_complaints(tags, proven) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_cite_equations_that_are_there(path: Path, tags):
    notebook = nbformat.read(path, as_version=4)
    texts = [
        equations.plain(source)
        for _, source in cells.sources(notebook, "markdown")
    ]
    texts += [
        equations.code_citations(source)
        for _, source in cells.sources(notebook, "code")
    ]
    assert [
        complaint
        for text in texts
        for complaint in equations.citation_complaints(text, path.stem, tags)
    ] == []


@pytest.mark.parametrize("path", MODULES + PAGES, ids=lambda path: path.name)
def test_docstrings_and_pages_cite_equations_that_are_there(path: Path, tags):
    text = path.read_text("utf8")
    read = (
        equations.code_citations if path.suffix == ".py" else equations.plain
    )
    assert equations.citation_complaints(read(text), path.name, tags) == []


def test_docstrings_cite_many_equations():
    cited = [
        equations.code_citations(path.read_text("utf8")) for path in MODULES
    ]
    assert len(equations.CITED.findall("".join(cited))) > 40


def display(latex: str) -> str:
    return f"Text\n\n$$\n{latex}\n$$\n\nMore."


GOOD = [display(r"a = b \tag{2.1}"), display("b = c"), display(r"c\tag{2.2}")]


def test_equations_are_read_without_their_tags():
    notebook = book(*map(md, GOOD), code("x = 1"))
    assert equations.tagged(notebook) == {"2.1": "a = b", "2.2": "c"}
    assert equations.numbering_complaints(notebook, 2) == []


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([display(r"a \tag{2.2}"), display(r"b \tag{2.1}")], "expected the"),
        ([display(r"a \tag{2.1}"), display(r"b \tag{2.3}")], "expected the"),
        ([display(r"a \tag{2.1}"), display(r"b \tag{2.1}")], "expected the"),
        ([display(r"a \tag{3.1}")], "expected the tags"),
        ([display(r"a \tag{2.1} b \tag{2.2}")], "2 tags in one display"),
        ([display(r"a \tag{2.1}"), r"In $b \tag{2.2}$."], "outside a display"),
        ([r"So $$a \tag{2.1}$$ here."], "outside a display"),
    ],
)
def test_bad_numbering_is_noticed(sources: list[str], said: str):
    found = equations.numbering_complaints(book(*map(md, sources)), 2)
    assert any(said in complaint for complaint in found)


MODULE = """
from tests.equations import equation

@equation("2.1", r"a =
    b")
def {name}():
    assert 1
""".replace('r"a =\n    b"', 'r"""a =\n    b"""')


def test_a_proof_is_read_from_its_module(tmp_path: Path):
    path = tmp_path / "test_x.py"
    path.write_text(MODULE.format(name="test_a"))
    assert equations.proofs(path) == [("2.1", "a = b", "test_a")]


@pytest.mark.parametrize(
    ("tags", "proofs", "said"),
    [
        ({"2.1": "a"}, [], "(2.1): has no test"),
        ({}, [("2.1", "a", "test_a")], "in no notebook"),
        ({"2.1": "a = c"}, [("2.1", "a = b", "test_a")], "the notebook has"),
        ({"2.1": "a"}, [("2.1", "a", "prove")], "prove is no test"),
    ],
)
def test_a_difference_is_noticed(tags, proofs, said):
    (complaint,) = equations.proof_complaints(tags, proofs)
    assert said in complaint
    assert (
        equations.proof_complaints({"2.1": "a"}, [("2.1", "a", "test_a")])
        == []
    )


def test_a_citation_of_no_equation_is_noticed():
    tags = {"2.1": "a", "2.2": "b"}
    text = "By (2.1), (2.3) and, not written yet, (7.1)."
    assert equations.citation_complaints(text, "here", tags) == [
        "here: cites (2.3), which no display has"
    ]


def test_code_and_maths_in_a_page_cite_nothing():
    page = """# By (2.1)

See (2.2), not `f(2.3)` nor $g(2.4)$.

    f(2.5)

$$
h(2.6)
$$

<details><summary>By (2.7)</summary>

So (2.8).

</details>
"""
    found = equations.CITED.findall(equations.plain(page))
    assert found == [("2", "1"), ("2", "2"), ("2", "7"), ("2", "8")]


def test_a_docstring_that_cites_no_equation_is_noticed():
    module = '''
def f(x):
    """Twice x. Equations (2.1), (2.2) and
    (2.3)–(2.4), then equation (7.1); not (2.5)."""
    return f(2.6)  # Equation (2.7)
'''
    tags = {"2.1": "a", "2.2": "b"}
    cited = equations.code_citations(module)
    assert equations.citation_complaints(cited, "f", tags) == [
        f"f: cites (2.{n}), which no display has" for n in [3, 4, 7]
    ]


def test_the_mark_reaches_pytest():
    from tests.equations import equation

    @equation("2.1", "a")
    def test_a():
        pass

    (mark,) = test_a.pytestmark
    assert (mark.name, mark.args) == ("equation", ("2.1", "a"))
