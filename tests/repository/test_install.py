"""What an install promises: each part imports with the extra it names."""

import importlib.metadata
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bft_ref
from tests import release
from tests.lowest import lowest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: RecTools pins what contradicts our own pins: its extra is not installed
CONTRADICTS = "rectools"
#: where a plugin has no name of its own, the option that it gives
OPTIONS = {
    "accelerate": "TrainingArguments",
    "nbval": '"--nbval"',
    "pytest-xdist": '"-n"',
}
NEEDS = {
    "recommend": (
        *("recsys.data", "recsys.metrics", "recsys.recommend"),
        *("recsys.storage", "recsys.train", "training"),
    ),
    "llm": ("llm",),
}
IMPORT = """
import importlib, sys
from importlib import metadata

from_name = metadata.Distribution.from_name

def of_what_is_there(name):
    if name.lower().replace("_", "-") in {without}:
        raise metadata.PackageNotFoundError(name)
    return from_name(name)

# an import of it fails, and who looks for it finds none
metadata.Distribution.from_name = of_what_is_there
sys.modules.update(dict.fromkeys({absent}))
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
    owners = importlib.metadata.packages_distributions()
    names = {top: set(map(canonicalize_name, n)) for top, n in owners.items()}
    absent = {t for t, n in names.items() if t != "bft_ref" and not n & there}
    without = set().union(*names.values()) - there - {"bft-ref"}
    code = IMPORT.format(
        absent=sorted(absent), without=sorted(without), modules=modules
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )


def modules(extra: str | None) -> list[str]:
    """The modules that need an extra; None: those that need none."""
    others = tuple(part for parts in NEEDS.values() for part in parts)
    found = []
    for info in pkgutil.walk_packages(bft_ref.__path__, "bft_ref."):
        name = info.name.removeprefix("bft_ref.")
        if name.endswith(("__main__", CONTRADICTS)):
            continue
        if name.startswith("notebook"):
            continue
        if extra is None and name.startswith(others):
            continue
        if extra is None or name.startswith(NEEDS[extra]):
            found.append(info.name)
    return found


@pytest.mark.parametrize("extra", [None, *NEEDS])
def test_each_part_imports_with_its_extra_alone(extra):
    names = modules(extra)
    assert len(names) >= 8
    done = importing(names, extra)
    assert done.returncode == 0, done.stderr


def test_a_package_too_few_would_be_noticed():
    done = importing(modules("recommend"), None)
    assert done.returncode == 1
    assert "None in sys.modules" in done.stderr


def test_the_package_says_that_it_has_types():
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (Path(bft_ref.__file__).parent / "py.typed").is_file()


def unused(requirements: list[str]) -> list[str]:
    """Those of which nothing is imported, run, or named as a plugin."""
    files = [
        *(ROOT / name for name in ["Makefile", "_config.yml"]),
        *(
            path
            for folder in ["bft_ref", "book", "notebooks", "tests"]
            for pattern in ["*.py", "*.ipynb"]
            for path in (ROOT / folder).rglob(pattern)
        ),
    ]
    text = "\n".join(
        line
        for path in files
        if path != Path(__file__)
        for line in path.read_text("utf8").splitlines()
        if len(line) < 200  # no images
    )
    tops: dict[str, list[str]] = {}
    for top, owners in importlib.metadata.packages_distributions().items():
        for owner in owners:
            tops.setdefault(canonicalize_name(owner), []).append(top)
    found = []
    for requirement in requirements:
        name = canonicalize_name(Requirement(requirement).name)
        any_of = "|".join(map(re.escape, tops.get(name, [name])))
        use = (
            rf"(?:\b(?:import|from)|-m) ({any_of})\b|"
            rf"[\"'\[]({any_of})[\"'.]"
        )
        if OPTIONS.get(name, "") not in text or not (
            name in OPTIONS or re.search(use, text)
        ):
            found.append(requirement)
    return found


def test_every_package_of_an_extra_is_used():
    asked = [one for extra in EXTRAS.values() for one in extra]
    assert unused([one for one in asked if "bft_ref" not in one]) == []


def test_a_package_without_use_would_be_noticed():
    found = unused(["numpy>=2", "editables>=0.5", "ruff>=0.11"])
    assert found == ["editables>=0.5"]


def test_every_package_of_the_checks_is_pinned():
    lines = "".join(
        (ROOT / name).read_text("utf8")
        for name in ["requirements.txt", "requirements-build.txt"]
    )
    pins = set(map(canonicalize_name, re.findall(r"(?m)^(\S+)==", lines)))
    extras = EXTRAS.keys() - {CONTRADICTS}
    needed = set().union(*map(installed_with, extras)) - {"bft-ref"}
    assert needed - pins == set()


def test_the_lowest_versions_are_those_of_pyproject(tmp_path: Path):
    pins = lowest()
    assert {"numpy==2.1", "torch==2.11"} <= set(pins)
    assert not any("bft" in pin for pin in pins)
    text = (ROOT / "pyproject.toml").read_text("utf8")
    (tmp_path / "x.toml").write_text(text.replace("numpy>=2.1", "numpy"))
    with pytest.raises(ValueError, match=r"^'numpy' in x.toml: expected a lo"):
        lowest(tmp_path / "x.toml")


def test_a_release_agrees_with_its_tag_and_has_a_day():
    version = bft_ref.__version__
    dated = f"# Change log\n\n## {version} (2027-01-31)\n"
    assert release.complaints(f"v{version}", dated) == []
    (tag,) = release.complaints("v9.9.9", dated)
    assert f"expected v{version}" in tag and "v9.9.9" in tag
    for changes in [dated.replace("2027-01-31", "unreleased"), ""]:
        (day,) = release.complaints(f"v{version}", changes)
        assert f"## {version} (YYYY-MM-DD)" in day


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run([*command, "-d", folder], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith(f"bft_ref-{bft_ref.__version__}-py3")
    zipfile.ZipFile(wheel).extractall(folder / "site-packages")
    return folder / "site-packages"


def test_the_wheel_has_the_package_and_its_numbers(installed: Path):
    def files(folder: Path) -> set[Path]:
        return {
            path.relative_to(folder)
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    there = files(installed / "bft_ref")
    numbers = {Path("facts"), Path("results")}
    assert {path for path in there if not numbers & {*path.parents}} == files(
        ROOT / "bft_ref"
    )
    assert {path.parent for path in there} > numbers
    facts = [path.name for path in there if path.parent == Path("facts")]
    assert sorted(facts) == sorted(
        path.with_suffix(".json").name
        for path in (ROOT / "notebooks").glob("*.ipynb")
    )
    assert {path.suffix for path in there} == {
        *[".csv", ".css", ".gz", ".js", ".json", ".py", ".typed"]
    }
    metadata = f"bft_ref-{bft_ref.__version__}.dist-info"
    assert {path.name for path in installed.iterdir()} == {"bft_ref", metadata}


FROM_SITE_PACKAGES = """
import importlib, inspect, pkgutil
from pathlib import Path

import bft_ref

package = Path({package!r})
assert Path(bft_ref.__file__).parent == package, bft_ref.__file__
for info in pkgutil.walk_packages(bft_ref.__path__, "bft_ref."):
    if info.name.endswith({contradicts!r}):
        continue
    module = importlib.import_module(info.name)
    assert package in Path(module.__file__).parents, module.__file__

from bft_ref.notebook import examples, facts, results, sliders

for name in examples.__all__:
    read = getattr(examples, name)
    if inspect.isfunction(read):
        read()
assert facts.recorded("01-why-precision")
assert results.load(results.names()[0])["seed"] >= 0
assert sliders.part("slider.js")
"""


def test_what_the_wheel_has_runs_from_site_packages(
    installed: Path, tmp_path: Path
):
    code = FROM_SITE_PACKAGES.format(
        package=str(installed / "bft_ref"), contradicts=CONTRADICTS
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
