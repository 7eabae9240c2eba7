"""Every numbered equation of chapter 4, from a source of its own.

Expectations of quadratic forms come from traces and from simulation,
likelihoods from scipy's densities and from numerical integration.
"""

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import integrate, linalg, optimize, stats

from bft_ref.kriging import dispersion, effective_sample_size
from bft_ref.notebook.examples import gravity, silicon
from bft_ref.reml import reml_variance
from tests.equations import equation

SIGMA2 = 2.5
MEAN = 7.0
T = 6


def weights(seed=2, size=T):
    return np.random.default_rng(seed).dirichlet(np.full(size, 0.8))


def values(seed=0, size=T):
    return np.random.default_rng(100 + seed).normal(MEAN, SIGMA2**0.5, size)


def quadratic(a):
    """M with D = vᵀMv."""
    return np.diag(a) - np.outer(a, a)


def spread(a, v):
    return dispersion(torch.tensor(a)[None], torch.tensor(v)[:, None]).item()


def n_of(a):
    return effective_sample_size(torch.tensor(a)).item()


def simulated(a, scale, draws=100_000):
    """μ and D of many draws; ``scale`` is the SD of each value."""
    rng = np.random.default_rng(7)
    v = MEAN + rng.normal(size=(draws, len(a))) * scale
    mu = v @ a
    return mu, ((v - mu[:, None]) ** 2) @ a


def agrees(sample, expected):
    error = sample.std() / len(sample) ** 0.5
    assert error < 0.02 * abs(expected)
    assert abs(sample.mean() - expected) < 4 * error


fractions = st.lists(st.floats(1e-3, 1), min_size=2, max_size=12)


@equation(
    "4.1",
    r"D = \sum_j \tilde\alpha_j (v_j - \mu)^2"
    r" = \sum_j \tilde\alpha_j v_j^2 - \mu^2",
)
def test_dispersion():
    """numpy's weighted covariance; any centre; the definition."""
    a, v = weights(), values()
    mu = a @ v
    expected = np.cov(v, aweights=a, ddof=0)
    assert_allclose((a * (v - mu) ** 2).sum(), expected, rtol=1e-12)
    assert_allclose((a * v**2).sum() - mu**2, expected, rtol=1e-10)
    assert_allclose(spread(a, v), expected, rtol=1e-10)
    assert_allclose(spread(a, v - 1e3), expected, rtol=1e-7)


@equation(
    "4.2",
    r"\mathrm{Var}\,\mu = \frac{\sigma^2}{n},"
    r" \qquad n = \frac{1}{\sum_j \tilde\alpha_j^2}",
)
def test_effective_sample_size():
    a = weights()
    exact = a @ (SIGMA2 * np.eye(T)) @ a
    assert_allclose(SIGMA2 / n_of(a), exact, rtol=1e-12)
    mu, _ = simulated(a, SIGMA2**0.5)
    agrees((mu - MEAN) ** 2, SIGMA2 / n_of(a))


@given(fractions)
@settings(deadline=None, max_examples=50)
def test_it_lies_between_one_and_the_number_of_tokens(raw):
    a = np.array(raw) / sum(raw)
    assert 1 - 1e-12 <= n_of(a) <= len(a) + 1e-12
    assert_allclose(1 / (a**2).sum(), n_of(a), rtol=1e-9)


@equation(
    "4.3",
    r"\mathrm{E}\,D = \sigma^2\left(1 - \sum_j \tilde\alpha_j^2\right)"
    r" = \sigma^2\,\frac{n-1}{n}",
)
def test_expected_dispersion():
    """tr(MΣ) + mean terms, and simulation."""
    a = weights()
    n = n_of(a)
    M = quadratic(a)
    m = np.full(T, MEAN)
    exact = np.trace(M @ (SIGMA2 * np.eye(T))) + m @ M @ m
    assert_allclose(SIGMA2 * (1 - (a**2).sum()), exact, rtol=1e-12)
    assert_allclose(SIGMA2 * (n - 1) / n, exact, rtol=1e-12)
    agrees(simulated(a, SIGMA2**0.5)[1], SIGMA2 * (n - 1) / n)


