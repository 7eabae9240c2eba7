"""Every numbered equation of chapter 8, from a source of its own.

Closed forms are checked against filterpy, statsmodels, SciPy's Riccati
solver, plain iteration, simulation or automatic differentiation.
"""

import math

import numpy as np
import pytest
import torch
from filterpy.kalman import KalmanFilter
from numpy.testing import assert_allclose
from scipy.linalg import solve_discrete_are
from scipy.special import gammaln
from statsmodels.tsa.statespace.structural import UnobservedComponents

from bft_ref import Belief, BFTConfig, BFTLayer, delta, kalman, textbook
from bft_ref.belief import discount
from bft_ref.kriging import kriging_attention
from bft_ref.reml import observation_variance
from tests.equations import equation

# observation precision and process noise, far apart and close
PAIRS = [(2.5, 0.3), (0.4, 6.0), (0.02, 0.9), (30.0, 0.001)]
pairs = pytest.mark.parametrize(("o", "q"), PAIRS)


def number(x):
    return torch.tensor(x, dtype=torch.float64)


def scalar_filter(lam, o, q, transition=1.0):
    """A scalar filterpy filter with belief precision lam."""
    filter_ = KalmanFilter(1, 1)
    filter_.x, filter_.P = np.zeros((1, 1)), np.array([[1 / lam]])
    filter_.F, filter_.H = np.array([[transition]]), np.eye(1)
    filter_.R, filter_.Q = np.array([[1 / o]]), np.array([[q]])
    return filter_


def step(lam, o, q, growth=1.0):
    """One layer in the package's functions: update, then predict."""
    seen = torch.logaddexp(number(lam).log(), number(o).log())
    after = delta.predict(seen, number(growth).log(), number(q).log())
    return after.exp().item()


def gain(lam, o):
    return kalman.gain(number(lam).log(), number(o).log()).item()


def iterated(o, q, lam=1.3, times=20_000, growth=1.0):
    for _ in range(times):
        lam = 1 / (growth / (lam + o) + q)
    return lam


@equation(
    "8.1",
    r"\lambda'' = \Bigl(\frac{(1+J)^2}{\lambda'} + Q\Bigr)^{-1}",
)
@pytest.mark.parametrize("j", [-1.0, -0.4, 0.0, 0.7])
def test_prediction_is_filterpys(j):
    lam, q = 1.7, 0.3
    filter_ = scalar_filter(lam, 1.0, q, transition=1 + j)
    filter_.predict()
    growth = delta.log_square(number(1 + j))
    found = delta.predict(number(lam).log(), growth, number(q).log())
    assert_allclose((-found).exp(), filter_.P.item(), rtol=1e-12)
    if j == 0:
        same = discount(number(lam).log(), number(q).log())
        assert_allclose(same, found, rtol=1e-12)


def test_prediction_of_a_linear_ffn_by_simulation():
    """Each feature moves by itself: h'' = (1 + J)h' + w."""
    rng = np.random.default_rng(0)
    size, lam, q = 400_000, np.array([0.6, 1.7, 5.0]), np.array([0.3, 2, 0.01])
    j = np.array([0.7, -0.4, 0.2])
    error = rng.normal(size=(size, 3)) / np.sqrt(lam)
    after = (1 + j) * error + rng.normal(size=(size, 3)) * np.sqrt(q)
    logs = [torch.from_numpy(x).log() for x in (lam, (1 + j) ** 2, q)]
    found = delta.predict(*logs)
    assert_allclose(after.var(0), (-found).exp(), rtol=6 * math.sqrt(2 / size))


@equation("8.2", r"K_\ell = \frac{1}{\ell + 1 + \tau/o}")
def test_gain_of_the_frozen_layer():
    tau, o = 0.7, 2.5
    filter_ = scalar_filter(tau, o, 0.0)
    lam = tau
    for layer in range(40):
        due = 1 / (layer + 1 + tau / o)
        assert_allclose(gain(lam, o), due, rtol=1e-12)
        filter_.predict()
        filter_.update(1.0)
        assert_allclose(filter_.K.item(), due, rtol=1e-9)
        lam = step(lam, o, 0.0)


