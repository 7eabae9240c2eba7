"""The whole book as one PDF: ``python -m book.tools.pdf``.

Jupyter Book writes all pages as one, Chromium prints it: with an outline,
page numbers, and links that lead inside the file. It lies beside the built
site, whose front page then links to it.
"""

import argparse
import sys
from pathlib import Path

from bs4 import BeautifulSoup, Tag
from playwright.sync_api import PdfMargins, sync_playwright
from pypdf import PdfWriter
from pypdf.generic import (
    DictionaryObject,
    NameObject,
    PdfObject,
    TextStringObject,
)

from book.tools import chromium
from book.tools.build import ROOT, build

NAME = "bft-book.pdf"
START = "book/pages/intro.html"  # where the builder writes its one page
MARGIN = PdfMargins(top="14mm", bottom="16mm", left="14mm", right="14mm")
NUMBER = (
    '<div style="font: 8px sans-serif; width: 100%; text-align: center">'
    '<span class="pageNumber"></span></div>'
)
HEADINGS = "h1, h2, h3, h4, h5, h6"
STYLE = """
body { margin: 0 }
.toctree-wrapper > section { break-before: page }
nav.contents a { display: block; padding: 0.15rem 0 }
nav.contents p { font-weight: 700; margin: 0.8rem 0 0.2rem }
h2 { font-size: 1.9rem } h3 { font-size: 1.4rem } h4 { font-size: 1.15rem }
"""


def one_page(html: str) -> str:
    """The builder's one page as it is printed: the text, and its contents."""
    page = BeautifulSoup(html, "html.parser")
    article = page.find("article")
    if not isinstance(article, Tag) or not isinstance(page.body, Tag):
        raise ValueError("singlehtml: expected a page with an article")
    for part in article.select("a.headerlink, noscript, button"):
        part.decompose()
    for link in article.find_all("a", href=True):
        target = str(link["href"])
        if target.startswith(f"{START}#"):
            link["href"] = target.removeprefix(START)
        elif target.startswith("_images/"):
            link.unwrap()
    contents = page.new_tag("nav", attrs={"class": "contents"})
    parts = article.select(".toctree-wrapper:not(section section *)")
    for part in parts:
        if name := part.find("p", class_="caption", recursive=False):
            contents.append(name)
        for chapter in part.find_all("section", recursive=False):
            link = page.new_tag("a", href=f"#{chapter['id']}")
            link.string = chapter.select("h1, h2")[0].get_text()
            contents.append(link)
    parts[0].insert_before(contents)
    style = page.new_tag("style")
    style.string = STYLE
    scripts = page.select('script[src*="mathjax"], script[src*="print.js"]')
    settings = [s for s in page.find_all("script") if "MathJax" in s.text]
    page.body.clear()
    page.body.extend([style, article, *settings, *scripts])
    return str(page)


def print_pdf(page: Path, out: Path) -> None:
    """Print a page of HTML, once its maths is typeset."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium.find(), args=chromium.FLAGS
        )
        tab = browser.new_page(viewport={"width": 680, "height": 1000})
        tab.set_default_timeout(600_000)
        tab.goto(page.resolve().as_uri(), wait_until="load")
        tab.evaluate("async () => await window.MathJax.startup.promise")
        tab.pdf(
            path=out,
            format="A4",
            margin=MARGIN,
            outline=True,
            tagged=True,
            display_header_footer=True,
            header_template="<span></span>",
            footer_template=NUMBER,
        )
        browser.close()


def mend_outline(pdf: Path, html: str) -> None:
    """Give the outline the headings' words, and the file its title.

    Where a heading takes two lines Chromium loses the space between them.
    """
    page = BeautifulSoup(html, "html.parser")
    headings = [" ".join(h.get_text().split()) for h in page.select(HEADINGS)]
    known = {heading.replace(" ", ""): heading for heading in headings}
    known |= {2 * bare: heading for bare, heading in known.items()}
    writer = PdfWriter(clone_from=pdf)
    writer.add_metadata({"/Title": headings[0]})

    def visit(entry: PdfObject | None) -> None:
        while isinstance(entry, DictionaryObject):
            bare = "".join(str(entry.get("/Title", "")).split())
            if bare in known:
                title = TextStringObject(known[bare])
                entry[NameObject("/Title")] = title
            if "/First" in entry:
                visit(entry["/First"].get_object())
            entry = entry["/Next"].get_object() if "/Next" in entry else None

    visit(writer.root_object["/Outlines"].get_object())
    writer.write(pdf)


def link_from(front: Path) -> None:
    """Say on the built front page that the PDF is there."""
    page = BeautifulSoup(front.read_text("utf8"), "html.parser")
    place = page.select_one(".bft-pdf")
    if place is None:
        raise ValueError(f"{front}: expected an element of class bft-pdf")
    place.clear()
    link = page.new_tag("a", href=f"../../{NAME}")
    link.string = "The whole book as PDF"
    place.append(link)
    front.write_text(str(page), "utf8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", type=Path, default=ROOT)
    source = parser.parse_args().source.resolve()
    html, single = (source / "_build" / n for n in ("html", "singlehtml"))
    if not (html / START).exists():
        print("The book is not built yet: run make book.", file=sys.stderr)
        return 1
    if status := build(source, "singlehtml", anew=False):
        return status
    page = single / "book.html"
    page.write_text(one_page((single / START).read_text("utf8")), "utf8")
    print_pdf(page, html / NAME)
    mend_outline(html / NAME, page.read_text("utf8"))
    link_from(html / START)
    print(f"Open {html / NAME}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
