"""Update, prediction and growth by hand against their plain forms."""

import math

import pytest
import torch

from bft_ref import Belief, delta, kalman, reml
from bft_ref.fast import algebra

F64 = torch.float64


def leaves(*shapes, scale=1.0, dtype=F64):
    generator = torch.Generator().manual_seed(1)
    return [
        (scale * torch.randn(*shape, generator=generator, dtype=F64))
        .to(dtype)
        .requires_grad_()
        for shape in shapes
    ]


def grown(j_first, radial, z, scale):
    """log (1 + J)² by plain operations."""
    outlier = 0.0 if radial is None else z * radial / z.shape[-1]
    return delta.log_square(1 + (j_first - outlier) / scale)


def norm(z, scale):
    return delta.Normalised(z, scale, None, None, True)


FORMS = {
    "update": (
        lambda m, log, e, o: algebra.update(Belief(m, log), e, o),
        lambda m, log, e, o: kalman.update(Belief(m, log), e, o),
        [(2, 3, 4)] * 4,
    ),
    "update, a token's precision": (
        lambda m, log, e, o: algebra.update(Belief(m, log), e, o),
        lambda m, log, e, o: kalman.update(Belief(m, log), e, o),
        [(2, 3, 4), (2, 3, 1), (2, 3, 4), (2, 3, 1)],
    ),
    "predict": (algebra.predict, delta.predict, [(2, 3, 4), (2, 3, 4), (4,)]),
    "predict, a token's precision": (
        algebra.predict,
        delta.predict,
        [(2, 3, 1), (2, 3, 1), (1,)],
    ),
    **{
        f"variance, {reading}": (
            lambda d, n, s, r=reading: algebra.observation_variance(
                d.exp(), 1 + (n / 10).exp(), s.exp(), 1.7, r
            ),
            lambda d, n, s, r=reading: reml.observation_variance(
                d.exp(), 1 + (n / 10).exp(), s.exp(), 1.7, r
            ),
            [(2, 3, 4), (2, 3, 1), (2, 3, 4)],
        )
        for reading in reml.READINGS
    },
    "variance, contracted": (
        lambda d, n, s: algebra.observation_variance(
            d.exp(), 1 + (n / 10).exp(), s.exp()
        ),
        lambda d, n, s: reml.observation_variance(
            d.exp(), 1 + (n / 10).exp(), s.exp()
        ),
        [(2, 3, 1)] * 3,
    ),
    "log precision": (
        lambda v: algebra.log_precision(v.exp()),
        lambda v: reml.log_precision(v.exp()),
        [(2, 3, 4)],
    ),
    "growth": (
        lambda f, r, z, s: algebra.growth(f, r, norm(z, s.exp())),
        lambda f, r, z, s: grown(f, r, z, s.exp()),
        [(2, 3, 4)] * 3 + [(2, 3, 1)],
    ),
    "growth, first term": (
        lambda f, s: algebra.growth(f, None, norm(f, s.exp())),
        lambda f, s: grown(f, None, f, s.exp()),
        [(2, 3, 4), (2, 3, 1)],
    ),
}


