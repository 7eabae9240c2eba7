"""The strict build: complete, clean, and without help from outside."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import nbformat
import pypdf
import pytest
import yaml

from tests.book import links
from tests.book.small import code

PAGE = "_build/html/book/pages/page.html"
# At every start of Python: what the build environment lacks is not found.
BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "bft_ref"}:
            raise ModuleNotFoundError(f"blocked: {name}")

sys.meta_path.insert(0, Block())
"""
MODULE = '''
"""A module."""

import torch
import tyro

app = tyro.extras.SubcommandApp()


class Layer(torch.nn.Module):
    """A layer."""

    width: int

    def __init__(self):
        self.hidden = 1

    def forward(self, x):
        return x

    def half(self):
        """Of this, one half."""


def twice(x):
    """Two of it."""


def silent(x):
    return x


@app.command()
def main(option):
    """A command."""
'''

DEEP = '''
"""A module of a package within."""


def half(x):
    """Half of it."""
'''
NUMBERED = r"$$\na = b \tag{9.1}\n$$\n".replace(r"\n", "\n")


def chapters_listed(root: Path) -> set[str]:
    """What the table of contents lists under notebooks/."""
    text = (root / "_toc.yml").read_text("utf8")
    return set(re.findall(r"file: (notebooks/\S+)", text))


def chapters_written(root: Path) -> set[str]:
    """Every notebook in notebooks/, in the form that the contents use."""
    return {
        f"notebooks/{path.stem}" for path in root.glob("notebooks/*.ipynb")
    }


def test_contents_list_every_notebook_and_no_other(root: Path):
    assert chapters_listed(root) == chapters_written(root)


def test_contents_name_no_part_without_chapters(root: Path):
    parts = yaml.safe_load((root / "_toc.yml").read_text("utf8"))["parts"]
    assert all(part["chapters"] for part in parts)


def test_an_unlisted_or_missing_notebook_is_noticed(tmp_path: Path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "02-there.ipynb").write_text("{}")
    (tmp_path / "_toc.yml").write_text("- file: notebooks/03-not-there\n")
    assert chapters_listed(tmp_path) == {"notebooks/03-not-there"}
    assert chapters_written(tmp_path) == {"notebooks/02-there"}


def test_a_warning_fails_the_build_the_second_time_too(small_book, build):
    page = small_book / "book" / "pages" / "page.md"
    page.write_text("# A page\n\n[Nowhere](missing.md)\n")
    first, second = build(small_book), build(small_book)
    assert first.returncode != 0
    assert second.returncode != 0
    assert "missing.md" in second.stdout + second.stderr
    page.write_text("# A page\n\nText.\n")
    mended = build(small_book)
    assert mended.returncode == 0, mended.stderr
    assert "index.html" in mended.stdout


