"""The same numbers sooner. What is chosen, is chosen in :func:`steps`."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from bft_ref import delta, kalman, reml
from bft_ref.belief import Belief
from bft_ref.config import Implementation
from bft_ref.fast.algebra import (
    log_precision,
    observation_variance,
    predict,
    update,
)
from bft_ref.fast.attention import attend
from bft_ref.fast.feed_forward import feed_forward_growth
from bft_ref.fast.norm import normalise
from bft_ref.kriging import AttentionMoments


class Steps(NamedTuple):
    """What a layer computes in more than one way, always the same numbers."""

    attend: Callable[..., AttentionMoments]
    normalise: Callable[..., delta.Normalised]
    observation_variance: Callable[..., Tensor]
    log_precision: Callable[..., Tensor]
    update: Callable[..., tuple[Belief, Tensor]]
    feed_forward_growth: Callable[..., tuple[Tensor, Tensor]]
    predict: Callable[..., Tensor]


def steps(implementation: Implementation) -> Steps:
    """Those of the readable modules for ``eager``, else the fast ones.

    :func:`attend` is both: it calls the readable one if it is asked to.
    """
    if implementation == "eager":
        return Steps(
            attend,
            delta.normalise,
            reml.observation_variance,
            reml.log_precision,
            kalman.update,
            delta.feed_forward_growth,
            delta.predict,
        )
    return Steps(
        attend,
        normalise,
        observation_variance,
        log_precision,
        update,
        feed_forward_growth,
        predict,
    )