@equation(
    "4.4",
    r"\ell(V) = -\tfrac12\left(\log|V|"
    r" + \log|X^\top V^{-1}X| + r^\top V^{-1}r\right)",
)
@pytest.mark.parametrize("columns", [1, 2])
def test_restricted_likelihood(columns):
    """Quadrature over β; contrasts of scipy's null space; statsmodels' GLS."""
    rng = np.random.default_rng(11)
    X = np.c_[np.ones(T), rng.normal(size=T)][:, :columns]
    root = rng.normal(size=(T, T))
    V, v = root @ root.T + SIGMA2 * np.eye(T), values()
    fit = sm.GLS(v, X, sigma=V).fit()
    information = X.T @ linalg.solve(V, X)
    formula = -0.5 * (
        np.linalg.slogdet(V)[1]
        + np.linalg.slogdet(information)[1]
        + fit.resid @ linalg.solve(V, fit.resid)
    )
    A = linalg.null_space(X.T).T
    contrasts = stats.multivariate_normal(cov=A @ V @ A.T).logpdf(A @ v)
    # contrasts lose the scale of X, and nothing of V
    scale = 0.5 * np.linalg.slogdet(X.T @ X)[1]
    two_pi = (T - columns) / 2 * np.log(2 * np.pi)
    assert_allclose(formula, contrasts - scale + two_pi, rtol=1e-9)

    step = np.linalg.cholesky(linalg.inv(information))
    nodes = np.linspace(-9, 9, 121)  # the trapezium rule on a Gaussian
    grid = np.stack(np.meshgrid(*[nodes] * columns), -1).reshape(-1, columns)
    beta = fit.params + grid @ step.T
    density = stats.multivariate_normal(cov=V).pdf(v - beta @ X.T)
    volume = (nodes[1] - nodes[0]) ** columns * np.linalg.det(step)
    integrated = np.log(density.sum() * volume) + two_pi
    assert_allclose(integrated, formula, rtol=1e-9)


@pytest.mark.parametrize("s2", [0.8, 2.5])
def test_the_three_cases_of_the_restricted_likelihood(s2):
    """(4.5), (4.6) and (4.7) are (4.4), the last with n for T in log|V|."""
    a, v = weights(), values()
    mu, n, D = a @ v, n_of(a), spread(a, v)

    def general(V):
        precision = linalg.inv(V).sum()
        r = v - linalg.inv(V).sum(0) @ v / precision
        logs = np.linalg.slogdet(V)[1] + np.log(precision)
        return -0.5 * (logs + r @ linalg.solve(V, r))

    two_pi = np.log(2 * np.pi)
    even = integral(np.full(T, 1 / T), v, s2, T)
    alike = general(s2 * np.eye(T))
    assert_allclose(alike - (T - 1) / 2 * two_pi, np.log(even), rtol=1e-8)

    precision = general(np.diag(s2 / a)) - general(np.diag(1 / a))
    due = -(T - 1) / 2 * np.log(s2) - D / 2 * (1 / s2 - 1)
    assert_allclose(precision, due, rtol=1e-9)

    V = np.diag(s2 / (n * a))
    r = v - mu  # the GLS mean of V is μ
    assert_allclose(r @ linalg.solve(V, r), n * D / s2, rtol=1e-9)
    whole = general(V) - 0.5 * (n * np.log(s2) - np.linalg.slogdet(V)[1])
    local = np.log(integral(a, v, s2, n)) + n / 2 * two_pi
    assert_allclose(whole + two_pi / 2, local, rtol=1e-8)


def integral(a, v, s2, total):
    """∫ Π N(v_j; m, σ²)^(total·a_j) dm by quadrature."""
    return integrate.quad(
        lambda m: np.exp(total * a @ stats.norm(m, s2**0.5).logpdf(v)),
        a @ v - 40,
        a @ v + 40,
        points=[a @ v],
        epsabs=0,
        epsrel=1e-10,
        limit=200,
    )[0]


@equation(
    "4.5",
    r"\int \prod_j \mathcal N(v_j; m, \sigma^2)\, dm"
    r" = T^{-1/2}\, (2\pi\sigma^2)^{-(T-1)/2}\, e^{-TD/2\sigma^2}",
)
def test_mean_integrated_out():
    a, v = np.full(T, 1 / T), values()
    D = spread(a, v)
    for s2 in [0.8, 2.5, 9.0]:
        power = (2 * np.pi * s2) ** (-(T - 1) / 2)
        formula = T**-0.5 * power * np.exp(-T * D / 2 / s2)
        assert_allclose(formula, integral(a, v, s2, T), rtol=1e-8)


