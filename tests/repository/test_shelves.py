"""No arrow runs up: which shelf of the repository may import which.

Read from the source, imports within functions and for types included. A
picture of the shelves is ``book/images/architecture.svg``.
"""

import ast
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

#: Shelf -> where it is, and the shelves that it may import besides itself.
SHELVES: dict[str, tuple[list[str], set[str]]] = {
    "support": (["bft_ref.support"], set()),
    "core": (["bft_ref"], set()),
    "textbook": (["bft_ref.textbook", "bft_ref.plot"], {"core"}),
    "fast": (["bft_ref.fast"], {"core"}),
    "training": (["bft_ref.training"], {"core"}),
    "recsys": (["bft_ref.recsys"], {"core", "training"}),
    "llm": (["bft_ref.llm"], {"core", "fast", "training"}),
    "notebook": (
        ["bft_ref.notebook"],
        {"core", "textbook", "recsys", "training"},
    ),
    "book": (["book"], {"core", "notebook"}),
    "experiments": (
        ["experiments"],
        {"core", "recsys", "llm", "training", "notebook"},
    ),
    "benchmarks": (
        ["benchmarks"],
        {"core", "recsys", "training", "notebook"},
    ),
    "tests": (["tests"], {"core", "book", "experiments", "benchmarks"}),
}
#: The imports that run up all the same: (module, what it imports) -> why.
#: This list only shrinks: one that is no longer needed fails.
SEAMS = {
    ("bft_ref", "bft_ref.fast.attention"): "attend is a public name",
    ("bft_ref.layer", "bft_ref.fast"): "chooses each step, in one function",
}
#: The shelf that all others of the package stand on.
GROUND = "support"
#: The names used most are imported from here, whatever shelf has them.
DOOR = ("bft_ref", "textbook")
DRAWING = ("bft_ref.notebook", "bft_ref.plot", "benchmarks")


class Import(NamedTuple):
    """``module``, in line ``line`` of ``file``, imports ``imported``.

    ``deferred``: only when a function is called, or by a type checker.
    """

    module: str
    file: Path
    line: int
    imported: str
    deferred: bool


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module on the shelves but the tests'."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for folder in ["bft_ref", "book", "experiments", "benchmarks"]
        for path in sorted((root / folder).rglob("*.py"))
    }


def imports(root: Path) -> Iterator[Import]:
    """Every import of every module, the innermost module that it names."""
    known = modules(root)
    for module, file in known.items():
        inside = file.name == "__init__.py"
        for node, deferred in statements(ast.parse(file.read_text("utf8"))):
            for name in named(node, module, inside, known):
                where = file.relative_to(root)
                yield Import(module, where, node.lineno, name, deferred)


def statements(
    tree: ast.AST, deferred: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The import statements beneath ``tree``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, deferred
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If)
            and ast.unparse(node.test).endswith("TYPE_CHECKING")
        )
        yield from statements(node, deferred or later)


