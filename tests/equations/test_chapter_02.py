"""Chapter 2: each numbered equation, held against another way to it."""

import math

import torch
from torch.distributions import MultivariateNormal

from bft_ref import (
    Belief,
    discount,
    fuse,
    gain,
    local_level_filter,
    steady_state_precision,
    update,
)
from tests.equations import equation

OBS, Q = 1 / 2.5, 0.7  # precision of an observation, variance of a step


def number(x):
    return torch.tensor(x, dtype=torch.float64)


def close(a, b, tol=1e-12):
    torch.testing.assert_close(a, b, rtol=tol, atol=0.0)


def moments(log_density, grid):
    """Mean and precision of an unnormalised density on a fine grid."""
    weights = (log_density - log_density.max()).exp()
    weights = weights / weights.sum()
    mean = (weights * grid).sum()
    return mean, 1 / (weights * (grid - mean) ** 2).sum()


def product_of_two():
    a = Belief.of(number(3.0), precision=0.4)
    b = Belief.of(number(-1.0), precision=1.7)
    grid = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    log_density = sum(
        -belief.precision * (grid - belief.mean) ** 2 / 2 for belief in (a, b)
    )
    return fuse(a, b), moments(log_density, grid)


@equation("2.1", r"\lambda = \lambda_a + \lambda_b")
def test_precisions_add():
    fused, (_, precision) = product_of_two()
    close(precision, number(0.4 + 1.7), 1e-10)
    close(fused.precision, precision, 1e-10)


@equation(
    "2.2",
    r"m = \frac{\lambda_a m_a + \lambda_b m_b}{\lambda_a + \lambda_b}",
)
def test_means_are_averaged_by_precision():
    fused, (mean, _) = product_of_two()
    close(mean, number((0.4 * 3.0 - 1.7 * 1.0) / (0.4 + 1.7)), 1e-10)
    close(fused.mean, mean, 1e-10)


def joint_conditioned(h, precision, z, observation_precision):
    """Mean and variance of the state given z, from the joint covariance."""
    prior, noise = 1 / precision, 1 / observation_precision
    cross = prior / (prior + noise)
    return h + cross * (z - h), prior - cross * prior


@equation("2.3", r"\lambda' = \lambda + \lambda^{\mathrm{obs}}")
def test_an_observation_adds_its_precision():
    prior = Belief.of(number([1.5, -2.0]), precision=number([0.3, 40.0]))
    z, observed = number([2.0, 2.0]), number([OBS, 0.02])
    after, _ = update(prior, z - prior.mean, observed.log())
    _, variance = joint_conditioned(*prior_of(prior), z, observed)
    close(after.variance, variance)
    close(after.precision, prior.precision + observed)


def prior_of(belief):
    return belief.mean, belief.precision


@equation(
    "2.4",
    r"h' = h + K\,(z - h), \qquad "
    r"K = \frac{\lambda^{\mathrm{obs}}}{\lambda + \lambda^{\mathrm{obs}}}",
)
def test_the_mean_moves_by_the_gain():
    prior = Belief.of(number([1.5, -2.0]), precision=number([0.3, 40.0]))
    z, observed = number([2.0, 2.0]), number([OBS, 0.02])
    after, k = update(prior, z - prior.mean, observed.log())
    mean, _ = joint_conditioned(*prior_of(prior), z, observed)
    close(after.mean, mean)
    close(k, observed / (prior.precision + observed))
    close(after.mean, fuse(prior, Belief(z, observed.log())).mean)


@equation(
    "2.5",
    r"K = \operatorname{sigmoid}\bigl(\log\lambda^{\mathrm{obs}} - "
    r"\log\lambda\bigr)",
)
def test_the_gain_is_a_sigmoid():
    precision = torch.logspace(-8, 8, 33, dtype=torch.float64)[:, None]
    observed = precision.T
    ratio = observed / (precision + observed)
    close(torch.sigmoid(observed.log() - precision.log()), ratio)
    close(gain(precision.log(), observed.log()), ratio)


@equation("2.6", r"\frac{1}{\lambda''} = \frac{1}{\lambda'} + Q")
def test_a_step_adds_its_variance():
    before = number([0.03, 1.3, 900.0])
    after = discount(before.log(), number(Q).log()).exp()
    for λ, found in zip(before, after, strict=True):
        # joint precision of (h', h''): prior of h' plus the step's square
        joint = torch.tensor(
            [[λ + 1 / Q, -1 / Q], [-1 / Q, 1 / Q]], dtype=torch.float64
        )
        close(1 / found, torch.linalg.inv(joint)[1, 1], 1e-10)
        close(1 / found, 1 / λ + Q)
    assert (after < before).all()
    assert (after < 1 / Q).all()


@equation("2.7", r"K_t = \frac{o}{\tau + t\,o + o} = \frac{1}{t + 1 + \tau/o}")
def test_without_process_noise_the_gain_dies():
    t = torch.arange(200).double()
    for τ in (0.9, 25.0):
        prior = Belief.of(number(4.0), precision=τ)
        path = local_level_filter(torch.sin(t), 1 / OBS, 0.0, prior)
        close(path.gain, 1 / (t + 1 + τ / OBS))
        close(path.gain, OBS / (τ + t * OBS + OBS))
    close(local_level_filter(torch.sin(t), 1 / OBS, 0.0).gain, 1 / (t + 1))


def next_precision(λ, o=OBS, q=Q):
    return 1 / (1 / (λ + o) + q)