@equation(
    "8.3",
    r"\prod_{\ell=L}^{L+m-1} (1 - K_\ell) = "
    r"\frac{L + \tau/o}{L + m + \tau/o}",
)
@pytest.mark.parametrize(("start", "more"), [(0, 5), (7, 1), (12, 30)])
def test_what_is_left_of_the_state(start, more):
    tau, o = 0.7, 2.5
    # the mean follows z = 0 from layer L on: what is left of h_L = 1
    belief = Belief.of(number(1.0), precision=tau + start * o)
    for _ in range(more):
        belief, _ = kalman.update(belief, 0.0 - belief.mean, number(o).log())
    due = (start + tau / o) / (start + more + tau / o)
    assert_allclose(belief.mean, due, rtol=1e-12)


@equation("8.4", r"K^* = 1 - \frac{1}{(1+J)^2}")
@pytest.mark.parametrize("j", [0.05, 0.4, 2.0, -2.3])
def test_spreading_dynamics_keep_the_gain_up(j):
    o, lam = 2.5, 9.0
    for _ in range(2000):
        lam = step(lam, o, 0.0, (1 + j) ** 2)
    assert_allclose(gain(lam, o), 1 - 1 / (1 + j) ** 2, rtol=1e-9)


def test_contracting_dynamics_freeze_the_state():
    """(1 + J)² < 1: gains fall geometrically, what is left stays positive."""
    o, growth = 2.5, 0.64
    lam, gains = 0.7, []
    for _ in range(60):
        gains.append(gain(lam, o))
        lam = step(lam, o, 0.0, growth)
    assert_allclose(gains[-1] / gains[-2], growth, rtol=1e-6)
    left = np.cumprod(1 - np.array(gains))
    assert left[-1] > 1e-3
    assert_allclose(left[-1], left[-10], rtol=1e-3)


@equation("8.5", r"\lambda'' \le \frac{1}{Q}")
def test_precision_has_a_ceiling():
    rng = torch.Generator().manual_seed(1)
    shape = (3, 10_000)
    draws = torch.randn(shape, generator=rng, dtype=torch.float64)
    log_lam, log_growth, log_q = draws * torch.tensor([[3.0], [2.0], [3.0]])
    after = delta.predict(log_lam, log_growth, log_q)
    assert (after <= -log_q).all()
    assert (after + log_q).max() > -0.01  # and it is approached
    met = delta.predict(log_lam, torch.full_like(log_lam, -torch.inf), log_q)
    assert_allclose(met, -log_q, rtol=1e-12)  # J = −1: an equality


@equation("8.6", r"1 - K \le \frac{1}{1 + Qo}")
def test_the_next_gain_has_a_floor():
    rng = torch.Generator().manual_seed(2)
    draws = 2 * torch.randn((4, 10_000), generator=rng, dtype=torch.float64)
    log_lam, log_growth, log_q, log_o = draws
    after = delta.predict(log_lam, log_growth, log_q)
    closed = 1 - kalman.gain(after, log_o)
    bound = 1 / (1 + (log_q + log_o).exp())
    assert (closed <= bound + 1e-15).all()
    assert (closed / bound).max() > 0.99


@equation(
    "8.7",
    r"\lambda_{\ell+1} = \Bigl(\frac{1}{\lambda_\ell + o} + Q\Bigr)^{-1}",
)
@pairs
def test_recursion_is_statsmodels(o, q):
    model = UnobservedComponents(np.zeros(30), "local level")
    model.ssm.tolerance = 0  # or it stops iterating near the fixed point
    model.ssm.initialize_known(np.zeros(1), np.array([[1 / 0.7]]))
    variances = model.smooth([1 / o, q]).predicted_state_cov[0, 0]
    lam = 0.7
    for variance in variances[:30]:
        assert_allclose(1 / lam, variance, rtol=1e-10)
        due = 1 / (1 / (lam + o) + q)
        assert_allclose(step(lam, o, q), due, rtol=1e-12)
        lam = due


@equation(
    "8.8",
    r"\lambda^* = \frac{2o}{Qo + \sqrt{Q^2o^2 + 4Qo}}",
)
@pairs
def test_fixed_point_solves_riccatis_equation(o, q):
    found = textbook.steady_state_precision(number(o), number(q)).item()
    one = np.eye(1)
    riccati = solve_discrete_are(one, one, q * one, one / o)
    assert_allclose(found, 1 / riccati.item(), rtol=1e-8)
    assert_allclose(found, iterated(o, q), rtol=1e-8)
    root = math.sqrt((q * o) ** 2 + 4 * q * o)
    assert_allclose(found, 2 * o / (q * o + root), rtol=1e-12)


