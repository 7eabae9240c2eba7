"""Kriging of a field and the local level filter, against libraries."""

import math
from decimal import Decimal, localcontext

import gstools
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from pykrige.ok import OrdinaryKriging
from scipy.spatial.distance import cdist

from bft_ref import (
    ordinary_kriging,
    simple_kriging,
)
from bft_ref.belief import Belief
from bft_ref.kalman import update
from bft_ref.notebook.examples import co2, nile
from bft_ref.textbook import local_level_filter, steady_state_precision

SILL, LENGTH, NUGGET = 2.5, 3.0, 0.4
R, Q = 15099.0, 1469.1  # Durbin and Koopman's estimates, as printed
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def places(n=12, m=5, seed=0):
    rng = np.random.default_rng(seed)
    here, there = rng.uniform(0, 10, (n, 2)), rng.uniform(0, 10, (m, 2))
    return here, there, 7 + 1.6 * rng.normal(size=n)


def covariances(here, there, errors=NUGGET):
    C = SILL * np.exp(-cdist(here, here) / LENGTH)
    C[np.diag_indices(len(here))] += errors
    c = SILL * np.exp(-cdist(there, here) / LENGTH)
    return torch.from_numpy(C), torch.from_numpy(c)


@pytest.mark.parametrize("nugget", [0.0, NUGGET])
def test_ordinary_kriging_equals_pykrige_and_gstools(nugget):
    here, there, v = places()
    C, c = covariances(here, there, nugget)
    said = ordinary_kriging(C, c, torch.from_numpy(v), SILL + nugget)
    pykrige = OrdinaryKriging(
        *here.T,
        v,
        variogram_model="exponential",
        # PyKrige's range is where 95 % of the sill are reached.
        variogram_parameters={
            "psill": SILL,
            "range": 3 * LENGTH,
            "nugget": nugget,
        },
    ).execute("points", *there.T)
    model = gstools.Exponential(2, SILL, LENGTH, nugget=nugget)
    kriged = gstools.krige.Ordinary(model, here.T, v, exact=True)(there.T)
    for mean, variance in (pykrige, kriged):
        assert_allclose(said.mean, mean, rtol=1e-8)
        assert_allclose(said.variance, variance, rtol=1e-8)


def test_ordinary_kriging_with_unequal_errors_equals_gstools():
    here, there, v = places(seed=1)
    errors = np.random.default_rng(2).uniform(0.1, 0.9, len(v))
    C, c = covariances(here, there, errors)
    said = ordinary_kriging(C, c, torch.from_numpy(v), SILL)
    mean, variance = gstools.krige.Ordinary(
        gstools.Exponential(2, SILL, LENGTH),
        here.T,
        v,
        cond_err=errors,
        exact=False,
    )(there.T)
    assert_allclose(said.mean, mean, rtol=1e-8)
    assert_allclose(said.variance, variance, rtol=1e-8)


@pytest.mark.parametrize("nugget", [0.0, NUGGET])
def test_simple_kriging_equals_gstools(nugget):
    here, there, v = places(seed=3)
    C, c = covariances(here, there, nugget)
    said = simple_kriging(C, c, torch.from_numpy(v), 6.5, SILL + nugget)
    model = gstools.Exponential(2, SILL, LENGTH, nugget=nugget)
    mean, variance = gstools.krige.Simple(
        model, here.T, v, mean=6.5, exact=True
    )(there.T)
    assert_allclose(said.mean, mean, rtol=1e-8)
    assert_allclose(said.variance, variance, rtol=1e-8)


def test_gap_of_1964_equals_pykrige():
    """The chapter's own gap, with the raw record instead of the field."""
    record = co2()
    start = int(np.searchsorted(record.date, np.datetime64("1964-01-25")))
    hidden = np.arange(start, start + 18)
    assert record.ppm[hidden].isnan().all()
    near = np.r_[start - 26 : start, start + 18 : start + 44]
    near = near[~record.ppm[near].isnan().numpy()]
    v = record.ppm[near]

    def apart(a, b):
        return torch.from_numpy(abs(a[:, None] - b).astype(float))

    C = 0.211 * torch.exp(-apart(near, near) / 12.3)
    C += 0.0672 * torch.eye(len(near), dtype=torch.float64)
    c = 0.211 * torch.exp(-apart(hidden, near) / 12.3)
    said = ordinary_kriging(C, c, v, 0.211 + 0.0672)
    mean, variance = OrdinaryKriging(
        near,
        np.zeros(len(near)),
        v.numpy(),
        variogram_model="exponential",
        variogram_parameters={
            "psill": 0.211,
            "range": 3 * 12.3,
            "nugget": 0.0672,
        },
    ).execute("points", hidden.astype(float), np.zeros(18))
    assert_allclose(said.mean, mean, rtol=1e-8)
    assert_allclose(said.variance, variance, rtol=1e-8)


