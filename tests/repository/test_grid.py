"""The grid of real runs: its commands, and the stored runs made by them."""

import ast
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from typer.testing import CliRunner

import experiments.grid
from bft_ref.notebook import results
from bft_ref.recsys.train import __main__ as command_line

ROOT = Path(__file__).resolve().parents[2]
#: Options that some stored runs are older than, and what they did then.
SINCE = {"embedding_std": None}


@pytest.fixture(scope="module")
def grid():
    """Names and arguments of the runs, in order."""
    return dict(experiments.grid.grid())


def configured(arguments, monkeypatch, n_items):
    """What the command line would train, as JSON has it."""
    seen = {}

    def fit(sequences, model, train, *, final, **_):
        seen.update(model=asdict(model), train=asdict(train), final=final)
        return SimpleNamespace(result={}, rankings={})

    data = SimpleNamespace(n_items=n_items, describe=dict)
    monkeypatch.setattr(command_line, "fit", fit)
    monkeypatch.setattr(command_line, "load", lambda *_, **__: data)
    done = CliRunner().invoke(command_line.app, [*arguments, "--threads", "0"])
    assert done.exit_code == 0, done.output
    return json.loads(json.dumps(seen))


def trained(grid):
    return {
        name: arguments
        for name, arguments in grid.items()
        if not name.endswith(("popularity", "item-knn"))
    }


def test_every_command_of_the_grid_is_understood(grid, monkeypatch):
    models = set()
    for name, arguments in trained(grid).items():
        found = configured(arguments, monkeypatch, 100)
        final = found.pop("final")
        assert final == ("--final" in arguments), name
        models.add(json.dumps([arguments[1], found], sort_keys=True))
    assert len(models) == len(trained(grid))  # no run is asked for twice


def test_stored_runs_are_those_of_the_grid(grid, monkeypatch):
    """A file's name says what was trained, and only final runs tested."""
    assert results.names()
    assert set(results.names()) <= set(grid)
    for name in results.names():
        run = results.load(name)
        found = configured(grid[name], monkeypatch, run["model"]["n_items"])
        assert SINCE | run["model"] == found["model"], name
        assert run["train"] == found["train"], name
        assert run["data"]["name"] == grid[name][1]
        assert found["final"] or "test" not in run, name


def test_a_file_without_its_test_items_is_not_done(tmp_path, monkeypatch):
    grid = experiments.grid
    monkeypatch.setattr(grid, "RESULTS", tmp_path)
    assert not grid.is_done("x", [])
    (tmp_path / "x.json").write_text('{"validation": {}}')
    assert grid.is_done("x", []) and not grid.is_done("x", ["--final"])
    (tmp_path / "x.json").write_text('{"validation": {}, "test": {}}')
    assert grid.is_done("x", ["--final"])


def commands(path):
    """The values that a notebook gives to ``command``."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code" and "command = (" in cell.source:
            for node in ast.parse(cell.source).body:
                target = getattr(node, "targets", [None])[0]
                if getattr(target, "id", None) == "command":
                    yield ast.literal_eval(node.value)


@pytest.mark.parametrize(
    ("chapter", "name"),
    [
        ("13-sequential-recommendation", "lastfm-sasrec-bft-s1"),
        ("14-two-other-backbones", "lastfm-hstu-bft-s1"),
        ("15-anatomy-of-a-cold-start", "lastfm-sasrec-bft-s1"),
    ],
)
def test_a_notebook_repeats_a_stored_run(
    grid, monkeypatch, tmp_path, chapter, name
):
    """On a GPU, the same run, but for the test items."""
    monkeypatch.chdir(tmp_path)
    (command,) = commands(ROOT / "notebooks" / f"{chapter}.ipynb")
    start = "python -m bft_ref.recsys.train "
    assert command.startswith(start)
    again = command.removeprefix(start).split()
    found = configured(again, monkeypatch, 100)
    assert found.pop("final") is False
    stored = configured(grid[name], monkeypatch, 100)
    assert found == {part: stored[part] for part in found}
    assert again[:2] == grid[name][:2]
