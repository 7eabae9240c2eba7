"""The layer: observe, update, predict. Belief in, Belief out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref import checks, delta, reml
from bft_ref.attention import IMPLEMENTATIONS, attend
from bft_ref.belief import Belief, log_mean_exp, wide
from bft_ref.cache import KeyValueCache
from bft_ref.kalman import update
from bft_ref.rotary import rotate


@dataclass(frozen=True)
class BFTConfig:
    """What the paper leaves open, and our choices; chosen at construction.

    granularity: ``feature`` (a precision per feature) or ``token`` (one per
        token).
    observation: what the observation precision is a precision of: one more
        value as kriging predicts it (``prediction``), the local ``mean``, or
        a ``value`` around a known mean.
    prior_scale: s₀² from the ``neighbours``' own variances, or ``unit``.
    prior_dof: ν₀ > 0 of the inverse-χ² prior.
    project: carry the variance through W_O into state units; otherwise
        feature i of the concatenated heads speaks for feature i of the state.
    jacobian: ``exact``, ``first`` (first norm term only) or ``hutchinson``.
    variance_rule: ``diagonal`` (the paper's) or ``row`` (one-probe estimate
        of the exact first-order variance, feature granularity only).
    process_noise: initial Q > 0, in state².
    implementation: of attention: ``materialised`` (forms the T×T weights),
        ``blocked``, ``flex`` (CUDA), or ``auto``, which chooses.
    n_eff_gradient: False drops the gradient through n_eff, which is cheaper.
    """

    granularity: str = "feature"
    observation: str = "prediction"
    prior_scale: str = "neighbours"
    prior_dof: float = 1.0
    project: bool = True
    jacobian: str = "exact"
    variance_rule: str = "diagonal"
    process_noise: float = 1.0
    implementation: str = "auto"
    n_eff_gradient: bool = True

    def __post_init__(self):
        for name, allowed in [
            ("granularity", ("feature", "token")),
            ("observation", reml.READINGS),
            ("prior_scale", ("neighbours", "unit")),
            ("jacobian", ("exact", "first", "hutchinson")),
            ("variance_rule", ("diagonal", "row")),
            ("implementation", ("auto", *IMPLEMENTATIONS)),
        ]:
            checks.choice(name, getattr(self, name), allowed)
        checks.number("prior_dof", self.prior_dof, 0.0)
        checks.number("process_noise", self.process_noise, 0.0)
        if self.variance_rule == "row" and self.granularity == "token":
            raise ValueError(
                "variance_rule: 'row' needs granularity='feature', got 'token'"
            )


class Observation(NamedTuple):
    """What attention adds to the state, and how precisely it is known.

    ``innovation`` e (B, T, d), state; ``log_precision`` log λ_obs (B, T, d)
    or (B, T, 1), −inf where a token saw nothing; ``n_eff`` (B, H, T) and
    ``weights`` α̃ (B, H, T, S) where they were kept.
    """

    innovation: Tensor
    log_precision: Tensor
    n_eff: Tensor | None = None
    weights: Tensor | None = None


class LayerTrace(NamedTuple):
    """A layer's internals, for plots and tests.

    ``weights`` (B, H, T, S), ``n_eff`` (B, H, T), and with last dimension d
    (or 1 for token granularity) ``log_observation_precision``, ``gain``,
    ``log_updated_precision`` λ', ``log_growth`` log (1 + J)².
    """

    weights: Tensor | None
    n_eff: Tensor
    log_observation_precision: Tensor
    gain: Tensor
    log_updated_precision: Tensor
    log_growth: Tensor


class BFTLayer(nn.Module):
    """One Transformer layer read as a Bayesian filter.

    Arguments and parameter names are those of
    ``torch.nn.TransformerEncoderLayer``, whose state dict it loads, with three
    differences: it maps a Belief to a Belief, ``batch_first`` is True by
    default, and ``is_causal=True`` masks by itself. In addition:

    config: :class:`BFTConfig`. num_kv_heads: fewer key/value heads than
    heads (grouped queries). rotary_base: base of rotary positions, None for
    none. norm: ``layernorm`` or ``rmsnorm``. activation: a pointwise
    function, its name, or ``reglu``, ``geglu``, ``swiglu``. ffn: a module
    (..., d) → (..., d) in place of the built-in network; its Jacobian is
    estimated (``hutchinson``).

    Adds one parameter, ``log_process_noise``, (d,) or (1,).

    Raises: ValueError for sizes and options that do not fit together.
    Equations (9.1)–(9.3); source: the paper, options as marked in BFTConfig.
    """

    probes: Tensor

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = True,
        norm_first: bool = False,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        config: BFTConfig | None = None,
        num_kv_heads: int | None = None,
        rotary_base: float | None = None,
        norm: str = "layernorm",
        ffn: nn.Module | None = None,
    ):
        super().__init__()
        kv_heads = nhead if num_kv_heads is None else num_kv_heads
        for name, value in [
            ("d_model", d_model),
            ("nhead", nhead),
            ("dim_feedforward", dim_feedforward),
            ("num_kv_heads", kv_heads),
        ]:
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{name}: expected a positive integer, got {value!r}"
                )
        if d_model % nhead:
            raise ValueError(
                f"d_model: expected a multiple of nhead={nhead}, got {d_model}"
            )
        if nhead % kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of nhead={nhead}, "
                f"got {kv_heads}"
            )
        if rotary_base is not None and (d_model // nhead) % 2:
            raise ValueError(
                "rotary_base: rotary positions need an even head size, got "
                f"{d_model // nhead}"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: expected [0, 1), got {dropout!r}")
        self.config = config or BFTConfig()
        checks.choice("norm", norm, ("layernorm", "rmsnorm"))
        self.d_model, self.nhead, self.num_kv_heads = d_model, nhead, kv_heads
        self.head_dim = d_model // nhead
        self.dropout_p, self.eps = dropout, layer_norm_eps
        self.batch_first, self.norm_first = batch_first, norm_first
        self.rotary_base = rotary_base
        self.centred = norm == "layernorm"
        self.activation, self.gated = delta.activation_function(activation)
        at = {"device": device, "dtype": dtype}
        self.self_attn = _AttentionParameters(
            d_model, self.head_dim * kv_heads, bias, at
        )
        norm_class = nn.LayerNorm if self.centred else nn.RMSNorm
        with_bias = {"bias": bias} if self.centred else {}
        if ffn is None:
            width = dim_feedforward * (2 if self.gated else 1)
            self.linear1 = nn.Linear(d_model, width, bias=bias, **at)
            self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **at)
            self.ffn = None
        else:
            self.ffn = ffn
        self.norm1 = norm_class(d_model, layer_norm_eps, **with_bias, **at)
        self.norm2 = norm_class(d_model, layer_norm_eps, **with_bias, **at)
        features = d_model if self.config.granularity == "feature" else 1
        log_q = torch.full((features,), self.config.process_noise, **at).log()
        self.log_process_noise = nn.Parameter(log_q)
        self.register_buffer(
            "probes", _signs((3, d_model), seed=0, device=device), False
        )
        self.register_load_state_dict_pre_hook(_keep_process_noise)

    def forward(
        self,
        belief: Belief,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        cache: KeyValueCache | None = None,
        trace: bool = False,
    ) -> Belief | tuple[Belief, LayerTrace]:
        """Belief → Belief, and the layer's internals with ``trace=True``.

        Shapes: ``belief.mean`` (B, T, d) (or (T, B, d) without
        ``batch_first``), ``belief.log_precision`` the same or with last
        dimension 1. Masks as in ``nn.TransformerEncoderLayer``: ``src_mask``
        (T, S) or (B·H, T, S), ``src_key_padding_mask`` (B, S), True where a
        token may *not* be seen, or floats added to the scores. With a
        ``cache`` the tokens given are the newest, and S counts the cached
        ones too. A token that may see nothing keeps its mean.

        Raises: TypeError, ValueError for shapes and dtypes; NaN and infinity
        are reported in eager mode only.
        """
        belief = self._checked(belief)
        if not self.batch_first:
            belief = Belief(*(x.transpose(0, 1) for x in belief))
        seen = self.observe(
            belief, src_mask, src_key_padding_mask, is_causal, cache, trace
        )
        updated, k = self.update(belief, seen)
        predicted, log_growth = self.predict(updated)
        if not self.batch_first:
            predicted = Belief(*(x.transpose(0, 1) for x in predicted))
        if not trace:
            return predicted
        return predicted, LayerTrace(
            seen.weights,
            cast(Tensor, seen.n_eff),
            seen.log_precision,
            k,
            updated.log_precision,
            log_growth,
        )

    def observe(
        self,
        belief: Belief,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        cache: KeyValueCache | None = None,
        keep_weights: bool = False,
    ) -> Observation:
        """Attention as kriging: the innovation and its precision.

        Through W_O with independence, Equation (6.12), if ``project``.
        """
        c, attn = self.config, self.self_attn
        batch, tokens, _ = belief.mean.shape
        # before the cache grows: a call that fails must not change it
        keys = tokens + (0 if cache is None else cache.length)
        attn_mask = self._score_mask(src_mask, batch, tokens, keys)
        if src_key_padding_mask is not None:
            padding = ("src_key_padding_mask", src_key_padding_mask)
            checks.mask(*padding, (batch, keys))
            checks.shape(*padding, (batch, keys))
        x = belief.mean
        spread = None
        if self.norm_first:
            norm = self._norm(self.norm1, belief.mean)
            x, spread = norm.output.to(x.dtype), norm.scale
        q, k, v = F.linear(x, attn.in_proj_weight, attn.in_proj_bias).split(
            [self.d_model, *[self.num_kv_heads * self.head_dim] * 2], -1
        )
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in (q, k, v)
        )
        if self.rotary_base is not None:
            start = 0 if cache is None else cache.length
            q = rotate(q, self.rotary_base, start)
            k = rotate(k, self.rotary_base, start)
        log_token_precision = belief.log_token_precision
        neighbours = None
        if c.prior_scale == "neighbours":
            neighbours = reml.neighbour_variance(belief.log_precision, spread)
        if cache is not None:
            k, v, log_token_precision, neighbours = cache.append(
                k, v, log_token_precision, neighbours
            )
        w_o2 = wide(attn.out_proj.weight).square()
        feature_weights = None
        if c.granularity == "token":
            feature_weights = (
                w_o2.mean(0)
                if c.project
                else w_o2.new_full((self.d_model,), 1 / self.d_model)
            ).unflatten(0, (self.nhead, self.head_dim))
        kriging = attend(
            q,
            k,
            v,
            log_token_precision,
            neighbour_variance=neighbours,
            feature_weights=feature_weights,
            key_padding_mask=src_key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout_p=self.dropout_p if self.training else 0.0,
            implementation=c.implementation,
            n_eff_gradient=c.n_eff_gradient,
            keep_weights=keep_weights,
        )
        flat = kriging.mean.transpose(1, 2).flatten(-2).to(x.dtype)
        innovation = F.linear(flat, attn.out_proj.weight, attn.out_proj.bias)
        innovation = self._drop(innovation)
        prior = self._prior_scale(kriging.neighbour_variance, feature_weights)
        variance = reml.observation_variance(
            kriging.dispersion,
            kriging.n_eff.unsqueeze(-1),
            prior,
            c.prior_dof,
            c.observation,
        )
        if c.granularity == "token":
            variance = variance.sum(1)
        else:
            variance = variance.transpose(1, 2).flatten(-2)
            if c.project:
                with torch.autocast(variance.device.type, enabled=False):
                    variance = variance @ w_o2.mT
        tiny = torch.finfo(variance.dtype).tiny
        log_precision = -variance.clamp(min=tiny).log()
        # an observation needs all its heads
        saw = (kriging.n_eff > 0).all(1).unsqueeze(-1)
        log_precision = torch.where(saw, log_precision, -torch.inf)
        return Observation(
            innovation, log_precision, kriging.n_eff, kriging.weights
        )

    def update(
        self, belief: Belief, seen: Observation
    ) -> tuple[Belief, Tensor]:
        """The residual connection as a Kalman update, and its gain.

        Equation (6.4); the paper. What attention adds is read as e.
        """
        updated, k = update(belief, seen.innovation, seen.log_precision)
        if not self.norm_first:
            updated = self._through_norm(self.norm1, updated)
        return updated, k

    def predict(self, belief: Belief) -> tuple[Belief, Tensor]:
        """The FFN as dynamics, by the delta method; log (1 + J)² with it."""
        norm = self._norm(self.norm2, belief.mean) if self.norm_first else None
        if self.ffn is None and self.config.jacobian != "hutchinson":
            step, log_growth = self._closed_form(belief, norm)
        else:
            step, log_growth = self._estimated(belief)
        mean = belief.mean + self._drop(step)
        log_precision = delta.predict(
            belief.log_precision, log_growth, wide(self.log_process_noise)
        )
        predicted = Belief(mean, log_precision)
        if not self.norm_first:
            predicted = self._through_norm(self.norm2, predicted)
        return predicted, log_growth

    def _closed_form(self, belief, norm):
        x = belief.mean if norm is None else norm.output.to(belief.mean.dtype)
        network = (
            x,
            self.linear1.weight,
            self.linear1.bias,
            self.linear2.weight,
            self.linear2.bias,
            self.activation,
            self.gated,
            self.dropout_p if self.training else 0.0,
        )
        if self.config.variance_rule == "row":
            ffn = delta.feed_forward(*network)
            log_growth = delta.row_growth(
                belief.log_precision,
                self._probe(belief.mean, 0),
                lambda vector: delta.jacobian_product(ffn, vector, norm),
            )
            return ffn.output, log_growth
        step, j = delta.feed_forward_jacobian(
            *network,
            norm,
            self.config.jacobian == "exact",
            self.config.granularity == "token",
        )
        return step, delta.log_square(1 + j)

    def _estimated(self, belief):
        def function(h, dropout_p=0.0):
            if self.norm_first:
                h = self._norm(self.norm2, h, fused=False).output.to(h.dtype)
            if self.ffn is not None:
                return self.ffn(h)
            h = self.linear1(h)
            if self.gated:
                g, u = h.chunk(2, -1)
                h = self.activation(g) * u
            else:
                h = self.activation(h)
            h = torch.dropout(h, dropout_p, dropout_p > 0)
            return self.linear2(h)

        mean = belief.mean.contiguous()  # jvp refuses expanded memory
        probes = torch.stack([self._probe(mean, i) for i in range(3)])
        if self.config.variance_rule == "row":
            step = None
            log_growth = delta.row_growth(
                belief.log_precision,
                probes[2],
                lambda x: wide(
                    torch.func.jvp(function, (mean,), (x.to(mean.dtype),))[1]
                ),
            )
        else:
            step, growth = delta.hutchinson_growth(
                function,
                mean,
                probes[:2].to(mean.dtype),
                self.config.granularity == "token",
            )
            log_growth = torch.log(growth + torch.finfo(growth.dtype).tiny)
        if self.ffn is None and self.training:
            # the linearisation is of the mean, without dropout
            step = function(mean, self.dropout_p)
        elif step is None:
            step = function(mean)
        return step, log_growth

    def _probe(self, like: Tensor, index: int) -> Tensor:
        """Random signs: fresh in training, fixed in evaluation."""
        if self.training:
            bits = torch.randint_like(like, 2, dtype=torch.float32)
            return wide(bits * 2 - 1)
        return self.probes[index].expand(like.shape)

    def _prior_scale(self, neighbours: Tensor, feature_weights) -> Tensor:
        """s₀² = g_i Σ_j α̃_tj c_j, g_i = Σ_k (W_V[i,k] γ_k)², per head."""
        w_v = self.self_attn.in_proj_weight[
            -self.num_kv_heads * self.head_dim :
        ]
        if self.norm_first and self.norm1.weight is not None:
            w_v = w_v * self.norm1.weight
        g = wide(w_v).square().sum(-1).unflatten(0, (-1, self.head_dim))
        g = g.repeat_interleave(self.nhead // self.num_kv_heads, 0)
        if feature_weights is not None:
            g = (g * feature_weights).sum(-1, True)
        return g.unsqueeze(-2) * neighbours.unsqueeze(-1)

    def _score_mask(
        self, mask: Tensor | None, batch: int, queries: int, keys: int
    ) -> Tensor | None:
        """``src_mask`` in the convention of scaled_dot_product_attention."""
        if mask is None:
            return None
        rows = batch * self.nhead
        checks.mask("src_mask", mask, (rows, queries, keys))
        want = [[queries, keys], [rows, queries, keys]][mask.dim() == 3]
        checks.shape("src_mask", mask, want)
        if mask.dim() == 3:
            mask = mask.unflatten(0, (batch, self.nhead))
        return ~mask if mask.dtype == torch.bool else mask

    def _norm(
        self, module: nn.Module, x: Tensor, fused: bool = True
    ) -> delta.Normalised:
        gamma, beta = (getattr(module, n, None) for n in ("weight", "bias"))
        return delta.normalise(x, gamma, beta, self.eps, self.centred, fused)

    def _through_norm(self, module: nn.Module, belief: Belief) -> Belief:
        norm = self._norm(module, belief.mean)
        log = delta.normalised_precision(belief.log_precision, norm)
        if self.config.granularity == "token":
            log = -log_mean_exp(-log)
        return Belief(norm.output.to(belief.mean.dtype), log)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout_p, self.training)

    def _checked(self, belief: Belief) -> Belief:
        if not isinstance(belief, Belief):
            raise TypeError(
                "belief: expected a Belief (see Belief.of), got "
                f"{type(belief).__name__}"
            )
        mean, log = belief
        checks.shape("belief.mean", mean, ["B", "T", self.d_model])
        if 0 in mean.shape:
            raise ValueError(
                f"belief.mean: expected at least one token, got shape "
                f"{tuple(mean.shape)}"
            )
        checks.finite("belief.mean", mean)
        checks.finite("belief.log_precision", log)
        *rest, last = log.shape
        if rest != list(mean.shape[:2]) or last not in (1, self.d_model):
            raise ValueError(
                "belief.log_precision: expected shape "
                f"{(*mean.shape[:2], self.d_model)} or "
                f"{(*mean.shape[:2], 1)}, got {tuple(log.shape)}"
            )
        log = wide(log)
        if self.config.granularity == "token" and last != 1:
            log = -log_mean_exp(-log)
        elif self.config.granularity == "feature" and last == 1:
            log = log.expand(mean.shape)
        return Belief(mean, log)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, nhead={self.nhead}, {self.config}"


class _AttentionParameters(nn.Module):
    """The parameters of ``nn.MultiheadAttention``, under the same names."""

    def __init__(self, d_model: int, kv_dim: int, bias: bool, at: dict):
        super().__init__()
        rows = d_model + 2 * kv_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, d_model, **at))
        self.in_proj_bias = (
            nn.Parameter(torch.zeros(rows, **at)) if bias else None
        )
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, **at)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)


def _signs(shape: tuple[int, ...], seed: int, device=None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, shape, generator=generator)
    return (2.0 * bits - 1.0).to(device)


def _keep_process_noise(module, state_dict, prefix, *_):
    """A plain Transformer layer has no Q: keep ours."""
    if prefix + "linear1.weight" in state_dict or module.ffn is not None:
        state_dict.setdefault(
            prefix + "log_process_noise", module.log_process_noise.detach()
        )
