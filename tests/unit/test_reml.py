"""REML and its posterior against SciPy, statsmodels and integration."""

import warnings

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from scipy import integrate, stats

from bft_ref import reml
from bft_ref.kriging import dispersion, effective_sample_size
from tests.oracles import integrals, loops

VALUES = np.array([1.3, -0.4, 2.6, 3.9, 0.7])
WEIGHTS = np.array([0.35, 0.2, 0.25, 0.05, 0.15])


def spread_and_n(values=VALUES, weights=WEIGHTS):
    w, v = torch.from_numpy(weights)[None], torch.from_numpy(values)[:, None]
    return dispersion(w, v).squeeze(), effective_sample_size(w).squeeze()


def test_reml_is_the_peak_of_the_integrated_likelihood():
    variance, likelihood = integrals.marginal_of_variance(VALUES, WEIGHTS)
    peak = variance[likelihood.argmax()]
    d, n = spread_and_n()
    step = variance[1] / variance[0]
    assert peak / step < reml.reml_variance(d, n).item() < peak * step


def test_reml_of_uniform_weights_is_the_residual_variance_of_ols():
    d, n = spread_and_n(weights=np.full(5, 0.2))
    fit = sm.OLS(VALUES, np.ones(5)).fit()
    np.testing.assert_allclose(reml.reml_variance(d, n), fit.scale)
    np.testing.assert_allclose(fit.scale, VALUES.var(ddof=1))


