"""Stored runs are read, compared and shown as worked out by hand."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bft_ref.notebook import results

USERS = 8
#: who had the target where; users not named had it beyond the list
RANKS = {
    "toy-sasrec-plain-s0": {0: 1, 1: 3, 6: 12},
    "toy-sasrec-plain-s1": {0: 1, 2: 1},
    "toy-sasrec-bft-s0": {0: 1, 1: 1, 5: 10},
    "toy-sasrec-bft-s2": {0: 2},
    "toy-sasrec-bft-value-s0": {},
    "toy-hstu-plain-s0": {4: 1},
}
STRATA = "01230123"


def top(ranks: dict[int, int]) -> dict:
    return {
        "users": USERS,
        "top": {
            "k": 20,
            "users": USERS,
            "user": list(ranks),
            "rank": list(ranks.values()),
        },
    }


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with six small runs, a baseline and their strata."""
    for name, ranks in RANKS.items():
        data, *_, seed = name.split("-")
        run = {
            "data": {"name": data, "sha256": "0123456789abcdef"},
            "seed": int(seed[1:]),
            "best_epoch": 7,
            "epochs": 9,
            "cpu_seconds_per_epoch": 2.5,
            "training_peak_bytes": 123_456_789,
            "parameters": 1000,
            "device": "an abacus",
            "code": {"commit": "abcdef0123456", "torch": "2.11.0"},
            "validation": top(ranks),
        }
        if name == "toy-sasrec-plain-s1":
            run["test"] = top({3: 1})
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    strata = {"labels": ["a", "b", "c", "d"], "of_user": STRATA}
    both = {"frequency": strata, "history": strata | {"of_user": "3" * 8}}
    parts = {"validation": both, "test": both}
    (tmp_path / "toy-strata.json").write_text(json.dumps(parts))
    baseline = {"data": {"name": "toy"}, "validation": top({7: 1})}
    (tmp_path / "toy-popularity.json").write_text(json.dumps(baseline))
    monkeypatch.setattr(results, "folder", lambda: tmp_path)
    results.load.cache_clear()
    yield tmp_path
    results.load.cache_clear()


def test_the_repository_has_the_strata_of_its_runs():
    """Each stored run can be read, and compared within a stratum."""
    assert results.names()
    for name in results.names():
        run = results.load(name)
        for part in {"validation", "test"} & set(run):
            values = results.of_users([run], part, stratum=results.RAREST)
            label, found = next(iter(run[part]["frequency"].items()))
            assert label.startswith("Q1")
            assert values.shape == (1, found["users"])
            assert values.mean() == pytest.approx(found["NDCG@10"])


def test_a_run_is_read_in_todays_words():
    """Its file has 0.1.0's."""
    run = results.load("lastfm-sasrec-bft-s1")
    assert run["model"]["d_model"] == 64 and run["train"]["batch_size"] == 32
    assert len(run["diagnostics"]["layers"]) == run["model"]["num_layers"]
    assert "anatomy" not in run


def test_names_are_those_of_trained_models(stored):
    assert results.names() == sorted(RANKS)


def test_a_run_that_is_not_there_is_named(stored):
    assert results.load("toy-popularity")["data"]["name"] == "toy"
    with pytest.raises(FileNotFoundError, match="toy-sasrec-bft-s0.*'nine'"):
        results.load("nine")


def test_runs_of_a_variant_are_only_its_own(stored):
    def seeds(*wanted, **options):
        return [run["seed"] for run in results.runs(*wanted, **options)]

    assert seeds("toy", "plain") == [0, 1]
    assert seeds("toy", "bft") == [0, 2]  # and not bft-value
    assert seeds("toy", "bft-value") == [0]
    assert seeds("toy", "plain", model="hstu") == [0]
    assert seeds("toy", "plain", split="test") == [1]
    assert seeds("toy", "never") == [] == seeds("boys", "plain")


def test_a_point_in_a_variants_name_is_a_point(stored):
    for name in ("toy-sasrec-q-0.1-s0", "toy-sasrec-q-0x1-s3"):
        run = json.loads((stored / "toy-sasrec-bft-s0.json").read_text())
        run["seed"] = int(name[-1])
        (stored / f"{name}.json").write_text(json.dumps(run))
    assert [run["seed"] for run in results.runs("toy", "q-0.1")] == [0]


