"""The best items: those of a plain loop, and of equal ones the same."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bft_ref.recsys.models import as_batch, build, top_items
from tests.factories import label, randomise
from tests.unit.recsys.configs import make_config

INF = float("inf")


def by_loop(scores, k, excluded):
    """Sort (−score, id) of what is allowed; pad."""
    rows = []
    for row, out in zip(scores, excluded, strict=True):
        allowed = [i for i in range(1, len(row)) if i not in out]
        best = sorted(allowed, key=lambda i, row=row: (-row[i], i))[:k]
        best = [(i, row[i]) for i in best if row[i] > -INF]
        rows.append(best + [(0, -INF)] * (k - len(best)))
    return rows


@given(st.data())
def test_the_best_items_are_those_of_a_loop(data):
    """With many ties, everything excluded, k beyond the catalogue."""
    n = data.draw(st.integers(1, 7))
    scores = st.lists(
        st.sampled_from([-INF, -1.0, 0.0, 0.5]), min_size=n + 1, max_size=n + 1
    )
    rows = data.draw(st.lists(scores, min_size=1, max_size=4))
    seen = st.lists(st.integers(0, n), min_size=3, max_size=3)
    out = data.draw(st.lists(seen, min_size=len(rows), max_size=len(rows)))
    k = data.draw(st.integers(1, 10))
    found = top_items(torch.tensor(rows), k, torch.tensor(out))
    assert found.items.shape == found.scores.shape == (len(rows), k)
    pairs = [
        list(zip(*row, strict=True))
        for row in zip(*(x.tolist() for x in found), strict=True)
    ]
    assert pairs == by_loop(rows, k, out)


def test_what_is_given_stays_as_it_is():
    scores = torch.tensor([[5.0, 1.0, 2.0]])
    found = top_items(scores, 1, torch.tensor([[2]], dtype=torch.int32))
    assert found.items.tolist() == [[1]]
    assert scores.tolist() == [[5.0, 1.0, 2.0]]


def test_no_rows_have_no_items():
    assert top_items(torch.zeros(0, 4), 2).items.shape == (0, 2)


@pytest.mark.parametrize(
    "scores, k, excluded, error, said",
    [
        ([[0.0, 1]], 0, None, ValueError, "k: expected at least 1, got 0"),
        ([[0.0, 1]], 1.0, None, TypeError, "k: expected a whole number"),
        ([[0, 1]], 1, None, TypeError, "scores: expected a floating dtype"),
        ([0.0, 1], 1, None, ValueError, "scores: expected shape"),
        ([[0, 1.0], [0, np.nan]], 1, None, ValueError, "or inf in row 1"),
        ([[0, INF]], 1, None, ValueError, "NaN or inf in row 0"),
        ([[0.0, 1]], 1, [[2]], ValueError, "0…1, got 2 in row 0 at pos.* 0"),
        ([[0.0, 1]], 1, [[0, -1]], ValueError, "got -1 in row 0 at pos.* 1"),
        ([[0.0, 1]], 1, [[0.0]], TypeError, "excluded: expected ids"),
        ([[0.0, 1]], 1, [[1], [1]], ValueError, "excluded: expected shape"),
    ],
)
def test_what_has_no_best_items_is_named(scores, k, excluded, error, said):
    excluded = None if excluded is None else torch.tensor(excluded)
    with pytest.raises(error, match=said):
        top_items(torch.tensor(scores), k, excluded)


MODELS = [{}, {"model": "bert4rec"}, {"model": "hstu"}]
HISTORIES = [[3, 9, 4], [1], [12, 2, 2, 7]]


def make(variant):
    torch.manual_seed(0)
    config = make_config(
        n_items=12, d_model=8, dim_feedforward=12, max_length=5, **variant
    )
    return randomise(build(config)).eval()


@pytest.mark.parametrize("variant", MODELS, ids=label)
def test_a_model_recommends_what_it_scores_best(variant):
    model, items = make(variant), as_batch(HISTORIES, 5)
    times = torch.arange(4.0).expand(3, 4) * 1e5
    scores = model.scores(items, times)
    for given_, out in ({}, HISTORIES), ({"exclude_seen": False}, [[]] * 3):
        found = model.recommend(items, 4, times=times, **given_)
        want = by_loop(scores.tolist(), 4, out)
        assert found.items.tolist() == [[i for i, _ in row] for row in want]
        assert torch.equal(found.scores, scores.gather(1, found.items))
    assert model.recommend(items).items.shape == (3, 10)


def test_what_was_seen_is_not_given_silently():
    """Nine of twelve are left; the rest is padding."""
    found = make({}).recommend(as_batch(HISTORIES[:1], 5), 12)
    assert found.items[0, 9:].tolist() == [0] * 3
    assert (found.scores[0, 9:] == -INF).all()
    assert sorted(found.items[0, :9].tolist()) == sorted(
        set(range(1, 13)) - {3, 9, 4}
    )


def test_recommending_refuses_what_scoring_does():
    model, items = make({"dropout": 0.5}), as_batch(HISTORIES, 5)
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        model.train().recommend(items)
    with pytest.raises(ValueError, match="at least one item in a row"):
        model.eval().recommend(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(TypeError, match="items: expected a tensor"):
        model.recommend(HISTORIES)
    with pytest.raises(ValueError, match="k: expected at least 1"):
        model.recommend(items, 0)
