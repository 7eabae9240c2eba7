"""What chapters train live, by their own folded helpers, on a GPU.

The cells are those of the notebooks; only what they train on is smaller. As
in :mod:`tests.gpu.test_cuda`, ``BFT_DEVICE=cpu`` runs the same on a CPU.
"""

from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch

from book.tools.folding import title
from tests.gpu.test_cuda import DEVICE, pytestmark  # noqa: F401

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.fixture(autouse=True)
def without_facts(monkeypatch):
    """What is smaller has other numbers than those recorded."""
    monkeypatch.delenv("BFT_FACTS", raising=False)


def names_of(chapter: str, *titles: str, **given: Any) -> dict[str, Any]:
    """What a chapter's set-up and the cells so titled define."""
    (path,) = NOTEBOOKS.glob(f"{chapter}-*.ipynb")
    names: dict[str, Any] = {"device": DEVICE} | given
    due = ["Set-up: ", *titles]
    for cell in nbformat.read(path, as_version=4).cells:
        name = title(cell.source) if cell.cell_type == "code" else None
        if due and name and name.startswith(due[0]):
            due.pop(0)
            exec(cell.source, names)
    assert not due, f"no cell with the title {due[0]!r}"
    return names


def test_networks_of_sensors_come_back_from_the_device():
    names = names_of("09", "Helpers: batch")
    names |= {"SENSORS": 24, "READINGS": 10, "SIZE": 4, "WIDTH": 16}
    names["sigma"] = torch.logspace(-1, 1, 24)
    for kind in ["plain", "tenfold"]:
        network, _, _ = names["trained"](kind, seed=0, steps=3)
        assert {p.device.type for p in network.parameters()} == {"cpu"}


def test_chapter_13_trains_its_three_models():
    names = names_of("13", "Helpers: train")
    simulate, filtering = names["simulate"], names["BFTConfig"]()
    names["world"] = simulate(80, 40, length=(5, 9), seed=0)
    names["SHAPE"] = {"n_items": 40, "d_model": 16, "max_length": 8}
    for given in [{}, {"bft": filtering}, {"gate": "constant"}]:
        one = names["train"](0, **given)
        assert next(one.model.parameters()).device.type == DEVICE
        assert np.isfinite(one.rankings["validation"].ndcg()).all()


def test_chapter_14_trains_and_asks_its_backbones():
    names = names_of(
        "14",
        "Helpers: fitted_as",
        "Helpers: asked_for",
        arms={
            "HSTU": ("hstu", {}, {}),
            "BERT4Rec": ("bert4rec", {"dim_feedforward": 32}, {}),
        },
    )
    for _, given, _ in names["arms"].values():
        kind = "HSTUFilter" if not given else "BFTConfig"
        given["bft"] = names[kind]()
    names["others"] = names["simulate"](80, 120, length=(6, 12), seed=1)
    world = names["simulate"](80, 120, length=(6, 12), seed=0)
    names["shoppers"] = world.sequences
    one = {arm: names["fitted_as"](arm, 0) for arm in names["arms"]}
    for each in one.values():
        assert next(each.model.parameters()).device.type == DEVICE
    for back in (3, 0):
        assert 0 <= names["asked_for"](one["BERT4Rec"].model, back) <= 1
    assert np.isfinite(names["without_mask"](one["BERT4Rec"].model)).all()


def test_chapter_15_trains_and_opens_its_filters():
    names = names_of(
        "15",
        "Helpers: trained_as",
        "Helpers: tilted",
        "Helpers: recovered",
        ITEMS=60,
        SEEDS=(0,),
    )
    item, shared = "filter", "filter, shared τ"
    world = names["simulate"](200, 60, length=(5, 9), seed=0)
    split = world.sequences.split("test")
    names |= {"item": item, "shared": shared, "tilts": [0.0, 0.4]}
    names |= {"worlds": {0: world}, "train_on": {0: world.sequences}}
    names |= {"ask_of": {0: split}, "ASK": len(split.target)}
    names["rarest"] = {0: np.arange(len(split.target)) % 4 == 0}
    filtering = {"bft": names["BFTConfig"]()}
    names["fitted"] = {
        (0, item): names["trained_as"](0, filtering),
        (0, shared): names["trained_as"](0, filtering | {"tau": "mlp"}),
    }
    model = names["fitted"][0, item].model
    assert next(model.parameters()).device.type == DEVICE
    assert np.isfinite(names["tilted"](0, item)).all()
    rows = list(names["recovered"](0, np.random.default_rng(0)))
    assert np.isfinite([row["|Δ log τ|"] for row in rows]).all()
