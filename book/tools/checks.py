"""The house's checks of a notebook: each returns what is wrong, as lines.

A notebook is an ``nbformat`` node; its chapter is the number that its file
name begins with. Every check is proven in ``tests/book`` by a notebook that
breaks it on purpose.

The prose is checked word by word (:func:`prose_complaints`). What is read
is the text of paragraphs, lists, tables and raw HTML; headings, code, maths
without a fact, links, tags and comments are not. There

- every number that refers to a fact shows the fact's digits;
- every other numeral is waived with ``<!-- given -->``, but for references
  such as (2.3), Chapter 3, Exercise 2.1, Python 3.11, and for names such as
  float64;
- every comparison of two facts is true, and the word before it states it:
  ``words.toml`` knows the word, and its direction is the comparison's;
- what rises from one number to another does rise, in alt texts too;
- a sentence that quotes a fact and holds a word of order ("larger",
  "falls") has a comparison right after that word, or ``<!-- given -->``.
  A sentence without facts may compare as it likes.

No check reads numbers in words (half, twice), quantifiers (all, never), the
unit after a number, or above and below without a comparison.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbformat import NotebookNode

from bft_ref.notebook.facts import FactError, Facts, read
from book.tools import prose
from book.tools.folding import ANSWER, title

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 79
MEGABYTE = 1_000_000

TAG = re.compile(r"\\tag\*?\{([^}]*)\}")
CITED = re.compile(r"\((\d{1,2})\.(\d{1,2})\)")
IN_CODE = re.compile(
    r"(?i)\bequations?\s(?:\s*(?:#\s*)?(?:\(\d+\.\d+\)|,|–|and\b|to\b))+"
)
GIVEN = "<!-- given -->"
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
NUMERAL = re.compile(
    r"(?<![\w.])\d(?:[\d.,:/×–—−-]*\d)?(?:\s?%)?(?P<given><!-- given -->)?"
)
REFERENCE = re.compile(
    r"\(\d+\.\d+\)|\b(?:Chapters?|Sections?|Exercises?|Figures?|Parts?|"
    r"Equations?|Labs?|Python|torch|PyTorch) \(?\d+(?:\.\d+)*\)?"
    r"(?:(?:–|, | and | to )\d+(?:\.\d+)*)*",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z*(])")


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


# ------------------------------------------------------- stored execution


def execution_complaints(notebook: NotebookNode) -> list[str]:
    """Cells not stored executed in order, or with an error."""
    found, due = [], 1
    for at, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
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
    code = [
        (at, cell)
        for at, cell in enumerate(notebook.cells)
        if cell.cell_type == "code"
    ]
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


GUARDS = {
    "fact",
    "figure",
    "slider",
    "assert",
    "assert_close",
    "assert_allclose",
}


def calls(source: str) -> set[str]:
    """Names of the functions called in Python source, and ``assert``."""
    plain = re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", source)
    names = set()
    for node in ast.walk(ast.parse(plain)):
        if isinstance(node, ast.Assert):
            names.add("assert")
        elif isinstance(node, ast.Call):
            names.add(
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
    return names


# -------------------------------------------------------------- equations


def normal(latex: str) -> str:
    """LaTeX with every run of white space as one blank."""
    return " ".join(latex.split())


def displays(notebook: NotebookNode) -> Iterator[tuple[int, str]]:
    """Position and LaTeX of every display formula on lines of its own."""
    for at, source in sources(notebook, "markdown"):
        for token in parsed(source):
            if token.type == "math_block":
                yield at, token.content


def equations(notebook: NotebookNode) -> dict[str, str]:
    """Label -> LaTeX without its tag, of every tagged display."""
    found = {}
    for _, latex in displays(notebook):
        for label in TAG.findall(latex):
            found[label] = normal(TAG.sub("", latex))
    return found


def numbering_complaints(notebook: NotebookNode, chapter: int) -> list[str]:
    """Tags that are not chapter.1, chapter.2, … one to a display."""
    found, labels = [], []
    for at, latex in displays(notebook):
        here = TAG.findall(latex)
        labels += here
        if len(here) > 1:
            found.append(f"cell {at}: {len(here)} tags in one display")
    due = [f"{chapter}.{n}" for n in range(1, len(labels) + 1)]
    if labels != due:
        found.append(f"expected the tags {due}, got {labels}")
    for at, source in sources(notebook, "markdown"):
        written = len(TAG.findall(source))
        read_ = sum(
            len(TAG.findall(token.content))
            for token in parsed(source)
            if token.type == "math_block"
        )
        if written != read_:
            found.append(
                f"cell {at}: {written - read_} tags outside a display on "
                "lines of its own"
            )
    return found


def proofs(path: Path) -> list[tuple[str, str, str]]:
    """(label, LaTeX, function) of every ``@equation`` in a test module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if (
                isinstance(mark, ast.Call)
                and getattr(mark.func, "id", "") == "equation"
            ):
                label, latex = (ast.literal_eval(arg) for arg in mark.args)
                found.append((label, normal(latex), node.name))
    return found


