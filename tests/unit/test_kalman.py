"""bft_ref.kalman: against statsmodels, filterpy and the joint Gaussian."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_ref.belief import Belief
from bft_ref.kalman import (
    gain,
    local_level_filter,
    steady_state_precision,
    update,
)
from bft_ref.notebook.examples import nile

steady = settings(deadline=None, derandomize=True)  # one run is like any
R, Q = 15099.0, 1469.1  # Durbin and Koopman's estimates, as printed


@pytest.fixture(scope="module")
def flow():
    return nile().flow


def gappy(flow):
    flow = flow.clone()
    flow[20:40] = math.nan
    flow[60:80] = math.nan
    return flow


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def close(found, expected, tol=1e-8, atol=0.0):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=tol, atol=atol)


# --------------------------------------------------------------- oracles


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("diffuse", [False, True])
def test_statsmodels(flow, missing, diffuse):
    structural = pytest.importorskip("statsmodels.tsa.api")
    z = gappy(flow) if missing else flow
    model = structural.UnobservedComponents(
        z.numpy(), "llevel", use_exact_diffuse=diffuse
    )
    prior = None
    if not diffuse:
        model.ssm.initialize_known(np.array([900.0]), np.array([[4e4]]))
        prior = Belief.of(f64(900.0), variance=4e4)
    model.update([R, Q])
    theirs = model.ssm.filter()
    ours = local_level_filter(z, R, Q, prior)
    close(ours.filtered.mean, theirs.filtered_state[0])
    close(ours.filtered.variance, theirs.filtered_state_cov[0, 0])
    from_ = 1 if diffuse else 0
    close(ours.predicted.mean[from_:], theirs.predicted_state[0, from_:-1])
    close(
        ours.predicted.variance[from_:],
        theirs.predicted_state_cov[0, 0, from_:-1],
    )
    # theirs gives the diffuse first observation the constant log 2π/2
    close(
        ours.log_likelihood[from_:].sum(),
        theirs.llf_obs[from_:].sum(),
        1e-10,
    )


@pytest.mark.parametrize("missing", [False, True])
def test_filterpy(flow, missing):
    kalman = pytest.importorskip("filterpy.kalman")
    z = gappy(flow) if missing else flow
    kf = kalman.KalmanFilter(dim_x=1, dim_z=1)
    kf.H = kf.F = np.array([[1.0]])
    kf.R, kf.Q = R, Q
    kf.x[:], kf.P[:] = 900.0, 4e4
    rows = []
    for z_t in z.tolist():
        kf.update(None if math.isnan(z_t) else z_t)
        rows.append((kf.x.item(), kf.P.item()))
        kf.predict()
    ours = local_level_filter(z, R, Q, Belief.of(f64(900.0), variance=4e4))
    means, variances = zip(*rows, strict=True)
    close(ours.filtered.mean, means)
    close(ours.filtered.variance, variances)


@pytest.mark.parametrize("missing", [False, True])
def test_joint_gaussian_from_covariances(flow, missing):
    z = gappy(flow) if missing else flow
    t = torch.arange(100).double()
    levels = 4e4 + Q * torch.minimum(t[:, None], t[None, :])
    ours = local_level_filter(z, R, Q, Belief.of(f64(900.0), variance=4e4))
    for last in range(0, 100, 3):
        seen = (~z[: last + 1].isnan()).nonzero().squeeze(-1)
        observed = levels[seen][:, seen] + R * torch.eye(len(seen)).double()
        cross = levels[last, seen]
        weights = torch.linalg.solve(observed, cross)
        mean = 900 + weights @ (z[seen] - 900)
        variance = levels[last, last] - weights @ cross
        close(ours.filtered.mean[last], mean, 1e-10)
        close(ours.filtered.variance[last], variance, 1e-10)


def test_diffuse_start_is_the_limit_of_a_vague_one(flow):
    exact = local_level_filter(flow, R, Q)
    vague = local_level_filter(
        flow, R, Q, Belief.of(f64(0.0), precision=1e-18)
    )
    close(vague.filtered.mean, exact.filtered.mean)
    close(vague.filtered.variance, exact.filtered.variance)
    close(vague.log_likelihood[1:], exact.log_likelihood[1:])
    assert exact.log_likelihood[0] == 0
    assert exact.gain[0] == 1
    assert exact.filtered.mean[0] == flow[0]


def test_published_variances_are_the_maximum_to_their_precision(flow):
    def value(r, q):
        return local_level_filter(flow, r, q).log_likelihood.sum()

    top = value(15098.52, 1469.18)
    assert math.isclose(top, -632.545625103, abs_tol=1e-8)
    for r, q in [(15099.0, 1469.1), (15098.5, 1469.2)]:
        assert 0 <= top - value(r, q) < 2e-8
    for factor in (0.99, 1.01):
        assert value(15098.52 * factor, 1469.18) < top - 1e-4
        assert value(15098.52, 1469.18 * factor) < top - 1e-5


# ---------------------------------------------------- properties, limits


def test_leading_missing_values_keep_the_diffuse_start(flow):
    z = torch.cat([torch.full((3,), math.nan).double(), flow[:20]])
    late, plain = (
        local_level_filter(z, R, Q),
        local_level_filter(flow[:20], R, Q),
    )
    assert (late.gain[:3] == 0).all()
    assert (late.filtered.log_precision[:3] == -torch.inf).all()
    assert torch.equal(late.filtered.mean[3:], plain.filtered.mean)
    assert torch.equal(late.log_likelihood[3:], plain.log_likelihood)


def test_precision_never_sees_the_data(flow):
    path, blind = (local_level_filter(z, R, Q) for z in (flow, 0 * flow))
    assert torch.equal(
        path.filtered.log_precision, blind.filtered.log_precision
    )


def test_predicted_and_filtered_fit_together(flow):
    path = local_level_filter(flow, R, Q)
    assert all(x.shape == (100,) for x in (path.gain, path.log_likelihood))
    close(path.predicted.mean[1:], path.filtered.mean[:-1], 0.0)
    close(path.predicted.variance[1:], path.filtered.variance[:-1] + Q)
    close(path.gain, path.filtered.variance / R)


@pytest.mark.parametrize("first", [1.0, math.nan])
def test_gradients_of_the_filter(first):
    z = f64([first, 1.0, 3.5, math.nan, 2.0])
    variances = [f64(2.5).requires_grad_(), f64(0.7).requires_grad_()]

    def score(r, q):
        return local_level_filter(z, r, q).log_likelihood.sum()

    assert torch.autograd.gradcheck(score, variances)
    assert torch.autograd.gradgradcheck(score, variances)


def test_float32_agrees_with_float64(flow):
    single = local_level_filter(flow.float(), R, Q)
    double = local_level_filter(flow, R, Q)
    assert single.filtered.mean.dtype == torch.float32
    close(single.filtered.mean.double(), double.filtered.mean, 1e-5)
    close(single.filtered.variance.double(), double.filtered.variance, 1e-4)
    close(single.gain.double(), double.gain, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("level_variance", [0.0, 1e-8, 1e-3])
def test_a_long_series_is_as_accurate_as_its_dtype(level_variance):
    """In float32 itself the recursion loses 20 ulp, in bfloat16 all."""
    t = torch.arange(1, 10_001).double()
    z = 2 + torch.sin(t)
    exact = local_level_filter(z, 0.8, level_variance)
    if level_variance == 0:
        close(exact.filtered.variance, 0.8 / t, 1e-11)
        close(exact.filtered.mean, z.cumsum(0) / t, 1e-11)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rounded = z.to(dtype)
        low = local_level_filter(rounded, 0.8, level_variance)
        fields = (*low.predicted, *low.filtered, low.gain, low.log_likelihood)
        assert {x.dtype for x in fields} == {torch.float32}
        # half an ulp of log λ < 16
        close(low.filtered.variance.double(), exact.filtered.variance, 6e-7)
        close(low.gain.double(), exact.gain, 1e-7)
        if dtype == torch.float32:
            close(low.filtered.mean.double(), exact.filtered.mean, 2e-7)
        elif level_variance == 0:
            mean = rounded.double().cumsum(0) / t
            close(low.filtered.mean.double(), mean, 2e-7)


def test_variances_and_prior_are_not_rounded_to_the_observations():
    z = torch.tensor([1.0, 2.0, 4.0])
    prior = Belief.of(f64(0.1), variance=1e-3)
    exact = local_level_filter(z.double(), 1e-12, 3e-13, prior)
    for dtype in (torch.float32, torch.float16):
        low = local_level_filter(z.to(dtype), 1e-12, 3e-13, prior)
        close(low.filtered.variance.double(), exact.filtered.variance, 4e-6)
        close(low.predicted.mean.double(), exact.predicted.mean, 1e-7)


@steady
@given(
    st.floats(1e-30, 1e30),
    st.floats(1e-30, 1e30),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_gain_lies_between_zero_and_one(λ, o, dtype):
    a, b = (torch.tensor(x, dtype=dtype).log() for x in (λ, o))
    k, kept = gain(a, b), gain(b, a)
    assert 0 <= k <= 1
    assert math.isclose(k + kept, 1, rel_tol=1e-6)
    tol = 1e-4 if dtype == torch.float32 else 1e-12
    # float32 ends at 1e-38
    close(k.double(), o / (λ + o), tol, atol=1e-37)


def test_gain_limits_and_gradient():
    assert gain(f64(1.0), f64(-torch.inf)) == 0
    assert gain(f64(-torch.inf), f64(1.0)) == 1
    a = torch.randn(4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gain, (a, b))
    k = gain(a, b)
    (slope,) = torch.autograd.grad(k.sum(), b)
    close(slope, (k * (1 - k)).detach(), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gain_and_precision_in_a_low_dtype_are_computed_wide(dtype):
    a, b = (torch.linspace(-6, at, 60).to(dtype) for at in (5.0, 9.0))
    k = gain(a, b)
    after, weight = update(Belief(torch.zeros(60).to(dtype), a), a, b)
    assert k.dtype == after.log_precision.dtype == torch.float32
    assert torch.equal(weight, k)
    close(k.double(), gain(a.double(), b.double()), 1e-6)
    close(
        after.log_precision.double(),
        torch.logaddexp(a.double(), b.double()),
        1e-6,
        1e-6,
    )


def test_the_mean_has_the_wider_dtype_of_mean_and_innovation():
    log = torch.tensor([1.0, 0.3])
    e = torch.tensor([1.0, 1.7])
    belief = Belief(torch.zeros(2).bfloat16(), log.double())
    after, k = update(belief, e, torch.zeros(2))
    assert after.mean.dtype == torch.float32
    # the gain is not rounded to bfloat16 on its way
    close(after.mean.double(), k * e.double(), 1e-6)
    with pytest.raises(TypeError, match="mean: expected a floating dtype"):
        update(Belief(torch.tensor([1, 2]), log), e, log)


def test_update_without_information_has_finite_gradients():
    mean = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    log_precision = torch.randn(2, 1, dtype=torch.float64, requires_grad=True)
    e = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    nothing = torch.full((2, 1), -torch.inf, dtype=torch.float64)
    after, k = update(Belief(mean, log_precision), e, nothing)
    assert torch.equal(after.mean, mean)
    assert torch.equal(after.log_precision, log_precision)
    assert (k == 0).all()
    (after.mean.sum() + after.log_precision.sum()).backward()
    for x in (mean, log_precision, e):
        assert x.grad.isfinite().all()


def test_update_keeps_the_dtype_of_the_mean():
    belief = Belief(torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 1))
    after, k = update(belief, torch.ones(2, 3).bfloat16(), torch.zeros(2, 1))
    assert after.mean.dtype == torch.bfloat16
    assert after.log_precision.dtype == k.dtype == torch.float32
    torch.testing.assert_close(after.mean.float(), torch.full((2, 3), 0.5))


@steady
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_steady_state_is_where_the_filter_stays(o, q):
    λ = steady_state_precision(f64(o), f64(q))
    close(1 / (1 / (λ + o) + q), λ, 1e-9)
    assert λ < 1 / q


def star(o, q):
    """λ* in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        o, q = Decimal(o), Decimal(q)
        qo = q * o
        return float(2 * o / (qo + (qo * qo + 4 * qo).sqrt()))