@pytest.fixture
def no_torch(tmp_path_factory, monkeypatch) -> None:
    """Programs that are started find neither torch nor the package."""
    folder = tmp_path_factory.mktemp("chunked")
    (folder / "sitecustomize.py").write_text(BLOCKED)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_the_book_is_built_without_torch(
    small_book, build, no_torch, root: Path
):
    (small_book / "bft_ref" / "__init__.py").write_text("import torch\n")
    (small_book / "bft_ref" / "thing.py").write_text(MODULE)
    (small_book / "bft_ref" / "apart.py").write_text(DEEP)
    (small_book / "bft_ref" / "inner").mkdir()
    (small_book / "bft_ref" / "inner" / "__init__.py").write_text("")
    (small_book / "bft_ref" / "inner" / "deep.py").write_text(DEEP)
    (small_book / "book" / "pages" / "page.md").unlink()
    (small_book / "book" / "pages" / "page.rst").write_text(
        "A page\n======\n\n"
        "One\n---\n\n.. api-modules:: bft_ref\n   :flat:\n"
        "   :without: apart\n\n"
        "Two\n---\n\n.. api-modules:: bft_ref.inner\n\n"
        "Three\n-----\n\n.. api-modules:: bft_ref\n   :only: apart\n"
    )
    done = build(small_book)
    assert done.returncode == 0, done.stderr
    page = links.read(small_book / PAGE)
    assert [tag["id"] for tag in page.select("dt[id]")] == [
        "bft_ref.thing.Layer",
        "bft_ref.thing.Layer.half",
        "bft_ref.thing.Layer.width",
        "bft_ref.thing.twice",
        "bft_ref.inner.deep.half",
        "bft_ref.apart.half",
    ]
    assert [tag.contents[0] for tag in page.select("article h2, h3")] == [
        *["One", "bft_ref.thing", "Two", "bft_ref.inner.deep"],
        *["Three", "bft_ref.apart"],
    ]
    assert [
        (tag["href"], tag.get_text())
        for tag in page.select("article p > a.reference.internal")
    ] == [
        ("#bft-ref-thing", "thing"),
        ("#bft-ref-inner-deep", "deep"),
        ("#bft-ref-apart", "apart"),
    ]
    programs = ["-m", "book.tools.repo", "--help"], ["-c", "import torch"]
    assert [
        subprocess.run(
            [sys.executable, *program], cwd=root, capture_output=True
        ).returncode
        for program in programs
    ] == [0, 1]


@pytest.fixture
def page_of_cells(small_book, build):
    """Build the small book, its page a notebook of these cells; the page."""

    def built(*cells):
        title = nbformat.v4.new_markdown_cell("# A page")
        (small_book / "book" / "pages" / "page.md").unlink()
        nbformat.write(
            nbformat.v4.new_notebook(
                cells=[title, *cells],
                metadata={"language_info": {"name": "python"}},
            ),
            small_book / "book" / "pages" / "page.ipynb",
        )
        done = build(small_book)
        assert done.returncode == 0, done.stderr
        return links.read(small_book / PAGE)

    return built


def test_tables_have_no_empty_heading_and_their_numbers_are_marked(
    page_of_cells,
):
    table = (
        "<table><thead><tr><th></th><th>a</th><th>b</th></tr></thead><tbody>"
        "<tr><th>x</th><td>two 2</td><td>-1.5e-3</td></tr>"
        "<tr><th>y</th><td>1</td><td>+0.5 (−1.0 to +2.0)</td></tr>"
        "<tr><th>z</th><td>3</td><td>NaN</td></tr></tbody></table>"
    )
    text = "| a | b |\n|---|---|\n| x 1 | 1,000 |\n| 2 | – |"
    page = page_of_cells(
        code("table", text_html=table), nbformat.v4.new_markdown_cell(text)
    )
    written, given = page.select("article table")
    assert written.thead.select_one("td").get_text() == ""
    assert [cell.get_text() for cell in written.select("th")] == [*"abxyz"]
    marked = [cell.get_text() for cell in written.select(".numeric")]
    assert sorted(marked) == sorted(
        ["b", "-1.5e-3", "+0.5 (−1.0 to +2.0)", "NaN"]
    )
    assert [c.get_text() for c in given.select(".numeric")] == [
        *["b", "1,000", "–"]
    ]


def indexed(small_book: Path) -> dict:
    """The built search index."""
    text = (small_book / "_build" / "html" / "searchindex.js").read_text()
    return json.loads(text.removeprefix("Search.setIndex(")[:-1])


def test_search_knows_prose_and_code_but_nothing_folded(
    small_book, page_of_cells
):
    (small_book / "book" / "index.toml").write_text(
        '[words]\n"the gain" = ["page"]\n[see]\n"share" = "the gain"\n'
    )
    proof = code("# @title Proof\nfolded_word = 1", "hide-cell")
    proof.outputs = code("", text_html="<p>answered</p>").outputs
    page_of_cells(
        nbformat.v4.new_markdown_cell("A written word."),
        code("visible_word = 1"),
        code("quiet_word = 1", "hide-input", text_html="<p>shown</p>"),
        proof,
    )
    found = indexed(small_book)
    terms = {"written", "visible_word", "quiet_word", "shown"}
    terms |= {"folded_word", "answer", "answered", "proof"}
    assert terms & {*found["terms"]} == {"written", "visible_word", "shown"}
    at = found["docnames"].index("book/pages/page")
    assert found["indexentries"] == {
        word: [[at, "", True]] for word in ("the gain", "share")
    }


