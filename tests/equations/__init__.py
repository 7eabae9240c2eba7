"""A test for every numbered equation of the book."""

from collections.abc import Callable
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])


def equation(label: str, latex: str) -> Callable[[Test], Test]:
    """Mark a test as the proof of equation ``label``.

    ``latex`` is the display as the notebook has it, without its tag: a
    check compares the two, so that neither changes alone.
    """
    return pytest.mark.equation(label, latex)
