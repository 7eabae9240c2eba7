"""Histories padded on either side, and what is no history."""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_ref.config import BFTConfig
from bft_ref.recsys.models import Recommender, as_batch, build
from bft_ref.recsys.models.padding import on_the_right
from bft_ref.recsys.train import Batch, TrainConfig, trainer
from tests.factories import label, randomise
from tests.unit.recsys.configs import make_config

N, LENGTH = 30, 8
FILTERS = [
    BFTConfig(),
    BFTConfig(granularity="token", reading="value"),
    BFTConfig(prior_scale="unit", project_variance=False, variance_rule="row"),
]
VARIANTS = [
    {},
    *({"gate": gate} for gate in ("ligr", "qiu-head", "qiu-element")),
    {"residual": "original"},
    {"residual": "original", "gate": "vector"},
    {"tau_bias": True},
    {"tau_bias": True, "residual": "original"},
    *({"bft": bft} for bft in FILTERS),
    {"bft": FILTERS[0], "tau": "frequency"},
    {"bft": FILTERS[0], "tau": "mlp"},
    {"model": "bert4rec"},
    {"model": "bert4rec", "tau_bias": True},
    *({"model": "bert4rec", "bft": bft} for bft in FILTERS),
    {"model": "hstu"},
    {"model": "hstu", "bft": BFTConfig()},
    {"model": "hstu", "bft": BFTConfig(granularity="token")},
]
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=label)
MODELS = [{}, {"model": "bert4rec"}, {"model": "hstu"}]
each_model = pytest.mark.parametrize("variant", MODELS, ids=label)


def make(dropout=0.0, **variant) -> Recommender:
    torch.manual_seed(0)
    config = make_config(
        n_items=N,
        d_model=16,
        dim_feedforward=24,
        max_length=LENGTH,
        dropout=dropout,
        **variant,
    )
    return randomise(build(config, np.arange(N + 1))).eval()


@cache
def made(index: int) -> Recommender:
    return make(**VARIANTS[index])


def padded(rows, width, first):
    """Rows of numbers that begin at the places ``first``."""
    found = np.zeros((len(rows), width), dtype=np.asarray(rows[0]).dtype)
    for out, row, start in zip(found, rows, first, strict=True):
        out[start : start + len(row)] = row
    return torch.from_numpy(found)


ROWS = [[3, 7, 9], [5, 2, 9, 30, 4, 8, 6], [11], [1, 1, 2, 1]]
TIMES = [[0.0, 7.5, 4e5], [0.0, 1, 1, 1e3, 2e3, 1e7, 4e7], [5.0], [0.0] * 4]
RIGHT = padded(ROWS, LENGTH, [0, 0, 0, 0])
LATE = {
    "left": [5, 1, 7, 4],
    "in the middle": [2, 0, 3, 1],
    "on one row": [0, 0, 0, 4],
}
late = pytest.mark.parametrize("first", LATE.values(), ids=LATE)


def same(found, expected, first):
    """Equal bits for each token, along dimension 1, wherever it stands."""
    for row, start in enumerate(first):
        n = len(ROWS[row])
        assert torch.equal(found[row, start : start + n], expected[row, :n])


@each_variant
@late
def test_padding_on_either_side_gives_the_same_bits(variant, first):
    net = make(**variant)
    items = padded(ROWS, LENGTH, first)
    times = padded(TIMES, LENGTH, first)
    right = padded(TIMES, LENGTH, [0, 0, 0, 0])
    for when, then in [(None, None), (times, right)]:
        assert torch.equal(net.scores(items, when), net.scores(RIGHT, then))
        same(net(items, when), net(RIGHT, then), first)
        asked = zip(
            net.evaluation_inputs(items, when),
            net.evaluation_inputs(RIGHT, then),
            strict=True,
        )
        for found, expected in asked:
            assert found is expected or torch.equal(found, expected)
    norm = getattr(net, "first", None)
    same(net.embed(items, norm), net.embed(RIGHT, norm), first)