def test_metrics_of_each_user(stored):
    runs = results.runs("toy", "plain")
    expected = np.zeros((2, USERS))
    expected[0, 0], expected[0, 1] = 1, 1 / 2  # rank 3: 1 / log2(4)
    expected[1, 0] = expected[1, 2] = 1
    np.testing.assert_allclose(results.of_users(runs), expected)
    hits = results.of_users(runs, metric="HR")
    np.testing.assert_array_equal(hits, expected > 0)
    wide = results.of_users(runs[:1], k=20)
    assert wide[0, 6] == pytest.approx(1 / math.log2(13))
    rare = results.of_users(runs, stratum=("frequency", 1))
    np.testing.assert_allclose(rare, expected[:, [1, 5]])
    assert results.of_users(runs, stratum=("history", 0)).shape == (2, 0)
    tested = results.of_users(runs[1:], "test")
    np.testing.assert_array_equal(tested[0], np.arange(8) == 3)


def test_what_cannot_be_read_is_named(stored):
    with pytest.raises(ValueError, match=r"runs: .*'validation', got \[\]"):
        results.of_users([])
    with pytest.raises(ValueError, match="'test', got .*'validation'"):
        results.of_users(results.runs("toy", "plain"), "test")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metric": "MRR"}, "metric: expected .*'MRR'"),
        ({"k": 21}, "k: expected 1 to 20, got 21"),
        ({"k": 0}, "k: expected 1 to 20, got 0"),
        ({"stratum": ("age", 0)}, "stratum: expected .*'age'"),
        ({"stratum": ("history", 4)}, "stratum: expected a quartile.*got 4"),
    ],
)
def test_bad_arguments_are_named(stored, given, said):
    with pytest.raises(ValueError, match=said):
        results.of_users(results.runs("toy", "plain"), **given)


def test_a_difference_is_of_common_seeds(stored):
    plain, bft = results.runs("toy", "plain"), results.runs("toy", "bft")
    found = results.difference(plain, bft)
    gain = 1 - 1 / 2 + 1 / math.log2(11)  # users 1 and 5, seed 0 alone
    assert found.absolute == pytest.approx(gain / USERS)
    assert found.relative == pytest.approx(gain / 1.5)
    assert 0 <= found.absolute_low < found.absolute < found.absolute_high
    again = results.difference(bft, plain)
    assert again.absolute == pytest.approx(-found.absolute)
    within = results.difference(
        plain, bft, "validation", "HR", ("frequency", 1)
    )
    assert within.absolute == pytest.approx(1 / 2)
    with pytest.raises(ValueError, match=r"common seed.*\[1\] and \[2\]"):
        results.difference(plain[1:], bft[1:])


def test_a_pooled_difference_counts_sets_alike(stored):
    plain, bft = results.runs("toy", "plain"), results.runs("toy", "bft")
    value = results.runs("toy", "bft-value")
    found = results.pooled_difference([(plain, bft), (plain, value)])
    one, other = (results.difference(plain, x) for x in (bft, value))
    assert found.absolute == pytest.approx((one.absolute + other.absolute) / 2)
    assert found.relative == pytest.approx((one.relative + other.relative) / 2)


def test_an_estimate_is_a_difference_with_its_seeds(stored):
    found = results.estimate("toy", "plain", split="validation", label="a set")
    plain, bft = results.runs("toy", "plain"), results.runs("toy", "bft")
    assert repr(found.difference) == repr(results.difference(plain, bft))
    assert found.seeds == 1 and found.label == "a set"
    assert found.kind == "exploratory"
    with pytest.raises(ValueError, match="common seed"):
        results.estimate("toy", "plain")  # no test items


def test_a_run_as_it_was_after_an_epoch(stored):
    run = results.load("toy-sasrec-plain-s0")
    early = run | {"at": {"3": {"validation": top({0: 2})}}}
    (found,) = results.at([early], 3)
    assert results.of_users([found], metric="NDCG").sum() == pytest.approx(
        1 / math.log2(3)
    )
    assert found["seed"] == 0
    with pytest.raises(ValueError, match="epoch: expected one of 3, got '4'"):
        results.at([early], 4)
    with pytest.raises(ValueError, match="epoch"):
        results.at([run], 3)


def test_what_made_a_run(stored):
    run = results.load("toy-sasrec-bft-s0")
    row = results.provenance({"filter": run}).loc["filter"]
    assert row.to_dict() == {
        "commit": "abcdef012",
        "torch": "2.11.0",
        "device": "an abacus",
        "best epoch": 7,
        "epochs": 9,
        "CPU s/epoch": 2.5,
        "peak MB": "123",
        "parameters": 1000,
        "data sha256": "0123456789ab",
    }
    del run["training_peak_bytes"]
    assert results.provenance({"": run}).loc["", "peak MB"] == "–"


def test_results_come_with_the_package(tmp_path, monkeypatch):
    """Beside the package in a repository, else inside of it."""
    assert results.folder().name == "results"
    assert (results.folder() / "beauty-strata.json").is_file()
    package = tmp_path / "site" / "bft_ref"
    monkeypatch.setattr(results.resources, "files", lambda name: package)
    assert results.folder() == package / "results"