def prose(path: Path) -> str:
    """What a page says, in lower case and without line breaks."""
    text = path.read_text("utf8")
    if path.suffix == ".ipynb":
        cells = nbformat.reads(text, as_version=4).cells
        text = " ".join(c.source for c in cells if c.cell_type == "markdown")
    return " ".join(text.lower().split())


def test_words_of_the_index_stand_on_their_pages(root: Path):
    listed = tomllib.loads((root / "book" / "index.toml").read_text("utf8"))
    assert {*listed["see"].values()} <= {*listed["words"]}
    lacking = []
    for word, pages in listed["words"].items():
        for page in pages:
            name = f"{page:02d}-*" if isinstance(page, int) else f"{page}.*"
            (path,) = [
                *root.glob(f"notebooks/{name}"),
                *root.glob(f"book/pages/{name}"),
            ]
            if word.lower() not in prose(path):
                lacking.append((word, path.stem))
    assert not lacking


def test_thebe_is_left_out(small_book, build):
    assert build(small_book).returncode == 0
    page = links.read(small_book / PAGE)
    assert not [
        script
        for script in page.find_all("script")
        if "thebe" in str(script).lower()
    ]


def test_the_reference_says_how_to_run_each_program(site: Path, root: Path):
    text = links.read(site / "book" / "pages" / "api.html").article.get_text()
    programs = [*root.glob("bft_ref/**/__main__.py")]
    assert programs
    for path in programs:
        name = ".".join(path.parent.relative_to(root).parts)
        assert f"python -m {name}" in text


def test_what_the_contents_do_not_list_is_not_published(small_book, build):
    master = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# Master\n\nSOLUTION 4711")]
    )
    for folder in ["labs", ".masters", "book/.masters"]:
        (small_book / folder).mkdir()
        nbformat.write(master, small_book / folder / "lab1.ipynb")
    assert build(small_book).returncode == 0
    for path in (small_book / "_build" / "html").rglob("*"):
        assert "lab1" not in path.name
        if path.suffix in {".html", ".txt", ".md", ".ipynb", ".js"}:
            assert "4711" not in path.read_text("utf8", "replace"), path


def test_published_sources_are_those_of_the_contents(site: Path, root: Path):
    listed = set(
        re.findall(
            r"(?:file|root): (\S+)", (root / "_toc.yml").read_text("utf8")
        )
    )
    sources = site / "_sources"
    published = {
        str(path.relative_to(sources).with_suffix(""))
        for path in sources.rglob("*.*")
    }
    assert published == listed


def test_equations_have_anchors_and_are_linked(small_book, build):
    (small_book / "book" / "pages" / "intro.md").write_text(
        f"# A book\n\n{NUMBERED}\nBy (9.1), not (9.2) nor `(9.1)`.\n"
    )
    (small_book / "book" / "pages" / "page.md").write_text(
        "# A page (9.1)\n\nSee (9.1) again, in $(9.1)$.\n"
    )
    assert build(small_book).returncode == 0
    html = (small_book / PAGE).parent
    intro, page = (links.read(html / f"{n}.html") for n in ["intro", "page"])
    assert "a = b" in intro.find(id="eq-9-1").get_text()
    to = "a.number"
    assert [a["href"] for a in intro.select(to)] == ["#eq-9-1"]
    assert [a["href"] for a in page.select(to)] == ["intro.html#eq-9-1"]
    assert not links.broken(small_book / "_build" / "html")


