"""Every numbered equation of chapter 6, from a source of its own.

Gaussian identities are checked against the covariance of a joint Gaussian,
simulation, filterpy, statsmodels or automatic differentiation.
"""

import math

import numpy as np
import pytest
import torch
from filterpy.kalman import KalmanFilter
from numpy.testing import assert_allclose
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit
from statsmodels.tsa.statespace.structural import UnobservedComponents

from bft_ref import (
    Belief,
    BFTConfig,
    BFTLayer,
    kalman,
    kriging_attention,
    textbook,
)
from bft_ref.delta import normalise
from bft_ref.reml import observation_variance, posterior_scale
from tests.equations import equation

LAM, OBS = 1.7, 0.6  # precisions before, and of the observation


def errors(size=400_000, seed=0):
    """Independent errors of h and of z, with variances 1/LAM and 1/OBS."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, size)) / np.sqrt([[LAM], [OBS]])


def number(x):
    return torch.tensor(x, dtype=torch.float64)


def updated(mean, lam, innovation, obs):
    belief = Belief.of(number(mean), precision=lam)
    after, k = kalman.update(belief, number(innovation), number(obs).log())
    return after.mean.item(), after.precision.item(), k.item()


@equation(
    "6.1",
    r"\operatorname{Var} e = \frac{1}{\lambda} + "
    r"\frac{1}{\lambda^{\mathrm{obs}}}",
)
def test_variance_of_an_innovation():
    of_h, of_z = errors()
    theta = 21.0
    e = (theta + of_z) - (theta + of_h)
    due = 1 / LAM + 1 / OBS
    assert abs(e.var() - due) < 5 * due * math.sqrt(2 / e.size)
    # the error of z is independent of that of the prior; e is not
    prior_error = theta - (theta + of_h)
    assert abs(np.cov(prior_error, of_z)[0, 1]) < 0.01
    assert abs(np.cov(prior_error, e)[0, 1] - 1 / LAM) < 0.01
    # filterpy's innovation covariance S
    filter_ = KalmanFilter(1, 1)
    filter_.x, filter_.P = np.array([[3.0]]), np.array([[1 / LAM]])
    filter_.R, filter_.H = np.array([[1 / OBS]]), np.eye(1)
    filter_.update(4.2)
    assert_allclose(filter_.S, due, rtol=1e-12)


@equation(
    "6.2",
    r"\operatorname{Var}(h + Ke - \theta) = \frac{(1-K)^2}{\lambda} + "
    r"\frac{K^2}{\lambda^{\mathrm{obs}}}",
)
@pytest.mark.parametrize("gain", [-0.3, 0.0, 0.2, 0.77, 1.0, 1.4])
def test_variance_for_any_gain(gain):
    of_h, of_z = errors(seed=1)
    theta = -4.0
    h, z = theta + of_h, theta + of_z
    after = h + gain * (z - h) - theta
    due = (1 - gain) ** 2 / LAM + gain**2 / OBS
    assert abs(after.var() - due) < 5 * due * math.sqrt(2 / after.size)


@equation(
    "6.3",
    r"K = \frac{\lambda^{\mathrm{obs}}}{\lambda + \lambda^{\mathrm{obs}}} = "
    r"\operatorname{sigmoid}\bigl(\log\lambda^{\mathrm{obs}} - "
    r"\log\lambda\bigr)",
)
@pytest.mark.parametrize(("lam", "obs"), [(1.7, 0.6), (0.02, 5.0), (40, 3)])
def test_gain_minimises_the_variance(lam, obs):
    found = minimize_scalar(
        lambda k: (1 - k) ** 2 / lam + k**2 / obs,
        bounds=(0, 1),
        method="bounded",
        options={"xatol": 1e-12},
    )
    k = kalman.gain(number(lam).log(), number(obs).log()).item()
    assert_allclose(k, found.x, atol=1e-6)
    assert_allclose(k, obs / (lam + obs), rtol=1e-12)
    assert_allclose(k, expit(math.log(obs) - math.log(lam)), rtol=1e-12)


@equation(
    "6.4",
    r"h' = h + K\circ e,\qquad \lambda' = \lambda + \lambda^{\mathrm{obs}}",
)
def test_update_is_filterpys_and_conditions_the_joint_gaussian():
    h, z = 1.3, 4.1
    mean, precision, k = updated(h, LAM, z - h, OBS)
    filter_ = KalmanFilter(1, 1)
    filter_.x, filter_.P = np.array([[h]]), np.array([[1 / LAM]])
    filter_.R, filter_.H = np.array([[1 / OBS]]), np.eye(1)
    filter_.update(z)
    assert_allclose(mean, filter_.x.item(), rtol=1e-12)
    assert_allclose(1 / precision, filter_.P.item(), rtol=1e-12)
    assert_allclose(k, filter_.K.item(), rtol=1e-12)
    # θ and z jointly Gaussian: Cov(θ, z) = Var θ
    covariance, var_z = 1 / LAM, 1 / LAM + 1 / OBS
    assert_allclose(mean, h + covariance / var_z * (z - h), rtol=1e-12)
    assert_allclose(1 / precision, 1 / LAM - covariance**2 / var_z, rtol=1e-12)


def test_update_is_pointwise():
    rng = torch.Generator().manual_seed(3)
    shape = (2, 3, 4)
    lam, obs = torch.rand((2, *shape), generator=rng, dtype=torch.float64)
    h, e = torch.randn((2, *shape), generator=rng, dtype=torch.float64)
    after, k = kalman.update(Belief.of(h, precision=lam), e, obs.log())
    for at in np.ndindex(shape):
        one = updated(
            h[at].item(), lam[at].item(), e[at].item(), obs[at].item()
        )
        assert_allclose(
            one, (after.mean[at], after.precision[at], k[at]), rtol=1e-10
        )


@equation(
    "6.5",
    r"\operatorname{Var}(h + \tilde K e - \theta) = \frac{1}{\lambda'} + "
    r"(\tilde K - K)^2\Bigl(\frac{1}{\lambda} + "
    r"\frac{1}{\lambda^{\mathrm{obs}}}\Bigr)",
)
@pytest.mark.parametrize("wrong", [0.0, 0.1, 0.5, 1.0])
def test_cost_of_a_wrong_gain(wrong):
    _, precision, k = updated(0.0, LAM, 1.0, OBS)
    due = 1 / precision + (wrong - k) ** 2 * (1 / LAM + 1 / OBS)
    # two error terms as a linear map of independent errors
    row, covariance = np.array([1 - wrong, wrong]), np.diag([1 / LAM, 1 / OBS])
    assert_allclose(row @ covariance @ row, due, rtol=1e-12)
    of_h, of_z = errors(seed=2)
    theta = 8.0
    h, z = theta + of_h, theta + of_z
    after = h + wrong * (z - h) - theta
    assert abs(after.var() - due) < 5 * due * math.sqrt(2 / after.size)


@equation("6.6", r"\operatorname{E}[h + Kz - \theta] = K\,\theta")
@pytest.mark.parametrize("theta", [-4.0, 0.0, 21.0])
def test_bias_without_the_subtraction(theta):
    of_h, of_z = errors(seed=4)
    _, _, k = updated(0.0, LAM, 1.0, OBS)
    after = theta + of_h + k * (theta + of_z) - theta
    standard_error = after.std() / math.sqrt(after.size)
    assert abs(after.mean() - k * theta) < 5 * standard_error


@equation(
    "6.7",
    r"\operatorname{Var}(h + Kz \mid \theta) = \frac{1}{\lambda} + "
    r"\frac{K^2}{\lambda^{\mathrm{obs}}} \;\ge\; \frac{1}{\lambda}",
)
@pytest.mark.parametrize("theta", [-4.0, 21.0])
def test_variance_without_the_subtraction(theta):
    """It grows, while the update claims that it shrinks."""
    of_h, of_z = errors(seed=12)
    mean, claimed, k = updated(theta, LAM, theta, OBS)
    assert_allclose(mean, (1 + k) * theta)
    after = theta + of_h + k * (theta + of_z)
    due = 1 / LAM + k**2 / OBS
    assert abs(after.var() - due) < 5 * due * math.sqrt(2 / after.size)
    assert after.var() > 1 / LAM > 1 / claimed


@equation(
    "6.8",
    r"h + \frac{\lambda^{\mathrm{obs}}}{\lambda}\,z = "
    r"\frac{\lambda'}{\lambda}\,\bigl(h + K(z - h)\bigr), \qquad "
    r"K = \frac{\lambda^{\mathrm{obs}}}{\lambda + \lambda^{\mathrm{obs}}}",
)
def test_adding_is_right_where_length_carries_the_precision():
    h, z = 1.3, 4.1
    mean, precision, k = updated(h, LAM, z - h, OBS)
    assert_allclose(h + OBS / LAM * z, precision / LAM * mean, rtol=1e-12)
    # the odds of the gain are the best factor when 1 + K is divided out
    found = minimize_scalar(
        lambda c: (1 / LAM + c**2 / OBS) / (1 + c) ** 2,
        bounds=(0, 5),
        method="bounded",
        options={"xatol": 1e-12},
    )
    assert_allclose(found.x, k / (1 - k), atol=1e-6)
    assert_allclose(found.fun, 1 / precision, rtol=1e-9)


@equation(
    "6.9",
    r"K = \frac{1/\lambda - c}{1/\lambda + 1/\lambda^{\mathrm{obs}} - 2c}",
)
@pytest.mark.parametrize("c", [-0.4, 0.0, 0.3, 0.7])
def test_gain_under_shared_errors(c):
    """The first weight of generalised least squares, and a minimum."""
    covariance = np.array([[1 / LAM, c], [c, 1 / OBS]])
    weights = np.linalg.solve(covariance, np.ones(2))
    k = (1 / LAM - c) / (1 / LAM + 1 / OBS - 2 * c)
    assert_allclose(k, weights[1] / weights.sum(), rtol=1e-10)
    rng = np.random.default_rng(13)
    of_h, of_z = rng.multivariate_normal([0, 0], covariance, 200_000).T

    def error(share):
        return (of_h + share * (of_z - of_h)).var()

    assert error(k) < min(error(k - 0.1), error(k + 0.1))


@equation(
    "6.10",
    r"c = \frac{\tilde\alpha_t}{\lambda_t} = "
    r"\frac{1}{\lambda^{\mathrm{obs}}} \quad\Longrightarrow\quad K = 1",
)
def test_a_weighted_mean_with_oneself_leaves_nothing_to_keep():
    rng = np.random.default_rng(14)
    lam = np.exp(rng.normal(size=6))
    weights = lam / lam.sum()
    of_tokens = np.diag(1 / lam)
    for t in range(6):
        own = np.eye(6)[t]
        c = own @ of_tokens @ weights
        assert_allclose(c, weights[t] / lam[t], rtol=1e-12)
        assert_allclose(c, weights @ of_tokens @ weights, rtol=1e-12)
        a, b = 1 / lam[t], 1 / lam.sum()
        assert_allclose((a - c) / (a + b - 2 * c), 1, rtol=1e-10)
        # and the gain of independent errors claims more than is there
        k, claimed = lam.sum() / (lam[t] + lam.sum()), lam[t] + lam.sum()
        row = (1 - k) * own + k * weights
        assert row @ of_tokens @ row > 1 / lam.sum() > 1 / claimed


def reading_logit(reading, n, lam=LAM, dispersion=0.8, s0=1.9, dof=1.5):
    """logit K and s², as the package computes them for W_O = 1."""
    d, size, prior = number(dispersion), number(n), number(s0)
    v = observation_variance(d, size, prior, dof, reading)
    k = kalman.gain(number(lam).log(), -v.log())
    return logit(k.item()), posterior_scale(d, size, prior, dof).item()


@equation(
    "6.11",
    r"\operatorname{logit} K^{\mathrm{value}} = -\log s^2 - \log\lambda",
)
@pytest.mark.parametrize("n", [1.0, 3.5, 80.0])
def test_logit_of_the_value_reading(n):
    found, s2 = reading_logit("value", n)
    assert_allclose(found, -math.log(s2) - math.log(LAM), rtol=1e-10)
    # one value of variance s² around a mean that is known: filterpy
    filter_ = KalmanFilter(1, 1)
    filter_.P, filter_.R = np.array([[1 / LAM]]), np.array([[s2]])
    filter_.H = np.eye(1)
    filter_.update(1.0)
    assert_allclose(expit(found), filter_.K.item(), rtol=1e-10)


@equation(
    "6.12",
    r"\operatorname{logit} K^{\mathrm{mean}} = \log n - \log s^2 - "
    r"\log\lambda",
)
@pytest.mark.parametrize("n", [1, 4, 25])
def test_logit_of_the_mean_reading(n):
    found, s2 = reading_logit("mean", float(n))
    assert_allclose(
        found, math.log(n) - math.log(s2) - math.log(LAM), rtol=1e-10
    )
    # n values of variance s² of one state, taken in one by one
    filter_ = KalmanFilter(1, 1)
    filter_.P, filter_.R = np.array([[1 / LAM]]), np.array([[s2]])
    filter_.H = np.eye(1)
    for _ in range(n):
        filter_.update(1.0)
    assert_allclose(filter_.x.item(), expit(found), rtol=1e-10)


@equation(
    "6.13",
    r"\operatorname{logit} K^{\mathrm{prediction}} = \log n - \log(n+1) - "
    r"\log s^2 - \log\lambda",
)
@pytest.mark.parametrize("n", [1, 4, 25])
def test_logit_of_the_prediction_reading(n):
    found, s2 = reading_logit("prediction", float(n))
    assert_allclose(
        found,
        math.log(n) - math.log(n + 1) - math.log(s2) - math.log(LAM),
        rtol=1e-10,
    )
    # θ is one more value of variance s² around a mean known from n others
    rng = np.random.default_rng(6)
    draws = rng.normal(size=(n + 1, 200_000)) * math.sqrt(s2)
    gap = (draws[0] - draws[1:].mean(0)).var()
    assert abs(gap * LAM - math.exp(-found)) < 0.02 * math.exp(-found)


@equation(
    "6.14",
    r"\frac{\partial \operatorname{logit} K^{\mathrm{prediction}}}"
    r"{\partial \log n} = \frac{1}{n+1}",
)
@pytest.mark.parametrize("n", [1.0, 2.5, 64.0])
def test_slope_in_log_n(n):
    log_n = number(math.log(n)).requires_grad_()
    size, s2 = log_n.exp(), number(1.9)
    # D = s² (n − 1)/n keeps s² fixed with ν₀ = 1: s² = (s² + nD)/n
    d = s2 * (size - 1) / size
    v = observation_variance(d, size, s2, 1.0, "prediction")
    k = kalman.gain(number(LAM).log(), -v.log())
    (slope,) = torch.autograd.grad(torch.logit(k), log_n)
    assert_allclose(slope.item(), 1 / (n + 1), rtol=1e-8)


def circuit(seed=7, d=8, heads=2, tokens=5):
    """W_O, W_V, weights (H, T) and state variances (T, d)."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(tokens), size=heads)
    w_o, w_v = rng.normal(size=(2, d, d))
    return w_o, w_v, weights, np.exp(rng.normal(size=(tokens, d)))


