"""Every numbered equation of chapter 20, from a source of its own.

Expectations by enumeration and by drawing, the bootstrap with every resample
there is, power by simulated experiments.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import stats

from bft_ref.recsys import metrics
from bft_ref.recsys.data import Sequences
from bft_ref.recsys.train import next_item_loss
from tests.equations import equation


@equation(
    "20.1",
    r"\mathrm E\,\mathrm{HR@}k = \frac kC, \qquad \mathrm E\,"
    r"\mathrm{NDCG@}k = \frac1C\sum_{r=1}^{k}\frac1{\log_2(1+r)}",
)
@pytest.mark.parametrize("k", [1, 5, 10])
def test_the_level_of_chance(k):
    """A constant scorer by the package, and random scores by drawing."""
    target = np.arange(1, 31).repeat(300)
    history = Sequences.of([[1 + t % 30] for t in target], n_items=30)
    C = 29
    gains = [1 / math.log2(1 + r) for r in range(1, k + 1)]
    gain = sum(gains) / C
    flat = metrics.rank(torch.zeros(len(target), 31), target, history)
    assert (flat.candidates == C).all()
    found = flat.summary((k,), "expected")
    assert_allclose(found[f"HR@{k}"], k / C)
    assert_allclose(found[f"NDCG@{k}"], gain)
    assert flat.summary((k,))[f"HR@{k}"] == 0
    scores = torch.rand(
        len(target), 31, generator=torch.Generator().manual_seed(2)
    )
    drawn = metrics.rank(scores, target, history)
    spread = [k / C * (1 - k / C), sum(g**2 for g in gains) / C - gain**2]
    hit_error, ndcg_error = np.sqrt(np.array(spread) / len(target))
    assert abs(drawn.hit(k).mean() - k / C) < 4 * hit_error < k / C / 2
    assert abs(drawn.ndcg(k).mean() - gain) < 4 * ndcg_error < gain / 2


@equation(
    "20.2",
    r"\Pr[\text{hit}] = \sum_{j=0}^{k-1} \binom{r-1}{j}\binom{C-r}{m-j}"
    r" \Big/ \binom{C-1}{m}",
)
@pytest.mark.parametrize(("C", "m", "k", "r"), [(9, 4, 2, 5), (12, 5, 3, 4)])
def test_a_hit_among_sampled_negatives(C, m, k, r):
    """All samples there are, ranked by the package, and scipy's law."""
    formula = sum(
        math.comb(r - 1, j) * math.comb(C - r, m - j) for j in range(k)
    ) / math.comb(C - 1, m)
    others = [i for i in range(C) if i != r - 1]  # item i has full rank i + 1
    hits = []
    for sample in itertools.combinations(others, m):
        scores = torch.full((1, C + 1), -torch.inf)
        for i in (r - 1, *sample):
            scores[0, i + 1] = -float(i)
        scores[0, 0] = -torch.inf
        ranking = metrics.rank(scores, np.array([r]))
        hits.append(ranking.hit(k)[0])
    assert 0.05 < formula < 0.95
    assert_allclose(np.mean(hits), formula, rtol=1e-12)
    law = stats.hypergeom(C - 1, r - 1, m)
    assert_allclose(law.cdf(k - 1), formula, rtol=1e-12)


def bootstrap_variance(d):
    S, n = d.shape
    users, seeds, mean = d.mean(0), d.mean(1), d.mean()
    rest = d - seeds[:, None] - users + mean
    return (
        ((users - mean) ** 2).sum() / n**2
        + ((seeds - mean) ** 2).sum() / S**2
        + (rest**2).sum() / (n * S) ** 2
    )


@equation(
    "20.3",
    r"\mathrm{Var}^*\,\bar d^{\,*} = \frac1{n^2}\sum_u (\bar d_{\cdot u} -"
    r" \bar d)^2 + \frac1{S^2}\sum_s (\bar d_{s\cdot} - \bar d)^2 +"
    r" \frac1{n^2S^2}\sum_{s,u} (d_{su} - \bar d_{s\cdot} - \bar d_{\cdot u}"
    r" + \bar d)^2",
)
@given(st.lists(st.floats(-5, 5), min_size=12, max_size=12))
@settings(max_examples=8, deadline=None)
def test_what_a_bootstrap_mean_varies_by(values):
    """Every resample of users and seeds there is."""
    d = np.array(values).reshape(3, 4)
    means = [
        d[np.ix_(seeds, users)].mean()
        for seeds in itertools.product(range(3), repeat=3)
        for users in itertools.product(range(4), repeat=4)
    ]
    assert_allclose(np.var(means), bootstrap_variance(d), atol=1e-10)


def test_the_packages_bootstrap_has_that_variance():
    rng = np.random.default_rng(6)
    a = rng.normal(size=(6, 80)) + 0.3 * rng.normal(size=(6, 1))
    b = a + 0.1 + 0.4 * rng.normal(size=(6, 80)) + rng.normal(size=80)
    found = metrics.paired_bootstrap(a, b, resamples=4000)
    half = (found.absolute_high - found.absolute_low) / 2
    assert_allclose(half, 1.96 * bootstrap_variance(b - a) ** 0.5, rtol=0.06)


