"""Where the precision at layer 0 comes from."""

from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from bft_ref.initial_precision import ItemPrecision, MLPPrecision
from bft_ref.support import checks

Source = Literal["item", "mlp", "unit", "frequency", "shuffled"]
SOURCES: tuple[Source, ...] = get_args(Source)


class InitialPrecision(nn.Module):
    """log τ of each token, from its item.

    source: ``item``, learned per item, starting at log ``start``; ``mlp``, a
    small network on the embedding (so that items share what they learn);
    ``unit``, ``start`` for all; ``frequency``, fixed at τ_i = start ·
    (f_i + 1)^power over its geometric mean, f the training frequency;
    ``shuffled``, those same values dealt to the items at random: a control
    that keeps the distribution of τ and destroys its meaning.

    Shapes: ids (B, T), embeddings (B, T, d) → log τ (B, T, 1), log 1/state².
    Items beyond the end of ``frequency`` have ``start``.
    Raises: ValueError for another source, or a missing or bad frequency.
    """

    log_tau: Tensor

    def __init__(
        self,
        source: str,
        rows: int,
        d: int,
        *,
        frequency=None,
        power: float = -0.125,
        start: float = 1.0,
    ):
        super().__init__()
        checks.choice("tau", source, SOURCES)
        checks.number("tau_start", start, 0.0)
        self.source = source
        log_tau = torch.full((rows,), float(np.log(start)))
        if source in ("frequency", "shuffled"):
            if frequency is None:
                raise ValueError(
                    f"frequency: expected counts (n_items + 1,) for "
                    f"tau={source!r}, got none"
                )
            count = np.log1p(counts(frequency, rows)[1:])
            relative = power * (count - count.mean())
            if source == "shuffled":
                relative = np.random.default_rng(0).permutation(relative)
            log_tau[1 : 1 + len(relative)] += torch.as_tensor(
                relative, dtype=log_tau.dtype
            )
        self.learned: ItemPrecision | MLPPrecision
        if source == "item":
            self.learned = ItemPrecision(rows, initial=start)
        elif source == "mlp":
            self.learned = MLPPrecision(d, initial=start)
        else:
            self.register_buffer("log_tau", log_tau)

    def forward(self, ids: Tensor, embedding: Tensor) -> Tensor:
        if self.source == "item":
            return self.learned(ids)
        if self.source == "mlp":
            return self.learned(embedding)
        return self.log_tau[ids].unsqueeze(-1)

    @torch.no_grad()
    def of_items(self, embedding: Tensor) -> Tensor:
        """log τ of every row of the embedding table, (rows,)."""
        ids = torch.arange(len(embedding), device=embedding.device)
        return self(ids, embedding).squeeze(-1)


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
