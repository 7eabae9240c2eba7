"""Pictures of a trace: what each layer saw, believed and forgot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bft_ref.layer import LayerTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

QUANTITIES = {
    "n_eff": "effective sample size n",
    "gain": "gain K",
    "log_observation_precision": "log λ_obs",
    "log_predicted_precision": "log λ after the layer",
    "weights": "attention α̃",
}
#: what :func:`trace` draws unless it is told
SHOWN = ("gain", "log_predicted_precision", "weights")
WIDTH = 6.4  # inches, of figures of the book
NAMES = 48  # that fit into that width


def by_token(trace: LayerTrace, quantity: str) -> Tensor:
    """One number a token, (B, T): the mean over heads or features.

    Of ``weights``, (B, H, T, S), what each of the S tokens is given, (B, S),
    in equal shares: one, if all that see it gave as much to all they see. The
    mean over heads and over those that see it; NaN where nobody does.
    Raises: ValueError for a quantity that is none of :data:`QUANTITIES`, and
    for weights that were not kept.
    """
    if quantity not in QUANTITIES:
        raise ValueError(
            f"quantity: expected one of {', '.join(QUANTITIES)}, got "
            f"{quantity!r}"
        )
    if quantity == "weights":
        given = attention(trace)
        sees = (given > 0).float()
        return (given * sees.sum(2, keepdim=True)).sum(1) / sees.sum(1)
    x = getattr(trace, quantity).detach().float().cpu()
    return x.mean(1) if quantity == "n_eff" else x.mean(-1)


def attention(trace: LayerTrace) -> Tensor:
    """α̃ in the mean over heads, (B, T, S): row t is what token t looks at.

    Raises: ValueError for weights that were not kept.
    """
    if trace.weights is None:
        raise ValueError(
            "quantity: 'weights' were not kept in this trace; those of "
            "BFTLayer.step and BFTEncoder.steps have them"
        )
    return trace.weights.detach().float().cpu().mean(1)


def trace(
    traces: LayerTrace | Sequence[LayerTrace],
    tokens: Sequence[str] | None = None,
    sequence: int = 0,
    quantities: Sequence[str] | None = None,
    *,
    query: int | None = None,
    layers: Sequence[int] | None = None,
) -> Figure:
    """Gain, precision and attention over the tokens of one sequence.

    Several layers: a panel for each quantity, a row of pixels for each layer;
    attention is what a token is given, as :func:`by_token` has it. One layer:
    a line for each quantity; attention is the map of who looks at whom.

    ``traces``: of :meth:`bft_ref.BFTEncoder.steps`, or the one of
    :meth:`bft_ref.BFTLayer.step`; ``tokens``: their names; ``quantities``: of
    :data:`QUANTITIES`, by default :data:`SHOWN`, attention only where it was
    kept and is of these tokens alone; ``query``: the token whose attention is
    meant, in place of the mean or the map; ``layers``: their numbers, from 1
    upwards if not given. What a token cannot say (−inf) stays empty.
    Raises: ValueError for no trace, traces of other numbers of tokens, no
    quantity, another one, one that was not kept, or names and numbers that do
    not fit.
    """
    import matplotlib.pyplot as plt

    given = [traces] if isinstance(traces, LayerTrace) else list(traces)
    rows = _rows(given, sequence, quantities, query)
    count = given[0].gain.shape[1]
    numbers = range(1, len(given) + 1) if layers is None else layers
    for name, labels, due in [
        ("tokens", tokens, count),
        ("layers", numbers, len(given)),
    ]:
        if labels is not None and len(labels) != due:
            raise ValueError(
                f"{name}: expected {due} of them, got {len(labels)}"
            )
    printable = [repr(one)[1:-1] for one in tokens or ()]
    heights = [_height(values) for values in rows.values()]
    figure, axes = plt.subplots(
        *(len(rows), 1),
        figsize=(WIDTH * max(1.0, count / NAMES), sum(heights) + 0.6),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, (name, values) in zip(axes[:, 0], rows.items(), strict=True):
        title = QUANTITIES[name]
        if name == "weights" and query is not None:
            who = printable[query] if printable else query % count
            title = f"{title} of {who}"
        elif name == "weights" and len(given) > 1:
            title = f"{title} that a token is given, in equal shares"
        ax.set_title(title, loc="left", parse_math=False)
        if values.dim() == 1:
            ax.plot(values.numpy(), marker="o")
            continue
        _pixels(ax, values)
        if len(given) > 1:
            ax.set_ylabel("layer")
            _name(ax.yaxis, [str(number) for number in numbers])
        else:
            ax.set_ylabel("token that looks")
            if tokens is not None:
                _name(ax.yaxis, printable)
    axes[-1, 0].set_xlim(-0.5, count - 0.5)
    axes[-1, 0].set_xlabel("token")
    if tokens is not None:
        _name(axes[-1, 0].xaxis, printable, rotation=90.0)
    return figure


def _rows(
    given: Sequence[LayerTrace],
    sequence: int,
    quantities: Sequence[str] | None,
    query: int | None,
) -> dict[str, Tensor]:
    """What each panel shows: (T,), (layers, T) or (T, T); NaN stays empty."""
    if not given:
        raise ValueError("traces: expected at least one, got none")
    widths = sorted({one.gain.shape[1] for one in given})
    if len(widths) > 1:
        raise ValueError(
            "traces: expected layers of one call, got some of "
            f"{' and '.join(map(str, widths))} tokens"
        )
    if quantities is None:
        square = all(
            one.weights is not None and one.weights.shape[-1] == widths[0]
            for one in given
        )
        quantities = SHOWN if square else SHOWN[:-1]
    if not quantities:
        raise ValueError("quantities: expected at least one, got none")
    rows = {}
    for name in quantities:
        if name == "weights" and query is not None:
            found = [attention(one)[sequence, query] for one in given]
        elif name == "weights" and len(given) == 1:
            found = [attention(given[0])[sequence]]
        else:
            found = [by_token(one, name)[sequence] for one in given]
        values = torch.stack(found) if len(given) > 1 else found[0]
        if values.shape[-1] != widths[0]:
            raise ValueError(
                f"quantities: expected those of {widths[0]} tokens, got "
                f"{name!r} of {values.shape[-1]}, cached ones among them"
            )
        hidden = ~values.isfinite()
        if name == "weights":
            hidden |= values == 0
        rows[name] = values.masked_fill(hidden, torch.nan)
    return rows


def _height(values: Tensor) -> float:
    """Inches of a panel, its title and its share of the space between."""
    if values.dim() == 1:
        return 1.4
    return 0.5 + min(max(0.6, 0.18 * len(values)), 4.8)


def _pixels(ax: Axes, values: Tensor) -> None:
    image = ax.imshow(values.numpy(), aspect="auto", interpolation="nearest")
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax)


def _name(axis: Axis, names: Sequence[str], rotation: float = 0.0) -> None:
    """A name for each row or column, as large as there is room for."""
    axis.set_ticks(range(len(names)), names)
    for label in axis.get_ticklabels():
        label.set(
            fontsize=min(11.0, 300 / len(names)),
            rotation=rotation,
            parse_math=False,
        )