def test_one_number_for_two_equations_is_a_warning(small_book, build):
    for name in ["intro", "page"]:
        (small_book / "book" / "pages" / f"{name}.md").write_text(
            f"# {name}\n\n{NUMBERED}"
        )
    failed = build(small_book)
    assert failed.returncode != 0
    assert "equation (9.1) is also in book/pages/" in failed.stderr


def test_a_badge_is_a_link_without_its_image(small_book, build):
    badge = "[![Open](https://example.org/a.svg)](https://example.org/b)"
    (small_book / "book" / "pages" / "page.md").write_text(
        f"# A page\n\n{badge}\n"
    )
    assert build(small_book).returncode == 0
    site = small_book / "_build" / "html"
    page = links.read(site / "book" / "pages" / "page.html")
    (link,) = page.select('a[href="https://example.org/b"]')
    assert link.get_text() == "Open"
    assert links.loaded_from_outside(site) == []


def test_no_page_asks_another_site_for_anything(site: Path):
    assert links.loaded_from_outside(site) == []


def test_what_a_page_loads_from_outside_is_noticed(tmp_path: Path):
    (tmp_path / "a.html").write_text(
        '<script src="//cdn.example.org/x.js"></script><img src="y.png">'
        '<link rel="canonical" href="https://here.example.org/">'
    )
    assert links.loaded_from_outside(tmp_path) == [
        "a.html: //cdn.example.org/x.js"
    ]


def test_maths_is_served_from_the_site_itself(site: Path):
    with_maths = [
        page
        for page in map(links.read, site.rglob("book/pages/*.html"))
        if page.select(".math")
    ]
    assert with_maths
    for page in with_maths:
        (source,) = page.select('script[src*="mathjax"]')
        assert "_static/mathjax/tex-svg.js" in source["src"]
        inline = "\n".join(tag.get_text() for tag in page.find_all("script"))
        # doubled backslashes would leave inline maths as plain text
        assert r'["\\(", "\\)"]' in inline
    assert (site / "_static" / "mathjax" / "tex-svg.js").exists()


def test_internal_links_and_anchors_resolve(site: Path):
    assert links.broken(site) == []


def test_a_dead_link_and_a_dead_anchor_are_noticed(tmp_path: Path):
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="#here">1</a><a href="#gone">2</a>'
        '<a href="b.html#there">3</a><a href="b.html#gone">4</a>'
        '<a href="c.html">5</a><img src="d.png">'
        '<a href="https://example.org/#x">6</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="there">B</h1>')
    assert links.broken(tmp_path) == [
        "a.html: d.png",
        "a.html: #gone",
        "a.html: b.html#gone",
        "a.html: c.html",
    ]


def venv(tmp_path: Path, root: Path, path: Path, *wanted: str):
    """Ask for an environment where only the programs in ``path`` exist."""
    return subprocess.run(
        ["/bin/sh", root / "book/tools/venv.sh", tmp_path / "env", *wanted],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
    )


def fake_python(folder: Path, version: str) -> None:
    """A Python that gives its version and answers that it is too old."""
    folder.mkdir(exist_ok=True)
    program = folder / "python3"
    program.write_text(
        f"#!/bin/sh\ncase $2 in *exit*) exit 1;; esac\necho {version}\n"
    )
    program.chmod(0o755)


@pytest.mark.skipif(os.name == "nt", reason="make is not used on Windows")
def test_no_python_is_said_plainly(tmp_path: Path, root: Path):
    (tmp_path / "bin").mkdir()
    said = venv(tmp_path, root, tmp_path / "bin")
    assert said.returncode == 1
    assert "Python was not found. The book needs Python 3.11" in said.stderr


@pytest.mark.skipif(os.name == "nt", reason="make is not used on Windows")
def test_a_python_too_old_is_said_plainly(tmp_path: Path, root: Path):
    fake_python(tmp_path / "bin", "3.9")
    said = venv(tmp_path, root, tmp_path / "bin")
    assert said.returncode == 1
    assert "Python is too old: python3 is 3.9;" in said.stderr
    assert "make PYTHON=" in said.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
