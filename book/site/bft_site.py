"""The book's Sphinx extension: local maths, numbered equations, badges.

- MathJax is copied from a pinned package, so that no page asks anything
  outside the site.
- A display formula that ends in ``\\tag{3.4}`` gets the anchor ``eq-3-4``,
  and a plain "(3.4)" in any page's text becomes a link to it.
- A plain "chapter 3" in a page's text becomes a link once it is written.
- A badge image from another site becomes its text: the link stays, the
  request does not.
- ``api-modules`` writes the API reference: whatever has a docstring in the
  public modules of a package, read without being imported.
- A folded cell shows its title instead of its first line.
- The empty corner of a table that pandas wrote is no heading; a column of
  numbers is marked as one.
- The search leaves out what is folded, and ``search.js`` ranks what it finds;
  ``book/index.toml`` names the pages that answer first.
- ``stored-output`` shows on a page what a notebook's cell has stored.
- Thebe, which would run cells on a server elsewhere, is left out.
"""

import ast
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeGuard

import mathjax
from bs4 import BeautifulSoup, Tag
from docutils import nodes
from docutils.parsers.rst import directives
from myst_nb.sphinx_ import HideCodeCellNode
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)

TITLE = re.compile(r"# @title (\S.*)\n?")
TAG = re.compile(r"\\tag\*?\{(\d+)\.(\d+)\}")
# A bar outside ``code``: |x| is an absolute value, not a substitution.
BAR = re.compile(r"((?:``.*?``|[^|`])*)\|")
# A number, an interval, or nothing.
NUMBER = re.compile(r"([\d\s.,%×±+−()…⁻⁰¹²³⁴-⁹–-]|NaN|to|e(?=[+-]?\d))*")
# "name: text" or "``name``  text"
FIELD = re.compile(r"(\w+): +(.+)|``(\w+)``  +(.+)")
REFERENCE = re.compile(
    r"\((?P<chapter>\d+)\.(?P<number>\d+)\)|\b[Cc]hapter (?P<alone>\d+)\b"
)

# What a page may load: the renderer, the TeX extensions it loads on demand,
# and the reading aids of its menu. SVG output needs no web font, which some
# browsers refuse to a page opened from a folder.
MATHJAX_PARTS = [
    "tex-svg.js",
    "input/tex/extensions",
    "a11y",
    "sre/mathmaps/base.json",
    "sre/mathmaps/en.json",
]


def anchor(chapter: str, number: str) -> str:
    """The id of equation (chapter.number) on its page."""
    return f"eq-{chapter}-{number}"


def copy_mathjax(target: Path) -> None:
    """Copy the parts of MathJax that a page may load to ``target``."""
    source = Path(mathjax.__file__).parent / "static" / "mathjax" / "es5"
    for part in MATHJAX_PARTS:
        origin, copy = source / part, target / part
        copy.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_dir():
            shutil.copytree(origin, copy, dirs_exist_ok=True)
        else:
            shutil.copy2(origin, copy)


def copy_static(app: Sphinx) -> None:
    """Lay out the folder that html_static_path names."""
    target = Path(app.srcdir) / "_build" / "static"
    shutil.rmtree(target, ignore_errors=True)
    copy_mathjax(target / "mathjax")
    here = Path(__file__).parent
    for own in [*here.glob("*.css"), *here.glob("*.js")]:
        shutil.copy2(own, target)
    shutil.copy2(here.parent / "images" / "card.png", target)


class AnchorEquations(SphinxTransform):
    """Give every tagged display formula its anchor, and remember where."""

    default_priority = 880

    def apply(self, **kwargs: Any) -> None:
        known = equations(self.env)
        for node in self.document.findall(nodes.math_block):
            found = TAG.search(node.astext())
            if not found:
                continue
            label = found.groups()
            if label in known:
                logger.warning(
                    "equation (%s) is also in %s",
                    ".".join(label),
                    known[label],
                    location=node,
                )
            known[label] = self.env.docname
            node["ids"].append(anchor(*label))


