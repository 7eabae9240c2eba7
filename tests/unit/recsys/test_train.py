"""Losses, batches, training and resuming."""

import json
import math
import re
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bft_ref.config import BFTConfig
from bft_ref.recsys.data import DataError, Sequences, simulate
from bft_ref.recsys.metrics import Ranking
from bft_ref.recsys.models import HSTUFilter, build
from bft_ref.recsys.train import (
    RunError,
    TrainConfig,
    diagnose,
    diagnostics,
    evaluate,
    fit,
    interventions,
    next_item_loss,
    trainer,
    training_batches,
)
from bft_ref.recsys.train.batches import count_batches, pad_windows, windows
from bft_ref.recsys.train.losses import noise_penalty, uniform_negatives
from bft_ref.training import provenance
from tests.unit.recsys.configs import make_config

ROOT = Path(__file__).resolve().parents[3]
TINY = {
    "d_model": 8,
    "dim_feedforward": 16,
    "nhead": 2,
    "max_length": 6,
    "dropout": 0.2,
}
N = 20


@pytest.fixture(scope="module")
def sequences():
    return simulate(150, 40, length=(4, 9), seed=5).sequences


def questions(n=7, seed=0):
    torch.manual_seed(seed)
    query, keys = torch.randn(n, 4), torch.randn(N + 1, 4)
    return query, torch.randint(1, N + 1, (n,)), keys, torch.randn(N + 1)


def test_full_loss_is_cross_entropy_over_the_items():
    query, target, keys, bias = questions()
    logits = query @ keys.T + bias
    logits[:, 0] = -torch.inf
    expected = F.cross_entropy(logits, target)
    found = next_item_loss(
        query, target, keys, bias, None, n_items=N, kind="full"
    )
    torch.testing.assert_close(found, expected)


def test_sampled_loss_with_every_item_once_is_the_full_one():
    query, target, keys, bias = questions()
    every = torch.arange(1, N + 1)
    found = next_item_loss(
        query, target, keys, bias, every, n_items=N, logq_correction=False
    )
    full = next_item_loss(
        query, target, keys, bias, None, n_items=N, kind="full"
    )
    torch.testing.assert_close(found, full)


def test_correction_makes_the_sum_over_negatives_unbiased():
    query, target, keys, _ = questions(1)
    draw = torch.Generator().manual_seed(0)
    others = [i for i in range(1, N + 1) if i != int(target)]
    truth = (query @ keys[others].T).exp().sum()
    positive = (query * keys[target]).sum(-1)
    sums = []
    for _ in range(3000):
        # from the other items only: an own target would be left out
        index = torch.randint(len(others), (4,), generator=draw)
        negatives = torch.tensor(others)[index]
        loss = next_item_loss(query, target, keys, None, negatives, n_items=N)
        sums.append(((loss + positive).exp() - positive.exp()).item())
    se = np.std(sums) / math.sqrt(len(sums))
    assert np.mean(sums) == pytest.approx(float(truth), abs=4 * se)


def test_bce_and_gbce_by_their_definitions():
    query, target, keys, bias = questions()
    negatives = torch.tensor([3, 9, 9, int(target[0])])
    total = {"bce": 0.0, "gbce": 0.0}
    rate = 4 / (N - 1)
    beta = rate * (0.75 * (1 - 1 / rate) + 1 / rate)
    for q, t in zip(query, target, strict=True):
        right = torch.sigmoid(q @ keys[t] + bias[t]).log()
        wrong = sum(
            (1 - torch.sigmoid(q @ keys[i] + bias[i])).log()
            for i in negatives
            if i != t
        )
        total["bce"] -= (right + wrong) / 5 / len(query)
        total["gbce"] -= (beta * right + wrong) / 5 / len(query)
    for kind, expected in total.items():
        found = next_item_loss(
            query, target, keys, bias, negatives, n_items=N, kind=kind
        )
        torch.testing.assert_close(found, expected)


def test_gbce_never_scales_the_positive_up():
    """More negatives than items: the rate counts as one, which is bce."""
    query, target, keys, bias = questions()
    negatives = torch.arange(1, N + 1).repeat(3)
    given = (query, target, keys, bias, negatives)
    bce, gbce = (
        next_item_loss(*given, n_items=N, kind=kind)
        for kind in ("bce", "gbce")
    )
    torch.testing.assert_close(gbce, bce)


def test_gbce_goes_from_bce_to_a_positive_that_counts_by_the_rate():
    query, target, keys, bias = questions()
    negatives = torch.arange(1, 6)
    given = (query, target, keys, bias, negatives)
    at = [
        next_item_loss(*given, n_items=N, kind="gbce", gbce_t=t)
        for t in (0.0, 1.0)
    ]
    bce = next_item_loss(*given, n_items=N, kind="bce")
    score = (query * keys[target]).sum(1) + bias[target]
    spared = (1 - 5 / (N - 1)) * F.softplus(-score).mean() / 6
    torch.testing.assert_close(at[0], bce)
    torch.testing.assert_close(at[1], bce - spared)


