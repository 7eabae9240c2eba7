"""What all tests share: which are core; a notebook's facts are complete."""

import os
from pathlib import Path

import pytest

from bft_ref.notebook.facts import missing

HERE = Path(__file__).parent
#: The readable layer, for ``make check``: half a minute of one core, imports
#: included. What is marked slow is left out there too.
CORE = {
    # chapters 4 and 5 integrate numerically, as long as all others together
    *HERE.glob("equations/test_chapter_0[1-36-9].py"),
    *(
        HERE / "unit" / f"test_{name}.py"
        for name in [
            *["belief", "kriging", "reml", "kalman", "delta", "layer"],
            *["initial_precision", "encoder", "rotary", "cache", "checks"],
            *["textbook", "jacobian_estimates", "properties"],
        ]
    ),
}


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return HERE.parent


class EveryFact(pytest.Item):
    """After a notebook's cells: no recorded fact was left uncomputed."""

    def runtest(self) -> None:
        left = missing(self.path)
        assert not left, f"recorded, but not computed again: {left}"

    def repr_failure(self, excinfo, style=None):
        return str(excinfo.value)

    def reportinfo(self):
        return self.path, None, f"{self.name}::facts"


def pytest_ignore_collect(
    collection_path: Path, config: pytest.Config
) -> bool | None:
    """Where only core is asked for, import nothing else."""
    if config.option.markexpr == "core" and collection_path.suffix == ".py":
        return collection_path not in CORE or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark core; add an item behind each notebook that nbval runs."""
    for item in items:
        if item.path in CORE and not item.get_closest_marker("slow"):
            item.add_marker("core")
    if os.environ.get("BFT_FACTS") != "check":
        return
    last = {
        item.parent: at
        for at, item in enumerate(items)
        if item.path.suffix == ".ipynb"
    }
    for parent, at in sorted(last.items(), key=lambda pair: -pair[1]):
        items.insert(at + 1, EveryFact.from_parent(parent, name="facts"))
