"""Carry the book's address to all that need it: ``python -m book.tools.repo``.

In pyproject.toml ``[project.urls]`` has the repository, ``[tool.bft-book]``
the branch that Colab opens notebooks from and the ref they install from.
Badges and install cells of all notebooks are written from these; in text
files the old address is exchanged for the new. ``--check`` says what is stale
and changes nothing.
"""

import argparse
import re
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
COLAB = "https://colab.research.google.com"
# Text files that may hold the address, and those that must.
TEXTS = [
    "pyproject.toml",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "book/pages/*.md",
]
BEARERS = ["_config.yml", "README.md", "CITATION.cff"]
BADGE = re.compile(
    rf"\[!\[[^]]*\]\({re.escape(COLAB)}/assets/[^)]*\)\]\([^)]*\)"
)
#: what chapters need beside the package; of language models, more
EXTRAS, LANGUAGE = "oracles,recommend", "llm,oracles,recommend"
INSTALL = """\
# @title Install: bft_ref, on Colab where it is missing, and nothing else
import importlib.util

if importlib.util.find_spec("bft_ref") is None:
    book = "git+https://github.com/{slug}@{ref}"
    %pip install -q "bft_ref[{extras}] @ $book"

import torch

device = "cuda" if torch.cuda.is_available() else "cpu\""""


@dataclass(frozen=True)
class Address:
    """Where the book lives; ``slug`` is owner/name on GitHub."""

    slug: str
    branch: str = "main"
    ref: str = "main"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.slug):
            raise ValueError(f"REPO: expected owner/name, got {self.slug!r}")
        for name in ["branch", "ref"]:
            value = getattr(self, name)
            if not re.fullmatch(r"[\w./-]+", value):
                raise ValueError(
                    f"{name.upper()}: expected a branch, tag or commit, "
                    f"got {value!r}"
                )

    @classmethod
    def read(cls, root: Path) -> "Address":
        """The address that ``root``'s pyproject.toml states."""
        settings = tomllib.loads((root / "pyproject.toml").read_text("utf8"))
        url = settings["project"]["urls"]["Repository"]
        return cls(
            url.removeprefix("https://github.com/"),
            **settings["tool"]["bft-book"],
        )

    @property
    def site(self) -> str:
        """Where GitHub Pages shows it, without https://."""
        owner, name = self.slug.split("/")
        home = f"{owner.lower()}.github.io"
        return home if name.lower() == home else f"{home}/{name}"

    def badge(self, notebook: Path) -> str:
        """The Markdown badge that opens ``notebook`` on Colab."""
        file = notebook.as_posix().rpartition("notebooks/")[2]
        page = f"github/{self.slug}/blob/{self.branch}/notebooks/{file}"
        image = f"![Open in Colab]({COLAB}/assets/colab-badge.svg)"
        return f"[{image}]({COLAB}/{page})"

    def install(self, extras: str = EXTRAS) -> str:
        """The source of the cell that installs bft_ref."""
        return INSTALL.format(slug=self.slug, ref=self.ref, extras=extras)


def notebooks(root: Path) -> list[Path]:
    """The notebooks of the book, and the template of a chapter."""
    return sorted(
        path
        for name in ["*.ipynb", "template/*.ipynb"]
        for path in (root / "notebooks").glob(name)
    )


def texts(root: Path) -> list[Path]:
    """The text files that may hold the address."""
    return sorted(path for name in TEXTS + BEARERS for path in root.glob(name))


def moved(text: str, old: Address, new: Address) -> str:
    """``text`` with the one address exchanged for the other."""
    for before, after in [
        (f"github.com/{old.slug}", f"github.com/{new.slug}"),
        (old.site, new.site),
        (f"cd {old.slug.split('/')[1]}", f"cd {new.slug.split('/')[1]}"),
    ]:
        text = re.sub(rf"{re.escape(before)}(?![\w-])", after, text)
    return text


def with_settings(text: str, new: Address) -> str:
    """pyproject.toml's or _config.yml's ``text`` with branch and ref."""
    text = re.sub(r'(?m)^(branch = )"[^"]*"', rf'\1"{new.branch}"', text)
    text = re.sub(r'(?m)^(ref = )"[^"]*"', rf'\1"{new.ref}"', text)
    return re.sub(r"(?m)^(  branch: ).*$", rf"\g<1>{new.branch}", text)


def with_address(path: Path, here: Address) -> str:
    """The notebook at ``path`` with its badge and install cell as due."""
    text = path.read_text("utf8")
    book = nbformat.reads(text, as_version=4)
    title, badge = book.cells[0], here.badge(path)
    if BADGE.search(title.source):
        title.source = BADGE.sub(badge, title.source)
    else:
        heading, _, rest = title.source.partition("\n")
        title.source = f"{heading}\n\n{badge}\n{rest}".rstrip("\n")
    second = book.cells[1].metadata if len(book.cells) > 1 else {}
    if "install" not in second.get("tags", []):
        cell = nbformat.v4.new_code_cell(metadata={"tags": ["install"]})
        cell.id = "install"
        book.cells.insert(1, cell)
    language = any("bft_ref.llm" in cell.source for cell in book.cells[2:])
    book.cells[1].source = here.install(LANGUAGE if language else EXTRAS)
    if book == nbformat.reads(text, as_version=4):
        return text
    return nbformat.writes(book) + "\n"


def carry(root: Path, new: Address) -> dict[Path, str]:
    """Every file that differs from what ``new`` asks for, as due."""
    old = Address.read(root)
    due = {}
    for path in texts(root):
        text = moved(path.read_text("utf8"), old, new)
        if path.name in {"pyproject.toml", "_config.yml"}:
            text = with_settings(text, new)
        due[path] = text
    due |= {path: with_address(path, new) for path in notebooks(root)}
    return {
        path: text
        for path, text in due.items()
        if text != path.read_text("utf8")
    }


def stale(root: Path) -> list[str]:
    """What does not agree with pyproject.toml, one line each."""
    here = Address.read(root)
    found = [
        f"{path.relative_to(root)}: not as {here} asks"
        for path in carry(root, here)
    ]
    name = re.escape(here.slug.split("/")[1])
    other = re.compile(rf"github\.com/([\w.-]+/{name})(?![\w-])")
    for path in texts(root):
        slugs = set(other.findall(path.read_text("utf8")))
        if slugs - {here.slug} or (not slugs and path.name in BEARERS):
            found.append(
                f"{path.relative_to(root)}: expected the repository "
                f"{here.slug}, found {', '.join(sorted(slugs)) or 'none'}"
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--set", metavar="OWNER/NAME", dest="slug")
    parser.add_argument("--branch")
    parser.add_argument("--ref")
    args = parser.parse_args()
    if args.check:
        found = stale(args.root)
        for line in found + ["Run make set-repo."] * bool(found):
            print(line)
        return bool(found)
    given = {
        name: getattr(args, name)
        for name in ["slug", "branch", "ref"]
        if getattr(args, name)
    }
    try:
        new = replace(Address.read(args.root), **given)
    except ValueError as error:
        parser.error(str(error))
    for path, text in carry(args.root, new).items():
        path.write_text(text, "utf8")
        print(f"wrote {path.relative_to(args.root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