def test_negatives_are_drawn_evenly_from_all_items_and_no_padding():
    draw = torch.Generator().manual_seed(3)
    found = uniform_negatives(40_000, N, draw).bincount(minlength=N + 1)
    assert len(found) == N + 1 and found[0] == 0
    # five standard deviations of a binomial count
    assert (found[1:] - 2000).abs().max() < 5 * (2000 * (1 - 1 / N)) ** 0.5
    assert not torch.equal(
        uniform_negatives(50, N, draw), uniform_negatives(50, N, draw)
    )


def test_losses_name_the_bad_argument():
    given = questions()
    with pytest.raises(ValueError, match="negatives"):
        next_item_loss(*given, None, n_items=N)
    with pytest.raises(ValueError, match="loss"):
        next_item_loss(*given, None, n_items=N, kind="hinge")
    draw = torch.Generator()
    for count, n_items in [(0, N), (3, 0)]:
        with pytest.raises(ValueError, match="expected at least 1"):
            uniform_negatives(count, n_items, draw)


@pytest.mark.parametrize("loss", ["sampled", "full", "bce", "gbce"])
@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_a_catalogue_of_one_item_is_trained_on_and_ranked(model, loss):
    data = Sequences.of([[1, 1, 1, 1], [1, 1, 1]] * 3)
    for given in ({}, {"bft": BFTConfig(), "tau": "frequency"}):
        given = {"model": model, **given}
        result = run(data, model=given, loss=loss, evaluate_test=True).result
        assert result["test"]["NDCG@10"] == 1
        losses = [record["loss"] for record in result["history"]]
        if loss in ("sampled", "full"):  # what is certain costs nothing
            assert losses == [0, 0, 0]
        else:
            assert losses[-1] < losses[0]


@pytest.mark.parametrize("model", [{}, {"bft": BFTConfig()}])
def test_a_trained_model_is_ready_to_score(sequences, model):
    net = run(sequences, model=model, epochs=1).model
    items = torch.tensor([[3, 4, 5]])
    assert not any(module.training for module in net.modules())
    assert torch.equal(net.scores(items), net.scores(items))


def test_a_run_is_the_same_twice_whatever_was_drawn_before(sequences):
    runs, states = [], []
    for state in (1, 2):
        torch.manual_seed(state)
        np.random.seed(state)  # noqa: NPY002
        runs.append(run(sequences, model={"bft": BFTConfig()}, epochs=2))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)  # fit sets PyTorch's own seed
    first, second = runs
    for x, y in zip(
        first.model.parameters(), second.model.parameters(), strict=True
    ):
        assert torch.equal(x, y)
    assert clockless(first.result["history"]) == clockless(
        second.result["history"]
    )
    other = run(sequences, model={"bft": BFTConfig()}, epochs=2, seed=1)
    assert clockless(other.result["history"]) != clockless(
        first.result["history"]
    )


def test_another_number_of_threads_changes_rounding_at_most(sequences):
    net = run(sequences, model={"bft": BFTConfig()}, epochs=1).model
    items = torch.randint(1, 41, (64, 6))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(net.scores(items))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def wrong(error, said, **changed):
    return pytest.param(changed, error, said, id=said)


@pytest.mark.parametrize("kind", ["full", "sampled", "bce", "gbce"])
@pytest.mark.parametrize(
    "changed, error, said",
    [
        wrong(ValueError, "target: .*got 0", target=torch.tensor([0, 1])),
        wrong(ValueError, "target: .*got -99", target=torch.tensor([-99, 1])),
        wrong(ValueError, "target: .*21", target=torch.tensor([1, N + 1])),
        wrong(TypeError, "target: .*float", target=torch.tensor([1.0, 2.0])),
        wrong(TypeError, "target: .*bool", target=torch.tensor([True] * 2)),
        wrong(ValueError, "target: .*shape", target=torch.tensor([[1], [2]])),
        wrong(ValueError, "target: .*one", query=torch.ones(0, 4),
              target=torch.ones(0).long()),
        wrong(ValueError, "item_embeddings: .*21 rows",
              item_embeddings=torch.ones(N, 4)),
        wrong(ValueError, "item_embeddings: .*shape",
              item_embeddings=torch.ones(N + 2, 3)),
        wrong(ValueError, "bias: .*21 rows", bias=torch.ones(N)),
        wrong(ValueError, "bias: .*shape", bias=torch.ones(N + 1, 1)),
        wrong(ValueError, "n_items: ", n_items=0),
    ],
)  # fmt: skip
def test_losses_refuse_what_is_nearly_right(kind, changed, error, said):
    given = {
        "query": torch.ones(2, 4),
        "target": torch.tensor([3, N]),
        # one row more, as BERT4Rec's, which must not count as an item
        "item_embeddings": torch.ones(N + 2, 4),
        "bias": torch.ones(N + 2),
        "negatives": torch.tensor([1, 2, 3]),
        "n_items": N,
    }
    next_item_loss(**given, kind=kind)
    with pytest.raises(error, match=said):
        next_item_loss(**given | changed, kind=kind)


