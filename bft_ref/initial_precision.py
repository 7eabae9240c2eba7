"""Where precision comes from: τ, the precision before the first layer."""

import math
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from bft_ref.support import checks
from bft_ref.support.numerics import at_least_float32, autocast_device

Source = Literal["item", "mlp", "unit", "frequency", "shuffled"]


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


class InitialPrecision(nn.Module):
    """log τ of each token, from its item: learned, or fixed.

    source: ``item``, an :class:`ItemPrecision`; ``mlp``, an
    :class:`MLPPrecision` on the embedding, so that items share what they
    learn; ``unit``, ``initial`` for all; ``frequency``, fixed at
    τ_i = initial · (f_i + 1)^power over its geometric mean, f the training
    frequency; ``shuffled``, those same values dealt to the items at random: a
    control that keeps the distribution of τ and destroys its meaning.

    Shapes: ids (B, T), embeddings (B, T, d) → log τ (B, T, 1), log 1/state².
    Items beyond the end of ``frequency`` have ``initial``.
    Raises: ValueError for another source, or a missing or bad frequency.
    """

    log_tau: Tensor

    def __init__(
        self,
        source: Source,
        num_items: int,
        d_model: int,
        *,
        frequency: ArrayLike | None = None,
        power: float = -0.125,
        initial: float = 1.0,
    ):
        super().__init__()
        checks.choice("source", source, get_args(Source))
        checks.number("initial", initial, 0.0)
        self.source = source
        self.learned: ItemPrecision | MLPPrecision
        if source == "item":
            self.learned = ItemPrecision(num_items, initial=initial)
        elif source == "mlp":
            self.learned = MLPPrecision(d_model, initial=initial)
        else:
            log_tau = torch.full((num_items,), math.log(initial))
            if source != "unit":
                relative = _by_frequency(source, frequency, num_items, power)
                log_tau[1 : 1 + len(relative)] += relative
            self.register_buffer("log_tau", log_tau)

    def forward(self, ids: Tensor, embedding: Tensor) -> Tensor:
        if self.source == "item":
            return self.learned(ids)
        if self.source == "mlp":
            return self.learned(embedding)
        return self.log_tau[ids].unsqueeze(-1)

    @torch.no_grad()
    def of_items(self, embedding: Tensor) -> Tensor:
        """log τ of every row of the embedding table, (num_items,)."""
        ids = torch.arange(len(embedding), device=embedding.device)
        return self(ids, embedding).squeeze(-1)


def _by_frequency(
    source: Source, frequency: ArrayLike | None, num_items: int, power: float
) -> Tensor:
    """log τ of each item but padding, of mean 0."""
    if frequency is None:
        raise ValueError(
            f"frequency: expected counts (n_items + 1,) for tau={source!r}, "
            "got none"
        )
    count = np.log1p(counts(frequency, num_items)[1:])
    relative = power * (count - count.mean())
    if source == "shuffled":
        relative = np.random.default_rng(0).permutation(relative)
    return torch.as_tensor(relative, dtype=torch.get_default_dtype())


def counts(
    frequency: ArrayLike, most: int, least: int = 2
) -> NDArray[np.float64]:
    """Checked training frequencies: of padding, then of each item.

    Raises: TypeError for what are no numbers; ValueError unless there are
    ``least`` to ``most``, and for a count that is negative or not finite.
    """
    found = np.asarray(frequency)
    if found.ndim != 1 or not least <= len(found) <= most:
        raise ValueError(
            f"frequency: expected shape ({most},), of padding and then of "
            f"each item; got {found.shape}"
        )
    if found.dtype.kind not in "iuf":
        raise TypeError(f"frequency: expected numbers, got {found.dtype}")
    found = found.astype(np.float64)
    bad = np.flatnonzero(~((found >= 0) & (found < np.inf)))
    if len(bad):
        raise ValueError(
            f"frequency: expected finite counts >= 0, got "
            f"{found[bad[0]]:g} for item {bad[0]}"
        )
    return found
