"""Every numbered equation of chapter 11, from a source of its own.

Quadratic forms come from traces and covariance matrices, regressions from
statsmodels and refitting, HSTU's layer from loops over its own weights.
"""

import dataclasses

import numpy as np
import pytest
import statsmodels.api as sm
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose
from scipy import stats

from bft_ref import Belief, BFTConfig, BFTLayer, delta
from bft_ref.kriging import kriging_attention, kriging_weights
from bft_ref.notebook.examples import engel
from bft_ref.recsys.models import HSTUConfig, HSTUFilter
from bft_ref.recsys.models.hstu import HSTULayer
from bft_ref.reml import (
    observation_variance,
    precision_weights,
    unnormalised_variance,
)
from tests.equations import equation

SIGMA2 = 2.5


def signed(size=9, seed=0):
    """Weights of any sum and sign."""
    rng = np.random.default_rng(seed)
    return rng.normal(0.3, 1.0, size) / size


def estimate(a, v, s0=SIGMA2, dof=1.0, estimator="sandwich"):
    found, _ = unnormalised_variance(
        torch.tensor(a)[None],
        torch.tensor(v)[..., None],
        torch.tensor(s0, dtype=torch.float64),
        dof,
        estimator,
    )
    return found.flatten().numpy()


def design():
    income, food = (x.numpy() for x in engel())
    return np.column_stack([np.ones_like(income), income]), food


def small_layer(config=None):
    torch.manual_seed(3)
    layer = BFTLayer(
        6, 3, 8, 0.0, norm_first=True, config=config, dtype=torch.float64
    ).eval()
    belief = Belief(
        torch.randn(1, 5, 6).double(), torch.randn(1, 5, 6).double()
    )
    torch.nn.init.normal_(layer.self_attn.out_proj.bias)
    return layer, belief


def attended(layer, belief):
    x = layer.norm1(belief.mean)
    attn = layer.self_attn
    q, k, v = (
        y.unflatten(-1, (3, 2)).transpose(1, 2)
        for y in F.linear(x, attn.in_proj_weight, attn.in_proj_bias).chunk(
            3, -1
        )
    )
    spread = belief.variance.mean(-1)
    spread = spread / belief.mean.var(-1, correction=0).add(1e-5)
    return kriging_attention(
        q,
        k,
        v,
        belief.log_token_precision,
        neighbour_variance=spread,
    )


@equation(
    "11.1",
    r"e = W_O\,[\mu^1;\dots;\mu^H] + b_O = \sum_{h=1}^{H} W^h \mu^h + b_O",
)
def test_the_innovation_is_a_sum_over_heads():
    layer, belief = small_layer()
    kriging = attended(layer, belief)
    W = layer.self_attn.out_proj.weight
    expected = layer.self_attn.out_proj.bias
    for head in range(3):
        block = W[:, 2 * head : 2 * head + 2]
        expected = expected + kriging.mean[:, head] @ block.T
    e = layer.observe(belief).innovation
    torch.testing.assert_close(e, expected)


@equation(
    "11.2",
    r"\frac{1}{\lambda^{\mathrm{obs}}_i} = \sum_{h=1}^{H}\sum_k"
    r" \frac{(W^h_{ik})^2}{\lambda^{\mu}_{hk}}",
)
def test_variances_add_over_heads():
    layer, belief = small_layer(BFTConfig(prior_scale="unit"))
    kriging = attended(layer, belief)
    W = layer.self_attn.out_proj.weight
    value_rows = layer.self_attn.in_proj_weight[12:] * layer.norm1.weight
    g = value_rows.square().sum(1).view(3, 1, 2)
    seen = observation_variance(
        kriging.dispersion, kriging.n_eff[..., None], g
    )
    for t in range(5):
        flat = seen[0, :, t].flatten()
        covariance = W @ torch.diag(flat) @ W.T
        found = layer.observe(belief).log_precision[0, t]
        torch.testing.assert_close(-found, covariance.diag().log())


