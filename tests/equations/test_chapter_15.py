"""Every numbered equation of chapter 15, from a source of its own.

Counting, numerical integration, enumeration of small worlds, automatic
differentiation, PyTorch's Adam, and simulation with its standard error.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import integrate, optimize, special, stats

from bft_ref import BFTConfig, kalman
from bft_ref.recsys.data import Sequences, simulate
from bft_ref.recsys.models import SASRecConfig, build
from bft_ref.recsys.train import TrainConfig, fit
from tests.equations import equation

BETAS = [(0.9, 0.98), (0.9, 0.999), (0.5, 0.6)]


@equation(
    "15.1",
    r"\frac{\sum_i f_i^2}{\sum_i f_i} = \bar f\,\bigl(1 + c_v^2\bigr)",
)
@given(
    st.lists(st.integers(0, 300), min_size=2, max_size=40).filter(any),
)
@settings(max_examples=50, deadline=None)
def test_an_events_item_is_more_popular_than_an_item(counts):
    """Asking the events one by one, each about its item."""
    f = np.array(counts, dtype=float)
    events = np.repeat(f, counts)
    spread = f.std() / f.mean()
    assert_allclose(events.mean(), f.mean() * (1 + spread**2))
    assert_allclose((f**2).sum() / f.sum(), events.mean())
    assert events.mean() >= f.mean() - 1e-9


def test_an_event_drawn_at_random():
    """Size bias in draws of an event from the generator's training data."""
    frequency = simulate(300, 60, length=(5, 9), seed=3).sequences.frequency
    f = frequency[1:].astype(float)
    rng = np.random.default_rng(1)
    drawn = rng.choice(f, 200_000, p=f / f.sum())
    expected = f.mean() * (1 + (f.std() / f.mean()) ** 2)
    error = drawn.std() / math.sqrt(len(drawn))
    assert abs(drawn.mean() - expected) < 4 * error
    assert expected > 1.5 * f.mean()


@equation(
    "15.2",
    r"\mathrm{E}[\theta \mid f] = (f+1)\,\frac{p(f+1)}{p(f)}",
)
@pytest.mark.parametrize(
    "rates",
    [stats.lognorm(0.9, scale=2.5), stats.gamma(0.6, scale=12.0)],
    ids=["lognormal", "gamma"],
)
def test_robbins_by_integration(rates):
    """The posterior mean of a rate, integrated, for two kinds of rates."""

    # over u = log θ the integrand is smooth and dies out at both ends
    u = np.linspace(-60, 7, 20_001)
    theta = np.exp(u)
    density = rates.pdf(theta) * theta

    def integral(f, power):
        counts = stats.poisson(theta).pmf(f)
        return integrate.trapezoid(theta**power * counts * density, u)

    for f in [0, 1, 4, 11]:
        posterior = integral(f, 1) / integral(f, 0)
        assert_allclose(
            (f + 1) * integral(f + 1, 0) / integral(f, 0),
            posterior,
            rtol=1e-8,
        )


def test_robbins_in_a_second_period():
    """Items met f times, met again: the Gamma's closed form, by draws."""
    a, b = 0.6, 0.05
    rng = np.random.default_rng(2)
    theta = rng.gamma(a, 1 / b, 400_000)
    first, second = rng.poisson(theta), rng.poisson(theta)
    share = stats.nbinom(a, b / (b + 1)).pmf
    for f in [0, 1, 3, 40]:
        again = second[first == f]
        error = again.std() / math.sqrt(len(again))
        formula = (f + 1) * share(f + 1) / share(f)
        assert_allclose(formula, (a + f) / (b + 1))
        assert abs(again.mean() - formula) < 4 * error
        assert abs(again.mean() - f) > 4 * error


@equation(
    "15.3",
    r"P'(i \mid h) = \frac{P(i \mid h)\,w_i}{\sum_j P(j \mid h)\,w_j}",
)
def test_another_popularity_tilts_the_answer():
    """A small world with all its histories, twice, by counting."""
    rng = np.random.default_rng(3)
    popularity = rng.dirichlet(np.full(6, 0.7))
    traces = rng.dirichlet(np.full(9, 0.5), 6)  # P(h | i)
    w = popularity**-0.6
    other = popularity * w / (popularity * w).sum()

    def answer(prior):
        joint = prior[:, None] * traces
        return joint / joint.sum(0)

    now = answer(popularity)
    assert_allclose(
        answer(other), now * w[:, None] / (now * w[:, None]).sum(0)
    )
    # and the tilted ranking has the most hits in the other world
    chosen = (np.log(now) + np.log(w)[:, None]).argmax(0)
    joint = other[:, None] * traces
    assert_allclose(joint[chosen, np.arange(9)].sum(), joint.max(0).sum())
    untilted = joint[now.argmax(0), np.arange(9)].sum()
    assert untilted < joint.max(0).sum()


