"""Prove that installing bft_ref on Colab changes no package Colab has.

A fresh environment gets Colab's versions of everything in the closure of our
dependencies; then bft_ref is installed as the notebooks install it, and what
was there before must be there unchanged. Needs the network; not part of
``make test``.

torch is represented by an empty distribution of Colab's version: pip decides
by name and version, and the real one is several gigabytes.
"""

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "tests" / "colab-pins.txt"
COLAB_PYTHON = "3.13"


def interpreter() -> str:
    """Colab's Python where there is one, else the one that runs this."""
    for name in [f"python{COLAB_PYTHON}", sys.executable]:
        found = shutil.which(name)
        # a pyenv shim exists even where it leads nowhere
        if (
            found
            and not subprocess.run(
                [found, "--version"], capture_output=True
            ).returncode
        ):
            return found
    return sys.executable


def requirement(root: Path = ROOT) -> str:
    """The most that a notebook's install cell asks pip for."""
    source = (root / "book" / "tools" / "repo.py").read_text("utf8")
    (found,) = re.findall(r'LANGUAGE = "[\w,]+", "([\w,]+)"', source)
    return f"bft_ref[{found}]"


def changed(before: str, after: str) -> list[str]:
    """Lines of pip freeze that were there before and are not there after."""
    return sorted(set(before.split("\n")) - set(after.split("\n")) - {""})


def stand_in(packages: Path, name: str, version: str) -> None:
    """An installed distribution without any content."""
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text("")


def main() -> int:
    base = interpreter()
    home = ROOT / "_build" / "colab"
    shutil.rmtree(home, ignore_errors=True)
    if base == sys.executable:
        venv.create(home, with_pip=True)
    else:
        subprocess.run([base, "-m", "venv", home], check=True)
    python = home / "bin" / "python"

    def run(*arguments: str) -> str:
        return subprocess.run(
            [python, "-m", "pip", "--disable-pip-version-check", *arguments],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    version = subprocess.run(
        [python, "--version"], capture_output=True, text=True
    ).stdout.split()[1]
    print(f"Python {version} (Colab has {COLAB_PYTHON})")
    pins = [
        line
        for line in PINS.read_text("utf8").splitlines()
        if line and not line.startswith("#")
    ]
    torch = next(line for line in pins if line.startswith("torch=="))
    run("install", "-q", "--no-deps", *[p for p in pins if p != torch])
    (packages,) = home.glob("lib/python*/site-packages")
    stand_in(packages, *torch.split("=="))

    before = run("freeze", "--all")
    asked = f"{requirement()} @ {ROOT.as_uri()}"
    print(f"pip install {asked!r}")
    run("install", "-q", asked)
    after = run("freeze", "--all")

    new = sorted(set(after.split("\n")) - set(before.split("\n")))
    print("installed:", *[line.split(" @ ")[0] for line in new if line])
    lost = changed(before, after)
    if lost:
        print("CHANGED:", *lost, sep="\n  ")
        return 1
    print(f"none of the {len(pins)} packages that Colab has was changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