def test_an_observation_needs_all_its_heads():
    layer, belief = small_layer()
    hidden = torch.zeros(3, 5, 5).bool()
    hidden[2, 1] = True
    seen = layer.observe(belief, hidden)
    assert (seen.log_precision[0, 1] == -torch.inf).all()
    updated, gain = layer.update(belief, seen)
    assert (gain[0, 1] == 0).all() and (gain[0, 0] > 0).all()
    torch.testing.assert_close(updated.mean[0, 1], belief.mean[0, 1])


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_are_repeated_heads(kv_heads):
    torch.manual_seed(4)
    q = torch.randn(2, 4, 5, 3)
    k, v = torch.randn(2, 2, kv_heads, 5, 3)
    lam = torch.randn(2, 5)
    repeat = 4 // kv_heads
    full = kriging_attention(
        q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), lam
    )
    few = kriging_attention(q, k, v, lam)
    for one, other in zip(few, full, strict=True):
        torch.testing.assert_close(one, other)
    tiled = kriging_attention(
        q, k.repeat(1, repeat, 1, 1), v.repeat(1, repeat, 1, 1), lam
    )
    same = torch.allclose(few.mean, tiled.mean)
    assert same == (kv_heads == 1)  # heads are grouped, not interleaved


@equation(
    "11.3",
    r"\mathrm{Cov}(\mu^a, \mu^b) = \sigma^2 \sum_j \tilde\alpha^a_j"
    r" \tilde\alpha^b_j",
)
def test_heads_that_share_values_share_noise():
    rng = np.random.default_rng(5)
    A = rng.dirichlet(np.full(6, 0.7), 2)
    exact = A @ (SIGMA2 * np.eye(6)) @ A.T
    assert_allclose(SIGMA2 * A[0] @ A[1], exact[0, 1], rtol=1e-12)
    means = rng.normal(7.0, SIGMA2**0.5, (200_000, 6)) @ A.T
    product = (means[:, 0] - 7) * (means[:, 1] - 7)
    error = product.std() / len(product) ** 0.5
    assert abs(product.mean() - exact[0, 1]) < 4 * error
    assert exact[0, 1] > 10 * error


@equation(
    "11.4",
    r"\mathrm{Var}\,\hat\beta = (X^\top X)^{-1}\, X^\top \Omega X\,"
    r" (X^\top X)^{-1}",
)
def test_sandwich_variance():
    """The covariance of a linear map, and simulation."""
    X, _ = design()
    X = X[:25]
    omega = (X[:, 1] / 50) ** 2
    solve = np.linalg.pinv(X)
    bread = np.linalg.inv(X.T @ X)
    formula = bread @ X.T @ np.diag(omega) @ X @ bread
    assert_allclose(formula, solve @ np.diag(omega) @ solve.T, rtol=1e-7)
    rng = np.random.default_rng(6)
    off = (rng.normal(size=(100_000, 25)) * omega**0.5) @ solve.T
    squares = off[:, 1] ** 2
    error = squares.std() / 100_000**0.5
    assert abs(squares.mean() - formula[1, 1]) < 4 * error


@equation(
    "11.5",
    r"\mathrm{E}\,\hat\varepsilon_i^2 = \sum_j M_{ij}^2\,\omega_j ="
    r" \sigma^2 (1 - h_i) \quad \text{if all } \omega_j = \sigma^2",
)
def test_expected_squared_residual():
    X, food = design()
    M = np.eye(len(X)) - X @ np.linalg.pinv(X)
    omega = (X[:, 1] / 50) ** 2
    exact = np.diag(M @ np.diag(omega) @ M.T)
    assert_allclose(M**2 @ omega, exact, rtol=1e-9)
    h = sm.OLS(food, X).fit().get_influence().hat_matrix_diag
    equal = M**2 @ np.full(len(X), SIGMA2)
    assert_allclose(equal, SIGMA2 * (1 - h), rtol=1e-9)
    assert abs(exact / omega - (1 - h)).max() > 0.01  # equal ω are needed


@equation(
    "11.6",
    r"\hat\beta - \hat\beta_{(i)} = (X^\top X)^{-1} x_i\,"
    r" \frac{\hat\varepsilon_i}{1-h_i}",
)
def test_leaving_one_out():
    X, food = design()
    fit = sm.OLS(food, X).fit()
    h = fit.get_influence().hat_matrix_diag
    bread = np.linalg.inv(X.T @ X)
    jackknife = np.zeros((2, 2))
    for i in range(len(X)):
        left = sm.OLS(np.delete(food, i), np.delete(X, i, 0)).fit().params
        change = bread @ X[i] * fit.resid[i] / (1 - h[i])
        assert_allclose(fit.params - left, change, rtol=1e-5, atol=1e-9)
        jackknife += np.outer(change, change)
    assert_allclose(np.sqrt(np.diag(jackknife)), fit.HC3_se, rtol=1e-8)


