"""Where precision comes from: τ, the precision before the first layer."""

import math

import torch
from torch import Tensor, nn

from bft_ref.support import checks
from bft_ref.support.numerics import at_least_float32, autocast_device


class ItemPrecision(nn.Module):
    """A learned precision τ per item: an embedding of log τ.

    Shapes: ``forward(items)`` with integer items (B, T) → log τ (B, T, d),
    d = ``features`` (1: one per item). All start at ``initial`` > 0, in
    1/state². Adds n_items·d parameters: 1/d of an embedding table if d = 1.
    Equation (12.5); the paper.
    """

    def __init__(
        self, num_items: int, features: int = 1, initial: float = 1.0
    ):
        super().__init__()
        checks.number("initial", initial, 0.0)
        self.log_precision = nn.Embedding(num_items, features)
        nn.init.constant_(self.log_precision.weight, math.log(initial))

    def forward(self, items: Tensor) -> Tensor:
        return at_least_float32(self.log_precision(items))


class MLPPrecision(nn.Module):
    """log τ from the embedding by a small MLP, d → hidden → features.

    Shapes: ``forward(h)``, h (B, T, d) → (B, T, features), in float32 or
    wider also under autocast. The last layer starts at zero, so that every τ
    starts at ``initial``.
    Equation (12.6); the paper names the MLP, its shape is ours.
    """

    def __init__(
        self,
        d_model: int,
        features: int = 1,
        hidden: int = 16,
        initial: float = 1.0,
    ):
        super().__init__()
        checks.number("initial", initial, 0.0)
        first, last = nn.Linear(d_model, hidden), nn.Linear(hidden, features)
        self.layers = nn.Sequential(first, nn.GELU(), last)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, math.log(initial))

    def forward(self, h: Tensor) -> Tensor:
        with torch.autocast(autocast_device(h), enabled=False):
            kind = next(self.parameters()).dtype
            return at_least_float32(self.layers(h.to(kind)))
