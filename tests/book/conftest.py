"""What the tests of the built book share."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from book.tools import chromium

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site() -> Path:
    """The built site: ``make test`` builds it before the tests run."""
    built = ROOT / "_build" / "html"
    if not (built / "index.html").exists():
        pytest.fail("the book is not built yet: run make book first")
    return built


@pytest.fixture
def small_book(tmp_path: Path) -> Path:
    """A two-page book with the real settings, quick to build."""
    for name in ["_config.yml", "pyproject.toml"]:
        shutil.copy(ROOT / name, tmp_path)
    for name in ["images", "site", "tools"]:
        shutil.copytree(
            ROOT / "book" / name,
            tmp_path / "book" / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    pages = tmp_path / "book" / "pages"
    pages.mkdir()
    (tmp_path / "bft_ref").mkdir()
    (tmp_path / "bft_ref" / "__init__.py").write_text('"""Nothing."""\n')
    (tmp_path / "book" / "references.bib").write_text("")
    (tmp_path / "book" / "index.toml").write_text("[words]\n[see]\n")
    (pages / "intro.md").write_text("# A book\n\nText.\n")
    (pages / "page.md").write_text("# A page\n\nText.\n")
    (tmp_path / "_toc.yml").write_text(
        "format: jb-book\nroot: book/pages/intro\n"
        "chapters:\n- file: book/pages/page\n"
    )
    return tmp_path


@pytest.fixture
def build():
    """Build the book in a folder; the finished process."""

    def run(source: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "book.tools.build"],
            cwd=source,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def executable() -> str:
    """Chromium's path; skips where there is none, but fails under CI."""
    try:
        return chromium.find()
    except FileNotFoundError as none:
        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(f"{none}; CI needs one")
        pytest.skip(str(none))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser without a window."""
    path = executable()
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=path, args=chromium.FLAGS
        )
        yield started
        started.close()
