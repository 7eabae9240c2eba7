"""Facts: the computed numbers of a chapter, each with a tolerance.

A notebook calls :func:`chapter` once and :func:`fact` for every number that
its prose, an alt text or a slider quotes. The environment variable
``BFT_FACTS`` says what becomes of them:

``record``
    (``make notebooks``) they are written to ``facts/<chapter>.json`` beside
    the notebook, in the order of the calls;
``check``
    (``make test``) each is compared with the recorded one, and what was
    computed is written to ``../_build/facts/<chapter>.json``, so that
    :func:`missing` can name the facts that were not computed again;
unset
    nothing is read or written: a reader never sees a fact fail.

A value agrees with the recorded one when they differ by at most ``tol``, or
``tol`` times the recorded value where that is larger than one.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

Facts = dict[str, dict[str, Any]]
#: Numbers in the digest of a plotted array; the first two are counts.
DIGEST = 5
NAME = re.compile(r"[a-z]\w*", re.ASCII | re.IGNORECASE)
CHAPTER = re.compile(r"\d\d-[a-z0-9-]+|laboratory|cookbook")


class FactError(AssertionError):
    """A recorded fact is missing, or was not found again."""


class Fact(float):
    """A float that shows nothing when a cell ends on it."""

    def _ipython_display_(self) -> None:
        pass


@dataclass
class Chapter:
    """The facts of the chapter that runs in this process."""

    name: str
    mode: str
    expected: Facts = field(default_factory=dict)
    computed: Facts = field(default_factory=dict)

    def keep(self, name: str, value: float | list[float], tol: float) -> None:
        """Record or check one value, as the mode asks."""
        if not 0 <= tol <= 1:
            raise ValueError(
                f"tol of fact {name!r}: expected 0 to 1, got {tol!r}; above "
                "it even the sign of a large number would not be checked"
            )
        if self.mode and name in self.computed:
            raise ValueError(
                f"fact {name!r}: recorded twice in {self.name}; expected "
                "a name of its own for each fact"
            )
        self.computed[name] = {"value": value, "tol": tol}
        if self.mode == "record":
            write(Path("facts"), self.name, self.computed)
        if self.mode == "check":
            write(seen_folder(Path()), self.name, self.computed)
            complaint = compare(name, value, self.expected)
            if complaint:
                raise FactError(f"{self.name}: {complaint}")


_current: Chapter | None = None


def chapter(name: str) -> None:
    """Begin a chapter: its facts, and the style of its figures.

    Call it once, in the notebook's set-up cell; ``name`` is the notebook's
    file name without ``.ipynb``. Raises ValueError on any other form of
    name, and FactError where facts are checked and none are recorded.
    """
    global _current
    if not isinstance(name, str) or not CHAPTER.fullmatch(name):
        raise ValueError(
            f"name: expected the notebook's file name without .ipynb, as "
            f"'02-fusing-what-we-know', got {name!r}"
        )
    mode = os.environ.get("BFT_FACTS", "")
    if mode not in {"", "record", "check"}:
        raise ValueError(
            f"BFT_FACTS: expected record, check or nothing, got {mode!r}"
        )
    _current = Chapter(name, mode)
    if mode == "check":
        _current.expected = read(Path("facts"), name)
        write(seen_folder(Path()), name, {})
    from bft_ref.notebook.figures import set_style

    set_style()


def current() -> Chapter:
    """The chapter that runs; RuntimeError when none has begun."""
    if _current is None:
        raise RuntimeError(
            "no chapter has begun: call chapter('NN-name') in the set-up cell"
        )
    return _current


def fact(name: str, value: Any, tol: float = 1e-8) -> float:
    """Record one computed number under ``name``, and return it as a float.

    ``value`` is an int, a float, or an array or tensor of one element; bool
    and text raise TypeError, NaN and infinity ValueError. ``tol``, at
    most one, is absolute up to values of one and relative above. The returned
    float shows nothing when a cell ends on it.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"name: expected an identifier, got {name!r}")
    number = as_number(f"fact {name!r}", value)
    bound = as_number(f"tol of fact {name!r}", tol)
    current().keep(name, number, bound)
    return Fact(number)


def as_number(what: str, value: Any) -> float:
    """``value`` as a finite float; an error that names ``what`` otherwise."""
    array = as_array(what, value)
    if array.size != 1:
        raise TypeError(
            f"{what}: expected one number, got shape {array.shape}"
        )
    number = float(array.reshape(()))
    if not math.isfinite(number):
        raise ValueError(f"{what}: expected a finite number, got {number}")
    return number


def as_array(what: str, value: Any) -> np.ndarray:
    """``value`` (number, sequence, array or tensor) as a float64 array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise TypeError(
            f"{what}: expected numbers, got {type(value).__name__} "
            f"of dtype {array.dtype}"
        )
    return array.astype(np.float64)


def compare(
    name: str, value: float | Sequence[float], expected: Facts
) -> str | None:
    """What is wrong with a computed value; None when it agrees."""
    if name not in expected:
        return f"fact {name!r} is not recorded; run make notebooks"
    recorded, tol = expected[name]["value"], expected[name]["tol"]
    if np.shape(value) != np.shape(recorded):
        return (
            f"fact {name!r} has {np.size(value)} numbers, "
            f"recorded are {np.size(recorded)}"
        )
    new, old = np.asarray(value, float), np.asarray(recorded, float)
    allowed = tol * np.maximum(1.0, np.abs(old))
    if name.startswith("figure:"):  # how many points there are is no estimate
        allowed[0::DIGEST] = allowed[1::DIGEST] = 0.0
    if (np.abs(new - old) <= allowed).all():
        return None
    worst = np.argmax(np.abs(new - old) / np.maximum(allowed, 1e-300))
    return (
        f"fact {name!r} is now {float(new.flat[worst])!r}, recorded is "
        f"{float(old.flat[worst])!r} with tolerance {tol:g}"
    )


def missing(notebook: Path) -> list[str]:
    """Recorded facts that the last check of a notebook did not compute."""
    folder, name = notebook.parent, notebook.stem
    expected = read(folder / "facts", name)
    computed = read(seen_folder(folder), name)
    return [fact for fact in expected if fact not in computed]


def seen_folder(folder: Path) -> Path:
    """Where a check of a notebook in ``folder`` notes what it computed."""
    return folder.resolve().parent / "_build" / "facts"


def read(folder: Path, name: str) -> Facts:
    """The facts of chapter ``name`` stored in ``folder``."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise FactError(f"{path} does not exist; run make notebooks")
    return json.loads(path.read_text("utf8"))


def write(folder: Path, name: str, facts: Facts) -> None:
    """Store facts, one a line in the order they were recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"  {json.dumps(n)}: {json.dumps(f)}" for n, f in facts.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n"
    (folder / f"{name}.json").write_text(text, "utf8")


def recorded(name: str) -> Facts:
    """The facts of chapter ``name``, from the repository or the package.

    Each has a ``value`` and a ``tol``. FileNotFoundError when neither holds
    that chapter.
    """
    package = resources.files("bft_ref")
    beside = Path(str(package)).parent / "notebooks" / "facts"
    for source in [beside, package / "facts"]:
        path = source / f"{name}.json"
        if path.is_file():
            return json.loads(path.read_text("utf8"))
    raise FileNotFoundError(
        f"no facts of a chapter {name!r} in {beside} nor in the package"
    )


def values(facts: Facts) -> Mapping[str, float]:
    """Only the plain numbers among facts: name -> value."""
    return {
        name: fact["value"]
        for name, fact in facts.items()
        if not isinstance(fact["value"], list)
    }
