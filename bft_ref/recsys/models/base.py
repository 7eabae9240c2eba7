"""What the three recommenders share: configuration, embedding, scores."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from bft_ref.initial_precision import InitialPrecision, Source, counts
from bft_ref.layer import LayerTrace
from bft_ref.recsys.models.heads import Head, HeadKind
from bft_ref.recsys.models.padding import Rows, on_the_right
from bft_ref.recsys.models.top import Top, top_items
from bft_ref.support import checks

#: names of logs of precisions, and of what stands in their place
PRECISIONS = ("tau.", "log_process_noise", "gate.scale", "head.log_")


@dataclass(frozen=True)
class RecommenderConfig:
    """What the configuration of every recommender has.

    Raises: TypeError for a field of another type; ValueError for values that
    do not fit or that nothing would read, each naming the field.
    """

    #: what the model is called on the command line and in results
    model = ""

    n_items: int  # Size of the catalogue.
    d_model: int = 64  # Width of the state.
    num_layers: int = 2  # Layers.
    nhead: int = 2  # Attention heads.
    max_length: int = 20  # Last items visible.
    dropout: float = 0.5  # Dropout rate.
    # Standard deviation of the first vectors of items and positions; None is
    # d_model^-1/2, which makes a state of unit variance.
    embedding_std: float | None = None
    # Where a filter's first precision τ comes from: learned per item, by an
    # MLP on the embedding, one for all, or fixed (shuffled) from frequency.
    tau: Source = "item"
    # τ ∝ (frequency + 1)^power where it is fixed.
    tau_power: float = -0.125
    tau_start: float = 1.0  # τ before training.
    # How a state scores the items.
    head: HeadKind = "dot"

    def __post_init__(self):
        checks.typed(self)
        for name in (
            "n_items",
            "d_model",
            "num_layers",
            "nhead",
            "max_length",
        ):
            checks.count(name, getattr(self, name), 1)
        if self.d_model % self.nhead:
            raise ValueError(
                f"nhead: expected a divisor of d_model={self.d_model}, got "
                f"{self.nhead}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected [0, 1), got {self.dropout!r}")
        for name in ("embedding_std", "tau_start"):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), 0.0)
        checks.number("tau_power", self.tau_power, -np.inf)
        checks.unread(self, self._unread())

    @property
    def bft(self) -> Any:
        """The filter's own options; None for the plain model."""
        raise NotImplementedError

    @property
    def features(self) -> int:
        """Precisions of a filter's token: one, or one a feature."""
        return self.d_model if self.bft.granularity == "feature" else 1

    @property
    def has_tau(self) -> bool:
        """Whether items have an initial precision."""
        return self.bft is not None

    def _unread(self) -> dict[str, str]:
        """Fields that the others leave without a reader, and whose they are.

        One that nothing reads is refused, unless it stands at its default.
        """
        if not self.has_tau:
            plain = "a plain model without tau_bias"
            return dict.fromkeys(("tau", "tau_power", "tau_start"), plain)
        if self.tau not in ("frequency", "shuffled"):
            return {"tau_power": f"tau {self.tau!r}"}
        return {}


