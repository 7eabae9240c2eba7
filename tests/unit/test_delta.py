"""Jacobians against torch.func.jacrev, variances against simulation."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from bft_ref import delta, fast
from bft_ref.delta import ACTIVATIONS, GATED
from bft_ref.fast import feed_forward
from tests.factories import label

NAMES = [*ACTIVATIONS, *GATED]
NORMS = ["none", "layernorm", "rmsnorm"]


class Net:
    """An FFN behind a norm, as parameters and as a plain function."""

    def __init__(self, name="gelu", norm="layernorm", d=6, bare=False, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape, at=0.0):
            x = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return at + 0.6 * x

        self.activation, self.gated = delta.activation_function(name)
        self.norm, self.d, width = norm, d, 9
        self.w_in = draw(width * (1 + self.gated), d)
        self.w_out = draw(d, width)
        self.b_in = None if bare else draw(len(self.w_in))
        self.b_out = None if bare else draw(d)
        self.gamma = None if bare else draw(d, at=1.3)
        self.beta = None if bare or norm == "rmsnorm" else draw(d)
        self.x = 1.7 * draw(3, d) + 0.8

    def normed(self, x):
        if self.norm == "none":
            return x
        if self.norm == "layernorm":
            return F.layer_norm(x, (self.d,), self.gamma, self.beta, 1e-3)
        return F.rms_norm(x, (self.d,), self.gamma, 1e-3)

    def network(self, y):
        a = F.linear(y, self.w_in, self.b_in)
        if self.gated:
            g, u = a.chunk(2, -1)
            hidden = self.activation(g) * u
        else:
            hidden = self.activation(a)
        return F.linear(hidden, self.w_out, self.b_out)

    def __call__(self, x):
        return self.network(self.normed(x))

    def jacobian(self):
        return torch.func.vmap(torch.func.jacrev(self))(self.x)

    def evaluated(self, x=None):
        x = self.x if x is None else x
        norm, y = None, x
        if self.norm != "none":
            norm = delta.normalise(
                x, self.gamma, self.beta, 1e-3, self.norm == "layernorm"
            )
            y = norm.output
        ffn = delta.feed_forward(
            y,
            self.w_in,
            self.b_in,
            self.w_out,
            self.b_out,
            self.activation,
            self.gated,
            norm=norm,
        )
        return ffn, norm


@pytest.mark.parametrize(
    "activation",
    [
        F.relu,
        torch.relu,
        F.gelu,
        F.silu,
        torch.tanh,
        F.softplus,
        F.elu,
        torch.nn.GELU(),
        partial(F.leaky_relu, negative_slope=0.3),
    ],
    ids=label,
)
def test_value_and_slope_against_autograd_and_differences(activation):
    a = torch.linspace(-4, 4, 31, dtype=torch.float64) + 0.013
    value, slope = delta.value_and_slope(activation, a)
    leaf = a.clone().requires_grad_()
    (grad,) = torch.autograd.grad(activation(leaf).sum(), leaf)
    torch.testing.assert_close(value, activation(a))
    torch.testing.assert_close(slope, grad)
    step = 1e-6
    difference = (activation(a + step) - activation(a - step)) / (2 * step)
    torch.testing.assert_close(slope, difference, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("normalise", [delta.normalise, fast.normalise])
def test_normalise_is_pytorchs_norm(norm, normalise):
    net = Net(norm=norm)
    found = normalise(net.x, net.gamma, net.beta, 1e-3, norm == "layernorm")
    torch.testing.assert_close(found.output, net.normed(net.x))
    centre = net.x.mean(-1, keepdim=True) if norm == "layernorm" else 0.0
    torch.testing.assert_close(found.z * found.scale, net.x - centre)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_first_term_is_the_networks_own_diagonal(norm, name):
    net = Net(name, norm)
    ffn, normed = net.evaluated()
    inner = torch.func.vmap(torch.func.jacrev(net.network))(normed.output)
    own = inner.diagonal(dim1=1, dim2=2) * net.gamma / normed.scale
    found = delta.jacobian_diag(ffn, normed, exact=False)
    torch.testing.assert_close(found, own)
    trace = delta.jacobian_trace(ffn, normed, exact=False)
    torch.testing.assert_close(trace, own.mean(-1, keepdim=True))


def test_first_term_is_badly_wrong_for_an_outlier_feature():
    net = Net(d=16)
    net.x[:, 0] += 100.0
    ffn, normed = net.evaluated()
    assert normed.z[0, 0].square() > 0.9 * 15
    exact = delta.jacobian_diag(ffn, normed)[:, 0]
    first = delta.jacobian_diag(ffn, normed, exact=False)[:, 0]
    torch.testing.assert_close(exact, net.jacobian()[:, 0, 0])
    assert (first / exact - 1).abs().max() > 0.5


# the one pass that keeps only the preactivations ----------------------------


def one_pass(net, x, *, exact=True, token=False, dropout_p=0.0):
    """The layer's fast way: the output, and log (1 + J)²."""
    norm, y = None, x
    if net.norm != "none":
        norm = fast.normalise(
            x, net.gamma, net.beta, 1e-3, net.norm == "layernorm"
        )
        y = norm.output
    return fast.feed_forward_growth(
        y,
        net.w_in,
        net.b_in,
        net.w_out,
        net.b_out,
        net.activation,
        net.gated,
        dropout_p,
        norm,
        exact,
        token,
    )


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", NAMES)
def test_one_pass_gives_jacrevs_diagonal_and_trace(name, norm, bare):
    net = Net(name, norm, bare=bare)
    diagonal = net.jacobian().diagonal(dim1=1, dim2=2)
    output, growth = one_pass(net, net.x)
    torch.testing.assert_close(output, net(net.x))
    torch.testing.assert_close(growth, delta.log_square(1 + diagonal))
    _, growth = one_pass(net, net.x, token=True)
    trace = diagonal.mean(-1, keepdim=True)
    torch.testing.assert_close(growth, delta.log_square(1 + trace))
    ffn, normed = net.evaluated()
    for token, way in [
        (False, delta.jacobian_diag),
        (True, delta.jacobian_trace),
    ]:
        _, found = one_pass(net, net.x, exact=False, token=token)
        expected = delta.log_square(1 + way(ffn, normed, exact=False))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", [*ACTIVATIONS, "swiglu"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradcheck_of_the_one_pass(dropout, name, exact, token):
    for norm in NORMS:
        net = Net(name, norm, d=4)
        names = ["w_in", "b_in", "w_out", "b_out", "gamma"]
        leaves = [net.x, *(getattr(net, n) for n in names)]
        leaves = [x.clone().requires_grad_() for x in leaves]

        def run(x, *values, net=net, names=names):
            for n, value in zip(names, values, strict=True):
                setattr(net, n, value)
            torch.manual_seed(1)  # the same hidden units every time
            return one_pass(
                net, x, exact=exact, token=token, dropout_p=dropout
            )

        assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_one_pass_in_many_blocks_is_one_in_one(name, monkeypatch):
    """150 rows, 64 at a time; dropout from the same seed."""
    found = []
    for size in [1, 2**19]:
        monkeypatch.setattr(feed_forward, "HIDDEN_BLOCK", size)
        monkeypatch.setattr(feed_forward, "LEAST_ROWS", 64)
        net = Net(name)
        x = net.x.repeat(50, 1).mul(torch.arange(150).double().cos()[:, None])
        leaves = [x.requires_grad_(), net.w_in.requires_grad_()]
        torch.manual_seed(0)
        output, j = one_pass(net, leaves[0], dropout_p=0.3)
        loss = output.sin().sum() + j.cos().sum()
        found.append((output, j, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*found)


def test_one_pass_drops_hidden_units_and_not_the_jacobian():
    net = Net()
    x = net.x[:1].expand(4000, -1).contiguous()
    torch.manual_seed(0)
    output, j = one_pass(net, x, dropout_p=0.4)
    calm, expected = one_pass(net, net.x[:1])
    torch.testing.assert_close(j, expected.expand_as(j))
    error = output.std(0) / 4000**0.5
    assert ((output.mean(0) - calm[0]).abs() < 5 * error).all()
    assert (output.std(0) > 0.01).all()


# Hutchinson and the row rule -----------------------------------------------


def test_delta_method_by_simulation():
    """Small noise through h + FFN(norm(h)): all features, then one alone."""
    net = Net(d=4)
    net.x = net.x[:1]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40000, 4, generator=generator, dtype=torch.float64)
    variance = 1e-6 * torch.tensor([0.5, 1.0, 2.5, 4.0]).double()
    ffn, normed = net.evaluated()
    jacobian = torch.eye(4).double() + net.jacobian()[0]

    def simulated(scale):
        h = net.x + noise * scale.sqrt()
        return (h + net(h)).var(0)

    exact = jacobian.square() @ variance
    torch.testing.assert_close(simulated(variance), exact, rtol=0.03, atol=0)
    j = delta.jacobian_diag(ffn, normed)[0]
    for i in range(4):
        alone = torch.zeros(4).double()
        alone[i] = variance[i]
        predicted = delta.predict(
            -variance[i].log(),
            delta.log_square(1 + j[i]),
            torch.tensor(-torch.inf),
        )
        torch.testing.assert_close(
            simulated(alone)[i], (-predicted).exp(), rtol=0.03, atol=0
        )


