"""bft_ref.belief: fuse and discount, and what a belief accepts."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bft_ref import BFTLayer
from bft_ref.belief import Belief, discount, fuse
from bft_ref.support.numerics import at_least_float32

steady = settings(deadline=None, derandomize=True)  # one run is like any
LOGS = st.floats(-60, 60)
MEANS = st.floats(-1e3, 1e3)


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


@st.composite
def beliefs(draw):
    return Belief(f64(draw(MEANS)), f64(draw(LOGS)))


def close(a, b, atol=1e-9):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=atol)


# ------------------------------------------------------------------ fuse


@steady
@given(beliefs(), beliefs())
def test_fuse_commutes(a, b):
    close(fuse(a, b), fuse(b, a))


@steady
@given(beliefs(), beliefs(), beliefs())
def test_fuse_is_associative(a, b, c):
    close(fuse(fuse(a, b), c), fuse(a, fuse(b, c)))


@steady
@given(beliefs(), beliefs())
def test_fused_mean_lies_between_and_precision_does_not_fall(a, b):
    fused = fuse(a, b)
    low, high = sorted([a.mean.item(), b.mean.item()])
    assert low - 1e-9 <= fused.mean <= high + 1e-9
    assert fused.log_precision >= max(a.log_precision, b.log_precision)


def test_no_information_changes_nothing():
    a = Belief.of(f64([1.0, -3.0]), precision=f64([2.5, 0.1]))
    nothing = Belief(f64([7.0, 9.0]), f64([-torch.inf] * 2))
    assert torch.equal(fuse(a, nothing).mean, a.mean)
    assert torch.equal(fuse(a, nothing).log_precision, a.log_precision)


def test_fuse_broadcasts_one_precision_per_token():
    a = Belief(torch.zeros(2, 5, 3), torch.zeros(2, 5, 1))
    b = Belief(torch.ones(2, 5, 3), torch.full((3,), math.log(3.0)))
    fused = fuse(a, b)
    torch.testing.assert_close(fused.mean, torch.full((2, 5, 3), 0.75))
    torch.testing.assert_close(fused.precision, torch.full((2, 5, 3), 4.0))


LOW = [torch.bfloat16, torch.float16]


def test_a_small_mean_that_is_sure_is_not_lost_beside_a_large_one():
    """x + K(y − x) gives 0 here, and K is 1."""
    large = Belief(torch.tensor(1e9), torch.tensor(-60.0))
    small = Belief(torch.tensor(1.25), torch.tensor(5.0))
    for fused in (fuse(large, small), fuse(small, large)):
        torch.testing.assert_close(fused.mean, torch.tensor(1.25))


@pytest.mark.parametrize("dtype", LOW)
def test_fuse_in_a_low_precision_is_rounded_once(dtype):
    x, y = torch.linspace(-3, 4, 50), torch.linspace(90, 7, 50)
    p, q = torch.linspace(3, 4, 50), torch.linspace(4, 2, 50)
    low = [z.to(dtype) for z in (x, p, y, q)]
    fused = fuse(Belief(*low[:2]), Belief(*low[2:]))
    exact = fuse(
        *(Belief(*(z.double() for z in low[i : i + 2])) for i in (0, 2))
    )
    assert fused.mean.dtype == dtype
    assert fused.log_precision.dtype == torch.float32
    assert torch.equal(fused.mean, exact.mean.to(dtype))
    torch.testing.assert_close(
        fused.log_precision.double(), exact.log_precision, rtol=0, atol=1e-6
    )
    # means as far apart as the dtype reaches
    top = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    far = fuse(*(Belief(z, torch.zeros(()).to(dtype)) for z in (top, -top)))
    assert far.mean == 0


def test_fuse_keeps_the_dtype_of_the_means():
    a = Belief(torch.ones(2), f64([0.5, 1.5]))
    b = Belief(torch.zeros(2), f64([0.25, -1.5]))
    fused = fuse(a, b)
    assert fused.mean.dtype == torch.float32
    assert fused.log_precision.dtype == torch.float64
    wider = fuse(a, Belief(b.mean.double(), b.log_precision))
    assert wider.mean.dtype == torch.float64
    with pytest.raises(TypeError, match="mean: expected a floating dtype"):
        fuse(a, Belief(torch.tensor([1, 2]), b.log_precision))


@pytest.mark.parametrize("dtype", LOW)
def test_precision_in_a_low_dtype_is_computed_wide(dtype):
    log, q = (torch.linspace(-9, at, 60).to(dtype) for at in (7.0, 2.0))
    belief = Belief(torch.zeros(60, dtype=dtype), log)
    whole = Belief(torch.zeros(60).double(), log.double())
    for found, exact in [
        (discount(log, q), discount(log.double(), q.double())),
        (belief.precision, whole.precision),
        (belief.variance, whole.variance),
        (belief.log_token_precision, whole.log_token_precision),
    ]:
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_fuse_gradients():
    inputs = [
        torch.randn(3, dtype=torch.float64, requires_grad=True)
        for _ in range(4)
    ]
    assert torch.autograd.gradcheck(
        lambda m, a, n, b: tuple(fuse(Belief(m, a), Belief(n, b))), inputs
    )


# -------------------------------------------------------------- discount


@steady
@given(LOGS, LOGS)
def test_discount_stays_below_both_bounds(log_precision, log_q):
    after = discount(f64(log_precision), f64(log_q))
    assert after <= log_precision + 1e-12
    assert after <= -log_q + 1e-12


@steady
@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5))
def test_two_discounts_are_one_with_the_sum(log_precision, log_q, log_p):
    twice = discount(discount(f64(log_precision), f64(log_q)), f64(log_p))
    once = discount(
        f64(log_precision), torch.logaddexp(f64(log_q), f64(log_p))
    )
    torch.testing.assert_close(twice, once, rtol=1e-12, atol=1e-12)


def test_discount_values_and_limits():
    after = discount(f64(2.5).log(), f64(0.7).log())
    torch.testing.assert_close(after.exp(), f64(1 / (1 / 2.5 + 0.7)))
    assert discount(f64(1.2), f64(-torch.inf)) == 1.2
    assert discount(f64(-torch.inf), f64(0.3)) == -torch.inf


def test_discount_gradients():
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    q = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(discount, (x, q))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_float32_agrees_with_float64(scale):
    λ = f64([0.3, 2.5, 70.0]) * scale
    b = f64([3.0, 0.25, 71.0]) * scale
    m, n = f64([1.0, -2.0, 0.5]), f64([0.0, 4.0, 8.0])
    exact = fuse(Belief(m, λ.log()), Belief(n, b.log()))
    single = fuse(
        Belief(m.float(), λ.log().float()), Belief(n.float(), b.log().float())
    )
    torch.testing.assert_close(
        single.mean.double(), exact.mean, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        single.log_precision.double(),
        exact.log_precision,
        rtol=1e-6,
        atol=1e-6,
    )


# ---------------------------------------------------------------- Belief


def test_three_ways_to_make_one():
    mean, variance = f64([1.0, 2.0]), f64([2.5, 0.01])
    ways = [
        Belief.of(mean, variance=variance),
        Belief.of(mean, precision=1 / variance),
        Belief.of(mean, log_precision=-variance.log()),
    ]
    for belief in ways:
        torch.testing.assert_close(belief.variance, variance)
        torch.testing.assert_close(belief.precision, 1 / variance)
    assert Belief.of(mean, precision=4.0).log_precision.dtype == mean.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_precision_is_never_half(dtype):
    x = torch.tensor([1.0, 2.0], dtype=dtype)
    belief = Belief.of(x, precision=x)
    assert belief.mean.dtype == dtype
    assert belief.log_precision.dtype == torch.float32
    assert at_least_float32(x).dtype == torch.float32
    assert at_least_float32(x.double()).dtype == torch.float64


@pytest.mark.parametrize(
    "given_, kept",
    [((), (2, 5, 8)), ((8,), (2, 5, 8)), ((1, 1, 8), (2, 5, 8)),
     ((1, 5, 1), (2, 5, 1)), ((2, 5, 1), (2, 5, 1))],
)  # fmt: skip
def test_a_precision_takes_the_shape_of_the_tokens(given_, kept):
    belief = Belief.of(torch.ones(2, 5, 8), precision=torch.full(given_, 2.5))
    assert belief.log_precision.shape == kept
    layer = BFTLayer(8, 2, 8)
    assert layer(belief).mean.shape == (2, 5, 8)


def test_log_token_precision_is_the_arithmetic_mean():
    λ = torch.rand(2, 3, 8, dtype=torch.float64) * 5 + 0.1
    belief = Belief(torch.zeros(2, 3, 8).double(), λ.log())
    torch.testing.assert_close(belief.log_token_precision.exp(), λ.mean(-1))
    one = Belief(torch.zeros(2, 3, 8).double(), λ[..., :1].log())
    assert torch.equal(one.log_token_precision, λ[..., 0].log())


@pytest.mark.parametrize(
    ("given_", "error", "says"),
    [
        ({}, TypeError, "got none"),
        ({"precision": 1.0, "variance": 2.0}, TypeError, "exactly one"),
        ({"precision": -1.0}, ValueError, "precision: expected positive"),
        ({"precision": 0.0}, ValueError, "precision: expected positive"),
        ({"variance": math.nan}, ValueError, "variance: expected finite"),
        ({"variance": math.inf}, ValueError, "variance: expected finite"),
        ({"log_precision": math.nan}, ValueError, "log_precision"),
        ({"precision": torch.ones(7)}, ValueError, "precision: shape"),
    ],
)
def test_bad_beliefs_are_named(given_, error, says):
    with pytest.raises(error, match=says):
        Belief.of(torch.zeros(2, 3), **given_)


def test_bad_means_are_named():
    with pytest.raises(ValueError, match="mean: expected finite"):
        Belief.of(torch.tensor([1.0, math.nan]), precision=1.0)
    with pytest.raises(TypeError, match="mean: expected a floating dtype"):
        Belief.of(torch.tensor([1, 2]), precision=1.0)


def test_a_belief_moves_and_is_detached():
    mean = torch.randn(2, 3, 4).requires_grad_()
    belief = Belief(mean, torch.randn(2, 3, 1, dtype=torch.float64))
    half = belief.to(torch.bfloat16)
    assert half.mean.dtype == torch.bfloat16
    assert half.log_precision.dtype == torch.float32
    double = belief.to("cpu", torch.float64)
    assert {x.dtype for x in double} == {torch.float64}
    same = belief.to("cpu")
    assert same.log_precision.dtype == torch.float64
    assert {x.device.type for x in belief.to("meta")} == {"meta"}
    assert belief.mean.requires_grad and not belief.detach().mean.requires_grad
    assert torch.equal(belief.detach().mean, mean)


@pytest.mark.parametrize("features", [1, 4])
@pytest.mark.parametrize(
    "index",
    [
        (slice(None), -1),
        0,
        (1, 2),
        (..., slice(1, 3)),
        [1, 0],
        torch.tensor([[True, False, True], [False, True, False]]),
    ],
)
def test_tokens_are_chosen_in_mean_and_precision_alike(index, features):
    mean = torch.arange(24.0).view(2, 3, 4)
    log = -torch.arange(6.0 * features).view(2, 3, features)
    found = Belief(mean, log).at[index]
    where = torch.arange(6).view(2, 3)[index].flatten()
    assert torch.equal(found.mean.reshape(-1, 4), mean.view(6, 4)[where])
    expected = log.view(6, features)[where]
    assert torch.equal(found.log_precision.reshape(-1, features), expected)
    assert found.mean.dim() == found.log_precision.dim()


def test_features_are_not_chosen():
    belief = Belief(torch.ones(2, 3, 4), torch.zeros(2, 3, 1))
    with pytest.raises(IndexError):
        belief.at[0, 0, 0]


@pytest.mark.parametrize("name", ["precision", "variance", "log_precision"])
@pytest.mark.parametrize("shape", [(3, 5, 8), (1, 1, 5, 8), (2, 1, 5, 1)])
def test_more_precisions_than_means_are_refused(name, shape):
    with pytest.raises(
        ValueError, match=f"^{name}: .*got {re.escape(str(shape))}"
    ):
        Belief.of(torch.ones(1, 5, 8), **{name: torch.ones(shape)})


@pytest.mark.parametrize("value", [True, torch.ones(8, dtype=torch.bool)])
@pytest.mark.parametrize("name", ["precision", "variance", "log_precision"])
def test_a_mask_is_no_precision(name, value):
    with pytest.raises(TypeError, match=f"^{name}: expected numbers"):
        Belief.of(torch.ones(2, 5, 8), **{name: value})