def test_a_batch_padded_on_the_right_is_read_as_it_is():
    """Not even copied: what was stored stays reproducible to the bit."""
    times = padded(TIMES, LENGTH, [0, 0, 0, 0])
    rows = on_the_right(RIGHT, times, largest=N, max_length=LENGTH)
    assert rows.items is RIGHT and rows.times is times
    hidden = torch.randn(4, LENGTH, 3)
    assert rows.restore(hidden, 1) is hidden


def test_the_times_of_a_shifted_history_are_read():
    net = make(model="hstu")
    first = LATE["left"]
    items, times = (padded(x, LENGTH, first) for x in (ROWS, TIMES))
    assert not torch.allclose(net.scores(items, times), net.scores(items))


@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if "bft" in v], ids=label
)
def test_internals_stand_where_their_tokens_do(variant):
    net, first = make(**variant), LATE["left"]
    hidden, traces = net.steps(padded(ROWS, LENGTH, first))
    expected, theirs = net.steps(RIGHT)
    same(hidden, expected, first)
    for found, right in zip(traces, theirs, strict=True):
        pairs = [(found.observation, right.observation), (found, right)]
        for name, x, y in (
            (name, getattr(a, name), getattr(b, name))
            for a, b in pairs
            for name in b._fields
            if name != "observation"
        ):
            if name in ("weights", "n_eff"):
                x, y = x.transpose(1, 2), y.transpose(1, 2)
            if name == "weights":  # here (B, T, H, S), keys to the front
                for row, start in enumerate(first):
                    n = len(ROWS[row])
                    mine = slice(start, start + n)
                    assert torch.equal(
                        x[row, mine, :, mine], y[row, :n, :, :n]
                    )
            else:
                same(x, y, first)


@each_model
@pytest.mark.parametrize("start", [0, 2, 6])
def test_padding_beyond_the_length_does_not_count(variant, start):
    net = make(**variant)
    first = [start] * len(ROWS)
    items = padded(ROWS, 13, first)
    assert torch.equal(net.scores(items), net.scores(RIGHT))
    hidden = net(items)
    assert hidden.shape[:2] == items.shape
    assert hidden.isfinite().all()
    same(hidden, net(RIGHT), first)


@pytest.mark.parametrize("variant", [*MODELS, {"bft": BFTConfig()}], ids=label)
@late
def test_a_batch_padded_elsewhere_trains_the_same(variant, first):
    """Targets stand with their items, dropout and all."""
    net = make(dropout=0.3, **variant).train()
    targets = [[*row[1:], 17] for row in ROWS]
    right = Batch(RIGHT, padded(targets, LENGTH, [0] * 4), None)
    other = Batch(
        padded(ROWS, LENGTH, first), padded(targets, LENGTH, first), None
    )
    found = []
    for batch in (right, other):
        net.zero_grad()
        torch.manual_seed(3)
        given = (batch, torch.arange(1, 9), TrainConfig())
        loss, _ = trainer._Loss(net)(*given)
        loss.backward()
        found.append((loss, [p.grad for p in net.parameters()]))
    (loss, gradients), (other_loss, other_gradients) = found
    assert torch.equal(loss, other_loss)
    for x, y in zip(gradients, other_gradients, strict=True):
        assert x is y or torch.equal(x, y)


def test_a_target_that_stands_on_padding_is_refused():
    """As where all of a history is shifted by one, padding and all."""
    whole = padded(ROWS, LENGTH, LATE["left"])
    batch = Batch(whole[:, :-1], whole[:, 1:], None)
    with pytest.raises(ValueError, match="target: expected 0 where items are"):
        trainer._Loss(make())(batch, torch.tensor([1]), TrainConfig())


@each_variant
@pytest.mark.parametrize("training", [False, True])
def test_a_history_of_padding_alone_is_finite_and_not_scored(
    variant, training
):
    net = make(**variant).train(training)
    items = torch.tensor([[0, 0, 0, 0], [0, 4, 5, 0]])
    hidden = net(items)
    hidden.square().sum().backward()
    assert hidden.isfinite().all()
    for p in net.parameters():
        assert p.grad is None or p.grad.isfinite().all()
    for given_ in (items, items[:, :0], torch.zeros(1, 4, dtype=torch.long)):
        for ask in (net.scores, net.evaluation_inputs):
            with pytest.raises(ValueError, match="at least one item.*row 0"):
                ask(given_)


