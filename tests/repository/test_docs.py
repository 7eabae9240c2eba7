"""What the documents name is there: files, names, programs, tests."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in [
        *["README.md", "CONTRIBUTING.md", "RELEASING.md", "Makefile"],
        *["notebooks/README.md", "experiments/*.md", "book/pages/*.*"],
        *[".github/**/*.*", ".pre-commit-config.yaml"],
    ]
    for path in ROOT.glob(pattern)
)
FOLDERS = "bft_ref|book|experiments|notebooks|results|tests"
FILE = re.compile(rf"`((?:{FOLDERS})/[\w./*-]*)`")
PROGRAM = re.compile(
    r"python[\d.]* (?:-m (?P<module>[\w.]+)|(?P<file>\S+\.py))"
)
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
NAME = re.compile(r"\bbft_ref(?:\.[a-zA-Z_]\w*)+")
#: written for the reader to fill in, or only in an installed package
NOT_FILES = re.compile(r".*NN|bft_ref/(facts|results)$")


def is_name(dotted: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one."""
    parts, found = dotted.split("."), None
    for at in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:at]))
            break
        except ModuleNotFoundError:
            continue
    for part in parts[at:]:
        found = getattr(found, part, None)
    return found is not None


def is_program(name: str) -> bool:
    """Whether ``python -m name`` has something to run."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def complaints(text: str) -> list[str]:
    """What a document names and is not there."""
    found = [
        f"{name}: no such file"
        for name in FILE.findall(text)
        if not NOT_FILES.match(name) and not list(ROOT.glob(name))
    ]
    for match in PROGRAM.finditer(text):
        module, file = match["module"], match["file"]
        if module and not is_program(module):
            found.append(f"python -m {module}: no such program")
        if file and not (ROOT / file.replace("\\", "/")).is_file():
            found.append(f"{file}: no such file")
    for file, test in TEST.findall(text):
        path = ROOT / file
        if not path.is_file() or f"def {test}(" not in path.read_text("utf8"):
            found.append(f"{file}::{test}: no such test")
    return found + [
        f"{name}: no such name"
        for name in NAME.findall(text)
        if not is_name(name)
    ]


@pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)
def test_what_a_document_names_is_there(path: Path):
    assert complaints(path.read_text("utf8")) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("in `bft_ref/fused.py`", "bft_ref/fused.py: no such file"),
        (r"python book\site\build.py", r"book\site\build.py: no such file"),
        ("$(BIN)/python results/grid.py", "results/grid.py: no such file"),
        (
            "python -m bft_ref.bench",
            "python -m bft_ref.bench: no such program",
        ),
        (
            "`tests/book/test_build.py::test_it`",
            "tests/book/test_build.py::test_it: no such test",
        ),
        ("`bft_ref.belief.lost(x)`", "bft_ref.belief.lost: no such name"),
    ],
)
def test_what_is_not_there_is_noticed(text: str, said: str):
    assert (
        complaints("`tests/slips.toml`, `bft_ref.belief.fuse`; " + text)[0]
        == said
    )