def named(
    node: ast.Import | ast.ImportFrom,
    module: str,
    inside: bool,
    known: dict[str, Path],
) -> set[str]:
    """The modules that one statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        above = parts[: len(parts) + inside - node.level]
        base = ".".join([*above, *filter(None, [node.module])])
    inner = [f"{base}.{alias.name}" for alias in node.names]
    return {name if name in known else base for name in inner}


def within(module: str, parents: tuple[str, ...] | list[str]) -> int:
    """How long the longest of ``parents`` is that holds a module; 0: none."""
    held = [p for p in parents if f"{module}.".startswith(f"{p}.")]
    return max(map(len, held), default=0)


def shelf(module: str) -> str | None:
    """The shelf of a module; None for one of another library."""
    best = max(SHELVES, key=lambda name: within(module, SHELVES[name][0]))
    return best if within(module, SHELVES[best][0]) else None


def complaints(root: Path, seams: dict[tuple[str, str], str]) -> list[str]:
    """The imports that run up, and the seams that nothing uses."""
    found, used = [], set()
    for one in imports(root):
        here, there = shelf(one.module), shelf(one.imported)
        where = f"{one.file.as_posix()}:{one.line}: "
        if one.imported.split(".")[0] == "matplotlib" and not (
            one.deferred and within(one.module, DRAWING)
        ):
            found.append(
                f"{where}imports matplotlib; expected that only in functions "
                f"of {' and '.join(DRAWING)}"
            )
        if here is None or there is None or there == here:
            continue
        allowed = SHELVES[here][1]
        if there in {*allowed, GROUND} or (one.module, there) == DOOR:
            continue
        if (one.module, one.imported) in seams:
            used.add((one.module, one.imported))
            continue
        found.append(
            f"{where}the shelf {here!r} imports {one.imported}, of the shelf "
            f"{there!r}; it may import {sorted(allowed) or 'none'}"
        )
    return found + [
        f"SEAMS: {module} no longer imports {imported}; take it out"
        for module, imported in seams.keys() - used
    ]


def test_no_arrow_runs_up(root: Path):
    assert complaints(root, SEAMS) == []


def test_every_module_is_on_a_shelf(root: Path):
    found = {shelf(name) for name in modules(root)}
    assert found | {"textbook", "tests"} == set(SHELVES)


SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture: Path) -> tuple[dict[str, set[str]], set[tuple[str, str]]]:
    """Shelf -> its package and modules, and the arrows of the picture."""
    tree = ET.parse(picture)
    shelves = {
        group.attrib["data-shelf"]: {
            group.attrib["data-package"],
            *(
                f"{group.attrib['data-package']}.{name}"
                for text in group.iter(f"{SVG}text")
                if text.get("class") == "modules"
                for name in text.text.split()
            ),
        }
        for group in tree.iter(f"{SVG}g")
        if "data-shelf" in group.attrib
    }
    arrows = {
        (path.attrib["data-from"], path.attrib["data-to"])
        for path in tree.iter(f"{SVG}path")
        if "data-from" in path.attrib
    }
    return shelves, arrows


def test_the_picture_shows_every_shelf_and_every_arrow(root: Path):
    shelves, arrows = drawn(root / "book" / "images" / "architecture.svg")
    packages = {path.parent.name for path in root.glob("bft_ref/*/*.py")}
    assert shelves.keys() == {"core", *packages}
    for name, shown in shelves.items():
        assert shown <= modules(root).keys()
        assert {shelf(module) for module in shown} == {name}
    allowed = {
        (name, other)
        for name in shelves
        for other in SHELVES[name][1] & shelves.keys()
    }
    seams = {(shelf(here), shelf(there)) for here, there in SEAMS}
    assert arrows == allowed | seams


TREE = {
    "bft_ref/__init__.py": "from bft_ref.textbook import nile",
    "bft_ref/textbook.py": "nile = 1",
    "bft_ref/kalman.py": """
        import torch
        from bft_ref import Belief, belief

        def gain():
            from bft_ref.fast import attention
        """,
    "bft_ref/belief.py": "from . import recsys",
    "bft_ref/reml.py": "from .fast.attention import attend",
    "bft_ref/layer.py": "import bft_ref.fast.attention",
    "bft_ref/plot.py": "import matplotlib.pyplot as plt",
    "bft_ref/fast/__init__.py": "from ..notebook import facts",
    "bft_ref/fast/attention.py": "from bft_ref import kalman",
    "bft_ref/recsys/__init__.py": "",
    "bft_ref/recsys/models.py": """
        from typing import TYPE_CHECKING

        from bft_ref import fast
        if TYPE_CHECKING:
            from bft_ref.notebook.facts import Facts
        from bft_ref.recsys import data
        """,
    "bft_ref/notebook/__init__.py": "from bft_ref import recsys, textbook",
    "bft_ref/notebook/facts.py": """
        import book.tools.prose

        def draw():
            from matplotlib import pyplot
        """,
    "bft_ref/notebook/figures.py": "import tests.factories, experiments.grid",
    "book/tools/prose.py": """
        from bft_ref.notebook import facts
        from bft_ref.recsys.models import x
        """,
    "experiments/grid.py": "from bft_ref.recsys import models",
}
WRONG = [
    "bft_ref/belief.py:1: the shelf 'core' imports bft_ref.recsys, of the "
    "shelf 'recsys'; it may import none",
    "bft_ref/fast/__init__.py:1: the shelf 'fast' imports "
    "bft_ref.notebook.facts, of the shelf 'notebook'; it may import ['core']",
    "bft_ref/kalman.py:6: the shelf 'core' imports bft_ref.fast.attention, "
    "of the shelf 'fast'; it may import none",
    "bft_ref/notebook/facts.py:2: the shelf 'notebook' imports "
    "book.tools.prose, of the shelf 'book'; it may import "
    "['core', 'recsys', 'textbook', 'training']",
    "bft_ref/notebook/figures.py:1: the shelf 'notebook' imports "
    "experiments.grid, of the shelf 'experiments'; it may import "
    "['core', 'recsys', 'textbook', 'training']",
    "bft_ref/notebook/figures.py:1: the shelf 'notebook' imports "
    "tests.factories, of the shelf 'tests'; it may import "
    "['core', 'recsys', 'textbook', 'training']",
    "bft_ref/plot.py:1: imports matplotlib; expected that only in functions "
    "of bft_ref.notebook and bft_ref.plot and benchmarks",
    "bft_ref/recsys/models.py:4: the shelf 'recsys' imports bft_ref.fast, "
    "of the shelf 'fast'; it may import ['core', 'training']",
    "bft_ref/recsys/models.py:6: the shelf 'recsys' imports "
    "bft_ref.notebook.facts, of the shelf 'notebook'; it may import "
    "['core', 'training']",
    "bft_ref/reml.py:1: the shelf 'core' imports bft_ref.fast.attention, of "
    "the shelf 'fast'; it may import none",
    "book/tools/prose.py:3: the shelf 'book' imports bft_ref.recsys.models, "
    "of the shelf 'recsys'; it may import ['core', 'notebook']",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small repository in which most that can be wrong is."""
    for name, source in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), "utf8")
    return tmp_path


def test_each_arrow_that_runs_up_is_named_with_its_line(tree: Path):
    seam = {("bft_ref.layer", "bft_ref.fast.attention"): "declared"}
    assert sorted(complaints(tree, seam)) == WRONG


def test_a_seam_that_nothing_uses_is_noticed(tree: Path):
    gone = {("bft_ref.layer", "bft_ref.fast.feed_forward"): "once"}
    assert (
        "SEAMS: bft_ref.layer no longer imports bft_ref.fast.feed_forward; "
        "take it out"
    ) in complaints(tree, gone)
