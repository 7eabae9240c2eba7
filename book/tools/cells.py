"""What the cells of a notebook hold: Markdown as tokens, code as a tree.

A notebook is an ``nbformat`` node, and so is a cell.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbformat import NotebookNode

PARSER = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin)


@cache
def parsed(source: str) -> list[Token]:
    """The tokens of Markdown with tables and dollar maths."""
    return PARSER.parse(source)


def sources(notebook: NotebookNode, kind: str) -> list[tuple[int, str]]:
    """Position and source of the cells of one kind."""
    return [
        (at, cell.source)
        for at, cell in enumerate(notebook.cells)
        if cell.cell_type == kind
    ]


def code_cells(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """Position and cell of each code cell."""
    for at, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            yield at, cell


def tree(source: str) -> ast.Module:
    """Python source as a tree, without the magics of IPython."""
    return ast.parse(re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", source))


def normal(latex: str) -> str:
    """LaTeX with every run of white space as one blank."""
    return " ".join(latex.split())


def calls(source: str) -> set[str]:
    """Names of the functions called in Python source, and ``assert``."""
    names = set()
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Assert):
            names.add("assert")
        elif isinstance(node, ast.Call):
            names.add(
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
    return names
