"""SASRec: causal self-attention over the items a user has met."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref import delta
from bft_ref.belief import Belief
from bft_ref.config import BFTConfig
from bft_ref.delta import activation_function
from bft_ref.layer import BFTLayer, LayerTrace
from bft_ref.recsys.models.base import Recommender, RecommenderConfig
from bft_ref.recsys.models.gates import Gate, GateKind
from bft_ref.recsys.models.heads import HeadKind
from bft_ref.support import checks
from bft_ref.support.modules import apply_norm

Norm = Literal["pre", "post", "original"]


@dataclass(frozen=True)
class TransformerConfig(RecommenderConfig):
    """What SASRec and BERT4Rec have: softmax attention and a network.

    ``gate`` and ``tau_bias`` are rivals and controls of the plain model; a
    filter does not read them.
    """

    dim_feedforward: int = 256  # Width of the feed-forward network.
    # Of the feed-forward network: a pointwise function's name, or reglu,
    # geglu, swiglu.
    activation: str = "gelu"
    # Scale the attention branch: by a constant, a learned scalar or vector,
    # LiGR's or Qiu's gate.
    gate: GateKind = "none"
    # The constant, or a learned factor's start: one number, or one a layer.
    gate_value: float | tuple[float, ...] = 1.0
    # A learned log τ of the key's item on the attention logits alone, gain 1.
    tau_bias: bool = False
    # Make every layer a Bayesian filter.
    bft: BFTConfig | None = None

    def __post_init__(self):
        super().__post_init__()
        checks.count("dim_feedforward", self.dim_feedforward, 1)
        values = self.gate_values
        if len(values) != self.num_layers or not np.isfinite(values).all():
            raise ValueError(
                f"gate_value: expected a number, or one for each of "
                f"{self.num_layers} layers, got {self.gate_value!r}"
            )

    @property
    def gate_values(self) -> tuple[float, ...]:
        """``gate_value`` of each layer."""
        if isinstance(self.gate_value, tuple):
            return self.gate_value
        return (self.gate_value,) * self.num_layers

    @property
    def has_tau(self) -> bool:
        return self.bft is not None or self.tau_bias

    def _unread(self) -> dict[str, str]:
        found = super()._unread()
        if self.gate not in ("constant", "scalar", "vector"):
            found["gate_value"] = f"gate {self.gate!r}"
        if self.bft is not None:
            found |= dict.fromkeys(("gate", "tau_bias"), "a Bayesian filter")
        return found


@dataclass(frozen=True)
class SASRecConfig(TransformerConfig):
    """SASRec: causal self-attention, each item asked for by those before."""

    model = "sasrec"

    # Pre-LN, or SASRec's own: Q normed, K and V not, and the normed input
    # carried on.
    residual: Literal["pre", "original"] = "pre"
    # How a state scores the items: by their product, times a temperature or
    # beside a bias of each, or as beliefs, each with its own variance.
    head: HeadKind = "dot"

    def _unread(self) -> dict[str, str]:
        found = super()._unread()
        if self.bft is not None:
            found["residual"] = "a Bayesian filter"
        return found


class Block(nn.Module):
    """A standard Transformer layer, with a place for a gate.

    Parameter names, order and dropout are those of
    ``nn.TransformerEncoderLayer``, whose function it computes (gate "none");
    post-norm for BERT4Rec, pre-norm or the ``original`` residual for SASRec.

    Shapes: h (B, T, d); ``bias`` broadcasts to the logits (B, H, T, T).
    """

    def __init__(
        self,
        config: TransformerConfig,
        norm: Norm,
        causal: bool,
        layer: int = 0,
    ):
        super().__init__()
        c = self.config = config
        self.norm, self.causal = norm, causal
        d, width = c.d_model, c.dim_feedforward
        self.in_proj = nn.Linear(d, 3 * d)
        self.out_proj = nn.Linear(d, d)
        self.activation, self.gated = activation_function(c.activation)
        self.linear1 = nn.Linear(d, width * (2 if self.gated else 1))
        self.linear2 = nn.Linear(width, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.gate = Gate(c.gate, d, c.nhead, c.gate_values[layer])
        nn.init.xavier_uniform_(self.in_proj.weight)
        nn.init.zeros_(self.in_proj.bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.norm == "post":
            h = self.norm1(h + self._attend(h, h, h, bias))
            return self.norm2(h + self._feed_forward(h, h))
        x = self.norm1(h)
        if self.norm == "original":
            # K and V from the state as it is, and x, not h, carried on.
            h = x + self._attend(x, h, x, bias)
            x = self.norm2(h)
            return x + self._feed_forward(x, x)
        h = h + self._attend(x, x, h, bias)
        return h + self._feed_forward(self.norm2(h), h)

    def _attend(self, query, source, h, bias):
        c, p = self.config, self.config.dropout if self.training else 0.0
        if query is source:
            q, k, v = self.in_proj(query).chunk(3, -1)
        else:
            w, b, d = self.in_proj.weight, self.in_proj.bias, c.d_model
            q = F.linear(query, w[:d], b[:d])
            k, v = F.linear(source, w[d:], b[d:]).chunk(2, -1)
        q, k, v = (
            x.unflatten(-1, (c.nhead, -1)).transpose(1, 2) for x in (q, k, v)
        )
        causal = self.causal and bias is None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=p, is_causal=causal
        ).transpose(1, 2)
        out = self.gate.on_heads(out, query).flatten(-2)
        branch = F.dropout(self.out_proj(out), c.dropout, self.training)
        return self.gate.on_attention(branch, h)

    def _feed_forward(self, x, h):
        p = self.config.dropout
        if self.gated:
            opening, through = self.linear1(x).chunk(2, -1)
            hidden = self.activation(opening) * through
        else:
            hidden = self.activation(self.linear1(x))
        hidden = F.dropout(hidden, p, self.training)
        branch = F.dropout(self.linear2(hidden), p, self.training)
        return self.gate.on_ffn(branch, h)


class Encoder(nn.Module):
    """Layers over an embedded sequence: plain, or each a Bayesian filter.

    The plain ones see log τ only if ``tau_bias`` asks for it, and know of no
    other λ than 1. A filter's internals are appended to ``traces``, a layer
    each.
    """

    def __init__(self, config: TransformerConfig, norm: Norm, causal: bool):
        super().__init__()
        c = self.config = config
        self.causal = causal
        layers: list[Block] | list[BFTLayer]
        if c.bft is None:
            layers = [Block(c, norm, causal, i) for i in range(c.num_layers)]
        else:
            layers = [
                BFTLayer(
                    c.d_model,
                    c.nhead,
                    c.dim_feedforward,
                    c.dropout,
                    c.activation,
                    norm_first=norm != "post",
                    config=c.bft,
                )
                for _ in range(c.num_layers)
            ]
        self.layers = nn.ModuleList(layers)

    def forward(
        self,
        h: Tensor,
        log_tau: Tensor | None = None,
        padding: Tensor | None = None,
        traces: list[LayerTrace] | None = None,
    ) -> Belief:
        if self.config.bft is not None:
            return self._filter(h, log_tau, padding, traces)
        bias = self._bias(h, log_tau, padding)
        for layer in self.layers:
            h = layer(h, bias)
        return Belief(h, h.new_zeros(*h.shape[:-1], 1))

    def _filter(self, h, log_tau, padding, traces):
        features = self.config.features
        belief = Belief(h, log_tau.expand(*h.shape[:-1], features))
        for layer in self.layers:
            belief = layer(
                belief,
                src_key_padding_mask=padding,
                is_causal=self.causal,
                traces=traces,
            )
        return belief

    def _bias(self, h, log_tau, padding):
        if not self.config.tau_bias and padding is None:
            return None
        tokens = h.shape[1]
        bias = h.new_zeros(1, 1, 1, tokens)
        if self.config.tau_bias:
            bias = log_tau.transpose(1, 2).unsqueeze(1)
        hidden = h.new_zeros(1, 1, tokens, tokens, dtype=torch.bool)
        if self.causal:
            hidden = ~torch.ones_like(hidden).tril()
        if padding is not None:
            hidden = hidden | padding[:, None, None]
        return bias.expand(-1, -1, tokens, -1).masked_fill(hidden, -torch.inf)


class SASRec(Recommender):
    """SASRec (Kang & McAuley 2018) in its strong pre-LN form, ± filter.

    Tied item embeddings, learned positions, a final LayerNorm. The original
    paper's residual is ``residual="original"``.
    """

    config: SASRecConfig

    def __init__(self, config: SASRecConfig, frequency=None):
        super().__init__(config, frequency)
        self.encoder = Encoder(config, config.residual, causal=True)
        self.final = nn.LayerNorm(config.d_model)

    def states(self, items, times, traces):
        x = self._embed(items)
        log_tau = None
        if self.tau is not None:
            log_tau = self.tau(items, self.items(items))
        belief = self.encoder(x, log_tau, traces=traces)
        if self.config.head != "gaussian":
            return self.final(belief.mean)
        if self.config.bft is None:
            return self.head.state(
                self.final(belief.mean), self.head.log_precision
            )
        hidden, norm = apply_norm(
            "final", self.final, belief.mean, delta.normalise
        )
        # the norm's part is no way to learn: a longer state would look surer
        fixed = norm._replace(z=norm.z.detach(), scale=norm.scale.detach())
        log_precision = delta.normalised_precision(belief.log_precision, fixed)
        return self.head.state(hidden, log_precision)
