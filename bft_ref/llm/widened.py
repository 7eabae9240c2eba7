"""A belief as one tensor, which is all that a Llama's layers hand on.

transformers passes one hidden state from layer to layer, recomputes it under
gradient checkpointing and moves it between devices. So log λ travels beside
h as more features of it, and beside the keys in the cache.
"""

import torch
from torch import Tensor

from bft_ref.belief import Belief
from bft_ref.support.numerics import at_least_float32


def columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A number of float32 in features of ``dtype``: itself, or two halves.

    The second half holds what rounding to 16 bits loses of the first.

    Shapes: (..., n) → (..., n) or (..., 2n).
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return x.to(dtype)
    high = x.to(dtype)
    low = (x - high).nan_to_num(0.0, 0.0, 0.0).to(dtype)
    return torch.cat([high, low], -1)


def numbers(x: Tensor) -> Tensor:
    """What :func:`columns` was given."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return at_least_float32(x)
    high, low = at_least_float32(x).chunk(2, -1)
    return high + low


def widen(belief: Belief) -> Tensor:
    """[h, log λ], (..., d + n or d + 2n)."""
    log = columns(belief.log_precision, belief.mean.dtype)
    return torch.cat([belief.mean, log], -1)


def narrow(x: Tensor, d_model: int) -> Belief:
    """What :func:`widen` was given."""
    return Belief(x[..., :d_model], numbers(x[..., d_model:]))
