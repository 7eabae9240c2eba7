"""Stored answers are read and compared as worked out by hand."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import nbformat
import numpy as np
import pytest

from bft_ref.notebook import answers, results
from tests.book.small import ROOT

F1 = {
    "nq-sft-p0.3-s1": [0.0, 0.5, 1.0, 0.5],
    "nq-sft-p0.3-s2": [0.0, 1.0, 1.0, 0.0],
    "nq-filter-p0.3-s2": [1.0, 1.0, 1.0, 0.0],
    "nq-filter-p0.3-s1": [0.0, 1.0, 1.0, 0.5],
    "nq-filter-p0.3-trial0-s0": [1.0, 1.0, 1.0, 1.0],
    "nq-filter-mlp-p0.0-s1": [1.0, 0.0, 0.0, 0.0],
}


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with six small runs, and one of a recommender."""
    for name, f1 in F1.items():
        split = "validation" if "trial" in name else "test"
        run = {"seed": int(name[-1]), split: {"each": {"f1": f1}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    (tmp_path / "beauty-sasrec-plain-s1.json").write_text("{}")
    monkeypatch.setattr(answers, "folder", lambda: tmp_path)
    monkeypatch.setattr(results, "folder", lambda: tmp_path)
    answers.load.cache_clear()
    yield
    answers.load.cache_clear()


def test_names_say_what_a_run_is():
    assert [*answers.names().values()] == sorted(F1)
    assert answers.Key("nq", "filter", 0.3, 0, 0) in answers.names()
    assert answers.Key("nq", "filter-mlp", 0.0, None, 1) in answers.names()


def test_recommenders_are_not_asked_for_answers():
    assert results.names() == ["beauty-sasrec-plain-s1"]


def test_runs_are_an_arms_by_seed_without_its_trials():
    found = answers.runs("filter", 0.3)
    assert [run["seed"] for run in found] == [1, 2]
    np.testing.assert_array_equal(
        answers.of_questions(found),
        [F1["nq-filter-p0.3-s1"], F1["nq-filter-p0.3-s2"]],
    )
    assert answers.runs("filter", 0.5) == []


def test_a_difference_pairs_questions_and_seeds():
    found = answers.estimate("sft", kind="confirmatory")
    assert found is not None and found.seeds == 2
    assert found.difference.absolute == pytest.approx(1.5 / 8)
    assert found.difference.relative == pytest.approx(1.5 / 4)
    assert found.label == "filter − sft"


def test_without_a_common_seed_there_is_no_estimate():
    assert answers.estimate("sft", "filter-mlp", 0.0) is None
    assert answers.estimate("gate") is None


def test_chapter_16_makes_a_registered_run_again():
    """Its command, parsed; the cell itself is not executed."""
    line = pytest.importorskip("bft_ref.llm.finetune.command")
    registered = pytest.importorskip("experiments.noisy_labels")
    path = ROOT / "notebooks/16-noisy-labels.ipynb"
    (source,) = [
        cell.source
        for cell in nbformat.read(path, as_version=4).cells
        if "command = (" in cell.source
    ]
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
    }
    assert values["again"] is False
    start = "python -m bft_ref.llm.finetune "
    assert values["command"].startswith(start)
    run = line.parse(values["command"].removeprefix(start).split())
    assert run.output == Path("again.json")
    arm = registered.ARMS["filter"]
    assert run.adaptation == arm.adaptation
    assert run.task.noise == registered.NOISE
    assert {"lr": run.train.lr} in arm.trials
