"""Every numbered equation of chapter 7, from a source of its own.

Jacobians come from autograd and from finite differences, expectations over
random signs from every sign pattern, variances from quadrature.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import MultivariateNormal, kl_divergence
from torch.func import jacrev

from bft_ref import delta, jacobian_estimates
from tests.equations import equation

D, WIDTH = 5, 9
F64 = torch.float64


def randn(*shape, seed=0, scale=0.6):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=F64)


def every_sign(d=D):
    pair = torch.tensor([-1.0, 1.0], dtype=F64)
    return torch.cartesian_prod(*[pair] * d)


class Net:
    """FFN∘norm with no parameter at its default."""

    def __init__(self, name="gelu", norm="layernorm"):
        self.activation, self.gated = delta.activation_function(name)
        rows = WIDTH * (1 + self.gated)
        self.w_in, self.b_in = randn(rows, D, seed=1), randn(rows, seed=2)
        self.w_out, self.b_out = randn(D, WIDTH, seed=3), randn(D, seed=4)
        self.gamma, self.beta = 1.3 + randn(D, seed=5), randn(D, seed=6)
        self.centred = norm == "layernorm"
        if not self.centred:
            self.beta = None
        self.h = 0.4 + 1.7 * randn(D, seed=7, scale=1.0)

    def normed(self, h):
        if self.centred:
            return F.layer_norm(h, (D,), self.gamma, self.beta, 1e-3)
        return F.rms_norm(h, (D,), self.gamma, 1e-3)

    def network(self, x):
        a = F.linear(x, self.w_in, self.b_in)
        if self.gated:
            g, u = a.chunk(2, -1)
            return F.linear(self.activation(g) * u, self.w_out, self.b_out)
        return F.linear(self.activation(a), self.w_out, self.b_out)

    def __call__(self, h):
        return self.network(self.normed(h))

    def evaluated(self):
        norm = delta.normalise(
            self.h, self.gamma, self.beta, 1e-3, self.centred
        )
        ffn = delta.feed_forward(
            norm.output,
            self.w_in,
            self.b_in,
            self.w_out,
            self.b_out,
            self.activation,
            self.gated,
            norm=norm,
        )
        return ffn, norm

    def differences(self, function, at, step=1e-6):
        """The Jacobian by central differences."""
        columns = [
            (function(at + step * e) - function(at - step * e)) / (2 * step)
            for e in torch.eye(len(at), dtype=F64)
        ]
        return torch.stack(columns, 1)


@equation(
    "7.1",
    r"\lim_{\varepsilon\to0}\; \tfrac1\varepsilon\,"
    r" \mathrm{Cov}\,F(m + \sqrt\varepsilon\,\xi) = G\,C\,G^\top",
)
def test_small_errors_are_carried_by_the_jacobian():
    """ξ = C^½r over every sign r has covariance C exactly."""
    net = Net()
    root = torch.linalg.cholesky(
        torch.diag(torch.tensor([0.4, 2.5, 1.0, 0.1, 3.0], dtype=F64)) + 0.3
    )
    xi = every_sign() @ root.mT
    jacobian = torch.eye(D, dtype=F64) + net.differences(net, net.h)
    limit = jacobian @ root @ root.mT @ jacobian.mT
    errors = []
    for epsilon in [1e-2, 1e-3, 1e-4]:
        moved = net.h + epsilon**0.5 * xi
        outcome = moved + net(moved)
        covariance = torch.cov(outcome.mT, correction=0) / epsilon
        errors.append((covariance - limit).abs().max().item())
    assert errors[2] < 1e-3 * limit.abs().max()
    assert errors[0] > 5 * errors[1] > 25 * errors[2]


@equation(
    "7.2",
    r"\bigl[(I+J)\,\mathrm{diag}(1/\lambda')\,(I+J)^\top\bigr]_{ii}"
    r" = \sum_k \frac{(\delta_{ik} + J_{ik})^2}{\lambda'_k}"
    r" \;\ge\; \frac{(1 + J_{ii})^2}{\lambda'_i}",
)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_diagonal_rule_is_never_cautious(name):
    net = Net(name)
    precision = randn(D, seed=8).exp()
    j = jacrev(net)(net.h)
    g = torch.eye(D, dtype=F64) + j
    covariance = g @ torch.diag(1 / precision) @ g.mT
    row = torch.stack(
        [
            sum(((i == k) + j[i, k]) ** 2 / precision[k] for k in range(D))
            for i in range(D)
        ]
    )
    torch.testing.assert_close(covariance.diagonal(), row)
    own = (1 + j.diagonal()) ** 2 / precision
    assert (row >= own).all()
    assert (row > 1.01 * own).any()


@equation(
    "7.3",
    r"A = \frac{\partial\,\mathrm{FFN}(x)}{\partial x}"
    r" = W_2\,\mathrm{diag}(p)\,W_1",
)
@pytest.mark.parametrize("name", [*delta.ACTIVATIONS, *delta.GATED])
def test_jacobian_of_the_network(name):
    net = Net(name)
    ffn, norm = net.evaluated()
    a = ffn.w_out @ torch.diag(ffn.slope) @ ffn.w_in
    torch.testing.assert_close(a, jacrev(net.network)(norm.output))
    differences = net.differences(net.network, norm.output)
    torch.testing.assert_close(a, differences, rtol=1e-6, atol=1e-7)


@equation(
    "7.4",
    r"A_{ii} = \sum_f p_f\,W_{1,fi}\,W_{2,if}"
    r" = \bigl[\,p\,(W_1\circ W_2^\top)\bigr]_i",
)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_diagonal_is_one_product(name):
    net = Net(name)
    ffn, norm = net.evaluated()
    dense = jacrev(net.network)(norm.output).diagonal()
    one_product = ffn.slope @ (ffn.w_in * ffn.w_out.mT)
    torch.testing.assert_close(one_product, dense)
    torch.testing.assert_close(delta.jacobian_diag(ffn), dense)


@equation(
    "7.5",
    r"\frac{\partial x_k}{\partial h_i} = \frac{\gamma_k}{\varsigma}"
    r"\Bigl(\delta_{ki} - \frac1d - \frac{z_kz_i}{d}\Bigr)",
)
def test_jacobian_of_the_norm():
    net = Net()
    _, norm = net.evaluated()
    z = norm.z
    closed = torch.eye(D, dtype=F64) - 1 / D - torch.outer(z, z) / D
    closed = net.gamma[:, None] / norm.scale * closed
    torch.testing.assert_close(closed, jacrev(net.normed)(net.h))
    differences = net.differences(net.normed, net.h)
    torch.testing.assert_close(closed, differences, rtol=1e-6, atol=1e-7)


@equation(
    "7.6",
    r"J_i = \frac1\varsigma\Bigl(\gamma_iA_{ii}"
    r" - \frac1d\sum_k A_{ik}\gamma_k"
    r" - \frac{z_i}{d}\sum_k A_{ik}\gamma_kz_k\Bigr)",
)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_diagonal_behind_a_norm(name, norm):
    net = Net(name, norm)
    _, normed = net.evaluated()
    a, z, gamma = jacrev(net.network)(normed.output), normed.z, net.gamma
    closed = gamma * a.diagonal() - z / D * (a @ (gamma * z))
    if norm == "layernorm":
        closed = closed - a @ gamma / D
    closed = closed / normed.scale
    torch.testing.assert_close(closed, jacrev(net)(net.h).diagonal())
    differences = net.differences(net, net.h).diagonal()
    torch.testing.assert_close(closed, differences, rtol=1e-6, atol=1e-7)


@equation(
    "7.7",
    r"J = \frac1\varsigma\Bigl(p\,M"
    r" - \frac zd\circ W_2\bigl(p\circ(a - c)\bigr)\Bigr)",
)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_two_products_are_enough(name):
    net = Net(name)
    ffn, norm = net.evaluated()
    a = F.linear(norm.output, net.w_in, net.b_in)
    c = net.w_in @ net.beta + net.b_in
    fixed = net.w_in @ net.gamma
    m = ffn.w_out.mT * (net.gamma * net.w_in - fixed[:, None] / D)
    second = ffn.w_out @ (ffn.slope * (a - c))
    closed = (ffn.slope @ m - norm.z / D * second) / norm.scale
    dense = jacrev(net)(net.h).diagonal()
    torch.testing.assert_close(closed, dense)
    torch.testing.assert_close(delta.jacobian_diag(ffn, norm), dense)


@equation(
    "7.8",
    r"\frac1d\,\mathrm{E}\sum_{i,k} A_{ik}^2"
    r" = d\,f\,\sigma_1^2\,\sigma_2^2\;\mathrm{E}\,p_f^2",
)
def test_size_of_the_row_for_random_weights():
    """Weights and slopes drawn independently, within four standard errors."""
    d, f, draws = 6, 10, 20_000
    w1 = randn(draws, f, d, seed=11, scale=0.7)
    w2 = randn(draws, d, f, seed=12, scale=0.3)
    p = 0.5 + randn(draws, f, seed=13, scale=0.4)
    a = w2 @ (p[..., None] * w1)
    sizes = a.square().sum((1, 2)) / d
    expected = d * f * 0.7**2 * 0.3**2 * (0.5**2 + 0.4**2)
    error = sizes.std() / draws**0.5
    assert error < 0.01 * expected
    assert (sizes.mean() - expected).abs() < 4 * error


@equation(
    "7.9",
    r"\mathrm{E}\bigl[(1 + r_i(Jr)_i)\,(1 + s_i(Js)_i)\bigr]"
    r" = (1 + J_i)^2",
)
def test_two_independent_probes():
    net, signs = Net(), every_sign()
    net.w_out = 0.1 * net.w_out  # nothing is cut at zero
    j = jacrev(net)(net.h)
    one = 1 + signs * (signs @ j.mT)
    expectation = (one[:, None] * one[None]).mean((0, 1))
    truth = (1 + j.diagonal()).square()
    torch.testing.assert_close(expectation, truth)
    pairs = len(signs) ** 2
    probes = torch.stack(
        [signs.repeat(len(signs), 1), signs.repeat_interleave(len(signs), 0)]
    )
    many = net.h.expand(pairs, D).contiguous()
    _, growth = jacobian_estimates.hutchinson_growth(net, many, probes)
    torch.testing.assert_close(growth.mean(0), truth)


@equation(
    "7.10",
    r"\mathrm{E}\bigl[(1 + r_i(Jr)_i)^2\bigr]"
    r" = \sum_k (\delta_{ik} + J_{ik})^2",
)
def test_one_probe_squared():
    net, signs = Net(), every_sign()
    j = jacrev(net)(net.h)
    squared = (1 + signs * (signs @ j.mT)).square().mean(0)
    row = (torch.eye(D, dtype=F64) + j).square().sum(-1)
    torch.testing.assert_close(squared, row)
    assert (squared > 1.05 * (1 + j.diagonal()).square()).any()


@equation(
    "7.11",
    r"\mathrm{E}\Bigl[\bigl((I + J)\,\lambda'^{-1/2}\circ r\bigr)_i^2\Bigr]"
    r" = \sum_k \frac{(\delta_{ik} + J_{ik})^2}{\lambda'_k}",
)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_row_rule(norm):
    net, signs = Net("swiglu", norm), every_sign()
    ffn, normed = net.evaluated()
    log = randn(D, seed=8)
    found = jacobian_estimates.row_variance(
        log.expand(len(signs), D),
        signs,
        lambda x: jacobian_estimates.jacobian_product(ffn, x, normed),
    )
    g = torch.eye(D, dtype=F64) + jacrev(net)(net.h)
    torch.testing.assert_close(found.mean(0), g.square() @ (-log).exp())


@equation(
    "7.12",
    r"\Bigl(1 + \frac{\mathrm{tr}\,J}{d}\Bigr)^2 \;\le\;"
    r" \frac1d\sum_i (1 + J_{ii})^2 \;\le\; \frac{\|I + J\|_F^2}{d}",
)
@pytest.mark.parametrize("name", [*delta.ACTIVATIONS, *delta.GATED])
def test_trace_is_a_lower_bound(name):
    net = Net(name)
    ffn, norm = net.evaluated()
    g = torch.eye(D, dtype=F64) + jacrev(net)(net.h)
    trace = (1 + delta.jacobian_trace(ffn, norm)).square()
    torch.testing.assert_close(trace, (g.trace() / D).square()[None])
    mean = g.diagonal().square().mean()
    frobenius = torch.linalg.matrix_norm(g).square() / D
    assert trace.item() < mean < frobenius


@equation(
    "7.13",
    r"w_i = S_{ii} \quad\text{or}\quad"
    r" \frac1{w_i} = \bigl[S^{-1}\bigr]_{ii},"
    r" \qquad S = (I+J)\,\mathrm{diag}(1/\lambda')\,(I+J)^\top",
)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_what_the_best_diagonals_keep(name):
    """torch's divergences of Gaussians, at their minimum over log w."""
    net = Net(name)
    g = torch.eye(D, dtype=F64) + jacrev(net)(net.h)
    precision = randn(D, seed=8).exp()
    s = g @ torch.diag(1 / precision) @ g.mT
    zero = torch.zeros(D, dtype=F64)
    full = MultivariateNormal(zero, s)
    marginal, conditional = s.diagonal(), 1 / torch.linalg.inv(s).diagonal()

    def divergence(log_w, forward):
        both = full, MultivariateNormal(zero, torch.diag(log_w.exp()))
        return kl_divergence(*(both if forward else both[::-1]))

    own = g.diagonal().square() / precision
    for forward, best in [(True, marginal), (False, conditional)]:
        log_w = best.log().requires_grad_()
        least = divergence(log_w, forward)
        (slope,) = torch.autograd.grad(least, log_w)
        torch.testing.assert_close(slope, zero, atol=1e-9, rtol=0)
        for seed in range(20):
            elsewhere = divergence(log_w + randn(D, seed=seed), forward)
            assert elsewhere > least
        assert divergence(own.log(), forward) > least + 1e-3
    rest = [*range(1, D)]
    given = s[0, 0] - s[0, rest] @ torch.linalg.solve(
        s[rest][:, rest], s[rest, 0]
    )
    torch.testing.assert_close(conditional[0], given)


@equation(
    "7.14",
    r"\mathrm{Var}\,F(h) = F'^2\,v"
    r" + \bigl(\tfrac12F''^2 + F'F'''\bigr)\,v^2 + O(v^3)",
)
@pytest.mark.parametrize("at", [-0.7, 0.0, 0.4])
def test_second_order(at):
    """Quadrature; derivatives from autograd; the error is of third order."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    def bend(x):
        return x - 2 * F.gelu(x)

    x = torch.tensor(at, dtype=F64, requires_grad=True)
    derivatives, value = [], bend(x)
    for _ in range(3):
        (value,) = torch.autograd.grad(value, x, create_graph=True)
        derivatives.append(value.item())
    one, two, three = derivatives
    errors = []
    for v in [0.04, 0.01, 0.0025]:
        y = bend(torch.tensor(at + v**0.5 * nodes)).numpy()
        variance = weights @ (y - weights @ y) ** 2
        errors.append(
            abs(variance - one**2 * v - (two**2 / 2 + one * three) * v**2)
        )
    assert errors[0] < 5 * 0.04**3
    assert errors[0] > 40 * errors[1] > 1600 * errors[2]
