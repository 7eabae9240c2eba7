"""Scores of two beliefs against loops, and one function for all who score."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal

from bft_ref.belief import Belief
from bft_ref.config import BFTConfig
from bft_ref.recsys.models import Head, build
from bft_ref.recsys.models.base import as_batch
from bft_ref.recsys.models.heads import dot, gaussian
from bft_ref.recsys.train import TrainConfig, trainer
from bft_ref.recsys.train.batches import Batch
from bft_ref.recsys.train.losses import next_item_loss
from tests.unit.recsys.configs import make_config

SMALL = {
    "n_items": 12,
    "d_model": 8,
    "dim_feedforward": 12,
    "nhead": 2,
    "max_length": 6,
    "dropout": 0.0,
}
ITEMS = as_batch([[3, 7, 7, 1], [5, 2, 9, 12, 4, 8], [11]], 6)
HEADS = [
    ("sasrec", "gaussian", None),
    ("sasrec", "gaussian", BFTConfig()),
    ("sasrec", "gaussian", BFTConfig(granularity="token")),
    ("sasrec", "item_bias", None),
    ("sasrec", "item_temperature", BFTConfig()),
    ("bert4rec", "item_temperature", None),
    ("hstu", "item_bias", BFTConfig()),
    ("hstu", "item_temperature", None),
]


def moved(model, head, bft, **given):
    """A model in evaluation, away from its start."""
    torch.manual_seed(1)
    config = make_config(model, head=head, bft=bft, **SMALL | given)
    found = build(config).double()
    with torch.no_grad():
        for p in found.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return found.eval()


def tables(n=5, m=7, d=4):
    torch.manual_seed(0)
    query = torch.randn(n, d + 1, dtype=torch.float64)
    return query, torch.randn(m, d + 1, dtype=torch.float64)


def test_a_gaussian_score_is_a_loop_over_features():
    query, items = tables()
    for n, m in [(0, 0), (3, 6), (4, 2)]:
        spread = math.sqrt(query[n, -1].exp() + items[m, -1].exp())
        expected = 0.0
        for f in range(4):
            density = Normal(query[n, f], spread).log_prob(items[m, f])
            expected += density + 0.5 * math.log(2 * math.pi)
        found = gaussian(query, items)[n, m]
        torch.testing.assert_close(found, expected)
    pairs = gaussian(query, items[:5], paired=True)
    torch.testing.assert_close(pairs, gaussian(query, items[:5]).diagonal())


def test_a_product_is_a_product():
    query, items = tables()
    bias = torch.randn(7, dtype=torch.float64)
    torch.testing.assert_close(dot(query, items), query @ items.mT)
    found = dot(query, items, bias)
    torch.testing.assert_close(found, query @ items.mT + bias)
    pairs = dot(query, items[:5], bias[:5], paired=True)
    torch.testing.assert_close(pairs, found[:, :5].diagonal())


def test_gradcheck_of_the_gaussian_score():
    given = [x.requires_grad_() for x in tables()]
    assert torch.autograd.gradcheck(gaussian, given)
    query, items = given
    assert torch.autograd.gradcheck(
        lambda q, v: gaussian(q, v, True), (query, items[:5])
    )


@pytest.mark.parametrize("log", [-80.0, 0.0, 80.0])
@pytest.mark.parametrize("other", [-80.0, 80.0])
def test_gaussian_scores_at_the_ends_of_float32(log, other):
    query, items = (x.float() for x in tables())
    query[:, -1], items[:, -1] = log, other
    # vectors as near one another as the variances let them be
    size = math.exp(min(0.0, max(log, other) / 2))
    query[:, :-1] *= size
    items[:, :-1] *= size
    query.requires_grad_()
    items.requires_grad_()
    found = gaussian(query, items)
    expected = gaussian(query.double(), items.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)
    for x in torch.autograd.grad(found.sum(), [query, items]):
        assert x.isfinite().all()


def test_certain_beliefs_tell_items_apart_and_vague_ones_do_not():
    query, items = tables()
    items[:, -1] = 0.0
    spread = []
    for log in (-5.0, 0.0, 5.0):
        query[:, -1] = log
        spread.append(gaussian(query, items).std(1).mean())
    assert spread[0] > spread[1] > spread[2]


def test_the_gaussian_head_starts_as_a_product():
    """Its differences between items are those of ĥ·v_i − ‖v_i‖²/2s."""
    head = Head("gaussian", 7, 64, plain=True).double()
    hidden = torch.randn(5, 64, dtype=torch.float64)
    v = 0.1 * torch.randn(7, 64, dtype=torch.float64)
    table, bias = head.items(v)
    assert bias is None
    # of a state that is known, and of one that is not
    for log, factor in [(40.0, 2.0), (-40.0, 1.0)]:
        log_precision = torch.full((64,), log, dtype=torch.float64)
        query = head.query(head.state(hidden, log_precision))
        found = head.score(query, table)
        expected = hidden @ v.mT - v.square().sum(1) / (2 * 64**-0.5)
        found, expected = (
            x - x.mean(1, keepdim=True) for x in (found, factor * expected)
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("granularity", ["feature", "token"])
def test_the_variance_of_a_filters_state_goes_through_the_last_norm(
    granularity,
):
    net = moved("sasrec", "gaussian", BFTConfig(granularity=granularity))
    with torch.no_grad():
        state, traces = net.steps(ITEMS)
        log_tau = net.tau(ITEMS, net.items(ITEMS))
        belief = net.encoder(net.embed(ITEMS), log_tau)
    last = traces[-1].log_predicted_precision
    for row, t in [(0, 3), (1, 5), (2, 0)]:
        jacobian = torch.autograd.functional.jacobian(
            net.final, belief.mean[row, t]
        )
        variance = jacobian.square() @ (-last[row, t]).exp().expand(8)
        a = (variance / (1 + variance)).mean()
        torch.testing.assert_close(state[row, t, -1], a.log())
        expected = net.final(belief.mean[row, t])
        torch.testing.assert_close(state[row, t, :-1], expected)


def test_a_plain_models_variance_is_learned():
    net = moved("sasrec", "gaussian", None)
    a = (1 / (1 + net.head.log_precision.exp())).mean()
    torch.testing.assert_close(
        net(ITEMS)[..., -1].exp(), a.expand(ITEMS.shape)
    )
    filtered = moved("sasrec", "gaussian", BFTConfig()).head
    assert [name for name, _ in filtered.named_parameters()] == [
        "log_scale",
        "log_temperature",
        "log_candidate_precision",
    ]


def test_rivals_of_the_gaussian_head():
    for head in ("item_bias", "item_temperature"):
        net = moved("sasrec", head, None)
        found = net.scores(ITEMS[2:, :1])[0]
        hidden = net(ITEMS[2:, :1])[0, 0]
        for i in (1, 5, 12):
            expected = hidden @ net.items.weight[i]
            if head == "item_bias":
                expected = expected + net.head.bias[i]
            else:
                expected = expected * net.head.log_item_temperature[i].exp()
            torch.testing.assert_close(found[i], expected)


@pytest.mark.parametrize("model, head, bft", HEADS)
@pytest.mark.parametrize("loss", ["full", "sampled", "bce"])
def test_the_loss_and_the_scores_are_of_one_head(model, head, bft, loss):
    """The full loss is the cross-entropy of the scores; so are its parts."""
    net = moved(model, head, bft)
    scores = net.scores(ITEMS)
    items, times = net.evaluation_inputs(ITEMS)
    target = torch.zeros_like(items)
    last = (items > 0).sum(1) - 1
    wanted = torch.tensor([9, 1, 6])
    target[torch.arange(3), last] = wanted
    negatives = torch.tensor([2, 5, 10, 12])
    config = TrainConfig(loss=loss, logq_correction=True)
    found, _ = trainer._Loss(net)(
        Batch(items, target, times), negatives, config
    )
    positive = scores[torch.arange(3), wanted]
    if loss == "full":
        expected = F.cross_entropy(scores[:, 1:], wanted - 1)
    elif loss == "bce":
        wrong = F.softplus(scores[:, negatives]).sum(1)
        expected = ((F.softplus(-positive) + wrong) / 5).mean()
    else:
        others = scores[:, negatives] + math.log(11 / 4)
        every = torch.cat([positive[:, None], others], 1)
        expected = (every.logsumexp(1) - positive).mean()
    torch.testing.assert_close(found, expected)
    found.backward()
    for name, p in net.named_parameters():
        if name.startswith("head."):
            assert p.grad is not None and p.grad.abs().sum() > 0, name


def test_the_last_noise_and_the_candidates_learn_with_a_gaussian_head():
    """With a product no score depends on the last Q."""
    found = {}
    for head in ("dot", "gaussian"):
        net = moved("sasrec", head, BFTConfig())
        hidden = net(ITEMS)[ITEMS > 0]
        table, bias = net.item_embeddings()
        target = torch.arange(1, len(hidden) + 1) % 12 + 1
        next_item_loss(
            net.query(hidden),
            target,
            table,
            bias,
            None,
            n_items=12,
            kind="full",
            score=net.head.score,
        ).backward()
        grad = net.encoder.layers[-1].log_process_noise.grad
        found[head] = 0.0 if grad is None else float(grad.abs().sum())
    assert found["dot"] == 0 < found["gaussian"]


def test_no_state_looks_surer_by_being_longer():
    """The norm's own part of the variance has no gradient."""
    net = moved("sasrec", "gaussian", BFTConfig())
    mean = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    log = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    net.encoder.forward = lambda *_, **__: Belief(mean, log)
    log_a = net.states(torch.tensor([[1, 2, 3]]), None, None)[..., -1]
    to_mean, to_log = torch.autograd.grad(log_a.sum(), [mean, log])
    assert (to_mean == 0).all() and (to_log < 0).all()


@pytest.mark.parametrize(
    "model, head",
    [
        ("sasrec", "cosine"),
        ("bert4rec", "gaussian"),
        ("bert4rec", "item_bias"),  # it has a bias
        ("hstu", "gaussian"),
    ],
)
def test_a_head_that_a_model_cannot_have_is_named(model, head):
    with pytest.raises(ValueError, match="^head: expected one of dot, .*"):
        make_config(model, n_items=12, head=head)


def test_logs_of_a_head_learn_as_precisions_do():
    for head, expected in {
        "gaussian": {
            "log_scale",
            "log_temperature",
            "log_candidate_precision",
            "log_precision",
        },
        "item_temperature": {"log_item_temperature"},
        "item_bias": set(),
    }.items():
        net = moved("sasrec", head, None)
        names = {id(p): name for name, p in net.head.named_parameters()}
        groups = net.parameter_groups(1e-3, 1e-2)
        found = {
            names[id(p)]
            for group in groups
            if group["lr"] == 1e-2
            for p in group["params"]
        }
        assert found == expected