def proof_complaints(
    tags: dict[str, str], proven: list[tuple[str, str, str]]
) -> list[str]:
    """Where the equations of notebooks and those of tests differ."""
    found = []
    for label, latex, test in proven:
        if not test.startswith("test_"):
            found.append(f"({label}): {test} is no test that pytest runs")
        if label not in tags:
            found.append(f"({label}): proven by {test}, in no notebook")
        elif tags[label] != latex:
            found.append(
                f"({label}): {test} proves\n    {latex}\n  the notebook has"
                f"\n    {tags[label]}"
            )
    unproven = tags.keys() - {label for label, _, _ in proven}
    return found + [f"({label}): has no test" for label in sorted(unproven)]


def plain(source: str) -> str:
    """The text of Markdown without its code and maths."""
    found = []
    for token in parsed(source):
        found += [token.content] if token.type == "html_block" else []
        children = token.children or []
        found += [child.content for child in children if child.type == "text"]
    return "\n".join(found)


def code_citations(source: str) -> str:
    """What Python source cites as "equation (c.n)"; 3.0 in f(3.0) is none.

    That is what its docstrings and comments say.
    """
    return "\n".join(IN_CODE.findall(source))


def citation_complaints(
    text: str, where: str, tags: dict[str, str]
) -> list[str]:
    """Equations cited as (c.n) in a written chapter that has none of them.

    ``text`` is what :func:`plain` or :func:`code_citations` returns.
    """
    written = {int(label.split(".")[0]) for label in tags}
    return [
        f"{where}: cites ({c}.{n}), which no display has"
        for c, n in CITED.findall(text)
        if int(c) in written and f"{c}.{n}" not in tags
    ]


# ------------------------------------------------------------------ prose


@cache
def facts_of(number: int) -> Facts:
    """The facts of the chapter of that number."""
    folder = ROOT / "notebooks" / "facts"
    paths = sorted(folder.glob(f"{number:02d}-*.json"))
    if not paths:
        raise FactError(f"no facts of a chapter {number} in {folder}")
    return read(folder, paths[0].stem)


def paragraphs(source: str) -> Iterator[str]:
    """The text of each block of Markdown that prose checks read.

    Comments stay; maths stays only before a comment that names a fact;
    code, links, tags, headings and images go.
    """
    tokens = parsed(source)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if before is not None and before.type == "heading_open":
            continue
        if token.type == "inline":
            yield "".join(pieces(token.children or []))
        elif token.type == "html_block":
            yield re.sub(r"<(?!!--)[^>]*>", " ", token.content)