def test_reml_of_a_mixed_model_agrees_with_statsmodels():
    """Groups without any effect: the restricted likelihood is ours."""
    groups = np.repeat(np.arange(2), [2, 3])
    model = sm.MixedLM(VALUES, np.ones((5, 1)), groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best fit lies on the boundary
        model.fit(reml=True)
    d, n = spread_and_n(weights=np.full(5, 0.2))
    ours = reml.reml_variance(d, n).item()
    # SD between groups in units of σ; below 1e-3 its arithmetic gives way
    none, some = (model.loglike(np.array([x])) for x in [1e-3, 0.3])
    assert none == pytest.approx(
        -0.5 * (4 * np.log(2 * np.pi * ours) + 4 + np.log(5)), abs=1e-5
    )
    assert abs(some - none) > 1e-3


def test_reml_is_unbiased_exactly():
    """E D = σ²(1 − Σα̃²) for any weights, as a quadratic form's trace."""
    form = np.diag(WEIGHTS) - np.outer(WEIGHTS, WEIGHTS)
    _, n = spread_and_n()
    expected_spread = torch.tensor(2.5 * np.trace(form))
    estimate = reml.reml_variance(expected_spread, n)
    np.testing.assert_allclose(estimate, 2.5, 1e-12)


def test_reml_is_unbiased_by_simulation():
    rng = np.random.default_rng(0)
    draws = torch.from_numpy(rng.normal(7.0, np.sqrt(2.5), (20000, 5)))
    w = torch.from_numpy(WEIGHTS)[None]
    d = dispersion(w, draws.mT)[0]
    estimates = reml.reml_variance(d, spread_and_n()[1])
    error = estimates.std() / 20000**0.5
    assert abs(estimates.mean() - 2.5) < 4 * error


def test_one_value_says_nothing_about_a_variance():
    n = torch.tensor([0.0, 1.0, 2.0])
    assert reml.reml_variance(torch.tensor(0.7), n).tolist() == [
        torch.inf,
        torch.inf,
        pytest.approx(1.4),
    ]


@pytest.mark.parametrize("dof", [1.0, 3.5])
def test_posterior_scale_by_brute_force_integration(dof):
    d, n = spread_and_n()
    s2 = reml.posterior_scale(d, n, torch.tensor(2.5), dof).item()
    first, second = integrals.posterior_moments(VALUES, WEIGHTS, dof, 2.5)
    assert first == pytest.approx(1 / s2, rel=1e-4)
    nu = dof + n.item() - 1
    assert second == pytest.approx((1 + 2 / nu) / s2**2, rel=1e-3)


@pytest.mark.parametrize("n", [1.0, 1.7, 4.0, 40.0])
def test_posterior_is_scipys_inverse_gamma(n):
    """Prior times likelihood, normalised, is invgamma; E[1/σ²] = 1/s²."""
    dof, s0, d = 1.6, 2.5, 0.8
    s2 = reml.posterior_scale(
        torch.tensor(d), torch.tensor(n), torch.tensor(s0), dof
    ).item()
    nu = dof + n - 1
    posterior = stats.invgamma(nu / 2, scale=nu * s2 / 2)
    prior = stats.invgamma(dof / 2, scale=dof * s0 / 2)

    def product(x):
        return prior.pdf(x) * x ** (-(n - 1) / 2) * np.exp(-n * d / (2 * x))

    x = np.array([0.3, 1.0, 2.7, 9.0])
    ratio = product(x) / posterior.pdf(x)
    np.testing.assert_allclose(ratio, ratio[0], 1e-5)
    inverse = integrate.quad(
        lambda u: np.exp(-u) * posterior.pdf(np.exp(u)) * np.exp(u), -20, 60
    )[0]
    assert inverse == pytest.approx(1 / s2, rel=1e-5)


@pytest.mark.parametrize("reading", reml.READINGS)
def test_readings_equal_the_loop_oracle(reading):
    for n, d, s0, dof in [(3.3, 0.8, 2.5, 1.0), (1.0, 0.0, 0.4, 2.0)]:
        found = reml.observation_variance(
            *(torch.tensor(x, dtype=torch.float64) for x in (d, n, s0)),
            dof,
            reading,
        )
        expected = loops.observation_variance(d, n, s0, dof, reading)
        assert found.item() == pytest.approx(expected, rel=1e-12)


def test_prediction_reading_is_the_kriging_variance():
    """Var(v_new − μ) = σ²(1 + 1/n) when all values share σ²."""
    rng = np.random.default_rng(1)
    draws = rng.normal(3.0, np.sqrt(2.5), (40000, 6))
    errors = draws[:, 5] - draws[:, :5] @ WEIGHTS
    n = spread_and_n()[1].item()
    # ν₀ → ∞ pins s² at the known variance
    found = reml.observation_variance(
        torch.tensor(0.0), torch.tensor(n), torch.tensor(2.5), 1e9
    ).item()
    assert np.var(errors) == pytest.approx(found, rel=0.03)


def test_a_sink_and_an_empty_row_get_the_prior():
    zero = torch.tensor(0.0)
    for n in [0.0, 1.0]:
        s2 = reml.posterior_scale(zero, torch.tensor(n), torch.tensor(2.5))
        assert s2.item() == 2.5


def test_observation_variance_is_never_zero():
    zero = torch.zeros(3)
    for reading in reml.READINGS:
        v = reml.observation_variance(zero, zero + 4, zero, 1.0, reading)
        assert (v > 0).all()


def test_neighbour_variance_is_the_mean_variance_over_the_norms():
    log = torch.tensor([[0.0, 0.5], [2.0, -3.0]], dtype=torch.float64)
    scale = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    expected = (-log).exp().mean(1)
    torch.testing.assert_close(reml.neighbour_variance(log), expected)
    torch.testing.assert_close(
        reml.neighbour_variance(log, scale), expected / scale[:, 0] ** 2
    )
    torch.testing.assert_close(
        reml.neighbour_variance(log[:, :1]), (-log[:, 0]).exp()
    )


@pytest.mark.parametrize("log", [-1e4, -88.0, 88.0, 1e4])
def test_neighbour_variance_stays_a_number_of_float32(log):
    precision = torch.full((1, 3), log, requires_grad=True)
    c = reml.neighbour_variance(precision, torch.full((1, 1), 3e-3))
    assert 1e-35 < c.item() < 1e36
    c.log().backward()
    assert precision.grad.isfinite().all()


def test_readings_and_dof_are_checked():
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"^reading: .*'median'"):
        reml.observation_variance(one, one, one, 1.0, "median")
    for dof in [0.0, -1.0, float("nan"), float("inf")]:
        with pytest.raises(ValueError, match="^prior_dof: "):
            reml.posterior_scale(one, one, one, dof)


