"""Whether every internal link of a built site leads somewhere."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

# What a page loads, as against what a reader may follow.
LOADED = [("script", "src"), ("img", "src"), ("link", "href")]
FOLLOWED = [("a", "href"), ("source", "src"), ("iframe", "src")]


def read(page: Path) -> BeautifulSoup:
    """Parse one page."""
    return BeautifulSoup(page.read_text("utf8"), "html.parser")


def anchors(page: BeautifulSoup) -> set[str]:
    """Every place on a page that a link can name."""
    named = {tag["name"] for tag in page.find_all("a", attrs={"name": True})}
    return named | {tag["id"] for tag in page.find_all(id=True)}


def broken(site: Path) -> list[str]:
    """Internal links and anchors that lead nowhere, one line each."""
    pages = {page.resolve(): read(page) for page in site.rglob("*.html")}
    targets = {path: anchors(page) for path, page in pages.items()}
    found = []
    for path, page in pages.items():
        for kind, attribute in LOADED + FOLLOWED:
            for tag in page.find_all(kind, attrs={attribute: True}):
                link = urlsplit(tag[attribute])
                if link.scheme or link.netloc:
                    continue
                target = path
                if link.path:
                    target = (path.parent / unquote(link.path)).resolve()
                if target.is_dir():
                    target /= "index.html"
                anchor = unquote(link.fragment)
                if not target.exists() or (
                    anchor
                    and target in targets
                    and anchor not in targets[target]
                ):
                    where = path.relative_to(site.resolve())
                    found.append(f"{where}: {tag[attribute]}")
    return found


def loaded_from_outside(site: Path) -> list[str]:
    """Scripts, styles and images that a page asks another site for."""
    found = []
    for path in site.rglob("*.html"):
        page = read(path)
        for kind, attribute in LOADED:
            for tag in page.find_all(kind, attrs={attribute: True}):
                canonical = tag.get("rel") == ["canonical"]
                if urlsplit(tag[attribute]).netloc and not canonical:
                    where = path.relative_to(site)
                    found.append(f"{where}: {tag[attribute]}")
    return found
