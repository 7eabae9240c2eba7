"""Inject each classic slip into a copy of ``bft_ref``: which test catches it?

``make mutants`` is this: it prints the table and writes the book's page of
it. Slips are data, in ``slips.toml``; the working tree is never touched.
"""

import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import pytest
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SLIPS = ROOT / "tests" / "slips.toml"
PAGE = ROOT / "book" / "pages" / "slips.md"
LIMIT = 600  # seconds for one run of the tests
# What the tests import besides the package.
LIBRARIES = [
    *["filterpy.kalman", "gstools", "hypothesis.strategies", "pykrige"],
    *["scipy.stats", "statsmodels.api", "torch", "torch._dynamo"],
]
ENVIRONMENT = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "OMP_NUM_THREADS": "1",
    "CI": "true",  # hypothesis: the same examples every time
}

HEAD = """\
# The slips table

The mistakes that anyone makes once when writing such a layer. Each was put
into a copy of `bft_ref` by itself, and the tests were run until one failed.
None of them stops the code from running, so only a test can tell; a slip that
no test notices counts as a fault of the tests. `make mutants` repeats all of
this and writes this page from what it sees.

Caught: {caught} of {all}.

| slip | what it teaches | caught by |
|---|---|---|
"""
LINES = """
## Line by line

Each block shows the line as it should be, then the slip.
"""


class Slip(NamedTuple):
    """A mistake: in ``file`` of bft_ref, ``new`` stands for ``old``."""

    name: str
    file: str
    old: str
    new: str
    lesson: str
    tests: list[str]

    def applied(self, source: str) -> str:
        """``source`` with the slip in it."""
        found = source.count(self.old)
        if found != 1:
            raise ValueError(
                f"slip {self.name!r}: expected its old text once in "
                f"{self.file}, found it {found} times"
            )
        return source.replace(self.old, self.new)


class Outcome(NamedTuple):
    """The test that failed (None: none did), and what pytest said."""

    test: str | None
    message: str
    seconds: float


def read(path: Path = SLIPS) -> list[Slip]:
    return [
        Slip(**one) for one in tomllib.loads(path.read_text("utf8"))["slip"]
    ]


def module(name: str) -> Path:
    """Where the tests of a module are: "fast/attention" is in unit/fast."""
    path = Path("tests", "unit", name)
    return path.with_name(f"test_{path.name}.py")


def copied(folder: Path) -> Path:
    """A copy of the package and its tests in ``folder``."""
    ignore = shutil.ignore_patterns("__pycache__", "book")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignore)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "bft_ref", folder / "bft_ref", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def tested(folder: Path, tests: Iterable[str]) -> Outcome:
    """Run test modules of the copy, up to the first failure."""
    report, log = folder / "report.xml", folder / "log"
    report.unlink(missing_ok=True)
    files = [str(module(name)) for name in tests]
    started = time.monotonic()
    process = processes().Process(
        target=_pytest, args=(folder, [f"--junitxml={report}", *files], log)
    )
    process.start()
    process.join(LIMIT)
    seconds = time.monotonic() - started
    if process.exitcode is None:
        process.kill()
        return Outcome(None, f"no answer in {LIMIT} s", seconds)
    if process.exitcode == 0:
        return Outcome(None, "", seconds)
    if process.exitcode == 1:
        for case in ET.parse(report).iter("testcase"):
            failure = case.find("failure")
            if failure is not None:
                file = case.attrib["classname"].replace(".", "/") + ".py"
                test = case.attrib["name"].partition("[")[0]
                message = failure.attrib["message"]
                return Outcome(f"{file}::{test}", message, seconds)
    return Outcome(None, log.read_text("utf8")[-4000:], seconds)


def processes():
    """Where a new process has the libraries already, if the system can."""
    methods = multiprocessing.get_all_start_methods()
    if "forkserver" not in methods:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *LIBRARIES])
    return context


