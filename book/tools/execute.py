"""Execute notebooks and store them: ``python -m book.tools.execute``.

Without paths, all of ``notebooks/*.ipynb``. Facts are recorded, alt
texts are copied to the cell metadata that the book's builder reads, cells
with a title are folded (:mod:`book.tools.folding`), the numbers in prose are
written anew from the facts (also in ``book/pages``, which quote a fact as
``13:name``), and what changes from run to run is left out. A
notebook that fails leaves its file and its facts as they were.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from bft_ref.notebook.facts import FactError, read
from book.tools.folding import fold
from book.tools.numerals import render

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 600  # seconds a cell may take
KEPT = {"tags", "mystnb", "slideshow", "jupyter", "cellView", "nbgrader"}


def execute(path: Path) -> None:
    """Execute the notebook at ``path``, and store it and its facts."""
    notebook = nbformat.read(path, as_version=4)
    clean(notebook)
    with restored(path.parent / "facts" / f"{path.stem}.json"):
        NotebookClient(
            notebook,
            timeout=TIMEOUT,
            kernel_name="python3",
            extra_arguments=["--log-level=ERROR"],
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(path.parent)}},
        ).execute()
        clean(notebook)
        copy_alt(notebook)
        fold(notebook)
        facts = read(path.parent / "facts", path.stem)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = render(cell.source, facts)
        nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", "utf8")


@contextmanager
def restored(path: Path) -> Iterator[None]:
    """Put a file back as it was when what is done here fails."""
    before = path.read_text("utf8") if path.exists() else None
    try:
        yield
    except BaseException:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(before, "utf8")
        raise


def clean(notebook: NotebookNode) -> None:
    """Leave out what differs from run to run or from machine to machine."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict(
            {key: cell.metadata[key] for key in KEPT & cell.metadata.keys()}
        )


def copy_alt(notebook: NotebookNode) -> None:
    """Copy each figure's alt text and width to its cell's metadata."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            about = output.get("metadata", {}).get("image/png", {})
            if "alt" in about:
                image = {"alt": about["alt"], "width": f"{about['width']}px"}
                image["classes"] = "bft-figure dark-light"
                cell.metadata["mystnb"] = {"image": image}


def pages(notebooks: list[Path]) -> list[Path]:
    """The pages of the notebooks' repository: they quote any."""
    roots = {path.parent.parent for path in notebooks}
    return sorted(
        page for root in roots for page in root.glob("book/pages/*.md")
    )


def main(names: list[str]) -> int:
    """Execute the notebooks named; how many failed."""
    paths = [Path(name).resolve() for name in names] or sorted(
        (ROOT / "notebooks").glob("*.ipynb")
    )
    os.environ["BFT_FACTS"] = "record"
    os.environ["PYTHONHASHSEED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    failed = 0
    for path in paths:
        started = time.monotonic()
        try:
            execute(path)
            said = "stored"
        except (
            CellExecutionError,
            CellTimeoutError,
            FactError,
            ValueError,
        ) as error:
            failed += 1
            said = f"FAILED, left as it was\n{error}"
        print(f"{path.name}: {time.monotonic() - started:.1f} s, {said}")
    for path in pages(paths):
        try:
            path.write_text(render(path.read_text("utf8"), {}), "utf8")
        except FactError as error:
            failed += 1
            print(f"{path.name}: FAILED, left as it was\n{error}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
