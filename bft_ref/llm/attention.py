"""Attention as kriging, with a Llama's parameters under their names."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
)

from bft_ref import delta, fast, projections, reml
from bft_ref.belief import Belief
from bft_ref.layer import Observation, observed_log_precision
from bft_ref.llm.config import BFTLlamaConfig
from bft_ref.llm.widened import columns, numbers
from bft_ref.support import checks
from bft_ref.support.modules import apply, is_linear
from bft_ref.support.numerics import at_least_float32


class Keys(NamedTuple):
    """What a query may see.

    Keys and values (B, H_kv, S, d_h), log λ̄ and, with the neighbours' prior,
    log c (B, S).
    """

    key: Tensor
    value: Tensor
    log_token_precision: Tensor
    log_neighbour_variance: Tensor | None

    def first(self, count: int) -> "Keys":
        """The first of them."""
        k, v, log, c = self
        c = None if c is None else c[:, :count]
        return Keys(k[..., :count, :], v[..., :count, :], log[:, :count], c)


class BFTLlamaAttention(LlamaAttention):
    """A Llama's attention, which also says how precisely it is known.

    Shapes: ``belief`` (B, T, d) and the ``norm`` in front of it; position
    embeddings, mask and cache as transformers makes them for its ``sdpa`` or
    ``eager`` attention. Equations (9.1), (11.1)–(11.3), (16.3), (16.4).

    Raises: ValueError for the masks of other kinds of attention, and for
    values whose matrix is not known (hooks that change it).
    """

    def __init__(self, config: BFTLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.filter = config.filter

    def forward(
        self,
        belief: Belief,
        norm: delta.Normalised,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        keep_weights: bool = False,
    ) -> Observation:
        c, x = self.filter, norm.output.to(belief.mean.dtype)
        values, w_v = apply(self.v_proj, x)
        if w_v is None:
            raise ValueError(
                "v_proj: expected a linear map, of whose matrix the prior of "
                "the variance is made; its hooks leave that unknown"
            )
        made = (self.q_proj(x), self.k_proj(x), values)
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in made
        )
        # under autocast positions make them float32
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        q, k = q.to(v.dtype), k.to(v.dtype)
        log_c = None
        if c.prior_scale == "neighbours":
            log_c = reml.neighbour_variance(
                belief.log_precision, norm.scale
            ).log()
        keys = Keys(k, v, belief.log_token_precision, log_c)
        if cache is not None:
            keys = self._cached(keys, cache)
        keys, masks = _visible(keys, q.shape[-2], attention_mask)
        weights = self._feature_weights()
        log_c = keys.log_neighbour_variance
        moments = self.ways.attend(
            q,
            keys.key,
            keys.value,
            self.config.bft_dial * keys.log_token_precision,
            neighbour_variance=None if log_c is None else log_c.exp(),
            feature_weights=weights,
            centre=self._value_of_nothing(keys.value),
            dropout_p=self.attention_dropout if self.training else 0.0,
            implementation=c.implementation,
            n_eff_gradient=c.n_eff_gradient,
            keep_weights=keep_weights,
            **masks,
        )
        flat = moments.mean.transpose(1, 2).flatten(-2).to(x.dtype)
        innovation, w_o = apply(self.o_proj, flat)
        log_precision = observed_log_precision(
            *(self.ways, c, moments),
            projections.prior_scale(
                w_v,
                norm.gamma,
                moments.neighbour_variance,
                (q.shape[1], keys.key.shape[1], self.head_dim),
                weights,
            ),
            weights is not None,
            lambda variance: _through(w_o, variance),
        )
        return Observation(
            innovation, log_precision, moments.n_eff, moments.weights
        )

    def plain(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """What a Llama's own attention adds to the state, (B, T, d)."""
        output, _ = LlamaAttention.forward(
            self, x, position_embeddings, attention_mask, cache
        )
        return output

    @property
    def ways(self) -> fast.Steps:
        """The readable functions or the fast ones."""
        return fast.steps(self.filter.implementation)

    def _value_of_nothing(self, value: Tensor) -> Tensor:
        """The value of a state of zeros, (H_kv, 1, d_h): D is taken there."""
        bias = getattr(self.v_proj, "bias", None)
        shape = (value.shape[1], 1, self.head_dim)
        if bias is None:
            return at_least_float32(value.new_zeros(shape))
        return at_least_float32(bias.detach()).view(shape)

    def _cached(self, new: Keys, cache: Any) -> Keys:
        """All keys so far: λ̄ and c are more columns of keys and values."""

        def beside(x: Tensor, extra: Tensor | None) -> Tensor:
            if extra is None:
                return x
            column = columns(extra[:, None, :, None], x.dtype)
            return torch.cat([x, column.expand(*x.shape[:-1], -1)], -1)

        def apart(x: Tensor) -> tuple[Tensor, Tensor | None]:
            d = self.head_dim
            if x.shape[-1] == d:
                return x, None
            return x[..., :d], numbers(x[:, 0, :, d:]).squeeze(-1)

        k = beside(new.key, new.log_token_precision)
        v = beside(new.value, new.log_neighbour_variance)
        for layer in [*getattr(cache, "layers", [])][self.layer_idx :][:1]:
            held = getattr(layer, "keys", None)
            if (
                held is not None
                and held.numel()
                and held.shape[-1] != k.shape[-1]
            ):
                raise ValueError(
                    "cache: expected one that this model filled, whose keys "
                    f"have {k.shape[-1]} features, precision among them; got "
                    f"{held.shape[-1]}"
                )
        k, v = cache.update(k, v, self.layer_idx)
        (k, log), (v, c) = apart(k), apart(v)
        assert log is not None
        return Keys(k, v, log, c)

    def _feature_weights(self) -> Tensor | None:
        """As BFTLayer's: what a token's variance takes of each feature."""
        c, w_o = self.filter, self.o_proj
        if c.granularity != "token":
            return None
        if not c.project_variance:
            like = at_least_float32(next(w_o.parameters()))
            width = self.config.hidden_size
            weights = like.new_full((width,), 1 / width)
        elif is_linear(w_o):
            weights = projections.mean_square(w_o.weight)
        else:
            return None
        return weights.unflatten(0, (-1, self.head_dim))


def _through(w_o: Tensor | None, variance: Tensor) -> Tensor:
    if w_o is None:
        raise ValueError(
            "o_proj: expected a linear map, which carries variances into the "
            "state; its hooks leave its matrix unknown"
        )
    return projections.through(w_o, variance)


def _visible(
    keys: Keys, queries: int, mask: Tensor | None
) -> tuple[Keys, dict[str, Any]]:
    """The keys that count and the masks of ``attend``.

    No mask means, as in transformers' ``sdpa``, that one query sees all keys
    and that of more the t-th sees the first t: what stands behind them is
    the empty part of a static cache.
    """
    if mask is None:
        if queries == 1:
            return keys, {}
        return keys.first(queries), {"is_causal": True}
    if mask.dim() != 4:
        raise ValueError(
            "attention_mask: expected one of shape (B, 1, T, S), as "
            "attn_implementation='sdpa' or 'eager' has it, got "
            f"{tuple(mask.shape)}; flash attention keeps no precision"
        )
    batch, _, count, _ = keys.key.shape
    mask = mask[..., :count]
    onto = (batch, mask.shape[1], queries, count)
    checks.mask("attention_mask", mask, onto, true="visible")
    return keys, {"attn_mask": mask}
