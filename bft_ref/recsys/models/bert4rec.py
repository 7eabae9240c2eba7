"""BERT4Rec: bidirectional attention, trained to fill in masked items."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref.recsys.models.base import Recommender
from bft_ref.recsys.models.sasrec import Encoder, TransformerConfig
from bft_ref.support import checks


@dataclass(frozen=True)
class BERT4RecConfig(TransformerConfig):
    """BERT4Rec: bidirectional attention, trained to fill in masked items."""

    model = "bert4rec"

    # How a state scores the items: by their product, beside a bias of each,
    # or also times a temperature of each.
    head: Literal["dot", "item_temperature"] = "dot"
    mask_rate: float = 0.3  # Share of the items that training hides.
    # Share of the sequences of which it hides the last item alone, which is
    # what the test asks.
    last_rate: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        if self.max_length < 2:
            raise ValueError(
                "max_length: expected at least 2 for bert4rec, whose [MASK] "
                f"takes one place; got {self.max_length}"
            )
        checks.number("mask_rate", self.mask_rate, 0.0, 1.0)
        checks.within("last_rate", self.last_rate, 0.0, 1.0)


class BERT4Rec(Recommender):
    """BERT4Rec (Sun et al. 2019): post-LN, GELU, cloze training, ± filter.

    Id n_items + 1 is [MASK]. The next item is asked for by appending it to
    the history, of which the last ``max_length`` − 1 items are visible.
    Output: dense, GELU, LayerNorm, then tied embeddings with a bias per item.
    [MASK] has a τ of its own: Equation (14.4).
    """

    special = 1

    config: BERT4RecConfig

    def __init__(self, config: BERT4RecConfig, frequency=None):
        super().__init__(config, frequency)
        d = config.d_model
        self.first = nn.LayerNorm(d)
        self.encoder = Encoder(config, "post", causal=False)
        self.dense = nn.Linear(d, d)
        self.final = nn.LayerNorm(d)
        self.bias = nn.Parameter(torch.zeros(config.n_items + 2))

    @property
    def mask_id(self) -> int:
        """The id of [MASK]."""
        return self.config.n_items + 1

    @property
    def masking(self) -> dict[str, Any]:
        return {
            "mask_id": self.mask_id,
            "mask_rate": self.config.mask_rate,
            "last_rate": self.config.last_rate,
        }

    def states(self, items, times, traces):
        x = self._embed(items, self.first)
        log_tau = None
        if self.tau is not None:
            log_tau = self.tau(items, self.items(items))
        return self.encoder(x, log_tau, items == 0, traces).mean

    def query(self, hidden: Tensor) -> Tensor:
        return self.final(F.gelu(self.dense(hidden)))

    def item_embeddings(self):
        embeddings, _ = super().item_embeddings()
        return embeddings, self.bias

    def evaluation_inputs(self, items, times=None):
        """The last ``max_length`` − 1 items and a [MASK] after them."""
        items, _ = super().evaluation_inputs(items, times)
        kept = min(items.shape[1], self.config.max_length - 1)
        count = (items > 0).sum(1, keepdim=True)
        first = (count - kept).clamp(min=0)
        place = torch.arange(kept, device=items.device)
        asked = F.pad(items.gather(1, first + place), (0, 1))
        return asked.scatter(1, count.clamp(max=kept), self.mask_id), None
