"""Every numbered equation of chapter 9, from a source of its own.

The layer's steps come from the loops of ``tests/oracles``, the norm's
Jacobian from autograd and simulation, double counting from the covariance
of all tokens together.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose
from torch import nn
from torch.func import jacrev

from bft_ref import Belief, BFTConfig, BFTEncoder, delta, update
from bft_ref.reml import observation_variance
from tests.equations import equation
from tests.factories import label, make_belief, make_layer

F64 = torch.float64
CONFIGS = [
    {"norm_first": first, "prior_scale": prior}
    for first in (True, False)
    for prior in ("neighbours", "unit")
]


@equation(
    "9.1",
    r"e = W_O\,\mu + b_O, \qquad \frac1{\lambda^{\mathrm{obs}}_i}"
    r" = \sum_k W_{O,ik}^2\;\frac{n+1}{n}\;"
    r"\frac{\nu_0s_{0,k}^2 + nD_k}{\nu_0 + n - 1}",
)
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_observe(config):
    """Written out in numpy from the trace's weights."""
    layer, belief = make_layer(prior_dof=2.5, **config), make_belief()
    seen = layer.observe(belief, keep_weights=True)
    d, heads = layer.d_model, layer.nhead
    x, scale = belief.mean, torch.ones(2, 5, dtype=F64)
    gamma = torch.ones(d, dtype=F64)
    if layer.norm_first:
        scale = (x.var(-1, correction=0) + layer.norm1.eps).sqrt()
        gamma = layer.norm1.weight
        x = layer.norm1(x)
    w_v = layer.self_attn.in_proj_weight[-d:]
    v = F.linear(x, w_v, layer.self_attn.in_proj_bias[-d:])
    c = belief.variance.mean(-1) / scale**2
    if config["prior_scale"] == "unit":
        c = torch.ones_like(c)
    w_o = layer.self_attn.out_proj.weight.detach().numpy()
    b_o = layer.self_attn.out_proj.bias.detach().numpy()
    g = ((w_v * gamma) ** 2).sum(-1).detach().numpy()
    v, c = v.detach().numpy(), c.detach().numpy()
    weights = seen.weights.detach().numpy()
    size = d // heads
    for b, t in [(0, 0), (1, 3)]:
        mu, variance = np.zeros(d), np.zeros(d)
        for k in range(d):
            a = weights[b, k // size, t]
            n = 1 / (a @ a)
            mu[k] = a @ v[b, :, k]
            spread = a @ (v[b, :, k] - mu[k]) ** 2
            s0 = g[k] * (a @ c[b])
            s2 = (2.5 * s0 + n * spread) / (2.5 + n - 1)
            variance[k] = s2 * (n + 1) / n
        e = seen.innovation[b, t].detach().numpy()
        log = seen.log_precision[b, t].detach().numpy()
        assert_allclose(e, w_o @ mu + b_o, rtol=1e-9)
        assert_allclose(np.exp(-log), w_o**2 @ variance, rtol=1e-9)


@equation(
    "9.2",
    r"h' = h + \frac{\lambda^{\mathrm{obs}}}"
    r"{\lambda + \lambda^{\mathrm{obs}}}\circ e, \qquad"
    r" \lambda' = \lambda + \lambda^{\mathrm{obs}}",
)
def test_update():
    """The layer's own update, and Bayes' rule on a grid for z = h + e."""
    layer, belief = make_layer(), make_belief()
    seen = layer.observe(belief)
    after, _ = layer.update(belief, seen)
    lam, o = belief.precision, seen.log_precision.exp()
    torch.testing.assert_close(after.precision, lam + o)
    expected = belief.mean + o / (lam + o) * seen.innovation
    torch.testing.assert_close(after.mean, expected)
    h, e, p, q = (
        x[0, 2, 3].item() for x in (belief.mean, seen.innovation, lam, o)
    )
    grid = np.linspace(h - 40, h + 40, 400_001)
    log = -p / 2 * (grid - h) ** 2 - q / 2 * (grid - h - e) ** 2
    density = np.exp(log - log.max())
    density /= density.sum()
    mean = density @ grid
    assert_allclose(after.mean[0, 2, 3].item(), mean, rtol=1e-8)
    variance = density @ (grid - mean) ** 2
    assert_allclose(after.variance[0, 2, 3].item(), variance, rtol=1e-6)


@equation(
    "9.3",
    r"h'' = h' + \mathrm{FFN}(\mathrm{norm}(h')), \qquad"
    r" \lambda'' = \Bigl(\frac{(1+J)^2}{\lambda'} + Q\Bigr)^{-1}",
)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_predict(activation):
    """J from autograd, one token at a time."""
    layer = make_layer(activation=activation, process_noise=0.4)
    belief = make_belief()
    after, _ = layer.predict(belief)

    def network(h):
        a = layer.linear1(layer.norm2(h))
        if activation == "swiglu":
            gate, u = a.chunk(2, -1)
            return layer.linear2(F.silu(gate) * u)
        return layer.linear2(F.gelu(a))

    h = belief.mean[1, 2]
    j = jacrev(network)(h).diagonal()
    torch.testing.assert_close(after.mean[1, 2], h + network(h))
    q = layer.log_process_noise.exp()
    expected = 1 / ((1 + j) ** 2 / belief.precision[1, 2] + q)
    torch.testing.assert_close(after.precision[1, 2], expected)


@equation(
    "9.4",
    r"\sum_k G_{ik}^2v_k = \frac{\gamma_i^2}{\varsigma^2}\Bigl["
    r"v_i\Bigl(1 - \frac{2(1+z_i^2)}d\Bigr)"
    r" + \frac{\sum_kv_k + 2z_i\sum_kz_kv_k + z_i^2\sum_kz_k^2v_k}{d^2}"
    r"\Bigr]",
)
@pytest.mark.parametrize("outlier", [0.0, 80.0])
def test_through_a_post_norm(outlier):
    """Autograd's Jacobian; simulation with small errors."""
    generator = torch.Generator().manual_seed(0)
    d = 6
    h, b = torch.randn(2, d, generator=generator, dtype=F64)
    gamma = 1.3 + 0.3 * torch.randn(d, generator=generator, dtype=F64)
    h = 1.7 * h + 0.4
    h[2] += outlier
    v = torch.tensor([0.4, 2.5, 1.0, 0.1, 3.0, 0.7], dtype=F64)

    def norm(x):
        return F.layer_norm(x, (d,), gamma, b, 1e-3)

    jacobian = jacrev(norm)(h)
    expected = jacobian.square() @ v
    at = delta.normalise(h, gamma, b, 1e-3)
    z, scale = at.z, at.scale
    shared = v.sum() + 2 * z * (z @ v) + z**2 * (z**2 @ v)
    closed = v * (1 - 2 * (1 + z**2) / d) + shared / d**2
    closed = closed * gamma**2 / scale**2
    torch.testing.assert_close(closed, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        delta.normalised_variance(v, at), expected, rtol=1e-9, atol=1e-12
    )
    noise = torch.randn(40_000, d, generator=generator, dtype=F64)
    drawn = norm(h + 1e-4 * v.sqrt() * noise).var(0) / 1e-8
    torch.testing.assert_close(drawn, expected, rtol=0.04, atol=0.0)


@equation(
    "9.5",
    r"\Bigl(1 + \frac{(1+J)^2}{Q\,\lambda^{\mathrm{obs}}}\Bigr)^{-1}"
    r" \le\; Q\,\lambda'' \;\le\; 1",
)
def test_limit():
    """The bounds for every token; the output differs by O(1/Q)."""
    torch.manual_seed(5)
    layer = nn.TransformerEncoderLayer(
        8, 2, 12, 0.0, F.gelu, batch_first=True, norm_first=True, dtype=F64
    )
    plain = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    plain = plain.eval()
    x = 1.5 * torch.randn(2, 5, 8, dtype=F64)
    target, errors = plain(x), []
    for q in [3.0, 1e3, 1e5, 1e7]:
        config = BFTConfig(prior_scale="unit", process_noise=q)
        ours = BFTEncoder.from_torch(plain, config, initial_precision=1 / q)
        belief = Belief.of(x, precision=1 / q)
        for one in ours.layers:
            belief, trace = one.step(belief)
            growth = trace.log_growth.exp()
            seen = trace.log_observation_precision.exp()
            bound = 1 / (1 + growth / (q * seen))
            assert (q * belief.precision <= 1 + 1e-12).all()
            assert (q * belief.precision >= bound - 1e-12).all()
            assert bound.min() > 0
        torch.testing.assert_close(belief.mean, ours(x))
        errors.append((belief.mean - target).abs().max().item())
    assert errors[0] > 0.05
    assert_allclose(errors[2] / errors[3], 100, rtol=0.02)
    assert errors[3] < 1e-4


TOKENS, TAU = 8, 0.4


def layers(reading, count, q=0.0):
    """Claimed precision, and the covariance of all tokens' errors.

    Uniform attention over tokens that hold independent measurements of one
    quantity; e = μ − h; s² = 1/λ, which a dispersion of 0 and n = 1 give.
    """
    belief = Belief(
        torch.zeros(TOKENS, dtype=F64),
        torch.full((TOKENS,), math.log(TAU), dtype=F64),
    )
    errors = torch.eye(TOKENS, dtype=F64)  # column j: token j off by one
    gains = []
    for _ in range(count):
        n = torch.tensor(float(TOKENS), dtype=F64)
        scale = belief.variance  # ν₀s₀²/(ν₀ + n − 1) with ν₀ → ∞
        variance = observation_variance(
            torch.zeros_like(scale), n, scale, 1e15, reading
        )
        log = -variance.log()
        moved, k = update(
            Belief(errors, belief.log_precision[:, None]),
            errors.mean(0) - errors,
            log[:, None],
        )
        errors = moved.mean
        gains.append(k[0, 0].item())
        _, log_precision = update(belief, belief.mean, log)[0]
        belief = Belief(belief.mean, log_precision)
    return belief.precision, errors @ errors.mT / TAU, gains


@equation(
    "9.6",
    r"\lambda_L^{\mathrm{mean}} = \tau\,(1 + T)^L, \qquad"
    r" \lambda_L^{\mathrm{prediction}}"
    r" = \tau\,\Bigl(1 + \frac{T}{T+1}\Bigr)^L",
)
@pytest.mark.parametrize("count", [1, 3, 6])
def test_claims_grow_geometrically(count):
    mean, _, _ = layers("mean", count)
    prediction, _, _ = layers("prediction", count)
    assert_allclose(mean, TAU * 9.0**count, rtol=1e-9)
    assert_allclose(prediction, TAU * (17 / 9) ** count, rtol=1e-9)


@equation(
    "9.7",
    r"\mathrm{Var}\,(h_L - \theta) = \frac1\tau\Bigl(\frac1T"
    r" + \Bigl(1 - \frac1T\Bigr)\prod_{\ell<L}(1 - K_\ell)^2\Bigr)"
    r" \;\ge\; \frac{1}{T\tau}",
)
@pytest.mark.parametrize("reading", ["mean", "prediction", "value"])
def test_truth_stays_at_the_joint_posterior(reading):
    """The covariance of all tokens; the joint posterior by least squares."""
    for count in [1, 3, 6]:
        claimed, covariance, gains = layers(reading, count)
        left = math.prod((1 - k) ** 2 for k in gains)
        expected = (1 / TOKENS + (1 - 1 / TOKENS) * left) / TAU
        assert_allclose(covariance.diagonal(), expected, rtol=1e-9)
        ones = np.ones((TOKENS, 1))
        joint = np.linalg.inv(ones.T @ (TAU * np.eye(TOKENS)) @ ones).item()
        assert_allclose(joint, 1 / (TOKENS * TAU))
        assert covariance.diagonal().min() >= joint * (1 - 1e-9)
    assert (1 / claimed < 0.2 * covariance.diagonal()).all()