def test_ordinary_kriging_equals_a_direct_gls_solve():
    """The bordered system, by an inverse that this package never forms."""
    here, there, v = places(seed=4)
    C, c = (x.numpy() for x in covariances(here, there))
    inverse, one = np.linalg.inv(C), np.ones(len(v))
    m_hat = one @ inverse @ v / (one @ inverse @ one)
    mean = m_hat + c @ inverse @ (v - m_hat)
    shortfall = 1 - c @ inverse @ one
    variance = (
        SILL
        - np.einsum("mi,ij,mj->m", c, inverse, c)
        + shortfall**2 / (one @ inverse @ one)
    )
    said = ordinary_kriging(*(torch.from_numpy(x) for x in (C, c, v)), SILL)
    assert_allclose(said.mean, mean, rtol=1e-8)
    assert_allclose(said.variance, variance, rtol=1e-8)


def test_a_number_for_the_variance_keeps_its_digits():
    """0.1 is not rounded to float32 on its way to float64 values."""
    C = torch.eye(1, dtype=torch.float64)
    said = simple_kriging(C, C * 0, C[0], 0.0, 0.1)
    assert said.variance.item() == 0.1


def test_kriging_differentiates():
    here, there, v = places(n=4, m=2)
    C, c = covariances(here, there)
    inputs = [x.requires_grad_() for x in (c, torch.from_numpy(v))] + [
        torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    ]

    def both(c, v, error):
        full = C + error * torch.eye(4, dtype=torch.float64)
        a = ordinary_kriging(full, c, v, SILL)
        b = simple_kriging(full, c, v, 6.5, SILL)
        return a.mean, a.variance, b.mean, b.variance

    assert torch.autograd.gradcheck(both, inputs)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"values": torch.zeros(0, dtype=torch.float64)}, ValueError, "val"),
        ({"values": torch.tensor([1, 2, 3])}, TypeError, "values"),
        ({"values": torch.full((3,), torch.nan)}, ValueError, "values"),
        ({"covariance": torch.eye(4)}, ValueError, "covariance"),
        ({"covariance": torch.ones(3, 3)}, ValueError, "covariance"),
        (
            {"covariance": torch.eye(3) + torch.ones(3, 3).triu(1)},
            ValueError,
            "covariance",
        ),
        ({"covariance": torch.eye(3).double()}, TypeError, "covariance"),
        ({"cross_covariance": torch.ones(3)}, ValueError, "cross_cov"),
        ({"cross_covariance": torch.ones(2, 4)}, ValueError, "cross_cov"),
        ({"point_variance": -0.1}, ValueError, "point_variance"),
        ({"point_variance": torch.ones(2, 1)}, ValueError, "point_variance"),
        ({"point_variance": torch.ones(3)}, ValueError, "point_variance"),
    ],
)
def test_kriging_names_what_is_wrong(change, error, names):
    given_ = {
        "covariance": 2.5 * torch.eye(3),
        "cross_covariance": torch.full((2, 3), 0.2),
        "values": torch.tensor([1.0, 2.0, 4.0]),
        "point_variance": 2.5,
    }
    ordinary_kriging(**given_)
    with pytest.raises(error, match=f"^{names}"):
        ordinary_kriging(**given_ | change)
    with pytest.raises(error, match=f"^{names}"):
        simple_kriging(**given_ | change, mean=1.0)


@pytest.mark.parametrize("mean", [torch.nan, torch.zeros(2)])
def test_a_mean_that_is_no_number_is_named(mean):
    with pytest.raises(ValueError, match="^mean: expected"):
        simple_kriging(
            2.5 * torch.eye(3),
            torch.full((2, 3), 0.2),
            torch.tensor([1.0, 2.0, 4.0]),
            mean,
            2.5,
        )


def test_each_point_may_have_its_own_variance():
    C, c = 2.5 * torch.eye(3), torch.full((2, 3), 0.2)
    v = torch.tensor([1.0, 2.0, 4.0])
    both = torch.tensor([2.5, 7.0])
    for krige in [
        ordinary_kriging,
        lambda *x: simple_kriging(*x[:3], 1, x[3]),
    ]:
        found = krige(C, c, v, both).variance
        alone = [krige(C, c, v, one).variance[i] for i, one in enumerate(both)]
        torch.testing.assert_close(found, torch.stack(alone))


steady = settings(deadline=None, derandomize=True)  # one run is like any


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


def star(o, q):
    """λ* in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        o, q = Decimal(o), Decimal(q)
        qo = q * o
        return float(2 * o / (qo + (qo * qo + 4 * qo).sqrt()))


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
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_steady_state_is_where_the_filter_stays(o, q):
    λ = steady_state_precision(f64(o), f64(q))
    close(1 / (1 / (λ + o) + q), λ, 1e-9)
    assert λ < 1 / q


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