# predict and norms ---------------------------------------------------------


def test_predict_is_the_discounted_precision():
    lam, growth, q = (
        torch.tensor([0.3, 2.0, 40.0], dtype=torch.float64),
        1.7,
        0.4,
    )
    found = delta.predict(
        lam.log(), torch.tensor(growth).log(), torch.tensor(q).log()
    )
    torch.testing.assert_close(found.exp(), 1 / (growth / lam + q))


def test_predict_without_process_noise_multiplies():
    found = delta.predict(
        torch.tensor(1.0), torch.tensor(0.4), torch.tensor(-torch.inf)
    )
    torch.testing.assert_close(found, torch.tensor(0.6))


def reverting(log_precision, log_growth, log_q, stationary=1.7):
    """log λ'' of a state that returns to its stationary variance."""
    log_kept, log_noise = delta.ornstein_uhlenbeck(log_q, stationary)
    return delta.predict(log_precision, log_growth + log_kept, log_noise)


def test_a_state_that_returns_to_its_stationary_variance():
    """φ² of what is carried, and the rest of ς²."""
    for lam, growth, q, s in [(0.3, 1.7, 0.4, 2.5), (40.0, 0.2, 9.0, 0.7)]:
        kept = s / (s + q)
        expected = 1 / (kept * growth / lam + (1 - kept) * s)
        logs = (torch.tensor(x).double().log() for x in (lam, growth, q))
        found = reverting(*logs, s)
        torch.testing.assert_close(found.exp().item(), expected)
        # a random walk's variance, shrunk
        assert 1 / expected == pytest.approx(kept * (growth / lam + q))
        assert min(lam / growth, 1 / s) < expected < max(lam / growth, 1 / s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_q", [-torch.inf, -80.0, 80.0, torch.inf])
def test_the_ends_of_a_returning_state(log_q, dtype):
    """No noise keeps everything, any amount of it no less than 1/ς²."""
    log = torch.tensor([-60.0, -1.0, 2.0, 60.0], dtype=dtype)
    found = reverting(log, torch.zeros_like(log), torch.full_like(log, log_q))
    bound = torch.full_like(log, -math.log(1.7))
    expected = log if log_q < 0 else bound
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("log_q", [-80.0, -20.0, 0.0, 20.0, 80.0])
def test_gradients_of_a_returning_state_keep_their_digits(log_q):
    """In float32 as in float64, though shares differ by e⁸⁰."""
    found = {}
    for dtype in [torch.float32, torch.float64]:
        leaves = [
            torch.tensor([-7.0, 0.5, 9.0], dtype=dtype),
            torch.tensor([0.4, -1.0, 2.0], dtype=dtype),
            torch.full((3,), log_q, dtype=dtype),
        ]
        leaves = [x.requires_grad_() for x in leaves]
        grads = torch.autograd.grad(reverting(*leaves).sum(), leaves)
        found[dtype] = [g.double() for g in grads]
    for x, y in zip(*found.values(), strict=True):
        assert x.isfinite().all()
        torch.testing.assert_close(x, y, rtol=1e-4, atol=0)


def test_gradcheck_of_predict_and_log_square():
    values = torch.linspace(-3, 3, 7, dtype=torch.float64)
    leaves = [(values + c).requires_grad_() for c in (0.1, -0.7, 0.4)]
    assert torch.autograd.gradcheck(delta.predict, leaves)
    assert torch.autograd.gradcheck(reverting, leaves)
    assert torch.autograd.gradcheck(delta.log_square, leaves[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_square_at_zero_is_finite_with_its_gradient(dtype):
    x = torch.tensor([0.0, 1e-30, -2.0], dtype=dtype, requires_grad=True)
    y = delta.log_square(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert y[2].item() == pytest.approx(1.3862944)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("bare", [True, False])
def test_normalised_variance_is_the_dense_first_order_variance(norm, bare):
    net = Net(norm=norm, bare=bare)
    v = torch.linspace(0.1, 4, 18, dtype=torch.float64).view(3, 6)
    dense = torch.func.vmap(torch.func.jacrev(net.normed))(net.x)
    found = delta.normalised_variance(v, net.evaluated()[1])
    expected = (dense.square() @ v[..., None])[..., 0]
    torch.testing.assert_close(found, expected)
    one = delta.normalised_variance(v[:, :1], net.evaluated()[1])
    spread = v[:, :1, None].expand(3, 6, 1)
    torch.testing.assert_close(one, (dense.square() @ spread)[..., 0])


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_normalised_variance_by_simulation(norm):
    net = Net(norm=norm)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40000, 6, generator=generator, dtype=torch.float64)
    v = 1e-6 * torch.linspace(0.5, 4, 6, dtype=torch.float64)
    simulated = net.normed(net.x[0] + noise * v.sqrt()).var(0)
    _, normed = net.evaluated(net.x[:1])
    found = delta.normalised_variance(v[None], normed)[0]
    torch.testing.assert_close(found, simulated, rtol=0.04, atol=0)


def test_normalised_variance_stays_where_its_diagonal_vanishes():
    d = 16
    x = torch.zeros(1, d, dtype=torch.float64)
    x[0, 0] = 500.0
    normed = delta.normalise(x, None, None, 1e-12)
    assert normed.z[0, 0].square().item() == pytest.approx(d - 1)
    diagonal = (1 - (1 + normed.z[0, 0].square()) / d) ** 2
    assert diagonal < 1e-12
    v = torch.full((1, d), 2.5, dtype=torch.float64)
    found = delta.normalised_variance(v, normed)
    assert (found > 0).all()
    assert (found[0, 1:] > 1e-6).all()


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("size", [-600.0, 0.0, 600.0])
def test_normalised_precision_is_the_variance_at_any_size(norm, size):
    _, normed = Net(norm=norm).evaluated()
    v = torch.linspace(0.1, 4, 18, dtype=torch.float64).view(3, 6)
    found = delta.normalised_precision(size - v.log(), normed)
    expected = -delta.normalised_variance(v, normed).log() + size
    torch.testing.assert_close(found, expected)


def test_gradcheck_of_normalised_variance():
    x = torch.linspace(-1, 2, 8, dtype=torch.float64).view(2, 4).sin()
    v = torch.linspace(0.4, 3, 8, dtype=torch.float64).view(2, 4)
    gamma = torch.linspace(0.5, 2, 4, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, v, gamma)]
    ways = [delta.normalise, fast.normalise]
    for centred, way in itertools.product([True, False], ways):
        assert torch.autograd.gradcheck(
            lambda x, v, g, c=centred, f=way: delta.normalised_variance(
                v, f(x, g, None, 1e-3, c)
            ),
            leaves,
        )


def test_composite_norm_has_the_right_second_derivative():
    """Gradients of a forward-mode derivative, as Hutchinson needs them."""
    x = torch.linspace(-1, 2, 5, dtype=torch.float64).sin().requires_grad_()
    r = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    for centred in [True, False]:

        def function(x, centred=centred):
            return delta.normalise(x, None, None, 1e-3, centred).output

        assert torch.autograd.gradcheck(
            lambda x, f=function: torch.func.jvp(f, (x,), (r,))[1], x
        )


def test_activation_names():
    assert delta.activation_function("geglu") == (F.gelu, True)
    assert delta.activation_function("silu") == (F.silu, False)
    assert delta.activation_function(F.elu) == (F.elu, False)
    with pytest.raises(ValueError, match="^activation: .*swiglu.*'swish'"):
        delta.activation_function("swish")


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("size", [1e2, 1e3, 1e4])
@pytest.mark.parametrize("d", [8, 64])
def test_a_norm_that_sees_one_feature_alone_in_float32(d, size, centred):
    """The sum of Equation (9.4) cancels there, 68 nats of log λ with it."""
    generator = torch.Generator().manual_seed(0)
    x, log = torch.randn(2, 20, d, generator=generator)
    x[:, 2] *= size
    x.requires_grad_()
    found = []
    for kind in [torch.float32, torch.float64]:
        normed = delta.normalise(x.to(kind), None, None, 1e-5, centred)
        after = delta.normalised_precision(log.to(kind), normed)
        (grad,) = torch.autograd.grad(after.sum(), x)
        assert grad.isfinite().all()
        found.append(after.double())
    torch.testing.assert_close(*found, rtol=0, atol=2e-3)
