"""Run the checks of the book, one after the other, and say which failed.

Without a name all of them: ``make test`` is this. ``quick`` is ``make check``,
``fix`` repairs what a machine can. On Windows, where make is missing, call it
directly: ``python tests/run.py quick``.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = [
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
    ROOT / "notebooks" / "template" / "00-template.ipynb",
]

CODE = ["bft_ref", "benchmarks", "book", "experiments", "notebooks", "tests"]
CHECKS = {
    "lint": ["ruff", "check", "--quiet", *CODE],
    "format": ["ruff", "format", "--quiet", "--check", *CODE],
    "spelling": ["codespell_lib"],
    "types": ["mypy"],
    "addresses": ["book.tools.repo", "--check"],
    "workflows": ["zizmor", "--offline", "--quiet", ".github"],
    # in one process: a second spends what it saves on importing torch
    "core": ["pytest", "-q", "-m", "core", "tests"],
    "book": ["book.tools.build"],
    # tests last: the line they end with is the one to read
    "tests": [
        "pytest",
        *["-q", "-n", "2", "--dist", "loadfile", "--durations", "5"],
        *["--nbval", "--nbval-current-env", "--nbval-cell-timeout", "300"],
        *["--nbval-sanitize-with", "tests/sanitize.cfg"],
        "tests",
        *[str(path.relative_to(ROOT)) for path in NOTEBOOKS],
    ],
}
REPAIRS = {
    "repair lint": ["ruff", "check", "--quiet", "--fix", *CODE],
    "repair format": ["ruff", "format", "--quiet", *CODE],
    "repair addresses": ["book.tools.repo"],
}
GROUPS = {
    "all": [name for name in CHECKS if name != "core"],  # "tests" has them
    "quick": list(CHECKS)[: list(CHECKS).index("core") + 1],
    "fix": list(REPAIRS),
}


def program(name: str) -> list[str]:
    """How to call a script, a module, or a program that is neither."""
    if name.endswith(".py"):
        return [sys.executable, name]
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    if name == "zizmor" and found:
        return [found]
    return [sys.executable, "-m", name]


def run(name: str) -> bool:
    """Run one check in the repository's root; whether it passed."""
    first, *arguments = (CHECKS | REPAIRS)[name]
    started = time.monotonic()
    done = subprocess.run(
        [*program(first), *arguments],
        cwd=ROOT,
        env={
            # two processes with a thread for each core starve one another
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "BFT_FACTS": "check",
            "PYTHONHASHSEED": "0",
        },
    )
    passed = done.returncode == 0
    said = "passed" if passed else f"FAILED ({done.returncode})"
    print(f"{name}: {said}, {time.monotonic() - started:.0f} s", flush=True)
    return passed


def main() -> int:
    given = sys.argv[1:] or ["all"]
    chosen = [one for name in given for one in GROUPS.get(name, [name])]
    known = CHECKS | REPAIRS
    unknown = [name for name in chosen if name not in known]
    if unknown:
        print(f"no check is called {unknown}; there are {[*GROUPS, *CHECKS]}")
        return 2
    failed = [name for name in chosen if not run(name)]
    if failed:
        print("FAILED checks: " + ", ".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
