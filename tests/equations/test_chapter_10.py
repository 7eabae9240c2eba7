"""Every numbered equation of chapter 10, from a source of its own.

PyTorch's attention and softmax, numpy's weighted covariance, automatic
differentiation, exact rational arithmetic, and PyTorch's flop counter.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import llama_layer
from benchmarks.llama_layer import Shape, filter_layer
from bft_ref import Belief, BFTConfig, BFTLayer
from bft_ref.fast.attention import attend
from bft_ref.fast.weighted_columns import weighted_columns
from bft_ref.kriging import dispersion, kriging_weights
from bft_ref.notebook.timing import StandardLayer, flops
from tests.equations import equation

T, DH = 9, 6


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 1.6 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def folded(q, k, log_precision):
    scale = q.shape[-1] ** 0.5
    q1 = torch.cat([q, torch.ones_like(q[:, :1])], 1)
    return q1, torch.cat([k, scale * log_precision[:, None]], 1)


@equation(
    "10.1",
    r"\frac{q'_t\cdot k'_j}{\sqrt{d_h}} = \frac{q_t\cdot k_j}{\sqrt{d_h}}"
    r" + \log\bar\lambda_j",
)
def test_precision_as_a_feature():
    """PyTorch's plain attention on q', k' is attention with a bias."""
    q, k, v = normal(T, DH), normal(T, DH, seed=1), normal(T, 4, seed=2)
    log_precision = normal(T, seed=3)
    q1, k1 = folded(q, k, log_precision)
    torch.testing.assert_close(
        q1 @ k1.T / DH**0.5, q @ k.T / DH**0.5 + log_precision
    )
    biased = F.scaled_dot_product_attention(
        *(x[None, None] for x in (q, k, v)),
        attn_mask=log_precision.expand(T, T)[None, None],
    )
    plain = F.scaled_dot_product_attention(
        *(x[None, None] for x in (q1, k1, v)), scale=DH**-0.5
    )
    torch.testing.assert_close(plain, biased)
    ours = attend(
        *(x[None, None] for x in (q, k, v)),
        log_precision[None],
        implementation="chunked",
    )
    torch.testing.assert_close(ours.mean, biased)


fractions = st.fractions(-50, 50, max_denominator=30)


@equation(
    "10.2",
    r"\frac{\sum_j \tilde\alpha_j v_j^2 + \mu^2}"
    r"{\sum_j \tilde\alpha_j v_j^2 - \mu^2} = 1 + \frac{2\mu^2}{D}",
)
@given(st.lists(st.tuples(fractions, st.integers(1, 9)), min_size=2))
@settings(deadline=None, max_examples=50)
def test_condition_number(pairs):
    """In rational numbers, without any rounding, D by its definition."""
    total = sum(w for _, w in pairs)
    alpha = [Fraction(w, total) for _, w in pairs]
    v = [x for x, _ in pairs]
    mu = sum(a * x for a, x in zip(alpha, v, strict=True))
    square = sum(a * x * x for a, x in zip(alpha, v, strict=True))
    D = sum(a * (x - mu) ** 2 for a, x in zip(alpha, v, strict=True))
    if D > 0:
        assert (square + mu**2) / (square - mu**2) == 1 + 2 * mu**2 / D


def test_rounding_grows_as_the_condition_number():
    """float32 without a centre loses what (10.2) says; with one, nothing."""
    w = normal(64).softmax(0)[None]
    for offset in [30.0, 300.0]:
        v = offset + normal(64, 200, seed=1)
        exact = torch.tensor(np.cov(v.T, aweights=w[0], ddof=0)).diagonal()
        kappa = 1 + 2 * (w @ v).square()[0] / exact
        plain = dispersion(w.float(), v.float())[0].double()
        centred = dispersion(w.float(), v.float(), v[:1].float())[0].double()
        error = ((plain - exact) / exact).abs().median()
        eps = torch.finfo(torch.float32).eps / 2
        assert 0.02 < error / (eps * kappa.median()) < 4
        rounded = eps * offset * 20  # of the values themselves
        assert ((centred - exact) / exact).abs().max() < rounded + 1e-5


@equation(
    "10.3",
    r"D = \sum_j \tilde\alpha_j (v_j - a)^2"
    r" - \Bigl(\sum_j \tilde\alpha_j (v_j - a)\Bigr)^2",
)
@pytest.mark.parametrize("a", [0.0, -7.5, 40.0])
def test_any_centre(a):
    w, v = normal(1, T).softmax(-1), 3 + normal(T, 5, seed=1)
    expected = np.cov(v.T, aweights=w[0], ddof=0).diagonal()
    u = v - a
    found = w @ u.square() - (w @ u).square()
    assert_allclose(found[0], expected, rtol=1e-10)
    centre = torch.full((1, 5), a, dtype=v.dtype)
    assert_allclose(dispersion(w, v, centre)[0], expected, rtol=1e-10)