class Recommender(nn.Module):
    """Items in time order → a state after each, and scores for the next.

    Sequences are padded with 0 on either side. They are read padded on the
    right, so that a causal model needs no padding mask, and what comes back
    is in the places that were given. Positions count back from the end of
    the sequence, as with the customary left padding.

    Shapes: ``items`` (B, T), at most ``max_length`` ids a row; ``times``
    (B, T) in seconds, or None → :meth:`forward` (B, T, d), and behind it, with
    the ``gaussian`` head, the log of the state's variance. float32 does not
    tell the seconds since 1970 apart: give float64, or seconds since each
    first item.
    Raises: TypeError or ValueError for what is no such batch, naming row and
    position.
    """

    #: rows of the embedding table beyond padding and the items
    special = 0
    #: whether times, where they are given, change the scores
    reads_times = False

    def __init__(self, config: RecommenderConfig, frequency=None):
        super().__init__()
        self.config = c = config
        if frequency is not None:
            frequency = counts(frequency, c.n_items + 1, c.n_items + 1)
        rows = c.n_items + 1 + self.special
        self.items = nn.Embedding(rows, c.d_model, padding_idx=0)
        self.positions = nn.Embedding(c.max_length, c.d_model)
        std = c.embedding_std or c.d_model**-0.5
        self.head = Head(c.head, rows, c.d_model, plain=c.bft is None)
        nn.init.normal_(self.items.weight, std=std)
        nn.init.normal_(self.positions.weight, std=std)
        with torch.no_grad():
            self.items.weight[0].zero_()
        self.tau = None
        if c.has_tau:
            self.tau = InitialPrecision(
                c.tau,
                rows,
                c.d_model,
                frequency=frequency,
                power=c.tau_power,
                initial=c.tau_start,
            )

    def embed(
        self, items: Tensor, norm: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """(B, T) → (B, T, d): √d times (item + position), O(1) per feature.

        Then comes ``norm``, if there is one, and dropout.
        """
        rows = self._rows(items)
        return rows.restore(self._embed(rows.items, norm), 1)

    def _rows(
        self, items: Tensor, times: Tensor | None = None, **given
    ) -> Rows:
        known = {
            "largest": self.items.num_embeddings - 1,
            "max_length": self.config.max_length,
        }
        return on_the_right(items, times, **(known | given))

    def _embed(
        self, items: Tensor, norm: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        longest = self.positions.num_embeddings
        left = (items > 0).sum(1, keepdim=True)
        place = torch.arange(items.shape[1], device=items.device)
        place = (longest - left + place).clamp(max=longest - 1)
        x = self.items(items) + self.positions(place)
        x = x * self.config.d_model**0.5
        x = x if norm is None else norm(x)
        return F.dropout(x, self.config.dropout, self.training)

    def steps(
        self, items: Tensor, times: Tensor | None = None
    ) -> tuple[Tensor, list[LayerTrace]]:
        """What :meth:`forward` gives, and the internals of every layer.

        Raises: ValueError for a plain model.
        """
        traces: list[LayerTrace] = []
        hidden = self(items, times, traces=traces)
        return hidden, traces

    def forward(
        self,
        items: Tensor,
        times: Tensor | None = None,
        *,
        traces: list[LayerTrace] | None = None,
    ) -> Tensor:
        """The states; each layer's internals are appended to ``traces``.

        Raises: ValueError for the traces of a plain model.
        """
        if traces is not None and self.config.bft is None:
            raise ValueError(
                "traces: expected None for a plain model, which has no filter "
                "to be traced; got a list"
            )
        rows = self._rows(items, times)
        found: list[LayerTrace] | None = None if traces is None else []
        hidden = self.states(rows.items, rows.times, found)
        if traces is not None and found is not None:
            traces += [rows.restore_trace(each) for each in found]
        return rows.restore(hidden, 1)

    def states(
        self,
        items: Tensor,
        times: Tensor | None,
        traces: list[LayerTrace] | None,
    ) -> Tensor:
        """What :meth:`forward` gives, of checked rows padded on the right."""
        raise NotImplementedError

    @property
    def masking(self) -> dict[str, Any]:
        """What ``training_batches`` is told of cloze training; {} for none."""
        return {}

    def query(self, hidden: Tensor) -> Tensor:
        """What a state, (..., d), asks the items to be compared with it."""
        return self.head.query(hidden)

    def item_embeddings(self) -> tuple[Tensor, Tensor | None]:
        """Item vectors (rows, d), and a bias (rows,) or None.

        A column more where the items have a variance, as states then have.
        """
        return self.head.items(self.items.weight)

    def evaluation_inputs(
        self, items: Tensor, times: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What to feed to predict the item after each sequence.

        It is padded on the right. Raises: ValueError for an empty sequence.
        """
        rows = self._rows(
            items, times, largest=self.config.n_items, empty=False
        )
        return rows.items, rows.times

    @torch.no_grad()
    def scores(self, items: Tensor, times: Tensor | None = None) -> Tensor:
        """Scores of all items for the item after each sequence.

        Shape: (B, n_items + 1), column 0 is −inf. Raises: ValueError for an
        empty sequence, or a model that would drop out.
        """
        if self.training and self.config.dropout > 0:
            raise ValueError(
                "model: expected one in evaluation mode, got one in training "
                "mode, whose dropout makes scores random; call model.eval()"
            )
        items, times = self.evaluation_inputs(items, times)
        last = (items > 0).sum(1) - 1
        hidden = self(items, times)
        rows = torch.arange(len(items), device=items.device)
        query = self.query(hidden[rows, last])
        weight, bias = self.item_embeddings()
        n = self.config.n_items + 1
        bias = None if bias is None else bias[:n]
        scores = self.head.score(query, weight[:n], bias)
        scores[:, 0] = -torch.inf
        return scores

    def recommend(
        self,
        items: Tensor,
        k: int = 10,
        *,
        exclude_seen: bool = True,
        times: Tensor | None = None,
    ) -> Top:
        """The k best items for the place after each sequence, best first.

        Those of the sequence itself are left out, unless ``exclude_seen`` is
        False; of two equal scores the lower id comes first. Where fewer than
        k are left, the rest is id 0 with −inf. A history that was cut to
        ``max_length`` is seen from there on only: give the whole of it to
        :func:`~bft_ref.recsys.models.top.top_items` with :meth:`scores`.

        Shapes: ``items``, ``times`` (B, T) → ids and scores, each (B, k).
        Raises: as :meth:`scores`; TypeError or ValueError for another k.
        """
        k = checks.count("k", k, 1)
        scores = self.scores(items, times)
        return top_items(scores, k, items if exclude_seen else None)

    def parameter_groups(self, lr: float, precision_lr: float) -> list[dict]:
        """Adam's groups: the weights, and what log λ is made of.

        With it the learned scales of ``gate``, rivals of the gain, which must
        not lose by learning slower.
        """
        groups: dict[bool, list[Tensor]] = {False: [], True: []}
        for name, parameter in self.named_parameters():
            own = any(each in name for each in PRECISIONS)
            groups[own].append(parameter)
        found = [{"params": groups[False], "lr": lr}]
        if groups[True]:
            found.append({"params": groups[True], "lr": precision_lr})
        return found


def as_batch(
    rows: Iterable[ArrayLike], max_length: int, device=None
) -> Tensor:
    """Pad the last ``max_length`` ids of each row on the right: (B, T).

    Padding (0) that a row has at its ends does not count. Raises: TypeError
    for ids that are no integers; ValueError for a row of another shape, or
    ``max_length`` < 1.
    """
    checks.count("max_length", max_length, 1)
    kept = [_ids(row)[-max_length:] for row in rows]
    width = max((len(row) for row in kept), default=0)
    batch = np.zeros((len(kept), width), dtype=np.int64)
    for i, row in enumerate(kept):
        batch[i, : len(row)] = row
    return torch.as_tensor(batch, device=device)


def _ids(row: ArrayLike) -> NDArray:
    found = np.asarray(row)
    if found.ndim != 1:
        raise ValueError(
            f"rows: expected a history of shape (T,), got {found.shape}"
        )
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"rows: expected integer ids, got {found.dtype}")
    if found.size and found.max() > np.iinfo(np.int64).max:
        raise ValueError(f"rows: expected ids in int64, got {found.max()}")
    return np.trim_zeros(found)