def pieces(tokens: list[Token]) -> Iterator[str]:
    """The text of inline tokens, as :func:`paragraphs` keeps it."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += {"link_open": 1, "link_close": -1}.get(token.type, 0)
        if depth:
            continue
        if token.type == "text":
            yield token.content
        elif token.type in {"softbreak", "hardbreak"}:
            yield "\n"
        elif token.type == "html_inline" and token.content[:4] == "<!--":
            yield token.content
        elif token.type == "math_inline":
            after = tokens[at + 1] if at + 1 < len(tokens) else None
            referred = after and after.content.startswith("<!-- fact")
            yield f"${token.content}$" if referred else "$ $"
        elif token.type == "code_inline":
            yield "` `"


def prose_complaints(source: str, facts: Facts) -> list[str]:
    """What is wrong with the numbers of one Markdown cell."""
    return [
        complaint
        for sentence in sentences(source)
        for complaint in (
            *fact_complaints(sentence, facts),
            *numeral_complaints(sentence),
        )
    ]


def page_complaints(source: str) -> list[str]:
    """What is wrong with the facts that a page of the book quotes.

    Its other numbers are its own.
    """
    return [
        complaint
        for sentence in sentences(source)
        for complaint in fact_complaints(sentence, {})
    ]


def sentences(source: str) -> Iterator[str]:
    """The sentences of Markdown that prose checks read."""
    for text in paragraphs(source):
        yield from SENTENCE.split(text)


def fact_complaints(text: str, facts: Facts) -> Iterator[str]:
    """What is wrong with the facts and order words of one sentence."""
    if text.lstrip().startswith("<!-- fact"):
        yield f"a line begins with a comment: {text.strip()!r}"
        return
    for match in prose.FACT.finditer(text):
        try:
            due = prose.render(match[0], facts)
        except FactError as error:
            yield f"{match[0]!r}: {error}"
            continue
        if due != match[0]:
            yield (
                f"{match[0]!r}: the fact now reads "
                f"{due.partition('<!--')[0]!r}; run make notebooks"
            )
    for match in prose.ORDER.finditer(text):
        try:
            if not prose.holds(match, facts):
                yield f"{match[0]!r}: not true of the recorded facts"
        except FactError as error:
            yield f"{match[0]!r}: {error}"
        if discord := prose.discord(text, match):
            yield f"{match[0]!r} in {normal(text)!r}: {discord}"
    yield from prose.misled(text)
    if prose.FACT.search(text):
        for match in prose.ASKED.finditer(text):
            after = match["after"] or ""
            if match["word"] and not (
                after == GIVEN or prose.ORDER.fullmatch(after)
            ):
                yield (
                    f"{match[0]!r} in {normal(text)!r}: a word of order "
                    "beside a fact needs a comparison right after it"
                )
    for comment in COMMENT.findall(unreferred(text)):
        if "fact" in comment:
            yield f"{comment!r}: no number or word of that form before it"


def unreferred(text: str) -> str:
    """``text`` without the numbers and comparisons that name facts."""
    return prose.ORDER.sub("", prose.FACT.sub("", text))


def numeral_complaints(text: str) -> Iterator[str]:
    """Numerals of one sentence that are neither facts nor waived."""
    rest = COMMENT.sub(
        lambda match: match[0] if match[0] == GIVEN else "", unreferred(text)
    )
    for match in NUMERAL.finditer(REFERENCE.sub("", rest)):
        if not match["given"]:
            yield (
                f"{match[0]!r} in {normal(rest)!r}: neither a fact nor "
                "waived with <!-- given -->"
            )


# ------------------------------------------------------------ portability


def myst_in(source: str) -> Iterator[str]:
    """MyST directives, roles and targets in Markdown."""
    for token in parsed(source):
        if token.type == "fence" and token.info.startswith("{"):
            yield token.info
        children = token.children or []
        for child, after in zip_longest(children, children[1:]):
            text = child.content if child.type == "text" else ""
            yield from re.findall(r"^:{3,}.*|^\(\w[\w-]*\)=$", text)
            code = after is not None and after.type == "code_inline"
            yield from re.findall(r"\{\w[\w:-]*\}$", text) if code else ()


def portability_complaints(notebook: NotebookNode) -> list[str]:
    """What Jupyter, Colab, GitHub or the page would not show as meant."""
    found = []
    for at, source in sources(notebook, "markdown"):
        found += [f"cell {at}: MyST's {text!r}" for text in myst_in(source)]
        if re.search(r"\\begin\{(align|eqnarray|equation)", source):
            found.append(f"cell {at}: align or equation; use one $$ a step")
        if re.search(r"(?m)(?<=\S)[ \t]*\$\$|\$\$[ \t]*(?=\S)", source):
            found.append(f"cell {at}: $$ not on a line of its own")
        opened = len(re.findall(r"<details\b", source))
        if opened != source.count("</details>"):
            found.append(f"cell {at}: <details> and </details> differ")
        if "](attachment:" in source:
            found.append(f"cell {at}: an attachment")
    for at, latex in displays(notebook):
        if TAG.search(latex) and r"\\" in latex:
            found.append(f"cell {at}: \\\\ in a tagged display")
    for at, source in sources(notebook, "code"):
        for line in source.splitlines():
            if len(line) > COLUMNS:
                found.append(f"cell {at}: {len(line)} columns: {line!r}")
    for at, cell in enumerate(notebook.cells):
        pictures = [
            output
            for output in cell.get("outputs", [])
            if any(k.startswith("image/") for k in output.get("data", {}))
        ]
        if len(pictures) > 1:
            found.append(f"cell {at}: {len(pictures)} figures in one cell")
        for output in pictures:
            kinds = {k for k in output.data if k.startswith("image/")}
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt")
            if kinds != {"image/png"} or "figure" not in calls(cell.source):
                found.append(f"cell {at}: a picture not from figure()")
            elif alt != output.metadata.get("image/png", {}).get("alt"):
                found.append(f"cell {at}: its alt text is not the figure's")
            found += [
                f"cell {at}: in its alt text {complaint}"
                for complaint in prose.misled(alt or "")
            ]
    return found


def size_complaints(path: Path) -> list[str]:
    """A notebook file that is too large to read in a browser."""
    size = path.stat().st_size
    return [f"{size} bytes, more than a megabyte"] * (size > MEGABYTE)


EXERCISE = re.compile(
    r"(?m)^### Exercise (\d+)\.(\d+) \((\d+) minutes, level [123]\)$"
)


def skeleton_complaints(notebook: NotebookNode, chapter: int) -> list[str]:
    """Where a chapter departs from the shape that all share."""
    found = []
    cells = notebook.cells
    title = cells[0].source.splitlines()[0] if cells[0].source else ""
    if not title.startswith(f"# {chapter} "):
        found.append(f"expected a title '# {chapter} …', got {title!r}")
    if "colab.research.google.com" not in cells[0].source:
        found.append("the first cell has no Colab badge")
    if "install" not in cells[1].metadata.get("tags", []):
        found.append("the second cell is not tagged install")
    code = [source for _, source in sources(notebook, "code")]
    named = [source for source in code if "chapter" in calls(source)]
    if len(named) != 1:
        found.append(f"chapter() is called in {len(named)} cells, not in one")
    text = "\n\n".join(source for _, source in sources(notebook, "markdown"))
    headings = re.findall(r"(?m)^#+ .*$", re.sub(r"(?s)```.*?```", "", text))
    if sum(heading.startswith("# ") for heading in headings) != 1:
        found.append("expected one heading of the first level")
    for part in ["where this breaks", "exercises", "what to remember"]:
        if not any(part in heading.lower() for heading in headings):
            found.append(f"no heading {part!r}")
    if not any("slider" in calls(source) for source in code):
        found.append("no slider")
    if not any("figure" in calls(source) for source in code):
        found.append("no figure")
    return found + exercise_complaints(notebook, chapter)


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
