"""BERT4Rec: bidirectional attention, trained to fill in masked items."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref.recsys.models.base import ModelConfig, Recommender
from bft_ref.recsys.models.sasrec import Encoder


class BERT4Rec(Recommender):
    """BERT4Rec (Sun et al. 2019): post-LN, GELU, cloze training, ± filter.

    Id n_items + 1 is [MASK]. The next item is asked for by appending it to
    the history, of which the last ``length`` − 1 items are seen. Output:
    dense, GELU, LayerNorm, then tied embeddings with a bias per item. [MASK]
    has a τ of its own: Equation (14.4).
    """

    special = 1

    def __init__(self, config: ModelConfig, frequency=None):
        super().__init__(config, frequency)
        self.first = nn.LayerNorm(config.d)
        self.encoder = Encoder(config, "post", causal=False)
        self.dense = nn.Linear(config.d, config.d)
        self.final = nn.LayerNorm(config.d)
        self.bias = nn.Parameter(torch.zeros(config.n_items + 2))

    @property
    def mask_id(self) -> int:
        """The id of [MASK]."""
        return self.config.n_items + 1

    def states(self, items, times, trace):
        x = self._embed(items, self.first)
        log_tau = None
        if self.tau is not None:
            log_tau = self.tau(items, self.items(items))
        return self.encoder(x, log_tau, items == 0, trace)

    def head(self, hidden: Tensor) -> Tensor:
        return self.final(F.gelu(self.dense(hidden)))

    def keys(self):
        return self.items.weight, self.bias

    def question(self, items, times=None):
        """The last ``length`` − 1 items and a [MASK] after them."""
        items, _ = super().question(items, times)
        kept = min(items.shape[1], self.config.length - 1)
        count = (items > 0).sum(1, keepdim=True)
        first = (count - kept).clamp(min=0)
        place = torch.arange(kept, device=items.device)
        asked = F.pad(items.gather(1, first + place), (0, 1))
        return asked.scatter(1, count.clamp(max=kept), self.mask_id), None
