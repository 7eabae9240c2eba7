"""How noisy was it? REML, its inverse-χ² prior, and the sandwich.

A row of kriging weights has seen n effective values with dispersion D. The
variance behind them gets a scaled inverse-χ² posterior; from it comes the
variance of what attention hands on.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from bft_ref.support import checks
from bft_ref.support.numerics import at_least_float32, log_mean_exp

Reading = Literal["prediction", "mean", "value"]
READINGS: tuple[Reading, ...] = get_args(Reading)
Estimator = Literal["sandwich", "pooled"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def reml_variance(dispersion: Tensor, n_eff: Tensor) -> Tensor:
    """σ̂² = nD/(n − 1), the restricted maximum likelihood estimate.

    Unbiased when the values share one variance. One effective value says
    nothing about a variance: n ≤ 1 gives infinity.

    Shapes: broadcast; ``dispersion`` in value². Equation (4.8); ours.
    """
    d, n = at_least_float32(dispersion), at_least_float32(n_eff)
    enough = n > 1
    estimate = n * d / torch.where(enough, n - 1, 1.0)
    return torch.where(enough, estimate, torch.inf)


def neighbour_variance(
    log_precision: Tensor, scale: Tensor | None = None
) -> Tensor:
    """c_j = mean_k 1/λ_jk, over ς_j² where values come through a norm.

    Kept e⁸ away from the smallest and the largest number of its dtype (in
    float32: e⁻⁷⁹ to e⁸⁰), so that what is made of c, and its gradient, stays
    one.

    Shapes: ``log_precision`` (..., T, d or 1), ``scale`` ς (..., T, 1) →
    (..., T). Units: state², none behind a norm. Equation (5.12), which takes
    one variance for all features; exact is (5.13). Ours.
    """
    log = log_mean_exp(-at_least_float32(log_precision))
    if scale is not None:
        log = log - 2 * at_least_float32(scale).log()
    info = torch.finfo(log.dtype)
    lowest, highest = math.log(info.tiny) + 8, math.log(info.max) - 8
    return log.clamp(lowest, highest).exp().squeeze(-1)


def _at_least_one(n_eff: Tensor) -> Tensor:
    """n, or 1 for an empty row; the slope at n = 1 is that of n.

    That of ``clamp`` at its own bound is 1 in some versions, 0 in others.
    """
    n = at_least_float32(n_eff)
    return torch.where(n < 1, 1.0, n)


def posterior_scale(
    dispersion: Tensor,
    n_eff: Tensor,
    prior_scale: Tensor,
    prior_dof: float = 1.0,
) -> Tensor:
    """s² = (ν₀s₀² + nD)/(ν₀ + n − 1), the posterior scale of the variance.

    σ² ~ Scaled-Inv-χ²(ν₀, s₀²) before, (ν₀ + n − 1, s²) after, so that
    E[1/σ²] = 1/s² exactly. With n = 1 it is the prior scale; an empty row
    (n = 0) is treated likewise.

    Shapes: broadcast. Units: value². Raises: ValueError unless ν₀ > 0.
    Equation (5.6); the prior is the paper's, ν₀ = 1 ours.
    """
    checks.number("prior_dof", prior_dof, 0.0)
    d, n, s0 = (
        at_least_float32(dispersion),
        _at_least_one(n_eff),
        at_least_float32(prior_scale),
    )
    dof = prior_dof + n - 1
    return prior_dof / dof * s0 + n / dof * d


def observation_variance(
    dispersion: Tensor,
    n_eff: Tensor,
    prior_scale: Tensor,
    prior_dof: float = 1.0,
    reading: Reading = "prediction",
) -> Tensor:
    """1/λ^μ: the variance of what attention saw, in one of three readings.

    ``prediction``: s²(n + 1)/n, one more value around the local mean, as
    kriging predicts it; ``mean``: s²/n, the local mean itself; ``value``:
    s², one value around a known mean. 1/variance is the posterior mean of a
    conditional precision, not the precision of the Student-t marginal.

    Shapes: broadcast. Units: value², > 0.
    Raises: ValueError for another reading or ν₀ ≤ 0.
    Equations (5.8)–(5.10); the paper leaves the reading open, so it is ours.
    """
    checks.choice("reading", reading, READINGS)
    s2 = posterior_scale(dispersion, n_eff, prior_scale, prior_dof)
    n = _at_least_one(n_eff)
    if reading == "prediction":
        s2 = s2 * ((n + 1) / n)
    elif reading == "mean":
        s2 = s2 / n
    return s2.clamp(min=torch.finfo(s2.dtype).tiny)


def log_precision(variance: Tensor) -> Tensor:
    """−log of a variance, at least the smallest number of its dtype."""
    return -variance.clamp(min=torch.finfo(variance.dtype).tiny).log()


def precision_weights(
    weights: Tensor, log_token_precision: Tensor, visible: Tensor | None = None
) -> Tensor:
    """a^λ = a λ̄_j / mean of the visible λ̄, for weights of any sum or sign.

    Equal precisions give back ``weights``.

    Shapes: ``weights`` (..., T, S); ``log_token_precision`` (..., S);
    ``visible`` broadcasts to (..., T, S), True where a key may be seen.
    Equation (11.7); our choice.
    """
    checks.finite("log_token_precision", log_token_precision)
    log = at_least_float32(log_token_precision).unsqueeze(-2)
    if visible is None:
        log_mean = log.logsumexp(-1, True) - math.log(log.shape[-1])
        return weights * (log - log_mean).exp()
    lowest = torch.finfo(log.dtype).min
    count = visible.sum(-1, keepdim=True).clamp(min=1).to(log.dtype)
    seen = torch.where(visible, log, lowest)
    log_mean = seen.logsumexp(-1, True) - count.log()
    ratio = torch.where(visible, log - log_mean, 0.0).exp()
    return torch.where(visible, weights * ratio, 0.0)


def unnormalised_variance(
    weights: Tensor,
    values: Tensor,
    prior_scale: Tensor,
    prior_dof: float = 1.0,
    estimator: Estimator = "sandwich",
) -> tuple[Tensor, Tensor]:
    """Var of o = Σ_j a_j v_j for weights that need not sum to one.

    ``sandwich``: squared weights throughout, as White's estimator has them:
    V = Σa²v²/Σa² − (Σa²v/Σa²)², n_u = (Σa²)²/Σa⁴. ``pooled``: p = |a|/Σ|a|,
    D over p, n = 1/Σp². Both: posterior scale s², Var o = s²Σa². No weight is
    no information: such rows say so in the second result.

    Shapes: ``weights`` (..., T, S), finite; ``values`` (..., S, d);
    ``prior_scale`` broadcasts to (..., T, d) → variance (..., T, d) in
    value², and informative (..., T, 1), boolean.
    Raises: ValueError for another estimator, no value at all, NaN or
    infinity.
    Equations (11.9)–(11.11); the paper names the sandwich, formulas are ours.
    """
    checks.choice("estimator", estimator, ESTIMATORS)
    a, v = (
        at_least_float32(weights),
        at_least_float32(checks.finite("values", values)),
    )
    if v.shape[-2] == 0:
        raise ValueError("values: expected at least one, got none")
    # Everything but Σa² is free of the scale of a: divide by the largest, so
    # that a⁴ neither under- nor overflows.
    peak = a.detach().abs().amax(-1, keepdim=True)
    checks.finite("weights", peak)
    informative = peak > 0
    a = a / torch.where(informative, peak, 1.0)
    p = a.square() if estimator == "sandwich" else a.abs()
    total = p.sum(-1, keepdim=True)
    p = p / torch.where(informative, total, 1.0)
    squares = p.square().sum(-1, keepdim=True)
    n = 1 / torch.where(informative, squares, 1.0)
    # any constant may be taken off before squaring
    centre = v[..., :1, :].detach()
    u = v - centre
    spread = (p @ u.square() - (p @ u).square()).clamp(min=0.0)
    s2 = posterior_scale(spread, n, prior_scale, prior_dof)
    power = a.square().sum(-1, keepdim=True) * peak.square()
    variance = s2 * power
    tiny = torch.finfo(variance.dtype).tiny
    return variance.clamp(min=tiny), informative
