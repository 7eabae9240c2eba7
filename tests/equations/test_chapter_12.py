"""Every numbered equation of chapter 12, from a source of its own.

Meta-analysis from statsmodels and full joint Gaussians, gradients from
automatic differentiation and finite differences, counts by counting.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import integrate, stats
from statsmodels.stats.meta_analysis import combine_effects
from torch import nn

from bft_ref import (
    Belief,
    BFTConfig,
    BFTLayer,
    ItemPrecision,
    MLPPrecision,
    discount,
    kalman,
)
from bft_ref.delta import predict
from bft_ref.kriging import kriging_attention
from bft_ref.notebook.examples import gravity, schools
from bft_ref.recsys.models import SASRec, SASRecConfig
from tests.equations import equation

Q = 50.0
M = 7.0


def table():
    _, y, u = schools()
    return y.numpy(), u.numpy() ** -2.0


def log(x):
    return torch.as_tensor(x, dtype=torch.float64).log()


def fused(values, precision):
    mean = precision @ values / precision.sum()
    return mean, precision @ (values - mean) ** 2


@equation(
    "12.1",
    r"y_i \sim \mathcal N\bigl(m, 1/\lambda_i\bigr), \qquad \lambda_i ="
    r" \Bigl(\frac{1}{\tau_i} + Q\Bigr)^{-1}",
)
def test_published_errors_are_discounted():
    """The sum of two independent Gaussians, by convolution and draws."""
    _, tau = table()
    lam = discount(log(tau), log(Q)).exp().numpy()
    rng = np.random.default_rng(1)
    for t, found in zip(tau[:3], lam[:3], strict=True):
        density, _ = integrate.quad(
            lambda theta, t=t: (
                stats.norm(M, Q**0.5).pdf(theta)
                * stats.norm(theta, t**-0.5).pdf(12.0)
            ),
            -150,
            150,
            points=[M, 12.0],
        )
        assert_allclose(stats.norm(M, found**-0.5).pdf(12.0), density)
        drawn = rng.normal(rng.normal(M, Q**0.5, 20_000), t**-0.5)
        law = stats.norm(M, found**-0.5)
        assert stats.kstest(drawn, law.cdf).pvalue > 1e-3


@equation(
    "12.2",
    r"\mathrm{E}[\theta_i \mid y, m] = m + K_i\,(y_i - m), \quad K_i ="
    r" \frac{Q}{Q + 1/\tau_i} = \mathrm{sigmoid}(\log \tau_i Q)",
)
def test_shrinkage_is_the_gain():
    """The conditional of the joint Gaussian of all θ and y."""
    y, tau = table()
    prior = Q * np.eye(8)
    seen = prior + np.diag(1 / tau)
    expected = M + prior @ np.linalg.solve(seen, y - M)
    K = Q / (Q + 1 / tau)
    assert_allclose(M + K * (y - M), expected, rtol=1e-10)
    assert_allclose(kalman.gain(-log(Q), log(tau)).numpy(), K, rtol=1e-12)
    assert_allclose((log(tau) + log(Q)).sigmoid().numpy(), K, rtol=1e-12)


@equation(
    "12.3",
    r"\mathrm{E}\,X^2 = (k-1) + Q\Bigl(\sum_i w_i - \frac{\sum_i w_i^2}"
    r"{\sum_i w_i}\Bigr)",
)
def test_expected_excess():
    """A trace, simulation, and statsmodels' DerSimonian–Laird."""
    y, w = table()
    form = np.diag(w) - np.outer(w, w) / w.sum()
    bracket = w.sum() - (w**2).sum() / w.sum()
    expected = 7 + Q * bracket
    trace = np.trace(form @ np.diag(1 / w + Q))
    assert_allclose(expected, trace, rtol=1e-10)
    drawn = np.random.default_rng(2).normal(size=(50_000, 8))
    drawn = M + drawn * np.sqrt(1 / w + Q)
    X2 = np.einsum("bi,ij,bj->b", drawn, form, drawn)
    assert abs(X2.mean() - expected) < 4 * X2.std() / 50_000**0.5

    _, g, u = gravity()
    for values, precision in [(y, w), (g.numpy(), u.numpy() ** -2.0)]:
        c = precision.sum() - (precision**2).sum() / precision.sum()
        found = (fused(values, precision)[1] - (len(values) - 1)) / c
        library = combine_effects(values, 1 / precision, method_re="dl")
        assert_allclose(max(found, 0), max(library.tau2, 0), rtol=1e-6)


