"""What 0.1.0 wrote means the same today, and nothing of it is lost."""

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from bft_ref.config import BFTConfig
from bft_ref.recsys import fields as stored
from bft_ref.recsys.data import simulate
from bft_ref.recsys.models import (
    CONFIGS,
    HSTUConfig,
    HSTUFilter,
    SASRecConfig,
)
from bft_ref.recsys.storage import as_fields, from_json
from bft_ref.recsys.train import TrainConfig, fit

ROOT = Path(__file__).resolve().parents[3]
RUNS = sorted(  # those of language models begin with nq
    path
    for path in (ROOT / "results").rglob("*-s[0-9].json")
    if not path.name.startswith("nq-")
)


def written(name):
    path = ROOT / "results" / f"{name}.json"
    return json.loads(path.read_text("utf8"))


def revived(run):
    """The configurations of a run in today's words."""
    given = dict(run["model"])
    kind = CONFIGS[given.pop("model")]
    return (
        from_json(kind, as_text(kind.__name__, given, stored.VERSION)),
        TrainConfig(**run["train"]),
    )


def as_text(kind, given, version):
    return json.dumps({"kind": kind, "version": version, "fields": given})


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_stored_run_has_a_configuration_of_today(path):
    """With every field, and nothing else in its result is touched."""
    before = json.loads(path.read_text("utf8"))
    found = stored.of_today(before)
    model, train = revived(found)
    assert as_fields(model) == found["model"]
    assert as_fields(train) == found["train"]
    moved = {"anatomy": "diagnostics"}
    rest = {
        moved.get(name, name): value
        for name, value in before.items()
        if name not in ("model", "train")
    }
    assert found == rest | {
        "version": 2,
        "model": found["model"],
        "train": found["train"],
    }
    assert stored.of_today(found) == found


def test_there_are_runs_to_be_read():
    assert len(RUNS) >= 84


TRANSFORMER = {
    "model": "sasrec",
    "n_items": 12101,
    "d_model": 64,
    "num_layers": 2,
    "nhead": 2,
    "max_length": 20,
    "dropout": 0.5,
    "embedding_std": None,
    "tau": "item",
    "tau_power": -0.125,
    "tau_start": 1.0,
    "head": "dot",
    "dim_feedforward": 256,
    "activation": "gelu",
    "gate": "none",
    "gate_value": 1.0,
    "tau_bias": False,
    "bft": None,
}
PLAIN = TRANSFORMER | {"residual": "pre"}
SMALL = {"n_items": 3646, "max_length": 50, "dropout": 0.3}
FILTER = asdict(BFTConfig())
BUDGET = {
    "loss": "sampled",
    "num_negatives": 512,
    "logq_correction": True,
    "gbce_t": 0.75,
    "epochs": 100,
    "patience": 5,
    "evaluate_every": 2,
    "batch_size": 128,
    "lr": 0.001,
    "precision_lr": 0.01,
    "weight_decay": 0.0,
    "noise_prior_sd": 0.0,
    "clip": 0.0,
    "every_window": False,
    "seed": 0,
}
LITTLE = {
    "patience": 8,
    "evaluate_every": 4,
    "batch_size": 32,
    "every_window": True,
}