def test_hc0_to_hc3_are_statsmodels():
    X, food = design()
    fit = sm.OLS(food, X).fit()
    bread = np.linalg.inv(X.T @ X)
    h = np.einsum("ij,jk,ik->i", X, bread, X)
    r2 = (food - X @ np.linalg.pinv(X) @ food) ** 2
    rows, columns = X.shape
    for name, factor in [
        ("HC0", 1 + 0 * h),
        ("HC1", rows / (rows - columns) + 0 * h),
        ("HC2", 1 / (1 - h)),
        ("HC3", 1 / (1 - h) ** 2),
    ]:
        V = bread @ (X.T * (r2 * factor)) @ X @ bread
        expected = getattr(fit, f"{name}_se")
        assert_allclose(np.sqrt(np.diag(V)), expected, rtol=1e-8)


def test_the_households_are_engels():
    """The line that quantreg's and statsmodels' own examples print."""
    X, food = design()
    assert X.shape == (235, 2)
    line = np.linalg.lstsq(X, food, rcond=None)[0]
    assert_allclose(line, [147.4754, 0.4852], atol=5e-5)
    shipped = sm.datasets.engel.load_pandas().data
    assert_allclose(X[:, 1], shipped["income"])
    assert_allclose(food, shipped["foodexp"])


@equation(
    "11.7",
    r"a^\lambda_j = a_j\,\frac{\bar\lambda_j}{\mathrm{mean}_i\,\bar\lambda_i},"
    r" \qquad \frac{a^\lambda_j}{\sum_i a^\lambda_i} = \tilde\alpha_j"
    r" \quad \text{if } a = \alpha",
)
def test_precision_weights():
    rng = np.random.default_rng(7)
    lam = rng.gamma(2.0, 1.5, 6)
    a = signed(6, 7)
    found = precision_weights(torch.tensor(a)[None], torch.tensor(lam).log())[
        0
    ].numpy()
    assert_allclose(found, a * lam / np.mean(lam), rtol=1e-12)

    scores = torch.tensor(rng.normal(size=(1, 6)))
    weighted = precision_weights(scores.softmax(-1), torch.tensor(lam).log())
    torch.testing.assert_close(
        weighted / weighted.sum(),
        kriging_weights(scores, torch.tensor(lam).log()),
    )

    visible = torch.tensor([[True, True, False, True, False, False]])
    some = precision_weights(
        torch.tensor(a)[None], torch.tensor(lam).log(), visible
    )[0].numpy()
    seen = visible[0].numpy()
    expected = np.where(seen, a * lam / lam[seen].mean(), 0.0)
    assert_allclose(some, expected, rtol=1e-12)


@equation("11.8", r"\mathrm{Var}\,o = \sum_j a_j^2\,\sigma_j^2")
def test_variance_of_a_sum():
    a = signed()
    s2 = np.random.default_rng(8).gamma(2.0, 1.5, 9)
    assert_allclose((a**2 * s2).sum(), a @ np.diag(s2) @ a, rtol=1e-12)
    o = (np.random.default_rng(9).normal(size=(200_000, 9)) * s2**0.5) @ a
    error = (o**2).std() / 200_000**0.5
    assert abs((o**2).mean() - (a**2 * s2).sum()) < 4 * error


def shares(a):
    w = a**2 / (a**2).sum()
    return w, np.diag(w) - np.outer(w, w)  # V = vᵀMv


@equation(
    "11.9",
    r"V = \sum_j w_j v_j^2 - \Bigl(\sum_j w_j v_j\Bigr)^2, \qquad"
    r" \mathrm{E}\,V = \sum_j w_j (1-w_j)\,\sigma_j^2",
)
def test_expected_filling():
    a = signed()
    w, M = shares(a)
    s2 = np.random.default_rng(10).gamma(2.0, 1.5, 9)
    level = np.full(9, 7.0)
    exact = np.trace(M @ np.diag(s2)) + level @ M @ level
    assert_allclose((w * (1 - w) * s2).sum(), exact, rtol=1e-9)
    truth = (w * s2).sum()
    assert truth * (1 - w.max()) <= exact <= truth

    v = np.random.default_rng(11).normal(7.0, 1.5, 9)
    V = np.cov(v, aweights=a**2, ddof=0)
    assert_allclose(v @ M @ v, V, rtol=1e-9)
    # the package's V: take the prior's share away
    n_u = 1 / (w**2).sum()
    s2_found = estimate(a, v) / (a**2).sum()
    assert_allclose((s2_found * n_u - SIGMA2) / n_u, V, rtol=1e-9)