@equation(
    "10.4",
    r"n = \frac{1}{\sum_j\tilde\alpha_j^2} ="
    r" \exp\bigl(2\,\mathrm{LSE}(s) - \mathrm{LSE}(2s)\bigr)",
)
def test_count_from_two_log_sum_exps():
    """Softmax, and the log-sum-exp that the chunked kernel returns."""
    q, k, v = normal(T, DH), normal(T, DH, seed=1), normal(T, 4, seed=2)
    log_precision = normal(T, seed=3)
    scores = q @ k.T / DH**0.5
    weights = kriging_weights(scores, log_precision)
    expected = 1 / weights.square().sum(-1)
    s = scores + log_precision
    lse = 2 * torch.logsumexp(s, -1) - torch.logsumexp(2 * s, -1)
    torch.testing.assert_close(lse.exp(), expected)
    q1, k1 = folded(q, k, log_precision)
    one, two = (
        weighted_columns(x[None], k1[None], v[None], False, DH**-0.5)
        for x in (q1, 2 * q1)
    )
    torch.testing.assert_close((2 * one[2] - two[2])[0].exp(), expected)
    torch.testing.assert_close(1 / one[1][0], expected)


@equation(
    "10.5",
    r"\mathrm dS_j = \tilde\alpha_j\,\bigl(\mathrm dO\cdot u_j"
    r" + 2g\,\tilde\alpha_j - \delta\bigr),"
    r" \qquad \delta = \mathrm dO\cdot o + 2g\sum_i\tilde\alpha_i^2",
)
def test_backward_of_the_columns():
    """Automatic differentiation through an ordinary softmax."""
    s = normal(T, T).requires_grad_()
    u, grad_out, g = normal(T, 5, seed=1), normal(T, 5, seed=2), normal(T)
    weights = s.softmax(-1)
    out, squares = weights @ u, weights.square().sum(-1)
    (expected,) = torch.autograd.grad([out, squares], s, [grad_out, g])
    alpha = weights.detach()
    delta = (grad_out * out).sum(-1) + 2 * g * squares
    ds = alpha * (grad_out @ u.T + 2 * g[:, None] * alpha - delta[:, None])
    torch.testing.assert_close(ds, expected)
    q, k = normal(T, DH).requires_grad_(), normal(T, DH, seed=1)
    out, squares, _ = weighted_columns(
        q[None], k[None], u[None], False, DH**-0.5
    )
    (found,) = torch.autograd.grad(
        [out, squares], q, [grad_out[None], g[None]]
    )
    alpha = (q @ k.T * DH**-0.5).softmax(-1).detach()
    delta = (grad_out * (alpha @ u)).sum(-1)
    delta = delta + 2 * g * alpha.square().sum(-1)
    ds = alpha * (grad_out @ u.T + 2 * g[:, None] * alpha - delta[:, None])
    torch.testing.assert_close(found, ds @ k * DH**-0.5)


SHAPES = [(64, 4, 32), (128, 2, 100), (96, 3, 10)]


def counted(d, heads, tokens, **options):
    """Operations per token of the forward pass, causal and chunked."""
    config = BFTConfig(implementation="chunked", **options)
    layer = BFTLayer(
        d, heads, 4 * d, 0.0, F.gelu, norm_first=True, config=config
    )
    log = torch.zeros(
        1, tokens, d if layer.log_process_noise.numel() > 1 else 1
    )
    with torch.no_grad():
        belief = Belief(torch.zeros(1, tokens, d), log)
        return flops(lambda: layer(belief, is_causal=True)) / tokens


@equation("10.6", r"F_{\text{standard}} = 24d^2 + 4Sd")
@pytest.mark.parametrize(("d", "heads", "tokens"), SHAPES)
def test_operations_of_the_standard_layer(d, heads, tokens):
    """The counter, on ours and on PyTorch's own layer without a mask."""
    x = torch.zeros(1, tokens, d)
    with torch.no_grad():
        ours = flops(lambda: StandardLayer(d, heads)(x)) / tokens
    assert ours == 24 * d**2 + 4 * (tokens / 2) * d
    torchs = nn.TransformerEncoderLayer(
        d, heads, 4 * d, 0.0, F.gelu, batch_first=True, norm_first=True
    )
    with FlopCounterMode(display=False) as counter:
        torchs.train()(x.requires_grad_())
    assert counter.get_total_flops() / tokens == 24 * d**2 + 4 * tokens * d


