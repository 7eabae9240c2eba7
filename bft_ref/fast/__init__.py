"""The same numbers sooner. What is chosen, is chosen in :func:`steps`."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from bft_ref import delta, kalman
from bft_ref.belief import Belief
from bft_ref.fast.algebra import predict, update
from bft_ref.fast.attention import Implementation, attend
from bft_ref.fast.feed_forward import feed_forward_growth
from bft_ref.fast.norm import normalise
from bft_ref.kriging import AttentionMoments


class Steps(NamedTuple):
    """What a layer computes in more than one way, always the same numbers."""

    attend: Callable[..., AttentionMoments]
    normalise: Callable[..., delta.Normalised]
    update: Callable[..., tuple[Belief, Tensor]]
    feed_forward_growth: Callable[..., tuple[Tensor, Tensor]]
    predict: Callable[..., Tensor]


def steps(implementation: Implementation) -> Steps:
    """Those of the readable modules for ``eager``, else the fast ones."""
    if implementation == "eager":
        return Steps(
            attend,
            delta.normalise,
            kalman.update,
            delta.feed_forward_growth,
            delta.predict,
        )
    return Steps(attend, normalise, update, feed_forward_growth, predict)
