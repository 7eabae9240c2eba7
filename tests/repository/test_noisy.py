"""The runs on noisy labels and noisy context: named once, in their order."""

import json

import pytest

from bft_ref.llm.finetune.command import FineTune
from experiments import noisy_context, noisy_labels

ARMS = noisy_labels.ARMS


def made(folder, name, split="validation", f1=0.5, nll=1.0):
    folder.mkdir(exist_ok=True)
    content = {split: {"f1": f1, "nll": nll}}
    (folder / f"{name}.json").write_text(json.dumps(content))


def searched(folder):
    """As if the second trial of each arm were the best."""
    for arm in ARMS:
        for place, name in enumerate(noisy_labels.trials(arm)):
            made(folder, name, f1=0.7 if place == 1 else 0.5)


def test_every_arm_has_as_many_trials():
    assert {len(arm.trials) for arm in ARMS.values()} == {3}
    assert set(noisy_labels.FIRST) < set(ARMS)


def test_before_the_search_only_trials_can_be_made(tmp_path):
    found = dict(noisy_labels.runs(tmp_path))
    assert len(found) == 3 * len(ARMS)
    assert not any(run.evaluate_test for run in found.values())
    assert all(run.task.noise == 0.3 for run in found.values())
    assert list(noisy_context.runs(tmp_path)) == []


def test_validation_chooses_and_equals_go_to_the_likelier(tmp_path):
    names = list(noisy_labels.trials("sft"))
    assert noisy_labels.chosen("sft", tmp_path) is None
    for name, f1, nll in zip(
        names, (0.4, 0.6, 0.6), (1.0, 2.0, 1.5), strict=True
    ):
        made(tmp_path, name, f1=f1, nll=nll)
    assert noisy_labels.chosen("sft", tmp_path) == {"lr": 8e-4}


def test_after_the_search_tests_are_asked_with_what_was_chosen(tmp_path):
    searched(tmp_path)
    found = dict(noisy_labels.runs(tmp_path))
    assert len(found) == len({str(run) for run in found.values()})
    run = found["nq-focal-p0.3-s4"]
    assert run.evaluate_test and run.train.seed == 4
    assert run.train.gamma == 2.0 and run.train.lr == 4e-4
    assert "nq-filter-p0.5-s1" in found and "nq-gate-p0.5-s1" not in found
    order = list(found)
    assert order.index("nq-filter-p0.3-s3") < order.index("nq-gate-p0.3-s1")


def test_the_best_control_is_no_filter_and_goes_on(tmp_path):
    searched(tmp_path)
    for arm in ARMS:
        for seed in (1, 2, 3):
            f1 = {"gate": 0.6, "filter": 0.9, "filter-mlp": 0.8}.get(arm, 0.5)
            made(tmp_path, f"nq-{arm}-p0.3-s{seed}", "test", f1)
    assert noisy_labels.best_control(tmp_path) == "gate"
    assert "nq-gate-p0.5-s1" in dict(noisy_labels.runs(tmp_path))


def test_context_takes_the_rates_that_labels_chose(tmp_path):
    searched(tmp_path)
    found = dict(noisy_context.runs(tmp_path))
    assert len(found) == 3 * 2 * 5
    told = found["nq-context-known-precision-noisy-s2"]
    assert told.known.role == "precision" and told.task.distractors == 1
    assert told.adaptation == ARMS["filter"].adaptation
    assert told.task.asked == (0, 1, 3)


def test_runs_are_made_in_order_until_all_are(tmp_path, monkeypatch):
    results, work = tmp_path / "results", tmp_path / "work"
    asked = []

    def make(run, result, folder, data_dir, execute):
        assert isinstance(run, FineTune) and run.cache == folder / "states"
        asked.append(result.stem)
        split = "test" if run.evaluate_test else "validation"
        made(results, result.stem, split)

    monkeypatch.setattr(noisy_labels, "make", make)
    noisy_labels.main(work, results=results, arm=("sft", "filter"))
    assert len(asked) == len(set(asked)) == 2 * (3 + 5 + 2 * 3)
    assert asked[:3] == list(noisy_labels.trials("sft"))
    noisy_labels.main(work, results=results, arm=("sft", "filter"))
    assert len(asked) == 2 * 14


def test_a_file_stop_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(noisy_labels, "make", lambda *_: pytest.fail("made"))
    (tmp_path / "stop").touch()
    noisy_labels.main(tmp_path, results=tmp_path)


def test_the_list_says_what_is_done(tmp_path, capsys):
    made(tmp_path, "nq-sft-p0.3-trial0-s0")
    noisy_labels.main(tmp_path, results=tmp_path, only_list=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["done", "nq-sft-p0.3-trial0-s0"]
    assert lines[1].startswith("open")
