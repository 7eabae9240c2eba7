"""The Kalman gain and update."""

import torch
from torch import Tensor

from bft_ref.belief import Belief
from bft_ref.support import checks
from bft_ref.support.numerics import at_least_float32


def gain(log_precision: Tensor, log_observation_precision: Tensor) -> Tensor:
    """Kalman gain K = λ_obs/(λ + λ_obs) = sigmoid(log λ_obs − log λ).

    Shapes: broadcast. K has no unit; it lies in (0, 1) in exact arithmetic
    and in [0, 1] in floating point; λ_obs = 0 (log: -inf) gives K = 0. One of
    the two must be finite: a gain between nothing and nothing is NaN. In
    float32 or wider, whatever the dtypes.

    Equations (2.5), (6.3); the update of the paper.
    """
    observed = at_least_float32(log_observation_precision)
    return torch.sigmoid(observed - at_least_float32(log_precision))


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
        at_least_float32(belief.log_precision),
        at_least_float32(log_observation_precision),
    )
    return Belief(mean, log_precision), k