@pytest.mark.parametrize(
    ("dtype", "computed", "ends", "tol"),
    [
        (torch.float64, torch.float64, 307, 1e-14),
        (torch.float32, torch.float32, 37.5, 1e-6),
        (torch.bfloat16, torch.float32, 37.5, 1e-6),
        (torch.float16, torch.float32, 4.5, 1e-6),
    ],
)
def test_steady_state_from_end_to_end_of_a_dtype(dtype, computed, ends, tol):
    grid = (10 ** torch.linspace(-ends, ends, 25).double()).to(dtype)
    o, q = torch.cartesian_prod(grid, grid).T
    found = steady_state_precision(o, q)
    assert found.dtype == computed
    expected = f64([*map(star, o.tolist(), q.tolist())])
    info = torch.finfo(computed)
    there = (expected >= info.tiny) & (expected <= info.max)
    assert there.sum() > 500
    close(found.double()[there], expected[there], tol)


def test_steady_state_of_two_tiny_numbers_and_its_slope():
    o, q = torch.tensor([1e-20, 1e-26]).requires_grad_()
    λ = steady_state_precision(o, q)
    close(λ.detach().double(), 1000.0, 1e-6)
    for x, power in [(o, 0.5), (q, -0.5)]:  # λ* → √(o/Q)
        (slope,) = torch.autograd.grad(λ, x, retain_graph=True)
        close((slope * x / λ).detach().double(), power, 1e-5)
    mixed = steady_state_precision(f64(0.3), torch.tensor(0.7))
    assert mixed.dtype == torch.float64
    close(mixed, star(0.3, torch.tensor(0.7).item()), 1e-14)