@equation("10.7", r"F_{\text{feature}} = 42d^2 + 6S(d+H)")
@pytest.mark.parametrize(("d", "heads", "tokens"), SHAPES)
def test_operations_with_a_precision_per_feature(d, heads, tokens):
    """The counter; and every product of the plain form, one by one."""
    due = 42 * d**2 + 6 * (tokens / 2) * (d + heads)
    assert counted(d, heads, tokens) == due
    first = counted(d, heads, tokens, jacobian="first")
    assert due - first == 8 * d**2  # the radial term
    one_by_one = [
        *[2 * d * d] * 4,  # q, k, v, output
        2 * d * d,  # variances through the squares of W_O
        *[2 * d * 4 * d] * 2,  # the feed-forward network
        *[2 * d * 4 * d] * 2,  # φ' through a fixed matrix, radial term
        2 * (d + heads) * tokens / 2,  # scores with log precision
        2 * (2 * d + 2 * heads) * tokens / 2,  # v, v², c, row sums
    ]
    assert sum(one_by_one) == due


def test_the_fused_passes_count_what_they_multiply():
    """The formulas given to the counter, against products it sees itself.

    Without an activation that has a fused pass, the layer takes the plain
    form, whose products PyTorch counts.
    """
    d, heads, tokens = 64, 4, 32
    counts = []
    for activation in (F.gelu, lambda a: F.gelu(a)):
        layer = BFTLayer(d, heads, 4 * d, 0.0, activation, norm_first=True)
        belief = Belief(torch.zeros(1, tokens, d), torch.zeros(1, tokens, d))
        with torch.no_grad():
            counts.append(flops(lambda la=layer, b=belief: la(b)))
    assert counts[0] == counts[1]


@equation("10.8", r"F_{\text{token}} = 32d^2 + 8d + S(4d+8H)")
@pytest.mark.parametrize(("d", "heads", "tokens"), SHAPES)
def test_operations_with_a_precision_per_token(d, heads, tokens):
    due = 32 * d**2 + 8 * d + tokens / 2 * (4 * d + 8 * heads)
    assert counted(d, heads, tokens, granularity="token") == due
    first = counted(d, heads, tokens, granularity="token", jacobian="first")
    assert due - first == 8 * d**2
    standard = 24 * d**2 + 4 * tokens / 2 * d
    assert first - standard == 8 * d + 8 * heads * tokens / 2


LLAMAS = [Shape(1, 64, 96, 6, 2, 160), Shape(1, 32, 48, 3, 1, 80)]


def more_of_a_llama(shape, granularity):
    """What the counter finds beyond a standard layer's, per token."""
    features = shape.d_model if granularity == "feature" else 1
    x = torch.zeros(1, shape.tokens, shape.d_model)
    log = torch.zeros(1, shape.tokens, features)
    config = BFTConfig(granularity=granularity, implementation="chunked")
    plain, layer = (
        llama_layer.StandardLayer(shape),
        filter_layer(shape, config),
    )
    with torch.no_grad():
        found = flops(lambda: plain(x))
        more = flops(lambda: layer(Belief(x, log), is_causal=True)) - found
    _, tokens, d, heads, kv_heads, w = shape
    kv = d // heads * kv_heads
    due = 4 * d**2 + 4 * d * kv + 6 * d * w + 4 * (tokens / 2) * d
    assert found / tokens == due
    return more / tokens


@equation(
    "10.9",
    r"F_{\text{Llama, token}} - F_{\text{Llama}} = 2dw + 4w + 2d + 8SH",
)
@pytest.mark.parametrize("shape", LLAMAS)
def test_operations_of_a_llama_with_a_precision_per_token(shape):
    _, tokens, d, heads, _, w = shape
    due = 2 * d * w + 4 * w + 2 * d + 8 * tokens / 2 * heads
    assert more_of_a_llama(shape, "token") == due


@equation(
    "10.10",
    r"F_{\text{Llama, feature}} - F_{\text{Llama}}"
    r" = 6dw + 2d^2 + 2Sd + 6SH",
)
@pytest.mark.parametrize("shape", LLAMAS)
def test_operations_of_a_llama_with_a_precision_per_feature(shape):
    _, tokens, d, heads, _, w = shape
    due = 6 * d * w + 2 * d**2 + tokens * d + 6 * tokens / 2 * heads
    assert more_of_a_llama(shape, "feature") == due
