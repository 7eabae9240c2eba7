"""Run every check of the book, one after the other, and say which failed.

``make test`` is this; on Windows, where make is missing, call it directly.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = [
    *sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")),
    ROOT / "notebooks" / "template" / "00-template.ipynb",
]

CODE = ["bft_ref", "book", "notebooks", "results", "tests"]
CHECKS = {
    "lint": ["ruff", "check", "--quiet", *CODE],
    "format": ["ruff", "format", "--quiet", "--check", *CODE],
    "spelling": ["codespell_lib"],
    "types": ["mypy"],
    "addresses": ["book/site/repo.py", "--check"],
    "book": ["book/site/build.py"],
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


def run(name: str) -> bool:
    """Run one check in the repository's root; whether it passed."""
    command = CHECKS[name]
    script = command[0].endswith(".py")
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *([] if script else ["-m"]), *command],
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
    chosen = sys.argv[1:] or list(CHECKS)
    unknown = [name for name in chosen if name not in CHECKS]
    if unknown:
        print(f"no check is called {unknown}; there are {list(CHECKS)}")
        return 2
    failed = [name for name in chosen if not run(name)]
    if failed:
        print("FAILED checks: " + ", ".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