@equation(
    "11.10",
    r"\widehat{\mathrm{Var}}\,o = s^2 \sum_j a_j^2, \quad s^2 ="
    r" \frac{\nu_0 s_0^2 + n_u V}{\nu_0 + n_u - 1}, \quad n_u ="
    r" \frac{(\sum_j a_j^2)^2}{\sum_j a_j^4}",
)
def test_sandwich():
    """scipy's inverse gamma; unbiased for equal variances without a prior."""
    a = signed()
    v = np.random.default_rng(12).normal(7.0, 1.5, 9)
    n_u = (a**2).sum() ** 2 / (a**4).sum()
    V = np.cov(v, aweights=a**2, ddof=0)
    for dof in [0.6, 3.0]:
        shape = (dof + n_u - 1) / 2
        posterior = stats.invgamma(shape, scale=(dof * 1.7 + n_u * V) / 2)
        s2 = 1 / posterior.expect(lambda x: 1 / x)
        found = estimate(a, v, 1.7, dof)
        assert_allclose(found, s2 * (a**2).sum(), rtol=1e-6)

    drawn = np.random.default_rng(13).normal(7.0, SIGMA2**0.5, (100_000, 9))
    claims = estimate(a, drawn, 1.7, 1e-12)
    error = claims.std() / len(claims) ** 0.5
    assert abs(claims.mean() - SIGMA2 * (a**2).sum()) < 4 * error


@equation(
    "11.11",
    r"\widehat{\mathrm{Var}}_{\mathrm{pooled}}\,o = s^2\sum_j a_j^2 ="
    r" \frac{s^2}{n} \qquad \text{if } a \ge 0,\ \sum_j a_j = 1",
)
def test_pooled_is_the_mean_reading_of_softmax():
    rng = np.random.default_rng(14)
    alpha, v = rng.dirichlet(np.full(9, 0.8)), rng.normal(7.0, 1.5, 9)
    n = 1 / (alpha**2).sum()
    D = np.cov(v, aweights=alpha, ddof=0)
    s2 = (1.4 * 1.7 + n * D) / (1.4 + n - 1)
    found = estimate(alpha, v, 1.7, 1.4, "pooled")
    assert_allclose(found, s2 / n, rtol=1e-9)
    reading = observation_variance(
        *(torch.tensor(float(x)).double() for x in (D, n, 1.7)), 1.4, "mean"
    )
    assert_allclose(found, reading.item(), rtol=1e-6)


def test_the_sandwich_holds_where_noise_goes_with_weight():
    a = signed(20, 15)
    w, _ = shares(a)
    s2 = 20 * SIGMA2 * w
    drawn = np.random.default_rng(16).normal(size=(40_000, 20)) * s2**0.5
    truth = (a**2 * s2).sum()
    white = estimate(a, drawn, 1.0, 1e-12).mean() / truth
    pooled = estimate(a, drawn, 1.0, 1e-12, "pooled").mean() / truth
    assert pooled < 0.7 < 0.85 < white < 1.05


def test_no_weight_is_no_information():
    v = torch.randn(4, 2)
    a = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.1, 0.0, -0.2, 0.0]])
    variance, informative = unnormalised_variance(a, v, torch.tensor(1.7))
    assert informative.flatten().tolist() == [False, True]
    assert torch.isfinite(variance).all()


