"""The laboratory: planned by counting, made once, compared as it says."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from bft_ref.notebook import laboratory, results
from bft_ref.notebook.forest import Estimate
from bft_ref.recsys.data import Sequences, simulate
from bft_ref.recsys.metrics import paired_bootstrap
from bft_ref.recsys.train import RunError
from bft_ref.recsys.train.batches import training_batches

SMALL = {"d_model": 8, "dim_feedforward": 8, "num_layers": 1}


def tiny(rival: laboratory.Rival = "ligr", seeds: int = 1) -> laboratory.Plan:
    """Runs of three epochs on ninety users."""
    world = simulate(90, 40, length=(5, 9), seed=4).sequences
    plan = laboratory.plan(world, rival, seeds=seeds, **SMALL)
    budget = {"epochs": 3, "evaluate_every": 1, "batch_size": 32}
    return replace(plan, train=plan.train | budget)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A plan of two seeds, its folder and its runs."""
    plan, folder = tiny("constant", 2), tmp_path_factory.mktemp("laboratory")
    return plan, folder, laboratory.run_all(plan, folder, progress=False)


def test_a_table_is_read_in_the_order_of_its_times():
    table = pd.DataFrame(
        {
            "item": ["b", "a", "c", "a", "d"],
            "user": [1, 1, 1, 2, 2],
            "time": [20, 10, 30, 5, 5],
            "stars": 5,
        }
    )
    read = laboratory.choose(table)
    assert [[read.labels[i] for i in read[u]] for u in (0, 1)] == [
        ["a", "b", "c"],
        ["a", "d"],
    ]
    untimed = laboratory.choose(table.drop(columns="time"))
    assert [untimed.labels[i] for i in untimed[0]] == ["b", "a", "c"]
    with pytest.raises(ValueError, match="user: expected one of.* a, b"):
        laboratory.choose(pd.DataFrame({"a": [1], "b": [2]}))
    with pytest.raises(TypeError, match="expected a pandas or polars"):
        laboratory.choose([[1, 2]])


def test_data_by_any_name(tmp_path):
    short = laboratory.choose()
    assert len(short) == 1200 and short.n_items == 300
    assert laboratory.choose(size="full", n_users=40).n_items == 600
    equal = laboratory.choose(n_users=50, noise=(1.0, 1.0))
    assert len(equal) == 50
    own = Sequences.of([[1, 2, 3]])
    assert laboratory.choose(own) is own
    file = tmp_path / "mine.inter"
    file.write_text("user_id:token\titem_id:token\nu\ta\nu\tb\n")
    assert laboratory.choose(str(file)).name == "mine"
    with pytest.raises(ValueError, match="noise: expected only with"):
        laboratory.choose(own, noise=(1.0, 1.0))
    with pytest.raises(ValueError, match="size: expected.*'huge'"):
        laboratory.choose(size="huge")


@pytest.mark.parametrize(
    ("name", "users", "lengths", "size"),
    [
        ("simulation-1", 300, (3, 9), "short"),
        ("shop", 2100, (3, 9), "full"),
        ("shop", 150, (3, 60), "full"),
        ("shop", 150, (3, 60), "short"),
    ],
)
def test_steps_are_counted_as_the_trainer_makes_them(
    name, users, lengths, size
):
    data = simulate(users, 70, length=lengths, seed=2).sequences
    data = replace(data, name=name)
    plan = laboratory.plan(data, size=size)
    train = plan.train
    batches = training_batches(
        data.split("validation").training,
        max_length=plan.model["max_length"],
        batch_size=train.get("batch_size", 128),
        every_window=train.get("every_window", False),
        rng=np.random.default_rng(0),
    )
    assert plan.steps_per_epoch == len(list(batches))
    wanted = laboratory.STEPS[size][name == "shop"]
    assert wanted <= plan.steps < wanted + plan.steps_per_epoch
    assert train["evaluate_every"] <= max(1, train["epochs"] / 10)


