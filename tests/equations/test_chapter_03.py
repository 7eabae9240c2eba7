"""Every numbered equation of chapter 3, from a source of its own.

The covariances come from a field that was not made for these formulas: an
irregular set of places, a Matérn covariance and unequal measurement errors.
"""

import math

import numpy as np
import torch
from numpy.testing import assert_allclose
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from scipy.stats import multivariate_normal

from bft_ref.kriging import kriging_attention, kriging_weights
from bft_ref.textbook import ordinary_kriging, simple_kriging
from tests.equations import equation

SIGMA2 = 2.5
MEAN = 7.0


def field(seed=0, n=6):
    """C, c, c₀ and values of a field at n places and one more."""
    rng = np.random.default_rng(seed)
    place = rng.uniform(0, 4, (n + 1, 2))
    h = math.sqrt(3) * cdist(place, place) / 1.7
    joint = SIGMA2 * (1 + h) * np.exp(-h)
    joint[np.arange(n), np.arange(n)] += rng.uniform(0.2, 0.9, n)
    values = MEAN + np.linalg.cholesky(joint) @ rng.normal(size=n + 1)
    return joint[:n, :n], joint[:n, n], joint[n, n], values[:n], joint


def tensors(*arrays):
    return tuple(torch.as_tensor(np.asarray(x)) for x in arrays)


def krige(C, c, c0, v, mean=None):
    C, c, v = tensors(C, c[None], v)
    if mean is None:
        return ordinary_kriging(C, c, v, c0)
    return simple_kriging(C, c, v, mean, c0)


@equation(
    "3.1",
    r"\operatorname{Var}(\hat v_0 - v_0) = c_0 - 2\,w^\top c + w^\top C\,w",
)
def test_variance_of_any_weighted_prediction():
    """The variance of one linear combination under the joint covariance."""
    C, c, c0, _, joint = field()
    w = np.random.default_rng(1).normal(size=len(c))
    combination = np.append(w, -1)
    assert_allclose(
        c0 - 2 * w @ c + w @ C @ w,
        combination @ joint @ combination,
        rtol=1e-12,
    )
    draws = np.random.default_rng(2).multivariate_normal(
        np.full(len(c) + 1, MEAN), joint, 200_000
    )
    error = MEAN + (draws[:, :-1] - MEAN) @ w - draws[:, -1]
    assert_allclose(error.var(), c0 - 2 * w @ c + w @ C @ w, rtol=0.02)


@equation("3.2", r"w = C^{-1} c")
def test_simple_weights_minimise_the_variance():
    """A numerical minimiser that is told the variance only."""
    C, c, c0, v, joint = field()

    def variance(w):
        x = np.append(w, -1)
        return x @ joint @ x

    found = minimize(variance, np.zeros(len(c)), tol=1e-12)
    said = krige(C, c, c0, v, MEAN)
    assert_allclose(said.weights[0], found.x, atol=1e-5)
    assert_allclose(said.weights[0], np.linalg.solve(C, c), rtol=1e-10)
    assert said.multiplier == 0


@equation("3.3", r"\sigma^2_{\mathrm{SK}} = c_0 - c^\top C^{-1} c")
def test_simple_variance_is_that_of_the_gaussian_conditional():
    """1/variance is the last entry of the joint precision matrix."""
    C, c, c0, v, joint = field()
    said = krige(C, c, c0, v, MEAN)
    assert_allclose(said.variance, 1 / np.linalg.inv(joint)[-1, -1])
    assert_allclose(said.variance, c0 - c @ np.linalg.solve(C, c))
    # The mean: where the joint density, values fixed, is highest.
    density = multivariate_normal(np.full(len(v) + 1, MEAN), joint)
    at = float(said.mean)
    peak = density.logpdf(np.append(v, at))
    for step in (-1e-3, 1e-3):
        assert density.logpdf(np.append(v, at + step)) < peak