@equation(
    "11.12",
    r"\frac{\widehat{\mathrm{Var}}(c\,o)}{\varsigma(c\,o)^2} ="
    r" \frac{\widehat{\mathrm{Var}}\,o}{\varsigma(o)^2}",
)
def test_the_norm_forgets_the_scale_of_the_weights():
    torch.manual_seed(17)
    a = torch.randn(5, 9).double()
    v = torch.randn(9, 6).double() + 3

    def normed(c):
        variance, _ = unnormalised_variance(c * a, v, torch.tensor(1.7))
        norm = delta.normalise(c * a @ v, None, None, eps=1e-30)
        ratio = variance / norm.scale.square()
        return variance, ratio, delta.normalised_variance(variance, norm)

    raw, ratio, through = normed(1.0)
    for c in [1e-4, 0.05, 30.0]:
        raw_c, ratio_c, through_c = normed(c)
        torch.testing.assert_close(raw_c, c**2 * raw)
        torch.testing.assert_close(ratio_c, ratio)
        torch.testing.assert_close(through_c, through)


def hstu_layer(length=12):
    torch.manual_seed(18)
    config = HSTUConfig(
        n_items=5,
        d_model=8,
        nhead=2,
        max_length=length,
        dropout=0.0,
        bft=HSTUFilter(process_noise=0.3),
    )
    layer = HSTULayer(config).double().eval()
    with torch.no_grad():
        layer.uvqk.weight.mul_(40)
    belief = Belief(
        torch.randn(1, 6, 8).double(), 0.4 * torch.randn(1, 6, 8).double()
    )
    return layer, belief, torch.randn(1, 1, 6, 6).double()


@equation(
    "11.13",
    r"\frac{1}{\lambda^{\mathrm{obs}}_i} = \sum_k W_{O,ik}^2\, U_k^2\,"
    r" \widehat{\mathrm{Var}}\,\mathrm{norm}(o)_k",
)
def test_what_hstu_observes():
    """Token by token; the norm's variance from its full Jacobian."""
    layer, belief, relative = hstu_layer()
    _, trace = layer.step(belief, relative)
    h = belief.mean[0]
    inner = layer.uvqk(F.layer_norm(h, (8,), eps=1e-6))
    u, v, q, k = F.silu(inner).chunk(4, -1)
    squash = inner[:, 8:16].sigmoid()
    slope = squash * (1 + inner[:, 8:16] * (1 - squash))
    rows = layer.uvqk.weight[8:16].square().sum(1)
    scale2 = h.var(-1, correction=0) + 1e-6
    c = belief.variance[0].mean(-1) / scale2
    lam = belief.precision[0].mean(-1)
    W = layer.out.weight
    for t in range(6):
        o, var = [], []
        for head in (slice(0, 4), slice(4, 8)):
            score = (
                q[t, head] @ k[: t + 1, head].T + relative[0, 0, t, : t + 1]
            )
            a = F.silu(score) / 12 * lam[: t + 1] / lam[: t + 1].mean()
            w = a**2 / (a**2).sum()
            s0 = w @ (
                rows[head] * slope[: t + 1, head] ** 2 * c[: t + 1, None]
            )
            seen = v[: t + 1, head]
            V = w @ seen**2 - (w @ seen) ** 2
            n_u = 1 / (w**2).sum()
            o.append(a @ seen)
            var.append((s0 + n_u * V) / n_u * (a**2).sum())
        o, var = torch.cat(o), torch.cat(var)
        J = torch.func.jacrev(lambda x: F.layer_norm(x, (8,), eps=1e-6))(o)
        through = J.square() @ var
        expected = W.square() @ (u[t] ** 2 * through)
        found = (-trace.log_observation_precision[0, t]).exp()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


@equation(
    "11.14",
    r"\lambda'' = \Bigl(\frac{1}{\lambda + \lambda^{\mathrm{obs}}} +"
    r" Q\Bigr)^{-1}",
)
def test_hstu_predicts_with_process_noise_alone():
    layer, belief, relative = hstu_layer()
    out, trace = layer.step(belief, relative)
    seen = trace.log_observation_precision.exp()
    expected = 1 / (1 / (belief.precision + seen) + 0.3)
    torch.testing.assert_close(out.precision, expected, rtol=1e-6, atol=0)
    assert (trace.log_growth == 0).all()


def test_the_length_that_divides_the_weights_leaves_the_gain():
    gains = []
    for length in [12, 24]:
        layer, belief, relative = hstu_layer()
        with torch.no_grad():
            layer.uvqk.weight.mul_(3)  # makes the norm's ε small
        layer.config = dataclasses.replace(layer.config, max_length=length)
        gains.append(layer.step(belief, relative)[1].gain)
    torch.testing.assert_close(*gains, rtol=1e-6, atol=0)