def test_steady_state_scales_with_the_unit():
    a = steady_state_precision(f64(0.4), f64(0.7))
    b = steady_state_precision(f64(0.4 / 100), f64(0.7 * 100))
    close(b, a / 100, 1e-12)


# ------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        (([1.0, 2.0], 1.0, 1.0), TypeError, "observations: expected a tensor"),
        (
            (torch.tensor([1, 2]), 1.0, 1.0),
            TypeError,
            "observations: expected a floating",
        ),
        (
            (torch.ones(2, 3), 1.0, 1.0),
            ValueError,
            r"observations: expected shape \(T\), got \(2, 3\)",
        ),
        ((torch.ones(0), 1.0, 1.0), ValueError, "observations: .*got none"),
        (
            (torch.tensor([math.inf]), 1.0, 1.0),
            ValueError,
            "observations: .*infinity",
        ),
        ((torch.ones(3), 0.0, 1.0), ValueError, "observation_variance"),
        ((torch.ones(3), -2.5, 1.0), ValueError, "observation_variance"),
        ((torch.ones(3), 1.0, -1.0), ValueError, "level_variance"),
        ((torch.ones(3), 1.0, math.nan), ValueError, "level_variance"),
        (
            (torch.ones(3), torch.ones(3), 1.0),
            ValueError,
            "observation_variance: expected shape",
        ),
        (
            (torch.ones(3), 1.0, torch.ones(3)),
            ValueError,
            "level_variance: expected shape",
        ),
    ],
)
def test_bad_series_are_named(args, error, says):
    with pytest.raises(error, match=says):
        local_level_filter(*args)


