"""The grid of real runs: its recipes, and the stored runs made by them."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

import experiments.decisive
import experiments.fresh_sets
import experiments.grid
import experiments.runs
from bft_ref.notebook import results
from bft_ref.recsys import fields
from bft_ref.recsys.data import simulate
from bft_ref.recsys.storage import as_fields
from bft_ref.recsys.train import TrainConfig
from bft_ref.recsys.train.command import (
    Popularity,
    SASRecOptions,
    Train,
    parse,
)


@pytest.fixture(scope="module")
def grid():
    """The runs by name, in order."""
    return experiments.grid.grid()


@pytest.fixture(scope="module")
def fresh():
    """The runs of the confirmation by name."""
    found = {}
    for data in experiments.fresh_sets.SETS:
        found |= experiments.fresh_sets.runs(data)
    return found


@pytest.fixture(scope="module")
def decisive():
    """The runs of the blocks by name."""
    return experiments.decisive.runs()


def configured(run, n_items=100):
    """What a run would train, as results have it."""
    data = SimpleNamespace(n_items=n_items)
    model = run.model.of(run.data, data)
    return {"model": as_fields(model), "train": as_fields(run.train)}


def trained(runs):
    return {name: run for name, run in runs.items() if isinstance(run, Train)}


def test_every_run_of_the_grid_can_be_trained(grid, fresh, decisive):
    runs = trained(grid) | fresh | decisive
    models = {
        json.dumps([run.data, configured(run)], sort_keys=True)
        for run in runs.values()
    }
    assert len(models) == len(runs)  # no run is asked for twice
    baselines = [name for name in grid if name not in runs]
    assert len(baselines) == 2 * len(experiments.grid.SETS)
    for name in baselines:
        run = grid[name]
        assert name == f"{run.data}-{run.name}" and run.evaluate_test


def test_the_line_of_a_run_is_the_command_that_makes_it(grid, fresh, decisive):
    start = "python -m bft_ref.recsys.train "
    for run in (grid | fresh | decisive).values():
        line = experiments.runs.line(run)
        assert line.startswith(start)
        assert parse(line.removeprefix(start).split()) == run


def same(path, run):
    """Whether a file holds what a run makes."""
    found = fields.of_today(json.loads(path.read_text("utf8")))
    wanted = configured(run, found["model"]["n_items"])
    assert {name: found[name] for name in wanted} == wanted, path.name
    assert found["data"]["name"] == run.data
    return found


def test_stored_runs_are_those_of_the_grid(grid, fresh, decisive):
    """A file's name says what was trained, and only final runs tested."""
    planned = decisive | grid
    stored = set(results.names()) - set(fresh)
    assert stored
    assert stored <= set(planned)
    for name in stored:
        run = same(results.folder() / f"{name}.json", planned[name])
        assert planned[name].evaluate_test or "test" not in run, name


def test_a_run_in_two_plans_is_one_run(grid, decisive):
    for name in set(grid) & set(decisive):
        assert configured(grid[name]) == configured(decisive[name])


def test_stored_runs_of_the_confirmation_are_those_registered(fresh):
    """Eighteen, and no test item is seen before nine of a set are there."""
    assert len(fresh) == 18
    there = set(results.names()) & set(fresh)
    assert there
    for name in there:
        run = same(results.folder() / f"{name}.json", fresh[name])
        assert set(run["at"]) == {"40", "80"} and run["epochs"] == 80
        nine = experiments.fresh_sets.runs(fresh[name].data)
        assert "test" not in run or set(nine) <= there


def test_a_file_without_its_test_items_is_not_done(tmp_path):
    done, path = experiments.runs.is_done, tmp_path / "x.json"
    run = Popularity(data="x")
    final = replace(run, evaluate_test=True)
    assert not done(path, run)
    path.write_text('{"validation": {}}')
    assert done(path, run) and not done(path, final)
    path.write_text('{"validation": {}, "test": {}}')
    assert done(path, final)


@pytest.fixture
def tiny(tmp_path):
    """A run of seconds, and where its files go."""
    sequences = simulate(60, 12, length=(4, 6), seed=1).sequences
    lines = [" ".join(map(str, [u, *s])) for u, s in enumerate(sequences)]
    (tmp_path / "d.txt").write_text("\n".join(lines))
    run = Train(
        data=str(tmp_path / "d.txt"),
        model=SASRecOptions(d_model=8, max_length=5),
        train=TrainConfig(epochs=1, num_negatives=4),
        threads=1,
    )
    work = tmp_path / "work"
    work.mkdir()
    return run, tmp_path / "results" / "tiny-s0.json", work


def test_a_run_is_made_in_a_process_of_its_own(tiny, capfd):
    run, result, work = tiny
    assert experiments.runs.make(run, result, work, None)
    found = same(result, replace(run, data="d"))
    assert "test" not in found and experiments.runs.is_done(result, run)
    assert {path.name for path in work.iterdir()} >= {
        "tiny-s0.log",
        "tiny-s0.pt",
    }
    before = result.read_bytes()
    assert not experiments.runs.make(run, result, work, None)
    assert result.read_bytes() == before
    assert capfd.readouterr().out == "tiny-s0: exit 0\n"


def test_a_run_that_fails_leaves_its_log_and_no_result(tiny, capfd):
    run, result, work = tiny
    bad = replace(run, data="nothing.txt")
    assert not experiments.runs.make(bad, result, work, None)
    assert not result.exists()
    assert "nothing.txt" in (work / "tiny-s0.log").read_text()
    assert capfd.readouterr().out == "tiny-s0: exit 1\n"


def commands(path):
    """The values that a notebook gives to ``command``."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code" and "command = (" in cell.source:
            for node in ast.parse(cell.source).body:
                target = getattr(node, "targets", [None])[0]
                if getattr(target, "id", None) == "command":
                    yield ast.literal_eval(node.value)


def test_chapter_15_trains_a_stored_filter_again(grid):
    """On a GPU, the same run, but for the test items; it keeps the model."""
    notebooks = Path(__file__).resolve().parents[2] / "notebooks"
    (command,) = commands(notebooks / "15-anatomy-of-a-cold-start.ipynb")
    start = "python -m bft_ref.recsys.train "
    assert command.startswith(start)
    again = parse(command.removeprefix(start).split())
    assert again.output == Path("again.json")
    assert again.weights == Path("filter.safetensors")
    aside = {"output": None, "weights": None, "evaluate_test": True}
    made = replace(again, **aside, threads=1)
    assert made == grid["lastfm-sasrec-bft-s1"]
