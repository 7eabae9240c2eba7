"""What the three recommenders share: configuration, embedding, scores."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref import checks
from bft_ref.layer import BFTConfig
from bft_ref.models.gates import GATES
from bft_ref.models.precision import SOURCES, InitialPrecision


@dataclass(frozen=True)
class ModelConfig:
    """One model, chosen at construction.

    ``bft`` is the switch: None is the plain model, a BFTConfig makes every
    layer a Bayesian filter. ``gate``, ``gate_value`` and ``tau_bias`` are
    rivals and controls of the plain model: see
    :class:`bft_ref.models.gates.Gate`; ``gate_value`` is one number, or one
    per layer; ``tau_bias`` adds a learned log τ of
    the key's item to the attention logits and changes nothing else (K = 1).
    ``tau``, ``tau_power`` and ``tau_start`` say where a filter's (or that
    bias') initial precision comes from: see
    :class:`bft_ref.models.precision.InitialPrecision`.
    ``embedding_std`` is the standard deviation of the first vectors of items
    and positions; None is d^−½, which makes a state of unit variance.
    ``length`` is the number of last items seen; ``residual`` is ``pre``
    (pre-LN) or ``original`` (SASRec's own: Q normed, K and V not, and the
    normed input carried on). Sizes: ``d`` the state, ``ffn`` its hidden layer
    (HSTU has none). An option that the model does not read is refused unless
    it is a size or stands at its default.
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
        checks.choice("model", self.model, ("sasrec", "bert4rec", "hstu"))
        checks.choice("residual", self.residual, ("pre", "original"))
        checks.choice("gate", self.gate, GATES)
        checks.choice("tau", self.tau, SOURCES)
        for name in ("n_items", "d", "layers", "heads", "ffn", "length"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: expected at least 1, got {getattr(self, name)}"
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
        if self.embedding_std is not None:
            checks.number("embedding_std", self.embedding_std, 0.0)
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
        if isinstance(self.gate_value, int | float):
            return (self.gate_value,) * self.layers
        return tuple(self.gate_value)


class Recommender(nn.Module):
    """Items in time order → a state after each, and scores for the next.

    Sequences are padded on the right with 0, to the longest of the batch:
    a causal model then needs no padding mask. Positions count back from the
    end of the sequence, as with the customary left padding.

    Shapes: ``items`` (B, T), T ≤ length; ``times`` (B, T) in seconds or None
    → :meth:`forward` (B, T, d).
    """

    #: rows of the embedding table beyond padding and the items
    special = 0

    def __init__(self, config: ModelConfig, frequency=None):
        super().__init__()
        self.config = c = config
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

        Then comes ``norm``, if there is one, and dropout. Raises: ValueError
        for a sequence longer than ``length``.
        """
        longest = self.positions.num_embeddings
        if items.dim() != 2 or items.shape[1] > longest:
            raise ValueError(
                f"items: expected shape (B, T <= {longest}), got "
                f"{tuple(items.shape)}"
            )
        left = (items > 0).sum(1, keepdim=True)
        place = torch.arange(items.shape[1], device=items.device)
        place = (longest - left + place).clamp(max=longest - 1)
        x = self.items(items) + self.positions(place)
        x = x * self.config.d**0.5
        x = x if norm is None else norm(x)
        return F.dropout(x, self.config.dropout, self.training)

    def forward(self, items: Tensor, times: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def head(self, hidden: Tensor) -> Tensor:
        """The query of a state, (..., d), to be compared with the items."""
        return hidden

    def keys(self) -> tuple[Tensor, Tensor | None]:
        """Item vectors (rows, d), and a bias (rows,) or None."""
        return self.items.weight, None

    def question(self, items: Tensor, times: Tensor | None = None):
        """What to feed to predict the item after each sequence."""
        return items, times

    @torch.no_grad()
    def scores(self, items: Tensor, times: Tensor | None = None) -> Tensor:
        """Scores of all items for the item after each sequence.

        Shape: (B, n_items + 1), column 0 is −inf. Raises: ValueError for an
        empty sequence.
        """
        items, times = self.question(items, times)
        last = (items > 0).sum(1) - 1
        if bool((last < 0).any()):
            raise ValueError("items: expected at least one item a sequence")
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


def as_batch(rows: list[np.ndarray], length: int, device=None) -> Tensor:
    """Pad the last ``length`` ids of each row on the right: (B, T)."""
    rows = [np.asarray(row)[-length:] for row in rows]
    width = max((len(row) for row in rows), default=0)
    batch = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        batch[i, : len(row)] = row
    return torch.as_tensor(batch, device=device)
