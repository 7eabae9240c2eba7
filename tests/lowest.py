"""Print the lowest versions that pyproject.toml allows, as constraints.

``pip install -c lowest.txt ".[test]"`` then makes the oldest environment that
is promised to work; continuous integration tests the package in it.
"""

import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def lowest(pyproject: Path = ROOT / "pyproject.toml") -> list[str]:
    """One ``name==version`` for each direct requirement, by name.

    A requirement without lower bound is a ValueError: nothing is promised.
    """
    project = tomllib.loads(pyproject.read_text("utf8"))["project"]
    pins = {}
    extras = project["optional-dependencies"].values()
    for text in chain(project["dependencies"], *extras):
        one = Requirement(text)
        if one.name == project["name"]:
            continue
        bounds = [x.version for x in one.specifier if x.operator == ">="]
        if not bounds:
            raise ValueError(
                f"{text!r} in {pyproject.name}: expected a lower bound, "
                "such as name>=1.2"
            )
        marker = f"; {one.marker}" if one.marker else ""
        pins[one.name] = f"{one.name}=={bounds[0]}{marker}"
    return [pins[name] for name in sorted(pins)]


if __name__ == "__main__":
    print(*lowest(), sep="\n")