@equation(
    "6.15",
    r"\operatorname{Var} \eta_i = \sum_k \sum_l W_{O,ik}\, C_{kl}\, W_{O,il}",
)
def test_projected_variance_against_simulation():
    w_o, w_v, weights, variance = circuit()
    heads, _ = weights.shape
    of_head = weights.repeat(len(w_v) // heads, 0)
    c = np.einsum("kj,lj,kf,jf,lf->kl", of_head, of_head, w_v, variance, w_v)
    due = np.einsum("ik,kl,il->i", w_o, c, w_o)
    rng = np.random.default_rng(8)
    size = 200_000
    state = rng.normal(size=(size, *variance.shape)) * np.sqrt(variance)
    mean = np.einsum("kj,njk->nk", of_head, state @ w_v.T)
    found = (mean @ w_o.T).var(0)
    assert_allclose(found, due, rtol=6 * math.sqrt(2 / size))
    # and its diagonal alone is something else
    assert np.abs(w_o**2 @ np.diag(c) / due - 1).max() > 0.1


@equation(
    "6.16",
    r"\frac{1}{\lambda^{\mathrm{obs}}_i} = \sum_k W_{O,ik}^2\, "
    r"\frac{1}{\lambda^\mu_k}",
)
@pytest.mark.parametrize("reading", ["prediction", "mean", "value"])
def test_the_layer_projects_with_independence(reading):
    torch.manual_seed(9)
    d, heads, tokens = 12, 3, 5
    layer = BFTLayer(
        d,
        heads,
        16,
        dropout=0.0,
        norm_first=True,
        dtype=torch.float64,
        config=BFTConfig(reading=reading, prior_scale="unit"),
    )
    h = torch.randn(2, tokens, d, dtype=torch.float64)
    belief = Belief.of(h, precision=torch.rand_like(h) + 0.2)
    seen = layer.observe(belief)
    attention = layer.self_attn
    x = normalise(h, layer.norm1.weight, layer.norm1.bias).output
    q, k, v = (
        (x @ w.T).unflatten(-1, (heads, -1)).transpose(1, 2)
        for w in attention.in_proj_weight.chunk(3)
    )
    kriged = kriging_attention(q, k, v, belief.log_token_precision)
    g = attention.in_proj_weight[2 * d :].square().sum(-1)
    prior = g.unflatten(0, (heads, -1))[:, None]
    variance = observation_variance(
        kriged.dispersion, kriged.n_eff[..., None], prior, 1.0, reading
    )
    variance = variance.transpose(1, 2).flatten(-2).detach().numpy()
    w_o = attention.out_proj.weight.detach().numpy()
    # independent values, one at a time: Var Σ W μ = Σ W² Var μ
    due = np.zeros_like(variance)
    for i, k_ in np.ndindex(d, d):
        due[..., i] += w_o[i, k_] ** 2 * variance[..., k_]
    found = torch.exp(-seen.log_precision).detach().numpy()
    assert_allclose(found, due, rtol=1e-9)


def stack(length=7, seed=10):
    rng = np.random.default_rng(seed)
    o = np.exp(rng.normal(size=length))
    z = 2.5 + rng.normal(size=length) / np.sqrt(o)
    tau, h0 = 0.7, 1.2
    belief = Belief.of(number(h0), precision=tau)
    for z_l, o_l in zip(z, o, strict=True):
        belief, _ = kalman.update(
            belief, number(z_l) - belief.mean, number(o_l).log()
        )
    return tau, h0, o, z, belief


@equation("6.17", r"\lambda_L = \tau + \sum_{\ell<L} o_\ell")
def test_precision_of_a_stack():
    tau, h0, o, z, belief = stack()
    assert_allclose(belief.precision, tau + o.sum(), rtol=1e-12)
    filter_ = KalmanFilter(1, 1)
    filter_.x, filter_.P = np.array([[h0]]), np.array([[1 / tau]])
    filter_.H, filter_.Q = np.eye(1), np.zeros((1, 1))
    for z_l, o_l in zip(z, o, strict=True):
        filter_.predict()
        filter_.update(z_l, R=1 / o_l)
    assert_allclose(1 / belief.precision, filter_.P.item(), rtol=1e-10)
    assert_allclose(belief.mean, filter_.x.item(), rtol=1e-10)


@equation(
    "6.18",
    r"h_L = \frac{\tau h_0 + \sum_{\ell<L} o_\ell z_\ell}"
    r"{\tau + \sum_{\ell<L} o_\ell}",
)
def test_mean_of_a_stack_conditions_the_joint_gaussian():
    tau, h0, o, z, belief = stack()
    due = (tau * h0 + (o * z).sum()) / (tau + o.sum())
    assert_allclose(belief.mean, due, rtol=1e-12)
    joint = np.full((len(z),) * 2, 1 / tau) + np.diag(1 / o)
    weights = np.linalg.solve(joint, np.full(len(z), 1 / tau))
    assert_allclose(belief.mean, h0 + weights @ (z - h0), rtol=1e-10)


def test_belief_algebra_is_the_kalman_filter_of_statsmodels():
    """Update and discount, fed z − h, over a series with process noise."""
    rng = np.random.default_rng(11)
    q, r = 0.4, 1.6
    level = np.cumsum(rng.normal(size=60) * math.sqrt(q))
    z = level + rng.normal(size=60) * math.sqrt(r)
    path = textbook.local_level_filter(
        torch.from_numpy(z), r, q, Belief.of(number(0.3), variance=2.5)
    )
    model = UnobservedComponents(z, "local level")
    model.ssm.tolerance = 0  # or it stops iterating near the fixed point
    model.ssm.initialize_known(np.array([0.3]), np.array([[2.5]]))
    result = model.smooth([r, q])
    assert_allclose(path.filtered.mean, result.filtered_state[0], atol=1e-10)
    assert_allclose(
        path.filtered.variance, result.filtered_state_cov[0, 0], rtol=1e-10
    )
