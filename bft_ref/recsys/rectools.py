"""The filter inside RecTools' own SASRec.

Three arguments put it there::

    model = SASRecModel(
        transformer_layers_type=BFTTransformerLayers,
        backbone_type=BFTBackbone,
        transformer_layers_kwargs={"config": {"granularity": "token"}},
    )

RecTools' data preparation, losses, training, ranking and files stay as they
are; BERT4RecModel takes the same arguments. Carried over are the layer,
τ per item, and Q. Not carried over: τ from an MLP or from frequency, a
learning rate of their own for τ and Q (``TrainConfig.precision_lr``; RecTools
has one for all), and the internals of a layer.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from rectools.models.nn.transformers.net_blocks import TransformerLayersBase
from rectools.models.nn.transformers.torch_backbone import (
    TransformerTorchBackbone,
)
from torch import Tensor, nn

from bft_ref.belief import Belief
from bft_ref.config import BFTConfig
from bft_ref.layer import BFTLayer
from bft_ref.support import checks


class BFTTransformerLayers(TransformerLayersBase):
    """Pre-LN layers that are Bayesian filters, and a norm behind them.

    ``config``: options of a BFTConfig by name, as JSON has them, since
    RecTools writes them to its files; ``tau_start``: every τ before training.
    τ is one number for all items, learned, unless :class:`BFTBackbone` makes
    it one an item.

    Shapes: ``seqs`` (B, T, d), ``timeline_mask`` (B, T, 1), True at an item,
    masks as ``nn.MultiheadAttention`` takes them → (B, T, d).
    Raises: TypeError, ValueError for options that do not fit.
    """

    def __init__(
        self,
        n_blocks: int,
        n_factors: int,
        n_heads: int,
        dropout_rate: float,
        ff_factors_multiplier: int = 4,
        activation: str = "gelu",
        tau_start: float = 1.0,
        config: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        checks.number("tau_start", tau_start, 0.0)
        self.layers = nn.ModuleList(
            BFTLayer(
                n_factors,
                n_heads,
                ff_factors_multiplier * n_factors,
                dropout_rate,
                activation,
                norm_first=True,
                config=BFTConfig(**(config or {})),
            )
            for _ in range(n_blocks)
        )
        self.last_layernorm = nn.LayerNorm(n_factors)
        # RecTools draws everything of two dimensions anew before it trains
        self.log_tau = nn.Parameter(torch.full((1,), math.log(tau_start)))

    def with_items(self, n_items: int) -> None:
        """One τ an item: ``n_items`` counts padding and other tokens too."""
        self.log_tau = nn.Parameter(self.log_tau.detach().repeat(n_items))

    def forward(
        self,
        seqs: Tensor,
        timeline_mask: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        batch: Mapping[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """What is padding, ``timeline_mask`` says in any case."""
        belief = Belief(seqs, self._log_tau(seqs, batch).unsqueeze(-1))
        for layer in self.layers:
            belief = layer(
                belief,
                src_mask=attn_mask,
                src_key_padding_mask=~timeline_mask.squeeze(-1),
            )
        return self.last_layernorm(belief.mean)

    def _log_tau(self, seqs: Tensor, batch: Mapping | None) -> Tensor:
        if len(self.log_tau) == 1:
            return self.log_tau.expand(seqs.shape[:2])
        if batch is None:
            raise ValueError(
                "batch: expected RecTools' batch, whose 'x' are the items, "
                "since each has a τ; got None"
            )
        return self.log_tau[batch["x"]]


class BFTBackbone(TransformerTorchBackbone):
    """RecTools' backbone, which tells its layers how many items there are."""

    def __init__(self, *, item_model, transformer_layers, **given: Any):
        transformer_layers.with_items(item_model.n_items)
        super().__init__(
            item_model=item_model,
            transformer_layers=transformer_layers,
            **given,
        )
