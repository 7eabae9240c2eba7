"""The same numbers sooner. What is chosen, is chosen in :func:`steps`."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from bft_ref import delta
from bft_ref.fast.attention import Implementation, attend
from bft_ref.fast.feed_forward import feed_forward_jacobian
from bft_ref.fast.norm import normalise
from bft_ref.kriging import AttentionMoments


class Steps(NamedTuple):
    """The three functions of a layer that can be had in more than one way."""

    attend: Callable[..., AttentionMoments]
    normalise: Callable[..., delta.Normalised]
    feed_forward_jacobian: Callable[..., tuple[Tensor, Tensor]]


def steps(implementation: Implementation) -> Steps:
    """Those of the readable modules for ``eager``, else the fast ones."""
    if implementation == "eager":
        return Steps(attend, delta.normalise, delta.feed_forward_jacobian)
    return Steps(attend, normalise, feed_forward_jacobian)
