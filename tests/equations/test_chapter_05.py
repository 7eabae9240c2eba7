"""Every numbered equation of chapter 5, from a source of its own.

The posterior is integrated numerically or taken from scipy's inverse-gamma
and Student-t; simulations are held to four standard errors.
"""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy import integrate, optimize, special, stats
from torch.nn import functional as F

from bft_ref.notebook.examples import silver
from bft_ref.reml import (
    observation_variance,
    posterior_scale,
    reml_variance,
)
from tests.equations import equation

LAWS = [(0.7, 2.5), (3.4, 0.4), (9.0, 6.0)]
CASES = [  # D, n, s₀², ν₀
    (0.9, 2.6, 2.4, 1.0),
    (3.1, 7.3, 0.5, 1.0),
    (1.7, 1.2, 4.0, 3.5),
]


def inverse_chi2(nu, s2):
    return stats.invgamma(nu / 2, scale=nu * s2 / 2)


def tensors(*numbers):
    return [torch.tensor(float(x), dtype=torch.float64) for x in numbers]


def scale_of(D, n, s02, nu0):
    return posterior_scale(*tensors(D, n, s02), nu0).item()


def precision_of(D, n, s02, nu0, reading):
    return 1 / observation_variance(*tensors(D, n, s02), nu0, reading).item()


def numerical_posterior(D, n, s02, nu0):
    """The density of σ² from likelihood and prior, normalised by quad.

    Integrals run over log σ².
    """

    def unnormalised(s2):
        power = -(n - 1) / 2 * np.log(s2) - n * D / 2 / s2
        return np.exp(power) * inverse_chi2(nu0, s02).pdf(s2)

    def expect(function):
        return integrate.quad(
            lambda t: (
                function(np.exp(t)) * unnormalised(np.exp(t)) * np.exp(t)
            ),
            -12,
            40,
            points=[0.0],
            epsabs=0,
            epsrel=1e-9,
            limit=400,
        )[0]

    total = expect(lambda s2: 1.0)
    return (
        lambda s2: unnormalised(s2) / total,
        lambda function: expect(function) / total,
    )


@equation(
    "5.1",
    r"p(\sigma^2) = \frac{(\nu s^2/2)^{\nu/2}}{\Gamma(\nu/2)}\,"
    r" (\sigma^2)^{-\nu/2-1}\, e^{-\nu s^2/2\sigma^2}",
)
@pytest.mark.parametrize(("nu", "s2"), LAWS)
def test_density(nu, s2):
    """The χ² law of νs²/σ², and scipy's inverse-gamma."""
    x = np.geomspace(0.05, 40, 9)
    log = nu / 2 * np.log(nu * s2 / 2) - special.gammaln(nu / 2)
    density = np.exp(log) * x ** (-nu / 2 - 1) * np.exp(-nu * s2 / 2 / x)
    changed = stats.chi2(nu).pdf(nu * s2 / x) * nu * s2 / x**2
    assert_allclose(density, changed, rtol=1e-10)
    assert_allclose(density, inverse_chi2(nu, s2).pdf(x), rtol=1e-10)


@equation(
    "5.2", r"\mathrm{E}\,\sigma^2 = \frac{\nu s^2}{\nu-2} \quad (\nu > 2)"
)
@pytest.mark.parametrize(("nu", "s2"), LAWS)
def test_mean(nu, s2):
    law = inverse_chi2(nu, s2)
    if nu <= 2:
        assert np.isinf(law.mean())
        # the part below a growing bound grows without bound
        parts = [law.expect(ub=10.0**k) for k in (2, 4, 6)]
        assert parts[2] > 5 * parts[1] > 25 * parts[0]
    else:
        assert_allclose(nu * s2 / (nu - 2), law.mean(), rtol=1e-10)
        assert_allclose(nu * s2 / (nu - 2), law.expect(), rtol=1e-6)


