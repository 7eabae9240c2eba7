"""Build the book: ``python -m book.tools.build``.

From nothing, and a warning is an error: an incremental build says nothing
about pages it does not read again, so a second run would hide the warning
that failed the first. Only the PDF starts from the pages just read.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "from jupyter_book.cli.main import main; main()"


def build(source: Path, builder: str = "html", anew: bool = True) -> int:
    """Build ``source`` strictly; the exit status of Jupyter Book.

    Not ``anew``: from the pages that the build before this one has read.
    """
    out = source / "_build"
    read = [".doctrees", ".jupyter_cache", "static"] if anew else []
    for made in [builder, *read]:
        shutil.rmtree(out / made, ignore_errors=True)
    options = ["-W", "--keep-going", "--quiet", "--builder", builder]
    options += ["--all"] if anew else []
    status = subprocess.run(
        [sys.executable, "-c", COMMAND, "build", str(source), *options]
    ).returncode
    static = out / builder / "_static"
    # a third of the site, of use only to who works on the theme
    for unused in [*static.rglob("*.map"), *static.glob("*macros.html")]:
        unused.unlink(missing_ok=True)
    return status


def archive(source: Path) -> str:
    """Zip the built site, as one folder named bft-book; the file's path."""
    out = source / "_build"
    shutil.rmtree(out / "archive", ignore_errors=True)
    shutil.copytree(out / "html", out / "archive" / "bft-book")
    name = str(out / "bft-book")
    return shutil.make_archive(name, "zip", out / "archive", "bft-book")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--builder", default="html")
    parser.add_argument(
        "--archive", action="store_true", help="only zip what is built"
    )
    args = parser.parse_args()
    source = args.source.resolve()
    if args.archive:
        print(archive(source))
        return 0
    status = build(source, args.builder)
    if status == 0 and args.builder == "html":
        print(f"Open {source / '_build' / 'html' / 'index.html'}")
    elif status:
        print(
            "The book was not built: see the warnings above.", file=sys.stderr
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
