"""Every numbered equation of chapter 1, from a source of its own.

Variances come from the covariance matrix and from simulation, the optimum
from a numerical minimiser.
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import optimize

from bft_ref.kriging import dispersion, kriging_weights
from tests.equations import equation

LAMBDA = np.array([0.2, 3.7, 1.4, 0.05, 9.0])
T = len(LAMBDA)
precisions = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)


def weights(seed=3):
    return np.random.default_rng(seed).dirichlet(np.ones(T))


@equation(
    "1.1",
    r"\mathrm{Var}\sum_j w_j x_j = \sum_j \frac{w_j^2}{\lambda_j}",
)
def test_variance_of_a_weighted_mean():
    """The quadratic form, and simulation with its standard error."""
    w = weights()
    expected = w @ np.diag(1 / LAMBDA) @ w
    assert_allclose((w**2 / LAMBDA).sum(), expected, rtol=1e-12)
    rng = np.random.default_rng(0)
    x = 7.0 + rng.normal(size=(100_000, T)) / LAMBDA**0.5
    squares = (x @ w - 7.0) ** 2
    error = squares.std() / len(squares) ** 0.5
    assert abs(squares.mean() - (w**2 / LAMBDA).sum()) < 4 * error
    assert error < 0.02 * expected


@equation(
    "1.2",
    r"\sum_j \frac{w_j^2}{\lambda_j} \ge \frac{1}{\sum_j \lambda_j},"
    r" \quad \text{with equality for }"
    r" w_j = \frac{\lambda_j}{\sum_i \lambda_i}",
)
def test_the_best_weights():
    """A numerical minimiser that knows the constraint only, and GLS."""
    found = optimize.minimize(
        lambda w: (w**2 / LAMBDA).sum(),
        np.full(T, 1 / T),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert_allclose(found.x, LAMBDA / LAMBDA.sum(), atol=1e-5)
    assert_allclose(found.fun, 1 / LAMBDA.sum(), rtol=1e-6)
    gls = np.linalg.inv(np.ones((1, T)) @ np.diag(LAMBDA) @ np.ones((T, 1)))
    assert_allclose(1 / LAMBDA.sum(), gls.item(), rtol=1e-12)
    ours = kriging_weights(
        torch.zeros(1, T, dtype=torch.float64), torch.tensor(LAMBDA).log()
    )
    assert_allclose(ours[0], found.x, atol=1e-5)
    for seed in range(20):
        w = weights(seed)
        assert (w**2 / LAMBDA).sum() > 1 / LAMBDA.sum()


@equation(
    "1.3",
    r"\frac{\mathrm{Var}_{\text{equal}}}{\mathrm{Var}_{\text{best}}} ="
    r" \left(\frac1T\sum_j \lambda_j\right)"
    r"\left(\frac1T\sum_j \frac1{\lambda_j}\right) \ge 1",
)
@given(precisions)
@settings(deadline=None, max_examples=80)
def test_price_of_equal_weights(raw):
    """Both variances as quadratic forms; one only if all are equal."""
    lam = np.array(raw)
    equal = np.full(len(lam), 1 / len(lam))
    best = lam / lam.sum()
    covariance = np.diag(1 / lam)
    ratio = (equal @ covariance @ equal) / (best @ covariance @ best)
    price = lam.mean() * (1 / lam).mean()
    assert_allclose(price, ratio, rtol=1e-9)
    assert price >= 1 - 1e-12
    if lam.max() > 1.1 * lam.min():
        assert price > 1 + 1e-5
    assert_allclose(np.full(4, 2.5).mean() * np.full(4, 0.4).mean(), 1)


@equation(
    "1.4",
    r"D \le \sum_j \alpha_j (v_j - v_1)^2 \le (1-\alpha_1)\,R^2",
)
@given(
    st.lists(st.floats(-50, 50), min_size=2, max_size=9),
    st.floats(0, 1),
    st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=100)
def test_a_sink_has_no_dispersion(raw, mass, seed):
    """numpy's weighted variance against both bounds."""
    v = np.array(raw)
    rest = np.random.default_rng(seed).dirichlet(np.ones(len(v) - 1))
    alpha = np.concatenate([[mass], (1 - mass) * rest])
    D = np.cov(v, aweights=alpha, ddof=0).item()
    middle = (alpha * (v - v[0]) ** 2).sum()
    R = np.abs(v - v[0]).max()
    slack = 1e-9 * (1 + R**2)
    assert middle + slack >= D
    assert middle <= (1 - mass) * R**2 + slack
    ours = dispersion(torch.tensor(alpha)[None], torch.tensor(v)[:, None])
    assert_allclose(ours.item(), D, atol=1e-9 * (1 + np.abs(v).max() ** 2))


def test_the_first_bound_is_attained_only_at_the_mean():
    """D is the minimum over centres, so v₁ = μ gives equality."""
    alpha, v = np.array([0.4, 0.3, 0.3]), np.array([2.0, 1.0, 3.0])
    D = np.cov(v, aweights=alpha, ddof=0).item()
    assert_allclose((alpha * (v - v[0]) ** 2).sum(), D, rtol=1e-12)
    shifted = np.array([2.5, 1.0, 3.0])
    D = np.cov(shifted, aweights=alpha, ddof=0).item()
    assert (alpha * (shifted - 2.5) ** 2).sum() > D * 1.01