@equation(
    "3.4",
    r"\operatorname{Var}(\hat v_0 - v_0) = \sigma^2_{\mathrm{SK}} "
    r"+ (w - C^{-1}c)^\top C\,(w - C^{-1}c)",
)
def test_other_weights_lose_a_square():
    C, c, c0, v, joint = field()
    best = krige(C, c, c0, v, MEAN)
    for seed in range(5):
        w = np.random.default_rng(seed).normal(size=len(c))
        x = np.append(w, -1)
        off = w - best.weights[0].numpy()
        assert_allclose(
            x @ joint @ x, best.variance.item() + off @ C @ off, rtol=1e-10
        )


@equation(
    "3.5",
    r"\operatorname{E}(w^\top v - v_0) = m\,(\mathbf 1^\top w - 1)",
)
def test_bias_of_weights_that_do_not_sum_to_one():
    """By simulation, with weights that sum to 0.6 and to one."""
    _, _, _, _, joint = field()
    n = len(joint) - 1
    draws = np.random.default_rng(3).multivariate_normal(
        np.full(n + 1, MEAN), joint, 400_000
    )
    for total in (0.6, 1.0):
        w = np.arange(1.0, n + 1)
        w *= total / w.sum()
        error = draws[:, :-1] @ w - draws[:, -1]
        se = error.std() / len(error) ** 0.5
        assert abs(error.mean() - MEAN * (total - 1)) < 4 * se


def bordered(C, c):
    """Weights and multiplier from the one system with the constraint."""
    n = len(c)
    system = np.ones((n + 1, n + 1))
    system[:n, :n], system[n, n] = C, 0
    solved = np.linalg.solve(system, np.append(c, 1))
    return solved[:n], -solved[n]