def test_gradcheck_of_reml():
    def leaf(*values):
        return torch.tensor(values, dtype=torch.float64, requires_grad=True)

    inputs = leaf(0.4, 2.2), leaf(1.6, 3.7), leaf(2.5, 0.3)
    assert torch.autograd.gradcheck(reml.reml_variance, inputs[:2])
    assert torch.autograd.gradcheck(reml.posterior_scale, inputs)
    for reading in reml.READINGS:
        assert torch.autograd.gradcheck(
            lambda *x, r=reading: reml.observation_variance(*x, 1.3, r), inputs
        )


# unnormalised weights ------------------------------------------------------


def signed_weights(tokens=4, keys=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, keys, generator=generator).double()


def some_values(keys=6, features=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return 1.6 * torch.randn(keys, features, generator=generator).double() + 5


@pytest.mark.parametrize("estimator", reml.ESTIMATORS)
def test_unnormalised_variance_equals_loops(estimator):
    a, v = signed_weights(), some_values()
    a[2] = 0
    a[3] = 0
    a[3, 1] = -0.7  # one-hot
    variance, informative = reml.unnormalised_variance(
        a, v, torch.tensor(2.5), 1.4, estimator
    )
    expected = loops.unnormalised(a.numpy(), v.numpy(), 2.5, 1.4, estimator)
    assert informative.squeeze(-1).tolist() == [True, True, False, True]
    for t in [0, 1, 3]:
        np.testing.assert_allclose(variance[t], expected[t], 1e-12)
    assert expected[2] is None
    np.testing.assert_allclose(variance[3], 2.5 * 0.49)  # the prior


def test_estimators_differ():
    a, v, s0 = signed_weights(), some_values(), torch.tensor(2.5)
    both = [
        reml.unnormalised_variance(a, v, s0, 1.0, e)[0]
        for e in reml.ESTIMATORS
    ]
    assert (both[0] / both[1] - 1).abs().max() > 0.05


def test_pooled_of_softmax_weights_is_the_mean_reading():
    w = signed_weights().softmax(-1)
    v, s0 = some_values(), torch.tensor(2.5).double()
    found, _ = reml.unnormalised_variance(w, v, s0, 1.4, "pooled")
    expected = reml.observation_variance(
        dispersion(w, v), effective_sample_size(w)[:, None], s0, 1.4, "mean"
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("estimator", reml.ESTIMATORS)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e12])
def test_variance_scales_with_the_square_of_the_weights(estimator, scale):
    a, v, s0 = signed_weights(), some_values(), torch.tensor(2.5).double()
    small, _ = reml.unnormalised_variance(scale * a, v, s0, 1.0, estimator)
    plain, _ = reml.unnormalised_variance(a, v, s0, 1.0, estimator)
    torch.testing.assert_close(small / scale**2, plain)
    # D, and so s², does not see a constant added to the values
    moved, _ = reml.unnormalised_variance(a, v + 1e6, s0, 1.0, estimator)
    torch.testing.assert_close(moved, plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("estimator", reml.ESTIMATORS)
def test_sandwich_covers_the_variance_of_the_sum(estimator):
    """Equal variances: E[s²Σa²] → Var o as the prior's weight vanishes."""
    torch.manual_seed(0)
    a = signed_weights(1, 6)
    v = 3 + 2.5**0.5 * torch.randn(6, 20000).double()
    found, _ = reml.unnormalised_variance(
        a, v, torch.tensor(2.5), 1e-9, estimator
    )
    true = 2.5 * a.square().sum()
    assert abs(found.mean() / true - 1) < 5 * found.std() / found.mean() / 141


@pytest.mark.parametrize("estimator", reml.ESTIMATORS)
def test_empty_rows_say_so_and_keep_finite_gradients(estimator):
    a = signed_weights()
    a[1] = 0
    a.requires_grad_()
    v = some_values().requires_grad_()
    variance, informative = reml.unnormalised_variance(
        a, v, torch.tensor(2.5), 1.0, estimator
    )
    assert not informative[1]
    assert (variance > 0).all()
    torch.where(informative, variance.log(), 0.0).sum().backward()
    assert a.grad.isfinite().all()
    assert v.grad.isfinite().all()


@pytest.mark.parametrize("estimator", reml.ESTIMATORS)
def test_gradcheck_of_the_unnormalised_variance(estimator):
    inputs = (
        signed_weights().requires_grad_(),
        some_values().requires_grad_(),
        torch.tensor(2.5).double().requires_grad_(),
    )
    assert torch.autograd.gradcheck(
        lambda *x: reml.unnormalised_variance(*x, 1.3, estimator)[0], inputs
    )


def test_unnormalised_variance_refuses_bad_input():
    a, v, s0 = signed_weights(), some_values(), torch.tensor(2.5)
    cases = [
        ((a * torch.nan, v, s0), "^weights: expected finite"),
        ((a * torch.inf, v, s0), "^weights: expected finite"),
        ((a, v * torch.nan, s0), "^values: expected finite"),
        ((a[:, :0], v[:0], s0), "^values: expected at least one"),
        ((a, v, s0, 0.0), "^prior_dof: "),
        ((a, v, s0, 1.0, "white"), "^estimator: .*'white'"),
    ]
    for arguments, words in cases:
        with pytest.raises(ValueError, match=words):
            reml.unnormalised_variance(*arguments)


def test_precision_weights_equal_loops():
    a = signed_weights()
    log = torch.linspace(-2, 1, 6).double()
    visible = torch.ones(4, 6).bool().tril(1)
    found = reml.precision_weights(a, log, visible)
    for t in range(4):
        seen = [j for j in range(6) if visible[t, j]]
        average = sum(log[j].exp() for j in seen) / len(seen)
        for j in range(6):
            expected = a[t, j] * log[j].exp() / average if j in seen else 0.0
            assert found[t, j].item() == pytest.approx(float(expected))
    everyone = reml.precision_weights(a, log, torch.ones(4, 6).bool())
    torch.testing.assert_close(reml.precision_weights(a, log), everyone)


def test_equal_precisions_give_back_the_weights():
    a, log = signed_weights(), torch.full((6,), -50.0).double()
    torch.testing.assert_close(reml.precision_weights(a, log), a)
    visible = torch.ones(4, 6).bool().tril(-1)  # the first row sees nothing
    found = reml.precision_weights(a, log, visible)
    torch.testing.assert_close(found, a.masked_fill(~visible, 0.0))


def test_precision_weights_do_not_see_the_unit_of_precision():
    a, log = signed_weights(), torch.linspace(-2, 1, 6).double()
    shifted = reml.precision_weights(a, log + 60)
    torch.testing.assert_close(shifted, reml.precision_weights(a, log))


def test_gradcheck_of_precision_weights():
    inputs = (
        signed_weights().requires_grad_(),
        torch.linspace(-2, 1, 6).double().requires_grad_(),
    )
    visible = torch.ones(4, 6).bool().tril(-1)
    for seen in [None, visible]:
        assert torch.autograd.gradcheck(
            lambda *x, s=seen: reml.precision_weights(*x, s), inputs
        )


def test_precision_weights_refuse_zero_precision():
    log = torch.tensor([0.0, -torch.inf])
    with pytest.raises(ValueError, match="^log_token_precision: "):
        reml.precision_weights(torch.ones(1, 2), log)
