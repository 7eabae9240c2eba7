"""The list of checks: who runs which, and that each can fail."""

import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import nbformat
import pytest
import yaml

from tests import conftest, run


def test_every_check_is_run_by_make_test_and_the_quick_ones_by_make_check():
    assert set(run.GROUPS["all"]) == set(run.CHECKS) - {"core"}
    left = set(run.CHECKS) - set(run.GROUPS["quick"])
    assert left == {"book", "tests"}


def test_an_unknown_check_is_refused(root: Path):
    done = subprocess.run(
        [sys.executable, root / "tests" / "run.py", "lint", "no such"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout.startswith("no check is called ['no such']")


def test_hooks_run_checks_that_there_are(root: Path):
    text = (root / ".pre-commit-config.yaml").read_text("utf8")
    (repo,) = yaml.safe_load(text)["repos"]
    assert repo["repo"] == "local"
    assert len(repo["hooks"]) == 3
    for hook in repo["hooks"]:
        python, script, *names = shlex.split(hook["entry"])
        assert (python, script) == (".venv/bin/python", "tests/run.py")
        assert names and set(names) <= {*run.GROUPS, *run.CHECKS}


def test_make_help_names_every_target(root: Path):
    text = (root / "Makefile").read_text("utf8")
    named = set(re.findall(r'@echo "make ([\w-]+)', text))
    phony = set(re.findall(r"(?m)^\.PHONY: (.*)$", text))
    assert {name for line in phony for name in line.split()} == {
        *named,
        "help",
    }


@pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")
def test_after_make_hooks_git_reads_notebooks(root: Path, tmp_path: Path):
    def ran(command: str, cwd: Path = tmp_path) -> str:
        return subprocess.run(
            command, shell=True, cwd=cwd, check=True, capture_output=True
        ).stdout.decode()

    def changed(cell: int, source: str) -> None:
        for one in book.cells:  # an execution counts all of them anew
            one.execution_count = cell + 7
        book.cells[cell].source = source
        nbformat.write(book, tmp_path / "a.ipynb")
        ran(f"git {me} commit --all --message {cell}")

    made = ran(f"make --dry-run hooks VENV={sys.prefix}", root)
    commands = re.findall(r"(?m)^git config (?:.*\\\n)*.*$", made)
    assert len(commands) == 3
    ran("git init --quiet && " + " && ".join(commands))
    shutil.copy(root / ".gitattributes", tmp_path)
    me = "-c user.name=a -c user.email=a@b"
    cells = [nbformat.v4.new_code_cell(name) for name in "abc"]
    book = nbformat.v4.new_notebook(cells=cells)
    nbformat.write(book, tmp_path / "a.ipynb")
    ran(f"git add . && git {me} commit --message 0 && git branch other")
    changed(0, "first")
    assert "modified /cells/0/source" in ran("git diff HEAD^")
    assert "code cell 0" in ran("git log -p -1")
    ran("git switch other")
    book.cells[0].source = "a"
    changed(1, "second")
    ran(f"git {me} merge -")
    merged = nbformat.read(tmp_path / "a.ipynb", as_version=4)
    assert [one.source for one in merged.cells] == ["first", "second", "c"]


def test_an_action_that_is_not_pinned_is_noticed(tmp_path: Path):
    flow = tmp_path / ".github" / "workflows" / "bad.yml"
    flow.parent.mkdir(parents=True)
    flow.write_text(
        "name: bad\non: pull_request\npermissions: {}\njobs:\n  one:\n"
        "    runs-on: ubuntu-latest\n    steps:\n"
        "      - uses: someone/something@v1\n"
    )
    first, *arguments = run.CHECKS["workflows"]
    done = subprocess.run(
        [*run.program(first), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode
    assert "unpinned-uses" in done.stdout + done.stderr


def test_core_is_what_there_is():
    assert len(conftest.CORE) == 21
    assert all(path.exists() for path in conftest.CORE), conftest.CORE


def test_a_warning_fails_a_test():
    with pytest.raises(UserWarning, match="^careful$"):
        warnings.warn("careful", stacklevel=1)
