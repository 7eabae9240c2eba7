"""What is said of a trained filter, against a loop over its users."""

import math
import statistics

import numpy as np
import pytest
import torch

from bft_ref.config import BFTConfig
from bft_ref.recsys.data import Sequences
from bft_ref.recsys.models import build
from bft_ref.recsys.train import diagnose, diagnostics, evaluate, interventions
from tests.factories import randomise
from tests.unit.recsys.configs import make_config

MODELS = ("sasrec", "bert4rec", "hstu")
CPU = torch.device("cpu")
ITEMS, LENGTH = 25, 5


def shoppers(users=40, seed=0):
    """Some items common and some rare, histories on both sides of LENGTH."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, ITEMS + 1)
    rows = [
        1 + rng.choice(ITEMS, size=n, p=share / share.sum())
        for n in rng.integers(3, 11, users)
    ]
    times = 1e9 + np.cumsum(rng.exponential(4e3, sum(map(len, rows))))
    return Sequences.of(rows, n_items=ITEMS, times=times).split("validation")


def trained(model, granularity="feature", seed=2):
    """Random weights in double precision, τ and Q far from one."""
    torch.manual_seed(seed)
    net = build(
        make_config(
            n_items=ITEMS,
            model=model,
            d_model=8,
            dim_feedforward=12,
            nhead=2,
            max_length=LENGTH,
            bft=BFTConfig(granularity=granularity, process_noise=0.3),
        )
    )
    net = randomise(net.double(), seed)
    with torch.no_grad():
        net.tau.learned.log_precision.weight.mul_(4)
    return net.eval()


def asked(net, split, user):
    """The question after one user's history, alone: ids and times (1, T)."""
    items = split.history[user].tolist()
    start = split.history.offsets[user]
    when = split.history.times[start : start + len(items)]
    if net.config.model == "bert4rec":
        return torch.tensor([[*items[1 - LENGTH :], ITEMS + 1]]), None
    when = when[-LENGTH:] - when[-LENGTH:][0]
    return torch.tensor([items[-LENGTH:]]), torch.from_numpy(when)[None]


def traces(net, split, user):
    with torch.no_grad():
        return net.steps(*asked(net, split, user))[1]


def by_quartile(values, key):
    """Values in four lists; a key equal to a cut counts below it."""
    cuts = np.quantile(key, [0.25, 0.5, 0.75])
    found = [[], [], [], []]
    for value, k in zip(values, key, strict=True):
        found[sum(k > cut for cut in cuts)].append(float(value))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_diagnostics_are_a_loop_over_users(model):
    net, split = trained(model), shoppers()
    found = diagnose(net, split, CPU, chunk=7)
    users = range(len(split.target))
    key = [split.frequency[split.history[user][-1]] for user in users]
    assert all(by_quartile(key, key))
    for layer, said in enumerate(found["layers"]):
        gain, precision, n_eff = [], [], []
        for user in users:
            trace = traces(net, split, user)[layer]
            gain.append(trace.gain[0, -1].mean())
            updated = trace.log_updated_precision[0, -1]
            precision.append(sum(x.exp() for x in updated) / len(updated))
            heads = trace.weights[0, :, -1]
            if model == "hstu":
                heads = heads**2
            counts = [a.sum() ** 2 / (a**2).sum() for a in heads]
            n_eff.append(sum(counts) / len(counts))
        for name, values, centre in [
            ("gain", gain, statistics.mean),
            ("updated_precision", precision, statistics.median),
            ("n_eff", n_eff, statistics.mean),
        ]:
            expected = [centre(part) for part in by_quartile(values, key)]
            np.testing.assert_allclose(said[name], expected, rtol=1e-5)
        noise = diagnostics.model_layers(net)[layer].log_process_noise.exp()
        assert said["process_noise_mean"] == pytest.approx(noise.mean().item())
        assert said["process_noise_max"] == pytest.approx(noise.max().item())


@pytest.mark.parametrize("users, empty", [(8, [1]), (12, [2]), (40, [])])
def test_diagnostics_have_the_mean_tau_of_items_met(users, empty):
    net, split = trained("sasrec"), shoppers(users)
    found = diagnose(net, split, CPU)["tau"]
    log_tau = net.tau.of_items(net.items.weight)
    met = [i for i in range(1, ITEMS + 1) if split.frequency[i] > 0]
    key = [split.frequency[i] for i in met]
    parts = by_quartile([log_tau[i].exp() for i in met], key)
    for q in range(4):
        if q in empty:
            assert not parts[q] and found[q] is None
        else:
            mean = statistics.mean(parts[q])
            assert found[q] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("granularity", ["feature", "token"])
def test_mean_gains_are_a_loop_over_tokens(model, granularity):
    net, split = trained(model, granularity), shoppers(60)
    sums, tokens = [0.0, 0.0], 0
    for user in range(len(split.target)):
        seen = traces(net, split, user)
        tokens += seen[0].gain.shape[1]
        for layer, trace in enumerate(seen):
            for gain in trace.gain[0]:
                sums[layer] = sums[layer] + gain
    found = diagnostics._mean_gains(net, split)
    for mean, total in zip(found, sums, strict=True):
        torch.testing.assert_close(mean, (total / tokens).float())


def test_mean_gains_do_not_depend_on_how_users_are_grouped():
    net, few = trained("sasrec"), shoppers(60)
    every = np.arange(60).repeat(20)
    many = few._replace(history=few.history.take(every))
    torch.testing.assert_close(
        diagnostics._mean_gains(net, many), diagnostics._mean_gains(net, few)
    )


@pytest.mark.parametrize("model", MODELS)
def test_interventions_give_the_model_what_they_say(model):
    net, split = trained(model), shoppers()
    own = net.tau.of_items(net.items.weight)
    seen = []

    def evaluated():
        tau = net.tau.of_items(net.items.weight)
        seen.append((tau, traces(net, split, 3)))
        return evaluate(net, split, CPU)

    found = interventions(net, split, evaluated, seed=4)
    assert list(found) == [
        "trained",
        "tau equal",
        "tau shuffled",
        "gain constant",
    ]
    (plain, before), (equal, _), (shuffled, _), (kept, frozen) = seen
    assert torch.equal(plain, own) and torch.equal(kept, own)
    items = range(1, ITEMS + 1)
    tau = [math.exp(own[i]) for i in items]
    geometric = statistics.geometric_mean(tau)
    for i in items:
        assert math.exp(equal[i]) == pytest.approx(geometric, rel=1e-6)
    assert sorted(shuffled[1 : ITEMS + 1].tolist()) == sorted(
        own[1 : ITEMS + 1].tolist()
    )
    moved = [i for i in items if shuffled[i] != own[i]]
    assert len(moved) > ITEMS // 2
    for row in {0, *range(ITEMS + 1, len(own))}:
        assert equal[row] == shuffled[row] == own[row]
    gains = diagnostics._mean_gains(net, split)
    for gain, trace, free in zip(gains, frozen, before, strict=True):
        expected = gain.double().expand_as(trace.gain)
        torch.testing.assert_close(trace.gain, expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(trace.gain, free.gain, rtol=1e-2)
    assert torch.equal(net.tau.of_items(net.items.weight), own)