def filter_of(n_items, **given):
    return SASRecConfig(
        n_items=n_items,
        d_model=8,
        dim_feedforward=16,
        num_layers=2,
        nhead=2,
        max_length=6,
        dropout=0.0,
        bft=BFTConfig(),
        **given,
    )


@equation(
    "15.4",
    r"\frac{\partial\mathcal L}{\partial\log\tau_i} = \sum_{t:\, x_t = i}"
    r" \frac{\partial\mathcal L}{\partial\log\lambda_t}",
)
def test_tau_hears_of_its_occurrences_only():
    """Gradients of the table against those of a copy for each token."""
    torch.manual_seed(4)
    model = build(filter_of(9)).double().eval()
    items = torch.tensor([[1, 2, 2, 5], [2, 7, 1, 3]])
    torch.nn.init.normal_(model.tau.learned.log_precision.weight, std=0.5)

    copies = []

    class Copied(torch.nn.Module):
        def forward(self, ids, embedding):
            copies.append(own(ids, embedding).detach().requires_grad_())
            return copies[-1]

    own = model.tau

    def loss():
        scores = model(items) @ model.items.weight.T
        return scores.flatten(0, 1).logsumexp(-1).sum()

    loss().backward()
    table = own.learned.log_precision.weight.grad[:, 0].clone()
    model.tau = Copied()
    loss().backward()
    of_tokens = copies[0].grad[..., 0]
    by_hand = torch.zeros(10, dtype=torch.float64)
    for row in range(2):
        for t in range(4):
            by_hand[items[row, t]] += of_tokens[row, t]
    torch.testing.assert_close(table, by_hand)
    assert (table[[4, 6, 8, 9]] == 0).all()
    assert (table[[1, 2, 5, 7]] != 0).all()
    # all of them are wrong answers, so all embeddings are moved
    assert (model.items.weight.grad[1:].norm(dim=1) > 0).all()


@pytest.mark.parametrize("loss", ["sampled", "full", "bce"])
def test_an_item_in_no_input_keeps_its_tau(loss):
    """Through the trainer: exactly the start, while its vector moves."""
    world = simulate(80, 20, length=(5, 7), seed=5).sequences
    rows = [list(world[user]) for user in range(len(world))]
    rows[0].insert(-2, 22)  # last of the training items: a target only
    rows[1].insert(-3, 23)  # read once
    sequences = Sequences.of(rows, n_items=23)
    config = filter_of(23, tau_start=2.5)
    torch.manual_seed(0)
    before = build(config).items.weight.detach()
    model = fit(
        sequences,
        config,
        TrainConfig(loss=loss, num_negatives=32, epochs=2, batch_size=16),
        device="cpu",
        progress=False,
    ).model
    log_tau = model.tau.of_items(model.items.weight)
    start = torch.tensor(math.log(2.5))
    assert (log_tau[[21, 22]] == start).all()
    assert log_tau[23] != start
    moved = (model.items.weight.detach() - before).norm(dim=1)
    assert (moved[[21, 22, 23]] > 0).all()
    # and the Q that nothing reads
    noise = model.encoder.layers[-1].get_parameter("log_process_noise")
    assert (noise == 0).all()


def adam_steps(gradients, lr, betas, late=False, eps=1e-30):
    """Displacements of one parameter by PyTorch's Adam.

    ``late``: after very many steps without a gradient.
    """
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=lr, betas=betas, eps=eps)
    if late:
        x.grad = torch.zeros_like(x)
        optimizer.step()
        assert x == 0
        optimizer.state[x]["step"] += 100_000
    path = [0.0]
    for g in gradients:
        x.grad = torch.tensor(float(g), dtype=torch.float64)
        optimizer.step()
        path.append(x.item())
    return np.diff(path)


def bound(betas):
    one, two = betas
    return (1 - one) / math.sqrt(1 - two) / math.sqrt(1 - one**2 / two)


@equation(
    "15.5",
    r"|\Delta\log\tau| \le \frac{\eta\,c}{\sqrt{1-r^2}}"
    r" \quad\text{in one step}",
)
@pytest.mark.parametrize("betas", BETAS)
def test_no_step_of_adam_is_longer(betas):
    """Random gradients stay below; the worst ones come as close as can be."""
    lr = 0.04
    rng = np.random.default_rng(6)
    for heavy in (1.0, 3.0):
        signs = rng.choice([-1, 1], 400)
        gradients = signs * np.exp(heavy * rng.normal(size=400))
        gradients[rng.random(400) < 0.6] = 0
        steps = np.abs(adam_steps(gradients, lr, betas))
        assert steps.max() <= lr * bound(betas) * (1 + 1e-9)
    # g ∝ (β₁/β₂)^k for k steps ago, long after the start
    gradients = (betas[0] / betas[1]) ** np.arange(120)[::-1]
    steps = np.abs(adam_steps(gradients, lr, betas, late=True))
    assert_allclose(steps[-1], lr * bound(betas), rtol=1e-6)