@equation("2.8", r"\lambda^* = \frac{2\,o}{Qo + \sqrt{Q^2o^2 + 4\,Qo}}")
def test_the_fixed_point():
    for q in (1e-6, 0.7, 3e5):
        λ = steady_state_precision(number(OBS), number(q))
        close(next_precision(λ, q=q), λ, 1e-11)
        qo = q * OBS
        close(λ, number(2 * OBS / (qo + math.sqrt(qo**2 + 4 * qo))))
    # the form that cancels loses most of float32, this one does not
    q = torch.tensor(4e5)
    λ = steady_state_precision(torch.tensor(2.5), q)
    close(λ.double(), steady_state_precision(number(2.5), q.double()), 1e-6)


@equation("2.9", r"K^* = \frac{2}{1 + \sqrt{1 + \dfrac{4}{Qo}}}")
def test_the_resting_gain():
    flow = torch.cos(torch.arange(400)).double()
    for q in (0.01, 0.7, 55.0):
        path = local_level_filter(flow, 1 / OBS, q)
        close(
            path.gain[-1],
            number(2 / (1 + math.sqrt(1 + 4 / (q * OBS)))),
            1e-10,
        )
    qo = 0.77**2 / (1 - 0.77)  # the chapter reads it backwards
    assert math.isclose(2 / (1 + math.sqrt(1 + 4 / qo)), 0.77)


@equation(
    "2.10",
    r"f'(\lambda^*) = \Bigl(\frac{\lambda^*}{\lambda^* + o}\Bigr)^2 = "
    r"(1 - K^*)^2 < 1",
)
def test_the_fixed_point_is_stable():
    λ = steady_state_precision(number(OBS), number(Q)).requires_grad_()
    (slope,) = torch.autograd.grad(next_precision(λ), λ)
    fixed = λ.detach()
    close(slope, (fixed / (fixed + OBS)) ** 2)
    close(slope, (1 - OBS / (fixed + OBS)) ** 2)
    assert slope < 1
    # from every side, never past it
    for start in (0.0, 1e-9, 0.5, 3.0, 1e12):
        x = number(start)
        for _ in range(200):
            after = next_precision(x)
            assert (after - fixed) * (x - fixed) >= -1e-15
            x = after
        close(x, fixed)


def series(length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(2, length, generator=generator, dtype=torch.float64)
    return math.sqrt(Q) * steps[0].cumsum(0) + steps[1] / math.sqrt(OBS)


@equation(
    "2.11",
    r"\log p(z_1, \dots, z_T) = -\frac12 \sum_t \Bigl(\log 2\pi F_t + "
    r"\frac{e_t^2}{F_t}\Bigr), \qquad "
    r"F_t = \frac{1}{\lambda_t} + \frac{1}{o}",
)
def test_the_likelihood_is_that_of_the_joint_gaussian():
    z, τ, m = series(40), 0.2, 1.3
    t = torch.arange(40).double()
    covariance = (
        1 / τ
        + Q * torch.minimum(t[:, None], t[None, :])
        + torch.eye(40, dtype=torch.float64) / OBS
    )
    joint = MultivariateNormal(torch.full_like(z, m), covariance)
    prior = Belief.of(number(m), precision=τ)
    path = local_level_filter(z, 1 / OBS, Q, prior)
    close(path.log_likelihood.sum(), joint.log_prob(z), 1e-11)

    e = z - path.predicted.mean
    f = path.predicted.variance + 1 / OBS
    terms = -((2 * math.pi * f).log() + e**2 / f) / 2
    close(path.log_likelihood, terms, 1e-11)

    # a flat start: the density of the differences, which the start leaves
    D = torch.eye(40, dtype=torch.float64).diff(dim=0)
    covariance = Q * torch.eye(39, dtype=torch.float64) + D @ D.T / OBS
    joint = MultivariateNormal(torch.zeros(39).double(), covariance)
    path = local_level_filter(z, 1 / OBS, Q)
    close(path.log_likelihood.sum(), joint.log_prob(z.diff()), 1e-11)
    assert path.log_likelihood[0] == 0


@equation("2.12", r"\frac{1}{\lambda_{t+k}} = \frac{1}{\lambda'_t} + k\,Q")
def test_silence_costs_process_noise():
    z = series(30)
    z[10:25] = math.nan
    path = local_level_filter(z, 1 / OBS, Q)
    k = torch.arange(1, 17).double()
    close(path.predicted.variance[10:26], path.filtered.variance[9] + k * Q)
    assert (path.filtered.mean[9:25] == path.filtered.mean[9]).all()
    assert (path.gain[10:25] == 0).all()


@equation(
    "2.13",
    r"\frac{\mathrm{Var}(\text{mean of } n)}{1/(no)} = 1 + (n - 1)\,\rho",
)
def test_shared_errors_inflate_the_variance():
    for n, ρ in [(2, 0.3), (8, 0.5), (8, 1.0)]:
        # the weights with which fusing n equal beliefs averages them
        heard = torch.zeros(n, dtype=torch.float64, requires_grad=True)
        belief = Belief(heard[0], number(OBS).log())
        for j in range(1, n):
            belief = fuse(belief, Belief(heard[j], number(OBS).log()))
        (w,) = torch.autograd.grad(belief.mean, heard)
        same = torch.eye(n, dtype=torch.float64)
        covariance = (ρ + (1 - ρ) * same) / OBS
        true = w @ covariance @ w
        close(true / belief.variance, number(1 + (n - 1) * ρ), 1e-11)