@equation("3.6", r"w = C^{-1}(c + \psi\,\mathbf 1)")
def test_ordinary_weights_minimise_under_the_constraint():
    """A constrained minimiser, and the bordered system of the textbooks."""
    C, c, c0, v, joint = field()

    def variance(w):
        x = np.append(w, -1)
        return x @ joint @ x

    found = minimize(
        variance,
        np.full(len(c), 1 / len(c)),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    said = krige(C, c, c0, v)
    assert_allclose(said.weights[0], found.x, atol=1e-5)
    w, psi = bordered(C, c)
    assert_allclose(said.weights[0], w, rtol=1e-9)
    assert_allclose(w, np.linalg.solve(C, c + psi), rtol=1e-9)


@equation(
    "3.7",
    r"\psi = \frac{1 - \mathbf 1^\top C^{-1} c}"
    r"{\mathbf 1^\top C^{-1} \mathbf 1}",
)
def test_multiplier_is_the_price_of_the_constraint():
    """ψ is how half the least variance moves with the sum of the weights."""
    C, c, c0, v, joint = field()
    inverse = np.linalg.inv(C)

    def least(total):
        psi = (total - inverse.sum(0) @ c) / inverse.sum()
        x = np.append(inverse @ (c + psi), -1)
        return x @ joint @ x / 2

    said = krige(C, c, c0, v)
    assert_allclose(said.multiplier, bordered(C, c)[1], rtol=1e-9)
    slope = (least(1 + 1e-4) - least(1 - 1e-4)) / 2e-4
    assert_allclose(said.multiplier, slope, rtol=1e-6)
    assert_allclose(said.weights.sum(), 1, rtol=1e-12)


@equation("3.8", r"\sigma^2_{\mathrm{OK}} = c_0 - w^\top c + \psi")
def test_ordinary_variance_is_that_of_its_error():
    C, c, c0, v, joint = field()
    said = krige(C, c, c0, v)
    x = np.append(said.weights[0], -1)
    assert_allclose(said.variance, x @ joint @ x, rtol=1e-10)


@equation(
    "3.9",
    r"\sigma^2_{\mathrm{OK}} = \sigma^2_{\mathrm{SK}} "
    r"+ \psi^2\,\mathbf 1^\top C^{-1}\mathbf 1",
)
def test_price_of_an_unknown_mean():
    C, c, c0, v, _ = field()
    known, unknown = krige(C, c, c0, v, MEAN), krige(C, c, c0, v)
    price = unknown.multiplier**2 * np.linalg.inv(C).sum()
    assert_allclose(unknown.variance, known.variance + price, rtol=1e-10)
    assert price > 1e-3


@equation(
    "3.10",
    r"w^\top v = \hat m + c^\top C^{-1}(v - \hat m\,\mathbf 1), \qquad "
    r"\hat m = \frac{\mathbf 1^\top C^{-1} v}"
    r"{\mathbf 1^\top C^{-1}\mathbf 1}",
)
def test_ordinary_is_simple_kriging_with_the_gls_mean():
    """The GLS mean from ordinary least squares on whitened values."""
    C, c, c0, v, _ = field()
    white = np.linalg.inv(np.linalg.cholesky(C))
    m_hat = np.linalg.lstsq(
        white @ np.ones((len(v), 1)), white @ v, rcond=None
    )[0].item()
    said = krige(C, c, c0, v)
    assert_allclose(said.mean, krige(C, c, c0, v, m_hat).mean, rtol=1e-10)
    assert abs(m_hat - v.mean()) > 1e-3


def witnesses():
    """Precisions and values of independent witnesses of one mean."""
    rng = np.random.default_rng(4)
    p = rng.uniform(0.1, 3, 7)
    return p, MEAN + rng.normal(size=7) / np.sqrt(p)


@equation("3.11", r"w_j = \frac{p_j}{\sum_i p_i}")
def test_independent_errors_give_precision_weights():
    """The full matrix route, and fusing one witness after the other."""
    p, v = witnesses()
    said = krige(np.diag(1 / p), np.zeros(7), 0.0, v)
    assert_allclose(said.weights[0], p / p.sum(), rtol=1e-12)
    mean, precision = v[0], p[0]
    for value, more in zip(v[1:], p[1:], strict=True):
        precision += more
        mean += more / precision * (value - mean)
    assert_allclose(said.mean, mean, rtol=1e-12)


def simulated(p, sigma2, draws=400_000):
    """Weighted means of witnesses, and one more value each."""
    rng = np.random.default_rng(5)
    v = MEAN + rng.normal(size=(draws, len(p))) / np.sqrt(p)
    return v @ (p / p.sum()), MEAN + rng.normal(0, sigma2**0.5, draws)


@equation("3.12", r"\operatorname{Var}(w^\top v - m) = \frac{1}{\sum_j p_j}")
def test_variance_of_the_mean():
    p, v = witnesses()
    said = krige(np.diag(1 / p), np.zeros(7), 0.0, v)
    assert_allclose(said.variance, 1 / p.sum(), rtol=1e-12)
    means, _ = simulated(p, SIGMA2)
    assert_allclose(((means - MEAN) ** 2).mean(), 1 / p.sum(), rtol=0.02)


@equation(
    "3.13",
    r"\operatorname{Var}(w^\top v - v_0) = c_0 + \frac{1}{\sum_j p_j}",
)
def test_variance_of_a_value():
    p, v = witnesses()
    said = krige(np.diag(1 / p), np.zeros(7), SIGMA2, v)
    assert_allclose(said.variance, SIGMA2 + 1 / p.sum(), rtol=1e-12)
    means, values = simulated(p, SIGMA2)
    assert_allclose(
        ((means - values) ** 2).mean(), SIGMA2 + 1 / p.sum(), rtol=0.02
    )


@equation(
    "3.14",
    r"\operatorname{Var}(\bar v - m) = \frac{\sigma^2}{n}, \qquad "
    r"\operatorname{Var}(\bar v - v_0) = "
    r"\sigma^2\Bigl(1 + \frac1n\Bigr)",
)
def test_value_against_mean():
    n = 7
    p = np.full(n, 1 / SIGMA2)
    v = np.random.default_rng(6).normal(MEAN, SIGMA2**0.5, n)
    of_mean = krige(np.diag(1 / p), np.zeros(n), 0.0, v)
    of_value = krige(np.diag(1 / p), np.zeros(n), SIGMA2, v)
    assert_allclose(of_mean.mean, v.mean(), rtol=1e-12)
    assert_allclose(of_mean.variance, SIGMA2 / n, rtol=1e-12)
    assert_allclose(of_value.variance, SIGMA2 * (1 + 1 / n), rtol=1e-12)
    means, values = simulated(p, SIGMA2)
    assert_allclose((means - MEAN).var(), SIGMA2 / n, rtol=0.02)
    assert_allclose((means - values).var(), SIGMA2 * (1 + 1 / n), rtol=0.02)


def attention_input(seed=7, tokens=6, features=3):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(1, features))
    k, v = rng.normal(size=(2, tokens, features)) * 1.5
    return q, k, v + MEAN, rng.normal(0, 1.2, tokens)