@pytest.mark.parametrize("betas", BETAS[:2])
def test_early_steps_are_within_the_bound_too(betas):
    """The least upper bound at step t, Adam's correction included."""
    one, two = betas
    t = np.arange(1, 20_000)
    r = one**2 / two
    at = (
        (1 - one)
        / math.sqrt(1 - two)
        * np.sqrt((1 - r**t) / (1 - r))
        * np.sqrt(1 - two**t)
        / (1 - one**t)
    )
    assert_allclose(at[0], 1)
    assert at.max() <= bound(betas) * (1 + 1e-9)
    assert_allclose(at[-1], bound(betas), rtol=1e-6)


@equation(
    "15.6",
    r"\Delta\log\tau = -\,\mathrm{sign}(g)\,\frac{\eta\,c}{1-r}"
    r" \quad\text{in all}",
)
@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("g", [-4.0, 1e-4])
def test_one_gradient_moves_as_far_whatever_its_size(betas, g):
    """PyTorch's Adam, fed one gradient late in training."""
    lr = 0.03
    steps = adam_steps([g] + [0] * 300, lr, betas, late=True)
    one, two = betas
    total = (1 - one) / math.sqrt(1 - two) / (1 - one / math.sqrt(two))
    assert_allclose(steps.sum(), -lr * math.copysign(total, g), rtol=1e-6)
    assert total > bound(betas)


@equation(
    "15.7",
    r"\mathrm{Var}\bigl[\log\hat\tau\bigr] = \psi'\!\left(\tfrac n2\right)"
    r" > \frac 2n",
)
@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_a_log_precision_from_n_errors(n):
    """By draws with standard error, by integration, and by information."""
    tau = 2.5
    rng = np.random.default_rng(7)
    errors = rng.normal(0, tau**-0.5, (200_000, n))
    log_tau = np.log(n / (errors**2).sum(1))
    formula = float(special.polygamma(1, n / 2))
    error = math.sqrt(stats.kurtosis(log_tau, fisher=False) - 1)
    error *= formula / math.sqrt(len(log_tau))
    assert abs(log_tau.var() - formula) < 4 * error
    bias = math.log(n / 2) - special.digamma(n / 2)
    assert abs((log_tau - math.log(tau)).mean() - bias) < 4 * math.sqrt(
        formula / len(log_tau)
    )
    # log χ²_n integrated
    moments = [
        integrate.quad(
            lambda u, k=k: u**k * math.exp(u) * stats.chi2(n).pdf(math.exp(u)),
            -70,
            7,
            limit=500,
        )[0]
        for k in (1, 2)
    ]
    assert_allclose(moments[1] - moments[0] ** 2, formula, rtol=1e-6)
    # minus the second derivative of the log-likelihood in log τ, expected
    log_at = torch.tensor(math.log(tau), dtype=torch.float64)
    squares = torch.full((n,), 1 / tau, dtype=torch.float64)  # E ε²
    information = -torch.func.hessian(
        lambda s: (0.5 * s - 0.5 * s.exp() * squares).sum()
    )(log_at)
    assert_allclose(information, n / 2)
    assert formula > 1 / information


@equation(
    "15.8",
    r"\mathrm{E}\bigl[(\log\tilde\tau - \log\tau)^2\bigr] = (1-K_n)\,s^2,"
    r" \qquad K_n = \frac{s^2}{s^2 + \psi'(n/2)}",
)
@pytest.mark.parametrize("shape", ["uniform", "laplace", "two values"])
@pytest.mark.parametrize("n", [1, 6])
def test_shrinking_a_log_precision(shape, n):
    """Draws of three shapes; the gain is the best one and kalman's."""
    m, s2, draws = 0.7, 1.3, 400_000
    rng = np.random.default_rng(8)
    unit = {
        "uniform": rng.uniform(-(3**0.5), 3**0.5, draws),
        "laplace": rng.laplace(0, 0.5**0.5, draws),
        "two values": rng.choice([-1.0, 1.0], draws),
    }[shape]
    truth = m + s2**0.5 * unit
    variance = float(special.polygamma(1, n / 2))
    estimate = np.log(n / rng.chisquare(n, draws)) + truth
    estimate -= math.log(n / 2) - special.digamma(n / 2)

    def loss(K):
        return (m + K * (estimate - m) - truth) ** 2

    K = s2 / (s2 + variance)
    squares = loss(K)
    error = squares.std() / math.sqrt(draws)
    assert abs(squares.mean() - (1 - K) * s2) < 4 * error
    best = optimize.minimize_scalar(lambda k: loss(k).mean(), bounds=(0, 1))
    assert abs(best.x - K) < 0.01
    log = torch.log(torch.tensor([1 / s2, 1 / variance], dtype=torch.float64))
    assert_allclose(kalman.gain(log[0], log[1]), K)