def flat(outputs):
    """All tensors of nested tuples, in order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [x for each in outputs for x in flat(each)]


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_those_of_the_plain_form(form, scale):
    quick, plain, shapes = FORMS[form]
    inputs = leaves(*shapes, scale=scale)
    found, expected = (flat(way(*inputs)) for way in (quick, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for y, z in zip(found, expected, strict=True):  # one output alone, too
        weights = torch.linspace(-1, 2, y.numel(), dtype=F64).view(y.shape)
        ours, theirs = (
            torch.autograd.grad(
                (weights * x).sum(),
                inputs,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for x in (y, z)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_of_every_order_and_way(form):
    quick, _, shapes = FORMS[form]

    def function(*x):
        return tuple(flat(quick(*x)))

    inputs = leaves(*shapes)
    assert torch.autograd.gradcheck(
        function, inputs, check_forward_ad=False, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(function, inputs)
    flat_inputs = [x.detach() for x in inputs]
    for transform in [torch.func.jacrev, torch.func.jacfwd]:
        jacobian = transform(lambda x: function(x, *flat_inputs[1:])[0])(
            flat_inputs[0]
        )
        expected = torch.autograd.functional.jacobian(
            lambda x: function(x, *flat_inputs[1:])[0], flat_inputs[0]
        )
        torch.testing.assert_close(jacobian, expected)


@pytest.mark.parametrize("apart", [-60.0, -20.0, 20.0, 60.0])
@pytest.mark.parametrize("form", ["update", "predict"])
def test_the_smaller_share_keeps_its_digits(form, apart):
    """One minus the larger would be a multiple of 2⁻²⁴, mostly zero."""
    inputs = leaves(*[(3,)] * 4, dtype=torch.float32)
    inputs[0] = (inputs[0] + apart).detach().requires_grad_()
    if form == "update":
        log, mean, e, o = inputs
        precision = algebra.update(Belief(mean, log), e, o)[0].log_precision
        known = (log, o)
    else:
        precision = algebra.predict(*inputs[:3])
        known = (inputs[0], inputs[2])
    found = torch.autograd.grad(precision.sum(), known)
    log, other = (x.detach().double() for x in known)
    if form == "predict":
        log, other = log - inputs[1].detach(), -other
    part = 1 if form == "update" else -1
    wanted = torch.sigmoid(part * (log - other))
    expected = [wanted, part * torch.sigmoid(part * (other - log))]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("relative", [-math.inf, -200.0, -30.0, 30.0, 200.0])
def test_update_at_the_ends(relative):
    """No information moves nothing; overwhelming information is believed."""
    mean, log, e = leaves((3,), (3,), (3,))
    observed = (log.detach() + relative).requires_grad_()
    given = (mean, log, e, observed)
    (after, k), (plain, k_plain) = (
        way(Belief(mean, log), e, observed)
        for way in (algebra.update, kalman.update)
    )
    torch.testing.assert_close([*after, k], [*plain, k_plain])
    for y, z in zip([*after, k], [*plain, k_plain], strict=True):
        ours, theirs = (
            torch.autograd.grad(
                x.sum(), given, retain_graph=True, materialize_grads=True
            )
            for x in (y, z)
        )
        torch.testing.assert_close(ours, theirs)
        assert all(g.isfinite().all() for g in ours)


@pytest.mark.parametrize("log_q", [-math.inf, -300.0, 300.0, math.inf])
def test_predict_without_noise_and_with_nothing_but_noise(log_q):
    log, growth = leaves((4,), (4,))
    q = torch.full((4,), log_q, dtype=F64)
    found, expected = (
        way(log, growth, q) for way in (algebra.predict, delta.predict)
    )
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_a_growth_of_zero_has_a_finite_logarithm_and_gradient():
    first, z = leaves((2, 4), (2, 4), dtype=torch.float32)
    scale = torch.ones(2, 1)
    stopped = torch.full_like(first, -1.0).requires_grad_()
    log = algebra.growth(stopped, None, norm(z, scale))
    (grad,) = torch.autograd.grad(log.sum(), stopped)
    assert log.isfinite().all()
    assert torch.equal(grad, torch.zeros_like(grad))


def test_low_dtypes_keep_the_precision_wide():
    mean, e = leaves((2, 3), (2, 3), dtype=torch.bfloat16)
    log, observed = leaves((2, 3), (2, 3), dtype=torch.float32)
    after, k = algebra.update(Belief(mean, log), e, observed)
    assert (after.mean.dtype, k.dtype) == (torch.bfloat16, torch.float32)
    plain, _ = kalman.update(Belief(mean, log), e, observed)
    torch.testing.assert_close(after, plain)
    grads = torch.autograd.grad(
        after.mean.float().sum(), [mean, e, log, observed]
    )
    assert [g.dtype for g in grads] == [torch.bfloat16] * 2 + [
        torch.float32
    ] * 2


@pytest.mark.parametrize("reading", reml.READINGS)
@pytest.mark.parametrize("n", [0.0, 1.0])
def test_the_variance_of_one_value_and_of_none(reading, n):
    """The slope in n at its smallest is that of n; of nothing, it is none."""
    d, s = leaves((3,), (3,))
    count = torch.full((3,), n, dtype=F64, requires_grad=True)
    grads = [
        torch.autograd.grad(
            way(d.exp(), count, s.exp(), 0.8, reading).sum(), [d, count, s]
        )
        for way in (algebra.observation_variance, reml.observation_variance)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-39])
def test_a_variance_of_zero_is_the_smallest_number(size):
    """It does not learn, where 1/variance would throw it anywhere."""
    small, n = torch.full((2,), size, requires_grad=True), torch.ones(2)
    found = algebra.log_precision(small)
    assert torch.equal(found, reml.log_precision(small))
    variance = algebra.observation_variance(small, n, small)
    assert torch.equal(variance, reml.observation_variance(small, n, small))
    for y in [found, variance]:
        (grad,) = torch.autograd.grad(y.sum(), small)
        assert torch.equal(grad, torch.zeros(2))
