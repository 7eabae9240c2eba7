"""Configurations and models that outlive their process."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from bft_ref.config import BFTConfig
from bft_ref.recsys import fields as stored_fields
from bft_ref.recsys import storage
from bft_ref.recsys.models import HSTUConfig, SASRecConfig, build
from bft_ref.recsys.storage import (
    from_json,
    load,
    load_beside,
    packed,
    save,
    to_json,
    unpacked,
)
from bft_ref.recsys.train import TrainConfig
from tests.factories import label, randomise
from tests.unit.recsys.configs import make_config

ROOT = Path(__file__).resolve().parents[3]
FILTER = BFTConfig(granularity="token", prior_dof=3.5, project_variance=False)
CONFIGS = [
    make_config(n_items=7),
    make_config(n_items=7, gate="vector", gate_value=(0.1, 0.7), num_layers=2),
    make_config(n_items=7, model="hstu", temperature=0.2, embedding_std=0.1),
    make_config(n_items=7, bft=FILTER, tau="shuffled", tau_power=0.5),
    FILTER,
    TrainConfig(loss="gbce", gbce_t=0.1, seed=2**64 - 1, lr=1e-300),
]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=label)


@each_config
def test_a_configuration_comes_back_from_json(config):
    text = to_json(config)
    found = from_json(type(config), text)
    assert found == config and type(found) is type(config)
    assert to_json(found) == text
    assert set(json.loads(text)["fields"]) == {f.name for f in fields(config)}


def changed(config, **fields_):
    content = json.loads(to_json(config))
    content["fields"] |= fields_
    return json.dumps(content)


def test_what_was_added_later_has_its_default():
    content = json.loads(to_json(make_config(n_items=7, d_model=8)))
    del content["fields"]["gate"], content["fields"]["bft"]
    found = from_json(SASRecConfig, json.dumps(content))
    assert found == make_config(n_items=7, d_model=8)
    within = {"granularity": "token"}
    found = from_json(SASRecConfig, changed(found, bft=within))
    assert found.bft == BFTConfig(granularity="token")


@pytest.mark.parametrize(
    "kind, text, error, said",
    [
        (SASRecConfig, "n_items: 3", ValueError, "text: expected JSON, got"),
        (SASRecConfig, "[1]", ValueError, "text: expected what to_json wrote"),
        (SASRecConfig, "{}", ValueError, "text: expected what to_json wrote"),
        (
            TrainConfig,
            to_json(CONFIGS[0]),
            ValueError,
            "kind: expected one of TrainConfig, got 'SASRecConfig'",
        ),
        (
            SASRecConfig,
            to_json(CONFIGS[0]).replace('"version": 2', '"version": 3'),
            ValueError,
            "version: expected at most 2, got 3",
        ),
        (
            SASRecConfig,
            to_json(CONFIGS[0]).replace('"version": 2', '"version": null'),
            ValueError,
            "version: expected at most 2, got None",
        ),
        (
            SASRecConfig,
            changed(CONFIGS[0], colour="red"),
            ValueError,
            "colour: expected a field of SASRecConfig",
        ),
        (
            SASRecConfig,
            changed(CONFIGS[0], bft={"colour": "red"}),
            ValueError,
            "colour: expected a field of BFTConfig",
        ),
        (
            SASRecConfig,
            changed(CONFIGS[0], bft=True),
            TypeError,
            "BFTConfig: expected fields, got True",
        ),
        (
            SASRecConfig,
            changed(CONFIGS[0], bft={"project_variance": "no"}),
            TypeError,
            "project_variance: expected bool, got 'no'",
        ),
        (
            SASRecConfig,
            changed(CONFIGS[0], d_model=8.5),
            TypeError,
            "d_model: expected int, got 8.5",
        ),
        (
            SASRecConfig,
            changed(CONFIGS[0], gate="sigmoid"),
            ValueError,
            "gate: expected one of",
        ),
        (
            BFTConfig,
            changed(FILTER, n_eff_gradient=1),
            TypeError,
            "n_eff_gradient: expected bool, got 1",
        ),
        (
            TrainConfig,
            changed(CONFIGS[-1], lr=float("nan")),
            ValueError,
            "lr: expected a number in",
        ),
    ],
)
def test_what_is_no_configuration_is_named(kind, text, error, said):
    with pytest.raises(error, match=said):
        from_json(kind, text)


def test_a_field_without_a_default_is_asked_for():
    content = json.loads(to_json(CONFIGS[0]))
    del content["fields"]["n_items"]
    with pytest.raises(TypeError, match="n_items"):
        from_json(SASRecConfig, json.dumps(content))


MODELS = [
    {"gate": "qiu-head", "residual": "original"},
    {"gate": "vector", "gate_value": [0.3, 0.9]},
    {"tau_bias": True, "tau": "mlp"},
    {"bft": BFTConfig(jacobian="hutchinson"), "activation": "swiglu"},
    {"bft": FILTER, "tau": "frequency"},
    {"model": "bert4rec", "bft": BFTConfig(), "tau": "shuffled"},
    {"model": "hstu", "bft": BFTConfig(), "tau": "unit", "tau_start": 0.5},
]
ITEMS = torch.tensor([[0, 3, 7, 9], [4, 1, 0, 0]])
TIMES = torch.tensor([[0.0, 0.0, 9.0, 5e6], [0.0, 60.0, 0.0, 0.0]])
# Another process, which knows nothing but the files.
SCORES = """
import sys
import torch
from bft_ref.recsys.storage import load