class LinkNumbers(SphinxPostTransform):
    """Link a plain "(3.4)" or "chapter 3" to what exists of that number."""

    default_priority = 700
    kept = (
        nodes.reference,
        nodes.literal,
        nodes.literal_block,
        nodes.math,
        nodes.math_block,
        nodes.title,
        nodes.raw,
    )

    def run(self, **kwargs: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            if not inside(text, self.kept):
                text.parent.replace(text, list(self.pieces(str(text))))

    def pieces(self, text: str) -> Iterator[nodes.Node]:
        start = 0
        for found in REFERENCE.finditer(text):
            target = self.target(found)
            if target is None:
                continue
            yield nodes.Text(text[start : found.start()])
            yield nodes.reference(
                found[0],
                found[0],
                internal=True,
                refuri=target,
                classes=["number"],
            )
            start = found.end()
        yield nodes.Text(text[start:])

    def target(self, found: re.Match[str]) -> str | None:
        here = self.env.docname
        if found["alone"]:
            page = chapter(self.env, found["alone"])
            fragment = ""
        else:
            label = found["chapter"], found["number"]
            page = equations(self.env).get(label)
            fragment = "#" + anchor(*label)
        if page is None or (page == here and not fragment):
            return None
        if page == here:
            return fragment
        return self.app.builder.get_relative_uri(here, page) + fragment


class IndexPages(SphinxTransform):
    """Put a page under its words of ``book/index.toml``, for the search."""

    default_priority = 880

    def apply(self, **kwargs: Any) -> None:
        path = Path(self.env.srcdir, "book", "index.toml")
        self.env.note_dependency(str(path))
        listed = tomllib.loads(path.read_text("utf8"))
        here = [
            word
            for word, numbers in listed["words"].items()
            if self.env.docname in {page(self.env, str(n)) for n in numbers}
        ]
        entries = [("single", word, "", "main", None) for word in here]
        entries += [
            ("see", f"{word}; {other}", "", "main", None)
            for word, other in listed["see"].items()
            if other in here
        ]
        if entries:
            self.document.insert(0, addnodes.index(entries=entries))


class BookBuilder(StandaloneHTMLBuilder):
    """Sphinx's HTML; its search knows nothing of what is folded."""

    def index_page(
        self, pagename: str, doctree: nodes.document, title: str
    ) -> None:
        shown = doctree.deepcopy()
        for folded in list(shown.findall(HideCodeCellNode)):
            folded.parent.remove(folded)
        super().index_page(pagename, shown, title)


def page(env: BuildEnvironment, name: str) -> str | None:
    """The page of a chapter's number, or of a file's name."""
    if name.isdecimal():
        return chapter(env, name)
    return next((p for p in env.found_docs if p.endswith(f"/{name}")), None)


def chapter(env: BuildEnvironment, number: str) -> str | None:
    """The page of the chapter of this number, if it is in the book."""
    start = f"notebooks/{int(number):02d}-"
    return next((p for p in env.found_docs if p.startswith(start)), None)


class Tables(SphinxPostTransform):
    """Mark columns of numbers; in HTML, empty heading cells become plain."""

    default_priority = 700

    def run(self, **kwargs: Any) -> None:
        for table in self.document.findall(nodes.tgroup):
            head, body = (
                [list(row) for part in table.findall(kind) for row in part]
                for kind in (nodes.thead, nodes.tbody)
            )
            for cell in numbers(head, body, nodes.Element.astext):
                cell["classes"].append("numeric")
        for raw in list(self.document.findall(nodes.raw)):
            if "<table" in raw.astext():
                mended = raw.copy()  # its classes too: it scrolls by them
                mended += nodes.Text(self.dressed(raw.astext()))
                raw.parent.replace(raw, mended)

    @staticmethod
    def dressed(html: str) -> str:
        page = BeautifulSoup(html, "html.parser")
        for cell in page.find_all("th"):
            if not cell.contents:
                cell.name = "td"
        for table in page.find_all("table"):
            head, body = (
                [[*row.select("th, td")] for row in table.select(rows)]
                for rows in ("thead tr", "tbody tr")
            )
            for cell in numbers(head, body, Tag.get_text):
                cell["class"] = "numeric"
        return str(page)


def numbers(
    head: list[list[Any]], body: list[list[Any]], text: Callable[[Any], str]
) -> Iterator[Any]:
    """The cells of a table's columns of numbers, their headings included.

    Columns are counted from the right: on the left an index spans rows.
    """
    columns = [*zip_longest(*(row[::-1] for row in body))]
    for i, column in enumerate(columns):
        cells = [cell for cell in column if cell is not None]
        words = [text(cell).strip() for cell in cells]
        if all(map(NUMBER.fullmatch, words)) and re.search(r"\d", str(words)):
            yield from cells
            yield from (
                row[-1 - i] for row in head if len(row) == len(columns)
            )


class TitleFolds(SphinxPostTransform):
    """Name a folded cell by its title, ``# @title …``, and leave that out."""

    default_priority = 198  # before myst-nb folds

    def run(self, **kwargs: Any) -> None:
        for cell in self.document.findall(nodes.container):
            source = next(cell.findall(nodes.literal_block), None)
            if "hide_mode" not in cell or source is None:
                continue
            if found := TITLE.match(source.astext()):
                cell["prompt_show"] = cell["prompt_hide"] = found[1]
                if found[1].startswith("Solution"):
                    cell["classes"].append("solution")
                rest = source.astext()[found.end() :]
                source.rawsource = rest
                source[:] = [nodes.Text(rest)]


class NameBadges(SphinxTransform):
    """Replace an image from another site by its alternative text."""

    default_priority = 880

    def apply(self, **kwargs: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            if re.match(r"(https?:)?//", image["uri"]):
                image.parent.replace(image, nodes.Text(image.get("alt", "")))


class ApiModules(SphinxDirective):
    """A section for every public module of a package, some of them first.

    Above them stand links to all. ``flat`` leaves out the packages within it,
    ``without`` some modules, ``only`` all others.
    """

    required_arguments = 1
    option_spec = {  # noqa: RUF012
        "first": directives.unchanged,
        "flat": directives.flag,
        "only": directives.unchanged,
        "without": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        first = self.options.get("first", "").split()
        root = Path(self.env.srcdir, *package.split("."))
        found = modules(root, flat="flat" in self.options)
        only = self.options.get("only", " ".join(found)).split()
        without = self.options.get("without", "").split()
        if unknown := {*first, *only, *without} - {*found}:
            raise self.error(
                f"api-modules: expected modules of {package}, "
                f"got {', '.join(sorted(unknown))}"
            )
        found = sorted(
            {*only} - {*without}, key=lambda name: place(name, first)
        )
        links = [f"`{name} <{package}.{name}_>`__" for name in found]
        lines = [", ".join(links) + ".", ""]
        for name in found:
            title = f"{package}.{name}"
            lines += [title, "-" * len(title), ""]
            lines += [f".. autoapimodule:: {title}", ""]
            for kind, defined, members in definitions(source(root, name)):
                lines += [f".. autoapi{kind}:: {title}.{defined}"]
                lines += [f"   :members: {members}"] if members else []
                lines += [""]
        return self.parse_text_to_nodes(
            "\n".join(lines), allow_section_headings=True
        )


class StoredOutput(SphinxDirective):
    """The HTML that the cell with an id has stored in a notebook."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        name, cell_id = self.arguments
        path = Path(self.env.srcdir, name)
        self.env.note_dependency(str(path))
        cells = json.loads(path.read_text("utf8"))["cells"]
        found = [
            "".join(output["data"]["text/html"])
            for cell in cells
            if cell["id"] == cell_id
            for output in cell["outputs"]
            if "text/html" in output.get("data", {})
        ]
        if len(found) != 1:
            raise self.error(
                f"stored-output: expected one HTML output of cell {cell_id} "
                f"in {name}, got {len(found)}"
            )
        return [nodes.raw("", found[0], format="html")]


def modules(package: Path, flat: bool = False) -> list[str]:
    """The dotted names of a package's public modules that define something.

    Those of the packages within it too, unless ``flat``.
    """
    names = {
        ".".join(path.relative_to(package).with_suffix("").parts)
        for path in package.glob("*.py" if flat else "**/*.py")
    }
    names = {name.removesuffix(".__init__") for name in names} - {"__init__"}
    return [
        name
        for name in names
        if not re.search(r"(^|\.)_", name)
        and definitions(source(package, name))
    ]


def source(package: Path, name: str) -> Path:
    """The file of the module with this dotted name."""
    path = package.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def definitions(path: Path) -> list[tuple[str, str, str]]:
    """(kind, name, members) of what a module defines and documents, in order.

    A command is left out: its options are for the command line.
    """
    return [
        (
            "class" if isinstance(node, ast.ClassDef) else "function",
            node.name,
            ", ".join(members(node)),
        )
        for node in ast.parse(path.read_text("utf8")).body
        if documented(node)
        and not any(
            ast.unparse(mark).endswith("command()")
            for mark in node.decorator_list
        )
    ]


def members(node: ast.stmt) -> list[str]:
    """A class' fields, and its methods that say something themselves.

    What a method inherits is another library's words, found only where that
    library is installed.
    """
    found = []
    for part in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(part, ast.AnnAssign):
            found.append(ast.unparse(part.target))
        elif documented(part):
            found.append(part.name)
    return [name for name in found if not name.startswith("_")]


def documented(
    node: ast.stmt,
) -> TypeGuard[ast.FunctionDef | ast.ClassDef]:
    """Whether this is a public function or class with a docstring."""
    return (
        isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is not None
    )


def place(name: str, first: list[str]) -> tuple[int, str]:
    """A sort key: the modules named first in their order, then the rest."""
    return (first.index(name) if name in first else len(first), name)


def as_fields(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    lines: list[str],
) -> None:
    """Show a docstring's "Shapes: ..." and "``name``  ..." lines as fields."""
    lines[:] = [BAR.sub(r"\1\\|", line) for line in lines]
    field = False
    for i, line in enumerate(lines):
        found = FIELD.match(line)
        starts = found and (field or i == 0 or not lines[i - 1].strip())
        if found and starts:
            term, text = (group for group in found.groups() if group)
            code = term[0].islower()
            lines[i] = f"- ``{term}``: {text}" if code else f":{term}: {text}"
            field = True
        elif not line.strip():
            field = False
        elif field:
            lines[i] = "  " + line.strip()


def inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    """Whether ``node`` has an ancestor of one of these kinds."""
    parent = node.parent
    while parent is not None:
        if isinstance(parent, kinds):
            return True
        parent = parent.parent
    return False


def equations(env: BuildEnvironment) -> dict[tuple[str, ...], str]:
    """Where each tagged equation stands: (chapter, number) -> page."""
    if not hasattr(env, "bft_equations"):
        env.bft_equations = {}  # type: ignore[attr-defined]
    return env.bft_equations  # type: ignore[attr-defined]


def forget(app: Sphinx, env: BuildEnvironment, page: str) -> None:
    """Drop the equations of a page that is read again."""
    known = equations(env)
    for label in [key for key, where in known.items() if where == page]:
        del known[label]


def rank_search(app: Sphinx, config: Config) -> None:
    """Name the file that ranks what a search finds."""
    config.html_search_scorer = str(Path(__file__).with_name("search.js"))


def leave_out_thebe(app: Sphinx) -> None:
    """Take back what Thebe has registered; it declares its names twice."""
    for event in ["env-before-read-docs", "doctree-resolved"]:
        registered = app.events.listeners[event]
        registered[:] = [
            listener
            for listener in registered
            if listener.handler.__module__ != "sphinx_thebe"
        ]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    copy_static(app)
    app.add_builder(BookBuilder, override=True)
    app.connect("config-inited", rank_search)
    app.connect("builder-inited", leave_out_thebe)
    app.connect("env-purge-doc", forget)
    app.connect("autodoc-process-docstring", as_fields)
    app.add_directive("api-modules", ApiModules)
    app.add_directive("stored-output", StoredOutput)
    app.add_transform(AnchorEquations)
    app.add_transform(IndexPages)
    app.add_transform(NameBadges)
    app.add_post_transform(LinkNumbers)
    app.add_post_transform(Tables)
    app.add_post_transform(TitleFolds)
    return {"version": "1", "parallel_read_safe": False}