@pytest.mark.parametrize(
    ("mean", "log_precision", "says"),
    [
        (torch.zeros(1), torch.zeros(()), "prior mean: expected shape"),
        (torch.zeros(3), torch.zeros(3), "prior mean: expected shape"),
        (torch.zeros(()), torch.zeros(1), "prior log_precision: .*shape"),
        (f64(math.nan), f64(0.0), "prior mean: expected finite"),
        (f64(0.0), f64(math.nan), "prior log_precision: expected a number"),
        (f64(0.0), f64(math.inf), "prior log_precision: expected a number"),
    ],
)
def test_a_bad_prior_is_named(mean, log_precision, says):
    with pytest.raises(ValueError, match=says):
        local_level_filter(
            torch.ones(3), 1.0, 1.0, Belief(mean, log_precision)
        )


def test_other_bad_input_is_named():
    belief = Belief(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="innovation: shape"):
        update(belief, torch.zeros(2, 4), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="observation_precision"):
        steady_state_precision(f64(0.0), f64(1.0))
    with pytest.raises(ValueError, match="process_noise"):
        steady_state_precision(f64(1.0), f64(-1.0))
    with pytest.raises(TypeError, match="observation_precision: .*got float"):
        steady_state_precision(1.0, f64(1.0))
    with pytest.raises(TypeError, match="process_noise: .*int64"):
        steady_state_precision(f64(1.0), torch.tensor(1))


def test_the_data_of_the_chapter():
    year, flow = nile()
    assert year.tolist() == list(range(1871, 1971))
    assert flow.dtype == torch.float64
    assert (flow[0], flow[42], flow[99]) == (1120, 456, 740)
    datasets = pytest.importorskip("statsmodels.datasets")
    theirs = datasets.nile.load_pandas().data
    assert flow.tolist() == theirs["volume"].tolist()