def test_nobody_is_scored_as_nobody():
    for variant in MODELS:
        none = torch.zeros(0, 5, dtype=torch.long)
        assert make(**variant).scores(none).shape == (0, N + 1)


NO_BATCH = [
    ([[1, 2]], TypeError, "items: expected a tensor .* got list; .*as_batch"),
    (None, TypeError, "items: expected a tensor .* got NoneType"),
    (np.ones((1, 2), int), TypeError, "items: expected a tensor .* ndarray"),
    (
        torch.ones(1, 2),
        TypeError,
        r"items: .* got torch.float32; .* items\.long\(\)",
    ),
    (
        torch.ones(1, 2).bool(),
        TypeError,
        "items: expected numbers, got .*bool",
    ),
    (torch.tensor([1, 2]), ValueError, r"items: .*got \(2,\); items\[None\]"),
    (torch.ones(1, 2, 2).long(), ValueError, r"items: .*got \(1, 2, 2\)"),
    (
        torch.tensor([[1, 2], [3, -4]]),
        ValueError,
        "items: expected ids in 1…30.* got -4 in row 1 at position 1",
    ),
    (
        torch.tensor([[1, 2], [99, 0]]),
        ValueError,
        "items: expected ids in 1…30.* got 99 in row 1 at position 0",
    ),
    (
        torch.tensor([[0, 1, 2], [3, 0, 4]]),
        ValueError,
        "items: .* got 0 between items in row 1 at position 1",
    ),
    (
        torch.tensor([[0, 0, 4, 0, 0, 5, 0]]),
        ValueError,
        "items: .* got 0 between items in row 0 at position 4",
    ),
    (
        torch.arange(1, 10)[None],
        ValueError,
        "items: expected at most max_length=8 .* got 9 in row 0; .*as_batch",
    ),
    (
        F.pad(torch.arange(1, 10)[None], (3, 1)),
        ValueError,
        "items: expected at most max_length=8 .* got 9 in row 0",
    ),
]


@each_model
@pytest.mark.parametrize("items, error, said", NO_BATCH)
def test_what_is_no_batch_is_named(variant, items, error, said):
    net = make(**variant)
    calls = [net.scores, net.evaluation_inputs]
    if "1…30" not in said or variant.get("model") != "bert4rec":
        calls += [net, net.embed]  # where BERT4Rec's [MASK] is an id as well
    for call in calls:
        with pytest.raises(error, match=said):
            call(items)


@each_model
def test_the_mask_is_an_id_of_bert4recs_input_alone(variant):
    net, masked = make(**variant), torch.tensor([[3, N + 1]])
    with pytest.raises(ValueError, match=f"1…{N}.* got {N + 1} in row 0"):
        net.scores(masked)
    if variant.get("model") == "bert4rec":
        assert net(masked).isfinite().all()
        with pytest.raises(ValueError, match=f"1…{N + 1}.* got {N + 2} in"):
            net(masked + 1)
    else:
        with pytest.raises(ValueError, match=f"1…{N}.* got {N + 1} in row 0"):
            net(masked)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_any_integer_is_an_id(dtype):
    net = make()
    assert torch.equal(net.scores(RIGHT.to(dtype)), net.scores(RIGHT))