@pytest.mark.parametrize(
    "name, model, train",
    [
        ("beauty-sasrec-plain-s0", PLAIN, BUDGET),
        (
            "beauty-sasrec-by-layer-s0",
            PLAIN | {"gate": "constant", "gate_value": [0.98, 0.28]},
            BUDGET,
        ),
        (
            "beauty-sasrec-bft-value-tau-shuffled-s0",
            PLAIN
            | {
                "tau": "shuffled",
                "bft": asdict(
                    BFTConfig(reading="value", project_variance=False)
                ),
            },
            BUDGET,
        ),
        (
            "lastfm-sasrec-full-softmax-s0",
            PLAIN | SMALL,
            BUDGET | LITTLE | {"loss": "full"},
        ),
        (
            "lastfm-bert4rec-bft-s1",
            TRANSFORMER
            | SMALL
            | {
                "model": "bert4rec",
                "mask_rate": 0.3,
                "last_rate": 0.1,
                "bft": FILTER,
            },
            BUDGET | LITTLE | {"seed": 1},
        ),
        (
            "lastfm-hstu-bft-tau-100-s1",
            {
                "model": "hstu",
                "n_items": 3646,
                "d_model": 64,
                "num_layers": 2,
                "nhead": 2,
                "max_length": 50,
                "dropout": 0.3,
                "embedding_std": None,
                "tau": "item",
                "tau_power": -0.125,
                "tau_start": 100.0,
                "head": "dot",
                "temperature": 0.05,
                "bft": {
                    "granularity": "feature",
                    "prior_scale": "neighbours",
                    "prior_dof": 1.0,
                    "project_variance": True,
                    "process_noise": 0.01,
                    "innovation": "increment",
                    "dynamics": "random_walk",
                    "stationary_variance": 1.0,
                },
            },
            BUDGET | LITTLE | {"seed": 1},
        ),
        (
            "video-games-sasrec-tau-bias-s1",
            PLAIN
            | {"n_items": 10672, "embedding_std": 0.02, "tau_bias": True},
            BUDGET | {"epochs": 80, "patience": 80, "seed": 1},
        ),
    ],
)
def test_a_stored_run_field_by_field(name, model, train):
    found = stored.of_today(written(name))
    assert found["model"] == model
    assert found["train"] == train


def of_version_1(**model):
    """What 0.1.0 would have written of a plain SASRec, changed."""
    run = written("beauty-sasrec-plain-s0")
    return run | {"model": run["model"] | model}


def test_a_field_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match="^colour: expected a field that 0.1"):
        stored.of_today(of_version_1(colour="red"))
    run = of_version_1()
    with pytest.raises(ValueError, match="^colour: expected a field that 0.1"):
        stored.of_today(run | {"train": run["train"] | {"colour": "red"}})
    bft = written("beauty-sasrec-bft-s0")["model"]["bft"] | {"colour": "red"}
    with pytest.raises(ValueError, match="^colour: expected a field that 0.1"):
        stored.of_today(of_version_1(bft=bft))


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.1},
        {"model": "bert4rec", "residual": "original"},
        {"model": "hstu", "gate": "ligr"},
        {"model": "hstu", "activation": "relu"},
    ],
)
def test_a_value_that_nothing_reads_is_not_dropped_in_silence(changed):
    name = list(changed)[-1]
    with pytest.raises(ValueError, match=f"^{name}: .* nothing reads it"):
        stored.of_today(of_version_1(**changed))


def test_masks_that_a_model_has_not_are_not_dropped_in_silence():
    run = of_version_1()
    run["train"]["mask_rate"] = 0.5
    with pytest.raises(ValueError, match=r"^mask_rate: expected 0\.3 where"):
        stored.of_today(run)
    text = as_text("TrainConfig", run["train"], 1)
    with pytest.raises(ValueError, match=r"^mask_rate: expected 0\.3 where"):
        from_json(TrainConfig, text)


def test_a_newer_result_says_so():
    for version in (3, None, "2"):
        run = of_version_1() | {"version": version}
        with pytest.raises(ValueError, match="version: expected at most 2"):
            stored.of_today(run)


def test_counting_has_no_configuration():
    found = stored.of_today(written("beauty-popularity"))
    assert found["model"] == {"model": "popularity"}
    assert found == written("beauty-popularity") | {"version": 2}