@equation("5.3", r"\arg\max_{\sigma^2}\, p(\sigma^2) = \frac{\nu s^2}{\nu+2}")
@pytest.mark.parametrize(("nu", "s2"), LAWS)
def test_mode(nu, s2):
    law = inverse_chi2(nu, s2)
    best = optimize.minimize_scalar(
        lambda t: -law.logpdf(np.exp(t)),
        bounds=(-6, 6),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert_allclose(nu * s2 / (nu + 2), np.exp(best.x), rtol=1e-6)


@equation("5.4", r"\mathrm{E}\,\frac{1}{\sigma^2} = \frac{1}{s^2}")
@pytest.mark.parametrize(("nu", "s2"), LAWS)
def test_expected_precision(nu, s2):
    draws = inverse_chi2(nu, s2).rvs(
        200_000, random_state=np.random.default_rng(1)
    )
    sample = 1 / draws
    error = sample.std() / len(sample) ** 0.5
    assert abs(sample.mean() - 1 / s2) < 4 * error < 0.05 / s2
    # integrated over log σ²
    law = inverse_chi2(nu, s2)
    found, _ = integrate.quad(
        lambda t: law.pdf(np.exp(t)), -15, 40, points=[0.0], limit=400
    )
    assert_allclose(found, 1 / s2, rtol=1e-6)


@equation(
    "5.5",
    r"m \mid \sigma^2 \sim \mathcal N\left(\mu, \frac{\sigma^2}{n}\right),"
    r" \qquad \sigma^2 \sim \text{Scaled-Inv-}\chi^2(\nu, s^2),"
    r" \qquad \nu = \nu_0 + n - 1",
)
@pytest.mark.parametrize("case", CASES)
def test_posterior(case):
    """Powers of Gaussians times priors; the mean integrated out by quad."""
    D, n, s02, nu0 = case
    # values and weights that have this n and, scaled, this D
    a = optimize.brentq(lambda a: a**2 + (1 - a) ** 2 / 8 - 1 / n, 1 / 9, 1)
    weights = np.r_[a, np.full(8, (1 - a) / 8)]
    v = np.array([0.4, -1.0, 2.0, 3.1, -0.3, 0.8, 1.7, -2.2, 0.1])
    v = 3.0 + (v - weights @ v) * np.sqrt(
        D / np.cov(v, aweights=weights, ddof=0)
    )
    mu = weights @ v
    assert_allclose([weights @ (v - mu) ** 2, 1 / (weights**2).sum()], [D, n])

    def joint(m, s2):
        logs = n * weights * stats.norm(m, s2**0.5).logpdf(v)
        return np.exp(logs.sum()) * inverse_chi2(nu0, s02).pdf(s2)

    law = inverse_chi2(nu0 + n - 1, scale_of(*case))
    ratios = []
    for s2 in (0.5, 2.5, 9.0):
        wide = 12 * (s2 / n) ** 0.5
        total, _ = integrate.quad(joint, mu - wide, mu + wide, (s2,))
        ratios.append(total / law.pdf(s2))
        for m in (mu - 0.7, mu, mu + 1.6):
            given = stats.norm(mu, (s2 / n) ** 0.5).pdf(m)
            assert_allclose(joint(m, s2) / total, given, rtol=1e-6)
    assert_allclose(ratios, ratios[0], rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_marginal_posterior(case):
    """The restricted likelihood times prior, normalised by quadrature."""
    _, n, _, nu0 = case
    density, _ = numerical_posterior(*case)
    law = inverse_chi2(nu0 + n - 1, scale_of(*case))
    x = np.geomspace(0.1, 30, 9)
    assert_allclose(density(x), law.pdf(x), rtol=1e-6)


@equation("5.6", r"s^2 = \frac{\nu_0 s_0^2 + nD}{\nu_0 + n - 1}")
@pytest.mark.parametrize("case", CASES)
def test_posterior_scale(case):
    """One over the expected precision of the numerical posterior."""
    D, n, s02, nu0 = case
    _, expect = numerical_posterior(*case)
    formula = (nu0 * s02 + n * D) / (nu0 + n - 1)
    assert_allclose(formula, 1 / expect(lambda s2: 1 / s2), rtol=1e-6)
    assert_allclose(scale_of(*case), formula, rtol=1e-12)


@equation(
    "5.7",
    r"s^2 = w\,s_0^2 + (1-w)\,\hat\sigma^2,"
    r" \qquad w = \frac{\nu_0}{\nu_0+n-1}",
)
@pytest.mark.parametrize("case", CASES)
def test_shrinkage(case):
    D, n, s02, nu0 = case
    w = nu0 / (nu0 + n - 1)
    reml = reml_variance(*tensors(D, n)).item()
    assert_allclose(scale_of(*case), w * s02 + (1 - w) * reml, rtol=1e-12)


def test_limits_of_the_posterior_scale():
    assert scale_of(0.0, 1.0, 2.4, 1.0) == 2.4
    assert scale_of(0.0, 1.0, 2.4, 7.0) == 2.4
    assert_allclose(scale_of(1.7, 1e9, 2.4, 1.0), 1.7, rtol=1e-8)
    assert_allclose(scale_of(1.7, 5.0, 2.4, 1e9), 2.4, rtol=1e-8)
    reml = reml_variance(*tensors(1.7, 5.0)).item()
    assert_allclose(scale_of(1.7, 5.0, 2.4, 1e-9), reml, rtol=1e-8)


def conditional_variance(name, n, sigma2=2.5, draws=200_000):
    """Var of what a reading describes, n equal weights, σ² known."""
    rng = np.random.default_rng(2)
    v = 3.0 + rng.normal(size=(draws, n)) * sigma2**0.5
    new = 3.0 + rng.normal(size=draws) * sigma2**0.5
    described = {
        "prediction": new - v.mean(1),
        "mean": v.mean(1) - 3.0,
        "value": new - 3.0,
    }[name]
    return (described**2).mean(), (described**2).std() / draws**0.5


def check_reading(name, factor):
    """``factor`` is Var/σ² as a function of n."""
    for n in [1, 4]:
        found, error = conditional_variance(name, n)
        assert abs(found - 2.5 * factor(n)) < 4 * error
    for case in CASES:
        _, expect = numerical_posterior(*case)
        expected = expect(lambda s2, n=case[1]: 1 / (s2 * factor(n)))
        assert_allclose(precision_of(*case, name), expected, rtol=1e-6)


@equation(
    "5.8",
    r"\lambda^\mu_{\mathrm{prediction}} = \mathrm{E}\left[\frac{1}"
    r"{\sigma^2(1+1/n)}\right] = \frac{n}{(n+1)\,s^2}",
)
def test_precision_of_a_prediction():
    check_reading("prediction", lambda n: 1 + 1 / n)
    D, n, s02, nu0 = CASES[0]
    formula = n / ((n + 1) * scale_of(D, n, s02, nu0))
    assert_allclose(precision_of(*CASES[0], "prediction"), formula)


@equation(
    "5.9",
    r"\lambda^\mu_{\mathrm{mean}} = \mathrm{E}\left[\frac{n}{\sigma^2}"
    r"\right] = \frac{n}{s^2}",
)
def test_precision_of_the_mean():
    check_reading("mean", lambda n: 1 / n)
    formula = CASES[0][1] / scale_of(*CASES[0])
    assert_allclose(precision_of(*CASES[0], "mean"), formula)


@equation(
    "5.10",
    r"\lambda^\mu_{\mathrm{value}} = \mathrm{E}\left[\frac{1}{\sigma^2}"
    r"\right] = \frac{1}{s^2}",
)
def test_precision_of_a_value():
    check_reading("value", lambda n: 1.0)
    formula = 1 / scale_of(*CASES[0])
    assert_allclose(precision_of(*CASES[0], "value"), formula)


@equation(
    "5.11",
    r"\frac{v_{\mathrm{new}}-\mu}{s\sqrt{1+1/n}} \sim t_\nu, \qquad"
    r" \mathrm{Var}\,v_{\mathrm{new}} = \frac{\nu}{\nu-2}\,"
    r" s^2\left(1+\frac1n\right) \quad (\nu>2)",
)
@pytest.mark.parametrize(("nu", "s2", "n"), [(1.6, 2.5, 1.6), (9.0, 0.4, 9)])
def test_student_marginal(nu, s2, n):
    rng = np.random.default_rng(3)
    sigma2 = inverse_chi2(nu, s2).rvs(200_000, random_state=rng)
    error = rng.normal(size=len(sigma2)) * np.sqrt(sigma2 * (1 + 1 / n))
    scaled = error / np.sqrt(s2 * (1 + 1 / n))
    assert stats.kstest(scaled[:50_000], stats.t(nu).cdf).pvalue > 1e-3
    if nu > 2:
        squares = error**2
        standard = squares.std() / len(squares) ** 0.5
        expected = nu / (nu - 2) * s2 * (1 + 1 / n)
        assert abs(squares.mean() - expected) < 4 * standard
    else:
        assert np.isinf(stats.t(nu).var())


@equation(
    "5.12",
    r"\mathrm{Var}\,v_i = g_i\,c, \qquad"
    r" g_i = \sum_k (W_{V,ik}\,\gamma_k)^2",
)
def test_variance_of_a_value():
    """Values of normalised states with independent features."""
    gen = torch.Generator().manual_seed(4)
    w = torch.randn(3, 8, generator=gen, dtype=torch.float64)
    gamma = 0.5 + torch.rand(8, generator=gen, dtype=torch.float64)
    c = 0.3
    z = c**0.5 * torch.randn(100_000, 8, generator=gen, dtype=torch.float64)
    squares = F.linear(z * gamma, w).square()
    expected = c * (w * gamma).square().sum(-1)
    error = squares.std(0) / len(squares) ** 0.5
    assert ((squares.mean(0) - expected).abs() < 4 * error).all()
    full = (w * gamma) @ (c * torch.eye(8, dtype=w.dtype)) @ (w * gamma).mT
    torch.testing.assert_close(full.diagonal(), expected)


@equation(
    "5.13",
    r"\mathrm{Var}\,v_i = \frac{1}{\varsigma^2} \sum_k \frac{(a_{ik} -"
    r" \bar a_i - z_k b_i)^2}{\lambda_k}, \qquad \bar a_i = \frac1d"
    r" \sum_k a_{ik}, \quad b_i = \frac1d \sum_k a_{ik} z_k",
)
def test_variance_of_a_value_with_unequal_precisions():
    """Autograd's Jacobian of norm and W_V, and a simulation."""
    gen = torch.Generator().manual_seed(13)
    d, f64 = 12, torch.float64
    h = 2.0 + 1.5 * torch.randn(d, generator=gen, dtype=f64)
    w = torch.randn(4, d, generator=gen, dtype=f64)
    gamma = 0.5 + torch.rand(d, generator=gen, dtype=f64)
    lam = 2e4 * torch.randn(d, generator=gen, dtype=f64).exp()

    def value(state):
        return F.layer_norm(state, (d,), eps=0.0) * gamma @ w.mT

    a, norm = w * gamma, h.std(correction=0)
    z = (h - h.mean()) / norm
    b = (a * z).mean(-1, keepdim=True)
    terms = (a - a.mean(-1, keepdim=True) - z * b).square()
    formula = (terms / lam).sum(-1) / norm**2
    J = torch.func.jacrev(value)(h)
    full = J @ torch.diag(1 / lam) @ J.mT
    torch.testing.assert_close(formula, full.diagonal())
    noise = torch.randn(200_000, d, generator=gen, dtype=f64) * lam**-0.5
    measured = value(h + noise).var(0)
    assert_allclose(formula, measured, rtol=0.02)
    # (5.12) with the mean of 1/λ is another number, feature by feature
    default = a.square().sum(-1) * (1 / lam).mean() / norm**2
    assert ((default / formula - 1).abs() > 0.1).any()
    # with equal precisions it is an upper bound
    equal = terms.sum(-1)
    direct = a.square().sum(-1) - d * a.mean(-1) ** 2 - d * b[:, 0] ** 2
    torch.testing.assert_close(equal, direct)
    assert (equal <= a.square().sum(-1)).all()


@equation(
    "5.14",
    r"\exp\,\mathrm{E}\left[\log \mathcal N(\mu; h, f\sigma^2)\right]"
    r" \propto \exp\left(-\frac{(\mu-h)^2}{2f}\,\mathrm{E}\left["
    r"\frac1{\sigma^2}\right]\right)",
)
@pytest.mark.parametrize(("nu", "s2"), LAWS)
def test_variational_step(nu, s2):
    """The expected log density by quadrature, and q(h) by minimising KL."""
    f, prior_precision, z = 1.3, 0.6, 1.7
    law = inverse_chi2(nu, s2)

    def expected_log(h):
        return integrate.quad(
            lambda t: (
                stats.norm(h, np.sqrt(f * np.exp(t))).logpdf(z)
                * law.pdf(np.exp(t))
                * np.exp(t)
            ),
            np.log(s2) - 12,
            np.log(s2) + 60 / min(nu, 4),
            points=[np.log(s2)],
            limit=400,
        )[0]

    at = [0.2, 1.7, 4.0]
    logs = np.array([expected_log(h) for h in at])
    formula = np.array([-((z - h) ** 2) / 2 / f / s2 for h in at])
    assert_allclose(logs - logs[1], formula - formula[1], rtol=1e-5, atol=1e-8)

    # the Gaussian q(h) of least KL, h ~ N(0, 1/λ) before, q(σ²) held
    precision = law.rvs(400_000, random_state=np.random.default_rng(14))
    precision = (1 / precision).mean() / f

    def divergence(x):
        mean, log_sd = x
        spread = np.exp(2 * log_sd)
        prior = prior_precision * (mean**2 + spread) / 2
        return prior + precision * ((z - mean) ** 2 + spread) / 2 - log_sd

    best = optimize.minimize(divergence, [0.0, 0.0], tol=1e-12).x
    total = prior_precision + 1 / f / s2
    assert_allclose(np.exp(-2 * best[1]), total, rtol=0.02)
    assert_allclose(best[0], z / f / s2 / total, rtol=0.02)


@equation(
    "5.15",
    r"\mathrm{E}\left[\frac{1}{\sigma^2}\right] = \frac{1}{s^2} \;>\;"
    r" \frac{1}{\mathrm{E}\,\sigma^2} = \frac{\nu-2}{\nu\,s^2}"
    r" \quad (\nu>2)",
)
def test_expected_precision_is_bold():
    for nu, s2 in [(3.4, 0.4), (9.0, 6.0)]:
        mean = inverse_chi2(nu, s2).expect()
        assert_allclose(1 / mean, (nu - 2) / nu / s2, rtol=1e-6)
        gamma = stats.gamma(nu / 2, scale=2 / nu / s2)  # of 1/σ²
        assert gamma.mean() > 1.2 / mean


@equation(
    "5.16",
    r"\mathrm{E}\log s_g^2 = \log s_0^2 + \psi\left(\frac d2\right) -"
    r" \log\frac d2 - \psi\left(\frac{d_0}2\right) + \log\frac{d_0}2",
)
@pytest.mark.parametrize(("d", "d0"), [(1, 4.0), (3, 2.5)])
def test_mean_of_log_variances(d, d0):
    """s_g²/s₀² is F(d, d₀)."""
    s02 = 0.3
    found = np.log(s02) + log_f_moment(d, d0, 1)
    formula = (
        np.log(s02)
        + special.digamma(d / 2)
        - np.log(d / 2)
        - special.digamma(d0 / 2)
        + np.log(d0 / 2)
    )
    assert_allclose(formula, found, rtol=1e-6)


@equation(
    "5.17",
    r"\mathrm{Var}\log s_g^2 = \psi'\left(\frac d2\right) +"
    r" \psi'\left(\frac{d_0}2\right)",
)
@pytest.mark.parametrize(("d", "d0"), [(1, 4.0), (3, 2.5)])
def test_variance_of_log_variances(d, d0):
    found = log_f_moment(d, d0, 2) - log_f_moment(d, d0, 1) ** 2
    formula = special.polygamma(1, d / 2) + special.polygamma(1, d0 / 2)
    assert_allclose(formula, found, rtol=1e-6)


def log_f_moment(d, d0, power):
    law = stats.f(d, d0)
    return integrate.quad(
        lambda t: t**power * law.pdf(np.exp(t)) * np.exp(t),
        -60,
        60,
        points=[0.0],
        limit=400,
    )[0]


def test_the_data_are_those_of_the_source():
    """NIST's certified sums of squares."""
    v = (silver().value - 107.868).view(2, 24)
    within = v.sub(v.mean(1, keepdim=True)).square().sum().item()
    between = 48 * v.mean(1).var(correction=0).item()
    assert_allclose(within, 1.04951729166667e-08, rtol=1e-6)
    assert_allclose(between, 3.63834187500000e-09, rtol=1e-6)
