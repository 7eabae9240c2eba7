"""A service: names in, names out, and no wrong name silently."""

from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from bft_ref.config import BFTConfig
from bft_ref.recsys import storage
from bft_ref.recsys.data import Catalogue, from_frame, simulate
from bft_ref.recsys.models import as_batch, build
from bft_ref.recsys.recommend import Answer, Service, as_columns
from bft_ref.recsys.train import TrainConfig
from tests.factories import label, randomise
from tests.unit.recsys.configs import make_config

N = 12
ROWS = [
    *[("al", f"i{i}", t) for t, i in enumerate([1, 2, 3, 4, 5, 6, 7])],
    *[("bo", f"i{i}", 10 * t) for t, i in enumerate([8, 9, 2, 2])],
    *[("cy", f"i{i}", 99 * t) for t, i in enumerate([10, 11, 12, 2])],
]
VARIANTS = [
    {},
    {"model": "bert4rec"},
    {"model": "hstu"},
    {"bft": BFTConfig(), "tau": "frequency"},
]


def make(time="time", max_length=5, **variant):
    frame = pd.DataFrame(ROWS, columns=["user", "item", "time"])
    sequences, catalogue = from_frame(frame, time=time)
    torch.manual_seed(0)
    config = make_config(
        n_items=N,
        d_model=8,
        dim_feedforward=12,
        max_length=max_length,
        **variant,
    )
    model = randomise(build(config, sequences.frequency)).eval()
    return Service(model, sequences, catalogue, {"NDCG@10": 0.5})


def ids(labels):
    return [int(label[1:]) for label in labels]


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_a_user_is_recommended_what_the_model_scores_best(variant):
    """Al has seven items, of which the model sees five and none is given."""
    service = make(**variant)
    answers = service.recommend(["cy", "al", "cy"], k=3)
    assert [one.user for one in answers] == ["cy", "al", "cy"]
    assert answers[0] == answers[2]
    h = service.histories
    for one, u in zip(answers[:2], [2, 0], strict=True):
        last = slice(max(h.offsets[u], h.offsets[u + 1] - 5), h.offsets[u + 1])
        scores = service.model.scores(
            as_batch([h.items[last]], 5), torch.as_tensor(h.times[last])[None]
        )[0].clone()
        scores[torch.as_tensor(h[u])] = -torch.inf
        best = scores.argsort(descending=True)[:3]
        assert ids(one.items) == best.tolist()
        np.testing.assert_allclose(one.scores, scores[best], rtol=1e-5)
        assert one.source == "model" and one.left_out == ()
    seen = service.recommend(["al"], k=N, exclude_seen=False)[0]
    assert sorted(ids(seen.items)) == list(range(1, N + 1))


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_a_history_is_answered_as_the_user_who_has_it(variant):
    service = make(**variant)
    times = None
    if service.model.reads_times:
        times = [[0, 99, 198, 297], [0, 10, 20, 30]]
    history = ["i10", "i11", "i12", "i2"]
    found = service.recommend(
        histories=[history, ("i8", "i9", "i2", "i2")], times=times
    )
    users = service.recommend(["cy", "bo"])
    for one, other in zip(found, users, strict=True):
        assert one.items == other.items and one.user is None
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-5)


def test_fewer_are_given_where_fewer_are_left():
    (one,) = make().recommend(["al"], k=50)
    assert sorted(ids(one.items)) == [8, 9, 10, 11, 12]
    assert len(one.scores) == 5


def test_an_unknown_user_gets_what_is_popular_and_it_says_so():
    """i2 was met four times; all others once, which the order breaks."""
    known, other = make().recommend(["bo", "zoe"], k=3)
    assert known.source == "model"
    assert other == Answer(
        ("i2", "i1", "i3"), (4.0, 1.0, 1.0), "popularity", "zoe"
    )


def test_unknown_items_are_left_out_and_named():
    service = make()
    mixed, bare, none, empty = service.recommend(
        histories=[["i8", "?", "i9", "!"], ["i8", "i9"], ["?", "?"], []], k=2
    )
    assert mixed.left_out == ("?", "!") and mixed.source == "model"
    assert replace(mixed, left_out=()) == bare
    assert none == Answer(
        ("i2", "i1"), (4.0, 1.0), "popularity", None, ("?",) * 2
    )
    assert empty == replace(none, left_out=())


def test_times_go_with_the_items_that_are_left():
    service = make(model="hstu")
    mixed, bare, other = service.recommend(
        histories=[["i8", "?", "i9"], ["i8", "i9"], ["i8", "i9"]],
        times=[[0.0, 5.0, 9e5], [0.0, 9e5], [0.0, 1.0]],
    )
    assert mixed.items == bare.items and mixed.scores == bare.scores
    assert other.scores != bare.scores


@pytest.mark.parametrize(
    "asked, error, said",
    [
        ({}, ValueError, "users, histories: .* one of the two, got neither"),
        ({"users": [], "histories": []}, ValueError, "got both"),
        ({"users": ["al"], "k": 0}, ValueError, "k: expected at least 1"),
        ({"users": [1]}, TypeError, "users: expected str like .* got 1 at"),
        ({"users": "al"}, TypeError, "users: expected a list of labels"),
        ({"users": [None]}, TypeError, "got None at position 0"),
        ({"histories": ["i1"]}, TypeError, "labels in place 0, got 'i1'"),
        ({"histories": [["i1"], {"i1"}]}, TypeError, "in place 1, got {'i1'}"),
        ({"histories": [7]}, TypeError, "in place 0, got 7"),
        ({"histories": [[7]]}, TypeError, "items: expected str like"),
        ({"users": ["al"], "unknown": "no"}, ValueError, "unknown: expected"),
        (
            {"users": ["al", "zoe"], "unknown": "error"},
            ValueError,
            "users: expected those of the frame, got 'zoe'; unknown=",
        ),
        (
            {"histories": [["i1"], ["i2", "?"]], "unknown": "error"},
            ValueError,
            r"items of the catalogue, got '\?' in place 1",
        ),
        (
            {"histories": [["i1"], []], "unknown": "error"},
            ValueError,
            "histories: expected an item, got none in place 1",
        ),
        ({"users": ["al"], "times": [[1]]}, ValueError, "None for users"),
        (
            {"histories": [["i1"]], "times": [[1]]},
            ValueError,
            "times: expected None, since the model does not read them",
        ),
    ],
)
def test_what_cannot_be_answered_is_named(asked, error, said):
    with pytest.raises(error, match=said):
        make().recommend(**asked)