def test_a_plan_says_what_it_is():
    text = str(tiny("tau-bias", 2))
    assert "90 users, 40 items" in text
    assert "plain, filter, tau-bias; seeds 0, 1" in text
    assert "3 epochs of 3 steps, 9 steps a run, 6 runs" in text
    with pytest.raises(ValueError, match="rival: expected.*'luck'"):
        tiny("luck")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seeds: expected"):
        tiny(seeds=0)
    with pytest.raises(ValueError, match="size: expected.*'huge'"):
        laboratory.plan(simulate(9, 9, length=(3, 3)).sequences, size="huge")


def test_arms_share_all_but_what_makes_them(made):
    plan, _, runs = made
    assert list(runs) == ["plain", "filter", "constant"]
    for arm in runs.values():
        assert [run["seed"] for run in arm] == [0, 1]
        for run in arm:
            assert sum(r["steps"] for r in run["history"]) == plan.steps == 9
            assert "test" not in run
    models = [runs[arm][1]["model"] for arm in runs]
    differ = {k for k in models[0] if len({str(m[k]) for m in models}) > 1}
    assert differ == {"bft", "gate", "gate_value"}


def test_the_constant_is_the_filters_own_mean_gain_of_that_seed(made):
    _, _, runs = made
    for ours, constant in zip(runs["filter"], runs["constant"], strict=True):
        gains = [np.mean(x["gain"]) for x in ours["diagnostics"]["layers"]]
        assert constant["model"]["gate_value"] == pytest.approx(gains)


def test_nothing_is_done_twice(made, capsys, monkeypatch):
    plan, folder, runs = made
    assert len(list(folder.glob("*.json"))) == 6
    with monkeypatch.context() as patch:
        patch.setattr(laboratory, "fit", None)
        assert laboratory.run_all(plan, folder) == runs
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 6 and all(line.endswith("was there") for line in said)
    other = replace(plan, model=plan.model | {"d_model": 4}, seeds=1)
    laboratory.run_all(other, folder, progress=False)
    assert len(list(folder.glob("*.json"))) == 9, "another model, other files"
    world = simulate(90, 40, length=(5, 9), noise=(1.0, 1.0), seed=4)
    other = replace(plan, sequences=world.sequences, seeds=1)
    laboratory.run_all(other, folder, progress=False)
    assert len(list(folder.glob("*.json"))) == 12, "other data, other files"


def test_test_items_are_ranked_later_without_training_again(made, monkeypatch):
    plan, folder, runs = made
    monkeypatch.setattr(
        "bft_ref.recsys.train.trainer._epoch",
        lambda *a: pytest.fail("trained again"),
    )
    tested = laboratory.run_all(
        plan, folder, evaluate_test=True, progress=False
    )
    for arm, each in tested.items():
        for run, before in zip(each, runs[arm], strict=True):
            assert run["validation"] == before["validation"]
            assert "test" in run
    assert len(laboratory.compare(plan, tested, "test")) == 3


def test_a_run_that_was_broken_off_goes_on(tmp_path, monkeypatch):
    plan = tiny()
    whole = laboratory.run_all(plan, tmp_path / "whole", progress=False)
    seen = []

    def stop(record):
        seen.append(record["epoch"])
        if seen == [1, 2]:
            raise KeyboardInterrupt

    monkeypatch.setattr(
        laboratory, "fit", partial(laboratory.fit, on_epoch=stop)
    )
    with pytest.raises(KeyboardInterrupt):
        laboratory.run_all(plan, tmp_path, progress=False)
    assert not list(tmp_path.glob("*.json"))
    resumed = laboratory.run_all(plan, tmp_path, progress=False)
    assert seen[:3] == [1, 2, 3]
    for arm in plan.arms:
        assert resumed[arm][0]["validation"] == whole[arm][0]["validation"]