@equation("8.9", r"K^* = \frac{2}{1 + \sqrt{1 + 4/(Qo)}}")
@pairs
def test_settled_gain(o, q):
    filter_ = scalar_filter(1.3, o, q)
    for _ in range(5000):
        filter_.predict()
        filter_.update(1.0)
    due = 2 / (1 + math.sqrt(1 + 4 / (q * o)))
    assert_allclose(filter_.K.item(), due, rtol=1e-9)


@equation("8.10", r"Qo = \frac{(K^*)^2}{1 - K^*}")
@pairs
def test_process_noise_from_a_settled_gain(o, q):
    k = gain(iterated(o, q), o)
    assert_allclose(k**2 / (1 - k), q * o, rtol=1e-7)


@equation(
    "8.11",
    r"\frac{d\lambda_{\ell+1}}{d\lambda_\ell}\bigg|_{\lambda^*} = "
    r"\Bigl(\frac{\lambda^*}{\lambda^* + o}\Bigr)^2",
)
@pairs
def test_multiplier(o, q):
    lam = number(iterated(o, q)).requires_grad_()
    seen = torch.logaddexp(lam.log(), number(o).log())
    after = discount(seen, number(q).log()).exp()
    (slope,) = torch.autograd.grad(after, lam)
    star = lam.item()
    assert_allclose(slope, (star / (star + o)) ** 2, rtol=1e-7)
    assert_allclose(slope, (1 - gain(star, o)) ** 2, rtol=1e-7)


@equation(
    "8.12",
    r"\frac{\lambda_\ell - \lambda^*}{\lambda_\ell - \lambda_-} = "
    r"(1-K^*)^{2\ell}\; \frac{\lambda_0 - \lambda^*}{\lambda_0 - \lambda_-}",
)
@pairs
@pytest.mark.parametrize("start", [1e-3, 0.5, 40.0])
def test_the_whole_way_to_the_fixed_point(o, q, start):
    low, high = sorted(np.roots([q, q * o, -o]).real)
    k = o / (high + o)
    lam = start
    for layer in range(12):
        left = (lam - high) / (lam - low)
        due = (1 - k) ** (2 * layer) * (start - high) / (start - low)
        assert_allclose(left, due, rtol=1e-6, atol=1e-10)
        lam = step(lam, o, q)


@equation("8.13", r"K(c\lambda,\, c\,o,\, Q/c) = K(\lambda, o, Q)")
@pytest.mark.parametrize("c", [1e-3, 7.0])
def test_gains_know_only_a_product(c):
    rng = np.random.default_rng(3)
    o, q, growth = np.exp(rng.normal(size=(3, 12)))

    def gains(tau, o, q):
        found, lam = [], tau
        for o_l, q_l, g_l in zip(o, q, growth, strict=True):
            found.append(gain(lam, o_l))
            lam = step(lam, o_l, q_l, g_l)
        return np.array(found)

    plain = gains(0.7, o, q)
    assert_allclose(gains(c * 0.7, c * o, q / c), plain, rtol=1e-10)
    # Q alone is seen
    assert np.abs(gains(0.7, o, q / c) - plain).max() > 1e-3


@equation(
    "8.14",
    r"\frac{\partial K}{\partial \log Q} = K(1-K)\,Q\lambda''",
)
@pairs
def test_gradient_of_the_gain(o, q):
    lam, growth = 1.7, 1.21
    log_q = number(math.log(q)).requires_grad_()
    after = delta.predict(number(lam).log(), number(growth).log(), log_q)
    k = kalman.gain(after, number(o).log())
    (slope,) = torch.autograd.grad(k, log_q)
    due = k * (1 - k) * q * after.exp()
    assert_allclose(slope, due.detach(), rtol=1e-10)

    def plain(x):
        return o / (1 / (growth / lam + math.exp(x)) + o)

    x, eps = math.log(q), 1e-5
    finite = (plain(x + eps) - plain(x - eps)) / (2 * eps)
    assert_allclose(slope, finite, rtol=1e-6, atol=1e-10)