@equation(
    "3.15",
    r"\tilde\alpha_{tj} = \frac{\alpha_{tj}\,\bar\lambda_j}"
    r"{\sum_i \alpha_{ti}\,\bar\lambda_i} = \operatorname{softmax}_j\Bigl("
    r"\frac{q_t\cdot k_j}{\sqrt{d_h}} + \log\bar\lambda_j\Bigr)",
)
def test_precision_weighted_attention_is_kriging():
    """A loop over tokens, and kriging with the diagonal covariance."""
    q, k, v, log_precision = attention_input()
    scores = [sum(q[0] * key) / math.sqrt(3) for key in k]
    alpha = [math.exp(s) / sum(map(math.exp, scores)) for s in scores]
    tall = [a * math.exp(x) for a, x in zip(alpha, log_precision, strict=True)]
    by_hand = np.array(tall) / sum(tall)

    said = kriging_weights(*tensors([scores], log_precision))
    assert_allclose(said[0], by_hand, rtol=1e-12)
    heads = tensors(q[None, None], k[None, None], v[None, None])
    head = kriging_attention(*heads, *tensors(log_precision[None]))
    assert_allclose(head.weights[0, 0, 0], by_hand, rtol=1e-12)
    kriged = krige(np.diag(1 / np.array(tall)), np.zeros(6), 0.0, v[:, 1])
    assert_allclose(head.mean[0, 0, 0, 1], kriged.mean[0], rtol=1e-12)


@equation(
    "3.16",
    r"\frac{\partial \mu_t}{\partial \log\bar\lambda_j} = "
    r"\tilde\alpha_{tj}\,(v_j - \mu_t)",
)
def test_output_follows_a_log_precision():
    """Central differences and autograd."""
    q, k, v, log_precision = attention_input()
    heads = tensors(q[None, None], k[None, None], v[None, None])

    def output(x):
        return kriging_attention(*heads, x[None]).mean[0, 0, 0]

    (x,) = tensors(log_precision)
    head = kriging_attention(*heads, x[None])
    weights = head.weights[0, 0, 0]
    formula = weights[:, None] * (heads[2][0, 0] - head.mean[0, 0, 0])
    for j in range(6):
        step = torch.zeros(6, dtype=torch.float64)
        step[j] = 1e-5
        slope = (output(x + step) - output(x - step)) / 2e-5
        assert_allclose(slope, formula[j], atol=1e-8)
    jacobian = torch.func.jacrev(output)(x)
    assert_allclose(jacobian.mT, formula, rtol=1e-10)


