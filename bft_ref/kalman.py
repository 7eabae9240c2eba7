"""The Kalman gain and update, and the scalar filter they come from."""

from typing import NamedTuple

import torch
from torch import Tensor

from bft_ref import checks
from bft_ref.belief import Belief, discount, wide


def gain(log_precision: Tensor, log_observation_precision: Tensor) -> Tensor:
    """Kalman gain K = λ_obs/(λ + λ_obs) = sigmoid(log λ_obs − log λ).

    Shapes: broadcast. K has no unit; it lies in (0, 1) in exact arithmetic
    and in [0, 1] in floating point; λ_obs = 0 (log: -inf) gives K = 0. One of
    the two must be finite: a gain between nothing and nothing is NaN. In
    float32 or wider, whatever the dtypes.

    Equations (2.5), (6.3); the update of the paper.
    """
    return torch.sigmoid(wide(log_observation_precision) - wide(log_precision))


def update(
    belief: Belief, innovation: Tensor, log_observation_precision: Tensor
) -> tuple[Belief, Tensor]:
    """The belief after an observation, and the gain it was weighted with.

    h' = h + K∘e and λ' = λ + λ_obs. A filter's innovation is e = z − h; a
    Transformer layer reads what attention adds as e and never subtracts h.

    Shapes: ``innovation`` as ``belief.mean``, (..., d), in state units;
    ``log_observation_precision`` (..., d) or (..., 1), -inf where there is
    no information. The mean has the wider dtype of mean and innovation; log
    precision and gain are float32 or wider. Raises: TypeError for a mean that
    is no float; ValueError for shapes that do not fit.
    Equations (2.3), (2.4) and (6.4).
    """
    checks.floating("mean", belief.mean)
    checks.broadcastable("innovation", innovation, "mean", belief.mean)
    k = gain(belief.log_precision, log_observation_precision)
    dtype = torch.promote_types(belief.mean.dtype, innovation.dtype)
    mean = belief.mean + k.to(dtype) * innovation
    log_precision = torch.logaddexp(
        wide(belief.log_precision), wide(log_observation_precision)
    )
    return Belief(mean, log_precision), k


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
    dtype = torch.promote_types(wide(o).dtype, q.dtype)
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
    dtype = wide(checks.floating("observations", observations)).dtype
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