@equation(
    "4.6",
    r"\frac{D}{c} \sim \chi^2_{T-1} \qquad \text{if } v_j \sim"
    r" \mathcal N\left(m, \frac{c}{w_j}\right) \text{ independently}, \quad"
    r" \tilde\alpha_j = w_j",
)
def test_precision_weights():
    """The form's eigenvalues are T−1 ones and a zero; statsmodels' WLS."""
    a = weights()
    scale = np.diag(a**-0.5)
    eigenvalues = np.linalg.eigvalsh(scale @ quadratic(a) @ scale)
    assert_allclose(eigenvalues, [0] + [1] * (T - 1), atol=1e-10)

    _, D = simulated(a, np.sqrt(SIGMA2 / a), 20_000)
    law = stats.chi2(T - 1)
    assert stats.kstest(D / SIGMA2, law.cdf).pvalue > 1e-3

    v = values()
    fit = sm.WLS(v, np.ones(T), weights=a).fit()
    assert_allclose(spread(a, v) / (T - 1), fit.scale, rtol=1e-9)


@equation(
    "4.7",
    r"L(\sigma^2) = \int \prod_j \mathcal N(v_j; m, \sigma^2)"
    r"^{n\tilde\alpha_j}\, dm = n^{-1/2}\, (2\pi\sigma^2)^{-(n-1)/2}\,"
    r" e^{-nD/2\sigma^2}",
)
def test_local_restricted_likelihood():
    a, v = weights(), values()
    n, D = n_of(a), spread(a, v)
    assert abs(n - T) > 1  # unequal weights, or nothing new is proven
    for s2 in [0.8, 2.5, 9.0]:
        power = (2 * np.pi * s2) ** (-(n - 1) / 2)
        formula = n**-0.5 * power * np.exp(-n * D / 2 / s2)
        assert_allclose(formula, integral(a, v, s2, n), rtol=1e-8)


@equation(
    "4.8",
    r"\hat\sigma^2 = \arg\max_{\sigma^2} L(\sigma^2) = \frac{nD}{n-1}",
)
def test_maximum_of_the_restricted_likelihood():
    a, v = weights(), values()
    n = n_of(a)
    best = optimize.minimize_scalar(
        lambda t: -np.log(integral(a, v, np.exp(t), n)),
        bounds=(-2, 4),
        method="bounded",
        options={"xatol": 1e-7},
    )
    D = torch.tensor(spread(a, v))
    found = reml_variance(D, torch.tensor(n)).item()
    assert_allclose(found, np.exp(best.x), rtol=1e-5)


@equation(
    "4.9",
    r"\mathrm{E}\,\frac{\kappa D}{\kappa - 1} = \sigma^2\,"
    r" \frac{\kappa}{\kappa-1} \cdot \frac{n-1}{n}",
)
def test_only_total_weight_n_is_unbiased():
    a = weights()
    n = n_of(a)
    _, D = simulated(a, SIGMA2**0.5)
    for kappa in [n, T, 2.0]:
        factor = kappa / (kappa - 1)
        agrees(factor * D, SIGMA2 * factor * (n - 1) / n)
    expected = np.trace(quadratic(a))
    root = optimize.brentq(lambda k: k / (k - 1) * expected - 1, 1.01, 99)
    assert_allclose(root, n, rtol=1e-9)
    estimate = reml_variance(torch.tensor(D), torch.tensor(n)).numpy()
    agrees(estimate, SIGMA2)


def powers(a):
    return (a**2).sum(), (a**3).sum()


@equation(
    "4.10",
    r"\mathrm{Var}\,D = 2\sigma^4\left(S_2 - 2S_3 + S_2^2\right)",
)
def test_variance_of_the_dispersion():
    a = weights()
    s2, s3 = powers(a)
    exact = 2 * SIGMA2**2 * np.trace(quadratic(a) @ quadratic(a))
    formula = 2 * SIGMA2**2 * (s2 - 2 * s3 + s2**2)
    assert_allclose(formula, exact, rtol=1e-12)
    _, D = simulated(a, SIGMA2**0.5)
    agrees((D - D.mean()) ** 2, formula)


