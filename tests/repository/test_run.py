"""The list of checks: who runs which, and that each can fail."""

import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

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
    assert len(conftest.CORE) == 19
    assert all(path.exists() for path in conftest.CORE), conftest.CORE


def test_a_warning_fails_a_test():
    with pytest.raises(UserWarning, match="^careful$"):
        warnings.warn("careful", stacklevel=1)