@equation(
    "8.15",
    r"\prod_{\ell=L}^{L+m-1} (1 - aK_\ell) = "
    r"\frac{\Gamma(L+m+1+\tau/o-a)\;\Gamma(L+1+\tau/o)}"
    r"{\Gamma(L+1+\tau/o-a)\;\Gamma(L+m+1+\tau/o)}",
)
@pytest.mark.parametrize(("start", "more"), [(0, 5), (7, 1), (12, 30)])
@pytest.mark.parametrize("a", [1.0, 0.5, 0.0, -0.3])
def test_what_is_left_where_attention_subtracts_a_part(start, more, a):
    """e = z − ah, so that only the part a of the state is subtracted."""
    tau, o = 0.7, 2.5
    belief = Belief.of(number(1.0), precision=tau + start * o)
    for _ in range(more):
        belief, _ = kalman.update(belief, -a * belief.mean, number(o).log())
    x = tau / o
    logs = gammaln([start + more + 1 + x - a, start + 1 + x])
    logs = (
        logs.sum() - gammaln([start + 1 + x - a, start + more + 1 + x]).sum()
    )
    assert_allclose(belief.mean, np.exp(logs), rtol=1e-10)
    if a == 1:
        assert_allclose(belief.mean, (start + x) / (start + more + x))


@equation("8.16", r"P(K) = \frac{(1-K)^2\,Q + K^2/o}{K\,(2 - K)}")
@pairs
def test_the_error_of_a_filter_with_the_wrong_gain(o, q):
    """Var(h_T − w·z) from the covariances of levels and observations."""
    t = np.arange(2000.0)
    level = q * np.minimum(t[:, None], t)
    observed = level + np.eye(len(t)) / o
    for wrong in (0.01, 1.0, 50.0):
        k = 2 / (1 + math.sqrt(1 + 4 / (wrong * q * o)))
        w = k * (1 - k) ** t[::-1]
        w[0] = (1 - k) ** (len(t) - 1)  # all of the first one
        variance = level[-1, -1] - 2 * w @ level[:, -1] + w @ observed @ w
        formula = ((1 - k) ** 2 * q + k**2 / o) / (k * (2 - k))
        assert_allclose(variance, formula, rtol=1e-7)
        claimed = k / o
        if wrong == 1:
            assert_allclose(claimed, formula)
        else:
            assert (claimed < formula) == (wrong < 1)


def test_with_the_neighbours_prior_no_process_noise_opens_the_gain():
    """Equal values: the gain is (n²/(n+1))/(1 + n²/(n+1)) for every Q."""
    values = torch.ones(1, 1, 5, 1, dtype=torch.float64)
    for q in (0.1, 10.0, 1e6):
        belief = Belief.of(values[:, 0], variance=q)
        seen = kriging_attention(
            values,
            values,
            values,
            belief.log_token_precision,
            neighbour_variance=belief.variance.mean(-1),
        )
        variance = observation_variance(
            seen.dispersion,
            seen.n_eff[..., None],
            seen.neighbour_variance[..., None],
        )[:, 0]
        k = kalman.gain(belief.log_precision, -variance.log())
        assert_allclose(k, (25 / 6) / (1 + 25 / 6), rtol=1e-10)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_patch_that_cannot_be_seen_stalls_sgd_and_not_adam(kind):
    """One gain, the same gradient at each step: only Adam goes anywhere."""
    lam, o = number(1.7).log(), number(0.4).log()
    log_q = number([math.log(1e4)]).requires_grad_()
    optimiser = kind([log_q], lr=0.1)
    for _ in range(50):
        k = kalman.gain(delta.predict(lam, number(0.0), log_q), o)
        # expected squared error of h + K(z − h), h of variance 1/λ + 0.5
        loss = (1 - k) ** 2 * (1 / 1.7 + 0.5) + k**2 / 0.4
        optimiser.zero_grad()
        loss.sum().backward()
        optimiser.step()
    moved = abs(log_q.item() - math.log(1e4))
    assert moved < 0.01 if kind is torch.optim.SGD else moved > 4


def test_a_layer_predicts_by_this_rule():
    """BFTLayer's predict, with the growth that it reports."""
    torch.manual_seed(4)
    layer = BFTLayer(
        8,
        2,
        16,
        dropout=0.0,
        norm_first=True,
        dtype=torch.float64,
        config=BFTConfig(process_noise=0.3),
    )
    h = torch.randn(2, 3, 8, dtype=torch.float64)
    belief = Belief.of(h, precision=torch.rand_like(h) + 0.2)
    with torch.no_grad():
        after, log_growth = layer.predict(belief)
    due = 1 / (log_growth.exp() / belief.precision + 0.3)
    assert_allclose(after.precision, due, rtol=1e-10)