def test_one_seed_says_nothing_of_seeds():
    """The seeds' share: none for one, (S − 1)/S of the truth for S."""
    rng = np.random.default_rng(7)
    for S in (1, 2, 5):
        shares = []
        for _ in range(4000):
            seeds = 1.5 * rng.normal(size=(S, 1))
            d = np.tile(seeds, (1, 3))
            shares.append(bootstrap_variance(d))
        truth = 1.5**2 / S
        assert_allclose(np.mean(shares), (S - 1) / S * truth, atol=0.06)


@equation(
    "20.4",
    r"\Pr[\text{confirmed}] = \Phi\!\left(\frac{\delta}{\sigma} - 1.96"
    r"\right)",
)
@pytest.mark.parametrize("delta", [0.0, 0.1, 0.2])
def test_power_is_the_share_of_experiments_that_confirm(delta):
    """The package's own intervals, of experiments whose truth is known."""
    rng = np.random.default_rng(8)
    n, spread, trials = 400, 1.4, 600
    confirmed = 0
    for trial in range(trials):
        a = rng.normal(3, 1, n)
        b = a + delta + spread * rng.normal(size=n)
        found = metrics.paired_bootstrap(a, b, resamples=200, seed=trial)
        confirmed += found.absolute_low > 0
    formula = stats.norm.cdf(delta / (spread / n**0.5) - 1.96)
    error = (formula * (1 - formula) / trials) ** 0.5
    assert abs(confirmed / trials - formula) < 4 * error + 0.005
    assert stats.norm.cdf(2.8 - 1.96) == pytest.approx(0.8, abs=1e-3)


def sums(scores, target, draws):
    """The sum Ẑ behind the package's loss, for each set of draws."""
    items = len(scores)
    keys = torch.cat([torch.zeros(1).double(), scores])[:, None]
    found = []
    for negatives in draws:
        loss = next_item_loss(
            torch.ones(1, 1).double(),
            torch.tensor([target + 1]),
            keys,
            None,
            negatives + 1,
            n_items=items,
        )
        found.append((loss + scores[target]).exp())
    return torch.stack(found)


@equation(
    "20.5",
    r"\mathrm E\,\hat Z = e^{s_+} + \Bigl(1 - \frac1N\Bigr)"
    r"\sum_{i\ne +} e^{s_i}",
)
@pytest.mark.parametrize("m", [1, 2, 3])
def test_the_corrected_sum(m):
    """Every set of draws there is, through the package's own loss."""
    scores = torch.tensor([0.7, -1.2, 2.4, 0.1, -0.3]).double()
    every = torch.tensor(list(itertools.product(range(5), repeat=m)))
    for target in (1, 2):
        mean = sums(scores, target, every).mean()
        others = scores.exp().sum() - scores[target].exp()
        expected = scores[target].exp() + (1 - 1 / 5) * others
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=0)


@equation(
    "20.6",
    r"\mathrm E\log\hat Z \approx \log\mathrm E\,\hat Z -"
    r" \frac{\mathrm{Var}\,\hat Z}{2\,(\mathrm E\,\hat Z)^2}, \qquad"
    r" \mathrm{Var}\,\hat Z = \frac{(N-1)^2}{m}\,"
    r"\mathrm{Var}_i\bigl(e^{s_i}\,[i\ne +]\bigr)",
)
def test_the_loss_is_too_small():
    """The variance by enumeration; the bias by enumeration, as m grows."""
    scores = torch.tensor([0.7, -1.2, 1.4, 0.1]).double()
    target, n = 1, 4
    x = scores.exp()
    x[target] = 0
    one = sums(scores, target, torch.arange(4)[:, None])
    assert_allclose(
        one.var(correction=0), (n - 1) ** 2 * x.var(correction=0), rtol=1e-12
    )
    every = torch.tensor(list(itertools.product(range(4), repeat=3)))
    three = sums(scores, target, every)
    assert_allclose(
        three.var(correction=0),
        (n - 1) ** 2 / 3 * x.var(correction=0),
        rtol=1e-12,
    )
    # the counts of the four items are multinomial: all of them, for any m
    left = []
    for m in (20, 40, 80):
        counts = np.array(
            [
                (a, b, c, m - a - b - c)
                for a in range(m + 1)
                for b in range(m + 1 - a)
                for c in range(m + 1 - a - b)
            ]
        )
        chance = stats.multinomial(m, [0.25] * 4).pmf(counts)
        Z = scores[target].exp().item() + (n - 1) / m * counts @ x.numpy()
        mean = chance @ Z
        exact = chance @ np.log(Z)
        second = (n - 1) ** 2 / m * x.var(correction=0).item() / mean**2 / 2
        assert exact < np.log(mean)
        left.append(abs(exact - (np.log(mean) - second)) / second)
    assert left[2] < left[1] < left[0] < 0.2
    assert left[2] < 0.6 * left[1] < 0.4 * left[0]