@equation(
    "12.4",
    r"\int \prod_i \mathcal N\bigl(y_i; m, 1/\lambda_i\bigr)\, dm ="
    r" \Bigl(\frac{2\pi}{\sum_i\lambda_i}\Bigr)^{1/2} \prod_i"
    r" \Bigl(\frac{\lambda_i}{2\pi}\Bigr)^{1/2}"
    r" e^{-\frac12\sum_i\lambda_i(y_i-\hat m)^2}",
)
@pytest.mark.parametrize("q", [0.7, 50.0, 400.0])
def test_restricted_likelihood(q):
    y, tau = table()
    lam = 1 / (1 / tau + q)
    _, squares = fused(y, lam)
    formula = (
        np.sqrt(2 * np.pi / lam.sum())
        * np.sqrt(lam / (2 * np.pi)).prod()
        * np.exp(-0.5 * squares)
    )
    scale = formula
    integral, _ = integrate.quad(
        lambda m: stats.norm(m, lam**-0.5).pdf(y).prod() / scale,
        -150,
        150,
        points=[8.0],
        epsrel=1e-10,
        limit=200,
    )
    assert_allclose(integral, 1, rtol=1e-8)


def size(module):
    return sum(p.numel() for p in module.parameters())


@equation(
    "12.5",
    r"\frac{\mathrm{parameters}(\tau)}{\mathrm{parameters}"
    r"(\mathrm{embedding})} = \frac{1}{d}",
)
@pytest.mark.parametrize("d", [16, 64])
def test_what_a_table_costs(d):
    table, embedding = ItemPrecision(300), nn.Embedding(300, d)
    assert size(table) * d == size(embedding)
    ids = torch.tensor([[3, 7]])
    torch.nn.init.normal_(table.log_precision.weight)
    expected = table.log_precision.weight[[3, 7]][None]
    torch.testing.assert_close(table(ids), expected)


@equation(
    "12.6",
    r"\mathrm{parameters}(\mathrm{MLP}) = f(d + 2) + 1",
)
@pytest.mark.parametrize(("d", "hidden"), [(16, 16), (64, 5)])
def test_what_a_network_costs(d, hidden):
    mlp = MLPPrecision(d, hidden=hidden)
    assert size(mlp) == hidden * (d + 2) + 1
    torch.nn.init.normal_(mlp.layers[-1].weight)
    h = torch.randn(2, 3, d)
    first, last = mlp.layers[0], mlp.layers[-1]
    a = h @ first.weight.T + first.bias
    phi = a * torch.special.ndtr(a)
    torch.testing.assert_close(mlp(h), phi @ last.weight.T + last.bias)


def parts(seed=3, tokens=5, d=8):
    torch.manual_seed(seed)
    layer = BFTLayer(
        d, 2, 12, 0.0, norm_first=True, dtype=torch.float64
    ).eval()
    h = torch.randn(1, tokens, d, dtype=torch.float64)
    log_tau = 0.5 * torch.randn(1, tokens, 1, dtype=torch.float64)
    return layer, h, log_tau


@equation(
    "12.7",
    r"\frac{\partial h'_t}{\partial \log\tau_t}\bigg|_{\mathrm{gain}} ="
    r" -K_t \circ (1-K_t) \circ e_t",
)
def test_gradient_through_the_own_gain():
    """Central differences of the update with the observation held fixed."""
    layer, h, log_tau = parts()
    expand = log_tau.expand(h.shape)
    seen = layer.observe(Belief(h, expand))
    _, K = layer.update(Belief(h, expand), seen)
    step = 1e-5
    up, _ = layer.update(Belief(h, expand + step), seen)
    down, _ = layer.update(Belief(h, expand - step), seen)
    slope = (up.mean - down.mean) / (2 * step)
    expected = -K * (1 - K) * seen.innovation
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-9)


def attention():
    torch.manual_seed(4)
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    log_tau = torch.randn(1, 6, dtype=torch.float64)
    return q, k, v, log_tau


@equation(
    "12.8",
    r"\frac{\partial \mu_t}{\partial \log\tau_k} = \tilde\alpha_{tk}\,"
    r"(v_k - \mu_t)",
)
def test_gradient_through_the_logits():
    q, k, v, log_tau = attention()
    now = kriging_attention(q, k, v, log_tau)
    for key in range(6):
        step = torch.zeros(1, 6, dtype=torch.float64)
        step[0, key] = 1e-5
        up = kriging_attention(q, k, v, log_tau + step).mean
        down = kriging_attention(q, k, v, log_tau - step).mean
        distance = v[:, :, key : key + 1] - now.mean
        expected = now.weights[..., key : key + 1] * distance
        slope = (up - down) / 2e-5
        torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-9)