@pytest.mark.parametrize(
    "negatives, error",
    [
        (torch.tensor([1, N + 1]), ValueError),
        (torch.tensor([0, 1]), ValueError),
        (torch.tensor([[1], [2]]), ValueError),
        (torch.tensor([1.0, 2.0]), TypeError),
    ],
)
def test_negatives_are_items(negatives, error):
    query, target, keys, bias = questions()
    keys, bias = torch.cat([keys, keys]), torch.cat([bias, bias])
    with pytest.raises(error, match="negatives: expected"):
        next_item_loss(query, target, keys, bias, negatives, n_items=N)
    with pytest.raises(ValueError, match="gbce_t"):
        next_item_loss(
            query, target, keys, bias, target, n_items=N, gbce_t=1.5
        )


@pytest.mark.parametrize("correct", [False, True])
def test_a_single_item_is_chosen_for_certain(correct):
    query, keys = torch.randn(3, 4).requires_grad_(), torch.randn(2, 4)
    only = torch.ones(3, dtype=torch.int64)
    given = (query, only, keys, torch.randn(2), only)
    loss = next_item_loss(*given, n_items=1, logq_correction=correct)
    full = next_item_loss(*given, n_items=1, kind="full")
    assert loss == full == 0
    (slope,) = torch.autograd.grad(loss, query)
    assert (slope == 0).all()
    bce, gbce = (
        next_item_loss(*given, n_items=1, kind=kind)
        for kind in ("bce", "gbce")
    )
    score = query @ keys[1] + given[3][1]
    torch.testing.assert_close(bce, F.softplus(-score).mean() / 4)
    torch.testing.assert_close(gbce, bce)


def epoch(sequences, seed=0, **given):
    given = {"max_length": 6, "batch_size": 16} | given
    rng = np.random.default_rng(seed)
    return list(training_batches(sequences, rng=rng, **given))


@pytest.mark.parametrize(
    "given, name",
    [
        ({"max_length": 0}, "max_length"),
        ({"max_length": -1, "every_window": True}, "max_length"),
        ({"max_length": 2.5}, "max_length"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"mask_rate": 1.5, "mask_id": 41}, "mask_rate"),
        ({"mask_rate": math.nan, "mask_id": 41}, "mask_rate"),
        ({"last_rate": -0.1, "mask_id": 41}, "last_rate"),
        ({"mask_id": 40}, "mask_id"),
        ({"mask_id": 0}, "mask_id"),
    ],
)
def test_batches_name_the_bad_argument_before_the_first(
    sequences, given, name
):
    given = {
        "max_length": 6,
        "batch_size": 16,
        "rng": np.random.default_rng(0),
    } | given
    with pytest.raises((ValueError, TypeError), match=f"{name}: expected"):
        training_batches(sequences, **given)


def test_an_epoch_without_a_question_is_refused(sequences):
    with pytest.raises(DataError, match="no user has two items"):
        epoch(Sequences.of([[1], [2]]))
    # three items each: the split leaves one to train on
    three = Sequences.of([row[:3] for row in sequences], n_items=40)
    with pytest.raises(DataError, match="no user has two items"):
        run(three, epochs=1)


@pytest.mark.parametrize(
    "users, end, error, said",
    [
        ([0], [4], ValueError, "end: expected 0…3 for user 0, got 4"),
        ([0], [-1], ValueError, "end: expected 0…3 for user 0, got -1"),
        ([0, 1], [3], ValueError, "end: expected one a user, 2, got 1"),
        ([True, False], [3, 2], TypeError, "users: .*flatnonzero"),
        ([0.5], [2], ValueError, "users: expected whole"),
        ([0], [1.5], ValueError, "end: expected whole"),
        ([2], [1], IndexError, "index 2 is out of bounds"),
    ],
)
def test_no_items_are_gathered_from_the_next_user(users, end, error, said):
    two = Sequences.of([[4, 5, 6], [7, 8]])
    with pytest.raises(error, match=said):
        pad_windows(two, np.array(users), np.array(end), 2)
    assert pad_windows(two, [-1, 0], [2, 3], 2)[0].tolist() == [[7, 8], [5, 6]]
    with pytest.raises(ValueError, match="max_length: expected at least 1"):
        pad_windows(two, [0], [1], 0)
    with pytest.raises(ValueError, match="length: expected at least 1"):
        windows(two.lengths, -1, True)


@pytest.mark.parametrize("size", [1, 7, 150, 1000])
@pytest.mark.parametrize("every", [False, True])
def test_batches_are_counted_before_they_are_made(sequences, size, every):
    found = epoch(sequences, batch_size=size, every_window=every)
    assert count_batches(sequences, 6, size, every) == len(found)
    with pytest.raises(ValueError, match="^batch_size: expected at least 1"):
        count_batches(sequences, 6, 0)


def test_causal_batches_ask_for_each_next_item_once(sequences):
    rows = {}
    for batch in epoch(sequences):
        assert batch.items.shape == batch.target.shape
        for items, target in zip(batch.items, batch.target, strict=True):
            n = int((target > 0).sum())
            assert (target[n:] == 0).all() and (items[n:] == 0).all()
            assert items[1:n].tolist() == target[: n - 1].tolist()
            whole = (int(items[0]), *target[:n].tolist())
            rows[whole] = rows.get(whole, 0) + 1
    expected = {}
    for u in range(len(sequences)):
        whole = tuple(sequences[u][-7:].tolist())
        expected[whole] = expected.get(whole, 0) + 1
    assert rows == expected