def _pytest(folder: Path, arguments: list[str], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # before the working tree
    quiet = ["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    sys.exit(pytest.main([*quiet, *arguments]))


def silent(outcome: Outcome) -> bool:
    """Whether a test noticed by what it checks, not by a crash.

    A slip that only breaks names or syntax would be caught by anything.
    """
    crash = r"(Name|Attribute|Import|Syntax|Indentation|Unbound)\w*Error"
    return re.match(crash, outcome.message) is None


def tried(slip: Slip, folder: Path) -> Outcome:
    """The tests' answer to one slip in the copy, which is mended after."""
    path = folder / "bft_ref" / slip.file
    source = path.read_text("utf8")
    try:
        _write(path, slip.applied(source))
        outcome = tested(folder, slip.tests)
    finally:
        _write(path, source)
    if outcome.test is not None and not silent(outcome):
        raise ValueError(f"slip {slip.name!r}: it crashes, {outcome.message}")
    return outcome


def _write(path: Path, source: str) -> None:
    path.write_text(source, "utf8")
    # Bytecode is known by second and size: a slip of equal length is missed.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def page(outcomes: list[tuple[Slip, Outcome]]) -> str:
    """The book's page, in Markdown."""
    caught = sum(outcome.test is not None for _, outcome in outcomes)
    text = [HEAD.format(caught=caught, all=len(outcomes))]
    for slip, outcome in outcomes:
        text.append(f"| {slip.name} | {slip.lesson} | {words(outcome)} |\n")
    text.append(LINES)
    for slip, outcome in outcomes:
        text += [
            f"\n**{slip.name}**: in `bft_ref/{slip.file}`, ",
            "not caught." if outcome.test is None else "caught by",
            "" if outcome.test is None else f"\n`{outcome.test}`.",
            "\n\n```text\n",
            *[f"- {line}\n" for line in _lines(slip.old)],
            *[f"+ {line}\n" for line in _lines(slip.new)],
            "```\n",
        ]
    return "".join(text)


def words(outcome: Outcome) -> str:
    """A test's name as the sentence that it is."""
    if outcome.test is None:
        return "nothing"
    file, name = outcome.test.split("::")
    return f"`{Path(file).stem}`: {name[len('test_') :].replace('_', ' ')}"


def _lines(code: str) -> list[str]:
    return code.strip("\n").splitlines() or ["(nothing)"]


def main(
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    slips: Path = SLIPS,
    to: Annotated[Path, tyro.conf.arg(name="page")] = PAGE,
) -> int:
    """Try every slip; 1 if a test misses one.

    The page is written only when all slips of the list were tried.

    Args:
        only: name of a slip to try; may be given repeatedly
        slips: the list of slips
        to: where the page goes
    """
    for name in ("BFT_FACTS", "PYTEST_ADDOPTS"):
        os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
    everything = read(slips)
    unknown = set(only) - {slip.name for slip in everything}
    if unknown:
        print(f"--only: no slip is called {sorted(unknown)}", file=sys.stderr)
        return 2
    chosen = [slip for slip in everything if not only or slip.name in only]
    for slip in chosen:
        slip.applied((ROOT / "bft_ref" / slip.file).read_text("utf8"))
    console = Console()
    table = Table("slip", "module", title="Slips")
    table.add_column("caught by", overflow="fold")
    table.add_column("seconds", justify="right")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="slips-") as name:
        folder = copied(Path(name))
        whole = tested(
            folder, dict.fromkeys(test for s in chosen for test in s.tests)
        )
        if whole.test is not None or whole.message:
            console.print(
                "The copy without a slip fails its tests:",
                whole.test or "",
                whole.message,
                markup=False,
            )
            return 2
        for slip in track(chosen, "Slips", console=console):
            outcome = tried(slip, folder)
            outcomes.append((slip, outcome))
            by = outcome.test or f"nothing. {outcome.message}"
            console.print(f"{slip.name}: {by}", markup=False, soft_wrap=True)
            table.add_row(
                slip.name,
                slip.file,
                outcome.test or "[red]nothing",
                f"{outcome.seconds:.1f}",
            )
    console.print(table)
    survived = [slip.name for slip, outcome in outcomes if not outcome.test]
    total = whole.seconds + sum(outcome.seconds for _, outcome in outcomes)
    console.print(
        f"{len(chosen) - len(survived)} of {len(chosen)} caught, "
        f"{total:.0f} s, of which {whole.seconds:.0f} s without a slip"
    )
    if not only:
        to.write_text(page(outcomes), "utf8")
    if survived:
        console.print("survived:", ", ".join(survived), markup=False)
    return bool(survived)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
