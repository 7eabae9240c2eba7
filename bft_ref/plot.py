"""Pictures of a trace: what each layer saw, believed and forgot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bft_ref.layer import LayerTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTITIES = {
    "n_eff": "effective sample size n",
    "gain": "gain K",
    "log_observation_precision": "log λ_obs",
    "log_predicted_precision": "log λ after the layer",
}


def by_token(trace: LayerTrace, quantity: str) -> Tensor:
    """One number a token, (B, T): the mean over heads or features.

    Raises: ValueError for a quantity that is none of :data:`QUANTITIES`.
    """
    if quantity not in QUANTITIES:
        raise ValueError(
            f"quantity: expected one of {', '.join(QUANTITIES)}, got "
            f"{quantity!r}"
        )
    x = getattr(trace, quantity).detach().float().cpu()
    return x.mean(1) if quantity == "n_eff" else x.mean(-1)


def trace(
    traces: Sequence[LayerTrace],
    tokens: Sequence[str] | None = None,
    sequence: int = 0,
    quantities: Sequence[str] = tuple(QUANTITIES),
) -> Figure:
    """A row of pixels for each layer, a column for each token, a panel each.

    ``traces``: of :meth:`bft_ref.BFTEncoder.steps`, or one of
    :meth:`bft_ref.BFTLayer.step` in a list; ``tokens``: their names, for one
    sequence of the batch. What a token cannot say (−inf) stays empty.
    Raises: TypeError for a trace that is in no list; ValueError for no trace,
    traces of other numbers of tokens, no quantity, another one, or names that
    do not fit.
    """
    import matplotlib.pyplot as plt

    if isinstance(traces, LayerTrace):
        raise TypeError("traces: expected a list of them, got one: [trace]")
    for given, what in [("traces", traces), ("quantities", quantities)]:
        if not what:
            raise ValueError(f"{given}: expected at least one, got none")
    widths = sorted({one.gain.shape[1] for one in traces})
    if len(widths) > 1:
        raise ValueError(
            "traces: expected layers of one call, got some of "
            f"{' and '.join(map(str, widths))} tokens"
        )
    rows = {
        name: torch.stack([by_token(one, name)[sequence] for one in traces])
        for name in quantities
    }
    (count,) = widths
    if tokens is not None and len(tokens) != count:
        raise ValueError(f"tokens: expected {count} names, got {len(tokens)}")
    figure, axes = plt.subplots(
        len(rows),
        1,
        figsize=(
            max(4.0, 0.35 * count + 2),
            0.6 * len(rows) * len(traces) + 1,
        ),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, (name, values) in zip(axes[:, 0], rows.items(), strict=True):
        shown = values.masked_fill(~values.isfinite(), torch.nan)
        image = ax.imshow(shown.numpy(), aspect="auto", cmap="viridis")
        ax.set_title(QUANTITIES[name], loc="left", fontsize="medium")
        ax.set_yticks(range(len(traces)), range(1, len(traces) + 1))
        ax.set_ylabel("layer")
        figure.colorbar(image, ax=ax)
    if tokens is not None:
        axes[-1, 0].set_xticks(range(count), tokens, rotation=60, ha="right")
    else:
        axes[-1, 0].set_xlabel("token")
    return figure