torch.set_num_threads(1)
items, times = torch.load(sys.argv[1])
scores = [load(path).scores(items, times) for path in sys.argv[2:]]
torch.save(scores, sys.argv[1])
"""


def make(variant, seed=0):
    torch.manual_seed(seed)
    config = make_config(
        n_items=30, d_model=16, dim_feedforward=24, max_length=8, **variant
    )
    return randomise(build(config, np.arange(31)), seed).eval()


def test_a_model_scores_the_same_in_another_process(tmp_path):
    """To the last bit, in the dtype that it had, with no word but a path."""
    models = [make(variant) for variant in MODELS]
    models.append(make(MODELS[3]).double())
    paths = [tmp_path / f"{i}.safetensors" for i in range(len(models))]
    for model, path in zip(models, paths, strict=True):
        save(model, path)
    both = tmp_path / "both.pt"
    torch.save((ITEMS, TIMES), both)
    subprocess.run(
        [sys.executable, "-c", SCORES, both, *paths],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for model, found in zip(models, torch.load(both), strict=True):
        expected = model.scores(ITEMS, TIMES)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("variant", MODELS, ids=label)
def test_what_is_loaded_is_the_model_and_can_be_trained(variant, tmp_path):
    model, path = make(variant).train(), tmp_path / "new" / "model.safetensors"
    save(model, path)
    state = torch.get_rng_state()
    found = load(path)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(found) is type(model) and found.config == model.config
    assert not any(module.training for module in found.modules())
    theirs = dict(model.named_parameters())
    for name, p in found.named_parameters():
        assert p.requires_grad and torch.equal(p, theirs.pop(name))
    assert not theirs
    assert (
        dict(found.named_buffers()).keys()
        == dict(model.named_buffers()).keys()
    )
    found(ITEMS, TIMES).square().sum().backward()


def test_a_save_that_fails_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save(make({}), path)
    before = path.read_bytes()

    def full(tensors, unfinished, metadata):
        Path(unfinished).write_bytes(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(storage, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save(make({}, seed=1), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_recommender_is_not_saved(tmp_path):
    path = tmp_path / "model.safetensors"
    for other in (nn.Linear(2, 2), nn.DataParallel(make({})), {}):
        with pytest.raises(TypeError, match="model: expected a Recommender"):
            save(other, path)
    assert not path.exists()


def written(path, weights=None, **other):
    """A file of ``save`` with other metadata, or other tensors."""
    save(make({}), path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() | other
        names = file.keys()
        found = {name: file.get_tensor(name) for name in names}
    save_file(found if weights is None else weights, path, metadata)


def test_what_is_no_model_is_not_loaded(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match=r"no file .*model\.safe"):
        load(path)
    path.write_text("n_items: 3")
    with pytest.raises(ValueError, match="which cannot be read"):
        load(path)
    for metadata in (None, {"format": "pt"}):
        save_file(make({}).state_dict(), path, metadata)
        with pytest.raises(ValueError, match="holds something else"):
            load(path)
    torch.save(make({}), path)  # a pickle, which could run any code
    with pytest.raises(ValueError, match="which cannot be read"):
        load(path)
    save(make({}), path)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ValueError, match="which cannot be read"):
        load(path)
    written(path, version="3")
    with pytest.raises(ValueError, match="version: expected at most 2, got 3"):
        load(path)
    written(path, config=changed(make({}).config, colour="red"))
    with pytest.raises(ValueError, match="colour: expected a field"):
        load(path)
    for config in (
        replace(make({}).config, d_model=8),
        replace(make({}).config, num_layers=1),
        replace(make({}).config, bft=BFTConfig()),
    ):
        written(path, config=to_json(config))
        with pytest.raises(ValueError, match="weights .* do not fit"):
            load(path)
    written(path, weights={})
    with pytest.raises(ValueError, match="weights .* do not fit"):
        load(path)


def test_other_programs_read_the_file(tmp_path):
    """Weights under their names, the configuration as JSON."""
    model, path = make(MODELS[-1]), tmp_path / "model.safetensors"
    save(model, path)
    with safe_open(path, framework="np") as file:
        assert from_json(HSTUConfig, file.metadata()["config"]) == model.config
        for name, value in model.state_dict().items():
            found = file.get_tensor(f"model.{name}")
            assert (found == value.numpy()).all()


def test_what_is_beside_a_model_comes_back(tmp_path):
    path = tmp_path / "model.safetensors"
    names = ["é", 2**70, -1, "7", None, {"a": [0.1]}]
    beside = {"names": packed(names), "x": torch.arange(6).view(2, 3).mT}
    model = make({})
    save(model, path, beside=beside)
    found = load_beside(path)
    assert unpacked(found["names"]) == names
    assert torch.equal(found.pop("x"), beside["x"])
    assert found.keys() == {"names"}
    assert torch.equal(load(path).scores(ITEMS), model.scores(ITEMS))
    save(model, path)
    assert load_beside(path) == {}


def test_a_file_may_be_replaced_while_its_model_is_used(tmp_path):
    path = tmp_path / "model.safetensors"
    save(make({}), path)
    model = load(path)
    before = model.scores(ITEMS)
    path.write_bytes(b"")
    assert torch.equal(model.scores(ITEMS), before)


def test_a_newer_version_says_so(tmp_path, monkeypatch):
    """Written by a bft_ref of which this one is an older release."""
    path = tmp_path / "model.safetensors"
    with monkeypatch.context() as later:
        later.setattr(storage, "VERSION", 3)
        later.setattr(stored_fields, "VERSION", 3)
        save(make({}), path)
        text = to_json(FILTER)
        assert load(path).config == make({}).config
        assert from_json(BFTConfig, text) == FILTER
    for read in (lambda: load(path), lambda: from_json(BFTConfig, text)):
        with pytest.raises(ValueError, match="version: .* at most 2, got 3"):
            read()


def test_any_dataclass_of_plain_fields_is_a_configuration():
    @dataclass(frozen=True)
    class Two:
        first: BFTConfig
        second: BFTConfig | None = None

    for config in (Two(FILTER), Two(FILTER, BFTConfig())):
        assert from_json(Two, to_json(config)) == config