@pytest.mark.parametrize(
    "times, error, said",
    [
        ([[0, 1, 2]], TypeError, "times: expected a tensor .* got list"),
        (
            torch.zeros(1, 3).bool(),
            TypeError,
            "times: expected numbers, got torch.bool",
        ),
        (
            torch.zeros(1, 2),
            ValueError,
            r"times: expected shape \(1, 3\), got \(1, 2\)",
        ),
        (
            torch.tensor([[0.0, torch.nan, 2.0]]),
            ValueError,
            "times: expected finite seconds, got nan in row 0 at position 1",
        ),
        (
            torch.tensor([[0.0, 3.0, torch.inf]]),
            ValueError,
            "times: expected finite seconds, got inf in row 0 at position 2",
        ),
        (
            torch.tensor([[9.0, 8.0, 7.0]]),
            ValueError,
            "times: expected the oldest item first, got 9.0, then 8.0 in row "
            "0 at position 0",
        ),
    ],
)
def test_what_are_no_times_is_named(times, error, said):
    net, items = make(model="hstu"), torch.tensor([[4, 5, 6]])
    for call in (net, net.scores, net.evaluation_inputs):
        with pytest.raises(error, match=said):
            call(items, times)


def test_times_of_padding_are_not_read():
    net, items = make(model="hstu"), torch.tensor([[0, 4, 5, 6]])
    zeros = torch.tensor([[0.0, 10.0, 20.0, 500.0]])
    other = torch.tensor([[torch.nan, 10.0, 20.0, 500.0]])
    whole = torch.tensor([[90, 10, 20, 500]])
    assert torch.equal(net.scores(items, zeros), net.scores(items, other))
    assert torch.equal(net.scores(items, zeros), net.scores(items, whole))


def test_scores_are_not_left_to_dropout():
    with pytest.raises(ValueError, match="evaluation mode.*model.eval()"):
        make(dropout=0.1).train().scores(RIGHT)
    assert torch.equal(make().train().scores(RIGHT), make().scores(RIGHT))


@each_model
def test_a_plain_model_is_not_traced(variant):
    with pytest.raises(ValueError, match="traces: expected None for a plain"):
        make(**variant).steps(RIGHT)


@pytest.mark.parametrize("variant", [*MODELS, {"bft": BFTConfig()}], ids=label)
def test_a_compiled_model_moves_what_it_cannot_look_at(variant):
    net = make(num_layers=1, **variant)
    first = LATE["left"]
    items, times = (padded(x, LENGTH, first) for x in (ROWS, TIMES))
    right = padded(TIMES, LENGTH, [0] * 4)
    torch._dynamo.reset()
    scores, states = (
        torch.compile(call, fullgraph=True, backend="eager")
        for call in (net.scores, net)
    )
    for given_, then in [(items, times), (RIGHT, right)]:
        torch.testing.assert_close(
            scores(given_, then), net.scores(given_, then)
        )
        torch.testing.assert_close(states(given_, then), net(given_, then))
    with pytest.raises(Exception, match="cannot tell what to cut"):
        scores(F.pad(items, (1, 0)))


def test_gradients_of_each_history_come_from_vmap_too():
    net = make()
    parameters = dict(net.named_parameters())
    items = padded(ROWS, LENGTH, LATE["left"])

    def loss(parameters, row):
        hidden = torch.func.functional_call(net, parameters, (row[None],))
        return (hidden[0] * (row > 0)[:, None]).square().sum()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, items)
        loss(parameters, items[1]).backward()
    torch.testing.assert_close(
        each["items.weight"][1], net.items.weight.grad, rtol=1e-4, atol=1e-4
    )


history = st.lists(st.integers(1, N), min_size=1, max_size=LENGTH)


@settings(max_examples=100, deadline=None)
@given(
    index=st.integers(0, len(VARIANTS) - 1),
    rows=st.lists(history, min_size=1, max_size=5),
    timed=st.booleans(),
    data=st.data(),
)
def test_scores_are_a_history_s_own(index, rows, timed, data):
    """Whatever padding, other users and order there are in the batch."""
    net = made(index)
    width = data.draw(st.integers(max(map(len, rows)), LENGTH + 4))
    first = [data.draw(st.integers(0, width - len(row))) for row in rows]
    order = data.draw(st.permutations(range(len(rows))))
    when = [np.cumsum([7.0 * i**3 for i in row]) for row in rows]
    times = padded(when, width, first)[order] if timed else None
    found = net.scores(padded(rows, width, first)[order], times)
    assert found.shape == (len(rows), N + 1)
    for scores, user in zip(found, order, strict=True):
        own = torch.from_numpy(when[user])[None] if timed else None
        alone = net.scores(torch.tensor([rows[user]]), own)
        torch.testing.assert_close(scores, alone[0], rtol=1e-3, atol=1e-3)


