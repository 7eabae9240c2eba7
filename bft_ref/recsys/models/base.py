"""What the three recommenders share: configuration, embedding, scores."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from bft_ref.config import BFTConfig
from bft_ref.layer import LayerTrace
from bft_ref.recsys.models.gates import GATES
from bft_ref.recsys.models.padding import Rows, on_the_right
from bft_ref.recsys.models.precision import SOURCES, InitialPrecision, counts
from bft_ref.support import checks


@dataclass(frozen=True)
class ModelConfig:
    """One model, chosen at construction.

    ``bft`` is the switch: None is the plain model, a BFTConfig makes every
    layer a Bayesian filter. ``gate``, ``gate_value`` and ``tau_bias`` are
    rivals and controls of the plain model: see
    :class:`bft_ref.recsys.models.gates.Gate`; ``gate_value`` is one number, or
    one per layer; ``tau_bias`` adds a learned log τ of the key's item to
    the attention logits and changes nothing else (K = 1).
    ``tau``, ``tau_power`` and ``tau_start`` say where a filter's (or that
    bias') initial precision comes from: see
    :class:`bft_ref.recsys.models.precision.InitialPrecision`.
    ``embedding_std`` is the standard deviation of the first vectors of items
    and positions; None is d^−½, which makes a state of unit variance.
    ``length`` is the number of last items seen; ``residual`` is ``pre``
    (pre-LN) or ``original`` (SASRec's own: Q normed, K and V not, and the
    normed input carried on). Sizes: ``d`` the state, ``ffn`` its hidden layer
    (HSTU has none). An option that the model does not read is refused unless
    it is a size or stands at its default.

    Raises: TypeError for a field of another type; ValueError for values that
    do not fit, each naming the field.
    """

    n_items: int
    model: str = "sasrec"
    d: int = 64
    layers: int = 2
    heads: int = 2
    ffn: int = 256
    length: int = 20
    dropout: float = 0.5
    embedding_std: float | None = None
    activation: str = "gelu"
    residual: str = "pre"
    gate: str = "none"
    gate_value: float | tuple[float, ...] = 1.0
    tau_bias: bool = False
    tau: str = "item"
    tau_power: float = -0.125
    tau_start: float = 1.0
    temperature: float = 0.05
    bft: BFTConfig | None = None

    def __post_init__(self):
        checks.typed(self)
        checks.choice("model", self.model, ("sasrec", "bert4rec", "hstu"))
        checks.choice("residual", self.residual, ("pre", "original"))
        checks.choice("gate", self.gate, GATES)
        checks.choice("tau", self.tau, SOURCES)
        for name in ("n_items", "d", "layers", "heads", "ffn", "length"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: expected at least 1, got {getattr(self, name)}"
                )
        if self.model == "bert4rec" and self.length < 2:
            raise ValueError(
                "length: expected at least 2 for bert4rec, whose [MASK] takes "
                f"one place; got {self.length}"
            )
        if self.d % self.heads:
            raise ValueError(
                f"heads: expected a divisor of d={self.d}, got {self.heads}"
            )
        values = self.gate_values
        if len(values) != self.layers or not np.isfinite(values).all():
            raise ValueError(
                f"gate_value: expected a number, or one for each of "
                f"{self.layers} layers, got {self.gate_value!r}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected [0, 1), got {self.dropout!r}")
        for name in ("embedding_std", "tau_start", "temperature"):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), 0.0)
        checks.number("tau_power", self.tau_power, -np.inf)
        plain_only = [
            name
            for name, given in [
                ("gate", self.gate != "none"),
                ("tau_bias", self.tau_bias),
                ("residual", self.residual != "pre"),
            ]
            if given
        ]
        if plain_only and self.bft is not None:
            raise ValueError(
                f"bft: expected None with {', '.join(plain_only)}, which "
                "belong to the plain model"
            )
        if self.model != "sasrec" and "residual" in plain_only:
            raise ValueError("residual: 'original' is SASRec's")
        if self.model == "hstu" and plain_only:
            raise ValueError(
                f"{plain_only[0]}: HSTU has no such control, its own U gates"
            )
        self._refuse_what_nothing_reads()

    def _refuse_what_nothing_reads(self):
        unread: dict[str, str] = {}
        if self.gate not in ("constant", "scalar", "vector"):
            unread["gate_value"] = f"gate {self.gate!r}"
        if self.bft is None and not self.tau_bias:
            for name in ("tau", "tau_power", "tau_start"):
                unread[name] = "a plain model without tau_bias"
        elif self.tau not in ("frequency", "shuffled"):
            unread["tau_power"] = f"tau {self.tau!r}"
        if self.model == "hstu":
            unread["activation"] = "HSTU, which has no feed-forward network,"
        else:
            unread["temperature"] = self.model
        checks.unread(self, unread)
        if self.model == "hstu" and self.bft is not None:
            known = {f.name for f in fields(BFTConfig)}
            read = (
                "prior_dof",
                "prior_scale",
                "process_noise",
                "granularity",
                "project",
            )
            names = dict.fromkeys(known.difference(read), "HSTU's filter")
            checks.unread(self.bft, names)

    @property
    def gate_values(self) -> tuple[float, ...]:
        """``gate_value`` of each layer."""
        if isinstance(self.gate_value, tuple):
            return self.gate_value
        return (self.gate_value,) * self.layers


class Recommender(nn.Module):
    """Items in time order → a state after each, and scores for the next.

    Sequences are padded with 0 on either side. They are read padded on the
    right, so that a causal model needs no padding mask, and what comes back
    is in the places that were given. Positions count back from the end of
    the sequence, as with the customary left padding.

    Shapes: ``items`` (B, T), at most ``length`` ids a row; ``times`` (B, T)
    in seconds, or None → :meth:`forward` (B, T, d). float32 does not tell the
    seconds since 1970 apart: give float64, or seconds since each first item.
    Raises: TypeError or ValueError for what is no such batch, naming row and
    position.
    """

    #: rows of the embedding table beyond padding and the items
    special = 0

    def __init__(self, config: ModelConfig, frequency=None):
        super().__init__()
        self.config = c = config
        if frequency is not None:
            frequency = counts(frequency, c.n_items + 1, c.n_items + 1)
        rows = c.n_items + 1 + self.special
        self.items = nn.Embedding(rows, c.d, padding_idx=0)
        self.positions = nn.Embedding(c.length, c.d)
        std = c.d**-0.5 if c.embedding_std is None else c.embedding_std
        nn.init.normal_(self.items.weight, std=std)
        nn.init.normal_(self.positions.weight, std=std)
        with torch.no_grad():
            self.items.weight[0].zero_()
        self.tau = None
        if c.bft is not None or c.tau_bias:
            self.tau = InitialPrecision(
                c.tau,
                rows,
                c.d,
                frequency=frequency,
                power=c.tau_power,
                start=c.tau_start,
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
            "length": self.config.length,
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
        x = x * self.config.d**0.5
        x = x if norm is None else norm(x)
        return F.dropout(x, self.config.dropout, self.training)

    def forward(
        self,
        items: Tensor,
        times: Tensor | None = None,
        trace: bool = False,
    ):
        """The states, and with ``trace`` a list of each layer's internals.

        Raises: ValueError for the trace of a plain model.
        """
        if trace and self.config.bft is None:
            raise ValueError(
                "trace: expected False for a plain model, which has no filter "
                "to be traced; got True"
            )
        rows = self._rows(items, times)
        hidden, traces = self.states(rows.items, rows.times, trace)
        hidden = rows.restore(hidden, 1)
        if not trace:
            return hidden
        return hidden, [rows.restore_trace(each) for each in traces]

    def states(
        self, items: Tensor, times: Tensor | None, trace: bool
    ) -> tuple[Tensor, list[LayerTrace]]:
        """What :meth:`forward` gives, of checked rows padded on the right.

        No internals without ``trace``.
        """
        raise NotImplementedError

    def head(self, hidden: Tensor) -> Tensor:
        """The query of a state, (..., d), to be compared with the items."""
        return hidden

    def keys(self) -> tuple[Tensor, Tensor | None]:
        """Item vectors (rows, d), and a bias (rows,) or None."""
        return self.items.weight, None

    def question(self, items: Tensor, times: Tensor | None = None):
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
        items, times = self.question(items, times)
        last = (items > 0).sum(1) - 1
        hidden = self(items, times)
        rows = torch.arange(len(items), device=items.device)
        query = self.head(hidden[rows, last])
        weight, bias = self.keys()
        n = self.config.n_items + 1
        bias = None if bias is None else bias[:n]
        scores = F.linear(query, weight[:n], bias)
        scores[:, 0] = -torch.inf
        return scores

    def parameter_groups(self, lr: float, precision_lr: float) -> list[dict]:
        """Adam's groups: the weights, and what log λ is made of."""
        groups: dict[bool, list[Tensor]] = {False: [], True: []}
        for name, parameter in self.named_parameters():
            own = name.startswith("tau.") or "log_process_noise" in name
            groups[own].append(parameter)
        found = [{"params": groups[False], "lr": lr}]
        if groups[True]:
            found.append({"params": groups[True], "lr": precision_lr})
        return found


def as_batch(rows: Iterable[ArrayLike], length: int, device=None) -> Tensor:
    """Pad the last ``length`` ids of each row on the right: (B, T).

    Padding (0) that a row has at its ends does not count. Raises: TypeError
    for ids that are no integers; ValueError for a row of another shape, or
    ``length`` < 1.
    """
    checks.count("length", length, 1)
    kept = [_ids(row)[-length:] for row in rows]
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
