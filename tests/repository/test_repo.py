"""One address in one place, and everything that depends on it in step."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml

import bft_ref
from book.tools import repo
from tests import colab

FILES = ["pyproject.toml", "_config.yml", "README.md", "CITATION.cff"]


@pytest.fixture
def copy(tmp_path: Path, root: Path) -> Path:
    """The files that hold the address, and one new notebook."""
    for name in FILES:
        shutil.copy(root / name, tmp_path)
    shutil.copytree(
        root / "book",
        tmp_path / "book",
        ignore=shutil.ignore_patterns("__pycache__", "images"),
    )
    (tmp_path / "notebooks").mkdir()
    book = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# 9 A chapter\n\nGoal."),
            nbformat.v4.new_code_cell("x = 1", execution_count=1),
        ]
    )
    nbformat.write(book, tmp_path / "notebooks" / "09-chapter.ipynb")
    return tmp_path


def set_repo(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "book.tools.repo", *arguments],
        cwd=copy,
        capture_output=True,
        text=True,
    )


def test_nothing_is_stale(root: Path):
    assert repo.stale(root) == []


def test_a_fork_takes_everything_along(copy: Path):
    old = repo.Address.read(copy)
    done = set_repo(
        copy, "--set", "Ann/fork.x", "--branch", "pub", "--ref", "abc123"
    )
    assert done.returncode == 0, done.stderr
    for path in repo.texts(copy):
        text = path.read_text("utf8")
        assert f"github.com/{old.slug}" not in text, path
        assert old.site not in text, path
    assert "github.com/Ann/fork.x" in (copy / "README.md").read_text("utf8")
    assert "https://ann.github.io/fork.x" in (copy / "README.md").read_text()
    how_to = (copy / "book" / "pages" / "how-to.md").read_text("utf8")
    assert "cd fork.x\n" in how_to
    config = yaml.safe_load((copy / "_config.yml").read_text("utf8"))
    assert config["repository"] == {
        "url": "https://github.com/Ann/fork.x",
        "branch": "pub",
    }
    first, install, third = nbformat.read(
        copy / "notebooks" / "09-chapter.ipynb", 4
    ).cells
    assert first.source.startswith("# 9 A chapter\n\n[![Open in Colab](")
    at = "Ann/fork.x/blob/pub/notebooks/09-chapter.ipynb"
    assert f"github/{at})" in first.source
    assert first.source.endswith("\n\nGoal.")
    assert "git+https://github.com/Ann/fork.x@abc123" in install.source
    assert install.metadata.tags == ["install"]
    assert third.source == "x = 1"
    assert set_repo(copy, "--check").returncode == 0
    assert set_repo(copy).stdout == ""


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("README.md", "github.com/", "github.com/another/"),
        ("_config.yml", "  branch: main", "  branch: old"),
        ("CITATION.cff", "repository-code", "was"),
        ("notebooks/09-chapter.ipynb", "@main", "@old"),
        ("notebooks/09-chapter.ipynb", "blob/main", "blob/old"),
    ],
)
def test_what_is_stale_is_named(copy: Path, name, before, after):
    assert set_repo(copy).returncode == 0
    path = copy / name
    text = path.read_text("utf8")
    if name == "CITATION.cff":
        text = re.sub(r"(?m)^repository-code:.*\n", "", text)
    elif name == "README.md":
        text = re.sub(r"github\.com/[\w-]+/", "github.com/another/", text)
    else:
        assert before in text
        text = text.replace(before, after)
    path.write_text(text, "utf8")
    said = set_repo(copy, "--check")
    assert said.returncode == 1
    assert name in said.stdout
    assert "make set-repo" in said.stdout


def test_a_chapter_begun_with_its_title_gets_the_rest(copy: Path):
    path = copy / "notebooks" / "10-new.ipynb"
    title = nbformat.v4.new_markdown_cell("# 10 New")
    nbformat.write(nbformat.v4.new_notebook(cells=[title]), path)
    done = set_repo(copy)
    assert done.returncode == 0, done.stderr
    first, second = nbformat.read(path, as_version=4).cells
    assert first.source.startswith("# 10 New\n\n[![Open in Colab]")
    assert second.metadata.tags == ["install"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "no-owner"], "REPO: expected owner/name, got 'no-owner'"),
        (["--ref", "a b"], "REF: expected a branch, tag or commit, got 'a b'"),
    ],
)
def test_a_bad_address_is_refused(copy: Path, arguments, said):
    before = {name: (copy / name).read_text("utf8") for name in FILES}
    done = set_repo(copy, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert before == {name: (copy / name).read_text("utf8") for name in FILES}


def test_the_install_cell_runs_where_bft_ref_is_there(root: Path):
    source = repo.Address.read(root).install()
    assert max(map(len, source.split("\n"))) <= 79
    # the one line that is not Python runs on Colab only
    source = re.sub(r"%pip .*", "raise AssertionError('installs')", source)
    found = {}
    exec(source, found)
    assert found["device"] in {"cpu", "cuda"}


@pytest.fixture(scope="module")
def flows(root: Path) -> dict[str, dict]:
    """The workflows by name."""
    return {
        path.stem: yaml.safe_load(path.read_text("utf8"))
        for path in (root / ".github" / "workflows").glob("*.yml")
    }


def before(jobs: dict[str, dict], name: str) -> set[str]:
    """The jobs that have to pass before the named one begins."""
    needs = jobs[name].get("needs", [])
    needs = {needs} if isinstance(needs, str) else set(needs)
    return needs.union(*[before(jobs, one) for one in needs])


def test_workflows_are_valid_and_publish_the_fork(flows, root: Path):
    assert set(flows) == {
        *["test", "publish", "release", "colab", "links", "newest"]
    }
    for flow in flows.values():
        for job in flow["jobs"].values():
            if "steps" in job:
                assert job["timeout-minutes"] <= 180
                assert all("run" in s or "uses" in s for s in job["steps"])
            else:
                name = job["uses"].removeprefix("$/.github/workflows/")
                # YAML reads "on" as true
                assert "workflow_call" in flows[Path(name).stem][True]
    text = (root / ".github" / "workflows" / "publish.yml").read_text("utf8")
    assert 'REPO="$GITHUB_REPOSITORY"' in text
    assert 'REF="$GITHUB_SHA"' in text
    assert "bft-book/" not in text


@pytest.mark.parametrize("name", ["publish", "release"])
def test_nothing_leaves_untested_or_with_a_right_too_many(flows, name):
    jobs = flows[name]["jobs"]
    assert flows[name]["permissions"] == {}
    for job, content in jobs.items():
        if job == "test":
            assert content["uses"] == "$/.github/workflows/test.yml"
            continue
        assert "test" in before(jobs, job)
        runs = " ".join(step.get("run", "") for step in content["steps"])
        if "write" in content["permissions"].values():
            assert "make" not in runs and "python" not in runs


def test_actions_are_pinned_to_one_commit_each(root: Path):
    pins: dict[str, set[str]] = {}
    for path in (root / ".github" / "workflows").glob("*.yml"):
        for line in re.findall(r"uses: (.*)", path.read_text("utf8")):
            if not line.startswith("$/"):
                action, pin = line.split("@")
                assert re.fullmatch(r"[0-9a-f]{40} # v\d+\.\d+\.\d+", pin)
                pins.setdefault(action, set()).add(pin)
    assert "actions/checkout" in pins
    assert all(len(found) == 1 for found in pins.values()), pins


@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_both_ends_of_python_are_tested(flows, python):
    jobs = flows["test"]["jobs"]
    assert python in jobs["checks"]["strategy"]["matrix"]["python"]
    assert python in jobs["install"]["strategy"]["matrix"]["python"]


def test_templates_ask_something(root: Path):
    folder = root / ".github" / "ISSUE_TEMPLATE"
    forms = sorted(folder.glob("[0-9]-*.yml"))
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text("utf8"))
        assert form["name"] and form["description"]
        ids = [one["id"] for one in form["body"]]
        assert len(set(ids)) == len(ids)
        assert any(one.get("validations") for one in form["body"])


def test_one_version_everywhere(root: Path):
    project = tomllib.loads((root / "pyproject.toml").read_text("utf8"))
    assert project["project"]["dynamic"] == ["version"]
    citation = yaml.safe_load((root / "CITATION.cff").read_text("utf8"))
    assert citation["version"] == bft_ref.__version__
    changes = (root / "CHANGELOG.md").read_text("utf8")
    newest = re.search(r"(?m)^## (\S+) \(", changes)[1]
    assert newest == bft_ref.__version__


def test_colab_install_is_the_one_that_is_checked(root: Path):
    image = (root / "tests" / "colab-image.sh").read_text("utf8")
    assert colab.requirement() == "bft_ref[llm,oracles,recommend]"
    assert f'"{colab.requirement()} @ file://' in image


def test_a_changed_package_is_noticed():
    before = "numpy==2.1.3\ntorch==2.11.0\n"
    assert colab.changed(before, before + "pykrige==1.7.3\n") == []
    assert colab.changed(before, "numpy==2.4.0\ntorch==2.11.0\n") == [
        "numpy==2.1.3"
    ]
    assert colab.changed(before, "numpy==2.1.3\n") == ["torch==2.11.0"]