def test_a_batch_is_made_of_histories_of_integers():
    zeros = [[0, 0, 5, 6, 7], [8, 9, 0, 0], [0, 0]]
    assert as_batch(zeros, 2).tolist() == [[6, 7], [8, 9], [0, 0]]
    for rows, error, said in [
        ([[1.5, 2.0]], TypeError, "rows: expected integer ids, got float64"),
        ([[True]], TypeError, "rows: expected integer ids, got bool"),
        ([["a"]], TypeError, "rows: expected integer ids"),
        ([[[1, 2]]], ValueError, r"rows: .* got \(1, 2\)"),
        ([3, 4], ValueError, r"rows: .* got \(\)"),
    ]:
        with pytest.raises(error, match=said):
            as_batch(rows, 4)
    for length in (0, -3):
        with pytest.raises(ValueError, match=f"max_length: .* got {length}"):
            as_batch([[1]], length)


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_a_catalogue_of_one_item(variant):
    torch.manual_seed(0)
    config = make_config(
        n_items=1, d_model=16, dim_feedforward=24, max_length=4, **variant
    )
    net = randomise(build(config, [0, 5])).eval()
    for items in as_batch([[1], [1, 1, 1]], 4), torch.tensor([[0, 1], [1, 1]]):
        scores = net.scores(items)
        assert scores.shape == (2, 2)
        assert (scores[:, 0] == -torch.inf).all()
        assert scores[:, 1].isfinite().all()
    for index, kind in product(range(2), ("sampled", "full", "bce", "gbce")):
        net.zero_grad()
        hidden = net(torch.tensor([[1, 1]]))[0, : index + 1]
        keys, bias = net.item_embeddings()
        loss = trainer.next_item_loss(
            net.query(hidden),
            torch.ones(index + 1, dtype=torch.long),
            keys,
            bias,
            torch.ones(3, dtype=torch.long),
            n_items=1,
            kind=kind,
        )
        loss.backward()
        if kind in ("sampled", "full"):  # what is certain costs nothing
            assert loss == 0
        else:
            score = net.query(hidden) @ keys[1]
            score = score if bias is None else score + bias[1]
            torch.testing.assert_close(loss, F.softplus(-score).mean() / 4)
        assert net.items.weight.grad.isfinite().all()


def test_times_whose_dtype_does_not_tell_seconds_apart_are_refused():
    net, items = make(model="hstu"), torch.tensor([[0, 1, 2]])
    times = torch.tensor([[2.0**25, 1.0, 2.0**24]], dtype=torch.float64)
    expected = net.scores(items, times)
    torch.testing.assert_close(net.scores(items, times.float()), expected)
    times[0, 2] += 2
    with pytest.raises(ValueError, match="^times: .*row 0 at position 2"):
        net.scores(items, times.float())
    net.scores(items, times)


@pytest.mark.parametrize("length", [2.5, True, "2"])
def test_the_length_of_a_batch_is_a_whole_number(length):
    with pytest.raises(
        TypeError, match="^max_length: expected a whole number"
    ):
        as_batch([[1, 2]], length)


def test_an_id_beyond_int64_does_not_wrap_around():
    with pytest.raises(ValueError, match=f"^rows: .*got {2**63 + 5}"):
        as_batch([[2**63 + 5]], 4)


def test_padding_beyond_the_length_comes_back_as_zeros():
    net = make()
    items = torch.zeros(2, LENGTH + 3, dtype=torch.long)
    items[0, 3:], items[1, :2] = 1 + torch.arange(LENGTH), 5
    hidden = net(items)
    assert (hidden[0, :3] == 0).all() and (hidden[1, LENGTH:] == 0).all()
    torch.testing.assert_close(hidden[0, 3:], net(items[:1, 3:])[0])