@pytest.mark.parametrize("mask_id", [None, 41])
def test_sequences_of_a_batch_are_alike_in_length(sequences, mask_id):
    spans = []
    for batch in epoch(sequences, mask_id=mask_id):
        own = (batch.items > 0).sum(1) + (mask_id is None)
        lengths = own.clamp(max=6)  # longer ones are cut to about that
        spans.append((int(lengths.min()), int(lengths.max())))
    assert len({low for low, _ in spans}) > 2
    assert sorted(spans) != spans
    for (_, high), (low, _) in pairwise(sorted(spans)):
        assert high <= low


def test_every_window_asks_for_every_item():
    sequences = Sequences.of([list(range(1, 24)), [3, 4], [5]])
    asked = np.concatenate(
        [b.target[b.target > 0] for b in epoch(sequences, every_window=True)]
    )
    assert sorted(asked.tolist()) == sorted([*range(2, 24), 4])


def test_cloze_hides_what_it_asks(sequences):
    masks, alone, rows = 0, 0, 0
    for batch in epoch(
        sequences, mask_id=41, mask_rate=0.3, last_rate=0.25, batch_size=64
    ):
        hidden = batch.items == 41
        assert torch.equal(hidden, batch.target > 0)
        assert hidden.any(1).all()
        n = (batch.items > 0).sum(1)
        last = hidden[torch.arange(len(n)), n - 1] & (hidden.sum(1) == 1)
        alone += int(last.sum())
        masks += int(hidden.sum())
        rows += len(n)
    assert rows == len(sequences)
    assert 0.25 * rows < alone < 0.6 * rows
    assert masks > rows


def test_cloze_asks_for_the_items_it_hides(sequences):
    found = []
    for batch in epoch(sequences, mask_id=41):
        whole = torch.where(batch.items == 41, batch.target, batch.items)
        found += [tuple(row[row > 0].tolist()) for row in whole]
    expected = [
        tuple(sequences[u][-6:].tolist()) for u in range(len(sequences))
    ]
    assert sorted(found) == sorted(expected)


def test_a_sequence_without_a_mask_gets_one_anywhere(sequences):
    places = []
    for batch in epoch(sequences, mask_id=41, mask_rate=0.0, last_rate=0.0):
        hidden = batch.target > 0
        assert (hidden.sum(1) == 1).all()
        places += hidden.float().argmax(1)[batch.items[:, -1] > 0].tolist()
    assert set(places) == set(range(6))


EPOCH = 1.6e9  # seconds, where float32 counts in steps of 128


def seconds(items):
    """A time of each item, from which its differences can be told."""
    return 7 * np.asarray(items) ** 2


def dated(rows, start=EPOCH):
    found = Sequences.of(rows)
    return replace(found, times=start + seconds(found.items))


ROWS = [list(range(u + 1, u + 4 + u % 7)) for u in range(40)]


@pytest.mark.parametrize("mask_id", [None, 99])
@pytest.mark.parametrize("every_window", [False, True])
def test_times_are_those_of_the_items_since_the_first(mask_id, every_window):
    batches = epoch(dated(ROWS), mask_id=mask_id, every_window=every_window)
    for batch in batches:
        batch = batch.to("cpu").share(1, 2)
        assert batch.times.shape == batch.items.shape
        hidden = batch.items == 99
        items = torch.where(hidden, batch.target, batch.items).numpy()
        since = seconds(items) - seconds(items[:, :1])
        assert batch.times[items > 0].tolist() == since[items > 0].tolist()


def test_times_of_a_history_are_those_of_its_items():
    split = dated(ROWS).split()
    part = np.array([30, 2, 17])
    items, times = diagnostics.histories(
        SimpleNamespace(config=SimpleNamespace(max_length=4)),
        split,
        part,
        torch.device("cpu"),
    )
    for row, when, user in zip(items, times, part, strict=True):
        kept = row[row > 0].tolist()
        assert kept == ROWS[user][:-2][-4:]
        since = seconds(kept) - seconds(kept[0])
        assert when[: len(kept)].tolist() == since.tolist()


def test_a_sequence_without_times_has_none():
    given = (np.array([0]), np.array([3]), 2)
    items, times, n = pad_windows(Sequences.of([[4, 5, 6]]), *given)
    assert (items.tolist(), times, n.tolist()) == ([[5, 6]], None, [2])


def test_batches_follow_the_seed(sequences):
    first, again, other = (epoch(sequences, s) for s in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.items, b.items)
    assert any(
        a.items.shape != b.items.shape or not torch.equal(a.items, b.items)
        for a, b in zip(first, other, strict=True)
    )


def run(sequences, *, model=None, evaluate_test=False, **given):
    model = make_config(n_items=sequences.n_items, **(TINY | (model or {})))
    config = TrainConfig(**({"epochs": 3, "num_negatives": 16} | given))
    return fit(
        sequences, model, config, progress=False, evaluate_test=evaluate_test
    )


