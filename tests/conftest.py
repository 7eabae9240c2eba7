"""What all tests share: a notebook's facts are checked to the last one."""

import os

import pytest

from bft_ref.book.facts import missing


class EveryFact(pytest.Item):
    """After a notebook's cells: no recorded fact was left uncomputed."""

    def runtest(self) -> None:
        left = missing(self.path)
        assert not left, f"recorded, but not computed again: {left}"

    def repr_failure(self, excinfo, style=None):
        return str(excinfo.value)

    def reportinfo(self):
        return self.path, None, f"{self.name}::facts"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add an item behind the last cell of each notebook that nbval runs."""
    if os.environ.get("BFT_FACTS") != "check":
        return
    last = {
        item.parent: at
        for at, item in enumerate(items)
        if item.path.suffix == ".ipynb"
    }
    for parent, at in sorted(last.items(), key=lambda pair: -pair[1]):
        items.insert(at + 1, EveryFact.from_parent(parent, name="facts"))
