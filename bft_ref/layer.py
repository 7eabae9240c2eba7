"""The layer: observe, update, predict. Belief in, Belief out."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bft_ref import checks, delta, reml
from bft_ref.attention import IMPLEMENTATIONS, attend
from bft_ref.belief import Belief, log_mean_exp, wide
from bft_ref.cache import KeyValueCache, all_or_nothing
from bft_ref.kalman import update
from bft_ref.kriging import hidden_and_bias
from bft_ref.linear_maps import effective_weight, is_plain, is_watched
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
    jacobian: ``exact``, ``first`` (first norm term only) or ``hutchinson``,
        which is also what is used where a network's matrices are unknown.
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
        checks.typed(self)
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

    ``observation``: all of what :meth:`BFTLayer.observe` found. With last
    dimension d (or 1 for token granularity): ``gain``,
    ``log_updated_precision`` λ', ``log_growth`` log (1 + J)²,
    ``log_predicted_precision`` λ''.
    """

    observation: Observation
    gain: Tensor
    log_updated_precision: Tensor
    log_growth: Tensor
    log_predicted_precision: Tensor

    @property
    def weights(self) -> Tensor | None:
        """α̃, (B, H, T, S)."""
        return self.observation.weights

    @property
    def n_eff(self) -> Tensor:
        """n, (B, H, T)."""
        return cast(Tensor, self.observation.n_eff)

    @property
    def log_observation_precision(self) -> Tensor:
        """log λ_obs, (B, T, d) or (B, T, 1)."""
        return self.observation.log_precision


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

    ``linear1``, ``linear2``, ``out_proj`` and the norms are called as the
    modules they are: adapters, hooks, parametrisations and quantised layers
    work. What the variances need of their matrices is the effective one; the
    Jacobian of a network whose matrices are unknown is estimated, with a
    warning. A hook or adapter on ``self_attn`` itself, which is a bag of
    parameters and never called, is refused.

    Raises: ValueError for sizes and options that do not fit together.
    Equations (9.1)–(9.3); source: the paper, options as marked in BFTConfig.
    """

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
        if config is not None and not isinstance(config, BFTConfig):
            raise TypeError(
                "config: expected a BFTConfig, such as "
                f"BFTConfig(granularity='token'), got {config!r}"
            )
        self.config = config or BFTConfig()
        checks.choice("norm", norm, ("layernorm", "rmsnorm"))
        self.d_model, self.nhead, self.num_kv_heads = d_model, nhead, kv_heads
        self.head_dim = d_model // nhead
        self.dropout_p = dropout
        self.batch_first, self.norm_first = batch_first, norm_first
        self.rotary_base = rotary_base
        self.activation, self.gated = delta.activation_function(activation)
        at = {"device": device, "dtype": dtype}
        self.self_attn = _AttentionParameters(
            d_model, self.head_dim * kv_heads, bias, at
        )
        centred = norm == "layernorm"
        norm_class = nn.LayerNorm if centred else nn.RMSNorm
        with_bias = {"bias": bias} if centred else {}
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
        # no buffer: it would be garbage on a layer that was first built on the
        # meta device and then loaded
        self._signs = _signs((3, d_model), seed=0)
        self.register_load_state_dict_pre_hook(_keep_process_noise)

    @classmethod
    def from_torch(
        cls,
        layer: nn.TransformerEncoderLayer,
        config: BFTConfig | None = None,
    ) -> "BFTLayer":
        """A BFT layer with sizes, options and weights of a plain layer.

        Raises: TypeError for anything but PyTorch's own layer made of its own
        modules; ValueError for one whose dropouts differ.
        """
        if type(layer) is not nn.TransformerEncoderLayer:
            raise TypeError(
                "layer: expected nn.TransformerEncoderLayer, got "
                f"{type(layer).__name__}"
            )
        attn = layer.self_attn
        for name, expected in [
            ("self_attn", nn.MultiheadAttention),
            ("linear1", nn.Linear),
            ("linear2", nn.Linear),
            ("norm1", nn.LayerNorm),
            ("norm2", nn.LayerNorm),
        ]:
            module: nn.Module = getattr(layer, name)
            if type(module) is not expected or is_watched(module):
                raise TypeError(
                    f"layer.{name}: expected {expected.__name__} without "
                    f"hooks, got {module}; add adapters and hooks afterwards"
                )
        rates = [layer.dropout.p, layer.dropout1.p, layer.dropout2.p]
        rates.append(attn.dropout)
        if len(set(rates)) > 1:
            raise ValueError(
                f"layer: expected one dropout rate, got {sorted(set(rates))}"
            )
        weight = layer.linear1.weight
        result = cls(
            attn.embed_dim,
            attn.num_heads,
            layer.linear1.out_features,
            rates[0],
            copy.deepcopy(layer.activation),
            layer.norm1.eps,
            attn.batch_first,
            layer.norm_first,
            layer.linear1.bias is not None,
            weight.device,
            weight.dtype,
            config=config,
        )
        result.norm2.eps = layer.norm2.eps
        result.load_state_dict(layer.state_dict())
        theirs = dict(layer.named_parameters())
        for name, parameter in result.named_parameters():
            if name in theirs:
                parameter.requires_grad_(theirs[name].requires_grad)
        return result.train(layer.training)

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

        Whatever stands at a token hidden by ``src_key_padding_mask`` changes
        nothing that is visible; NaN and infinity there become zeros.

        Raises: TypeError, ValueError for shapes and dtypes; NaN and infinity
        are reported in eager mode only. A cache grows only if all went well.
        """
        belief = self._checked(belief, src_key_padding_mask)
        if not self.batch_first:
            belief = Belief(*(x.transpose(0, 1) for x in belief))
        with all_or_nothing([] if cache is None else [cache]):
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
            seen,
            k,
            updated.log_precision,
            log_growth,
            predicted.log_precision,
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
        self._refuse_what_is_never_called()
        x = belief.mean
        spread = None
        if self.norm_first:
            norm = self._norm("norm1", belief.mean)
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
        plain = is_plain(attn.out_proj)
        feature_weights = None
        if c.granularity == "token" and (plain or not c.project):
            feature_weights = (
                wide(attn.out_proj.weight).square().mean(0)
                if c.project
                else wide(q).new_full((self.d_model,), 1 / self.d_model)
            ).unflatten(0, (self.nhead, self.head_dim))
        kriging = attend(
            q,
            k,
            v,
            log_token_precision,
            neighbour_variance=neighbours,
            feature_weights=feature_weights,
            center=self._value_of_nothing(),
            key_padding_mask=src_key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout_p=self.dropout_p if self.training else 0.0,
            implementation=c.implementation,
            n_eff_gradient=c.n_eff_gradient,
            keep_weights=keep_weights,
        )
        flat = kriging.mean.transpose(1, 2).flatten(-2).to(x.dtype)
        branch = attn.out_proj(flat)
        innovation = self._drop(branch)
        prior = self._prior_scale(kriging.neighbour_variance, feature_weights)
        variance = reml.observation_variance(
            kriging.dispersion,
            kriging.n_eff.unsqueeze(-1),
            prior,
            c.prior_dof,
            c.observation,
        )
        if feature_weights is not None:
            variance = variance.sum(1)
        else:
            variance = variance.transpose(1, 2).flatten(-2)
            if c.project:
                variance = self._through_out_proj(variance, flat, branch)
            if c.granularity == "token":
                variance = variance.mean(-1, keepdim=True)
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
            updated = self._through_norm("norm1", updated)
        return updated, k

    def predict(self, belief: Belief) -> tuple[Belief, Tensor]:
        """The FFN as dynamics, by the delta method; log (1 + J)² with it."""
        norm = self._norm("norm2", belief.mean) if self.norm_first else None
        step: Tensor | None = None
        log_growth: Tensor | None = None
        if self.ffn is None and self.config.jacobian != "hutchinson":
            if is_plain(self.linear1) and is_plain(self.linear2):
                step, log_growth = self._closed_form(belief, norm)
            else:
                step, log_growth = self._through_modules(belief, norm)
        if log_growth is None:
            step, log_growth = self._estimated(belief, step)
        mean = belief.mean + self._drop(cast(Tensor, step))
        log_precision = delta.predict(
            belief.log_precision, log_growth, wide(self.log_process_noise)
        )
        predicted = Belief(mean, log_precision)
        if not self.norm_first:
            predicted = self._through_norm("norm2", predicted)
        return predicted, log_growth

    def _closed_form(self, belief, norm):
        """The step and log (1 + J)² from the matrices of plain modules."""
        network = (
            self._ffn_input(belief, norm),
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
            return ffn.output, self._row_growth(ffn, belief, norm)
        step, j = delta.feed_forward_jacobian(
            *network,
            norm,
            self.config.jacobian == "exact",
            self.config.granularity == "token",
        )
        return step, delta.log_square(1 + j)

    def _through_modules(self, belief, norm):
        """The same by calling the modules; None where one is no matrix."""
        x = self._ffn_input(belief, norm)
        a = self.linear1(x)
        hidden, slope = delta.hidden_and_slope(a, self.activation, self.gated)
        hidden = self._drop(hidden)
        step = self.linear2(hidden)
        w_in = effective_weight(self.linear1, x, a)
        w_out = effective_weight(self.linear2, hidden, step)
        if w_in is None or w_out is None:
            name = "linear1" if w_in is None else "linear2"
            warnings.warn(
                f"BFTLayer: what {name} did is not Wx + b (a hook?); the "
                "Jacobian is estimated, as with jacobian='hutchinson'",
                stacklevel=4,
            )
            return step, None
        radial = None
        if norm is not None:
            z = norm.output if norm.beta is None else norm.output - norm.beta
            radial = slope * F.linear(z.to(w_in.dtype), w_in)
        w_out = delta.tiled(w_out, self.gated)
        ffn = delta.FeedForward(step, slope, w_in, w_out, radial)
        if self.config.variance_rule == "row":
            return step, self._row_growth(ffn, belief, norm)
        token = self.config.granularity == "token"
        jacobian = delta.jacobian_trace if token else delta.jacobian_diag
        j = jacobian(ffn, norm, self.config.jacobian == "exact")
        return step, delta.log_square(1 + j)

    def _row_growth(self, ffn, belief, norm):
        return delta.row_growth(
            belief.log_precision,
            self._probe(belief.mean, 0),
            lambda vector: delta.jacobian_product(ffn, vector, norm),
        )

    def _ffn_input(self, belief: Belief, norm: delta.Normalised | None):
        if norm is None:
            return belief.mean
        return norm.output.to(belief.mean.dtype)

    def _estimated(self, belief, step):
        """The step, unless there is one, and log (1 + J)² from random signs.

        The linearisation is of the mean, without dropout.
        """

        def function(h, dropout_p=0.0):
            if self.norm_first:
                h = self._norm("norm2", h, fused=False).output.to(h.dtype)
            if self.ffn is not None:
                return self.ffn(h.clone())  # it may work in place
            h = self.linear1(h)
            if self.gated:
                g, u = h.chunk(2, -1)
                h = self.activation(g.clone()) * u
            else:
                h = self.activation(h.clone())
            h = torch.dropout(h, dropout_p, dropout_p > 0)
            return self.linear2(h)

        mean = belief.mean.contiguous()  # jvp refuses expanded memory
        probes = torch.stack([self._probe(mean, i) for i in range(3)])
        if self.config.variance_rule == "row":
            log_growth = delta.row_growth(
                belief.log_precision,
                probes[2],
                lambda x: wide(
                    torch.func.jvp(function, (mean,), (x.to(mean.dtype),))[1]
                ),
            )
            made = None
        else:
            made, growth = delta.hutchinson_growth(
                function,
                mean,
                probes[:2].to(mean.dtype),
                self.config.granularity == "token",
            )
            log_growth = torch.log(growth + torch.finfo(growth.dtype).tiny)
        if step is None and self.ffn is None and self.training:
            step = function(mean, self.dropout_p)
        elif step is None:
            step = function(mean) if made is None else made
        return step, log_growth

    def _through_out_proj(self, variance, flat, branch):
        """Σ_k W_O[i,k]² v_k, (B, T, d): Equation (6.12)."""
        out_proj = self.self_attn.out_proj
        with torch.autocast(variance.device.type, enabled=False):
            if is_plain(out_proj):
                return variance @ wide(out_proj.weight).square().mT
            weight = effective_weight(out_proj, flat, branch)
            if weight is not None:
                return variance @ wide(weight).square().mT
        # by random signs: unbiased for a module that is affine
        signs = self._probe(flat, 0) * variance.sqrt()
        zero = torch.zeros_like(flat)
        difference = out_proj(signs.to(flat.dtype)) - out_proj(zero)
        return wide(difference).square()

    def _value_of_nothing(self) -> Tensor:
        """W_V β + b_V, (H_kv, 1, d_h): the value of a state of zeros.

        Values are centred there before they are squared. It depends on no
        token; it is detached, since the dispersion does not depend on it.
        """
        attn, rows = self.self_attn, self.num_kv_heads * self.head_dim
        with torch.no_grad():
            value = wide(attn.in_proj_weight).new_zeros(rows)
            beta = getattr(self.norm1, "bias", None)
            if self.norm_first and beta is not None:
                value = value + wide(attn.in_proj_weight[-rows:]) @ wide(beta)
            if attn.in_proj_bias is not None:
                value = value + attn.in_proj_bias[-rows:]
            return value.view(self.num_kv_heads, 1, self.head_dim)

    def _refuse_what_is_never_called(self) -> None:
        attn = self.self_attn
        if not isinstance(attn, _AttentionParameters) or is_watched(attn):
            raise TypeError(
                "self_attn: expected the layer's own parameters, unwrapped "
                f"and without hooks, got {type(attn).__name__}; they are read "
                "and never called, so that an adapter or a hook there would "
                "do nothing: use self_attn.out_proj, or parametrise "
                "in_proj_weight"
            )

    def _probe(self, like: Tensor, index: int) -> Tensor:
        """Random signs: fresh in training, fixed in evaluation."""
        if self.training:
            bits = torch.randint_like(like, 2, dtype=torch.float32)
            return wide(bits * 2 - 1)
        return self._signs[index].to(like.device).expand(like.shape)

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
        self, name: str, x: Tensor, fused: bool = True
    ) -> delta.Normalised:
        """The norm of that name, evaluated with its scale."""
        module = getattr(self, name)
        forward = getattr(type(module), "forward", None)
        if forward not in (nn.LayerNorm.forward, nn.RMSNorm.forward):
            raise TypeError(
                f"{name}: expected nn.LayerNorm or nn.RMSNorm, through which "
                f"precision goes in closed form, got {type(module).__name__}"
            )
        eps = module.eps
        norm = delta.normalise(
            x,
            module.weight,
            getattr(module, "bias", None),
            torch.finfo(x.dtype).eps if eps is None else eps,
            forward is nn.LayerNorm.forward,
            fused,
        )
        if is_watched(module):
            made = wide(module(x))
            if checks.values_can_be_read() and not torch.allclose(
                made, norm.output.to(made.dtype), 0.02, 0.02
            ):
                raise ValueError(
                    f"{name}: expected hooks that only look, got one that "
                    "changes the output, which precision cannot follow"
                )
        return norm

    def _through_norm(self, name: str, belief: Belief) -> Belief:
        norm = self._norm(name, belief.mean)
        log = delta.normalised_precision(belief.log_precision, norm)
        if self.config.granularity == "token":
            log = -log_mean_exp(-log)
        return Belief(norm.output.to(belief.mean.dtype), log)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout_p, self.training)

    def _checked(
        self, belief: Belief, padding: Tensor | None = None
    ) -> Belief:
        """The belief, NaN emptied where hidden; raises if it is bad."""
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
        checks.floating("belief.mean", mean)
        checks.floating("belief.log_precision", log)
        weight = self.self_attn.in_proj_weight
        autocast = torch.is_autocast_enabled(mean.device.type)
        if mean.dtype != weight.dtype and not autocast:
            raise TypeError(
                f"belief.mean: expected {weight.dtype}, the dtype of the "
                f"layer's weights, got {mean.dtype}; convert one with .to"
            )
        *rest, last = log.shape
        if rest != list(mean.shape[:2]) or last not in (1, self.d_model):
            raise ValueError(
                "belief.log_precision: expected shape "
                f"{(*mean.shape[:2], self.d_model)} or "
                f"{(*mean.shape[:2], 1)}, got {tuple(log.shape)}"
            )
        if padding is not None:
            sound = mean.isfinite().all(-1) & log.isfinite().all(-1)
            lost = (self._hidden(padding, mean) & ~sound).unsqueeze(-1)
            mean, log = mean.masked_fill(lost, 0.0), log.masked_fill(lost, 0.0)
        checks.finite("belief.mean", mean)
        checks.finite("belief.log_precision", log)
        log = wide(log)
        if self.config.granularity == "token" and last != 1:
            log = -log_mean_exp(-log)
        elif self.config.granularity == "feature" and last == 1:
            log = log.expand(mean.shape)
        return Belief(mean, log)

    def _hidden(self, padding: Tensor, mean: Tensor) -> Tensor:
        """Which of the tokens given are hidden, shaped as mean without d."""
        name = "src_key_padding_mask"
        batch, tokens = mean.shape[:2]
        if not self.batch_first:
            batch, tokens = tokens, batch
        checks.shape(name, padding, ["B", "S"])
        keys = max(padding.shape[1], tokens)  # more, with a cache
        checks.mask(name, padding, (batch, keys))
        checks.shape(name, padding, (batch, keys))
        hidden = padding[:, keys - tokens :]  # the newest
        if hidden.dtype != torch.bool:
            hidden = hidden_and_bias(hidden)[0]
        return hidden if self.batch_first else hidden.mT

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


def _signs(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random signs on the CPU, whatever the default device is."""
    generator = torch.Generator("cpu").manual_seed(seed)
    bits = torch.randint(0, 2, shape, generator=generator, device="cpu")
    return 2.0 * bits - 1.0


def _keep_process_noise(module, state_dict, prefix, *_):
    """A plain Transformer layer has no Q: keep ours."""
    if prefix + "linear1.weight" in state_dict or module.ffn is not None:
        state_dict.setdefault(
            prefix + "log_process_noise", module.log_process_noise.detach()
        )