def test_make_stops_where_python_is_too_old(tmp_path: Path, root: Path):
    fake_python(tmp_path / "bin", "3.10")
    done = subprocess.run(
        ["make", "book", f"VENV={tmp_path / 'env'}", "PYTHON=python3"],
        cwd=root,
        env={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "Python is too old: python3 is 3.10;" in done.stderr


def pins(path: Path) -> dict[str, str]:
    """The pinned packages of a requirements file, by normalised name."""
    found = {}
    for line in path.read_text("utf8").splitlines():
        if line and not line.startswith(("#", "-r")):
            name, version = line.split("==")
            found[re.sub(r"[-_.]+", "-", name).lower()] = version
    return found


def test_requirements_pin_everything_once(root: Path):
    build = pins(root / "requirements-build.txt")
    rest = pins(root / "requirements.txt")
    assert "torch" in rest
    assert not set(build) & set(rest)
    assert all(re.fullmatch(r"[\w.]+", v) for v in [*build.values()])


def test_requirements_are_what_is_installed(root: Path):
    from importlib.metadata import version

    wanted = pins(root / "requirements-build.txt")
    wanted |= pins(root / "requirements.txt")
    here = {name: version(name).split("+")[0] for name in wanted}
    assert here == wanted


def test_the_archive_is_one_folder_with_the_whole_site(small_book, build):
    assert build(small_book).returncode == 0
    subprocess.run(
        [sys.executable, "-m", "book.tools.build", "--archive"],
        cwd=small_book,
        check=True,
    )
    built = small_book / "_build"
    with zipfile.ZipFile(built / "bft-book.zip") as packed:
        inside = {name for name in packed.namelist() if name[-1] != "/"}
    assert inside == {
        f"bft-book/{path.relative_to(built / 'html').as_posix()}"
        for path in (built / "html").rglob("*")
        if path.is_file()
    }
    assert "bft-book/_static/mathjax/tex-svg.js" in inside


WIDE = " + ".join(f"x_{{{i}}}" for i in range(60))


@pytest.mark.browser
@pytest.mark.slow
def test_the_pdf_has_an_outline_and_links_that_lead_inside(small_book, build):
    pages = small_book / "book" / "pages"
    (pages / "intro.md").write_text(
        f"# A book\n\n<p class='bft-pdf'></p>\n\n{NUMBERED}\n"
        f"$$\n{WIDE} \\tag{{9.9}}\n$$\n\n[A page](page.md) has more.\n"
    )
    (pages / "page.md").write_text("# A page\n\n## A part\n\nBy (9.1).\n")
    command = [sys.executable, "-m", "book.tools.pdf"]
    early = subprocess.run(
        command, cwd=small_book, capture_output=True, text=True
    )
    assert early.returncode == 1 and "run make book" in early.stderr
    assert build(small_book).returncode == 0
    subprocess.run(command, cwd=small_book, check=True)
    html = small_book / "_build" / "html"
    front = links.read(html / "book" / "pages" / "intro.html")
    (link,) = front.select(".bft-pdf a")
    assert link["href"] == "../../bft-book.pdf"
    assert not links.broken(html)
    read = pypdf.PdfReader(html / "bft-book.pdf")
    assert len(read.pages) == 2  # each chapter begins a page
    ((title, (chapter, (part,))),) = [read.outline]
    named = [entry.title for entry in (title, chapter, part)]
    assert named == ["A book", "A page", "A part"]
    texts = [page.extract_text() for page in read.pages]
    assert texts[0].rstrip().endswith("1") and "A part" in texts[1]
    found = [
        note.get_object()
        for page in read.pages
        for note in page.get("/Annots", [])
    ]
    inside = [note for note in found if "/Dest" in note]
    assert len(inside) == 3  # two to the page, one to (9.1)
    outside = [note["/A"]["/URI"] for note in found if "/A" in note]
    assert not [uri for uri in outside if not uri.startswith("http")]
