"""Build wheel and sdist, and prove that what they install is the package.

``make dist`` is this, with ``TAG=v0.2.0`` in a release. Needs the network.
Files are built in ``dist/``, the wheel from the sdist; twine reads their
metadata; then a fresh environment gets the wheel with the lowest versions that
it allows, imports it from elsewhere and runs the README's examples.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import bft_ref
from tests.lowest import lowest

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
INSTALLED = """
import importlib.metadata, importlib.resources
import bft_ref
version = importlib.metadata.version("bft_ref")
assert version == bft_ref.__version__ == {version!r}, version
files = importlib.resources.files("bft_ref")
assert "site-packages" in str(files), files
for part in ["py.typed", "facts", "results"]:
    assert (files / part).exists(), part
"""


def complaints(tag: str, changes: str) -> list[str]:
    """What forbids to release this version under ``tag``, one line each."""
    version = bft_ref.__version__
    found = []
    if tag != f"v{version}":
        found.append(
            f"TAG: expected v{version}, as bft_ref.__version__ says, "
            f"got {tag!r}"
        )
    if not re.search(
        rf"(?m)^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changes
    ):
        found.append(
            f"CHANGELOG.md: expected the heading '## {version} "
            "(YYYY-MM-DD)' with the day of the release"
        )
    return found


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, cwd=cwd, check=True)


def build() -> Path:
    """The wheel, made from the sdist as an installer would."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist")
    (sdist,) = DIST.glob("*.tar.gz")
    run(
        *[sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"],
        *["--no-build-isolation", "--wheel-dir", DIST, sdist],
    )
    (wheel,) = DIST.glob("*.whl")
    return wheel


def check_metadata(folder: Path) -> None:
    """Let twine read it: an environment of its own, twine needs much."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "twine")
    run(python, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))


def check_install(folder: Path, wheel: Path) -> None:
    """Install it with the lowest versions, import it, run the examples."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pins = folder / "lowest.txt"
    pins.write_text("\n".join(lowest()), "utf8")
    run(python, "-m", "pip", "install", "--quiet", "-c", pins, wheel)
    code = INSTALLED.format(version=bft_ref.__version__)
    run(python, "-c", code, cwd=folder)
    run(python, ROOT / "tests" / "example.py", cwd=folder)


def main() -> int:
    if len(sys.argv) > 1:
        changes = (ROOT / "CHANGELOG.md").read_text("utf8")
        found = complaints(sys.argv[1], changes)
        if found:
            print(*found, sep="\n", file=sys.stderr)
            return 1
    wheel = build()
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        check_metadata(Path(name) / "twine")
        check_install(Path(name) / "lowest", wheel)
    print("ready:", *sorted(path.name for path in DIST.iterdir()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