def other_weights(seed):
    """Weights that sum to one, some of them negative, and a C for each."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=5)
    w /= w.sum()
    kappa = rng.uniform(0.3, 4)
    rest = np.eye(5) - np.outer(w, w) / (w @ w)
    root = rest @ rng.normal(size=(5, 5))
    return w, kappa, kappa + root @ root.T  # Cw = κ·1


@equation(
    "3.17",
    r"C\,w = \kappa\,\mathbf 1, \qquad "
    r"\operatorname{Var}(w^\top v - m) = w^\top C\,w = \kappa",
)
def test_any_weights_are_those_of_some_covariance():
    """A constrained minimiser that knows C only, and a covariance without."""
    for seed in range(4):
        w, kappa, C = other_weights(seed)
        assert np.linalg.eigvalsh(C).min() > 0
        said = krige(C, np.zeros(5), 0.0, np.arange(5.0))
        assert_allclose(said.weights[0], w, rtol=1e-6)
        assert_allclose(said.variance, kappa, rtol=1e-6)
        # no step that keeps the sum leads to a lower variance
        for step in np.eye(5) - 1 / 5:
            for size in (-1e-3, 1e-3):
                moved = w + size * step
                assert moved @ C @ moved > kappa
    # positive weights: one family of covariances, any variance
    w = np.array([0.6, 0.3, 0.1])
    for a, b in [(0.02, 0.0), (0.7, 5.0)]:
        said = krige(a * np.diag(1 / w) + b, np.zeros(3), 0.0, np.ones(3))
        assert_allclose(said.weights[0], w, rtol=1e-9)
        assert_allclose(said.variance, a + b, rtol=1e-9)
    # a covariance that does not satisfy it gives other weights
    C = np.diag(1 / w)
    C[0, 1] = C[1, 0] = 0.4
    said = krige(C, np.zeros(3), 0.0, np.ones(3))
    assert np.abs(said.weights[0].numpy() - w).max() > 0.01


@equation(
    "3.18",
    r"p_{tj} = \frac{1}{1/\bar\lambda_j + m_{tj}} \;\le\; \frac{1}{m_{tj}}",
)
def test_variances_of_mismatch_and_error_add_up():
    """Simulated witnesses that are beside the point and wrong."""
    rng = np.random.default_rng(18)
    precision, mismatch = rng.uniform(0.2, 5, 6), rng.uniform(0.1, 2, 6)
    p = 1 / (1 / precision + mismatch)
    v0 = MEAN + 1.5 * rng.normal(size=400_000)
    error = rng.normal(size=(len(v0), 6)) / np.sqrt(precision)
    beside = rng.normal(size=(len(v0), 6)) * np.sqrt(mismatch)
    off = (v0[:, None] + beside + error) @ (p / p.sum()) - v0
    assert_allclose(off.var(), 1 / p.sum(), rtol=0.02)
    # the best weights for what they are off by
    seen = np.cov((beside + error).T)
    best = np.linalg.solve(seen, np.ones(6))
    assert_allclose(p / p.sum(), best / best.sum(), rtol=0.03)
    # a precise token that is beside the point is bounded; a product is not
    precision[0] = 1e9
    assert_allclose(1 / (1 / precision[0] + mismatch[0]), 1 / mismatch[0])
    assert (p <= 1 / mismatch).all()


@equation(
    "3.19",
    r"\operatorname{Var}(\bar v) = "
    r"\sigma^2\Bigl(\rho + \frac{1-\rho}{n}\Bigr)",
)
def test_variance_of_a_mean_of_redundant_values():
    """The equicorrelated covariance, multiplied out and simulated."""
    n, rho = 9, 0.6
    C = SIGMA2 * (rho * np.ones((n, n)) + (1 - rho) * np.eye(n))
    formula = SIGMA2 * (rho + (1 - rho) / n)
    w = np.full(n, 1 / n)
    assert_allclose(w @ C @ w, formula, rtol=1e-12)
    draws = np.random.default_rng(8).multivariate_normal(
        np.zeros(n), C, 200_000
    )
    assert_allclose(draws.mean(1).var(), formula, rtol=0.02)
    # By symmetry kriging has the same weights, and knows this variance.
    said = krige(C, np.zeros(n), 0.0, draws[0])
    assert_allclose(said.weights[0], w, rtol=1e-12)
    assert_allclose(said.variance, formula, rtol=1e-12)