def test_differences_are_those_of_the_runs(made):
    plan, _, runs = made
    rows = laboratory.compare(plan, runs, group="mine")
    assert [row.label for row in rows] == [
        "filter − plain",
        "constant − plain",
        "filter − constant",
    ]
    ndcg = {arm: results.of_users(each) for arm, each in runs.items()}
    assert rows[2].difference == paired_bootstrap(
        ndcg["constant"], ndcg["filter"]
    )
    assert {(r.seeds, r.kind, r.group) for r in rows} == {
        (2, "exploratory", "mine")
    }
    rare = laboratory.compare(plan, runs, stratum=results.RAREST)
    quarter = next(iter(runs["plain"][0]["validation"]["frequency"].values()))
    mean = np.mean(
        [
            next(iter(run["validation"]["frequency"].values()))["NDCG@10"]
            for run in runs["filter"]
        ]
    )
    assert quarter["users"] < 90
    base = np.mean(
        [
            next(iter(run["validation"]["frequency"].values()))["NDCG@10"]
            for run in runs["plain"]
        ]
    )
    assert rare[0].difference.absolute == pytest.approx(mean - base)
    with pytest.raises(ValueError, match="runs: expected.*'test'"):
        laboratory.compare(
            plan,
            {
                arm: [{k: v for k, v in r.items() if k != "test"} for r in rs]
                for arm, rs in runs.items()
            },
            "test",
        )


def test_stored_runs_stand_beside():
    rows = laboratory.stored("ligr")
    groups = {row.group for row in rows}
    assert groups == {"stored: filter − plain", "stored: filter − ligr"}
    of = {(row.group, row.label): row for row in rows}
    toys = of["stored: filter − plain", "toys"]
    assert toys.kind == "exploratory" and toys.seeds == 3
    wanted = results.difference(
        results.runs("toys", "plain", split="test"),
        results.runs("toys", "bft", split="test"),
        "test",
    )
    assert toys.difference == wanted
    after = [r for r in laboratory.stored("tau-bias") if "tau" in str(r.group)]
    kinds = {row.label: row.kind for row in after}
    assert kinds["toys"] == "exploratory"
    assert kinds["video-games"] == "confirmatory"
    (games,) = [row for row in after if row.label == "video-games"]
    arms = ("tau-bias", "bft")
    runs = [results.runs("video-games", arm, split="test") for arm in arms]
    equal = results.difference(*(results.at(x, 80) for x in runs), "test")
    assert games.difference == equal
    with pytest.raises(ValueError, match="rival: expected.*'luck'"):
        laboratory.stored("luck")  # type: ignore[arg-type]


def test_curves_have_the_steps_done_so_far(made):
    _, _, runs = made
    table = laboratory.curves(runs)
    assert sorted(table["step"].unique()) == [3, 6, 9]
    assert len(table) == 3 * 2 * 3 * 4
    last = table[(table.arm == "plain") & (table.seed == 1)]
    value = last[(last.step == 9) & (last.quartile == 0)]["NDCG@10"].item()
    by = runs["plain"][1]["history"][-1]["NDCG@10 by frequency"]
    assert value == by[0]


def difference(*shift: float):
    """Of 40 users who gain what is given, in turn."""
    base = np.full((3, 40), 0.5)
    return paired_bootstrap(base, base + np.resize(shift, 40))


@pytest.mark.parametrize(
    ("shift", "seeds", "said"),
    [
        ((0.1,), 3, "above zero, exploratory: the whole interval lies"),
        ((-0.1,), 3, "below zero, exploratory: the whole interval lies"),
        ((0.1, -0.1), 3, "open: zero is inside, so this does not say"),
        ((0.0,), 3, "open: zero is inside, so this does not say"),
        ((0.1,), 1, "direction only: above zero, exploratory: a verdict"),
    ],
)
def test_a_sentence_says_no_more_than_the_interval(shift, seeds, said):
    row = Estimate("filter − plain", difference(*shift), seeds)
    first, line = laboratory.in_words([row]).splitlines()
    assert first.startswith("filter − plain (")
    assert first.endswith(" % of plain's NDCG@10")
    assert said in line
    assert ("lies above" in line) == (shift == (0.1,) and seeds == 3)
    assert ("lies below" in line) == (shift == (-0.1,))
    assert "better" not in line or "does not say which is better" in line


def test_results_are_whole_files(made):
    _, folder, _ = made
    assert not list(folder.glob("*.part"))
    for path in folder.glob("*.json"):
        json.loads(path.read_text("utf8"))


def test_data_of_which_nobody_can_be_asked(tmp_path):
    short = Sequences.of([[1, 2], [2, 1]], name="short")
    plan = laboratory.plan(short)
    with pytest.raises((ValueError, RunError), match="nobody can be asked"):
        laboratory.run_all(plan, tmp_path, progress=False)