@pytest.mark.parametrize("loss", ["sampled", "full", "bce", "gbce"])
@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_training_lowers_the_loss(sequences, model, loss):
    given = {"model": model, "dropout": 0.0}
    history = run(
        sequences, model=given, loss=loss, epochs=10, lr=1e-2, batch_size=32
    ).result["history"]
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]


def clockless(history):
    return [
        {k: v for k, v in record.items() if "seconds" not in k}
        for record in history
    ]


def test_hstu_trains_on_times_and_on_their_differences_only():
    def trained(sequences):
        result = run(sequences, model={"model": "hstu"}, epochs=2).result
        return clockless(result["history"]), result["validation"]

    found = trained(dated(ROWS))
    assert found == trained(dated(ROWS, start=0.0))
    assert found[0][0]["loss"] != trained(Sequences.of(ROWS))[0][0]["loss"]


@pytest.mark.parametrize(
    "given",
    [
        {"loss": "full"},
        {"loss": "bce"},
        {"loss": "sampled", "logq_correction": False},
        {"loss": "sampled", "logq_correction": True},
        {"loss": "gbce", "gbce_t": 0.2},
    ],
)
def test_the_trainer_asks_for_the_loss_of_its_configuration(sequences, given):
    torch.manual_seed(0)
    net = build(make_config(n_items=40, **TINY)).eval()
    batch, negatives = epoch(sequences)[0], torch.arange(1, 8)
    found, _ = trainer._Loss(net)(batch, negatives, TrainConfig(**given))
    asked = batch.target > 0
    options = {k: v for k, v in given.items() if k != "loss"}
    expected = next_item_loss(
        net(batch.items)[asked],
        batch.target[asked],
        net.items.weight,
        None,
        negatives,
        n_items=40,
        kind=given["loss"],
        **options,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_trainer_asks_for_the_batches_of_its_configuration(monkeypatch):
    sequences, seen = Sequences.of([[1, 2, 3, 4], [5, 6]] * 20), []

    def spy(own, **given):
        seen.append((own, given))
        return training_batches(own, **given)

    monkeypatch.setattr(trainer, "training_batches", spy)
    rates = {"mask_rate": 0.4, "last_rate": 0.2}
    model, chosen = {"model": "bert4rec", **rates}, {"every_window": True}
    run(sequences, model=model, epochs=1, batch_size=33, **chosen)
    run(sequences, model={"model": "sasrec"}, epochs=1)
    (own, cloze), (_, causal) = seen
    assert own[0].tolist() == [1, 2]
    assert own[1].tolist() == [5, 6]  # too short to be asked
    for given in (cloze, causal):
        given.pop("rng")
    shape = {"max_length": 6, "batch_size": 33, "mask_id": 7}
    assert cloze == shape | rates | chosen
    assert "mask_id" not in causal and causal["batch_size"] == 128


@pytest.fixture
def adam(monkeypatch):
    """Every optimiser made, and the norm of each step's gradient."""
    made = []

    class Spy(torch.optim.Adam):
        def __init__(self, groups, **given):
            super().__init__(groups, **given)
            self.norms = []
            made.append(self)

        def step(self):
            parts = [p.grad for g in self.param_groups for p in g["params"]]
            flat = torch.cat([x.flatten() for x in parts if x is not None])
            self.norms.append(float(flat.norm()))
            super().step()

    monkeypatch.setattr(torch.optim, "Adam", Spy)
    return made


def test_the_optimiser_has_the_rates_of_its_configuration(sequences, adam):
    rates = {"lr": 2e-3, "precision_lr": 5e-2, "weight_decay": 0.1}
    fitted = run(sequences, model={"bft": BFTConfig()}, epochs=1, **rates)
    (made,) = adam
    of = {
        id(p): (group["lr"], group["weight_decay"])
        for group in made.param_groups
        for p in group["params"]
    }
    for name, p in fitted.model.named_parameters():
        precision = name.startswith("tau.") or "process_noise" in name
        assert of.pop(id(p)) == (5e-2 if precision else 2e-3, 0.1), name
    assert not of


def test_clip_bounds_the_gradient_of_a_step(sequences, adam):
    for clip in (0.0, 0.01):
        run(sequences, epochs=2, clip=clip, batch_size=64)
    free, clipped = (made.norms for made in adam)
    assert min(free) > 0.02
    assert len(clipped) == len(free)
    assert clipped == pytest.approx([0.01] * len(free), rel=1e-3)


def test_the_prior_on_noise_is_a_loop_over_its_definition():
    net = build(make_config(n_items=40, bft=BFTConfig(), **TINY))
    expected = 0.0
    for layer in net.encoder.layers:
        torch.nn.init.normal_(layer.log_process_noise)
        for log_q in layer.log_process_noise.double().tolist():
            density = -((log_q - math.log(0.3)) ** 2) / (2 * 0.7**2)
            expected -= density
    assert noise_penalty(net, 0.3, 0.7).item() == pytest.approx(expected)
    plain = build(make_config(n_items=40, **TINY))
    for given in [(plain, 0.3, 0.7), (net, 0.0, 0.7), (net, 0.3, -1.0)]:
        with pytest.raises(ValueError, match="^(model|start|sd): expected"):
            noise_penalty(*given)


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
@pytest.mark.parametrize("every_window", [False, True])
def test_the_prior_counts_once_beside_the_losses_of_an_epoch(
    sequences, model, every_window, monkeypatch
):
    """Of a prior with slope 1 each step has 1/B, as the mean of n has 1/n."""
    asked, slopes = [], []

    def nothing(query, target, *_, **__):
        asked.append(len(target))
        return 0.0 * query.sum()

    class Spy(torch.optim.Adam):
        def step(self):
            slopes.append(float(self.param_groups[1]["params"][0].grad.sum()))

    def slope_one(net, start, sd):
        assert (start, sd) == (0.4, 0.5)
        return net.get_parameter("log_process_noise").mean()

    monkeypatch.setattr(trainer, "next_item_loss", nothing)
    monkeypatch.setattr(trainer, "noise_penalty", slope_one)
    monkeypatch.setattr(torch.optim, "Adam", Spy)
    monkeypatch.setattr(
        trainer.Recommender,
        "parameter_groups",
        lambda net, lr, precision_lr: [
            {"params": [net.items.weight]},
            {"params": [net.log_process_noise]},
        ],
    )
    built = trainer.build

    def with_one(*given):
        net = built(*given)
        net.log_process_noise = torch.nn.Parameter(torch.zeros(3))
        return net

    monkeypatch.setattr(trainer, "build", with_one)
    filters = {"hstu": HSTUFilter(process_noise=0.4)}
    bft = filters.get(model, BFTConfig(process_noise=0.4))
    run(
        sequences,
        model={"model": model, "bft": bft},
        epochs=1,
        batch_size=37,
        every_window=every_window,
        noise_prior_sd=0.5,
    )
    assert len(asked) == len(slopes) > 2
    shares = [n * slope for n, slope in zip(asked, slopes, strict=True)]
    assert shares == pytest.approx([1 / len(asked)] * len(asked))


def test_a_narrow_prior_holds_the_noise_where_it_was(sequences):
    bft = BFTConfig(process_noise=0.4)
    found = {}
    for sd in (0.0, 1e6, 1e-3):
        fitted = run(
            sequences,
            model={"bft": bft},
            epochs=3,
            batch_size=8,
            noise_prior_sd=sd,
        )
        log_q = fitted.model.encoder.layers[0].log_process_noise
        found[sd] = (log_q - math.log(0.4)).abs().max().item()
        history = clockless(fitted.result["history"])
        found[sd, "loss"] = [record["loss"] for record in history]
    assert found[1e-3] < 0.02 < found[0.0]
    assert found[1e6] == pytest.approx(found[0.0], rel=0.01)
    # what is reported is the loss of the questions alone
    assert found[1e-3, "loss"] == pytest.approx(found[0.0, "loss"], rel=0.05)
    with pytest.raises(RunError, match="^noise_prior_sd: expected 0 for a pl"):
        run(sequences, noise_prior_sd=0.5)


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_a_filter_trains_and_shows_its_diagnostics(sequences, model):
    bft = BFTConfig(project_variance=False)
    result = run(sequences, model={"model": model, "bft": bft}).result
    assert result["model"]["bft"]["project_variance"] is False
    for layer in result["diagnostics"]["layers"]:
        assert all(0 < k < 1 for k in layer["gain"] if k is not None)
        assert layer["process_noise_mean"] > 0
    assert len(result["diagnostics"]["tau"]) == 4


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_interventions_change_what_they_name_and_leave_the_model(
    sequences, model
):
    bft = BFTConfig(project_variance=False, process_noise=0.3)
    fitted = run(sequences, model={"model": model, "bft": bft}, epochs=1)
    split, cpu = sequences.split("validation"), torch.device("cpu")
    net = fitted.model.eval()
    items = torch.randint(1, 41, (4, 6))
    before = net(items)

    def seen(change):
        with torch.no_grad(), change:
            return net.steps(items)

    other = net.tau.of_items(net.items.weight).flip(0) + torch.arange(
        net.items.num_embeddings
    ).remainder(3)
    moved = seen(diagnostics._initial_precision(net, other))[0]
    assert not torch.allclose(moved, before)
    gains = [torch.full((net.config.d_model,), k) for k in (0.2, 0.6)]
    _, traces = seen(diagnostics._constant_gains(net, gains))
    for trace, gain in zip(traces, gains, strict=True):
        torch.testing.assert_close(
            trace.gain, gain.expand_as(trace.gain), rtol=1e-5, atol=1e-6
        )
    assert torch.equal(net(items), before)
    found = interventions(net, split, lambda: evaluate(net, split, cpu))
    assert list(found) == [
        "trained",
        "tau equal",
        "tau shuffled",
        "gain constant",
    ]
    trained = fitted.result["validation"]["NDCG@10"]
    assert found["trained"]["NDCG@10"] == trained
    for kept in found.values():
        ranks = Ranking.from_top(kept["top"])
        assert ranks.summary()["NDCG@10"] == kept["NDCG@10"]
    assert torch.equal(net(items), before)


@pytest.mark.parametrize("model", ["sasrec", "bert4rec", "hstu"])
def test_a_process_without_a_question_takes_part(sequences, model):
    """Two processes and one sequence: DDP needs a gradient from both."""
    net = build(make_config(n_items=40, model=model, bft=BFTConfig(), **TINY))
    batch = next(
        training_batches(
            sequences,
            max_length=6,
            batch_size=1,
            rng=np.random.default_rng(0),
            mask_id=getattr(net, "mask_id", None),
        )
    ).share(1, 2)
    assert len(batch.items) == 0
    loss, _ = trainer._Loss(net)(batch, None, TrainConfig())
    loss.backward()
    assert loss == 0
    for p in net.parameters():
        assert (p.grad == 0).all()


def test_a_plain_model_has_no_diagnostics(sequences):
    fitted = run(sequences)
    with pytest.raises(ValueError, match="expected a Bayesian filter"):
        diagnose(
            fitted.model, sequences.split("validation"), torch.device("cpu")
        )


def test_a_trained_model_beats_popularity():
    from bft_ref.recsys import metrics

    simulation = simulate(500, 60, noise=(0.05, 0.5), seed=1)
    data = simulation.sequences
    split = data.split()
    baseline = metrics.evaluate(split, metrics.popularity(split)).summary()
    found = run(
        data,
        model={"d_model": 32, "dim_feedforward": 64, "max_length": 18},
        epochs=15,
        loss="full",
        lr=3e-3,
        batch_size=32,
        evaluate_every=5,
    ).result["validation"]
    assert found["NDCG@10"] > 1.3 * baseline["NDCG@10"]


def test_result_has_its_provenance(sequences):
    fitted = run(sequences, epochs=2)
    result = json.loads(json.dumps(fitted.result))
    assert result["data"]["interactions"] == len(sequences.items)
    assert result["code"]["torch"] == torch.__version__
    assert len(result["code"]["source_sha256"]) == 64
    assert result["training_peak_bytes"] > 1e6
    device = next(fitted.model.parameters()).device
    assert result["device"] == provenance.device_name(device)
    assert result["resumed_with"] == []
    assert result["seed"] == 0 and result["epochs"] == 2
    assert str(ROOT) not in json.dumps(result)
    found = result["validation"]
    again = Ranking.from_top(found["top"])
    for k in (5, 10, 20):
        assert again.summary((k,))[f"NDCG@{k}"] == found[f"NDCG@{k}"]
        assert again.summary((k,))[f"HR@{k}"] == found[f"HR@{k}"]


def test_the_best_epoch_is_kept_and_patience_ends_it(sequences):
    result = run(sequences, epochs=40, patience=2, lr=0.3).result
    values = [r["NDCG@10"] for r in result["history"]]
    best = int(np.argmax(values))
    assert result["best_epoch"] == best + 1
    assert result["validation"]["NDCG@10"] == values[best]
    assert result["stopped_early"] and result["epochs"] == best + 3


@pytest.mark.parametrize("tau", [None, "frequency", "shuffled"])
def test_only_final_looks_at_the_test_items(sequences, tau):
    model = {} if tau is None else {"bft": BFTConfig(), "tau": tau}
    assert "test" not in run(sequences, model=model, epochs=1).result
    last = sequences.offsets[1:] - 1
    changed = sequences.items.copy()
    changed[last] = changed[last] % 40 + 1
    other = Sequences(changed, sequences.offsets, sequences.n_items)
    assert other.frequency.tolist() != sequences.frequency.tolist()
    a, b = (
        run(s, model=model, evaluate_test=True) for s in (sequences, other)
    )
    assert clockless(a.result["history"]) == clockless(b.result["history"])
    assert a.result["validation"] == b.result["validation"]
    assert a.result["test"]["users"] == len(sequences)
    assert a.result["test"] != b.result["test"]


def test_tau_comes_from_the_frequency_in_what_is_trained_on(sequences):
    given = {"bft": BFTConfig(), "tau": "frequency", "tau_power": 0.5}
    count = np.ones(41)
    for u in range(len(sequences)):
        for item in sequences[u][:-2]:
            count[item] += 1
    tau = run(sequences, model=given, epochs=1).model.tau.log_tau.exp()
    expected = (count[1:] / np.exp(np.log(count[1:]).mean())) ** 0.5
    np.testing.assert_allclose(tau[1:], expected, rtol=1e-5)


def test_a_loss_that_is_not_finite_is_an_error(sequences):
    with pytest.raises(ValueError, match="loss.*finite"):
        run(sequences, lr=1e30, epochs=4)


def test_the_last_epoch_is_evaluated(sequences):
    fitted = run(sequences, epochs=3, evaluate_every=2)
    asked = ["NDCG@10" in record for record in fitted.result["history"]]
    assert asked == [False, True, True]
    assert run(sequences, epochs=1, evaluate_every=5).result["best_epoch"] == 1


def test_what_does_not_fit_is_refused(sequences):
    with pytest.raises(ValueError, match="n_items: expected 40"):
        fit(sequences, make_config(n_items=39, **TINY), TrainConfig())
    short = Sequences.of([[1, 2], [3]], name="short")
    with pytest.raises(DataError, match="short: no user has three items"):
        run(short)


@pytest.mark.parametrize(
    "given, reader",
    [
        ({"logq_correction": False, "loss": "full"}, "loss 'full'"),
        ({"logq_correction": False, "loss": "bce"}, "loss 'bce'"),
        ({"logq_correction": False, "loss": "gbce"}, "loss 'gbce'"),
        ({"gbce_t": 0.5, "loss": "sampled"}, "loss 'sampled'"),
        ({"gbce_t": 0.5, "loss": "bce"}, "loss 'bce'"),
    ],
)
def test_an_option_that_no_loss_reads_is_refused(given, reader):
    said = f"^{next(iter(given))}: .* since {reader} does not read it"
    with pytest.raises(ValueError, match=said):
        TrainConfig(**given)


def test_a_resumed_run_says_which_code_went_on(
    sequences, tmp_path, monkeypatch
):
    path = tmp_path / "run.pt"
    model = make_config(n_items=40, **TINY)
    config = TrainConfig(epochs=2, num_negatives=16)

    class Killed(Exception):
        pass

    def kill(record):
        raise Killed

    with pytest.raises(Killed):
        fit(
            sequences,
            model,
            config,
            checkpoint=path,
            progress=False,
            on_epoch=kill,
        )
    first = trainer.code_version()
    other = first | {"source_sha256": "0" * 64}
    monkeypatch.setattr(trainer, "code_version", lambda: other)
    result = fit(
        sequences, model, config, checkpoint=path, progress=False
    ).result
    assert result["code"] == first and result["resumed_with"] == [other]


def test_a_checkpoint_of_another_run_is_refused(sequences, tmp_path):
    model = make_config(n_items=40, **TINY)
    path = tmp_path / "run.pt"
    fit(
        sequences,
        model,
        TrainConfig(epochs=1),
        checkpoint=path,
        progress=False,
    )
    with pytest.raises(ValueError, match="another configuration"):
        fit(
            sequences,
            model,
            TrainConfig(epochs=1, seed=1),
            checkpoint=path,
            progress=False,
        )


def test_the_checksum_of_the_source_is_that_of_its_contents(
    tmp_path, monkeypatch
):
    source = tmp_path / "a" / "part.py"
    source.parent.mkdir()
    start = tmp_path / "__init__.py"
    start.write_text("")
    monkeypatch.setattr(provenance.bft_ref, "__file__", str(start))
    sums = []
    for text in ("x = 1", "x = 2", "x = 1"):
        source.write_text(text)
        sums.append(provenance.code_version()["source_sha256"])
    assert sums[0] == sums[2] != sums[1]
    beside = tmp_path / "notebook" / "part.py"
    beside.parent.mkdir()
    beside.write_text("what only notebooks use is not in the sum")
    assert provenance.code_version()["source_sha256"] == sums[0]
    source.rename(source.with_name("other.py"))
    assert provenance.code_version()["source_sha256"] != sums[0]


@pytest.mark.parametrize(
    "given",
    [
        {"loss": "x"},
        {"epochs": 0},
        {"patience": 0},
        {"evaluate_every": 0},
        {"batch_size": 0},
        {"lr": 0.0},
        {"precision_lr": 0.0},
        {"gbce_t": -0.1},
        {"gbce_t": 1.1},
        {"gbce_t": math.nan},
        {"noise_prior_sd": -1.0},
        {"noise_prior_sd": math.nan},
        {"clip": -1.0},
        {"clip": math.nan},
        {"clip": math.inf},
        {"num_negatives": 0},
        {"lr": math.nan},
        {"lr": math.inf},
        {"precision_lr": math.nan},
        {"weight_decay": -0.1},
        {"weight_decay": math.nan},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_training_configuration_names_the_bad_argument(given):
    with pytest.raises(ValueError, match=f"^{next(iter(given))}: expected"):
        TrainConfig(**given)


@pytest.mark.parametrize(
    "field",
    [each for each in fields(TrainConfig) if each.name != "loss"],
    ids=lambda f: f.name,
)
def test_training_configuration_names_a_field_of_another_type(field):
    others = {int: (3.0, True, "3"), float: ("3", True), bool: (1, "no")}
    for value in (None, [3], *others.get(field.type, (3,))):
        said = f"^{field.name}: expected {field.type.__name__}, got "
        with pytest.raises(TypeError, match=said + re.escape(repr(value))):
            TrainConfig(**{field.name: value})


def test_one_and_one_point_nought_are_one_training_configuration():
    found = TrainConfig(lr=1, epochs=np.int64(3), weight_decay=np.float32(0))
    assert json.dumps(asdict(found)) == json.dumps(
        asdict(TrainConfig(lr=1.0, epochs=3))
    )


@pytest.mark.parametrize("end", [0.0, 1.0])
def test_gbce_is_calibrated_from_none_to_all(sequences, end):
    result = run(sequences, epochs=1, loss="gbce", gbce_t=end).result
    assert result["train"]["gbce_t"] == end


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_training_on_a_gpu(sequences):
    model = make_config(n_items=40, bft=BFTConfig(), **TINY)
    fitted = fit(
        sequences, model, TrainConfig(epochs=2), device="cuda", progress=False
    )
    assert next(fitted.model.parameters()).is_cuda
    assert math.isfinite(fitted.result["history"][-1]["loss"])
