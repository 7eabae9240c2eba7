"""What an install promises: each part imports with the extra it names."""

import importlib.metadata
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bft_ref

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
NEEDS_RECOMMEND = ("data", "metrics", "train", "bench")
IMPORT = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(f"not installed: {{name}}", name=name)

sys.meta_path.insert(0, Absent())
for name in {modules}:
    importlib.import_module(name)
"""


def installed_with(extra: str | None) -> set[str]:
    """Names of all that ``pip install bft_ref[extra]`` brings."""
    asked = list(PROJECT["dependencies"])
    if extra is not None:
        asked += PROJECT["optional-dependencies"][extra]
    found: set[str] = set()
    while asked:
        one = Requirement(asked.pop())
        name = canonicalize_name(one.name)
        if name in found or not (one.marker is None or one.marker.evaluate()):
            continue
        found.add(name)
        asked += [
            text
            for text in importlib.metadata.requires(name) or []
            if "extra ==" not in text
        ]
    return found


def importing(modules: list[str], extra: str | None):
    """Import in a new process, everything else out of sight."""
    there = installed_with(extra)
    absent = {
        top
        for top, owners in importlib.metadata.packages_distributions().items()
        if top != "bft_ref"
        and not any(canonicalize_name(name) in there for name in owners)
    }
    code = IMPORT.format(absent=sorted(absent), modules=modules)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )


def modules(parts: tuple[str, ...] | None) -> list[str]:
    """The package's modules of these parts; None: of those in no list."""
    found = []
    for info in pkgutil.walk_packages(bft_ref.__path__, "bft_ref."):
        part = info.name.split(".")[1]
        if info.name.endswith("__main__") or part == "book":
            continue
        if part in (parts or ()) or (
            parts is None and part not in NEEDS_RECOMMEND
        ):
            found.append(info.name)
    return found


@pytest.mark.parametrize(
    "parts, extra", [(None, None), (NEEDS_RECOMMEND, "recommend")]
)
def test_each_part_imports_with_its_extra_alone(parts, extra):
    names = modules(parts)
    assert len(names) >= 8
    done = importing(names, extra)
    assert done.returncode == 0, done.stderr


def test_a_package_too_few_would_be_noticed():
    done = importing(modules(NEEDS_RECOMMEND), None)
    assert done.returncode == 1
    assert "not installed" in done.stderr


def test_the_package_says_that_it_has_types():
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (Path(bft_ref.__file__).parent / "py.typed").is_file()