def test_a_new_run_and_an_old_one_of_the_same_meaning_are_equal():
    """Those of today's trainer, beside what 0.1.0 would have written."""
    data = simulate(60, 12, length=(4, 6), seed=1).sequences
    bft = BFTConfig(prior_dof=2.0)
    model = SASRecConfig(12, 8, nhead=1, max_length=5, bft=bft)
    train = TrainConfig(epochs=1, num_negatives=4, batch_size=32)
    new = json.loads(
        json.dumps(fit(data, model, train, progress=False).result)
    )
    assert stored.of_today(new) == new
    back = {today: old for old, today in stored.MODEL.items()}
    old = {back.get(name, name): x for name, x in new["model"].items()}
    old.pop("head")
    old |= {"temperature": 0.05}
    back = {today: old for old, today in stored.FILTER.items()}
    old["bft"] = {
        back[name]: x
        for name, x in old["bft"].items()
        if name not in stored.LATER_FILTER
    }
    back = {today: old for old, today in stored.TRAIN.items()}
    how = {
        back[name]: x
        for name, x in new["train"].items()
        if name not in stored.LATER_TRAIN
    }
    how |= {"mask_rate": 0.3, "last_rate": 0.1}
    run = {k: v for k, v in new.items() if k not in ("version", "diagnostics")}
    run |= {"model": old, "train": how, "anatomy": new["diagnostics"]}
    assert "d" in old and "heads" in old and "batch" in how
    assert stored.of_today(run) == new


def test_every_word_of_today_is_a_field_of_today():
    words = set().union(
        *({field.name for field in fields(kind)} for kind in CONFIGS.values()),
        {field.name for field in fields(TrainConfig)},
    )
    every = {*stored.MODEL.values(), *stored.TRAIN.values()}
    assert every | {*stored.LATER, *stored.LATER_TRAIN} == words
    every = {*stored.FILTER.values(), *stored.LATER_FILTER}
    assert every == {field.name for field in fields(BFTConfig)}


def test_what_came_later_stands_at_its_default():
    """A run of version 2 without it, too, is the run of today."""
    data = simulate(60, 12, length=(4, 6), seed=1).sequences
    train = TrainConfig(epochs=1, num_negatives=4, batch_size=32)
    for kind, bft in [(SASRecConfig, BFTConfig()), (HSTUConfig, HSTUFilter())]:
        model = kind(12, 8, nhead=1, max_length=5, bft=bft)
        assert stored._completed(as_fields(model)) == as_fields(model)
        new = {"version": 2, "data": data.describe()}
        new |= {"model": as_fields(model), "train": as_fields(train)}
        old = json.loads(json.dumps(new))
        for name in stored.LATER:
            old["model"].pop(name)
        for name in stored.LATER_FILTER:
            old["model"]["bft"].pop(name, None)  # HSTU has no network
        for name in stored.LATER_TRAIN:
            old["train"].pop(name)
        assert stored.of_today(old) == new


@pytest.mark.parametrize(
    "name", ["lastfm-hstu-bft-s1", "beauty-sasrec-bft-value-s0"]
)
def test_a_model_of_version_1_is_read(name):
    old = written(name)["model"] | {"n_items": 9, "d": 8}
    kind = {"hstu": HSTUConfig, "sasrec": SASRecConfig}[old["model"]]
    config = from_json(kind, as_text("ModelConfig", old, 1))
    bft = {
        HSTUConfig: HSTUFilter(),
        SASRecConfig: BFTConfig(reading="value", project_variance=False),
    }
    assert config == kind(
        n_items=9,
        d_model=8,
        max_length=old["length"],
        dropout=old["dropout"],
        bft=bft[kind],
    )


def test_the_others_of_version_1_are_read():
    old = written("beauty-sasrec-plain-s0")["train"]
    found = from_json(TrainConfig, as_text("TrainConfig", old, 1))
    assert found == TrainConfig(patience=5, evaluate_every=2)
    old = written("beauty-sasrec-bft-s0")["model"]["bft"]
    found = from_json(BFTConfig, as_text("BFTConfig", old, 1))
    assert found == BFTConfig()
    for way, today in {"blocked": "chunked", "materialised": "eager"}.items():
        old["implementation"] = way
        found = from_json(BFTConfig, as_text("BFTConfig", old, 1))
        assert found.implementation == today