@equation(
    "4.11",
    r"f = \frac{(1-S_2)^2}{S_2 - 2S_3 + S_2^2} \ge n - 1",
)
@given(fractions)
@settings(deadline=None, max_examples=100)
def test_n_less_one_is_conservative(raw):
    a = np.array(raw) / sum(raw)
    s2, s3 = powers(a)
    f = (1 - s2) ** 2 / (s2 - 2 * s3 + s2**2)
    M = quadratic(a)
    assert_allclose(f, np.trace(M) ** 2 / np.trace(M @ M), rtol=1e-6)
    assert f >= (n_of(a) - 1) * (1 - 1e-9)


@pytest.mark.parametrize("seen", [2, 5])
def test_equality_for_equal_weights(seen):
    a = np.array([1 / seen] * seen + [0.0] * 3)
    s2, s3 = powers(a)
    f = (1 - s2) ** 2 / (s2 - 2 * s3 + s2**2)
    assert_allclose(f, seen - 1, rtol=1e-12)
    assert_allclose(n_of(a), seen, rtol=1e-12)


@equation(
    "4.12",
    r"\mathrm{Var}\,\mu = \frac{\bar\sigma^2}{n_C}, \quad \mathrm{E}\,D ="
    r" \bar\sigma^2\,\frac{n_C-1}{n_C}, \quad n_C = \frac{\sum_j"
    r" \tilde\alpha_j/\bar\lambda_j}{\sum_j \tilde\alpha_j^2/\bar\lambda_j}",
)
def test_effective_sample_size_for_unequal_precisions():
    a = weights(3)
    lam = np.random.default_rng(4).gamma(2.0, 1.5, T)
    pooled = SIGMA2 * (a / lam).sum()
    n_c = (a / lam).sum() / (a**2 / lam).sum()
    covariance = np.diag(SIGMA2 / lam)
    assert_allclose(pooled / n_c, a @ covariance @ a, rtol=1e-12)
    exact = np.trace(quadratic(a) @ covariance)
    assert_allclose(pooled * (n_c - 1) / n_c, exact, rtol=1e-12)
    agrees(simulated(a, np.sqrt(SIGMA2 / lam))[1], exact)
    assert abs(n_c - n_of(a)) > 0.1


def test_what_the_estimate_estimates():
    """The weighted mean of the variances, up to a factor of n and n_C."""
    a = weights()
    n, variances = n_of(a), SIGMA2 / a  # the precision model: n_C = T
    _, D = simulated(a, np.sqrt(variances))
    estimate = reml_variance(torch.tensor(D), torch.tensor(n)).numpy()
    due = (a @ variances) * n / (n - 1) * (T - 1) / T
    assert_allclose(due, n * (T - 1) / (n - 1) * SIGMA2, rtol=1e-12)
    agrees(estimate, due)


@equation(
    "4.13",
    r"p(Av \mid \sigma^2) = (2\pi\sigma^2)^{-(T-1)/2}\, e^{-TD/2\sigma^2}",
)
def test_error_contrasts():
    """scipy's null space instead of Helmert's rows."""
    A = linalg.null_space(np.ones((1, T))).T
    v = values()
    D = spread(np.full(T, 1 / T), v)
    for s2 in [0.4, 2.5, 9.0]:
        density = stats.multivariate_normal(cov=s2 * A @ A.T).pdf(A @ v)
        power = (2 * np.pi * s2) ** (-(T - 1) / 2)
        assert_allclose(power * np.exp(-T * D / 2 / s2), density, rtol=1e-8)


def test_the_data_are_those_of_the_sources():
    """NIST's certified sums of squares; CODATA's χ² as others find it."""
    v = silicon().value.view(5, 5)
    within = v.sub(v.mean(1, keepdim=True)).square().sum().item()
    between = 5 * v.mean(1).var(correction=0).item() * 5
    assert_allclose(within, 2.16636560000000e-01, rtol=1e-9)
    assert_allclose(between, 5.11462616000000e-02, rtol=1e-8)
    names, g, u = gravity()
    assert len(names) == len(g) == len(u) == 16
    w = u**-2
    chi2 = (w * (g - (w * g).sum() / w.sum()) ** 2).sum().item()
    assert_allclose(chi2, 197.8399, atol=1e-3)