@pytest.mark.parametrize(
    "times, said",
    [
        (None, "since the model was trained with them, got None"),
        ([[1.0, 2.0]], "expected seconds for 2 histories, got 1"),
        ([[1.0, 2.0], [1.0, 2.0]], "1 for the items of history 1, got 2"),
        ([[2.0, 1.0], [1.0]], "times: user 0, position 1: .* in order"),
        ([[0.0, 1.0], [np.nan]], "times: user 1, position 0: .* finite"),
    ],
)
def test_times_that_do_not_fit_are_named(times, said):
    with pytest.raises(ValueError, match=said):
        make(model="hstu").recommend(
            histories=[["i1", "i2"], ["i3"]], times=times
        )


def test_hstu_without_times_wants_none():
    service = make(time=None, model="hstu")
    assert service.recommend(["al"])[0].source == "model"
    assert service.recommend(histories=[["i1"]])[0].source == "model"
    with pytest.raises(ValueError, match="times: expected None, since"):
        service.recommend(histories=[["i1"]], times=[[1.0]])


def test_nobody_and_many_are_answered(monkeypatch):
    service = make()
    assert service.recommend([]) == service.recommend(histories=[]) == []
    asked = ["al", "zoe", "bo", "cy", "al"]
    whole = service.recommend(asked)
    monkeypatch.setattr("bft_ref.recsys.recommend.CHUNK", 2)
    for one, other in zip(service.recommend(asked), whole, strict=True):
        assert one.items == other.items and one.user == other.user
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-5)


def test_parts_that_do_not_fit_are_refused():
    service = make()
    items, users = service.catalogue.items, service.catalogue.users
    for catalogue, said in [
        (Catalogue(items[1:], users), "the same number of items"),
        (Catalogue(items, users[1:]), "catalogue: expected 3 users"),
    ]:
        with pytest.raises(ValueError, match=said):
            replace(service, catalogue=catalogue)


def test_answers_become_a_frame():
    answers = make().recommend(["bo", "zoe"], k=2)
    for kind in (pd.DataFrame, pl.DataFrame):
        frame = kind(as_columns(answers))
        assert frame["asked"].to_list() == [0, 0, 1, 1]
        assert frame["user"].to_list() == ["bo", "bo", "zoe", "zoe"]
        assert frame["rank"].to_list() == [1, 2, 1, 2]
        assert frame["item"].to_list() == [
            *answers[0].items,
            *answers[1].items,
        ]
        assert frame["score"].to_list()[2:] == [4.0, 1.0]
        assert frame["source"].to_list()[1:3] == ["model", "popularity"]


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_a_service_is_kept_in_one_file(variant, tmp_path):
    service, path = make(**variant), tmp_path / "shop.safetensors"
    service.save(path)
    found = Service.load(path)
    asked = ["al", "zoe", "cy"]
    assert found.recommend(asked) == service.recommend(asked)
    assert found.catalogue == service.catalogue
    assert found.validation == {"NDCG@10": 0.5}
    assert found.histories.labels == service.histories.labels
    model = storage.load(path)
    items = torch.tensor([[3, 7, 1]])
    assert torch.equal(model.scores(items), service.model.scores(items))
    storage.save(model, path)
    with pytest.raises(ValueError, match=r"Service\.save, .* a model alone"):
        Service.load(path)


def test_names_of_any_kind_are_kept(tmp_path):
    service = make(time=None)
    names = Catalogue((2**70, -1, 0, *range(5, 14)), ("é", "7", '"'))
    service = replace(service, catalogue=names)
    service.save(tmp_path / "a")
    found = Service.load(tmp_path / "a")
    assert found.catalogue == names
    assert all(type(x) is int for x in found.catalogue.items)
    assert found.histories.times is None


def test_a_service_is_fitted_on_a_frame():
    """It ranks what follows in a simulated shop better than chance."""
    shop = simulate(150, 30, seed=3).sequences
    rows = [
        (1000 + u, f"item {i}", t)
        for u, own in enumerate(shop)
        for t, i in enumerate(own)
    ]
    frame = pl.DataFrame(
        rows, schema=["customer", "product", "at"], orient="row"
    )
    service = Service.fit(
        frame,
        train=TrainConfig(epochs=2, seed=1),
        user="customer",
        item="product",
        time="at",
        progress=False,
        d_model=16,
        dropout=0.0,
        bft=BFTConfig(granularity="token"),
    )
    assert service.model.config.bft == BFTConfig(granularity="token")
    assert set(service.validation) == {"HR@10", "NDCG@10"}
    (one,) = service.recommend(np.array([1003]), k=5)
    assert len(one.items) == 5 and one.source == "model"
    assert not {f"item {i}" for i in shop[3]} & set(one.items)
    with pytest.raises(ValueError, match="model: expected one of sasrec"):
        Service.fit(frame, "gru4rec")
    with pytest.raises(TypeError, match="colour"):
        Service.fit(
            frame,
            user="customer",
            item="product",
            time="at",
            colour="red",
        )
