"""bft_ref.kalman: against statsmodels, filterpy and the joint Gaussian."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_ref.belief import Belief
from bft_ref.book.data import nile
from bft_ref.kalman import (
    gain,
    local_level_filter,
    steady_state_precision,
    update,
)

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


def test_other_bad_input_is_named():
    belief = Belief(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="innovation: shape"):
        update(belief, torch.zeros(2, 4), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="observation_precision"):
        steady_state_precision(f64(0.0), f64(1.0))
    with pytest.raises(ValueError, match="process_noise"):
        steady_state_precision(f64(1.0), f64(-1.0))


def test_the_data_of_the_chapter():
    year, flow = nile()
    assert year.tolist() == list(range(1871, 1971))
    assert flow.dtype == torch.float64
    assert (flow[0], flow[42], flow[99]) == (1120, 456, 740)
    datasets = pytest.importorskip("statsmodels.datasets")
    theirs = datasets.nile.load_pandas().data
    assert flow.tolist() == theirs["volume"].tolist()