@equation(
    "12.9",
    r"\sum_k \frac{\partial \mu_t}{\partial \log\tau_k} = 0",
)
def test_logits_do_not_see_the_level():
    q, k, v, log_tau = attention()
    J = torch.func.jacrev(lambda s: kriging_attention(q, k, v, s).mean)(
        log_tau
    )
    assert J.abs().max() > 0.1
    assert J.sum(-1).abs().max() < 1e-12
    shifted = kriging_attention(q, k, v, log_tau + 2.3)
    now = kriging_attention(q, k, v, log_tau)
    torch.testing.assert_close(shifted.mean, now.mean)
    torch.testing.assert_close(shifted.n_eff, now.n_eff)


@equation(
    "12.10",
    r"\frac{\partial \log\lambda''}{\partial \log\lambda} ="
    r" (1-K)\,(1 - Q\lambda'')",
)
@given(*[st.floats(-3, 3)] * 4)
@settings(deadline=None, max_examples=50)
def test_memory_of_a_layer(log_lam, log_o, log_g, log_q):
    start, o, g, q = (
        torch.tensor(x, dtype=torch.float64)
        for x in (log_lam, log_o, log_g, log_q)
    )
    start.requires_grad_()
    updated, K = kalman.update(
        Belief(torch.zeros(1).double(), start.view(1)),
        torch.zeros(1).double(),
        o.view(1),
    )
    out = predict(updated.log_precision, g, q)
    out.sum().backward()
    expected = (1 - K) * (1 - q.exp() * out.exp())
    torch.testing.assert_close(start.grad.view(1), expected.detach())
    assert 0 < start.grad < 1


def test_a_change_common_to_all_tokens_keeps_what_the_update_would_take():
    """With the neighbours' prior and values that agree, λ_obs follows λ."""
    layer, h, _ = parts()
    same = h[:, :1].expand(h.shape)

    def after(level):
        return layer(Belief(same, torch.full_like(same, level))).log_precision

    step = 1e-4
    slope = (after(0.3 + step) - after(0.3 - step)) / (2 * step)
    passed = 1 - layer.log_process_noise.exp() * after(0.3).exp()
    torch.testing.assert_close(slope, passed, rtol=1e-6, atol=0)


@equation(
    "12.11",
    r"K_\ell(c\,\tau,\; c\,\lambda^{\mathrm{obs}},\; Q/c) ="
    r" K_\ell(\tau,\; \lambda^{\mathrm{obs}},\; Q) \qquad"
    r" \text{at every layer } \ell",
)
@pytest.mark.parametrize("c", [1e-3, 0.4, 60.0])
def test_the_scale_of_precision_cancels(c):
    rng = np.random.default_rng(5)
    observed, growth = rng.gamma(2.0, 1.0, 6), rng.gamma(2.0, 0.5, 6)

    def gains(tau, factor, q):
        belief = Belief(torch.zeros(1).double(), log([tau]))
        found = []
        for o, g in zip(observed, growth, strict=True):
            belief, K = kalman.update(
                belief, torch.ones(1).double(), log([factor * o])
            )
            found.append(K.item())
            after = predict(belief.log_precision, log(g), log(q))
            belief = Belief(belief.mean, after)
        return found

    base = gains(1.7, 1.0, 0.4)
    assert_allclose(gains(c * 1.7, c, 0.4 / c), base, rtol=1e-9)
    assert abs(gains(c * 1.7, 1.0, 0.4)[0] - base[0]) > 0.05


def test_an_unread_item_has_no_precision_in_the_network():
    torch.manual_seed(6)
    config = SASRecConfig(
        n_items=9, d_model=8, dim_feedforward=16, dropout=0.0, bft=BFTConfig()
    )
    model = SASRec(config).eval()
    history = torch.tensor([[3, 5, 3, 8]])
    table = model.tau.learned.log_precision.weight

    def scores():
        h = model.query(model(history))
        weight, bias = model.item_embeddings()
        out = h @ weight.T
        return out if bias is None else out + bias

    before = scores()
    before.square().sum().backward()
    read = torch.zeros(len(table), dtype=torch.bool)
    read[history.flatten()] = True
    assert (table.grad[~read] == 0).all()
    assert (table.grad[read] != 0).all()
    with torch.no_grad():
        table[~read] += 4.6
        assert torch.equal(scores(), before)
        table[3] += 4.6
        assert not torch.allclose(scores(), before)


def test_the_schools_are_rubins():
    """The pooled mean and its error as every textbook prints them."""
    y, tau = table()
    mean, _ = fused(y, tau)
    assert_allclose(mean, 7.7, atol=0.05)
    assert_allclose(tau.sum() ** -0.5, 4.1, atol=0.05)
