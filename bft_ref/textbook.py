"""What only chapters use: kriging of a field, and the local level filter."""

from typing import NamedTuple

import torch
from torch import Tensor

from bft_ref.belief import Belief, discount
from bft_ref.kalman import update
from bft_ref.support import checks
from bft_ref.support.numerics import at_least_float32


class KrigingPrediction(NamedTuple):
    """What kriging says at m points: all fields (m,), ``weights`` (m, n).

    ``mean`` in units of the values, ``variance`` (of the error of predicting
    a new value) in their square; ``multiplier`` is the Lagrange multiplier
    of ordinary kriging, zero for simple kriging.
    """

    mean: Tensor
    variance: Tensor
    weights: Tensor
    multiplier: Tensor


def _kriging_input(
    covariance: Tensor,
    cross_covariance: Tensor,
    values: Tensor,
    point_variance: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Cholesky factor of the checked covariance, and c₀ as a tensor."""
    checks.finite("values", values)
    checks.shape("values", values, ["n"])
    n = len(values)
    if n == 0:
        raise ValueError("values: expected at least one, got none")
    checks.finite("covariance", covariance)
    checks.shape("covariance", covariance, [n, n])
    checks.finite("cross_covariance", cross_covariance)
    checks.shape("cross_covariance", cross_covariance, ["m", n])
    for name, x in [
        ("covariance", covariance),
        ("cross_covariance", cross_covariance),
    ]:
        if x.dtype != values.dtype:
            raise TypeError(
                f"{name}: expected {values.dtype} as the values, got {x.dtype}"
            )
    if not torch.allclose(covariance, covariance.mT):
        raise ValueError("covariance: expected a symmetric matrix")
    c0 = torch.as_tensor(
        point_variance, dtype=values.dtype, device=values.device
    )
    checks.not_negative("point_variance", c0)
    if c0.dim() > 0:
        checks.shape("point_variance", c0, [len(cross_covariance)])
    factor, info = torch.linalg.cholesky_ex(covariance)
    if info.any():
        raise ValueError(
            "covariance: expected a positive definite matrix, got one whose "
            f"leading minor of order {int(info)} is not positive (are two "
            "points the same?)"
        )
    return factor, c0


def simple_kriging(
    covariance: Tensor,
    cross_covariance: Tensor,
    values: Tensor,
    mean: float | Tensor,
    point_variance: float | Tensor,
) -> KrigingPrediction:
    """The best linear prediction when the mean of the field is known.

    w = C⁻¹c, prediction m + wᵀ(v − m), variance c₀ − cᵀC⁻¹c.

    Shapes: ``covariance`` C (n, n) of the observed values;
    ``cross_covariance`` c (m, n) with the points asked for; ``values`` (n,);
    ``mean`` a scalar; ``point_variance`` c₀ = Var of the value predicted,
    scalar or (m,).
    Units: values, and values² for covariances.
    Raises: TypeError for dtypes that differ; ValueError for wrong shapes,
    NaN, a negative variance, a covariance that is not symmetric and positive
    definite. Equations (3.2), (3.3).
    """
    factor, c0 = _kriging_input(
        covariance, cross_covariance, values, point_variance
    )
    known = torch.as_tensor(mean, dtype=values.dtype, device=values.device)
    checks.shape("mean", checks.finite("mean", known), [])
    weights = torch.cholesky_solve(cross_covariance.mT, factor).mT
    prediction = mean + weights @ (values - mean)
    variance = c0 - (weights * cross_covariance).sum(-1)
    return KrigingPrediction(
        prediction, variance, weights, torch.zeros_like(prediction)
    )


def ordinary_kriging(
    covariance: Tensor,
    cross_covariance: Tensor,
    values: Tensor,
    point_variance: float | Tensor,
) -> KrigingPrediction:
    """The best linear unbiased prediction when the mean is unknown.

    Minimises the error variance under Σw = 1; ψ is the multiplier of that
    constraint: w = C⁻¹(c + ψ1), ψ = (1 − 1ᵀC⁻¹c)/(1ᵀC⁻¹1), and the variance
    is c₀ − wᵀc + ψ.

    Shapes, units, errors: as :func:`simple_kriging`, without the mean.
    Equations (3.6)–(3.8).
    """
    factor, c0 = _kriging_input(
        covariance, cross_covariance, values, point_variance
    )
    ones = torch.ones_like(values)
    solved = torch.cholesky_solve(cross_covariance.mT, factor).mT
    solved_ones = torch.cholesky_solve(ones[:, None], factor).squeeze(-1)
    multiplier = (1 - solved @ ones) / solved_ones.sum()
    weights = solved + multiplier[:, None] * solved_ones
    variance = c0 - (weights * cross_covariance).sum(-1) + multiplier
    return KrigingPrediction(weights @ values, variance, weights, multiplier)


def steady_state_precision(
    observation_precision: Tensor, process_noise: Tensor
) -> Tensor:
    """The fixed point λ* of λ → 1/(1/(λ + o) + Q), in 1/state².

    λ* = 2o/(Qo + √(Q²o² + 4Qo)), the form that does not cancel, as
    √(o/Q)/(k + √(k² + 1)) with k = √(Qo)/2, of which no part leaves the range
    of floats before λ* does. Globally stable, with multiplier (λ*/(λ* + o))².

    Shapes: broadcast; the result is float32 or wider. Raises: ValueError
    unless o > 0 and Q > 0; TypeError unless both are floating tensors.
    Equations (2.8), (2.10), (8.8) and (8.11).
    """
    o = checks.positive("observation_precision", observation_precision)
    q = checks.positive("process_noise", process_noise)
    dtype = torch.promote_types(at_least_float32(o).dtype, q.dtype)
    o, q = o.to(dtype).sqrt(), q.to(dtype).sqrt()
    half = o * q / 2
    return o / q / (half + torch.hypot(half, torch.ones_like(half)))


class FilteredPath(NamedTuple):
    """A filtered series of length T; every field has shape (T,).

    ``predicted`` is the belief before the observation of that time,
    ``filtered`` after it; ``log_likelihood`` holds the terms of the
    prediction-error decomposition (0 where the observation is missing).
    """

    predicted: Belief
    filtered: Belief
    gain: Tensor
    log_likelihood: Tensor


def local_level_filter(
    observations: Tensor,
    observation_variance: float | Tensor,
    level_variance: float | Tensor,
    prior: Belief | None = None,
) -> FilteredPath:
    """Kalman filter of the local level model, in mean/precision form.

    z_t = h_t + noise of variance 1/o, h_{t+1} = h_t + noise of variance Q.
    NaN in ``observations`` is a missing value: the belief is only discounted.

    Shapes: ``observations`` (T,). Units: variances in observation². The
    ``prior`` has scalar mean and log precision; None is the exact diffuse
    prior, λ = 0, whose first term leaves the likelihood. The recursion runs
    in float64, since rounding would add up over a long series; the results
    are float32 or wider, as the observations are.

    Raises: TypeError unless ``observations`` is a floating tensor; ValueError
    for an empty series, infinity, variances that are no single numbers or
    not positive (``level_variance`` may be 0), or a prior that is no single
    belief. Equations (2.3) to (2.6) and (2.11).
    """
    dtype = at_least_float32(
        checks.floating("observations", observations)
    ).dtype
    checks.shape("observations", observations, ["T"])
    z = observations.double()
    if len(z) == 0:
        raise ValueError("observations: expected at least one, got none")
    if z.isinf().any():
        raise ValueError("observations: expected numbers or NaN, got infinity")
    r = torch.as_tensor(observation_variance, dtype=z.dtype, device=z.device)
    q = torch.as_tensor(level_variance, dtype=z.dtype, device=z.device)
    checks.shape("observation_variance", r, [])
    checks.shape("level_variance", q, [])
    log_o = -checks.positive("observation_variance", r).log()
    log_q = checks.not_negative("level_variance", q).log()
    if prior is None:
        prior = Belief(z.new_zeros(()), z.new_full((), -torch.inf))
    m, log = (x.to(z) for x in prior)
    checks.shape("prior mean", checks.finite("prior mean", m), [])
    checks.shape("prior log_precision", log, [])
    if not log < torch.inf:
        raise ValueError(
            f"prior log_precision: expected a number or -inf, got {log.item()}"
        )
    belief, rows = Belief(m, log), []
    log_2pi = torch.log(2 * z.new_tensor(torch.pi))
    for z_t in z:
        filtered, k, term = belief, z.new_zeros(()), z.new_zeros(())
        if not z_t.isnan():
            innovation = z_t - belief.mean
            filtered, k = update(belief, innovation, log_o)
            if belief.log_precision > -torch.inf:
                log_f = -discount(belief.log_precision, -log_o)  # Var z_t
                scaled = innovation**2 * (-log_f).exp()
                term = -0.5 * (log_2pi + log_f + scaled)
        rows.append((*belief, *filtered, k, term))
        belief = filtered
        if filtered.log_precision > -torch.inf:  # else NaN in Hessians
            log_precision = discount(filtered.log_precision, log_q)
            belief = Belief(filtered.mean, log_precision)
    m0, l0, m1, l1, k, log_p = (
        torch.stack(column).to(dtype) for column in zip(*rows, strict=True)
    )
    return FilteredPath(Belief(m0, l0), Belief(m1, l1), k, log_p)
