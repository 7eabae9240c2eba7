"""bft_ref.kalman: against statsmodels, filterpy and the joint Gaussian."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_ref.belief import Belief
from bft_ref.kalman import gain, update
from bft_ref.notebook.examples import nile

steady = settings(deadline=None, derandomize=True)  # one run is like any
R, Q = 15099.0, 1469.1  # Durbin and Koopman's estimates, as printed


@pytest.fixture(scope="module")
def flow():
    return nile().flow


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def close(found, expected, tol=1e-8, atol=0.0):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=tol, atol=atol)


# --------------------------------------------------------------- oracles


# ---------------------------------------------------- properties, limits


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


# ------------------------------------------------------------- bad input


def test_the_data_of_the_chapter():
    year, flow = nile()
    assert year.tolist() == list(range(1871, 1971))
    assert flow.dtype == torch.float64
    assert (flow[0], flow[42], flow[99]) == (1120, 456, 740)
    datasets = pytest.importorskip("statsmodels.datasets")
    theirs = datasets.nile.load_pandas().data
    assert flow.tolist() == theirs["volume"].tolist()
